//! Computes how large the file of a qcow2 image will be, to the byte, like `qemu-img measure`.
//!
//! ```
//! # use std::sync::Arc;
//! # use cowslip::file::{host::NoFiles, memory::MemoryFile};
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, BufMut, Image, Job};
//! # async fn image(bytes: u64) -> cowslip::Result<Image> {
//! #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
//! #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
//! #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! #     Image::open(file, options, &NoFiles).await
//! # }
//! # fn main() -> cowslip::Result<()> {
//! # cowslip::blocking::wait(async {
//! use cowslip::measure::measure;
//!
//! let options = CreateOptions::new(1 << 30);
//! let sizes = measure(&options, &options.validate()?, 0, None).await;
//! let sizes = sizes.map_err(|failure| failure.into_error())?;
//! assert!(sizes.required < 1 << 20 && sizes.fully_allocated > 1 << 30);
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! That is a promise of room, made before a volume is cut for the image: metadata as it is for a
//! disk whose clusters are all there, and as many clusters as hold data. The promise is kept: a
//! copy takes no more than that where there is no more, but for `preallocation=metadata`, which
//! assigns all clusters and needs the fully allocated size.

use crate::convert::{Outcome, Sources, touched_bytes};
use crate::qcow2::create::{CreateOptions, Preallocation, TOO_LARGE};
use crate::qcow2::geometry::Geometry;
use crate::qcow2::inspect::BitmapInfo;
use crate::units::round_up;
use crate::{Error, Result};
use cowslip_qcow2::count_growth::metadata_bytes;

/// Bytes of an entry of a bitmap's table.
const ENTRY_BYTES: u64 = 8;
/// Bytes of a bitmap's directory entry before its name (qcow2.rst, "Bitmap directory").
const BITMAP_ENTRY_BYTES: u64 = 24;

/// Sizes of an image's file in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// With the data that there is.
    pub required: u64,
    /// File length in bytes if all of the disk were data.
    pub fully_allocated: u64,
}

/// Returns the sizes of an image with these options, and with `keys_bytes` bytes of keys if it is
/// encrypted; with `sources`, the sizes after they are converted into it.
///
/// # Errors
/// The tables of a source cannot be read.
pub async fn measure(
    options: &CreateOptions,
    geometry: &Geometry,
    keys_bytes: u64,
    sources: Option<&Sources<'_>>,
) -> Outcome<Sizes> {
    let disk = round_up(options.size, geometry.cluster_bytes());
    let tables = metadata_bytes(geometry, disk, keys_bytes);
    let all = options.preallocation == Preallocation::Falloc
        || options.preallocation == Preallocation::Full
        // How much the image shares with it is not known: nothing, at worst.
        || (sources.is_some() && options.backing_file.is_some());
    let data = match sources {
        _ if all => disk,
        None => 0,
        Some(sources) => touched_bytes(sources, geometry.cluster_bytes()).await?,
    };
    Ok(Sizes {
        required: tables + data,
        fully_allocated: tables + disk,
    })
}

/// The room that a source's persistent bitmaps take in the image, if all of their bits are stored.
/// Those that were not closed cleanly are not copied.
#[doc(hidden)]
pub fn bitmaps_bytes(bitmaps: &[BitmapInfo], disk_bytes: u64, cluster_bytes: u64) -> u64 {
    let mut directory = 0;
    let mut stored = 0;
    for bitmap in bitmaps.iter().filter(|bitmap| !bitmap.in_use) {
        let bytes = disk_bytes.div_ceil(bitmap.granularity).div_ceil(8);
        let clusters = bytes.div_ceil(cluster_bytes);
        stored += clusters * cluster_bytes + round_up(clusters * ENTRY_BYTES, cluster_bytes);
        directory += round_up(BITMAP_ENTRY_BYTES + bitmap.name.len() as u64, ENTRY_BYTES);
    }
    stored + round_up(directory, cluster_bytes)
}

/// The geometry of an image of these options, in the words of `qemu-img measure` where there is
/// none.
///
/// # Errors
/// `Invalid`.
#[doc(hidden)]
pub fn geometry(options: &CreateOptions) -> Result<Geometry> {
    // Of all that `create` refuses, measuring only looks at what changes the sizes.
    let bare = CreateOptions {
        cluster_size: options.cluster_size,
        extended_l2: options.extended_l2,
        refcount_bits: options.refcount_bits,
        ..CreateOptions::new(options.size)
    };
    bare.validate().map_err(|error| match error {
        Error::Invalid(text) if text == TOO_LARGE => {
            let text = "The image size is too large (try using a larger cluster size)";
            Error::Invalid(text.to_string())
        }
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn sizes(size: u64, change: impl Fn(&mut CreateOptions)) -> (u64, u64) {
        let mut options = CreateOptions::new(size);
        change(&mut options);
        let geometry = geometry(&options).unwrap();
        let sizes = measure(&options, &geometry, 0, None)
            .now_or_never()
            .unwrap();
        let sizes = sizes.unwrap();
        (sizes.required, sizes.fully_allocated)
    }

    #[test]
    fn sizes_are_those_that_qemu_tells() {
        assert_eq!(sizes(0, |_| {}), (196_608, 196_608));
        assert_eq!(sizes(1000, |_| {}), (327_680, 393_216));
        assert_eq!(sizes(1 << 30, |_| {}), (393_216, 1_074_135_040));
        let large = sizes(1 << 40, |options| {
            options.cluster_size = 2 << 20;
            options.refcount_bits = 1;
        });
        assert_eq!(large, (12_582_912, 1_099_524_210_688));
        let full = sizes(1 << 30, |options| {
            options.preallocation = Preallocation::Falloc
        });
        assert_eq!(full, (1_074_135_040, 1_074_135_040));
    }

    /// With small clusters the keys alone need refcount blocks.
    #[test]
    fn keys_are_counted() {
        let mut options = CreateOptions::new(3 << 20);
        options.cluster_size = 2048;
        let geometry = geometry(&options).unwrap();
        let required = |keys| {
            let sizes = measure(&options, &geometry, keys, None).now_or_never();
            sizes.unwrap().unwrap().required
        };
        assert_eq!(required(2 << 20) - required(0), (2 << 20) + 2048);
        assert_eq!(required(1), required(0) + 2048);
    }

    #[test]
    fn bitmaps_take_bits_tables_and_a_directory() {
        let bitmap = |name: &str, in_use| BitmapInfo {
            name: name.to_string(),
            granularity: 65536,
            in_use,
            auto: true,
        };
        assert_eq!(bitmaps_bytes(&[], 1 << 30, 65536), 0);
        let two = [bitmap("a", false), bitmap("broken", true)];
        assert_eq!(bitmaps_bytes(&two, 1 << 30, 65536), 3 * 65536);
    }
}
