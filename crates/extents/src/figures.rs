//! Figures of one file, and of the image in it.

use cowslip::file::host::Aio;
use cowslip_console::error::CommandError;
use cowslip_console::queue::block_on;
use cowslip_queue::fiemap::{self, Flags};

use crate::guest::PieceSink;
use crate::host::AlignedFile;
use crate::interleave::is_placed;
use crate::join::{Around, HostMap, Joined, What};
use crate::look::{RECORDS_MAX, Subject, piece_of};
use crate::sequential::{Reason, Sequential};
use crate::summary;
use crate::view::Opened;

/// Figures of one file, in short.
#[derive(Clone, Debug)]
pub struct Figures {
    /// `xfs`, `ext4` …
    pub file_system: String,
    /// Extents, as `perfect` counts them; `None` where the file system does not list places.
    pub extents: Option<u64>,
    /// The fewest that there could be.
    pub perfect: u64,
    /// Bytes that were never written.
    pub unwritten_bytes: u64,
    /// Bytes that are stored in another form than they read.
    pub encoded_bytes: u64,
}

/// Sums up one file, once what is dirty has been written back.
///
/// # Errors
/// It is no regular file, or the system's.
pub fn figures(name: &str) -> Result<Figures, CommandError> {
    let mut subject = Subject::new(AlignedFile::open(name, None)?, None, None);
    let summary = subject.sum_up(fiemap::Sync::First)?;
    Ok(of_summary(&subject.host, &summary))
}

fn of_summary(host: &AlignedFile, summary: &summary::Summary) -> Figures {
    let bytes_of = |wanted: Flags| {
        let at = summary::MARKS.iter().position(|(flag, _)| *flag == wanted);
        at.map_or(0, |at| summary.marked[at].bytes)
    };
    Figures {
        extents: host.has_places().then_some(summary.expressed()),
        perfect: summary.perfect(),
        unwritten_bytes: bytes_of(Flags::UNWRITTEN),
        encoded_bytes: bytes_of(Flags::ENCODED),
        file_system: host.on.kind.clone(),
    }
}

/// Figures of a file and of the image in it.
#[derive(Clone, Debug)]
pub struct Whole {
    /// Figures of the file that guest data is in.
    pub file: Figures,
    /// Bytes of a block of its file system.
    pub block_bytes: u64,
    /// Bytes of space.
    pub allocated_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// A read of all data in the guest's order: bytes, and contiguous runs of the device where
    /// places are known.
    pub read: (u64, Option<u64>),
    /// The image, if it is one.
    pub image: Option<Inside>,
}

/// Bytes of an image by their use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inside {
    /// Guest data, compressed too, in bytes of the disk.
    pub data_bytes: u64,
    /// Guest data that is compressed.
    pub compressed_bytes: u64,
    /// Bytes of the file for data and for what is reserved beside it.
    pub used_bytes: u64,
    /// Metadata.
    pub metadata_bytes: u64,
    /// Pieces of data that do not follow the one before them in the file.
    pub breaks: u64,
}

/// Counts where data does not go on in the file.
#[derive(Default)]
struct Breaks {
    end: Option<u64>,
    count: u64,
}

impl PieceSink for Breaks {
    fn piece(&mut self, joined: &Joined) {
        let is_data = matches!(joined.what, What::Data);
        if let (true, Some(file)) = (is_data, joined.file) {
            self.count += u64::from(self.end.is_some_and(|end| end != file));
            self.end = Some(file + joined.file_len);
        }
    }
}

/// Looks at a file that was opened, and at the image in it. What is dirty is not written back.
///
/// # Errors
/// The system's, or the image's tables cannot be right.
pub fn whole((host, image): Opened) -> Result<Whole, CommandError> {
    let mut room = RECORDS_MAX;
    let (own_bytes, own_allocated) = (host.size, host.allocated);
    let mut subject = match image.as_ref().and_then(|image| image.data_file.as_ref()) {
        Some(name) => Subject::new(AlignedFile::open(name, None)?, None, None),
        None => Subject::new(host, None, None),
    };
    subject.collect(fiemap::Sync::No, &mut room)?;
    let file = of_summary(&subject.host, subject.summary());
    let has_places = subject.host.has_places();
    let host_map = HostMap(subject.records());
    let (read, inside) = match &image {
        None => (raw_read(&subject), None),
        Some(image) => {
            let areas = block_on(Aio::Auto, image.areas())?;
            let around = Around {
                host: host_map,
                areas: &[],
                neighbours: None,
                number: 0,
            };
            let mut breaks = Breaks::default();
            let join = image.join(around, (&[], HostMap(&[])), &mut breaks);
            let join = block_on(Aio::Auto, join)?;
            let bytes = join.bytes;
            let inside = Inside {
                data_bytes: bytes.data + bytes.compressed,
                compressed_bytes: bytes.compressed,
                used_bytes: bytes.data + bytes.stored + bytes.reserved,
                metadata_bytes: areas.iter().map(|area| area.len).sum(),
                breaks: breaks.count,
            };
            ((join.read.bytes, join.read.runs), Some(inside))
        }
    };
    Ok(Whole {
        file,
        block_bytes: subject.host.on.block_bytes,
        allocated_bytes: own_allocated,
        file_bytes: own_bytes,
        read: (read.0, has_places.then_some(read.1)),
        image: inside,
    })
}

/// A raw file's bytes that have places, and their runs.
fn raw_read(subject: &Subject) -> (u64, u64) {
    let mut read = Sequential::default();
    let placed = subject.records().iter().filter(|record| is_placed(record));
    for record in placed {
        read.push(piece_of(record), |_, _| Reason::HostFragmented);
    }
    (read.bytes, read.runs)
}
