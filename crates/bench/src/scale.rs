//! The sizes of a table's runs, and the columns that all its cells have.

use std::rc::Rc;
use std::time::Instant;

use crate::cell::{CellLoad, Contestant, RawFile};
use crate::machine::Machine;
use crate::peers::Peer;

/// Requests of a depth of one are fewer, because each waits for the last.
const FEWER_AT_DEPTH_ONE: u64 = 8;

/// The sizes of a run, and what else cells have in common.
#[derive(Clone)]
pub struct Scale {
    /// Size of the disks in bytes.
    pub disk_bytes: u64,
    /// Requests of a run.
    pub requests: u64,
    /// Requests in flight, by cell.
    pub depths: Vec<u64>,
    /// Runs of each contestant in each cell.
    pub repetitions: usize,
    /// Columns of ours.
    pub policies: Vec<&'static str>,
    /// QEMU's programs that take part.
    pub peers: Vec<Peer>,
    /// More columns of ours, by how zeroes are made.
    pub zero_methods: Vec<&'static str>,
    /// Columns of raw files.
    pub yardsticks: Vec<fn(RawFile) -> Contestant>,
    /// Whether they are counted.
    pub system_calls: bool,
    /// Whether images stay.
    pub keep: bool,
    /// Where guests run, once that is known.
    pub machine: Option<Rc<Machine>>,
    /// Time from which on no cell is begun.
    pub deadline: Option<Instant>,
}

impl Scale {
    /// Requests of a run at this depth.
    pub fn requests_of(&self, depth: u64) -> u64 {
        match depth {
            1 => (self.requests / FEWER_AT_DEPTH_ONE).max(1),
            _ => self.requests,
        }
    }

    /// The same where each place is visited once: no more than there are.
    pub fn requests_at(&self, depth: u64, request_bytes: u64) -> u64 {
        let wanted = self.requests_of(depth);
        wanted.clamp(1, self.disk_bytes / request_bytes)
    }

    /// The same with one column of ours where all policies would do the same: the first that was
    /// asked for.
    pub fn contestants_of_one_policy(&self, raw: &[RawFile]) -> Vec<Contestant> {
        let mut contestants = self.contestants(raw);
        let first = self.policies.first();
        contestants.retain(|c| !matches!(c, Contestant::Cowslip(policy) if Some(policy) != first));
        contestants
    }

    /// Servers: ours with each policy, and QEMU's that take part.
    pub fn servers(&self) -> Vec<Contestant> {
        let theirs = self.peers.iter().filter_map(|peer| peer.server());
        let ours = self.policies.iter().map(|p| Contestant::Cowslip(p));
        ours.chain(theirs.map(Contestant::QemuServer)).collect()
    }

    /// Writes at this depth, each place once.
    pub fn writes(&self, depth: u64, request_bytes: u64) -> CellLoad {
        CellLoad::writes(self.requests_at(depth, request_bytes), depth, request_bytes)
    }

    /// Ours, QEMU's, and raw files of these states.
    pub fn contestants(&self, raw: &[RawFile]) -> Vec<Contestant> {
        let ours = self.policies.iter().map(|p| Contestant::Cowslip(p));
        let yardsticks = self.yardsticks.iter();
        let zeroing = self.zero_methods.iter();
        let ours = ours.chain(zeroing.map(|method| Contestant::CowslipZeroing(method)));
        let raw = yardsticks.flat_map(|yardstick| raw.iter().map(|state| yardstick(*state)));
        ours.chain([Contestant::QemuImg]).chain(raw).collect()
    }
}
