//! The contents of a page of figures, independent of the bench: sections of prose, tables, charts
//! and facts. A bench makes [`Section`]s out of its results and knows nothing of HTML; [`html`]
//! writes all of them alike, [`chart`] draws them. A new kind of bench needs no change here:
//!
//! ```ignore
//! let mut section = Section::new("Allocation");
//! section.add(Block::Prose("1 GiB on fresh file systems.".to_string()));
//! section.add(Block::Table(table));   // numbers are formatted by the code that knows their unit
//! section.add(Block::Bars(bars));     // groups of bars, whiskers, linear or logarithmic
//! section.add(Block::Curves(curves)); // lines or stacked areas over time or anything else
//! page_file.write(&Page::new("cowslip bench allocate", vec![section]))?;
//! ```
//!
//! All text is escaped where it is written, so it may come from anywhere.

use cowslip_testbed::Spread;

pub mod chart;
pub mod file;
pub mod html;
pub mod palette;

pub use palette::{Key, Kind};

/// A document for people.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Subject.
    pub title: String,
    /// Line below the title: when, where, by what.
    pub subtitle: String,
    /// Warnings, which come before all else.
    pub warnings: Vec<String>,
    /// Sections in their order; with more than one there is a table of contents.
    pub sections: Vec<Section>,
}

impl Page {
    /// A page of these sections.
    pub fn new(title: &str, sections: Vec<Section>) -> Page {
        Page {
            title: title.to_string(),
            subtitle: String::new(),
            warnings: Vec::new(),
            sections,
        }
    }
}

/// A part of a page that the table of contents names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Its name.
    pub title: String,
    /// Contents.
    pub blocks: Vec<Block>,
}

impl Section {
    /// An empty one.
    pub fn new(title: &str) -> Section {
        Section {
            title: title.to_string(),
            blocks: Vec::new(),
        }
    }

    /// Adds a block at its end.
    pub fn add(&mut self, block: Block) {
        self.blocks.push(block);
    }
}

#[cfg(test)]
impl Section {
    pub fn tables(&self) -> Vec<&Table> {
        let tables = self.blocks.iter().filter_map(|block| match block {
            Block::Table(table) => Some(table),
            _ => None,
        });
        tables.collect()
    }

    pub fn bars(&self) -> Vec<&Bars> {
        let bars = self.blocks.iter().filter_map(|block| match block {
            Block::Bars(bars) => Some(bars),
            _ => None,
        });
        bars.collect()
    }
}

/// A piece of a section.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// A heading within the section.
    Heading(String),
    /// A paragraph; lines that are broken stay so.
    Prose(String),
    /// Warning to the reader.
    Warning(String),
    /// Names and what they are.
    Facts(Vec<(String, String)>),
    /// Rows and columns.
    Table(Table),
    /// Bars in groups.
    Bars(Bars),
    /// Lines or areas.
    Curves(Curves),
    /// Output of a program, below its name; folded away on a screen.
    Output {
        /// The program and its words.
        title: String,
        /// Text as it was printed.
        text: String,
    },
}

/// Content of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words, from the left.
    Words,
    /// Numbers, to the right.
    Numbers,
}

/// A table, its rows in groups that have names of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Caption.
    pub caption: String,
    /// Titles of the columns. The first holds the names of the rows.
    pub columns: Vec<(String, Align)>,
    /// The rows.
    pub groups: Vec<RowGroup>,
}

/// Rows that belong together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowGroup {
    /// Common name of the rows; empty for none.
    pub title: String,
    /// Rows in their order.
    pub rows: Vec<TableRow>,
}

/// A row of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableRow {
    /// Texts, one for each column.
    pub fields: Vec<String>,
    /// Its key in the charts, if it is in one.
    pub key: Option<Key>,
    /// Stands out.
    pub is_marked: bool,
}

impl Table {
    /// A table of these rows, each of the group that is named with it; groups come in the order of
    /// their first rows.
    pub fn of<R: Into<TableRow>>(
        caption: impl Into<String>,
        columns: &[(&str, Align)],
        rows: impl IntoIterator<Item = (String, R)>,
    ) -> Table {
        let mut groups: Vec<RowGroup> = Vec::new();
        for (title, row) in rows {
            let row = row.into();
            match groups.iter_mut().find(|group| group.title == title) {
                Some(group) => group.rows.push(row),
                None => groups.push(RowGroup {
                    title,
                    rows: vec![row],
                }),
            }
        }
        let columns = columns
            .iter()
            .map(|(title, align)| (title.to_string(), *align));
        Table {
            caption: caption.into(),
            columns: columns.collect(),
            groups,
        }
    }
}

impl From<Vec<String>> for TableRow {
    fn from(fields: Vec<String>) -> TableRow {
        TableRow {
            fields,
            ..TableRow::default()
        }
    }
}

/// A name with its colour.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Its colour.
    pub key: Key,
}

impl Series {
    /// Series of these names and kinds, numbered within their kinds.
    pub fn numbered(names: impl IntoIterator<Item = (String, Kind)>) -> Vec<Series> {
        let mut series: Vec<Series> = Vec::new();
        for (name, kind) in names {
            let index = series.iter().filter(|s| s.key.kind == kind).count();
            let key = Key { kind, index };
            series.push(Series { name, key });
        }
        series
    }
}

impl AsRef<Series> for Series {
    fn as_ref(&self) -> &Series {
        self
    }
}

/// How an axis of values is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Evenly, from 0.
    #[default]
    Linear,
    /// Powers of ten, for values that differ by orders of magnitude; 0 has no place there.
    Logarithmic,
}

/// A chart of bars in groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bars {
    /// Title.
    pub title: String,
    /// Unit, and whether more is better.
    pub unit: String,
    /// How its values are laid out.
    pub scale: Scale,
    /// Series in the order of the bars of a group.
    pub series: Vec<Series>,
    /// Groups from left to right.
    pub groups: Vec<BarGroup>,
}

/// Bars side by side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarGroup {
    /// Below them; broken into lines at blanks.
    pub name: String,
    /// Bars, one for each series, where there is one.
    pub bars: Vec<Option<Bar>>,
}

/// A value with its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Its height.
    pub value: f64,
    /// Where the whisker begins; the value itself for none.
    pub least: f64,
    /// Where it ends.
    pub most: f64,
}

impl From<Spread> for Bar {
    fn from(spread: Spread) -> Bar {
        Bar {
            value: spread.median,
            least: spread.least,
            most: spread.greatest,
        }
    }
}

impl Bars {
    /// Bars, each with the names of its group and of its series; both come in the order in which
    /// they are first named.
    pub fn of(
        (title, unit, scale): (String, &str, Scale),
        bars: impl IntoIterator<Item = (String, (String, Kind), Option<Bar>)>,
    ) -> Bars {
        let mut names: Vec<(String, Kind)> = Vec::new();
        let mut groups: Vec<BarGroup> = Vec::new();
        for (name, series, bar) in bars {
            let known = names.iter().position(|name| *name == series);
            let index = known.unwrap_or(names.len());
            if known.is_none() {
                names.push(series);
            }
            let group = match groups.iter().position(|group| group.name == name) {
                Some(group) => &mut groups[group],
                None => {
                    let bars = Vec::new();
                    groups.push(BarGroup { name, bars });
                    groups.last_mut().expect("it was just added")
                }
            };
            group.bars.resize(group.bars.len().max(index + 1), None);
            // The first of a name counts.
            group.bars[index] = group.bars[index].or(bar);
        }
        for group in &mut groups {
            group.bars.resize(names.len(), None);
        }
        Bars {
            title,
            unit: unit.to_string(),
            scale,
            series: Series::numbered(names),
            groups,
        }
    }
}

/// A chart of lines, or of areas on top of each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    /// Title.
    pub title: String,
    /// Unit of the horizontal axis.
    pub x_unit: String,
    /// Unit of the vertical axis.
    pub y_unit: String,
    /// Whether each is an area on top of those before it; all have the same places then.
    pub is_stacked: bool,
    /// Series with their points, from left to right.
    pub series: Vec<(Series, Vec<(f64, f64)>)>,
}

/// `12345.6` as `12 345.6`, with blanks that keep it on one line.
pub fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let digits = text.find('.').unwrap_or(text.len());
    let begin = text.find(|c: char| c.is_ascii_digit()).unwrap_or(0);
    let mut out = String::new();
    for (index, character) in text.char_indices() {
        let left = digits.saturating_sub(index);
        if index > begin && index < digits && left % 3 == 0 {
            out.push('\u{202f}');
        }
        out.push(character);
    }
    out
}

/// A number in about three digits.
pub fn rounded(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 || (size.fract() == 0.0 && size > 0.0) => 0,
        size if size >= 10.0 => 1,
        0.0 => 0,
        size if size >= 0.01 => 2,
        size => (-size.log10()).ceil().min(12.0) as usize,
    };
    grouped(value, decimals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_numbers_have_gaps() {
        let plain = |text: String| text.replace('\u{202f}', " ");
        assert_eq!(plain(grouped(1_234_567.0, 0)), "1 234 567");
        assert_eq!(plain(grouped(-1234.56, 1)), "-1 234.6");
        assert_eq!(plain(grouped(999.0, 0)), "999");
        assert_eq!(plain(rounded(0.126)), "0.13");
        assert_eq!(plain(rounded(35_211.4)), "35 211");
        assert_eq!(plain(rounded(4.0)), "4");
        assert_eq!(plain(rounded(0.0)), "0");
    }

    #[test]
    fn series_are_numbered_within_their_kinds() {
        let names = [("a", Kind::Ours), ("b", Kind::Peer), ("c", Kind::Ours)];
        let series = Series::numbered(names.map(|(name, kind)| (name.to_string(), kind)));
        let indices: Vec<usize> = series.iter().map(|s| s.key.index).collect();
        assert_eq!(indices, [0, 0, 1]);
    }
}
