//! libFuzzer around `cowslip_hostile::image_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::image_bytes::run(input));
