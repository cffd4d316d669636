//! libFuzzer around `cowslip_hostile::repair`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::repair::run(input));
