//! The end of a program that waits for servers of its images.

/// Has requests to such servers end soon, whatever they wait for: the program was asked to end.
pub fn end_requests() {
    #[cfg(feature = "remote")]
    cowslip_remote::end_soon();
    #[cfg(feature = "rbd")]
    cowslip_rbd::end_soon();
}
