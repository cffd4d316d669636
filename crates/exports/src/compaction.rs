//! `--compact-background`: the image's file is compacted while clients leave the disk alone.
//!
//! Moves wait while a request is under way, and until none has come for some time; then they keep
//! the rate. After a compaction another one begins when clients have changed something, and some
//! more time has passed.

use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cowslip::job::{Attendant, Job, Moment};
use cowslip::qcow2::compact::CompactOptions;
use cowslip::{Error, Image};
use cowslip_cmdline::job::Pace;
use cowslip_console::output::counted;
use cowslip_console::size;
use cowslip_graph::{LiveDisk, Quiet, Turn};

use super::log::{Log, Severity};

/// How compactions go behind clients.
#[derive(Clone, Copy, Debug)]
pub struct Background {
    /// Bytes that move in a second.
    pub rate: u64,
    /// Time for which clients have to leave the disk alone before anything moves.
    pub idle: Duration,
    /// Shortest time between two compactions: each reads all tables.
    pub pause: Duration,
    /// The disk's clusters get the guest's order, too.
    pub defragment: bool,
}

/// Time between two looks at whether another one is due.
const LOOK: Duration = Duration::from_secs(1);
/// Longest wait before it is asked whether the work is to end.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// Compactions beside clients, until [`Compacting::end`].
pub struct Compacting {
    job: Job,
    /// Held by a compaction.
    turn: Rc<Turn<()>>,
}

/// A compaction that has ended.
#[derive(Clone, Copy)]
struct Ended {
    at: Instant,
    /// The number of the requests by which clients had changed something when it began.
    changes: u64,
    /// It found no space, which may come back though no client changes anything.
    without_space: bool,
}

/// How a compaction ends.
enum Outcome {
    Done,
    /// Space may come back, and the guest goes on as well.
    WithoutSpace,
    /// There will not be another one.
    End,
}

/// Lets clients go first, then keeps the pace.
struct Behind {
    quiet: Quiet,
    pace: Pace,
}

impl Attendant for Behind {
    fn pace(&self, bytes: u64) -> Option<Moment> {
        let wait = self.quiet.wait().or_else(|| self.pace.wait(bytes))?;
        Some(Box::pin(cowslip_queue::blocking(move || {
            std::thread::sleep(wait.min(WAIT_MAX));
        })))
    }
}

impl Compacting {
    /// Begins to compact an image beside the clients of a disk.
    pub fn begin(
        image: &Arc<Image>,
        disk: &Arc<LiveDisk>,
        (background, log): (Background, Log),
    ) -> Compacting {
        let job = Job::attended(Behind {
            quiet: Quiet::new(vec![Arc::clone(disk)], background.idle),
            pace: Pace::new(background.rate),
        });
        let compacting = Compacting {
            job: job.clone(),
            turn: Rc::new(Turn::new(())),
        };
        let (image, disk) = (Arc::downgrade(image), Arc::clone(disk));
        let turn = Rc::clone(&compacting.turn);
        let options = CompactOptions {
            // A guest that fills them would only have them allocated once more.
            subclusters: false,
            defragment: background.defragment,
            // Its data would be written again and again. What moves much must give it back.
            whole_extents: background.defragment,
            ..CompactOptions::default()
        };
        cowslip_queue::spawn(async move {
            let mut before: Option<Ended> = None;
            loop {
                let guard = turn.take().await;
                let changes = changes_of(&disk);
                let is_due = before.is_none_or(|ended| {
                    let has_work = ended.without_space || changes != ended.changes;
                    has_work && ended.at.elapsed() >= background.pause
                });
                if job.is_cancelled() {
                    return;
                }
                if is_due {
                    let without_space = match compact(&image, (&options, &job), &log).await {
                        Outcome::Done => false,
                        Outcome::WithoutSpace => true,
                        Outcome::End => return,
                    };
                    before = Some(Ended {
                        at: Instant::now(),
                        changes,
                        without_space,
                    });
                }
                drop(guard);
                cowslip_queue::sleep(LOOK).await;
            }
        });
        compacting
    }

    /// Ends it: what was moved is given back.
    pub async fn end(self) {
        self.job.cancel();
        drop(self.turn.take().await);
    }
}

/// Requests that may have changed something.
fn changes_of(disk: &LiveDisk) -> u64 {
    let statistics = disk.statistics();
    statistics.writes.requests + statistics.discards.requests
}

/// Compacts an image once.
async fn compact(
    image: &Weak<Image>,
    (options, job): (&CompactOptions, &Job),
    log: &Log,
) -> Outcome {
    let Some(image) = image.upgrade() else {
        return Outcome::End;
    };
    match image.compact(options, job).await {
        Ok(done) => {
            log.report(Severity::Usual, || {
                let order = done.defragmentation.map_or(String::new(), |order| {
                    let (now, before) = (counted(order.extents, "extent"), order.extents_before);
                    format!("; the disk lies in {now} instead of {before}")
                });
                format!(
                    "compacted: the file has {} instead of {}, {} moved{order}",
                    size::human(done.file_bytes),
                    size::human(done.file_bytes_before),
                    size::human(done.moved_bytes),
                )
            });
            Outcome::Done
        }
        Err(Error::Cancelled) => Outcome::End,
        Err(error) => {
            log.report(Severity::Failure, || {
                format!("cannot be compacted: {error}")
            });
            match &error {
                Error::Io { source, .. } if source.kind() == ErrorKind::StorageFull => {
                    Outcome::WithoutSpace
                }
                _ => Outcome::End,
            }
        }
    }
}
