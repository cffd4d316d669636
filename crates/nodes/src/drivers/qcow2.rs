//! `qcow2`: options of its images.

use cowslip::image::Format;
use cowslip_block::Result;
use cowslip_block::options::{self, Kind, OptionEntry, option};

use crate::driver::ImageFormat;
use crate::options::ImageOptions;

const OPTIONS: &[OptionEntry] = &[
    option(
        "discard-no-unref",
        Kind::Switch,
        "off",
        "Discards keep the allocation",
    ),
    option(
        "encrypt.",
        Kind::Text,
        "",
        "Encryption: format, and key-secret, the ID of a secret",
    ),
    option("cache-size", Kind::Size, "32M", "Memory for tables"),
    option(
        "l2-cache-size",
        Kind::Size,
        "",
        "The part of it for L2 tables",
    ),
    option(
        "refcount-cache-size",
        Kind::Size,
        "",
        "The part of it for refcounts",
    ),
    option("l2-cache-entry-size", Kind::Size, "", "Without effect"),
    option("lazy-refcounts", Kind::Switch, "", "Without effect"),
    option("pass-discard-request", Kind::Switch, "", "Without effect"),
    option("pass-discard-snapshot", Kind::Switch, "", "Without effect"),
    option("pass-discard-other", Kind::Switch, "", "Without effect"),
    option("cache-clean-interval", Kind::Number, "", "Without effect"),
    option("overlap-check", Kind::Text, "", "Without effect"),
    option("overlap-check.", Kind::Text, "", "Without effect"),
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
