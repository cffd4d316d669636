//! Cells of the table: patterns of writing, and helps for the files' layout.

use std::ops::RangeInclusive;

use cowslip::growth::{Rule, Steps};
use cowslip_console::size;

/// A write.
pub const WRITE_BYTES: u64 = 64 << 10;
/// A piece of a torrent.
pub const TORRENT_BYTES: u64 = 256 << 10;
/// Pace of each of 2 x 16 files of NFS clients in the mail that asked first, in bytes a second.
const NFS_PACE: u64 = 3 << 20;
/// Ratio of a file system's size to the size of the written data: the data is to fit into one of
/// the four allocation groups of XFS, with room for images and preallocated space.
const FILESYSTEM_TIMES: u64 = 6;
/// XFS refuses to be below 300 MiB, and its groups are to be larger than what is written in all
/// rows.
const FILESYSTEM_BYTES_MIN: u64 = 1 << 30;
/// Limits of the size that writers of a cell write together.
pub const BYTES_OF_A_CELL: RangeInclusive<u64> = 64 << 20..=1 << 42;

/// The steps that were proposed in that mail: doubling to 4 MiB, then half of the file up to 8 GiB.
pub const SEED_STEPS: Steps = Steps {
    ample_fraction: u64::MAX,
    max_bytes: 8 << 30,
    ..Steps::DYNAMIC
};

/// Size of the file systems that are made for cells that write `bytes` bytes.
pub fn filesystem_bytes(bytes: u64) -> u64 {
    (bytes * FILESYSTEM_TIMES).max(FILESYSTEM_BYTES_MIN)
}

/// How files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Files from beginning to end, and closed there.
    Stream,
    /// The same, opened and closed around every write, as an NFS server does.
    Reopen,
    /// Files of 1 to 64 MiB one after the other.
    Small,
    /// Files from beginning to end, cut to nothing half way, and once more.
    Restart,
    /// Files in pieces in random order.
    Torrent,
    /// Files from beginning to end, on a file system that has a quarter more room than that.
    Full,
}

impl Pattern {
    fn name(self) -> &'static str {
        match self {
            Pattern::Stream => "stream",
            Pattern::Reopen => "reopen",
            Pattern::Small => "small",
            Pattern::Restart => "restart",
            Pattern::Torrent => "torrent",
            Pattern::Full => "full",
        }
    }
}

/// Target of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Raw files, with O_DIRECT.
    Direct,
    /// Raw files, through the page cache.
    Buffered,
    /// qcow2 images, by this engine, directly.
    Qcow2,
    /// Space: it is allocated, and no data written.
    Space,
}

impl Target {
    fn name(self) -> &'static str {
        match self {
            Target::Direct => "direct",
            Target::Buffered => "buffered",
            Target::Qcow2 => "qcow2",
            Target::Space => "space",
        }
    }
}

/// Help for the layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Help {
    /// No help: the file system's own ways. For images, the policy `sparse`.
    None,
    /// Space ahead, by the writer itself, through the library.
    Rule(Rule),
    /// An extent size hint.
    Hint(u32),
    /// `cowslip grow` beside the writers.
    Grow,
    /// All space at the beginning.
    Whole,
}

impl Help {
    fn name(self) -> String {
        match self {
            Help::None | Help::Rule(Rule::None) => "none".to_string(),
            Help::Rule(Rule::Fixed(bytes)) => format!("fixed={}", short(bytes)),
            Help::Rule(rule) if rule == Rule::Dynamic(SEED_STEPS) => "seed".to_string(),
            Help::Rule(Rule::Dynamic(_)) => "dynamic".to_string(),
            Help::Hint(bytes) => format!("hint={}", short(u64::from(bytes))),
            Help::Grow => "grow".to_string(),
            Help::Whole => "whole".to_string(),
        }
    }
}

fn short(bytes: u64) -> String {
    size::human(bytes).replace(" MiB", "M").replace(" GiB", "G")
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// How it is written.
    pub pattern: Pattern,
    /// Target.
    pub target: Target,
    /// Number of files that are written at a time.
    pub writers: usize,
    /// Help for the layout.
    pub help: Help,
    /// Bytes a second of each writer.
    pub pace: Option<u64>,
}

impl Cell {
    fn new(pattern: Pattern, target: Target, writers: usize, help: Help) -> Cell {
        Cell {
            pattern,
            target,
            writers,
            help,
            pace: None,
        }
    }

    /// Its name.
    pub fn name(&self) -> String {
        let pace = match self.pace {
            Some(pace) => format!(" at {}B/s", short(pace)),
            None => String::new(),
        };
        let Cell {
            pattern,
            target,
            writers,
            help,
            ..
        } = self;
        let (pattern, target, help) = (pattern.name(), target.name(), help.name());
        format!("{pattern} {target} {writers} {help}{pace}")
    }
}

/// All cells.
pub fn all() -> Vec<Cell> {
    use Pattern::{Full, Reopen, Restart, Small, Stream, Torrent};
    use Target::{Buffered, Direct, Qcow2};
    const DYNAMIC: Help = Help::Rule(Rule::DYNAMIC);
    const FIXED: Help = Help::Rule(Rule::Fixed(1 << 20));
    let mut cells = Vec::new();
    for writers in [4, 16, 64] {
        for help in [Help::None, Help::Hint(1 << 20), FIXED, DYNAMIC, Help::Grow] {
            cells.push(Cell::new(Stream, Direct, writers, help));
        }
        for help in [Help::None, DYNAMIC] {
            cells.push(Cell::new(Stream, Buffered, writers, help));
        }
        for help in [Help::None, DYNAMIC] {
            cells.push(Cell::new(Stream, Qcow2, writers, help));
        }
    }
    for (target, help) in [
        (Direct, Help::None),
        (Direct, DYNAMIC),
        (Direct, Help::Grow),
    ]
    .into_iter()
    .chain([(Buffered, Help::None), (Buffered, DYNAMIC)])
    {
        cells.push(Cell::new(Reopen, target, 16, help));
        for pace in [None, Some(NFS_PACE)] {
            cells.push(Cell {
                pace,
                ..Cell::new(Reopen, target, 32, help)
            });
        }
    }
    for pattern in [Small, Restart] {
        for (target, help) in [
            (Direct, Help::None),
            (Direct, DYNAMIC),
            (Buffered, Help::None),
        ] {
            cells.push(Cell::new(pattern, target, 16, help));
        }
    }
    for help in [Help::None, Help::Whole] {
        cells.push(Cell::new(Torrent, Direct, 4, help));
    }
    for help in [DYNAMIC, Help::Grow] {
        cells.push(Cell::new(Full, Direct, 16, help));
    }
    cells
}

/// Returns the cells that write nothing.
pub fn of_space() -> Vec<Cell> {
    let rules = [
        Rule::Fixed(1 << 30),
        Rule::Dynamic(SEED_STEPS),
        Rule::DYNAMIC,
    ];
    let cells = [4, 16, 64].into_iter().flat_map(|writers| {
        let cell = move |rule| Cell::new(Pattern::Stream, Target::Space, writers, Help::Rule(rule));
        rules.map(cell)
    });
    cells.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_cells_have_one_name() {
        let cells = all().into_iter().chain(of_space());
        let mut names: Vec<String> = cells.map(|cell| cell.name()).collect();
        assert!(names.contains(&"stream direct 4 dynamic".to_string()));
        assert!(names.contains(&"stream direct 64 fixed=1M".to_string()));
        assert!(names.contains(&"reopen buffered 32 none at 3MB/s".to_string()));
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
