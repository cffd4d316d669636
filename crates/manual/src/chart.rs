//! Charts: horizontal bars of columns of a table that a page has, so that a figure is in one place.
//!
//! ```text
//! table: docs/performance.md#check 1
//! label: file system; image
//! bars: ms; qemu-img
//! rows: ext4; cold
//! names: Cowslip; qemu-img
//! title: Milliseconds, less is better
//! ```
//!
//! `table` is a page with the anchor of a heading, and which of the tables behind it (1 if left
//! out). Columns are named as in the table's head; a name that is there twice means the first.
//! `names` are shown instead of the columns', if there are any. `rows` are words that a row's cells
//! must have, all of them.

use std::fmt::Write as _;

use pulldown_cmark::{Event, Tag, TagEnd};

use crate::markdown::{Anchors, parser};
use crate::text::{Result, escaped};

/// Description of a chart.
struct Chart<'a> {
    page: &'a str,
    anchor: &'a str,
    number: usize,
    labels: Vec<&'a str>,
    bars: Vec<&'a str>,
    names: Vec<&'a str>,
    rows: Vec<&'a str>,
    title: &'a str,
}

/// A table's cells; the first row is its head.
type Table = Vec<Vec<String>>;

/// Draws a chart of this description; `source` has the Markdown of a page.
pub fn html<'a>(description: &str, source: &dyn Fn(&str) -> Option<&'a String>) -> Result<String> {
    let chart = parse(description)?;
    let markdown = source(chart.page).ok_or(format!("chart: no page {}", chart.page))?;
    let tables = tables(markdown, chart.anchor);
    let table = tables.get(chart.number - 1);
    let table = table.ok_or(format!("chart: no table behind #{}", chart.anchor))?;
    draw(&chart, table)
}

fn parse(description: &str) -> Result<Chart<'_>> {
    let value = |key: &str| {
        let mut lines = description.lines();
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':').map(str::trim))
    };
    let need = |key: &str| value(key).ok_or(format!("chart: has no '{key}:'"));
    let table = need("table")?;
    let (page, rest) = table
        .split_once('#')
        .ok_or("chart: a table has an anchor")?;
    let (anchor, number) = rest.split_once(' ').unwrap_or((rest, "1"));
    let bars = list(need("bars")?);
    Ok(Chart {
        page,
        anchor,
        number: number.parse().map_err(|_| "chart: tables are numbered")?,
        labels: list(need("label")?),
        names: value("names").map_or_else(|| bars.clone(), list),
        bars,
        rows: value("rows").map(list).unwrap_or_default(),
        title: need("title")?,
    })
}

/// The parts of a list with semicolons; names of columns have commas.
fn list(text: &str) -> Vec<&str> {
    text.split(';').map(str::trim).collect()
}

/// The tables between the heading with this anchor and the next one of its level or above.
fn tables(markdown: &str, anchor: &str) -> Vec<Table> {
    let mut anchors = Anchors::default();
    let mut tables: Vec<Table> = Vec::new();
    let mut within = None;
    let mut heading: Option<String> = None;
    let mut cell: Option<String> = None;
    for event in parser(markdown) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(level)) => {
                let is_it = anchors.next(&heading.take().unwrap_or_default()) == anchor;
                if is_it {
                    within = Some(level);
                } else if within.is_some_and(|of| level <= of) {
                    within = None;
                }
            }
            Event::Start(Tag::Table(_)) if within.is_some() => tables.push(Vec::new()),
            Event::Start(Tag::TableHead | Tag::TableRow) if within.is_some() => {
                tables
                    .last_mut()
                    .into_iter()
                    .for_each(|t| t.push(Vec::new()));
            }
            Event::Start(Tag::TableCell) => cell = Some(String::new()),
            Event::End(TagEnd::TableCell) => {
                let row = tables.last_mut().and_then(|table| table.last_mut());
                if let (Some(_), Some(row)) = (within, row) {
                    row.push(cell.take().unwrap_or_default());
                }
            }
            Event::Text(text) | Event::Code(text) => {
                for open in [&mut heading, &mut cell].into_iter().flatten() {
                    open.push_str(&text);
                }
            }
            _ => {}
        }
    }
    tables
}

/// The number of a cell: digits may be in groups.
fn number(cell: &str) -> Option<f64> {
    let digits: String = cell.chars().filter(|c| !c.is_whitespace()).collect();
    digits
        .parse()
        .ok()
        .filter(|number: &f64| number.is_finite())
}

fn draw(chart: &Chart, table: &Table) -> Result<String> {
    let (head, rows) = table.split_first().ok_or("chart: the table is empty")?;
    let column = |name: &&str| {
        let place = head.iter().position(|cell| cell == name);
        place.ok_or(format!("chart: the table has no column '{name}': {head:?}"))
    };
    let labels: Vec<usize> = chart.labels.iter().map(column).collect::<Result<_>>()?;
    let bars: Vec<usize> = chart.bars.iter().map(column).collect::<Result<_>>()?;
    let is_chosen =
        |row: &&Vec<String>| chart.rows.iter().all(|word| row.iter().any(|c| c == word));
    let rows: Vec<&Vec<String>> = rows.iter().filter(is_chosen).collect();
    let value = |row: &[String], bar: usize| row.get(bar).and_then(|cell| number(cell));
    let values = rows
        .iter()
        .flat_map(|row| bars.iter().filter_map(|bar| value(row, *bar)));
    let most = values.fold(0.0, f64::max);
    if most <= 0.0 {
        return Err(format!("chart: no numbers in {:?}", chart.bars));
    }
    let mut html = format!("<figure><figcaption>{}", escaped(chart.title));
    for (index, name) in chart.names.iter().enumerate() {
        let name = escaped(name);
        let _ok = write!(html, " <span class=\"key bar{index}\"></span> {name}");
    }
    html.push_str("</figcaption>\n<div class=\"chart\">\n");
    for row in rows {
        let words: Vec<&str> = labels
            .iter()
            .filter_map(|at| row.get(*at))
            .map(String::as_str)
            .collect();
        let _ok = write!(
            html,
            "<div class=\"label\">{}</div><div>",
            escaped(&words.join(", "))
        );
        for (index, bar) in bars.iter().enumerate() {
            if let Some(number) = value(row, *bar) {
                let width = (number / most * 80.0).max(0.3);
                let text = escaped(row[*bar].trim());
                let _ok = write!(
                    html,
                    "<div class=\"row\"><span class=\"bar bar{index}\" style=\"width:{width:.1}%\">\
                     </span> {text}</div>"
                );
            }
        }
        html.push_str("</div>\n");
    }
    html.push_str("</div></figure>\n");
    Ok(html)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // In a test a panic is the report.
mod tests {
    use super::*;

    const PAGE: &str = "# P\n\n| x |\n| - |\n| 9 |\n\n## Two\n\n| fs | a | b |\n| - | - | - |\n\
                        | ext4 | 1 000 | 500 |\n| XFS | 250 | |\n\n### Deeper\n\n## Other\n\n\
                        | fs | a |\n| - | - |\n| q | 1 |\n";

    fn drawn(description: &str) -> Result<String> {
        let page = PAGE.to_string();
        html(description, &|path| (path == "p.md").then_some(&page))
    }

    #[test]
    fn bars_are_as_long_as_the_numbers_of_the_table() {
        let html = drawn("table: p.md#two\nlabel: fs\nbars: a; b\ntitle: T").unwrap();
        for part in [
            "width:80.0%\"></span> 1 000",
            "width:40.0%\"></span> 500",
            "width:20.0%",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert_eq!(html.matches("class=\"row\"").count(), 3);
        let html = drawn("table: p.md#two\nlabel: fs\nbars: a\nrows: XFS\ntitle: T").unwrap();
        assert_eq!(html.matches("class=\"row\"").count(), 1);
    }

    #[test]
    fn what_is_not_there_is_named() {
        for (description, words) in [
            (
                "table: q.md#two\nlabel: fs\nbars: a\ntitle: T",
                "no page q.md",
            ),
            (
                "table: p.md#two 2\nlabel: fs\nbars: a\ntitle: T",
                "no table behind #two",
            ),
            (
                "table: p.md#two\nlabel: fs\nbars: c\ntitle: T",
                "no column 'c'",
            ),
            (
                "table: p.md#two\nlabel: fs\nbars: fs\ntitle: T",
                "no numbers",
            ),
            ("table: p.md#two\nlabel: fs\nbars: a", "no 'title:'"),
        ] {
            let error = drawn(description).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
