//! The situations, one test each.

use super::*;

/// Seed of 2009: a volume of known size for libvirt. One call, whatever the size, and never blocks
/// of 4 KiB; where there is no call, zeroes in large pieces.
#[test]
fn a_volume_of_known_size_is_allocated_at_once() {
    for on in ["ext4", "xfs", "btrfs"] {
        let advice = advise(&raw(on, 0), &under("fill"));
        let answer = changed(&advice, "preallocation");
        assert!(answer.text.contains("fallocate"), "{}", answer.text);
        assert_eq!(
            answer.commands,
            ["cowslip allocate --size 42949672960 disk.raw"]
        );
        // The article: microseconds beside the minutes of small writes.
        assert!(promised(answer) < 0.01);
    }
}

/// Seed of the allocation methods: a file system without extents has no such call.
#[test]
fn without_fallocate_zeroes_are_written_in_large_pieces() {
    let advice = advise(&raw("ext2", 0), &under("fill"));
    let answer = changed(&advice, "preallocation");
    assert!(
        answer.reason.contains("posix_fallocate"),
        "{}",
        answer.reason
    );
    assert!(promised(answer) < 0.6, "1 MiB took less than half of 4 KiB");
    // Where the space is not there, nothing can be allocated.
    let mut full = raw("ext4", 0);
    full.host.free_bytes = GIB;
    left(&advise(&full, &under("fill")), "preallocation");
}

/// Seed of 2010: files that stream into one directory of XFS side by side.
#[test]
fn interleaved_streams_get_space_ahead() {
    let mut facts = raw("xfs", 40 * GIB);
    facts.image.name = "recordings/a.ts".to_string();
    facts.order = Order {
        bytes: 40 * GIB,
        runs: Some(20_000),
        extents: 20_000,
        perfect: 5,
    };
    let advice = advise(&facts, &under("streams"));
    let answer = changed(&advice, "preallocation");
    assert_eq!(answer.commands, ["cowslip grow recordings"]);
    assert!(
        promised(answer) < 0.1,
        "some ten extents instead of one for each write"
    );
}

/// The same through the page cache, on today's kernels: XFS allocates ahead itself.
#[test]
fn streams_through_the_page_cache_are_left_alone() {
    let mut facts = raw("xfs", 40 * GIB);
    facts.order.extents = 9;
    facts.order.perfect = 5;
    facts.order.runs = Some(9);
    let advice = advise(&facts, &under("streams"));
    left(&advice, "preallocation");
    assert_eq!(advice.verdict(), Verdict::Leave);
}

/// Seed of 2019: what subclusters are worth over a backing file.
#[test]
fn an_overlay_that_is_written_at_random_gets_subclusters() {
    for on in ["ext4", "xfs"] {
        let facts = overlay(on);
        let advice = advise(&facts, &under("random-writes"));
        let answer = changed(&advice, "clusters");
        let first = &answer.figures[0];
        assert_eq!(first.name, "first writes a second");
        let command = &answer.commands[0];
        assert!(command.contains("extended_l2=on"), "{command}");
        assert!(command.contains("-B golden.raw -F raw"), "{command}");
        // What was measured is no less than half of what is promised, and more than nothing.
        let cell = |words: &str| value("first-writes", on, &format!("{words} backed=1"));
        let gain = match command.contains("cluster_size=128k") {
            true => cell("cluster=131072 unit=4096") / cell("cluster=65536 unit=65536"),
            false => cell("cluster=65536 unit=2048") / cell("cluster=65536 unit=65536"),
        };
        assert!(gain > 1.3, "the bench confirms it: {gain}");
        let ratio = promised(answer) / gain;
        assert!((0.5..2.0).contains(&ratio), "{on}: {ratio}");
    }
    // An overlay that has them is left.
    let mut facts = overlay("xfs");
    facts.image.cluster_bytes = 131_072;
    facts.image.has_subclusters = true;
    let advice = advise(&facts, &under("random-writes"));
    left(&advice, "clusters");
    assert_eq!(advice.verdict(), Verdict::Leave);
}

/// The same seed's second half: without a backing file they are worth nothing.
#[test]
fn an_image_without_backing_file_needs_no_subclusters() {
    for on in ["ext4", "xfs"] {
        let mut facts = facts(on);
        facts.space.data_bytes = GIB;
        let advice = advise(&facts, &under("random-writes"));
        left(&advice, "clusters");
        assert_eq!(advice.verdict(), Verdict::Leave);
        let cell = |words| value("first-writes", on, words);
        let with = cell("cluster=65536 unit=2048 backed=0 disk=1073741824");
        let without = cell("cluster=65536 unit=65536 backed=0 disk=1073741824");
        assert!(with / without < 1.3, "the bench confirms it");
    }
}

/// Seed of 2020: first writes to a qcow2 image on XFS beside ext4, preallocated or not.
#[test]
fn first_writes_need_no_preallocation_unless_the_space_must_be_sure() {
    let mut facts = facts("xfs");
    facts.space = Space {
        host_bytes: 1 << 20,
        ..Space::default()
    };
    let advice = advise(&facts, &under("random-writes"));
    let answer = left(&advice, "preallocation");
    assert!(answer.reason.contains("23310"), "{}", answer.reason);
    assert!(
        answer.reason.contains("space must be sure"),
        "{}",
        answer.reason
    );
    // Nor does a disk that will be written throughout: falloc was 0.90 and 1.11 times as fast.
    left(&advise(&facts, &under("fill")), "preallocation");
}

/// A golden image with overlays, on a file system that could clone.
#[test]
fn overlays_of_a_golden_image_stay_overlays_with_subclusters() {
    let mut facts = overlay("xfs");
    facts.siblings = 30;
    let advice = advise(&facts, &under("mixed"));
    let answer = left(&advice, "format");
    assert!(answer.text.contains("30 others"), "{}", answer.text);
    changed(&advice, "clusters");
    // 15 039 first writes a second beside 5 777 of a clone.
    assert!(answer.reason.contains("2.6 times"));
    // On btrfs a copy costs less beside a write, and subclusters are worth it all the same.
    let advice = advise(&overlay("btrfs"), &under("random-writes"));
    changed(&advice, "clusters");
    assert!(value("copy-cost", "btrfs", "unit=65536") < 0.7);
}

/// A guest that discards, and little space.
#[test]
fn a_guest_that_discards_on_a_full_disk_gets_the_sparse_policy() {
    for (cluster_bytes, free_bytes) in [(65_536, 2 * GIB), (1 << 20, 400 * GIB)] {
        let mut facts = facts("ext4");
        facts.image.cluster_bytes = cluster_bytes;
        facts.host.free_bytes = free_bytes;
        let advice = advise(&facts, &under("discards"));
        let answer = changed(&advice, "policy");
        assert_eq!(
            answer.commands,
            ["cowslip amend -o alloc_policy=sparse vm.qcow2"]
        );
        let cell = |sparse| {
            let words = format!("cluster={cluster_bytes} sparse={sparse}");
            value("discard-space", "ext4", &words)
        };
        assert!(cell(1) < cell(0) - 0.15, "the bench confirms it");
        let (now, then) = (answer.figures[0].now, answer.figures[0].then.unwrap());
        assert!((now - cell(0)).abs() < 0.05 && (then - cell(1)).abs() < 0.05);
    }
    // With room, 64 KiB clusters lose little, and their extents stay few.
    let advice = advise(&facts("ext4"), &under("discards"));
    left(&advice, "policy");
    // A sparse image whose guest does not discard is better contiguous.
    let mut facts = facts("xfs");
    facts.image.is_sparse = true;
    facts.space.data_bytes = GIB;
    let advice = advise(&facts, &under("random-writes"));
    let answer = changed(&advice, "policy");
    assert_eq!(
        answer.commands,
        ["cowslip amend -o alloc_policy=contiguous vm.qcow2"]
    );
    let contiguous = value("in-order", "xfs", "runs=9");
    let sparse = value("in-order", "xfs", "runs=126025");
    assert!(contiguous / sparse > 2.0, "reads in order afterwards");
}

/// A very large disk whose tables do not fit in memory.
#[test]
fn tables_that_do_not_fit_get_memory_or_larger_clusters() {
    let mut facts = facts("ext4");
    facts.image.disk_bytes = 8 << 40;
    facts.space.data_bytes = 8 << 40;
    facts.space.scattered_permille = 300;
    facts.cache_bytes = 64 << 20;
    let advice = advise(&facts, &under("read-mostly"));
    let answer = changed(&advice, "cache");
    let command = &answer.commands[0];
    assert!(
        command.starts_with("cowslip serve --cache-size "),
        "{command}"
    );
    let measured = value(
        "table-memory",
        "ext4",
        "cluster=65536 scattered=0.3 budget=67108864",
    );
    let now = answer.figures[0].now;
    assert!((now / measured - 1.0).abs() < 0.15, "{now} {measured}");
    assert!(promised(answer) > 1.3);
    // In order they fit, and in larger clusters too.
    facts.space.scattered_permille = 0;
    left(&advise(&facts, &under("read-mostly")), "cache");
    facts.image.cluster_bytes = 2 << 20;
    facts.image.has_subclusters = true;
    facts.space.scattered_permille = 300;
    left(&advise(&facts, &under("read-mostly")), "cache");
    assert!(value("table-memory", "ext4", "cluster=2097152 budget=67108864") > 0.9);
    // Requests in order do not mind.
    facts.image.cluster_bytes = 65_536;
    facts.image.has_subclusters = false;
    left(&advise(&facts, &under("sequential")), "cache");
    // QEMU keeps all eight bytes of an entry.
    facts.image.disk_bytes = 1 << 40;
    facts.engine = Engine::Qemu;
    let advice = advise(&facts, &under("read-mostly"));
    let answer = changed(&advice, "cache");
    assert!(
        answer.commands[0].contains("l2-cache-size="),
        "{:?}",
        answer.commands
    );
}

/// A chain of forty images.
#[test]
fn a_long_chain_is_left_to_this_engine_and_shortened_for_qemu() {
    let mut facts = overlay("ext4");
    facts.image.cluster_bytes = 131_072;
    facts.image.has_subclusters = true;
    facts.image.depth = 150;
    facts.image.backing = Some(("149.qcow2".to_string(), Some("qcow2".to_string())));
    let advice = advise(&facts, &under("read-mostly"));
    let answer = left(&advice, "chain");
    assert!(
        answer.reason.contains("the same at any depth"),
        "{}",
        answer.reason
    );
    facts.engine = Engine::Qemu;
    let advice = advise(&facts, &under("read-mostly"));
    let answer = changed(&advice, "chain");
    let expected = "cowslip rebase -p -b golden.raw -F raw vm.qcow2";
    assert_eq!(answer.commands, [expected]);
    let measured =
        value("qemu-read-us", "ext4", "depth=150") / value("qemu-read-us", "ext4", "depth=2");
    assert!(measured > 2.0 && promised(answer) < 0.5);
    // Where space is short, what lies between counts for this engine too.
    facts.engine = Engine::Cowslip;
    facts.space.between_bytes = 100 * GIB;
    facts.host.free_bytes = 10 * GIB;
    changed(&advise(&facts, &under("read-mostly")), "chain");
}

/// Twenty internal snapshots.
#[test]
fn many_internal_snapshots_are_worth_a_look() {
    let mut facts = facts("xfs");
    facts.image.snapshots = 20;
    facts.space.host_bytes = 35 * GIB;
    let advice = advise(&facts, &under("random-writes"));
    let answer = changed(&advice, "snapshots");
    assert!(answer.reason.contains("15 GiB"), "{}", answer.reason);
    assert!(promised(answer) > 2.0, "nothing is copied without them");
    // Subclusters would not help: a held cluster is copied whole.
    left(&advice, "clusters");
    // A few that are only read are left.
    facts.image.snapshots = 3;
    left(&advise(&facts, &under("read-mostly")), "snapshots");
}

/// A compressed image that is only read.
#[test]
fn a_compressed_image_is_left_unless_it_is_written() {
    let mut facts = facts("ext4");
    facts.space.compressed_bytes = facts.space.data_bytes;
    facts.space.used_bytes = 8 * GIB;
    facts.space.host_bytes = 8 * GIB;
    let advice = advise(&facts, &under("read-mostly"));
    left(&advice, "compression");
    assert_eq!(advice.verdict(), Verdict::Leave, "{advice:?}");
    let advice = advise(&facts, &under("random-writes"));
    let answer = changed(&advice, "compression");
    let expected = "cowslip create -f qcow2 -o cluster_size=128k,extended_l2=on -b vm.qcow2 -F \
                    qcow2 vm.disk.qcow2";
    assert_eq!(answer.commands, [expected]);
}

/// An image that was filled at random under the policy sparse, on XFS.
#[test]
fn a_fragmented_image_is_copied_where_it_is_read_in_order() {
    let mut facts = scattered("xfs");
    let advice = advise(&facts, &under("sequential"));
    let answer = changed(&advice, "order");
    assert!(answer.commands[0].starts_with("cowslip convert -p -O qcow2 vm.qcow2 "));
    let measured = value("in-order", "xfs", "runs=9") / value("in-order", "xfs", "runs=126025");
    assert!(
        (promised(answer) / measured - 1.0).abs() < 0.1,
        "{measured}"
    );
    // Who reads at random does not meet the next run.
    left(&advise(&facts, &under("random-writes")), "order");
    // The same number of runs over a hundred times the data is no matter, but on a disk that turns.
    facts.order.bytes = 50 * GIB;
    left(&advise(&facts, &under("sequential")), "order");
    facts.host.is_rotational = true;
    changed(&advise(&facts, &under("sequential")), "order");
}

/// A raw file that should stay raw.
#[test]
fn a_raw_file_with_its_space_is_left() {
    for workload in ["random-writes", "read-mostly", "mixed", "boot"] {
        let advice = advise(&raw("xfs", 40 * GIB), &under(workload));
        assert_eq!(advice.verdict(), Verdict::Leave, "{advice:?}");
        assert_eq!(left(&advice, "format").text, "it should stay raw");
    }
    // A sparse one finds a free block for each write.
    for on in ["xfs", "ext4"] {
        let advice = advise(&raw(on, GIB), &under("random-writes"));
        changed(&advice, "preallocation");
    }
    let advice = advise(&raw("btrfs", GIB), &under("random-writes"));
    left(&advice, "preallocation");
}

/// An image whose guest has deleted most of its files.
#[test]
fn dead_space_comes_back_in_place() {
    let mut facts = facts("ext4");
    facts.space.used_bytes = 3 * GIB;
    facts.space.data_bytes = 3 * GIB;
    let advice = advise(&facts, &under("read-mostly"));
    let answer = changed(&advice, "space");
    assert!(answer.text.contains("17 GiB"), "{}", answer.text);
    // Whether or not there is room for a copy.
    facts.host.free_bytes = GIB;
    let advice = advise(&facts, &under("read-mostly"));
    let answer = changed(&advice, "space");
    assert_eq!(answer.commands, ["cowslip compact vm.qcow2"]);
    // What subclusters hold for nothing counts as well.
    facts.space.used_bytes = 20 * GIB;
    facts.space.subcluster_bytes = 12 * GIB;
    let advice = advise(&facts, &under("read-mostly"));
    let answer = changed(&advice, "space");
    assert!(answer.text.contains("gives back 12 GiB"), "{}", answer.text);
    facts.space.subcluster_bytes = GIB;
    left(&advise(&facts, &under("read-mostly")), "space");
}
