//! Dirty bitmaps of a daemon's nodes, and the commands about them.
//!
//! They live in memory. Left out: bitmaps that the image keeps, which `serve --bitmap` and `bitmap`
//! have.

use std::rc::Rc;
use std::sync::Arc;

use cowslip_graph::{DirtyMap, Drained};
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::bitmap::Bitmap;
use super::given::Given;
use super::host::Daemon;
use super::nodes::Node;
use super::words::{missing, refused};

/// Bytes of a bit, if nothing else is asked for.
const GRANULARITY: u64 = 64 << 10;

impl Daemon {
    /// The bitmap of this name.
    ///
    /// # Errors
    /// The node has none.
    pub fn bitmap(&self, node: &Node, name: &str) -> Result<Rc<Bitmap>, QmpError> {
        let bitmaps = node.bitmaps.borrow();
        let found = bitmaps.iter().find(|bitmap| bitmap.name == name).cloned();
        found.ok_or_else(|| QmpError::generic(format!("Dirty bitmap '{name}' not found")))
    }

    /// A command about a bitmap: `block-dirty-bitmap-*`.
    ///
    /// # Errors
    /// No such node or bitmap; what cannot be.
    pub async fn bitmap_command(&self, verb: &str, given: &Given) -> Result<Value, QmpError> {
        let node = self.nodes.referred(given.required("node")?)?;
        let drained = node.live.drain().await;
        let changed = self.change_bitmap((verb, &node), given, &drained);
        changed.map(|()| json!({}))
    }

    /// The same between two requests of the node.
    ///
    /// # Errors
    /// As for [`Daemon::bitmap_command`].
    pub fn change_bitmap(
        &self,
        (verb, node): (&str, &Rc<Node>),
        given: &Given,
        drained: &Drained,
    ) -> Result<(), QmpError> {
        match verb {
            "add" => return add_bitmap(node, given, drained),
            "merge" => return self.merge_bitmaps(node, given),
            _ => {}
        }
        let bitmap = self.bitmap(node, given.required("name")?)?;
        match verb {
            "remove" => {
                let tap = Arc::clone(&bitmap.map) as _;
                node.live.remove(&tap);
                let is_other = |other: &Rc<Bitmap>| !Rc::ptr_eq(other, &bitmap);
                node.bitmaps.borrow_mut().retain(is_other);
            }
            "clear" => bitmap.map.clear(),
            "enable" => bitmap.map.enable(true),
            "disable" => bitmap.map.enable(false),
            _ => {
                let name = format!("block-dirty-bitmap-{verb}");
                return Err(QmpError::command_not_found(&name));
            }
        }
        Ok(())
    }

    fn merge_bitmaps(&self, node: &Rc<Node>, given: &Given) -> Result<(), QmpError> {
        let target = self.bitmap(node, given.required("target")?)?;
        let Some(Value::Array(sources)) = given.0.get("bitmaps") else {
            return Err(missing("bitmaps"));
        };
        let mut found = Vec::new();
        for source in sources {
            let bitmap = match source {
                Value::String(name) => self.bitmap(node, name)?,
                Value::Object(other) => {
                    let other = Given(other.clone());
                    let node = self.nodes.referred(other.required("node")?)?;
                    self.bitmap(&node, other.required("name")?)?
                }
                _ => return Err(missing("bitmaps")),
            };
            found.push(bitmap);
        }
        for source in found.iter().filter(|source| !Rc::ptr_eq(source, &target)) {
            target.map.merge(&source.map);
        }
        Ok(())
    }

    /// The bitmaps of a node, as `query-named-block-nodes` has them.
    pub fn describe_bitmaps(&self, node: &Node) -> Value {
        let describe = |bitmap: &Rc<Bitmap>| {
            json!({
                "name": bitmap.name,
                "recording": bitmap.map.is_enabled(),
                "persistent": false,
                "busy": false,
                "granularity": bitmap.map.chunk_bytes(),
                "count": bitmap.map.dirty_bytes(),
            })
        };
        // The last one first, as in QEMU.
        node.bitmaps.borrow().iter().rev().map(describe).collect()
    }
}

fn add_bitmap(node: &Rc<Node>, given: &Given, drained: &Drained) -> Result<(), QmpError> {
    let name = given.required("name")?.to_string();
    if name.is_empty() {
        return Err(refused("Bitmap name cannot be empty"));
    }
    let granularity = given.number("granularity")?.unwrap_or(GRANULARITY);
    if granularity < 512 || !granularity.is_power_of_two() {
        return Err(refused("Granularity must be power of 2 and at least 512"));
    }
    if given.switch("persistent")?.unwrap_or(false) {
        return Err(refused(
            "bitmaps that the image keeps are not supported here; they are made by \
             'cowslip bitmap' while nobody uses the image",
        ));
    }
    let mut bitmaps = node.bitmaps.borrow_mut();
    if bitmaps.iter().any(|bitmap| bitmap.name == name) {
        return Err(QmpError::generic(format!("Bitmap already exists: {name}")));
    }
    let map = DirtyMap::new(node.live_size(), granularity);
    map.enable(!given.switch("disabled")?.unwrap_or(false));
    drained.add(Arc::clone(&map) as _);
    bitmaps.push(Rc::new(Bitmap { name, map }));
    Ok(())
}
