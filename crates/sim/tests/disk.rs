//! The simulated disk itself: what a crash may leave, enumerated on small cases by many seeds.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::file::{BlockFile, Capabilities, Durability, Space};
use cowslip_queue::{Buf, BufMut, Pending};
use cowslip_sim::disk::content::Content;
use cowslip_sim::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use cowslip_sim::disk::{Lie, SimDisk};
use cowslip_sim::rng::Rng;
use cowslip_sim::trace::Trace;

const SECTOR: usize = 512;

fn disk(seed: u64, bytes: usize) -> (SimDisk, Arc<dyn BlockFile>) {
    let disk = SimDisk::new(Rng::new(seed), Trace::off());
    disk.add_file(
        "f",
        Capabilities::of_regular_file(1),
        Content::of(&vec![b'.'; bytes]),
    );
    let file = disk.open("f", true).expect("it was added");
    (disk, file)
}

fn poll<T>(waiting: &mut Pending<T>) -> Poll<T> {
    Pin::new(waiting).poll(&mut Context::from_waker(Waker::noop()))
}

/// Moves the disk on until this operation has completed.
fn finish<T>(disk: &SimDisk, mut waiting: Pending<T>) -> T {
    loop {
        if let Poll::Ready(value) = poll(&mut waiting) {
            return value;
        }
        assert!(disk.step(), "the disk has nothing left to do");
    }
}

fn write(file: &Arc<dyn BlockFile>, sector: usize, text: &str) -> Pending<std::io::Result<()>> {
    let bytes: Vec<u8> = text.bytes().flat_map(|b| [b; SECTOR]).collect();
    let data = Buf::from(bytes).into();
    file.write((sector * SECTOR) as u64, data, Durability::Cached)
}

/// The first byte of each sector; a sector must be uniform.
fn sectors(content: &Content) -> String {
    let bytes = content.bytes(0, content.len() as usize);
    let one = |sector: &[u8]| {
        assert!(sector.iter().all(|b| *b == sector[0]), "a sector is torn");
        if sector[0] == 0 {
            '0'
        } else {
            sector[0] as char
        }
    };
    bytes.chunks(SECTOR).map(one).collect()
}

/// All outcomes of a crash after `work`, over many seeds.
fn outcomes(count: usize, work: impl Fn(&SimDisk, &Arc<dyn BlockFile>)) -> BTreeSet<String> {
    let run = |seed| {
        let (disk, file) = disk(seed, count * SECTOR);
        work(&disk, &file);
        let after = disk.crash(Rng::new(seed ^ 1), Rng::new(seed ^ 2));
        sectors(&after.content("f").expect("files survive"))
    };
    (0..1500).map(run).collect()
}

fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(ToString::to_string).collect()
}

#[test]
fn what_was_flushed_survives() {
    let left = outcomes(2, |disk, file| {
        finish(disk, write(file, 0, "ab")).unwrap();
        finish(disk, file.flush()).unwrap();
    });
    assert_eq!(left, set(&["ab"]));
}

#[test]
fn what_was_not_flushed_vanishes_or_survives_sector_by_sector() {
    let left = outcomes(2, |disk, file| {
        finish(disk, write(file, 0, "ab")).unwrap();
    });
    assert_eq!(left, set(&["..", "a.", ".b", "ab"]));
}

#[test]
fn a_write_in_flight_may_be_on_the_medium() {
    let left = outcomes(1, |_, file| drop(write(file, 0, "a")));
    assert_eq!(left, set(&[".", "a"]));
}

#[test]
fn overlapping_writes_leave_any_of_them() {
    let left = outcomes(1, |disk, file| {
        finish(disk, write(file, 0, "a")).unwrap();
        finish(disk, write(file, 0, "b")).unwrap();
    });
    assert_eq!(left, set(&[".", "a", "b"]));
}

#[test]
fn independent_writes_are_reordered() {
    let left = outcomes(2, |disk, file| {
        finish(disk, write(file, 0, "a")).unwrap();
        finish(disk, write(file, 1, "b")).unwrap();
    });
    assert_eq!(left, set(&["..", "a.", ".b", "ab"]));
}

#[test]
fn a_flush_covers_what_had_completed_when_it_was_issued() {
    let left = outcomes(2, |disk, file| {
        finish(disk, write(file, 0, "a")).unwrap();
        let flush = file.flush();
        finish(disk, write(file, 1, "b")).unwrap();
        finish(disk, flush).unwrap();
    });
    assert_eq!(left, set(&["a.", "ab"]));
}

#[test]
fn nothing_older_comes_over_what_was_flushed() {
    let left = outcomes(1, |disk, file| {
        let early = write(file, 0, "a");
        finish(disk, write(file, 0, "b")).unwrap();
        finish(disk, early).unwrap();
        finish(disk, write(file, 0, "c")).unwrap();
        finish(disk, file.flush()).unwrap();
    });
    assert_eq!(left, set(&["c"]));
}

#[test]
fn a_durable_write_is_durable_alone() {
    let durable = |file: &Arc<dyn BlockFile>, sector: usize, byte: u8| {
        let data = Buf::from(vec![byte; SECTOR]).into();
        file.write((sector * SECTOR) as u64, data, Durability::Durable)
    };
    let left = outcomes(2, |disk, file| {
        finish(disk, write(file, 0, "ab")).unwrap();
        finish(disk, durable(file, 1, b'c')).unwrap();
    });
    assert_eq!(left, set(&[".c", "ac"]));
}

#[test]
fn changes_of_length_and_space_are_effects_like_others() {
    let left = outcomes(1, |disk, file| {
        finish(disk, file.set_len(2 * SECTOR as u64)).unwrap();
        finish(disk, write(file, 1, "b")).unwrap();
    });
    assert_eq!(left, set(&[".", ".0", ".b"]));
    let left = outcomes(16, |disk, file| {
        finish(disk, file.zero(0, 16 * SECTOR as u64, Space::Release)).unwrap();
    });
    let torn = set(&[
        "................",
        "00000000........",
        "........00000000",
        "0000000000000000",
    ]);
    assert_eq!(left, torn);
}

#[test]
fn a_failed_flush_loses_some_and_later_flushes_do_not_bring_it_back() {
    let run = |seed| {
        let (disk, file) = disk(seed, 2 * SECTOR);
        disk.set_faults(&[Fault {
            verb: Verb::Flush,
            after: 0,
            errno: EIO,
            duration: Duration::Once,
            file: None,
        }]);
        finish(&disk, write(&file, 0, "a")).unwrap();
        finish(&disk, write(&file, 1, "b")).unwrap();
        assert!(finish(&disk, file.flush()).is_err());
        assert_eq!(
            sectors(&disk.content("f").unwrap()),
            "ab",
            "memory keeps it"
        );
        finish(&disk, file.flush()).unwrap();
        let after = disk.crash(Rng::new(seed ^ 1), Rng::new(seed ^ 2));
        sectors(&after.content("f").expect("files survive"))
    };
    let left: BTreeSet<String> = (0..200).map(run).collect();
    assert_eq!(left, set(&["..", "a.", ".b", "ab"]));
}

#[test]
fn a_lying_flush_loses_what_it_promised() {
    let left = outcomes(1, |disk, file| {
        disk.set_lie(Lie::FlushDoesNothing);
        finish(disk, write(file, 0, "a")).unwrap();
        finish(disk, file.flush()).unwrap();
    });
    assert_eq!(left, set(&[".", "a"]));
}

#[test]
fn a_dead_process_leaves_its_completed_writes_unflushed() {
    let run = |seed| {
        let (disk, file) = disk(seed, SECTOR);
        finish(&disk, write(&file, 0, "a")).unwrap();
        disk.kill(Rng::new(seed));
        assert_eq!(sectors(&disk.content("f").unwrap()), "a");
        let after = disk.crash(Rng::new(seed ^ 1), Rng::new(seed ^ 2));
        sectors(&after.content("f").expect("files survive"))
    };
    let left: BTreeSet<String> = (0..200).map(run).collect();
    assert_eq!(left, set(&[".", "a"]));
}

#[test]
fn reads_see_a_write_between_its_issue_and_its_completion_or_after() {
    let run = |seed| {
        let (disk, file) = disk(seed, SECTOR);
        let writing = write(&file, 0, "a");
        let reading = file.read(0, BufMut::zeroed(SECTOR).into());
        let (outcome, buf) = finish(&disk, reading);
        outcome.unwrap();
        finish(&disk, writing).unwrap();
        let (_, later) = finish(&disk, file.read(0, BufMut::zeroed(SECTOR).into()));
        assert_eq!(later.to_vec()[0], b'a');
        (buf.to_vec()[0] as char).to_string()
    };
    let seen: BTreeSet<String> = (0..200).map(run).collect();
    assert_eq!(seen, set(&[".", "a"]));
}

#[test]
#[should_panic(expected = "is not aligned to 4096")]
fn requests_that_break_the_alignment_are_loud() {
    let disk = SimDisk::new(Rng::new(1), Trace::off());
    disk.add_file("f", Capabilities::of_regular_file(4096), Content::default());
    let file = disk.open("f", true).expect("it was added");
    drop(file.read(512, BufMut::zeroed(4096).into()));
}

#[test]
#[should_panic(expected = "opened read-only")]
fn changes_of_a_file_that_was_opened_read_only_are_loud() {
    let (disk, _) = disk(1, SECTOR);
    let file: Arc<dyn BlockFile> = disk.open("f", false).expect("it was added");
    drop(write(&file, 0, "a"));
}

/// All lengths that a crash leaves of a file of four pages, over many seeds.
fn lengths(work: impl Fn(&SimDisk, &Arc<dyn BlockFile>)) -> BTreeSet<u64> {
    let run = |seed| {
        let (disk, file) = disk(seed, 4 * 4096);
        work(&disk, &file);
        let after = disk.crash(Rng::new(seed ^ 1), Rng::new(seed ^ 2));
        after.content("f").expect("files survive").len() / 4096
    };
    (0..1500).map(run).collect()
}

#[test]
fn changes_of_length_and_allocations_are_dropped_or_torn_at_4096_bytes() {
    let pages = |pages: &[u64]| pages.iter().copied().collect::<BTreeSet<u64>>();
    let grown = lengths(|disk, file| finish(disk, file.set_len(7 * 4096)).unwrap());
    assert_eq!(grown, pages(&[4, 5, 6, 7]));
    let cut = lengths(|disk, file| finish(disk, file.set_len(4096)).unwrap());
    assert_eq!(cut, pages(&[1, 2, 3, 4]));
    let allocated = lengths(|disk, file| finish(disk, file.allocate(4 * 4096, 3 * 4096)).unwrap());
    assert_eq!(allocated, pages(&[4, 5, 6, 7]));
    let flushed = lengths(|disk, file| {
        finish(disk, file.allocate(4 * 4096, 3 * 4096)).unwrap();
        finish(disk, file.flush()).unwrap();
    });
    assert_eq!(flushed, pages(&[7]));
}

#[test]
fn a_hole_is_dropped_or_torn_at_4096_bytes_and_comes_before_or_after_a_write() {
    let left = outcomes(16, |disk, file| {
        finish(disk, file.discard(0, 16 * SECTOR as u64)).unwrap();
    });
    let torn = [
        "................",
        "00000000........",
        "........00000000",
        "0000000000000000",
    ];
    assert_eq!(left, set(&torn));
    let left = outcomes(1, |disk, file| {
        finish(disk, file.discard(0, SECTOR as u64)).unwrap();
        finish(disk, write(file, 0, "a")).unwrap();
    });
    assert_eq!(left, set(&[".", "0", "a"]));
    // Both in flight: whichever comes last wins.
    let left = outcomes(1, |disk, file| {
        let punch = file.discard(0, SECTOR as u64);
        let write = write(file, 0, "a");
        finish(disk, punch).unwrap();
        finish(disk, write).unwrap();
        finish(disk, file.flush()).unwrap();
    });
    assert_eq!(left, set(&["0", "a"]));
}

fn fault(verb: Verb, errno: i32) -> Fault {
    Fault {
        verb,
        after: 0,
        errno,
        duration: Duration::Once,
        file: None,
    }
}

#[test]
fn a_flush_or_a_durable_write_that_fails_loses_what_came_before_whatever_the_error() {
    for (verb, errno) in [
        (Verb::Flush, ENOSPC),
        (Verb::Write, EIO),
        (Verb::Write, ENOSPC),
    ] {
        let left = outcomes(2, |disk, file| {
            finish(disk, write(file, 0, "a")).unwrap();
            disk.set_faults(&[fault(verb, errno)]);
            let failed = match verb {
                Verb::Flush => finish(disk, file.flush()),
                _ => {
                    let data = Buf::from(vec![b'b'; SECTOR]).into();
                    finish(disk, file.write(SECTOR as u64, data, Durability::Durable))
                }
            };
            assert_eq!(failed.unwrap_err().raw_os_error(), Some(errno));
            // The next one succeeds, and brings nothing back.
            finish(disk, file.flush()).unwrap();
        });
        assert!(
            left.contains("..") && left.contains("a."),
            "{verb:?} {errno}: {left:?}"
        );
    }
}

#[test]
fn a_write_that_fails_may_have_stopped_anywhere() {
    let left = outcomes(3, |disk, file| {
        disk.set_faults(&[fault(Verb::Write, ENOSPC)]);
        assert!(finish(disk, write(file, 0, "abc")).is_err());
        finish(disk, file.flush()).unwrap();
    });
    for prefix in ["...", "a..", "ab.", "abc"] {
        assert!(left.contains(prefix), "{prefix} is not in {left:?}");
    }
}

#[test]
fn a_fault_may_strike_one_file_of_several() {
    let (disk, file) = disk(1, SECTOR);
    disk.add_file(
        "g",
        Capabilities::of_regular_file(1),
        Content::of(&[b'.'; SECTOR]),
    );
    let other: Arc<dyn BlockFile> = disk.open("g", true).expect("it was added");
    disk.set_faults(&[Fault {
        file: Some("g"),
        ..fault(Verb::Write, EIO)
    }]);
    finish(&disk, write(&file, 0, "a")).unwrap();
    assert!(finish(&disk, write(&other, 0, "a")).is_err());
    finish(&disk, write(&other, 0, "a")).unwrap();
}

#[test]
fn the_power_fails_right_after_an_issue_or_a_completion() {
    // One poll of a task may issue several writes: the crash may fall between two of them.
    let left = outcomes(2, |disk, file| {
        disk.fail_power_after(1);
        drop(write(file, 0, "a"));
        drop(write(file, 1, "b"));
        assert!(!disk.has_power() && !disk.step());
    });
    assert_eq!(left, set(&["..", "a."]));
    // Right after the completion of a flush, before its answer has arrived anywhere.
    let left = outcomes(1, |disk, file| {
        disk.fail_power_after(4);
        finish(disk, write(file, 0, "a")).unwrap();
        let mut flush = file.flush();
        while disk.step() {}
        assert!(!disk.has_power());
        assert!(poll(&mut flush).is_ready());
    });
    assert_eq!(left, set(&["a"]));
}
