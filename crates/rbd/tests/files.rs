//! Requests: bytes, errors, ends in any order, and an image that is let go meanwhile.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cowslip_block::file::{BlockFile, Durability, FileExtent, Space};
use cowslip_queue::{Buf, BufMut, IoVec, IoVecMut, SharedMemory};
use cowslip_rbd::{Access, RbdFile};
use cowslip_testbed::Random;

use crate::support::{Cluster, cluster, cluster_with, random, wait};

const OBJECT: u64 = 64 << 10;

fn read(file: &RbdFile, offset: u64, len: usize) -> Result<Vec<u8>, std::io::Error> {
    let (outcome, list) = wait(file.read(offset, BufMut::zeroed(len).into()));
    outcome.map(|()| list.to_vec())
}

fn write(file: &RbdFile, offset: u64, bytes: &[u8]) -> Result<(), std::io::Error> {
    let data = IoVec::from(Buf::copy_of(bytes));
    wait(file.write(offset, data, Durability::Cached))
}

#[test]
fn reads_have_the_bytes_and_zeroes_beyond_the_end() {
    let Some(cluster) = cluster() else { return };
    let contents = cluster.random("golden", 300_001);
    let file = cluster.open("rbd:rbd/golden", Access::Read).unwrap();
    assert_eq!(wait(file.len()).unwrap(), 300_001);
    let mut beyond = contents.clone();
    beyond.resize(400_000, 0);
    for (offset, len) in [
        (0, 300_001),
        (1, 511),
        (299_990, 4096),
        (300_001, 16),
        (399_999, 1),
    ] {
        let range = offset as usize..offset as usize + len;
        let expected: Vec<u8> = match beyond.get(range.clone()) {
            Some(bytes) => bytes.to_vec(),
            None => panic!("{range:?}"),
        };
        assert_eq!(
            read(&file, offset, len).unwrap(),
            expected,
            "{offset}+{len}"
        );
    }
    let overflow = read(&file, u64::MAX, 2).unwrap_err();
    assert_eq!(overflow.kind(), ErrorKind::InvalidInput);
    // Lists of several segments, of memory that is not ours.
    let guest = SharedMemory::new(8192);
    let mut list = IoVecMut::shared(&guest, 100..4196);
    list.append(BufMut::zeroed(1000).into());
    let (outcome, list) = wait(file.read(5000, list));
    outcome.unwrap();
    assert_eq!(list.to_vec(), &contents[5000..5000 + 4096 + 1000]);
}

#[test]
fn a_snapshot_is_what_it_was() {
    let Some(cluster) = cluster() else { return };
    let before = cluster.random("golden@v1", 100_000);
    cluster.empty("golden", 200_000);
    let file = cluster.open("rbd:rbd/golden@v1", Access::Read).unwrap();
    assert_eq!(wait(file.len()).unwrap(), 100_000);
    assert_eq!(read(&file, 0, 100_000).unwrap(), before);
    let refused = write(&file, 0, b"x").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    assert!(wait(file.flush()).is_ok(), "there is nothing to flush");
    assert!(cluster.calls("aio_w").is_empty());
}

#[test]
fn failures_have_the_number_of_ceph_and_give_memory_back() {
    let Some(cluster) = cluster() else { return };
    let contents = cluster.random("golden", 4096);
    let file = cluster.open("rbd:rbd/golden", Access::Write).unwrap();
    cluster
        .fake
        .put(
            "faults",
            "aio_r 1 12\nended 1 5\nended 2 110\nrbd_resize 1 28\nrbd_diff_iterate2 1 5",
        )
        .unwrap();
    let error = |outcome: std::io::Result<()>| outcome.unwrap_err().raw_os_error();
    // Refused at once, and failed in the end.
    for number in [12, 5] {
        let (outcome, list) = wait(file.read(0, BufMut::zeroed(512).into()));
        assert_eq!(error(outcome), Some(number));
        assert_eq!(list.len(), 512);
    }
    assert_eq!(error(write(&file, 0, &[1; 16])), Some(110));
    assert_eq!(error(wait(file.set_len(1 << 20))), Some(28));
    assert_eq!(wait(file.len()).unwrap(), 4096, "as it was");
    assert_eq!(
        wait(file.extents(0, 4096)).unwrap_err().raw_os_error(),
        Some(5)
    );
    assert_eq!(read(&file, 0, 4096).unwrap(), contents);
    cluster
        .fake
        .put("faults", "rbd_aio_create_completion 5 12")
        .unwrap();
    assert_eq!(error(wait(file.flush())), Some(12));
    wait(file.flush()).unwrap();
}

#[test]
fn an_image_that_became_shorter_is_an_error_not_zeroes() {
    let Some(cluster) = cluster() else { return };
    cluster.random("golden", 8192);
    let file = cluster.open("rbd:rbd/golden", Access::Read).unwrap();
    cluster.fake.put("hold", "").unwrap();
    let reading = file.read(0, BufMut::zeroed(8192).into());
    let behind = std::fs::File::options()
        .write(true)
        .open(cluster.fake.image("rbd/golden"));
    behind.unwrap().set_len(4096).unwrap();
    cluster.fake.remove("hold").unwrap();
    let (outcome, _) = wait(reading);
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

/// Futures that are dropped free nothing that Ceph still writes to, and the image is closed after
/// the last request: the library ends the process otherwise.
#[test]
fn an_image_is_closed_after_its_last_request_whoever_waits() {
    let Some(cluster) = cluster() else { return };
    cluster.random("golden", 1 << 20);
    let file = cluster.open("rbd:rbd/golden", Access::Write).unwrap();
    cluster.fake.put("hold", "").unwrap();
    let kept = file.read(4096, BufMut::zeroed(4096).into());
    for number in 0..20 {
        drop(file.read(number * 512, BufMut::zeroed(60_000).into()));
        drop(file.write(0, Buf::copy_of(&[1; 512]).into(), Durability::Durable));
    }
    drop(file.extents(0, 1 << 20));
    drop(file);
    assert!(cluster.calls("rbd_close").is_empty());
    cluster.fake.remove("hold").unwrap();
    let (outcome, _) = wait(kept);
    outcome.unwrap();
    cluster.wait_for("rados_shutdown");
    assert_eq!(cluster.calls("rbd_close"), ["rbd_close golden"]);
    // The flush that makes a write durable was made although nobody waited for it.
    assert_eq!(cluster.calls("aio_f").len(), 20);
    assert!(cluster.calls("FORBIDDEN").is_empty());
}

#[test]
fn writes_are_flushed_if_they_are_to_be_durable() {
    let Some(cluster) = cluster() else { return };
    cluster.empty("disk", 1 << 20);
    let file = cluster.open("rbd:rbd/disk", Access::Write).unwrap();
    let data = || IoVec::from(Buf::copy_of(&[3; 700]));
    wait(file.write(999, data(), Durability::Cached)).unwrap();
    assert!(cluster.calls("aio_f").is_empty());
    wait(file.write(5000, data(), Durability::Durable)).unwrap();
    assert_eq!(cluster.calls("aio_f").len(), 1);
    let contents = cluster.contents("disk");
    assert_eq!(&contents[999..1699], [3; 700]);
    assert_eq!(&contents[5000..5700], [3; 700]);
    // A flush that fails makes the write fail.
    cluster.fake.put("faults", "aio_f 2 5").unwrap();
    let outcome = wait(file.write(0, data(), Durability::Durable));
    assert_eq!(outcome.unwrap_err().raw_os_error(), Some(5));
}

#[test]
fn an_image_grows_with_what_is_written_by_whole_objects() {
    let Some(cluster) = cluster() else { return };
    cluster.empty("disk", 0);
    let file = cluster.open("rbd:rbd/disk", Access::Write).unwrap();
    let bytes = random(70_000);
    // At once: each is in the end.
    let parts: Vec<_> = (0..10)
        .map(|part: u64| {
            let data = Buf::copy_of(&bytes[part as usize * 7000..][..7000]);
            file.write(part * 7000, data.into(), Durability::Cached)
        })
        .collect();
    for part in parts {
        wait(part).unwrap();
    }
    assert_eq!(wait(file.len()).unwrap(), 2 * OBJECT);
    assert_eq!(cluster.calls("rbd_resize").len(), 2);
    wait(file.zero(3 * OBJECT, 10, Space::Release)).unwrap();
    assert_eq!(wait(file.len()).unwrap(), 4 * OBJECT);
    wait(file.set_len(70_000)).unwrap();
    assert_eq!(cluster.contents("disk"), bytes);
    assert_eq!(
        read(&file, 69_000, 2000).unwrap(),
        [&bytes[69_000..], &[0; 1000]].concat()
    );
}

#[test]
fn zeroes_and_discards_are_requests_of_their_own() {
    let Some(cluster) = cluster() else { return };
    let mut model = cluster.random("disk", 4 * OBJECT as usize);
    let file = cluster.open("rbd:rbd/disk", Access::Write).unwrap();
    assert!(file.capabilities().punches_holes && file.capabilities().zeroes_fast);
    wait(file.zero(100, 70_000, Space::Release)).unwrap();
    wait(file.zero(100_000, 10, Space::Keep)).unwrap();
    // An unaligned discard reads as zeroes, too, and one beyond the end ends there.
    wait(file.discard(3 * OBJECT + 7, 10 * OBJECT)).unwrap();
    model[100..70_100].fill(0);
    model[100_000..100_010].fill(0);
    model[3 * OBJECT as usize + 7..].fill(0);
    assert!(cluster.contents("disk") == model);
    let calls = [cluster.calls("aio_z").len(), cluster.calls("aio_t").len()];
    assert_eq!(calls, [2, 1]);
}

#[test]
fn an_old_library_has_neither_fast_zeroes_nor_exact_discards() {
    let Some(cluster) = cluster_with(&["WITHOUT_WRITE_ZEROES"]) else {
        return;
    };
    let mut model = cluster.random("disk", 4 * OBJECT as usize);
    let file = cluster.open("rbd:rbd/disk", Access::Write).unwrap();
    assert!(!file.capabilities().punches_holes && !file.capabilities().zeroes_fast);
    let refused = wait(file.zero(0, 4096, Space::Release)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    wait(file.discard(OBJECT, OBJECT)).unwrap();
    model[OBJECT as usize..2 * OBJECT as usize].fill(0);
    assert!(cluster.contents("disk") == model);
}

/// Extents of a range, from which each byte's state is known.
fn states(file: &RbdFile, offset: u64, len: u64) -> Vec<bool> {
    let extents = wait(file.extents(offset, len)).unwrap();
    let mut at = offset;
    let mut states = Vec::new();
    for FileExtent { start, len, hole } in extents {
        assert_eq!(start, at, "without gaps");
        assert!(len > 0);
        states.resize(states.len() + len as usize, hole);
        at += len;
    }
    assert_eq!(at, offset + len);
    states
}

fn sparse(cluster: &Cluster, name: &str, objects: u64, data: &[u64]) -> Arc<RbdFile> {
    cluster.empty(name, objects * OBJECT - 100);
    let path = cluster.fake.image(&format!("rbd/{name}"));
    let file = std::fs::File::options().write(true).open(path).unwrap();
    for object in data {
        file.write_all_at(&[1; 10], object * OBJECT + 5000).unwrap();
    }
    cluster
        .open(&format!("rbd:rbd/{name}"), Access::Read)
        .unwrap()
}

#[test]
fn holes_are_objects_that_are_not_there() {
    let Some(cluster) = cluster() else { return };
    let data = [0, 3, 4, 9, 15];
    let file = sparse(&cluster, "golden", 16, &data);
    let end = 16 * OBJECT - 100;
    let is_hole = |at: u64| at >= end || !data.contains(&(at / OBJECT));
    let mut random = Random::new(3);
    for round in 0..40 {
        let offset = random.below(16 * OBJECT);
        let len = 1 + random.below(3 * OBJECT);
        for (at, hole) in (offset..).zip(states(&file, offset, len)) {
            assert_eq!(
                hole,
                is_hole(at),
                "round {round}: byte {at} of {offset}+{len}"
            );
        }
    }
    assert!(wait(file.extents(5, 0)).unwrap().is_empty());
}

#[test]
fn stripes_and_images_below_are_taken_into_account() {
    let Some(cluster) = cluster() else { return };
    cluster.fake.put("stripes", "4").unwrap();
    let file = sparse(&cluster, "striped", 16, &[5]);
    // The library ends the process where a difference begins within a row of stripes.
    assert!(states(&file, 6 * OBJECT, OBJECT).iter().all(|hole| *hole));
    cluster.fake.remove("stripes").unwrap();
    cluster
        .fake
        .put("overlap", &(3 * OBJECT).to_string())
        .unwrap();
    let clone = sparse(&cluster, "clone", 16, &[5]);
    let states = states(&clone, 0, 16 * OBJECT);
    let expected = (0..16 * OBJECT).map(|at| {
        let object = at / OBJECT;
        object >= 3 && object != 5
    });
    assert!(states.into_iter().eq(expected));
}

/// Random operations at once against a model of the bytes, with faults: a write that fails leaves
/// old or new bytes, everything else is exact.
#[test]
fn random_operations_agree_with_a_model() {
    let Some(cluster) = cluster() else { return };
    const LEN: u64 = 8 * OBJECT;
    let mut model = cluster.random("disk", LEN as usize);
    let file = cluster.open("rbd:rbd/disk", Access::Write).unwrap();
    let faults: Vec<String> = (1..60).map(|at| format!("ended {} 5", at * 17)).collect();
    cluster.fake.put("faults", &faults.join("\n")).unwrap();
    let mut random = Random::new(11);
    let mut failed = 0;
    for round in 0..400_u32 {
        let offset = random.below(LEN - 1);
        let len = 1 + random.below((LEN - offset).min(20_000));
        let range = offset as usize..(offset + len) as usize;
        match random.below(4) {
            0 => {
                let bytes = vec![round as u8; len as usize];
                match write(&file, offset, &bytes) {
                    Ok(()) => model[range].copy_from_slice(&bytes),
                    Err(_) => failed += 1,
                }
            }
            1 => match wait(file.zero(offset, len, Space::of_unmap(round % 2 == 0))) {
                Ok(()) => model[range].fill(0),
                Err(_) => failed += 1,
            },
            _ => {
                let middle = offset + len / 2;
                // Two at once, which end in any order.
                let first = file.read(offset, BufMut::zeroed(len as usize).into());
                let second = file.read(middle, BufMut::zeroed(4096).into());
                let (outcome, list) = wait(second);
                let expected =
                    (middle..middle + 4096).map(|at| model.get(at as usize).copied().unwrap_or(0));
                match outcome {
                    Ok(()) => assert!(list.to_vec().into_iter().eq(expected), "round {round}"),
                    Err(_) => failed += 1,
                }
                let (outcome, list) = wait(first);
                match outcome {
                    Ok(()) => assert!(list.to_vec() == model[range], "round {round}"),
                    Err(_) => failed += 1,
                }
            }
        }
    }
    assert!(failed > 10, "{failed}");
    drop(file);
    cluster.wait_for("rados_shutdown");
    assert!(cluster.contents("disk") == model);
}
