//! libFuzzer around `cowslip_hostile::qmp`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::qmp::run(input));
