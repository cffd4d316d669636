//! `bench compact`: the space of dead clusters comes back, by `cowslip compact` in place and by
//! `qemu-img convert` to a copy, which is what there is without it. Images are aged by QEMU: their
//! data is written again under a snapshot, which is deleted then, or written in no order, which
//! `compact --defragment` and the copy put right. A run finds none of the image in the page cache,
//! and its time includes a flush of the file system.
//!
//! Input and output are what the device of the file system counts from before the run until it is
//! flushed; on a device that others use at the same time these columns are theirs, too. The
//! additional space is the most that the file system had less than before the run, as far as a look
//! every two milliseconds shows it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cowslip_console::error::{CommandError, failed};
use cowslip_testbed::machine::Root;
use cowslip_testbed::stack::Stack;
use rustix::fs::{Advice, fadvise, syncfs};

use crate::cell::{Cell, Contestant};
use crate::description::Description;
use crate::peer_path;
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::run::run;
use crate::scale::Scale;
use crate::stage::{Stage, Turn, by_program, mebibytes};

const READ: Column = column("read MiB", 0);
const WRITTEN: Column = column("written MiB", 0);
const ADDED: Column = column("more MiB", 0);
const BEFORE: Column = column("MiB before", 0);
const AFTER: Column = column("MiB after", 0);
/// Runs of clusters that follow on each other on the disk and in the file.
const RUNS_BEFORE: Column = column("runs before", 0);
const RUNS_AFTER: Column = column("runs after", 0);

/// Time between two looks at the free space.
const LOOK: Duration = Duration::from_millis(2);
/// Bytes that are written at once.
const WRITE_BYTES: u64 = 1 << 20;
/// The same of a disk in no order.
const SCATTERED_BYTES: u64 = 256 << 10;

/// The table.
pub const TABLE: Description = Description {
    disk_bytes: 1 << 30,
    quick_disk_bytes: 256 << 20,
    policies: &["auto"],
    peers: &[Peer::QemuImg],
    // The aged image, the one of the run, a copy of it.
    files_bytes: |disk_bytes| disk_bytes * 7,
    rate: column("runs/s", 3),
    measure,
    has_depths: false,
    has_requests: false,
    ..Description::usual("compact", cells)
};

/// How an image is aged.
#[derive(Clone, Copy)]
enum Age {
    /// One of each group of this number of parts of its disk is written again.
    Dead(u64),
    /// Its disk is written in no order.
    NoOrder,
}

const AGES: [(&str, Age); 4] = [
    ("a half is dead", Age::Dead(1)),
    ("a third is dead", Age::Dead(2)),
    ("a ninth is dead", Age::Dead(8)),
    ("in no order", Age::NoOrder),
];

fn cells(_scale: &Scale) -> Vec<Cell> {
    use Contestant::{Cowslip, CowslipInOrder, QemuImg};
    let cell = |(name, age): &(&str, Age)| {
        let contestants: &[Contestant] = match age {
            Age::Dead(_) => &[Cowslip("auto"), CowslipInOrder, QemuImg],
            // There is nothing that could come back.
            Age::NoOrder => &[CowslipInOrder, QemuImg],
        };
        Cell::of_work((*name).to_string(), contestants)
    };
    AGES.iter().map(cell).collect()
}

/// Makes one run.
///
/// # Errors
/// A program fails, or the disk is another one afterwards.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let name = cell.name();
    let (_, how) = AGES
        .iter()
        .find(|(age, _)| *age == name)
        .expect("it is one");
    let size = stage.disk_bytes();
    let aged = stage.shared_files(&name, |directory| age(&directory.join("aged"), size, *how))?;
    let (image, copy) = (aged.join("image"), aged.join("copy"));
    let of_aged = aged.join("aged");
    copy_bytes(&of_aged, &image).map_err(|e| failed("copy", &of_aged, &e))?;
    evict(&image).map_err(|e| failed("evict", &image, &e))?;
    let mut command = stage.program(turn.contestant);
    let result = match turn.contestant.is_cowslip() {
        true => {
            command.args(["compact", "-q"]);
            if turn.contestant == Contestant::CowslipInOrder {
                command.arg("--defragment");
            }
            command.arg(&image);
            &image
        }
        false => {
            command.args(["convert", "-f", "qcow2", "-O", "qcow2"]);
            command.arg(&image).arg(&copy);
            &copy
        }
    };
    let before = allocated(&image)?;
    let runs_before = runs_of(stage, &of_aged)?;
    let used = Used::begin(&aged).map_err(|e| failed("look at", &aged, &e))?;
    let done = used.of(|| {
        let mut done = run(&mut command)?;
        let begun = Instant::now();
        let flushed = File::open(&aged).and_then(|aged| Ok(syncfs(&aged)?));
        flushed.map_err(|e| failed("flush", &aged, &e))?;
        done.seconds += begun.elapsed().as_secs_f64();
        Ok(done)
    });
    let (done, input, output, added) = done?;
    same_disk(&of_aged, result)?;
    let (after, runs_after) = (allocated(result)?, runs_of(stage, result)?);
    for left in [&image, &copy] {
        drop(fs::remove_file(left));
    }
    let mut measurement = by_program(1.0, &done, &command);
    measurement.add(READ, input.map(mebibytes));
    measurement.add(WRITTEN, output.map(mebibytes));
    measurement.add(ADDED, Some(mebibytes(added)));
    measurement.add(BEFORE, Some(mebibytes(before)));
    measurement.add(AFTER, Some(mebibytes(after)));
    measurement.add(RUNS_BEFORE, runs_before);
    measurement.add(RUNS_AFTER, runs_after);
    Ok(measurement)
}

fn allocated(file: &Path) -> Result<u64, CommandError> {
    let found = fs::metadata(file).map_err(|e| failed("look at", file, &e))?;
    Ok(found.blocks() * 512)
}

/// The runs of an image's disk in its file.
fn runs_of(stage: &Stage<'_>, image: &Path) -> Result<Option<f64>, CommandError> {
    let mut plan = stage.program(Contestant::Cowslip("auto"));
    plan.args(["compact", "--plan", "--json"]).arg(image);
    let plan: serde_json::Value = serde_json::from_str(&run(&mut plan)?.output)
        .map_err(|e| CommandError::new(format!("The plan of a compaction is no JSON: {e}")))?;
    Ok(plan["extents"].as_f64())
}

/// Makes an image of which all is written: in no order, or some of it again, under a snapshot that
/// is deleted then, whose space the host keeps.
fn age(image: &Path, size: u64, age: Age) -> Result<(), CommandError> {
    let name = image.display();
    let mut create = peer_path::command("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(image);
    run(create.arg(size.to_string()))?;
    let in_order = |stride: u64| (0..size / WRITE_BYTES).step_by(stride as usize).collect();
    let stride = match age {
        Age::Dead(stride) => stride,
        Age::NoOrder => {
            write(
                image,
                (scattered(size / SCATTERED_BYTES), SCATTERED_BYTES),
                1,
            )?;
            return flush(image);
        }
    };
    write(image, (in_order(1), WRITE_BYTES), 1)?;
    let mut snapshot = peer_path::command("qemu-img");
    run(snapshot.args(["snapshot", "-c", "dead"]).arg(image))?;
    write(image, (in_order(stride), WRITE_BYTES), stride)?;
    let options = "driver=qcow2,discard=ignore,pass-discard-snapshot=off,file.driver=file";
    let mut delete = peer_path::command("qemu-img");
    delete.args(["snapshot", "--image-opts", "-d", "dead"]);
    run(delete.arg(format!("{options},file.filename={name}")))?;
    flush(image)
}

/// The numbers of this many parts, of which hardly two follow on each other.
fn scattered(parts: u64) -> Vec<u64> {
    let step = (parts * 3 / 5..).find(|step| is_coprime(*step, parts));
    let step = step.unwrap_or(1);
    (0..parts).map(|number| number * step % parts).collect()
}

fn is_coprime(one: u64, other: u64) -> bool {
    let (mut one, mut other) = (one, other);
    while other > 0 {
        (one, other) = (other, one % other);
    }
    one == 1
}

fn flush(image: &Path) -> Result<(), CommandError> {
    File::open(image)
        .and_then(|image| image.sync_all())
        .map_err(|e| failed("flush", image, &e))
}

/// Writes parts of a disk, each of the same number of bytes, one after the other.
fn write(image: &Path, (parts, bytes): (Vec<u64>, u64), turn: u64) -> Result<(), CommandError> {
    for parts in parts.chunks(256) {
        let mut write = peer_path::command("qemu-io");
        write.args(["-f", "qcow2", "-t", "unsafe"]);
        for part in parts {
            let byte = 1 + (part * 7 + turn) % 250;
            let at = part * bytes;
            write.args(["-c", &format!("write -q -P {byte} {at} {bytes}")]);
        }
        run(write.arg(image))?;
    }
    Ok(())
}

/// Refuses an outcome whose disk is another one.
fn same_disk(one: &Path, other: &Path) -> Result<(), CommandError> {
    let mut compare = peer_path::command("qemu-img");
    compare.args(["compare", "-q", "-f", "qcow2", "-F", "qcow2"]);
    run(compare.arg(one).arg(other)).map(drop)
}

/// Copies a file so that no file system lets the two share their space.
fn copy_bytes(from: &Path, to: &Path) -> std::io::Result<()> {
    let (mut from, mut to) = (File::open(from)?, File::create(to)?);
    let mut buf = vec![0; WRITE_BYTES as usize];
    loop {
        match from.read(&mut buf)? {
            0 => return Ok(()),
            len => to.write_all(&buf[..len])?,
        }
    }
}

/// Has the image on the device, and not in the page cache.
fn evict(image: &Path) -> std::io::Result<()> {
    let file = File::open(image)?;
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// The state of a file system before a run.
struct Used<'a> {
    directory: &'a Path,
    /// Bytes that the device has read and written.
    moved: Option<(u64, u64)>,
    free: u64,
}

impl<'a> Used<'a> {
    fn begin(directory: &'a Path) -> std::io::Result<Used<'a>> {
        syncfs(&File::open(directory)?)?;
        Ok(Used {
            directory,
            moved: moved_by_device(directory),
            free: free_bytes(directory)?,
        })
    }

    /// Runs something: its outcome, what the device has read and written for it, and how much less
    /// space there was meanwhile.
    fn of<T>(
        &self,
        work: impl FnOnce() -> Result<T, CommandError>,
    ) -> Result<(T, Option<u64>, Option<u64>, u64), CommandError> {
        let (ends, least) = (AtomicBool::new(false), AtomicU64::new(self.free));
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    if let Ok(free) = free_bytes(self.directory) {
                        least.fetch_min(free, Ordering::Relaxed);
                    }
                    std::thread::sleep(LOOK);
                }
            });
            let outcome = work();
            ends.store(true, Ordering::Relaxed);
            outcome
        })?;
        let moved = moved_by_device(self.directory).zip(self.moved);
        let (input, output) = moved
            .map(|(now, before)| (now.0 - before.0, now.1 - before.1))
            .unzip();
        let added = self.free - least.into_inner();
        Ok((outcome, input, output, added))
    }
}

fn free_bytes(directory: &Path) -> std::io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_bfree * found.f_frsize)
}

/// Bytes that the device of a file system has read and written; `None` if it has none of its own.
fn moved_by_device(directory: &Path) -> Option<(u64, u64)> {
    let stack = Stack::look(&Root::default(), directory).ok()?;
    let device = &stack.devices.first()?.name;
    let text = fs::read_to_string(format!("/sys/class/block/{device}/stat")).ok()?;
    sectors(&text).map(|(read, written)| (read * 512, written * 512))
}

/// Sectors that were read and written, as the kernel's documentation of `stat` has them.
fn sectors(stat: &str) -> Option<(u64, u64)> {
    let fields: Vec<&str> = stat.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse().ok();
    Some((number(2)?, number(6)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_says_how_much_it_has_moved() {
        let stat = "   25  0  200  13   7  1  56  40  0  52  53  0  0  0  0  0  0\n";
        assert_eq!(sectors(stat), Some((200, 56)));
        assert_eq!(sectors("nothing"), None);
    }

    #[test]
    fn scattered_parts_are_all_there_and_apart() {
        for parts in [1024, 1000, 7] {
            let mut found = scattered(parts);
            assert!(found.windows(2).all(|two| two[0] + 1 != two[1]), "{parts}");
            found.sort_unstable();
            assert!(found.into_iter().eq(0..parts));
        }
    }

    #[test]
    fn the_least_space_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let used = Used::begin(directory.path()).unwrap();
        let file = directory.path().join("file");
        let done = used.of(|| {
            fs::write(&file, vec![7; 32 << 20]).unwrap();
            std::thread::sleep(20 * LOOK);
            fs::remove_file(&file).unwrap();
            Ok(5)
        });
        let (outcome, .., added) = done.unwrap();
        assert_eq!(outcome, 5);
        // Others write there, too.
        assert!(added > 8 << 20, "{added}");
    }
}
