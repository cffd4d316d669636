//! Answers that contradict each other: forbidden in whatever situation.

use std::collections::BTreeMap;

use super::*;

/// Numbers by a rule of their own, the same in each run.
struct Drawn(u64);

impl Drawn {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }

    fn pick<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.below(some.len() as u64) as usize]
    }
}

fn situation(drawn: &mut Drawn) -> Facts {
    let on = drawn.pick(&["ext4", "xfs", "btrfs", "ext2", "tmpfs"]);
    let mut facts = match drawn.below(4) {
        0 => raw(on, drawn.pick(&[0, GIB, 40 * GIB])),
        1 => facts(on),
        _ => overlay(on),
    };
    facts.image.disk_bytes = drawn.pick(&[GIB, 40 * GIB, 1 << 40, 8 << 40]);
    facts.host.free_bytes = drawn.pick(&[0, GIB / 2, 10 * GIB, 20 << 40]);
    facts.host.is_rotational = drawn.below(4) == 0;
    facts.cache_bytes = drawn.pick(&[1 << 20, 32 << 20, 1 << 30]);
    facts.engine = drawn.pick(&[Engine::Cowslip, Engine::Qemu]);
    facts.order.runs = drawn.pick(&[None, Some(5), Some(100_000)]);
    facts.order.extents = facts.order.runs.unwrap_or(0);
    if facts.image.format == Format::Raw {
        return facts;
    }
    facts.image.cluster_bytes = drawn.pick(&[4096, 65_536, 131_072, 2 << 20]);
    facts.image.has_subclusters = facts.image.cluster_bytes > 16_384 && drawn.below(2) == 0;
    facts.image.is_sparse = drawn.below(3) == 0;
    facts.image.is_zstd = drawn.below(3) == 0;
    facts.image.is_encrypted = drawn.below(6) == 0;
    facts.is_in_use = drawn.below(6) == 0;
    facts.image.snapshots = drawn.pick(&[0, 0, 0, 2, 40]);
    if facts.image.backing.is_some() {
        facts.image.depth = drawn.pick(&[2, 2, 40, 500]);
    }
    let data = drawn.pick(&[0, 1, 4, 16]) * facts.image.disk_bytes / 16;
    facts.space.data_bytes = data;
    facts.space.compressed_bytes = match facts.image.is_encrypted {
        true => 0,
        false => drawn.pick(&[0, 0, data]),
    };
    facts.space.used_bytes = drawn.pick(&[data, data / 2, data + data / 4]);
    facts.space.host_bytes = data + drawn.pick(&[0, GIB, 100 * GIB]);
    if facts.image.has_subclusters {
        facts.space.subcluster_bytes = drawn.pick(&[0, data / 4]);
    }
    facts.space.scattered_permille = drawn.below(1001);
    facts.space.between_bytes = drawn.pick(&[0, 1 << 40]);
    facts.order.bytes = data;
    facts
}

/// Sizes of clusters that a command line or a sentence names.
fn cluster_sizes(line: &str) -> Vec<String> {
    let named = line.split("cluster_size=").skip(1);
    named
        .map(|rest| {
            rest.split([',', ' '])
                .next()
                .unwrap_or_default()
                .to_string()
        })
        .collect()
}

fn judge(facts: &Facts, workload: &Workload) -> usize {
    let advice = advise(facts, workload);
    let shown = || format!("{facts:#?}\n{}", as_text(facts, workload, &advice));
    let mut figures: BTreeMap<&str, f64> = BTreeMap::new();
    for answer in &advice.answers {
        // "Leave it", and nothing that changes something.
        if answer.verdict == Verdict::Leave {
            assert!(answer.commands.is_empty(), "{answer:?}\n{}", shown());
            let all = answer.figures.iter();
            assert!(
                all.clone().all(|figure| figure.then.is_none()),
                "{answer:?}\n{}",
                shown()
            );
            assert!(
                !answer.text.contains("instead of"),
                "{answer:?}\n{}",
                shown()
            );
        }
        for figure in &answer.figures {
            let known = *figures.entry(figure.name).or_insert(figure.now);
            let differs = (known - figure.now).abs() > 1e-6 * known.abs();
            assert!(
                !differs,
                "'{}' is {known} and {}\n{}",
                figure.name,
                figure.now,
                shown()
            );
        }
    }
    let lines: Vec<&String> = advice
        .changes()
        .flat_map(|answer| &answer.commands)
        .collect();
    assert_eq!(
        advice.verdict() == Verdict::Leave,
        advice.changes().count() == 0
    );
    // The image is made afresh once, and then as it was but for what was advised.
    let makes = |line: &&&String| line.contains(" convert ") || line.contains(" create ");
    let made: Vec<_> = lines.iter().filter(makes).collect();
    assert!(made.len() <= 1, "{}", shown());
    let of_copies = made.iter().filter(|line| line.contains(" convert "));
    for line in of_copies.filter(|line| line.contains("-O qcow2")) {
        let sizes = cluster_sizes(line);
        let clusters = advice.on("clusters");
        let stays = clusters.is_some_and(|answer| answer.verdict == Verdict::Leave);
        let is_default = facts.image.cluster_bytes == 65_536;
        assert_eq!(
            sizes.len(),
            usize::from(!(stays && is_default)),
            "{}",
            shown()
        );
        let is_sparse = line.contains("alloc_policy=sparse");
        let advised = advice
            .on("policy")
            .map(|answer| answer.text.contains("sparse"));
        assert_eq!(Some(is_sparse), advised, "{}", shown());
        assert!(
            facts.host.free_bytes >= facts.space.data_bytes,
            "{}",
            shown()
        );
    }
    // More memory for tables is for those of the clusters that are advised.
    let clusters = advice.changes().find(|answer| answer.subject == "clusters");
    let cache = advice.changes().find(|answer| answer.subject == "cache");
    if let (Some(clusters), Some(cache)) = (clusters, cache) {
        let size = clusters.text.split(" clusters").next().unwrap_or_default();
        let words = format!("in clusters of {size}");
        assert!(cache.reason.contains(&words), "{}", shown());
    }
    // A plain image in the place of an encrypted one.
    assert!(made.is_empty() || !facts.image.is_encrypted, "{}", shown());
    // Without its size a disk over a smaller one would shrink.
    let creates = made.iter().filter(|line| line.contains(" create "));
    for line in creates.filter(|line| line.contains("-b golden.raw")) {
        let size = format!(" vm.qcow2 {}", facts.image.disk_bytes);
        assert!(line.ends_with(&size), "{}", shown());
    }
    let gives_back = advice.changes().any(|answer| answer.subject == "space");
    assert!(!(facts.is_in_use && gives_back), "{}", shown());
    advice.changes().count()
}

#[test]
fn no_answer_contradicts_another() {
    let mut drawn = Drawn(1);
    let mut changes = [0; 8];
    let workloads: Vec<Workload> = Workload::names().map(under).collect();
    for _ in 0..4000 {
        let facts = situation(&mut drawn);
        let workload = &workloads[drawn.below(workloads.len() as u64) as usize];
        changes[judge(&facts, workload).min(7)] += 1;
    }
    // Enough of the situations ask for several changes.
    assert!(
        changes[0] > 100 && changes[2..].iter().sum::<i32>() > 400,
        "{changes:?}"
    );
}

#[test]
fn a_compressed_image_below_an_overlay_is_not_copied_as_well() {
    let mut facts = facts("ext4");
    facts.space.compressed_bytes = facts.space.data_bytes;
    facts.order.runs = Some(1_000_000);
    facts.image.is_sparse = true;
    facts.space.host_bytes = 60 * GIB;
    let advice = advise(&facts, &under("sequential"));
    let changed = advice.changes().map(|answer| answer.subject);
    assert_eq!(changed.collect::<Vec<_>>(), ["compression"]);
}

#[test]
fn an_overlay_is_made_again_with_its_size() {
    let mut facts = overlay("ext4");
    facts.space = Space::default();
    let advice = advise(&facts, &under("random-writes"));
    let answer = changed(&advice, "clusters");
    let expected = "cowslip create -f qcow2 -o cluster_size=128k,extended_l2=on -b golden.raw -F \
                    raw vm.qcow2 42949672960";
    assert_eq!(answer.commands, [expected]);
    facts.image.is_encrypted = true;
    let advice = advise(&facts, &under("random-writes"));
    let answer = changed(&advice, "clusters");
    assert!(answer.commands.is_empty(), "{answer:?}");
    assert!(
        answer.reason.contains("needs the image's key"),
        "{answer:?}"
    );
}

#[test]
fn a_copy_of_a_compressed_image_stays_compressed_by_its_method() {
    let mut facts = facts("xfs");
    facts.image.is_zstd = true;
    facts.space.data_bytes = GIB;
    facts.space.compressed_bytes = GIB;
    facts.space.used_bytes = GIB / 2;
    facts.space.host_bytes = GIB / 2;
    facts.order.runs = Some(1_000_000);
    facts.order.bytes = GIB / 2;
    let mut workload = under("read-mostly");
    workload.reads.in_order = 1.0;
    let advice = advise(&facts, &workload);
    let line = &changed(&advice, "order").commands[0];
    let expected = "cowslip convert -p -c -O qcow2 -o compression_type=zstd vm.qcow2 vm.new.qcow2";
    assert_eq!(line, expected);
}

#[test]
fn one_copy_does_all_that_needs_one() {
    let mut facts = overlay("xfs");
    facts.image.is_sparse = true;
    facts.order.bytes = 10 * GIB;
    facts.order.runs = Some(1_000_000);
    facts.space.host_bytes = 30 * GIB;
    facts.space.data_bytes = 10 * GIB;
    facts.space.used_bytes = 10 * GIB;
    let mut workload = under("mixed");
    workload.reads.in_order = 1.0;
    let advice = advise(&facts, &workload);
    let lines = advice.changes().flat_map(|answer| &answer.commands);
    let lines: Vec<&String> = lines.collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(
        lines[0].contains("extended_l2=on,alloc_policy=contiguous"),
        "{lines:?}"
    );
    assert_eq!(lines[1], "mv vm.new.qcow2 vm.qcow2");
    for subject in ["policy", "order", "space"] {
        let answer = changed(&advice, subject);
        assert!(
            answer.reason.contains("the copy for clusters does that"),
            "{answer:?}"
        );
    }
}
