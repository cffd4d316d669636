//! The results as a section of a page, made from what `--json` prints: for each file system and
//! pattern the extents of a file with each kind of help, and all rows.

use cowslip_testbed::Spread;
use serde_json::Value;

use crate::document::{Document, distinct};
use crate::page::{
    Align, Bar, BarGroup, Bars, Block, Kind, RowGroup, Scale, Section, Series, Table, TableRow,
    grouped,
};
use crate::section::section_of_rows;

/// Words of a row's name that are no part of its pattern: the help that it had.
const HELPS: [&str; 7] = [
    "none", "hint=1M", "fixed=1M", "fixed=1G", "seed", "dynamic", "grow",
];
/// The help that is compared with it in the text.
const OURS: &str = "dynamic";

const TITLE: &str = "Files that grow side by side (writers)";
const TEXT: &str = "Extents of a file: the middle of all files of all runs, with the least and the most. 'perfect' is the fewest that \
                    the file system can express. 'ahead' is what was allocated behind ends at the worst moment, 'lost' what was still \
                    there after all files were closed, 'short' counts writes that found no space while some was held.";

/// The section of a document.
pub fn section(document: Document<'_>) -> Section {
    let mut section = section_of_rows((TITLE, TEXT), document, |filesystem, rows| {
        let rows: Vec<Row<'_>> = rows.iter().map(|row| Row(row.0)).collect();
        (bars(filesystem, &rows), table(filesystem, &rows))
    });
    for note in document.notes() {
        section.add(Block::Prose(note.to_string()));
    }
    section
}

/// Returns the results in lines of plain text: how far from perfect files are, without help and
/// with steps ahead.
pub fn summary(document: Document<'_>) -> String {
    let mut out = String::new();
    for filesystem in document.filesystems() {
        for help in ["none", OURS] {
            let rows = document.rows().map(|row| Row(row.0));
            let rows =
                rows.filter(|row| row.text("filesystem") == filesystem && row.help() == help);
            let over = rows.filter_map(|row| row.0["over-perfect"]["median"].as_f64());
            if let Some(over) = Spread::of(over.collect()) {
                out += &format!(
                    "  {filesystem:<12} {help:<8} extents over perfect: median {:.1}, {:.1} to {:.1} in the rows\n",
                    over.median, over.least, over.greatest
                );
            }
        }
    }
    out
}

/// A cell on a file system.
#[derive(Clone, Copy)]
struct Row<'a>(&'a Value);

impl<'a> Row<'a> {
    fn text(self, name: &str) -> &'a str {
        self.0[name].as_str().unwrap_or_default()
    }

    /// Returns the help with the layout.
    fn help(self) -> &'a str {
        let mut words = self.text("cell").split(' ');
        let is_help = |word: &&str| HELPS.contains(word);
        words.find(is_help).unwrap_or("whole")
    }

    /// The cell without that.
    fn pattern(self) -> String {
        let words = self.text("cell").split(' ');
        let words: Vec<&str> = words.filter(|word| *word != self.help()).collect();
        words.join(" ")
    }

    /// A figure's median, or nothing.
    fn median(self, figure: &str) -> Option<f64> {
        self.0[figure]["median"].as_f64()
    }
}

/// Extents of a file in each pattern, a bar for each kind of help.
fn bars(filesystem: &str, rows: &[Row<'_>]) -> Bars {
    let helps = distinct(rows.iter().map(|row| row.help()));
    let patterns: Vec<String> = rows.iter().map(|row| row.pattern()).collect();
    let group = |pattern: &str| BarGroup {
        name: pattern.to_string(),
        bars: helps
            .iter()
            .map(|help| {
                let is_it = |row: &&Row<'_>| row.pattern() == pattern && row.help() == *help;
                let extents = &rows.iter().find(is_it)?.0["extents"];
                let of = |name: &str| extents[name].as_f64().filter(|count| *count > 0.0);
                Some(Bar {
                    value: of("median")?,
                    least: of("min")?,
                    most: of("max")?,
                })
            })
            .collect(),
    };
    let kind = |help: &str| match help {
        "dynamic" | "grow" => Kind::Ours,
        "seed" => Kind::Source,
        _ => Kind::Yardstick,
    };
    let series = helps.iter().map(|help| (help.to_string(), kind(help)));
    Bars {
        title: format!("Extents of a file on {filesystem}"),
        unit: "extents, less is better; medians".to_string(),
        scale: Scale::Logarithmic,
        series: Series::numbered(series),
        groups: distinct(patterns.iter().map(String::as_str))
            .into_iter()
            .map(group)
            .collect(),
    }
}

/// Titles of the columns of figures, which are filled by `fields`.
const COLUMNS: [&str; 12] = [
    "files",
    "extents",
    "least",
    "most",
    "perfect",
    "x perfect",
    "MiB an extent",
    "write MiB/s",
    "read MiB/s",
    "ahead MiB",
    "lost KiB",
    "short",
];

fn fields(row: &Row<'_>) -> Vec<String> {
    let cell = |value: Option<f64>, decimals| value.map_or(String::new(), |v| grouped(v, decimals));
    let number = |name: &str| row.0[name].as_f64();
    let extents = |name: &str| row.0["extents"][name].as_f64();
    vec![
        row.help().to_string(),
        cell(number("files"), 0),
        cell(row.median("extents"), 0),
        cell(extents("min"), 0),
        cell(extents("max"), 0),
        cell(row.median("perfect"), 0),
        cell(row.median("over-perfect"), 1),
        cell(number("mean-extent-mib"), 2),
        cell(row.median("write-mib-s"), 0),
        cell(row.median("read-mib-s"), 0),
        cell(row.0["peak-unused-mib"]["max"].as_f64(), 1),
        cell(number("lost-kib"), 0),
        cell(number("short-of-space"), 0),
    ]
}

fn table(filesystem: &str, rows: &[Row<'_>]) -> Table {
    let patterns: Vec<String> = rows.iter().map(|row| row.pattern()).collect();
    let group = |pattern: &str| RowGroup {
        title: pattern.to_string(),
        rows: rows
            .iter()
            .filter(|row| row.pattern() == pattern)
            .map(|row| TableRow {
                fields: fields(row),
                ..TableRow::default()
            })
            .collect(),
    };
    let numbers = COLUMNS.map(|title| (title.to_string(), Align::Numbers));
    Table {
        caption: format!("{filesystem}: all rows"),
        columns: [("help".to_string(), Align::Words)]
            .into_iter()
            .chain(numbers)
            .collect(),
        groups: distinct(patterns.iter().map(String::as_str))
            .into_iter()
            .map(group)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writers::cell;
    use serde_json::json;

    fn row(cell: &str, median: f64) -> Value {
        json!({
            "filesystem": "xfs", "cell": cell, "files": 4,
            "extents": { "min": 1.0, "median": median, "max": 2.0 * median },
            "perfect": { "median": 1.0 }, "over-perfect": { "median": median },
            "peak-unused-mib": null,
        })
    }

    #[test]
    fn rows_of_one_pattern_stand_side_by_side() {
        let document = json!({
            "conditions": { "table": "writers" },
            "rows": [
                row("stream direct 4 none", 252.0), row("stream direct 4 dynamic", 11.0),
                row("reopen direct 32 none at 3MB/s", 254.0),
            ],
        });
        let made = section(Document(&document));
        let bars = made.blocks.iter().find_map(|block| match block {
            Block::Bars(bars) => Some(bars),
            _ => None,
        });
        let bars = bars.unwrap();
        let groups: Vec<&str> = bars
            .groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        assert_eq!(groups, ["stream direct 4", "reopen direct 32 at 3MB/s"]);
        let bar = bars.groups[0].bars[1].unwrap();
        assert_eq!((bar.value, bar.least, bar.most), (11.0, 1.0, 22.0));
        assert!(bars.groups[1].bars[1].is_none());
        assert_eq!(
            summary(Document(&document)),
            "  xfs          none     extents over perfect: median 253.0, 252.0 to 254.0 in the rows\n  \
             xfs          dynamic  extents over perfect: median 11.0, 11.0 to 11.0 in the rows\n"
        );
        let table = made.blocks.iter().find_map(|block| match block {
            Block::Table(table) => Some(table),
            _ => None,
        });
        let table = table.unwrap();
        let row = &table.groups[0].rows[0];
        assert_eq!(row.fields.len(), table.columns.len());
        assert_eq!(
            (row.fields[0].as_str(), row.fields[10].as_str()),
            ("none", "")
        );
    }

    #[test]
    fn each_cell_is_known_by_its_help() {
        for cell in cell::all().iter().chain(&cell::of_space()) {
            let value = json!({ "cell": cell.name() });
            let help = Row(&value).help();
            assert!(
                cell.name().split(' ').any(|word| word == help),
                "{}",
                cell.name()
            );
        }
    }
}
