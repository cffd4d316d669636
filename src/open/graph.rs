//! Filters in a list of options, taken out of it: what is left describes an image and its file
//! alone, which `spec.rs` reads.
//!
//! A list describes a line of nodes, each the child of the one before: a format or none, then
//! filters, then what has the bytes: a file, an export, or the disk of another image, whose options
//! are a list of their own. The options of a child stand behind the name that its parent has for
//! it: `file.`, or `image.` under `blkdebug`.

use std::time::Duration;

use cowslip::limits::Limits;

use super::above;
use super::spec::Source;
use crate::error::CommandError;
use crate::options;
use cowslip_filters::{DebugSpec, NullSpec, RuleText};

/// Names and values.
pub type Pairs = Vec<(String, String)>;

/// A filter between an image and its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Requests fail or stop as rules have it.
    Debug(DebugSpec),
    /// A part of the file, from an offset on; to its end if it has no size.
    Part(u64, Option<u64>),
}

/// What is between an image and the bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filters {
    /// The uppermost first.
    pub list: Vec<Filter>,
    /// In place of a file, one that keeps nothing.
    pub null: Option<NullSpec>,
    /// Its driver, if no format stands over it.
    pub bare_null: Option<String>,
    /// In place of a file, the disk of an image.
    pub image: Option<Box<Source>>,
    /// What requests to the image's disk are cut by.
    pub limits: Limits,
}

/// Nodes in a line at most: nobody's has so many, and each is a call within a call.
pub const NODES_MAX: usize = 64;

/// How a file name begins that is a configuration and another file's name.
const BLKDEBUG_NAME: &str = "blkdebug:";

/// What a name means by itself: its options.
///
/// # Errors
/// It is a filter's, and not whole.
pub fn named(filename: &str) -> Result<Option<Pairs>, CommandError> {
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    for driver in ["null-co", "null-aio"] {
        let Some(rest) = filename.strip_prefix(driver) else {
            continue;
        };
        return match rest.strip_prefix("://") {
            Some("") => Ok(Some(vec![pair("driver", driver)])),
            Some(_) => Err(CommandError::new(format!(
                "The only allowed filename for this driver is '{driver}://'"
            ))),
            None => continue,
        };
    }
    let Some(rest) = filename.strip_prefix(BLKDEBUG_NAME) else {
        return Ok(None);
    };
    let Some((config, image)) = rest.split_once(':') else {
        let text = "blkdebug requires both config file and image path";
        return Err(CommandError::new(text));
    };
    let mut pairs = vec![pair("driver", "blkdebug"), pair("image.filename", image)];
    if !config.is_empty() {
        pairs.push(pair("config", config));
    }
    Ok(Some(pairs))
}

/// Takes the filters out of a list; `nodes` are above it.
///
/// # Errors
/// A filter that there is not, or an option that it does not have; too many nodes.
pub fn peel(list: Pairs, nodes: usize) -> Result<(Pairs, Filters), CommandError> {
    let mut peeling = Peeling {
        rest: list,
        plain: Vec::new(),
        filters: Filters::default(),
        nodes,
    };
    let mut prefix = peeling.format()?;
    while let Some(child) = peeling.filter(&prefix)? {
        prefix = child;
        peeling.nodes += 1;
        if peeling.nodes >= NODES_MAX {
            return Err(CommandError::new(format!(
                "'{prefix}': more than {NODES_MAX} nodes in a line are not supported"
            )));
        }
    }
    if peeling.filters == Filters::default() && peeling.plain.is_empty() {
        return Ok((peeling.rest, peeling.filters));
    }
    for (name, value) in std::mem::take(&mut peeling.rest) {
        // The options of the last node, by the name that they have where there is no filter.
        let name = match name.strip_prefix(&prefix) {
            Some(own) if !prefix.is_empty() => format!("file.{own}"),
            Some(_) | None => name,
        };
        peeling.plain.push((name, value));
    }
    Ok((peeling.plain, peeling.filters))
}

struct Peeling {
    rest: Pairs,
    plain: Pairs,
    filters: Filters,
    /// Nodes above the one that is looked at.
    nodes: usize,
}

impl Peeling {
    /// Takes an option; the last of several values.
    fn take(&mut self, name: &str) -> Option<String> {
        let mut found = None;
        self.rest.retain_mut(|(other, value)| {
            let is_it = other == name;
            if is_it {
                found = Some(std::mem::take(value));
            }
            !is_it
        });
        found
    }

    fn get(&self, name: &str) -> Option<&str> {
        let mut found = self.rest.iter().rev();
        found
            .find(|(other, _)| other == name)
            .map(|(_, value)| value.as_str())
    }

    /// The format's own options go to the plain ones, those of a `blkdebug` above it that only sets
    /// limits to the disk's. The beginning of the names that describe its file.
    fn format(&mut self) -> Result<String, CommandError> {
        match self.get("driver") {
            Some("blkdebug") if self.has_rules() => return Ok(String::new()),
            Some("blkdebug") if self.get("image.driver").is_some_and(is_format) => {
                self.limits_above()?;
            }
            Some(name) if is_format(name) || self.get("file.driver").is_some() => {}
            Some(_) => return Ok(String::new()),
            None => {}
        }
        // By what is said of the file itself, its name can be a filter's.
        if let Some(name) = self.take("filename") {
            self.rest.push(("file.filename".to_string(), name));
        }
        if self.get("driver") == Some("raw") {
            let part = self.part("")?;
            self.filters.list.extend(part);
        }
        Ok("file.".to_string())
    }

    /// Whether the uppermost node has rules: then it stands over the disk of the image below it.
    fn has_rules(&self) -> bool {
        let is_rule = |name: &str| {
            let lists = ["inject-error.", "set-state."];
            name == "config" || lists.iter().any(|list| name.starts_with(list))
        };
        self.rest.iter().any(|(name, _)| is_rule(name))
    }

    /// `blkdebug` without rules above a format: the disk of the image has its limits, and nothing
    /// stands over it.
    fn limits_above(&mut self) -> Result<(), CommandError> {
        let name = self.take("filename").or(self.take("x-image"));
        let Filter::Debug(spec) = self.debug("")? else {
            return Ok(());
        };
        let limits = spec.limits_over(1);
        self.filters.limits = limits.map_err(|error| CommandError::new(error.to_string()))?;
        self.take("driver");
        for (option, _) in &mut self.rest {
            if let Some(own) = option.strip_prefix("image.") {
                *option = own.to_string();
            }
        }
        if let Some(name) = name {
            let image = match named(&name)? {
                Some(pairs) => pairs
                    .into_iter()
                    .find(|(option, _)| option == "image.filename"),
                None => None,
            };
            let name = image.map_or(name, |(_, image)| image);
            self.rest.push(("file.filename".to_string(), name));
        }
        Ok(())
    }

    /// The filter whose options begin so, if it is one; the beginning of its child's.
    fn filter(&mut self, prefix: &str) -> Result<Option<String>, CommandError> {
        let filename = format!("{prefix}filename");
        let own = self.get(&filename).map(named).transpose()?.flatten();
        let own = own.unwrap_or_default();
        if !own.is_empty() {
            self.take(&filename);
        }
        for (name, value) in own {
            let name = format!("{prefix}{name}");
            if self.get(&name).is_none() {
                self.rest.push((name, value));
            }
        }
        let driver = self.get(&format!("{prefix}driver")).unwrap_or_default();
        match driver {
            "blkdebug" => {
                let filter = self.debug(prefix)?;
                self.filters.list.push(filter);
                self.below(prefix, "image.")
            }
            "qcow2" | "luks" | "copy-on-read" | "compress" if !prefix.is_empty() => {
                self.image(prefix)?;
                Ok(None)
            }
            "raw" if prefix.is_empty() => Ok(None),
            "raw" => {
                let part = self.part(prefix)?;
                self.filters.list.extend(part);
                self.take(&format!("{prefix}driver"));
                self.below(prefix, "file.")
            }
            "null-co" | "null-aio" => {
                self.null(prefix)?;
                Ok(None)
            }
            other => match instead(other) {
                Some(words) => Err(CommandError::new(format!(
                    "Driver '{other}' is not supported; {words}"
                ))),
                None => Ok(None),
            },
        }
    }

    /// The image whose options begin so, as the file of what is above it.
    fn image(&mut self, prefix: &str) -> Result<(), CommandError> {
        let own = |(name, value): (String, String)| (name[prefix.len()..].to_string(), value);
        let theirs = self
            .rest
            .extract_if(.., |(name, _)| name.starts_with(prefix));
        let theirs: Pairs = theirs.map(own).collect();
        let image = Source::of_pairs(theirs, self.nodes + 1)?;
        self.plain
            .push(("file.filename".to_string(), image.filename.clone()));
        self.filters.image = Some(Box::new(image));
        Ok(())
    }

    /// What is left of a filter's own options is said of the image.
    fn below(&mut self, prefix: &str, child: &str) -> Result<Option<String>, CommandError> {
        let below = format!("{prefix}{child}");
        if prefix.is_empty() {
            self.plain.push(("driver".to_string(), "raw".to_string()));
        }
        if !self.rest.iter().any(|(name, _)| name.starts_with(&below)) {
            return Err(CommandError::new(format!(
                "A block device must be specified for \"{}\"",
                child.trim_end_matches('.')
            )));
        }
        Ok(Some(below))
    }

    fn part(&mut self, prefix: &str) -> Result<Option<Filter>, CommandError> {
        let start = self.size(prefix, "offset")?;
        let size = self.size(prefix, "size")?;
        Ok((start.is_some() || size.is_some()).then(|| Filter::Part(start.unwrap_or(0), size)))
    }

    fn size(&mut self, prefix: &str, name: &str) -> Result<Option<u64>, CommandError> {
        let value = self.take(&format!("{prefix}{name}"));
        Ok(value.map(|value| options::size(name, &value)).transpose()?)
    }

    fn null(&mut self, prefix: &str) -> Result<(), CommandError> {
        let driver = self.take(&format!("{prefix}driver")).unwrap_or_default();
        let mut spec = NullSpec::default();
        if let Some(bytes) = self.size(prefix, "size")? {
            spec.bytes = bytes;
        }
        if let Some(text) = self.take(&format!("{prefix}latency-ns")) {
            let nanoseconds = text.parse();
            let nanoseconds =
                nanoseconds.map_err(|_| CommandError::new("latency-ns is invalid"))?;
            spec.latency = Duration::from_nanos(nanoseconds);
        }
        if let Some(value) = self.take(&format!("{prefix}read-zeroes")) {
            options::switch("read-zeroes", &value)?;
        }
        self.no_others(&driver, prefix)?;
        if prefix.is_empty() {
            self.plain.push(("driver".to_string(), "raw".to_string()));
            self.filters.bare_null = Some(driver.clone());
        }
        let name = ("file.filename".to_string(), format!("{driver}://"));
        self.plain.push(name);
        self.filters.null = Some(spec);
        Ok(())
    }

    fn debug(&mut self, prefix: &str) -> Result<Filter, CommandError> {
        let mut spec = DebugSpec {
            config: self.take(&format!("{prefix}config")),
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
            *limit = self.size(prefix, name)?.unwrap_or_default();
        }
        for kind in ["inject-error", "set-state"] {
            spec.rules.extend(self.rules(prefix, kind)?);
        }
        let plain_name = match prefix.is_empty() {
            true => self.take("filename"),
            false => None,
        };
        if let Some(image) = self.take(&format!("{prefix}x-image")).or(plain_name) {
            let name = format!("{prefix}image.filename");
            self.rest.push((name, image));
        }
        // Which permissions it takes is of no consequence: the image below takes what it needs.
        for list in ["take-child-perms.", "unshare-child-perms."] {
            let list = format!("{prefix}{list}");
            self.rest.retain(|(name, _)| !name.starts_with(&list));
        }
        self.take(&format!("{prefix}driver"));
        let child = format!("{prefix}image.");
        let held: Pairs = self
            .rest
            .extract_if(.., |(name, _)| name.starts_with(&child))
            .collect();
        let others = self.no_others("blkdebug", prefix);
        self.rest.extend(held);
        others.map(|()| Filter::Debug(spec))
    }

    /// The rules of a kind: `KIND.0.NAME`, `KIND.1.NAME` and so on.
    fn rules(&mut self, prefix: &str, kind: &str) -> Result<Vec<RuleText>, CommandError> {
        let list = format!("{prefix}{kind}.");
        let mut rules: Vec<RuleText> = Vec::new();
        let mut left: Pairs = Vec::new();
        for (name, value) in self
            .rest
            .extract_if(.., |(name, _)| name.starts_with(&list))
        {
            left.push((name[list.len()..].to_string(), value));
        }
        while !left.is_empty() {
            let this = format!("{}.", rules.len());
            let settings: Pairs = left
                .extract_if(.., |(name, _)| name.starts_with(&this))
                .map(|(name, value)| (name[this.len()..].to_string(), value))
                .collect();
            if settings.is_empty() {
                let (name, _) = &left[0];
                let text = format!("Unused option '{name}' for [{kind}]");
                return Err(CommandError::new(text));
            }
            rules.push(RuleText {
                kind: kind.to_string(),
                settings,
            });
        }
        Ok(rules)
    }

    /// Options that every node has go to the image; the first other one is refused.
    fn no_others(&mut self, driver: &str, prefix: &str) -> Result<(), CommandError> {
        let own = |name: &str| name.strip_prefix(prefix).map(str::to_string);
        let mut kept = Vec::new();
        for (name, value) in std::mem::take(&mut self.rest) {
            let Some(own) = own(&name) else {
                kept.push((name, value));
                continue;
            };
            match own.as_str() {
                "node-name" | "auto-read-only" | "cache.writeback" => {}
                "read-only" | "force-share" | "discard" | "detect-zeroes" | "cache.direct"
                | "cache.no-flush" => {
                    // What is said of the image itself counts for more.
                    self.plain.insert(0, (own, value));
                }
                _ => {
                    return Err(CommandError::new(format!(
                        "Block protocol '{driver}' doesn't support the option '{own}'"
                    )));
                }
            }
        }
        self.rest = kept;
        Ok(())
    }
}

/// Drivers that have a file below them and are no filters here.
fn is_format(driver: &str) -> bool {
    matches!(driver, "qcow2" | "raw" | "luks")
}

/// Whether a driver changes what is below it.
pub fn is_filter(driver: &str) -> bool {
    driver == "blkdebug" || above::is_above(driver)
}

/// What does the work of a driver that is not supported.
fn instead(driver: &str) -> Option<&'static str> {
    Some(match driver {
        "throttle" => "limits belong to whoever reads and writes the image",
        "blkverify" => "compare the images afterwards: qemu-img compare",
        "quorum" => "mirror the files below it: dm-raid, or a file system with copies",
        "blklogwrites" => "log writes below it: dm-log-writes",
        "blkreplay" | "replication" => "there is no machine here that would be replayed",
        "preallocate" => "images grow ahead of need by themselves (alloc-policy=contiguous)",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &str) -> Pairs {
        options::split(list).unwrap()
    }

    fn peeled(list: &str) -> (Pairs, Filters) {
        peel(pairs(list), 0).unwrap_or_else(|error| panic!("{list}: {error}"))
    }

    fn debug(filters: &Filters) -> &DebugSpec {
        match &filters.list[..] {
            [Filter::Debug(spec)] => spec,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_list_without_filters_stays_as_it_is() {
        for list in [
            "driver=qcow2,file.filename=a",
            "file=a,backing=",
            "driver=file,filename=a",
        ] {
            let (plain, filters) = peeled(list);
            assert_eq!(filters, Filters::default(), "{list}");
            assert_eq!(plain, pairs(list), "{list}");
        }
    }

    #[test]
    fn a_filter_under_a_format_is_found_by_driver_and_by_name() {
        let one =
            "driver=qcow2,file.driver=blkdebug,file.config=c,file.image.filename=a,file.align=4k";
        let two = "driver=qcow2,file.filename=blkdebug:c:a,file.align=4k";
        for list in [one, two] {
            let (mut plain, filters) = peeled(list);
            plain.sort();
            assert_eq!(plain, pairs("driver=qcow2,file.filename=a"), "{list}");
            let spec = debug(&filters);
            assert_eq!(
                (spec.config.as_deref(), spec.limits.align),
                (Some("c"), 4096)
            );
        }
        let (plain, filters) = peeled("driver=blkdebug,image.filename=a,inject-error.0.event=none");
        assert_eq!(plain, pairs("driver=raw,file.filename=a"));
        assert_eq!(debug(&filters).rules.len(), 1);
        let (plain, filters) = peeled("driver=raw,offset=1k,size=2k,file.filename=a");
        assert_eq!(plain, pairs("driver=raw,file.filename=a"));
        assert_eq!(filters.list, [Filter::Part(1024, Some(2048))]);
    }

    #[test]
    fn limits_above_a_format_are_those_of_its_disk() {
        let list =
            "driver=blkdebug,image.driver=qcow2,align=4k,max-transfer=64k,filename=blkdebug::a";
        let (mut plain, filters) = peeled(list);
        plain.sort();
        assert_eq!(plain, pairs("driver=qcow2,file.filename=a"));
        let limits = Limits {
            align: 4096,
            transfer_max: 65536,
            ..Limits::default()
        };
        let expected = Filters {
            limits,
            ..Filters::default()
        };
        assert_eq!(filters, expected);
        let list = "driver=blkdebug,image.driver=qcow2,opt-discard=3k,max-discard=4k,filename=a";
        let error = peel(pairs(list), 0).unwrap_err().to_string();
        assert!(
            error.contains("Cannot meet constraints with max-discard 4096"),
            "{error}"
        );
    }

    #[test]
    fn an_image_in_the_line_is_a_list_of_its_own() {
        for list in [
            "driver=raw,file.driver=qcow2,file.file.filename=a,file.backing=",
            "driver=blkdebug,config=c,image.driver=qcow2,image.file.filename=a,image.backing=",
        ] {
            let (plain, filters) = peeled(list);
            let expected = pairs("driver=raw,file.filename=a");
            let all_there = plain.iter().all(|pair| expected.contains(pair));
            assert!(all_there && plain.len() == 2, "{list}: {plain:?}");
            let image = filters.image.unwrap();
            assert_eq!(image.filename, "a", "{list}");
            assert_eq!(image.backing, Some(cowslip::image::BackingChoice::None));
        }
        let list = "driver=blkdebug,config=c,image.driver=qcow2,filename=a";
        assert_eq!(peeled(list).1.image.unwrap().filename, "a");
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let nested = |child: &str, driver: &str| {
            let line = |depth: usize| format!("{}driver={driver}", child.repeat(depth));
            let list: Vec<String> = (0..200).map(line).collect();
            peel(pairs(&list.join(",")), 0).unwrap_err().to_string()
        };
        for (child, driver) in [("image.", "blkdebug"), ("file.", "qcow2"), ("file.", "raw")] {
            let why = nested(child, driver);
            assert!(why.contains("more than 64 nodes"), "{driver}: {why}");
        }
        let why = nested("file.", "copy-on-read");
        assert!(why.contains("more than 64 nodes"), "{why}");
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        for (list, expected) in [
            (
                "driver=throttle,file.filename=a",
                "'throttle' is not supported",
            ),
            (
                "driver=qcow2,file.driver=quorum",
                "'quorum' is not supported",
            ),
            (
                "driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.foo=1",
                "Block protocol 'blkdebug' doesn't support the option 'foo'",
            ),
            (
                "driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.inject-error.1.event=none",
                "Unused option '1.event' for [inject-error]",
            ),
            ("driver=blkdebug", "must be specified for \"image\""),
            (
                "driver=null-co,foo=1",
                "'null-co' doesn't support the option 'foo'",
            ),
            (
                "driver=qcow2,file.filename=blkdebug:a",
                "both config file and image path",
            ),
        ] {
            let error = peel(pairs(list), 0).unwrap_err().to_string();
            assert!(error.contains(expected), "{list}: {error}");
        }
    }
}
