//! Where the refcount structures go that a longer file needs: at the beginning of the new space, which
//! they count with themselves. Pure.

/// New space and the refcount structures that count it.
#[derive(Debug)]
pub struct CountGrowth {
    /// The first new cluster that is used: the metadata comes first.
    pub start: u64,
    /// The end of the new space, in clusters.
    pub end: u64,
    /// Indices of new refcount blocks.
    pub blocks: Vec<u64>,
    /// Clusters of a new refcount table; 0 if the old one does.
    pub table_clusters: u64,
}

impl CountGrowth {
    /// The first cluster after the metadata.
    pub fn first_free(&self) -> u64 {
        self.start + self.table_clusters + self.blocks.len() as u64
    }

    /// Bytes of the refcount table up to the last of the blocks.
    pub fn table_bytes(&self) -> u64 {
        self.blocks.last().map_or(0, |index| (index + 1) * 8)
    }

    /// Index, cluster and empty bytes of each new block.
    pub fn placed_blocks(&self, cluster_bytes: u64) -> impl Iterator<Item = (u64, u64, Vec<u8>)> {
        let first = self.start + self.table_clusters;
        let empty = vec![0; cluster_bytes as usize];
        self.blocks
            .iter()
            .zip(first..)
            .map(move |(&index, at)| (index, at, empty.clone()))
    }
}
