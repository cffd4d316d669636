//! Transactions: overlays, backups and bitmaps of one disk or both, at one moment.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::{Extent, Format};
use cowslip::{Error, Job, Result};
use cowslip_graph::{Backup, Held, Host, NotDone, Rotates, Rotation, transact};

use crate::remembered::Content;
use crate::rng::Rng;

use super::attending::Attending;
use super::images::{Style, read_all};
use super::kept::Kept;
use super::marks::{Bitmap, NewBitmap};
use super::world::{Node, Port, World, size_of};

/// A part of a transaction.
enum Action {
    Overlay(Rc<Node>, Rc<Node>),
    Backup(Box<Prepared>),
    Bitmap(Rc<Port>, NewBitmap, Option<Bitmap>),
}

/// The same, in its world, and the backups whose moments were taken.
struct Part<'a> {
    world: &'a World,
    started: &'a RefCell<Vec<Started>>,
    action: Action,
}

/// The contents of a copy.
#[derive(Debug)]
enum Wanted {
    All,
    /// Those of the uppermost image.
    Top,
    Since(Bitmap, Rotates),
}

struct Prepared {
    port: Rc<Port>,
    node: Rc<Node>,
    target: Rc<Node>,
    backup: Backup,
    wanted: Wanted,
    rotation: Option<Rotation<Bitmap>>,
}

/// A backup whose moment was taken.
struct Started {
    prepared: Box<Prepared>,
    content: Content,
}

/// Makes overlays over a disk, or backs it up, and perhaps the other one at the same moment.
pub(super) async fn transaction(
    (world, port): (&Rc<World>, &Rc<Port>),
    rng: &mut Rng,
    is_backup: bool,
) {
    let mut ports = vec![Rc::clone(port)];
    let other = world.ports.iter().find(|other| !Rc::ptr_eq(other, port));
    let other = other.filter(|other| rng.chance(40) && !other.has_ended.get());
    // The script of the other disk waits.
    if let Some(other) = other.filter(|other| !other.is_busy.replace(true)) {
        ports.push(Rc::clone(other));
    }
    {
        let _turn = world.turn.take().await;
        let mut actions = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let backs_up = if index == 0 {
                is_backup
            } else {
                rng.chance(50)
            };
            let node = Rc::clone(&port.node.borrow());
            match backs_up {
                true => prepare_backup((world, port, &node), rng, &mut actions).await,
                false => {
                    let backing = (size_of(&node), Some(Rc::clone(&node)));
                    let Some(overlay) = world.new_node(backing, rng).await else {
                        continue;
                    };
                    if let Err(error) = world.enter(&overlay).await {
                        world.explain("opening an overlay", &error);
                        world.remove(&[overlay]).await;
                        continue;
                    }
                    world.note(port, || {
                        format!("{} is to lie over {}", overlay.file, node.file)
                    });
                    // It shows the disk as soon as it is an image.
                    let shows = (overlay.file.clone(), overlay.format);
                    port.also.replace(vec![shows]);
                    actions.push(Action::Overlay(node, overlay));
                }
            }
        }
        let started = perform(world, &ports, actions).await;
        drop(_turn);
        for started in started {
            run(world, started, rng).await;
        }
    }
    for other in &ports[1..] {
        other.is_busy.set(false);
    }
}

async fn perform(world: &World, ports: &[Rc<Port>], actions: Vec<Action>) -> Vec<Started> {
    let before: Vec<Rc<Node>> = ports
        .iter()
        .map(|port| Rc::clone(&port.node.borrow()))
        .collect();
    let mut nodes: Vec<Rc<Node>> = Vec::new();
    for action in &actions {
        let of_action = match action {
            Action::Overlay(below, overlay) => vec![below, overlay],
            Action::Backup(prepared) => vec![&prepared.node],
            Action::Bitmap(..) => Vec::new(),
        };
        for node in of_action {
            if !nodes.iter().any(|other| Rc::ptr_eq(other, node)) {
                nodes.push(Rc::clone(node));
            }
        }
    }
    let held = world.hold_all(&nodes).await;
    let started = RefCell::new(Vec::new());
    let part = |action| Part {
        world,
        started: &started,
        action,
    };
    let parts: Vec<Part<'_>> = actions.into_iter().map(part).collect();
    let done = transact(world, (parts, &held)).await;
    if let Err(NotDone { actions, error }) = done {
        world.trace.line(|| format!("a transaction fails: {error}"));
        world.explain("a transaction", &error);
        let nodes = before.iter().zip(ports);
        let mut moved = nodes.filter(|(node, port)| !Rc::ptr_eq(node, &port.node.borrow()));
        if moved.next().is_some() || !started.borrow().is_empty() {
            world.fail("a transaction that failed has moved a disk".to_string());
        }
        drop(held);
        for port in ports {
            port.also.borrow_mut().clear();
        }
        for part in actions {
            match part.action {
                Action::Overlay(_, overlay) => world.remove(&[overlay]).await,
                Action::Backup(prepared) => close_target(world, &prepared.target).await,
                Action::Bitmap(..) => {}
            }
        }
    }
    started.into_inner()
}

impl cowslip_graph::Action<World> for Part<'_> {
    fn overlaid(&self) -> Option<Rc<Node>> {
        match &self.action {
            Action::Overlay(below, _) => Some(Rc::clone(below)),
            Action::Backup(_) | Action::Bitmap(..) => None,
        }
    }

    async fn prepare(&mut self, held: &Held) -> Result<()> {
        match &mut self.action {
            Action::Overlay(below, overlay) => self.world.put_over(overlay, Some(below), held),
            Action::Bitmap(port, new, begun) => {
                let node = Rc::clone(&port.node.borrow());
                begun.replace(new.begin(&node).await?);
                Ok(())
            }
            Action::Backup(prepared) => prepared.mark().await,
        }
    }

    async fn take_back(&mut self, held: &Held) {
        match &mut self.action {
            Action::Overlay(_, overlay) => {
                let alone = self.world.put_over(overlay, None, held);
                self.world.note_outcome("taking an overlay off", alone);
            }
            Action::Bitmap(port, _, begun) => {
                if let Some(bitmap) = begun.take() {
                    let node = Rc::clone(&port.node.borrow());
                    self.world
                        .note_outcome("removing a bitmap", bitmap.remove(&node).await);
                }
            }
            Action::Backup(prepared) => {
                if let Some(rotation) = prepared.rotation.take() {
                    let rotated = rotation.take_back().await;
                    if rotated.is_err() {
                        // What it has to have is not known.
                        prepared.port.bitmap.take();
                    }
                    self.world
                        .note_outcome("taking the rotation of a bitmap back", rotated);
                }
            }
        }
    }

    fn commit(self, held: &Held) {
        match self.action {
            Action::Overlay(below, overlay) => self.world.move_up(&below, &overlay, held),
            Action::Bitmap(port, _, begun) => {
                let node = Rc::clone(&port.node.borrow());
                let bitmap = begun.expect("it was prepared");
                bitmap.follow(held.of(&node.live).expect("it was held back"));
                port.bitmap.replace(Some(bitmap));
            }
            Action::Backup(prepared) => {
                let drained = held.of(&prepared.node.live).expect("it was held back");
                let content = prepared.port.model.borrow().possible();
                let (from, to) = (&prepared.node.file, &prepared.target.file);
                let wanted = &prepared.wanted;
                let text = || format!("backup of {from} to {to} begins: {wanted:?}");
                self.world.note(&prepared.port, text);
                prepared.backup.freeze(drained);
                let started = Started { prepared, content };
                self.started.borrow_mut().push(started);
            }
        }
    }
}

impl Prepared {
    /// Marks what is to be copied.
    async fn mark(&mut self) -> Result<()> {
        match &self.wanted {
            Wanted::Since(bitmap, rotates) => {
                let bitmap = (bitmap.clone(), *rotates);
                self.rotation = Some(self.backup.want_since(bitmap).await?);
                Ok(())
            }
            Wanted::Top => {
                let is_own = |extent: &Extent| extent.depth == 0 && extent.present;
                self.backup.want_extents(&Job::default(), is_own).await
            }
            Wanted::All => {
                self.backup.want_all();
                Ok(())
            }
        }
    }
}

/// Prepares a copy of what has changed since the last one, or of all or the uppermost image.
async fn prepare_backup(
    (world, port, node): (&World, &Rc<Port>, &Rc<Node>),
    rng: &mut Rng,
    actions: &mut Vec<Action>,
) {
    let size = size_of(node);
    let last = port.kept.borrow().last().cloned();
    let bitmap = port.bitmap.borrow().clone();
    let (wanted, backing) = match (bitmap, last) {
        (Some(bitmap), Some(last)) if rng.chance(80) => (
            Wanted::Since(bitmap, Rotates::OnSuccess),
            Some((last.file, last.format)),
        ),
        _ => {
            let below = node.backing().filter(|_| rng.chance(25));
            match below {
                Some(below) => (Wanted::Top, Some((below.file.clone(), below.format))),
                None => (Wanted::All, None),
            }
        }
    };
    let file = world.files.new_name("backup");
    let named = backing.as_ref().map(|(name, format)| (&**name, *format));
    let style = Style::draw(rng);
    let making = world
        .files
        .make((&file, Format::Qcow2), (size, style), named);
    let made = match making.await {
        Ok(()) => world.open_target(&file).await,
        Err(error) => Err(error),
    };
    let target = match made {
        Ok(target) => target,
        Err(error) => return world.explain("making a target", &error),
    };
    let chunk_bytes = rng.pick(&[512, 4096, 65536]);
    let (source, copy) = (Arc::clone(&node.live), Arc::clone(&target.live) as _);
    let begins_again = matches!(wanted, Wanted::All);
    actions.push(Action::Backup(Box::new(Prepared {
        port: Rc::clone(port),
        node: Rc::clone(node),
        target,
        backup: Backup::new(source, copy, chunk_bytes),
        wanted,
        rotation: None,
    })));
    if begins_again {
        if let Some(old) = port.bitmap.take() {
            world.note_outcome("removing a bitmap", old.remove(node).await);
        }
        let new = NewBitmap::draw((world, node), rng);
        actions.push(Action::Bitmap(Rc::clone(port), new, None));
    }
}

async fn close_target(world: &World, target: &Node) {
    world.note_outcome("closing a target", target.image().close().await);
}

/// Copies, and keeps what the copy has to hold.
async fn run(world: &World, started: Started, rng: &mut Rng) {
    let Started { prepared, content } = started;
    let Prepared {
        port,
        target,
        backup,
        wanted,
        rotation,
        ..
    } = *prepared;
    let attending = Attending::begin((world, &port), rng);
    let mut outcome = backup.run(&attending.job).await;
    drop(backup);
    if attending.was_cancelled() {
        // Its user has, before its last step.
        outcome = outcome.and(Err(Error::Cancelled));
    }
    world.note(&port, || {
        format!("backup to {} ends: {outcome:?}", target.file)
    });
    let is_done = attending.end("a backup", &outcome);
    let is_chained = !matches!(wanted, Wanted::Top);
    if let Some(rotation) = rotation {
        let rotated = rotation.end(is_done).await;
        if rotated.is_err() {
            // What it has to have is not known.
            port.bitmap.take();
        }
        world.note_outcome("the rotation of a bitmap", rotated);
    }
    if is_done {
        if is_chained {
            port.keep(&target, content);
        } else {
            check_top((world, &port), &target, &content).await;
        }
    } else if matches!(wanted, Wanted::All) {
        // No copy has what the bitmap begins with.
        port.bitmap.take();
    }
    close_target(world, &target).await;
}

/// Checks a copy of the uppermost image while what lies below it is as it was.
async fn check_top(both: (&World, &Port), target: &Node, content: &Content) {
    let (world, port) = both;
    let read = read_all(&target.image()).await;
    let kept = Kept {
        file: target.file.clone(),
        format: target.format,
        size: size_of(target),
        content: content.clone(),
    };
    match read {
        Ok(bytes) => {
            if let Err(what) = kept.check_whole(&bytes) {
                world.fail(format!("disk {}: {what}", port.number));
            }
        }
        Err(error) => world.explain("reading a backup", &error),
    }
}
