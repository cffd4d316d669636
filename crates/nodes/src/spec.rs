//! [`NodeSpec`]: the description of a node and of those below it, as a tree. Here options are only
//! sorted by node.

use cowslip_block::options::{self, Options, Pairs};
use cowslip_block::{Error, Result};

/// Limit of nodes in a chain. Each is a call within a call.
pub const NODES_MAX: usize = 64;

/// The names that nodes have for those below them. Options of a child stand behind its name and a
/// dot.
pub const CHILDREN: [&str; 4] = ["file", "image", "backing", "data-file"];

/// A node: its driver, its options, and the nodes below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSpec {
    /// The name of the driver (`driver=`).
    pub driver: Option<String>,
    /// The options of this node alone, not of those below it.
    pub options: Options,
    /// The nodes below, by the names that this one has for them.
    pub children: Vec<(&'static str, NodeSpec)>,
}

/// The refusal of a chain that has no end.
pub fn too_many_nodes() -> Error {
    Error::invalid(format!(
        "more than {NODES_MAX} nodes in a chain are not supported"
    ))
}

impl NodeSpec {
    /// The tree that a flat list describes.
    ///
    /// # Errors
    /// There are too many nodes in a chain.
    pub fn of_pairs(pairs: Pairs) -> Result<NodeSpec> {
        let mut root = NodeSpec::default();
        for (name, value) in pairs {
            root.put(&name, value)?;
        }
        Ok(root)
    }

    /// Adds an option, of this node or of one below it by its whole name.
    ///
    /// # Errors
    /// As [`NodeSpec::of_pairs`].
    pub fn put(&mut self, name: &str, value: String) -> Result<()> {
        let (mut node, mut own) = (self, name);
        for _ in 0..=NODES_MAX {
            let below = own.split_once('.').and_then(|(child, rest)| {
                let child = CHILDREN.into_iter().find(|known| *known == child);
                Some((child?, rest))
            });
            match below {
                Some((child, rest)) => (node, own) = (node.child_mut(child), rest),
                None if own == "driver" => {
                    node.driver = Some(value);
                    return Ok(());
                }
                None => {
                    node.options.put(own, value);
                    return Ok(());
                }
            }
        }
        Err(too_many_nodes())
    }

    /// A child, which is made if there is none.
    pub fn child_mut(&mut self, name: &'static str) -> &mut NodeSpec {
        let at = self.children.iter().position(|(known, _)| *known == name);
        let at = at.unwrap_or_else(|| {
            self.children.push((name, NodeSpec::default()));
            self.children.len() - 1
        });
        &mut self.children[at].1
    }

    /// A child, if it has options.
    pub fn child(&self, name: &str) -> Option<&NodeSpec> {
        let found = self.children.iter().find(|(known, _)| *known == name);
        found.map(|(_, node)| node)
    }

    /// Takes a child away.
    pub fn take_child(&mut self, name: &str) -> Option<NodeSpec> {
        let at = self.children.iter().position(|(known, _)| *known == name)?;
        Some(self.children.remove(at).1)
    }

    /// The driver's name; empty if none is given.
    pub fn driver(&self) -> &str {
        self.driver.as_deref().unwrap_or_default()
    }

    /// Whether there is an option of this name, of the node or of one below it.
    pub fn has(&self, name: &str) -> bool {
        match name.split_once('.') {
            Some((child, rest)) if CHILDREN.contains(&child) => {
                self.child(child).is_some_and(|node| node.has(rest))
            }
            _ if name == "driver" => self.driver.is_some(),
            _ => self.options.get(name).is_some(),
        }
    }

    /// The flat list of the tree.
    pub fn into_pairs(self) -> Pairs {
        let mut list: Pairs = Vec::new();
        if let Some(driver) = self.driver {
            list.push(("driver".to_string(), driver));
        }
        list.extend(self.options.into_pairs());
        for (child, node) in self.children {
            let theirs = node.into_pairs().into_iter();
            list.extend(theirs.map(|(name, value)| (format!("{child}.{name}"), value)));
        }
        list
    }
}

/// Names and values of a list of options, `name=value,name=value`.
pub fn pairs_of_list(list: &str) -> Result<Pairs> {
    let first = list.split(',').next().unwrap_or_default();
    if !first.is_empty() && !first.contains('=') {
        // In QEMU a word by itself is the name of an open node.
        return Err(Error::invalid(format!(
            "Cannot find device='{first}' nor node-name='{first}'"
        )));
    }
    Ok(options::pairs(list))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_becomes_a_tree_and_a_list_again() {
        let list = "driver=qcow2,snapshot.id=1,file.driver=blkdebug,file.image.filename=a,backing=";
        let tree = NodeSpec::of_pairs(options::pairs(list)).unwrap();
        assert_eq!(tree.driver(), "qcow2");
        assert_eq!(tree.options.get("snapshot.id"), Some("1"));
        let file = tree.child("file").unwrap();
        assert_eq!(file.driver(), "blkdebug");
        assert!(tree.has("file.image.filename") && !tree.has("file.filename"));
        let mut flat: Vec<_> = options::pairs(list);
        let mut again = tree.into_pairs();
        flat.sort();
        again.sort();
        assert_eq!(again, flat);
    }

    #[test]
    fn a_chain_without_end_is_refused() {
        let endless = vec![(format!("{}driver", "file.".repeat(200)), "raw".to_string())];
        let why = NodeSpec::of_pairs(endless).unwrap_err().to_string();
        assert!(why.contains("more than 64 nodes"), "{why}");
    }
}
