//! Checkpoints: moments of several disks that are taken in one step, for backups.
//!
//! A checkpoint is a bitmap in the image of each of its disks (`checkpoint-NAME`), in the order in
//! which they were made. The last one notes what changes; so what has changed since a checkpoint is
//! in its bitmap and those behind it. At the moment of a new one requests to all disks are held
//! back: the last bitmap ends, the new one begins, and the view, or the copy, of the disk begins
//! ([`Checkpoint`]).
//!
//! | step | a failure leaves |
//! | --- | --- |
//! | images are open for writing, have the new bitmaps, which note nothing; room for what changes | the disks as they were |
//! | the moment: bitmaps are exchanged, views begin | the same: those that were exchanged are exchanged back |
//! | exports, jobs | the checkpoint, with its bitmaps |
//!
//! After a crash bitmaps are inconsistent, as all that an image keeps, and those that were added
//! since the daemon has begun are not there: what has changed since then is not known.

use std::rc::Rc;
use std::sync::Arc;

use cowslip::Disk;
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip_cmdline::bitmaps::CHECKPOINT;
use cowslip_cmdline::open::object::is_identifier;
use cowslip_graph::{
    Backup, CHUNK_BYTES, Checkpoint, DirtyMap, Held, Link, Marks, Use, View, complete_from, join,
    noted_changes, removed_with,
};
use cowslip_nbd::Export as NbdExport;
use cowslip_qmp::QmpError;
use serde_json::{Map, Value, json};

use super::active::{Active, Offered};
use super::bitmap::Bitmap;
use super::contexts::OfMap;
use super::exports::PATIENCE;
use super::given::Given;
use super::host::Daemon;
use super::job::JobOptions;
use super::nodes::Node;
use super::reserved::Reserved;
use super::scratch::scratch_for;
use super::words::{failed, missing, refused};

/// A disk that a checkpoint is to be taken of.
struct Part {
    node: Rc<Node>,
    /// Checkpoints that can be no parent any more. With a new one behind them they would seem to
    /// know what has changed, so they are removed.
    useless: Vec<Bitmap>,
    /// Its other checkpoints so far, the oldest first.
    earlier: Vec<Bitmap>,
    /// The place of the parent among them.
    since: Option<usize>,
    way: Way,
}

/// The use of the moment.
enum Way {
    Export(String),
    Target(Rc<Node>),
}

/// A disk that is ready for the moment, with the new bitmap in its image.
struct Ready {
    part: Part,
    moment: Checkpoint<Bitmap>,
    reserved: Reserved,
}

impl Part {
    /// The bitmap that notes what changes, so far.
    fn last(&self) -> Option<&Bitmap> {
        let last = self.earlier.last();
        last.filter(|bitmap| bitmap.is_enabled())
    }
}

fn bitmap_name(checkpoint: &str) -> String {
    format!("{CHECKPOINT}{checkpoint}")
}

async fn change(node: &Node, bitmap: &str, change: BitmapChange) -> Result<(), QmpError> {
    let changed = node.image().change_bitmap(bitmap, &change).await;
    changed.map_err(failed)
}

/// The checkpoints of a node, the oldest first.
async fn checkpoints_of(node: &Rc<Node>) -> Result<Vec<Bitmap>, QmpError> {
    let bitmaps = node.bitmaps().await?.into_iter();
    let is_one = |bitmap: &Bitmap| bitmap.is_kept() && bitmap.name.starts_with(CHECKPOINT);
    Ok(bitmaps.filter(is_one).collect())
}

impl Daemon {
    /// `x-cowslip-checkpoint-create`.
    ///
    /// # Errors
    /// No such nodes; what cannot be; I/O. The disks, and their bitmaps, are as they were.
    pub async fn checkpoint_create(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let name = given.required("name")?;
        if !is_identifier(name) {
            return Err(QmpError::generic(format!(
                "Invalid checkpoint name '{name}': a letter, then letters, digits, '-', '.' and '_'"
            )));
        }
        let Some(Value::Array(disks)) = given.0.get("disks") else {
            return Err(missing("disks"));
        };
        if disks.is_empty() {
            return Err(refused("A checkpoint needs at least one disk"));
        }
        let mut parts: Vec<Part> = Vec::new();
        for disk in disks {
            let Value::Object(disk) = disk else {
                return Err(missing("disks"));
            };
            let part = self.part(given, &Given(disk.clone())).await?;
            let is_twice = |other: &Part| {
                let same_export = match (&other.way, &part.way) {
                    (Way::Export(one), Way::Export(other)) => one == other,
                    (Way::Target(one), Way::Target(other)) => Rc::ptr_eq(one, other),
                    _ => false,
                };
                Rc::ptr_eq(&other.node, &part.node) || same_export
            };
            if parts.iter().any(is_twice) {
                return Err(refused("Disks, targets and exports are each named once"));
            }
            parts.push(part);
        }
        let mut ready = Vec::new();
        for part in parts {
            match self.ready(part, given).await {
                Ok(part) => ready.push(part),
                Err(error) => {
                    self.abandon(ready, name).await;
                    return Err(error);
                }
            }
        }
        let nodes: Vec<_> = ready.iter().map(|it| Rc::clone(&it.part.node)).collect();
        let held = Held {
            clients: Vec::new(),
            disks: self.nodes.hold(&nodes).await,
        };
        let (rest, moments): (Vec<_>, Vec<_>) = ready
            .into_iter()
            .map(|it| ((it.part, it.reserved), it.moment))
            .unzip();
        let taken = Checkpoint::take(&moments, &held).await;
        drop(held);
        let ready = rest.into_iter().zip(moments);
        let ready = ready.map(|((part, reserved), moment)| Ready {
            part,
            moment,
            reserved,
        });
        let ready = ready.collect();
        if let Err(error) = taken {
            self.abandon(ready, name).await;
            return Err(error);
        }
        self.begin(ready, (name, given.text("parent"))).await
    }

    /// Looks whether a checkpoint of a disk can be taken.
    async fn part(&self, given: &Given, disk: &Given) -> Result<Part, QmpError> {
        let name = given.required("name")?;
        let node = self.nodes.referred(disk.required("node")?)?;
        if node.driver() != "qcow2" {
            return Err(QmpError::generic(format!(
                "Checkpoints of '{}' are not possible: its image keeps no bitmaps",
                node.name
            )));
        }
        node.may_change()?;
        self.nodes.is_root(&node)?;
        let mut earlier = checkpoints_of(&node).await?;
        let wanted = bitmap_name(name);
        if node.find_bitmap(&wanted).await?.is_some() {
            let text = format!("Checkpoint '{name}' exists already on '{}'", node.name);
            return Err(QmpError::generic(text));
        }
        let since = match given.text("parent") {
            None => None,
            Some(parent) => Some(parent_among(&earlier, parent, &node)?),
        };
        let complete = complete_from(&links(&earlier));
        let useless: Vec<Bitmap> = earlier.drain(..complete).collect();
        for bitmap in &useless {
            self.may_remove_checkpoint(bitmap)?;
        }
        let since = since.map(|place| place - complete);
        let way = match disk.text("target") {
            Some(target) => {
                let target = self.nodes.referred(target)?;
                self.check_pair(&node, &target)?;
                self.check_job_id(&job_id(name, &node))?;
                Way::Target(target)
            }
            None => {
                let default = format!("{}-{name}", node.name);
                let export = disk.text("export-name").unwrap_or(&default);
                if self.exports.nbd()?.export(export).is_some() {
                    return Err(QmpError::generic(format!(
                        "NBD server already has export named '{export}'"
                    )));
                }
                Way::Export(export.to_string())
            }
        };
        Ok(Part {
            node,
            useless,
            earlier,
            since,
            way,
        })
    }

    /// Has a disk ready for the moment: what can fail has been done.
    async fn ready(&self, part: Part, given: &Given) -> Result<Ready, QmpError> {
        let node = &part.node;
        let filled: Vec<Rc<Node>> = match &part.way {
            Way::Target(target) => vec![Rc::clone(target)],
            Way::Export(_) => Vec::new(),
        };
        let busy = filled.iter().cloned().chain([Rc::clone(node)]).collect();
        let reserved = Reserved::new(busy, "backup")?.filling(&filled);
        let copy = match &part.way {
            Way::Export(export) => {
                let store = scratch_for(node, given.text("scratch")).await?;
                let disks = (Arc::clone(&node.live), store);
                Use::View(Arc::new(View::new(export.clone(), disks, CHUNK_BYTES)))
            }
            Way::Target(target) => {
                let disk: Arc<dyn Disk> = Arc::clone(&target.live) as _;
                Use::Backup(Backup::new(Arc::clone(&node.live), disk, CHUNK_BYTES))
            }
        };
        self.nodes.enter(node, true).await?;
        if let Way::Target(target) = &part.way
            && let Err(error) = self.nodes.enter(target, true).await
        {
            drop(self.nodes.leave(node, true).await);
            return Err(error);
        }
        match prepare(&part, given.required("name")?).await {
            Ok((changed, next)) => Ok(Ready {
                moment: Checkpoint {
                    live: Arc::clone(&part.node.live),
                    last: part.last().cloned(),
                    next,
                    changed,
                    copy,
                },
                part,
                reserved,
            }),
            Err(error) => {
                drop(copy);
                self.leave_part(&part).await;
                Err(error)
            }
        }
    }

    /// Takes back what was made ready.
    async fn abandon(&self, ready: Vec<Ready>, name: &str) {
        for Ready {
            part,
            moment,
            reserved,
        } in ready
        {
            drop(moment);
            // It has noted nothing.
            drop(change(&part.node, &bitmap_name(name), BitmapChange::Remove).await);
            self.leave_part(&part).await;
            drop(reserved);
        }
    }

    async fn leave_part(&self, part: &Part) {
        if let Way::Target(target) = &part.way {
            drop(self.nodes.leave(target, true).await);
        }
        drop(self.nodes.leave(&part.node, true).await);
    }

    /// Offers views, and starts copies.
    async fn begin(
        self: &Rc<Self>,
        ready: Vec<Ready>,
        (name, parent): (&str, Option<&str>),
    ) -> Result<Value, QmpError> {
        let mut active = Active {
            name: name.to_string(),
            views: Vec::new(),
        };
        for Ready {
            part,
            moment,
            reserved,
        } in ready
        {
            let Checkpoint { changed, copy, .. } = moment;
            let node = part.node;
            match (copy, part.way) {
                (Use::View(view), Way::Export(export)) => {
                    let mut offered = NbdExport::new(Arc::clone(&view) as _);
                    offered.description = format!("{} at checkpoint {name}", node.name);
                    if let (Some(changed), Some(parent)) = (changed, parent) {
                        let since = OfMap::new(&format!("since-{parent}"), changed);
                        offered.contexts.push(Arc::new(since));
                    }
                    self.exports.nbd()?.add_export(export.clone(), offered);
                    active.views.push(Offered {
                        node: Rc::clone(&node),
                        view,
                        export,
                        _reserved: reserved,
                    });
                }
                (Use::Backup(backup), Way::Target(target)) => {
                    // The image has the checkpoint once the copy is whole, and not before.
                    self.push((name, node), (backup, target), reserved);
                    continue;
                }
                _ => unreachable!("a view is offered, and a backup has a target"),
            }
            self.leave_with_checkpoint(&node).await;
        }
        if !active.views.is_empty() {
            self.checkpoints.borrow_mut().push(active);
        }
        Ok(json!({}))
    }

    /// Has the image of a disk closed in order, with the checkpoint, when nobody else writes it. If
    /// that fails, the checkpoint is there all the same: clients would take an error for the
    /// opposite.
    async fn leave_with_checkpoint(&self, node: &Rc<Node>) {
        if let Err(error) = self.nodes.leave(node, true).await {
            let text = "could not be closed in order after a checkpoint";
            self.log
                .write(format_args!("'{}' {text}: {error}", node.name));
        }
    }

    /// Starts the copy of a disk, whose image stays open for writing until it has ended: so a crash
    /// before leaves no checkpoint that the next backup could rest on. The ID of its job was looked
    /// at.
    fn push(
        self: &Rc<Self>,
        (name, node): (&str, Rc<Node>),
        (backup, target): (Backup, Rc<Node>),
        reserved: Reserved,
    ) {
        let mut options = Map::new();
        options.insert("job-id".to_string(), job_id(name, &node).into());
        let options = JobOptions::of(&Given(options), Some(&node.name));
        let options = options.expect("an ID is no value of the wrong type");
        let checkpoint = name.to_string();
        self.begin_job(("backup", options), |daemon, job| async move {
            let copied = backup.run(&job.work).await.map_err(failed);
            drop(backup);
            let outcome = match copied {
                Ok(()) => daemon.finalize(&job).await,
                Err(error) => Err(error),
            };
            let _turn = daemon.turn.take().await;
            // No command comes between this and the end of the checkpoint.
            drop(reserved);
            let left = daemon.nodes.leave(&target, true).await;
            let outcome = outcome.and(left);
            if outcome.is_err() {
                daemon.drop_failed(&checkpoint, &node.name).await;
            }
            daemon.leave_with_checkpoint(&node).await;
            outcome
        });
    }

    /// Removes a checkpoint of a disk whose copy is not whole: the next backup must not rest on it.
    /// What has changed since then counts for the one before.
    async fn drop_failed(&self, name: &str, node: &str) {
        let mut given = Map::new();
        given.insert("name".to_string(), name.into());
        given.insert("nodes".to_string(), json!([node]));
        if let Err(error) = self.checkpoint_delete(&Given(given)).await {
            self.log.write(format_args!(
                "the backup of checkpoint '{name}' of '{node}' has failed, and the checkpoint \
                 cannot be removed, which has to be done by checkpoint-delete: {}",
                error.desc
            ));
        }
    }

    /// `x-cowslip-checkpoint-end`.
    ///
    /// # Errors
    /// There is none of this name with views.
    pub async fn checkpoint_end(&self, given: &Given) -> Result<Value, QmpError> {
        let name = given.required("name")?;
        let found = {
            let mut active = self.checkpoints.borrow_mut();
            let place = active.iter().position(|it| it.name == name);
            place.map(|place| active.remove(place))
        };
        let Some(active) = found else {
            let text = format!("Checkpoint '{name}' has no exports");
            return Err(QmpError::generic(text));
        };
        self.end_views(active).await;
        Ok(json!({}))
    }

    async fn end_views(&self, active: Active) {
        for offered in active.views {
            if let Ok(server) = self.exports.nbd()
                && let Some(withdrawn) = server.withdraw(&offered.export)
            {
                server.gone(&withdrawn, PATIENCE).await;
            }
        }
    }

    /// Ends the views of all checkpoints.
    pub async fn end_checkpoints(&self) {
        for active in self.checkpoints.take() {
            self.end_views(active).await;
        }
    }

    /// `x-cowslip-checkpoint-delete`: the one before has what has changed since then.
    ///
    /// # Errors
    /// No node has one of this name; I/O.
    pub async fn checkpoint_delete(&self, given: &Given) -> Result<Value, QmpError> {
        let name = given.required("name")?;
        let mut nodes = Vec::new();
        match given.0.get("nodes") {
            Some(Value::Array(names)) => {
                for node in names.iter().filter_map(Value::as_str) {
                    nodes.push(self.nodes.referred(node)?);
                }
            }
            _ => nodes = self.nodes.all(),
        }
        let is_named = given.0.contains_key("nodes");
        let mut with = Vec::new();
        for node in nodes {
            let earlier = checkpoints_of(&node).await?;
            match place_of(name, &node, &earlier) {
                Ok(place) => {
                    for bitmap in &earlier[removed_with(&links(&earlier), place)] {
                        self.may_remove_checkpoint(bitmap)?;
                    }
                    with.push((node, earlier, place));
                }
                Err(error) if is_named => return Err(error),
                Err(_) => {}
            }
        }
        if with.is_empty() {
            return Err(QmpError::generic(format!(
                "No disk has a checkpoint '{name}'"
            )));
        }
        for (node, earlier, place) in with {
            self.nodes.enter(&node, true).await?;
            let deleted = delete(&earlier, place).await;
            let left = self.nodes.leave(&node, true).await;
            deleted.and(left)?;
        }
        Ok(json!({}))
    }

    /// `x-cowslip-query-checkpoints`.
    ///
    /// # Errors
    /// Bitmaps that cannot be read.
    pub async fn query_checkpoints(&self) -> Result<Value, QmpError> {
        let mut found = Vec::new();
        for node in self.nodes.all() {
            let all = checkpoints_of(&node).await?;
            let complete = complete_from(&links(&all));
            for (place, bitmap) in all.iter().enumerate() {
                let name = bitmap.name.trim_start_matches(CHECKPOINT);
                let mut described = json!({
                    "name": name,
                    "node": node.name,
                    "recording": bitmap.is_enabled(),
                    "inconsistent": bitmap.is_inconsistent(),
                    "usable": place >= complete,
                    "count": bitmap.dirty_bytes().await?,
                    "granularity": bitmap.granularity(),
                });
                let active = self.checkpoints.borrow();
                let active = active.iter().find(|it| it.name == name);
                let views = active.iter().flat_map(|it| &it.views);
                for offered in views.filter(|it| Rc::ptr_eq(&it.node, &node)) {
                    described["export-name"] = offered.export.as_str().into();
                    described["stored-bytes"] = offered.view.stored_bytes().into();
                    if let Some(failure) = offered.view.failure() {
                        described["failure"] = failure.to_string().into();
                    }
                }
                found.push(described);
            }
        }
        Ok(found.into())
    }
}

fn job_id(checkpoint: &str, node: &Node) -> String {
    format!("{checkpoint}-{}", node.name)
}

/// Advice to those whose checkpoint cannot be a parent.
const ADVICE: &str = "without 'parent' a full backup is made";

fn links(checkpoints: &[Bitmap]) -> Vec<Link> {
    let link = |bitmap: &Bitmap| Link {
        is_sound: !bitmap.is_inconsistent(),
        is_recording: bitmap.is_enabled(),
    };
    checkpoints.iter().map(link).collect()
}

/// The place of a checkpoint among those of a node.
fn place_of(name: &str, node: &Node, earlier: &[Bitmap]) -> Result<usize, QmpError> {
    let place = earlier.iter().position(|it| it.name == bitmap_name(name));
    place.ok_or_else(|| {
        QmpError::generic(format!(
            "'{}' has no checkpoint '{name}': it was deleted, or lost when the image was not \
             closed in order; {ADVICE}",
            node.name
        ))
    })
}

/// The place of a checkpoint since which all changes are known.
fn parent_among(earlier: &[Bitmap], name: &str, node: &Node) -> Result<usize, QmpError> {
    let place = place_of(name, node, earlier)?;
    if place >= complete_from(&links(earlier)) {
        return Ok(place);
    }
    let lost = earlier[place..].iter().find(|it| it.is_inconsistent());
    let why = match (lost, earlier.last()) {
        (None, Some(last)) => format!(
            "the last one, '{}', notes nothing, and the one behind it was removed",
            last.name
        ),
        (lost, _) => format!(
            "the image was not closed in order, and '{}' is inconsistent",
            lost.map_or(name, |lost| &lost.name)
        ),
    };
    Err(QmpError::generic(format!(
        "what has changed on '{}' since checkpoint '{name}' is not known: {why}; {ADVICE}",
        node.name
    )))
}

/// Collects what does not change any more, and adds the new bitmap, which notes nothing yet.
async fn prepare(part: &Part, name: &str) -> Result<(Option<Arc<DirtyMap>>, Bitmap), QmpError> {
    let node = &part.node;
    let granularity = node.default_granularity();
    let changed = match part.since {
        None => None,
        Some(since) => {
            let sizes = (node.live_size(), granularity);
            Some(noted_changes(&part.earlier[since..], sizes).await?)
        }
    };
    for bitmap in &part.useless {
        bitmap.remove().await?;
    }
    let wanted = bitmap_name(name);
    let add = BitmapChange::Add {
        granularity: Some(granularity),
    };
    change(node, &wanted, add).await?;
    let prepared = async {
        change(node, &wanted, BitmapChange::Disable).await?;
        if let Some(last) = part.last() {
            // Its bits are in memory from now on.
            let runs = node.image();
            runs.dirty_runs(&last.name, 0..1, 1).await.map_err(failed)?;
        }
        node.bitmap(&wanted).await
    };
    match prepared.await {
        Ok(next) => Ok((changed, next)),
        Err(error) => {
            drop(change(node, &wanted, BitmapChange::Remove).await);
            Err(error)
        }
    }
}

/// Removes a checkpoint from an image that is open for writing.
async fn delete(earlier: &[Bitmap], place: usize) -> Result<(), QmpError> {
    let removed = removed_with(&links(earlier), place);
    let gone = &earlier[place];
    if let Some(before) = removed.start.checked_sub(1).map(|at| &earlier[at])
        && !gone.is_inconsistent()
        && !before.is_inconsistent()
    {
        join(before, gone).await?;
    }
    for gone in &earlier[removed] {
        gone.remove().await?;
    }
    Ok(())
}
