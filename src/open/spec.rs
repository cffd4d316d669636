//! What the command line says of an image, as text: file names, `--image-opts`, `json:`.
//!
//! An option that is not understood is refused: silently dropping one would change what is opened.

use cowslip::file::host::{Aio, Driver, Locking};
use cowslip::image::{
    AllocPolicy, BackingChoice, CopyOnRead, DetectZeroes, DiscardPolicy, Format, ZeroMethod,
};
use cowslip::qcow2::snapshot::SnapshotChoice;

use super::above::{self, Copies};
use super::cache_sizes::CacheSizes;
use super::doubts::Doubts;
use super::foreign;
use super::graph::{self, Filters};
use super::json;
use crate::error::CommandError;
use crate::open::loaded::{with_id, with_name};
use crate::options::{self, Options};
use crate::output::{Program, usage_error};
use cowslip_nbd::remote::{self, ExportName};

/// An image as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// File name, `json:{...}`, or options if `image_opts`.
    pub filename: String,
    /// `-f`.
    pub format: Option<String>,
    /// `--image-opts`: the file name is a list of options.
    pub image_opts: bool,
}

/// What a specification resolves to: one file and how its image is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name as given, for messages.
    pub given: String,
    /// The file.
    pub filename: String,
    /// The name that says all of it, if the file's alone does not.
    pub full_name: Option<String>,
    /// The file is this export of an NBD server.
    pub remote: Option<ExportName>,
    /// No format stands over the export: `driver=nbd`.
    pub is_bare_export: bool,
    /// What is between the image and the file.
    pub filters: Filters,
    /// The format, if it is fixed.
    pub format: Option<Format>,
    /// `backing=` or `backing.file.filename=`.
    pub backing: Option<BackingChoice>,
    /// `discard=`.
    pub discard: Option<DiscardPolicy>,
    /// `discard-no-unref=on`.
    pub discard_no_unref: bool,
    /// `detect-zeroes=`.
    pub detect_zeroes: Option<DetectZeroes>,
    /// `zero-method=`.
    pub zero_method: ZeroMethod,
    /// `alloc-policy=`.
    pub alloc_policy: Option<AllocPolicy>,
    /// `cache-size=` and its parts.
    pub cache: CacheSizes,
    /// `read-only=on`.
    pub read_only: bool,
    /// `read-only=off`.
    pub read_write: bool,
    /// `cache.direct=`.
    pub direct: Option<bool>,
    /// `cache.no-flush=`.
    pub no_flush: Option<bool>,
    /// `force-share=on`.
    pub force_share: bool,
    /// `file.locking=`.
    pub locking: Locking,
    /// `file.driver=`, or `driver=` where that is a file's: what the file has to be.
    pub driver: Driver,
    /// `snapshot.id=`, `snapshot.name=`: the internal snapshot to read.
    pub snapshot: Option<SnapshotChoice>,
    /// `encrypt.format=`: the method that the image is encrypted with.
    pub encrypt_format: Option<String>,
    /// `encrypt.key-secret=`, or `key-secret=` of a LUKS volume: the ID of what opens the image.
    pub key_secret: Option<String>,
    /// The same of the encrypted images below it.
    pub backing_key_secret: Option<String>,
    /// What reads keep, of all that the image is asked to by a filter above it.
    pub copy_on_read: Option<CopyOnRead>,
    /// Writes store whole clusters, compressed.
    pub compress: bool,
    /// `backing=`, of which QEMU says that one should not.
    pub backing_is_empty: bool,
    /// `file.aio=`, and whether it is QEMU's `native`.
    pub aio: Option<(Aio, bool)>,
    /// What is wrong with the rest of what was said.
    pub doubts: Doubts,
    /// `data-file=` and `data-file.*`: the file that guest data is in.
    pub data_file: Option<Box<Source>>,
}

/// The format of this name.
///
/// # Errors
/// `Unknown driver 'x'`.
pub fn parse_format(name: &str) -> Result<Format, CommandError> {
    match name {
        "qcow2" => Ok(Format::Qcow2),
        "luks" => Ok(Format::Luks),
        "raw" | "file" | "host_device" | "host_cdrom" => Ok(Format::Raw),
        _ => Err(CommandError::new(foreign::driver_refused(name))),
    }
}

/// The name of a file without `file:`. What would name a protocol then is told apart by its
/// directory.
///
/// # Errors
/// It is behind a protocol that is not supported.
pub fn local_name(name: &str) -> Result<String, CommandError> {
    match (protocol(name), name.strip_prefix("file:")) {
        (None, _) => Ok(name.to_string()),
        (Some(_), Some(local)) if protocol(local).is_some() => Ok(format!("./{local}")),
        (Some(_), Some(local)) => Ok(local.to_string()),
        (Some(other), None) => Err(CommandError::new(foreign::protocol_refused(other))),
    }
}

/// What stands before the colon of a name, if that is before any slash.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/']).filter(|&end| end > 0)?;
    name[end..].starts_with(':').then_some(&name[..end])
}

impl ImageSpec {
    /// A file name and the `-f` that goes with it.
    pub fn named(filename: &str, format: Option<&str>) -> ImageSpec {
        ImageSpec {
            filename: filename.to_string(),
            format: format.map(str::to_string),
            image_opts: false,
        }
    }

    /// The one image that a verb of `qemu-img` is asked about.
    ///
    /// # Errors
    /// Not one name, or a format beside a list of options.
    pub fn only(
        filenames: &[String],
        format: Option<&str>,
        image_opts: bool,
        (verb, program): (&str, &Program),
    ) -> Result<ImageSpec, CommandError> {
        let [filename] = filenames else {
            let text = "Expecting one image file name";
            return Err(usage_error(text, verb, program));
        };
        if image_opts && format.is_some() {
            let text = "--image-opts and --format are mutually exclusive";
            return Err(CommandError::new(text));
        }
        Ok(ImageSpec {
            image_opts,
            ..ImageSpec::named(filename, format)
        })
    }

    /// Resolves it; opens nothing.
    ///
    /// # Errors
    /// `Could not open 'x': …` for what is not understood.
    pub fn resolve(&self) -> Result<Source, CommandError> {
        self.resolve_inner().map_err(|error| self.refused(&error))
    }

    fn refused(&self, why: &dyn std::fmt::Display) -> CommandError {
        CommandError::new(format!("Could not open '{}': {why}", self.filename))
    }

    fn resolve_inner(&self) -> Result<Source, CommandError> {
        let pairs = if self.image_opts {
            let first = self.filename.split(',').next().unwrap_or_default();
            if !first.is_empty() && !first.contains('=') {
                // A word by itself would name what a monitor has opened.
                let text = format!("Cannot find device='{first}' nor node-name='{first}'");
                return Err(CommandError::new(text));
            }
            options::pairs(&self.filename)
        } else if let Some(json) = self.filename.strip_prefix("json:") {
            let mut pairs = json::pairs(json)?;
            if let Some(format) = &self.format {
                pairs.retain(|(name, _)| name != "driver");
                pairs.push(("driver".to_string(), format.clone()));
            }
            pairs
        } else {
            if graph::named(&self.filename)?.is_some() {
                let format = self.format.iter();
                let driver = format.map(|format| ("driver".to_string(), format.clone()));
                let name = ("file.filename".to_string(), self.filename.clone());
                return self.resolve_pairs(driver.chain([name]).collect());
            }
            let format = self.format.as_deref().map(parse_format).transpose()?;
            let driver = self.format.as_deref().and_then(Driver::from_name);
            let mut source = Source {
                given: self.filename.clone(),
                format,
                driver: driver.unwrap_or_default(),
                ..Source::empty()
            };
            source.name(&self.filename)?;
            return Ok(source);
        };
        self.resolve_pairs(pairs)
    }

    fn resolve_pairs(&self, pairs: graph::Pairs) -> Result<Source, CommandError> {
        let mut source = Source::of_pairs(pairs, 0)?;
        if source.remote.is_some() && source.filename.is_empty() {
            source.filename.clone_from(&self.filename);
        }
        source.say_given(&self.filename);
        // In JSON it may be null, which is how it should be said.
        source.backing_is_empty &= self.image_opts;
        Ok(source)
    }
}

/// Takes what describes the data file out of a list.
fn data_file(pairs: &mut graph::Pairs, nodes: usize) -> Result<Option<Box<Source>>, CommandError> {
    let own = |name: &str| match name {
        "data-file" => Some("filename".to_string()),
        name => name.strip_prefix("data-file.").map(str::to_string),
    };
    let theirs = pairs.extract_if(.., |(name, _)| own(name).is_some());
    let mut theirs: graph::Pairs = theirs
        .filter_map(|(name, value)| Some((own(&name)?, value)))
        .collect();
    if theirs.is_empty() {
        return Ok(None);
    }
    if !theirs.iter().any(|(name, _)| name == "driver") {
        theirs.push(("driver".to_string(), "file".to_string()));
    }
    Source::of_pairs(theirs, nodes + 1).map(|source| Some(Box::new(source)))
}

impl Source {
    /// What a list describes, below so many other nodes; opens nothing.
    ///
    /// # Errors
    /// What is not understood.
    pub fn of_pairs(pairs: graph::Pairs, nodes: usize) -> Result<Source, CommandError> {
        if nodes >= graph::NODES_MAX {
            let most = graph::NODES_MAX;
            let text = format!("more than {most} nodes in a line are not supported");
            return Err(CommandError::new(text));
        }
        let pairs = json::expanded(pairs)?;
        let names_something = |(name, _): &(String, String)| {
            ["driver", "filename", "file"].contains(&name.as_str()) || name.starts_with("file.")
        };
        if !pairs.iter().any(names_something) {
            return Err(CommandError::new("Must specify either driver or file"));
        }
        let full_name = (!is_told_by_name(&pairs)).then(|| format!("json:{}", json::text(&pairs)));
        let (mut pairs, above) = above::take(pairs)?;
        let copy_on_read = match &above.copy_on_read {
            None => None,
            Some(Copies::All) => Some(CopyOnRead::All),
            Some(Copies::DownTo(bottom)) => Some(CopyOnRead::DownTo(above::depth(bottom, &pairs)?)),
        };
        let data_file = data_file(&mut pairs, nodes)?;
        let (pairs, filters) = graph::peel(pairs, nodes)?;
        let mut source = Source {
            full_name,
            filters,
            copy_on_read,
            compress: above.compress,
            data_file,
            ..Source::empty()
        };
        source.take_pairs(&pairs)?;
        Ok(source)
    }

    fn take_pairs(&mut self, pairs: &graph::Pairs) -> Result<(), CommandError> {
        let source = self;
        let names_nbd = |(name, value): &(String, String)| {
            matches!(name.as_str(), "driver" | "file.driver") && value == "nbd"
        };
        let is_remote = pairs.iter().any(names_nbd);
        let mut place = Vec::new();
        for (name, value) in pairs {
            let own = name.strip_prefix("file.").unwrap_or(name);
            match is_remote && remote::OPTIONS.iter().any(|option| option.is(own)) {
                true => place.push((own.to_string(), value.clone())),
                false => source.apply(name, value)?,
            }
        }
        if is_remote && source.remote.is_none() {
            source.remote = Some(ExportName::of_options(&mut Options::new(place))?);
        }
        if source.filename.is_empty() && source.remote.is_none() {
            let text = "A block device must be specified for \"file\"";
            return Err(CommandError::new(text));
        }
        Ok(())
    }

    /// The name as given, for messages: also those of the nodes below.
    fn say_given(&mut self, given: &str) {
        self.given = given.to_string();
        let below = [&mut self.data_file, &mut self.filters.image];
        for node in below.into_iter().flatten() {
            node.say_given(given);
        }
    }
}

/// Whether the file's name tells all that decides what the disk holds.
fn is_told_by_name(pairs: &[(String, String)]) -> bool {
    pairs.iter().all(|(name, value)| {
        let own = name.strip_prefix("file.").unwrap_or(name);
        match own {
            "driver" => !graph::is_filter(value),
            "offset" | "size" => false,
            _ => !["backing", "encrypt.", "key-secret", "image.", "file."]
                .iter()
                .any(|decides| own.starts_with(decides)),
        }
    })
}

impl Source {
    fn empty() -> Source {
        Source {
            given: String::new(),
            filename: String::new(),
            full_name: None,
            remote: None,
            is_bare_export: false,
            filters: Filters::default(),
            format: None,
            backing: None,
            discard: None,
            discard_no_unref: false,
            detect_zeroes: None,
            zero_method: ZeroMethod::Auto,
            alloc_policy: None,
            cache: CacheSizes::default(),
            read_only: false,
            read_write: false,
            direct: None,
            no_flush: None,
            force_share: false,
            locking: Locking::Auto,
            driver: Driver::Unsaid,
            snapshot: None,
            encrypt_format: None,
            key_secret: None,
            backing_key_secret: None,
            copy_on_read: None,
            compress: false,
            backing_is_empty: false,
            aio: None,
            doubts: Doubts::default(),
            data_file: None,
        }
    }

    /// Takes a file's name.
    fn name(&mut self, filename: &str) -> Result<(), CommandError> {
        if self.filters.null.is_some() || self.filters.image.is_some() {
            self.filename = filename.to_string();
            return Ok(());
        }
        if filename.is_empty() {
            let text = "The 'file' block driver requires a file name";
            return Err(CommandError::new(text));
        }
        self.remote = ExportName::of_file_name(filename).transpose()?;
        self.filename = match self.remote {
            Some(_) => filename.to_string(),
            None => local_name(filename)?,
        };
        Ok(())
    }

    /// The choice of a backing file so far, in this format.
    fn backing_in(&self, format: Format) -> BackingChoice {
        let name = self.backing.as_ref().and_then(override_name);
        match name.map(str::to_string) {
            Some(name) => BackingChoice::Override {
                name,
                format: Some(format),
            },
            None => BackingChoice::InFormat(format),
        }
    }

    fn apply(&mut self, name: &str, value: &str) -> Result<(), CommandError> {
        self.doubts.hear(name);
        match name {
            "driver" if value == "nbd" => {
                self.format = Some(Format::Raw);
                self.is_bare_export = true;
            }
            "driver" => {
                self.format = Some(parse_format(value)?);
                self.driver = Driver::from_name(value).unwrap_or(self.driver);
            }
            "file.driver" if value == "nbd" => {}
            "file.driver" => {
                let refused = || CommandError::new(foreign::driver_refused(value));
                self.driver = Driver::from_name(value).ok_or_else(refused)?;
            }
            "filename" | "file.filename" | "file" => self.name(value)?,
            "backing" => {
                self.backing = Some(backing_choice(value));
                self.backing_is_empty = value.is_empty();
            }
            "backing.file.filename" | "backing.filename" => {
                let format = self.backing.as_ref().and_then(override_format);
                let name = value.to_string();
                self.backing = Some(BackingChoice::Override { name, format });
            }
            "backing.driver" => self.backing = Some(self.backing_in(parse_format(value)?)),
            "discard" => self.discard = Some(discard_policy(value)?),
            "discard-no-unref" => self.discard_no_unref = options::switch(name, value)?,
            "detect-zeroes" => self.detect_zeroes = Some(detect_zeroes(value)?),
            "zero-method" => {
                self.zero_method = ZeroMethod::from_name(value).ok_or_else(|| {
                    CommandError::new(format!(
                        "Parameter '{name}' does not accept value '{value}' (auto, fresh, zero-range or write)"
                    ))
                })?;
            }
            "encrypt.format" => self.encrypt_format = Some(value.to_string()),
            "backing.encrypt.format" if ["aes", "luks"].contains(&value) => {}
            "encrypt.key-secret" | "key-secret" => self.key_secret = Some(value.to_string()),
            "backing.encrypt.key-secret" | "backing.key-secret" => {
                self.backing_key_secret = Some(value.to_string());
            }
            "snapshot.id" => self.snapshot = Some(with_id(self.snapshot.take(), value)),
            "snapshot.name" => self.snapshot = Some(with_name(self.snapshot.take(), value)),
            "alloc-policy" => self.alloc_policy = Some(alloc_policy(name, value)?),
            "read-only" => {
                self.read_only = options::switch(name, value)?;
                self.read_write = !self.read_only;
            }
            "force-share" => self.force_share = options::switch(name, value)?,
            "locking" | "file.locking" => self.locking = locking(value)?,
            "cache.direct" => self.direct = Some(options::switch(name, value)?),
            "cache.no-flush" => self.no_flush = Some(options::switch(name, value)?),
            "file.cache.direct" => self.direct = Some(options::switch("cache.direct", value)?),
            "file.cache.no-flush" => {
                self.no_flush = Some(options::switch("cache.no-flush", value)?)
            }
            "file.read-only" => self.read_only |= options::switch("read-only", value)?,
            "file.force-share" => self.force_share |= options::switch("force-share", value)?,
            "file.aio" => {
                let aio = super::parse_aio(value).ok_or_else(|| {
                    CommandError::new(format!("invalid parameter value: {value}"))
                })?;
                self.aio = Some((aio, value == "native"));
            }
            _ if self.cache.take(name, value)? => {}
            // These tune caches and checks that work otherwise here, name nodes of a graph, or are
            // nothing.
            _ if self.doubts.take(name, value)? => {}
            _ => {
                let text = format!("Block option '{name}' is not supported");
                return Err(CommandError::new(text));
            }
        }
        Ok(())
    }
}

fn backing_choice(value: &str) -> BackingChoice {
    match value {
        "" | "null" => BackingChoice::None,
        name => BackingChoice::Override {
            name: name.to_string(),
            format: None,
        },
    }
}

fn override_format(choice: &BackingChoice) -> Option<Format> {
    match choice {
        BackingChoice::Override { format, .. } => *format,
        BackingChoice::InFormat(format) => Some(*format),
        BackingChoice::AsNamed | BackingChoice::None => None,
    }
}

fn override_name(choice: &BackingChoice) -> Option<&str> {
    match choice {
        BackingChoice::Override { name, .. } => Some(name),
        BackingChoice::AsNamed | BackingChoice::InFormat(_) | BackingChoice::None => None,
    }
}

fn locking(value: &str) -> Result<Locking, CommandError> {
    match value {
        "auto" => Ok(Locking::Auto),
        "on" => Ok(Locking::On),
        "off" => Ok(Locking::Off),
        _ => Err(CommandError::new(format!(
            "invalid parameter value: {value}"
        ))),
    }
}

fn discard_policy(value: &str) -> Result<DiscardPolicy, CommandError> {
    match value {
        "unmap" | "on" => Ok(DiscardPolicy::Unmap),
        "ignore" | "off" => Ok(DiscardPolicy::Ignore),
        _ => Err(CommandError::new("Invalid discard option")),
    }
}

/// What writes of zeroes do, as `detect-zeroes` has it.
///
/// # Errors
/// No such mode.
pub fn detect_zeroes(value: &str) -> Result<DetectZeroes, CommandError> {
    DetectZeroes::from_name(value)
        .ok_or_else(|| CommandError::new(format!("invalid parameter value: {value}")))
}

/// How space is allocated, as options `name` have it.
///
/// # Errors
/// No such policy.
pub fn alloc_policy(name: &str, value: &str) -> Result<AllocPolicy, CommandError> {
    match value {
        "auto" => Ok(AllocPolicy::Auto),
        "contiguous" => Ok(AllocPolicy::Contiguous),
        "sparse" => Ok(AllocPolicy::Sparse),
        _ => Err(CommandError::new(format!(
            "Parameter '{name}' does not accept value '{value}' (auto, contiguous or sparse)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(filename: &str, image_opts: bool) -> Result<Source, String> {
        let spec = ImageSpec {
            filename: filename.to_string(),
            format: None,
            image_opts,
        };
        spec.resolve().map_err(|error| error.to_string())
    }

    #[test]
    fn the_three_ways_to_name_an_image_mean_the_same() {
        let by_options = resolve(
            "driver=qcow2,file.filename=a,,b,backing=,discard=unmap",
            true,
        );
        let by_json = resolve(
            r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a,b"},
                "backing":null,"discard":"unmap"}"#,
            false,
        );
        let (by_options, by_json) = (by_options.unwrap(), by_json.unwrap());
        assert_eq!(by_options.filename, "a,b");
        assert_eq!(by_options.format, Some(Format::Qcow2));
        let keys = "driver=qcow2,file.filename=a,encrypt.key-secret=s,backing.encrypt.key-secret=t";
        let keys = resolve(keys, true).unwrap();
        assert_eq!(keys.key_secret.as_deref(), Some("s"));
        assert_eq!(keys.backing_key_secret.as_deref(), Some("t"));
        let json = r#"json:{"driver":"luks","file.filename":"a","key-secret":"s"}"#;
        let luks = resolve(json, false).unwrap();
        assert_eq!(
            (luks.format, luks.key_secret),
            (Some(Format::Luks), Some("s".to_string()))
        );
        assert_eq!(by_options.backing, Some(BackingChoice::None));
        let (given, full_name) = (by_options.given.clone(), by_options.full_name.clone());
        // Only one of them says that it is a regular file.
        assert_eq!(
            (by_options.driver, by_json.driver),
            (Driver::Unsaid, Driver::File)
        );
        for source in [&by_options, &by_json] {
            assert_eq!(source.doubts.of_image(Format::Qcow2), Ok(()));
        }
        let as_given = Source {
            given,
            full_name,
            driver: Driver::Unsaid,
            doubts: by_options.doubts.clone(),
            // An empty name and null are both said to be none.
            backing_is_empty: true,
            ..by_json
        };
        assert_eq!(by_options, as_given);
        let both = resolve("file=a,snapshot.id=1,snapshot.name=x", true).unwrap();
        let swapped = resolve("file=a,snapshot.name=x,snapshot.id=1", true).unwrap();
        assert_eq!(both.snapshot, swapped.snapshot);
        let (id, name) = ("1".to_string(), "x".to_string());
        assert_eq!(both.snapshot, Some(SnapshotChoice::IdAndName { id, name }));
        assert_eq!(resolve("file:x", false).unwrap().filename, "x");
        assert_eq!(resolve("file:x:y", false).unwrap().filename, "./x:y");
        assert_eq!(resolve("./odd:name", false).unwrap().filename, "./odd:name");
        assert_eq!(resolve(":x", false).unwrap().filename, ":x");
    }

    #[test]
    fn an_export_is_a_file() {
        let remote = |filename, image_opts| {
            let source = resolve(filename, image_opts).unwrap();
            (source.remote.map(|remote| remote.export), source.format)
        };
        let raw = Some(Format::Raw);
        let export = |name: &str| Some(name.to_string());
        assert_eq!(
            remote("nbd:unix:/s:exportname=e", false),
            (export("e"), None)
        );
        assert_eq!(
            remote("driver=nbd,path=/s,export=e", true),
            (export("e"), raw)
        );
        let json = r#"json:{"driver":"qcow2","file":{"driver":"nbd","export":"e","server":{"type":"unix","path":"/s"}}}"#;
        assert_eq!(remote(json, false), (export("e"), Some(Format::Qcow2)));
        assert_eq!(
            remote("driver=raw,file.filename=nbd://h/e", true),
            (export("e"), raw)
        );
        assert!(
            resolve("driver=nbd,export=e", true)
                .unwrap_err()
                .contains("address missing")
        );
        let other = resolve("driver=raw,file.filename=a,host=h", true).unwrap();
        let why = other.doubts.of_image(Format::Raw).unwrap_err();
        assert!(why.contains("'host'"), "{why}");
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let refused = |filename, image_opts| resolve(filename, image_opts).unwrap_err();
        assert_eq!(
            refused("foo:x", false),
            "Could not open 'foo:x': Unknown protocol 'foo'"
        );
        assert!(refused("driver=foo,file.filename=a", true).ends_with("Unknown driver 'foo'"));
        assert!(refused("driver=vmdk,file.filename=a", true).contains("'vmdk' is not supported"));
        let http = "driver=qcow2,file.driver=http,file.url=http://h/a";
        assert!(refused(http, true).contains("'http' is not supported; let nbdkit serve it"));
        assert!(refused("rbd:x", false).contains("'rbd' is not supported; map it"));
        let later = resolve("driver=qcow2,file.filename=a,x=1", true).unwrap();
        let why = later.doubts.of_image(Format::Qcow2).unwrap_err();
        assert!(why.contains("'x'"), "{why}");
        assert!(refused("driver=qcow2", true).contains("must be specified"));
        for (options, format, option) in [
            (
                "driver=raw,file.filename=a,encrypt.key-secret=s",
                "raw",
                "encrypt.key-secret",
            ),
            (
                "driver=luks,file.filename=a,encrypt.key-secret=s",
                "luks",
                "encrypt.key-secret",
            ),
            (
                "driver=qcow2,file.filename=a,key-secret=s",
                "qcow2",
                "key-secret",
            ),
        ] {
            let source = resolve(options, true).unwrap();
            let why = source.doubts.of_image(source.format.unwrap()).unwrap_err();
            let text = format!("Block format '{format}' does not support the option '{option}'");
            assert!(why.ends_with(&text), "{options}: {why}");
        }
        let below = refused(
            "driver=qcow2,file.filename=a,backing.encrypt.format=x",
            true,
        );
        assert!(below.contains("'backing.encrypt.format' is not"), "{below}");
        assert!(refused("json:[]", false).contains("Invalid JSON"));
        assert!(refused("json:{", false).contains("JSON"));
    }
}
