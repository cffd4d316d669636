//! Files of text, whose errors name them, and text within HTML.

use std::fs;
use std::path::Path;

/// An operation of this crate; the error is for a person, and names the file.
pub type Result<T> = std::result::Result<T, String>;

/// Reads a file.
pub fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The names of the Markdown files of a directory, sorted.
pub fn markdown_files(directory: &Path) -> Result<Vec<String>> {
    files(directory, ".md")
}

/// The names of a directory's files with this end, sorted.
pub fn files(directory: &Path, end: &str) -> Result<Vec<String>> {
    let error = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        let name = name.to_string_lossy();
        if name.ends_with(end) {
            names.push(name.into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// A path's last part.
pub fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Text as HTML, within elements and in quotes.
pub fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            _ => html.push(c),
        }
    }
    html
}
