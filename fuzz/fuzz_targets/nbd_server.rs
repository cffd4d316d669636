//! libFuzzer around `cowslip_hostile::nbd_server`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cowslip_hostile::nbd_server::run(input));
