//! Space that no entry refers to any more, on its way to the free clusters.

use crate::mapping::inflight::Epochs;
use crate::plan::Freed;

/// References that were dropped, each with the epoch in which it was. Their space is used again
/// when their clearing is durable and no request is left that may have seen them (invariant D2).
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// Dropped since the last cut.
    given_up: Vec<(Freed, u64)>,
    /// Those whose clearing is durable, waiting for their epoch to leave.
    cleared: Vec<(Freed, u64)>,
}

impl Quarantine {
    /// A reference was dropped in this epoch. Holes that are wanted in its space are none of the
    /// quarantine's: see `HostSpace::give_up`.
    pub(super) fn give_up(&mut self, freed: Freed, epoch: u64) {
        self.given_up.push((freed, epoch));
    }

    /// Takes what was given up so far: a cycle makes the clearing durable.
    pub fn cut(&mut self) -> Vec<(Freed, u64)> {
        std::mem::take(&mut self.given_up)
    }

    /// A cycle has failed: what it has taken waits for the next one.
    pub fn take_back(&mut self, freed: Vec<(Freed, u64)>) {
        let later = std::mem::replace(&mut self.given_up, freed);
        self.given_up.extend(later);
    }

    /// A cycle has ended well: the clearing of what it has taken is durable.
    pub fn clearing_is_durable(&mut self, mut freed: Vec<(Freed, u64)>) {
        self.cleared.append(&mut freed);
    }

    /// Takes what nothing refers to and no request can reach any more.
    pub fn open(&mut self, epochs: &mut Epochs) -> Vec<(Freed, u64)> {
        // Asked once for each epoch: it reads the counters of all threads, and many references are
        // of one epoch.
        let mut last = None;
        let mut has_left = |epoch: u64| match last {
            Some((of, left)) if of == epoch => left,
            Some(_) | None => last.insert((epoch, epochs.all_left(epoch))).1,
        };
        let (ready, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.cleared)
            .into_iter()
            .partition(|(_, epoch)| has_left(*epoch));
        self.cleared = waiting;
        ready
    }

    /// Number of references in quarantine.
    pub fn len(&self) -> usize {
        self.given_up.len() + self.cleared.len()
    }

    /// Returns whether nothing is in quarantine.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::HostOffset;

    fn cluster(number: u64) -> Freed {
        Freed::Cluster(HostOffset(number << 16))
    }

    #[test]
    fn what_is_given_up_is_free_when_it_is_cleared_and_its_epoch_has_left() {
        let (mut quarantine, mut epochs) = (Quarantine::default(), Epochs::default());
        let reader = epochs.enter();
        quarantine.give_up(cluster(1), epochs.current());
        assert_eq!(quarantine.open(&mut epochs), [], "nothing is durable");
        epochs.advance();
        let cut = quarantine.cut();
        quarantine.give_up(cluster(2), epochs.current());
        quarantine.clearing_is_durable(cut);
        assert_eq!(quarantine.open(&mut epochs), [], "a request may read it");
        epochs.leave(reader);
        assert_eq!(quarantine.open(&mut epochs), [(cluster(1), reader)]);
        assert_eq!(quarantine.len(), 1);
    }

    #[test]
    fn a_cycle_that_fails_gives_back_what_it_has_taken() {
        let mut quarantine = Quarantine::default();
        quarantine.give_up(cluster(1), 1);
        let cut = quarantine.cut();
        quarantine.give_up(cluster(2), 2);
        quarantine.take_back(cut);
        assert_eq!(quarantine.cut(), [(cluster(1), 1), (cluster(2), 2)]);
        assert!(quarantine.is_empty());
    }
}
