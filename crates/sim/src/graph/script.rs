//! A script: changes of a disk's chain, one after the other, as clients of a daemon ask for them.

use std::rc::Rc;

use cowslip::image::Format;
use cowslip_graph::{Committed, CopyMode, Held, Host, Mirroring, commit, mirror, resize, stream};

use crate::disk::fault::{Duration, ENOSPC, Fault, Verb};
use crate::model::{Outcome, SECTOR_BYTES, Until};
use crate::rng::Rng;

use super::SIZE_MAX;
use super::attending::Attending;
use super::checkpoint::checkpoint;
use super::guest::pause;
use super::marks::remove_lost;
use super::transaction::transaction;
use super::world::{Port, World, size_of};

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

type Both<'a> = (&'a Rc<World>, &'a Rc<Port>);

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
    world.note_outcome("closing a base", world.leave(&part.base).await);
    if is_done {
        world.remove(&chain[top..base]).await;
    }
}

async fn mirror_to((world, port): Both<'_>, rng: &mut Rng) {
    let node = Rc::clone(&port.node.borrow());
    let is_top = node.backing().is_some() && rng.chance(30);
    let backing = node.backing().filter(|_| is_top);
    let Some(target) = world.new_node((size_of(&node), backing), rng).await else {
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
        port.keep(&target, content);
    }
    let _turn = world.turn.take().await;
    world.note_outcome("closing a target", world.leave(&target).await);
    match has_moved {
        true => {
            let left = if is_top { 1 } else { chain.len() };
            world.remove(&chain[..left]).await;
        }
        false => world.remove(&[target]).await,
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
        world.note_outcome("removing bitmaps", remove_lost(&node).await);
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
        world.note_outcome("a resize", resized);
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
    world.note_outcome("opening again", world.open(&node, true, &held).await);
}
