//! The storage under a directory: the file system with its mount options and fill level, and below
//! it partitions, device-mapper, LUKS, LVM, RAID and loop devices with the files that these are on,
//! down to the disks. Read from /proc/self/mountinfo and /sys, without root and within bounds.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use serde::Serialize;

use crate::machine::{Root, read};

/// No stack has more layers that tell anything.
const DEVICES_MAX: usize = 32;
/// A file system that is fuller allocates in another way than an empty one.
const FULL_PERCENT: f64 = 85.0;

/// The storage under a directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Stack {
    /// The directory.
    pub directory: PathBuf,
    /// Kind of its file system, as the kernel calls it.
    pub filesystem_type: Option<String>,
    /// Where it is mounted.
    pub mount_point: Option<String>,
    /// The source of the mount.
    pub source: Option<String>,
    /// Options of the mount, then those of the file system.
    pub mount_options: Option<String>,
    /// Size of the file system in bytes.
    pub size_bytes: u64,
    /// Space that is taken, in percent of what files may take.
    pub used_percent: f64,
    /// From the file system down to the disks.
    pub devices: Vec<Device>,
}

/// A block device of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Device {
    /// The kernel's name.
    pub name: String,
    /// `disk`, `partition`, `loop`, `LUKS`, `LVM`, `device-mapper`, `RAID` …
    pub kind: String,
    /// A detail that depends on its kind: the file of a loop device, the name of a volume, the
    /// model of a disk.
    pub detail: Option<String>,
    /// How many layers below the file system, from 0.
    pub depth: usize,
    /// Turns; what is virtual tells what its host says.
    pub rotational: Option<bool>,
    /// The I/O scheduler.
    pub scheduler: Option<String>,
    /// Takes discards.
    pub discards: Option<bool>,
    /// Files may be mapped past the page cache.
    pub dax: Option<bool>,
    /// `write back` if it has a cache that a flush empties.
    pub write_cache: Option<String>,
    /// Size in bytes.
    pub size_bytes: Option<u64>,
}

/// A line of mountinfo (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    device: (u32, u32),
    point: String,
    options: String,
    kind: String,
    source: String,
    more_options: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Mount> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mount: Vec<&str> = mount.split(' ').collect();
        let filesystem: Vec<&str> = filesystem.split(' ').collect();
        let (major, minor) = mount.get(2)?.split_once(':')?;
        Some(Mount {
            device: (major.parse().ok()?, minor.parse().ok()?),
            point: unescaped(mount.get(4)?),
            options: mount.get(5)?.to_string(),
            kind: filesystem.first()?.to_string(),
            source: unescaped(filesystem.get(1)?),
            more_options: filesystem.get(2).copied().unwrap_or_default().to_string(),
        })
    }
}

/// Blanks and line feeds are written in octal there.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        let octal = tail
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The mount that a path is in: of those whose point is above it the nearest, of several on one
/// point the last.
fn mount_of(root: &Root, path: &Path) -> Option<Mount> {
    let text = root.read("proc/self/mountinfo")?;
    let mounts = text.lines().filter_map(Mount::parse);
    let above = mounts.filter(|mount| path.starts_with(&mount.point));
    above.max_by_key(|mount| mount.point.len())
}

impl Stack {
    /// That of a directory.
    ///
    /// # Errors
    /// It is not there.
    pub fn look(root: &Root, directory: &Path) -> io::Result<Stack> {
        let directory = fs::canonicalize(directory)?;
        let space = rustix::fs::statvfs(&directory)?;
        let (free, all) = (space.f_bavail as f64, space.f_blocks as f64);
        // Space reserved for root is not available to files.
        let usable = all - (space.f_bfree as f64 - free);
        let mount = mount_of(root, &directory);
        let mut stack = Stack {
            size_bytes: space.f_blocks.saturating_mul(space.f_frsize),
            used_percent: if usable > 0.0 {
                (1.0 - free / usable) * 100.0
            } else {
                0.0
            },
            directory,
            ..Stack::default()
        };
        if let Some(mount) = mount {
            stack.devices = devices_of(root, &mount);
            stack.mount_options = Some(format!("{}; {}", mount.options, mount.more_options));
            stack.filesystem_type = Some(mount.kind);
            stack.mount_point = Some(mount.point);
            stack.source = Some(mount.source);
        }
        Ok(stack)
    }

    /// Returns the circumstances that a reader of figures from there must know.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let directory = self.directory.display();
        if self.used_percent > FULL_PERCENT {
            warnings.push(format!(
                "{directory}: the file system is {:.0} % full, and allocates otherwise than one with room.",
                self.used_percent
            ));
        }
        let is_layer = |device: &&Device| !["disk", "partition"].contains(&device.kind.as_str());
        let layers: Vec<String> = self
            .devices
            .iter()
            .filter(is_layer)
            .map(|device| format!("{} ({})", device.name, device.kind))
            .collect();
        if !layers.is_empty() {
            warnings.push(format!(
                "{directory}: devices lie on other devices here ({}), each of which has its price.",
                layers.join(", ")
            ));
        }
        if self.filesystem_type.as_deref() == Some("tmpfs") {
            warnings.push(format!("{directory}: this is memory, not a disk."));
        }
        if self
            .devices
            .iter()
            .any(|device| device.rotational == Some(true))
        {
            warnings.push(format!(
                "{directory}: a disk there says that it turns; if it is virtual, that is what its host says."
            ));
        }
        warnings
    }
}

/// The devices still to examine: number and depth of each.
type Pending = VecDeque<((u32, u32), usize)>;

fn devices_of(root: &Root, mount: &Mount) -> Vec<Device> {
    let mut pending = Pending::new();
    // btrfs and others have numbers of their own; what they are mounted from is a device all the
    // same.
    let number = match exists(root, mount.device) {
        true => Some(mount.device),
        false => device_number(root, &mount.source),
    };
    pending.extend(number.map(|number| (number, 0)));
    let mut devices: Vec<Device> = Vec::new();
    while let Some((number, depth)) = pending.pop_front() {
        let Some(path) = device_path(root, number) else {
            continue;
        };
        let device = device(&path, depth);
        if devices.len() == DEVICES_MAX || devices.iter().any(|known| known.name == device.name) {
            continue;
        }
        push_lower(root, &path, depth + 1, &mut pending);
        devices.push(device);
    }
    devices
}

fn device_path(root: &Root, (major, minor): (u32, u32)) -> Option<PathBuf> {
    fs::canonicalize(root.path(&format!("sys/dev/block/{major}:{minor}"))).ok()
}

fn exists(root: &Root, number: (u32, u32)) -> bool {
    device_path(root, number).is_some()
}

/// The number of a device by the name of its file, or by that of its entry in /sys.
fn device_number(root: &Root, source: &str) -> Option<(u32, u32)> {
    let name = source.strip_prefix("/dev/")?;
    let dev = root.read(&format!("sys/class/block/{name}/dev"));
    if let Some((major, minor)) = dev.as_deref().and_then(|text| text.split_once(':')) {
        return Some((major.parse().ok()?, minor.parse().ok()?));
    }
    let number = fs::metadata(root.path(&format!("dev/{name}"))).ok()?.rdev();
    Some((major(number), minor(number)))
}

fn dev_of(path: &Path) -> Option<(u32, u32)> {
    let dev = read(&path.join("dev"))?;
    let (major, minor) = dev.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Appends the devices that a device lies on.
fn push_lower(root: &Root, path: &Path, depth: usize, pending: &mut Pending) {
    if path.join("partition").exists() {
        let disk = path.parent().and_then(dev_of);
        pending.extend(disk.map(|number| (number, depth)));
    }
    let slaves = fs::read_dir(path.join("slaves"))
        .into_iter()
        .flatten()
        .flatten();
    let mut slaves: Vec<PathBuf> = slaves.map(|entry| entry.path()).collect();
    slaves.sort();
    let numbers = slaves.iter().filter_map(|slave| dev_of(slave));
    pending.extend(numbers.map(|number| (number, depth)));
    if let Some(mount) = backing_file(path).and_then(|file| mount_of(root, &file)) {
        let number = match exists(root, mount.device) {
            true => Some(mount.device),
            false => device_number(root, &mount.source),
        };
        pending.extend(number.map(|number| (number, depth)));
    }
}

/// Returns the file of a loop device. The kernel appends a word to the name of a removed file.
fn backing_file(path: &Path) -> Option<PathBuf> {
    let shown = read(&path.join("loop/backing_file"))?;
    let name = shown.strip_suffix(" (deleted)").unwrap_or(&shown);
    Some(PathBuf::from(name))
}

fn device(path: &Path, depth: usize) -> Device {
    let file = |name: &str| read(&path.join(name));
    let is_partition = path.join("partition").exists();
    // A partition has the queue of its disk.
    let queue = match is_partition {
        true => path.parent().map(|disk| disk.join("queue")),
        false => Some(path.join("queue")),
    };
    let queued = |name: &str| read(&queue.as_ref()?.join(name));
    let (kind, detail) = kind_of(path, is_partition);
    let chosen = |text: String| {
        // "mq-deadline [none]"
        let brackets = text
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'));
        brackets.map_or(text.clone(), |(chosen, _)| chosen.to_string())
    };
    Device {
        name: path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        kind,
        detail,
        depth,
        rotational: queued("rotational").map(|text| text == "1"),
        scheduler: queued("scheduler").map(chosen),
        discards: queued("discard_max_bytes").map(|text| text != "0"),
        dax: queued("dax").map(|text| text == "1"),
        write_cache: queued("write_cache"),
        // In sectors of 512 bytes, whatever the device's are.
        size_bytes: file("size").and_then(|text| text.parse::<u64>().ok()?.checked_mul(512)),
    }
}

fn kind_of(path: &Path, is_partition: bool) -> (String, Option<String>) {
    let file = |name: &str| read(&path.join(name));
    if is_partition {
        return ("partition".to_string(), None);
    }
    if let Some(backing) = file("loop/backing_file") {
        let direct = match file("loop/dio").as_deref() {
            Some("1") => "direct I/O",
            _ => "through the page cache",
        };
        return ("loop".to_string(), Some(format!("{backing}, {direct}")));
    }
    if path.join("dm").exists() {
        let uuid = file("dm/uuid").unwrap_or_default();
        let kind = match uuid.split('-').next() {
            Some("CRYPT") if uuid.contains("LUKS2") => "LUKS2",
            Some("CRYPT") if uuid.contains("LUKS") => "LUKS",
            Some("CRYPT") => "dm-crypt",
            Some("LVM") => "LVM",
            Some("mpath") => "multipath",
            _ => "device-mapper",
        };
        return (kind.to_string(), file("dm/name"));
    }
    if let Some(level) = file("md/level") {
        return ("RAID".to_string(), Some(level));
    }
    let detail = [file("device/vendor"), file("device/model")];
    let detail: Vec<String> = detail
        .into_iter()
        .flatten()
        .filter(|text| !text.starts_with("0x"))
        .collect();
    let detail = (!detail.is_empty()).then(|| detail.join(" "));
    ("disk".to_string(), detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Tree {
            Tree(tempfile::tempdir().unwrap())
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// Adds a device with its number; slaves are identified by their names.
        fn device(&self, name: &str, number: &str, slaves: &[&str]) {
            let leaf = name.rsplit('/').next().unwrap();
            self.file(&format!("sys/devices/{name}/dev"), number);
            self.file(&format!("sys/devices/{name}/size"), "2048\n");
            let target = self.0.path().join("sys/devices").join(name);
            for directory in ["sys/dev/block", "sys/class/block"] {
                fs::create_dir_all(self.0.path().join(directory)).unwrap();
            }
            let link = |path: PathBuf| std::os::unix::fs::symlink(&target, path).unwrap();
            link(self.0.path().join("sys/dev/block").join(number));
            link(self.0.path().join("sys/class/block").join(leaf));
            for slave in slaves {
                let directory = target.join("slaves");
                fs::create_dir_all(&directory).unwrap();
                let to = self.0.path().join("sys/class/block").join(slave);
                std::os::unix::fs::symlink(to, directory.join(slave)).unwrap();
            }
        }

        fn look(&self) -> Stack {
            Stack::look(&Root::at(self.0.path()), Path::new("/")).unwrap()
        }
    }

    #[test]
    fn a_volume_in_luks_on_a_partition_is_walked_down_to_the_disk() {
        let tree = Tree::new();
        tree.file(
            "proc/self/mountinfo",
            "22 1 253:1 / / rw,noatime shared:1 - xfs /dev/mapper/vg-root rw,logbsize=32k\n",
        );
        tree.device("sda", "8:0", &[]);
        tree.device("sda/sda2", "8:2", &[]);
        tree.file("sys/devices/sda/sda2/partition", "2\n");
        tree.file("sys/devices/sda/queue/rotational", "0\n");
        tree.file("sys/devices/sda/queue/scheduler", "mq-deadline [none]\n");
        tree.file("sys/devices/sda/device/model", "SSD 850\n");
        tree.device("dm-0", "253:0", &["sda2"]);
        tree.file("sys/devices/dm-0/dm/uuid", "CRYPT-LUKS2-0123-sda2_crypt\n");
        tree.file("sys/devices/dm-0/dm/name", "sda2_crypt\n");
        tree.device("dm-1", "253:1", &["dm-0"]);
        tree.file("sys/devices/dm-1/dm/uuid", "LVM-abc\n");
        let stack = tree.look();
        assert_eq!(stack.filesystem_type.as_deref(), Some("xfs"));
        assert_eq!(
            stack.mount_options.as_deref(),
            Some("rw,noatime; rw,logbsize=32k")
        );
        let layers: Vec<_> = stack
            .devices
            .iter()
            .map(|d| (d.name.as_str(), d.kind.as_str(), d.depth))
            .collect();
        let expected = [
            ("dm-1", "LVM", 0),
            ("dm-0", "LUKS2", 1),
            ("sda2", "partition", 2),
            ("sda", "disk", 3),
        ];
        assert_eq!(layers, expected);
        let disk = &stack.devices[3];
        assert_eq!(
            (disk.rotational, disk.scheduler.as_deref()),
            (Some(false), Some("none"))
        );
        assert_eq!(
            (disk.detail.as_deref(), disk.size_bytes),
            (Some("SSD 850"), Some(1 << 20))
        );
        // The partition has its disk's queue.
        assert_eq!(stack.devices[2].scheduler.as_deref(), Some("none"));
        assert!(stack.warnings().iter().any(|w| w.contains("dm-0 (LUKS2)")));
    }

    #[test]
    fn a_loop_device_is_followed_to_the_disk_of_its_file() {
        let tree = Tree::new();
        tree.file(
            "proc/self/mountinfo",
            "22 1 0:40 / / rw - btrfs /dev/loop0 rw\n30 22 8:1 / /data\\040files rw - ext4 /dev/sda1 rw\n",
        );
        tree.device("loop0", "7:0", &[]);
        tree.file(
            "sys/devices/loop0/loop/backing_file",
            "/data files/fs (deleted)\n",
        );
        tree.file("sys/devices/loop0/loop/dio", "1\n");
        tree.device("sda1", "8:1", &[]);
        let stack = tree.look();
        let names: Vec<_> = stack
            .devices
            .iter()
            .map(|d| (d.name.as_str(), d.depth))
            .collect();
        assert_eq!(names, [("loop0", 0), ("sda1", 1)]);
        assert_eq!(
            stack.devices[0].detail.as_deref(),
            Some("/data files/fs (deleted), direct I/O")
        );
    }

    #[test]
    fn devices_that_lie_on_each_other_in_a_circle_end() {
        let tree = Tree::new();
        tree.file(
            "proc/self/mountinfo",
            "22 1 253:0 / / rw - ext4 /dev/dm-0 rw\n",
        );
        tree.device("dm-0", "253:0", &[]);
        tree.device("dm-1", "253:1", &["dm-0"]);
        let slaves = tree.0.path().join("sys/devices/dm-0/slaves");
        fs::create_dir_all(&slaves).unwrap();
        let to = tree.0.path().join("sys/class/block/dm-1");
        std::os::unix::fs::symlink(to, slaves.join("dm-1")).unwrap();
        assert_eq!(tree.look().devices.len(), 2);
    }

    #[test]
    fn a_file_system_without_a_device_has_none() {
        let tree = Tree::new();
        tree.file(
            "proc/self/mountinfo",
            "garbage\n22 1 0:30 / / rw - tmpfs tmpfs rw\n",
        );
        let stack = tree.look();
        assert!(stack.devices.is_empty());
        assert!(
            stack
                .warnings()
                .iter()
                .any(|warning| warning.contains("memory"))
        );
        let nowhere = Stack::look(&Root::at(tree.0.path()), Path::new("/no/such/directory"));
        assert!(nowhere.is_err());
    }

    #[test]
    fn a_full_file_system_is_warned_of() {
        let stack = |used_percent| Stack {
            used_percent,
            ..Stack::default()
        };
        assert!(stack(84.0).warnings().is_empty());
        assert!(stack(86.0).warnings()[0].contains("86 % full"));
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let stack = Stack::look(&Root::default(), Path::new("/proc")).unwrap();
        assert_eq!(stack.filesystem_type.as_deref(), Some("proc"));
    }
}
