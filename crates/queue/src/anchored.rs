//! [`Anchored`]: a value of one thread inside of something that may move between threads.
#![allow(unsafe_code)] // The two promises of threads; the check of the thread is their proof.

use std::fmt;
use std::mem::ManuallyDrop;
use std::thread::{self, ThreadId};

/// A value that only the thread that made it reaches. Whatever holds it may move to other threads,
/// which is what the traits of event loops ask for, though their objects stay on one.
///
/// Dropped on another thread, the value is left in memory for good.
pub struct Anchored<T> {
    value: ManuallyDrop<T>,
    thread: ThreadId,
}

// SAFETY: another thread gets no reference to the value, and does not drop it.
unsafe impl<T> Send for Anchored<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Anchored<T> {}

/// The error of a thread that is not the value's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongThread;

impl fmt::Display for WrongThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it belongs to the thread that used it first")
    }
}

impl std::error::Error for WrongThread {}

impl<T> Anchored<T> {
    /// A value of this thread.
    pub fn new(value: T) -> Anchored<T> {
        Anchored {
            value: ManuallyDrop::new(value),
            thread: thread::current().id(),
        }
    }

    fn is_here(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// The value.
    ///
    /// # Errors
    /// This is another thread.
    pub fn get(&self) -> Result<&T, WrongThread> {
        match self.is_here() {
            true => Ok(&self.value),
            false => Err(WrongThread),
        }
    }
}

impl<T> Drop for Anchored<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: it is dropped once, here, on its thread.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T> fmt::Debug for Anchored<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Anchored({:?})", self.thread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn only_the_thread_that_made_it_reaches_and_drops_it() {
        let value = Rc::new(5);
        let anchored = Anchored::new(Rc::clone(&value));
        assert_eq!(anchored.get().map(|five| **five), Ok(5));
        let anchored = thread::spawn(move || {
            assert_eq!(anchored.get().err(), Some(WrongThread));
            anchored
        });
        let anchored = anchored.join().unwrap();
        assert_eq!(Rc::strong_count(&value), 2);
        drop(anchored);
        assert_eq!(Rc::strong_count(&value), 1);
        let other = Anchored::new(Rc::clone(&value));
        thread::spawn(move || drop(other)).join().unwrap();
        assert_eq!(Rc::strong_count(&value), 2, "it is left for good");
    }
}
