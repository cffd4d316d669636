//! Changes within the image of a node: internal snapshots, and the name of its backing file.

use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::inspect::SnapshotInfo;
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Image, Job};
use cowslip_nodes::Access;
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::given::Given;
use super::host::Daemon;
use super::nodes::Node;
use super::words::{failed, refused};

impl Daemon {
    /// `blockdev-snapshot-internal-sync`.
    ///
    /// # Errors
    /// No such node; one of another format; a name that is taken; I/O.
    pub async fn internal_snapshot(&self, given: &Given) -> Result<Value, QmpError> {
        let node = self.nodes.referred(given.required("device")?)?;
        let name = given.required("name")?;
        self.may_keep_snapshots(&node)?;
        if name.is_empty() {
            return Err(refused("Name is empty"));
        }
        let known = node.image().snapshots().await.map_err(failed)?;
        if known.iter().any(|snapshot| snapshot.name == name) {
            let device = &node.name;
            return Err(QmpError::generic(format!(
                "Snapshot with name '{name}' already exists on device '{device}'"
            )));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default();
        let new = NewSnapshot {
            name: name.to_string(),
            date_sec: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
            date_nsec: now.subsec_nanos(),
        };
        self.nodes.enter(&node, true).await?;
        let made = node.image().create_snapshot(&new, &Job::default()).await;
        let left = self.nodes.leave(&node, true).await;
        made.map_err(failed)?;
        left.map(|()| json!({}))
    }

    /// `blockdev-snapshot-delete-internal-sync`.
    ///
    /// # Errors
    /// No such node or snapshot; I/O.
    pub async fn delete_internal_snapshot(&self, given: &Given) -> Result<Value, QmpError> {
        let node = self.nodes.referred(given.required("device")?)?;
        let (id, name) = (given.text("id"), given.text("name"));
        if id.is_none() && name.is_none() {
            return Err(refused("Name or id must be provided"));
        }
        self.may_keep_snapshots(&node)?;
        let known = node.image().snapshots().await.map_err(failed)?;
        let is_meant = |snapshot: &&SnapshotInfo| {
            id.is_none_or(|id| snapshot.id == id) && name.is_none_or(|name| snapshot.name == name)
        };
        let Some(found) = known.iter().find(is_meant) else {
            let (id, name) = (id.unwrap_or("null"), name.unwrap_or("null"));
            return Err(QmpError::generic(format!(
                "Snapshot with id '{id}' and name '{name}' does not exist on device '{}'",
                node.name
            )));
        };
        let choice = SnapshotChoice::IdAndName {
            id: found.id.clone(),
            name: found.name.clone(),
        };
        self.nodes.enter(&node, true).await?;
        let image = node.image();
        let deleted = image.delete_snapshot(&choice, &Job::default()).await;
        drop(image);
        let left = self.nodes.leave(&node, true).await;
        deleted.map_err(failed)?;
        left.map(|()| describe_snapshot(found))
    }

    fn may_keep_snapshots(&self, node: &Rc<Node>) -> Result<(), QmpError> {
        if node.driver() != "qcow2" {
            return Err(QmpError::generic(format!(
                "Block format '{}' used by device '{}' does not support internal snapshots",
                node.driver(),
                node.name
            )));
        }
        node.may_change()?;
        self.nodes.is_root(node)
    }

    /// `change-backing-file`: the chain in use stays as it is.
    ///
    /// # Errors
    /// No such nodes; an image without a backing file, or of another chain; I/O.
    pub async fn change_backing_file(&self, given: &Given) -> Result<Value, QmpError> {
        let top = self.nodes.referred(given.required("device")?)?;
        let node = self.nodes.named(given.required("image-node-name")?)?;
        let Some(below) = node.backing() else {
            return Err(refused(
                "not allowing backing file change on an image without a backing file",
            ));
        };
        if !top.chain().iter().any(|other| Rc::ptr_eq(other, &node)) {
            return Err(QmpError::generic(format!(
                "'{}' and image file are not in the same chain",
                top.name
            )));
        }
        node.may_change()?;
        let backing = BackingFile::File {
            name: given.required("backing-file")?.to_string(),
            format: below.driver().to_string(),
        };
        let held = self.nodes.hold(&self.nodes.with_above(&node)).await;
        let access = node.access();
        if access == Access::Read {
            self.nodes.open_held(&node, Access::Write, &held).await?;
        }
        let amendment = Amendment::of_backing(backing);
        let amended = node.image().amend(&amendment, &Job::default()).await;
        // The session has ended with it.
        let reopened = self.nodes.open_held(&node, access, &held).await;
        amended.map_err(failed)?;
        reopened.map(|()| json!({}))
    }
}

/// The internal snapshots of an image, as queries have them; none if its table cannot be read.
pub async fn describe_snapshots(image: &Image) -> Vec<Value> {
    let known = image.snapshots().await.unwrap_or_default();
    known.iter().map(describe_snapshot).collect()
}

fn describe_snapshot(snapshot: &SnapshotInfo) -> Value {
    const SECOND_NSEC: u64 = 1_000_000_000;
    let mut found = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_size,
        "date-sec": snapshot.date_sec,
        "date-nsec": snapshot.date_nsec,
        "vm-clock-sec": snapshot.vm_clock_nsec / SECOND_NSEC,
        "vm-clock-nsec": snapshot.vm_clock_nsec % SECOND_NSEC,
    });
    if let Some(icount) = snapshot.icount {
        found["icount"] = icount.into();
    }
    found
}
