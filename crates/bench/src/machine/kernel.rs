//! The guest's kernel: which file, of which release, and the modules that it needs to see its disk.
//!
//! Debian's cloud kernel boots fast and has virtio as modules; other kernels do too, or have it
//! built in. Modules are looked for beside the kernel, so that a package that was only unpacked
//! will do.

use std::fs;
use std::path::{Path, PathBuf};

use cowslip_console::error::{CommandError, failed};

/// Where distributions put kernels.
const BOOT: &str = "/boot";
/// Modules for a virtio disk on PCI. Those that are not there are built in.
const MODULES: [&str; 6] = [
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
];
/// Modules for the file systems that guests make; ext4 is built in.
const FILE_SYSTEMS: [&str; 2] = ["lib/libcrc32c", "fs/xfs/xfs"];
/// How the names of modules end, by how they are compressed.
const SUFFIXES: [&str; 4] = ["ko", "ko.xz", "ko.zst", "ko.gz"];
/// Offsets in a kernel's file, Documentation/arch/x86/boot.rst: the magic, and the pointer to the
/// version, which counts from the end of the first sector.
const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
const VERSION_POINTER: usize = 0x20e;
const SECTOR_BYTES: usize = 0x200;

/// A kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its file.
    pub file: PathBuf,
    /// Release, as `uname -r` prints it.
    pub release: String,
}

impl Kernel {
    /// The one that was chosen, or the newest cloud kernel that is installed.
    ///
    /// # Errors
    /// There is none, or it is no kernel.
    pub fn find(chosen: Option<&Path>) -> Result<Kernel, CommandError> {
        let file = match chosen {
            Some(file) => file.to_path_buf(),
            None => newest_cloud_kernel(Path::new(BOOT)).ok_or_else(|| {
                CommandError::new(format!(
                    "No cloud kernel in {BOOT} for the guest: install one (Debian: linux-image-cloud-amd64), \
                     or unpack that package anywhere and name its boot/vmlinuz-* with --kernel"
                ))
            })?,
        };
        let bytes = fs::read(&file).map_err(|e| failed("read", &file, &e))?;
        let release = release(&bytes).ok_or_else(|| {
            CommandError::new(format!("'{}' is not a kernel for x86", file.display()))
        })?;
        Ok(Kernel { file, release })
    }

    /// Modules to load for a disk.
    pub fn modules(&self) -> Vec<PathBuf> {
        self.find_modules(&MODULES)
    }

    /// Modules to load for file systems.
    pub fn modules_of_file_systems(&self) -> Vec<PathBuf> {
        self.find_modules(&FILE_SYSTEMS)
    }

    fn find_modules(&self, modules: &[&str]) -> Vec<PathBuf> {
        let Some(directory) = self.module_directory() else {
            return Vec::new();
        };
        let modules = modules.iter().filter_map(|module| {
            let names = SUFFIXES.iter().map(|suffix| format!("{module}.{suffix}"));
            let mut files = names.map(|name| directory.join("kernel").join(name));
            files.find(|file| file.is_file())
        });
        modules.collect()
    }

    /// Beside the kernel, or below the root that the kernel's directory is in.
    fn module_directory(&self) -> Option<PathBuf> {
        let file = self.file.canonicalize().ok()?;
        let directory = file.parent()?;
        let root = directory.parent()?;
        let below = ["lib/modules", "usr/lib/modules"];
        let mut candidates = vec![directory.to_path_buf()];
        for root in [root, Path::new("/")] {
            candidates.extend(below.map(|below| root.join(below).join(&self.release)));
        }
        candidates
            .into_iter()
            .find(|candidate| candidate.join("kernel").is_dir())
    }
}

fn newest_cloud_kernel(directory: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    let kernels = entries.filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("vmlinuz-") && name.contains("cloud")
    });
    let newest = kernels.max_by_key(|entry| {
        let changed = entry.metadata().and_then(|metadata| metadata.modified());
        (changed.ok(), entry.file_name())
    });
    newest.map(|entry| entry.path())
}

/// The first word of the version in a kernel's file.
fn release(kernel: &[u8]) -> Option<String> {
    let (at, magic) = MAGIC;
    if kernel.get(at..)?.get(..magic.len())? != magic {
        return None;
    }
    let pointer = kernel.get(VERSION_POINTER..)?.first_chunk::<2>()?;
    let version = kernel.get(usize::from(u16::from_le_bytes(*pointer)) + SECTOR_BYTES..)?;
    let is_end = |byte: &u8| !byte.is_ascii_graphic();
    let end = version.iter().position(is_end)?;
    let release = String::from_utf8_lossy(&version[..end]).into_owned();
    (!release.is_empty()).then_some(release)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_the_kernel() {
        let mut kernel = vec![0; 0x1000];
        assert_eq!(release(&kernel), None);
        kernel[0x202..0x206].copy_from_slice(b"HdrS");
        assert_eq!(release(&kernel), None);
        kernel[0x20e..0x210].copy_from_slice(&0x600_u16.to_le_bytes());
        let version = b"6.1.0-9-cloud-amd64 (debian) #1 SMP\0";
        kernel[0x800..0x800 + version.len()].copy_from_slice(version);
        assert_eq!(release(&kernel).as_deref(), Some("6.1.0-9-cloud-amd64"));
        assert_eq!(release(&kernel[..0x300]), None);
        assert_eq!(release(b"MZ"), None);
    }
}
