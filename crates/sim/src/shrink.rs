//! Makes a failing run smaller: leaves out requests, in halves, quarters and so on, as long as it
//! still fails, trying a few orders of events for each attempt.

use crate::config::{Kind, Part};
use crate::model::WriteId;
use crate::run::{Changes, Report, run};
use crate::trace::Trace;

/// Orders of events that are tried for each attempt.
const SALTS: u64 = 6;
/// Attempts in all.
const ATTEMPTS_MAX: usize = 400;

/// A smaller run that still fails; `None` if the run passes. Says on the way how far it got.
pub fn shrink(
    seed: u64,
    kind: Kind,
    changes: &Changes,
    mut say: impl FnMut(&str),
) -> Option<Changes> {
    let mut best = changes.clone();
    let report = run(seed, kind, &best, Trace::off());
    report.failure.as_ref()?;
    let mut attempts = 0;
    let mut wanted = requests(&report);
    let mut parts = 2;
    while parts <= wanted.len().max(1) * 2 && attempts < ATTEMPTS_MAX {
        let chunk = wanted.len().div_ceil(parts).max(1);
        let mut smaller = None;
        for part in wanted.chunks(chunk) {
            let mut skip = best.skip.clone();
            skip.extend(part);
            attempts += 1;
            let attempt = Changes {
                skip,
                ..changes.clone()
            };
            smaller = fails(seed, kind, &attempt);
            if smaller.is_some() || attempts >= ATTEMPTS_MAX {
                break;
            }
        }
        match smaller {
            Some((changes, report)) => {
                wanted = requests(&report);
                best = changes;
                say(&format!("{} requests still fail", wanted.len()));
                parts = 2.max(parts - 1);
            }
            None => parts *= 2,
        }
    }
    Some(best)
}

fn requests(report: &Report) -> Vec<WriteId> {
    report.begun.clone()
}

fn fails(seed: u64, kind: Kind, attempt: &Changes) -> Option<(Changes, Report)> {
    (0..SALTS).find_map(|salt| {
        let changes = Changes {
            salt,
            ..attempt.clone()
        };
        let report = run(seed, kind, &changes, Trace::off());
        report.failure.is_some().then_some((changes, report))
    })
}

/// The command that replays a run.
pub fn command(seed: u64, kind: Kind, changes: &Changes) -> String {
    let mut text = format!("cargo run -p cowslip-sim -- --replay {seed}");
    match kind {
        Kind::Qcow2 => {}
        Kind::Raw => text.push_str(" --kind raw"),
        Kind::Plain => text.push_str(" --kind plain"),
    }
    let left_out = Part::NAMES
        .iter()
        .filter(|(_, part)| changes.without.contains(part));
    let left_out: Vec<&str> = left_out.map(|(name, _)| *name).collect();
    if !left_out.is_empty() {
        text.push_str(&format!(" --without {}", left_out.join(",")));
    }
    if changes.salt != 0 {
        text.push_str(&format!(" --salt {}", changes.salt));
    }
    if !changes.skip.is_empty() {
        let ids: Vec<String> = changes.skip.iter().map(WriteId::to_string).collect();
        text.push_str(&format!(" --skip {}", ids.join(",")));
    }
    text
}
