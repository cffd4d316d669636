//! `blockdev-reopen`: other options of nodes in use, for all of the nodes that are named or none.
//!
//! The image stays the same, and so does its file; whether it is written, how it is cached, what
//! discards and zeroes do, and the node below may be other ones. Requests are held back for each
//! node in turn.

use std::rc::Rc;

use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::given::Given;
use super::host::Daemon;
use super::nodes::{Described, Node, Options};
use super::words::{failed, missing, refused};

/// Members that describe the files of a node.
const CHILDREN: [&str; 3] = ["file", "data-file", "image"];

/// Another way to open a node.
struct Reopened {
    node: Rc<Node>,
    described: Rc<Described>,
    backing: Option<Rc<Node>>,
}

impl Daemon {
    /// `blockdev-reopen`.
    ///
    /// # Errors
    /// No such node; what cannot change, or not now; I/O. The nodes are as they were.
    pub async fn blockdev_reopen(&self, given: &Given) -> Result<Value, QmpError> {
        let Some(Value::Array(list)) = given.0.get("options") else {
            return Err(missing("options"));
        };
        let mut wanted = Vec::new();
        for options in list {
            let Value::Object(options) = options else {
                return Err(missing("options"));
            };
            wanted.push(self.reopened(options.clone())?);
        }
        let mut before = Vec::new();
        for reopened in wanted {
            let as_it_was = Reopened {
                node: Rc::clone(&reopened.node),
                described: reopened.node.described(),
                backing: reopened.node.backing(),
            };
            // Only now: it may lie over nodes that were reopened before it.
            let done = match check_below(&reopened) {
                Ok(()) => {
                    before.push(as_it_was);
                    self.reopen(reopened).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                while let Some(as_it_was) = before.pop() {
                    // A node that cannot be opened again answers reads as it did.
                    drop(self.reopen(as_it_was).await);
                }
                return Err(error);
            }
        }
        for Reopened { backing, .. } in before {
            self.nodes.drop_unused(&Vec::from_iter(backing)).await;
        }
        Ok(json!({}))
    }

    /// Looks whether a node can have these options.
    fn reopened(&self, mut options: Options) -> Result<Reopened, QmpError> {
        let Some(Value::String(name)) = options.remove("node-name") else {
            return Err(refused("node-name not specified"));
        };
        let found = self.nodes.find(&name);
        let node = found.ok_or_else(|| {
            QmpError::generic(format!("Failed to find node with node-name='{name}'"))
        })?;
        node.may_change()?;
        let backing = match options.remove("backing") {
            None => match node.backing() {
                None => None,
                Some(_) => {
                    let text = format!("backing is missing for '{name}'");
                    return Err(QmpError::generic(text));
                }
            },
            Some(Value::Null) => None,
            Some(Value::String(below)) => Some(self.nodes.named(&below)?),
            Some(_) => return Err(refused("Cannot change the option 'backing.driver'")),
        };
        self.with_files(&node, &mut options)?;
        let described = node.described();
        for member in ["driver", "filename"] {
            let is = |options: &Options| options.get(member).cloned().unwrap_or_default();
            let unsaid = member == "filename" && described.options.get(member).is_none();
            if !unsaid && is(&options) != is(&described.options) {
                let text = format!("Cannot change the option '{member}'");
                return Err(QmpError::generic(text));
            }
        }
        let described = Described::of(options)?;
        if described.source.filename != node.filename() {
            return Err(refused("Cannot change the option 'filename'"));
        }
        if described.source.common.read_only && node.is_written() {
            return Err(QmpError::generic(format!(
                "Read-only block node '{name}' cannot support read-write users"
            )));
        }
        Ok(Reopened {
            node,
            described: Rc::new(described),
            backing,
        })
    }

    /// Has files be described that are named: those that the node is over.
    fn with_files(&self, node: &Rc<Node>, options: &mut Options) -> Result<(), QmpError> {
        for child in CHILDREN {
            let named = match options.get(child) {
                Some(Value::String(name)) => name.clone(),
                Some(Value::Object(inner)) => match inner.get("node-name") {
                    Some(Value::String(name)) => name.clone(),
                    _ => continue,
                },
                _ => continue,
            };
            let file = self.nodes.referred(&named)?;
            if !node.files().iter().any(|it| Rc::ptr_eq(it, &file)) {
                let text = format!("Cannot change the option '{child}'");
                return Err(failed(text));
            }
            options.insert(child.to_string(), file.described().options.clone().into());
        }
        Ok(())
    }

    /// Opens a node in another way, and puts it over another node.
    async fn reopen(&self, reopened: Reopened) -> Result<(), QmpError> {
        let Reopened {
            node,
            described,
            backing,
        } = reopened;
        let held = self.nodes.hold(&self.nodes.with_above(&node)).await;
        let before = node.describe(described);
        if let Err(error) = self.nodes.open_held(&node, node.access(), &held).await {
            node.describe(before);
            // The image is closed, and opened as it was.
            drop(self.nodes.open_held(&node, node.access(), &held).await);
            return Err(error);
        }
        self.nodes.set_backing(&node, backing, &held)
    }
}

/// Looks whether a node can lie over the one that it is to lie over.
///
/// # Errors
/// It would be a loop; something in the chain changes.
fn check_below(reopened: &Reopened) -> Result<(), QmpError> {
    let (node, Some(below)) = (&reopened.node, &reopened.backing) else {
        return Ok(());
    };
    let chain = below.chain();
    if chain.iter().any(|it| Rc::ptr_eq(it, node)) {
        return Err(QmpError::generic(format!(
            "Making '{}' a backing child of '{}' would create a cycle",
            below.name, node.name
        )));
    }
    if node.backing().is_some_and(|it| Rc::ptr_eq(&it, below)) {
        return Ok(());
    }
    below.may_change()?;
    match chain.iter().find(|it| it.is_written()) {
        None => Ok(()),
        Some(written) => {
            // It changes under the node.
            let name = &written.name;
            let text = format!("Node '{name}' is busy: it is being written");
            Err(QmpError::generic(text))
        }
    }
}
