//! Fenced blocks of the pages: what they include, and what tests run.

use std::path::Path;

use pulldown_cmark::{CodeBlockKind, Event, Tag, TagEnd};

use crate::markdown::parser;
use crate::text::{self, Result};

/// A fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snippet {
    /// Path of its page from the root.
    pub page: String,
    /// Line of its first line, from 1.
    pub line: usize,
    /// First word behind the fence, such as `sh`.
    pub language: String,
    /// Further words, such as `run`.
    pub words: Vec<String>,
    /// The text as it is in the page.
    pub text: String,
}

/// The fenced blocks of a page.
pub fn snippets(path: &str, markdown: &str) -> Vec<Snippet> {
    let mut snippets: Vec<Snippet> = Vec::new();
    let mut is_inside = false;
    for (event, range) in parser(markdown).into_offset_iter() {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                let mut words = info.split_whitespace().map(str::to_string);
                let fence = markdown[..range.start].lines().count();
                is_inside = true;
                snippets.push(Snippet {
                    page: path.to_string(),
                    line: fence + 2,
                    language: words.next().unwrap_or_default(),
                    words: words.collect(),
                    text: String::new(),
                });
            }
            Event::Text(text) if is_inside => {
                if let Some(snippet) = snippets.last_mut() {
                    snippet.text.push_str(&text);
                }
            }
            Event::End(TagEnd::CodeBlock) => is_inside = false,
            _ => {}
        }
    }
    snippets
}

/// A block's text in which lines `{{#include PATH}}` are replaced by files below `root`.
pub fn included(root: &Path, block: &str) -> Result<String> {
    let mut whole = String::new();
    for line in block.lines() {
        let named = line.trim().strip_prefix("{{#include ");
        match named.and_then(|rest| rest.strip_suffix("}}")) {
            Some(path) => whole.push_str(text::read(&root.join(path.trim()))?.trim_end()),
            None => whole.push_str(line),
        }
        whole.push('\n');
    }
    Ok(whole)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // In a test a panic is the report.
mod tests {
    use super::*;

    #[test]
    fn blocks_have_lines_and_words() {
        let found = snippets(
            "a.md",
            "text\n\n```sh run\nfalse\n```\n\n    indented\n\n```\nx\n```",
        );
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].line, found[0].language.as_str()), (4, "sh"));
        assert_eq!(found[0].words, ["run"]);
        assert_eq!(found[0].text, "false\n");
        assert_eq!(found[1].text, "x\n");
    }

    #[test]
    fn a_file_is_included_or_named() {
        let dir = tempfile::tempdir().unwrap();
        text::write(&dir.path().join("a.c"), "int a;\n\n").unwrap();
        let whole = included(dir.path(), "{{#include a.c}}\n/* { */\n").unwrap();
        assert_eq!(whole, "int a;\n/* { */\n");
        let error = included(dir.path(), "{{#include b.c}}").unwrap_err();
        assert!(error.contains("b.c: No such file"), "{error}");
    }
}
