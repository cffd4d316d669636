//! `blockdev-backup` with `sync=none`: what changes on a disk is copied to the target before, until
//! the job is cancelled.
//!
//! If the disk is below the target, clients of the target see the disk as it was when the job
//! began: what was copied comes from the target's own image, all else from the disk, with requests
//! that would change it held back meanwhile ([`View`]).

use std::rc::Rc;
use std::sync::Arc;

use cowslip::{Disk, Error};
use cowslip_graph::{CHUNK_BYTES, Held, View};
use cowslip_qmp::QmpError;

use super::host::Daemon;
use super::job::Job;
use super::nodes::Node;
use super::words::failed;

impl Daemon {
    /// The view for a job of this kind.
    ///
    /// # Errors
    /// Of the engine.
    pub fn fleece(&self, node: &Rc<Node>, target: &Rc<Node>) -> Result<Arc<View>, QmpError> {
        let store: Arc<dyn Disk> = match is_below(node, target) {
            true => Arc::new(target.alone()?),
            false => Arc::clone(&target.live) as _,
        };
        let disks = (Arc::clone(&node.live), store);
        Ok(Arc::new(View::new(target.name.clone(), disks, CHUNK_BYTES)))
    }

    /// Takes the moment of a view. Its disk is held, and so is the target.
    pub fn take_view(&self, view: &Arc<View>, (node, target): (&Rc<Node>, &Rc<Node>), held: &Held) {
        view.freeze(held.of(&node.live).expect("it is held"));
        if is_below(node, target) {
            target.cover.replace(Some(Arc::clone(view) as _));
            let drained = held.of(&target.live).expect("it is held");
            drained.exchange(Arc::clone(view) as _);
        }
    }

    /// Keeps a view until the job is cancelled, or the view is of no use.
    ///
    /// # Errors
    /// [`cowslip::Error::Cancelled`]; a chunk could not be copied.
    pub async fn keep_view(
        &self,
        job: &Job,
        view: &Arc<View>,
        target: &Rc<Node>,
    ) -> Result<(), QmpError> {
        job.view.replace(Some(Arc::clone(view)));
        let kept = view.hold(&job.work).await;
        job.view.take();
        // The clients of a view that is of no use get errors until the last of them has left: what
        // is below the target has changed, and was not copied.
        if matches!(kept, Err(Error::Cancelled)) {
            target.uncover().await;
        }
        kept.map_err(failed)
    }
}

/// Whether a node is in the chain of a target, below its image.
pub fn is_below(node: &Rc<Node>, target: &Rc<Node>) -> bool {
    target.chain()[1..].iter().any(|it| Rc::ptr_eq(it, node))
}
