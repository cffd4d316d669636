//! Markdown as the pages have it: how it is read, the anchors of headings, the names of pages.

use std::collections::BTreeMap;

use pulldown_cmark::{Options, Parser};

/// A reader of the pages' Markdown.
pub fn parser(markdown: &str) -> Parser<'_> {
    Parser::new_ext(markdown, Options::ENABLE_TABLES)
}

/// The file name of the page of a source: `docs/format.md` is `docs-format.html`, chapters and the
/// reference have their own names.
pub fn output_name(path: &str) -> String {
    let path = path.strip_prefix("manual/").unwrap_or(path);
    let stem = path.trim_end_matches(".md").replace('/', "-");
    format!("{stem}.html")
}

/// The anchors of a page's headings.
#[derive(Default)]
pub struct Anchors {
    used: BTreeMap<String, usize>,
}

impl Anchors {
    /// The anchor of the next heading: its words in lower case with hyphens between, and a number
    /// if the page has it already.
    pub fn next(&mut self, title: &str) -> String {
        let lower = title.to_lowercase();
        let kept = lower
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor = kept.collect::<String>().replace(' ', "-");
        let count = self.used.entry(anchor.clone()).or_default();
        *count += 1;
        match *count {
            1 => anchor,
            more => format!("{anchor}-{}", more - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_those_of_forges() {
        let mut anchors = Anchors::default();
        let title = "Why: `O_DIRECT` & \"holes\", 4.5 times";
        assert_eq!(anchors.next(title), "why-o_direct--holes-45-times");
        assert_eq!(anchors.next("Check"), "check");
        assert_eq!(anchors.next("Check"), "check-1");
    }
}
