//! Memory for tables.

use crate::answer::{Answer, Verdict};
use crate::facts::{Engine, Facts};
use crate::model;
use crate::workload::Workload;

use super::lines::{human, quoted, size};

const SUBJECT: &str = "cache";
const SOURCE: &str = "docs/performance.md#tables-larger-than-memory";

/// The command that serves the image with this memory for tables.
fn with_memory(facts: &Facts, bytes: u64) -> String {
    let name = &facts.image.name;
    match facts.engine {
        Engine::Cowslip => {
            let (size, name) = (size(bytes), quoted(name));
            format!("cowslip serve --cache-size {size} {name}")
        }
        Engine::Qemu => {
            let (size, file) = (size(bytes), name.replace(',', ",,"));
            let words = format!("driver=qcow2,file.filename={file},l2-cache-size={size}");
            format!("qemu-system-x86_64 -drive {}", quoted(&words))
        }
    }
}

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    if !facts.is_qcow2() {
        return None;
    }
    let image = &facts.image;
    // The tables of larger clusters may fit: then memory is not the answer as well.
    let layout = super::clusters::advised(facts, workload);
    let span = workload
        .span_bytes
        .unwrap_or(image.disk_bytes)
        .min(image.disk_bytes);
    let needed = match facts.engine {
        Engine::Cowslip => {
            let scattered = facts.space.scattered_permille as f64 / 1000.0;
            model::table_bytes(span, layout, scattered)
        }
        Engine::Qemu => {
            let entry = if layout.1 { 16 } else { 8 };
            (span / layout.0.max(1) * entry) as f64
        }
    };
    // A table is touched by slices: some more than its entries.
    let needed = needed * 1.1;
    let at_random = workload.reads.at_random() + workload.writes.at_random();
    let is_random = at_random / workload.total() >= 0.2;
    let seen = workload
        .cache
        .map(|(hits, misses)| misses as f64 / (hits.saturating_add(misses)).max(1) as f64);
    let expected = model::misses(needed, facts.cache_bytes);
    // What was counted was counted of the image as it is.
    let seen = seen.filter(|_| layout == (image.cluster_bytes, image.has_subclusters));
    let misses = seen.unwrap_or(expected);
    if misses < 0.05 || !is_random {
        let why = match (is_random, seen) {
            (false, _) => "requests in order read each table once".to_string(),
            (true, Some(seen)) => format!("{:.1} % of the lookups read a table", seen * 100.0),
            (true, None) => format!(
                "the tables of {} take {}, all of which is kept",
                human(span),
                human(needed as u64)
            ),
        };
        let text = format!("{} for tables", human(facts.cache_bytes));
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    let wanted = needed.max(facts.cache_bytes as f64 * 2.0) as u64;
    let wanted = (wanted >> 20).next_multiple_of(32) << 20;
    let then = match seen {
        // Counted, not predicted: the span is not known as well as that.
        Some(seen) => seen * model::misses(needed, wanted).min(0.05),
        None => model::misses(needed, wanted),
    };
    let why = format!(
        "requests are at random over {}, whose tables take {} in clusters of {}: {:.0} of 100 read \
         a table first",
        human(span),
        human(needed as u64),
        human(layout.0),
        misses * 100.0
    );
    let text = format!(
        "{} for tables instead of {}",
        human(wanted),
        human(facts.cache_bytes)
    );
    let line = with_memory(facts, wanted);
    let speed = |misses| model::speed_with_misses(misses);
    Some(
        Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why)
            .figure(
                "speed beside tables in memory",
                speed(misses),
                Some(speed(then)),
            )
            .command(line),
    )
}
