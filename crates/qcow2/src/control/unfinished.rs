//! A mark on an image that is being filled: until it is complete, no program opens it.
//!
//! A copy that is killed has sound tables and a part of the data; nothing else says that it is a
//! part. The mark is an incompatible feature bit, which programs that do not know it must refuse.
//! The feature name table has words for it meanwhile, which they show. Version 2 has no feature
//! bits, so no mark.
//!
//! | write, with a barrier after each bit | what a crash after it leaves |
//! | --- | --- |
//! | the name, in the place of the table's last one | the empty image |
//! | the bit | an image that is refused |
//! | all data and metadata, and a barrier | the same |
//! | the bit is cleared | the complete image |
//! | the last name is back | the same, to the byte |

use cowslip_boxed::boxed;
use cowslip_queue::Buf;

use crate::Qcow2;
use crate::Result;
use crate::file::Durability;
use crate::header::{FeatureNames, incompatible};

/// Bytes of the header's cluster in which names are looked for.
const HEADER_BYTES: u64 = 4096;

impl Qcow2 {
    /// Sets the mark durably, before the data that it is about.
    pub async fn mark_unfinished(&self) -> Result<()> {
        if self.header().version < 3 {
            return Ok(());
        }
        self.ready_for_changes().await?;
        let [last, unfinished] = FeatureNames::last_and_unfinished();
        self.replace_name(last, unfinished).await?;
        self.change_mark(true).await
    }

    /// Makes all that was written durable, then clears the mark durably.
    pub async fn mark_finished(&self) -> Result<()> {
        if !self.header().is_unfinished() {
            return Ok(());
        }
        self.write_back().await?;
        self.change_mark(false).await?;
        let [last, unfinished] = FeatureNames::last_and_unfinished();
        self.replace_name(unfinished, last).await
    }

    #[boxed]
    async fn change_mark(&self, is_unfinished: bool) -> Result<()> {
        let _turn = self.turn.take().await;
        let mut header = self.header();
        match is_unfinished {
            true => header.incompatible_features |= incompatible::UNFINISHED,
            false => header.incompatible_features &= !incompatible::UNFINISHED,
        }
        self.latch_if_cancelled(self.write_header(&header)).await
    }

    /// Writes a name over another one, if the table has that. Nothing depends on names.
    #[boxed]
    async fn replace_name(&self, old: [u8; 48], new: [u8; 48]) -> Result<()> {
        let _turn = self.turn.take().await;
        let header = self.header();
        let cluster_bytes = header.geometry().cluster_bytes();
        let cluster = self
            .file
            .read_new(0, cluster_bytes.min(HEADER_BYTES))
            .await?;
        let start = header.header_length as usize;
        match FeatureNames::offset_of(&old, &cluster, start) {
            None => Ok(()),
            Some(offset) => {
                let name = vec![Buf::from(new.to_vec())];
                self.file.write(offset, name, Durability::Cached).await
            }
        }
    }
}
