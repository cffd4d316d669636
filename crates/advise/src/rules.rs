//! The rules: each looks at one subject and answers, or has nothing to say. Pure.

use crate::answer::{Advice, Verdict};
use crate::facts::Facts;
use crate::workload::Workload;

mod cache;
mod chain;
mod clusters;
mod compressed;
mod copies;
mod format;
mod lines;
mod order;
mod policy;
mod preallocation;
mod snapshots;
mod space;

pub use lines::human;

/// The advice for an image under a workload.
pub fn advise(facts: &Facts, workload: &Workload) -> Advice {
    let rules = [
        format::rule,
        clusters::rule,
        compressed::rule,
        policy::rule,
        preallocation::rule,
        cache::rule,
        chain::rule,
        snapshots::rule,
        order::rule,
        space::rule,
    ];
    let mut answers: Vec<_> = rules
        .iter()
        .filter_map(|rule| rule(facts, workload))
        .collect();
    copies::join(facts, &mut answers);
    // Stable: otherwise in the order of the rules.
    answers.sort_by_key(|answer| answer.verdict != Verdict::Change);
    Advice { answers }
}
