//! libFuzzer around `cowslip_hostile::published`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::published::run(input));
