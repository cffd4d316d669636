//! From the command line's words for an image to an open one: the one place where the commands open
//! images, with their cache modes and I/O engines.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use cowslip::Image;
use cowslip::file::BlockFile;
use cowslip::file::host::{
    Aio, CreateMode, FlushPolicy, HostGate, HostOptions, PageCache, open_host_file,
};
use cowslip::image::{BackingChoice, DiscardPolicy, OpenOptions, WritePolicy};
use cowslip_queue::{Backend, Queue};

use crate::error::{CommandError, opening_reason};

mod spec;

pub use spec::{ImageSpec, Source, local_name, parse_format};

/// `--cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// The page cache; durable at a flush.
    #[default]
    Writeback,
    /// O_DIRECT; durable at a flush.
    None,
    /// The page cache; durable at completion.
    Writethrough,
    /// O_DIRECT; durable at completion.
    DirectSync,
    /// The page cache; flushes are ignored.
    Unsafe,
}

impl CacheMode {
    /// The mode of this name.
    pub fn parse(name: &str) -> Option<CacheMode> {
        Some(match name {
            "writeback" => CacheMode::Writeback,
            "none" | "off" => CacheMode::None,
            "writethrough" => CacheMode::Writethrough,
            "directsync" => CacheMode::DirectSync,
            "unsafe" => CacheMode::Unsafe,
            _ => return None,
        })
    }

    /// Whether the page cache is used.
    pub fn page_cache(self) -> PageCache {
        match self {
            CacheMode::None | CacheMode::DirectSync => PageCache::Bypass,
            _ => PageCache::Use,
        }
    }

    /// When writes are durable.
    pub fn write_policy(self) -> WritePolicy {
        match self {
            CacheMode::Writethrough | CacheMode::DirectSync => WritePolicy::Writethrough,
            _ => WritePolicy::Writeback,
        }
    }

    /// Whether flushes count.
    pub fn flush_policy(self) -> FlushPolicy {
        match self {
            CacheMode::Unsafe => FlushPolicy::Ignore,
            _ => FlushPolicy::Honour,
        }
    }
}

/// `--aio`: the engine of this name. QEMU's `native` is the ring here.
pub fn parse_aio(name: &str) -> Option<Aio> {
    Some(match name {
        "threads" => Aio::Threads,
        "native" | "io_uring" => Aio::Uring,
        _ => return None,
    })
}

/// Whether an image is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Access {
    /// Only for reading.
    #[default]
    Read,
    /// Also for writing.
    Write,
}

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct OpenHow {
    /// For writing or not.
    pub access: Access,
    /// `--cache`.
    pub cache: CacheMode,
    /// `--aio`.
    pub aio: Aio,
    /// What discards do.
    pub discard: DiscardPolicy,
    /// Where unallocated data comes from, unless the specification says otherwise.
    pub backing: BackingChoice,
    /// See [`OpenOptions::metadata_only`].
    pub metadata_only: bool,
}

impl Source {
    /// `Could not open 'x': why`.
    pub fn refused(&self, error: &cowslip::Error) -> CommandError {
        let why = opening_reason(&self.filename, error);
        CommandError::new(format!("Could not open '{}': {why}", self.given))
    }

    /// How the host's file is opened.
    pub fn host_options(&self, how: &OpenHow) -> HostOptions {
        let direct = self.direct.map(|direct| match direct {
            true => PageCache::Bypass,
            false => PageCache::Use,
        });
        let flush = self.no_flush.map(|no_flush| match no_flush {
            true => FlushPolicy::Ignore,
            false => FlushPolicy::Honour,
        });
        HostOptions {
            writable: how.access == Access::Write && !self.read_only,
            create: CreateMode::OpenExisting,
            page_cache: direct.unwrap_or(how.cache.page_cache()),
            flush: flush.unwrap_or(how.cache.flush_policy()),
            aio: how.aio,
        }
    }
}

/// Opens the image, and its chain, as `qemu-img` and its kin do.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_image(spec: &ImageSpec, how: &OpenHow) -> Result<Image, CommandError> {
    let source = spec.resolve()?;
    let host = source.host_options(how);
    let options = OpenOptions {
        format: source.format,
        writable: host.writable,
        write_policy: how.cache.write_policy(),
        discard: source.discard.unwrap_or(how.discard),
        backing: source.backing.clone().unwrap_or(how.backing.clone()),
        metadata_only: how.metadata_only,
        cache_bytes: 0,
    };
    let file = open_file(&source, how)?;
    let gate = HostGate { options: host };
    let opened = Image::open(file, options, &gate).await;
    opened.map_err(|error| source.refused(&error))
}

/// Opens the image's file alone.
///
/// # Errors
/// `Could not open 'x': why`.
pub fn open_file(source: &Source, how: &OpenHow) -> Result<Arc<dyn BlockFile>, CommandError> {
    let file = open_host_file(Path::new(&source.filename), &source.host_options(how));
    file.map_err(|error| source.refused(&error))
}

/// Runs a verb's work on a queue of its own.
///
/// # Errors
/// The queue cannot be made, or the work fails.
pub fn block_on<T>(
    aio: Aio,
    work: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    let backend = match aio {
        Aio::Auto => Backend::Auto,
        Aio::Uring => Backend::Uring,
        Aio::Threads => Backend::Threads,
    };
    let queue = Queue::new(backend).map_err(|error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not set up the I/O queue: {words}"))
    })?;
    queue.block_on(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_image_opens_in_every_cache_mode_and_can_be_written() {
        // Beside the test's binary is a disk, where direct I/O works; /tmp may be memory.
        let test = std::env::current_exe().unwrap();
        let dir = tempfile::tempdir_in(test.parent().unwrap()).unwrap();
        let path = dir.path().join("a.qcow2");
        let name = path.to_str().unwrap();
        let options = HostOptions {
            writable: true,
            create: CreateMode::Truncate,
            ..HostOptions::default()
        };
        for mode in ["writeback", "none", "writethrough", "directsync", "unsafe"] {
            let how = OpenHow {
                access: Access::Write,
                cache: CacheMode::parse(mode).unwrap(),
                ..OpenHow::default()
            };
            let work = async {
                let file = open_host_file(&path, &options)?;
                let fresh = cowslip::qcow2::create::CreateOptions::new(1 << 20);
                cowslip::qcow2::create::create(file, None, &fresh).await?;
                let image = open_image(&ImageSpec::named(name, Some("qcow2")), &how).await?;
                let data = cowslip::Buf::copy_of(&[7; 512]);
                image.write(512, data, Default::default()).await?;
                image.close().await?;
                let image = open_image(&ImageSpec::named(name, None), &OpenHow::default()).await?;
                let read = image.read(0, cowslip::BufMut::zeroed(1536)).await?;
                Ok((image.size(), read.to_vec()))
            };
            let (size, read) = block_on(Aio::Auto, work).unwrap();
            assert_eq!(size, 1 << 20, "{mode}");
            assert_eq!(read, [[0; 512], [7; 512], [0; 512]].concat(), "{mode}");
        }
    }
}
