//! Where everything of one image is in its files, for reports: the disk in the guest's order, and
//! the metadata.
//!
//! Reads the tables and nothing else, so neither the backing file nor the data file nor the key of
//! an encrypted image is needed. Memory: the L1 table, and 40 bytes an L2 table or refcount block.
//! Leaves out data that only internal snapshots refer to, and whether anything is right, which is
//! for [`super::check`]: an entry that cannot be right is an error.

use std::collections::HashSet;
use std::sync::Arc;

use super::check::Structure;
use super::check::reader::{Reader, Window, is_zero};
use crate::entry::bitmap::{self, TableEntry};
use crate::entry::snapshot;
use crate::entry::{EntryError, EntryFormat, L2Entry, big_endian};
use crate::file::BlockFile;
use crate::geometry::Geometry;
use crate::header::Header;
use crate::map::{self, Run, Source};
use crate::{Error, Result};

/// Long tables are read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;

/// No file has an offset beyond this.
const OFFSET_END: u64 = i64::MAX as u64;

/// How a part of the disk is stored in this image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// The backing file decides, or it is zeroes.
    Below {
        /// Space in the data file that a write would use.
        space: Option<u64>,
    },
    /// The range reads as zeroes without data.
    Zero {
        /// Space in the data file that a write would use.
        space: Option<u64>,
    },
    /// Data at this offset in the data file.
    Data(u64),
    /// A compressed cluster, or what of it is on the disk.
    Compressed {
        /// First byte in the image file.
        start: u64,
        /// Bytes up to the end of the last sector.
        len: u64,
    },
}

/// A part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte on the disk.
    pub start: u64,
    /// Length of the area in bytes.
    pub len: u64,
    /// How it is stored.
    pub kind: PartKind,
}

impl Part {
    /// Returns whether `next` is of the same kind and contiguous in the file.
    fn goes_on_in(&self, next: &Part) -> bool {
        use PartKind::{Below, Compressed, Data, Zero};
        let follows = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => a + self.len == b,
            (Some(_), None) | (None, Some(_)) => false,
        };
        match (self.kind, next.kind) {
            (Below { space: a }, Below { space: b }) | (Zero { space: a }, Zero { space: b }) => {
                follows(a, b)
            }
            (Data(a), Data(b)) => a + self.len == b,
            (Below { .. } | Zero { .. } | Data(_) | Compressed { .. }, _) => false,
        }
    }
}

/// Metadata at some place of the image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes, whole clusters.
    pub len: u64,
    /// The structure that it holds.
    pub structure: Structure,
}

/// Receives the parts of the disk.
pub trait Observer: Send {
    /// The next part in the guest's order; the parts cover the disk.
    ///
    /// # Errors
    /// Ends the walk.
    fn part(&mut self, part: Part) -> Result<()>;
}

impl Observer for Vec<Part> {
    fn part(&mut self, part: Part) -> Result<()> {
        self.push(part);
        Ok(())
    }
}

/// The way to the tables of an image.
pub struct Layout<'a> {
    reader: Reader<'a>,
    header: &'a Header,
    format: EntryFormat,
    geometry: Geometry,
    l1: Vec<u64>,
}

impl<'a> Layout<'a> {
    /// Reads the active L1 table of the image in `file`, whose header is `header`.
    ///
    /// # Errors
    /// I/O.
    pub async fn read(file: &'a Arc<dyn BlockFile>, header: &'a Header) -> Result<Layout<'a>> {
        let reader = Reader::new(file).await?;
        let l1 = words(&reader, header.l1_table_offset, header.l1_bytes()).await?;
        Ok(Layout {
            reader,
            header,
            format: header.entry_format(),
            geometry: header.geometry(),
            l1,
        })
    }

    fn corrupt(&self, structure: &'static str, offset: u64, why: impl ToString) -> Error {
        Error::Corrupt {
            file: self.reader.name().to_string(),
            structure,
            offset,
            detail: why.to_string(),
        }
    }

    /// Returns where the L2 table of an L1 entry is.
    fn l2_offset(&self, l1_offset: u64, index: usize, entry: u64) -> Result<Option<u64>> {
        let place = l1_offset + index as u64 * 8;
        let table = self.format.decode_l1(entry);
        let table = table.map_err(|error| self.corrupt("L1 table", place, error))?;
        let Some(table) = table else { return Ok(None) };
        match table.offset.0 < self.reader.len() {
            true => Ok(Some(table.offset.0)),
            false => Err(self.corrupt("L1 table", place, "an L2 table beyond the end of the file")),
        }
    }

    /// Reports the parts of the disk in order, contiguous ones joined.
    ///
    /// # Errors
    /// I/O, an entry that cannot be right, or the observer's.
    pub async fn parts(&self, observer: &mut dyn Observer) -> Result<()> {
        let l1_offset = self.header.l1_table_offset;
        let needed = self.geometry.l1_entries_for(self.header.size) as usize;
        let mut tables = Vec::new();
        for (index, &entry) in self.l1.iter().take(needed).enumerate() {
            if let Some(offset) = self.l2_offset(l1_offset, index, entry)? {
                tables.push((offset, index as u64));
            }
        }
        let mut parts = JoinedParts {
            observer,
            last: None,
        };
        let offsets: Vec<u64> = tables.iter().map(|&(offset, _)| offset).collect();
        let cluster_bytes = self.geometry.cluster_bytes();
        let mut read = self.reader.tables(tables.into_iter(), cluster_bytes);
        let mut offsets = offsets.into_iter();
        let mut at = 0;
        while let (Some(table), Some(offset)) = (read.next().await, offsets.next()) {
            let (index, bytes) = table?;
            let start = index * self.geometry.l2_coverage_bytes();
            parts.below(at..start)?;
            at = start.saturating_add(self.geometry.l2_coverage_bytes());
            at = at.min(self.header.size);
            self.table(&bytes, offset, start..at, &mut parts)?;
            self.reader.recycle(bytes);
        }
        parts.below(at..self.header.size)?;
        parts.end()
    }

    /// The parts of the range that a table maps.
    fn table(
        &self,
        bytes: &[u8],
        offset: u64,
        range: std::ops::Range<u64>,
        parts: &mut JoinedParts<'_>,
    ) -> Result<()> {
        if is_zero(bytes) {
            return parts.below(range);
        }
        let entry_bytes = self.geometry.l2_entry_bytes() as usize;
        let mut runs = Vec::new();
        let mut start = range.start;
        for (index, words) in bytes.chunks_exact(entry_bytes).enumerate() {
            if start >= range.end {
                break;
            }
            let bitmap = words.get(8..16).map_or(0, big_endian);
            let entry = self.format.decode_l2(big_endian(&words[..8]), bitmap);
            let failed = |error: EntryError| {
                self.corrupt("L2 table", offset + (index * entry_bytes) as u64, error)
            };
            let entry = entry.map_err(failed)?;
            let end = (start + self.geometry.cluster_bytes()).min(range.end);
            runs.clear();
            map::map_cluster(&self.format, &entry, start, start..end, &mut runs);
            for run in &runs {
                parts.push(part_of(&entry, start, run))?;
            }
            start = end;
        }
        Ok(())
    }

    /// The image file's metadata in the order of the file, neighbours of one kind joined.
    ///
    /// # Errors
    /// I/O, or an entry that cannot be right.
    pub async fn areas(&self) -> Result<Vec<Area>> {
        let header = self.header;
        let mut areas = Areas {
            list: Vec::new(),
            l2_tables: HashSet::new(),
            bitmap_clusters: HashSet::new(),
        };
        self.add(
            &mut areas,
            0,
            self.geometry.cluster_bytes(),
            Structure::Header,
        )?;
        let (l1_offset, l1_bytes) = (header.l1_table_offset, header.l1_bytes());
        self.add(&mut areas, l1_offset, l1_bytes, Structure::ActiveL1)?;
        self.l2_areas(l1_offset, &self.l1, &mut areas)?;
        let (offset, len) = (header.refcount_table_offset, header.refcount_table_bytes());
        self.add(&mut areas, offset, len, Structure::RefcountTable)?;
        for (index, &entry) in words(&self.reader, offset, len).await?.iter().enumerate() {
            let block = self.format.decode_refcount_table(entry);
            let failed = |error| self.corrupt("refcount table", offset + index as u64 * 8, error);
            if let Some(block) = block.map_err(failed)? {
                let len = self.geometry.cluster_bytes();
                self.add(&mut areas, block.0, len, Structure::RefcountBlock)?;
            }
        }
        self.snapshot_areas(&mut areas).await?;
        if let Some(crypto) = header.extensions.crypto_header {
            self.add(
                &mut areas,
                crypto.offset,
                crypto.length,
                Structure::CryptoHeader,
            )?;
        }
        self.bitmap_areas(&mut areas).await?;
        Ok(areas.joined())
    }

    /// Notes a structure, whole clusters of it.
    fn add(&self, areas: &mut Areas, offset: u64, len: u64, structure: Structure) -> Result<()> {
        let clusters = self.geometry.clusters_for(len);
        let len = clusters.saturating_mul(self.geometry.cluster_bytes());
        if offset.checked_add(len).is_none_or(|end| end > OFFSET_END) {
            let why = "it is where no file has anything";
            return Err(self.corrupt(structure_name(structure), offset, why));
        }
        if len > 0 {
            areas.list.push(Area {
                offset,
                len,
                structure,
            });
        }
        Ok(())
    }

    fn l2_areas(&self, l1_offset: u64, l1: &[u64], areas: &mut Areas) -> Result<()> {
        for (index, &entry) in l1.iter().enumerate() {
            if let Some(offset) = self.l2_offset(l1_offset, index, entry)?
                && areas.l2_tables.insert(offset)
            {
                self.add(areas, offset, self.geometry.cluster_bytes(), Structure::L2)?;
            }
        }
        Ok(())
    }

    async fn snapshot_areas(&self, areas: &mut Areas) -> Result<()> {
        let start = self.header.snapshots_offset;
        let mut window = Window::new(&self.reader);
        let mut at = start;
        for _ in 0..self.header.nb_snapshots {
            let entry = window.get(at, snapshot::FIXED_BYTES).await?;
            let entry = snapshot::Fixed::decode(entry);
            if entry.extra_bytes > snapshot::EXTRA_BYTES_MAX
                || at - start > snapshot::TABLE_BYTES_MAX
            {
                return Err(self.corrupt("snapshot table", at, "an entry of no valid length"));
            }
            if entry.l1_flaw(&self.geometry).is_some() {
                return Err(self.corrupt("snapshot table", at, "an L1 table of no valid place"));
            }
            let (l1_offset, l1_bytes) = (entry.l1_offset, u64::from(entry.l1_size) * 8);
            self.add(areas, l1_offset, l1_bytes, Structure::SnapshotL1)?;
            let l1 = words(&self.reader, l1_offset, l1_bytes).await?;
            self.l2_areas(l1_offset, &l1, areas)?;
            at += entry.entry_bytes();
        }
        self.add(areas, start, at - start, Structure::SnapshotTable)?;
        Ok(())
    }

    async fn bitmap_areas(&self, areas: &mut Areas) -> Result<()> {
        let Some(extension) = self.header.consistent_bitmaps() else {
            return Ok(());
        };
        let directory = extension.bitmap_directory_offset;
        let bytes = extension.bitmap_directory_size;
        let end = directory.checked_add(bytes);
        if end.is_none_or(|end| end > self.reader.len()) {
            return Err(self.corrupt("bitmap directory", directory, "it is beyond the end"));
        }
        self.add(areas, directory, bytes, Structure::Bitmaps)?;
        let mut window = Window::new(&self.reader);
        let mut at = 0;
        for _ in 0..extension.nb_bitmaps {
            let fixed = bitmap::FIXED_BYTES;
            let entry = bitmap::Fixed::decode(window.get(directory + at, fixed).await?);
            let failed = |why| self.corrupt("bitmap directory", directory + at, why);
            if at + entry.entry_bytes() > bytes {
                return Err(failed("an entry reaches beyond the end"));
            }
            if let Some(flaw) = entry.table_flaw(&self.geometry, self.header.size) {
                return Err(failed(flaw));
            }
            at += entry.entry_bytes();
            let (table, len) = (entry.table_offset, entry.table_bytes());
            self.add(areas, table, len, Structure::Bitmaps)?;
            let mut pieces = self.reader.pieces(table, len, PIECE_BYTES);
            while let Some(piece) = pieces.next().await {
                for entry in piece?.words() {
                    if let TableEntry::At(offset) = TableEntry::decode(entry, &self.geometry)
                        && areas.bitmap_clusters.insert(offset)
                    {
                        let len = self.geometry.cluster_bytes();
                        self.add(areas, offset, len, Structure::Bitmaps)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// As errors name it.
fn structure_name(structure: Structure) -> &'static str {
    match structure {
        Structure::Header => "header",
        Structure::ActiveL1 => "L1 table",
        Structure::SnapshotL1 => "snapshot's L1 table",
        Structure::L2 => "L2 table",
        Structure::RefcountTable => "refcount table",
        Structure::RefcountBlock => "refcount block",
        Structure::SnapshotTable => "snapshot table",
        Structure::Bitmaps => "bitmap",
        Structure::CryptoHeader => "encryption header",
    }
}

/// A table of words, whole.
async fn words(reader: &Reader<'_>, offset: u64, bytes: u64) -> Result<Vec<u64>> {
    let mut table = Vec::new();
    let mut pieces = reader.pieces(offset, bytes, PIECE_BYTES);
    while let Some(piece) = pieces.next().await {
        table.extend(piece?.words());
    }
    Ok(table)
}

/// A run of a cluster that starts at `start`.
fn part_of(entry: &L2Entry, start: u64, run: &Run) -> Part {
    let kind = match run.source {
        Source::Below => PartKind::Below {
            space: match entry {
                L2Entry::Standard(entry) => {
                    entry.host.map(|host| host.0 + (run.range.start - start))
                }
                L2Entry::Compressed(_) => None,
            },
        },
        Source::Zero(space) => PartKind::Zero {
            space: space.map(|space| space.0),
        },
        Source::Data(host) => PartKind::Data(host.0),
        Source::Compressed(place, _) => PartKind::Compressed {
            start: place.start,
            len: place.len,
        },
    };
    Part {
        start: run.range.start,
        len: run.range.end - run.range.start,
        kind,
    }
}

/// Parts on their way to the observer.
struct JoinedParts<'a> {
    observer: &'a mut dyn Observer,
    last: Option<Part>,
}

impl JoinedParts<'_> {
    fn push(&mut self, part: Part) -> Result<()> {
        match &mut self.last {
            Some(last) if last.goes_on_in(&part) => {
                last.len += part.len;
                Ok(())
            }
            last => match last.replace(part) {
                Some(last) => self.observer.part(last),
                None => Ok(()),
            },
        }
    }

    fn below(&mut self, range: std::ops::Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        self.push(Part {
            start: range.start,
            len: range.end - range.start,
            kind: PartKind::Below { space: None },
        })
    }

    fn end(&mut self) -> Result<()> {
        match self.last.take() {
            Some(last) => self.observer.part(last),
            None => Ok(()),
        }
    }
}

/// Metadata as it is found.
struct Areas {
    list: Vec<Area>,
    /// Tables that are shared are metadata once.
    l2_tables: HashSet<u64>,
    /// So are clusters of bitmaps: any number of bitmaps can name one table.
    bitmap_clusters: HashSet<u64>,
}

impl Areas {
    fn joined(mut self) -> Vec<Area> {
        self.list.sort_by_key(|area| (area.offset, area.len));
        self.list.dedup_by(|next, last| {
            let joins = last.structure == next.structure && last.offset + last.len == next.offset;
            if joins {
                last.len += next.len;
            }
            joins || next == last
        });
        self.list
    }
}
