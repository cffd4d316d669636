//! Random operations on a mounted file and on a model of its bytes, after the idea of fsx: reads
//! and writes through the page cache's rules and past them, by maps, with holes, zeroes, space,
//! growth, flushes and opening again, in any order.
//!
//! `COWSLIP_FUSE_SECONDS=n` goes on for longer, `COWSLIP_FUSE_SEED=n` repeats a run's choices.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use cowslip_queue::BufMut;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use super::{Mounted, SIZE, can_mount};
use crate::support::rng::Rng;
use crate::support::{cowslip, peers_are_installed, run};

/// The disk grows up to this.
const SIZE_MAX: u64 = 2 * SIZE;
/// Direct I/O has this alignment.
const BLOCK: u64 = 512;

/// The file, and its bytes as they have to be.
struct Both {
    path: PathBuf,
    plain: File,
    direct: File,
    bytes: Vec<u8>,
    rng: Rng,
    has_maps: bool,
}

fn opened(path: &PathBuf, flags: OFlags) -> File {
    let mut options = File::options();
    options.read(true).write(true);
    options.custom_flags(flags.bits().cast_signed());
    options.open(path).unwrap()
}

impl Both {
    fn new(path: PathBuf, seed: u64) -> Both {
        Both {
            plain: opened(&path, OFlags::empty()),
            direct: opened(&path, OFlags::DIRECT),
            path,
            bytes: vec![0; SIZE as usize],
            rng: Rng::new(seed),
            has_maps: peers_are_installed(&["xfs_io"]),
        }
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// A range within the file.
    fn range(&mut self) -> (u64, u64) {
        let offset = self.rng.below(self.size());
        let most = [4096, 100_000, 700_000][self.rng.below(3) as usize];
        (offset, (1 + self.rng.below(most)).min(self.size() - offset))
    }

    /// The same, as direct I/O takes it.
    fn blocks(&mut self) -> (u64, u64) {
        let (offset, len) = self.range();
        let start = offset / BLOCK * BLOCK;
        let end = (offset + len).next_multiple_of(BLOCK).min(self.size());
        (start, end - start)
    }

    fn model(&mut self, (offset, len): (u64, u64)) -> &mut [u8] {
        &mut self.bytes[offset as usize..(offset + len) as usize]
    }

    fn pattern(&mut self, len: u64) -> Vec<u8> {
        let (byte, step) = (self.rng.below(256) as u8, 1 + self.rng.below(40) as usize);
        let mut bytes = vec![byte; len as usize];
        bytes.iter_mut().step_by(step).for_each(|it| *it ^= 0x55);
        bytes
    }

    fn check(&mut self, range: (u64, u64), bytes: &[u8], how: &str) {
        let expected = self.model(range);
        let wrong = bytes.iter().zip(&*expected).position(|(a, b)| a != b);
        assert!(bytes.len() == expected.len(), "{how} {range:?}");
        assert_eq!(wrong.map(|at| range.0 + at as u64), None, "{how} {range:?}");
    }

    fn read(&mut self) {
        if self.rng.below(2) == 0 {
            let range = self.range();
            let mut bytes = vec![0; range.1 as usize];
            self.plain.read_exact_at(&mut bytes, range.0).unwrap();
            return self.check(range, &bytes, "read");
        }
        let range = self.blocks();
        let mut bytes = BufMut::zeroed(range.1 as usize);
        self.direct.read_exact_at(&mut bytes, range.0).unwrap();
        self.check(range, &bytes, "direct read");
    }

    fn write(&mut self) {
        let is_direct = self.rng.below(2) == 0;
        let range = match is_direct {
            true => self.blocks(),
            false => self.range(),
        };
        let bytes = self.pattern(range.1);
        match is_direct {
            true => {
                let mut aligned = BufMut::zeroed(bytes.len());
                aligned.copy_from_slice(&bytes);
                self.direct.write_all_at(&aligned, range.0).unwrap();
            }
            false => self.plain.write_all_at(&bytes, range.0).unwrap(),
        }
        self.model(range).copy_from_slice(&bytes);
    }

    /// Runs commands of xfs_io, which maps the range; its output.
    fn mapped(&self, (offset, len): (u64, u64), commands: &[String]) -> String {
        let mut program = Command::new("xfs_io");
        program.args(["-c", &format!("mmap -rw {offset} {len}")]);
        for command in commands {
            program.args(["-c", command]);
        }
        run(program.arg(&self.path))
    }

    /// A map is of whole pages; the last one may reach beyond the end.
    fn pages(&mut self) -> (u64, u64) {
        let (offset, len) = self.range();
        let start = offset / 4096 * 4096;
        (start, (offset + len).min(start + 50_000) - start)
    }

    fn write_map(&mut self) {
        let pages = self.pages();
        let start = pages.0 + self.rng.below(pages.1);
        let len = 1 + self.rng.below(pages.0 + pages.1 - start);
        let byte = self.rng.below(256) as u8;
        let mut commands = vec![format!("mwrite -S {byte:#x} {start} {len}")];
        if self.rng.below(2) == 0 {
            // Without, the pages are written back later, or before they are read.
            commands.push(format!("msync -s {} {}", pages.0, pages.1));
        }
        self.mapped(pages, &commands);
        self.model((start, len)).fill(byte);
    }

    fn read_map(&mut self) {
        let mut pages = self.pages();
        // Of one byte in a page the program (6.1) prints nothing.
        pages.1 = pages.1.min(8192).next_multiple_of(2);
        let command = format!("mread -v {} {}", pages.0, pages.1);
        let said = self.mapped(pages, &[command]);
        let bytes = said.lines().flat_map(|line| {
            // An offset, the bytes, and the same as text, with two spaces between.
            let numbers = line.split("  ").nth(1).unwrap_or_default();
            let numbers = numbers.split(' ');
            numbers.map(|number| u8::from_str_radix(number, 16).unwrap())
        });
        let bytes: Vec<u8> = bytes.take(pages.1 as usize).collect();
        self.check(pages, &bytes, "map");
    }

    fn space(&mut self) {
        let range = self.range();
        let (keep, zero) = (FallocateFlags::KEEP_SIZE, FallocateFlags::ZERO_RANGE);
        let kinds = [
            FallocateFlags::empty(),
            keep,
            keep | FallocateFlags::PUNCH_HOLE,
            zero,
            zero | keep,
        ];
        let kind = kinds[self.rng.below(5) as usize];
        fallocate(&self.plain, kind, range.0, range.1).unwrap();
        if kind.intersects(zero | FallocateFlags::PUNCH_HOLE) {
            self.model(range).fill(0);
        }
    }

    fn grow(&mut self) {
        let size = self.size();
        assert!(self.plain.set_len(size - 1).is_err(), "it does not shrink");
        if size >= SIZE_MAX || self.rng.below(8) != 0 {
            return;
        }
        let more = size + 1 + self.rng.below(200_000);
        match self.rng.below(3) {
            0 => self.plain.set_len(more).unwrap(),
            1 => {
                let flags = FallocateFlags::empty();
                fallocate(&self.plain, flags, size - 10, more - size + 10).unwrap();
            }
            _ => self.plain.write_all_at(&[0x77], more - 1).unwrap(),
        }
        let is_written = self.plain.metadata().unwrap().len();
        assert_eq!(is_written, more.next_multiple_of(512));
        self.bytes.resize(is_written as usize, 0);
        let mut last = [0];
        self.plain.read_exact_at(&mut last, more - 1).unwrap();
        assert!(matches!(last[0], 0 | 0x77));
        self.bytes[more as usize - 1] = last[0];
    }

    /// Checks that holes read as zeroes.
    fn look_for_holes(&mut self) {
        let size = self.size();
        let at = self.rng.below(size);
        let next = |from| match seek(self.plain.as_fd(), from) {
            Ok(found) => found,
            Err(error) => {
                assert_eq!(error, Errno::NXIO, "{from:?}");
                size
            }
        };
        let data = next(SeekFrom::Data(at));
        let hole = next(SeekFrom::Hole(at));
        assert!((at..=size).contains(&data) && (at..=size).contains(&hole));
        assert!(data == at || hole == at, "it is one of them");
        let after = next(SeekFrom::Data(hole.min(size - 1))).max(hole);
        for (start, end) in [(at, data), (hole, after)] {
            let hole = self.model((start, end - start));
            assert!(hole.iter().all(|byte| *byte == 0), "{start}..{end}");
        }
    }

    fn flush_or_open_again(&mut self) {
        match self.rng.below(4) {
            0 => self.plain.sync_all().unwrap(),
            1 => self.direct.sync_data().unwrap(),
            2 => self.plain = opened(&self.path, OFlags::empty()),
            _ => self.direct = opened(&self.path, OFlags::DIRECT | OFlags::DSYNC),
        }
    }

    fn step(&mut self) {
        match self.rng.below(32) {
            0..10 => self.read(),
            10..20 => self.write(),
            20..25 => self.space(),
            25 => self.grow(),
            26..28 => self.look_for_holes(),
            28 if self.has_maps => self.write_map(),
            29 if self.has_maps => self.read_map(),
            _ => self.flush_or_open_again(),
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn random_operations_have_the_effect_of_those_on_a_plain_file() {
    if can_mount() {
        check(Mounted::new(&["--growable", "--threads", "2"]));
    }
}

/// Makes random operations on a file of [`SIZE`] bytes that grows, and compares all of it in the
/// end.
pub fn check(mounted: Mounted) {
    let seconds = number("COWSLIP_FUSE_SECONDS").unwrap_or(5);
    let seed = number("COWSLIP_FUSE_SEED").unwrap_or(std::process::id().into());
    println!("COWSLIP_FUSE_SEED={seed}");
    let mut both = Both::new(mounted.file(), seed);
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < Duration::from_secs(seconds) {
        both.step();
        count += 1;
    }
    assert!(count > 100);
    let size = both.size();
    let mut bytes = vec![0; size as usize];
    both.plain.read_exact_at(&mut bytes, 0).unwrap();
    both.check((0, size), &bytes, "all of it");
    let raw = mounted.dir.path().join("model.raw");
    std::fs::write(&raw, &both.bytes).unwrap();
    drop(both);
    let (image, dir) = mounted.unmount();
    run(cowslip().args(["compare"]).args([&image, &raw]));
    run(cowslip().arg("check").arg(&image));
    if peers_are_installed(&["qemu-img"]) {
        let mut compare = Command::new("qemu-img");
        run(compare
            .args(["compare", "-f", "qcow2", "-F", "raw"])
            .args([&image, &raw]));
        run(Command::new("qemu-img").arg("check").arg(&image));
    }
    drop(dir);
}
