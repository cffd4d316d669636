//! Descriptions of tables of images: what each measures, on how large a disk, beside whom. A table
//! is a file with one of these, and a verb with two lines in `tables.rs`.

use crate::cell::Cell;
use crate::peers::Peer;
use crate::report::{Column, column};
use crate::scale::Scale;
use crate::stage::{Measure, bench_process};

/// Least size of a file system, whatever the disk: XFS refuses to be below 300 MiB.
const FILESYSTEM_BYTES_MIN: u64 = 512 << 20;

/// A table.
#[derive(Clone, Copy)]
pub struct Description {
    /// Its name.
    pub name: &'static str,
    /// Size of the disks in bytes, if it is not said.
    pub disk_bytes: u64,
    /// The same for a first look.
    pub quick_disk_bytes: u64,
    /// Requests of a run, if it is not said.
    pub requests: u64,
    /// Policies that are columns, if it is not said.
    pub policies: &'static [&'static str],
    /// It takes `--depths`.
    pub has_depths: bool,
    /// It takes `--requests`.
    pub has_requests: bool,
    /// More columns of ours, by how zeroes are made, if it is not said.
    pub zero_methods: &'static [&'static str],
    /// QEMU's programs that can take part.
    pub peers: &'static [Peer],
    /// The mails that first asked its question.
    pub source: Option<Source>,
    /// Note below it.
    pub note: Option<&'static str>,
    /// Whether requests over time are what it is about.
    pub is_about_series: bool,
    /// Space of its files, for disks of this size, with as much again so that their file system is
    /// not nearly full.
    pub files_bytes: fn(u64) -> u64,
    /// The rate that runs are compared by; more is better.
    pub rate: Column,
    /// Its cells.
    pub cells: fn(&Scale) -> Vec<Cell>,
    /// How a run is made.
    pub measure: Measure,
}

/// How the mails that first asked a table's question measured.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// Approximate number of requests of a run of 60 s there.
    pub requests: u64,
    /// Description of the source, with its differences here.
    pub words: &'static str,
}

impl Description {
    /// A table in which `bench` runs as a process, beside qemu-img.
    pub const fn usual(name: &'static str, cells: fn(&Scale) -> Vec<Cell>) -> Description {
        Description {
            name,
            disk_bytes: 4 << 30,
            quick_disk_bytes: 1 << 30,
            requests: 8000,
            policies: &["auto", "sparse"],
            has_depths: true,
            has_requests: true,
            zero_methods: &[],
            peers: &[Peer::QemuImg],
            source: None,
            note: None,
            is_about_series: false,
            // A written raw file, a new image that may become as large, and as much again.
            files_bytes: |disk_bytes| disk_bytes * 3,
            rate: column("IOPS", 0),
            cells,
            measure: bench_process,
        }
    }

    /// Space that a file system needs for disks of this size.
    pub fn filesystem_bytes(&self, disk_bytes: u64) -> u64 {
        (self.files_bytes)(disk_bytes).max(FILESYSTEM_BYTES_MIN)
    }
}
