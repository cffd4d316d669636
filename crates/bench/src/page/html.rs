//! A page as one HTML document: its style and its charts are in it, it has no script, and it asks
//! nobody for anything (its own content policy forbids that to whatever might be smuggled in).
//! Names of files, cells and devices may be hostile; the templates escape all text.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    Align, Bars, Block, Curves, Page, Scale, Section, Series, Table, TableRow, chart, palette,
};

const STYLE: &str = include_str!("page.css");
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// Returns a visible substitute for a character that a terminal or a browser would obey: controls,
/// and marks that turn the direction of writing.
fn visible(character: char) -> char {
    match character {
        '\n' | '\t' => character,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => '\u{fffd}',
        character if character.is_control() => '\u{fffd}',
        character => character,
    }
}

impl Page {
    /// The whole document.
    pub fn html(&self) -> String {
        let markup = html! {
            (DOCTYPE) "\n"
            html lang="en" {
                head { "\n"
                    meta charset="utf-8"; "\n"
                    meta http-equiv="Content-Security-Policy" content=(POLICY); "\n"
                    meta name="viewport" content="width=device-width, initial-scale=1"; "\n"
                    meta name="color-scheme" content="light dark"; "\n"
                    title { (self.title) } "\n"
                    style { "\n" (PreEscaped(STYLE)) } "\n"
                } "\n"
                body { "\n"
                    header {
                        h1 { (self.title) } "\n"
                        @if !self.subtitle.is_empty() { p.subtitle { (self.subtitle) } }
                    } "\n"
                    (warnings(&self.warnings))
                    @if self.sections.len() > 1 { (contents(&self.sections)) }
                    main { "\n"
                        @for (index, section) in self.sections.iter().enumerate() {
                            section id={ "section-" (index) } { "\n"
                                h2 { (section.title) } "\n"
                                (blocks(&section.blocks))
                            } "\n"
                        }
                    } "\n"
                }
            } "\n"
        };
        markup.into_string().chars().map(visible).collect()
    }
}

fn warning(text: &str) -> Markup {
    html! { p.warning { strong { "Note:" } " " (text) } "\n" }
}

fn warnings(warnings: &[String]) -> Markup {
    html! {
        @if let [only] = warnings {
            (warning(only))
        } @else if !warnings.is_empty() {
            div.warning {
                strong { "Note:" }
                ul { @for warning in warnings { li { (warning) } "\n" } }
            } "\n"
        }
    }
}

fn contents(sections: &[Section]) -> Markup {
    html! {
        nav aria-label="Contents" {
            h2 { "Contents" } "\n"
            ol {
                @for (index, section) in sections.iter().enumerate() {
                    li { a href={ "#section-" (index) } { (section.title) } } "\n"
                }
            }
        } "\n"
    }
}

/// A table or a chart; what is too wide is scrolled for itself.
fn scrolled(label: &str, inner: &Markup) -> Markup {
    html! { div.scroll role="region" tabindex="0" aria-label=(label) { "\n" (inner) } "\n" }
}

fn table(table: &Table) -> Markup {
    let rows = html! {
        table { "\n"
            caption { (table.caption) } "\n"
            thead { tr {
                @for (title, align) in &table.columns {
                    th scope="col" class=[class_of(*align)] { (title) }
                }
            } } "\n"
            @for group in &table.groups {
                tbody { "\n"
                    @if !group.title.is_empty() {
                        tr.group {
                            th scope="rowgroup" colspan=(table.columns.len()) { (group.title) }
                        } "\n"
                    }
                    @for row in &group.rows { (table_row(table, row)) }
                } "\n"
            }
        }
    };
    scrolled(&table.caption, &rows)
}

fn table_row(table: &Table, row: &TableRow) -> Markup {
    html! {
        tr class=[row.is_marked.then_some("marked")] {
            @for (index, (field, (_, align))) in row.fields.iter().zip(&table.columns).enumerate() {
                @if index > 0 {
                    td class=[class_of(*align)] { (field) }
                } @else if let Some(key) = row.key {
                    th scope="row" class=(palette::class(key)) { (mark()) (field) }
                } @else {
                    th scope="row" { (field) }
                }
            }
        } "\n"
    }
}

fn class_of(align: Align) -> Option<&'static str> {
    (align == Align::Numbers).then_some("n")
}

/// A mark in the colour of the class that it stands in.
fn mark() -> Markup {
    html! { span.key aria-hidden="true" {} }
}

fn blocks(blocks: &[Block]) -> Markup {
    let is_chart = |block: &Block| matches!(block, Block::Bars(_) | Block::Curves(_));
    html! {
        @for blocks in blocks.chunk_by(|a, b| is_chart(a) && is_chart(b)) {
            // Small ones stand side by side where there is room.
            @if blocks.iter().all(is_chart) {
                div.charts { "\n" @for one in blocks { (block(one)) } } "\n"
            } @else {
                @for one in blocks { (block(one)) }
            }
        }
    }
}

fn block(block: &Block) -> Markup {
    match block {
        Block::Heading(text) => html! { h3 { (text) } "\n" },
        Block::Prose(text) => html! { p.prose { (text) } "\n" },
        Block::Warning(text) => warning(text),
        Block::Facts(facts) => html! {
            dl { "\n"
                @for (name, value) in facts { div { dt { (name) } dd { (value) } } "\n" }
            } "\n"
        },
        Block::Table(rows) => table(rows),
        Block::Bars(bars) => bar_chart(bars),
        Block::Curves(curves) => curve_chart(curves),
        // A line feed after the tag is not shown.
        Block::Output { title, text } => html! {
            details { summary { (title) } pre tabindex="0" { "\n" (text) } } "\n"
        },
    }
}

/// A chart: its title, what is counted, its keys, and the drawing.
fn figure(
    (title, unit): (&str, &str),
    series: impl Iterator<Item = impl AsRef<Series>>,
    drawing: &Markup,
) -> Markup {
    html! {
        figure { "\n"
            figcaption { strong { (title) } "\n" span.unit { (unit) } } "\n"
            ul.legend { "\n"
                @for series in series {
                    li class=(palette::class(series.as_ref().key)) {
                        (mark()) (series.as_ref().name)
                    } "\n"
                }
            } "\n"
            (scrolled(title, drawing))
        } "\n"
    }
}

fn bar_chart(bars: &Bars) -> Markup {
    let scale = match bars.scale {
        Scale::Linear => "",
        Scale::Logarithmic => "; lengths are logarithmic",
    };
    let mut shown = bars.groups.iter().flat_map(|group| &group.bars).flatten();
    let spread = match shown.any(|bar| bar.least < bar.most) {
        true => "; lines from the least to the most of the runs",
        false => "",
    };
    let unit = format!("{}{scale}{spread}", bars.unit);
    figure((&bars.title, &unit), bars.series.iter(), &chart::bars(bars))
}

fn curve_chart(curves: &Curves) -> Markup {
    let form = match curves.is_stacked {
        true => "areas on top of each other",
        false => "lines",
    };
    let unit = format!("{} over {}; {form}", curves.y_unit, curves.x_unit);
    let series = curves.series.iter().map(|(series, _)| series);
    figure((&curves.title, &unit), series, &chart::curves(curves))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Bar, BarGroup, Kind, RowGroup};

    const HOSTILE: &str = "</title><script>alert(1)</script>\"'&\u{7}\u{202e}";

    fn hostile() -> Page {
        let name = HOSTILE.to_string();
        let series = Series::numbered([(name.clone(), Kind::Ours)]);
        let mut section = Section::new(HOSTILE);
        section.add(Block::Heading(name.clone()));
        section.add(Block::Prose(name.clone()));
        section.add(Block::Warning(name.clone()));
        section.add(Block::Facts(vec![(name.clone(), name.clone())]));
        section.add(Block::Table(Table {
            caption: name.clone(),
            columns: vec![(name.clone(), Align::Words), (name.clone(), Align::Numbers)],
            groups: vec![RowGroup {
                title: name.clone(),
                rows: vec![TableRow {
                    fields: vec![name.clone(), name.clone()],
                    key: Some(series[0].key),
                    is_marked: true,
                }],
            }],
        }));
        section.add(Block::Bars(Bars {
            title: name.clone(),
            unit: name.clone(),
            scale: Scale::Linear,
            series: series.clone(),
            groups: vec![BarGroup {
                name: name.clone(),
                bars: vec![Some(Bar {
                    value: 3.0,
                    least: 2.0,
                    most: 4.0,
                })],
            }],
        }));
        section.add(Block::Curves(Curves {
            title: name.clone(),
            x_unit: name.clone(),
            y_unit: name.clone(),
            is_stacked: false,
            series: vec![(series[0].clone(), vec![(0.0, 1.0), (1.0, 2.0)])],
        }));
        section.add(Block::Output {
            title: name.clone(),
            text: name,
        });
        let mut page = Page::new(HOSTILE, vec![section.clone(), section]);
        page.subtitle = HOSTILE.to_string();
        page.warnings = vec![HOSTILE.to_string()];
        page
    }

    #[test]
    fn names_cannot_break_out_of_their_elements() {
        let html = hostile().html();
        assert!(!html.contains("<script"), "{html}");
        assert!(!html.contains(['\u{7}', '\u{202e}']));
        assert!(html.contains("&lt;script&gt;"));
    }

    /// Elements that are opened are closed, in order.
    #[test]
    fn the_document_is_well_formed() {
        let html = hostile().html();
        let body = &html[html.find("<html").unwrap()..];
        let mut open: Vec<&str> = Vec::new();
        let style = body.find("<style>").unwrap() + 1..body.find("</style>").unwrap();
        for (index, tag) in body.match_indices('<').filter(|(i, _)| !style.contains(i)) {
            let tag = &body[index + tag.len()..];
            let tag = &tag[..tag.find('>').unwrap()];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "{open:?}");
            } else if !tag.ends_with('/') && !tag.starts_with("meta ") {
                open.push(tag.split([' ', '\n']).next().unwrap());
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn a_page_is_read_aloud_too() {
        let html = hostile().html();
        assert!(html.contains("scope=\"col\"") && html.contains("scope=\"row\""));
        assert!(html.contains("scope=\"rowgroup\" colspan=\"2\""));
        // Two sections, each with a drawing; bars are a table of words and numbers.
        assert_eq!(html.matches("<svg ").count(), 2);
        assert_eq!(html.matches("<svg role=\"img\" aria-label=\"").count(), 2);
        let mut ids: Vec<&str> = html
            .match_indices(" id=\"")
            .map(|(at, found)| html[at + found.len()..].split('"').next().unwrap())
            .collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count, "each has a name of its own");
    }

    #[test]
    fn it_asks_nobody_for_anything() {
        let html = hostile().html().replace("http://www.w3.org/2000/svg", "");
        let html = html.replace("http-equiv", "");
        for word in ["http", "src=", "url(", "@import", "<link"] {
            assert!(!html.contains(word), "{word}");
        }
    }
}
