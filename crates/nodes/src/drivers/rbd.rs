//! `rbd`: an image in Ceph RBD.

use std::sync::Arc;
use std::time::Duration;

use cowslip::file::host::PageCache;
use cowslip::file::{BlockFile, Storage};
use cowslip_block::options::{OptionEntry, Options};
use cowslip_block::{Error, Result};
use cowslip_rbd::{Access, RbdName, Settings};

use crate::driver::{Creation, FileSettings, Objects, Opening, Protocol, ProtocolNode};

/// The protocol `rbd`.
pub struct Rbd;

impl Protocol for Rbd {
    fn names(&self) -> &'static [&'static str] {
        &["rbd"]
    }

    fn options(&self) -> &'static [OptionEntry] {
        cowslip_rbd::OPTIONS
    }

    fn node_of_name(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        let image = RbdName::of_file_name(name)?;
        Ok(image.map(|image| Arc::new(Image(image)) as Arc<dyn ProtocolNode>))
    }

    fn read(&self, _: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        Ok(Arc::new(Image(RbdName::of_options(options)?)))
    }
}

#[derive(Debug)]
struct Image(RbdName);

impl Image {
    fn open_for<'a>(&'a self, settings: FileSettings<'a>, access: Access) -> Opening<'a> {
        Box::pin(async move {
            let Image(name) = self;
            let key = name.key_secret.as_deref();
            let settings = Settings {
                shown: settings.name,
                access,
                cached: settings.host.page_cache == PageCache::Use,
                key: key.map(|id| key_of(id, settings.objects)).transpose()?,
                wait_timeout: wait_timeout()?,
            };
            Ok(cowslip_rbd::open(name, settings).await? as Arc<dyn BlockFile>)
        })
    }
}

impl ProtocolNode for Image {
    fn driver(&self) -> &'static str {
        "rbd"
    }

    fn uri(&self) -> Option<String> {
        Some(self.0.file_name())
    }

    fn file_name(&self) -> Option<String> {
        Some(self.0.file_name())
    }

    fn storage(&self) -> Storage {
        self.0.storage()
    }

    fn writes_by(&self) -> Option<&'static str> {
        self.0.reaches_files_by()
    }

    fn creation(&self) -> Creation {
        match self.0.snapshot {
            None => Creation::New,
            Some(_) => Creation::Unsupported,
        }
    }

    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        let access = match settings.host.writable {
            true => Access::Write,
            false => Access::Read,
        };
        self.open_for(settings, access)
    }

    fn create<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        self.open_for(settings, Access::Create)
    }
}

/// The key of a secret.
fn key_of(id: &str, objects: &dyn Objects) -> Result<String> {
    let secret = objects.passphrase(id)?;
    let text = std::str::from_utf8(secret.bytes());
    let text = text.map_err(|_| Error::invalid(format!("Secret '{id}' is no text")))?;
    Ok(text.trim_end().to_string())
}

/// The time that the program gives all files behind networks, if it says one.
#[cfg(feature = "remote")]
fn wait_timeout() -> Result<Option<Duration>> {
    let environment = cowslip_remote::Environment::of_process();
    Ok(cowslip_remote::Defaults::in_force(&environment)?.timeout)
}

#[cfg(not(feature = "remote"))]
fn wait_timeout() -> Result<Option<Duration>> {
    Ok(None)
}
