//! [`Active`]: a checkpoint that clients still read.

use std::rc::Rc;
use std::sync::Arc;

use cowslip_graph::View;

use super::nodes::Node;
use super::reserved::Reserved;

/// A checkpoint whose views are still there.
pub struct Active {
    /// Its name.
    pub name: String,
    /// Its views.
    pub views: Vec<Offered>,
}

/// A view that clients of NBD see.
pub struct Offered {
    /// The node whose disk it shows as it was.
    pub node: Rc<Node>,
    /// The view.
    pub view: Arc<View>,
    /// The name of its export.
    pub export: String,
    /// The node stays where it is.
    pub _reserved: Reserved,
}
