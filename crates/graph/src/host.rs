//! [`Host`]: what changes of a graph ask of the program that has the graph.
//!
//! The order of the steps is in `steps.rs` and `jobs.rs`. A host does what it is asked for, and
//! decides nothing about the order. A daemon is one; the simulator, whose power fails, another.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::Error;

use crate::live::{Drained, LiveDisk};
use crate::mirror::Mirror;

/// A disk of a host, with an image of its own.
pub type NodeOf<H> = <H as Host>::Node;

/// Requests that are held back.
#[derive(Debug, Default)]
pub struct Held {
    /// Those of clients, in front of their disks.
    pub clients: Vec<Drained>,
    /// Those of the disks.
    pub disks: Vec<Drained>,
}

impl Held {
    /// The disk of this name among those that are held.
    pub fn of(&self, live: &Arc<LiveDisk>) -> Option<&Drained> {
        let mut all = self.clients.iter().chain(&self.disks);
        all.find(|drained| Arc::ptr_eq(drained.live(), live))
    }
}

/// A graph of disks, each with an image of its own over the image of the disk below.
pub trait Host {
    /// A disk.
    type Node: Clone;
    /// Its errors.
    type Error;

    /// An error of a disk.
    fn failed(error: Error) -> Self::Error;

    /// The disk for all who use it.
    fn live(&self, node: &Self::Node) -> Arc<LiveDisk>;

    /// Whether the disk's own image is open for writing.
    fn is_written(&self, node: &Self::Node) -> bool;

    /// Holds back the requests of a disk's clients, in front of it.
    fn hold_clients(&self, node: &Self::Node) -> impl Future<Output = Vec<Drained>>;

    /// Holds back the requests to a disk, and to those above it.
    fn hold(&self, node: &Self::Node) -> impl Future<Output = Vec<Drained>>;

    /// Holds back the requests to the disks above one, but not those to itself.
    fn hold_above(&self, node: &Self::Node) -> impl Future<Output = Vec<Drained>>;

    /// Counts a user that writes: the image is open for writing until [`Host::leave`].
    ///
    /// # Errors
    /// It cannot be opened for writing.
    fn enter(&self, node: &Self::Node) -> impl Future<Output = Result<(), Self::Error>>;

    /// Counts this user out.
    ///
    /// # Errors
    /// The image could not be closed in order.
    fn leave(&self, node: &Self::Node) -> impl Future<Output = Result<(), Self::Error>>;

    /// Changes the size of the disk, beside requests.
    ///
    /// # Errors
    /// Of the image.
    fn resize(
        &self,
        node: &Self::Node,
        size: u64,
    ) -> impl Future<Output = cowslip_block::Result<()>>;

    /// Copies into the image what this number of layers below it show of a range, beside requests,
    /// on any thread.
    ///
    /// # Errors
    /// Of the images.
    fn populate(
        &self,
        node: &Self::Node,
        range: Range<u64>,
        layers: u32,
    ) -> impl Future<Output = cowslip_block::Result<()>> + Send + 'static;

    /// Makes durable what the image has, and ends its session; it stays open for those above it.
    ///
    /// # Errors
    /// Of the image.
    fn freeze(&self, node: &Self::Node) -> impl Future<Output = cowslip_block::Result<()>>;

    /// Names another backing file in the image's header, or none, durably. The session ends with
    /// it, well or not.
    ///
    /// # Errors
    /// Of the image.
    fn name_backing(
        &self,
        node: &Self::Node,
        base: Option<&Self::Node>,
    ) -> impl Future<Output = cowslip_block::Result<()>>;

    /// Removes the bitmaps that the image, which is open for writing, keeps.
    ///
    /// # Errors
    /// Of the image. Some may be gone.
    fn forget_bitmaps(&self, node: &Self::Node) -> impl Future<Output = cowslip_block::Result<()>>;

    /// Empties the image, durably. The session ends with it, well or not.
    ///
    /// # Errors
    /// Of the image.
    fn empty(&self, node: &Self::Node) -> impl Future<Output = cowslip_block::Result<()>>;

    /// Opens the image again, for reading or for writing too, under requests that are held back.
    ///
    /// # Errors
    /// It cannot be opened.
    fn open(
        &self,
        node: &Self::Node,
        writes: bool,
        held: &Held,
    ) -> impl Future<Output = Result<(), Self::Error>>;

    /// Has requests, which are held back, find another disk below this one, or none.
    ///
    /// # Errors
    /// A chain that would be a loop.
    fn put_over(
        &self,
        node: &Self::Node,
        base: Option<&Self::Node>,
        held: &Held,
    ) -> Result<(), Self::Error>;

    /// Has the clients of a disk, whose requests are held back, use another one, and lets requests
    /// go on.
    ///
    /// # Errors
    /// The image of the first disk could not be closed in order.
    fn move_clients(
        &self,
        from: &Self::Node,
        to: &Self::Node,
        held: Held,
    ) -> impl Future<Output = Result<(), Self::Error>>;
}

/// The questions of a job to the program that has started it.
pub trait Attended<H: Host> {
    /// The right to change the graph, until it is dropped.
    type Turn;

    /// The mirror that the job follows its disk with has begun.
    fn follows(&self, mirror: &Arc<Mirror>);

    /// The copy was equal to its disk, and follows it.
    fn is_ready(&self);

    /// Whether the disk is to stay where it is, beside a copy that is equal.
    fn stays(&self) -> bool;

    /// Waits until the last step may be taken.
    ///
    /// # Errors
    /// The job was cancelled meanwhile.
    fn finalize(&self) -> impl Future<Output = Result<Self::Turn, H::Error>>;
}
