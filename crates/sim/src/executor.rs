//! A single-threaded executor whose order of polling is drawn from a seed.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use crate::rng::Rng;

type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;
type Ready = Arc<Mutex<Vec<usize>>>;

/// Wakes one task, once until it is polled again.
struct TaskWaker {
    id: usize,
    queued: AtomicBool,
    ready: Ready,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
            ready.push(self.id);
        }
    }
}

/// Whether a run waits for a task to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request: it must end.
    Foreground,
    /// A task that may run as long as the image does.
    Background,
}

struct Task {
    name: String,
    kind: Kind,
    future: TaskFuture,
    waker: Arc<TaskWaker>,
}

/// The tasks of a run.
#[derive(Default)]
pub struct Executor {
    tasks: Vec<Option<Task>>,
    ready: Ready,
    foreground: usize,
    slow: bool,
}

impl Executor {
    /// Sets whether the disk gets most of the turns.
    pub fn set_slow(&mut self, slow: bool) {
        self.slow = slow;
    }

    /// Percent of the turns that are the tasks' first.
    pub fn turns_percent(&self) -> u64 {
        if self.slow { 8 } else { 60 }
    }

    /// Adds a task; it is polled for the first time when its turn comes.
    pub fn spawn(&mut self, name: String, kind: Kind, future: impl Future<Output = ()> + 'static) {
        let id = self.tasks.len();
        let waker = Arc::new(TaskWaker {
            id,
            queued: AtomicBool::new(false),
            ready: Arc::clone(&self.ready),
        });
        waker.wake_by_ref();
        self.tasks.push(Some(Task {
            name,
            kind,
            future: Box::pin(future),
            waker,
        }));
        self.foreground += usize::from(kind == Kind::Foreground);
    }

    /// Tasks in the foreground that have not ended.
    pub fn unfinished(&self) -> usize {
        self.foreground
    }

    /// Names of the foreground tasks that have not ended.
    pub fn unfinished_names(&self) -> Vec<String> {
        let tasks = self.tasks.iter().flatten();
        let tasks = tasks.filter(|task| task.kind == Kind::Foreground);
        tasks.map(|task| task.name.clone()).collect()
    }

    /// Whether some task can be polled.
    pub fn has_ready(&self) -> bool {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        !ready.is_empty()
    }

    /// Polls one of the tasks that were woken; `announce` hears its name before. False if none was.
    pub fn poll_one(&mut self, rng: &mut Rng, announce: impl FnOnce(&str)) -> bool {
        let id = {
            let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
            if ready.is_empty() {
                return false;
            }
            let chosen = rng.index(ready.len());
            ready.swap_remove(chosen)
        };
        let Some(task) = &mut self.tasks[id] else {
            return true;
        };
        task.waker.queued.store(false, Ordering::Relaxed);
        announce(&task.name);
        let waker = Waker::from(Arc::clone(&task.waker));
        let poll = task.future.as_mut().poll(&mut Context::from_waker(&waker));
        if poll == Poll::Ready(()) {
            self.foreground -= usize::from(task.kind == Kind::Foreground);
            self.tasks[id] = None;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    #[test]
    fn tasks_run_in_an_order_that_the_seed_decides() {
        let order = |seed| {
            let mut executor = Executor::default();
            let log = Rc::new(RefCell::new(Vec::new()));
            for id in 0..10 {
                let log = Rc::clone(&log);
                executor.spawn(String::new(), Kind::Foreground, async move {
                    log.borrow_mut().push(id);
                });
            }
            let mut rng = Rng::new(seed);
            while executor.poll_one(&mut rng, |_| ()) {}
            assert_eq!(executor.unfinished(), 0);
            log.take()
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn a_task_that_nobody_wakes_stays_unfinished() {
        let mut executor = Executor::default();
        executor.spawn(
            "stuck".to_string(),
            Kind::Foreground,
            std::future::pending(),
        );
        let mut rng = Rng::new(1);
        while executor.poll_one(&mut rng, |_| ()) {}
        assert_eq!(executor.unfinished_names(), ["stuck"]);
    }
}
