//! [`Destination`]: a file, a device or a node of some protocol in which an image can be made.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use cowslip::file::host::{FlushPolicy, HostOptions};
use cowslip::file::{BlockFile, ReadSet};
use cowslip_block::{Error, Result};

use crate::driver::{Creation, FileSettings, ProtocolNode};
use crate::foreign::local_name;
use crate::registry::Registry;
use crate::settings::OpenSettings;

/// A file, a device or a node in which an image can be made.
#[derive(Clone, Debug)]
pub enum Destination {
    /// A file or device of the host, by its path.
    Host(String),
    /// A node of a protocol.
    Node(NodeDestination),
}

/// A node of a protocol in which images can be made.
#[derive(Clone, Debug)]
pub struct NodeDestination {
    node: Arc<dyn ProtocolNode>,
    name: String,
}

impl Destination {
    /// The destination of that name.
    ///
    /// # Errors
    /// It is behind a protocol that there is not, or that has no files for new images; a name of a
    /// protocol that is not whole.
    pub fn named(name: &str, registry: &Arc<Registry>) -> Result<Destination> {
        let Some(node) = registry.protocol_node(name)? else {
            return Ok(Destination::Host(local_name(name)?));
        };
        if node.creation() == Creation::Unsupported {
            return Err(Error::invalid(format!(
                "Protocol driver '{}' does not support image creation",
                node.driver()
            )));
        }
        let name = name.to_string();
        Ok(Destination::Node(NodeDestination { node, name }))
    }

    /// The name, for messages, and for the names of other files, which are relative to it.
    pub fn name(&self) -> &str {
        match self {
            Destination::Host(name) | Destination::Node(NodeDestination { name, .. }) => name,
        }
    }

    /// The path of a file or device of the host.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Destination::Host(path) => Some(Path::new(path)),
            Destination::Node(_) => None,
        }
    }

    /// Whether it exists and keeps its length and, until it is written, its bytes: a device, or a
    /// node of a protocol that makes no files.
    pub fn is_fixed(&self) -> bool {
        let path = match self {
            Destination::Host(path) => path,
            Destination::Node(destination) => {
                return destination.node.creation() != Creation::New;
            }
        };
        let kind = std::fs::metadata(path).map(|found| found.file_type());
        kind.is_ok_and(|kind| kind.is_block_device() || kind.is_char_device())
    }
}

impl NodeDestination {
    /// Checks, before the node is opened, that it stores nothing of a set: some servers take one
    /// client at a time, and a second connection would wait for the first.
    ///
    /// # Errors
    /// [`Error::Overwrites`]
    pub fn check(&self, read: &ReadSet) -> Result<()> {
        read.check_stored(&self.name, &self.node.storage())
    }

    /// Makes the file, or opens the one that exists, for writing. Its bytes are lost only when the
    /// image is written.
    ///
    /// # Errors
    /// The driver's failure, in QEMU's words.
    pub async fn create(
        &self,
        flush: FlushPolicy,
        settings: &OpenSettings,
    ) -> Result<Arc<dyn BlockFile>> {
        let host = HostOptions {
            writable: true,
            flush,
            ..HostOptions::default()
        };
        let file_settings = FileSettings {
            name: &self.name,
            host: &host,
            objects: &*settings.environment.objects,
            breakpoints: &settings.breakpoints,
        };
        self.node.create(file_settings).await.map_err(|why| {
            Error::invalid(match self.node.creation() {
                Creation::New => format!("Could not create '{}': {why}", self.name),
                Creation::Existing | Creation::Unsupported => format!(
                    "Protocol driver '{}' does not support creating new images, so an existing \
                     image must be selected as the target; however, opening the given target as \
                     an existing image failed: {why}",
                    self.node.driver()
                ),
            })
        })
    }
}
