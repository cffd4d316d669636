//! One page: Markdown to HTML with anchors, links between pages, the navigation around it.

use std::fmt::Write as _;

use pulldown_cmark::{CodeBlockKind, CowStr, Event, HeadingLevel, Tag, TagEnd, html};

use crate::contents::{Contents, Entry};
use crate::markdown::{Anchors, output_name, parser};
use crate::sources::Sources;
use crate::text::Result;
use crate::text::escaped;
use crate::{chart, link, snippet};

/// A page's place in the manual.
pub struct Around<'a> {
    /// The list of all pages.
    pub contents: &'a Contents,
    /// The page.
    pub entry: &'a Entry,
    /// Its neighbours.
    pub before: Option<&'a Entry>,
    /// The next page.
    pub after: Option<&'a Entry>,
}

/// A heading, for the list of a page's sections.
struct Section {
    title: String,
    anchor: String,
}

/// The whole page.
pub fn html(sources: &Sources, around: &Around) -> Result<String> {
    let path = &around.entry.path;
    let markdown = sources.pages.get(path).ok_or("a page has a source")?;
    let mut events: Vec<Event> = parser(markdown).collect();
    let sections = anchored(&mut events);
    relinked(sources, path, &mut events)?;
    let events = blocks(sources, path, events)?;
    let mut body = String::new();
    html::push_html(&mut body, events.into_iter());
    let body = body
        .replace("<table>", "<div class=\"table\"><table>")
        .replace("</table>", "</table></div>");
    Ok(framed(around, &sections, &body))
}

/// Gives headings their anchors, as forges do; the sections of the second level.
fn anchored(events: &mut [Event]) -> Vec<Section> {
    let mut sections = Vec::new();
    let mut anchors = Anchors::default();
    for index in 0..events.len() {
        let Event::Start(Tag::Heading { level, .. }) = &events[index] else {
            continue;
        };
        let is_section = *level == HeadingLevel::H2;
        let title = heading_text(&events[index + 1..]);
        let anchor = anchors.next(&title);
        if let Event::Start(Tag::Heading { id, .. }) = &mut events[index] {
            *id = Some(CowStr::from(anchor.clone()));
        }
        if is_section {
            sections.push(Section { title, anchor });
        }
    }
    sections
}

fn heading_text(events: &[Event]) -> String {
    let mut title = String::new();
    for event in events {
        match event {
            Event::Text(text) | Event::Code(text) => title.push_str(text),
            Event::SoftBreak => title.push(' '),
            Event::End(TagEnd::Heading(_)) => break,
            _ => {}
        }
    }
    title
}

/// Leads links between sources to pages. A link to another file of the repository is left out, but
/// its text stays: such a file is not part of the manual.
fn relinked(sources: &Sources, path: &str, events: &mut Vec<Event>) -> Result<()> {
    let mut left_out = Vec::new();
    let mut is_kept = Vec::new();
    for (index, event) in events.iter_mut().enumerate() {
        match event {
            Event::Start(Tag::Link { dest_url, .. }) => {
                let target = link::target(sources, path, dest_url)?;
                is_kept.push(target.is_some());
                match target {
                    Some(target) => *dest_url = CowStr::from(target),
                    None => left_out.push(index),
                }
            }
            Event::End(TagEnd::Link) if is_kept.pop() == Some(false) => left_out.push(index),
            _ => {}
        }
    }
    let mut index = 0;
    events.retain(|_| {
        index += 1;
        !left_out.contains(&(index - 1))
    });
    Ok(())
}

/// Replaces fenced blocks by what they include, and charts by their drawings.
fn blocks<'a>(sources: &Sources, path: &str, events: Vec<Event<'a>>) -> Result<Vec<Event<'a>>> {
    let mut all = Vec::with_capacity(events.len());
    let mut block: Option<(String, String)> = None;
    for event in events {
        match (&mut block, event) {
            (None, Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info)))) => {
                let language = info.split_whitespace().next().unwrap_or_default();
                block = Some((language.to_string(), String::new()));
            }
            (Some((_, text)), Event::Text(more)) => text.push_str(&more),
            (Some((language, text)), Event::End(TagEnd::CodeBlock)) => {
                let drawn = match language.as_str() {
                    "chart" => chart::html(text, &|path| sources.pages.get(path)),
                    _ => code(sources, language, text),
                };
                let html = drawn.map_err(|error| format!("{path}: {error}"))?;
                all.push(Event::Html(CowStr::from(html)));
                block = None;
            }
            (_, event) => all.push(event),
        }
    }
    Ok(all)
}

fn code(sources: &Sources, language: &str, text: &str) -> Result<String> {
    let whole = escaped(&snippet::included(&sources.root, text)?);
    let language = escaped(language);
    Ok(format!(
        "<pre><code class=\"language-{language}\">{whole}</code></pre>\n"
    ))
}

/// A page's head, navigation, text and neighbours.
fn framed(around: &Around, sections: &[Section], body: &str) -> String {
    let title = escaped(&around.entry.title);
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title} - Cowslip</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <link rel=\"stylesheet\" href=\"manual.css\">\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#text\">To the text</a>\n"
    );
    html.push_str(&navigation(around, sections));
    write_line(&mut html, "<main id=\"text\">");
    html.push_str(body);
    write_line(&mut html, "<nav class=\"turn\" aria-label=\"Neighbours\">");
    for (entry, class) in [(around.before, "before"), (around.after, "after")] {
        if let Some(entry) = entry {
            let link = anchor_element(entry, &format!(" class=\"{class}\""));
            write_line(&mut html, &link);
        }
    }
    write_line(&mut html, "</nav>\n</main>\n</body>\n</html>");
    html
}

fn navigation(around: &Around, sections: &[Section]) -> String {
    let mut html = String::new();
    write_line(
        &mut html,
        "<nav class=\"contents\" aria-label=\"Contents\">",
    );
    write_line(
        &mut html,
        "<p class=\"name\"><a href=\"index.html\">Cowslip</a></p>",
    );
    for part in &around.contents.parts {
        let is_here = part.entries.iter().any(|e| e.path == around.entry.path);
        // The first part has no title, and its pages are always shown.
        let is_open = is_here || part.title.is_empty();
        if !part.title.is_empty() {
            let open = if is_open { " open" } else { "" };
            let title = escaped(&part.title);
            write_line(
                &mut html,
                &format!("<details{open}><summary>{title}</summary>"),
            );
        }
        write_line(&mut html, "<ul>");
        for entry in &part.entries {
            html.push_str("<li>");
            if entry.path == around.entry.path {
                html.push_str(&anchor_element(entry, " aria-current=\"page\""));
                html.push_str(&section_list(sections));
            } else {
                html.push_str(&anchor_element(entry, ""));
            }
            write_line(&mut html, "</li>");
        }
        write_line(&mut html, "</ul>");
        if !part.title.is_empty() {
            write_line(&mut html, "</details>");
        }
    }
    write_line(&mut html, "</nav>");
    html
}

fn section_list(sections: &[Section]) -> String {
    if sections.is_empty() {
        return String::new();
    }
    let mut html = String::from("<ul class=\"sections\">");
    for Section { title, anchor } in sections {
        let (title, anchor) = (escaped(title), escaped(anchor));
        // Writing into a string cannot fail.
        let _ok = write!(html, "<li><a href=\"#{anchor}\">{title}</a></li>");
    }
    html.push_str("</ul>");
    html
}

fn anchor_element(entry: &Entry, attributes: &str) -> String {
    let title = escaped(&entry.title);
    let name = output_name(&entry.path);
    format!("<a href=\"{name}\"{attributes}>{title}</a>")
}

fn write_line(html: &mut String, line: &str) {
    html.push_str(line);
    html.push('\n');
}
