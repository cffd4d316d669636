//! libFuzzer around `cowslip_hostile::fuse_server`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::fuse_server::run(input));
