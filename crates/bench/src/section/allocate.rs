//! The results as a section of a page, made from what `--json` prints: for each file system how
//! long each method took, and all rows.

use cowslip_testbed::Spread;

use crate::document::{Document, DocumentRow, distinct};
use crate::page::Align::{Numbers, Words};
use crate::page::{Align, Bar, Bars, Kind, Scale, Section, Table};
use crate::section::{field, section_of_rows};

/// Times that are drawn, by their names in a run.
const TIMES: [(&str, &str); 2] = [
    ("call-seconds", "until it returns"),
    ("durable-seconds", "until it is durable"),
];

const TITLE: &str = "Files that are given their space (allocate)";
const TEXT: &str = "Medians, with the least and the most. A method returns when its last call does, and its space is durable when \
                    fsync after that returns. CPU time is the calling thread's. 'perfect' is the fewest extents that the file \
                    system can express.";

/// Titles of the columns, which are filled by `fields`.
const COLUMNS: [(&str, Align); 11] = [
    ("method", Words),
    ("returns s", Numbers),
    ("least", Numbers),
    ("most", Numbers),
    ("durable s", Numbers),
    ("least", Numbers),
    ("most", Numbers),
    ("CPU s", Numbers),
    ("extents", Numbers),
    ("perfect", Numbers),
    ("system calls", Words),
];

/// The section of a document.
pub fn section(document: Document<'_>) -> Section {
    section_of_rows((TITLE, TEXT), document, |filesystem, rows| {
        let of_states = |row: &DocumentRow<'_>| (row.text("state").to_string(), fields(*row));
        let caption = format!("{filesystem}: all methods");
        let table = Table::of(caption, &COLUMNS, rows.iter().map(of_states));
        (bars(filesystem, rows), table)
    })
}

/// Returns the results in lines of plain text: on each file system the method whose space is
/// durable first, and the last.
pub fn summary(document: Document<'_>) -> String {
    let mut out = String::new();
    let states = distinct(document.rows().map(|row| row.text("state")));
    for filesystem in document.filesystems() {
        for state in &states {
            let rows = document
                .rows()
                .filter(|row| row.filesystem() == filesystem && row.text("state") == *state);
            let timed = rows.filter_map(|row| {
                let durable = spread(row, "durable-seconds")?.median;
                // It gives no space.
                (row.text("method") != "ftruncate").then_some((durable, row.text("method")))
            });
            let mut timed: Vec<(f64, &str)> = timed.collect();
            timed.sort_by(|a, b| a.0.total_cmp(&b.0));
            if let (Some((least, first)), Some((most, last))) = (timed.first(), timed.last()) {
                out += &format!(
                    "  {filesystem:<12} {state:<8} durable after {least:.3} s by {first}, {most:.3} s by {last}\n"
                );
            }
        }
    }
    out
}

fn spread(row: DocumentRow<'_>, figure: &str) -> Option<Spread> {
    let figures = row
        .runs()
        .filter_map(|run| run["measured"][figure].as_f64());
    Spread::of(figures.collect())
}

fn calls(row: DocumentRow<'_>) -> String {
    let failure = row.runs().find_map(|run| run["failed"].as_str());
    match (row.text("called"), failure) {
        (called, None) => called.to_string(),
        ("", Some(why)) => why.to_string(),
        (called, Some(why)) => format!("{called}; a run failed: {why}"),
    }
}

/// Times of all methods, in each state.
fn bars(filesystem: &str, rows: &[DocumentRow<'_>]) -> Bars {
    let states = distinct(rows.iter().map(|row| row.text("state"))).len();
    let bars = rows.iter().flat_map(|row| {
        TIMES.map(|(figure, words)| {
            let name = match states {
                1 => words.to_string(),
                _ => format!("{}, {words}", row.text("state")),
            };
            // An axis of powers of ten has no place for 0.
            let shown = spread(*row, figure).filter(|spread| spread.least > 0.0);
            let method = row.text("method").to_string();
            (method, (name, Kind::Ours), shown.map(Bar::from))
        })
    });
    let title = format!("Time of each method on {filesystem}");
    let unit = "seconds, less is better; medians";
    Bars::of((title, unit, Scale::Logarithmic), bars)
}

fn fields(row: DocumentRow<'_>) -> Vec<String> {
    let median = |figure| spread(row, figure).map(|spread| spread.median);
    let mut fields = vec![row.text("method").to_string()];
    for (figure, _) in TIMES {
        let spread = spread(row, figure);
        let figures = spread.map(|s| [s.median, s.least, s.greatest]);
        fields.extend((0..3).map(|index| field(figures.map(|all| all[index]), 4)));
    }
    fields.push(field(median("cpu-seconds"), 4));
    fields.push(field(median("extents"), 0));
    fields.push(field(row.0["perfect"].as_f64(), 0));
    fields.push(calls(row));
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_section_shows_times_and_what_failed() {
        let run = |seconds: f64| {
            json!({ "measured": {
                "call-seconds": seconds, "durable-seconds": 2.0 * seconds, "cpu-seconds": 0.0, "extents": 9,
            } })
        };
        let document = json!({
            "conditions": { "table": "allocate" },
            "rows": [
                { "filesystem": "ext3", "state": "fresh", "method": "mmap", "perfect": 8, "called": "1 mmap",
                  "runs": [run(1.0), run(4.0), run(2.0)] },
                { "filesystem": "ext3", "state": "aged", "method": "fallocate", "perfect": null, "called": null,
                  "runs": [{ "failed": "not <supported>" }] },
            ],
        });
        let made = section(Document(&document));
        let bars = made.bars()[0];
        let names: Vec<&str> = bars
            .series
            .iter()
            .map(|series| series.name.as_str())
            .collect();
        let all = [
            "fresh, until it returns",
            "fresh, until it is durable",
            "aged, until it returns",
            "aged, until it is durable",
        ];
        assert_eq!(names, all);
        let bar = bars.groups[0].bars[1].unwrap();
        assert_eq!((bar.value, bar.least, bar.most), (4.0, 2.0, 8.0));
        assert!(bars.groups[1].bars.iter().all(Option::is_none));
        let lines = summary(Document(&document));
        assert_eq!(
            lines,
            "  ext3         fresh    durable after 4.000 s by mmap, 4.000 s by mmap\n"
        );
        let text = format!("{made:?}");
        assert!(
            text.contains("not <supported>") && text.contains("1 mmap"),
            "{text}"
        );
    }
}
