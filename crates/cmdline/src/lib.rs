//! Words of a command line that the verbs, the servers and the daemon read alike: images and
//! objects such as secrets, options of a job, the files of new images, and files of text beside
//! them.
//!
//! Under QEMU's names of programs, options are read as the C library's getopt reads them.
//!
//! May not know: any verb, any server, table entries.

pub mod bitmaps;
pub mod compaction;
pub mod getopt;
pub mod job;
pub mod new_file;
pub mod open;
pub mod repair_text;
pub mod strtol;
pub mod text_file;
pub mod trace;
