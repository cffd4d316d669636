//! `published`: a disk that was published to an object store or a directory, read in place.
//!
//! A name that images store has to be pinned: it has the digest of the index, so it stands for the
//! same bytes for ever, whatever is published later.

use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::image::Format;
use cowslip_block::options::Kind::{Size, Text};
use cowslip_block::options::{OptionEntry, Options, option};
use cowslip_block::{Error, Result, Workers};
use cowslip_publish::disk::{CACHE_BYTES, PublishedDisk};
use cowslip_publish::file::PublishedFile;
use cowslip_publish::location::{Location, Version};
use cowslip_remote::StoreOptions;

use crate::driver::{FileSettings, Opening, Protocol, ProtocolNode};
use crate::stores::open_store;

/// How names of published disks begin.
pub const PREFIX: &str = "published:";

#[rustfmt::skip] // An option a line.
const OPTIONS: &[OptionEntry] = &[
    option("url", Text, "", "Store, name and digest: s3://bucket/name@DIGEST"),
    option("endpoint", Text, "", "URL of the server of an object store"),
    option("region", Text, "", "Region of a bucket"),
    option("cache-size", Size, "64M", "Unpacked data that is kept in memory"),
];

/// The protocol `published`.
pub struct Published;

impl Protocol for Published {
    fn names(&self) -> &'static [&'static str] {
        &["published"]
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn node_of_name(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        let Some(url) = name.strip_prefix(PREFIX) else {
            return Ok(None);
        };
        let node = Node::new(url, StoreOptions::default(), CACHE_BYTES)?;
        Ok(Some(Arc::new(node)))
    }

    fn read(&self, _: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        let Some(url) = options.take("url") else {
            return Err(Error::invalid("Parameter 'url' is missing"));
        };
        let store = StoreOptions {
            endpoint: options.take("endpoint"),
            region: options.take("region"),
            ..StoreOptions::default()
        };
        let cache_bytes = options.take_size("cache-size")?.unwrap_or(CACHE_BYTES);
        Ok(Arc::new(Node::new(&url, store, cache_bytes)?))
    }
}

#[derive(Debug)]
struct Node {
    location: Location,
    options: StoreOptions,
    cache_bytes: u64,
}

impl Node {
    fn new(url: &str, options: StoreOptions, cache_bytes: u64) -> Result<Node> {
        let location = Location::parse(url)?;
        if !matches!(location.version, Version::Pinned(_)) {
            return Err(Error::invalid(format!(
                "'{url}' may stand for another disk tomorrow: a disk that is used in place is named with its digest, as 'cowslip publish --list' prints it"
            )));
        }
        Ok(Node {
            location,
            options,
            cache_bytes,
        })
    }
}

impl ProtocolNode for Node {
    fn driver(&self) -> &'static str {
        "published"
    }

    fn file_name(&self) -> Option<String> {
        self.uri()
    }

    fn uri(&self) -> Option<String> {
        Some(format!("{PREFIX}{}", self.location))
    }

    /// The bytes are a disk's, so what a guest has written at its beginning says nothing.
    fn format(&self) -> Option<Format> {
        Some(Format::Raw)
    }

    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        Box::pin(async move {
            if settings.host.writable {
                return Err(Error::invalid("a published disk is read-only"));
            }
            let Version::Pinned(digest) = self.location.version else {
                unreachable!("the node was made of a pinned name");
            };
            let store = open_store(&self.location.root, &self.options)?;
            let workers = Workers::new(|work| drop(cowslip_queue::blocking(work)));
            let way = (self.cache_bytes, workers);
            let disk = PublishedDisk::open(&store, digest, settings.name, way).await?;
            Ok(Arc::new(PublishedFile::new(Arc::new(disk))) as Arc<dyn BlockFile>)
        })
    }
}
