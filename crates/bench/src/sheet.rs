//! The table as it grows: the rows of a cell are printed when the cell is done.
//!
//! Widths are chosen before the rows are known: those of names from all names that may come, those
//! of numbers from their titles and a usual size. Which figures there are is known with the first
//! cell; if a later one has more, the titles are printed again.

use cowslip_console::error::CommandError;
use cowslip_console::progress::Progress;
use cowslip_load::SERIES_STEP_MS;
use cowslip_testbed::{Side, TextColumns};

use crate::cell::Cell;
use crate::document::{DocumentRow, numbers};

use crate::report::{self, Column, Row, comparisons};
use crate::reporter::{Made, Results};
use crate::sparkline::Sparkline;
use serde_json::Value;

/// Widths of the rate and of its spread: "123456", "123456-123456".
const RATE_WIDTHS: [usize; 2] = [7, 13];
/// Width of other numbers: "1234.56".
const NUMBER_WIDTH: usize = 7;
/// Mark after the rows of a cell that was measured again.
const AGAIN: &str = "(again)";

/// Where columns are.
#[derive(Debug)]
struct Layout {
    columns: TextColumns,
    /// The rate that runs are compared by.
    rate: Column,
    /// Titles of the ratios that occur.
    ratios: Vec<&'static str>,
    /// Figures that have occurred.
    figures: Vec<Column>,
}

impl Layout {
    fn new((places, cells): (&[String], &[Cell]), rate: Column) -> Layout {
        let all = cells.iter().flat_map(|cell| &cell.contestants);
        let all: Vec<_> = all.copied().collect();
        // In their own order, and only those that a single cell has.
        let mut ratios = comparisons(&all);
        let compared = |title: &&str| {
            let mut cells = cells.iter();
            cells.any(|cell| comparisons(&cell.contestants).contains(title))
        };
        ratios.retain(compared);
        let columns = TextColumns::default()
            .names("fs", places)
            .names("cell", cells.iter().map(Cell::name))
            .names("contestant", all.iter().map(|c| c.name()))
            .numbers([(rate.title, RATE_WIDTHS[0]), ("least-most", RATE_WIDTHS[1])])
            .numbers(ratios.iter().map(|title| (*title, NUMBER_WIDTH)));
        Layout {
            columns,
            rate,
            ratios,
            figures: Vec::new(),
        }
    }

    /// Makes room for the figures of these rows; those that are new come last.
    fn take_figures(&mut self, rows: &[Row]) {
        let runs = rows.iter().flat_map(|row| &row.runs);
        let fullest = runs.max_by_key(|run| run.figures.len());
        for (column, _) in fullest.iter().flat_map(|run| &run.figures) {
            if !self.figures.contains(column) {
                self.figures.push(*column);
                self.columns.push(column.title, NUMBER_WIDTH, Side::Right);
            }
        }
    }

    fn fields(&self, row: &Row, rows: &[Row]) -> Vec<String> {
        let mark = if row.is_outlier { "!" } else { "" };
        let decimals = self.rate.decimals;
        let spread = row.spread().map_or(String::new(), |iops| {
            format!("{:.decimals$}-{:.decimals$}", iops.least, iops.greatest)
        });
        let mut fields = vec![
            row.filesystem.clone(),
            row.cell.clone(),
            row.contestant.name(),
            format!("{mark}{:.decimals$}", row.iops()),
            spread,
        ];
        let mut push = |value: Option<f64>, decimals: usize| {
            fields.push(value.map_or(String::new(), |value| format!("{value:.decimals$}")));
        };
        for (title, ratio) in report::ratios(row, rows).titled() {
            if self.ratios.contains(&title) {
                push(ratio, 2);
            }
        }
        for column in &self.figures {
            push(row.median(*column), column.decimals);
        }
        fields
    }

    /// The rows of a cell, each with this word behind it; before them the titles, if they are new.
    fn rows(&mut self, rows: &[Row], word: &str) -> String {
        self.take_figures(rows);
        let mut text = String::new();
        for row in rows {
            let line = self.columns.row(&self.fields(row, rows));
            text += format!("{} {word}", line.trim_end()).trim_end();
            text.push('\n');
        }
        text
    }

    /// The series of a cell's rows, below the names of their contestants.
    fn series(&self, rows: &[Value]) -> String {
        let indent = self.columns.offset(2);
        let width = self.columns.offset(3) - indent - 2;
        let line = |row: DocumentRow<'_>| {
            let (part, seconds) = row.series()?;
            let step_seconds = SERIES_STEP_MS as f64 / 1e3;
            let line = Sparkline::of(&numbers(&part["series"])?, step_seconds, seconds)?;
            Some(format!(
                "{:indent$}{:<width$}  {}  {:.0} to {:.0} IOPS in {:.1} s each{}\n",
                "",
                row.contestant(),
                line.blocks,
                line.least,
                line.most,
                line.piece_seconds,
                shares(&part["series-allocated"]).unwrap_or_default(),
            ))
        };
        let rows = rows.iter().map(DocumentRow);
        rows.filter_map(line).collect()
    }
}

/// Which share of writes allocated space; the others found their data's place.
fn shares(allocated: &Value) -> Option<String> {
    let sum = |name: &str| Some(numbers(&allocated[name])?.iter().sum::<u64>() as f64);
    let (clusters, subclusters) = (sum("cluster")?, sum("subcluster")?);
    let percent = 100.0 / (clusters + subclusters + sum("nothing")?);
    percent.is_finite().then(|| {
        let (clusters, subclusters) = (clusters * percent, subclusters * percent);
        format!("; {clusters:.0} % took a cluster, {subclusters:.0} % subclusters")
    })
}

/// Rows that are printed while they are measured.
pub struct Sheet {
    results: Results,
    rows: Vec<Row>,
    layout: Layout,
    /// Whether a line below each row shows its series, where it has one.
    with_series: bool,
}

impl Sheet {
    /// Returns a sheet before anything is printed. The names of all places and all cells are known;
    /// each cell is measured at each place.
    pub fn new(
        results: Results,
        with_series: bool,
        (named, rate): ((&[String], &[Cell]), Column),
    ) -> Sheet {
        Sheet {
            results,
            rows: Vec::new(),
            layout: Layout::new(named, rate),
            with_series,
        }
    }

    /// Returns the rows so far.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The results, whose rows are this sheet's.
    pub fn results(&mut self) -> &mut Results {
        &mut self.results
    }

    /// A cell is done: takes its rows and prints them.
    pub fn add(&mut self, rows: Vec<Row>, progress: &Progress) {
        let first = self.rows.len();
        self.rows.extend(rows);
        self.results.finished += 1;
        self.print_rows(first, "", progress);
    }

    /// Changes rows from the one of this number on, and prints those of the cells that `change`
    /// names again.
    pub fn change(
        &mut self,
        first: usize,
        change: impl FnOnce(&mut [Row]) -> Vec<String>,
        progress: &Progress,
    ) {
        for cell in change(&mut self.rows[first..]) {
            let of_cell = |row: &Row| row.cell == cell;
            if let Some(index) = self.rows[first..].iter().position(of_cell) {
                self.print_rows(first + index, AGAIN, progress);
            }
        }
    }

    /// Prints the rows of one cell, the first of which has this number.
    fn print_rows(&mut self, first: usize, word: &str, progress: &Progress) {
        let all = &self.rows;
        self.results.rows = all.iter().map(|row| report::json(row, all)).collect();
        let rows = all[first..].chunk_by(|a, b| a.cell == b.cell);
        let rows = rows.into_iter().next().unwrap_or_default();
        let (layout, with_series) = (&mut self.layout, self.with_series);
        let of_cell: Vec<Value> = rows.iter().map(|row| report::json(row, rows)).collect();
        self.results.show(progress, || {
            let text = layout.rows(rows, word);
            match with_series {
                true => text + &layout.series(&of_cell),
                false => text,
            }
        });
    }

    /// Prints the end, with the failure if that was the outcome. Returns the results.
    ///
    /// # Errors
    /// The page cannot be written.
    pub fn finish(self, outcome: Result<(), CommandError>) -> Result<Made, CommandError> {
        self.results.finish(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Backing, CellLoad, Contestant, RawFile, Shape, Subclusters};
    use crate::report::{Measurement, column};

    fn cells() -> Vec<Cell> {
        let of = |cluster_bytes, contestants: &[Contestant]| {
            Cell::new(
                Shape::new(cluster_bytes, Subclusters::Off, Backing::None),
                CellLoad::writes(1, 32, 4096),
                contestants.to_vec(),
            )
        };
        let ours = Contestant::Cowslip("auto");
        let raw = Contestant::Raw(RawFile::Allocated);
        vec![
            of(4 << 10, &[ours, Contestant::QemuImg]),
            of(128 << 10, &[ours, raw]),
        ]
    }

    fn row(cell: &Cell, contestant: Contestant, iops: &[f64]) -> Row {
        let mut row = Row::new("ext4", &cell.name(), contestant);
        row.runs = iops
            .iter()
            .map(|iops| Measurement {
                iops: *iops,
                figures: vec![(column("CPU us", 1), 1.25)],
                output: serde_json::Value::Null,
                command: None,
            })
            .collect();
        row
    }

    #[test]
    fn ratios_are_those_that_a_single_cell_has() {
        let cells = cells();
        let mut layout = Layout::new((&["ext4".to_string()], &cells), column("IOPS", 0));
        let mut text = String::new();
        for (cell, iops) in cells
            .iter()
            .zip([[1.0, 2.0, 3.0], [98765.0, 123_456.0, 1e5]])
        {
            let contestants = cell.contestants.iter();
            let rows: Vec<Row> = contestants.map(|c| row(cell, *c, &iops)).collect();
            text += &layout.rows(&rows, AGAIN);
        }
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[1].contains("1.00") && !lines[2].contains("1.00"));
        assert!(lines[0].contains("x QEMU") && lines[0].contains("x first"));
        assert!(!lines[0].contains("x written"), "{text}");
        assert!(lines[3].contains("98765-123456"), "{text}");
        assert!(lines[3].ends_with("1.2 (again)"), "{text}");
    }

    #[test]
    fn titles_are_printed_again_when_there_are_more() {
        let cells = cells();
        let mut layout = Layout::new((&["ext4".to_string()], &cells), column("IOPS", 0));
        let mut rows = [row(&cells[0], Contestant::QemuImg, &[5.0])];
        let titled = |text: &str| text.starts_with("fs ");
        assert!(titled(&layout.rows(&rows, "")));
        assert!(!titled(&layout.rows(&rows, "")));
        rows[0].runs[0].add(column("extents", 0), Some(3.0));
        let text = layout.rows(&rows, "");
        assert!(titled(&text) && text.contains("CPU us  extents"), "{text}");
    }

    #[test]
    fn the_series_of_the_median_run_is_drawn() {
        let cells = cells();
        let layout = Layout::new((&["ext4".to_string()], &cells), column("IOPS", 0));
        let mut row = row(&cells[0], Contestant::Cowslip("auto"), &[10.0, 500.0, 90.0]);
        for (run, series) in row.runs.iter_mut().zip([[1, 1], [2, 2], [8, 4]]) {
            run.output = serde_json::json!({
                "seconds": 0.2,
                "series": series,
                "series-allocated": { "cluster": [6, 0], "subcluster": [2, 1], "nothing": [0, 3] },
            });
        }
        let text = layout.series(&[report::json(&row, &[])]);
        let expected =
            "cowslip        █▅  40 to 80 IOPS in 0.1 s each; 50 % took a cluster, 25 % subclusters";
        assert_eq!(text.trim(), expected);
    }
}
