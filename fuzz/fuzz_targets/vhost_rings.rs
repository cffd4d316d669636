//! libFuzzer around `cowslip_hostile::vhost_rings`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::vhost_rings::run(input));
