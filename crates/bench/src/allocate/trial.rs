//! A run of one method on a new file, by the calls themselves, in this thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use cowslip_console::error::{CommandError, failed};
use cowslip_queue::space::{Calls, FillMethod, give};
use rustix::fs::FallocateFlags;
use rustix::time::{ClockId, clock_gettime};

use super::method::Method;
use super::results::{Measured, Run, SystemCalls};

impl Method {
    /// Makes the calls.
    fn call(self, file: &File, size: u64) -> io::Result<SystemCalls> {
        let (ftruncate, way) = match self {
            Method::Fallocate => {
                rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size)?;
                let one = SystemCalls {
                    fallocate: 1,
                    writes: Some(0),
                    ..SystemCalls::default()
                };
                return Ok(one);
            }
            Method::PosixFallocate => (0, Some(FillMethod::Library)),
            Method::Mmap => (1, Some(FillMethod::Mapping)),
            Method::Write(bytes) => {
                let chunk_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                (0, Some(FillMethod::Writes { chunk_bytes }))
            }
            Method::Ftruncate => (1, None),
        };
        if ftruncate > 0 {
            file.set_len(size)?;
        }
        let none = Calls {
            writes: Some(0),
            ..Calls::default()
        };
        let calls = way.map_or(Ok(none), |way| give(file, 0..size, way))?;
        Ok(SystemCalls {
            fallocate: calls.fallocate,
            ftruncate,
            writes: calls.writes,
            reads: calls.reads,
            mappings: calls.mappings,
        })
    }
}

/// Makes the file, measures, and looks at what it has got. A method that fails is a result; one
/// whose result cannot be seen is an error.
///
/// # Errors
/// The file cannot be made, or not be looked at.
pub fn run(path: &Path, method: Method, size: u64) -> Result<Run, CommandError> {
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).open(path);
    let file = file.map_err(|error| failed("create", path, &error))?;
    let faults = faults_of_this_thread();
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let called = method.call(&file, size);
    let call_seconds = start.elapsed().as_secs_f64();
    let calls = match called.and_then(|calls| file.sync_all().map(|()| calls)) {
        Ok(calls) => calls,
        Err(error) => return Ok(Run::Failed(cowslip::error::system_words(&error))),
    };
    let durable_seconds = start.elapsed().as_secs_f64();
    let cpu_seconds = cpu_seconds() - cpu;
    let faults = faults.zip(faults_of_this_thread());
    // XFS gives back then what it had allocated ahead of the end.
    drop(file);
    let metadata = path.metadata();
    let metadata = metadata.map_err(|error| failed("look at", path, &error))?;
    let figures = cowslip_extents::figures(&path.to_string_lossy())?;
    Ok(Run::Measured(Measured {
        call_seconds,
        durable_seconds,
        cpu_seconds,
        faults: faults.map(|(before, after)| after - before),
        calls,
        extents: figures.extents,
        perfect: figures.perfect,
        allocated_bytes: metadata.blocks() * 512,
    }))
}

/// CPU time of this thread so far, user and system.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Faults that were answered without reading a device (`minflt` of proc_pid_stat(5)).
fn faults_of_this_thread() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
    // The program's name may contain anything.
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_method_makes_the_file_and_counts_its_calls() {
        let dir = tempfile::tempdir().unwrap();
        let size = 1 << 20;
        for method in Method::all(&[4096, 3000]) {
            let path = dir.path().join(method.name().replace(' ', "-"));
            let run = match run(&path, method, size).unwrap() {
                Run::Measured(run) => run,
                Run::Failed(why) => panic!("{method:?}: {why}"),
            };
            assert_eq!(path.metadata().unwrap().len(), size, "{method:?}");
            let expected = match method {
                Method::Fallocate | Method::Ftruncate | Method::Mmap => Some(0),
                Method::Write(4096) => Some(256),
                Method::Write(3000) => Some(350),
                Method::Write(_) | Method::PosixFallocate => run.calls.writes,
            };
            assert_eq!(run.calls.writes, expected, "{method:?}");
            if method == Method::PosixFallocate {
                let SystemCalls {
                    fallocate, writes, ..
                } = run.calls;
                // libc's writes are counted where the system counts them for a thread.
                assert!(fallocate == 1 && writes.is_none_or(|count| count == 0 || count == 256));
            }
            assert!(run.durable_seconds >= run.call_seconds);
            assert_eq!(
                run.allocated_bytes >= size,
                method != Method::Ftruncate,
                "{method:?}"
            );
        }
    }

    #[test]
    fn a_file_that_is_there_is_not_measured() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let refused = run(file.path(), Method::Fallocate, 4096);
        assert!(refused.unwrap_err().to_string().contains("File exists"));
    }
}
