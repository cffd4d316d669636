//! Links: where a link between sources leads, and which links of finished
//! pages are broken.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::markdown::output_name;
use crate::sources::Sources;
use crate::text::{self, Result};

/// Where a link of the source `path` leads among the pages; `None` if it leads to a file of the
/// repository that is no page.
pub fn target(sources: &Sources, path: &str, url: &str) -> Result<Option<String>> {
    let is_elsewhere = url.contains("://") || url.starts_with("mailto:");
    if is_elsewhere || url.starts_with('#') {
        return Ok(Some(url.to_string()));
    }
    let (file, anchor) = match url.split_once('#') {
        Some((file, anchor)) => (file, format!("#{anchor}")),
        None => (url, String::new()),
    };
    let named = joined(path, file).ok_or(format!("{path}: {url}: leads out of the repository"))?;
    if sources.pages.contains_key(&named) {
        return Ok(Some(format!("{}{anchor}", output_name(&named))));
    }
    if sources.root.join(&named).exists() {
        return Ok(None);
    }
    Err(format!("{path}: {url}: there is no such page or file"))
}

/// The path from the root of a file that a source names relatively.
fn joined(path: &str, relative: &str) -> Option<String> {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in relative.split('/') {
        match part {
            ".." => {
                parts.pop()?;
            }
            "." | "" => {}
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The links of the pages in `directory` that lead to no page or no element there. Links to other
/// hosts are not followed.
///
/// # Errors
///
/// The directory or a file cannot be read.
pub fn broken(directory: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    for name in text::files(directory, ".html")? {
        let html = text::read(&directory.join(&name))?;
        pages.insert(name, html);
    }
    let anchors: BTreeMap<&str, BTreeSet<&str>> = pages
        .iter()
        .map(|(name, html)| (name.as_str(), attribute(html, " id=\"").collect()))
        .collect();
    let mut findings = Vec::new();
    for (name, html) in &pages {
        for url in attribute(html, " href=\"").chain(attribute(html, " src=\"")) {
            if url.contains("://") || url.starts_with("mailto:") || url.starts_with("data:") {
                continue;
            }
            let (file, anchor) = url.split_once('#').unwrap_or((url, ""));
            let file = if file.is_empty() { name } else { file };
            let leads = match anchors.get(file) {
                Some(there) => anchor.is_empty() || there.contains(anchor),
                None => anchor.is_empty() && directory.join(file).is_file(),
            };
            if !leads {
                findings.push(format!("{name}: {url}"));
            }
        }
    }
    Ok(findings)
}

/// The values of an attribute in HTML.
fn attribute<'a>(html: &'a str, begins: &str) -> impl Iterator<Item = &'a str> {
    let starts: Vec<usize> = html.match_indices(begins).map(|(at, _)| at).collect();
    let length = begins.len();
    let values = starts.into_iter().map(move |at| &html[at + length..]);
    values.filter_map(|rest| rest.split('"').next())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // In a test a panic is the report.
mod tests {
    use super::*;

    #[test]
    fn paths_are_joined_within_the_repository() {
        assert_eq!(joined("docs/a.md", "b.md").unwrap(), "docs/b.md");
        assert_eq!(joined("docs/a.md", "../README.md").unwrap(), "README.md");
        assert_eq!(joined("README.md", "../x"), None);
    }

    #[test]
    fn a_link_to_nothing_is_broken() {
        let dir = tempfile::tempdir().unwrap();
        let page = "<h2 id=\"here\"></h2><a href=\"#here\"></a><a href=\"#there\"></a>\
                    <a href=\"b.html#here\"></a><a href=\"none.html\"></a><a href=\"x.css\"></a>\
                    <a href=\"https://example.org/#x\"></a>";
        text::write(&dir.path().join("a.html"), page).unwrap();
        text::write(&dir.path().join("b.html"), "<h2 id=\"here\"></h2>").unwrap();
        text::write(&dir.path().join("x.css"), "").unwrap();
        let broken = broken(dir.path()).unwrap();
        assert_eq!(broken, ["a.html: #there", "a.html: none.html"]);
    }
}
