//! Formats of images, and what writes, discards, zeroes and reads of them mean.

/// An image's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Bytes as they are.
    Raw,
    /// qcow2, version 2 or 3.
    Qcow2,
    /// A LUKS volume, version 1: encrypted bytes behind a header.
    Luks,
    /// Another one, by its name: that of a driver which the caller has added.
    Other(&'static str),
}

impl Format {
    /// The built-in format of a name, as `-f` and headers have it.
    pub fn from_name(name: &str) -> Option<Format> {
        match name {
            "raw" | "file" | "host_device" | "host_cdrom" => Some(Format::Raw),
            "qcow2" => Some(Format::Qcow2),
            "luks" => Some(Format::Luks),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Luks => "luks",
            Format::Other(name) => name,
        }
    }
}

/// What a guest's discard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DiscardPolicy {
    /// Nothing.
    #[default]
    Ignore,
    /// Frees clusters and gives their space back to the host.
    Unmap,
}

/// What becomes of a write whose bytes are all zero (`detect-zeroes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DetectZeroes {
    /// It is a write like others.
    #[default]
    Off,
    /// It is a write of zeroes that keeps its space.
    On,
    /// It is a write of zeroes whose space may be given back. Only with [`DiscardPolicy::Unmap`],
    /// as in QEMU.
    Unmap,
}

impl DetectZeroes {
    /// The mode of a name, as command lines have it.
    pub fn from_name(name: &str) -> Option<DetectZeroes> {
        match name {
            "off" => Some(DetectZeroes::Off),
            "on" => Some(DetectZeroes::On),
            "unmap" => Some(DetectZeroes::Unmap),
            _ => None,
        }
    }
}

/// How what a write leaves of a new cluster comes to read as zeroes (`zero-method`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ZeroMethod {
    /// Space that is known to read so is left as it is; elsewhere the cheaper of a call and a write
    /// by their size.
    #[default]
    Auto,
    /// Space that is known to read so is left as it is; elsewhere zeroes are written.
    Fresh,
    /// One call of the file system a cluster, whatever is known of it.
    ZeroRange,
    /// Zeroes are written, whatever is known of the space.
    Write,
}

impl ZeroMethod {
    /// The method of a name.
    pub fn from_name(name: &str) -> Option<ZeroMethod> {
        Some(match name {
            "auto" => ZeroMethod::Auto,
            "fresh" => ZeroMethod::Fresh,
            "zero-range" => ZeroMethod::ZeroRange,
            "write" => ZeroMethod::Write,
            _ => return None,
        })
    }

    /// Whether freshness counts.
    pub fn knows_fresh(self) -> bool {
        matches!(self, ZeroMethod::Auto | ZeroMethod::Fresh)
    }
}

/// How space on the host is allocated (`alloc_policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AllocPolicy {
    /// As the image says, or else by its geometry.
    #[default]
    Auto,
    /// A cluster's space is allocated as a whole and kept as a whole; the file grows by allocated
    /// space.
    Contiguous,
    /// Only what is written takes space; what is given up goes back subcluster by subcluster.
    Sparse,
}

/// What reads keep in the image of what they find in the layers below (`copy-on-read`), whole
/// subclusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CopyOnRead {
    /// Nothing.
    #[default]
    Off,
    /// All of it, and that nothing is there.
    All,
    /// What the layers down to this depth hold; 1 is the backing file, and at 0 nothing is kept.
    DownTo(u32),
}

/// Space that is allocated when an image is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// None.
    #[default]
    Off,
    /// Tables are complete, data clusters are assigned; the file is sparse.
    Metadata,
    /// Also the file system has allocated the data clusters.
    Falloc,
    /// Also zeroes are written to them.
    Full,
}

impl Preallocation {
    /// The mode of a name, as command lines have it.
    pub fn from_name(name: &str) -> Option<Preallocation> {
        Some(match name {
            "off" => Preallocation::Off,
            "metadata" => Preallocation::Metadata,
            "falloc" => Preallocation::Falloc,
            "full" => Preallocation::Full,
            _ => return None,
        })
    }
}

/// When a write is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// At the next flush.
    #[default]
    Writeback,
    /// At its completion: FUA on everything.
    Writethrough,
}
