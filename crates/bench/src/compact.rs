//! `bench compact`: the space of dead clusters comes back, by `cowslip compact` in place and by
//! `qemu-img convert` to a copy, which is what there is without it. Images are aged by QEMU: their
//! data is written again under a snapshot, which is deleted then. A run finds none of the image in
//! the page cache, and includes a flush of the file system.
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
use std::time::Duration;

use cowslip_console::error::{CommandError, failed};
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

/// Time between two looks at the free space.
const LOOK: Duration = Duration::from_millis(2);
/// Bytes that are written at once.
const WRITE_BYTES: u64 = 1 << 20;

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

/// How an image is aged: of each `stride` parts of its disk one is written again.
const AGES: [(&str, u64); 3] = [
    ("a half is dead", 1),
    ("a third is dead", 2),
    ("a ninth is dead", 8),
];

fn cells(_scale: &Scale) -> Vec<Cell> {
    let contestants = [Contestant::Cowslip("auto"), Contestant::QemuImg];
    let cell = |(name, _): &(&str, u64)| Cell::of_work((*name).to_string(), &contestants);
    AGES.iter().map(cell).collect()
}

/// Makes one run.
///
/// # Errors
/// A program fails, or the disk is another one afterwards.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let name = cell.name();
    let (_, stride) = AGES
        .iter()
        .find(|(age, _)| *age == name)
        .expect("it is one");
    let size = stage.disk_bytes();
    let aged = stage.shared_files(&name, |directory| {
        age(&directory.join("aged"), size, *stride)
    })?;
    let (image, copy) = (aged.join("image"), aged.join("copy"));
    let of_aged = aged.join("aged");
    copy_bytes(&of_aged, &image).map_err(|e| failed("copy", &of_aged, &e))?;
    evict(&image).map_err(|e| failed("evict", &image, &e))?;
    let mut command = stage.program(turn.contestant);
    let result = match turn.contestant.is_cowslip() {
        true => {
            command.args(["compact", "-q"]).arg(&image);
            &image
        }
        false => {
            command.args(["convert", "-f", "qcow2", "-O", "qcow2"]);
            command.arg(&image).arg(&copy);
            &copy
        }
    };
    let before = allocated(&image)?;
    let used = Used::begin(&aged).map_err(|e| failed("look at", &aged, &e))?;
    let done = used.of(|| {
        let done = run(&mut command)?;
        let flushed = File::open(&aged).and_then(|aged| Ok(syncfs(&aged)?));
        flushed.map_err(|e| failed("flush", &aged, &e))?;
        Ok(done)
    });
    let (done, input, output, added) = done?;
    same_disk(&of_aged, result)?;
    let after = allocated(result)?;
    for left in [&image, &copy] {
        drop(fs::remove_file(left));
    }
    let mut measurement = by_program(1.0, &done, &command);
    measurement.add(READ, input.map(mebibytes));
    measurement.add(WRITTEN, output.map(mebibytes));
    measurement.add(ADDED, Some(mebibytes(added)));
    measurement.add(BEFORE, Some(mebibytes(before)));
    measurement.add(AFTER, Some(mebibytes(after)));
    Ok(measurement)
}

fn allocated(file: &Path) -> Result<u64, CommandError> {
    let found = fs::metadata(file).map_err(|e| failed("look at", file, &e))?;
    Ok(found.blocks() * 512)
}

/// Makes an image of which all is written, and of each `stride` parts one again, under a snapshot
/// that is deleted then, whose space the host keeps.
fn age(image: &Path, size: u64, stride: u64) -> Result<(), CommandError> {
    let name = image.display();
    let mut create = peer_path::command("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(image);
    run(create.arg(size.to_string()))?;
    write(image, size, 1)?;
    let mut snapshot = peer_path::command("qemu-img");
    run(snapshot.args(["snapshot", "-c", "dead"]).arg(image))?;
    write(image, size, stride)?;
    let options = "driver=qcow2,discard=ignore,pass-discard-snapshot=off,file.driver=file";
    let mut delete = peer_path::command("qemu-img");
    delete.args(["snapshot", "--image-opts", "-d", "dead"]);
    run(delete.arg(format!("{options},file.filename={name}")))?;
    File::open(image)
        .and_then(|image| image.sync_all())
        .map_err(|e| failed("flush", image, &e))
}

/// Writes one of each `stride` parts of a disk.
fn write(image: &Path, size: u64, stride: u64) -> Result<(), CommandError> {
    let parts: Vec<u64> = (0..size / WRITE_BYTES).step_by(stride as usize).collect();
    for parts in parts.chunks(256) {
        let mut write = peer_path::command("qemu-io");
        write.args(["-f", "qcow2", "-t", "unsafe"]);
        for part in parts {
            let byte = 1 + (part * 7 + stride) % 250;
            let at = part * WRITE_BYTES;
            write.args(["-c", &format!("write -q -P {byte} {at} {WRITE_BYTES}")]);
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
    let device = fs::metadata(directory).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
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
