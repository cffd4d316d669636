//! A page as one HTML document: its style and its charts are in it, it has no script, and it asks nobody for
//! anything (its own content policy forbids that to whatever might be smuggled in). Names of files, cells and devices may
//! be hostile; all text goes through [`escaped`].

use std::fmt::Write;

use super::{
    Align, Bars, Block, Curves, Key, Page, Scale, Section, Series, Table, TableRow, chart, palette,
    visible,
};

const STYLE: &str = include_str!("page.css");

/// Text for an element or an attribute. What a terminal or a browser would obey, controls and marks that turn the
/// direction of writing, becomes visible.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            character => out.push(visible(character)),
        }
    }
    out
}

/// A document that is being written.
#[derive(Default)]
struct Document {
    out: String,
    /// Charts so far: their titles need names of their own.
    charts: usize,
}

impl Page {
    /// The whole document.
    pub fn html(&self) -> String {
        let mut document = Document::default();
        let title = escaped(&self.title);
        document.push(&format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <title>{title}</title>\n<style>\n{}{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n",
            palette::style()
        ));
        if !self.subtitle.is_empty() {
            document.element("p", "subtitle", &self.subtitle);
        }
        document.push("</header>\n");
        document.warnings(&self.warnings);
        if self.sections.len() > 1 {
            document.contents(&self.sections);
        }
        document.push("<main>\n");
        for (index, section) in self.sections.iter().enumerate() {
            document.section(index, section);
        }
        document.push("</main>\n</body>\n</html>\n");
        document.out
    }
}

impl Document {
    fn push(&mut self, html: &str) {
        self.out += html;
    }

    /// An element of a class, with this text.
    fn element(&mut self, name: &str, class: &str, text: &str) {
        let class = match class.is_empty() {
            true => String::new(),
            false => format!(" class=\"{class}\""),
        };
        let text = escaped(text);
        self.push(&format!("<{name}{class}>{text}</{name}>\n"));
    }

    fn contents(&mut self, sections: &[Section]) {
        self.push("<nav aria-label=\"Contents\">\n<h2>Contents</h2>\n<ol>\n");
        for (index, section) in sections.iter().enumerate() {
            let title = escaped(&section.title);
            self.push(&format!(
                "<li><a href=\"#section-{index}\">{title}</a></li>\n"
            ));
        }
        self.push("</ol>\n</nav>\n");
    }

    fn section(&mut self, index: usize, section: &Section) {
        self.push(&format!("<section id=\"section-{index}\">\n"));
        self.element("h2", "", &section.title);
        let is_chart = |block: &Block| matches!(block, Block::Bars(_) | Block::Curves(_));
        for blocks in section.blocks.chunk_by(|a, b| is_chart(a) && is_chart(b)) {
            // Small ones stand side by side where there is room.
            let are_charts = blocks.iter().all(is_chart);
            if are_charts {
                self.push("<div class=\"charts\">\n");
            }
            for block in blocks {
                self.block(block);
            }
            if are_charts {
                self.push("</div>\n");
            }
        }
        self.push("</section>\n");
    }

    fn block(&mut self, block: &Block) {
        match block {
            Block::Heading(text) => self.element("h3", "", text),
            Block::Prose(text) => self.element("p", "prose", text),
            Block::Warning(text) => self.warning(text),
            Block::Facts(facts) => self.facts(facts),
            Block::Table(table) => self.table(table),
            Block::Bars(bars) => self.bars(bars),
            Block::Curves(curves) => self.curves(curves),
            Block::Output { title, text } => {
                let title = escaped(title);
                self.push(&format!(
                    "<details>\n<summary>{title}</summary>\n<pre tabindex=\"0\">"
                ));
                // A line feed after the tag would not be shown.
                self.push(&format!("\n{}</pre>\n</details>\n", escaped(text)));
            }
        }
    }

    fn warning(&mut self, text: &str) {
        let text = escaped(text);
        self.push(&format!(
            "<p class=\"warning\"><strong>Note:</strong> {text}</p>\n"
        ));
    }

    fn warnings(&mut self, warnings: &[String]) {
        if let [only] = warnings {
            self.warning(only);
        } else if !warnings.is_empty() {
            self.push("<div class=\"warning\">\n<strong>Note:</strong>\n<ul>\n");
            for warning in warnings {
                self.element("li", "", warning);
            }
            self.push("</ul>\n</div>\n");
        }
    }

    fn facts(&mut self, facts: &[(String, String)]) {
        self.push("<dl>\n");
        for (name, value) in facts {
            let (name, value) = (escaped(name), escaped(value));
            self.push(&format!("<div><dt>{name}</dt><dd>{value}</dd></div>\n"));
        }
        self.push("</dl>\n");
    }

    fn table(&mut self, table: &Table) {
        let caption = escaped(&table.caption);
        self.push(&format!(
            "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{caption}\">\n<table>\n\
             <caption>{caption}</caption>\n<thead>\n<tr>"
        ));
        for (title, align) in &table.columns {
            let class = class_of(*align);
            let title = escaped(title);
            self.push(&format!("<th scope=\"col\"{class}>{title}</th>"));
        }
        self.push("</tr>\n</thead>\n");
        for group in &table.groups {
            self.push("<tbody>\n");
            if !group.title.is_empty() {
                let (columns, title) = (table.columns.len(), escaped(&group.title));
                self.push(&format!(
                    "<tr class=\"group\"><th scope=\"rowgroup\" colspan=\"{columns}\">{title}</th></tr>\n"
                ));
            }
            for row in &group.rows {
                self.row(table, row);
            }
            self.push("</tbody>\n");
        }
        self.push("</table>\n</div>\n");
    }

    fn row(&mut self, table: &Table, row: &TableRow) {
        self.push(match row.is_marked {
            true => "<tr class=\"marked\">",
            false => "<tr>",
        });
        let fields = row.fields.iter().zip(&table.columns);
        for (index, (field, (_, align))) in fields.enumerate() {
            let text = escaped(field);
            match (index, row.key) {
                (0, Some(key)) => {
                    let key = key_mark(key);
                    self.push(&format!("<th scope=\"row\"{}>{}{text}</th>", key.0, key.1));
                }
                (0, None) => self.push(&format!("<th scope=\"row\">{text}</th>")),
                _ => {
                    let class = class_of(*align);
                    self.push(&format!("<td{class}>{text}</td>"));
                }
            }
        }
        self.push("</tr>\n");
    }

    /// A chart: its title, what is counted, its keys, and the drawing.
    fn figure(&mut self, title: &str, unit: &str, series: &[&Series], drawings: &[String]) {
        self.push("<figure>\n<figcaption>");
        self.element("strong", "", title);
        self.element("span", "unit", unit);
        self.push("</figcaption>\n<ul class=\"legend\">\n");
        for series in series {
            let (class, mark) = key_mark(series.key);
            let name = escaped(&series.name);
            self.push(&format!("<li{class}>{mark}{name}</li>\n"));
        }
        let label = escaped(title);
        self.push(&format!(
            "</ul>\n<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{label}\">\n"
        ));
        for drawing in drawings {
            self.push(drawing);
        }
        self.push("</div>\n</figure>\n");
    }

    fn bars(&mut self, bars: &Bars) {
        let mut described = format!(
            "Bars, in each group in the order of the legend; {}.",
            bars.unit
        );
        for group in &bars.groups {
            write!(described, " {}:", group.name).expect("a string takes all");
            let of_group = bars.series.iter().zip(&group.bars);
            for (series, bar) in of_group.filter_map(|(series, bar)| Some((series, bar.as_ref()?)))
            {
                let value = super::rounded(bar.value);
                write!(described, " {} {value},", series.name).expect("a string takes all");
            }
        }
        let scale = match bars.scale {
            Scale::Linear => "",
            Scale::Logarithmic => "; the axis is logarithmic",
        };
        let has_spread = |bar: &super::Bar| bar.least < bar.most;
        let mut shown = bars.groups.iter().flat_map(|group| &group.bars).flatten();
        let spread = match shown.any(has_spread) {
            true => "; whiskers from the least to the most of the runs",
            false => "",
        };
        let unit = format!("{}{scale}{spread}", bars.unit);
        let drawings = chart::bars(bars);
        let drawings = self.titled(&bars.title, described.trim_end_matches(','), drawings);
        let series: Vec<&Series> = bars.series.iter().collect();
        self.figure(&bars.title, &unit, &series, &drawings);
    }

    fn curves(&mut self, curves: &Curves) {
        let form = match curves.is_stacked {
            true => "areas on top of each other",
            false => "lines",
        };
        let unit = format!("{} over {}; {form}", curves.y_unit, curves.x_unit);
        let series: Vec<&Series> = curves.series.iter().map(|(series, _)| series).collect();
        let names: Vec<&str> = series.iter().map(|series| series.name.as_str()).collect();
        let described = format!("{unit}: {}.", names.join(", "));
        let drawings = self.titled(&curves.title, &described, vec![chart::curves(curves)]);
        self.figure(&curves.title, &unit, &series, &drawings);
    }

    /// The drawings with what a screen reader says of them.
    fn titled(&mut self, title: &str, description: &str, drawings: Vec<String>) -> Vec<String> {
        let (title, description) = (escaped(title), escaped(description));
        let with_title = |drawing: String| {
            self.charts += 1;
            let number = self.charts;
            let attributes = format!(
                "<svg role=\"img\" aria-labelledby=\"title-{number}\" aria-describedby=\"desc-{number}\" "
            );
            let drawing = drawing.replacen("<svg ", &attributes, 1);
            let titles = format!(
                ">\n<title id=\"title-{number}\">{title}</title>\n<desc id=\"desc-{number}\">{description}</desc>"
            );
            // The first is the end of the opening tag: its attributes are numbers.
            drawing.replacen('>', &titles, 1)
        };
        drawings.into_iter().map(with_title).collect()
    }
}

fn class_of(align: Align) -> &'static str {
    match align {
        Align::Words => "",
        Align::Numbers => " class=\"n\"",
    }
}

/// The class of what has this key, and its coloured mark.
fn key_mark(key: Key) -> (String, &'static str) {
    let class = format!(" class=\"{}\"", palette::class(key));
    (class, "<span class=\"key\" aria-hidden=\"true\"></span>")
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
        let svgs = html.matches("<svg ").count();
        assert_eq!(svgs, 4);
        assert_eq!(
            html.matches("<svg role=\"img\" aria-labelledby").count(),
            svgs
        );
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
