//! Holding requests back: for what changes a root, and for what changes what tables say of clusters
//! that stay mapped.

use crate::Qcow2;
use crate::{Error, Result};

/// No request that changes anything is under way and none begins, until this is dropped. Reads go
/// on.
pub(crate) struct Drained<'a>(&'a Qcow2);

impl Drop for Drained<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        // Counts may have changed, and with them what may be written in place.
        state.mapping.tables.direct().forget_all();
        // It may have been dropped while it waited.
        state.mapping.epochs.no_longer_waits();
        // Wakes those that were held back.
        state.health.let_changes_begin();
    }
}

/// Nothing at all is under way and nothing begins, until this is dropped: no read, and no access to
/// a slice of a table. So tables may change under the cache, which is then emptied.
pub(crate) struct Still<'a> {
    image: &'a Qcow2,
    _drained: Drained<'a>,
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        let mut state = self.image.lock();
        state.mapping.tables.direct().forget_all();
        state.health.let_reads_begin();
    }
}

impl Qcow2 {
    /// Holds new requests back and waits for those under way. Reads that begin meanwhile are not
    /// waited for: when they come one after the other, there is always one.
    pub(crate) async fn drain(&self) -> Drained<'_> {
        let drained = self.hold_changes_back().await;
        // The first time for all that change something, the second for reads that have begun before
        // these had ended, and may see what they have freed.
        for _ in 0..2 {
            let before = self.lock().mapping.epochs.advance();
            loop {
                let waiting = self.lock().mapping.epochs.wait_for_end(before);
                match waiting {
                    Some(waiting) => waiting.await,
                    None => break,
                }
            }
        }
        drained
    }

    /// Holds back new requests that change something, once no other operation does.
    async fn hold_changes_back(&self) -> Drained<'_> {
        loop {
            let waiting = {
                let mut state = self.lock();
                match state.health.hold_changes_back() {
                    Some(waiting) => waiting,
                    None => break,
                }
            };
            waiting.await;
        }
        Drained(self)
    }

    /// Holds reads back, too, and waits until no slice is in use.
    ///
    /// # Errors
    /// A request was dropped halfway, so the end of its I/O is unknown.
    pub(crate) async fn stand_still(&self) -> Result<Still<'_>> {
        let drained = self.hold_changes_back().await;
        // Reads that came one after the other would keep the last one from ever ending.
        self.lock().health.hold_reads_back();
        let still = Still {
            image: self,
            _drained: drained,
        };
        loop {
            let waiting = {
                let mut state = self.lock();
                let state = &mut *state;
                if state.mapping.epochs.any_abandoned() {
                    let text = format!(
                        "a request to '{}' was broken off: it has to be closed and opened again first",
                        self.name()
                    );
                    return Err(Error::Invalid(text));
                }
                let now = state.mapping.epochs.current();
                if let Some(waiting) = state.mapping.epochs.wait_for_end(now) {
                    waiting
                } else if state.mapping.tables.is_in_use() {
                    state.mapping.tables.wait_for_use()
                } else {
                    state.health.hold_slices_back();
                    return Ok(still);
                }
            };
            waiting.await;
        }
    }
}
