//! Opening: by name as the command does, or over files that the caller opens.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use cowslip::file::host::{BackingPolicy, FlushPolicy, HostOptions, host_file_of, resolve_name};
use cowslip::file::{BlockFile, ChosenBy, FileRequest, Gate, Sharing};
use cowslip::image::{DiscardPolicy, OpenOptions};
use cowslip::luks::Passphrase;
use cowslip::{Image, Result, Workers};
use cowslip_nbd::remote::{Address, TlsName};
use cowslip_nbd::tls::ClientTls;
use cowslip_nodes::driver::{NoObjects, Objects};
use cowslip_nodes::{Access, CacheMode, Environment, ImageSpec, OpenSettings, drivers, open_image};

/// Opens files that an image names, for a caller who does not leave that to the engine.
pub trait Opener: Send + Sync {
    /// Opens the file of this name, which is relative to the working directory, for reading, or
    /// for both. `chosen_by` says whether the name stands in the image, which may be untrusted.
    ///
    /// # Errors
    /// A refusal, with its errno.
    fn open(&self, naming: &Naming<'_>) -> std::io::Result<OwnedFd>;
}

/// A file to open.
#[derive(Clone, Copy, Debug)]
pub struct Naming<'a> {
    /// Name of the file; relative ones are resolved against the image that has them.
    pub name: &'a str,
    /// Whether it is to be written: an image's data file, if the image is.
    pub writable: bool,
    /// Whether the name stands in an image.
    pub by_image: bool,
}

/// How an image is opened.
#[derive(Clone, Default)]
pub struct OpenRequest {
    /// Name of the format; `None` finds it out.
    pub format: Option<String>,
    /// For writing too.
    pub writable: bool,
    /// Use of the page cache, and when writes are durable.
    pub cache: CacheMode,
    /// Effect of a discard.
    pub discard: DiscardPolicy,
    /// Whether it is read although another process writes it.
    pub force_share: bool,
    /// Which files the image may name.
    pub policy: BackingPolicy,
    /// Passphrase of an encrypted image.
    pub passphrase: Option<Passphrase>,
    /// Opens what the image names.
    pub opener: Option<Arc<dyn Opener>>,
}

/// The only secret that there is: that of the request.
#[derive(Debug)]
struct OneSecret(Passphrase);

/// Its ID.
const SECRET: &str = "passphrase";

impl Objects for OneSecret {
    fn passphrase(&self, id: &str) -> Result<Passphrase> {
        match id {
            SECRET => Ok(self.0.clone()),
            id => NoObjects.passphrase(id),
        }
    }

    fn tls_to(&self, server: &Address, name: &TlsName) -> Result<ClientTls> {
        NoObjects.tls_to(server, name)
    }
}

impl OpenRequest {
    fn host_options(&self) -> HostOptions {
        HostOptions {
            writable: self.writable,
            page_cache: self.cache.page_cache(),
            flush: match self.cache {
                CacheMode::Unsafe => FlushPolicy::Ignore,
                _ => FlushPolicy::Honour,
            },
            ..HostOptions::default()
        }
    }

    /// Settings of the crate of nodes.
    pub(crate) fn settings(&self) -> OpenSettings {
        let objects: Arc<dyn Objects> = match &self.passphrase {
            Some(passphrase) => Arc::new(OneSecret(passphrase.clone())),
            None => Arc::new(NoObjects),
        };
        let environment = Environment {
            objects,
            ..Environment::default()
        };
        OpenSettings {
            access: match self.writable {
                true => Access::Write,
                false => Access::Read,
            },
            cache: self.cache,
            discard: self.discard,
            sharing: self.sharing(),
            policy: self.policy,
            key_secret: self.passphrase.as_ref().map(|_| SECRET.to_string()),
            workers: workers(),
            ..OpenSettings::new(environment)
        }
    }

    fn sharing(&self) -> Sharing {
        match self.force_share {
            true => Sharing::Forced,
            false => Sharing::default(),
        }
    }

    fn options(&self) -> Result<OpenOptions> {
        let registry = drivers::standard();
        let format = self.format.as_deref();
        Ok(OpenOptions {
            format: format.map(|name| registry.format(name)).transpose()?,
            formats: registry.engine_formats().clone(),
            writable: self.writable,
            write_policy: self.cache.write_policy(),
            discard: self.discard,
            sharing: self.sharing(),
            passphrase: self.passphrase.clone(),
            backing_passphrase: self.passphrase.clone(),
            workers: workers(),
            ..OpenOptions::default()
        })
    }
}

/// The queue's threads for blocking calls, which pack and unpack clusters too.
fn workers() -> Workers {
    Workers::new(|work| drop(cowslip_queue::blocking(work)))
}

/// Opens the image of a name: a path, `nbd://…`, `json:{…}` or another that the command takes.
/// With an [`Opener`] it is a path, and the opener opens it too.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open(name: &str, request: &OpenRequest) -> Result<Image> {
    let Some(opener) = &request.opener else {
        let spec = ImageSpec::named(name, request.format.as_deref());
        return open_image(&spec, &request.settings()).await;
    };
    let naming = Naming {
        name,
        writable: request.writable,
        by_image: false,
    };
    let fd = opener
        .open(&naming)
        .map_err(|error| could_not(name, error))?;
    open_file(fd, name, request).await
}

/// Opens the image in a file that is open already, by a name for messages, against which names in
/// the image are resolved.
///
/// # Errors
/// As [`open`]. The descriptor's access must be that of the request.
pub async fn open_file(fd: OwnedFd, name: &str, request: &OpenRequest) -> Result<Image> {
    let host = request.host_options();
    let file = host_file_of(fd, name, &host)?;
    let options = request.options()?;
    match &request.opener {
        Some(opener) => {
            let opener = Arc::clone(opener);
            Image::open(file, options, &OpenerGate { opener, host }).await
        }
        None => {
            let gate = cowslip_nodes::NodeGate {
                host: cowslip::file::host::HostGate {
                    options: host,
                    policy: request.policy,
                },
                settings: request.settings(),
            };
            Image::open(file, options, &gate).await
        }
    }
}

fn could_not(name: &str, error: std::io::Error) -> cowslip::Error {
    cowslip::Error::io(format!("Could not open '{name}'"), error)
}

/// The way to files through an [`Opener`].
struct OpenerGate {
    opener: Arc<dyn Opener>,
    host: HostOptions,
}

impl Gate for OpenerGate {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        let name = resolve_name(request.named_by, request.name);
        let naming = Naming {
            name: &name,
            writable: request.writable,
            by_image: request.chosen_by == ChosenBy::Image,
        };
        let fd = self.opener.open(&naming);
        let fd = fd.map_err(|error| could_not(&name, error))?;
        let options = HostOptions {
            writable: request.writable,
            ..self.host
        };
        host_file_of(fd, &name, &options)
    }
}
