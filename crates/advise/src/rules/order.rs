//! Order: a read from front to back.

use crate::answer::{Answer, Verdict};
use crate::facts::Facts;
use crate::model;
use crate::workload::Workload;

use super::lines::{SPEED_GAIN, human};

const SUBJECT: &str = "order";
const SOURCE: &str = "docs/how-to-allocate.md#does-reserving-help-where-nothing-is-copied";

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    let order = &facts.order;
    let (runs, bytes) = (order.runs?, order.bytes);
    if bytes == 0 {
        return None;
    }
    let on = facts.host.file_system();
    let is_rotational = facts.host.is_rotational;
    let speed = |runs| model::in_order(bytes, runs, is_rotational, on);
    let (now, then) = (speed(runs), speed(order.perfect.max(1)));
    let name = "MiB/s in order";
    let in_order = workload.read_in_order();
    // A few megabytes are read in no time, in whatever order.
    let is_small = bytes < 64 << 20;
    if then / now < SPEED_GAIN || in_order < 0.2 || is_small {
        let why = match then / now < SPEED_GAIN {
            true => format!(
                "{} lie in {runs} runs, and each further one costs {}: less than runs differ by",
                human(bytes),
                if is_rotational { "8 ms" } else { "some 14 us" }
            ),
            false if is_small => format!("it is {} in all", human(bytes)),
            false => format!(
                "it lies in {runs} runs, but little is read in order, and a read at random meets \
                 one run anyway"
            ),
        };
        let text = "as it lies";
        let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why);
        return Some(answer.figure(name, now, None));
    }
    let why = format!(
        "{} that the guest reads in order lie in {runs} runs on the device where {} are the minimum",
        human(bytes),
        order.perfect
    );
    let text = "a copy in the guest's order";
    let answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why);
    Some(answer.figure(name, now, Some(then)).by_copy(&[]))
}
