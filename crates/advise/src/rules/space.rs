//! Space that nothing uses, and disks that may outgrow their file system.

use crate::answer::{Answer, Verdict};
use crate::facts::Facts;
use crate::workload::Workload;

use super::lines::{SPACE_BYTES, copied, human};

const SUBJECT: &str = "space";
const SOURCE: &str = "docs/how-to-allocate.md#what-do-clusters-of-1-mib-really-cost";

/// The rule.
pub fn rule(facts: &Facts, _: &Workload) -> Option<Answer> {
    if !facts.is_qcow2() || facts.image.has_data_file {
        return None;
    }
    let space = &facts.space;
    let dead = space.other_bytes();
    let is_much = dead > SPACE_BYTES && dead > space.host_bytes / 5;
    let growth = facts.image.disk_bytes.saturating_sub(space.data_bytes);
    let name = "bytes on the host";
    let host = space.host_bytes as f64;
    if facts.image.snapshots > 0 {
        // Which of it the snapshots hold is theirs to answer.
        return None;
    }
    if !is_much {
        let why = format!(
            "{} of {} are free or allocated ahead; the disk may grow by {}, and {} are free",
            human(dead),
            human(space.host_bytes),
            human(growth),
            human(facts.host.free_bytes)
        );
        let text = "nothing worth a copy comes back";
        let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why);
        return Some(answer.figure(name, host, None));
    }
    let live = (space.used_bytes + space.metadata_bytes) as f64;
    let why = format!(
        "nothing refers to {} of the file, or it was never written",
        human(dead)
    );
    let text = format!("a copy gives back {}", human(dead));
    let answer =
        Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why).figure(name, host, Some(live));
    if live as u64 > facts.host.free_bytes {
        let mut answer = answer;
        answer.verdict = Verdict::Leave;
        answer.reason += "; there is no room for a copy";
        answer.figures.truncate(0);
        return Some(answer);
    }
    Some(copied(facts, "").into_iter().fold(answer, Answer::command))
}
