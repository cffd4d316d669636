//! Files of random layout, from a seed: several writers at once, so that their blocks lie between
//! each other.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

use crate::support::rng::Rng;
use crate::support::{number_from_environment, run};

/// The abilities of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Abilities {
    /// Writes and truncation.
    Writes,
    /// Also space ahead, and holes.
    Fallocate,
    /// Also sharing.
    Reflink,
    /// Also compression.
    Compression,
}

/// Files that are written at the same time.
const WRITERS: usize = 8;
const FILE_BYTES: u64 = 2 << 20;

fn seed() -> u64 {
    number_from_environment("COWSLIP_SEED").unwrap_or(0x5eed_e47e)
}

/// Makes `count` files in a directory.
pub fn make(dir: &Path, count: usize, abilities: Abilities) -> Vec<PathBuf> {
    let seed = seed();
    eprintln!("COWSLIP_SEED={seed:#x}");
    let mut rng = Rng::named(seed, &format!("{abilities:?}"));
    let mut paths = Vec::new();
    while paths.len() < count {
        let first = paths.len();
        let mut files = Vec::new();
        for index in first..(first + WRITERS).min(count) {
            let path = dir.join(format!("file-{index}"));
            files.push(open(&path));
            if abilities == Abilities::Compression && index % 4 == 0 {
                let mut set = Command::new("btrfs");
                run(set
                    .args(["property", "set"])
                    .arg(&path)
                    .args(["compression", "zstd"]));
            }
            paths.push(path);
        }
        for _ in 0..files.len() * 24 {
            let at = rng.below(files.len() as u64) as usize;
            let other = rng.below(files.len() as u64) as usize;
            step(
                &mut rng,
                &files[at],
                (&files[other], at != other),
                abilities,
            );
        }
    }
    // Small ones, empty ones, and one in one piece.
    if let [first, second, third, ..] = &paths[..] {
        open(first).set_len(0).expect("a file can be cut");
        write(&open(first), 0, b"a few bytes");
        open(second).set_len(0).expect("a file can be cut");
        open(third).set_len(0).expect("a file can be cut");
        write(&open(third), 0, &vec![7; 4 << 20]);
    }
    paths
}

fn open(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).expect("a file can be made")
}

fn write(file: &File, at: u64, bytes: &[u8]) {
    file.write_all_at(bytes, at).expect("there is room");
}

/// One change of a file.
fn step(rng: &mut Rng, file: &File, (other, differs): (&File, bool), abilities: Abilities) {
    let block = 4096;
    let at = rng.below(FILE_BYTES / block) * block;
    let len = (rng.below(12) + 1) * block;
    let kinds = match abilities {
        Abilities::Writes => 5,
        Abilities::Fallocate => 9,
        Abilities::Reflink | Abilities::Compression => 11,
    };
    match rng.below(kinds) {
        0..=2 => write(file, at + rng.below(block), &rng.bytes(len as usize)),
        3 => file.sync_data().expect("a file can be flushed"),
        4 if rng.once_in(4) => {
            let len = rng.below(FILE_BYTES);
            file.set_len(len).expect("a file can be cut");
        }
        4 => write(file, at, &vec![rng.next() as u8; len as usize]),
        5 => allocate(file, FallocateFlags::empty(), at, len * 2),
        6 => {
            let beyond = FILE_BYTES + at;
            allocate(file, FallocateFlags::KEEP_SIZE, beyond, len);
        }
        7 | 8 => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            allocate(file, flags, at, len);
        }
        _ if differs => share(file, other, at, len),
        _ => {}
    }
}

fn allocate(file: &File, flags: FallocateFlags, at: u64, len: u64) {
    fallocate(file, flags, at, len).expect("the file system can do it");
}

/// Shares a range, as `cp --reflink` shares whole files: XFS and btrfs copy ranges so.
fn share(from: &File, to: &File, at: u64, len: u64) {
    let (mut from_at, mut to_at) = (at, at);
    rustix::fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), len as usize)
        .expect("ranges can be copied");
}

/// Changes a file at random, until `stop` is set.
pub fn change_until(path: &Path, stop: &AtomicBool) {
    let mut rng = Rng::named(seed(), "busy");
    let file = open(path);
    let mut end = 0;
    while !stop.load(Ordering::Relaxed) {
        let at = rng.below(64) << 16;
        match rng.below(20) {
            0 => {
                file.set_len(0).expect("a file can be cut");
                end = 0;
            }
            1..4 => step(&mut rng, &file, (&file, false), Abilities::Writes),
            4..12 => write(&file, at, &[1; 1 << 12]),
            _ => {
                write(&file, end, &[2; 1 << 13]);
                end = (end + (1 << 14)) % (32 << 20);
            }
        }
    }
}

/// Two files or more that grow in turns, each piece flushed, so that they lie between each other.
pub fn write_in_turns(paths: &[PathBuf]) {
    let files: Vec<File> = paths.iter().map(|path| open(path)).collect();
    for turn in 0..64 {
        for file in &files {
            write(file, turn << 16, &[turn as u8 | 1; 1 << 16]);
            file.sync_data().expect("a file can be flushed");
        }
    }
}

/// Random writes, zeroes and discards in an image of 64 MiB, while another file takes space
/// between.
pub fn scribble_image(image: &Path) {
    let mut rng = Rng::named(seed(), "image");
    let beside = open(&image.with_extension("beside"));
    let mut at = 0;
    for _ in 0..8 {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "qcow2"]);
        for _ in 0..24 {
            let start = rng.below(1 << 14) << 12;
            let len = ((rng.below(40) + 1) << 12).min((64 << 20) - start);
            let command = match rng.below(8) {
                0 => format!("write -z {start} {len}"),
                1 => format!("discard {start} {len}"),
                _ => format!("write -P 5 {start} {len}"),
            };
            io.args(["-c", &command]);
        }
        run(io.arg(image));
        write(&beside, at, &[3; 1 << 16]);
        beside.sync_data().expect("a file can be flushed");
        at += 1 << 16;
    }
}
