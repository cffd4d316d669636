//! Images and files by name or by options: where formats, protocols and filters meet.

mod image_file;

pub use image_file::ImageFile;
