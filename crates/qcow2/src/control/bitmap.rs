//! Persistent dirty bitmaps: in memory during a session, on disk between two.
//!
//! In a session they are in memory (`list.rs`, `bits.rs`): those that follow writes from the first
//! write on, others when they are asked for. On disk, meanwhile, they say what the last session
//! left. So there are three moments:
//!
//! | moment | what is written | what a crash after it leaves |
//! | --- | --- | --- |
//! | before the first write (D5), and for all of them before a resize | IN_USE in the directory's entries, in place: a bit of a sector each; barrier | bitmaps that are lost, and say so; the guest's data is as it was |
//! | while the disk is written | nothing: bits are set as requests are admitted, before their data moves | the same |
//! | close | bits, tables and a directory in new space, with their counts; barrier; the header refers to the directory (D6); barrier; the old ones' counts go down | the old state, marked, or the new one as a whole; leaks |
//!
//! A request sets its bits under the same hold of the lock that admits it, so after the image is
//! drained all of its bits are set or none. If it fails later, they stay set, as it may have
//! changed some of its bytes. Bitmaps that are marked IN_USE when the image is opened, after a
//! crash of another program, are kept as they are.

mod bits;
mod list;
mod store;

use cowslip_boxed::boxed;
use std::ops::Range;

use crate::commit::roots::Flush;
use crate::entry::big_endian;
use crate::entry::bitmap::{COUNT_MAX, DIRECTORY_BYTES_MAX, Fixed, TableEntry};
use crate::file::AlignedFile;
use crate::header::Header;
use crate::inspect::{self, BitmapInfo};
use crate::{Buf, Error, Result};
use crate::{Qcow2, State};

pub use bits::DirtyBits;
#[doc(hidden)]
pub use bits::DirtyRun;
pub use list::BitmapChange;
pub(crate) use list::Bitmaps;

use list::{Bits, Entry, Which};

/// Reads the bitmap directory; none if there is no consistent one.
pub(crate) async fn read_directory(file: &AlignedFile, header: &Header) -> Result<Vec<Entry>> {
    let Some(extension) = header.consistent_bitmaps() else {
        return Ok(Vec::new());
    };
    let (offset, len) = (
        extension.bitmap_directory_offset,
        extension.bitmap_directory_size,
    );
    let corrupt = |at: u64, detail: &str| Error::Corrupt {
        file: file.name().to_string(),
        structure: "bitmap directory",
        offset: offset.saturating_add(at),
        detail: detail.to_string(),
    };
    let is_possible = (1..=COUNT_MAX).contains(&extension.nb_bitmaps)
        && extension.reserved == 0
        && len <= DIRECTORY_BYTES_MAX
        && header.geometry().is_cluster_aligned(offset)
        && offset
            .checked_add(len)
            .is_some_and(|end| end <= i64::MAX as u64);
    if !is_possible || offset + len > file.len().await? {
        return Err(corrupt(
            0,
            "the bitmaps extension describes no valid directory",
        ));
    }
    let bytes = file.read_new(offset, len).await?;
    let entries = list::decode(&bytes, extension.nb_bitmaps);
    let entries = entries.map_err(|(at, why)| corrupt(at, why))?;
    let mut at = 0;
    for entry in &entries {
        let flaw = entry.fixed.table_flaw(&header.geometry(), header.size);
        if let (Some(flaw), false) = (flaw, entry.fixed.in_use()) {
            return Err(corrupt(at, flaw));
        }
        at += entry.fixed.entry_bytes();
    }
    Ok(entries)
}

impl Qcow2 {
    /// The bitmaps, in the directory's order, as they are now.
    pub async fn bitmaps(&self) -> Result<Vec<BitmapInfo>> {
        if !self.writable {
            let found = inspect::inspect(self.file.block_file()).await?;
            return Ok(found.bitmaps);
        }
        let state = self.lock();
        let describe = |bitmap: &list::Bitmap| BitmapInfo {
            name: bitmap.entry.name(),
            granularity: 1 << bitmap.entry.fixed.granularity_bits,
            in_use: bitmap.bits == Bits::Lost,
            auto: bitmap.enabled,
        };
        Ok(state.bitmaps.list().iter().map(describe).collect())
    }

    /// Returns the bits of a bitmap at this moment.
    pub async fn dirty_bits(&self, name: &str) -> Result<DirtyBits> {
        if !self.writable {
            let read = Bitmaps::new(read_directory(&self.file, &self.header()).await?);
            let entry = &read.list()[read.find_sound(name)?].entry;
            return self.load_bits(entry).await;
        }
        let _turn = self.turn.take().await;
        let entry = {
            let state = self.lock();
            let bitmap = &state.bitmaps.list()[state.bitmaps.find_sound(name)?];
            if let Bits::Loaded { bits, .. } = &bitmap.bits {
                return Ok(bits.clone());
            }
            bitmap.entry.clone()
        };
        self.load_bits(&entry).await
    }

    /// Returns the first `most` runs of a range in a bitmap at this moment; the image is open for
    /// writing.
    ///
    /// The bits stay in memory from the first call on, since a client that lists the runs of a disk
    /// calls this often.
    pub async fn dirty_runs(
        &self,
        name: &str,
        range: &Range<u64>,
        most: usize,
    ) -> Result<Vec<DirtyRun>> {
        let looked = |state: &State| -> Result<Option<Vec<DirtyRun>>> {
            let bitmap = &state.bitmaps.list()[state.bitmaps.find_sound(name)?];
            Ok(match &bitmap.bits {
                Bits::Loaded { bits, .. } => Some(bits.runs(range, most)),
                Bits::Stored | Bits::Lost => None,
            })
        };
        if let Some(runs) = looked(&self.lock())? {
            return Ok(runs);
        }
        // In the turn no other operation loads it, or begins to mark it.
        let _turn = self.turn.take().await;
        let wanted = {
            let state = self.lock();
            let size = state.committed.header.size;
            state.bitmaps.refuse_too_large(Which::All, size)?;
            let at = state.bitmaps.find_sound(name)?;
            let is_stored = state.bitmaps.list()[at].bits == Bits::Stored;
            is_stored.then_some(at)
        };
        self.load_bitmaps(wanted.into_iter().collect()).await?;
        let runs = looked(&self.lock())?;
        Ok(runs.expect("it has just been loaded"))
    }

    /// Changes a bitmap: in memory, and on disk when the image is closed.
    #[boxed]
    pub async fn change_bitmap(&self, name: &str, change: &BitmapChange) -> Result<()> {
        if self.header().version < 3 && matches!(change, BitmapChange::Add { .. }) {
            return Err(Error::Invalid(format!(
                "Can't make bitmap '{name}' persistent in '{}': Cannot store dirty bitmaps in qcow2 v2 files",
                self.name()
            )));
        }
        self.lock().bitmaps.needed_for(name, change)?;
        self.ready_for_changes().await?;
        let _drained = self.drain().await;
        let _turn = self.turn.take().await;
        let changed = self.change_in_turn(name, change);
        self.latch_if_cancelled(changed).await
    }

    async fn change_in_turn(&self, name: &str, change: &BitmapChange) -> Result<()> {
        let needed = {
            let state = self.lock();
            self.unlatched(&state)?;
            state.bitmaps.needed_for(name, change)?
        };
        self.load_bitmaps(needed).await?;
        let mut state = self.lock();
        let state = &mut *state;
        let disk = (self.geometry(), state.committed.header.size, self.name());
        let changed = state.bitmaps.change(name, change, disk);
        state.set_gate();
        changed
    }

    /// Before the first write of a session (D5): what follows writes is in memory, and marked on
    /// disk.
    pub(crate) async fn track_in_turn(&self) -> Result<()> {
        let wanted = {
            let state = self.lock();
            let size = state.committed.header.size;
            state.bitmaps.refuse_too_large(Which::Following, size)?;
            state.bitmaps.to_load(Which::Following)
        };
        self.load_bitmaps(wanted).await?;
        self.mark_directory().await
    }

    /// All bitmaps become of the new size with the disk, so all of them have to be in memory.
    pub(crate) async fn ready_bitmaps_for_resize(&self, size: u64) -> Result<()> {
        let _turn = self.turn.take().await;
        let ready = async {
            let wanted = {
                let state = self.lock();
                self.unlatched(&state)?;
                // Those that the session has removed are on disk until the close.
                if state.bitmaps.list().is_empty() && state.bitmaps.directory().is_empty() {
                    return Ok(());
                }
                state.bitmaps.refuse_resize(size)?;
                state.bitmaps.to_load(Which::All)
            };
            self.load_bitmaps(wanted).await?;
            self.lock().bitmaps.about_to_resize();
            self.mark_directory().await
        };
        self.latch_if_cancelled(ready).await
    }

    /// Marks what on disk will not be right any more, durably. What follows writes is in memory.
    async fn mark_directory(&self) -> Result<()> {
        let (marked, extension) = {
            let state = self.lock();
            (
                state.bitmaps.marked(),
                state.committed.header.extensions.bitmaps,
            )
        };
        if let (Some(entries), Some(extension)) = (&marked, extension) {
            // In place: of each entry nothing changes but a bit.
            let bytes = list::encode(entries.iter());
            debug_assert_eq!(bytes.len() as u64, extension.bitmap_directory_size);
            let write = vec![(extension.bitmap_directory_offset, vec![Buf::from(bytes)])];
            self.write_root(write, Flush::All).await?;
        }
        self.lock().bitmaps.now_tracking(marked);
        Ok(())
    }

    /// Brings the bits of bitmaps into memory.
    async fn load_bitmaps(&self, which: Vec<usize>) -> Result<()> {
        for at in which {
            let entry = self.lock().bitmaps.list()[at].entry.clone();
            let bits = self.load_bits(&entry).await?;
            self.lock().bitmaps.loaded(at, bits);
        }
        Ok(())
    }

    async fn load_bits(&self, entry: &Entry) -> Result<DirtyBits> {
        let fixed = &entry.fixed;
        if fixed.is_foreign() {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: format!("the extra data of bitmap '{}'", entry.name()).into(),
            });
        }
        let mut bits = DirtyBits::clean(fixed.granularity_bits, self.size());
        let cluster_bytes = self.geometry().cluster_bytes();
        let wanted = fixed.table_entries_for(self.geometry(), self.size());
        let wanted = wanted.min(u64::from(fixed.table_entries));
        let mut index = 0;
        while index < wanted {
            let entries = (wanted - index).min(self.bitmap_piece_bytes / 8);
            for entry in self.read_table(fixed, index..index + entries).await? {
                let at = index * cluster_bytes;
                match entry {
                    TableEntry::Clean => {}
                    TableEntry::Dirty => bits.load_dirty(at, cluster_bytes),
                    TableEntry::At(offset) => {
                        let stored = self.file.read_new(offset, cluster_bytes).await?;
                        bits.load(at, &stored);
                    }
                    TableEntry::Invalid => unreachable!("read_table has refused it"),
                }
                index += 1;
            }
        }
        Ok(bits)
    }

    /// Some entries of a bitmap's table; each is valid, and its cluster lies within the file.
    async fn read_table(&self, bitmap: &Fixed, entries: Range<u64>) -> Result<Vec<TableEntry>> {
        let file_bytes = self.file.len().await?;
        let start = bitmap.table_offset.saturating_add(entries.start * 8);
        let len = (entries.end - entries.start) * 8;
        if start.saturating_add(len) > file_bytes {
            // It would read as a table without a bit.
            return Err(Error::Corrupt {
                file: self.name().to_string(),
                structure: "bitmap table",
                offset: start,
                detail: "it reaches beyond the end of the file".to_string(),
            });
        }
        let bytes = self.file.read_new(start, len).await?;
        let decoded = (start..).step_by(8).zip(bytes.chunks_exact(8));
        let decoded = decoded.map(|(at, raw)| {
            let entry = TableEntry::decode(big_endian(raw), self.geometry());
            let is_valid = match entry {
                TableEntry::Clean | TableEntry::Dirty => true,
                TableEntry::At(offset) => offset < file_bytes,
                TableEntry::Invalid => false,
            };
            is_valid.then_some(entry).ok_or_else(|| Error::Corrupt {
                file: self.name().to_string(),
                structure: "bitmap table entry",
                offset: at,
                detail: format!("{:#x} is not a cluster of the file", big_endian(raw)),
            })
        });
        decoded.collect()
    }
}
