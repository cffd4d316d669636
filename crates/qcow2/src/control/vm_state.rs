//! The state of a virtual machine, which QEMU keeps behind the disk for its internal snapshots.
//!
//! The area has no size. It begins at the first L1 entry that the disk does not need, and its
//! clusters are mapped and counted like the disk's; so snapshots take it along, and check, repair
//! and amend see it. It is never visible in the disk. Layers below an image have no part in it: a
//! range that was not written reads as zeroes, whatever a backing file holds there.
//!
//! Its offsets are relative to its start, which moves with the size of the disk. An operation that
//! uses the area holds `Qcow2::vm_state` meanwhile, and so does one that changes the size. A resize
//! that moves the start of the area moves the state with it, since its offsets must stay the same.

use std::ops::Range;

use cowslip_queue::{IoVec, IoVecMut};

use crate::Qcow2;
use crate::backing::NoBacking;
use crate::errno::{EFBIG, EIO};
use crate::file::Event;
use crate::header::L1_BYTES_MAX;
use crate::plan::{EntryRequest, Unref};
use crate::{Error, Result};

/// No guest offset is beyond this, as in QEMU: the largest multiple of 1 GiB that a signed offset
/// can be.
const GUEST_END: u64 = (i64::MAX as u64) & !((1 << 30) - 1);

impl Qcow2 {
    /// Reads from the area.
    pub async fn read_vm_state(&self, offset: u64, buf: IoVecMut) -> Result<IoVecMut> {
        let _size_stays = self.vm_state.take().await;
        let _visit = self.enter().await;
        let place = self.vm_state_place(offset, buf.len() as u64)?;
        self.file.reach(Event::VmstateLoad).await;
        let runs = self.map(place.clone()).await?;
        self.read_runs(&runs, (place.start, buf), &NoBacking).await
    }

    /// Writes to the area.
    pub async fn write_vm_state(&self, offset: u64, data: IoVec) -> Result<()> {
        let _size_stays = self.vm_state.take().await;
        let place = self.vm_state_place(offset, data.len() as u64)?;
        if place.is_empty() {
            return Ok(());
        }
        self.file.reach(Event::VmstateSave).await;
        self.ready_for_writes().await?;
        self.reach_with_l1(place.end).await?;
        self.write(place.start, data, &NoBacking).await
    }

    /// Returns where a range of the area is among the guest offsets.
    fn vm_state_place(&self, offset: u64, len: u64) -> Result<Range<u64>> {
        let begin = self.geometry().vm_state_offset(self.size());
        let start = begin.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(len));
        match (start, end) {
            (Some(start), Some(end)) if end <= GUEST_END => Ok(start..end),
            _ => Err(Error::io(
                format!("{len} bytes at {offset} of the VM state are beyond what can be addressed"),
                std::io::Error::from_raw_os_error(EIO),
            )),
        }
    }

    /// Makes the L1 table long enough for guest offsets below `end`. It grows by half at least:
    /// with small clusters each L1 entry maps so little that a state needs thousands.
    async fn reach_with_l1(&self, end: u64) -> Result<()> {
        let needed = self.geometry().l1_entries_for(end);
        let has = self.lock().mapping.tables.l1().len() as u64;
        self.refuse_l1(needed)?;
        if needed <= has {
            return Ok(());
        }
        let ahead = (has + has.div_ceil(2)).min(L1_BYTES_MAX / 8);
        let _growth = self.probe.l1_table_grows();
        self.lengthen_l1(needed.max(ahead)).await
    }

    /// Refuses an L1 table that is longer than QEMU's may be.
    pub(crate) fn refuse_l1(&self, entries: u64) -> Result<()> {
        match entries.saturating_mul(8) > L1_BYTES_MAX {
            true => Err(Error::io(
                "Failed to grow the L1 table",
                std::io::Error::from_raw_os_error(EFBIG),
            )),
            false => Ok(()),
        }
    }

    /// Returns whether a change of the disk's size takes the VM state along. A raw data file is as
    /// long as the disk from then on.
    pub(crate) fn loses_vm_state(&self, old: u64, new: u64) -> bool {
        let begin = |size| self.geometry().vm_state_offset(size);
        self.raw_data || begin(old) != begin(new)
    }

    /// Discards everything mapped behind a cluster boundary beyond the end of the disk.
    pub(crate) async fn free_behind(&self, start: u64) -> Result<()> {
        let nothing = NoBacking;
        let coverage = self.geometry().l2_coverage_bytes();
        let entries = self.lock().mapping.tables.l1().len() as u64;
        for index in start / coverage..entries {
            if self.lock().mapping.tables.l1()[index as usize] == 0 {
                continue;
            }
            let range = start.max(index * coverage)..(index + 1) * coverage;
            let ask = (EntryRequest::Discard, Unref::Free);
            let rest = self.change_entries(range, &nothing, ask).await?;
            debug_assert!(rest.is_empty(), "a discard never writes");
        }
        Ok(())
    }
}
