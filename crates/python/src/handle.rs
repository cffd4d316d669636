//! An image that may be closed while others use it, and that a fork does not take along.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cowslip::Image;
use pyo3::prelude::*;

use crate::error;

/// Time between two looks at signals.
const SIGNALS: Duration = Duration::from_millis(50);

/// An image and those who use it.
pub struct Handle {
    /// The process that has opened it.
    process: u32,
    state: Mutex<State>,
    /// Notified when a call has ended, and when the image is closed.
    changed: Condvar,
}

struct State {
    image: Option<Arc<Image>>,
    is_closing: bool,
    /// Calls that block, and jobs.
    calls: usize,
    /// Requests of queues.
    requests: usize,
    servers: usize,
}

/// Kind of a use.
#[derive(Clone, Copy)]
pub enum Kind {
    /// A call that blocks, or a job.
    Call,
    /// A request of a queue.
    Request,
    /// A server, which stays.
    Server,
}

/// A use of the image, which is not closed before this is dropped.
pub struct Use {
    handle: Arc<Handle>,
    image: Arc<Image>,
    kind: Kind,
}

impl std::ops::Deref for Use {
    type Target = Arc<Image>;

    fn deref(&self) -> &Arc<Image> {
        &self.image
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.handle.state();
        *state.count(self.kind) -= 1;
        drop(state);
        self.handle.changed.notify_all();
    }
}

impl Handle {
    /// A handle of an image that this process has opened.
    pub fn new(image: Image) -> Arc<Handle> {
        let state = State {
            image: Some(Arc::new(image)),
            is_closing: false,
            calls: 0,
            requests: 0,
            servers: 0,
        };
        Arc::new(Handle {
            process: std::process::id(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// Begins a use.
    ///
    /// # Errors
    /// `ValueError`: it is closed; `RuntimeError`: another process has opened it.
    pub fn begin(self: &Arc<Handle>, kind: Kind) -> PyResult<Use> {
        // Before the lock, which may have been held when the process was forked.
        if !self.is_ours() {
            return Err(error::of_another_process(self.process));
        }
        let mut state = self.state();
        let image = match (&state.image, state.is_closing) {
            (Some(image), false) => Arc::clone(image),
            _ => return Err(error::closed()),
        };
        *state.count(kind) += 1;
        drop(state);
        let handle = Arc::clone(self);
        Ok(Use {
            handle,
            image,
            kind,
        })
    }

    /// Whether it is closed, or of another process.
    pub fn is_closed(&self) -> bool {
        !self.is_ours() || self.state().image.is_none()
    }

    /// Requests of queues that are under way.
    pub fn requests(&self) -> usize {
        match self.is_ours() {
            true => self.state().requests,
            false => 0,
        }
    }

    /// Waits for calls that are under way, flushes and closes. A closed image stays so.
    ///
    /// # Errors
    /// It is served, or requests of a queue are under way; a signal, whose handler has raised: it
    /// stays open then.
    /// Those of closing: it is closed all the same.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.is_ours() {
            return Ok(());
        }
        let image = {
            let mut state = self.state();
            if state.requests + state.servers > 0 {
                let text = format!(
                    "the image is in use, by {} servers and {} requests of event loops",
                    state.servers, state.requests
                );
                return Err(error::to_python(cowslip::Error::Invalid(text)));
            }
            state.is_closing = true;
            state.idle_image()
        };
        let image = match image {
            Idle::Closed => return Ok(()),
            Idle::Taken(image) => image,
            Idle::Busy => match self.wait_for_calls(py)? {
                Some(image) => image,
                None => return Ok(()),
            },
        };
        crate::run(py, cowslip_embed::close(&image))
    }

    fn wait_for_calls(&self, py: Python<'_>) -> PyResult<Option<Arc<Image>>> {
        loop {
            let idle = py.detach(|| {
                let state = self.state();
                let waited = self.changed.wait_timeout(state, SIGNALS);
                let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
                state.idle_image()
            });
            match idle {
                Idle::Closed => return Ok(None),
                Idle::Taken(image) => return Ok(Some(image)),
                Idle::Busy => {}
            }
            if let Err(raised) = py.check_signals() {
                self.state().is_closing = false;
                return Err(raised);
            }
        }
    }
}

/// State of an image that is to be closed.
enum Idle {
    Closed,
    Busy,
    Taken(Arc<Image>),
}

impl State {
    /// The number of uses of a kind.
    fn count(&mut self, kind: Kind) -> &mut usize {
        match kind {
            Kind::Call => &mut self.calls,
            Kind::Request => &mut self.requests,
            Kind::Server => &mut self.servers,
        }
    }

    /// Takes the image, if nothing uses it.
    fn idle_image(&mut self) -> Idle {
        if self.image.is_some() && self.calls + self.requests + self.servers > 0 {
            return Idle::Busy;
        }
        match self.image.take() {
            Some(image) => Idle::Taken(image),
            None => Idle::Closed,
        }
    }
}

impl Drop for Handle {
    /// In a fork the image stays as it is in memory: what it would release is its parent's.
    fn drop(&mut self) {
        if !self.is_ours() {
            let state = self.state.get_mut();
            let state = state.unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(state.image.take());
        }
    }
}
