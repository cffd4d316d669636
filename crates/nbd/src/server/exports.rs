//! [`Exports`]: what a server offers by name. It may change while the server runs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::export::Export;

/// An export and its name.
pub struct Offered {
    pub(super) name: String,
    pub(super) export: Arc<Export>,
    /// Connections that have chosen it.
    clients: AtomicUsize,
    /// Its clients are disconnected.
    is_withdrawn: AtomicBool,
    /// Its clients have had their time to take replies.
    is_cut_off: AtomicBool,
}

impl Offered {
    /// Connections that have chosen it and have not ended.
    pub fn clients(&self) -> usize {
        self.clients.load(Ordering::Acquire)
    }

    pub(super) fn is_withdrawn(&self) -> bool {
        self.is_withdrawn.load(Ordering::Acquire)
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off.load(Ordering::Acquire)
    }

    pub(super) fn cut_off(&self) {
        self.is_cut_off.store(true, Ordering::Release);
    }

    pub(super) fn leave(&self) {
        self.clients.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The exports of a server, in the order in which they were added.
#[derive(Default)]
pub(super) struct Exports(Mutex<Vec<Arc<Offered>>>);

impl Exports {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<Offered>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Offered>> {
        self.list().clone()
    }

    /// The export of this name.
    pub fn find(&self, name: &str) -> Option<Arc<Offered>> {
        self.list().iter().find(|it| it.name == name).cloned()
    }

    /// Counts a client of an export. Returns `false` if that was withdrawn meanwhile.
    pub fn enter(&self, offered: &Offered) -> bool {
        let _no_withdrawal = self.list();
        let is_offered = !offered.is_withdrawn();
        if is_offered {
            offered.clients.fetch_add(1, Ordering::AcqRel);
        }
        is_offered
    }

    /// Adds one. Returns whether the name was free.
    pub fn add(&self, name: String, export: Export) -> bool {
        let mut list = self.list();
        let is_free = list.iter().all(|it| it.name != name);
        if is_free {
            list.push(Arc::new(Offered {
                name,
                export: Arc::new(export),
                clients: AtomicUsize::new(0),
                is_withdrawn: AtomicBool::new(false),
                is_cut_off: AtomicBool::new(false),
            }));
        }
        is_free
    }

    /// Takes one out: nobody can choose it any more, and its clients are disconnected when the
    /// server is notified.
    pub fn withdraw(&self, name: &str) -> Option<Arc<Offered>> {
        let mut list = self.list();
        let index = list.iter().position(|it| it.name == name)?;
        let offered = list.remove(index);
        offered.is_withdrawn.store(true, Ordering::Release);
        Some(offered)
    }
}
