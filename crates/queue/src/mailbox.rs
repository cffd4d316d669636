//! How other threads reach a queue: what they leave for it, and whether it has to be woken for
//! that.
//!
//! A queue announces its sleep before it looks for mail a last time, and a sender looks after it
//! has left mail whether the queue sleeps, so one of the two sees the other and no wake is lost.

use crate::primitives::{AtomicBool, Mutex, MutexGuard, Ordering};

/// Mail for a queue, from any thread.
pub struct Mailbox<T> {
    /// `None` when the queue is gone.
    mail: Mutex<Option<Vec<T>>>,
    /// The queue is in the kernel or about to go there, and must be woken by its event.
    asleep: AtomicBool,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Mailbox<T> {
        Mailbox::new()
    }
}

impl<T> Mailbox<T> {
    /// An empty one, of a queue that is awake.
    pub fn new() -> Mailbox<T> {
        Mailbox {
            mail: Mutex::new(Some(Vec::new())),
            asleep: AtomicBool::new(false),
        }
    }

    fn mail(&self) -> MutexGuard<'_, Option<Vec<T>>> {
        self.mail
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Leaves an item; returns whether the queue has to be woken by its event. For a queue that is
    /// gone it is dropped.
    #[must_use = "a queue that sleeps has to be woken"]
    pub fn post(&self, item: T) -> bool {
        match self.mail().as_mut() {
            Some(mail) => mail.push(item),
            None => return false,
        }
        // The lock orders this against the queue's last look before its sleep: either that look
        // finds the item, or this swap finds the queue asleep.
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Takes what has arrived.
    pub fn collect(&self, take: impl FnMut(T)) {
        if let Some(mail) = self.mail().as_mut() {
            mail.drain(..).for_each(take);
        }
    }

    /// Announces the sleep; to be followed by a last [`Mailbox::collect`].
    pub fn fall_asleep(&self) {
        // A swap here and below, like the one in `post`: each change of the flag sees the one
        // before it.
        self.asleep.swap(true, Ordering::SeqCst);
    }

    /// Whether the queue that announced its sleep has been woken.
    pub fn is_woken(&self) -> bool {
        !self.asleep.load(Ordering::Relaxed)
    }

    /// Takes the announcement back.
    pub fn wake_up(&self) {
        self.asleep.swap(false, Ordering::SeqCst);
    }

    /// The queue is gone: what is here and what comes is dropped.
    pub fn close(&self) {
        let rest = self.mail().take();
        drop(rest);
    }
}

/// Whether a task has been woken since it was polled.
pub struct Scheduled(AtomicBool);

impl Scheduled {
    /// Returns the mark of a task that is in line already, or is not.
    pub fn new(scheduled: bool) -> Scheduled {
        Scheduled(AtomicBool::new(scheduled))
    }

    /// Notes a wake; whether the task has to be put in line for it. A write even if another wake is
    /// noted already: what was done before this wake must be visible to the poll that follows.
    #[must_use = "a task that is woken is put in line"]
    pub fn set(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Begins a poll, so that a wake during the poll puts the task in line again.
    pub fn clear(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}
