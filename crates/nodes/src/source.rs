//! [`Source`]: an image as a tree of options describes it, with the chain of nodes between it and
//! its bytes.
//!
//! Nothing is opened here. An option that is not understood is refused: silently dropping one would
//! change what is opened. Some are refused only when the file or the image is open, since QEMU says
//! so then, and by then something else may have been wrong.

use std::sync::Arc;

use cowslip::file::host::Driver;
use cowslip::image::{CopyOnRead, Format};
use cowslip_block::options::{self, Pairs};
use cowslip_block::{Error, Result};

use crate::driver::{Filter, FilterNode, ImageFilter, ProtocolNode};
use crate::drivers::file::{self, Taken};
use crate::foreign;
use crate::json;
use crate::options::{Above, CommonOptions, Copies, FileOptions, ImageOptions};
use crate::registry::Registry;
use crate::spec::{NODES_MAX, NodeSpec, too_many_nodes};

/// An image, and the chain of nodes down to its bytes.
#[derive(Clone, Debug)]
pub struct Source {
    /// The name as given, for messages.
    pub given: String,
    /// The name of the file in which the image is; that of the innermost image, if there are
    /// several.
    pub filename: String,
    /// The name that says all of it, if the file's alone does not.
    pub full_name: Option<String>,
    /// The format, if it is fixed.
    pub format: Option<Format>,
    /// Options of every node, of all its nodes together.
    pub common: CommonOptions,
    /// Options of its file, where that is the host's.
    pub host: FileOptions,
    /// Options of the image.
    pub image: ImageOptions,
    /// Filters between the image and its bytes, the uppermost first.
    pub filters: Vec<Arc<dyn FilterNode>>,
    /// The lowest node, which stores the bytes.
    pub bottom: Bottom,
    /// `data-file=` and `data-file.*`: the file that guest data is in.
    pub data_file: Option<Box<Source>>,
    pub(crate) registry: Arc<Registry>,
    /// A refusal of an option of the file.
    wrong_of_file: Option<String>,
    /// Names of options that only some format has, or none.
    names: Vec<String>,
}

/// The node that stores the bytes of an image.
#[derive(Clone, Debug)]
pub enum Bottom {
    /// A file of the host.
    Host,
    /// A file that a protocol opens.
    Protocol {
        /// The node, as its driver has read it.
        node: Arc<dyn ProtocolNode>,
        /// Its driver, if no format stands over it.
        bare: Option<String>,
    },
    /// The disk of an image.
    Image(Box<Source>),
}

/// Options given to a chain of nodes besides those of its drivers.
#[derive(Default)]
struct ChainOptions {
    /// Options of all nodes, given to filters. They apply unless the image has its own.
    of_filters: Pairs,
    /// Options of the image, given to a file that no format stands over.
    of_image: Pairs,
    /// Options of the file.
    of_file: Pairs,
}

/// Whether a chain of nodes has a format over it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Top {
    /// It has, and the chain begins with its file.
    Format,
    /// It has none, and the chain begins with what was described.
    Bare,
}

impl Source {
    /// The image that a list describes, at a depth in the tree of nodes.
    ///
    /// # Errors
    /// An option or a driver that is not known, or a value that cannot be.
    pub fn of_pairs(pairs: Pairs, depth: usize, registry: &Arc<Registry>) -> Result<Source> {
        if depth >= NODES_MAX {
            return Err(too_many_nodes());
        }
        let pairs = json::expanded(pairs)?;
        let names_something = |(name, _): &(String, String)| {
            ["driver", "filename", "file"].contains(&name.as_str()) || name.starts_with("file.")
        };
        if !pairs.iter().any(names_something) {
            return Err(Error::invalid("Must specify either driver or file"));
        }
        let mut source = Source::empty(registry);
        if !is_described_by_name(&pairs, registry) {
            source.full_name = Some(format!("json:{}", json::text(&pairs)));
        }
        let mut root = NodeSpec::of_pairs(pairs.into_iter().map(child_by_name).collect())?;
        let mut above = Above::default();
        while let Some(filter) = registry.image_filter(root.driver()) {
            root = source.below_image_filter(root, filter, &mut above)?;
        }
        source.image.compress = above.compress;
        source.image.copy_on_read = match above.copy_on_read {
            None => None,
            Some(Copies::All) => Some(CopyOnRead::All),
            Some(Copies::DownTo(bottom)) => Some(CopyOnRead::DownTo(layers_above(&bottom, &root)?)),
        };
        if let Some(mut node) = root.take_child("data-file") {
            node.driver.get_or_insert("file".to_string());
            let data = Source::of_pairs(node.into_pairs(), depth + 1, registry)?;
            source.data_file = Some(Box::new(data));
        }
        source.read(root, depth)?;
        Ok(source)
    }

    /// The image in a file of this name.
    ///
    /// # Errors
    /// It is behind a protocol that is not supported, or the format is unknown.
    pub fn of_name(name: &str, format: Option<&str>, registry: &Arc<Registry>) -> Result<Source> {
        let mut source = Source {
            given: name.to_string(),
            format: format.map(|name| registry.format(name)).transpose()?,
            ..Source::empty(registry)
        };
        source.host.driver = format.and_then(Driver::from_name).unwrap_or_default();
        source.name(name)?;
        Ok(source)
    }

    fn empty(registry: &Arc<Registry>) -> Source {
        Source {
            given: String::new(),
            filename: String::new(),
            full_name: None,
            format: None,
            common: CommonOptions::default(),
            host: FileOptions::default(),
            image: ImageOptions::default(),
            filters: Vec::new(),
            bottom: Bottom::Host,
            data_file: None,
            registry: Arc::clone(registry),
            wrong_of_file: None,
            names: Vec::new(),
        }
    }

    /// The name as given, for messages: also those of the nodes below.
    pub fn say_given(&mut self, given: &str) {
        self.given = given.to_string();
        if let Some(data) = &mut self.data_file {
            data.say_given(given);
        }
        if let Bottom::Image(image) = &mut self.bottom {
            image.say_given(given);
        }
    }

    /// Reads a filter over an image; the node below it. Options of every node apply to the image.
    fn below_image_filter(
        &mut self,
        mut node: NodeSpec,
        filter: &dyn ImageFilter,
        above: &mut Above,
    ) -> Result<NodeSpec> {
        let names = [node.options.take("filename"), node.options.take("file")];
        node.options
            .read(filter.options(), |options| filter.read(options, above))?;
        let mut below = node.take_child("file");
        node.driver = None;
        for (name, value) in node.into_pairs() {
            let is_idle = matches!(name.as_str(), "node-name" | "auto-read-only");
            if !is_idle && !self.common.take(&name, &value)? {
                let driver = filter.name();
                return Err(Error::invalid(format!(
                    "Block format '{driver}' does not support the option '{name}'"
                )));
            }
        }
        for name in names.into_iter().flatten() {
            let below = below.get_or_insert_default();
            below.options.put("filename", name);
        }
        let mut below = below.ok_or_else(|| nothing_below("file"))?;
        // Nothing is probed below a filter: without a driver it is a file's bytes.
        below.driver.get_or_insert("file".to_string());
        Ok(below)
    }

    /// Reads an image's own node, and the chain below it.
    fn read(&mut self, mut root: NodeSpec, depth: usize) -> Result<()> {
        let registry = Arc::clone(&self.registry);
        let has_format_below = |root: &NodeSpec, filter: &dyn Filter| {
            let below = root.child(filter.child());
            below.is_some_and(|below| registry.is_format(below.driver()))
        };
        if !registry.is_format(root.driver())
            && let Some(filter) = registry.filter(root.driver())
            && filter.only_limits(&root.options)
            && has_format_below(&root, filter)
        {
            root = self.below_limits(root, filter)?;
        } else if registry
            .filter(root.driver())
            .is_some_and(|f| !f.only_limits(&root.options))
            && !registry.is_format(root.driver())
        {
            return self.read_bare(root, depth);
        }
        let stands_over_a_file =
            root.driver.is_none() || registry.is_format(root.driver()) || root.has("file.driver");
        if !stands_over_a_file {
            return self.read_bare(root, depth);
        }
        if let Some(name) = root.options.take("filename") {
            root.child_mut("file").options.put("filename", name);
        }
        if let Some(filter) = registry.filter(root.driver())
            && registry.is_format(root.driver())
        {
            let read = root.options.read(filter.options(), |own| filter.read(own));
            self.filters.extend(read?);
        }
        let file = root.take_child("file").unwrap_or_default();
        let mut chain = self.read_chain(file, Top::Format, depth)?;
        if let Some(driver) = &root.driver {
            self.format = Some(registry.format(driver)?);
            self.host.driver = Driver::from_name(driver).unwrap_or(self.host.driver);
        }
        root.driver = None;
        chain.of_image = root.into_pairs();
        self.apply(chain)
    }

    /// Reads a chain that has no format over it: its bytes are the disk.
    fn read_bare(&mut self, root: NodeSpec, depth: usize) -> Result<()> {
        self.format = Some(Format::Raw);
        let chain = self.read_chain(root, Top::Bare, depth)?;
        self.apply(chain)
    }

    fn apply(&mut self, chain: ChainOptions) -> Result<()> {
        for (name, value) in chain.of_filters {
            self.common.take(&name, &value)?;
        }
        for (name, value) in chain.of_image {
            match name.strip_prefix("file.") {
                Some(own) => self.file_option(own, &value)?,
                None => self.image_option(&name, &value)?,
            }
        }
        for (own, value) in chain.of_file {
            self.file_option(&own, &value)?;
        }
        match self.bottom {
            Bottom::Host if self.filename.is_empty() => Err(nothing_below("file")),
            _ => Ok(()),
        }
    }

    /// A filter that only has limits over a format: the disk of the image has them, and nothing
    /// stands over it.
    fn below_limits(&mut self, mut root: NodeSpec, filter: &dyn Filter) -> Result<NodeSpec> {
        let name = root.options.take("filename");
        let name = name.or(filter.take_child_name(&mut root.options));
        let node = root
            .options
            .read(filter.options(), |own| filter.read(own))?;
        let limits = node.map(|node| node.limits()).transpose()?;
        self.image.limits = limits.unwrap_or_default();
        let mut below = root.take_child(filter.child()).unwrap_or_default();
        for (name, value) in others(filter.name(), root)? {
            self.common.take(&name, &value)?;
        }
        if let Some(name) = name {
            let meant = format!("{}.filename", filter.child());
            let pairs = filter.options_of_name(&name)?.unwrap_or_default();
            let inner = pairs.into_iter().find(|(option, _)| *option == meant);
            let name = inner.map_or(name, |(_, inner)| inner);
            below.child_mut("file").options.put("filename", name);
        }
        Ok(below)
    }

    /// Reads a chain of nodes down to the one that stores the bytes.
    fn read_chain(&mut self, mut node: NodeSpec, top: Top, depth: usize) -> Result<ChainOptions> {
        let registry = Arc::clone(&self.registry);
        let mut chain = ChainOptions::default();
        let mut is_top = top == Top::Bare;
        for nodes in depth.. {
            if nodes >= NODES_MAX {
                break;
            }
            expand_name(&mut node, &registry)?;
            let driver = node.driver().to_string();
            if let Some(filter) = registry.filter(&driver) {
                node = self.through(filter, (node, is_top), &mut chain)?;
                is_top = false;
                continue;
            }
            let is_image = registry.is_format(&driver) || registry.image_filter(&driver).is_some();
            if is_image && !is_top {
                let image = Source::of_pairs(node.into_pairs(), nodes + 1, &registry)?;
                self.filename.clone_from(&image.filename);
                self.bottom = Bottom::Image(Box::new(image));
            } else {
                self.read_bottom((node, is_top), &mut chain)?;
            }
            return Ok(chain);
        }
        Err(too_many_nodes())
    }

    /// Reads a filter; the node below it.
    fn through(
        &mut self,
        filter: &dyn Filter,
        (mut node, is_top): (NodeSpec, bool),
        chain: &mut ChainOptions,
    ) -> Result<NodeSpec> {
        let name = filter.take_child_name(&mut node.options);
        let name = name.or_else(|| match is_top {
            true => node.options.take("filename"),
            false => None,
        });
        if let Some(name) = name {
            node.child_mut(filter.child()).options.put("filename", name);
        }
        let read = node.options.read(filter.options(), |own| filter.read(own));
        self.filters.extend(read?);
        let below = node.take_child(filter.child());
        node.driver = None;
        match filter.passes_options_on() {
            true => chain.of_file.extend(node.into_pairs()),
            false => {
                let of_image = others(filter.name(), node)?;
                chain.of_filters.splice(0..0, of_image.into_iter().rev());
            }
        }
        below.ok_or_else(|| nothing_below(filter.child()))
    }

    /// Reads the node that stores the bytes.
    fn read_bottom(
        &mut self,
        (mut node, is_top): (NodeSpec, bool),
        chain: &mut ChainOptions,
    ) -> Result<()> {
        let driver = node.driver.take().unwrap_or_default();
        let said = match is_top {
            true => &mut chain.of_image,
            false => &mut chain.of_file,
        };
        if let Some(protocol) = self.registry.protocol(&driver) {
            let name = node.options.get("filename").unwrap_or_default();
            let named = match protocol.reads_names_as_options() {
                true => None,
                false => self.registry.node_of_name(name)?,
            };
            let opened = match named {
                Some(named) => {
                    // The name says all.
                    self.filename = node.options.take("filename").unwrap_or_default();
                    node.options.take_known(protocol.options());
                    named
                }
                None => node
                    .options
                    .read(protocol.options(), |own| protocol.read(&driver, own))?,
            };
            if let Some(name) = opened.file_name() {
                self.filename = name;
            }
            self.bottom = Bottom::Protocol {
                node: opened,
                bare: is_top.then(|| driver.clone()),
            };
            if protocol.passes_options_on() {
                said.extend(node.into_pairs());
            } else {
                let of_image = others(&driver, node)?;
                chain.of_filters.splice(0..0, of_image.into_iter().rev());
            }
            return Ok(());
        }
        if let Some(words) = foreign::instead_of_filter(&driver) {
            return Err(Error::invalid(format!(
                "Driver '{driver}' is not supported; {words}"
            )));
        }
        if is_top {
            self.format = Some(self.registry.format(&driver)?);
            self.host.driver = Driver::from_name(&driver).unwrap_or(self.host.driver);
        } else if !driver.is_empty() {
            self.host.driver = file::driver(&driver)?;
        }
        let of_image = |(name, _): &(String, String)| {
            Driver::from_name(&driver).is_none()
                || !is_top
                || file::is_of_disk(name)
                || self.registry.is_of_format(Format::Raw, name)
        };
        let (rest, of_file): (Vec<_>, Vec<_>) = node.into_pairs().into_iter().partition(of_image);
        said.extend(rest);
        chain.of_file.extend(of_file);
        Ok(())
    }

    /// Takes a file's name.
    fn name(&mut self, filename: &str) -> Result<()> {
        if !matches!(self.bottom, Bottom::Host) {
            self.filename = filename.to_string();
            return Ok(());
        }
        if filename.is_empty() {
            let text = "The 'file' block driver requires a file name";
            return Err(Error::invalid(text));
        }
        self.filename = match self.registry.node_of_name(filename)? {
            Some(node) => {
                self.format = self.format.or(node.format());
                self.bottom = Bottom::Protocol { node, bare: None };
                filename.to_string()
            }
            None => foreign::local_name(filename)?,
        };
        Ok(())
    }

    fn image_option(&mut self, name: &str, value: &str) -> Result<()> {
        if self.registry.is_of_a_format(name) {
            self.names.push(name.to_string());
        }
        if self.common.take(name, value)? || self.image.take(name, value)? {
            return Ok(());
        }
        for format in &self.registry.formats {
            let is_its = format.options().iter().any(|option| option.is(name));
            if is_its && format.take(&mut self.image, name, value)? {
                return Ok(());
            }
        }
        let unsupported = || Error::invalid(format!("Block option '{name}' is not supported"));
        match name {
            "filename" => self.name(value)?,
            "locking" => self.host.locking = file::locking(value)?,
            "auto-read-only" => {
                let wrong = options::switch(name, value).err();
                self.image.refuse_later(wrong.map(|why| why.to_string()));
            }
            "node-name" => {
                let wrong = !is_well_formed(value);
                let wrong = wrong.then(|| format!("Invalid node-name: '{value}'"));
                self.image.refuse_later(wrong);
            }
            _ => match name.strip_prefix("backing.") {
                Some(own) if self.image.take_of_backing((own, value), &self.registry)? => {}
                _ if name.contains('.') => return Err(unsupported()),
                _ => self.names.push(name.to_string()),
            },
        }
        Ok(())
    }

    fn file_option(&mut self, own: &str, value: &str) -> Result<()> {
        if own == "filename" {
            return self.name(value);
        }
        match file::take(&mut self.host, &mut self.common, (own, value))? {
            Taken::Yes => {}
            Taken::Unknown => {
                let text = format!("Block protocol 'file' doesn't support the option '{own}'");
                self.wrong_of_file.get_or_insert(text);
            }
            Taken::Unsupported => {
                let text = format!("Block option 'file.{own}' is not supported");
                return Err(Error::invalid(text));
            }
        }
        Ok(())
    }

    /// Checks the options of the file, which is open.
    ///
    /// # Errors
    /// The first option that it does not have.
    pub fn check_file_options(&self) -> Result<()> {
        self.wrong_of_file
            .clone()
            .map_or(Ok(()), |why| Err(Error::Invalid(why)))
    }

    /// Checks the options of the image, which is open and has this format.
    ///
    /// # Errors
    /// A value that cannot be, or the first option that the format does not have.
    pub fn check_image_options(&self, format: Format) -> Result<()> {
        if let Some(why) = &self.image.wrong {
            return Err(Error::invalid(why));
        }
        let has = |name: &&String| self.registry.is_of_format(format, name);
        match self.names.iter().find(|name| !has(name)) {
            None => Ok(()),
            Some(name) => Err(Error::invalid(format!(
                "Block format '{}' does not support the option '{name}'",
                format.name()
            ))),
        }
    }

    /// Whether the file's bytes come from a file of the host as they are.
    pub fn is_plain_file(&self) -> bool {
        matches!(self.bottom, Bottom::Host) && self.filters.is_empty()
    }

    /// The image whose disk is in the place of the file.
    pub fn image_below(&self) -> Option<&Source> {
        match &self.bottom {
            Bottom::Image(image) => Some(image),
            Bottom::Host | Bottom::Protocol { .. } => None,
        }
    }
}

/// A child that is named in place of its options is a file.
fn child_by_name((name, value): (String, String)) -> (String, String) {
    match name.as_str() {
        "file" | "data-file" => (format!("{name}.filename"), value),
        _ => (name, value),
    }
}

fn nothing_below(child: &str) -> Error {
    Error::invalid(format!("A block device must be specified for \"{child}\""))
}

/// Puts the options in the place of a file name that stands for some.
fn expand_name(node: &mut NodeSpec, registry: &Registry) -> Result<()> {
    let name = node.options.get("filename").unwrap_or_default();
    let Some(pairs) = registry.options_of_name(name)? else {
        return Ok(());
    };
    node.options.take("filename");
    for (name, value) in pairs {
        if !node.has(&name) {
            node.put(&name, value)?;
        }
    }
    Ok(())
}

/// The rest of a node's options, which every node has: they apply to the image.
///
/// # Errors
/// The first option that the driver does not have.
fn others(driver: &str, mut node: NodeSpec) -> Result<Pairs> {
    node.driver = None;
    let mut kept = Pairs::new();
    for (name, value) in node.into_pairs() {
        match name.as_str() {
            "node-name" | "auto-read-only" | "cache.writeback" => {}
            _ if CommonOptions::OPTIONS.iter().any(|option| option.is(&name)) => {
                kept.push((name, value))
            }
            _ => {
                return Err(Error::invalid(format!(
                    "Block protocol '{driver}' doesn't support the option '{name}'"
                )));
            }
        }
    }
    Ok(kept)
}

/// The number of layers from the image down to a node.
fn layers_above(bottom: &str, root: &NodeSpec) -> Result<u32> {
    let mut node = Some(root);
    for depth in 0.. {
        match node {
            Some(this) if this.options.get("node-name") == Some(bottom) => return Ok(depth),
            Some(this) => node = this.child("backing"),
            None => break,
        }
    }
    Err(Error::invalid(format!("Bottom node '{bottom}' not found")))
}

/// Whether the file's name alone decides the contents of the disk.
fn is_described_by_name(pairs: &[(String, String)], registry: &Registry) -> bool {
    let is_filter = |name: &str| {
        registry.image_filter(name).is_some()
            || registry.filter(name).is_some() && !registry.is_format(name)
    };
    pairs.iter().all(|(name, value)| {
        let own = name.strip_prefix("file.").unwrap_or(name);
        match own {
            "driver" => !is_filter(value),
            "offset" | "size" => false,
            _ => !["backing", "encrypt.", "key-secret", "image.", "file."]
                .iter()
                .any(|decides| own.starts_with(decides)),
        }
    })
}

/// As QEMU has identifiers, and nodes have 31 signs at most.
fn is_well_formed(name: &str) -> bool {
    let signs = |sign: char| sign.is_ascii_alphanumeric() || "-._".contains(sign);
    let starts = name.starts_with(|sign: char| sign.is_ascii_alphabetic());
    starts && name.len() < 32 && name.chars().all(signs)
}

#[cfg(test)]
mod tests;
