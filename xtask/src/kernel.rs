//! The kernel of the guests that `cowslip bench guest` boots: Debian's for clouds. Its package is
//! only unpacked, into the target directory: installing it would be a matter for the machine's boot
//! loader.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

/// It depends on the newest kernel of its kind.
pub const PACKAGE: &str = "linux-image-cloud-amd64";

/// Where it is unpacked; `tests/bench.rs` looks there.
fn directory() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    run::root().join(target).join("guest-kernel")
}

/// Whether one is installed or unpacked.
pub fn is_there() -> bool {
    let is_kernel = |name: &str| name.starts_with("vmlinuz-") && name.contains("cloud");
    [Path::new("/boot"), &directory().join("boot")]
        .into_iter()
        .flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten())
        .any(|entry| is_kernel(&entry.file_name().to_string_lossy()))
}

/// Downloads and unpacks it.
///
/// # Errors
/// The package is not to be had.
pub fn unpack() -> Result<(), String> {
    println!("xtask: unpacking the newest kernel of {PACKAGE}");
    let depends = run::output(Command::new("apt-cache").args(["depends", PACKAGE]))?;
    let package = kernel_package(&depends)
        .ok_or_else(|| format!("{PACKAGE} depends on no kernel:\n{depends}"))?;
    let directory = directory();
    let unfinished = directory.with_extension("new");
    let failed = |e: std::io::Error| format!("{}: {e}", unfinished.display());
    // The remains of an interrupted attempt.
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(failed)?;
    }
    fs::create_dir_all(&unfinished).map_err(failed)?;
    let mut download = Command::new("apt-get");
    download.args(["-qq", "-o", "APT::Sandbox::User=root", "download", package]);
    run::output(download.current_dir(&unfinished))?;
    let entries = fs::read_dir(&unfinished).map_err(failed)?;
    for archive in entries.flatten().map(|entry| entry.path()) {
        run::run(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(&archive)
                .arg(&unfinished),
        )?;
        fs::remove_file(&archive).map_err(failed)?;
    }
    if directory.exists() {
        fs::remove_dir_all(&directory).map_err(failed)?;
    }
    fs::rename(&unfinished, &directory).map_err(failed)
}

/// The kernel among the lines `Depends: NAME`.
fn kernel_package(depends: &str) -> Option<&str> {
    let packages = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    packages
        .map(str::trim)
        .find(|package| package.starts_with("linux-image-") && package.contains("cloud"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_what_the_package_depends_on() {
        let depends = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-9-cloud-amd64\n";
        let kernel = "linux-image-6.1.0-9-cloud-amd64";
        assert_eq!(kernel_package(depends), Some(kernel));
        assert_eq!(kernel_package("linux-image-cloud-amd64\n"), None);
    }
}
