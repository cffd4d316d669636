//! The sources of all pages.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// The sources of all pages.
pub struct Sources {
    /// The repository.
    pub root: PathBuf,
    /// Markdown of each page, by its path from the root.
    pub pages: BTreeMap<String, String>,
}
