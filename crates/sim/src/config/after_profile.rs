//! Draws of a configuration after its profile has shaped it, from streams of their own: how space
//! is allocated, the filters, the VM state, encryption.

use cowslip::image::{AllocPolicy, CopyOnRead, DetectZeroes, DiscardPolicy, ZeroMethod};
use cowslip::luks::CipherMode;
use cowslip::qcow2::create::Preallocation;

use super::{Config, Data, Encryption, Kind, Part, Room};
use crate::barriers::Barrier;
use crate::goals::Goal;
use crate::model::SECTOR_BYTES;
use crate::profile::Profile;
use crate::rng::Rng;
use crate::stories::Story;

impl Config {
    /// Draws the VM state that some machines keep behind the disk: at the beginning of the area,
    /// and around the beginning of a further table, so that L1 has to grow once or often.
    pub(super) fn draw_vm_state(&mut self, seed: u64) {
        let rng = &mut Rng::derived(seed, "vm state", 0);
        let usual = !matches!(self.profile, Profile::Directed(_) | Profile::Story(_));
        // Where it is given up in a raw data file, that is zeroed.
        let slow = self.data == Data::ExternalRaw && self.resizes_write_zeroes();
        if !usual || slow || !rng.chance(25) {
            return;
        }
        let per_sector = self.grain.per_sector();
        let sectors = rng.pick(&[8, 32, 70]);
        let further = self.table_bytes() * rng.pick(&[1, 1, 2, 5, 17]) / SECTOR_BYTES;
        let begin = further - rng.between(0, further.min(sectors));
        let windows = [0..sectors.min(begin), begin..begin + sectors];
        let granules = windows.map(|window| window.start * per_sector..window.end * per_sector);
        self.vm_state = granules.into_iter().filter(|w| !w.is_empty()).collect();
        for round in &mut self.rounds {
            round.vm_state_percent = rng.pick(&[3, 10, 30]);
            // One request at a time gets into the area: others are under way beside it.
            round.depth = round.depth.max(rng.pick(&[1, 16, 32]));
        }
    }

    /// How space is allocated, and what discards keep of it.
    pub(super) fn draw_policies(&mut self, seed: u64) {
        use AllocPolicy::{Auto, Contiguous, Sparse};
        use DetectZeroes::{Off, On, Unmap};
        let rng = &mut Rng::derived(seed, "policies", 0);
        self.prepared.stored_policy = rng.pick(&[Auto, Auto, Contiguous, Sparse]);
        for round in &mut self.rounds {
            round.alloc_policy = rng.pick(&[Auto, Contiguous, Sparse, Sparse]);
            if matches!(
                self.profile,
                Profile::Story(Story::HolesLate | Story::FlushedOften | Story::TablesOnUsedSpace)
                    | Profile::Directed(Goal::Barrier(Barrier::Zeroes))
            ) {
                // The others keep what they have allocated.
                round.alloc_policy = Sparse;
            }
            round.discard_no_unref = rng.chance(15);
            round.zero_method = rng.pick(&[
                ZeroMethod::Auto,
                ZeroMethod::Auto,
                ZeroMethod::Fresh,
                ZeroMethod::ZeroRange,
                ZeroMethod::Write,
            ]);
            round.detect_zeroes = match round.discard {
                DiscardPolicy::Unmap => rng.pick(&[Off, On, Unmap]),
                DiscardPolicy::Ignore => rng.pick(&[Off, On]),
            };
        }
    }

    /// Draws filters: some sessions copy what they read, and some compress what they write.
    pub(super) fn draw_filters(&mut self, seed: u64) {
        let rng = &mut Rng::derived(seed, "filters", 0);
        if self.kind != Kind::Qcow2
            || matches!(self.profile, Profile::Directed(_) | Profile::Story(_))
        {
            return;
        }
        // A write of a part of a compressed cluster stores all of it again and makes it dirty.
        let has_bitmaps = self.rounds.iter().any(|round| round.bitmaps_percent > 0);
        for round in &mut self.rounds {
            if rng.chance(25) {
                round.copy_on_read =
                    rng.pick(&[CopyOnRead::All, CopyOnRead::All, CopyOnRead::DownTo(1)]);
            }
            let compresses = self.data == Data::Inside && rng.chance(8);
            round.compress = compresses && !has_bitmaps;
        }
    }

    /// Draws encryption: some images have it. They have no compressed clusters, which would not be
    /// encrypted.
    pub(super) fn draw_encryption(&mut self, seed: u64) {
        let rng = &mut Rng::derived(seed, "encryption", 0);
        let drawn = !matches!(self.profile, Profile::Directed(_) | Profile::Story(_));
        if drawn && self.data != Data::ExternalRaw && rng.chance(6) {
            self.encrypt(rng);
        }
    }

    /// Encrypts the guest's data.
    pub(crate) fn encrypt(&mut self, rng: &mut Rng) {
        self.encryption = rng.pick(&[
            Encryption::Aes,
            Encryption::Luks(CipherMode::Cbc),
            Encryption::Luks(CipherMode::Xts),
        ]);
        self.leave_out(Part::Compressed);
        if self.layout.version == 2 {
            // Nothing could say that preallocated clusters read as zeroes.
            self.preallocation = Preallocation::Off;
            self.leave_out(Part::Resizes);
        }
    }

    /// Draws devices: some images are on them, a few of which are too small for all that is asked
    /// for.
    pub(super) fn draw_room(&mut self, seed: u64) {
        let rng = &mut Rng::derived(seed, "room", 0);
        let percent = match self.profile {
            Profile::Directed(Goal::Barrier(Barrier::Blocks | Barrier::CountTable)) => 30,
            Profile::Directed(_) | Profile::Story(_) => 0,
            _ => 12,
        };
        // A tool that makes such an image writes no more than its metadata.
        let is_bare = self.preallocation == Preallocation::Off;
        if !rng.chance(percent) || !is_bare || self.layout.cluster_bits > 16 {
            return;
        }
        self.room = match rng.chance(40) {
            true => Room::Scarce,
            false => Room::Fixed,
        };
        // Clusters beyond the end have no counts, and there is no file to extend.
        self.crammed = None;
        let below_shows = self.layout.version == 2 && !self.below.is_empty();
        if self.data == Data::ExternalRaw || below_shows {
            // The first has no file to extend; what a growth of the second uncovers is written.
            self.leave_out(Part::Resizes);
        }
        if self.data != Data::Inside {
            // It lies in the data file, however far out.
            self.vm_state.clear();
            self.leave_out(Part::VmState);
        }
        if self.room == Room::Scarce {
            self.prepared.filled = false;
            // A close that has to store bitmaps, or clusters that are packed, may find no space.
            self.leave_out(Part::Bitmaps);
            self.leave_out(Part::Compressed);
            // A read that copies finds no space.
            self.leave_out(Part::CopyOnRead);
        }
    }

    /// Space that is allocated in advance, in some runs: it is written, at least in part.
    pub(super) fn draw_allocations(&mut self, seed: u64) {
        let rng = &mut Rng::derived(seed, "allocations", 0);
        let usual = !matches!(self.profile, Profile::Directed(_) | Profile::Story(_));
        // A device that holds what is written may have no space for more.
        if !usual || self.room == Room::Fixed || !rng.chance(25) {
            return;
        }
        for round in &mut self.rounds {
            round.allocates_percent = rng.pick(&[2, 10, 30]);
        }
    }

    /// The file is compacted beside other requests, in some runs.
    pub(super) fn draw_compactions(&mut self, seed: u64) {
        let rng = &mut Rng::derived(seed, "compactions", 0);
        let usual = !matches!(self.profile, Profile::Directed(_) | Profile::Story(_));
        if !usual || !rng.chance(30) {
            return;
        }
        for round in &mut self.rounds {
            round.compacts_percent = rng.pick(&[1, 3, 10]);
        }
    }

    /// Tables of bitmaps are read, and bits written, in few entries at a time.
    pub(super) fn draw_pieces(&mut self, seed: u64) {
        if matches!(self.profile, Profile::Directed(_) | Profile::Story(_)) {
            return;
        }
        for (round, index) in self.rounds.iter_mut().zip(0..) {
            let rng = &mut Rng::derived(seed, "pieces", index);
            round.bitmap_piece_bytes = rng.pick(&[0, 8, 16, 64, 512]);
        }
    }
}
