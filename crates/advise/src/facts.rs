//! [`Facts`]: an image, its files and its place, as they were found.

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Format {
    /// qcow2.
    #[default]
    Qcow2,
    /// Raw.
    Raw,
    /// Another one, which is only read.
    Other,
}

/// The engine that will serve the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Engine {
    /// This one.
    #[default]
    Cowslip,
    /// QEMU's.
    Qemu,
}

/// A file system, as far as the model tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4.
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// Another one; the figures are ext4's.
    Other,
}

impl FileSystem {
    /// The one of this name.
    pub fn of(kind: &str) -> FileSystem {
        match kind {
            "ext4" => FileSystem::Ext4,
            "xfs" => FileSystem::Xfs,
            "btrfs" => FileSystem::Btrfs,
            _ => FileSystem::Other,
        }
    }
}

/// An image.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Image {
    /// The name of its file.
    pub name: String,
    /// The format.
    pub format: Format,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// Cluster in bytes; of other formats than qcow2 the block of the file system.
    pub cluster_bytes: u64,
    /// It has extended L2 entries.
    pub has_subclusters: bool,
    /// Its policy is sparse.
    pub is_sparse: bool,
    /// Its clusters are compressed by zstd, if at all.
    pub is_zstd: bool,
    /// It is encrypted.
    pub is_encrypted: bool,
    /// Images of the chain; 1 without a backing file.
    pub depth: u64,
    /// The backing file and its format, as the image names them.
    pub backing: Option<(String, Option<String>)>,
    /// The lowest image of the chain and its format, as this one can name them.
    pub lowest: Option<(String, Option<String>)>,
    /// Internal snapshots.
    pub snapshots: u64,
    /// Persistent bitmaps.
    pub bitmaps: u64,
    /// Its guest data is in another file.
    pub has_data_file: bool,
}

impl Image {
    /// The part of a cluster that is allocated, and copied, at a time.
    pub fn unit_bytes(&self) -> u64 {
        match self.has_subclusters {
            true => (self.cluster_bytes / 32).max(512),
            false => self.cluster_bytes,
        }
    }
}

/// Space of the image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Space {
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes that it takes on the host.
    pub host_bytes: u64,
    /// Bytes of it that were never written.
    pub unwritten_bytes: u64,
    /// Guest data of this image, in bytes of the disk.
    pub data_bytes: u64,
    /// Bytes of the file in clusters that the disk uses, compressed ones as they are stored.
    pub used_bytes: u64,
    /// Bytes that the host has allocated for subclusters that hold nothing, in clusters that hold
    /// something.
    pub subcluster_bytes: u64,
    /// Tables and other metadata.
    pub metadata_bytes: u64,
    /// Guest data that is stored compressed, in bytes of the disk.
    pub compressed_bytes: u64,
    /// Clusters that do not follow the one before them in the file, in thousandths of all.
    pub scattered_permille: u64,
    /// Bytes of the images below this one but for the lowest, on the host.
    pub between_bytes: u64,
}

impl Space {
    /// Bytes on the host that neither the disk nor metadata uses: free clusters, and what internal
    /// snapshots hold.
    pub fn other_bytes(&self) -> u64 {
        let live = self.used_bytes.saturating_add(self.metadata_bytes);
        self.host_bytes.saturating_sub(live)
    }
}

/// How the disk lies in the file, and the file on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Order {
    /// Bytes of a read of all data from front to back.
    pub bytes: u64,
    /// Contiguous runs of that read on the device; `None` where places are not known.
    pub runs: Option<u64>,
    /// Extents of the file.
    pub extents: u64,
    /// The fewest that there could be.
    pub perfect: u64,
}

/// The file system, and what is below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name: `xfs` …
    pub kind: String,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// All its bytes.
    pub total_bytes: u64,
    /// Files can share their data (reflink).
    pub has_reflink: bool,
    /// It gives space to a file in one call (`fallocate`).
    pub has_fallocate: bool,
    /// The device has moving parts, as far as that is known.
    pub is_rotational: bool,
}

impl Host {
    /// The file system for the model.
    pub fn file_system(&self) -> FileSystem {
        FileSystem::of(&self.kind)
    }
}

/// The facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The image.
    pub image: Image,
    /// Its space.
    pub space: Space,
    /// Its order.
    pub order: Order,
    /// Its place.
    pub host: Host,
    /// Memory for tables in bytes.
    pub cache_bytes: u64,
    /// The engine.
    pub engine: Engine,
    /// Other images in the same directory on the same backing file.
    pub siblings: u64,
    /// Another process may be writing to the image: not all that it has is in its file.
    pub is_in_use: bool,
}

impl Facts {
    /// The share of the disk that this image has data for.
    pub fn filled(&self) -> f64 {
        let disk = self.image.disk_bytes.max(1) as f64;
        let held = match self.image.format {
            Format::Qcow2 => self.space.data_bytes,
            _ => self
                .space
                .host_bytes
                .saturating_sub(self.space.unwritten_bytes),
        };
        (held as f64 / disk).min(1.0)
    }

    /// The image is qcow2.
    pub fn is_qcow2(&self) -> bool {
        self.image.format == Format::Qcow2
    }
}
