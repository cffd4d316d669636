//! A run: files are written side by side in a directory of their own, synced, looked at, read back,
//! and removed.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::{RemovedOnInterrupt, TreeRemovedOnInterrupt};
use cowslip_extents::AlignedFile;
use cowslip_extents::Perfect;
use cowslip_queue::fiemap;
use cowslip_queue::fiemap::beyond_end_bytes;
use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};
use rustix::process::Signal;

use crate::run::Running;

use super::cell::{Cell, Help, Pattern, Target, WRITE_BYTES};
use super::space;
use super::stream::{Shared, Writers, watch_unused};

/// Reads of the way back.
const READ_BYTES: usize = 1 << 20;
/// Room of a nearly full file system, in per cent of what is written.
const FULL_ROOM_PERCENT: u64 = 125;

/// A file of a run.
#[derive(Clone, Copy, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Layout {
    /// Length in bytes.
    pub size: u64,
    /// Mapping records.
    pub extents: u64,
    /// The fewest there could be.
    pub perfect: u64,
}

/// A run.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Measured {
    /// Files in order of names.
    pub files: Vec<Layout>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Bytes that were written, those of files that were cut and begun again included.
    pub written_bytes: u64,
    /// Seconds until all was written, closed and durable.
    pub write_seconds: f64,
    /// Seconds of reading one file after the other, from the device; 0 if there is no data.
    pub read_seconds: f64,
    /// The most that was allocated behind ends at a time, as seen every 20 ms; `None` of images,
    /// whose length is that of their space.
    pub peak_unused: Option<u64>,
    /// Space behind ends after all files were closed.
    pub lost: u64,
    /// Writes that found no space while some lay ahead of other files' ends.
    pub short_of_space: u64,
    /// Allocation groups with data, where groups are known.
    pub groups: Option<u64>,
}

/// Where runs are made.
pub struct Bench<'a> {
    /// A directory of their file system.
    pub directory: &'a Path,
    /// Path of this program.
    pub cowslip: &'a Path,
    /// Bytes that all writers of a cell write together.
    pub bytes: u64,
}

fn failed(what: &str, error: &io::Error) -> CommandError {
    let words = cowslip::error::system_words(error);
    CommandError::new(format!("Could not {what}: {words}"))
}

impl Bench<'_> {
    /// Whether the file system takes the cell's extent size hint.
    pub fn can(&self, cell: &Cell) -> bool {
        let Help::Hint(bytes) = cell.help else {
            return true;
        };
        let path = self.directory.join("hint-probe");
        let taken = File::create(&path)
            .and_then(|file| cowslip_queue::attributes::set_extent_hint(&file, bytes));
        drop(fs::remove_file(&path));
        taken.is_ok()
    }

    /// Makes a run.
    ///
    /// # Errors
    /// A write or a program fails.
    pub fn measure(&self, cell: &Cell, seed: u64) -> Result<Measured, CommandError> {
        let directory = self.directory.join("files");
        fs::create_dir(&directory).map_err(|e| failed("make a directory", &e))?;
        let removed = TreeRemovedOnInterrupt::new(&directory);
        let filler = match cell.pattern {
            Pattern::Full => Some(self.fill()?),
            _ => None,
        };
        let outcome = self.measure_in(&directory, cell, seed);
        fs::remove_dir_all(&directory).map_err(|e| failed("remove files", &e))?;
        drop(removed);
        if let Some(filler) = filler {
            fs::remove_file(filler.path()).map_err(|e| failed("remove a file", &e))?;
        }
        sync(self.directory)?;
        outcome
    }

    /// Fills the file system but for a little more room than the written data needs.
    fn fill(&self) -> Result<RemovedOnInterrupt, CommandError> {
        let filler = RemovedOnInterrupt::new(&self.directory.join("filler"));
        let fill = || {
            let file = File::create(filler.path())?;
            let stats = rustix::fs::fstatvfs(&file)?;
            let free = stats.f_bavail.saturating_mul(stats.f_frsize);
            let room = self.bytes / 100 * FULL_ROOM_PERCENT;
            let bytes = free.saturating_sub(room).max(1);
            Ok(fallocate(&file, FallocateFlags::empty(), 0, bytes)?)
        };
        fill().map_err(|e: io::Error| failed("fill the file system", &e))?;
        Ok(filler)
    }

    fn measure_in(
        &self,
        directory: &Path,
        cell: &Cell,
        seed: u64,
    ) -> Result<Measured, CommandError> {
        let grow = match cell.help {
            Help::Grow => Some(self.start_grow(directory)?),
            _ => None,
        };
        let stop = Arc::new(AtomicU64::new(0));
        let unused = watch_unused(directory.to_path_buf(), Arc::clone(&stop));
        let shared = Arc::new(Shared::default());
        let images = match cell.target {
            Target::Qcow2 => self.make_images(directory, cell)?,
            _ => Vec::new(),
        };
        let begun = Instant::now();
        let written = match cell.target {
            Target::Qcow2 => self.write_images(images),
            Target::Space => space::allocate(cell, directory, seed)
                .map_err(|e| failed(&format!("allocate '{}'", cell.name()), &e)),
            Target::Direct | Target::Buffered => {
                let writers = Writers {
                    cell,
                    directory,
                    bytes: self.bytes_of_each(cell),
                    seed,
                };
                let files = writers.run(&shared);
                files.map_err(|e| failed(&format!("write '{}'", cell.name()), &e))
            }
        };
        let synced = sync(directory);
        let write_seconds = begun.elapsed().as_secs_f64();
        stop.store(1, Ordering::Relaxed);
        let peak_unused = unused.join().unwrap_or(0);
        if let Some(grow) = grow {
            grow.signal(Signal::TERM)?;
            grow.wait()?;
        }
        let mut files = written?;
        synced?;
        files.sort();
        let mut measured = Measured {
            files: Vec::new(),
            bytes: 0,
            written_bytes: 0,
            write_seconds,
            read_seconds: 0.0,
            peak_unused: (cell.target != Target::Qcow2).then_some(peak_unused),
            lost: 0,
            short_of_space: shared.short_of_space.load(Ordering::Relaxed),
            groups: None,
        };
        look(&files, &mut measured)?;
        measured.written_bytes = match (cell.target, cell.pattern) {
            (Target::Space, _) => 0,
            // Half of it twice.
            (_, Pattern::Restart) => measured.bytes + measured.bytes / 2,
            _ => measured.bytes,
        };
        if cell.target != Target::Space {
            measured.read_seconds = read_all(&files).map_err(|e| failed("read back", &e))?;
        }
        Ok(measured)
    }

    fn bytes_of_each(&self, cell: &Cell) -> u64 {
        self.bytes / cell.writers as u64 / WRITE_BYTES * WRITE_BYTES
    }

    fn start_grow(&self, directory: &Path) -> Result<Running, CommandError> {
        let mut command = Command::new(self.cowslip);
        command.args(["grow", "--idle", "0.2"]).arg(directory);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut grow = Running::start("grow", &mut command)?;
        // Its first line says that it watches; nobody reads the others, which fit into the pipe.
        let mut first = [0];
        let mut stdout = grow.child.stdout.as_mut();
        let read = stdout.as_mut().map(|stdout| stdout.read_exact(&mut first));
        match read {
            Some(Ok(())) => Ok(grow),
            _ => Err(CommandError::new("grow says nothing")),
        }
    }

    /// Empty images of what each writer will write.
    fn make_images(&self, directory: &Path, cell: &Cell) -> Result<Vec<PathBuf>, CommandError> {
        let policy = match cell.help {
            Help::None => "alloc_policy=sparse",
            _ => "alloc_policy=contiguous",
        };
        let size = self.bytes_of_each(cell).to_string();
        let images: Vec<PathBuf> = (0..cell.writers)
            .map(|number| directory.join(format!("{number}.qcow2")))
            .collect();
        for image in &images {
            let mut create = Command::new(self.cowslip);
            create.args(["create", "-q", "-f", "qcow2", "-o", policy]);
            crate::run::run(create.arg(image).arg(&size))?;
        }
        Ok(images)
    }

    /// A process for each image, all at once.
    fn write_images(&self, images: Vec<PathBuf>) -> Result<Vec<PathBuf>, CommandError> {
        let bytes = self.bytes / images.len().max(1) as u64 / WRITE_BYTES * WRITE_BYTES;
        let count = (bytes / WRITE_BYTES).to_string();
        let cache = match cowslip_testbed::supports_direct_io(self.directory) {
            Ok(true) => "none",
            _ => "writeback",
        };
        let mut all = Vec::new();
        for image in &images {
            let mut bench = Command::new(self.cowslip);
            bench.args(["bench", "-w", "-q", "-f", "qcow2", "-d", "1", "-s", "64k"]);
            bench.args(["-t", cache, "-c", &count]).arg(image);
            bench.stdin(Stdio::null()).stdout(Stdio::null());
            all.push(Running::start("bench", &mut bench)?);
        }
        for bench in all {
            bench.wait()?;
        }
        Ok(images)
    }
}

fn sync(directory: &Path) -> Result<(), CommandError> {
    let synced = File::open(directory).and_then(|file| Ok(rustix::fs::syncfs(&file)?));
    synced.map_err(|e| failed("sync", &e))
}

/// Layouts, and what lies behind ends.
fn look(files: &[PathBuf], measured: &mut Measured) -> Result<(), CommandError> {
    let mut groups = HashSet::new();
    let mut group_bytes = None;
    for path in files {
        let host = AlignedFile::open(&path.display().to_string(), None)?;
        let file = File::open(path).map_err(|e| failed("open", &e))?;
        group_bytes = group_bytes.or_else(|| group_bytes_of(&host.on.kind, &file));
        let mut perfect = Perfect::new(host.on.limits);
        host.walk(fiemap::Sync::First, &mut |record| {
            // Space behind the end is reported separately.
            if record.logical >= host.size {
                return Ok(());
            }
            perfect.push(&record);
            if let Some(group_bytes) = group_bytes {
                groups.insert(record.physical / group_bytes);
            }
            Ok(())
        })?;
        measured.files.push(Layout {
            size: host.size,
            extents: perfect.expressed(),
            perfect: perfect.count(),
        });
        measured.bytes += host.size;
        let beyond = beyond_end_bytes(&file).map_err(|e| failed("map", &e))?;
        measured.lost += beyond.unwrap_or(0);
    }
    measured.groups = group_bytes.map(|_| groups.len() as u64);
    Ok(())
}

/// Bytes of an allocation group, or of a block group, which one block of bits describes.
fn group_bytes_of(kind: &str, file: &File) -> Option<u64> {
    match kind {
        "xfs" => cowslip_queue::fibmap::xfs_group_bytes(file).ok(),
        "ext4" => {
            let block_bytes = rustix::fs::fstatvfs(file).ok()?.f_bsize;
            Some(block_bytes * 8 * block_bytes)
        }
        _ => None,
    }
    .filter(|bytes| *bytes > 0)
}

/// Reads all files from the device, one after the other; the time it took.
fn read_all(files: &[PathBuf]) -> io::Result<f64> {
    let open = |path: &PathBuf| {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, rustix::fs::Mode::empty())
    };
    for path in files {
        fadvise(open(path)?, 0, None, Advice::DontNeed)?;
    }
    let mut buffer = vec![0; READ_BYTES];
    let begun = Instant::now();
    for path in files {
        let mut file = File::from(open(path)?);
        while file.read(&mut buffer)? > 0 {}
    }
    Ok(begun.elapsed().as_secs_f64())
}
