//! `null-co` and `null-aio`: a file that keeps nothing.

use std::sync::Arc;
use std::time::Duration;

use cowslip::file::BlockFile;
use cowslip_block::options::Kind::{Number, Size, Switch};
use cowslip_block::options::{OptionEntry, Options, Pairs, option};
use cowslip_block::{Error, Result};
use cowslip_filters::{NullFile, NullSpec};

use crate::driver::{FileSettings, Opening, Protocol, ProtocolNode};

const NAMES: &[&str] = &["null-co", "null-aio"];

#[rustfmt::skip] // An option a line.
const OPTIONS: &[OptionEntry] = &[
    option("size", Size, "1G", "Length of the file"),
    option("latency-ns", Number, "0", "Nanoseconds that each request takes"),
    option("read-zeroes", Switch, "off", "Without effect: it always reads as zeroes"),
];

/// The protocols `null-co` and `null-aio`.
pub struct Null;

impl Protocol for Null {
    fn names(&self) -> &'static [&'static str] {
        NAMES
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn options_of_name(&self, name: &str) -> Result<Option<Pairs>> {
        for driver in NAMES {
            match name
                .strip_prefix(driver)
                .and_then(|rest| rest.strip_prefix("://"))
            {
                None => {}
                Some("") => return Ok(Some(vec![("driver".to_string(), driver.to_string())])),
                Some(_) => {
                    return Err(Error::invalid(format!(
                        "The only allowed filename for this driver is '{driver}://'"
                    )));
                }
            }
        }
        Ok(None)
    }

    fn read(&self, driver: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        let mut spec = NullSpec::default();
        if let Some(bytes) = options.take_size("size")? {
            spec.bytes = bytes;
        }
        if let Some(text) = options.take("latency-ns") {
            let nanoseconds = text.parse();
            let nanoseconds = nanoseconds.map_err(|_| Error::invalid("latency-ns is invalid"))?;
            spec.latency = Duration::from_nanos(nanoseconds);
        }
        options.take_switch("read-zeroes")?;
        let named = NAMES.iter().find(|name| **name == driver);
        let driver = named.expect("a driver is read under one of its names");
        Ok(Arc::new(Nothing { driver, spec }))
    }
}

#[derive(Debug)]
struct Nothing {
    driver: &'static str,
    spec: NullSpec,
}

impl ProtocolNode for Nothing {
    fn driver(&self) -> &'static str {
        self.driver
    }

    fn file_name(&self) -> Option<String> {
        Some(format!("{}://", self.driver))
    }

    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        let file = NullFile::new(settings.name, self.spec.clone());
        Box::pin(std::future::ready(Ok(Arc::new(file) as Arc<dyn BlockFile>)))
    }
}
