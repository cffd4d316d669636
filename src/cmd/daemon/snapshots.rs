//! Snapshots: writes to a disk go to an overlay from one moment on; and transactions, which do
//! several things at one moment.
//!
//! | step | a failure, or a crash, leaves |
//! | --- | --- |
//! | overlays are made, durably, and opened | the disks as they were, and files that nothing uses |
//! | requests are held back | the same |
//! | the disks are frozen: what they have is durable | the same; after a failure they are opened again |
//! | overlays are put over them, and clients go there | the disks with their overlays, which have nothing yet |

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::file::host::FlushPolicy;
use cowslip::file::{Claim, ReadAs, ReadSet};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip_graph::{Drained, Held, NotDone, transact};
use cowslip_nodes::Destination;
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::backups::Prepared;
use super::bitmaps::{Change, Made};
use super::changing::{Changing, name_beside};
use super::export::Export;
use super::given::Given;
use super::host::Daemon;
use super::nodes::Node;
use super::words::{failed, missing, refused};
use crate::cmd::create::NewFile;

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

impl Daemon {
    /// `blockdev-snapshot`.
    ///
    /// # Errors
    /// Nodes that are not there, or in use; I/O.
    pub async fn blockdev_snapshot(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let overlay = self.overlay_of(given).await?;
        self.act(vec![Action::Overlay(overlay)]).await
    }

    /// `blockdev-snapshot-sync`.
    ///
    /// # Errors
    /// As [`Daemon::blockdev_snapshot`]; the overlay cannot be made.
    pub async fn blockdev_snapshot_sync(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let overlay = self.new_overlay_of(given).await?;
        self.act(vec![Action::Overlay(overlay)]).await
    }

    async fn overlay_of(&self, given: &Given) -> Result<Overlay, QmpError> {
        let node = self.nodes.referred(given.required("node")?)?;
        let overlay = self.nodes.referred(given.required("overlay")?)?;
        self.overlay(node, overlay, false).await
    }

    async fn overlay(
        &self,
        node: Rc<Node>,
        overlay: Rc<Node>,
        is_new: bool,
    ) -> Result<Overlay, QmpError> {
        node.may_change()?;
        overlay.may_change()?;
        self.nodes.is_root(&node)?;
        if overlay.backing().is_some() {
            return Err(refused("The overlay already has a backing image"));
        }
        if overlay.is_used() || !self.nodes.parents(&overlay).is_empty() {
            return Err(refused("The overlay is already in use"));
        }
        if Rc::ptr_eq(&node, &overlay) {
            return Err(QmpError::generic(format!(
                "Making '{}' a backing child of '{}' would create a cycle",
                node.name, overlay.name
            )));
        }
        let exports = self.exports.of(&node);
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
    async fn new_overlay_of(&self, given: &Given) -> Result<Overlay, QmpError> {
        let node = self.nodes.of_device_or_name(given)?;
        let Some(name) = given.text("snapshot-node-name") else {
            return Err(refused("New overlay node-name missing"));
        };
        if self.nodes.find(name).is_some() {
            return Err(refused("New overlay node-name already in use"));
        }
        node.may_change()?;
        self.nodes.is_root(&node)?;
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
        let made = self.overlay(node, Rc::clone(&overlay), true).await;
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
        let earlier = earlier.iter().filter_map(|action| match action {
            Action::Bitmap(change) => Some(change),
            _ => None,
        });
        let earlier: Vec<&Change> = earlier.collect();
        Ok(match action.required("type")? {
            "abort" => Action::Abort,
            "blockdev-snapshot" => Action::Overlay(self.overlay_of(&data).await?),
            "blockdev-snapshot-sync" => Action::Overlay(self.new_overlay_of(&data).await?),
            "blockdev-backup" => Action::Backup(Box::new(self.backup_of(&data, &earlier).await?)),
            other => match other.strip_prefix("block-dirty-bitmap-") {
                Some(verb) => Action::Bitmap(self.prepare_bitmap(verb, &data, &earlier).await?),
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
        let held = self.hold_all(&actions).await;
        let made = match self.change_bitmaps(&mut actions, &held.disks).await {
            Ok(made) => made,
            Err(error) => {
                drop(held);
                self.undo(actions).await;
                return Err(error);
            }
        };
        let (changes, actions): (Vec<_>, Vec<_>) = actions
            .into_iter()
            .partition(|action| matches!(action, Action::Bitmap(_)));
        let nothing = Given::default();
        let changing = Changing::by(self, &nothing);
        let overlaid = |action: &Action| match action {
            Action::Overlay(overlay) => Some(Rc::clone(&overlay.node)),
            Action::Backup(_) | Action::Bitmap(..) | Action::Abort => None,
        };
        let act = async |action| self.act_on(action, &held).await;
        let done = transact(&changing, (actions, &held), overlaid, act).await;
        if matches!(&done, Err(NotDone { actions, .. }) if !actions.is_empty()) {
            self.take_back(made).await;
        }
        drop(held);
        let mut left = Ok(());
        for change in &changes {
            if let Action::Bitmap(change) = change {
                left = left.and(self.leave_bitmap(change).await);
            }
        }
        match done {
            Ok(()) => left.map(|()| json!({})),
            Err(NotDone { actions, error }) => {
                self.undo(actions).await;
                Err(error)
            }
        }
    }

    /// Holds the requests of all disks of these actions back.
    async fn hold_all(&self, actions: &[Action]) -> Held {
        let mut nodes: Vec<Rc<Node>> = Vec::new();
        for action in actions {
            let of_action = match action {
                Action::Overlay(overlay) => vec![&overlay.node, &overlay.overlay],
                Action::Backup(prepared) => vec![prepared.node()],
                Action::Bitmap(change) => vec![change.node()],
                Action::Abort => Vec::new(),
            };
            for node in of_action {
                if !nodes.iter().any(|other| Rc::ptr_eq(other, node)) {
                    nodes.push(Rc::clone(node));
                }
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

    async fn act_on(self: &Rc<Self>, action: Action, held: &Held) -> Result<(), QmpError> {
        match action {
            Action::Overlay(overlay) => self.put_on(&overlay, held),
            Action::Backup(prepared) => {
                let drained = held.of(&prepared.node().live);
                let drained = drained.expect("it was held back");
                self.start_backup(*prepared, drained).await
            }
            Action::Bitmap(_) | Action::Abort => unreachable!("it is not among the actions"),
        }
    }

    /// Changes the bitmaps, removals last, or none of them; and finds those that backups copy.
    async fn change_bitmaps(
        &self,
        actions: &mut [Action],
        held: &[Drained],
    ) -> Result<Made, QmpError> {
        let mut made = Made::default();
        let changed = self.change_each(&mut made, actions, held).await;
        match changed {
            Ok(()) => Ok(made),
            Err(error) => {
                self.take_back(made).await;
                Err(error)
            }
        }
    }

    async fn change_each(
        &self,
        made: &mut Made,
        actions: &mut [Action],
        held: &[Drained],
    ) -> Result<(), QmpError> {
        for is_last in [false, true] {
            for action in &*actions {
                if let Action::Bitmap(change) = action
                    && change.is_last() == is_last
                {
                    self.change_bitmap_within(made, change, held).await?;
                }
            }
        }
        for action in actions {
            if let Action::Backup(prepared) = action {
                self.find_added(prepared).await?;
            }
        }
        Ok(())
    }

    /// Puts an overlay over its disk, and has the clients use it.
    fn put_on(&self, overlay: &Overlay, held: &Held) -> Result<(), QmpError> {
        let below = Some(Rc::clone(&overlay.node));
        self.nodes.is_frozen(&overlay.node);
        self.nodes
            .set_backing(&overlay.overlay, below, &held.disks)?;
        for export in &overlay.exports {
            let port = held.of(export.port()).expect("it was held back");
            port.exchange(export.moved_to(&overlay.overlay));
            self.nodes.count_out(&overlay.node, export.is_writable());
        }
        Ok(())
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
