//! `--record`: a trace of the requests that clients make (`cowslip-trace`), beside their serving.

use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use cowslip::Disk;
use cowslip::file::host::{Driver, HostOptions, host_file_of};
use cowslip::file::{BlockFile, Claim, ReadSet, Sharing};
use cowslip_cmdline::open::claim_file;
use cowslip_console::error::CommandError;
use cowslip_graph::Turn;
use cowslip_trace::{Limits, Recorder, RecordingDisk, Writer};

use super::log::{Log, Severity};

/// Pause between two writes of what was noted. The recorder's memory holds what comes meanwhile.
const PAUSE: Duration = Duration::from_millis(200);

/// A file for a trace, and the most bytes that it gets.
#[derive(Clone, Debug)]
pub struct Record {
    /// The file.
    pub path: PathBuf,
    /// The most bytes of it.
    pub file_bytes: u64,
}

/// A trace that is being written.
pub struct Recording {
    recorder: Arc<Recorder>,
    /// One writes at a time: the task that does so regularly, or the end.
    writer: Rc<Turn<Writer>>,
    path: PathBuf,
    log: Log,
}

impl Record {
    /// Opens the file, which none of `read` may be, and begins the trace of this disk.
    ///
    /// # Errors
    /// `Could not record to 'x': why`.
    pub async fn begin(
        &self,
        disk: &dyn Disk,
        read: &ReadSet,
        log: &Log,
    ) -> Result<Recording, CommandError> {
        let limits = Limits {
            file_bytes: self.file_bytes,
            ..Limits::default()
        };
        let recorder = Arc::new(Recorder::new(limits));
        let failed = |why: String| {
            let path = self.path.display();
            CommandError::new(format!("Could not record to '{path}': {why}"))
        };
        let file = self.open().map_err(|error| failed(error.to_string()))?;
        read.check(file.as_ref())?;
        // Another server that records there would have its trace cut.
        let claimed = claim_file(&file, Claim::raw(true, Sharing::Frozen));
        claimed.map_err(|error| failed(error.to_string()))?;
        let writer = Writer::begin(file, Arc::clone(&recorder), disk).await;
        let writer = writer.map_err(|error| failed(cowslip::error::system_words(&error)))?;
        let writer = Rc::new(Turn::new(writer));
        write_regularly(Rc::downgrade(&writer), self.path.clone(), log.clone());
        Ok(Recording {
            recorder,
            writer,
            path: self.path.clone(),
            log: log.clone(),
        })
    }

    fn open(&self) -> cowslip::Result<Arc<dyn BlockFile>> {
        let mut options = std::fs::OpenOptions::new();
        // Readable by its owner alone: a trace says much about a guest. Its old content stays until
        // the file is known to be no image's.
        options.read(true).write(true).create(true).truncate(false);
        let opened = options.mode(0o600).open(&self.path);
        let name = self.path.to_string_lossy();
        let file = opened.map_err(|error| cowslip::Error::io(name.to_string(), error))?;
        let options = HostOptions {
            writable: true,
            driver: Driver::File,
            ..HostOptions::default()
        };
        host_file_of(OwnedFd::from(file), &name, &options)
    }
}

/// Writes what was noted, until the recording is dropped or fails.
fn write_regularly(writer: Weak<Turn<Writer>>, path: PathBuf, log: Log) {
    cowslip_queue::spawn(async move {
        loop {
            cowslip_queue::sleep(PAUSE).await;
            let Some(writer) = writer.upgrade() else {
                return;
            };
            if let Err(error) = writer.take().await.write_out().await {
                return report_failure(&error, &path, &log);
            }
        }
    });
}

fn report_failure(error: &std::io::Error, path: &Path, log: &Log) {
    let (path, why) = (path.display(), cowslip::error::system_words(error));
    log.write(format_args!("the recording to '{path}' has ended: {why}"));
}

impl Recording {
    /// The disk, whose requests are noted.
    pub fn of(&self, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(RecordingDisk::new(disk, Arc::clone(&self.recorder)))
    }

    /// Writes what is left.
    pub async fn finish(self) {
        let finished = self.writer.take().await.finish().await;
        match finished {
            Ok(bytes) => self.log.report(Severity::Usual, || {
                format!("recorded {bytes} bytes to '{}'", self.path.display())
            }),
            Err(error) => report_failure(&error, &self.path, &self.log),
        }
    }
}
