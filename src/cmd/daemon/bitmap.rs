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

impl Bitmap {
    /// Takes what is marked out of it.
    pub fn take(&self) -> Arc<DirtyMap> {
        let taken = DirtyMap::new(self.map.size(), self.map.chunk_bytes());
        taken.merge(&self.map);
        self.map.clear();
        taken
    }
}
