//! [`FakeCeph`]: Ceph's libraries over plain files, with faults, made by the system's C compiler.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The source; its first lines say what the files beside the library mean.
const SOURCE: &str = include_str!("ceph/fake.c");

/// Libraries in a directory, with the images that they show.
#[derive(Debug)]
pub struct FakeCeph {
    directory: PathBuf,
}

impl FakeCeph {
    /// Makes the libraries in a directory, and a pool `rbd`; `None` if there is no C compiler.
    ///
    /// # Errors
    /// The compiler's or the system's.
    pub fn make(directory: &Path) -> io::Result<Option<FakeCeph>> {
        FakeCeph::make_with(directory, &[])
    }

    /// As [`FakeCeph::make`], with definitions for the compiler: `WITHOUT_WRITE_ZEROES`.
    ///
    /// # Errors
    /// As there.
    pub fn make_with(directory: &Path, defined: &[&str]) -> io::Result<Option<FakeCeph>> {
        fs::create_dir_all(directory.join("pools/rbd"))?;
        let source = directory.join("fake.c");
        fs::write(&source, SOURCE)?;
        let mut compiler = Command::new("cc");
        compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1"]);
        compiler.args(["-shared", "-fPIC", "-pthread", "-o", "librbd.so.1"]);
        compiler.args(defined.iter().map(|name| format!("-D{name}")));
        compiler.arg("fake.c").arg("-ldl").current_dir(directory);
        let output = match compiler.output() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            output => output?,
        };
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(io::Error::other(text));
        }
        symlink("librbd.so.1", directory.join("librados.so.2"))?;
        let ceph = FakeCeph {
            directory: directory.to_path_buf(),
        };
        ceph.put("ceph.conf", "mon_host = 192.0.2.1\n")?;
        Ok(Some(ceph))
    }

    /// The directory of the libraries.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file of an image, `POOL/IMAGE[@SNAPSHOT]`.
    pub fn image(&self, name: &str) -> PathBuf {
        self.directory.join("pools").join(name)
    }

    /// Writes one of the files beside the libraries: `faults`, `hold`, `deaf` and so on.
    ///
    /// # Errors
    /// The system's.
    pub fn put(&self, name: &str, text: &str) -> io::Result<()> {
        fs::write(self.directory.join(name), text)
    }

    /// Removes such a file.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.directory.join(name))
    }

    /// The calls that were made.
    ///
    /// # Errors
    /// The system's.
    pub fn calls(&self) -> io::Result<Vec<String>> {
        let text = match fs::read_to_string(self.directory.join("log")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text?,
        };
        Ok(text.lines().map(str::to_string).collect())
    }
}
