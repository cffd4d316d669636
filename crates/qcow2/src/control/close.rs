//! The end of a session: all that it has changed becomes durable, and space that it has kept ahead
//! of need is released.

use crate::Qcow2;
use crate::Result;
use cowslip_boxed::boxed;

impl Qcow2 {
    /// Flushes what the session has changed, and releases space allocated ahead.
    #[boxed]
    pub async fn close(&self) -> Result<()> {
        // After a failure, memory and medium differ: the session cannot go on.
        let closed = self.or_latched(self.finish().await);
        let mut state = self.lock();
        state.health.close();
        state.maintenance.wake();
        closed
    }

    async fn finish(&self) -> Result<()> {
        if !self.writable || self.lock().health.is_closed() {
            return Ok(());
        }
        let _drained = self.drain().await;
        if self.raw_data && self.lock().committed.may_change_data_file() {
            self.data.cut_padding(self.size()).await?;
        }
        if self.lock().is_as_opened() {
            // There is nothing to flush that is the session's own.
            return Ok(());
        }
        self.write_back().await?;
        {
            let mut counts = self.turn.take().await;
            let released = self.release_counted_ahead(&mut counts);
            self.latch_if_cancelled(released).await?;
        }
        // Clusters that the first cycle cleared have no readers left: the second lowers their
        // counts.
        self.write_back().await?;
        let stored = self.store_bitmaps().await;
        self.trim().await.and(stored)
    }
}
