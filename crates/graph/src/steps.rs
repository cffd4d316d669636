//! The steps of a change of a graph, in the order that a crash, or a failure, allows at each. An
//! image is flushed before its session is ended; if that fails nothing is changed.
//!
//! | change | steps, with requests held back | after each, this image shows the disk |
//! | --- | --- | --- |
//! | [`transact`] | what can fail is prepared, all disks are flushed, then frozen, then all takes effect | the disk, and from the first on its overlay, which is empty, as well |
//! | [`shorten`] | the header names the new base, the image is opened again | the image: both chains show the same |
//! | [`give_to_base`] | what lies between leaves the chain, then the image is emptied, without bitmaps, then clients go to the base | the image, and the base, which is equal |
//! | [`resize`] | the image has its new size, then those who observe the disk | the image |

use std::future::Future;

use crate::host::{Held, Host, NodeOf};
use crate::live::Drained;

/// A part of a transaction. What can fail is done before anything is frozen, and can be taken back.
pub trait Action<H: Host> {
    /// The disk that it puts an overlay over.
    fn overlaid(&self) -> Option<NodeOf<H>>;

    /// Does what can fail; requests are held back.
    ///
    /// # Errors
    /// Then all is as it was.
    fn prepare(&mut self, held: &Held) -> impl Future<Output = Result<(), H::Error>>;

    /// Takes back what was prepared.
    fn take_back(&mut self, held: &Held) -> impl Future<Output = ()>;

    /// Takes effect.
    fn commit(self, held: &Held);
}

/// Actions none of which was done, and why.
#[derive(Debug)]
pub struct NotDone<A, E> {
    /// The actions.
    pub actions: Vec<A>,
    /// The first error.
    pub error: E,
}

/// Does several things at one moment, at which no request to their disks is under way: all of them,
/// or none. They are prepared one after the other, then those disks are flushed and frozen that
/// get an overlay, and then all of them take effect. If a step fails those before it are taken
/// back: disks that were frozen are open as before.
///
/// # Errors
/// An action could not be prepared, or a disk not be frozen.
pub async fn transact<H: Host, A: Action<H>>(
    host: &H,
    (mut actions, held): (Vec<A>, &Held),
) -> Result<(), NotDone<A, H::Error>> {
    let mut prepared = 0;
    let mut done = Ok(());
    for action in &mut actions {
        done = action.prepare(held).await;
        if done.is_err() {
            break;
        }
        prepared += 1;
    }
    if done.is_ok() {
        done = freeze(host, &actions, held).await;
    }
    if let Err(error) = done {
        for action in actions[..prepared].iter_mut().rev() {
            action.take_back(held).await;
        }
        return Err(NotDone { actions, error });
    }
    for action in actions {
        action.commit(held);
    }
    Ok(())
}

/// Freezes the disks that actions put overlays over, once all of them are durable.
async fn freeze<H: Host, A: Action<H>>(
    host: &H,
    actions: &[A],
    held: &Held,
) -> Result<(), H::Error> {
    let nodes = actions.iter().filter_map(Action::overlaid);
    let nodes: Vec<NodeOf<H>> = nodes.filter(|node| host.is_written(node)).collect();
    for node in &nodes {
        flush(host, node).await?;
    }
    for (index, node) in nodes.iter().enumerate() {
        if let Err(error) = host.freeze(node).await {
            for frozen in &nodes[..=index] {
                // One that cannot be opened for writing refuses what would change it.
                drop(host.open(frozen, true, held).await);
            }
            return Err(H::failed(error));
        }
    }
    Ok(())
}

/// Makes durable what an image has, before its session is ended: if that ended with a loss, the
/// next session would know nothing of it, and a guest's next flush would succeed.
async fn flush<H: Host>(host: &H, node: &NodeOf<H>) -> Result<(), H::Error> {
    let flushed = host.live(node).behind().flush().await;
    flushed.map_err(H::failed)
}

/// Has an image name another backing file, or none, which shows the same, and puts its disk over
/// that.
///
/// # Errors
/// Of the image. The disk is as before, over one of the two.
pub async fn shorten<H: Host>(
    host: &H,
    node: &NodeOf<H>,
    base: Option<&NodeOf<H>>,
) -> Result<(), H::Error> {
    let held = Held {
        clients: Vec::new(),
        disks: host.hold(node).await,
    };
    let is_written = host.is_written(node);
    if !is_written {
        host.open(node, true, &held).await?;
    }
    name_base(host, (node, base), (is_written, &held)).await
}

async fn name_base<H: Host>(
    host: &H,
    (node, base): (&NodeOf<H>, Option<&NodeOf<H>>),
    (is_written, held): (bool, &Held),
) -> Result<(), H::Error> {
    flush(host, node).await?;
    let named = host.name_backing(node, base).await;
    // The session has ended with it. Both chains show the same.
    let opened = host.open(node, is_written, held).await;
    named.map_err(H::failed)?;
    opened?;
    host.put_over(node, base, held)
}

/// Empties an image whose data is in its base, durably, and has its clients use the base; `layers`
/// is the number of images above the base. The image is held, with those above it.
///
/// # Errors
/// Of the image. Its clients use it as before then.
pub async fn give_to_base<H: Host>(
    host: &H,
    (top, base): (&NodeOf<H>, &NodeOf<H>),
    layers: u32,
    held: Held,
) -> Result<(), H::Error> {
    if layers > 1 {
        // The images between would show through an empty one.
        name_base(host, (top, Some(base)), (true, &held)).await?;
    }
    flush(host, top).await?;
    // It shows the disk from then on, and would know nothing of what changes in the base.
    let forgotten = host.forget_bitmaps(top).await;
    forgotten.map_err(H::failed)?;
    let emptied = host.empty(top).await;
    let opened = host.open(top, true, &held).await;
    emptied.map_err(H::failed)?;
    opened?;
    host.move_clients(top, base, held).await
}

/// Changes the size of a disk. Requests are held back until those who observe its changes have the
/// new size, too: else they would miss one behind the old end.
///
/// # Errors
/// Of the image.
pub async fn resize<H: Host>(host: &H, node: &NodeOf<H>, size: u64) -> Result<(), H::Error> {
    let held: Vec<Drained> = host.hold(node).await;
    let resized = host.resize(node, size).await;
    host.live(node).announce_size();
    drop(held);
    resized.map_err(H::failed)
}

#[cfg(test)]
mod tests;
