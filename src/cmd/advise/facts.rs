//! Facts about an image: its headers, its chain, its extents, and the file system below it.

use std::os::unix::fs::MetadataExt;

use cowslip::Job;
use cowslip::file::Sharing;
use cowslip::file::host::{Aio, BackingPolicy};
use cowslip::image::{self, BackingChoice};
use cowslip::qcow2::compact::CompactOptions;
use cowslip::qcow2::header::{CompressionType, CryptMethod, Header};
use cowslip_advise::{Engine, Facts, Format, Host, Image, Order, Space};
use cowslip_extents::{Whole, whole};

use crate::cmd::create::format_name;
use crate::cmd::extents::{self, Looking};
use crate::error::CommandError;
use crate::layer::{ImageFileInfo, InspectOptions, chain};
use crate::open::{self, Access, ImageSpec, OpenSettings, block_on, open_image, sharing};

/// How facts are collected.
pub struct Collect<'a> {
    /// Format of the images, if it is given.
    pub format: Option<&'a str>,
    /// Images may be in use.
    pub force_share: bool,
    /// Policy on files that images name.
    pub policy: BackingPolicy,
    /// Memory for tables, as served now.
    pub cache_bytes: u64,
    /// The engine.
    pub engine: Engine,
    /// The device has moving parts, whatever the system says.
    pub is_rotational: bool,
}

/// File systems that give space in one call.
const WITH_FALLOCATE: [&str; 8] = [
    "ext4", "xfs", "btrfs", "tmpfs", "f2fs", "gfs2", "ocfs2", "bcachefs",
];
/// Those on which files share data.
const WITH_REFLINK: [&str; 4] = ["xfs", "btrfs", "bcachefs", "ocfs2"];

impl Collect<'_> {
    /// The facts about an image.
    ///
    /// # Errors
    /// `Could not open 'x': why`.
    pub fn facts(&self, name: &str) -> Result<Facts, CommandError> {
        let sharing = sharing(self.force_share, Sharing::AsFormat);
        let looking = Looking {
            format: self.format,
            by: None,
            sharing,
            policy: self.policy,
        };
        let whole = whole(extents::open(name, &looking)?)?;
        let layers = self.layers(name, sharing)?;
        let image = image(name, &layers);
        let mut space = space(&whole, &layers);
        if image.has_subclusters && !image.has_data_file {
            space.subcluster_bytes = self.subcluster_bytes(name, sharing);
        }
        Ok(Facts {
            image,
            space,
            order: Order {
                bytes: whole.read.0,
                runs: whole.read.1,
                extents: whole.file.extents.unwrap_or(0),
                perfect: whole.file.perfect,
            },
            host: self.host(name, &whole)?,
            cache_bytes: self.cache_bytes,
            engine: self.engine,
            siblings: 0,
            is_in_use: self.force_share,
        })
    }

    /// Bytes that a compaction gives back of clusters that hold something; none where the image
    /// cannot be compacted: it is damaged, or encrypted.
    fn subcluster_bytes(&self, name: &str, sharing: Sharing) -> u64 {
        let settings = OpenSettings {
            access: Access::Read,
            backing: BackingChoice::None,
            sharing,
            policy: self.policy,
            ..open::settings()
        };
        let planned: Result<_, CommandError> = block_on(Aio::Auto, async {
            let image = open_image(&ImageSpec::named(name, self.format), &settings).await?;
            let options = CompactOptions::default();
            Ok(image.compaction_plan(&options, &Job::default()).await?)
        });
        planned.map_or(0, |plan| plan.subcluster_bytes)
    }

    fn host(&self, name: &str, whole: &Whole) -> Result<Host, CommandError> {
        let failed = |error: std::io::Error| {
            CommandError::opening(name, cowslip::error::system_words(&error))
        };
        let kind = whole.file.file_system.as_str();
        let found = std::fs::metadata(name).map_err(failed)?;
        let room = rustix::fs::statvfs(name).map_err(|error| failed(error.into()))?;
        Ok(Host {
            kind: kind.to_string(),
            block_bytes: whole.block_bytes,
            free_bytes: room.f_bavail.saturating_mul(room.f_frsize),
            total_bytes: room.f_blocks.saturating_mul(room.f_frsize),
            has_reflink: WITH_REFLINK.contains(&kind),
            has_fallocate: WITH_FALLOCATE.contains(&kind),
            is_rotational: self.is_rotational || is_rotational(found.dev()),
        })
    }

    fn layers(&self, name: &str, sharing: Sharing) -> Result<Vec<ImageFileInfo>, CommandError> {
        let source = ImageSpec::named(name, self.format).resolve()?;
        let options = InspectOptions {
            sharing,
            policy: self.policy,
            ..InspectOptions::default()
        };
        block_on(Aio::Auto, async {
            let layer = ImageFileInfo::inspect_source(&source, &options).await;
            let layer = layer.map_err(|why| CommandError::opening(name, why.to_string()))?;
            chain(layer, &options).await
        })
    }
}

fn image(name: &str, layers: &[ImageFileInfo]) -> Image {
    let layer = &layers[0];
    let header = layer.header();
    let inspection = layer.inspection.as_ref();
    let policy = header.and_then(|header| header.extensions.allocation);
    let backing = header.and_then(|header| {
        let file = header.backing_file.clone()?;
        let format = header.backing_format().map(str::to_string);
        let found = layers
            .get(1)
            .map(|below| format_name(below.format).to_string());
        Some((file, format.or(found)))
    });
    let lowest = layers.last().filter(|_| layers.len() > 2).map(|lowest| {
        // As the image names it, wherever the command is run.
        let path = std::path::absolute(&lowest.filename);
        let path = path.map(|path| path.to_string_lossy().into_owned());
        let format = format_name(lowest.format).to_string();
        (
            path.unwrap_or_else(|_| lowest.filename.clone()),
            Some(format),
        )
    });
    Image {
        name: name.to_string(),
        format: match layer.format {
            image::Format::Qcow2 => Format::Qcow2,
            image::Format::Raw => Format::Raw,
            _ => Format::Other,
        },
        disk_bytes: layer.virtual_size(),
        cluster_bytes: header.map_or(4096, |header| header.geometry().cluster_bytes()),
        has_subclusters: header.is_some_and(Header::is_extended_l2),
        is_sparse: policy.is_some_and(|hint| hint.policy == image::AllocPolicy::Sparse),
        is_zstd: header.is_some_and(|header| header.compression_type == CompressionType::Zstd),
        is_encrypted: header.is_some_and(|header| header.crypt_method != CryptMethod::None),
        depth: layers.len() as u64,
        backing,
        lowest,
        snapshots: inspection.map_or(0, |it| it.snapshots.len() as u64),
        bitmaps: inspection.map_or(0, |it| it.bitmaps.len() as u64),
        has_data_file: header.is_some_and(Header::has_data_file),
    }
}

fn space(whole: &Whole, layers: &[ImageFileInfo]) -> Space {
    let inside = whole.image.unwrap_or_default();
    let header = layers[0].header();
    let cluster_bytes = header.map_or(4096, |header| header.geometry().cluster_bytes());
    let clusters = (inside.data_bytes / cluster_bytes).max(1);
    let between = layers.iter().skip(1).rev().skip(1);
    Space {
        file_bytes: whole.file_bytes,
        host_bytes: whole.allocated_bytes,
        unwritten_bytes: whole.file.unwritten_bytes,
        data_bytes: inside.data_bytes,
        used_bytes: inside.used_bytes,
        subcluster_bytes: 0,
        metadata_bytes: inside.metadata_bytes,
        compressed_bytes: inside.compressed_bytes,
        scattered_permille: (inside.breaks.saturating_mul(1000) / clusters).min(1000),
        between_bytes: between.filter_map(|layer| layer.disk_size).sum(),
    }
}

/// Whether a device has moving parts: a SCSI or ATA disk of which the system says so. Of virtual
/// disks and loop devices it says so without reason.
fn is_rotational(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let directory = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"));
    let Ok(mut directory) = directory else {
        return false;
    };
    // A partition is a directory in its disk's.
    if directory.join("partition").exists() {
        directory.pop();
    }
    let name = directory.file_name().map(|name| name.to_string_lossy());
    let is_disk = name.is_some_and(|name| name.starts_with("sd"));
    let text = std::fs::read_to_string(directory.join("queue/rotational"));
    is_disk && text.is_ok_and(|text| text.trim() == "1")
}
