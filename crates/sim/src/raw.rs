//! Runs about disks that are no images of qcow2: a LUKS volume that is a file or a device, and a
//! raw disk on a device.
//!
//! Runs of their own, with seeds from 5 * 2^40 on. A LUKS volume is a raw disk behind a header,
//! whose sectors are numbered from where its data begins; a second reader opens the keys and
//! decrypts by itself ([`cipher`](crate::cipher)). A device has the length that it has: it is
//! neither extended nor cut, nothing is written or zeroed beyond its end, and its calls for space
//! take whole blocks, which may be larger than the unit of reads and writes.

use cowslip::luks::CipherMode;

use crate::config::{Config, Encryption, Kind, Part, Room};
use crate::model::{Grain, SECTOR_BYTES};
use crate::rng::Rng;

/// Shapes the configuration of a seed.
pub(crate) fn shape(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "raw", 0);
    config.kind = Kind::Raw;
    config.encryption = match rng.below(5) {
        0 => Encryption::None,
        1 | 2 => Encryption::Luks(CipherMode::Cbc),
        _ => Encryption::Luks(CipherMode::Xts),
    };
    config.room = match config.encryption == Encryption::None || rng.chance(40) {
        true => Room::Fixed,
        false => Room::Grows,
    };
    config.alignment_bytes = rng.pick(&[1, 1, 512, 4096]);
    config.grain = Grain::new(rng.pick(&[vec![0], vec![0, 255], vec![0, 64, 128, 256]]));
    // A disk may end within a block of its file, unless that is a device.
    let unit = match config.room {
        Room::Grows => SECTOR_BYTES,
        Room::Fixed | Room::Scarce => 4096,
    };
    config.size = rng.between(2, 24) * 4096 + rng.below(4096 / unit) * unit;
    config.created_bytes = config.size;
    config.crammed = None;
    for part in [Part::Resizes, Part::Snapshots, Part::Bitmaps] {
        config.leave_out(part);
    }
    let granules = config.size / SECTOR_BYTES * config.grain.per_sector();
    config.windows = std::iter::once(0..granules).collect();
    for round in &mut config.rounds {
        round.whole_percent = 0;
        round.requests = round.requests.min(120);
        round.weights = [25, 45, 12, rng.pick(&[0, 10]), rng.pick(&[4, 12]), 0];
        round.fua_percent = rng.pick(&[0, 10, 50]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds;

    #[test]
    fn seeds_from_there_on_are_about_raw_disks() {
        let draw = |seed| Config::draw(seed, Kind::Qcow2);
        let configs: Vec<Config> = (seeds::RAW..seeds::RAW + 60).map(draw).collect();
        assert!(configs.iter().all(|config| config.kind == Kind::Raw));
        let encrypted = |config: &&Config| config.encryption != Encryption::None;
        let count = configs.iter().filter(encrypted).count();
        assert!((30..60).contains(&count), "{count} are encrypted");
        let fixed = configs.iter().filter(|config| config.room == Room::Fixed);
        assert!(fixed.count() > 15, "some are devices");
        assert_eq!(draw(seeds::RAW - 1).kind, Kind::Qcow2);
    }
}
