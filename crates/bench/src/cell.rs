//! Cells of a table: a kind of image, a load, and the contestants that take it.

use cowslip_console::size;

use crate::peers::Peer;
use crate::server::{Kind, Transport};

/// Contestant, and its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contestant {
    /// Cowslip, on an image that our `create` made with this policy.
    Cowslip(&'static str),
    /// Cowslip, with zeroes made in this way (`zero-method`).
    CowslipZeroing(&'static str),
    /// Cowslip, with this memory for tables.
    CowslipCached(CacheBudget),
    /// Cowslip with its requests spread over this many threads, on a file that keeps nothing.
    CowslipThreads(u16),
    /// As many processes of Cowslip, each with such a file of its own.
    CowslipProcesses(u16),
    /// Cowslip, which puts the disk's clusters in the guest's order, too.
    CowslipInOrder,
    /// Cowslip, as a vhost-user-blk device of a guest; the others are its NBD export there.
    CowslipVhostUser,
    /// qemu-img: of a load its `bench`, on an image that `qemu-img create` made.
    QemuImg,
    /// `qemu-img convert -W`: in any order, which with `-c` is its only way to use several
    /// processors.
    QemuImgAnyOrder,
    /// nbdcopy.
    Nbdcopy,
    /// `qemu-img bench`, with this memory for tables.
    QemuImgCached(CacheBudget),
    /// This NBD server of QEMU's, on such an image.
    QemuServer(Kind),
    /// QEMU's own driver below a guest, on such an image.
    QemuDriver,
    /// Cowslip, on a raw file: the limit set by the file system.
    Raw(RawFile),
    /// `qemu-img bench` on such a file.
    QemuRaw(RawFile),
}

/// Memory limit of L2 tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheBudget {
    /// A number of MiB.
    Mebibytes(u64),
    /// Room for all tables that there are.
    Unlimited,
}

impl CacheBudget {
    /// Returns the limit for `l2-cache-size`.
    pub fn bytes(self) -> u64 {
        match self {
            CacheBudget::Mebibytes(count) => count << 20,
            CacheBudget::Unlimited => 1 << 40,
        }
    }

    fn name(self) -> String {
        match self {
            CacheBudget::Mebibytes(count) => format!("{count}M"),
            CacheBudget::Unlimited => "unlimited".to_string(),
        }
    }
}

/// The state of a raw file before the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawFile {
    /// A file of one hole.
    Sparse,
    /// A file of one hole, whose space the file system allocates in units of this many bytes (XFS).
    Hinted(u64),
    /// Space, never written (`fallocate`).
    Allocated,
    /// Written throughout.
    Written,
    /// A reflink clone of a file that is written throughout.
    Clone,
}

impl Contestant {
    /// Its name in tables.
    pub fn name(self) -> String {
        let raw = |file| match file {
            RawFile::Sparse => "raw sparse".to_string(),
            RawFile::Hinted(bytes) => format!("raw hint {}", short_size(bytes)),
            RawFile::Allocated => "raw allocated".to_string(),
            RawFile::Written => "raw written".to_string(),
            RawFile::Clone => "raw clone".to_string(),
        };
        match self {
            Contestant::Cowslip("auto") => "cowslip".to_string(),
            Contestant::Cowslip(policy) => format!("cowslip {policy}"),
            Contestant::CowslipZeroing(method) => format!("cowslip {method}"),
            Contestant::CowslipCached(budget) => format!("cowslip {}", budget.name()),
            Contestant::CowslipInOrder => "cowslip --defragment".to_string(),
            Contestant::CowslipVhostUser => "cowslip vhost-user".to_string(),
            Contestant::CowslipThreads(1) => "cowslip 1 thread".to_string(),
            Contestant::CowslipThreads(count) => format!("cowslip {count} threads"),
            Contestant::CowslipProcesses(count) => format!("cowslip {count} processes"),
            Contestant::QemuImg => "qemu-img".to_string(),
            Contestant::QemuImgAnyOrder => "qemu-img -W".to_string(),
            Contestant::Nbdcopy => "nbdcopy".to_string(),
            Contestant::QemuImgCached(budget) => format!("qemu-img {}", budget.name()),
            Contestant::QemuServer(kind) => kind.name().to_string(),
            Contestant::QemuDriver => "qemu driver".to_string(),
            Contestant::Raw(file) => raw(file),
            Contestant::QemuRaw(file) => format!("{} (qemu-img)", raw(file)),
        }
    }

    /// The QEMU program that this is; raw files are a reference and belong to no peer.
    pub fn peer(self) -> Option<Peer> {
        match self {
            Contestant::QemuImg | Contestant::QemuImgCached(_) | Contestant::QemuImgAnyOrder => {
                Some(Peer::QemuImg)
            }
            Contestant::Nbdcopy => Some(Peer::Nbdcopy),
            Contestant::QemuServer(Kind::StorageDaemon) => Some(Peer::StorageDaemon),
            Contestant::QemuServer(_) => Some(Peer::QemuNbd),
            Contestant::QemuDriver => Some(Peer::System),
            _ => None,
        }
    }

    /// Whether it is we, on an image.
    pub fn is_cowslip(self) -> bool {
        use Contestant::{Cowslip, CowslipCached, CowslipProcesses, CowslipThreads};
        use Contestant::{CowslipInOrder, CowslipVhostUser, CowslipZeroing};
        matches!(
            self,
            Cowslip(_)
                | CowslipZeroing(_)
                | CowslipCached(_)
                | CowslipThreads(_)
                | CowslipProcesses(_)
                | CowslipInOrder
                | CowslipVhostUser
        )
    }

    /// Whether it is QEMU under the conditions of ours. With a limited cache it is not: it is timed
    /// from its start, with no table in memory, and visits other places.
    pub fn is_rival(self) -> bool {
        matches!(
            self,
            Contestant::QemuImg | Contestant::QemuServer(_) | Contestant::QemuDriver
        )
    }

    /// Whether `other` is this one with memory for all tables.
    pub fn is_limited_form_of(self, other: Contestant) -> bool {
        let unlimited = Contestant::CowslipCached(CacheBudget::Unlimited);
        matches!(self, Contestant::CowslipCached(_)) && other == unlimited
    }

    /// Whether `other` is this one on a single thread.
    pub fn is_many_of(self, other: Contestant) -> bool {
        use Contestant::{CowslipProcesses, CowslipThreads};
        let is_many = matches!(self, CowslipThreads(2..) | CowslipProcesses(_));
        is_many && other == CowslipThreads(1)
    }

    /// Whether a first touch of its file allocates space of the file system.
    pub fn is_raw_first_touch(self) -> bool {
        use RawFile::{Allocated, Sparse};
        matches!(
            self,
            Contestant::Raw(Sparse | Allocated) | Contestant::QemuRaw(Sparse | Allocated)
        )
    }

    /// Whether its file is raw.
    pub fn is_raw(self) -> bool {
        matches!(self, Contestant::Raw(_) | Contestant::QemuRaw(_))
    }

    /// Whether its file is raw and written throughout.
    pub fn is_raw_written(self) -> bool {
        use RawFile::Written;
        matches!(
            self,
            Contestant::Raw(Written) | Contestant::QemuRaw(Written)
        )
    }
}

/// Backing of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// No backing.
    None,
    /// A raw file, written throughout.
    Raw,
}

/// Whether an image has extended L2 entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subclusters {
    /// With subclusters.
    On,
    /// Without subclusters.
    Off,
}

impl Subclusters {
    /// Returns the value for `extended_l2`.
    pub fn word(self) -> &'static str {
        match self {
            Subclusters::On => "on",
            Subclusters::Off => "off",
        }
    }
}

/// The state of an image before the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// An image as `create` leaves it.
    Fresh,
    /// An image as `create -o preallocation=` leaves it.
    Preallocated(&'static str),
    /// Written throughout, in order, by the engine that is measured.
    Filled,
    /// The same, then discarded throughout, with its space given back to the host.
    Trimmed,
    /// All of it has space, laid out so; little of it is written.
    Laid(Layout),
}

/// Where on the host clusters lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Clusters in the order of the disk.
    Contiguous,
    /// The same, but three of ten have changed places.
    Scattered,
}

/// Direction of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// The requests of a file system to its disk: writes, zeroes, discards, flushes.
    Churn,
}

/// A kind of image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Size of a cluster in bytes.
    pub cluster_bytes: u64,
    /// Extended L2 entries.
    pub subclusters: Subclusters,
    /// Its backing.
    pub backing: Backing,
    /// Its content.
    pub before: Before,
}

impl Shape {
    /// A fresh one.
    pub fn new(cluster_bytes: u64, subclusters: Subclusters, backing: Backing) -> Shape {
        Shape {
            cluster_bytes,
            subclusters,
            backing,
            before: Before::Fresh,
        }
    }

    /// Returns the options for `create -o`.
    pub fn options(&self) -> String {
        let extended = self.subclusters.word();
        let mut options = format!("cluster_size={},extended_l2={extended}", self.cluster_bytes);
        if let Before::Preallocated(mode) = self.before {
            options += &format!(",preallocation={mode}");
        }
        options
    }

    /// The unit that a first write copies or zeroes at least, in bytes.
    pub fn unit_bytes(&self) -> u64 {
        match self.subclusters {
            Subclusters::On => self.cluster_bytes / 32,
            Subclusters::Off => self.cluster_bytes,
        }
    }

    /// Returns the name for tables.
    pub fn name(&self) -> String {
        let state = match (self.before, self.backing) {
            (Before::Fresh, Backing::None) => "empty".to_string(),
            (Before::Fresh, Backing::Raw) => "backed".to_string(),
            (Before::Preallocated(mode), _) => format!("preallocation {mode}"),
            (Before::Filled, _) => "filled".to_string(),
            (Before::Trimmed, _) => "trimmed".to_string(),
            (Before::Laid(Layout::Contiguous), _) => "contiguous".to_string(),
            (Before::Laid(Layout::Scattered), _) => "30% scattered".to_string(),
        };
        let cluster = short_size(self.cluster_bytes);
        match self.subclusters {
            Subclusters::Off => format!("{cluster}, {state}"),
            Subclusters::On => format!("{cluster}/{}, {state}", short_size(self.unit_bytes())),
        }
    }
}

/// A load, the same for each contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellLoad {
    /// How many requests.
    pub requests: u64,
    /// Number of requests in flight.
    pub depth: u64,
    /// Size of each in bytes.
    pub request_bytes: u64,
    /// Writes to a flush; 0 for none but that of the close.
    pub flush_interval: u64,
    /// Direction.
    pub direction: Direction,
}

impl CellLoad {
    /// Writes without flushes.
    pub fn writes(requests: u64, depth: u64, request_bytes: u64) -> CellLoad {
        CellLoad {
            requests,
            depth,
            request_bytes,
            flush_interval: 0,
            direction: Direction::Write,
        }
    }
}

/// How a cell's requests reach the disk, where a table has several ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a server that lives.
    Served(Transport),
    /// By a vhost-user server that is killed meanwhile, again and again, and started again.
    Killed,
    /// By one that hands over to a successor, again and again.
    HandedOver,
}

impl Way {
    /// The transport.
    pub fn transport(self) -> Transport {
        match self {
            Way::Served(transport) => transport,
            Way::Killed | Way::HandedOver => Transport::VhostUser,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Way::Served(Transport::Nbd) => "NBD",
            Way::Served(Transport::VhostUser) => "vhost-user",
            Way::Served(Transport::Fuse) => "FUSE",
            Way::Killed => "killed",
            Way::HandedOver => "handed over",
        }
    }
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The image.
    pub shape: Shape,
    /// The load.
    pub load: CellLoad,
    /// Contestants that take it.
    pub contestants: Vec<Contestant>,
    /// How requests reach the disk; `None` is the table's own way.
    pub way: Option<Way>,
    /// Work of whole programs, in place of a load on an image.
    pub work: Option<String>,
}

impl Cell {
    /// A cell of a table with one way to the disk.
    pub fn new(shape: Shape, load: CellLoad, contestants: Vec<Contestant>) -> Cell {
        Cell {
            shape,
            load,
            contestants,
            way: None,
            work: None,
        }
    }

    /// A cell of what whole programs do, by its name.
    pub fn of_work(name: String, contestants: &[Contestant]) -> Cell {
        let shape = Shape::new(64 << 10, Subclusters::Off, Backing::None);
        let mut cell = Cell::new(shape, CellLoad::writes(1, 1, 4096), contestants.to_vec());
        cell.work = Some(name);
        cell
    }

    /// Returns the name for tables and filters.
    pub fn name(&self) -> String {
        if let Some(work) = &self.work {
            return work.clone();
        }
        let mut name = format!("{}, depth {}", self.shape.name(), self.load.depth);
        match (self.shape.before, self.load.direction) {
            (_, Direction::Read) => name += ", reads",
            (_, Direction::Churn) => name += ", churn",
            (Before::Filled | Before::Laid(_), Direction::Write) => name += ", overwrites",
            (_, Direction::Write) => {}
        }
        if self.load.flush_interval > 0 {
            name += &format!(", flush every {}", self.load.flush_interval);
        }
        if let Some(way) = self.way {
            name += &format!(", {}", way.name());
        }
        name
    }
}

/// A step through a disk that visits each block once before it comes back, and scatters what
/// follows one another: near the golden section of the disk, coprime to its blocks, and within
/// qemu-img's limit.
pub fn scattering_step(disk_bytes: u64, request_bytes: u64) -> u64 {
    /// 2^64 times the golden section, the smaller part.
    const SECTION: u128 = 0x61C8_8646_80B5_83EB;
    let blocks = (disk_bytes / request_bytes).max(1);
    let wanted = (u128::from(blocks) * SECTION) >> 64;
    let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
    let mut step = wanted.min(i32::MAX as u64 / request_bytes).max(1);
    while step > 1 && greatest_common_divisor(step, blocks) != 1 {
        step -= 1;
    }
    step * request_bytes
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// `64K`, `1M`.
pub fn short_size(bytes: u64) -> String {
    let text = size::human(bytes);
    let text = text.replace(" KiB", "K").replace(" MiB", "M");
    text.replace(" GiB", "G").replace(" B", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_scatters_and_visits_each_block_once() {
        for (disk_bytes, request_bytes) in [(4 << 30, 4096), (8 << 40, 4096), (3 << 20, 4096)] {
            let step = scattering_step(disk_bytes, request_bytes);
            assert!(step <= i32::MAX as u64 && step.is_multiple_of(request_bytes));
            let blocks = disk_bytes / request_bytes;
            assert_eq!(greatest_common_divisor(step / request_bytes, blocks), 1);
            assert!(step > 512 << 10, "{step} does not scatter");
        }
        assert_eq!(scattering_step(4096, 4096), 4096);
    }
}
