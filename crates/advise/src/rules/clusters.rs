//! Cluster size and subclusters: what a first write copies, and what tables take in memory.

use crate::answer::{Answer, Verdict};
use crate::facts::{Engine, Facts};
use crate::figures::figure;
use crate::model::{self, Layout};
use crate::workload::Workload;

use super::copies;
use super::lines::{SPEED_GAIN, human, quoted, size};

const SUBJECT: &str = "clusters";
const SOURCE: &str = "docs/performance.md#first-writes-in-process";

/// The layouts that are weighed: cluster, and whether it has subclusters.
const CANDIDATES: [(u64, bool); 4] = [
    (65_536, false),
    (65_536, true),
    (131_072, true),
    (1 << 20, true),
];

/// The layout of overlays in the guides.
const USUAL: (u64, bool) = (131_072, true);

/// An image's clusters under a workload.
#[derive(Clone, Copy, Debug)]
struct Choice {
    cluster_bytes: u64,
    has_subclusters: bool,
    /// Requests a second, of the whole mix.
    rate: f64,
    /// First writes a second.
    writes: f64,
    /// Bytes copied by one.
    copied: f64,
}

fn unit(cluster_bytes: u64, has_subclusters: bool) -> u64 {
    match has_subclusters {
        true => cluster_bytes / 32,
        false => cluster_bytes,
    }
}

/// The share of writes that are the first to what they write.
pub fn first(facts: &Facts, workload: &Workload) -> f64 {
    let mut share = workload.first.unwrap_or(1.0 - facts.filled());
    // Clusters that a snapshot holds are copied when they are next written.
    if facts.image.snapshots > 0 {
        share = 1.0;
    }
    share
}

fn weigh(facts: &Facts, workload: &Workload, (cluster, has_sub): (u64, bool)) -> Choice {
    let on = facts.host.file_system();
    // Subclusters do not help where a snapshot holds the whole cluster.
    let is_held = facts.image.snapshots > 0;
    let unit_bytes = match is_held {
        true => cluster,
        false => unit(cluster, has_sub),
    };
    let layout = Layout {
        cluster_bytes: cluster,
        unit_bytes,
        is_backed: facts.image.backing.is_some() || is_held,
        is_sparse: facts.image.is_sparse,
    };
    let share = workload.unit_share(unit_bytes);
    let writes = model::first_writes(&layout, share, on);
    let scattered = facts.space.scattered_permille as f64 / 1000.0;
    let span = workload.span_bytes.unwrap_or(facts.image.disk_bytes);
    let tables = model::table_bytes(span, (cluster, has_sub), scattered);
    let misses = model::misses(tables, facts.cache_bytes);
    let of_first = workload.share_of(&workload.writes) * first(facts, workload);
    let table_time = match workload.reads.in_order > 0.8 {
        true => 0.0,
        false => misses / figure("read", on),
    };
    let others = (1.0 - of_first).max(0.0) / figure("read", on);
    let seconds = of_first / writes + others + table_time;
    Choice {
        cluster_bytes: cluster,
        has_subclusters: has_sub,
        rate: 1.0 / seconds,
        writes,
        copied: model::copied_bytes(&layout, workload.writes.mean_bytes(), share),
    }
}

/// First writes a second to the image as it is, but for its policy.
pub fn writes_with_policy(facts: &Facts, workload: &Workload, is_sparse: bool) -> f64 {
    let mut facts = facts.clone();
    facts.image.is_sparse = is_sparse;
    current(&facts, workload).writes
}

/// Clusters, and whether they have subclusters, of the image as it is after this advice.
pub fn advised(facts: &Facts, workload: &Workload) -> (u64, bool) {
    let image = &facts.image;
    let is_changed = rule(facts, workload).is_some_and(|it| it.verdict == Verdict::Change);
    match best(facts, workload) {
        Some(best) if is_changed => (best.cluster_bytes, best.has_subclusters),
        _ => (image.cluster_bytes, image.has_subclusters),
    }
}

fn current(facts: &Facts, workload: &Workload) -> Choice {
    let image = &facts.image;
    let layout = (image.cluster_bytes, image.has_subclusters);
    weigh(facts, workload, layout)
}

fn best(facts: &Facts, workload: &Workload) -> Option<Choice> {
    let candidates = CANDIDATES
        .iter()
        .map(|candidate| weigh(facts, workload, *candidate));
    let best = candidates.reduce(|best, next| match next.rate > best.rate * 1.02 {
        true => next,
        false => best,
    })?;
    // As the guides have them, with half the table entries, unless others are faster for certain.
    let usual = weigh(facts, workload, USUAL);
    let is_as_good = best.has_subclusters && usual.rate * 1.1 >= best.rate;
    Some(if is_as_good { usual } else { best })
}

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    if !facts.is_qcow2() {
        return None;
    }
    let (now, best) = (current(facts, workload), best(facts, workload)?);
    if best.rate / now.rate < SPEED_GAIN {
        return Some(leave(&now, why_not(facts, workload, &now)));
    }
    if !copies::fits(facts) {
        return Some(leave(
            &now,
            format!(
                "others would be {:.1} times as fast, but a copy takes {}, and {} are free",
                best.rate / now.rate,
                human(copies::bytes(facts)),
                human(facts.host.free_bytes)
            ),
        ));
    }
    Some(change(facts, (&now, &best)))
}

fn leave(now: &Choice, why: impl Into<String>) -> Answer {
    let text = match now.has_subclusters {
        true => format!(
            "{} clusters with subclusters of {}",
            human(now.cluster_bytes),
            human(unit(now.cluster_bytes, true))
        ),
        false => format!("{} clusters", human(now.cluster_bytes)),
    };
    Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why).figure(
        "first writes a second",
        now.writes,
        None,
    )
}

fn why_not(facts: &Facts, workload: &Workload, now: &Choice) -> &'static str {
    let writes = workload.share_of(&workload.writes) * first(facts, workload);
    match facts.image.backing.is_some() || facts.image.snapshots > 0 {
        false => {
            "nothing lies below the image, so a first write copies nothing, whatever the size of \
             clusters: subclusters were as fast as plain clusters there, within what runs differ by"
        }
        true if writes < 0.1 => "few requests are first writes, and no others depend on clusters",
        true if facts.image.snapshots > 0 => {
            "a cluster that a snapshot holds is copied whole when it is first written, with \
             subclusters or without"
        }
        true if now.copied < 8192.0 => {
            "a first write copies nothing, or hardly more than it writes"
        }
        true => "another size would be no more than 1.3 times as fast, which runs differ by",
    }
}

fn change(facts: &Facts, (now, then): (&Choice, &Choice)) -> Answer {
    let image = &facts.image;
    let by_tables = facts.image.backing.is_none() && image.snapshots == 0;
    let text = match then.has_subclusters {
        true => format!(
            "{} clusters with subclusters of {} instead of {}",
            human(then.cluster_bytes),
            human(unit(then.cluster_bytes, true)),
            described(now)
        ),
        false => format!(
            "{} clusters instead of {}",
            human(then.cluster_bytes),
            described(now)
        ),
    };
    let reason = match by_tables {
        true => {
            "the tables of so large a disk do not fit in the memory that they may take; larger \
                 clusters have fewer entries"
                .to_string()
        }
        false => format!(
            "a first write copies {} KiB of what lies below, and would copy {} KiB",
            (now.copied / 1024.0).round(),
            (then.copied / 1024.0).round()
        ),
    };
    let cluster_size = format!("cluster_size={}", size(then.cluster_bytes));
    let extended_l2 = match then.has_subclusters {
        true => "extended_l2=on",
        false => "extended_l2=off",
    };
    let mut answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, reason)
        .figure("first writes a second", now.writes, Some(then.writes))
        .figure(
            "requests a second of this workload",
            now.rate,
            Some(then.rate),
        );
    if image.snapshots > 0 || image.bitmaps > 0 || image.is_encrypted || image.has_data_file {
        answer.reason += "; a copy leaves out internal snapshots and bitmaps, and must be given \
                          keys and data files again";
    }
    if facts.engine == Engine::Qemu && then.has_subclusters {
        answer.reason += "; QEMU reads subclusters from version 5.2 on";
    }
    let is_fresh = facts.space.data_bytes == 0 && image.snapshots == 0;
    let (true, false, Some((file, format))) = (is_fresh, image.is_encrypted, &image.backing) else {
        return answer.by_copy(&[&cluster_size, extended_l2]);
    };
    let format = format.as_deref().unwrap_or("raw");
    let (file, format) = (quoted(file), quoted(format));
    let name = quoted(&image.name);
    let mut options = format!("{cluster_size},{extended_l2}");
    if image.is_sparse {
        options += ",alloc_policy=sparse";
    }
    answer.command(format!(
        "cowslip create -f qcow2 -o {options} -b {file} -F {format} {name} {}",
        image.disk_bytes
    ))
}

fn described(choice: &Choice) -> String {
    match choice.has_subclusters {
        true => format!(
            "{} with subclusters of {}",
            human(choice.cluster_bytes),
            human(unit(choice.cluster_bytes, true))
        ),
        false => human(choice.cluster_bytes),
    }
}
