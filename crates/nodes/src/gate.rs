//! The way to the files that images name: those of the host, exports of NBD servers, and what
//! `json:` describes.

use std::sync::Arc;

use cowslip::error::Opening;
use cowslip::file::host::{BackingPolicy, HostGate, resolve_name};
use cowslip::file::{BlockFile, ChosenBy, FileRequest, Gate, OpenFuture, OpenedFile};
use cowslip::{Error, Result};

use crate::image_spec::ImageSpec;
use crate::open::open_file;
use crate::settings::{Access, OpenSettings};
use crate::source::{Bottom, Source};

/// Opens what images name, as far as the policy allows.
#[derive(Clone, Debug)]
pub struct NodeGate {
    /// The way to files of the host.
    pub host: HostGate,
    /// Settings for other nodes.
    pub settings: OpenSettings,
}

impl Gate for NodeGate {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        self.host.open(request)
    }

    fn open_async<'a>(&'a self, request: &'a FileRequest<'a>) -> OpenFuture<'a> {
        match &self.settings.kept {
            Some(kept) => Box::pin(kept.or_name(request, self.open_new(request))),
            None => self.open_new(request),
        }
    }
}

impl NodeGate {
    fn open_new<'a>(&'a self, request: &'a FileRequest<'a>) -> OpenFuture<'a> {
        if self
            .settings
            .environment
            .registry
            .is_description(request.name)
        {
            return Box::pin(self.described(request));
        }
        Box::pin(std::future::ready(self.open(request).map(OpenedFile::from)))
    }

    async fn described(&self, request: &FileRequest<'_>) -> Result<OpenedFile> {
        if self.host.policy != BackingPolicy::Any && request.chosen_by == ChosenBy::Image {
            return Err(self
                .host
                .policy
                .forbidden(request, ": it does not name a file"));
        }
        let resolved = match request.chosen_by {
            ChosenBy::Image => resolve_name(request.named_by, request.name),
            ChosenBy::Caller => request.name.to_string(),
        };
        let name = resolved.as_str();
        let could_not = |error: Error| Error::Opening {
            what: Opening::Backing,
            cause: Some(Box::new(error.duplicate())),
            why: match error {
                Error::Opening {
                    what: Opening::Named(opened),
                    why,
                    ..
                } if opened == name => why,
                other => other.to_string(),
            },
        };
        let source = ImageSpec::named(name, None).resolve_by(&self.settings.environment.registry);
        let source = source.map_err(could_not)?;
        source.check_named_by(request.named_by, request.chosen_by)?;
        let settings = OpenSettings {
            access: match request.writable {
                true => Access::Write,
                false => Access::Read,
            },
            ..self.settings.clone()
        };
        let file = open_file(&source, &settings).await;
        Ok(OpenedFile {
            file: file.map_err(could_not)?,
            format: source.format,
        })
    }
}

impl Source {
    /// Checks that an image opens with this description of its backing file.
    ///
    /// # Errors
    /// An option of an image, not of its file; if the image has chosen it, an option by which files
    /// are written.
    pub fn check_named_by(&self, named_by: &str, chosen_by: ChosenBy) -> Result<()> {
        let written = self.writes_by();
        let written = written.filter(|_| chosen_by == ChosenBy::Image);
        match self.of_an_image().or(written) {
            Some(option) => Err(Error::Unsupported {
                file: named_by.to_string(),
                feature: format!("'{option}' in the description of its backing file").into(),
            }),
            None => Ok(()),
        }
    }

    /// An option by which files beside the image are made or written.
    fn writes_by(&self) -> Option<&'static str> {
        match &self.bottom {
            Bottom::Protocol { node, .. } => node.writes_by(),
            Bottom::Image(image) => image.writes_by(),
            Bottom::Host => None,
        }
    }

    /// An option of an image, and not of its file, if there is one.
    fn of_an_image(&self) -> Option<&'static str> {
        let image = &self.image;
        let keys = image.key_secret.is_some() || image.backing_key_secret.is_some();
        [
            ("backing", image.backing.is_some()),
            ("data-file", self.data_file.is_some()),
            ("snapshot", image.snapshot.is_some()),
            ("encrypt.format", image.encrypt_format.is_some()),
            ("key-secret", keys),
            ("copy-on-read", image.copy_on_read.is_some()),
            ("compress", image.compress),
        ]
        .into_iter()
        .find_map(|(option, is_said)| is_said.then_some(option))
    }
}
