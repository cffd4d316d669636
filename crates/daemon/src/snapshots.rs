//! Snapshots: writes to a disk go to an overlay from one moment on; and transactions, which do
//! several things at one moment.
//!
//! | step | a failure, or a crash, leaves |
//! | --- | --- |
//! | overlays are made, durably, and opened | the disks as they were, and files that nothing uses |
//! | requests are held back | the same |
//! | bitmaps are changed, what backups copy is marked, overlays are put over their disks | the same; after a failure the bitmaps have again what they had |
//! | the disks are frozen: what they have is durable | the same; after a failure they are opened again |
//! | clients go to the overlays, and backups begin; none of this can fail | the disks with their overlays, which have nothing yet |

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::file::host::FlushPolicy;
use cowslip::file::{Claim, ReadAs, ReadSet};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip_cmdline::new_file::NewFile;
use cowslip_graph::{Held, NotDone, transact};
use cowslip_nodes::Destination;
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::backups::Prepared;
use super::bitmaps::Change;
use super::changing::{Changing, name_beside};
use super::export::Export;
use super::given::Given;
use super::host::Daemon;
use super::nodes::{Node, in_chain};
use super::words::{failed, missing, refused};

/// A disk and the overlay that it gets.
pub struct Overlay {
    node: Rc<Node>,
    overlay: Rc<Node>,
    exports: Vec<Rc<Export>>,
    /// The overlay was opened for this.
    is_new: bool,
}

/// A part of a transaction that is prepared.
enum Action {
    Overlay(Overlay),
    Backup(Box<Prepared>),
    Bitmap(Change),
    Abort,
}

/// The same, in its daemon.
struct Part<'a> {
    daemon: &'a Rc<Daemon>,
    action: Action,
}

impl Action {
    /// The place among other actions: a bitmap is removed when no other change needs it, and a
    /// backup copies what its bitmap has then.
    fn rank(&self) -> u8 {
        match self {
            Action::Bitmap(change) => u8::from(change.is_last()),
            Action::Overlay(_) | Action::Backup(_) | Action::Abort => 2,
        }
    }

    /// Nodes whose requests are held back.
    fn held_nodes(&self) -> Vec<&Rc<Node>> {
        match self {
            Action::Overlay(overlay) => vec![&overlay.node, &overlay.overlay],
            Action::Backup(prepared) => prepared.held_nodes(),
            Action::Bitmap(change) => vec![change.node()],
            Action::Abort => Vec::new(),
        }
    }
}

/// The graph as it will be after the actions of a list.
#[derive(Clone, Copy)]
struct After<'a>(&'a [Action]);

impl After<'_> {
    fn overlays(&self) -> impl Iterator<Item = &Overlay> {
        self.0.iter().filter_map(|action| match action {
            Action::Overlay(overlay) => Some(overlay),
            _ => None,
        })
    }

    /// The overlay that this node will be.
    fn put_over(&self, node: &Rc<Node>) -> Option<&Overlay> {
        self.overlays().find(|it| Rc::ptr_eq(&it.overlay, node))
    }

    /// The node that will be below.
    fn backing(&self, node: &Rc<Node>) -> Option<Rc<Node>> {
        let below = self.put_over(node).map(|it| Rc::clone(&it.node));
        below.or_else(|| node.backing())
    }

    fn chain(&self, node: &Rc<Node>) -> impl Iterator<Item = Rc<Node>> {
        std::iter::successors(Some(Rc::clone(node)), |node| self.backing(node))
    }

    /// The exports of a node.
    fn exports(&self, daemon: &Daemon, node: &Rc<Node>) -> Vec<Rc<Export>> {
        match self.put_over(node) {
            Some(overlay) => overlay.exports.clone(),
            None => daemon.exports.of(node),
        }
    }

    /// Refuses a node that a job keeps from getting an overlay. A backup of the list does not: what
    /// it copies is frozen at its own moment. One that waits for changes would see none any more.
    fn may_change(&self, node: &Rc<Node>) -> Result<(), QmpError> {
        let is_copied = self.0.iter().any(|action| match action {
            Action::Backup(prepared) => prepared.copies_all_of(node),
            _ => false,
        });
        match is_copied {
            true => Ok(()),
            false => node.may_change(),
        }
    }

    /// Refuses a node that will lie below another one.
    fn is_root(&self, daemon: &Daemon, node: &Rc<Node>) -> Result<(), QmpError> {
        daemon.nodes.is_root(node)?;
        match self.overlays().find(|it| Rc::ptr_eq(&it.node, node)) {
            None => Ok(()),
            Some(above) => Err(in_chain(node, &above.overlay)),
        }
    }
}

impl Daemon {
    /// `blockdev-snapshot`.
    ///
    /// # Errors
    /// Nodes that are not there, or in use; I/O.
    pub async fn blockdev_snapshot(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let overlay = self.overlay_of(given, After(&[])).await?;
        self.act(vec![Action::Overlay(overlay)]).await
    }

    /// `blockdev-snapshot-sync`.
    ///
    /// # Errors
    /// As [`Daemon::blockdev_snapshot`]; the overlay cannot be made.
    pub async fn blockdev_snapshot_sync(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let overlay = self.new_overlay_of(given, After(&[])).await?;
        self.act(vec![Action::Overlay(overlay)]).await
    }

    /// `blockdev-backup`.
    ///
    /// # Errors
    /// As for [`Daemon::backup_of`]; I/O.
    pub async fn blockdev_backup(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let prepared = self.backup_of(given, (&[], &[])).await?;
        self.act(vec![Action::Backup(Box::new(prepared))]).await
    }

    async fn overlay_of(&self, given: &Given, after: After<'_>) -> Result<Overlay, QmpError> {
        let node = self.nodes.referred(given.required("node")?)?;
        let overlay = self.nodes.referred(given.required("overlay")?)?;
        self.overlay((node, overlay), false, after).await
    }

    async fn overlay(
        &self,
        (node, overlay): (Rc<Node>, Rc<Node>),
        is_new: bool,
        after: After<'_>,
    ) -> Result<Overlay, QmpError> {
        after.may_change(&node)?;
        overlay.may_change()?;
        after.is_root(self, &node)?;
        let exports = after.exports(self, &node);
        if overlay.is_used() {
            return Err(refused("The overlay is already in use"));
        }
        if after.backing(&overlay).is_some() {
            return Err(refused("The overlay already has a backing image"));
        }
        if after.chain(&node).any(|it| Rc::ptr_eq(&it, &overlay)) {
            return Err(QmpError::generic(format!(
                "Making '{}' a backing child of '{}' would create a cycle",
                node.name, overlay.name
            )));
        }
        if after.is_root(self, &overlay).is_err() {
            return Err(refused("The overlay is already in use"));
        }
        let overlay = Overlay {
            node,
            overlay,
            exports,
            is_new,
        };
        let mut entered = Vec::new();
        for export in &overlay.exports {
            let writes = export.is_writable();
            if let Err(error) = self.nodes.enter(&overlay.overlay, writes).await {
                for writes in entered {
                    drop(self.nodes.leave(&overlay.overlay, writes).await);
                }
                return Err(error);
            }
            entered.push(writes);
        }
        Ok(overlay)
    }

    /// Makes an overlay, and opens it.
    async fn new_overlay_of(&self, given: &Given, after: After<'_>) -> Result<Overlay, QmpError> {
        let node = self.nodes.of_device_or_name(given)?;
        let Some(name) = given.text("snapshot-node-name") else {
            return Err(refused("New overlay node-name missing"));
        };
        if self.nodes.find(name).is_some() {
            return Err(refused("New overlay node-name already in use"));
        }
        after.may_change(&node)?;
        after.is_root(self, &node)?;
        let format = given.text("format").unwrap_or("qcow2");
        if format != "qcow2" {
            let text = format!("overlays of format '{format}' are not supported");
            return Err(QmpError::generic(text));
        }
        let file = given.required("snapshot-file")?;
        if given.text("mode") != Some("existing") {
            self.make_overlay(&node, file).await?;
        }
        let options = json!({
            "node-name": name,
            "driver": "qcow2",
            "backing": null,
            "file": {"driver": "file", "filename": file},
        });
        let Value::Object(options) = options else {
            unreachable!("it is an object");
        };
        let overlay = self.nodes.add_implicit(options).await?;
        let both = (node, Rc::clone(&overlay));
        let made = self.overlay(both, true, after).await;
        if made.is_err() {
            self.nodes.drop_unused(&[overlay]).await;
        }
        made
    }

    async fn make_overlay(&self, node: &Rc<Node>, file: &str) -> Result<(), QmpError> {
        let mut read = ReadSet::default();
        for other in self.nodes.all() {
            other.image().add_to(&mut read, ReadAs::Image);
        }
        let destination = Destination::Host(file.to_string());
        let claim = Claim::qcow2(true);
        let made = NewFile::create(&destination, &read, claim, FlushPolicy::Honour).await;
        let (new, opened) = made.map_err(failed)?;
        let options = CreateOptions {
            backing_file: Some(name_beside(&node.filename(), file)),
            backing_format: Some(node.driver().to_string()),
            ..CreateOptions::new(node.live_size())
        };
        create(Arc::clone(&opened), None, &options)
            .await
            .map_err(failed)?;
        drop(opened.claim(Claim::NONE));
        sync_directory(Path::new(file)).map_err(failed)?;
        new.finished();
        Ok(())
    }

    /// `transaction`.
    ///
    /// # Errors
    /// One of the actions cannot be done: then none is.
    pub async fn transaction(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let Some(Value::Array(list)) = given.0.get("actions") else {
            return Err(missing("actions"));
        };
        let mut actions = Vec::new();
        for action in list {
            let Value::Object(action) = action else {
                return Err(missing("actions"));
            };
            match self.prepare(&Given(action.clone()), &actions).await {
                Ok(action) => actions.push(action),
                Err(error) => {
                    self.undo(actions).await;
                    return Err(error);
                }
            }
        }
        self.act(actions).await
    }

    async fn prepare(
        self: &Rc<Self>,
        action: &Given,
        earlier: &[Action],
    ) -> Result<Action, QmpError> {
        let data = action.group("data").unwrap_or_default();
        let after = After(earlier);
        let (mut changes, mut job_ids) = (Vec::new(), Vec::new());
        for action in earlier {
            match action {
                Action::Bitmap(change) => changes.push(change),
                Action::Backup(prepared) => job_ids.push(prepared.job_id()),
                Action::Overlay(_) | Action::Abort => {}
            }
        }
        Ok(match action.required("type")? {
            "abort" => Action::Abort,
            "blockdev-snapshot" => Action::Overlay(self.overlay_of(&data, after).await?),
            "blockdev-snapshot-sync" => Action::Overlay(self.new_overlay_of(&data, after).await?),
            "blockdev-backup" => {
                let prepared = self.backup_of(&data, (&changes, &job_ids)).await?;
                Action::Backup(Box::new(prepared))
            }
            other => match other.strip_prefix("block-dirty-bitmap-") {
                Some(verb) => Action::Bitmap(self.prepare_bitmap(verb, &data, &changes).await?),
                None => {
                    let text = format!("actions of type '{other}' are not supported");
                    return Err(QmpError::generic(text));
                }
            },
        })
    }

    /// Takes back what was prepared.
    async fn undo(&self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Overlay(overlay) => {
                    for export in &overlay.exports {
                        let writes = export.is_writable();
                        drop(self.nodes.leave(&overlay.overlay, writes).await);
                    }
                    if overlay.is_new {
                        self.nodes.drop_unused(&[overlay.overlay]).await;
                    }
                }
                Action::Backup(prepared) => self.leave_backup(*prepared).await,
                Action::Bitmap(change) => drop(self.leave_bitmap(&change).await),
                Action::Abort => {}
            }
        }
    }

    /// Does all actions at one moment, at which no request to their disks is under way.
    async fn act(self: &Rc<Self>, mut actions: Vec<Action>) -> Result<Value, QmpError> {
        if actions.iter().any(|action| matches!(action, Action::Abort)) {
            self.undo(actions).await;
            return Err(refused("Transaction aborted using Abort action"));
        }
        actions.sort_by_key(Action::rank);
        let is_bitmap = |action: &Action| matches!(action, Action::Bitmap(_));
        let are_bitmaps = actions.iter().all(is_bitmap);
        let entered = actions.iter().filter_map(|action| match action {
            Action::Bitmap(change) => change.entered().cloned(),
            _ => None,
        });
        let entered: Vec<Rc<Node>> = entered.collect();
        let made: Vec<Rc<Node>> = After(&actions)
            .overlays()
            .filter(|it| it.is_new)
            .map(|it| Rc::clone(&it.overlay))
            .collect();
        let held = self.hold_all(&actions).await;
        let part = |action| Part {
            daemon: self,
            action,
        };
        let parts = actions.into_iter().map(part).collect();
        let nothing = Given::default();
        let done = transact(&Changing::by(self, &nothing), (parts, &held)).await;
        drop(held);
        if let Err(NotDone { actions, error }) = done {
            let actions = actions.into_iter().map(|part: Part<'_>| part.action);
            self.undo(actions.collect()).await;
            return Err(error);
        }
        // As in QEMU: nothing uses an overlay that was made for the clients of a disk without any,
        // and it leaves the disk as it was.
        for node in made.iter().rev() {
            self.nodes.drop_unused(std::slice::from_ref(node)).await;
        }
        let mut left = Ok(());
        for node in entered {
            left = left.and(self.nodes.leave(&node, true).await);
        }
        match left {
            Err(error) if are_bitmaps => Err(error),
            // All is done: clients would take an error for the opposite.
            Err(error) => {
                let text = "an image could not be closed in order after a transaction";
                self.log.write(format_args!("{text}: {error}"));
                Ok(json!({}))
            }
            Ok(()) => Ok(json!({})),
        }
    }

    /// Holds the requests of all disks of these actions back.
    async fn hold_all(&self, actions: &[Action]) -> Held {
        let mut nodes: Vec<Rc<Node>> = Vec::new();
        for node in actions.iter().flat_map(Action::held_nodes) {
            if !nodes.iter().any(|other| Rc::ptr_eq(other, node)) {
                nodes.push(Rc::clone(node));
            }
        }
        let mut held = Held::default();
        // Clients first: their requests are under way in the nodes.
        for node in &nodes {
            held.clients.extend(self.hold_ports(node).await);
        }
        held.disks = self.nodes.hold(&nodes).await;
        held
    }

    /// Has the clients of a disk that was frozen use its overlay.
    fn move_up(&self, overlay: &Overlay, held: &Held) {
        self.nodes.is_frozen(&overlay.node);
        for export in &overlay.exports {
            let port = held.of(export.port()).expect("it was held back");
            port.exchange(export.moved_to(&overlay.overlay));
            self.nodes.count_out(&overlay.node, export.is_writable());
        }
    }
}

impl cowslip_graph::Action<Changing<'_>> for Part<'_> {
    fn overlaid(&self) -> Option<Rc<Node>> {
        match &self.action {
            Action::Overlay(overlay) => Some(Rc::clone(&overlay.node)),
            Action::Backup(_) | Action::Bitmap(..) | Action::Abort => None,
        }
    }

    async fn prepare(&mut self, held: &Held) -> Result<(), QmpError> {
        let daemon = self.daemon;
        match &mut self.action {
            Action::Overlay(overlay) => {
                let below = Some(Rc::clone(&overlay.node));
                let nodes = &daemon.nodes;
                nodes.set_backing(&overlay.overlay, below, &held.disks)
            }
            Action::Backup(prepared) => daemon.mark_backup(prepared).await,
            Action::Bitmap(change) => daemon.change_bitmap_within(change, &held.disks).await,
            Action::Abort => Ok(()),
        }
    }

    async fn take_back(&mut self, held: &Held) {
        let daemon = self.daemon;
        match &mut self.action {
            Action::Overlay(overlay) => {
                let alone = daemon
                    .nodes
                    .set_backing(&overlay.overlay, None, &held.disks);
                alone.expect("an image without others below it is no loop");
            }
            Action::Backup(prepared) => prepared.unmark().await,
            Action::Bitmap(change) => daemon.take_back_bitmap(change, &held.disks).await,
            Action::Abort => {}
        }
    }

    fn commit(self, held: &Held) {
        match self.action {
            Action::Overlay(overlay) => self.daemon.move_up(&overlay, held),
            Action::Backup(prepared) => self.daemon.begin_backup(*prepared, held),
            Action::Bitmap(_) | Action::Abort => {}
        }
    }
}

/// Makes the name of a new file durable.
fn sync_directory(file: &Path) -> Result<(), String> {
    let directory = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let synced = std::fs::File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| cowslip::error::system_words(&error))
}
