//! [`Bitmap`]: what has changed on a disk since a moment, by a name.

use std::sync::Arc;

use cowslip_graph::DirtyMap;

/// A bitmap with a name.
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// Its bits.
    pub map: Arc<DirtyMap>,
}
