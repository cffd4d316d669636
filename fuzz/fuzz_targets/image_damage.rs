//! libFuzzer around `cowslip_hostile::damage`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::damage::run(input));
