//! Image formats and policies of writes, discards, zeroes and reads.

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Raw bytes.
    Raw,
    /// qcow2, version 2 or 3.
    Qcow2,
    /// A LUKS volume, version 1: encrypted bytes behind a header.
    Luks,
    /// Another format, by its name; the caller has added its driver.
    Other(&'static str),
}

impl Format {
    /// The built-in format of this name, as in `-f` and in headers.
    pub fn from_name(name: &str) -> Option<Format> {
        match name {
            "raw" | "file" | "host_device" | "host_cdrom" => Some(Format::Raw),
            "qcow2" => Some(Format::Qcow2),
            "luks" => Some(Format::Luks),
            _ => None,
        }
    }

    /// The name on command lines and in images.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Luks => "luks",
            Format::Other(name) => name,
        }
    }
}

/// Effect of a guest's discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DiscardPolicy {
    /// Discards have no effect.
    #[default]
    Ignore,
    /// Frees clusters and deallocates their space on the host.
    Unmap,
}

/// Treatment of writes whose bytes are all zero (`detect-zeroes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DetectZeroes {
    /// Writes them as data.
    #[default]
    Off,
    /// Turns them into requests for zeroes that keep the space.
    On,
    /// Turns them into requests for zeroes that may deallocate the space. Only with
    /// [`DiscardPolicy::Unmap`], as in QEMU.
    Unmap,
}

impl DetectZeroes {
    /// The mode of this name, as on command lines.
    pub fn from_name(name: &str) -> Option<DetectZeroes> {
        match name {
            "off" => Some(DetectZeroes::Off),
            "on" => Some(DetectZeroes::On),
            "unmap" => Some(DetectZeroes::Unmap),
            _ => None,
        }
    }
}

/// Method of zeroing the part of a new cluster that a write leaves (`zero-method`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ZeroMethod {
    /// Leaves space that is known to read as zeroes; elsewhere takes the cheaper of a call and a
    /// write, by size.
    #[default]
    Auto,
    /// Leaves space that is known to read as zeroes; elsewhere writes zeroes.
    Fresh,
    /// Makes one call of the file system for each cluster, even if its space is known to be zero.
    ZeroRange,
    /// Writes zeroes, even if the space is known to be zero.
    Write,
}

impl ZeroMethod {
    /// The method of this name.
    pub fn from_name(name: &str) -> Option<ZeroMethod> {
        Some(match name {
            "auto" => ZeroMethod::Auto,
            "fresh" => ZeroMethod::Fresh,
            "zero-range" => ZeroMethod::ZeroRange,
            "write" => ZeroMethod::Write,
            _ => return None,
        })
    }

    /// Whether the method makes use of space that is known to read as zeroes.
    pub fn knows_fresh(self) -> bool {
        matches!(self, ZeroMethod::Auto | ZeroMethod::Fresh)
    }
}

/// Allocation of space on the host (`alloc_policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AllocPolicy {
    /// As the image specifies, otherwise by its geometry.
    #[default]
    Auto,
    /// Allocates and keeps whole clusters; the file grows by allocated space.
    Contiguous,
    /// Allocates only written bytes, and deallocates by subcluster.
    Sparse,
}

/// Data from lower layers that reads store in the image (`copy-on-read`), in whole subclusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CopyOnRead {
    /// Reads store nothing.
    #[default]
    Off,
    /// All data, and also the absence of data.
    All,
    /// Data of the layers down to this depth; 1 is the backing file, 0 stores nothing.
    DownTo(u32),
}

/// Space that is allocated when an image is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// None.
    #[default]
    Off,
    /// Complete tables and assigned data clusters; the file is sparse.
    Metadata,
    /// `Metadata`, with data clusters allocated by the file system.
    Falloc,
    /// `Falloc`, with zeroes written to the data clusters.
    Full,
}

impl Preallocation {
    /// The mode of this name, as on command lines.
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

/// Time at which a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// At the next flush.
    #[default]
    Writeback,
    /// At its completion, as with FUA on every write.
    Writethrough,
}
