//! The results as a section of a page, made from what `--json` prints: for each file system and
//! pattern the extents of a file with each kind of help, and all rows.

use cowslip_testbed::Spread;

use crate::document::{Document, DocumentRow};
use crate::page::Align::{Numbers, Words};
use crate::page::{Align, Bar, Bars, Block, Kind, Scale, Section, Table};
use crate::section::{field, section_of_rows};

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

/// Titles of the columns, which are filled by `fields`.
const COLUMNS: [(&str, Align); 13] = [
    ("help", Words),
    ("files", Numbers),
    ("extents", Numbers),
    ("least", Numbers),
    ("most", Numbers),
    ("perfect", Numbers),
    ("x perfect", Numbers),
    ("MiB an extent", Numbers),
    ("write MiB/s", Numbers),
    ("read MiB/s", Numbers),
    ("ahead MiB", Numbers),
    ("lost KiB", Numbers),
    ("short", Numbers),
];

/// The section of a document.
pub fn section(document: Document<'_>) -> Section {
    let mut section = section_of_rows((TITLE, TEXT), document, |filesystem, rows| {
        let of_pattern = |row: &DocumentRow<'_>| (pattern(*row), fields(*row));
        let caption = format!("{filesystem}: all rows");
        let table = Table::of(caption, &COLUMNS, rows.iter().map(of_pattern));
        (bars(filesystem, rows), table)
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
            let rows = document.rows();
            let rows = rows.filter(|row| row.filesystem() == filesystem && help_of(*row) == help);
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

/// Returns the help with the layout.
fn help_of<'a>(row: DocumentRow<'a>) -> &'a str {
    let mut words = row.cell().split(' ');
    words.find(|word| HELPS.contains(word)).unwrap_or("whole")
}

/// The cell without that.
fn pattern(row: DocumentRow<'_>) -> String {
    let words = row.cell().split(' ').filter(|word| *word != help_of(row));
    words.collect::<Vec<_>>().join(" ")
}

/// Extents of a file in each pattern, a bar for each kind of help.
fn bars(filesystem: &str, rows: &[DocumentRow<'_>]) -> Bars {
    let bars = rows.iter().map(|row| {
        let extents = &row.0["extents"];
        let of = |name: &str| extents[name].as_f64().filter(|count| *count > 0.0);
        let bar = || {
            Some(Bar {
                value: of("median")?,
                least: of("min")?,
                most: of("max")?,
            })
        };
        let help = help_of(*row);
        let kind = match help {
            "dynamic" | "grow" => Kind::Ours,
            "seed" => Kind::Source,
            _ => Kind::Yardstick,
        };
        (pattern(*row), (help.to_string(), kind), bar())
    });
    let title = format!("Extents of a file on {filesystem}");
    let unit = "extents, less is better; medians";
    Bars::of((title, unit, Scale::Logarithmic), bars)
}

fn fields(row: DocumentRow<'_>) -> Vec<String> {
    let median = |name: &str| row.0[name]["median"].as_f64();
    let number = |name: &str| row.0[name].as_f64();
    let extents = |name: &str| row.0["extents"][name].as_f64();
    vec![
        help_of(row).to_string(),
        field(number("files"), 0),
        field(median("extents"), 0),
        field(extents("min"), 0),
        field(extents("max"), 0),
        field(median("perfect"), 0),
        field(median("over-perfect"), 1),
        field(number("mean-extent-mib"), 2),
        field(median("write-mib-s"), 0),
        field(median("read-mib-s"), 0),
        field(row.0["peak-unused-mib"]["max"].as_f64(), 1),
        field(number("lost-kib"), 0),
        field(number("short-of-space"), 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writers::cell;
    use serde_json::{Value, json};

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
        let bars = made.bars()[0];
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
        let table = made.tables()[0];
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
            let help = help_of(DocumentRow(&value));
            assert!(
                cell.name().split(' ').any(|word| word == help),
                "{}",
                cell.name()
            );
        }
    }
}
