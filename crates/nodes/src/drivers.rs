//! The drivers of this program, one line each.

use std::sync::{Arc, LazyLock};

use crate::registry::Registry;

mod blkdebug;
mod compress;
mod copy_on_read;
pub mod file;
mod luks;
mod nbd;
mod null;
#[cfg(feature = "remote")]
pub mod published;
mod qcow2;
mod raw;
#[cfg(feature = "rbd")]
mod rbd;
#[cfg(feature = "remote")]
mod remote;

/// All drivers that there are.
pub fn standard() -> Arc<Registry> {
    static STANDARD: LazyLock<Arc<Registry>> = LazyLock::new(|| {
        Arc::new(Registry {
            protocols: vec![
                &nbd::Nbd,
                &null::Null,
                #[cfg(feature = "remote")]
                &published::Published,
                #[cfg(feature = "rbd")]
                &rbd::Rbd,
                #[cfg(feature = "remote")]
                &remote::Remote,
            ],
            filters: vec![&blkdebug::Blkdebug, &raw::Raw],
            image_filters: vec![&copy_on_read::CopyOnRead, &compress::Compress],
            formats: vec![&qcow2::Qcow2, &raw::Raw, &luks::Luks],
        })
    });
    Arc::clone(&STANDARD)
}

/// Has requests to servers of images end soon, whatever they wait for: the program was asked to
/// end.
pub fn end_requests() {
    #[cfg(feature = "remote")]
    cowslip_remote::end_soon();
    #[cfg(feature = "rbd")]
    cowslip_rbd::end_soon();
}
