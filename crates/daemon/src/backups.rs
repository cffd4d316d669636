//! `blockdev-backup`: copies of a disk as it was at one moment.

use std::rc::Rc;
use std::sync::Arc;

use cowslip::Disk;
use cowslip::image::Extent;
use cowslip_graph::{Backup, CHUNK_BYTES, Held, Rotates, Rotation, View};
use cowslip_qmp::QmpError;

use super::bitmap::{Bitmap, InUse};
use super::bitmaps::Change;
use super::given::Given;
use super::host::Daemon;
use super::job::JobOptions;
use super::nodes::Node;
use super::reserved::Reserved;
use super::words::{failed, refused};

impl Daemon {
    /// Prepares a backup: its target is open for writing, and its job can have its ID, also after
    /// those of the same step. Its bitmap may be one that is added in the same step, earlier.
    ///
    /// # Errors
    /// Nodes or bitmaps that are not there, or cannot be copied or written.
    pub async fn backup_of(
        self: &Rc<Self>,
        given: &Given,
        (earlier, earlier_ids): (&[&Change], &[&str]),
    ) -> Result<Prepared, QmpError> {
        let node = self.device(given)?;
        let target = self.nodes.referred(given.required("target")?)?;
        let options = JobOptions::of(given, Some(&node.name))?;
        self.check_pair(&node, &target)?;
        let sync = given.required("sync")?.to_string();
        let wanted = wanted_bitmap(given, &sync)?;
        let (bitmap, later) = match &wanted {
            None => (None, None),
            Some(wanted) => match node.find_bitmap(&wanted.0).await? {
                Some(bitmap) => {
                    let chosen = self.chosen(bitmap, wanted.1.as_deref()).await?;
                    (Some(Rc::new(chosen)), None)
                }
                None if earlier.iter().any(|it| it.adds_to(&node, &wanted.0)) => {
                    (None, Some(wanted.clone()))
                }
                None => {
                    let name = &wanted.0;
                    return Err(failed(format_args!("Bitmap '{name}' could not be found")));
                }
            },
        };
        self.check_job_id(options.id())?;
        if earlier_ids.contains(&options.id()) {
            let text = format!("Job ID '{}' already in use", options.id());
            return Err(QmpError::generic(text));
        }
        let both = vec![Rc::clone(&target), Rc::clone(&node)];
        let reserved = Reserved::new(both, "backup")?;
        // Without a copy the target shows the disk at one moment, or what was on it.
        let reserved = match sync.as_str() {
            "none" => reserved,
            _ => reserved.filling(&[Rc::clone(&target)]),
        };
        // What is taken out of a bitmap is back in its image if the job does not end.
        let changes_source = bitmap.as_deref().is_some_and(Chosen::changes_image);
        if changes_source {
            self.nodes.enter(&node, true).await?;
        }
        if let Err(error) = self.nodes.enter(&target, true).await {
            if changes_source {
                drop(self.nodes.leave(&node, true).await);
            }
            return Err(error);
        }
        let disk: Arc<dyn Disk> = Arc::clone(&target.live) as _;
        let view = match sync.as_str() {
            "none" => Some(self.fleece(&node, &target)?),
            _ => None,
        };
        Ok(Prepared {
            view,
            backup: Backup::new(Arc::clone(&node.live), disk, CHUNK_BYTES),
            bitmap,
            later,
            is_top: sync == "top",
            nodes: (node, target),
            options,
            reserved,
            rotation: None,
        })
    }

    /// Marks what a backup is to copy, while the requests of its node are held back.
    ///
    /// # Errors
    /// The disk cannot be read, its bitmap not be used or changed: the bitmap is as it was.
    pub async fn mark_backup(&self, prepared: &mut Prepared) -> Result<(), QmpError> {
        self.find_added(prepared).await?;
        prepared.mark().await
    }

    /// Finds the bitmap of a backup that was added meanwhile, with its image open for writing.
    ///
    /// # Errors
    /// It cannot be used.
    async fn find_added(&self, prepared: &mut Prepared) -> Result<(), QmpError> {
        let Some((name, keeps)) = prepared.later.take() else {
            return Ok(());
        };
        let node = &prepared.nodes.0;
        let chosen = self
            .chosen(node.bitmap(&name).await?, keeps.as_deref())
            .await?;
        if chosen.changes_image() {
            self.nodes.enter(node, true).await?;
        }
        prepared.bitmap = Some(Rc::new(chosen));
        Ok(())
    }

    /// The bitmap that says what a backup copies.
    async fn chosen(&self, bitmap: Bitmap, keeps: Option<&str>) -> Result<Chosen, QmpError> {
        match keeps {
            Some("never") => bitmap.refuse_unreadable()?,
            _ => self.may_change_bitmap(&bitmap, "clear").await?,
        }
        let rotates = match keeps {
            Some("never") => Rotates::Never,
            Some("always") => Rotates::Always,
            _ => Rotates::OnSuccess,
        };
        Ok(Chosen {
            _in_use: bitmap.use_it(),
            bitmap,
            rotates,
        })
    }

    /// Takes back what was prepared for a backup.
    pub async fn leave_backup(&self, prepared: Prepared) {
        drop(
            self.leave_both(&prepared.nodes, prepared.bitmap.as_deref())
                .await,
        );
    }

    /// Gives the bitmap of a backup what it is to have, now that the backup has ended.
    async fn end_rotation(
        &self,
        rotation: Option<Rotation<Bitmap>>,
        node: &Rc<Node>,
        (chosen, has_succeeded): (Option<&Chosen>, bool),
    ) -> Result<(), QmpError> {
        let Some(rotation) = rotation else {
            return Ok(());
        };
        if !has_succeeded && chosen.is_some_and(Chosen::changes_image) {
            // An overlay that came at the same moment has frozen its image.
            self.nodes.open_for_writers(node).await?;
        }
        rotation.end(has_succeeded).await
    }

    async fn leave_both(
        &self,
        (node, target): &(Rc<Node>, Rc<Node>),
        bitmap: Option<&Chosen>,
    ) -> Result<(), QmpError> {
        let left = self.nodes.leave(target, true).await;
        match bitmap.is_some_and(Chosen::changes_image) {
            true => left.and(self.nodes.leave(node, true).await),
            false => left,
        }
    }

    /// Takes the moment of a backup, while the requests of its nodes are held back, and starts its
    /// job.
    pub fn begin_backup(self: &Rc<Self>, prepared: Prepared, held: &Held) {
        let Prepared {
            backup,
            view,
            bitmap,
            nodes,
            options,
            reserved,
            rotation,
            ..
        } = prepared;
        match &view {
            Some(view) => self.take_view(view, (&nodes.0, &nodes.1), held),
            None => backup.freeze(held.of(&nodes.0.live).expect("it is held")),
        }
        self.begin_job(("backup", options), |daemon, job| async move {
            let copied = match &view {
                Some(view) => daemon.keep_view(&job, view, &nodes.1).await,
                None => backup.run(&job.work).await.map_err(failed),
            };
            drop((backup, reserved));
            let outcome = match copied {
                Ok(()) => daemon.finalize(&job).await,
                Err(error) => Err(error),
            };
            let _turn = daemon.turn.take().await;
            let ends = (bitmap.as_deref(), outcome.is_ok());
            let rotated = daemon.end_rotation(rotation, &nodes.0, ends).await;
            let left = daemon.leave_both(&nodes, bitmap.as_deref()).await;
            outcome.and(rotated).and(left)
        });
    }
}

/// A backup that is to be started.
pub struct Prepared {
    backup: Backup,
    /// The view in the place of a copy, if nothing is to be copied but what changes.
    view: Option<Arc<View>>,
    bitmap: Option<Rc<Chosen>>,
    /// A bitmap that is added in the same step, and its mode.
    later: Option<Wanted>,
    is_top: bool,
    nodes: (Rc<Node>, Rc<Node>),
    options: JobOptions,
    reserved: Reserved,
    /// The marks that its bitmap had.
    rotation: Option<Rotation<Bitmap>>,
}

/// The bitmap of what a backup copies.
struct Chosen {
    bitmap: Bitmap,
    rotates: Rotates,
    _in_use: InUse,
}

impl Chosen {
    /// Whether the image that keeps it has to be open for writing.
    fn changes_image(&self) -> bool {
        self.bitmap.is_kept() && self.rotates != Rotates::Never
    }
}

impl Prepared {
    /// The ID of its job.
    pub fn job_id(&self) -> &str {
        self.options.id()
    }

    /// Whether it copies this node, and not what changes there later.
    pub fn copies_all_of(&self, node: &Rc<Node>) -> bool {
        self.view.is_none() && Rc::ptr_eq(&self.nodes.0, node)
    }

    /// The nodes whose requests are held back at its moment: the one that is copied, and the target
    /// if clients are to see the view there.
    pub fn held_nodes(&self) -> Vec<&Rc<Node>> {
        let target = self.view.as_ref().map(|_| &self.nodes.1);
        [&self.nodes.0].into_iter().chain(target).collect()
    }

    async fn mark(&mut self) -> Result<(), QmpError> {
        if let Some(chosen) = &self.bitmap {
            let bitmap = (chosen.bitmap.clone(), chosen.rotates);
            self.rotation = Some(self.backup.want_since(bitmap).await?);
        } else if self.is_top {
            let is_own = |extent: &Extent| extent.depth == 0 && extent.present;
            let job = cowslip::Job::default();
            let wanted = self.backup.want_extents(&job, is_own).await;
            wanted.map_err(failed)?;
        } else if self.view.is_none() {
            self.backup.want_all();
        }
        Ok(())
    }

    /// Takes back what [`Daemon::mark_backup`] did.
    pub async fn unmark(&mut self) {
        if let Some(rotation) = self.rotation.take() {
            // What fails here has failed before: the image takes no change any more.
            drop(rotation.take_back().await);
        }
    }
}

/// The name of the bitmap of a backup, and its mode.
type Wanted = (String, Option<String>);

/// The bitmap that a backup names.
fn wanted_bitmap(given: &Given, sync: &str) -> Result<Option<Wanted>, QmpError> {
    let keeps = given.text("bitmap-mode");
    let wanted = match (sync, given.text("bitmap")) {
        ("full" | "top" | "none", None) => return Ok(None),
        ("incremental" | "bitmap", Some(name)) => (name.to_string(), keeps.map(str::to_string)),
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
    match (sync, keeps) {
        ("incremental", Some("never" | "always")) => Err(refused(
            "Bitmap sync mode must be 'on-success' when using sync mode 'incremental'",
        )),
        ("bitmap", None) => Err(refused(
            "Bitmap sync mode must be given when providing a bitmap",
        )),
        _ => Ok(Some(wanted)),
    }
}
