//! The rows of first writes again, and the writing process is killed in the middle. Each write that
//! had ended before a flush that had ended must be there, as QEMU reads the image, and `qemu-img
//! check` must find no corruption; leaks are allowed. The image is then written and killed again,
//! three times in all.
//!
//! The kernel lives on, so that what was handed to it is there: this shows that a flush that has
//! ended left nothing in the process. That it reached the disk is shown by the simulator and by
//! `tests/power_cut.rs`.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cowslip_testbed::{Place, populate};

use super::super::remove;
use crate::run;

const DISK_BYTES: u64 = 1 << 30;
const BLOCK_BYTES: u64 = 4096;
/// Coprime to the disk's blocks, so that each is visited once; its neighbours are far apart.
const STEP_BYTES: u64 = 410_005_504;
const PATTERN: u8 = 165;
/// Writes to a flush; up to 32 are in flight.
const INTERVALS: [u64; 3] = [1, 32, 256];
/// Of those that run before it is killed.
const REQUESTS: u64 = 256 * 200;
const LIVES: u64 = 3;
/// So long may a killed process's lock be there.
const LOCK_TIME_MAX: Duration = Duration::from_secs(10);

/// How an image is made.
struct Shape {
    cluster_bytes: u64,
    extended_l2: &'static str,
    policy: &'static str,
    backed: bool,
}

impl Shape {
    fn all() -> Vec<Shape> {
        let mut shapes = Vec::new();
        for cluster_bytes in (12..=21).map(|bits| 1 << bits) {
            for extended_l2 in ["off", "on"] {
                // Extended entries begin at 16 KiB.
                if extended_l2 == "on" && cluster_bytes < 16 << 10 {
                    continue;
                }
                for backed in [false, true] {
                    // Either policy meets each of the other options.
                    let policies = ["contiguous", "sparse"];
                    shapes.push(Shape {
                        cluster_bytes,
                        extended_l2,
                        policy: policies[(shapes.len() / 2 + usize::from(backed)) % 2],
                        backed,
                    });
                }
            }
        }
        shapes
    }

    fn name(&self) -> String {
        let Shape {
            cluster_bytes,
            extended_l2,
            policy,
            backed,
        } = self;
        let backed = if *backed { "backed" } else { "empty" };
        format!("{cluster_bytes}, extended_l2={extended_l2}, {policy}, {backed}")
    }
}

/// The totals of the runs.
#[derive(Default)]
pub struct Verdict {
    /// Processes that were killed.
    pub kills: u64,
    /// Writes that had to be there, and were.
    pub writes: u64,
}

/// Kills writers on images of all shapes.
///
/// # Errors
/// A write is lost, or an image is corrupt: which one.
pub fn run(binary: &Path, place: &Place) -> Result<Verdict, String> {
    let directory = &place.directory;
    let backing = directory.join("killed-backing");
    populate(&backing, DISK_BYTES)?;
    let mut verdict = Verdict::default();
    for (number, shape) in Shape::all().iter().enumerate() {
        let killed = Killed {
            binary,
            image: directory.join("killed.qcow2"),
        };
        killed.create(shape, &backing)?;
        let interval = INTERVALS[number % INTERVALS.len()];
        for life in 0..LIVES {
            let context = |e| format!("{}, life {life}: {e}", shape.name());
            let start = (number as u64 * LIVES + life) * 7 * BLOCK_BYTES;
            let ended = killed.write_and_kill(start, interval).map_err(context)?;
            killed.judge(start, ended).map_err(context)?;
            verdict.kills += 1;
            verdict.writes += ended;
        }
        remove(&killed.image)?;
    }
    remove(&backing)?;
    Ok(verdict)
}

struct Killed<'a> {
    binary: &'a Path,
    image: PathBuf,
}

impl Killed<'_> {
    fn create(&self, shape: &Shape, backing: &Path) -> Result<(), String> {
        let mut create = Command::new(self.binary);
        create.args(["create", "-q", "-f", "qcow2", "-o"]);
        create.arg(format!(
            "cluster_size={},extended_l2={},alloc_policy={}",
            shape.cluster_bytes, shape.extended_l2, shape.policy
        ));
        if shape.backed {
            create.args(["-F", "raw", "-b"]).arg(backing);
        }
        create.arg(&self.image).arg(DISK_BYTES.to_string());
        run::output(&mut create).map(drop)
    }

    /// Writes until some flushes have ended, and kills the process. Returns how many writes had
    /// ended before the last flush that it reported.
    fn write_and_kill(&self, start: u64, interval: u64) -> Result<u64, String> {
        let mut command = Command::new(self.binary);
        command.args(["bench", "-w", "-f", "qcow2", "-t", "none", "-i", "io_uring"]);
        command.args(["--tell-flushes", &format!("--pattern={PATTERN}")]);
        for (option, value) in [
            ("--count", REQUESTS),
            ("--depth", interval.min(32)),
            ("--flush-interval", interval),
            ("--offset", start),
            ("--step-size", STEP_BYTES),
        ] {
            command.arg(format!("{option}={value}"));
        }
        let mut child = command
            .arg(&self.image)
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("cannot run {}: {e}", run::describe(&command)))?;
        let outcome = kill_among_writes(&mut child, start);
        let status = child.wait().map_err(|e| e.to_string())?;
        let output = outcome?;
        match status.success() {
            true => Err("it ended before it was killed".to_string()),
            false => last_flush(&output),
        }
    }

    /// The kernel ends the ring of a killed process, and with it the lock on the image, when the
    /// process is gone: the lock may be there for a moment yet.
    fn check(&self) -> Result<Output, String> {
        let start = Instant::now();
        loop {
            let mut check = Command::new("qemu-img");
            check.args(["check", "-f", "qcow2"]).arg(&self.image);
            let checked = check.output().map_err(|e| e.to_string())?;
            let words = String::from_utf8_lossy(&checked.stderr);
            if !words.contains("lock") || start.elapsed() > LOCK_TIME_MAX {
                return Ok(checked);
            }
            sleep(Duration::from_millis(5));
        }
    }

    fn judge(&self, start: u64, ended: u64) -> Result<(), String> {
        let checked = self.check()?;
        // 3: leaks alone.
        if !matches!(checked.status.code(), Some(0 | 3)) {
            let words = [&checked.stdout[..], &checked.stderr[..]].concat();
            let words = String::from_utf8_lossy(&words);
            return Err(format!("qemu-img check: {}\n{words}", checked.status));
        }
        let mut reads = String::new();
        for number in 0..ended {
            let offset = (start + number * STEP_BYTES) % DISK_BYTES;
            writeln!(reads, "read -P {PATTERN} {offset} {BLOCK_BYTES}")
                .expect("a string takes all");
        }
        let mut read = Command::new("qemu-io");
        read.args(["-r", "-f", "qcow2"]).arg(&self.image);
        let said = with_input(&mut read, reads)?;
        let came = said.matches("read 4096/4096 bytes").count() as u64;
        let differ = said.matches("Pattern verification failed").count();
        match came == ended && differ == 0 {
            true => Ok(()),
            false => Err(format!(
                "of {ended} flushed writes {came} could be read, and {differ} were not there"
            )),
        }
    }
}

/// Kills the process at a moment that differs from run to run, and returns its output.
fn kill_among_writes(child: &mut Child, seed: u64) -> Result<String, String> {
    let stdout = child.stdout.take().ok_or("no standard output")?;
    let mut lines = BufReader::new(stdout);
    let mut output = String::new();
    // The first two lines are the announcement.
    for _ in 0..2 + 1 + seed / BLOCK_BYTES % 23 {
        lines.read_line(&mut output).map_err(|e| e.to_string())?;
    }
    sleep(Duration::from_micros(seed / BLOCK_BYTES % 11 * 300));
    child.kill().map_err(|e| e.to_string())?;
    std::io::Read::read_to_string(&mut lines, &mut output).map_err(|e| e.to_string())?;
    Ok(output)
}

/// Returns the number of requests in the last whole line about a flush.
fn last_flush(output: &str) -> Result<u64, String> {
    let whole = output.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let mut numbers = whole.lines().filter_map(|line| {
        let line = line.strip_prefix("Flushed after ")?;
        line.strip_suffix(" requests")?.parse().ok()
    });
    let last = numbers.next_back();
    last.ok_or_else(|| format!("no flush was reported:\n{output}"))
}

/// Runs a program with this input and returns its output, whatever its exit code.
fn with_input(command: &mut Command, input: String) -> Result<String, String> {
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|e| format!("cannot run {}: {e}", run::describe(command)))?;
    let mut stdin = child.stdin.take().ok_or("no standard input")?;
    // It answers while it is asked: neither pipe may fill up.
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    let written = writer.join().map_err(|_| "the writer panicked")?;
    written.map_err(|e| format!("qemu-io does not listen: {e}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_count() {
        let output =
            "Sending\nFlushed after 32 requests\nFlushed after 64 requests\nFlushed after 96";
        assert_eq!(last_flush(output), Ok(64));
        assert_eq!(
            last_flush("Flushed after 96 requests"),
            Err("no flush was reported:\nFlushed after 96 requests".to_string())
        );
    }

    #[test]
    fn each_block_is_visited_once() {
        let blocks = DISK_BYTES / BLOCK_BYTES;
        // An odd step goes round a power of two.
        assert!(blocks.is_power_of_two() && STEP_BYTES.is_multiple_of(BLOCK_BYTES));
        assert_eq!(STEP_BYTES / BLOCK_BYTES % 2, 1);
    }
}
