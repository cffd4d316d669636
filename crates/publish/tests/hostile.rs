//! Packs and records that are damaged or replaced: an error that names them, never other bytes.

use std::sync::Arc;

use cowslip_block::random::Random;
use cowslip_publish::digest::Digest;
use cowslip_publish::location::Version;
use cowslip_publish::store::{Kind, Store};

use crate::shared::{open, open_digest, publish_bytes, random_bytes, read_all, small_request};
use crate::simulated::{Simulated, run};

/// The keys of the objects of a kind.
fn keys(sim: &Simulated, kind: Kind) -> Vec<String> {
    let world = sim.world();
    let keys = world.objects.keys();
    let keys = keys.filter(|key| key.starts_with(&kind.folder()));
    keys.cloned().collect()
}

fn replace(sim: &Simulated, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut world = sim.world();
    let (bytes, _) = world.objects.get_mut(key).unwrap();
    let mut changed = bytes.to_vec();
    change(&mut changed);
    *bytes = Arc::new(changed);
}

#[test]
fn damaged_packs_are_refused_where_they_are_damaged() {
    let mut rng = Random(31);
    let sim = Simulated::new(11);
    let store = Store::new(sim.client(), "sim");
    let bytes = random_bytes(&mut rng, 1 << 20);
    let request = small_request("one", &mut rng);
    let done = run(publish_bytes(&store, &bytes, &request)).unwrap();
    let digest = Digest::from_hex(&done.record.index).unwrap();
    let packs = keys(&sim, Kind::Packs);
    for round in 0..200 {
        let key = &packs[rng.below(packs.len() as u64) as usize];
        let before = sim.world().objects[key].clone();
        replace(&sim, key, |bytes| {
            let at = rng.below(bytes.len() as u64) as usize;
            match round % 3 {
                0 => bytes[at] ^= 1 << rng.below(8),
                1 => bytes.truncate(at),
                _ => {
                    let end = bytes.len().min(at + 1000);
                    rng.fill(&mut bytes[at..end]);
                }
            }
        });
        let disk = run(open_digest(&store, digest)).unwrap();
        match run(read_all(&disk)) {
            // Some bits of a compressed chunk mean nothing.
            Ok(read) => assert!(read == bytes),
            Err(refused) => {
                let refused = refused.to_string();
                assert!(
                    refused.contains("sim/cowslip-published-1/packs/"),
                    "{refused}"
                );
            }
        }
        sim.world().objects.insert(key.clone(), before);
    }
    sim.world().objects.remove(&packs[0]);
    let disk = run(open_digest(&store, digest)).unwrap();
    let refused = run(read_all(&disk)).unwrap_err().to_string();
    assert!(refused.contains("No such object"), "{refused}");
}

#[test]
fn another_index_or_record_under_a_name_is_refused() {
    let mut rng = Random(32);
    let sim = Simulated::new(12);
    let store = Store::new(sim.client(), "sim");
    for name in ["one", "two"] {
        let bytes = random_bytes(&mut rng, 300 << 10);
        run(publish_bytes(
            &store,
            &bytes,
            &small_request(name, &mut rng),
        ))
        .unwrap();
    }
    let indexes = keys(&sim, Kind::Indexes);
    let kept = sim.world().objects.clone();
    let other = kept[&indexes[1]].0.to_vec();
    replace(&sim, &indexes[0], |bytes| *bytes = other);
    let digest = indexes[0].rsplit('/').next().and_then(Digest::from_hex);
    let refused = run(open_digest(&store, digest.unwrap())).unwrap_err();
    assert!(
        refused.to_string().contains("its digest is not its name"),
        "{refused}"
    );
    sim.world().objects = kept;
    let records = keys(&sim, Kind::Versions);
    replace(&sim, &records[0], |bytes| bytes[20] ^= 1);
    let refused = run(open(&store, "one", Version::Newest)).unwrap_err();
    assert!(refused.to_string().contains("checksum"), "{refused}");
    replace(&sim, &records[0], |bytes| bytes.resize(1 << 20, b' '));
    let refused = run(open(&store, "one", Version::Newest)).unwrap_err();
    assert!(
        refused.to_string().contains("its length is 1048576"),
        "{refused}"
    );
    let missing = run(open(&store, "three", Version::Newest)).unwrap_err();
    let text = "There is no published disk 'sim/three': the names there are ";
    assert!(missing.to_string().starts_with(text), "{missing}");
}
