//! The matrix: every legal combination of version, cluster size, extended L2 entries, what is
//! below, and refcount width; and how QEMU makes an image of each.

use std::fmt;
use std::path::{Path, PathBuf};

use super::rng::Rng;
use super::{qemu_img, run};

/// Version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V2,
    V3,
}

/// The backing file or data file of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Below {
    /// Nothing.
    Nothing,
    /// A raw file.
    Raw,
    /// Two qcow2 images on a raw file.
    Chain,
    /// The guest's data is in an external data file.
    DataFile,
    /// And that file is the disk byte by byte.
    RawDataFile,
}

/// Whether entries are extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    Plain,
    Extended,
}

/// One combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub version: Version,
    pub cluster_bytes: u64,
    pub entries: Entries,
    pub below: Below,
    pub refcount_bits: u32,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = match self.version {
            Version::V2 => "v2",
            Version::V3 => "v3",
        };
        let entries = match self.entries {
            Entries::Plain => "plain",
            Entries::Extended => "extended",
        };
        let below = match self.below {
            Below::Nothing => "nothing",
            Below::Raw => "raw",
            Below::Chain => "chain",
            Below::DataFile => "data",
            Below::RawDataFile => "rawdata",
        };
        write!(
            f,
            "{version}-{}-{entries}-{below}-rc{}",
            self.cluster_bytes, self.refcount_bits
        )
    }
}

impl Shape {
    /// All legal combinations with this cluster size.
    pub fn all(cluster_bytes: u64) -> Vec<Shape> {
        use Below::{Chain, DataFile, Nothing, Raw, RawDataFile};
        let mut shapes = Vec::new();
        for version in [Version::V2, Version::V3] {
            for entries in [Entries::Plain, Entries::Extended] {
                for below in [Nothing, Raw, Chain, DataFile, RawDataFile] {
                    for refcount_bits in [1, 16, 64] {
                        let shape = Shape {
                            version,
                            cluster_bytes,
                            entries,
                            below,
                            refcount_bits,
                        };
                        if shape.is_legal() {
                            shapes.push(shape);
                        }
                    }
                }
            }
        }
        shapes
    }

    fn is_legal(&self) -> bool {
        let needs_version_3 =
            self.entries == Entries::Extended || self.refcount_bits != 16 || self.has_data_file();
        let extended_fits = self.entries == Entries::Plain || self.cluster_bytes >= 16 << 10;
        extended_fits && (self.version == Version::V3 || !needs_version_3)
    }

    /// Whether guest data is in a file of its own.
    pub fn has_data_file(&self) -> bool {
        matches!(self.below, Below::DataFile | Below::RawDataFile)
    }

    /// Whether there is a backing file.
    pub fn has_backing(&self) -> bool {
        matches!(self.below, Below::Raw | Below::Chain)
    }

    /// Guest bytes that one L2 table maps.
    pub fn table_bytes(&self) -> u64 {
        let entry_bytes = match self.entries {
            Entries::Plain => 8,
            Entries::Extended => 16,
        };
        self.cluster_bytes / entry_bytes * self.cluster_bytes
    }

    /// The unit of allocation.
    pub fn subcluster_bytes(&self) -> u64 {
        match self.entries {
            Entries::Plain => self.cluster_bytes,
            Entries::Extended => self.cluster_bytes / 32,
        }
    }

    /// A size seldom a whole number of clusters, and with a second L2 table or several where that
    /// is no more than QEMU reads in a moment.
    pub fn disk_bytes(&self, rng: &mut Rng) -> u64 {
        let is_plain_case = self.below == Below::Nothing && self.refcount_bits == 16;
        let reaches_second_table = self.table_bytes() <= 512 << 20 || is_plain_case;
        let least = if reaches_second_table {
            self.table_bytes().max(256 << 10)
        } else {
            8 << 20
        };
        let clusters = least / self.cluster_bytes;
        let size = (clusters + 3 + rng.below(6)) * self.cluster_bytes;
        size + rng.below(self.cluster_bytes / 512) * 512
    }

    /// Options of `create`, but for the files.
    pub fn options(&self) -> String {
        let compat = match self.version {
            Version::V2 => "0.10",
            Version::V3 => "1.1",
        };
        let mut options = format!("compat={compat},cluster_size={}", self.cluster_bytes);
        if self.version == Version::V3 {
            options.push_str(&format!(",refcount_bits={}", self.refcount_bits));
        }
        if self.entries == Entries::Extended {
            options.push_str(",extended_l2=on");
        }
        options
    }
}

/// The files of one case.
pub struct Files {
    pub directory: PathBuf,
    /// The image under test.
    pub image: PathBuf,
}

impl Files {
    pub fn new(directory: &Path) -> Files {
        Files {
            directory: directory.to_path_buf(),
            image: directory.join("image.qcow2"),
        }
    }

    /// Makes what is below the image and returns the words of `create` that name it. The
    /// backing files are shorter or longer than the disk, or as long.
    pub fn make_below(&self, shape: &Shape, disk_bytes: u64, rng: &mut Rng) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|w| (*w).to_string()).collect();
        match shape.below {
            Below::Nothing => Vec::new(),
            Below::DataFile => words(&["-o", &self.data_file()]),
            Below::RawDataFile => words(&["-o", &(self.data_file() + ",data_file_raw=on")]),
            Below::Raw => {
                self.make_raw("base.raw", backing_bytes(disk_bytes, rng), rng);
                words(&["-F", "raw", "-b", "base.raw"])
            }
            Below::Chain => {
                self.make_raw("base.raw", backing_bytes(disk_bytes, rng), rng);
                self.make_overlay("lower.qcow2", ("raw", "base.raw"), disk_bytes, rng);
                self.make_overlay("upper.qcow2", ("qcow2", "lower.qcow2"), disk_bytes, rng);
                words(&["-F", "qcow2", "-b", "upper.qcow2"])
            }
        }
    }

    /// QEMU looks for a relative name in the directory that it runs in, not beside the image: the
    /// name is absolute.
    fn data_file(&self) -> String {
        format!("data_file={}", self.directory.join("data.raw").display())
    }

    /// A sparse file with islands of data, more of them near the ends of the disk's tables.
    fn make_raw(&self, name: &str, bytes: u64, rng: &mut Rng) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(self.directory.join(name)).unwrap();
        file.set_len(bytes).unwrap();
        for _ in 0..40 {
            let len = (512 + rng.below(96 << 10)).min(bytes);
            let offset = match rng.below(3) {
                0 => rng.below((1 << 20).min(bytes - len + 1)),
                1 => bytes - len - rng.below((1 << 20).min(bytes - len + 1)),
                _ => rng.below(bytes - len + 1),
            };
            file.write_all_at(&rng.bytes(len as usize), offset).unwrap();
        }
    }

    fn make_overlay(
        &self,
        name: &str,
        (format, backing): (&str, &str),
        disk_bytes: u64,
        rng: &mut Rng,
    ) {
        let path = self.directory.join(name);
        let bytes = backing_bytes(disk_bytes, rng) / 512 * 512;
        let cluster_bytes = rng.pick(&["4096", "16384", "65536", "1048576"]);
        let options = format!("cluster_size={cluster_bytes}");
        run(std::process::Command::new("qemu-img")
            .current_dir(&self.directory)
            .args([
                "create", "-q", "-f", "qcow2", "-o", &options, "-F", format, "-b", backing,
            ])
            .args([name, &bytes.to_string()]));
        let mut commands = Vec::new();
        for _ in 0..20 {
            commands.push("-c".to_string());
            let len = 512 * (1 + rng.below((128).min(bytes / 512)));
            let offset = rng.below(bytes - len + 1) / 512 * 512;
            let what = match rng.below(4) {
                0 => "write -z".to_string(),
                1 => "discard".to_string(),
                _ => format!("write -P {}", 1 + rng.below(255)),
            };
            commands.push(format!("{what} {offset} {len}"));
        }
        run(std::process::Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .args(commands)
            .arg(&path));
    }

    /// QEMU's `create`.
    pub fn create_with_qemu(&self, shape: &Shape, extra: &str, below: &[String], disk_bytes: u64) {
        let options = shape.options() + extra;
        let size = disk_bytes.to_string();
        let mut words = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        words.extend(below.iter().map(String::as_str));
        run(std::process::Command::new("qemu-img")
            .current_dir(&self.directory)
            .args(words)
            .args(["image.qcow2", &size]));
    }

    /// Our own `create`, with the same words.
    pub fn create_with_cowslip(&self, shape: &Shape, below: &[String], disk_bytes: u64) {
        let options = shape.options();
        run(super::cowslip()
            .current_dir(&self.directory)
            .args(["create", "-q", "-f", "qcow2", "-o", &options])
            .args(below)
            .args(["image.qcow2", &disk_bytes.to_string()]));
    }

    /// The disk as QEMU reads it, in a sparse raw file.
    pub fn read_with_qemu(&self, words: &[&str]) -> PathBuf {
        let truth = self.directory.join("truth.raw");
        let mut all = vec!["convert", "-O", "raw"];
        all.extend(words);
        qemu_img(&all, &[&self.image, &truth]);
        truth
    }
}

/// Shorter than the disk, longer, or as long.
fn backing_bytes(disk_bytes: u64, rng: &mut Rng) -> u64 {
    match rng.below(3) {
        0 => disk_bytes,
        1 => disk_bytes - rng.below(disk_bytes / 2) / 512 * 512,
        _ => disk_bytes + (1 + rng.below(200)) * 512,
    }
}
