//! The commands about the dirty bitmaps of a daemon's nodes.

use std::rc::Rc;
use std::sync::Arc;

use cowslip::qcow2::bitmap::BitmapChange;
use cowslip_cmdline::bitmaps::{CHECKPOINT, PUBLISHED};
use cowslip_graph::{DirtyMap, Drained, Marks};
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::bitmap::{Bitmap, Bits};
use super::given::Given;
use super::host::Daemon;
use super::nodes::Node;
use super::words::{failed, missing, refused};

/// Bytes that the bits of a bitmap may take.
const BITS_BYTES_MAX: u64 = 512 << 20;

/// A change of a bitmap that is possible, with its node open for writing if the image keeps it.
pub struct Change {
    verb: String,
    given: Given,
    node: Rc<Node>,
    is_entered: bool,
    /// The bitmap as it was, once this was made as a part of a step.
    before: Option<Before>,
}

/// The state of a bitmap before a change, for taking it back.
enum Before {
    /// There was none of this name.
    Nothing(String),
    /// It was there.
    Changed(Kept),
    /// It was there, at this place among those in memory, if it was one.
    Removed(Kept, usize),
}

/// A bitmap as it was.
struct Kept {
    bitmap: Bitmap,
    /// Its marks; none if they mean nothing.
    marks: Option<Arc<DirtyMap>>,
    is_enabled: bool,
}

impl Change {
    /// The node whose bitmap it is about.
    pub fn node(&self) -> &Rc<Node> {
        &self.node
    }

    /// The node, if it is open for writing for this.
    pub fn entered(&self) -> Option<&Rc<Node>> {
        self.is_entered.then_some(&self.node)
    }

    /// Whether it is to be made after others, which may need the bitmap.
    pub fn is_last(&self) -> bool {
        self.verb == "remove"
    }

    /// Whether it adds a bitmap of this name to a node.
    pub fn adds_to(&self, node: &Rc<Node>, name: &str) -> bool {
        Rc::ptr_eq(&self.node, node) && self.adds() == Some(name)
    }

    /// The name of the bitmap that it adds.
    fn adds(&self) -> Option<&str> {
        match self.verb.as_str() {
            "add" => self.given.text("name"),
            _ => None,
        }
    }
}

impl Daemon {
    /// A command about a bitmap: `block-dirty-bitmap-*`.
    ///
    /// # Errors
    /// No such node or bitmap; what cannot be; I/O of the image that keeps it.
    pub async fn bitmap_command(&self, verb: &str, given: &Given) -> Result<Value, QmpError> {
        let change = self.prepare_bitmap(verb, given, &[]).await?;
        let held = match (verb, change.is_entered) {
            ("add", false) => self.nodes.hold(&[Rc::clone(&change.node)]).await,
            _ => Vec::new(),
        };
        let changed = self.change_bitmap(&change, &held).await;
        drop(held);
        let left = self.leave_bitmap(&change).await;
        changed.and(left).map(|()| json!({}))
    }

    /// Looks whether a change can be made after others, and opens the image that keeps the bitmap
    /// for writing.
    ///
    /// # Errors
    /// No such node or bitmap; what cannot be.
    pub async fn prepare_bitmap(
        &self,
        verb: &str,
        given: &Given,
        earlier: &[&Change],
    ) -> Result<Change, QmpError> {
        let node = given.required("node")?;
        let node = match verb {
            "add" => self.nodes.referred(node)?,
            _ => self.node_of_bitmap(node)?,
        };
        let name = given.required(if verb == "merge" { "target" } else { "name" })?;
        let is_added = |name: &str| {
            let adds = |change: &&&Change| change.adds() == Some(name);
            let added = earlier.iter().find(adds)?;
            Rc::ptr_eq(&added.node, &node).then(|| added.given.clone())
        };
        let is_kept = match (verb, is_added(name)) {
            ("add", added) => {
                self.may_add_bitmap(&node, given, added.is_some()).await?;
                given.switch("persistent")?.unwrap_or(false)
            }
            (_, Some(given)) => given.switch("persistent")?.unwrap_or(false),
            (_, None) => {
                let bitmap = node.bitmap(name).await?;
                self.may_change_bitmap(&bitmap, verb).await?;
                bitmap.is_kept()
            }
        };
        if verb == "merge" {
            for source in self.sources(&node, given)? {
                let (of, name) = source;
                if is_added(&name).is_none() {
                    let source = of.bitmap(&name).await?;
                    source.refuse_unreadable()?;
                }
            }
        }
        if is_kept {
            self.nodes.enter(&node, true).await?;
        }
        Ok(Change {
            verb: verb.to_string(),
            given: given.clone(),
            node,
            is_entered: is_kept,
            before: None,
        })
    }

    /// Undoes [`Daemon::prepare_bitmap`]. The image stores what has changed when nothing else
    /// writes it.
    ///
    /// # Errors
    /// The image could not be closed in order.
    pub async fn leave_bitmap(&self, change: &Change) -> Result<(), QmpError> {
        match change.is_entered {
            true => self.nodes.leave(&change.node, true).await,
            false => Ok(()),
        }
    }

    async fn may_add_bitmap(
        &self,
        node: &Rc<Node>,
        given: &Given,
        is_added: bool,
    ) -> Result<(), QmpError> {
        let name = given.required("name")?;
        if name.is_empty() {
            return Err(refused("Bitmap name cannot be empty"));
        }
        let granularity = given.number("granularity")?;
        let granularity = granularity.unwrap_or_else(|| node.default_granularity());
        if granularity < 512 || !granularity.is_power_of_two() {
            return Err(refused("Granularity must be power of 2 and at least 512"));
        }
        let bits = node.live_size().div_ceil(granularity);
        if bits.div_ceil(8) > BITS_BYTES_MAX {
            return Err(refused(
                "The bitmap would be too large. Use larger granularity",
            ));
        }
        if is_added || node.find_bitmap(name).await?.is_some() {
            return Err(QmpError::generic(format!("Bitmap already exists: {name}")));
        }
        if given.switch("persistent")?.unwrap_or(false) {
            if node.driver() != "qcow2" {
                return Err(QmpError::generic(format!(
                    "Can't store persistent bitmaps to {}: Operation not supported",
                    node.name
                )));
            }
            self.refuse_frozen(node, name)?;
        }
        Ok(())
    }

    /// Refuses a change of a bitmap that the image of a node below others keeps.
    fn refuse_frozen(&self, node: &Rc<Node>, name: &str) -> Result<(), QmpError> {
        let is_written = node.access() == cowslip_nodes::Access::Write;
        match !is_written && !self.nodes.parents(node).is_empty() {
            false => Ok(()),
            true => Err(QmpError::generic(format!(
                "Bitmap '{name}' is readonly and cannot be modified"
            ))),
        }
    }

    /// Refuses a change of a bitmap.
    ///
    /// # Errors
    /// In QEMU's words.
    pub async fn may_change_bitmap(&self, bitmap: &Bitmap, verb: &str) -> Result<(), QmpError> {
        self.may_remove_checkpoint(bitmap)?;
        if verb != "merge" && bitmap.is_kept() && bitmap.name.starts_with(CHECKPOINT) {
            return Err(QmpError::generic(format!(
                "Bitmap '{}' is a checkpoint, and checkpoints before it rest on it: \
                 x-cowslip-checkpoint-delete deletes it",
                bitmap.name
            )));
        }
        let is_published = bitmap.is_kept() && bitmap.name.starts_with(PUBLISHED);
        match verb {
            "remove" => Ok(()),
            "clear" | "enable" | "disable" if is_published => Err(QmpError::generic(format!(
                "Bitmap '{}' has what has changed since a version was published: it can be removed",
                bitmap.name
            ))),
            _ => bitmap.refuse_unreadable(),
        }
    }

    /// Refuses to remove the bitmap of a checkpoint, with those that rest on it.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn may_remove_checkpoint(&self, bitmap: &Bitmap) -> Result<(), QmpError> {
        bitmap.refuse_busy()?;
        match bitmap.is_kept() {
            true => self.refuse_frozen(&bitmap.node, &bitmap.name),
            false => Ok(()),
        }
    }

    fn node_of_bitmap(&self, name: &str) -> Result<Rc<Node>, QmpError> {
        let found = self.nodes.find(name);
        found.ok_or_else(|| QmpError::generic(format!("Node '{name}' not found")))
    }

    /// The bitmaps that a merge is from, by node and name.
    fn sources(&self, node: &Rc<Node>, given: &Given) -> Result<Vec<(Rc<Node>, String)>, QmpError> {
        let Some(Value::Array(sources)) = given.0.get("bitmaps") else {
            return Err(missing("bitmaps"));
        };
        let named = sources.iter().map(|source| self.named_bitmap(node, source));
        named.collect()
    }

    /// A bitmap by its name, or by node and name.
    ///
    /// # Errors
    /// No such node.
    pub fn named_bitmap(
        &self,
        node: &Rc<Node>,
        named: &Value,
    ) -> Result<(Rc<Node>, String), QmpError> {
        match named {
            Value::String(name) => Ok((Rc::clone(node), name.clone())),
            Value::Object(other) => {
                let other = Given(other.clone());
                let node = self.node_of_bitmap(other.required("node")?)?;
                Ok((node, other.required("name")?.to_string()))
            }
            _ => Err(missing("bitmaps")),
        }
    }

    /// Makes a change that was prepared. The requests of a node that gets a bitmap in memory are
    /// held back.
    ///
    /// # Errors
    /// I/O of the image that keeps the bitmap.
    pub async fn change_bitmap(&self, change: &Change, held: &[Drained]) -> Result<(), QmpError> {
        let (node, given) = (&change.node, &change.given);
        match change.verb.as_str() {
            "add" => self.add_bitmap(change, held).await,
            "merge" => {
                let target = node.bitmap(given.required("target")?).await?;
                for (of, name) in self.sources(node, given)? {
                    let source = of.bitmap(&name).await?;
                    let is_itself = Rc::ptr_eq(&of, node) && name == target.name;
                    if !is_itself {
                        target.merge(&*source.marks().await?).await?;
                    }
                }
                Ok(())
            }
            verb => {
                let bitmap = node.bitmap(given.required("name")?).await?;
                match verb {
                    "remove" => bitmap.remove().await,
                    "clear" => bitmap.clear().await,
                    "enable" => bitmap.enable(true).await,
                    "disable" => bitmap.enable(false).await,
                    _ => {
                        let name = format!("block-dirty-bitmap-{verb}");
                        Err(QmpError::command_not_found(&name))
                    }
                }
            }
        }
    }

    /// The same as a part of a step that may fail later, and is taken back then.
    ///
    /// # Errors
    /// As for [`Daemon::change_bitmap`]. The bitmap is as it was.
    pub async fn change_bitmap_within(
        &self,
        change: &mut Change,
        held: &[Drained],
    ) -> Result<(), QmpError> {
        let target = change.given.text("target").or(change.given.text("name"));
        let name = target.unwrap_or_default().to_string();
        let before = match (change.verb.as_str(), change.node.find_bitmap(&name).await?) {
            ("add", Some(_)) => {
                let text = format!("Bitmap already exists: {name}");
                return Err(QmpError::generic(text));
            }
            (_, None) => Before::Nothing(name),
            ("remove", Some(bitmap)) => {
                let place = change.node.place_in_memory(&bitmap);
                Before::Removed(Kept::of(bitmap).await?, place)
            }
            (_, Some(bitmap)) => Before::Changed(Kept::of(bitmap).await?),
        };
        change.before = Some(before);
        let changed = self.change_bitmap(change, held).await;
        if changed.is_err() {
            // A part of it may have happened.
            self.take_back_bitmap(change, held).await;
        }
        changed
    }

    /// Takes a change back that was made by [`Daemon::change_bitmap_within`].
    pub async fn take_back_bitmap(&self, change: &mut Change, held: &[Drained]) {
        let node = &change.node;
        // What fails here has failed before: the image takes no change any more.
        match change.before.take() {
            None => {}
            Some(Before::Nothing(name)) => {
                if let Ok(Some(bitmap)) = node.find_bitmap(&name).await {
                    drop(bitmap.remove().await);
                }
            }
            Some(Before::Changed(kept)) => drop(kept.restore().await),
            Some(Before::Removed(kept, place)) => {
                if let Ok(None) = node.find_bitmap(&kept.bitmap.name).await {
                    drop(kept.put_back(place, held).await);
                }
            }
        }
    }

    async fn add_bitmap(&self, change: &Change, held: &[Drained]) -> Result<(), QmpError> {
        let (node, given) = (&change.node, &change.given);
        let name = given.required("name")?.to_string();
        let is_disabled = given.switch("disabled")?.unwrap_or(false);
        let granularity = given.number("granularity")?;
        let granularity = granularity.unwrap_or_else(|| node.default_granularity());
        if change.is_entered {
            let image = node.image();
            let add = BitmapChange::Add {
                granularity: Some(granularity),
            };
            image.change_bitmap(&name, &add).await.map_err(failed)?;
            if is_disabled {
                let disabled = image.change_bitmap(&name, &BitmapChange::Disable).await;
                if disabled.is_err() {
                    drop(image.change_bitmap(&name, &BitmapChange::Remove).await);
                }
                disabled.map_err(failed)?;
            }
            return Ok(());
        }
        let map = DirtyMap::new(node.live_size(), granularity);
        map.enable(!is_disabled);
        drained(node, held).add(Arc::clone(&map) as _);
        node.memory_bitmaps.borrow_mut().push((name, map));
        Ok(())
    }

    /// The bitmaps of a node, as `query-named-block-nodes` has them.
    pub async fn describe_bitmaps(&self, node: &Rc<Node>) -> Vec<Value> {
        let mut described = Vec::new();
        // The last one first, as in QEMU. A list that cannot be read is described by no command.
        for bitmap in node.bitmaps().await.unwrap_or_default().iter().rev() {
            let mut found = json!({
                "name": bitmap.name,
                "recording": bitmap.is_enabled(),
                "persistent": bitmap.is_kept(),
                "busy": bitmap.is_busy(),
                "granularity": bitmap.granularity(),
                "count": bitmap.dirty_bytes().await.unwrap_or(0),
            });
            if bitmap.is_inconsistent() {
                found["inconsistent"] = true.into();
            }
            described.push(found);
        }
        described
    }
}

/// The requests of a node among those that are held back.
fn drained<'a>(node: &Node, held: &'a [Drained]) -> &'a Drained {
    let drained = held.iter().find(|it| Arc::ptr_eq(it.live(), &node.live));
    drained.expect("its requests are held back")
}

impl Kept {
    async fn of(bitmap: Bitmap) -> Result<Kept, QmpError> {
        let marks = match bitmap.is_inconsistent() {
            true => None,
            false => Some(bitmap.marks().await?),
        };
        Ok(Kept {
            marks,
            is_enabled: bitmap.is_enabled(),
            bitmap,
        })
    }

    /// Gives a bitmap that is there the marks and the state that it had.
    async fn restore(&self) -> Result<(), QmpError> {
        if let Some(marks) = &self.marks {
            self.bitmap.clear().await?;
            self.bitmap.merge(marks).await?;
        }
        self.bitmap.enable(self.is_enabled).await
    }

    /// Adds a bitmap again that was removed. One that was inconsistent is not missed.
    async fn put_back(&self, place: usize, held: &[Drained]) -> Result<(), QmpError> {
        let Bitmap { node, name, bits } = &self.bitmap;
        match bits {
            Bits::Memory(map) => {
                drained(node, held).add(Arc::clone(map) as _);
                let mut in_memory = node.memory_bitmaps.borrow_mut();
                in_memory.insert(place, (name.clone(), Arc::clone(map)));
                Ok(())
            }
            Bits::Kept(info) if info.in_use => Ok(()),
            Bits::Kept(info) => {
                let add = BitmapChange::Add {
                    granularity: Some(info.granularity),
                };
                let added = node.image().change_bitmap(name, &add).await;
                added.map_err(failed)?;
                self.restore().await
            }
        }
    }
}

impl Node {
    /// The place of a bitmap among those in memory; the end if it is none.
    fn place_in_memory(&self, bitmap: &Bitmap) -> usize {
        let in_memory = self.memory_bitmaps.borrow();
        let is_it = |(name, _): &(String, Arc<DirtyMap>)| *name == bitmap.name;
        in_memory.iter().position(is_it).unwrap_or(in_memory.len())
    }
}
