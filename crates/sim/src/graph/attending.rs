//! [`Attending`]: a job of a simulated host, and what its user does to it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use cowslip::{Error, Job, Result};
use cowslip_graph::{Attended, Mirror, TurnGuard};

use crate::rng::Rng;

use super::guest::pause;
use super::world::{Node, Port, World};

/// A job, and what its user will do to it.
pub(super) struct Attending<'a> {
    world: &'a World,
    port: Rc<Port>,
    /// The disk of its guests when it began.
    node: Rc<Node>,
    pub job: Job,
    mirror: Rc<RefCell<Option<Arc<Mirror>>>>,
    /// Turns from when it is ready to when its user completes it.
    completes_after: u64,
    /// Turns after that until its user cancels it, having thought better of it.
    cancels_after: Option<u64>,
    pub stays: bool,
    /// It was cancelled before its guests have moved.
    is_cancelled: Rc<Cell<bool>>,
    has_ended: Rc<Cell<bool>>,
}

impl<'a> Attending<'a> {
    pub fn begin((world, port): (&'a World, &Rc<Port>), rng: &mut Rng) -> Attending<'a> {
        let attending = Attending {
            world,
            port: Rc::clone(port),
            node: Rc::clone(&port.node.borrow()),
            job: Job::default(),
            mirror: Rc::default(),
            completes_after: rng.pick(&[0, 10, 60, 300]),
            cancels_after: rng.chance(20).then(|| rng.below(40)),
            stays: rng.chance(25),
            is_cancelled: Rc::default(),
            has_ended: Rc::default(),
        };
        if rng.chance(20) {
            let most = rng.pick(&[30, 150, 600]);
            let cancelling = attending.cancel_after(rng.below(most));
            world.spawn("canceller", cancelling);
        }
        attending
    }

    /// Cancels it some turns later, if it has not ended.
    fn cancel_after(&self, turns: u64) -> impl Future<Output = ()> + use<> {
        let (job, mirror) = (self.job.clone(), Rc::clone(&self.mirror));
        let has_ended = Rc::clone(&self.has_ended);
        let is_cancelled = Rc::clone(&self.is_cancelled);
        let (port, node) = (Rc::clone(&self.port), Rc::clone(&self.node));
        async move {
            for _ in 0..turns {
                if has_ended.get() {
                    return;
                }
                pause().await;
            }
            if has_ended.get() {
                return;
            }
            // Behind the move of its guests it is too late.
            is_cancelled.set(Rc::ptr_eq(&port.node.borrow(), &node));
            job.cancel();
            if let Some(mirror) = &*mirror.borrow() {
                mirror.wake();
            }
        }
    }

    /// The job has ended; whether it succeeded.
    pub fn end(&self, what: &str, outcome: &Result<()>) -> bool {
        self.has_ended.set(true);
        self.mirror.take();
        match outcome {
            Ok(()) => true,
            Err(Error::Cancelled) => false,
            Err(error) => {
                self.world.explain(what, error);
                false
            }
        }
    }

    /// Whether the user has asked for the end without an effect.
    pub fn was_cancelled(&self) -> bool {
        self.is_cancelled.get()
    }

    /// No cancelling counts any more.
    pub fn too_late(&self) {
        self.has_ended.set(true);
    }
}

impl<'a> Attended<World> for Attending<'a> {
    type Turn = TurnGuard<'a, ()>;

    fn follows(&self, mirror: &Arc<Mirror>) {
        self.mirror.replace(Some(Arc::clone(mirror)));
    }

    fn is_ready(&self) {
        let Some(mirror) = self.mirror.borrow().clone() else {
            return;
        };
        let turns = self.completes_after;
        let cancelling = self.cancels_after.map(|turns| self.cancel_after(turns));
        self.world.spawn("completer", async move {
            for _ in 0..turns {
                pause().await;
            }
            mirror.complete();
            drop(mirror);
            if let Some(cancelling) = cancelling {
                cancelling.await;
            }
        });
    }

    fn stays(&self) -> bool {
        self.stays
    }

    async fn finalize(&self) -> Result<TurnGuard<'a, ()>> {
        self.job.check()?;
        Ok(self.world.turn.take().await)
    }
}
