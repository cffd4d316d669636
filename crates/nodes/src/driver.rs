//! Drivers: each is a table of options, and a constructor.
//!
//! A [`Protocol`] stores bytes. A [`Filter`] is a file over another one. An [`ImageFilter`] stands
//! over the disk of an image, and the engine does its work. An [`ImageFormat`] is a format of
//! images, with its options; it brings the way to read images that the engine has not built in.

use std::fmt;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use cowslip::file::host::HostOptions;
use cowslip::file::{BlockFile, Storage};
use cowslip::formats::FormatDriver;
use cowslip::image::Format;
use cowslip::limits::Limits;
use cowslip::luks::Passphrase;
use cowslip_block::options::{OptionEntry, Options, Pairs};
use cowslip_block::{Error, Result};
use cowslip_filters::Breakpoints;
use cowslip_nbd::remote::{Address, TlsName};
use cowslip_nbd::tls::ClientTls;

use crate::options::{Above, ImageOptions};

/// A file that is being opened.
pub type Opening<'a> = Pin<Box<dyn Future<Output = Result<Arc<dyn BlockFile>>> + Send + 'a>>;

/// Files that are open already, by names that no file system has.
pub trait PassedFiles: fmt::Debug + Send + Sync {
    /// A descriptor of the file of a name, for reading or for both; `None` if the name is of the
    /// file system.
    ///
    /// # Errors
    /// Text of the reason: no file has this name, or none that is open so.
    fn open(&self, name: &str, writable: bool) -> Option<std::result::Result<OwnedFd, String>>;
}

/// Secrets and credentials, which images name by their IDs.
pub trait Objects: fmt::Debug + Send + Sync {
    /// The secret of this ID, as a passphrase of an encrypted image.
    ///
    /// # Errors
    /// There is none, or it is no text.
    fn passphrase(&self, id: &str) -> Result<Passphrase>;

    /// Credentials for the connection to a server.
    ///
    /// # Errors
    /// They cannot be used.
    fn tls_to(&self, server: &Address, name: &TlsName) -> Result<ClientTls>;
}

/// No secrets and no credentials.
#[derive(Clone, Copy, Debug)]
pub struct NoObjects;

impl Objects for NoObjects {
    fn passphrase(&self, id: &str) -> Result<Passphrase> {
        Err(Error::invalid(format!("No secret with id '{id}'")))
    }

    fn tls_to(&self, _: &Address, _: &TlsName) -> Result<ClientTls> {
        Err(Error::invalid("No TLS credentials"))
    }
}

/// Settings that all drivers of files get.
#[derive(Clone, Copy, Debug)]
pub struct FileSettings<'a> {
    /// The name that users know it by.
    pub name: &'a str,
    /// Access, and options of files of the host.
    pub host: &'a HostOptions,
    /// Secrets and credentials that options name by IDs.
    pub objects: &'a dyn Objects,
    /// Breakpoints, for filters that have them.
    pub breakpoints: &'a Breakpoints,
}

/// A driver that stores the bytes of a file.
pub trait Protocol: Sync {
    /// Its names in `driver=`.
    fn names(&self) -> &'static [&'static str];

    /// Its options. It is given those of the table, and no others.
    fn options(&self) -> &'static [OptionEntry];

    /// The options that a file name stands for, if it is one of this driver's: `null-co://`.
    ///
    /// # Errors
    /// It is one, and not whole.
    fn options_of_name(&self, _name: &str) -> Result<Option<Pairs>> {
        Ok(None)
    }

    /// The node that a file name describes in full, if it is a URI of this driver's. Images name
    /// backing files so, and a format may stand beside it.
    ///
    /// # Errors
    /// It is one, and not whole.
    fn node_of_name(&self, _name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        Ok(None)
    }

    /// Whether options that it does not have are read as those of a file of the host.
    fn passes_options_on(&self) -> bool {
        false
    }

    /// Whether a file name beside other options is one of them, and does not stand for all.
    fn reads_names_as_options(&self) -> bool {
        false
    }

    /// Reads its options under one of its names, and takes them; opens nothing.
    ///
    /// # Errors
    /// A value that cannot be.
    fn read(&self, driver: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>>;
}

/// Support of a protocol for new images in its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creation {
    /// Its files hold no images that are made by name.
    Unsupported,
    /// Its files exist before, and keep their lengths: exports of a server, devices.
    Existing,
    /// It makes files, and they take any length.
    New,
}

/// A file that a protocol can open.
pub trait ProtocolNode: fmt::Debug + Send + Sync {
    /// The name of its driver.
    fn driver(&self) -> &'static str;

    /// The file name that it has where none was given; `None` if the name as given is its name.
    fn file_name(&self) -> Option<String> {
        None
    }

    /// Its URI, for messages and for images that name it.
    fn uri(&self) -> Option<String> {
        None
    }

    /// The format of the disk in it where none is given; `None`, as by default, if its first bytes
    /// decide.
    fn format(&self) -> Option<Format> {
        None
    }

    /// An option of it by which files of the host are made or written, if it has one. Images may
    /// not choose such files.
    fn writes_by(&self) -> Option<&'static str> {
        None
    }

    /// Opens the file, for writing if `settings` say so. It claims nothing.
    ///
    /// # Errors
    /// The failure of the system or the server; options that contradict the file.
    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a>;

    /// Its support for new images. By default none can be made in it.
    fn creation(&self) -> Creation {
        Creation::Unsupported
    }

    /// The storage of its bytes, as far as it is known before it is open. By default nothing is.
    fn storage(&self) -> Storage {
        Storage::default()
    }

    /// Opens it for a new image. With [`Creation::New`] it makes the file if there is none, and
    /// leaves the bytes of one that exists; by default, the file has to exist.
    fn create<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        self.open(settings)
    }
}

/// A driver that changes the view of another file, or watches it.
pub trait Filter: Sync {
    /// The name in `driver=`.
    fn name(&self) -> &'static str;

    /// The options of the driver's own; [`OptionEntry`] says what each means.
    fn options(&self) -> &'static [OptionEntry];

    /// Its name for the file below: `file` or `image`.
    fn child(&self) -> &'static str;

    /// The options that a file name stands for, if it is one of this driver's.
    ///
    /// # Errors
    /// It is one, and not whole.
    fn options_of_name(&self, _name: &str) -> Result<Option<Pairs>> {
        Ok(None)
    }

    /// Takes the option that names the file below, if it has one beside that file's own.
    fn take_child_name(&self, _options: &mut Options) -> Option<String> {
        None
    }

    /// Whether options that it does not have are those of the file below.
    fn passes_options_on(&self) -> bool {
        false
    }

    /// Whether the options only say how long requests to the disk below may be. Then it can stand
    /// over an image without hiding what it is.
    fn only_limits(&self, _options: &Options) -> bool {
        false
    }

    /// Reads its options, and takes them; `None` if they change nothing.
    ///
    /// # Errors
    /// A value that cannot be.
    fn read(&self, options: &mut Options) -> Result<Option<Arc<dyn FilterNode>>>;
}

/// A filter that can be put over a file.
pub trait FilterNode: fmt::Debug + Send + Sync {
    /// Limits of requests.
    ///
    /// # Errors
    /// Limits that cannot be met.
    fn limits(&self) -> Result<Limits> {
        Ok(Limits::default())
    }

    /// Whether it observes the work of the image above it.
    fn observes_image(&self) -> bool {
        false
    }

    /// Puts it over a file.
    fn open<'a>(&'a self, below: Arc<dyn BlockFile>, settings: FileSettings<'a>) -> Opening<'a>;
}

/// A driver over the disk of an image.
pub trait ImageFilter: Sync {
    /// The name in `driver=`.
    fn name(&self) -> &'static str;

    /// The options of the driver's own; [`OptionEntry`] says what each means.
    fn options(&self) -> &'static [OptionEntry];

    /// Reads its options, and takes them.
    ///
    /// # Errors
    /// A value that cannot be.
    fn read(&self, options: &mut Options, above: &mut Above) -> Result<()>;
}

/// A format of images.
pub trait ImageFormat: Sync {
    /// The format that the driver stands for.
    fn format(&self) -> Format;

    /// The way to open its images, unless the engine has it built in.
    fn driver(&self) -> Option<&'static FormatDriver> {
        None
    }

    /// The options that it has beside those of all images.
    fn options(&self) -> &'static [OptionEntry] {
        &[]
    }

    /// Reads one of them; `false` if it is none of these.
    ///
    /// # Errors
    /// A value that cannot be.
    fn take(&self, _image: &mut ImageOptions, _name: &str, _value: &str) -> Result<bool> {
        Ok(false)
    }
}
