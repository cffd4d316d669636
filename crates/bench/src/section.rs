//! A table of operations a second as a section of a page: charts, requests over time, all rows, the
//! figures of those who asked first, what each run was started with.

use cowslip_load::SERIES_STEP_MS;
use serde_json::Value;

use crate::document::{Document, DocumentRow, distinct, kind_of, numbers};

use crate::page::{
    Align, Bar, Bars, Block, Curves, Kind, Scale, Section, Series, Table, TableRow, grouped,
    rounded,
};
use crate::report::RATIO_TITLES;
use crate::sources;
use crate::sparkline::rates;

pub mod allocate;
pub mod writers;

/// Points of a curve at most.
const POINTS_MAX: usize = 100;
/// More charts over time than these say less than the table.
const SERIES_CHARTS_MAX: usize = 24;
/// Number of groups up to which all share one chart, whatever their names.
const GROUPS_IN_ONE: usize = 12;

/// Titles of the sections of tables, by the names of these.
const TITLES: [(&str, &str); 15] = [
    (
        "subclusters",
        "Random first writes, by cluster size (subclusters)",
    ),
    ("flush", "First writes with flushes (flush)"),
    (
        "preallocation",
        "First writes, by preallocation (preallocation)",
    ),
    ("discard", "Space and speed under discard (discard)"),
    (
        "fragmentation",
        "Filled at random, then read (fragmentation)",
    ),
    (
        "steady",
        "Reads and overwrites of what is allocated (steady)",
    ),
    (
        "metadata",
        "Random requests over a large disk, little memory for tables (metadata)",
    ),
    ("served", "Random first writes over NBD (served)"),
    ("vhost-user", "Disks of virtual machines (vhost-user)"),
    ("fuse", "Disks as files (fuse)"),
    (
        "threads",
        "Several threads on a file that keeps nothing (threads)",
    ),
    ("check", "Checks of images (check)"),
    (
        "compact",
        "Space of dead clusters, in place and by a copy (compact)",
    ),
    ("convert", "Conversions (convert)"),
    ("guest", "Inside a Linux guest (guest)"),
];

/// Returns the title of a table's section.
pub fn title_of(table: &str) -> Option<&'static str> {
    let found = TITLES.iter().find(|(name, _)| *name == table);
    found.map(|(_, title)| *title)
}

/// The section of a table that has no operations a second: what its figures are, and of each file
/// system what `draw` makes of its rows.
pub fn section_of_rows(
    (title, text): (&str, &str),
    document: Document<'_>,
    draw: impl Fn(&str, &[DocumentRow<'_>]) -> (Bars, Table),
) -> Section {
    let mut section = Section::new(title);
    if let Some(shortfall) = document.shortfall() {
        section.add(Block::Warning(shortfall));
    }
    section.add(Block::Prose(text.to_string()));
    for filesystem in document.filesystems() {
        section.add(Block::Heading(filesystem.to_string()));
        let here = document.rows().filter(|row| row.filesystem() == filesystem);
        let (bars, table) = draw(filesystem, &here.collect::<Vec<_>>());
        section.add(Block::Bars(bars));
        section.add(Block::Table(table));
    }
    sources::add(document, &mut section);
    section
}

/// A figure as a field of a table; empty if it is not known.
fn field(value: Option<f64>, decimals: usize) -> String {
    value.map_or(String::new(), |value| grouped(value, decimals))
}

/// The section of a table of this title.
pub fn section(title: &str, document: Document<'_>) -> Section {
    let mut section = Section::new(title);
    if let Some(shortfall) = document.shortfall() {
        section.add(Block::Warning(shortfall));
    }
    for note in document.notes().filter(|note| !is_table(note)) {
        section.add(Block::Prose(note.to_string()));
    }
    let filesystems = document.filesystems();
    for filesystem in &filesystems {
        if filesystems.len() > 1 {
            section.add(Block::Heading(filesystem.to_string()));
        }
        let rows: Vec<DocumentRow<'_>> = document
            .rows()
            .filter(|row| row.filesystem() == *filesystem)
            .collect();
        charts(document.rate(), &rows, &mut section);
        series_charts(&rows, &mut section);
        section.add(Block::Table(table((filesystem, document.rate()), &rows)));
    }
    for note in document.notes().filter(|note| is_table(note)) {
        let (title, _) = note.split_once('\n').unwrap_or((note, ""));
        let title = title.trim().to_string();
        let text = note.to_string();
        section.add(Block::Output { title, text });
    }
    sources::add(document, &mut section);
    commands(document, &mut section);
    section
}

/// Whether a note is columns of text.
fn is_table(note: &str) -> bool {
    note.lines().count() > 2
}

/// Contestants in their order, with their colours.
fn series_of(rows: &[DocumentRow<'_>]) -> Vec<Series> {
    let names = distinct(rows.iter().map(|row| row.contestant()));
    Series::numbered(
        names
            .into_iter()
            .map(|name| (name.to_string(), kind_of(name))),
    )
}

fn charts(rate: &str, rows: &[DocumentRow<'_>], section: &mut Section) {
    let cells = distinct(rows.iter().map(|row| row.cell()));
    for panel in panels(&cells) {
        let bars = panel.groups.iter().flat_map(|(name, cell)| {
            let of_cell = rows.iter().filter(|row| row.cell() == *cell);
            of_cell.map(|row| {
                let contestant = (row.contestant().to_string(), row.kind());
                (name.clone(), contestant, row.spread("iops").map(Bar::from))
            })
        });
        let unit = format!("{rate}, more is better; medians");
        section.add(Block::Bars(Bars::of(
            (panel.title, &unit, Scale::Linear),
            bars,
        )));
    }
}

/// Cells of one chart: what all have in common is in its title, what differs below the bars.
#[derive(Debug, PartialEq)]
struct Panel<'a> {
    title: String,
    /// Short name and full name.
    groups: Vec<(String, &'a str)>,
}

/// Cells by chart. Their names are parts with commas between them. Few are one chart; more are
/// divided by all parts but the one that leaves the fewest charts, plain clusters and subclusters
/// apart.
fn panels<'a>(cells: &[&'a str]) -> Vec<Panel<'a>> {
    let parts = |cell: &'a str| cell.split(", ").collect::<Vec<_>>();
    let longest = cells
        .iter()
        .map(|cell| parts(cell).len())
        .max()
        .unwrap_or(0);
    let rest = |cell: &'a str, axis: usize| {
        let mut rest = parts(cell);
        if axis < rest.len() {
            let name = rest.remove(axis);
            rest.insert(
                0,
                if name.contains('/') {
                    "subclusters"
                } else {
                    "plain clusters"
                },
            );
        }
        rest.join(", ")
    };
    let divided = |axis: usize| {
        let mut panels: Vec<Panel<'a>> = Vec::new();
        for cell in cells {
            let title = rest(cell, axis);
            let name = parts(cell).get(axis).copied().unwrap_or(cell);
            let group = (name.to_string(), *cell);
            match panels.iter_mut().find(|panel| panel.title == title) {
                Some(panel) => panel.groups.push(group),
                None => panels.push(Panel {
                    title,
                    groups: vec![group],
                }),
            }
        }
        panels
    };
    if cells.len() <= GROUPS_IN_ONE {
        return vec![one_panel(cells)];
    }
    let all = (0..longest).map(divided);
    all.min_by_key(Vec::len).unwrap_or_default()
}

fn one_panel<'a>(cells: &[&'a str]) -> Panel<'a> {
    let parts = |cell: &'a str| cell.split(", ").collect::<Vec<_>>();
    let is_common = |part: &&str| cells.iter().all(|cell| parts(cell).contains(part));
    let common: Vec<&str> = match cells {
        [first, _, ..] => parts(first).into_iter().filter(is_common).collect(),
        _ => Vec::new(),
    };
    let name = |cell: &&'a str| {
        let rest = parts(cell)
            .into_iter()
            .filter(|part| !common.contains(part));
        (rest.collect::<Vec<_>>().join(", "), *cell)
    };
    Panel {
        title: match common.is_empty() {
            true => "All cells".to_string(),
            false => common.join(", "),
        },
        groups: cells.iter().map(name).collect(),
    }
}

/// The rates of these counts over time, as corners of a line.
fn curve(counts: &Value, seconds: f64) -> Option<Vec<(f64, f64)>> {
    let step_seconds = SERIES_STEP_MS as f64 / 1e3;
    let mut begin = 0.0;
    let mut points = Vec::new();
    for (count, length) in rates(&numbers(counts)?, step_seconds, seconds, POINTS_MAX)? {
        let rate = count / length;
        points.push((begin, rate));
        begin += length;
        points.push((begin, rate));
    }
    Some(points)
}

fn series_charts(rows: &[DocumentRow<'_>], section: &mut Section) {
    let cells = distinct(rows.iter().map(|row| row.cell()));
    let mut charts = Vec::new();
    for cell in cells {
        let of_cell: Vec<DocumentRow<'_>> = rows
            .iter()
            .filter(|row| row.cell() == cell)
            .copied()
            .collect();
        let series = series_of(&of_cell);
        let line = |series: &Series| {
            let row = of_cell.iter().find(|row| row.contestant() == series.name)?;
            let (part, seconds) = row.series()?;
            Some((series.clone(), curve(&part["series"], seconds)?))
        };
        let lines: Vec<_> = series.iter().filter_map(line).collect();
        if !lines.is_empty() {
            charts.push(Block::Curves(Curves {
                title: cell.to_string(),
                x_unit: "seconds".to_string(),
                y_unit: "operations a second".to_string(),
                is_stacked: false,
                series: lines,
            }));
            charts.extend(shares(cell, &of_cell));
        }
    }
    if charts.is_empty() {
        return;
    }
    section.add(Block::Heading("Requests over time".to_string()));
    let text = "Of the run that is nearest to the median. Programs that report nothing of it are not drawn; runs of less \
                than two tenths of a second neither.";
    section.add(Block::Prose(text.to_string()));
    if charts.len() > SERIES_CHARTS_MAX {
        let more = charts.len() - SERIES_CHARTS_MAX;
        let text = format!("{more} charts more are left out; their figures are in the JSON.");
        section.add(Block::Prose(text));
        charts.truncate(SERIES_CHARTS_MAX);
    }
    section.blocks.extend(charts);
}

/// Returns the contestant, the allocations of its writes in each step, and the time that they took.
fn allocated(row: DocumentRow<'_>) -> Option<(&str, &Value, f64)> {
    let (part, seconds) = row.series()?;
    let allocated = &part["series-allocated"];
    let is_known = allocated.is_object();
    is_known.then_some((row.contestant(), allocated, seconds))
}

/// Returns a chart of the allocations by writes of our first contestant, over time.
fn shares(cell: &str, rows: &[DocumentRow<'_>]) -> Option<Block> {
    let (contestant, allocated, seconds) = rows.iter().copied().find_map(allocated)?;
    let parts = [
        ("cluster", "allocated a cluster"),
        ("subcluster", "allocated subclusters"),
        ("nothing", "allocated nothing"),
    ];
    // Steps at the end in which nothing was admitted are missing from the series.
    let steps = parts
        .iter()
        .filter_map(|(name, _)| Some(allocated[name].as_array()?.len()))
        .max()?;
    let of_part = |name: &str| {
        let mut counts = allocated[name].as_array()?.clone();
        counts.resize(steps, Value::from(0));
        curve(&Value::from(counts), seconds)
    };
    let names = parts.map(|(_, title)| (title.to_string(), Kind::Ours));
    let series = Series::numbered(names).into_iter().zip(parts);
    let series: Vec<_> = series
        .filter_map(|(series, (name, _))| Some((series, of_part(name)?)))
        .collect();
    (series.len() == parts.len()).then(|| {
        Block::Curves(Curves {
            title: format!("{cell}: what writes of {contestant} found"),
            x_unit: "seconds".to_string(),
            y_unit: "writes a second".to_string(),
            is_stacked: true,
            series,
        })
    })
}

/// All rows of a file system, by cell.
fn table((filesystem, rate): (&str, &str), rows: &[DocumentRow<'_>]) -> Table {
    let ratios: Vec<(&str, &str)> = RATIO_TITLES
        .into_iter()
        .filter(|(name, _)| rows.iter().any(|row| row.0[*name].is_number()))
        .collect();
    let figures = distinct(rows.iter().flat_map(|row| row.figures()));
    let numbers = [rate, "least", "most"]
        .into_iter()
        .chain(ratios.iter().map(|(_, title)| *title));
    let numbers = numbers.chain(figures.iter().copied());
    let mut columns = vec![("contestant", Align::Words)];
    columns.extend(numbers.map(|title| (title, Align::Numbers)));
    let series = series_of(rows);
    let row = |row: &DocumentRow<'_>| {
        let iops = row.spread("iops");
        let iops = iops.map(|iops| [iops.median, iops.least, iops.greatest]);
        let mut fields = vec![row.contestant().to_string()];
        let decimals = if iops.is_some_and(|all| all[0] < 10.0) {
            2
        } else {
            0
        };
        fields.extend((0..3).map(|index| field(iops.map(|all| all[index]), decimals)));
        let ratio = |(name, _): &(&str, &str)| row.0[*name].as_f64();
        fields.extend(
            ratios
                .iter()
                .map(|of| ratio(of).map_or(String::new(), |r| format!("{r:.2}"))),
        );
        let figure = |name: &&str| {
            row.spread(name)
                .map_or(String::new(), |s| rounded(s.median))
        };
        fields.extend(figures.iter().map(figure));
        let key = series.iter().find(|series| series.name == row.contestant());
        let row_of_table = TableRow {
            fields,
            key: key.map(|series| series.key),
            is_marked: row.is_outlier(),
        };
        (row.cell().to_string(), row_of_table)
    };
    let runs = rows.iter().map(|row| row.runs().count()).max().unwrap_or(0);
    let of_runs = match runs {
        1 => "one run".to_string(),
        _ => format!("medians of {runs} runs"),
    };
    let caption =
        format!("{filesystem}: {of_runs}; marked rows are below half of both their neighbours");
    Table::of(caption, &columns, rows.iter().map(row))
}

/// The command line of each contestant in the first cell that has it.
fn commands(document: Document<'_>, section: &mut Section) {
    let mut lines = Vec::new();
    let mut seen = Vec::new();
    for row in document.rows() {
        if let Some(command) = row.command().filter(|_| !seen.contains(&row.contestant())) {
            seen.push(row.contestant());
            lines.push(format!("# {}: {}\n{command}", row.contestant(), row.cell()));
        }
    }
    if !lines.is_empty() {
        section.add(Block::Output {
            title: "Command lines, one of each contestant".to_string(),
            text: lines.join("\n"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(cell: &str, contestant: &str, iops: &[f64]) -> Value {
        let run = |iops: &f64| {
            json!({
                "iops": iops,
                "CPU us": 12.5,
                "told": {
                    "seconds": 0.4,
                    "series": [10, 30, 20, 10],
                    "series-allocated": { "cluster": [10, 1], "subcluster": [0, 4], "nothing": [0, 25] },
                },
            })
        };
        json!({
            "filesystem": "ext4", "cell": cell, "contestant": contestant, "outlier": false,
            "times-qemu-img": 2.5, "command": format!("{contestant} bench"),
            "runs": iops.iter().map(run).collect::<Vec<_>>(),
        })
    }

    #[test]
    fn all_results_are_in_the_section() {
        let cell = "64K, empty, depth 32";
        let document = json!({
            "conditions": { "table": "steady" },
            "rows": [row(cell, "cowslip", &[100.0, 300.0, 200.0]), row(cell, "raw sparse", &[900.0])],
            "interrupted": true, "cells-finished": 1, "cells-planned": 7,
            "notes": ["a remark"],
        });
        let section = section("x", Document(&document));
        let warning = "Interrupted: 1 of 7 cells are finished.".to_string();
        assert_eq!(section.blocks[0], Block::Warning(warning));
        assert_eq!(section.blocks[1], Block::Prose("a remark".to_string()));
        let bar = section.bars()[0].groups[0].bars[0].unwrap();
        assert_eq!((bar.value, bar.least, bar.most), (200.0, 100.0, 300.0));
        let curves = section.blocks.iter().filter_map(|block| match block {
            Block::Curves(curves) => Some(curves),
            _ => None,
        });
        let curves: Vec<_> = curves.collect();
        assert_eq!(curves.len(), 2);
        assert_eq!(curves[0].series.len(), 2);
        assert_eq!(curves[1].series.len(), 3);
        let fields = &section.tables()[0].groups[0].rows[0].fields;
        assert_eq!(
            fields[..6],
            ["cowslip", "200", "100", "300", "2.50", "12.5"]
        );
    }

    #[test]
    fn an_empty_document_is_an_empty_section() {
        for document in [
            json!(null),
            json!([]),
            json!({ "rows": [{}] }),
            json!({ "rows": 3, "conditions": 4 }),
        ] {
            let html = crate::page::Page::new("x", vec![section("x", Document(&document))]).html();
            assert!(html.ends_with("</html>\n"));
        }
    }

    #[test]
    fn few_cells_are_one_chart_and_many_are_divided() {
        let few = [
            "4K, empty, depth 1, flush every 1",
            "64K, empty, depth 8, flush every 8",
        ];
        let panels_of = panels(&few);
        assert_eq!(panels_of.len(), 1);
        assert_eq!(panels_of[0].title, "empty");
        assert_eq!(panels_of[0].groups[1].0, "64K, depth 8, flush every 8");
        let mut cells = Vec::new();
        for state in ["empty", "backed"] {
            for size in ["4K", "8K", "16K", "32K", "64K", "64K/2K", "128K/4K"] {
                cells.push(format!("{size}, {state}, depth 32"));
            }
        }
        let names: Vec<&str> = cells.iter().map(String::as_str).collect();
        let divided = panels(&names);
        let titles: Vec<&str> = divided.iter().map(|panel| panel.title.as_str()).collect();
        assert_eq!(
            titles,
            [
                "plain clusters, empty, depth 32",
                "subclusters, empty, depth 32",
                "plain clusters, backed, depth 32",
                "subclusters, backed, depth 32",
            ]
        );
        assert_eq!(divided[1].groups[1].0, "128K/4K");
        let all: usize = divided.iter().map(|panel| panel.groups.len()).sum();
        assert_eq!(all, cells.len());
    }
}
