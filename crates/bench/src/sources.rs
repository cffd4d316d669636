//! Published figures of other projects beside ours: other machines, other years, other versions.
//! Only the differences between the rows of one column can be compared. The figures are in
//! `sources.json`.

use cowslip_testbed::Spread;
use serde::Deserialize;

use crate::document::Document;
use crate::page::{Align, Bar, Bars, Block, Kind, Scale, Section, Table, grouped};

/// A published table.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Source {
    /// The table of ours that measures the same.
    table: String,
    /// Subject.
    title: String,
    /// Author, medium and date.
    origin: String,
    /// The conditions, as far as they were published.
    conditions: String,
    /// Description of the rows.
    rows_are: String,
    /// Titles of its columns of figures, with their units.
    columns: Vec<String>,
    /// Titles of our columns beside them.
    ours: Vec<String>,
    /// Its rows.
    rows: Vec<SourceRow>,
}

/// A row of it; in the file its members in this order.
#[derive(Debug, Deserialize)]
struct SourceRow {
    /// Name in the source.
    name: String,
    /// Figures, one per column, as published; empty for none.
    figures: Vec<String>,
    /// How names of cells of ours begin that measure this; empty for none.
    cell: String,
    /// Contestants of ours beside it, one for each of our columns; empty for none.
    contestants: Vec<String>,
}

/// All of them, in the order in which pages show them.
fn sources() -> Vec<Source> {
    serde_json::from_str(include_str!("sources.json")).expect("the file is one of sources")
}

/// Ratio from which on figures differ by orders of magnitude.
const WIDE: f64 = 50.0;

/// Adds what sources there are of a table to its section: of those whose cells were measured, and
/// of those that have none.
pub fn add(document: Document<'_>, section: &mut Section) {
    let all = sources();
    let of_table = all.iter().filter(|source| source.table == document.table());
    let measured = |source: &&Source| {
        let has_cells = source.rows.iter().any(|row| !row.cell.is_empty());
        !has_cells
            || source
                .rows
                .iter()
                .any(|row| document.rows().any(|ours| row.measures(ours.cell())))
    };
    let sources: Vec<&Source> = of_table.filter(measured).collect();
    if sources.is_empty() {
        return;
    }
    section.add(Block::Heading("Beside those who asked first".to_string()));
    let text = "Their figures are of other machines, years and versions. What compares is how rows of one column differ.";
    section.add(Block::Prose(text.to_string()));
    for source in sources {
        let table = source.beside(document);
        section
            .blocks
            .extend(source.chart(document).map(Block::Bars));
        section.add(Block::Prose(format!(
            "Source: {}. {}",
            source.origin, source.conditions
        )));
        section.add(Block::Table(table));
    }
}

impl SourceRow {
    /// Whether a cell of this name measures the same. All sources with a depth have 32;
    /// without that they are held against it too.
    fn measures(&self, cell: &str) -> bool {
        let rest = cell.strip_prefix(&self.cell);
        let mut parts = cell.split(", ");
        let is_of_depth = parts.all(|part| !part.starts_with("depth ") || part == "depth 32");
        !self.cell.is_empty()
            && is_of_depth
            && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(','))
    }

    /// The median of ours in that column on a file system, in its first cell that measures this.
    fn here(&self, document: Document<'_>, filesystem: &str, column: usize) -> Option<f64> {
        let wanted = self
            .contestants
            .get(column)
            .filter(|name| !name.is_empty())?;
        let mut found = document.rows().filter(|row| {
            self.measures(row.cell())
                && row.filesystem() == filesystem
                && row.contestant() == *wanted
        });
        Some(found.next()?.spread("iops")?.median)
    }

    fn figure(&self, column: usize) -> Option<f64> {
        self.figures.get(column)?.parse().ok()
    }
}

impl Source {
    /// Columns of ours, for each file system.
    fn places<'a>(&self, filesystems: &[&'a str]) -> Vec<(&'a str, usize)> {
        let ours = |place| (0..self.ours.len()).map(move |ours| (place, ours));
        filesystems.iter().copied().flat_map(ours).collect()
    }

    /// Its figures, with ours of each file system beside them.
    fn beside(&self, document: Document<'_>) -> Table {
        let places = self.places(&document.filesystems());
        let titles = places.iter();
        let titles = titles.map(|(place, ours)| format!("{}, {place}", self.ours[*ours]));
        let titles: Vec<String> = titles.collect();
        let numbers = self.columns.iter().chain(&titles);
        let numbers = numbers.map(|title| (title.as_str(), Align::Numbers));
        let words = [(self.rows_are.as_str(), Align::Words)];
        let columns: Vec<(&str, Align)> = words.into_iter().chain(numbers).collect();
        let row = |row: &SourceRow| {
            let figures = row.figures.iter().enumerate().map(|(index, text)| {
                let number = row.figure(index);
                number.map_or(text.clone(), |number| grouped(number, 0))
            });
            let ours = places.iter().map(|(place, ours)| {
                let here = row.here(document, place, *ours);
                here.map_or(String::new(), |number| grouped(number, 0))
            });
            let name = [row.name.clone()].into_iter();
            let fields: Vec<String> = name.chain(figures).chain(ours).collect();
            (String::new(), fields)
        };
        Table::of(&*self.title, &columns, self.rows.iter().map(row))
    }

    /// Where a row is a hundred times another, an even axis shows nothing of the lesser.
    fn scale(&self) -> Scale {
        let columns = 0..self.columns.len();
        let rows = self.rows.iter();
        let figures = rows.flat_map(|row| columns.clone().filter_map(|column| row.figure(column)));
        match Spread::of(figures.collect()) {
            Some(all) if all.greatest > WIDE * all.least => Scale::Logarithmic,
            _ => Scale::Linear,
        }
    }

    /// The same as bars, where its figures are numbers and ours are beside them.
    fn chart(&self, document: Document<'_>) -> Option<Bars> {
        let is_drawn = self.rows.iter().all(|row| row.figure(0).is_some()) && !self.ours.is_empty();
        let places = self.places(&document.filesystems());
        let kind = |title: &str| match title {
            title if title.starts_with("Cowslip") => Kind::Ours,
            title if title.starts_with("QEMU") => Kind::Peer,
            _ => Kind::Yardstick,
        };
        let bar = |value: f64| Bar {
            value,
            least: value,
            most: value,
        };
        let bars = self.rows.iter().flat_map(|row| {
            let there = self.columns.iter().enumerate().map(|(index, title)| {
                let series = (format!("source: {title}"), Kind::Source);
                (row.name.clone(), series, row.figure(index).map(bar))
            });
            let here = places.iter().map(|(place, ours)| {
                let title = &self.ours[*ours];
                let series = (format!("{title}, {place}"), kind(title));
                let here = row.here(document, place, *ours);
                (row.name.clone(), series, here.map(bar))
            });
            there.chain(here).collect::<Vec<_>>()
        });
        let unit = "operations a second, more is better";
        is_drawn.then(|| Bars::of((self.title.clone(), unit, self.scale()), bars))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_row_has_a_figure_for_each_column() {
        for source in sources() {
            for row in &source.rows {
                assert_eq!(
                    row.figures.len(),
                    source.columns.len(),
                    "{} {}",
                    source.title,
                    row.name
                );
                let ours = if row.cell.is_empty() {
                    0
                } else {
                    source.ours.len()
                };
                assert_eq!(row.contestants.len(), ours, "{} {}", source.title, row.name);
            }
        }
    }

    /// Cells are found by the beginning of their names: of those that their tables have.
    #[test]
    fn each_cell_is_one_of_its_table() {
        use crate::tables::cell_names;
        for source in sources() {
            let Some(names) = cell_names(&source.table) else {
                continue;
            };
            for row in source.rows.iter().filter(|row| !row.cell.is_empty()) {
                let found = names.iter().any(|name| row.measures(name));
                assert!(
                    found,
                    "{} is no cell of {}: {names:?}",
                    row.cell, source.table
                );
            }
        }
    }

    #[test]
    fn ours_stand_beside_the_row_that_they_measure() {
        let of = |cell: &str, contestant: &str, iops: f64| {
            json!({
                "filesystem": "xfs", "cell": cell, "contestant": contestant, "runs": [{ "iops": iops }],
            })
        };
        let document = json!({
            "conditions": { "table": "subclusters" },
            "rows": [
                of("64K, backed, depth 1", "cowslip", 7.0),
                of("64K, backed, depth 32", "cowslip", 5000.0),
                of("64K, backed, depth 32", "qemu-img", 2000.0),
            ],
        });
        let mut section = Section::new("x");
        add(Document(&document), &mut section);
        let tables = section.tables();
        assert_eq!(tables.len(), 1, "the others measure other cells");
        let row = tables[0].groups[0]
            .rows
            .iter()
            .find(|row| row.fields[0] == "64 KB");
        let plain = row
            .unwrap()
            .fields
            .iter()
            .map(|field| field.replace('\u{202f}', ""));
        assert_eq!(
            plain.collect::<Vec<_>>(),
            ["64 KB", "1622", "1680", "5000", "2000"]
        );
        let prose = section.blocks.iter().any(|block| {
            matches!(block, Block::Prose(text) if text.starts_with("Source: Alberto Garcia"))
        });
        assert!(prose);
    }
}
