//! Holding the turn to write metadata: its work goes to its end, and some of it is done ahead of
//! need.

use crate::Error;
use crate::Qcow2;

impl Qcow2 {
    /// Work of the holder of the turn. Dropped half way it leaves I/O under way, and in memory what
    /// is neither on disk nor to be written: the image is latched then, so that no flush that
    /// follows says that all is well.
    pub(crate) async fn latch_if_cancelled<T>(&self, work: impl Future<Output = T>) -> T {
        let mut unfinished = Unfinished(Some(self));
        let outcome = work.await;
        unfinished.0 = None;
        outcome
    }

    /// See `Image::maintain` of the crate `cowslip`.
    pub async fn maintain(&self) {
        loop {
            let (waiting, write_back, room) = {
                let mut state = self.lock();
                if state.health.is_closed() || state.health.is_latched() {
                    return;
                }
                let room = state.space.wanted_ahead();
                (
                    state.maintenance.wait(),
                    state.mapping.tables.wants_writeback(),
                    room,
                )
            };
            let mut idle = true;
            if write_back {
                // A failure latches the image or is met again by the next flush.
                idle = self.write_back().await.is_err();
            }
            if let Some(clusters) = room {
                // Without space, requests meet the error when they need some.
                idle &= self.make_room_ahead(clusters).await.is_err();
            }
            if idle {
                waiting.await;
            }
        }
    }
}

/// Work in the turn that has not ended.
struct Unfinished<'a>(Option<&'a Qcow2>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(image) = self.0 {
            let abandoned = std::io::Error::from(std::io::ErrorKind::Interrupted);
            let text = format!("Writing metadata of '{}' was broken off", image.name());
            let mut state = image.lock();
            state.health.latch(Error::io(text, abandoned));
        }
    }
}
