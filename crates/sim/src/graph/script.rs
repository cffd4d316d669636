//! A script: changes of a disk's chain, one after the other, as clients of a daemon ask for them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::Format;
use cowslip::{Error, Job, Result};
use cowslip_graph::{
    Attended, Committed, CopyMode, Held, Host, Mirror, Mirroring, TurnGuard, commit, mirror,
    resize, stream,
};

use crate::disk::fault::{Duration, ENOSPC, Fault, Verb};
use crate::model::{Outcome, SECTOR_BYTES, Until};
use crate::rng::Rng;

use super::checkpoint::checkpoint;
use super::guest::pause;
use super::images::Style;
use super::marks::remove_lost;
use super::transaction::transaction;
use super::world::{Node, Port, World, size_of};
use super::{Kept, SIZE_MAX};

/// Images of a chain.
const DEPTH_MAX: usize = 5;
/// Changes of a disk's chain in a session.
const DEEDS_MAX: u64 = 9;

/// Makes changes until there were enough.
pub(crate) async fn follow(world: Rc<World>, port: Rc<Port>, mut rng: Rng) {
    // Kinds of scripts: chains that grow and shrink, backups, backups of a disk whose size changes,
    // mirrors, checkpoints, and all.
    let weights: [u64; 9] = rng.pick(&[
        [4, 2, 3, 5, 1, 0, 1, 1, 0],
        [0, 1, 0, 0, 0, 8, 1, 1, 0],
        [0, 0, 0, 0, 0, 5, 6, 0, 2],
        [2, 0, 0, 0, 6, 0, 0, 0, 0],
        [3, 1, 0, 4, 0, 0, 1, 1, 8],
        [3, 2, 2, 3, 3, 4, 1, 1, 3],
    ]);
    for _ in 0..rng.between(2, DEEDS_MAX) {
        for _ in 0..rng.below(40) {
            pause().await;
        }
        while port.is_busy.replace(true) {
            pause().await;
        }
        // What was said of other images is not so after the next change.
        port.also.borrow_mut().clear();
        let both = (&world, &port);
        let depth = port.node.borrow().chain().len();
        match rng.weighted(&weights) {
            0 if depth < DEPTH_MAX => transaction(both, &mut rng, false).await,
            1 if depth > 1 => stream_into(both, &mut rng).await,
            2 if depth > 2 => commit_some(both, &mut rng, Which::Below).await,
            3 if depth > 1 => commit_some(both, &mut rng, Which::Active).await,
            4 => mirror_to(both, &mut rng).await,
            5 => transaction(both, &mut rng, true).await,
            // A raw disk has the length of its file, which a crash may leave between both.
            6 if port.node.borrow().format == Format::Qcow2 => change_size(both, &mut rng).await,
            6 | 7 => open_again(both).await,
            8 => checkpoint(both, &mut rng).await,
            _ => transaction(both, &mut rng, depth >= DEPTH_MAX).await,
        }
        port.is_busy.set(false);
        world.figures.borrow_mut().changes += 1;
    }
    port.has_ended.set(true);
}

/// A job, and what its user will do to it.
pub(super) struct Attending<'a> {
    world: &'a World,
    port: Rc<Port>,
    /// The disk of its guests when it began.
    node: Rc<Node>,
    pub job: Job,
    mirror: Rc<RefCell<Option<Arc<Mirror>>>>,
    /// Turns from when it is ready to when its user completes it.
    completes_after: u64,
    /// Turns after that until its user cancels it, having thought better of it.
    cancels_after: Option<u64>,
    stays: bool,
    /// It was cancelled before its guests have moved.
    is_cancelled: Rc<Cell<bool>>,
    has_ended: Rc<Cell<bool>>,
}

impl<'a> Attending<'a> {
    pub fn begin((world, port): (&'a World, &Rc<Port>), rng: &mut Rng) -> Attending<'a> {
        let attending = Attending {
            world,
            port: Rc::clone(port),
            node: Rc::clone(&port.node.borrow()),
            job: Job::default(),
            mirror: Rc::default(),
            completes_after: rng.pick(&[0, 10, 60, 300]),
            cancels_after: rng.chance(20).then(|| rng.below(40)),
            stays: rng.chance(25),
            is_cancelled: Rc::default(),
            has_ended: Rc::default(),
        };
        if rng.chance(20) {
            let most = rng.pick(&[30, 150, 600]);
            let cancelling = attending.cancel_after(rng.below(most));
            world.spawn("canceller", cancelling);
        }
        attending
    }

    /// Cancels it some turns later, if it has not ended.
    fn cancel_after(&self, turns: u64) -> impl Future<Output = ()> + use<> {
        let (job, mirror) = (self.job.clone(), Rc::clone(&self.mirror));
        let has_ended = Rc::clone(&self.has_ended);
        let is_cancelled = Rc::clone(&self.is_cancelled);
        let (port, node) = (Rc::clone(&self.port), Rc::clone(&self.node));
        async move {
            for _ in 0..turns {
                if has_ended.get() {
                    return;
                }
                pause().await;
            }
            if has_ended.get() {
                return;
            }
            // Behind the move of its guests it is too late.
            is_cancelled.set(Rc::ptr_eq(&port.node.borrow(), &node));
            job.cancel();
            if let Some(mirror) = &*mirror.borrow() {
                mirror.wake();
            }
        }
    }

    /// The job has ended; whether it succeeded.
    pub fn end(&self, what: &str, outcome: &Result<()>) -> bool {
        self.has_ended.set(true);
        self.mirror.take();
        match outcome {
            Ok(()) => true,
            Err(Error::Cancelled) => false,
            Err(error) => {
                self.world.explain(what, error);
                false
            }
        }
    }

    /// Whether the user has asked for the end without an effect.
    pub fn was_cancelled(&self) -> bool {
        self.is_cancelled.get()
    }

    /// No cancelling counts any more.
    fn too_late(&self) {
        self.has_ended.set(true);
    }
}

impl<'a> Attended<World> for Attending<'a> {
    type Turn = TurnGuard<'a, ()>;

    fn follows(&self, mirror: &Arc<Mirror>) {
        self.mirror.replace(Some(Arc::clone(mirror)));
    }

    fn is_ready(&self) {
        let Some(mirror) = self.mirror.borrow().clone() else {
            return;
        };
        let turns = self.completes_after;
        let cancelling = self.cancels_after.map(|turns| self.cancel_after(turns));
        self.world.spawn("completer", async move {
            for _ in 0..turns {
                pause().await;
            }
            mirror.complete();
            drop(mirror);
            if let Some(cancelling) = cancelling {
                cancelling.await;
            }
        });
    }

    fn stays(&self) -> bool {
        self.stays
    }

    async fn finalize(&self) -> Result<TurnGuard<'a, ()>> {
        self.job.check()?;
        Ok(self.world.turn.take().await)
    }
}

type Both<'a> = (&'a Rc<World>, &'a Rc<Port>);

/// Notes a step that failed because an operation was to.
pub(super) fn note(world: &World, what: &str, outcome: Result<()>) {
    if let Err(error) = outcome {
        world.explain(what, &error);
    }
}

async fn stream_into((world, port): Both<'_>, rng: &mut Rng) {
    let chain = port.node.borrow().chain();
    let base = 1 + rng.index(chain.len());
    world.note(port, || {
        format!("stream of {} down to {base}", chain[0].file)
    });
    let attending = Attending::begin((&**world, port), rng);
    let streamed = stream(
        &**world,
        (&attending.job, &attending),
        (&chain[0], chain.get(base)),
        (base as u32 - 1, false),
    )
    .await;
    world.note(port, || format!("the stream ends: {streamed:?}"));
    if attending.end("a stream", &streamed) {
        let _turn = world.turn.take().await;
        world.remove(&chain[1..base]).await;
    }
}

/// The images that a commit empties.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    Below,
    Active,
}

async fn commit_some((world, port): Both<'_>, rng: &mut Rng, which: Which) {
    let chain = port.node.borrow().chain();
    let top = match which {
        Which::Active => 0,
        Which::Below => 1 + rng.index(chain.len() - 2),
    };
    let base = top + 1 + rng.index(chain.len() - top - 1);
    let part = Committed {
        top: Rc::clone(&chain[top]),
        above: top.checked_sub(1).map(|above| Rc::clone(&chain[above])),
        base: Rc::clone(&chain[base]),
        layers: (base - top) as u32,
        chunk_bytes: rng.pick(&[512, 4096, 65536]),
    };
    if which == Which::Active && size_of(&part.base) > size_of(&part.top) {
        // The guest would get a larger disk, and what the base has there, as in QEMU.
        return;
    }
    {
        let _turn = world.turn.take().await;
        if let Err(error) = world.enter(&part.base).await {
            return world.explain("opening a base", &error);
        }
    }
    let (upper, lower) = (&chain[top].file, &part.base.file);
    world.note(port, || format!("commit of {upper} into {lower}"));
    let attending = Attending::begin((&**world, port), rng);
    let committed = commit(&**world, (&attending.job, &attending), &part).await;
    world.note(port, || format!("the commit ends: {committed:?}"));
    let is_done = attending.end("a commit", &committed);
    if !is_done {
        // Its clients go on writing the image.
        port.also.borrow_mut().clear();
    }
    let _turn = world.turn.take().await;
    note(world, "closing a base", world.leave(&part.base).await);
    if is_done {
        world.remove(&chain[top..base]).await;
    }
}

async fn mirror_to((world, port): Both<'_>, rng: &mut Rng) {
    let node = Rc::clone(&port.node.borrow());
    let is_top = node.backing().is_some() && rng.chance(30);
    let backing = node.backing().filter(|_| is_top);
    let Some(target) = new_node(world, (size_of(&node), backing), rng).await else {
        return;
    };
    {
        let _turn = world.turn.take().await;
        if let Err(error) = world.enter(&target).await {
            world.explain("opening a target", &error);
            return world.remove(&[target]).await;
        }
    }
    let how = Mirroring {
        layers: if is_top { 1 } else { u32::MAX },
        chunk_bytes: rng.pick(&[512, 4096, 65536]),
        mode: match rng.chance(50) {
            true => CopyMode::Background,
            false => CopyMode::WriteBlocking,
        },
    };
    let (from, to) = (&node.file, &target.file);
    world.note(port, || format!("mirror of {from} to {to}: {how:?}"));
    if how.mode == CopyMode::WriteBlocking && rng.chance(30) {
        // Perhaps one of a copy that a request makes.
        world.files.disk.add_fault(Fault {
            verb: Verb::Write,
            after: rng.below(100),
            errno: ENOSPC,
            duration: Duration::Once,
            file: None,
        });
    }
    let attending = Attending::begin((&**world, port), rng);
    let chain = node.chain();
    let mirrored = mirror(
        &**world,
        (&attending.job, &attending),
        (&node, &target),
        how,
    )
    .await;
    world.note(port, || format!("the mirror ends: {mirrored:?}"));
    let content = port.model.borrow().possible();
    let has_moved = Rc::ptr_eq(&port.node.borrow(), &target);
    if has_moved && attending.was_cancelled() {
        return world.fail("a mirror that was cancelled has taken over".to_string());
    }
    attending.too_late();
    let is_done = attending.end("a mirror", &mirrored);
    if is_done && attending.stays && !is_top {
        keep(port, &target, content);
    }
    let _turn = world.turn.take().await;
    note(world, "closing a target", world.leave(&target).await);
    match has_moved {
        true => {
            let left = if is_top { 1 } else { chain.len() };
            world.remove(&chain[..left]).await;
        }
        false => world.remove(&[target]).await,
    }
}

/// Notes what a copy has to hold from now on.
pub(super) fn keep(port: &Port, target: &Node, content: crate::remembered::Content) {
    let mut kept = port.kept.borrow_mut();
    kept.push(Kept {
        file: target.file.clone(),
        format: target.format,
        size: size_of(target),
        content,
    });
    if kept.len() > 3 {
        kept.remove(0);
    }
}

/// Makes an image, and opens it as a node, which nobody writes yet.
pub(super) async fn new_node(
    world: &World,
    (size, backing): (u64, Option<Rc<Node>>),
    rng: &mut Rng,
) -> Option<Rc<Node>> {
    let format = match backing.is_none() && rng.chance(15) {
        true => Format::Raw,
        false => Format::Qcow2,
    };
    let file = world.files.new_name("image");
    let named = backing.as_ref().map(|node| (&*node.file, node.format));
    let style = Style::draw(rng);
    let making = world.files.make((&file, format), (size, style), named);
    if let Err(error) = making.await {
        world.explain("making an image", &error);
        return None;
    }
    match world.add((&file, format), false, backing).await {
        Ok(node) => Some(node),
        Err(error) => {
            world.explain("opening an image", &error);
            None
        }
    }
}

async fn change_size((world, port): Both<'_>, rng: &mut Rng) {
    // The model of a disk that changes its size knows no request beside that.
    port.is_quiet.set(true);
    while port.requests.get() > 0 {
        pause().await;
    }
    let old = port.model.borrow().size();
    let size = match rng.chance(35) {
        true => rng.between(1, old / SECTOR_BYTES) * SECTOR_BYTES,
        false => rng.between(old / SECTOR_BYTES, SIZE_MAX / SECTOR_BYTES) * SECTOR_BYTES,
    };
    let id = world.request_id();
    {
        let _turn = world.turn.take().await;
        let node = Rc::clone(&port.node.borrow());
        // Of a disk with such bitmaps the size cannot be changed.
        note(world, "removing bitmaps", remove_lost(&node).await);
        port.model.borrow_mut().begin_resize(id, size);
        let resized = resize(&**world, &node, size).await;
        world.note(port, || {
            format!("{id}: {old:#x} bytes became {size:#x}: {resized:?}")
        });
        let outcome = match &resized {
            Ok(()) => Outcome::Done(Until::Flush),
            Err(_) => Outcome::Perhaps,
        };
        let now = size_of(&node);
        let mut model = port.model.borrow_mut();
        model.end_resize(id, (size, now), outcome);
        drop(model);
        note(world, "a resize", resized);
    }
    port.is_quiet.set(false);
}

async fn open_again((world, port): Both<'_>) {
    let _turn = world.turn.take().await;
    let node = Rc::clone(&port.node.borrow());
    // What a transaction prepares may lie above it already.
    let held = Held {
        clients: world.hold_clients(&node).await,
        disks: world.hold(&node).await,
    };
    world.note(port, || format!("{} is opened again", node.file));
    note(world, "opening again", world.open(&node, true, &held).await);
}
