//! libFuzzer around `cowslip_hostile::io_lines`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::io_lines::run(input));
