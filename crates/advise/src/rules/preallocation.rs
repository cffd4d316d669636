//! Space before it is written: when it pays, and by which method.

use crate::answer::{Answer, Verdict};
use crate::facts::{Facts, Format};
use crate::figures::figure;
use crate::model::{self, RawFile, raw_writes};
use crate::workload::Workload;

use super::lines::{SPEED_GAIN, human, quoted};

const SUBJECT: &str = "preallocation";
const SOURCE: &str = "docs/how-to-allocate.md#which-method-where";
const WHY_SLOW: &str = "docs/how-to-allocate.md#why-is-falloc-slower-than-off-on-xfs";

/// Of an image without backing file and data, which is written at random: not of this image.
const MEASURED: &str = "first writes a second to an empty image";

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    if workload.is_streams {
        return streams(facts);
    }
    match facts.image.format {
        Format::Raw => raw(facts, workload),
        Format::Qcow2 if facts.image.backing.is_none() => Some(image(facts)),
        _ => None,
    }
}

/// Bytes of the disk that have no space yet.
fn missing(facts: &Facts) -> u64 {
    let held = facts.space.host_bytes.min(facts.image.disk_bytes);
    facts.image.disk_bytes - held
}

fn raw(facts: &Facts, workload: &Workload) -> Option<Answer> {
    let on = facts.host.file_system();
    let missing = missing(facts);
    let gib = missing as f64 / (1_u64 << 30) as f64;
    let (name, bytes) = (quoted(&facts.image.name), facts.image.disk_bytes);
    let line = format!("cowslip allocate --size {bytes} {name}");
    if missing < facts.image.disk_bytes / 10 {
        let text = "it has its space";
        let why = "a write finds it, and asks nothing of the file system but to note that it came";
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    if missing > facts.host.free_bytes {
        let text = "it stays sparse";
        let why = format!(
            "{} are missing and {} are free",
            human(missing),
            human(facts.host.free_bytes)
        );
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    if workload.fills && !facts.host.has_fallocate {
        let [now, then] = ["allocate-4k-gib-s", "allocate-written-gib-s"];
        let why = "the file system has no call for it: libc's posix_fallocate would write a byte a \
                   block and is among the slowest; zeroes in pieces of 1 MiB can be shown and \
                   cancelled, and take half as long";
        let text = "allocate all of it once, with zeroes in large pieces";
        return Some(
            Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why)
                .figure(
                    "seconds to allocate it",
                    figure(now, on) * gib,
                    Some(figure(then, on) * gib),
                )
                .command(line)
                .or_by_copy(&["preallocation=full"]),
        );
    }
    let sparse = raw_writes(RawFile::Sparse, on);
    let gain = figure("raw-gain", on);
    let allocated = sparse * gain;
    let gains = gain >= SPEED_GAIN
        && workload.share_of(&workload.writes) * (1.0 - workload.writes.in_order) >= 0.2;
    if workload.fills || gains {
        let why = "one call of the file system takes no time where there are extents, the space is \
                   sure, and the file lies in as few pieces as free space allows";
        let text = format!("allocate {} once, by fallocate", human(missing));
        let answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why);
        let seconds = (
            figure("allocate-4k-gib-s", on) * gib,
            figure("allocate-gib-s", on) * gib,
        );
        let answer = match workload.fills {
            true => answer.figure("seconds to allocate it", seconds.0, Some(seconds.1)),
            false => answer.figure("first writes a second", sparse, Some(allocated)),
        };
        return Some(answer.command(line).or_by_copy(&["preallocation=falloc"]));
    }
    let text = "it stays sparse";
    let why = "a first write to allocated space converts it, which costs what finding a free block \
               costs; that would be no gain here";
    let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why);
    Some(answer.figure("first writes a second", sparse, None))
}

fn image(facts: &Facts) -> Answer {
    let on = facts.host.file_system();
    let rate = |kind| model::preallocated_writes(kind, on);
    let missing = missing(facts);
    let why = format!(
        "space is allocated ahead of need anyway; falloc would make {:.0} first writes a second and \
         full {:.0}, for {} now; take it only if the space must be sure",
        rate("falloc"),
        rate("full"),
        human(missing)
    );
    Answer::new((SUBJECT, WHY_SLOW), Verdict::Leave, "none", why).figure(
        MEASURED,
        rate("off"),
        None,
    )
}

/// Files that grow side by side.
fn streams(facts: &Facts) -> Option<Answer> {
    if facts.image.format != Format::Raw {
        return None;
    }
    const SOURCE: &str = "docs/how-to-allocate.md#which-growth-rule";
    let on = facts.host.file_system();
    let of = |name| figure(name, on);
    let gib = (facts.space.host_bytes as f64 / (1_u64 << 30) as f64).max(1.0);
    let is_in_pieces = facts.order.extents > 4 * facts.order.perfect.max(1)
        && facts.order.extents as f64 > 8.0 * gib;
    if !is_in_pieces {
        let text = "nothing ahead of its end";
        let why = format!(
            "it has {} extents where {} are the minimum: its writer goes through the page cache, \
             where the file system allocates ahead itself",
            facts.order.extents, facts.order.perfect
        );
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    let directory = match facts.image.name.rsplit_once('/') {
        Some(("", _)) => "/",
        Some((directory, _)) => directory,
        None => ".",
    };
    let why = "its pieces lie between those of others: direct writers get no space ahead from the \
               file system, and steps that follow the file's size keep them in few extents; of \
               writers at full speed some are ahead of it, and have a sixth of their extents then";
    let text = "keep space ahead of its end while it grows";
    Some(
        Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why)
            .figure(
                "extents a gibibyte",
                facts.order.extents as f64 / gib,
                Some(of("streams-with").min(facts.order.extents as f64 / gib)),
            )
            .command(format!("cowslip grow {}", quoted(directory))),
    )
}
