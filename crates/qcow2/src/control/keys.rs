//! The LUKS volume in an encrypted image: where it is, and writing its key slots. What is written
//! is decided in `luks/change.rs`; tables and guest data have no part in it.

use std::ops::Range;

use cowslip_queue::Buf;

use crate::Qcow2;
use crate::Result;
use crate::commit::roots::Flush;
use crate::file::AlignedFile;
use crate::luks;
use crate::open::place_of_keys;

impl Qcow2 {
    /// The file and the place of the volume that holds the image's keys, if there is one.
    pub async fn keys(&self) -> Result<Option<(AlignedFile, Range<u64>)>> {
        let Some(crypto) = self.header().extensions.crypto_header else {
            return Ok(None);
        };
        let place = place_of_keys(crypto, (&self.file, self.file.len().await?))?;
        Ok(Some((self.file.clone(), place)))
    }

    /// Writes to that volume, with a barrier after each stage.
    pub async fn write_keys(&self, stages: luks::Stages) -> Result<()> {
        self.ready_for_writes().await?;
        let _turn = self.turn.take().await;
        let written = async {
            self.unlatched(&self.lock())?;
            for stage in stages {
                let writes = stage.into_iter();
                let writes = writes.map(|(at, bytes)| (at, vec![Buf::from(bytes)]));
                self.write_root(writes.collect(), Flush::All).await?;
            }
            Ok(())
        };
        self.latch_if_cancelled(written).await
    }
}
