//! Checkpoints of one disk or both: the frozen disk is read while its guests write, or copied, and
//! what has changed since an earlier checkpoint has to be all that its copy lacks.
//!
//! The bitmaps are kept by the images, so a checkpoint may have a parent of an earlier session. Its
//! copy lies over that of its parent, and has what the bitmaps say alone; it is read after each
//! ending, as other backups are.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::{BackingChoice, Durability, Format};
use cowslip::{BufMut, Disk, Result};
use cowslip_graph::{
    Backup, Checkpoint, DirtyMap, Held, Link, Marks, Use, View, complete_from, join, noted_changes,
    removed_with,
};

use crate::model::SECTOR_BYTES;
use crate::remembered::Content;
use crate::rng::Rng;

use super::attending::Attending;
use super::guest::pause;
use super::images::Style;
use super::kept::{Kept, Past};
use super::marks::Bitmap;
use super::world::{Node, Port, World, size_of};

/// The beginning of the names of bitmaps that are checkpoints.
const PREFIX: &str = "checkpoint-";

/// A disk that is ready for the moment.
struct Ready {
    port: Rc<Port>,
    node: Rc<Node>,
    moment: Checkpoint<Bitmap>,
    target: Rc<Node>,
    name: String,
}

/// The checkpoints of a disk, the oldest first.
async fn checkpoints_of(node: &Rc<Node>) -> Result<Vec<Bitmap>> {
    let kept = node.image().bitmaps().await?.into_iter();
    let named = kept.filter(|info| info.name.starts_with(PREFIX));
    Ok(named
        .map(|info| Bitmap::Kept(Rc::clone(node), info))
        .collect())
}

fn links(checkpoints: &[Bitmap]) -> Vec<Link> {
    let link = |bitmap: &Bitmap| Link {
        is_sound: !bitmap.is_lost(),
        is_recording: bitmap.is_enabled(),
    };
    checkpoints.iter().map(link).collect()
}

/// Takes a checkpoint of a disk, and perhaps of the other one at the same moment, and copies both.
pub(super) async fn checkpoint((world, port): (&Rc<World>, &Rc<Port>), rng: &mut Rng) {
    let mut ports = vec![Rc::clone(port)];
    let other = world.ports.iter().find(|other| !Rc::ptr_eq(other, port));
    let other = other.filter(|other| rng.chance(40) && !other.has_ended.get());
    // The script of the other disk waits.
    if let Some(other) = other.filter(|other| !other.is_busy.replace(true)) {
        ports.push(Rc::clone(other));
    }
    let mut taken = Vec::new();
    {
        let _turn = world.turn.take().await;
        let mut ready = Vec::new();
        for port in &ports {
            if port.node.borrow().format == Format::Qcow2 {
                match prepare((world, port), rng).await {
                    Ok(part) => ready.push(part),
                    Err(error) => world.explain("preparing a checkpoint", &error),
                }
            }
        }
        if !ready.is_empty() {
            taken = take(world, ready).await;
        }
    }
    let mut own = None;
    for (ready, content) in taken {
        let rng = Rng::new(rng.bits());
        if Rc::ptr_eq(&ready.port, port) {
            own = Some((ready, content, rng));
            continue;
        }
        // Both are copied at a time. The script of the other disk goes on after that.
        let other = ports.pop().expect("the other disk is the last one");
        let world = Rc::clone(world);
        world.clone().spawn("other copy", async move {
            copy(&world, ready, content, rng).await;
            other.is_busy.set(false);
        });
    }
    for other in &ports[1..] {
        other.is_busy.set(false);
    }
    if let Some((ready, content, rng)) = own {
        copy(world, ready, content, rng).await;
    }
}

/// Has a disk ready: its image has the new bitmap, which notes nothing, and there is a place for
/// the copy and for what changes.
async fn prepare((world, port): (&World, &Rc<Port>), rng: &mut Rng) -> Result<Ready> {
    let node = Rc::clone(&port.node.borrow());
    let mut earlier = checkpoints_of(&node).await?;
    check_none_lost((world, port), &node, &earlier);
    if !earlier.is_empty() && rng.chance(20) {
        // One that was lost, perhaps: those before it go, too.
        let place = rng.index(earlier.len());
        forget((world, port, &node), &mut earlier, place).await?;
    }
    for bitmap in earlier.drain(..complete_from(&links(&earlier))) {
        bitmap.remove(&node).await?;
        no_more(port, &bitmap);
    }
    if earlier.len() > 2 && rng.chance(40) {
        let place = rng.index(earlier.len());
        forget((world, port, &node), &mut earlier, place).await?;
    }
    let parent = parent_of(port, &node, &earlier, rng);
    let granularity = rng.pick(&[512, 4096, 65536]);
    let changed = match &parent {
        None => None,
        Some((place, _)) => {
            let sizes = (size_of(&node), granularity);
            Some(noted_changes(&earlier[*place..], sizes).await?)
        }
    };
    let file = world.files.new_name("checkpoint");
    let backing = parent.as_ref().map(|(_, past)| &past.copy);
    let backing = backing.map(|(name, format)| (&**name, *format));
    let layout = (size_of(&node), Style::draw(rng));
    let making = world.files.make((&file, Format::Qcow2), layout, backing);
    making.await?;
    let target = world.open_target(&file).await?;
    let name = format!("{PREFIX}{}", world.request_id());
    let copy = use_of((world, &node, &target), rng).await?;
    let last = earlier.last().filter(|bitmap| bitmap.is_enabled()).cloned();
    let next = Bitmap::keep(&node, &name, granularity).await?;
    if let Err(error) = next.enable(false).await {
        drop(next.remove(&node).await);
        return Err(error);
    }
    world.note(port, || {
        let parent = parent.as_ref().map(|(_, past)| &past.name);
        format!("{name} of {} to {file} since {parent:?}", node.file)
    });
    Ok(Ready {
        port: Rc::clone(port),
        moment: Checkpoint {
            live: Arc::clone(&node.live),
            last,
            next,
            changed,
            copy,
        },
        node,
        target,
        name,
    })
}

/// A view, with a store for what changes, or a copy.
async fn use_of((world, node, target): (&World, &Node, &Node), rng: &mut Rng) -> Result<Use> {
    let live = Arc::clone(&node.live);
    let chunk_bytes = rng.pick(&[512, 4096, 65536]);
    if rng.chance(35) {
        let target = Arc::clone(&target.live) as _;
        return Ok(Use::Backup(Backup::new(live, target, chunk_bytes)));
    }
    // A file without more, or an overlay over the disk that is shown, of which the view has the
    // overlay's own part.
    let (format, below) = match rng.chance(50) {
        true => (Format::Raw, None),
        false => (Format::Qcow2, Some((&*node.file, node.format))),
    };
    let file = world.files.new_name("scratch");
    let layout = (size_of(node), Style::draw(rng));
    world.files.make((&file, format), layout, below).await?;
    let named = (&*file, format);
    let store = world.files.open(named, true, BackingChoice::None).await?;
    let disks = (live, Arc::new(store) as Arc<dyn Disk>);
    Ok(Use::View(Arc::new(View::new("view", disks, chunk_bytes))))
}

/// A checkpoint whose copy is complete, and since which all changes are known.
fn parent_of(port: &Port, node: &Node, earlier: &[Bitmap], rng: &mut Rng) -> Option<(usize, Past)> {
    let pasts = port.pasts.borrow();
    let place = |past: &Past| {
        let is_it =
            |bitmap: &Bitmap| matches!(bitmap, Bitmap::Kept(_, info) if info.name == past.name);
        let place = earlier.iter().position(is_it)?;
        (past.image == node.file).then(|| (place, past.clone()))
    };
    let known: Vec<_> = pasts.iter().filter_map(place).collect();
    match known.is_empty() || rng.chance(15) {
        true => None,
        // Mostly the last one, whose copy is often still to be checked.
        false if rng.chance(60) => known.last().cloned(),
        false => Some(rng.pick(&known)),
    }
}

/// Removes a checkpoint; what has changed since then counts for the one before.
async fn forget(
    (world, port, node): (&World, &Port, &Rc<Node>),
    earlier: &mut Vec<Bitmap>,
    place: usize,
) -> Result<()> {
    let removed = removed_with(&links(earlier), place);
    let gone = earlier[place].clone();
    world.note(port, || format!("{:?} is deleted", gone.info()));
    if let Some(before) = removed.start.checked_sub(1)
        && !earlier[before].is_lost()
        && !gone.is_lost()
    {
        join(&earlier[before], &gone).await?;
    }
    for gone in &earlier[removed] {
        gone.remove(node).await?;
        no_more(port, gone);
    }
    // The one before may note changes now.
    *earlier = checkpoints_of(node).await?;
    Ok(())
}

/// Notes that a bitmap was removed.
fn no_more(port: &Port, bitmap: &Bitmap) {
    if let Some(info) = bitmap.info() {
        port.pasts
            .borrow_mut()
            .retain(|past| past.name != info.name);
        port.alive
            .borrow_mut()
            .retain(|(_, name)| *name != info.name);
    }
}

/// Bitmaps are lost by a crash or a failure alone.
fn check_none_lost((world, port): (&World, &Port), node: &Node, found: &[Bitmap]) {
    let (faults, _) = world.files.disk.delivered();
    let is_found = |name: &String| {
        let is_it = |it: &Bitmap| it.info().is_some_and(|info| info.name == *name);
        found.iter().any(|it| is_it(it) && !it.is_lost())
    };
    let alive = port.alive.borrow();
    let of_node = alive.iter().filter(|(image, _)| *image == node.file);
    for (_, name) in of_node {
        if faults == 0 && world.files.disk.has_power() && !is_found(name) {
            let number = port.number;
            let infos = found.iter().filter_map(Bitmap::info);
            let infos: Vec<_> = infos.collect();
            world.fail(format!(
                "disk {number}: {} has lost {name}, and has {infos:?}",
                node.file
            ));
        }
    }
}

/// Takes the moment of all of them, or of none.
async fn take(world: &World, ready: Vec<Ready>) -> Vec<(Ready, Content)> {
    let nodes: Vec<Rc<Node>> = ready.iter().map(|it| Rc::clone(&it.node)).collect();
    let held: Held = world.hold_all(&nodes).await;
    let contents: Vec<Content> = ready
        .iter()
        .map(|it| it.port.model.borrow().possible())
        .collect();
    let (rest, moments): (Vec<_>, Vec<_>) = ready
        .into_iter()
        .map(|it| ((it.port, it.node, it.target, it.name), it.moment))
        .unzip();
    let taken = Checkpoint::take(&moments, &held).await;
    drop(held);
    let ready = rest.into_iter().zip(moments);
    let ready = ready.map(|((port, node, target, name), moment)| Ready {
        port,
        node,
        moment,
        target,
        name,
    });
    if let Err(error) = taken {
        world.explain("a checkpoint", &error);
        for part in ready {
            let removed = part.moment.next.remove(&part.node).await;
            world.note_outcome("removing a bitmap", removed);
        }
        return Vec::new();
    }
    let ready: Vec<Ready> = ready.collect();
    for part in &ready {
        let mut alive = part.port.alive.borrow_mut();
        alive.push((part.node.file.clone(), part.name.clone()));
    }
    ready.into_iter().zip(contents).collect()
}

/// Fills the copy of a disk, from its view or beside its guests.
async fn copy(world: &World, ready: Ready, content: Content, mut rng: Rng) {
    let Ready {
        port,
        node,
        moment,
        target,
        name,
    } = ready;
    let is_done = match moment.copy {
        Use::Backup(backup) => {
            let attending = Attending::begin((world, &port), &mut rng);
            let copied = backup.run(&attending.job).await;
            drop(backup);
            attending.end("a backup of a checkpoint", &copied) && !attending.was_cancelled()
        }
        Use::View(view) => {
            let expected = Kept {
                file: format!("the view {name}"),
                format: Format::Raw,
                size: view.size(),
                content: content.clone(),
            };
            let client = Client {
                world,
                port: &port,
                view: &view,
                expected,
                seen: vec![None; (view.size() / SECTOR_BYTES) as usize],
            };
            let pulled = client
                .pull(moment.changed.as_deref(), &target, &mut rng)
                .await;
            world.note(&port, || {
                format!("reading the view {name} ends: {pulled:?}")
            });
            if let Err(error) = &pulled {
                world.explain("reading a view", error);
            }
            matches!(pulled, Ok(true))
        }
    };
    if is_done {
        port.keep(&target, content);
        port.pasts.borrow_mut().push(Past {
            image: node.file.clone(),
            name,
            copy: (target.file.clone(), target.format),
        });
    }
    let closed = target.image().close().await;
    world.note_outcome("closing a target", closed);
}

/// A client that reads a view.
struct Client<'a> {
    world: &'a World,
    port: &'a Port,
    view: &'a View,
    expected: Kept,
    /// The sectors that were read.
    seen: Vec<Option<Vec<u8>>>,
}

impl Client<'_> {
    /// Copies what is marked, or all, to a target, and reads other places meanwhile. Returns
    /// whether it has come to the end.
    async fn pull(
        mut self,
        changed: Option<&DirtyMap>,
        target: &Node,
        rng: &mut Rng,
    ) -> Result<bool> {
        let all = DirtyMap::new(self.view.size(), SECTOR_BYTES);
        all.mark(0..u64::MAX);
        let wanted = changed.unwrap_or(&all);
        let gives_up = rng.chance(15).then(|| rng.below(20));
        let piece = rng.pick(&[512, 2048, 8192, 65536]);
        let (mut at, mut pieces) = (0, 0);
        while let Some(run) = wanted.next(at, piece) {
            if gives_up == Some(pieces) {
                return Ok(false);
            }
            pieces += 1;
            at = run.end;
            for _ in 0..rng.below(30) {
                pause().await;
            }
            let bytes = self.read(run.clone()).await?;
            let mut buf = BufMut::zeroed(bytes.len());
            buf.copy_from_slice(&bytes);
            let written = target
                .live
                .write(run.start, buf.freeze().into(), Durability::Cached);
            written.await?;
            if rng.chance(40) {
                let sectors = self.view.size() / SECTOR_BYTES;
                let first = rng.below(sectors);
                let end = first + rng.between(1, 16).min(sectors - first);
                self.read(first * SECTOR_BYTES..end * SECTOR_BYTES).await?;
            }
        }
        target.live.flush().await?;
        Ok(true)
    }

    /// Reads a part of the view, which has to be as it was at the moment, whenever it is read.
    async fn read(&mut self, range: Range<u64>) -> Result<Vec<u8>> {
        let (start, len) = (range.start, range.end - range.start);
        let extents = self.view.extents(start, len, 8).await?;
        let buf = BufMut::zeroed(len as usize);
        let bytes = self.view.read(start, buf.into()).await?.to_vec();
        let granules = start / SECTOR_BYTES..range.end / SECTOR_BYTES;
        if let Err(what) = self.expected.check(&granules, &bytes) {
            self.fail(what);
        }
        for (granule, found) in granules.zip(bytes.chunks(SECTOR_BYTES as usize)) {
            let seen = self.seen[granule as usize].get_or_insert_with(|| found.to_vec());
            if seen != found {
                let at = granule * SECTOR_BYTES;
                self.fail(format!("{} has changed at {at:#x}", self.expected.file));
            }
        }
        for extent in extents.iter().filter(|extent| extent.zero) {
            let end = (extent.start + extent.len).min(range.end);
            let part = (extent.start.max(start) - start) as usize..(end - start) as usize;
            if bytes[part].iter().any(|byte| *byte != 0) {
                let file = &self.expected.file;
                self.fail(format!("{file} has no zeroes where it says so: {extent:?}"));
            }
        }
        Ok(bytes)
    }

    fn fail(&self, what: String) {
        self.world
            .fail(format!("disk {}: {what}", self.port.number));
    }
}
