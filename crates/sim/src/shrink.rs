//! Makes a failing run smaller, as long as it still fails: fewer rounds, features left out, fewer
//! requests (in halves, quarters and so on), an earlier crash. A few orders of events are tried for
//! each attempt, since a change shifts what happens when.

use crate::config::{Kind, Part};
use crate::model::WriteId;
use crate::perform::run;
use crate::run::{Changes, Report};
use crate::trace::Trace;

/// Orders of events that are tried for each attempt.
const SALTS: u64 = 6;
/// Runs in all.
const RUNS_MAX: usize = 4000;

struct Shrinker<'a> {
    seed: u64,
    kind: Kind,
    runs: usize,
    best: Changes,
    report: Report,
    say: &'a mut dyn FnMut(&str),
}

/// A smaller run that still fails; `None` if the run passes. Says on the way how far it got.
pub fn shrink(
    seed: u64,
    kind: Kind,
    changes: &Changes,
    mut say: impl FnMut(&str),
) -> Option<Changes> {
    let report = run(seed, kind, changes, Trace::off());
    report.failure.as_ref()?;
    let mut shrinker = Shrinker {
        seed,
        kind,
        runs: 1,
        best: changes.clone(),
        report,
        say: &mut say,
    };
    shrinker.rounds();
    shrinker.parts();
    shrinker.requests();
    shrinker.moment();
    shrinker.requests();
    Some(shrinker.best)
}

impl Shrinker<'_> {
    /// Whether a run fails with these changes, in one of some orders of events; then it is the
    /// best.
    fn take(&mut self, attempt: Changes) -> bool {
        for salt in (0..SALTS).map(|salt| self.best.salt.wrapping_add(salt)) {
            if self.runs >= RUNS_MAX {
                return false;
            }
            self.runs += 1;
            let changes = Changes {
                salt,
                ..attempt.clone()
            };
            let report = run(self.seed, self.kind, &changes, Trace::off());
            if report.failure.is_some() {
                self.best = changes;
                self.report = report;
                return true;
            }
        }
        false
    }

    fn report_step(&mut self, what: &str) {
        let requests = self.report.begun.len();
        (self.say)(&format!("{what}: {requests} requests still fail"));
    }

    /// Drops the rounds after the one that failed, and if possible those before.
    fn rounds(&mut self) {
        let rounds = self.report.rounds.max(1);
        self.take(Changes {
            rounds: Some(rounds),
            ..self.best.clone()
        });
        self.report_step("rounds");
    }

    fn parts(&mut self) {
        for (name, part) in Part::NAMES {
            let mut without = self.best.without.clone();
            let smaller = without.insert(part)
                && self.take(Changes {
                    without,
                    ..self.best.clone()
                });
            if smaller {
                self.report_step(&format!("without {name}"));
            }
        }
    }

    fn requests(&mut self) {
        let mut wanted = self.report.begun.clone();
        let mut parts = 2;
        while parts <= wanted.len().max(1) * 2 && self.runs < RUNS_MAX {
            let chunk = wanted.len().div_ceil(parts).max(1);
            let smaller = wanted.chunks(chunk).any(|part| {
                let mut skip = self.best.skip.clone();
                skip.extend(part);
                self.take(Changes {
                    skip,
                    ..self.best.clone()
                })
            });
            if smaller {
                wanted.clone_from(&self.report.begun);
                self.report_step("requests");
                parts = 2.max(parts - 1);
            } else {
                parts *= 2;
            }
        }
    }

    /// The crash as early as possible: what comes after what matters says nothing.
    fn moment(&mut self) {
        let mut step = self.report.events / 2;
        let mut moment = self.report.events.max(1);
        while step > 0 && self.runs < RUNS_MAX {
            let earlier = moment.saturating_sub(step).max(1);
            let smaller = earlier < moment
                && self.take(Changes {
                    moment: Some(earlier),
                    ..self.best.clone()
                });
            if smaller {
                moment = earlier;
            } else {
                step /= 2;
            }
        }
        self.report_step("an earlier crash");
    }
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
    if let Some(rounds) = changes.rounds {
        text.push_str(&format!(" --rounds {rounds}"));
    }
    if let Some(moment) = changes.moment {
        text.push_str(&format!(" --moment {moment}"));
    }
    if !changes.skip.is_empty() {
        let ids: Vec<String> = changes.skip.iter().map(WriteId::to_string).collect();
        text.push_str(&format!(" --skip {}", ids.join(",")));
    }
    text
}
