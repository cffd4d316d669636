//! The results as a section of a page, made from what `--json` prints: for each file system how
//! long each method took, and all rows.

use cowslip_testbed::Spread;
use serde_json::Value;

use crate::document::{Document, distinct};
use crate::page::{
    Align, Bar, BarGroup, Bars, Kind, RowGroup, Scale, Section, Series, Table, TableRow, grouped,
};
use crate::section::section_of_rows;

/// Times that are drawn, by their names in a run.
const TIMES: [(&str, &str); 2] = [
    ("call-seconds", "until it returns"),
    ("durable-seconds", "until it is durable"),
];

const TITLE: &str = "Files that are given their space (allocate)";
const TEXT: &str = "Medians, with the least and the most. A method returns when its last call does, and its space is durable when \
                    fsync after that returns. CPU time is the calling thread's. 'perfect' is the fewest extents that the file \
                    system can express.";

/// The section of a document.
pub fn section(document: Document<'_>) -> Section {
    section_of_rows((TITLE, TEXT), document, |filesystem, rows| {
        let rows: Vec<Row<'_>> = rows.iter().map(|row| Row(row.0)).collect();
        (bars(filesystem, &rows), table(filesystem, &rows))
    })
}

/// Returns the results in lines of plain text: on each file system the method whose space is
/// durable first, and the last.
pub fn summary(document: Document<'_>) -> String {
    let mut out = String::new();
    let states = distinct(document.rows().map(|row| Row(row.0).text("state")));
    for filesystem in document.filesystems() {
        for state in &states {
            let rows = document
                .rows()
                .map(|row| Row(row.0))
                .filter(|row| row.text("filesystem") == filesystem && row.text("state") == *state);
            let timed = rows.filter_map(|row| {
                let durable = row.spread("durable-seconds")?.median;
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

/// A method in one state of a file system.
#[derive(Clone, Copy)]
struct Row<'a>(&'a Value);

impl<'a> Row<'a> {
    fn text(self, name: &str) -> &'a str {
        self.0[name].as_str().unwrap_or_default()
    }

    fn runs(self) -> impl Iterator<Item = &'a Value> {
        self.0["runs"].as_array().into_iter().flatten()
    }

    fn spread(self, figure: &str) -> Option<Spread> {
        let figures = self
            .runs()
            .filter_map(|run| run["measured"][figure].as_f64());
        Spread::of(figures.collect())
    }

    fn failure(self) -> Option<&'a str> {
        self.runs().find_map(|run| run["failed"].as_str())
    }

    fn calls(self) -> String {
        match (self.text("called"), self.failure()) {
            (called, None) => called.to_string(),
            ("", Some(why)) => why.to_string(),
            (called, Some(why)) => format!("{called}; a run failed: {why}"),
        }
    }
}

/// Times of all methods, in each state.
fn bars(filesystem: &str, rows: &[Row<'_>]) -> Bars {
    let states = distinct(rows.iter().map(|row| row.text("state")));
    let timed = || {
        let states = states.iter();
        states.flat_map(|state| TIMES.iter().map(move |time| (*state, *time)))
    };
    let name = |(state, (_, words)): (&str, (&str, &str))| match states.len() {
        1 => words.to_string(),
        _ => format!("{state}, {words}"),
    };
    let group = |method: &str| BarGroup {
        name: method.to_string(),
        bars: timed()
            .map(|(state, (figure, _))| {
                let is_it =
                    |row: &&Row<'_>| row.text("method") == method && row.text("state") == state;
                let spread = rows.iter().find(is_it)?.spread(figure)?;
                // An axis of powers of ten has no place for 0.
                (spread.least > 0.0).then_some(Bar {
                    value: spread.median,
                    least: spread.least,
                    most: spread.greatest,
                })
            })
            .collect(),
    };
    Bars {
        title: format!("Time of each method on {filesystem}"),
        unit: "seconds, less is better; medians".to_string(),
        scale: Scale::Logarithmic,
        series: Series::numbered(timed().map(|timed| (name(timed), Kind::Ours))),
        groups: distinct(rows.iter().map(|row| row.text("method")))
            .into_iter()
            .map(group)
            .collect(),
    }
}

fn table(filesystem: &str, rows: &[Row<'_>]) -> Table {
    let titles = [
        ("method", Align::Words),
        ("returns s", Align::Numbers),
        ("least", Align::Numbers),
        ("most", Align::Numbers),
        ("durable s", Align::Numbers),
        ("least", Align::Numbers),
        ("most", Align::Numbers),
        ("CPU s", Align::Numbers),
        ("extents", Align::Numbers),
        ("perfect", Align::Numbers),
        ("system calls", Align::Words),
    ];
    let fields = |row: &Row<'_>| {
        let seconds = |value: Option<f64>| value.map_or(String::new(), |value| grouped(value, 4));
        let count = |value: Option<f64>| value.map_or(String::new(), |value| grouped(value, 0));
        let mut fields = vec![row.text("method").to_string()];
        for (figure, _) in TIMES {
            let spread = row.spread(figure);
            fields.push(seconds(spread.map(|spread| spread.median)));
            fields.push(seconds(spread.map(|spread| spread.least)));
            fields.push(seconds(spread.map(|spread| spread.greatest)));
        }
        fields.push(seconds(
            row.spread("cpu-seconds").map(|spread| spread.median),
        ));
        fields.push(count(row.spread("extents").map(|spread| spread.median)));
        fields.push(count(row.0["perfect"].as_f64()));
        fields.push(row.calls());
        TableRow {
            fields,
            ..TableRow::default()
        }
    };
    let states = distinct(rows.iter().map(|row| row.text("state")));
    Table {
        caption: format!("{filesystem}: all methods"),
        columns: titles
            .map(|(title, align)| (title.to_string(), align))
            .to_vec(),
        groups: states
            .into_iter()
            .map(|state| RowGroup {
                title: state.to_string(),
                rows: rows
                    .iter()
                    .filter(|row| row.text("state") == state)
                    .map(fields)
                    .collect(),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Block;
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
        let bars = made.blocks.iter().find_map(|block| match block {
            Block::Bars(bars) => Some(bars),
            _ => None,
        });
        let bars = bars.unwrap();
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
