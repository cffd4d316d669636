//! A vhost-user server that is killed under load and started again, or hands over to a successor:
//! how long no request completes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use cowslip_front::load::Load;
use cowslip_front::{EVENT_IDX, FLUSH, Front, FrontQueue, MEMORY_BYTES, VERSION_1, memory_file};
use serde_json::Value;

use super::{GAP, RING_SIZE, places, queue_load};
use crate::cell::{CellLoad, Way};
use crate::report::Measurement;
use crate::server::Server;

/// Features of the front end.
pub const FEATURES: u64 = VERSION_1 | EVENT_IDX | FLUSH;
/// Restarts of a run.
const RESTARTS: usize = 5;
/// Time under load before and after each.
const BETWEEN: Duration = Duration::from_millis(100);
/// A handover that takes longer has failed.
const HANDOVER_WITHIN: Duration = Duration::from_secs(20);

/// A front end under load, which keeps what a server that is killed leaves: the memory, the queue
/// and the table of requests in flight.
struct Endurance<I> {
    memory: OwnedFd,
    table: Option<(OwnedFd, Vec<u8>)>,
    connection: Option<(Front, FrontQueue)>,
    load: Load<I>,
    completed: u64,
    last: Instant,
    longest: Duration,
}

impl<I: Iterator<Item = u64>> Endurance<I> {
    fn new(load: Load<I>) -> io::Result<Endurance<I>> {
        Ok(Endurance {
            memory: memory_file(MEMORY_BYTES)?,
            table: None,
            connection: None,
            load,
            completed: 0,
            last: Instant::now(),
            longest: Duration::ZERO,
        })
    }

    /// Connects to a server, which goes on with what is in flight.
    fn connect(&mut self, socket: &Path) -> io::Result<()> {
        let queue = self.connection.take().map(|(_, queue)| queue);
        let mut front = Front::connect_with(socket, FEATURES, self.memory.try_clone()?)?;
        match &self.table {
            Some((table, description)) => front.set_inflight(table, description)?,
            None => self.table = Some(front.get_inflight(1, RING_SIZE)?),
        }
        let queue = match queue {
            Some(mut queue) => {
                // The place is in the ring and the table, as for QEMU, which does not know it.
                front.start_queue(&mut queue, 0)?;
                queue
            }
            None => front.queue(0, RING_SIZE)?,
        };
        self.connection = Some((front, queue));
        Ok(())
    }

    /// Keeps requests in flight until a condition holds.
    fn work(&mut self, mut is_over: impl FnMut() -> bool) -> io::Result<()> {
        let Some((_, queue)) = &mut self.connection else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        while !is_over() {
            self.load.submit(queue)?;
            let completed = self.load.take(queue, |_| ())?;
            if completed == 0 {
                // The server may share the processor.
                std::thread::yield_now();
                continue;
            }
            self.completed += completed as u64;
            self.longest = self.longest.max(self.last.elapsed());
            self.last = Instant::now();
        }
        Ok(())
    }

    fn work_for(&mut self, time: Duration) -> io::Result<()> {
        let end = Instant::now() + time;
        self.work(|| Instant::now() >= end)
    }
}

/// Restarts the server again and again under load.
///
/// # Errors
/// A request or a server fails.
pub fn gaps(
    server: &mut Server,
    way: Way,
    load: &CellLoad,
    disk_bytes: u64,
) -> Result<Measurement, CommandError> {
    let failed = |e: io::Error| CommandError::new(format!("The load fails: {e}"));
    let load = queue_load(load, places(load, disk_bytes)).map_err(failed)?;
    let mut endurance = Endurance::new(load).map_err(failed)?;
    endurance.connect(server.at()).map_err(failed)?;
    let begun = Instant::now();
    endurance.work_for(BETWEEN).map_err(failed)?;
    // What comes before the first completion is none of a restart's.
    endurance.longest = Duration::ZERO;
    for _ in 0..RESTARTS {
        match way {
            Way::HandedOver => handed_over(server, &mut endurance)?,
            _ => {
                server.kill_and_restart()?;
                endurance.connect(server.at()).map_err(failed)?;
            }
        }
        endurance.work_for(BETWEEN).map_err(failed)?;
    }
    let rate = endurance.completed as f64 / begun.elapsed().as_secs_f64();
    let mut measurement = Measurement::new(rate, Value::Null, None);
    measurement.add(GAP, Some(endurance.longest.as_secs_f64() * 1e3));
    Ok(measurement)
}

/// Hands over to a successor under load.
fn handed_over<I: Iterator<Item = u64>>(
    server: &mut Server,
    endurance: &mut Endurance<I>,
) -> Result<(), CommandError> {
    let mut before = server.hand_over()?;
    let begun = Instant::now();
    let mut status = None;
    let worked = endurance.work(|| {
        status = before.child.try_wait().ok().flatten();
        status.is_some() || begun.elapsed() > HANDOVER_WITHIN
    });
    worked.map_err(|e| CommandError::new(format!("The load fails: {e}")))?;
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(before.failure(&format!("ends with {status}"))),
        None => Err(before.failure("is not replaced in time")),
    }
}
