//! [`Watch`]: waits for an event again and again, with one operation of the ring for all of them.
//!
//! The counter of the event is not read: each signal completes the operation, whatever the counter
//! is. That spares three system calls for each event.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::driver::Driver;
use crate::event::Event;
use crate::executor::Core;
use crate::watched::Watched;

enum Inner {
    /// On the ring of a queue.
    Ring {
        core: Rc<Core>,
        watched: Rc<Watched>,
    },
    /// Where there is no ring that can: a wait at a time.
    Waits(Option<WaitFuture>),
    /// A failure of a wait was reported.
    Failed,
}

type WaitFuture = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// Waits for the events of one [`Event`], on the queue of this thread.
pub struct Watch {
    event: Event,
    inner: Inner,
}

impl Watch {
    /// Watches an event from here on; signals before count too.
    ///
    /// # Panics
    /// Outside a queue.
    pub fn new(event: Event) -> Watch {
        let on_ring = Core::with_current(|core| {
            let Driver::Uring(ring) = &core.driver else {
                return None;
            };
            let watched = Rc::new(Watched::default());
            let is_watched = ring.watch(Arc::clone(event.descriptor()), Rc::clone(&watched));
            let core = Rc::clone(core);
            is_watched.then_some(Inner::Ring { core, watched })
        });
        let on_ring = on_ring.expect("events are watched on a running queue");
        Watch {
            event,
            inner: on_ring.unwrap_or(Inner::Waits(None)),
        }
    }

    /// Ready once there was a signal since this was ready last. Signals in a row may count as one.
    /// An error comes once, and nothing after it.
    ///
    /// # Errors
    /// The descriptor is no event, or its other side is closed.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Ring { watched, .. } => watched.poll(cx),
            Inner::Waits(wait) => {
                let event = &self.event;
                let under_way = wait.get_or_insert_with(|| {
                    let event = event.clone();
                    Box::pin(async move { event.wait().await })
                });
                let outcome = under_way.as_mut().poll(cx);
                match &outcome {
                    Poll::Ready(Ok(())) => *wait = None,
                    Poll::Ready(Err(_)) => self.inner = Inner::Failed,
                    Poll::Pending => {}
                }
                outcome
            }
            Inner::Failed => Poll::Pending,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Inner::Ring { core, watched } = &self.inner
            && let (Driver::Uring(ring), Some(tag)) = (&core.driver, watched.tag.get())
        {
            ring.cancel(tag);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Queue};

    async fn next(watch: &mut Watch) -> io::Result<()> {
        std::future::poll_fn(|cx| watch.poll_next(cx)).await
    }

    #[test]
    fn each_signal_is_seen() {
        for backend in [Backend::Auto, Backend::Threads] {
            let queue = Queue::new(backend).unwrap();
            let (there, back) = (Event::new().unwrap(), Event::new().unwrap());
            let (other_there, other_back) = (there.clone(), back.clone());
            there.signal().unwrap();
            queue.block_on(async {
                let mut watch = Watch::new(there);
                next(&mut watch).await.unwrap();
                let thread = std::thread::spawn(move || {
                    let queue = Queue::new(backend).unwrap();
                    queue.block_on(async {
                        let mut watch = Watch::new(other_back);
                        for _ in 0..1000 {
                            other_there.signal().unwrap();
                            next(&mut watch).await.unwrap();
                        }
                    });
                });
                for _ in 0..1000 {
                    next(&mut watch).await.unwrap();
                    back.signal().unwrap();
                }
                drop(watch);
                crate::blocking(move || thread.join()).await.unwrap();
            });
        }
    }

    #[test]
    fn a_watch_ends_with_the_other_side() {
        for backend in [Backend::Auto, Backend::Threads] {
            let queue = Queue::new(backend).unwrap();
            let (reader, writer) = std::io::pipe().unwrap();
            let event = Event::from_fd(reader.into()).unwrap();
            queue.block_on(async {
                let mut watch = Watch::new(event);
                crate::sleep(std::time::Duration::from_millis(2)).await;
                drop(writer);
                assert!(next(&mut watch).await.is_err());
                let mut cx = Context::from_waker(std::task::Waker::noop());
                assert!(watch.poll_next(&mut cx).is_pending());
            });
        }
    }
}
