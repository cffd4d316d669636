//! libFuzzer around `cowslip_hostile::tables`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::tables::run(input));
