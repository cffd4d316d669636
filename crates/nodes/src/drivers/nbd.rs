//! `nbd`: an export of a server.

use std::sync::Arc;

use cowslip::file::Storage;
use cowslip_block::Result;
use cowslip_block::options::{OptionEntry, Options};
use cowslip_nbd::remote::{self, ExportName};

use crate::driver::{Creation, FileSettings, Opening, Protocol, ProtocolNode};

/// The protocol `nbd`.
pub struct Nbd;

impl Protocol for Nbd {
    fn names(&self) -> &'static [&'static str] {
        &["nbd"]
    }

    fn options(&self) -> &'static [OptionEntry] {
        remote::OPTIONS
    }

    fn node_of_name(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        let export = ExportName::of_file_name(name).transpose()?;
        Ok(export.map(|export| Arc::new(Export(export)) as Arc<dyn ProtocolNode>))
    }

    fn passes_options_on(&self) -> bool {
        true
    }

    fn read(&self, _: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        Ok(Arc::new(Export(ExportName::of_options(options)?)))
    }
}

#[derive(Debug)]
struct Export(ExportName);

impl ProtocolNode for Export {
    fn driver(&self) -> &'static str {
        "nbd"
    }

    fn uri(&self) -> Option<String> {
        Some(self.0.uri())
    }

    fn creation(&self) -> Creation {
        Creation::Existing
    }

    fn storage(&self) -> Storage {
        self.0.storage()
    }

    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        Box::pin(async move {
            let Export(export) = self;
            // Before anything is sent: who has no credentials meets no server.
            let tls = export.tls.as_ref();
            let tls = tls.map(|tls| settings.objects.tls_to(&export.server, tls));
            remote::open(
                export,
                tls.transpose()?,
                settings.name,
                settings.host.writable,
            )
            .await
        })
    }
}
