//! [`Reserved`]: nodes that a job uses.

use std::rc::Rc;

use cowslip_qmp::QmpError;

use super::nodes::Node;

/// Nodes whose places nothing but a job changes, until this is dropped.
pub struct Reserved(Vec<Rc<Node>>);

impl Reserved {
    /// Reserves nodes for a job.
    ///
    /// # Errors
    /// Another job has one of them.
    pub fn new(nodes: Vec<Rc<Node>>, kind: &str) -> Result<Reserved, QmpError> {
        nodes.iter().try_for_each(|node| node.may_change())?;
        for node in &nodes {
            node.job.replace(Some(kind.to_string()));
        }
        Ok(Reserved(nodes))
    }

    /// Keeps clients from these nodes, whose contents the job changes.
    pub fn filling(self, nodes: &[Rc<Node>]) -> Reserved {
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
