//! A second version costs what differs, wherever the image keeps its clusters.

use cowslip_block::Buf;
use cowslip_block::disk::{Disk, MemoryDisk};
use cowslip_block::file::Durability;
use cowslip_block::random::Random;
use cowslip_publish::location::Version;

use crate::shared::{open, publish_bytes, read_all, usual_request};
use crate::simulated::{Simulated, run};

/// A disk of this many bytes, mostly full, a third of it like text.
pub fn golden(rng: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut at = 0;
    while at < len {
        let run = ((1 + rng.below(64) as usize) * 16384).min(len - at);
        match rng.below(8) {
            0 => {}
            1..=3 => {
                for word in bytes[at..at + run].chunks_mut(16) {
                    let number = rng.below(4096);
                    let text = format!("{number:016x}");
                    word.copy_from_slice(&text.as_bytes()[..word.len()]);
                }
            }
            _ => rng.fill(&mut bytes[at..at + run]),
        }
        at += run;
    }
    bytes
}

#[test]
fn a_second_version_that_differs_by_2_per_cent_costs_at_most_4() {
    let mut rng = Random(11);
    let store = Simulated::new(4);
    let client = cowslip_publish::store::Store::new(store.client(), "sim");
    let mut bytes = golden(&mut rng, 64 << 20);
    let request = usual_request("golden", &mut rng);
    let first = run(publish_bytes(&client, &bytes, &request)).unwrap();
    // Files that a guest has replaced: runs of 256 KiB to 1.25 MiB.
    let mut changed = 0;
    while changed < bytes.len() / 50 {
        let len = (1 + rng.below(5) as usize) << 18;
        let len = len.min(bytes.len() / 50 - changed).next_multiple_of(4096);
        let at = rng.below((bytes.len() - len) as u64 / 4096) as usize * 4096;
        rng.fill(&mut bytes[at..at + len]);
        changed += len;
    }
    let before = store.world().put_bytes;
    let request = usual_request("golden", &mut rng);
    let second = run(publish_bytes(&client, &bytes, &request)).unwrap();
    let uploaded = store.world().put_bytes - before;
    let share = uploaded as f64 / first.record.stored_bytes as f64;
    println!(
        "{share:.4} of the first version, {} objects",
        second.objects
    );
    assert!(share <= 0.04, "{share}");
    let disk = run(open(&client, "golden", Version::Newest)).unwrap();
    assert!(run(read_all(&disk)).unwrap() == bytes);
    // The same disk once more, of which an image now stores the zeroes too.
    let stored = MemoryDisk::new("stored", bytes.len() as u64);
    for (at, piece) in bytes.chunks(1 << 20).enumerate() {
        let data = Buf::copy_of(piece).into();
        run(stored.write((at as u64) << 20, data, Durability::Cached)).unwrap();
    }
    let request = usual_request("golden", &mut rng);
    let (workers, job) = Default::default();
    let third = cowslip_publish::publish::publish(&stored, &client, &request, &workers, &job);
    let third = run(third).unwrap();
    assert_eq!(third.record.new_bytes, third.record.index_bytes);
    assert_eq!(third.record.chunks, second.record.chunks);
}
