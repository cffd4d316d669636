//! Parses the output of other tools that list extents.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::run;

/// An extent, all in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the file.
    pub logical: u64,
    /// Length.
    pub len: u64,
    /// Offset on the device; 0 for none.
    pub physical: u64,
    /// Flags by name.
    pub flags: Vec<String>,
}

/// `filefrag -v` in bytes: the extents of each file.
pub fn filefrag(files: &[PathBuf]) -> Vec<Vec<Extent>> {
    let text = run(Command::new("filefrag").args(["-b1", "-v"]).args(files));
    let mut out: Vec<Vec<Extent>> = Vec::new();
    for line in text.lines() {
        if line.starts_with("File size of ") {
            out.push(Vec::new());
        }
        // `   0:        0..    4095:   1000..  5095:   4096:   2000: last,eof`
        let columns: Vec<&str> = line.split(':').map(str::trim).collect();
        let [index, logical, physical, len, rest @ ..] = &columns[..] else {
            continue;
        };
        if index.parse::<u64>().is_err() {
            continue;
        }
        let first = |range: &str| {
            let first = range.split("..").next().unwrap_or_default();
            first.trim().parse::<u64>().expect("a number")
        };
        let flags = rest.last().copied().unwrap_or_default().split(',');
        out.last_mut()
            .expect("a file's name comes first")
            .push(Extent {
                logical: first(logical),
                len: len.parse().expect("a length"),
                physical: first(physical),
                flags: flags.map(str::to_string).collect(),
            });
    }
    assert_eq!(out.len(), files.len(), "filefrag reports each file");
    out
}

/// `xfs_bmap -vvp`, which counts in sectors. Without a number of extents xfs_bmap 6.1.0 stops at
/// the 31st line of a file that has 32.
pub fn xfs_bmap(file: &Path) -> Vec<Extent> {
    let mut command = Command::new("xfs_bmap");
    let text = run(command.args(["-vvp", "-n", "100000"]).arg(file));
    let mut out = Vec::new();
    for line in text.lines() {
        // `   0: [0..7]:  96..103  0 (96..103)  8 000000`
        let Some((_, rest)) = line.split_once(": [") else {
            continue;
        };
        let (range, rest) = rest.split_once("]:").expect("a range of the file");
        let (first, last) = range.split_once("..").expect("a range has two ends");
        let first: u64 = first.parse().expect("a number");
        let last: u64 = last.parse().expect("a number");
        let words: Vec<&str> = rest.split_whitespace().collect();
        if words[0] == "hole" {
            continue;
        }
        let place = words[0].split("..").next().unwrap_or_default();
        let bits = u32::from_str_radix(words.last().expect("flags"), 8).unwrap_or(0);
        let names = [(0o100_000, "shared"), (0o10_000, "unwritten")];
        let flags = names.iter().filter(|(bit, _)| bits & bit != 0);
        out.push(Extent {
            logical: first * 512,
            len: (last + 1 - first) * 512,
            physical: place.parse::<u64>().expect("a place") * 512,
            flags: flags.map(|(_, name)| (*name).to_string()).collect(),
        });
    }
    out
}

/// The files of a btrfs, by inode, as `btrfs inspect-internal dump-tree` shows its main tree.
pub fn btrfs_tree(device: &Path) -> BTreeMap<u64, Vec<Extent>> {
    let mut dump = Command::new("btrfs");
    let text = run(dump
        .args(["inspect-internal", "dump-tree", "-t", "5"])
        .arg(device));
    let mut out: BTreeMap<u64, Vec<Extent>> = BTreeMap::new();
    let mut key = None;
    let (mut kind, mut disk) = (0, 0);
    let mut part = (0, 0);
    for line in text.lines().map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        if line.starts_with("item ") {
            key = None;
            if let Some(start) = line.find("key (")
                && let Some(inner) = line[start + 5..].split(')').next()
                && let [inode, "EXTENT_DATA", offset] =
                    inner.split_whitespace().collect::<Vec<_>>()[..]
            {
                key = Some((
                    inode.parse().expect("an inode"),
                    offset.parse().expect("an offset"),
                ));
            }
            continue;
        }
        let Some((inode, offset)) = key else { continue };
        if line.starts_with("generation ") && words.get(2) == Some(&"type") {
            kind = number(3);
        } else if line.starts_with("inline extent data") {
            out.entry(inode).or_default().push(Extent {
                logical: offset,
                len: 0,
                physical: 0,
                flags: vec!["inline".to_string()],
            });
        } else if line.starts_with("extent data disk byte")
            || line.starts_with("prealloc data disk byte")
        {
            disk = number(4);
        } else if line.starts_with("extent data offset") || line.starts_with("prealloc data offset")
        {
            part = (number(3), number(5));
            if kind == 2 {
                push(&mut out, (inode, offset), (disk, part), "unwritten");
            }
        } else if line.starts_with("extent compression") && kind == 1 {
            let flag = if number(2) == 0 { "" } else { "encoded" };
            push(&mut out, (inode, offset), (disk, part), flag);
        }
    }
    out
}

fn push(
    out: &mut BTreeMap<u64, Vec<Extent>>,
    (inode, logical): (u64, u64),
    (disk, (into, len)): (u64, (u64, u64)),
    flag: &str,
) {
    // A hole has no disk byte; the place within what is compressed is not known.
    if disk == 0 {
        return;
    }
    let physical = if flag == "encoded" { disk } else { disk + into };
    let flags = Some(flag).filter(|flag| !flag.is_empty());
    out.entry(inode).or_default().push(Extent {
        logical,
        len,
        physical,
        flags: flags.map(str::to_string).into_iter().collect(),
    });
}

/// Extents that go on from each other as one.
pub fn joined(extents: Vec<Extent>) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    for extent in extents {
        if let Some(last) = out.last_mut()
            && last.flags == extent.flags
            && last.logical + last.len == extent.logical
            && last.physical + last.len == extent.physical
        {
            last.len += extent.len;
            continue;
        }
        out.push(extent);
    }
    out
}

/// For each file: gaps between its runs on the device with something of another in them, and all
/// gaps.
pub fn interleaving(files: &[Vec<Extent>]) -> Vec<(u64, u64)> {
    let of = |file: &Vec<Extent>| {
        let mut runs: Vec<(u64, u64)> = file.iter().map(|e| (e.physical, e.len)).collect();
        runs.sort_unstable();
        runs
    };
    let shares = files.iter().enumerate().map(|(index, file)| {
        let (mut shared, mut gaps) = (0, 0);
        for pair in of(file).windows(2) {
            let (start, end) = (pair[0].0 + pair[0].1, pair[1].0);
            if start >= end {
                continue;
            }
            gaps += 1;
            let others = files
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != index);
            let between = others
                .flat_map(|(_, other)| other)
                .any(|e| e.physical < end && e.physical + e.len > start);
            shared += u64::from(between);
        }
        (shared, gaps)
    });
    shares.collect()
}
