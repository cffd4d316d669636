//! Jobs that copy disks in use: stream, commit, mirror, backup.
//!
//! | job | what a crash leaves | the last step, with requests held back |
//! | --- | --- | --- |
//! | stream | the disk: what was copied into the image is what its chain shows there | the header names the new backing file |
//! | commit below the active image | the disk: the images above the base still decide what was copied | the image above the committed ones names the base as its backing file |
//! | commit of the active image | the same | the base is flushed, and the image becomes empty: either of the two shows the disk, before and after |
//! | mirror | the disk; a copy that is of no use | clients go to the copy, which is flushed |
//! | backup | the disk; a copy that is of no use | none |

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::Disk;
use cowslip::image::{CopyOnRead, Extent};
use cowslip::job::Stage;
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip_graph::{Backup, CopyMode, Drained, Mirror};
use cowslip_nodes::Access;
use cowslip_qmp::{ErrorClass, QmpError};
use serde_json::{Value, json};

use super::bitmap::Bitmap;
use super::given::Given;
use super::host::Daemon;
use super::job::{Job, JobOptions};
use super::nodes::Node;
use super::words::{failed, refused};

/// Bytes that are copied as a whole, if nothing else is asked for.
const CHUNK_BYTES: u64 = 64 << 10;

/// Nodes whose places nothing but a job changes, until this is dropped.
pub struct Reserved(Vec<Rc<Node>>);

impl Reserved {
    /// Reserves nodes for a job.
    ///
    /// # Errors
    /// Another job has one of them.
    fn new(nodes: Vec<Rc<Node>>, kind: &str) -> Result<Reserved, QmpError> {
        nodes.iter().try_for_each(|node| node.may_change())?;
        for node in &nodes {
            node.job.replace(Some(kind.to_string()));
        }
        Ok(Reserved(nodes))
    }

    /// Keeps clients from these nodes, whose contents the job changes.
    fn filling(self, nodes: &[Rc<Node>]) -> Reserved {
        nodes.iter().for_each(|node| node.is_filled.set(true));
        self
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        for node in &self.0 {
            node.job.take();
            node.is_filled.set(false);
        }
    }
}

/// A chain, and the nodes in it that a job is about.
struct Part {
    chain: Vec<Rc<Node>>,
    /// The uppermost that is copied from.
    top: usize,
    /// The one below those that are copied from; the end of the chain, if all are.
    base: usize,
}

impl Part {
    fn base(&self) -> Option<&Rc<Node>> {
        self.chain.get(self.base)
    }
}

/// The place of a node in a chain: by its name, or by the name of its file.
fn place_in(
    chain: &[Rc<Node>],
    given: &Given,
    (by_node, by_file): (&str, &str),
) -> Result<Option<usize>, QmpError> {
    let is_meant = |node: &Rc<Node>| match (given.text(by_node), given.text(by_file)) {
        (Some(name), _) => node.name == name,
        (None, Some(file)) => node.filename() == file,
        (None, None) => false,
    };
    let named = given.text(by_node).or(given.text(by_file));
    match (named, chain.iter().position(is_meant)) {
        (None, _) => Ok(None),
        (Some(_), Some(place)) => Ok(Some(place)),
        (Some(name), None) => Err(QmpError::generic(format!(
            "Node '{name}' is not a backing image of '{}'",
            chain[0].name
        ))),
    }
}

/// How an image names a node as its backing file.
fn naming(image: &Node, base: Option<&Rc<Node>>, given: &Given) -> BackingFile {
    match base {
        None => BackingFile::None,
        Some(base) => BackingFile::File {
            name: match given.text("backing-file") {
                Some(name) => name.to_string(),
                None => name_beside(&base.filename(), &image.filename()),
            },
            format: base.driver().to_string(),
        },
    }
}

/// The name of a file as an image names it: relative to the image, not to where this process runs.
pub fn name_beside(file: &str, image: &str) -> String {
    let (file_path, image_path) = (Path::new(file), Path::new(image));
    if file_path.is_absolute() || !file_path.exists() {
        // A path that means the same everywhere, or no file.
        return file.to_string();
    }
    match (
        file_path.parent() == image_path.parent(),
        file_path.file_name(),
    ) {
        (true, Some(name)) => name.to_string_lossy().into_owned(),
        _ => match std::path::absolute(file_path) {
            Ok(path) => path.to_string_lossy().into_owned(),
            Err(_) => file.to_string(),
        },
    }
}

impl Daemon {
    fn device(&self, given: &Given) -> Result<Rc<Node>, QmpError> {
        self.nodes.referred(given.required("device")?)
    }

    /// Refuses names of nodes that are not there.
    fn are_there(&self, given: &Given, members: &[&str]) -> Result<(), QmpError> {
        let mut named = members.iter().filter_map(|member| given.text(member));
        named.try_for_each(|name| self.nodes.named(name).map(drop))
    }

    /// `block-stream`.
    ///
    /// # Errors
    /// Nodes that are not there, or cannot be written.
    pub async fn block_stream(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let node = self.device(given)?;
        let chain = node.chain();
        self.are_there(given, &["bottom", "base-node"])?;
        let base = match place_in(&chain, given, ("bottom", ""))? {
            Some(bottom) => bottom + 1,
            None => place_in(&chain, given, ("base-node", "base"))?.unwrap_or(chain.len()),
        };
        if base == 0 {
            let text = format!("Node '{}' is not a backing image of itself", node.name);
            return Err(QmpError::generic(text));
        }
        let options = JobOptions::of(given, Some(&node.name))?;
        let reserved = Reserved::new(chain.clone(), "stream")?;
        self.nodes.enter(&node, true).await?;
        let (given, part) = (
            given.clone(),
            Part {
                chain,
                top: 0,
                base,
            },
        );
        let entered = Rc::clone(&node);
        let started = self.start_job(("stream", options), |daemon, job| async move {
            let streamed = daemon.stream(&job, &part, &given).await;
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&part.chain[0], true).await;
            daemon.nodes.drop_unused(&part.chain[1..]).await;
            streamed.and(left)
        });
        self.or_leave(started, &entered).await
    }

    /// Undoes [`super::nodes::Nodes::enter`] if the job could not be started.
    async fn or_leave(
        &self,
        started: Result<(), QmpError>,
        node: &Rc<Node>,
    ) -> Result<Value, QmpError> {
        if started.is_err() {
            drop(self.nodes.leave(node, true).await);
        }
        started.map(|()| json!({}))
    }

    async fn stream(&self, job: &Job, part: &Part, given: &Given) -> Result<(), QmpError> {
        let node = &part.chain[0];
        let image = node.image();
        let layers = part.base - 1;
        if layers > 0 {
            job.work.enter(Stage::Copy);
            job.work.expect(image.size());
            let what = CopyOnRead::DownTo(layers as u32);
            let pieces = job.work.run_pieces(0..image.size(), |at, len| {
                image.populate(at..at + len, what)
            });
            pieces.await.map_err(failed)?;
            image.flush().await.map_err(failed)?;
        }
        drop(image);
        self.finalize(job).await?;
        let _turn = self.turn.take().await;
        if layers > 0 || given.text("backing-file").is_some() {
            let base = part.base().cloned();
            self.put_over(node, (base.as_ref(), given), job).await?;
        }
        Ok(())
    }

    /// Has an image name another backing file, which shows the same, and puts its node over that.
    async fn put_over(
        &self,
        node: &Rc<Node>,
        (base, given): (Option<&Rc<Node>>, &Given),
        job: &Job,
    ) -> Result<(), QmpError> {
        let held = self.nodes.hold(&self.nodes.with_above(node)).await;
        let access = node.access();
        if access == Access::Read {
            self.nodes.open_held(node, Access::Write, &held).await?;
        }
        let amendment = Amendment::of_backing(naming(node, base, given));
        let amended = node.image().amend(&amendment, &job.work).await;
        // The session has ended with it. Both chains show the same.
        let reopened = self.nodes.open_held(node, access, &held).await;
        amended.map_err(failed)?;
        reopened?;
        self.nodes.set_backing(node, base.cloned(), &held)
    }

    /// `block-commit`.
    ///
    /// # Errors
    /// Nodes that are not there, or cannot be written.
    pub async fn block_commit(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let device = given.required("device")?;
        let Some(node) = self.nodes.find(device) else {
            let text = format!("Device '{device}' not found");
            return Err(QmpError::new(ErrorClass::DeviceNotFound, text));
        };
        let chain = node.chain();
        self.are_there(given, &["top-node", "base-node"])?;
        let top = place_in(&chain, given, ("top-node", "top"))?.unwrap_or(0);
        let base = place_in(&chain, given, ("base-node", "base"))?;
        let base = base.unwrap_or(chain.len() - 1);
        if base == top {
            return Err(refused("cannot commit an image into itself"));
        }
        if base < top {
            let name = &chain[base].name;
            let text = format!("'{name}' is not in this backing file chain");
            return Err(QmpError::generic(text));
        }
        if top == 0 {
            self.nodes.is_root(&node)?;
        }
        let options = JobOptions::of(given, Some(&node.name))?;
        let part = Part { chain, top, base };
        let reserved = Reserved::new(part.chain.clone(), "commit")?;
        self.check_committed(&part)?;
        let reserved = reserved.filling(&part.chain[part.top + 1..=part.base]);
        let target = Rc::clone(&part.chain[base]);
        self.nodes.enter(&target, true).await?;
        let (given, entered) = (given.clone(), Rc::clone(&target));
        let started = self.start_job(("commit", options), |daemon, job| async move {
            let committed = match part.top {
                0 => daemon.commit_active(&job, &part).await,
                _ => daemon.commit_below(&job, &part, &given).await,
            };
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&target, true).await;
            daemon.nodes.drop_unused(&part.chain).await;
            committed.and(left)
        });
        self.or_leave(started, &entered).await
    }

    /// Begins to copy into the base what the nodes above it decide.
    async fn commit_begin(&self, job: &Job, part: &Part) -> Result<Rc<Mirror>, QmpError> {
        let (top, base) = (&part.chain[part.top], &part.chain[part.base]);
        if base.live.size() < top.live.size() {
            base.image().resize(top.live.size()).await.map_err(failed)?;
            base.live.announce_size();
        }
        let target: Arc<dyn Disk> = Arc::clone(&base.live) as _;
        let modes = (CHUNK_BYTES, CopyMode::Background);
        let mirror = Rc::new(Mirror::begin(Arc::clone(&top.live), target, modes).await);
        job.mirror.replace(Some(Rc::clone(&mirror)));
        let layers = (part.base - part.top) as u32;
        // A layer that ends before decides, too: behind its end the disk reads as zeroes.
        let is_decided_above = |extent: &Extent| extent.depth < layers;
        mirror
            .mark(&job.work, is_decided_above)
            .await
            .map_err(failed)?;
        Ok(mirror)
    }

    async fn commit_below(&self, job: &Job, part: &Part, given: &Given) -> Result<(), QmpError> {
        let mirror = self.commit_begin(job, part).await?;
        // Nothing changes what is copied from.
        mirror.complete();
        mirror.follow(&job.work, || ()).await.map_err(failed)?;
        let base = &part.chain[part.base];
        base.image().flush().await.map_err(failed)?;
        self.finalize(job).await?;
        let _turn = self.turn.take().await;
        let above = &part.chain[part.top - 1];
        self.put_over(above, (Some(base), given), job).await
    }

    async fn commit_active(&self, job: &Job, part: &Part) -> Result<(), QmpError> {
        let (top, base) = (&part.chain[0], &part.chain[part.base]);
        let mirror = self.commit_begin(job, part).await?;
        let followed = mirror.follow(&job.work, || self.job_is_ready(job)).await;
        followed.map_err(failed)?;
        self.finalize(job).await?;
        let _turn = self.turn.take().await;
        // A reader of the image alone writes nothing, and it has to be emptied.
        self.nodes.enter(top, true).await?;
        let ports = self.hold_ports(top).await;
        let switched = match mirror.finish(&job.work).await {
            Ok(drained) => {
                self.switch_to_base((top, base), (drained, ports), part.base)
                    .await
            }
            Err(error) => Err(failed(error)),
        };
        let left = self.nodes.leave(top, true).await;
        switched?;
        left
    }

    /// Empties an image whose data is in the base, and has its clients use the base.
    async fn switch_to_base(
        &self,
        (top, base): (&Rc<Node>, &Rc<Node>),
        (drained, ports): (Drained, Vec<Drained>),
        layers: usize,
    ) -> Result<(), QmpError> {
        let held = [drained];
        if layers > 1 {
            // The images between would show through an empty one.
            let backing = naming(top, Some(base), &Given::default());
            let amendment = Amendment::of_backing(backing);
            let job = cowslip::Job::default();
            let amended = top.image().amend(&amendment, &job).await;
            let reopened = self.nodes.open_held(top, Access::Write, &held).await;
            amended.map_err(failed)?;
            reopened?;
            self.nodes.set_backing(top, Some(Rc::clone(base)), &held)?;
        }
        let emptied = top.image().empty().await;
        let reopened = self.nodes.open_held(top, Access::Write, &held).await;
        emptied.map_err(failed)?;
        reopened?;
        self.move_exports((top, base), ports, held).await
    }

    /// Holds the requests of all clients of a node back.
    pub async fn hold_ports(&self, node: &Rc<Node>) -> Vec<Drained> {
        let mut held = Vec::new();
        for export in self.exports.of(node) {
            held.push(export.port().drain().await);
        }
        held
    }

    /// Has the clients of a node, whose requests are held back, use another one; then lets requests
    /// go on.
    async fn move_exports(
        &self,
        (from, to): (&Rc<Node>, &Rc<Node>),
        ports: Vec<Drained>,
        held: [Drained; 1],
    ) -> Result<(), QmpError> {
        let exports = self.exports.of(from);
        for export in &exports {
            // Its image is open for writing already, so this counts and does nothing else.
            self.nodes.enter(to, export.is_writable()).await?;
            let port = ports
                .iter()
                .find(|it| Arc::ptr_eq(it.live(), export.port()));
            port.expect("it was held back")
                .exchange(export.moved_to(to));
        }
        drop((ports, held));
        for export in exports {
            self.nodes.leave(from, export.is_writable()).await?;
            export.inform();
        }
        Ok(())
    }

    /// `blockdev-mirror`.
    ///
    /// # Errors
    /// Nodes that are not there, or cannot be copied or written.
    pub async fn blockdev_mirror(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let node = self.device(given)?;
        let target = self.nodes.referred(given.required("target")?)?;
        if Rc::ptr_eq(&node, &target) {
            return Err(refused("Can't mirror node into itself"));
        }
        if !self.nodes.parents(&node).is_empty() {
            return Err(refused("Need a root block node"));
        }
        let options = JobOptions::of(given, Some(&node.name))?;
        let layers = match given.required("sync")? {
            "full" => u32::MAX,
            "top" => 1,
            "none" => 0,
            other => {
                let text = format!("Sync mode '{other}' not supported");
                return Err(QmpError::generic(text));
            }
        };
        let mode = match given.text("copy-mode") {
            Some("write-blocking") => CopyMode::WriteBlocking,
            _ => CopyMode::Background,
        };
        let chunk = given.number("granularity")?.filter(|chunk| *chunk > 0);
        let chunk = chunk.unwrap_or(CHUNK_BYTES);
        if !(512..=64 << 20).contains(&chunk) {
            let text = "Parameter 'granularity' expects a value in range [512B, 64MB]";
            return Err(refused(text));
        }
        if !chunk.is_power_of_two() {
            return Err(refused("Parameter 'granularity' expects a power of 2"));
        }
        self.check_pair(&node, &target)?;
        let both = vec![Rc::clone(&node), Rc::clone(&target)];
        let reserved = Reserved::new(both, "mirror")?.filling(&[Rc::clone(&target)]);
        self.nodes.enter(&target, true).await?;
        let entered = Rc::clone(&target);
        let started = self.start_job(("mirror", options), |daemon, job| async move {
            let wanted = (layers, chunk, mode);
            let mirrored = daemon.mirror(&job, (&node, &target), wanted).await;
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&target, true).await;
            mirrored.and(left)
        });
        self.or_leave(started, &entered).await
    }

    /// Refuses a copy that cannot be.
    fn check_pair(&self, node: &Rc<Node>, target: &Rc<Node>) -> Result<(), QmpError> {
        if Rc::ptr_eq(node, target) {
            return Err(refused("Source and target cannot be the same"));
        }
        if node.live.size() != target.live.size() {
            return Err(refused("Source and target image have different sizes"));
        }
        target.may_change()?;
        node.may_change()?;
        if target.is_used() {
            let text = format!("Node '{}' is in use", target.name);
            return Err(QmpError::generic(text));
        }
        self.nodes.is_root(target)
    }

    /// Refuses a commit that would change what clients, or nodes besides the chain, see: those of
    /// the images below its top.
    fn check_committed(&self, part: &Part) -> Result<(), QmpError> {
        for place in part.top + 1..=part.base {
            let node = &part.chain[place];
            let above = &part.chain[place - 1];
            if node.is_used() {
                let text = format!("Node '{}' is in use", node.name);
                return Err(QmpError::generic(text));
            }
            let others = self.nodes.parents(node);
            let others = others.iter().filter(|it| !Rc::ptr_eq(it, above));
            for other in others {
                // One that nothing uses may show another disk afterwards, as in QEMU.
                if self.nodes.with_above(other).iter().any(|it| it.is_used()) {
                    return Err(QmpError::generic(format!(
                        "Node '{}' is busy: node is used as backing hd of '{}'",
                        node.name, other.name
                    )));
                }
            }
        }
        Ok(())
    }

    async fn mirror(
        &self,
        job: &Job,
        (node, target): (&Rc<Node>, &Rc<Node>),
        (layers, chunk, mode): (u32, u64, CopyMode),
    ) -> Result<(), QmpError> {
        let disk: Arc<dyn Disk> = Arc::clone(&target.live) as _;
        let mirror = Mirror::begin(Arc::clone(&node.live), disk, (chunk, mode)).await;
        let mirror = Rc::new(mirror);
        job.mirror.replace(Some(Rc::clone(&mirror)));
        if layers > 0 {
            let is_wanted = |extent: &Extent| layers == u32::MAX || extent.depth < layers;
            mirror.mark(&job.work, is_wanted).await.map_err(failed)?;
        }
        let followed = mirror.follow(&job.work, || self.job_is_ready(job)).await;
        followed.map_err(failed)?;
        self.finalize(job).await?;
        let _turn = self.turn.take().await;
        let ports = self.hold_ports(node).await;
        let drained = mirror.finish(&job.work).await.map_err(failed)?;
        match job.stays() {
            true => Ok(()),
            false => self.move_exports((node, target), ports, [drained]).await,
        }
    }

    /// `blockdev-backup`.
    ///
    /// # Errors
    /// As for [`Daemon::backup_of`].
    pub async fn blockdev_backup(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let prepared = self.backup_of(given).await?;
        let drained = prepared.node().live.drain().await;
        let started = self.start_backup(prepared, &drained).await;
        drop(drained);
        started.map(|()| json!({}))
    }

    /// Prepares a backup: its target is open for writing, and its job has its name.
    ///
    /// # Errors
    /// Nodes or bitmaps that are not there, or cannot be copied or written.
    pub async fn backup_of(self: &Rc<Self>, given: &Given) -> Result<Prepared, QmpError> {
        let node = self.device(given)?;
        let target = self.nodes.referred(given.required("target")?)?;
        let options = JobOptions::of(given, Some(&node.name))?;
        self.check_pair(&node, &target)?;
        let sync = given.required("sync")?.to_string();
        let bitmap = match (sync.as_str(), given.text("bitmap")) {
            ("full" | "top", None) => None,
            ("incremental" | "bitmap", Some(name)) => {
                let found = self.bitmap(&node, name);
                let missing = |_| failed(format_args!("Bitmap '{name}' could not be found"));
                Some(found.map_err(missing)?)
            }
            ("incremental" | "bitmap", None) => {
                let text = format!("must provide a valid bitmap name for '{sync}' sync mode");
                return Err(QmpError::generic(text));
            }
            (_, Some(_)) => {
                let text = format!("sync mode '{sync}' with a bitmap is not supported");
                return Err(QmpError::generic(text));
            }
            _ => {
                let text = format!("sync mode '{sync}' is not supported");
                return Err(QmpError::generic(text));
            }
        };
        let keeps = given.text("bitmap-mode");
        match (sync.as_str(), keeps) {
            ("incremental", Some("never" | "always")) => {
                return Err(refused(
                    "Bitmap sync mode must be 'on-success' when using sync mode 'incremental'",
                ));
            }
            ("bitmap", None) => {
                let text = "Bitmap sync mode must be given when providing a bitmap";
                return Err(refused(text));
            }
            _ => {}
        }
        let both = vec![Rc::clone(&target), Rc::clone(&node)];
        let reserved = Reserved::new(both, "backup")?.filling(&[Rc::clone(&target)]);
        self.nodes.enter(&target, true).await?;
        let disk: Arc<dyn Disk> = Arc::clone(&target.live) as _;
        Ok(Prepared {
            backup: Backup::new(Arc::clone(&node.live), disk, CHUNK_BYTES),
            bitmap: bitmap.map(|bitmap| (bitmap, keeps == Some("never"), keeps == Some("always"))),
            is_top: sync == "top",
            nodes: (node, target),
            options,
            _reserved: reserved,
        })
    }

    /// Takes the moment of a backup, while the requests of its node are held back, and starts its
    /// job.
    ///
    /// # Errors
    /// The disk cannot be read; the job's ID is in use.
    pub async fn start_backup(
        self: &Rc<Self>,
        prepared: Prepared,
        drained: &Drained,
    ) -> Result<(), QmpError> {
        let Prepared {
            backup,
            bitmap,
            is_top,
            nodes: (node, target),
            options,
            _reserved: reserved,
        } = prepared;
        let wanted = match (&bitmap, is_top) {
            (Some((bitmap, ..)), _) => {
                backup.want(&bitmap.map);
                Ok(())
            }
            (None, true) => {
                let is_own = |extent: &Extent| extent.depth == 0 && extent.present;
                let job = cowslip::Job::default();
                backup.want_extents(&job, is_own).await.map_err(failed)
            }
            (None, false) => {
                backup.want_all();
                Ok(())
            }
        };
        if let Err(error) = wanted {
            drop(self.nodes.leave(&target, true).await);
            return Err(error);
        }
        let taken = bitmap.map(|(bitmap, never, always)| {
            let taken = (!never).then(|| bitmap.take());
            (bitmap, taken, always)
        });
        let entered = Rc::clone(&target);
        let started = self.start_job(("backup", options), |daemon, job| {
            backup.freeze(drained);
            async move {
                let copied = backup.run(&job.work).await.map_err(failed);
                drop((backup, reserved));
                let outcome = match copied {
                    Ok(()) => daemon.finalize(&job).await,
                    Err(error) => Err(error),
                };
                // A copy that is of no use has none of what the bitmap had.
                if let (Err(_), Some((bitmap, Some(taken), false))) = (&outcome, &taken) {
                    bitmap.map.merge(taken);
                }
                let _turn = daemon.turn.take().await;
                let left = daemon.nodes.leave(&target, true).await;
                let _source = node;
                outcome.and(left)
            }
        });
        self.or_leave(started, &entered).await.map(drop)
    }
}

/// A backup that is to be started.
pub struct Prepared {
    backup: Backup,
    /// The bitmap of what is copied; whether it stays as it is, or is cleared in any case.
    bitmap: Option<(Rc<Bitmap>, bool, bool)>,
    is_top: bool,
    nodes: (Rc<Node>, Rc<Node>),
    options: JobOptions,
    _reserved: Reserved,
}

impl Prepared {
    /// The node that is copied.
    pub fn node(&self) -> &Rc<Node> {
        &self.nodes.0
    }

    /// The node that is written.
    pub fn target(&self) -> &Rc<Node> {
        &self.nodes.1
    }
}
