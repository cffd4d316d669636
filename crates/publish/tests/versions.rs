//! A second version costs what differs, wherever the image keeps its clusters.

use std::ops::Range;

use cowslip_block::Buf;
use cowslip_block::disk::{Disk, MemoryDisk};
use cowslip_block::file::Durability;
use cowslip_publish::digest::Digest;
use cowslip_publish::location::Version;
use cowslip_publish::publish::{Changed, Request};

use crate::shared::{
    change, open, publish_bytes, random_bytes, read_all, small_request, usual_request,
};
use crate::simulated::{Rng, Simulated, run};

/// A disk of this many bytes, mostly full, a third of it like text.
fn golden(rng: &mut Rng, len: usize) -> Vec<u8> {
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
    let mut rng = Rng(11);
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

/// Bytes that differ, in ranges of this granularity, as a bitmap has them.
fn differences(old: &[u8], new: &[u8], granularity: usize) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for start in (0..new.len()).step_by(granularity) {
        let end = (start + granularity).min(new.len());
        let is_same = old
            .get(start..end)
            .is_some_and(|old| *old == new[start..end]);
        let piece = start as u64..end as u64;
        match ranges.last_mut() {
            _ if is_same => {}
            Some(last) if last.end == piece.start => last.end = piece.end,
            _ => ranges.push(piece),
        }
    }
    ranges
}

/// Versions by what is known to have changed, each upon the one before: of any lengths, and each is
/// the disk of its moment.
#[test]
fn a_version_of_which_the_changes_are_known_is_the_disk() {
    let mut rng = Rng(23);
    let store = Simulated::new(7);
    let client = cowslip_publish::store::Store::new(store.client(), "sim");
    let mut bytes = random_bytes(&mut rng, 900_000);
    let request = small_request("golden", &mut rng);
    let mut before = run(publish_bytes(&client, &bytes, &request))
        .unwrap()
        .record;
    for round in 0..60 {
        let old = bytes.clone();
        for _ in 0..rng.below(4) {
            change(&mut rng, &mut bytes);
        }
        if rng.one_in(5) {
            let len = 4096 + rng.below(1 << 20) as usize;
            bytes.resize(len, 0);
        }
        let granularity = 512 << rng.below(9);
        let since = Digest::from_hex(&before.index).unwrap();
        let request = Request {
            changed: Some(Changed {
                since,
                ranges: differences(&old, &bytes, granularity),
            }),
            ..small_request("golden", &mut rng)
        };
        before = run(publish_bytes(&client, &bytes, &request))
            .unwrap()
            .record;
        let disk = run(open(&client, "golden", Version::Newest)).unwrap();
        assert!(run(read_all(&disk)).unwrap() == bytes, "round {round}");
    }
}

/// A part that is not marked is not looked at: here it is other bytes, which nobody gets.
#[test]
fn what_has_not_changed_is_not_read() {
    let mut rng = Rng(29);
    let store = Simulated::new(8);
    let client = cowslip_publish::store::Store::new(store.client(), "sim");
    let old = golden(&mut rng, 4 << 20);
    let request = small_request("golden", &mut rng);
    let first = run(publish_bytes(&client, &old, &request)).unwrap().record;
    let mut others = vec![0; old.len()];
    rng.fill(&mut others);
    let range = 1 << 20..(1 << 20) + 8192_usize;
    let marked = range.start as u64..range.end as u64;
    let request = Request {
        changed: Some(Changed {
            since: Digest::from_hex(&first.index).unwrap(),
            ranges: std::iter::once(marked).collect(),
        }),
        ..small_request("golden", &mut rng)
    };
    run(publish_bytes(&client, &others, &request)).unwrap();
    let disk = run(open(&client, "golden", Version::Newest)).unwrap();
    let found = run(read_all(&disk)).unwrap();
    assert!(found[range.clone()] == others[range.clone()]);
    // The longest chunk, on each side.
    let near = range.start - (32 << 10)..range.end + (32 << 10);
    assert!(found[..near.start] == old[..near.start] && found[near.end..] == old[near.end..]);
    let gone = Request {
        changed: Some(Changed {
            since: Digest::of(b"none"),
            ranges: Vec::new(),
        }),
        ..small_request("golden", &mut rng)
    };
    let refused = run(publish_bytes(&client, &old, &gone))
        .unwrap_err()
        .to_string();
    assert!(refused.contains("is not there any more"), "{refused}");
}
