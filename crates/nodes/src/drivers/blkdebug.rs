//! `blkdebug`: errors and stops of requests by rules.

use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::limits::Limits;
use cowslip_block::options::Kind::{Size, Text};
use cowslip_block::options::{OptionEntry, Options, Pairs, ignored, option};
use cowslip_block::{Error, Result};
use cowslip_filters::{DebugFile, DebugSpec, RuleText};

use crate::driver::{FileSettings, Filter, FilterNode, Opening};

#[rustfmt::skip] // An option a line.
const OPTIONS: &[OptionEntry] = &[
    option("config", Text, "", "File with rules"),
    option("inject-error.", Text, "", "Rules for requests that fail, numbered from 0"),
    option("set-state.", Text, "", "Rules for states, numbered from 0"),
    option("align", Size, "0", "Alignment of requests"),
    option("max-transfer", Size, "0", "Longest read or write"),
    option("opt-write-zero", Size, "0", "Unit of writes of zeroes"),
    option("max-write-zero", Size, "0", "Longest write of zeroes"),
    option("opt-discard", Size, "0", "Unit of discards"),
    option("max-discard", Size, "0", "Longest discard"),
    option("x-image", Text, "", "File name of the image below"),
    // Which permissions it takes is of no consequence: the image below takes what it needs.
    ignored("take-child-perms.", Text, ""),
    ignored("unshare-child-perms.", Text, ""),
];

/// The beginning of file names that give a configuration and another file's name.
const NAME: &str = "blkdebug:";

/// The filter `blkdebug`.
pub struct Blkdebug;

impl Filter for Blkdebug {
    fn name(&self) -> &'static str {
        "blkdebug"
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn child(&self) -> &'static str {
        "image"
    }

    fn options_of_name(&self, name: &str) -> Result<Option<Pairs>> {
        let Some(rest) = name.strip_prefix(NAME) else {
            return Ok(None);
        };
        let Some((config, image)) = rest.split_once(':') else {
            let text = "blkdebug requires both config file and image path";
            return Err(Error::invalid(text));
        };
        let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
        let mut pairs = vec![pair("driver", "blkdebug"), pair("image.filename", image)];
        if !config.is_empty() {
            pairs.push(pair("config", config));
        }
        Ok(Some(pairs))
    }

    fn take_child_name(&self, options: &mut Options) -> Option<String> {
        options.take("x-image")
    }

    fn only_limits(&self, options: &Options) -> bool {
        let is_rule = |name: &str| {
            let lists = ["inject-error.", "set-state."];
            name == "config" || lists.iter().any(|list| name.starts_with(list))
        };
        !options.names().any(is_rule)
    }

    fn read(&self, options: &mut Options) -> Result<Option<Arc<dyn FilterNode>>> {
        let mut spec = DebugSpec {
            config: options.take("config"),
            ..DebugSpec::default()
        };
        let limits = &mut spec.limits;
        for (name, limit) in [
            ("align", &mut limits.align),
            ("max-transfer", &mut limits.transfer_max),
            ("opt-write-zero", &mut limits.zeroes_unit),
            ("max-write-zero", &mut limits.zeroes_max),
            ("opt-discard", &mut limits.discard_unit),
            ("max-discard", &mut limits.discard_max),
        ] {
            *limit = options.take_size(name)?.unwrap_or_default();
        }
        for kind in ["inject-error", "set-state"] {
            spec.rules.extend(rules(options, kind)?);
        }
        for list in ["take-child-perms.", "unshare-child-perms."] {
            options.take_group(list);
        }
        Ok(Some(Arc::new(Debug(spec))))
    }
}

/// The rules of a kind: `KIND.0.NAME`, `KIND.1.NAME` and so on.
fn rules(options: &mut Options, kind: &str) -> Result<Vec<RuleText>> {
    let mut rules: Vec<RuleText> = Vec::new();
    let mut left = options.take_group(&format!("{kind}."));
    while !left.is_empty() {
        let this = format!("{}.", rules.len());
        let settings: Pairs = left
            .extract_if(.., |(name, _)| name.starts_with(&this))
            .map(|(name, value)| (name[this.len()..].to_string(), value))
            .collect();
        if settings.is_empty() {
            let (name, _) = &left[0];
            let text = format!("Unused option '{name}' for [{kind}]");
            return Err(Error::invalid(text));
        }
        rules.push(RuleText {
            kind: kind.to_string(),
            settings,
        });
    }
    Ok(rules)
}

#[derive(Debug)]
struct Debug(DebugSpec);

impl FilterNode for Debug {
    fn limits(&self) -> Result<Limits> {
        self.0.limits_over(1)
    }

    fn observes_image(&self) -> bool {
        true
    }

    fn open<'a>(&'a self, below: Arc<dyn BlockFile>, settings: FileSettings<'a>) -> Opening<'a> {
        let debugged = DebugFile::new(below, &self.0, settings.breakpoints.clone());
        let debugged = debugged.map(|file| Arc::new(file) as Arc<dyn BlockFile>);
        Box::pin(std::future::ready(debugged))
    }
}
