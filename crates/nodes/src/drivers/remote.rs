//! `http`, `https`, `s3`, `gs`, `az` and `oci`: objects on web servers, in object stores and in
//! registries.

use std::sync::Arc;

use cowslip::file::{BlockFile, Storage};
use cowslip_block::options::{OptionEntry, Options};
use cowslip_block::{Error, Result, error};
use cowslip_remote::{Environment, RemoteName, SCHEMES, Scheme, Secrets};
use zeroize::Zeroizing;

use crate::driver::{FileSettings, Objects, Opening, Protocol, ProtocolNode};

/// The protocols of remote objects.
pub struct Remote;

impl Protocol for Remote {
    fn names(&self) -> &'static [&'static str] {
        SCHEMES
    }

    fn options(&self) -> &'static [OptionEntry] {
        cowslip_remote::OPTIONS
    }

    fn node_of_name(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        let object = RemoteName::of_file_name(name)?;
        Ok(object.map(|object| Arc::new(Object(object)) as Arc<dyn ProtocolNode>))
    }

    fn reads_names_as_options(&self) -> bool {
        true
    }

    fn read(&self, driver: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        let scheme = Scheme::of_name(driver).expect("a driver is read under one of its names");
        Ok(Arc::new(Object(RemoteName::of_options(scheme, options)?)))
    }
}

#[derive(Debug)]
struct Object(RemoteName);

impl ProtocolNode for Object {
    fn driver(&self) -> &'static str {
        self.0.url.scheme().name()
    }

    fn uri(&self) -> Option<String> {
        Some(self.0.url.whole().to_string())
    }

    fn file_name(&self) -> Option<String> {
        Some(self.0.url.whole().to_string())
    }

    fn storage(&self) -> Storage {
        Storage::named(&self.0.url.resource())
    }

    fn writes_by(&self) -> Option<&'static str> {
        self.0.cache.as_ref().map(|_| "cache-dir")
    }

    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        Box::pin(async move {
            let secret = |id: &Option<String>| text_of(id.as_deref(), settings.objects);
            let secrets = Secrets {
                password: secret(&self.0.secrets.password)?,
                cookie: secret(&self.0.secrets.cookie)?,
            };
            let environment = Environment::of_process();
            let shown = (settings.name, settings.host.writable);
            let opened = cowslip_remote::open(&self.0, secrets, &environment, shown).await;
            // As a backing file it is not what the command line names.
            let opened = opened.map_err(|error| Error::Opening {
                what: error::Opening::Named(self.0.url.to_string()),
                why: error.to_string(),
                cause: Some(Box::new(error)),
            });
            Ok(opened? as Arc<dyn BlockFile>)
        })
    }
}

/// The text of a secret.
fn text_of(id: Option<&str>, objects: &dyn Objects) -> Result<Option<Zeroizing<String>>> {
    let Some(id) = id else {
        return Ok(None);
    };
    let secret = objects.passphrase(id)?;
    let text = std::str::from_utf8(secret.bytes());
    let text = text.map_err(|_| Error::invalid(format!("Secret '{id}' is no text")))?;
    Ok(Some(Zeroizing::new(text.to_string())))
}
