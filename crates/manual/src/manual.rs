//! A manual as a whole: reading its sources, writing its pages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::contents::{self, Contents, Entry};
use crate::sources::Sources;
use crate::text::{self, Result};
use crate::{markdown, page};

/// A manual whose sources have been read.
pub struct Manual {
    contents: Contents,
    sources: Sources,
}

impl Manual {
    /// Reads the pages that `manual/contents.md` below `root` lists, and those of `reference`: a
    /// directory of Markdown files, one for each verb.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or is listed twice.
    pub fn load(root: &Path, reference: &Path) -> Result<Manual> {
        let verbs = contents::reference(reference)?;
        let contents = Contents::parse(
            &text::read(&root.join(contents::PATH))?,
            &verbs,
            &contents::documents(root)?,
        )?;
        let mut pages = BTreeMap::new();
        for entry in contents.entries() {
            let source = match verbs.contains(&entry.path) {
                true => reference.join(text::file_name(&entry.path)),
                false => root.join(&entry.path),
            };
            let text = text::read(&source)?;
            if pages.insert(entry.path.clone(), text).is_some() {
                return Err(format!("{}: lists {} twice", contents::PATH, entry.path));
            }
        }
        let root = root.to_path_buf();
        let sources = Sources { root, pages };
        Ok(Manual { contents, sources })
    }

    /// The paths of the pages' sources from the root, with their Markdown.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.sources.pages.iter();
        pairs.map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Writes the pages and their style sheet into `directory`, which is made.
    ///
    /// # Errors
    ///
    /// A file cannot be written; a link leads to no page and no file of the repository; a chart
    /// names a table or a column that is not there.
    pub fn write(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        let entries: Vec<&Entry> = self.contents.entries().collect();
        for (index, entry) in entries.iter().enumerate() {
            let around = page::Around {
                contents: &self.contents,
                entry,
                before: index.checked_sub(1).map(|index| entries[index]),
                after: entries.get(index + 1).copied(),
            };
            let html = page::html(&self.sources, &around)?;
            text::write(&directory.join(markdown::output_name(&entry.path)), &html)?;
        }
        text::write(&directory.join("manual.css"), include_str!("manual.css"))
    }
}
