//! Where files are on their devices, and where a guest's disk is in them.
//!
//! Each file is walked once: its mapping records are summed up as they come. They are kept in
//! memory only where a second look needs them: where several files are held beside each other,
//! where a qcow2 image is joined with them, where a picture is drawn. A single raw file of any
//! number of extents takes a few megabytes.
//!
//! `host.rs` asks the system; `guest.rs` reads a qcow2 image's tables; `perfect.rs`, `summary.rs`,
//! `sequential.rs`, `interleave.rs`, `join.rs` and `draw.rs` decide, without I/O; `text.rs`,
//! `json.rs` and `svg.rs` put it in words. The definitions of all figures are in docs/extents.md.
//!
//! May not know: NBD, the command's verbs and how they open images; who wants a report opens them
//! ([`Viewer::open`]).

mod draw;
mod figures;
mod guest;
mod host;
mod interleave;
mod join;
mod json;
mod look;
mod perfect;
mod print;
mod report;
mod sequential;
mod summary;
mod svg;
mod text;
mod view;

pub use figures::{Figures, Inside, Whole, figures, whole};
pub use guest::ImageFile;
pub use host::{AlignedFile, Method, other_than_file};
pub use perfect::Perfect;
pub use print::{Show, When};
pub use view::{Keep, Opened, Viewer};
