//! `qcow2`: options of its images.

use cowslip::image::Format;
use cowslip_block::Result;
use cowslip_block::options::Kind::{Number, Size, Switch, Text};
use cowslip_block::options::{self, OptionEntry, ignored, option};

use crate::driver::ImageFormat;
use crate::options::ImageOptions;

#[rustfmt::skip] // An option a line.
const OPTIONS: &[OptionEntry] = &[
    option("discard-no-unref", Switch, "off", "Discards keep the allocation"),
    option("encrypt.", Text, "", "Encryption: format, and key-secret, the ID of a secret"),
    option("cache-size", Size, "32M", "Memory for tables"),
    option("l2-cache-size", Size, "", "The part of it for L2 tables"),
    option("refcount-cache-size", Size, "", "The part of it for refcounts"),
    ignored("l2-cache-entry-size", Size, ""),
    ignored("lazy-refcounts", Switch, ""),
    ignored("pass-discard-request", Switch, ""),
    ignored("pass-discard-snapshot", Switch, ""),
    ignored("pass-discard-other", Switch, ""),
    ignored("cache-clean-interval", Number, ""),
    ignored("overlap-check", Text, ""),
    ignored("overlap-check.", Text, ""),
];

/// The format `qcow2`.
pub struct Qcow2;

impl ImageFormat for Qcow2 {
    fn format(&self) -> Format {
        Format::Qcow2
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn take(&self, image: &mut ImageOptions, name: &str, value: &str) -> Result<bool> {
        match name {
            "discard-no-unref" => image.discard_no_unref = options::switch(name, value)?,
            "encrypt.format" => image.encrypt_format = Some(value.to_string()),
            "encrypt.key-secret" => image.key_secret = Some(value.to_string()),
            _ if image.cache.take(name, value)? => {}
            "lazy-refcounts"
            | "pass-discard-request"
            | "pass-discard-snapshot"
            | "pass-discard-other" => {
                let wrong = options::switch(name, value).err();
                image.refuse_later(wrong.map(|why| why.to_string()));
            }
            "overlap-check" | "overlap-check.template" => {
                image.refuse_later(wrong_template(value));
            }
            "cache-clean-interval" => {}
            _ => return Ok(name.starts_with("overlap-check.")),
        }
        Ok(true)
    }
}

fn wrong_template(value: &str) -> Option<String> {
    let is_one = ["none", "constant", "cached", "all"].contains(&value);
    (!is_one).then(|| {
        format!(
            "Unsupported value '{value}' for qcow2 option 'overlap-check'. Allowed are any of the following: none, \
             constant, cached, all"
        )
    })
}
