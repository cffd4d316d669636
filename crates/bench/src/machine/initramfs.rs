//! The guest's files: this program, the libraries that it is linked with, and the modules of the
//! kernel that a virtio disk needs, as an archive that the kernel unpacks into memory when it
//! boots.
//!
//! The archive is cpio's "newc": for each entry a head of 110 characters (a magic and 13 numbers of
//! 8 hexadecimal digits), the name with a zero byte, padding to 4 bytes, the contents, padding
//! again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_console::error::{CommandError, failed};

use super::init::MODULES;
use super::kernel::Kernel;
use crate::run::run;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";
/// Where libraries are that have no place of their own; `/lib` leads here, too.
const LIBRARIES: &str = "lib64";

/// Builds the archive with all files of the guest.
///
/// # Errors
/// A file cannot be read.
pub fn build(program: &Path, kernel: &Kernel) -> Result<Vec<u8>, CommandError> {
    let read = |path: &Path| fs::read(path).map_err(|e| failed("read", path, &e));
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", LIBRARIES] {
        archive.add(directory, DIRECTORY, &[]);
    }
    archive.add("lib", LINK, LIBRARIES.as_bytes());
    archive.add("init", PROGRAM, &read(program)?);
    for library in libraries(program)? {
        archive.add_with_parents(&library.place, &read(&library.file)?);
    }
    archive.add(MODULES, DIRECTORY, &[]);
    for module in kernel.modules() {
        let name = module.file_name().unwrap_or_default().to_string_lossy();
        archive.add(&format!("{MODULES}/{name}"), PROGRAM, &read(&module)?);
    }
    Ok(archive.finish())
}

/// An archive in the making.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: Vec<String>,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let length = |bytes: usize| u32::try_from(bytes).expect("files of a guest are small");
        let fields = [
            self.entries, // inode
            mode,
            0, // user
            0, // group
            1, // links
            0, // time
            length(contents.len()),
            0, // device, major and minor
            0,
            0, // device that it is, major and minor
            0,
            length(name.len() + 1),
            0, // checksum, of another kind of archive
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// A file for which directories may be missing.
    fn add_with_parents(&mut self, place: &Path, contents: &[u8]) {
        let place = place.to_string_lossy();
        let name = place.trim_start_matches('/');
        for (index, _) in name.match_indices('/') {
            let directory = &name[..index];
            // `lib` is a link to one.
            let known = ["lib", LIBRARIES].contains(&directory);
            if !known && !self.directories.iter().any(|made| made == directory) {
                self.directories.push(directory.to_string());
                self.add(directory, DIRECTORY, &[]);
            }
        }
        self.add(name, PROGRAM, contents);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add(TRAILER, 0, &[]);
        self.bytes
    }
}

/// A shared library.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Library {
    /// Where it is here.
    file: PathBuf,
    /// Where it is looked for in the guest.
    place: PathBuf,
}

/// The libraries that a program is linked with, the dynamic loader among them. The loader itself
/// tells; a program without one ignores the question and prints its version.
fn libraries(program: &Path) -> Result<Vec<Library>, CommandError> {
    let mut command = Command::new(program);
    command.env("LD_TRACE_LOADED_OBJECTS", "1").arg("--version");
    Ok(listed_libraries(&run(&mut command)?.output))
}

/// Lines of the loader: `NAME => PATH (ADDRESS)`, and `PATH (ADDRESS)` of what has its own place.
/// The kernel's own library has no path.
fn listed_libraries(text: &str) -> Vec<Library> {
    let libraries = text.lines().filter_map(|line| {
        let (name, _) = line.trim().rsplit_once(" (")?;
        let (place, file) = match name.split_once(" => ") {
            Some((name, file)) if !name.contains('/') => {
                (Path::new("/").join(LIBRARIES).join(name), file)
            }
            Some((place, file)) => (PathBuf::from(place), file),
            None => (PathBuf::from(name), name),
        };
        file.starts_with('/').then(|| Library {
            file: PathBuf::from(file),
            place,
        })
    });
    libraries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_heads_names_and_contents_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.add("dev", DIRECTORY, &[]);
        archive.add_with_parents(Path::new("/opt/a/b.so"), b"12345");
        archive.add_with_parents(Path::new("/opt/a/c.so"), b"");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let mut rest = &bytes[..];
        let mut entries = Vec::new();
        loop {
            let head = std::str::from_utf8(&rest[..110]).unwrap();
            assert_eq!(&head[..6], "070701");
            let field = |index: usize| {
                let digits = &head[6 + index * 8..14 + index * 8];
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (mode, length, name_length) = (field(1), field(6), field(11));
            let name = &rest[110..110 + name_length];
            assert_eq!(name.last(), Some(&0));
            let name = String::from_utf8_lossy(&name[..name_length - 1]).into_owned();
            let contents = (110 + name_length).next_multiple_of(4);
            let data = rest[contents..contents + length].to_vec();
            rest = &rest[(contents + length).next_multiple_of(4)..];
            if name == TRAILER {
                break;
            }
            entries.push((name, mode as u32, data));
        }
        assert!(rest.is_empty());
        let expected = [
            ("dev", DIRECTORY, ""),
            ("opt", DIRECTORY, ""),
            ("opt/a", DIRECTORY, ""),
            ("opt/a/b.so", PROGRAM, "12345"),
            ("opt/a/c.so", PROGRAM, ""),
        ];
        let expected =
            expected.map(|(name, mode, data)| (name.to_string(), mode, data.as_bytes().to_vec()));
        assert_eq!(entries, expected);
    }

    #[test]
    fn libraries_are_what_the_loader_lists_with_a_path() {
        let text = "\tlinux-vdso.so.1 (0x00007f5a)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc-2.31.so (0x00007f5b)\n\
                    \tlibodd.so => not found\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f5c)\n";
        let library = |place: &str, file: &str| Library {
            file: PathBuf::from(file),
            place: PathBuf::from(place),
        };
        let expected = [
            library("/lib64/libc.so.6", "/lib/x86_64-linux-gnu/libc-2.31.so"),
            library("/lib64/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
        ];
        assert_eq!(listed_libraries(text), expected);
        assert_eq!(listed_libraries("cowslip 0.1.0\n"), []);
    }
}
