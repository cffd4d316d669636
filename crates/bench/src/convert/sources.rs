//! The sources of conversions: made by qemu-img and by writing files, so that their layout is not
//! the work of the program that is measured.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_console::error::{CommandError, failed};
use cowslip_testbed::{Random, populate, populate_compressible};

use crate::peer_path;
use crate::run::{Running, run};

const CLUSTER_BYTES: u64 = 64 << 10;
/// The disk of the sparse sources.
const SPARSE_BYTES: u64 = 1 << 40;
/// Number of places at which a sparse source has data.
const SPARSE_PARTS: u64 = 64;
/// Layers of the chain.
const LAYERS: u64 = 5;
/// Names of all files here begin so.
const PREFIX: &str = "source";

/// A source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// A raw file, all of it data.
    Raw,
    /// The same as qcow2.
    Qcow2,
    /// A raw file of 1 TiB with data in 64 places.
    SparseRaw,
    /// The same as qcow2.
    SparseQcow2,
    /// A raw file of which every second block of 4 KiB is a hole.
    PiecesRaw,
    /// qcow2 with its clusters in random order in the file.
    Scattered,
    /// Five qcow2 images, one on the other, with a fifth of the clusters each.
    Chain,
    /// A raw file that compresses well.
    Compressible,
    /// The same as compressed qcow2.
    Zlib,
    /// The same by the other means.
    Zstd,
    /// A raw file, all of it data, behind qemu-nbd.
    Served,
    /// The same behind nbdkit, with a delay of this many milliseconds for each read.
    Distant(u32),
}

/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(30);

impl Source {
    /// Its format.
    pub fn format(self) -> &'static str {
        match self {
            Source::Qcow2 | Source::SparseQcow2 | Source::Scattered | Source::Chain => "qcow2",
            Source::Zlib | Source::Zstd => "qcow2",
            _ => "raw",
        }
    }

    /// Where it is.
    pub fn path(self, place: &Path) -> PathBuf {
        place.join(PREFIX)
    }

    /// How commands name it.
    pub fn name(self, place: &Path) -> OsString {
        match self {
            Source::Served | Source::Distant(_) => {
                let socket = socket(place);
                format!("nbd+unix:///?socket={}", socket.display()).into()
            }
            _ => self.path(place).into(),
        }
    }

    /// Starts what serves it, if it is not a file.
    pub fn serve(self, place: &Path) -> Result<Option<Running>, CommandError> {
        let socket = socket(place);
        let mut command = match self {
            Source::Served => {
                let mut command = peer_path::command("qemu-nbd");
                command.args(["-r", "-t", "-e", "8", "-f", "raw", "-k"]);
                command.arg(&socket).arg(self.path(place));
                command
            }
            Source::Distant(milliseconds) => {
                let mut command = Command::new("nbdkit");
                command.args(["-f", "-r", "--filter=delay", "-U"]);
                command.arg(&socket).arg("file").arg(self.path(place));
                command.arg(format!("rdelay={milliseconds}ms"));
                command
            }
            _ => return Ok(None),
        };
        let mut server = Running::start("the source's server", command.stdin(Stdio::null()))?;
        let begun = Instant::now();
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            let ended = server.child.try_wait().is_ok_and(|status| status.is_some());
            if ended || begun.elapsed() > PATIENCE {
                return Err(server.failure("does not listen"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Some(server))
    }

    /// The size of its disk.
    pub fn disk_bytes(self, place: &Path) -> Result<u64, CommandError> {
        let mut info = peer_path::command("qemu-img");
        info.args(["info", "--output=json", "-f", self.format()]);
        let info = run(info.arg(self.path(place)))?.output;
        let info: serde_json::Value = serde_json::from_str(&info).unwrap_or_default();
        let size = info["virtual-size"].as_u64();
        size.ok_or_else(|| CommandError::new("qemu-img prints no size"))
    }

    /// Bytes of data in it, of these: a quarter where they take long enough.
    pub fn data_bytes(self, data_bytes: u64) -> u64 {
        match self {
            Source::Raw | Source::Served | Source::SparseRaw => data_bytes,
            Source::Qcow2 | Source::SparseQcow2 => data_bytes,
            _ => data_bytes / 4,
        }
    }

    /// Makes it with this much data, or a quarter of it.
    pub fn make(self, place: &Path, data_bytes: u64) -> Result<(), CommandError> {
        let (path, data_bytes) = (self.path(place), self.data_bytes(data_bytes));
        let populate = |path: &Path| populate(path, data_bytes).map_err(CommandError::new);
        let compressible =
            |path: &Path| populate_compressible(path, data_bytes).map_err(CommandError::new);
        let raw = place.join(format!("{PREFIX}.raw"));
        match self {
            Source::Raw | Source::Served | Source::Distant(_) => populate(&path),
            Source::Compressible => compressible(&path),
            Source::SparseRaw => sparse(&path, data_bytes),
            Source::PiecesRaw => pieces(&path, data_bytes),
            Source::Scattered => scattered(&path, data_bytes),
            Source::Chain => chain(place, data_bytes),
            Source::Qcow2 => {
                populate(&raw)?;
                convert(&raw, &path, &[])
            }
            Source::SparseQcow2 => {
                sparse(&raw, data_bytes)?;
                convert(&raw, &path, &[])
            }
            Source::Zlib => {
                compressible(&raw)?;
                convert(&raw, &path, &["-c", "-W"])
            }
            Source::Zstd => {
                compressible(&raw)?;
                convert(&raw, &path, &["-c", "-W", "-o", "compression_type=zstd"])
            }
        }
    }
}

fn socket(place: &Path) -> PathBuf {
    place.join(format!("{PREFIX}.socket"))
}

/// Makes qcow2 of a raw file, which goes.
fn convert(raw: &Path, path: &Path, words: &[&str]) -> Result<(), CommandError> {
    let mut convert = peer_path::command("qemu-img");
    convert
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args(words);
    run(convert.arg(raw).arg(path))?;
    fs::remove_file(raw).map_err(|e| failed("remove", raw, &e))
}

fn noise(random: &mut Random, len: u64) -> Vec<u8> {
    (0..len / 8)
        .flat_map(|_| random.bits().to_le_bytes())
        .collect()
}

fn sparse(path: &Path, data_bytes: u64) -> Result<(), CommandError> {
    let failed = |e: std::io::Error| failed("write", path, &e);
    let file = File::create(path).map_err(failed)?;
    file.set_len(SPARSE_BYTES).map_err(failed)?;
    let part = data_bytes / SPARSE_PARTS;
    let bytes = noise(&mut Random::new(1), part);
    for index in 0..SPARSE_PARTS {
        let at = index * (SPARSE_BYTES / SPARSE_PARTS);
        file.write_all_at(&bytes, at).map_err(failed)?;
    }
    Ok(())
}

fn pieces(path: &Path, data_bytes: u64) -> Result<(), CommandError> {
    const BLOCK_BYTES: u64 = 4096;
    let failed = |e: std::io::Error| failed("write", path, &e);
    let file = File::create(path).map_err(failed)?;
    file.set_len(2 * data_bytes).map_err(failed)?;
    let mut random = Random::new(2);
    for at in (0..2 * data_bytes).step_by(2 * BLOCK_BYTES as usize) {
        file.write_all_at(&noise(&mut random, BLOCK_BYTES), at)
            .map_err(failed)?;
    }
    Ok(())
}

/// Writes clusters by qemu-io, in the order that is given.
fn write_clusters(path: &Path, clusters: impl Iterator<Item = u64>) -> Result<(), CommandError> {
    let mut command = peer_path::command("qemu-io");
    command.args(["-t", "unsafe", "-f", "qcow2"]).arg(path);
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let failed = |e: std::io::Error| failed("write", path, &e);
    let mut writer = Running::start("qemu-io", &mut command)?;
    let stdin = writer.child.stdin.take();
    let mut stdin = stdin.ok_or_else(|| writer.failure("takes no commands"))?;
    for cluster in clusters {
        let (pattern, at) = (1 + cluster % 255, cluster * CLUSTER_BYTES);
        writeln!(stdin, "write -q -P {pattern} {at} {CLUSTER_BYTES}").map_err(failed)?;
    }
    drop(stdin);
    writer.wait()
}

fn create(path: &Path, disk_bytes: u64, backing: Option<&Path>) -> Result<(), CommandError> {
    let mut create = peer_path::command("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]);
    if let Some(backing) = backing {
        create.args(["-F", "qcow2", "-b"]).arg(backing);
    }
    run(create.arg(path).arg(disk_bytes.to_string())).map(drop)
}

fn scattered(path: &Path, data_bytes: u64) -> Result<(), CommandError> {
    let count = data_bytes / CLUSTER_BYTES;
    create(path, data_bytes, None)?;
    let mut order: Vec<u64> = (0..count).collect();
    let mut random = Random::new(3);
    for end in (1..order.len()).rev() {
        order.swap(end, random.below(end as u64 + 1) as usize);
    }
    write_clusters(path, order.into_iter())
}

/// The top one is the source.
fn chain(place: &Path, data_bytes: u64) -> Result<(), CommandError> {
    let count = data_bytes / CLUSTER_BYTES;
    let mut below: Option<PathBuf> = None;
    for layer in 0..LAYERS {
        let name = match layer == LAYERS - 1 {
            true => PREFIX.to_string(),
            false => format!("{PREFIX}.{layer}"),
        };
        let path = place.join(name);
        create(&path, data_bytes, below.as_deref())?;
        write_clusters(
            &path,
            (0..count).filter(|cluster| cluster % LAYERS == layer),
        )?;
        below = Some(path);
    }
    Ok(())
}
