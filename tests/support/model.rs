//! The disk as it must read: windows of it in memory, all of it in a sparse raw file at need.
//!
//! A disk with two L2 tables of 2 MiB clusters has a terabyte; what is written is near its ends and
//! around the boundary of its tables. Only these windows are modelled; what is outside them, nobody
//! changes, and QEMU compares it against the state at the start.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::rng::Rng;
use super::shape::Shape;

/// A part of the disk.
#[derive(Clone, Debug)]
pub struct Window {
    /// First byte on the disk.
    pub start: u64,
    /// The expected content; may extend beyond the end of the disk, which may grow into it.
    bytes: Vec<u8>,
}

/// The disk.
#[derive(Clone, Debug)]
pub struct Model {
    pub disk_bytes: u64,
    pub windows: Vec<Window>,
}

impl Model {
    /// Windows for a shape, with the contents of a raw file.
    pub fn of(shape: &Shape, truth: &Path) -> Model {
        let file = File::open(truth).unwrap();
        let disk_bytes = file.metadata().unwrap().len();
        let width = (shape.cluster_bytes * 6).clamp(192 << 10, 4 << 20);
        let half = width / 2 / 512 * 512;
        let mut windows: Vec<Window> = Vec::new();
        let boundary = shape.table_bytes().min(disk_bytes / 2);
        for start in [
            0,
            boundary.saturating_sub(half),
            disk_bytes.saturating_sub(half),
        ] {
            let start = windows
                .last()
                .map_or(start, |w| start.max(w.start + w.bytes.len() as u64));
            if start < disk_bytes {
                let mut bytes = vec![0; width as usize];
                let known = (disk_bytes - start).min(width) as usize;
                file.read_exact_at(&mut bytes[..known], start).unwrap();
                windows.push(Window { start, bytes });
            }
        }
        Model {
            disk_bytes,
            windows,
        }
    }

    /// How far the disk may grow within the windows.
    pub fn greatest_bytes(&self) -> u64 {
        let last = self.windows.last().expect("there is a window");
        (last.start + last.bytes.len() as u64).max(self.disk_bytes)
    }

    /// Returns the expected content of a range in one window.
    pub fn get(&self, offset: u64, len: u64) -> &[u8] {
        let window = self
            .windows
            .iter()
            .find(|w| offset >= w.start && offset + len <= w.start + w.bytes.len() as u64)
            .expect("the range is in a window");
        let at = (offset - window.start) as usize;
        &window.bytes[at..at + len as usize]
    }

    /// Changes a range of one window.
    pub fn set(&mut self, offset: u64, bytes: &[u8]) {
        let window = self
            .windows
            .iter_mut()
            .find(|w| offset >= w.start && offset < w.start + w.bytes.len() as u64)
            .expect("the range is in a window");
        let at = (offset - window.start) as usize;
        window.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The parts of the windows that are on the disk, as offset and length.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.windows
            .iter()
            .map(|w| {
                let end = (w.start + w.bytes.len() as u64).min(self.disk_bytes);
                (w.start, end - w.start)
            })
            .collect()
    }

    /// A range within a window, its ends aligned to a random unit.
    pub fn random_range(&self, shape: &Shape, rng: &mut Rng) -> (u64, u64) {
        let ranges = self.ranges();
        let (start, width) = *rng.pick(&ranges);
        let unit = *rng.pick(&[
            1,
            512,
            4096,
            shape.subcluster_bytes().max(512),
            shape.cluster_bytes,
        ]);
        let most = match rng.below(4) {
            0 => shape.cluster_bytes * 3,
            1 => shape.cluster_bytes,
            _ => 16 << 10,
        };
        let first = start + rng.below(width);
        let len = 1 + rng.below(most.min(width));
        let first = (first / unit * unit).max(start);
        let end = (first + len).next_multiple_of(unit).min(start + width);
        (first, end.max(first + 1) - first)
    }

    /// Writes the windows into a raw file that holds the rest of the disk, and gives it the disk's
    /// size.
    pub fn store(&self, raw: &Path) {
        let file = File::options().write(true).open(raw).unwrap();
        file.set_len(self.disk_bytes).unwrap();
        for (start, len) in self.ranges() {
            file.write_all_at(self.get(start, len), start).unwrap();
        }
    }
}

/// Where two slices differ first, for messages.
pub fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    // Almost always they are equal, and comparing them as wholes is quick without an optimiser too.
    (left != right)
        .then(|| left.iter().zip(right).position(|(l, r)| l != r))
        .flatten()
}
