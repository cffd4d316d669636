//! Jobs that copy disks in use: stream, commit, mirror; backups are in `backups.rs`.
//!
//! Their steps, and what a crash leaves after each, are those of `cowslip_graph`.
//!
//! | job | what a crash leaves | the last step, with requests held back |
//! | --- | --- | --- |
//! | stream | the disk: what was copied into the image is what its chain shows there | the header names the new backing file |
//! | commit below the active image | the disk: the images above the base still decide what was copied | the image above the committed ones names the base as its backing file |
//! | commit of the active image | the same | the base is flushed, and the image becomes empty: either of the two shows the disk, before and after |
//! | mirror | the disk; a copy that is of no use | clients go to the copy, which is flushed |

use std::rc::Rc;

use cowslip::Disk;
use cowslip_graph::{CHUNK_BYTES, Committed, CopyMode, Mirroring, commit, mirror, stream};
use cowslip_qmp::{ErrorClass, QmpError};
use serde_json::{Value, json};

use super::changing::{Attending, Changing};
use super::given::Given;
use super::host::Daemon;
use super::job::JobOptions;
use super::nodes::Node;
use super::reserved::Reserved;
use super::words::refused;

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

    /// The part of a commit, which has a base.
    fn committed(&self) -> Committed<Rc<Node>> {
        let above = self.top.checked_sub(1);
        Committed {
            top: Rc::clone(&self.chain[self.top]),
            above: above.map(|above| Rc::clone(&self.chain[above])),
            base: Rc::clone(&self.chain[self.base]),
            layers: (self.base - self.top) as u32,
            chunk_bytes: CHUNK_BYTES,
        }
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

impl Daemon {
    /// The node that a job is about.
    ///
    /// # Errors
    /// There is none.
    pub fn device(&self, given: &Given) -> Result<Rc<Node>, QmpError> {
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
            let changing = Changing::by(&daemon, &given);
            let (layers, renames) = (part.base - 1, given.text("backing-file").is_some());
            let streamed = stream(
                &changing,
                (&job.work, &Attending(&daemon, &job)),
                (&part.chain[0], part.base()),
                (layers as u32, renames),
            )
            .await;
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&part.chain[0], true).await;
            daemon.nodes.drop_unused(&part.chain[1..]).await;
            streamed.and(left)
        });
        self.or_leave(started, &entered).await
    }

    /// Undoes [`super::nodes::Nodes::enter`] if the job could not be started.
    pub(super) async fn or_leave(
        &self,
        started: Result<(), QmpError>,
        node: &Rc<Node>,
    ) -> Result<Value, QmpError> {
        if started.is_err() {
            drop(self.nodes.leave(node, true).await);
        }
        started.map(|()| json!({}))
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
        let given = match part.top {
            // The image of the clients is emptied, and names what it named.
            0 => Given::default(),
            _ => given.clone(),
        };
        let entered = Rc::clone(&target);
        let started = self.start_job(("commit", options), |daemon, job| async move {
            let changing = Changing::by(&daemon, &given);
            let attending = (&job.work, &Attending(&daemon, &job));
            let committed = commit(&changing, attending, &part.committed()).await;
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&target, true).await;
            daemon.nodes.drop_unused(&part.chain).await;
            committed.and(left)
        });
        self.or_leave(started, &entered).await
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
            let how = Mirroring {
                layers,
                chunk_bytes: chunk,
                mode,
            };
            let nothing = Given::default();
            let changing = Changing::by(&daemon, &nothing);
            let attending = (&job.work, &Attending(&daemon, &job));
            let mirrored = mirror(&changing, attending, (&node, &target), how).await;
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&target, true).await;
            mirrored.and(left)
        });
        self.or_leave(started, &entered).await
    }

    /// Refuses a copy that cannot be.
    ///
    /// # Errors
    /// Of different sizes, in use.
    pub fn check_pair(&self, node: &Rc<Node>, target: &Rc<Node>) -> Result<(), QmpError> {
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
}
