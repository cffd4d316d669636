//! The list of pages: parts, each with its pages in order.

use std::path::Path;

use crate::text::{self, Result};

/// The list's file.
pub const PATH: &str = "manual/contents.md";
/// Where links to the pages of the reference lead.
const REFERENCE: &str = "reference/";

/// A page of the list.
#[derive(Clone)]
pub struct Entry {
    /// Title in the navigation.
    pub title: String,
    /// Path of the source, from the root.
    pub path: String,
}

/// A part, such as the quick starts.
pub struct Part {
    /// Title, empty for the pages before the first one.
    pub title: String,
    /// Its pages.
    pub entries: Vec<Entry>,
}

/// The list.
pub struct Contents {
    /// The parts, in order.
    pub parts: Vec<Part>,
}

impl Contents {
    /// Reads the list: `## TITLE` begins a part, `- [TITLE](PATH)` is a page, whose path is
    /// relative to the list. `- (reference)` stands for the pages of `reference`, `- (documents)`
    /// for those of `documents` that the list does not name.
    pub fn parse(text: &str, reference: &[String], documents: &[Entry]) -> Result<Contents> {
        let mut parts = vec![Part {
            title: String::new(),
            entries: Vec::new(),
        }];
        for (index, line) in text.lines().enumerate() {
            if let Some(title) = line.strip_prefix("## ") {
                parts.push(Part {
                    title: title.to_string(),
                    entries: Vec::new(),
                });
                continue;
            }
            let Some(item) = line.strip_prefix("- ") else {
                continue;
            };
            let part = parts.last_mut().ok_or("there is a first part")?;
            if item == "(reference)" {
                part.entries.extend(reference.iter().map(|path| verb(path)));
                continue;
            }
            if item == "(documents)" {
                let is_named = |entry: &&Entry| text.contains(&format!("](../{})", entry.path));
                let others = documents.iter().filter(|entry| !is_named(entry));
                part.entries.extend(others.cloned());
                continue;
            }
            let entry = entry(item).ok_or(format!("{PATH}:{}: not a link", index + 1))?;
            part.entries.push(entry);
        }
        Ok(Contents { parts })
    }

    /// All pages in order.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.parts.iter().flat_map(|part| &part.entries)
    }
}

/// A page of a list's item.
fn entry(item: &str) -> Option<Entry> {
    let (title, path) = item.strip_prefix('[')?.split_once("](")?;
    let path = path.strip_suffix(')')?;
    let path = match path.strip_prefix("../") {
        Some(above) => above.to_string(),
        None => format!("manual/{path}"),
    };
    let title = title.to_string();
    Some(Entry { title, path })
}

/// A page of the reference; its name is the command's words, joined.
fn verb(path: &str) -> Entry {
    let name = text::file_name(path).trim_end_matches(".md");
    Entry {
        title: name.replacen('-', " ", 1),
        path: path.to_string(),
    }
}

/// The documents below `root`, by their headings.
pub fn documents(root: &Path) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for name in text::markdown_files(&root.join("docs"))? {
        let path = format!("docs/{name}");
        let markdown = text::read(&root.join(&path))?;
        let heading = markdown.lines().find_map(|line| line.strip_prefix("# "));
        let title = heading.unwrap_or(&name).to_string();
        entries.push(Entry { title, path });
    }
    Ok(entries)
}

/// The paths that the pages of the reference have, the overview first.
pub fn reference(directory: &Path) -> Result<Vec<String>> {
    let files = text::markdown_files(directory)?;
    if files.is_empty() {
        return Err(format!("{}: has no reference", directory.display()));
    }
    let paths = files.iter().map(|name| format!("{REFERENCE}{name}"));
    let mut paths: Vec<String> = paths.collect();
    // "cowslip.md" is the overview of "cowslip-check.md".
    paths.sort_by_key(|path| path.trim_end_matches(".md").to_string());
    Ok(paths)
}
