//! The figures of the demonstration, for people and for programs.

use std::path::Path;

use cowslip_console::size;
use cowslip_testbed::TextColumns;
use serde_json::{Value, json};

use super::load::{DEPTH, Load};
use crate::cell::Subclusters;
use crate::host_usage::HostUsage;
use crate::server::{Kind, PageCache};

/// The outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checked {
    /// No findings.
    Clean,
    /// Findings.
    Bad(String),
    /// The checker is not installed.
    NotInstalled,
}

impl Checked {
    fn word(&self) -> &'static str {
        match self {
            Checked::Clean => "clean",
            Checked::Bad(_) => "BAD",
            Checked::NotInstalled => "-",
        }
    }
}

/// A server with one kind of overlay.
#[derive(Clone, Debug)]
pub struct Row {
    /// Owner of the server.
    pub kind: Kind,
    /// Kind of overlay.
    pub subclusters: Subclusters,
    /// Time of the writes, the final flush included.
    pub seconds: f64,
    /// CPU time of the server during the writes.
    pub cpu_seconds: f64,
    /// Bytes that reached the files, from open to close.
    pub file_bytes: Option<u64>,
    /// Space of the overlay.
    pub host: HostUsage,
    /// Our check.
    pub own_check: Checked,
    /// QEMU's.
    pub qemu_check: Checked,
}

/// Columns of numbers with their usual widths.
const COLUMNS: [(&str, usize); 9] = [
    ("subclusters", 11),
    ("IOPS", 7),
    ("CPU/write", 10),
    ("guest wrote", 11),
    ("files got", 11),
    ("host space", 11),
    ("extents", 8),
    ("check", 6),
    ("qemu-img check", 14),
];

/// All of it.
pub struct Report {
    directory: String,
    page_cache: PageCache,
    disk_bytes: u64,
    operations: u64,
    guest_bytes: u64,
    rows: Vec<Row>,
}

impl Report {
    /// Without rows.
    pub fn new(directory: &Path, page_cache: PageCache, load: &Load) -> Report {
        Report {
            directory: directory.display().to_string(),
            page_cache,
            disk_bytes: load.disk_bytes(),
            operations: load.operations(),
            guest_bytes: load.guest_bytes(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Whether every image is sound, as far as it could be checked.
    pub fn all_is_well(&self) -> bool {
        let bad = |checked: &Checked| matches!(checked, Checked::Bad(_));
        !self
            .rows
            .iter()
            .any(|row| bad(&row.own_check) || bad(&row.qemu_check))
    }

    fn iops(&self, row: &Row) -> f64 {
        self.operations as f64 / row.seconds
    }

    fn cpu_microseconds(&self, row: &Row) -> f64 {
        row.cpu_seconds * 1e6 / self.operations as f64
    }

    /// The table.
    pub fn text(&self) -> String {
        let cache = match self.page_cache {
            PageCache::Bypass => "O_DIRECT",
            PageCache::Use => "the page cache, since this file system knows no O_DIRECT",
        };
        let mut text = format!(
            "{} random writes of 4 KiB ({}) at queue depth {DEPTH} over NBD, then a flush,\n\
             to an overlay on a golden image of {} that is fully written; clusters of 64 KiB.\n\
             In {}, with {cache}. Everything was read back and compared.\n\n",
            self.operations,
            size::human(self.guest_bytes),
            size::human(self.disk_bytes),
            self.directory,
        );
        let mut columns = TextColumns::default()
            .names("server", self.rows.iter().map(|row| row.kind.name()))
            .numbers(COLUMNS);
        for row in &self.rows {
            text += &columns.row(&self.fields(row));
        }
        for row in &self.rows {
            for checked in [&row.own_check, &row.qemu_check] {
                if let Checked::Bad(words) = checked {
                    let name = row.kind.name();
                    text.push_str(&format!("\n{name}, {}:\n{words}\n", row.subclusters.word()));
                }
            }
        }
        text
    }

    fn fields(&self, row: &Row) -> Vec<String> {
        let or_dash = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_string());
        vec![
            row.kind.name().to_string(),
            row.subclusters.word().to_string(),
            format!("{:.0}", self.iops(row)),
            format!("{:.1} us", self.cpu_microseconds(row)),
            size::human(self.guest_bytes),
            // Memory file systems count nothing.
            or_dash(row.file_bytes.filter(|bytes| *bytes > 0).map(size::human)),
            size::human(row.host.bytes),
            or_dash(row.host.extents.map(|count| count.to_string())),
            row.own_check.word().to_string(),
            row.qemu_check.word().to_string(),
        ]
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|row| self.row_json(row)).collect();
        json!({
            "directory": self.directory,
            "direct-io": self.page_cache == PageCache::Bypass,
            "disk-size": self.disk_bytes,
            "queue-depth": DEPTH,
            "block-size": 4096,
            "operations": self.operations,
            "rows": rows,
        })
    }

    fn row_json(&self, row: &Row) -> Value {
        json!({
            "server": row.kind.name(),
            "extended-l2": row.subclusters == Subclusters::On,
            "iops": self.iops(row).round(),
            "seconds": row.seconds,
            "cpu-us-per-write": self.cpu_microseconds(row),
            "guest-bytes": self.guest_bytes,
            "file-bytes": row.file_bytes,
            "host-bytes": row.host.bytes,
            "host-extents": row.host.extents,
            "read-back": "identical",
            "check": row.own_check.word(),
            "qemu-img-check": row.qemu_check.word(),
        })
    }
}
