//! Parts of a report, for people and for programs alike.

use cowslip::qcow2::header::Header;
use cowslip::qcow2::layout::Area;

use crate::host::AlignedFile;
use crate::join::Join;
use crate::sequential::Sequential;
use crate::summary::Summary;

/// Report on a file of the host.
#[derive(Clone, Copy)]
pub struct FileReport<'a> {
    /// The file.
    pub host: &'a AlignedFile,
    /// Sums of its records.
    pub summary: &'a Summary,
    /// How it is read from front to back.
    pub read: &'a Sequential,
    /// The names of all files, by their numbers.
    pub names: &'a [String],
    /// Whether it was changed while it was looked at.
    pub changed: bool,
}

/// Report on the image in it.
#[derive(Clone, Copy)]
pub struct ImageReport<'a> {
    /// Its header.
    pub header: &'a Header,
    /// The file that guest data is in, if it is another.
    pub data_file: Option<&'a str>,
    /// Its metadata.
    pub areas: &'a [Area],
    /// Pieces of that which are contiguous on the device.
    pub metadata_pieces: u64,
    /// The disk joined with host extents.
    pub join: &'a Join<'a>,
    /// Whether places on the device are known.
    pub has_places: bool,
    /// The names of all files, by their numbers.
    pub names: &'a [String],
}
