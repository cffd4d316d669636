//! Moves tasks and a simulated disk on, in an order drawn from a seed, until something ends.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use crate::disk::SimDisk;
use crate::executor::{Executor, Kind};
use crate::rng::Rng;

/// How the waiting for tasks ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// All foreground tasks have ended.
    Idle,
    /// The power has failed, or the process is to die.
    PowerOff,
    /// A failure.
    Failure,
}

/// More moves than any session needs.
const MOVES_MAX: u64 = 3_000_000;

/// Moves tasks and the disk on until `each` says so, or the power fails.
///
/// # Errors
/// If nothing moves any more, or no end is in sight.
pub(crate) fn drive(
    executor: &mut Executor,
    disk: &SimDisk,
    rng: &mut Rng,
    mut each: impl FnMut(&mut Executor, &mut Rng) -> Option<Stop>,
) -> Result<Stop, String> {
    for _ in 0..MOVES_MAX {
        if !disk.has_power() {
            return Ok(Stop::PowerOff);
        }
        if let Some(stop) = each(executor, rng) {
            return Ok(stop);
        }
        if rng.chance(executor.turns_percent()) {
            if executor.poll_one(rng, |name| disk.set_caller(name)) || disk.step() {
                continue;
            }
        } else if step(disk, executor) || executor.poll_one(rng, |name| disk.set_caller(name)) {
            continue;
        }
        if executor.unfinished() > 0 && disk.has_power() {
            let names = executor.unfinished_names().join(", ");
            return Err(format!("nothing moves any more; waiting: {names}"));
        }
    }
    Err(format!("no end after {MOVES_MAX} moves"))
}

/// Time that passes on the disk is jumped over only when no task has anything to do: else nothing
/// would ever be late.
fn step(disk: &SimDisk, executor: &Executor) -> bool {
    if executor.has_ready() {
        disk.step_if_due()
    } else {
        disk.step()
    }
}

/// Runs one future on the simulated disk; `None` if the power fails before it ends.
///
/// # Errors
/// If it hangs.
pub(crate) fn attempt<T: 'static>(
    disk: &SimDisk,
    rng: &mut Rng,
    name: &str,
    future: impl Future<Output = T> + 'static,
) -> Result<Option<T>, String> {
    attempt_watched((disk, rng), name, future, || ())
}

/// The same; `watch` is called at each of its moments.
///
/// # Errors
/// If it hangs.
pub(crate) fn attempt_watched<T: 'static>(
    (disk, rng): (&SimDisk, &mut Rng),
    name: &str,
    future: impl Future<Output = T> + 'static,
    mut watch: impl FnMut(),
) -> Result<Option<T>, String> {
    let result = Rc::new(RefCell::new(None));
    let slot = Rc::clone(&result);
    let mut executor = Executor::default();
    executor.spawn(name.to_string(), Kind::Foreground, async move {
        let value = future.await;
        *slot.borrow_mut() = Some(value);
    });
    let stop = |executor: &mut Executor, _: &mut Rng| {
        watch();
        (executor.unfinished() == 0).then_some(Stop::Idle)
    };
    match drive(&mut executor, disk, rng, stop)? {
        Stop::Idle => Ok(result.borrow_mut().take()),
        Stop::PowerOff | Stop::Failure => Ok(None),
    }
}

/// Runs one future to its end on a simulated disk whose power stays on.
///
/// # Errors
/// If it hangs.
pub(crate) fn block_on<T: 'static>(
    disk: &SimDisk,
    rng: &mut Rng,
    name: &str,
    future: impl Future<Output = T> + 'static,
) -> Result<T, String> {
    let value = attempt(disk, rng, name, future)?;
    value.ok_or_else(|| format!("the power failed during {name}"))
}
