//! The guest's files: this program, the libraries that it is linked with, and the modules of the
//! kernel that a virtio disk needs, as an archive that the kernel unpacks into memory when it
//! boots.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_console::error::{CommandError, failed};

use super::init::MODULES;
use super::kernel::Kernel;
use crate::run::run;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
/// Where libraries are that have no place of their own; `/lib` leads here, too.
const LIBRARIES: &str = "lib64";

/// Builds the archive with all files of the guest.
///
/// # Errors
/// A file cannot be read.
pub fn build(
    (program, tools): (&Path, &[PathBuf]),
    kernel: &Kernel,
) -> Result<Vec<u8>, CommandError> {
    let read = |path: &Path| fs::read(path).map_err(|e| failed("read", path, &e));
    let mut archive = Files::default();
    for directory in ["dev", "proc", "sys", "tmp", "mnt", LIBRARIES] {
        archive.add(directory, DIRECTORY, &[]);
    }
    archive.add("lib", LINK, LIBRARIES.as_bytes());
    archive.add("init", PROGRAM, &read(program)?);
    let mut needed = libraries(program)?;
    for tool in tools {
        archive.add_with_parents(tool, &read(tool)?);
        needed.extend(libraries(tool)?);
    }
    needed.sort_by(|a, b| a.place.cmp(&b.place));
    needed.dedup_by(|a, b| a.place == b.place);
    for library in needed {
        archive.add_with_parents(&library.place, &read(&library.file)?);
    }
    archive.add(MODULES, DIRECTORY, &[]);
    let mut modules = kernel.modules();
    if !tools.is_empty() {
        modules.extend(kernel.modules_of_file_systems());
    }
    for module in modules {
        let name = module.file_name().unwrap_or_default().to_string_lossy();
        archive.add(&format!("{MODULES}/{name}"), PROGRAM, &read(&module)?);
    }
    archive.archive().map_err(|e| failed("pack", program, &e))
}

/// Files with their names and modes, in the order in which they are made.
#[derive(Debug, Default)]
struct Files(Vec<(String, u32, Vec<u8>)>);

impl Files {
    fn add(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.0.push((name.to_string(), mode, contents.to_vec()));
    }

    /// A file for which directories may be missing.
    fn add_with_parents(&mut self, place: &Path, contents: &[u8]) {
        let place = place.to_string_lossy();
        let name = place.trim_start_matches('/');
        for (index, _) in name.match_indices('/') {
            let directory = &name[..index];
            // `lib` is a link to one.
            if !self.0.iter().any(|(made, ..)| made == directory) {
                self.add(directory, DIRECTORY, &[]);
            }
        }
        self.add(name, PROGRAM, contents);
    }

    fn archive(self) -> std::io::Result<Vec<u8>> {
        let entries = self.0.into_iter().map(|(name, mode, contents)| {
            let entry = cpio::NewcBuilder::new(&name).mode(mode);
            (entry, Cursor::new(contents))
        });
        cpio::write_cpio(entries, Vec::new())
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
/// lists them; a program without one ignores the question and prints its version.
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
    fn directories_come_before_their_files() {
        let mut files = Files::default();
        files.add("lib", LINK, LIBRARIES.as_bytes());
        for file in ["/opt/a/b.so", "/opt/a/c.so", "/lib/d.so"] {
            files.add_with_parents(Path::new(file), b"12345");
        }
        let names = files.0.iter().map(|(name, mode, _)| (name.as_str(), *mode));
        let expected = [
            ("lib", LINK),
            ("opt", DIRECTORY),
            ("opt/a", DIRECTORY),
            ("opt/a/b.so", PROGRAM),
            ("opt/a/c.so", PROGRAM),
            ("lib/d.so", PROGRAM),
        ];
        assert_eq!(names.collect::<Vec<_>>(), expected);
        let archive = files.archive().unwrap();
        let first = cpio::NewcReader::new(&archive[..]).unwrap();
        assert_eq!((first.entry().name(), first.entry().mode()), ("lib", LINK));
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
