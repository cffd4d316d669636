//! The table of requests in flight: memory that the front end keeps, so that a server that is
//! started after the end of another one knows what that one had taken and not completed
//! (vhost-user protocol, "Inflight I/O tracking").
//!
//! | the process ends | what the table says | what is carried out again |
//! | --- | --- | --- |
//! | before a request is marked | nothing: the ring still has it as available | it is taken again |
//! | while it is marked | in flight | yes |
//! | in the middle of a completion, before the ring has it | in flight | yes |
//! | in the middle of a completion, after the ring has it | in flight, but the used index differs | no: the completion is finished first |
//!
//! The table is shared with the front end, which could change it: numbers from it are checked like
//! those of a ring.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use cowslip_queue::SharedMemory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};

use crate::fields::Fields;
use crate::ring::{Broken, Descriptor};

/// Parts of queues begin at multiples of this, as in QEMU's library for servers.
const ALIGNMENT_BYTES: usize = 64;
/// Version of the layout; 0 is a table that no server has used.
const VERSION: u16 = 1;

/// Offsets in the part of a queue, and bytes of an entry. Split rings: features, version, number
/// of entries, head of the last batch, used index; entries of in flight, next, counter.
mod split {
    pub const LAST_BATCH_HEAD: usize = 12;
    pub const USED_INDEX: usize = 14;
    pub const ENTRIES: usize = 16;
    pub const ENTRY_BYTES: usize = 16;
    pub const NEXT: usize = 6;
    pub const COUNTER: usize = 8;
}

/// The same for packed rings: the positions are there twice, as they are and as they were at the
/// end of the last completion; entries have a descriptor.
mod packed {
    pub const FREE_HEAD: usize = 12;
    pub const OLD_FREE_HEAD: usize = 14;
    pub const USED_INDEX: usize = 16;
    pub const OLD_USED_INDEX: usize = 18;
    pub const USED_WRAP: usize = 20;
    pub const OLD_USED_WRAP: usize = 21;
    pub const ENTRIES: usize = 32;
    pub const ENTRY_BYTES: usize = 32;
    pub const NEXT: usize = 2;
    pub const LAST: usize = 4;
    pub const COUNT: usize = 6;
    pub const COUNTER: usize = 8;
    pub const ID: usize = 16;
    pub const FLAGS: usize = 18;
    pub const LEN: usize = 20;
    pub const ADDRESS: usize = 24;
}

/// Feature of a queue's part, of ours (the protocol has none so far): the guest has chosen that
/// writes are durable when they complete. It does not choose again when another server comes.
const WRITETHROUGH: u64 = 1 << 63;

/// Offsets that both kinds share.
const FEATURES_AT: usize = 0;
const VERSION_AT: usize = 8;
const ENTRY_COUNT_AT: usize = 10;
const IN_FLIGHT: usize = 0;

/// Dimensions of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub queues: u16,
    /// Descriptors of each queue's ring.
    pub queue_size: u16,
    pub is_packed: bool,
}

impl Shape {
    fn queue_bytes(self) -> usize {
        let (start, entry) = match self.is_packed {
            false => (split::ENTRIES, split::ENTRY_BYTES),
            true => (packed::ENTRIES, packed::ENTRY_BYTES),
        };
        (start + usize::from(self.queue_size) * entry).next_multiple_of(ALIGNMENT_BYTES)
    }

    /// Bytes of the whole table.
    pub fn bytes(self) -> u64 {
        (self.queue_bytes() * usize::from(self.queues)) as u64
    }
}

/// A table of all queues.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    memory: Arc<SharedMemory>,
    shape: Shape,
    /// The file and the offset in it, for another server.
    file: Arc<OwnedFd>,
    offset: u64,
}

impl Table {
    /// Makes memory for a table, to be passed to the front end.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn make_file(shape: Shape) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("cowslip-in-flight", flags)?;
        ftruncate(&file, shape.bytes())?;
        // It is mapped here: its length stays.
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        Ok(file)
    }

    /// Maps a table that the front end has passed.
    ///
    /// # Errors
    /// It is too small for its shape, or not aligned; it cannot be mapped.
    pub fn map(file: BorrowedFd<'_>, (offset, len): (u64, u64), shape: Shape) -> io::Result<Table> {
        let invalid = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if len < shape.bytes() || shape.bytes() == 0 {
            let Shape {
                queues, queue_size, ..
            } = shape;
            return invalid(format!(
                "{len} bytes are too few for {queues} queues of {queue_size} descriptors"
            ));
        }
        if !offset.is_multiple_of(ALIGNMENT_BYTES as u64) {
            return invalid(format!("it begins at {offset}, no multiple of 64"));
        }
        Ok(Table {
            memory: SharedMemory::map(file.as_fd(), offset, shape.bytes())?,
            shape,
            file: Arc::new(file.try_clone_to_owned()?),
            offset,
        })
    }

    /// Its shape, and its offset in its file.
    pub fn part(&self) -> (Shape, u64) {
        (self.shape, self.offset)
    }

    /// Notes whether the guest has chosen that writes are durable when they complete.
    pub fn set_writethrough(&self, is_writethrough: bool) {
        for part in (0..self.shape.queues).filter_map(|index| self.queue(index)) {
            let others = part.fields.load_u64(FEATURES_AT) & !WRITETHROUGH;
            let chosen = if is_writethrough { WRITETHROUGH } else { 0 };
            part.fields.store_u64(FEATURES_AT, others | chosen);
        }
    }

    /// Whether the guest has chosen so with another server.
    pub fn is_writethrough(&self) -> bool {
        let mut parts = (0..self.shape.queues).filter_map(|index| self.queue(index));
        parts.any(|part| part.fields.load_u64(FEATURES_AT) & WRITETHROUGH != 0)
    }

    /// The part of a queue.
    pub fn queue(&self, index: u16) -> Option<QueueTable> {
        let start = self.shape.queue_bytes() * usize::from(index);
        (index < self.shape.queues).then(|| QueueTable {
            fields: Fields::new(&self.memory, start),
            shape: self.shape,
        })
    }
}

impl AsFd for Table {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The part of one queue.
#[derive(Clone)]
pub(crate) struct QueueTable {
    fields: Fields,
    shape: Shape,
}

impl fmt::Debug for QueueTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueTable({:?})", self.shape)
    }
}

impl QueueTable {
    /// Checks that the table is for this ring. Returns whether a server has used it before; if not,
    /// it is one of this version afterwards, once `begin` has filled it.
    fn open(&self, (size, is_packed): (u16, bool), begin: impl FnOnce()) -> Result<bool, Broken> {
        let Shape {
            queue_size,
            is_packed: of_packed,
            ..
        } = self.shape;
        if size > queue_size || is_packed != of_packed {
            return Err(Broken(format!(
                "the table of requests in flight is for rings of {queue_size} descriptors, not \
                 for one of {size}, or not of its kind"
            )));
        }
        match self.fields.load_u16(VERSION_AT) {
            0 => {
                begin();
                self.fields.store_u16(ENTRY_COUNT_AT, queue_size);
                self.fields.store_u16(VERSION_AT, VERSION);
                Ok(false)
            }
            VERSION if self.fields.load_u16(ENTRY_COUNT_AT) == queue_size => Ok(true),
            version => Err(Broken(format!(
                "the table of requests in flight has version {version} and {} entries; version \
                 {VERSION} with {queue_size} is supported",
                self.fields.load_u16(ENTRY_COUNT_AT)
            ))),
        }
    }

    /// The table of a split ring of this size.
    ///
    /// # Errors
    /// The table is of another kind, size or version.
    pub fn split(self, size: u16) -> Result<SplitTable, Broken> {
        self.open((size, false), || ())?;
        Ok(SplitTable {
            table: self,
            size,
            counter: 0,
        })
    }

    /// The table of a packed ring of this size, with what another server has left in it. Without a
    /// server before, completions begin at `used`. `was_used` says of a position in the
    /// ring whether its descriptor was marked used.
    ///
    /// # Errors
    /// The table is of another kind, size or version, or broken.
    pub fn packed(
        self,
        size: u16,
        used: PackedPosition,
        was_used: impl Fn(PackedPosition) -> Option<bool>,
    ) -> Result<(PackedTable, Option<Recovered>), Broken> {
        let table = PackedTable {
            entries: self.shape.queue_size,
            table: self,
            size,
            counter: 0,
        };
        let is_known = table.table.open((size, true), || table.begin(used))?;
        match is_known {
            false => Ok((table, None)),
            true => {
                let mut table = table;
                let recovered = table.recover(was_used)?;
                Ok((table, Some(recovered)))
            }
        }
    }
}

/// The table of a split ring. Entries are the ring's descriptors.
#[derive(Debug)]
pub(crate) struct SplitTable {
    table: QueueTable,
    size: u16,
    /// Number of the next request, for the order.
    counter: u64,
}

impl SplitTable {
    fn at(head: u16, field: usize) -> usize {
        split::ENTRIES + usize::from(head) * split::ENTRY_BYTES + field
    }

    fn is_in_flight(&self, head: u16) -> bool {
        self.table.fields.load_u8(Self::at(head, IN_FLIGHT)) == 1
    }

    /// Marks a request that was taken from the ring.
    ///
    /// # Errors
    /// The driver has made a chain available that it had not got back.
    pub fn take(&mut self, head: u16) -> Result<(), Broken> {
        if self.is_in_flight(head) {
            return Err(Broken(format!(
                "the chain at descriptor {head} is available while it is in flight"
            )));
        }
        self.table
            .fields
            .store_u64(Self::at(head, split::COUNTER), self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.table.fields.store_u8(Self::at(head, IN_FLIGHT), 1);
        Ok(())
    }

    /// Notes which request is completed next, before the ring has it.
    pub fn begin_completion(&mut self, head: u16) {
        let before = self.table.fields.load_u16(split::LAST_BATCH_HEAD);
        self.table
            .fields
            .store_u16(Self::at(head, split::NEXT), before);
        self.table.fields.store_u16(split::LAST_BATCH_HEAD, head);
    }

    /// Ends a completion after the ring has it.
    pub fn end_completion(&mut self, head: u16, used_index: u16) {
        self.table.fields.store_u8(Self::at(head, IN_FLIGHT), 0);
        self.table.fields.store_u16(split::USED_INDEX, used_index);
    }

    /// Finishes the completions that the ring has, and returns the requests that are in flight, in
    /// the order in which they were taken.
    pub fn recover(&mut self, used_index: u16) -> Vec<u16> {
        let unfinished = used_index.wrapping_sub(self.table.fields.load_u16(split::USED_INDEX));
        let mut head = self.table.fields.load_u16(split::LAST_BATCH_HEAD);
        for _ in 0..unfinished.min(self.size) {
            if head >= self.size {
                break;
            }
            self.table.fields.store_u8(Self::at(head, IN_FLIGHT), 0);
            head = self.table.fields.load_u16(Self::at(head, split::NEXT));
        }
        self.table.fields.store_u16(split::USED_INDEX, used_index);
        let in_flight = (0..self.size).filter(|&head| self.is_in_flight(head));
        let mut taken: Vec<(u64, u16)> = in_flight
            .map(|head| {
                (
                    self.table.fields.load_u64(Self::at(head, split::COUNTER)),
                    head,
                )
            })
            .collect();
        taken.sort_unstable();
        if let Some((last, _)) = taken.last() {
            self.counter = last.wrapping_add(1);
        }
        taken.into_iter().map(|(_, head)| head).collect()
    }
}

/// A position in a packed ring: the index, and the wrap counter in bit 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedPosition(pub u16);

/// State that another server has left in the table of a packed ring.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Recovered {
    /// Where the next used descriptor goes.
    pub used: PackedPosition,
    /// Entries of requests in flight, in the order in which they were taken.
    pub entries: Vec<u16>,
    /// Descriptors that these take in the ring.
    pub descriptors: u16,
}

/// The table of a packed ring. A request takes an entry for each of its descriptors from a list of
/// free ones, and is known by the first.
#[derive(Debug)]
pub(crate) struct PackedTable {
    table: QueueTable,
    size: u16,
    entries: u16,
    counter: u64,
}

impl PackedTable {
    fn at(entry: u16, field: usize) -> usize {
        packed::ENTRIES + usize::from(entry) * packed::ENTRY_BYTES + field
    }

    /// Makes all entries free, in their order.
    fn begin(&self, used: PackedPosition) {
        for entry in 0..self.entries {
            self.table
                .fields
                .store_u16(Self::at(entry, packed::NEXT), entry.wrapping_add(1));
            self.table.fields.store_u8(Self::at(entry, IN_FLIGHT), 0);
        }
        self.set_used(used);
        self.settle();
    }

    fn set_used(&self, PackedPosition(bits): PackedPosition) {
        self.table
            .fields
            .store_u16(packed::USED_INDEX, bits & 0x7FFF);
        self.table
            .fields
            .store_u8(packed::USED_WRAP, (bits >> 15) as u8);
    }

    /// Ends a change: from now on the positions are the old ones, too.
    fn settle(&self) {
        let table = &self.table;
        table.fields.store_u16(
            packed::OLD_FREE_HEAD,
            table.fields.load_u16(packed::FREE_HEAD),
        );
        table.fields.store_u16(
            packed::OLD_USED_INDEX,
            table.fields.load_u16(packed::USED_INDEX),
        );
        table.fields.store_u8(
            packed::OLD_USED_WRAP,
            table.fields.load_u8(packed::USED_WRAP),
        );
    }

    /// Takes back a change that was not ended. The used index comes first: as long as it differs
    /// from the old one, the free head names the request whose completion was begun.
    fn roll_back(&self) {
        let fields = &self.table.fields;
        fields.store_u16(packed::USED_INDEX, fields.load_u16(packed::OLD_USED_INDEX));
        fields.store_u8(packed::USED_WRAP, fields.load_u8(packed::OLD_USED_WRAP));
        fields.store_u16(packed::FREE_HEAD, fields.load_u16(packed::OLD_FREE_HEAD));
    }

    /// Stores a request that was taken from the ring, and returns its entry.
    ///
    /// # Errors
    /// No entries are free: the driver has made more available than the ring has.
    pub fn take(&mut self, descriptors: &[Descriptor]) -> Result<u16, Broken> {
        let head = self.table.fields.load_u16(packed::OLD_FREE_HEAD);
        let mut entry = head;
        let mut last = head;
        for descriptor in descriptors {
            if entry >= self.entries || self.is_in_flight(entry) {
                return Err(Broken(
                    "more descriptors are in flight than the ring has".to_string(),
                ));
            }
            let table = &self.table;
            table
                .fields
                .store_u64(Self::at(entry, packed::ADDRESS), descriptor.address);
            let len = Self::at(entry, packed::LEN);
            table.fields.store_u32(len, descriptor.len);
            table
                .fields
                .store_u16(Self::at(entry, packed::FLAGS), descriptor.flags);
            table
                .fields
                .store_u16(Self::at(entry, packed::ID), descriptor.link);
            last = entry;
            entry = table.fields.load_u16(Self::at(entry, packed::NEXT));
        }
        let table = &self.table;
        table.fields.store_u16(Self::at(head, packed::LAST), last);
        table
            .fields
            .store_u16(Self::at(head, packed::COUNT), descriptors.len() as u16);
        table
            .fields
            .store_u64(Self::at(head, packed::COUNTER), self.counter);
        self.counter = self.counter.wrapping_add(1);
        table.fields.store_u8(Self::at(head, IN_FLIGHT), 1);
        table.fields.store_u16(packed::FREE_HEAD, entry);
        table.fields.store_u16(packed::OLD_FREE_HEAD, entry);
        Ok(head)
    }

    fn is_in_flight(&self, entry: u16) -> bool {
        self.table.fields.load_u8(Self::at(entry, IN_FLIGHT)) == 1
    }

    /// The descriptors of a request; none if the table is broken.
    pub fn descriptors(&self, head: u16) -> Vec<Descriptor> {
        let mut found = Vec::new();
        let mut entry = head;
        let count = self.table.fields.load_u16(Self::at(head, packed::COUNT));
        for _ in 0..count.min(self.size) {
            if entry >= self.entries {
                return Vec::new();
            }
            let table = &self.table;
            found.push(Descriptor {
                address: table.fields.load_u64(Self::at(entry, packed::ADDRESS)),
                len: table.fields.load_u32(Self::at(entry, packed::LEN)),
                flags: table.fields.load_u16(Self::at(entry, packed::FLAGS)),
                link: table.fields.load_u16(Self::at(entry, packed::ID)),
            });
            entry = table.fields.load_u16(Self::at(entry, packed::NEXT));
        }
        found
    }

    /// Notes where completions will have come to, and that the request's entries are free then,
    /// before the ring has it.
    pub fn begin_completion(&mut self, head: u16, used: PackedPosition) {
        let last = self.table.fields.load_u16(Self::at(head, packed::LAST));
        // A front end that wrote nonsense here loses its own requests.
        let last = if last < self.entries { last } else { head };
        let free = self.table.fields.load_u16(packed::FREE_HEAD);
        self.table
            .fields
            .store_u16(Self::at(last, packed::NEXT), free);
        self.table.fields.store_u16(packed::FREE_HEAD, head);
        self.set_used(used);
    }

    /// Ends a completion after the ring has it. The mark goes first: positions consist of two
    /// fields, and may be half of the old and half of the new one if the process ends meanwhile.
    pub fn end_completion(&mut self, head: u16) {
        self.table.fields.store_u8(Self::at(head, IN_FLIGHT), 0);
        self.settle();
    }

    fn recover(
        &mut self,
        was_used: impl Fn(PackedPosition) -> Option<bool>,
    ) -> Result<Recovered, Broken> {
        let old_index = self.table.fields.load_u16(packed::OLD_USED_INDEX);
        let old_wrap = u16::from(self.table.fields.load_u8(packed::OLD_USED_WRAP) & 1);
        if old_index != self.table.fields.load_u16(packed::USED_INDEX)
            || old_wrap != u16::from(self.table.fields.load_u8(packed::USED_WRAP) & 1)
        {
            // A completion was begun. If its request is not marked any more, the ring has it, and
            // the old position may be half the new one. Else the ring says whether it has it.
            let head = self.table.fields.load_u16(packed::FREE_HEAD);
            let old = PackedPosition(old_index | old_wrap << 15);
            let is_used = match head < self.entries {
                true if self.is_in_flight(head) => was_used(old),
                true => Some(true),
                false => None,
            };
            match is_used {
                Some(true) => self.end_completion(head),
                Some(false) => {}
                None => {
                    return Err(Broken(format!(
                        "the table of requests in flight has used index {old_index} and free head \
                         {head} of {}",
                        self.size
                    )));
                }
            }
        }
        self.roll_back();
        let mut free = self.table.fields.load_u16(packed::FREE_HEAD);
        for _ in 0..self.entries {
            if free >= self.entries {
                break;
            }
            self.table.fields.store_u8(Self::at(free, IN_FLIGHT), 0);
            free = self.table.fields.load_u16(Self::at(free, packed::NEXT));
        }
        let in_flight = (0..self.entries).filter(|&entry| self.is_in_flight(entry));
        let mut taken: Vec<(u64, u16)> = in_flight
            .map(|entry| {
                (
                    self.table.fields.load_u64(Self::at(entry, packed::COUNTER)),
                    entry,
                )
            })
            .collect();
        taken.sort_unstable();
        if let Some((last, _)) = taken.last() {
            self.counter = last.wrapping_add(1);
        }
        let counts = taken.iter();
        let counts =
            counts.map(|(_, entry)| self.table.fields.load_u16(Self::at(*entry, packed::COUNT)));
        let used = self.table.fields.load_u16(packed::USED_INDEX)
            | u16::from(self.table.fields.load_u8(packed::USED_WRAP) & 1) << 15;
        Ok(Recovered {
            used: PackedPosition(used),
            descriptors: counts.fold(0, u16::saturating_add),
            entries: taken.into_iter().map(|(_, entry)| entry).collect(),
        })
    }
}

#[cfg(test)]
#[path = "inflight_tests.rs"]
mod tests;
