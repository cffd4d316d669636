//! The file that a page is written to: refused before anything is measured if it cannot be written,
//! and never half of a page.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;

use super::Page;
use crate::private_files;

/// Where a page goes.
#[derive(Clone, Debug)]
pub struct PageFile {
    path: PathBuf,
}

impl PageFile {
    /// Takes a name, if a page can be written there.
    ///
    /// # Errors
    /// It is no regular file, or nothing can be written beside it.
    pub fn new(path: &Path) -> Result<PageFile, CommandError> {
        // The name may be a link: what it leads to is replaced, not the link.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let page = PageFile { path };
        if fs::metadata(&page.path).is_ok_and(|found| !found.is_file()) {
            return Err(page.failed(&io::Error::other("it is not a regular file")));
        }
        let temporary = page.temporary();
        let made = File::options()
            .write(true)
            .create_new(true)
            .open(&temporary);
        made.map_err(|e| page.failed(&e))?;
        fs::remove_file(&temporary).map_err(|e| page.failed(&e))?;
        Ok(page)
    }

    /// Replaces what was there by this page, as a whole.
    ///
    /// # Errors
    /// The file system's; what was there stays.
    pub fn write(&self, page: &Page) -> Result<(), CommandError> {
        let temporary = RemovedOnInterrupt::new(&self.temporary());
        let written = self.replace(&page.html(), temporary.path());
        written.map_err(|e| self.failed(&e))
    }

    /// Writes the page as [`PageFile::write`], for the thread that ends the process and holds the
    /// list of files that are removed then.
    ///
    /// # Errors
    /// The same.
    pub fn write_at_last(&self, page: &Page) -> io::Result<()> {
        // Another process may be writing the other just now.
        self.replace(&page.html(), &self.temporary().with_extension("last"))
    }

    fn replace(&self, text: &str, temporary: &Path) -> io::Result<()> {
        let write = || {
            let mut file = File::create(temporary)?;
            file.write_all(text.as_bytes())?;
            private_files::hand_over(&file)?;
            file.sync_all()?;
            fs::rename(temporary, &self.path)
        };
        write().inspect_err(|_| {
            // A file that was not made needs no removing.
            drop(fs::remove_file(temporary));
        })
    }

    /// Returns the name of a file in the same directory, so that it can be renamed.
    fn temporary(&self) -> PathBuf {
        let mut name = std::ffi::OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!(".{}.tmp", std::process::id()));
        self.path.with_file_name(name)
    }

    fn failed(&self, error: &io::Error) -> CommandError {
        let words = cowslip::error::system_words(error);
        CommandError::new(format!(
            "Could not write '{}': {words}",
            self.path.display()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        entries.map(|entry| name(entry.unwrap())).collect()
    }

    #[test]
    fn a_page_replaces_what_was_there_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.html");
        fs::write(&path, "old").unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let file = PageFile::new(&link).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        file.write(&Page::new("new", Vec::new())).unwrap();
        assert!(fs::read_to_string(&path).unwrap().contains("<h1>new</h1>"));
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let mut found = names(directory.path());
        found.sort();
        assert_eq!(found, ["link", "report.html"]);
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |path: &Path| PageFile::new(path).unwrap_err().to_string();
        assert!(refused(directory.path()).contains("not a regular file"));
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
        let nowhere = directory.path().join("nowhere/report.html");
        assert!(refused(&nowhere).contains("No such file"));
        assert!(refused(Path::new("/proc/report.html")).contains("/proc/report.html"));
        assert!(names(directory.path()).is_empty());
    }
}
