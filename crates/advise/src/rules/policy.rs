//! The policy: whole clusters ahead of need, or only what is written.

use crate::answer::{Answer, Verdict};
use crate::facts::Facts;
use crate::model;
use crate::workload::Workload;

use super::lines::{human, quoted};

const SUBJECT: &str = "policy";
const SOURCE: &str = "docs/how-to-allocate.md#what-do-clusters-of-1-mib-really-cost";

/// Below this share of the file system free space is little.
const LITTLE: f64 = 0.15;

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    if !facts.is_qcow2() {
        return None;
    }
    let image = &facts.image;
    let on = facts.host.file_system();
    let discards = workload.discards.count as f64 / workload.total();
    let live = facts.space.data_bytes as f64;
    let now = model::churn(image.cluster_bytes, image.is_sparse, on);
    let sparse = model::churn(image.cluster_bytes, true, on);
    let extra = ((now - sparse) * live).max(0.0) as u64;
    let is_full = is_full(facts, extra);
    let is_discarding = discards >= 0.05;
    let name = "space over live data, after discards";
    match (image.is_sparse, is_discarding) {
        (false, true) if is_full || now - sparse >= 0.3 => {
            let why = format!(
                "a discard of less than a cluster is a hole in place under the policy sparse: \
                 {} less for the data of today, at the price of more extents (1 330 instead of 40)",
                human(extra)
            );
            let text = "the policy sparse, as the guest discards";
            let answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why);
            let line = format!(
                "cowslip amend -o alloc_policy=sparse {}",
                quoted(&image.name)
            );
            let answer = answer.figure(name, now, Some(sparse)).command(line);
            Some(answer.or_by_copy(&["alloc_policy=sparse"]))
        }
        (false, true) => {
            let why = "there is room for what clusters keep of discarded space, and whole clusters \
                       lie in few extents";
            let text = "the policy contiguous";
            let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why);
            Some(answer.figure(name, now, None))
        }
        (true, false) if !is_full && workload.share_of(&workload.writes) >= 0.1 => {
            Some(contiguous(facts, workload))
        }
        (false, false) => {
            let why = "the guest does not discard, and whole clusters that are allocated ahead lie \
                       in few extents: 9 instead of 126 025 on XFS, after 512 MiB at random";
            Some(Answer::new(
                (SUBJECT, SOURCE),
                Verdict::Leave,
                "the policy contiguous",
                why,
            ))
        }
        (true, _) => {
            let why = "space is short, or the guest discards: only what is written takes some";
            Some(Answer::new(
                (SUBJECT, SOURCE),
                Verdict::Leave,
                "the policy sparse",
                why,
            ))
        }
    }
}

/// Whether free space is little, for the disk as it may grow or in itself.
fn is_full(facts: &Facts, extra: u64) -> bool {
    let host = &facts.host;
    let share = host.free_bytes as f64 / host.total_bytes.max(1) as f64;
    share < LITTLE || host.free_bytes < extra.saturating_mul(2)
}

/// A sparse image whose guest does not discard.
fn contiguous(facts: &Facts, workload: &Workload) -> Answer {
    let rate = |is_sparse| super::clusters::writes_with_policy(facts, workload, is_sparse);
    let why = "the guest does not discard; a sparse image that is written at random becomes what a \
               sparse raw file becomes, an extent for each block on XFS";
    let text = "the policy contiguous, as the guest does not discard";
    let line = format!(
        "cowslip amend -o alloc_policy=contiguous {}",
        quoted(&facts.image.name)
    );
    Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why)
        .figure("first writes a second", rate(true), Some(rate(false)))
        .command(line)
        .or_by_copy(&["alloc_policy=contiguous"])
}
