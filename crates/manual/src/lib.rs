//! The manual: chapters in `manual/`, the documents in `docs/` and the reference of the command,
//! as static pages that refer to each other.
//!
//! [`Manual::load`] reads `manual/contents.md`, the list of pages in their order, and
//! [`Manual::write`] writes a directory that any web server, or none, can show. Markdown is
//! CommonMark with tables, and two additions in fenced blocks: a line `{{#include PATH}}` is the
//! text of a file of the repository, and a block `chart` draws columns of a table ([`chart`]).
//!
//! [`broken`] reads such a directory as a browser does and lists links that lead nowhere.
//! [`snippets`] has the fenced blocks, for tests that run them.
//!
//! May not know: images, verbs of the command, how the reference was made.

pub mod chart;
mod contents;
mod link;
mod manual;
mod markdown;
mod page;
mod snippet;
mod sources;
mod text;

pub use link::broken;
pub use manual::Manual;
pub use snippet::{Snippet, snippets};
pub use text::Result;
