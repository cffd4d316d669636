//! Each fuzz target over its corpus, its regressions, and some thousand mutations of them that
//! follow from a seed. What the fuzzers find beyond that is kept in `fuzz/regressions/TARGET/NAME`.
//!
//! `COWSLIP_ROUNDS=n` tries more mutations.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use cowslip_hostile::TARGETS;
use cowslip_hostile::draw::Draw;

/// An input and what it is called.
type Input = (String, Vec<u8>);

fn fuzz_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

fn inputs(kind: &str, target: &str) -> Vec<Input> {
    let directory = fuzz_directory().join(kind).join(target);
    let Ok(entries) = fs::read_dir(&directory) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: PathBuf| (path.display().to_string(), fs::read(&path).unwrap());
    paths.into_iter().map(read).collect()
}

/// A copy with some bytes changed, moved, doubled or cut off.
fn mutated(input: &[u8], draw: &mut Draw) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..1 + draw.below(4) {
        let len = bytes.len() as u64;
        let at = draw.below(len + 1) as usize;
        match draw.below(6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, draw.byte()),
            2 => {
                let end = at + draw.below(len + 1 - at as u64) as usize;
                let copy = bytes[at..end.min(at + 64)].to_vec();
                let to = draw.below(len + 1) as usize;
                bytes.splice(to..to, copy);
            }
            3 => {
                let value = draw.pick(&[0u64, 1, u64::MAX, 1 << 63, 512, 1 << 32]);
                let end = bytes.len().min(at + 8);
                bytes[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = draw.byte();
                }
            }
        }
    }
    bytes
}

fn smoke(name: &str, rounds: u64) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let corpus = inputs("corpus", name);
    assert!(corpus.len() > 5, "{name} has no corpus");
    let mut failed = Vec::new();
    let mut run = |called: &str, bytes: &[u8]| {
        if catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))).is_err() {
            failed.push(called.to_string());
        }
    };
    for (called, bytes) in corpus.iter().chain(&inputs("regressions", name)) {
        run(called, bytes);
    }
    let rounds = std::env::var("COWSLIP_ROUNDS").map_or(rounds, |text| text.parse().unwrap());
    for seed in 0..rounds {
        let mut draw = Draw::from_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (called, bytes) = &corpus[draw.below(corpus.len() as u64) as usize];
        let bytes = mutated(bytes, &mut draw);
        run(&format!("mutation {seed}, of {called}"), &bytes);
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn arbitrary_bytes_are_an_image_or_an_error() {
    smoke("image_bytes", 2000);
}

#[test]
fn damaged_images_cost_no_metadata() {
    smoke("image_damage", 1000);
}

#[test]
fn damaged_images_are_repaired_or_left_alone() {
    smoke("image_repair", 1000);
}

#[test]
fn tables_and_messages_decode_to_what_they_encode_to() {
    smoke("tables", 20_000);
}

#[test]
fn the_nbd_server_survives_its_clients() {
    smoke("nbd_server", 2000);
}

#[test]
fn the_nbd_client_survives_its_servers() {
    smoke("nbd_client", 2000);
}

#[test]
fn the_fuse_server_survives_its_kernels() {
    smoke("fuse_server", 2000);
}

#[test]
fn hostile_rings_stop_their_queue_with_a_reason_and_no_other() {
    smoke("vhost_rings", 1000);
}

#[test]
fn hostile_messages_end_their_connection_and_no_other() {
    smoke("vhost_messages", 1000);
}

#[test]
fn lines_of_the_shell_are_carried_out_or_complained_of() {
    smoke("io_lines", 500);
}

#[test]
fn the_control_protocol_survives_its_clients() {
    smoke("qmp", 2000);
}

#[test]
fn objects_of_published_disks_are_read_or_refused() {
    smoke("published", 3000);
}

#[test]
fn the_corpus_stays_small_and_every_target_has_one() {
    let mut total = 0;
    for target in TARGETS {
        let inputs = [
            inputs("corpus", target.name),
            inputs("regressions", target.name),
        ]
        .concat();
        assert!(!inputs.is_empty(), "{}", target.name);
        total += inputs.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    }
    assert!(total < 1 << 20, "{total} bytes");
}
