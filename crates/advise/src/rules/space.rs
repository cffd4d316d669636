//! Space that nothing uses, and disks that may outgrow their file system.

use crate::answer::{Answer, Verdict};
use crate::facts::Facts;
use crate::workload::Workload;

use super::lines::{SPACE_BYTES, human, quoted};

const SUBJECT: &str = "space";
const SOURCE: &str = "docs/compaction.md";

/// The rule.
pub fn rule(facts: &Facts, _: &Workload) -> Option<Answer> {
    if !facts.is_qcow2() || facts.image.has_data_file {
        return None;
    }
    if facts.image.snapshots > 0 {
        // Which of it the snapshots hold is theirs to answer.
        return None;
    }
    let space = &facts.space;
    let (free, inside) = (space.other_bytes(), space.subcluster_bytes);
    let dead = free.saturating_add(inside).min(space.host_bytes);
    if facts.is_in_use {
        let why = "space that another process keeps ahead, and tables that it has not written yet, \
                   look like space that nothing uses";
        let text = "not known while the image is in use";
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    let is_much = dead > SPACE_BYTES && dead > space.host_bytes / 5;
    let name = "bytes on the host";
    let host = space.host_bytes as f64;
    if !is_much {
        let growth = facts.image.disk_bytes.saturating_sub(space.data_bytes);
        let why = format!(
            "{} of {} are free, allocated ahead, or of subclusters that hold nothing; the disk may \
             grow by {}, and {} are free",
            human(dead),
            human(space.host_bytes),
            human(growth),
            human(facts.host.free_bytes)
        );
        let text = "too little comes back";
        let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why);
        return Some(answer.figure(name, host, None));
    }
    let of_subclusters = match inside {
        0 => String::new(),
        _ => format!(", and subclusters that hold nothing have {}", human(inside)),
    };
    let why = format!(
        "nothing refers to {} of the file, or it was never written{of_subclusters}",
        human(free)
    );
    let text = format!("compaction gives back {}, in place", human(dead));
    let line = format!("cowslip compact {}", quoted(&facts.image.name));
    let answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why)
        .figure(name, host, Some(host - dead as f64))
        .command(line);
    Some(answer.or_by_copy(&[]))
}
