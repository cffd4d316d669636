//! [`Memory`]: blocks that are kept in memory, those used last, within a limit.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;

/// Blocks by their numbers.
#[derive(Debug)]
pub(crate) struct Memory {
    limit: usize,
    used: usize,
    blocks: HashMap<u64, (Bytes, u64)>,
    /// Blocks in the order of their last uses.
    order: BTreeMap<u64, u64>,
    uses: u64,
}

impl Memory {
    pub(crate) fn new(limit: usize) -> Memory {
        Memory {
            limit,
            used: 0,
            blocks: HashMap::new(),
            order: BTreeMap::new(),
            uses: 0,
        }
    }

    pub(crate) fn get(&mut self, block: u64) -> Option<Bytes> {
        let (bytes, used) = self.blocks.get_mut(&block)?;
        self.order.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.order.insert(self.uses, block);
        Some(bytes.clone())
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    pub(crate) fn put(&mut self, block: u64, bytes: Bytes) {
        if bytes.len() > self.limit || self.has(block) {
            return;
        }
        self.uses += 1;
        self.used += bytes.len();
        self.blocks.insert(block, (bytes, self.uses));
        self.order.insert(self.uses, block);
        while self.used > self.limit {
            let Some((_, oldest)) = self.order.pop_first() else {
                return;
            };
            if let Some((bytes, _)) = self.blocks.remove(&oldest) {
                self.used -= bytes.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_used_last_stay_within_the_limit() {
        let mut memory = Memory::new(30);
        for block in 0..3 {
            memory.put(block, Bytes::from(vec![block as u8; 10]));
        }
        assert_eq!(memory.get(0).unwrap()[0], 0);
        memory.put(3, Bytes::from(vec![3; 10]));
        assert!(memory.has(0) && !memory.has(1) && memory.has(2) && memory.has(3));
        memory.put(4, Bytes::from(vec![4; 31]));
        assert!(!memory.has(4), "it is longer than all there is");
        memory.put(5, Bytes::from(vec![5; 30]));
        assert!(memory.has(5) && !memory.has(0));
        assert_eq!(memory.used, 30);
    }
}
