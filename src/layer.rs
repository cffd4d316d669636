//! Facts about one file of a chain from outside: format, sizes, header. For reports and for the
//! checks before an image is created; nothing of the guest's data is read.

use std::sync::Arc;

use cowslip::error::Opening;
use cowslip::file::host::{
    BackingPolicy, Driver, HostGate, HostOptions, Locking, open_host_file, resolve_name,
};
use cowslip::file::{
    BlockFile, ChosenBy, Claim, ContentId, FileRequest, Gate, ReadAs, ReadSet, Role, Sharing,
    Storage,
};
use cowslip::image::Format;
use cowslip::luks;
use cowslip::qcow2::header::Header;
use cowslip::qcow2::inspect::{Inspection, inspect, read_start};

use crate::error::CommandError;
use crate::open::object;
use crate::open::{
    self, ImageSpec, NodeGate, OpenSettings, Source, Trust, claim_file, is_description, local_name,
    open_file, opening_reason, parse_format, probe, sharing,
};
use cowslip_filters::Breakpoints;
use cowslip_nodes::driver::FileSettings;
use cowslip_nodes::{Bottom, disk_bytes};

const SECTOR_BYTES: u64 = 512;

/// Layers of a chain at most, as the engine has it: what lies in other images has no identity.
const LAYERS_MAX: usize = 1000;

/// Facts about a file of a chain.
#[derive(Clone, Debug)]
pub struct ImageFileInfo {
    /// The name that it was opened by.
    pub filename: String,
    /// The full name, if the file's name alone is not enough to open it.
    pub full_name: Option<String>,
    /// Protocol of the file.
    pub protocol: Protocol,
    /// Its format, given or probed.
    pub format: Format,
    /// Length of the file, in whole sectors.
    pub file_len: u64,
    /// The size of its disk in bytes, if neither a header nor the file's length says it.
    disk_bytes: Option<u64>,
    /// Bytes that it occupies on the host.
    pub disk_size: Option<u64>,
    /// The file system's extent size hint for the file in bytes, if one is set.
    pub extent_hint_bytes: Option<u64>,
    /// How space comes to read as zeroes there, the cheapest first.
    pub zero_methods: Vec<&'static str>,
    /// Identity of its bytes.
    pub content: Option<ContentId>,
    /// Where its bytes are stored.
    pub storage: Storage,
    /// Facts from a qcow2 image's structures.
    pub inspection: Option<Inspection>,
    /// The header of a LUKS volume, or of the keys in an encrypted image.
    pub keys: Option<luks::Header>,
}

/// Protocol of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// The host's file system, or a protocol that is presented like one.
    #[default]
    File,
    /// Another protocol, by the name of its driver.
    Named(&'static str),
    /// Another protocol, by the name of its driver, whose bytes are the disk: no format stands over
    /// it.
    Bare(&'static str),
}

/// Returns the names of the file's calls for zeroes.
fn zero_methods(file: &dyn BlockFile) -> Vec<&'static str> {
    let has = file.capabilities();
    [
        ("fresh", has.extends_with_zeroes),
        ("zero-range", has.zeroes_fast),
        ("write-zeroes", file.allocates_written()),
        ("write", true),
    ]
    .into_iter()
    .filter_map(|(name, is_there)| is_there.then_some(name))
    .collect()
}

/// Options of inspecting files.
#[derive(Clone, Copy, Debug, Default)]
pub struct InspectOptions {
    /// Access of other processes meanwhile.
    pub sharing: Sharing,
    /// Whether the first file is locked.
    pub locking: Locking,
    /// Kind that the first file has to have.
    pub driver: Driver,
    /// Policy on further files that the images name.
    pub policy: BackingPolicy,
}

impl InspectOptions {
    /// Those of a verb that describes an image which another process may be writing, if the verb's
    /// options say so or the image's.
    pub fn of_image(source: &Source, force_share: bool, trust: &Trust) -> InspectOptions {
        let force_share = force_share || source.common.force_share;
        InspectOptions {
            sharing: sharing(force_share, Sharing::AsFormat),
            locking: source.host.locking,
            policy: trust.backing_policy,
            ..InspectOptions::default()
        }
    }
}

impl ImageFileInfo {
    /// Inspects a file; its format is probed if it is not given.
    ///
    /// # Errors
    /// Why it could not be opened, without the leading "Could not open".
    pub async fn inspect(
        filename: &str,
        format: Option<Format>,
        options: &InspectOptions,
    ) -> Result<ImageFileInfo, CommandError> {
        let host_options = HostOptions {
            locking: options.locking,
            driver: options.driver,
            ..HostOptions::default()
        };
        let file = open_host_file(filename.as_ref(), &host_options);
        ImageFileInfo::inspect_at(file, filename, format, options).await
    }

    /// Inspects the file that the command line names.
    ///
    /// # Errors
    /// As [`ImageFileInfo::inspect`].
    pub async fn inspect_source(
        source: &Source,
        options: &InspectOptions,
    ) -> Result<ImageFileInfo, CommandError> {
        if source.image.copy_on_read.is_some() {
            return Err(CommandError::new(open::read_only()));
        }
        let mut layer = ImageFileInfo::inspect_named(source, options).await?;
        source.check_file_options()?;
        source.check_image_options(layer.format)?;
        layer.full_name.clone_from(&source.full_name);
        Ok(layer)
    }

    async fn inspect_named(
        source: &Source,
        options: &InspectOptions,
    ) -> Result<ImageFileInfo, CommandError> {
        let (name, format) = (&source.filename, source.format);
        let is_plain = source.filters.is_empty() && source.image.limits == Default::default();
        let uri = match &source.bottom {
            Bottom::Protocol { node, bare } if is_plain => Some((node, node.uri(), bare.is_some())),
            _ => None,
        };
        match (uri, &source.bottom) {
            (Some((node, Some(uri), is_bare)), _) => {
                let (host, breakpoints) = (HostOptions::default(), Breakpoints::default());
                let opened = node.open(FileSettings {
                    name,
                    host: &host,
                    objects: &object::Defined,
                    breakpoints: &breakpoints,
                });
                let file = opened.await?;
                let mut layer = ImageFileInfo::inspect_at(Ok(file), name, format, options).await?;
                layer.filename = uri;
                layer.protocol = match is_bare {
                    true => Protocol::Bare(node.driver()),
                    false => Protocol::Named(node.driver()),
                };
                Ok(layer)
            }
            (None, Bottom::Host) if is_plain => {
                let driver = source.host.driver;
                ImageFileInfo::inspect(name, format, &InspectOptions { driver, ..*options }).await
            }
            _ => {
                let settings = OpenSettings {
                    sharing: options.sharing,
                    ..open::settings()
                };
                let file = open_file(source, &settings).await?;
                ImageFileInfo::inspect_at(Ok(file), name, format, options).await
            }
        }
    }

    /// The name in messages.
    pub fn shown_name(&self) -> &str {
        self.full_name.as_ref().unwrap_or(&self.filename)
    }

    /// A request for another file that the image names, to be read.
    fn request<'a>(&'a self, name: &'a str, role: Role) -> FileRequest<'a> {
        FileRequest {
            named_by: &self.filename,
            name,
            role,
            writable: false,
            chosen_by: ChosenBy::Image,
        }
    }

    /// Looks at the backing file that `self` names.
    async fn inspect_below(
        &self,
        (name, format): (&str, Option<Format>),
        options: &InspectOptions,
    ) -> Result<ImageFileInfo, CommandError> {
        let request = self.request(name, Role::Backing);
        let (file, format_of_gate) = match gate(options).open_async(&request).await {
            Ok(reached) => (Ok(reached.file), reached.format),
            Err(
                cowslip::Error::Invalid(why)
                | cowslip::Error::Opening {
                    what: Opening::Backing,
                    why,
                    ..
                },
            ) => return Err(CommandError::new(why)),
            Err(error) if is_description(name) => {
                return Err(CommandError::new(opening_reason(name, &error)));
            }
            Err(error) => (Err(error), None),
        };
        // The names in messages: the file's, and the one that says all of it.
        let (path, full_name) = match is_description(name) {
            true => {
                let resolved = resolve_name(&self.filename, name);
                let source = ImageSpec::named(&resolved, None).resolve()?;
                (source.filename, source.full_name)
            }
            false => (local_name(&resolve_name(&self.filename, name))?, None),
        };
        let mut layer =
            ImageFileInfo::inspect_at(file, &path, format.or(format_of_gate), options).await?;
        layer.full_name = full_name;
        Ok(layer)
    }

    /// Looks at what an image (the first) would name (the second) as its backing file.
    ///
    /// # Errors
    /// As [`ImageFileInfo::inspect`]; a description that no image may name.
    pub async fn inspect_named_by(
        (named_by, name): (&str, &str),
        format: Option<Format>,
        options: &InspectOptions,
    ) -> Result<ImageFileInfo, CommandError> {
        let resolved = resolve_name(named_by, name);
        let Some(mut source) = description((named_by, &resolved))? else {
            return ImageFileInfo::inspect(&local_name(&resolved)?, format, options).await;
        };
        source.format = format.or(source.format);
        ImageFileInfo::inspect_source(&source, options).await
    }

    async fn inspect_at(
        file: cowslip::Result<Arc<dyn BlockFile>>,
        name: &str,
        format: Option<Format>,
        options: &InspectOptions,
    ) -> Result<ImageFileInfo, CommandError> {
        let refused = |error: cowslip::Error| CommandError::new(opening_reason(name, &error));
        let file = file.map_err(refused)?;
        let layer = ImageFileInfo::of_file(&file, name, format, options).await;
        layer.map_err(refused)
    }

    async fn of_file(
        file: &Arc<dyn BlockFile>,
        name: &str,
        format: Option<Format>,
        options: &InspectOptions,
    ) -> cowslip::Result<ImageFileInfo> {
        let format = match format {
            Some(format) => format,
            None => probe(&read_start(file.as_ref()).await?, name)?,
        };
        let is_claimed = match options.sharing {
            Sharing::Forced => false,
            Sharing::Frozen => true,
            Sharing::AsFormat | Sharing::FixedLength => format != Format::Raw,
        };
        if is_claimed {
            claim_file(file, Claim::DESCRIBE)?;
        }
        let inspection = match format {
            Format::Raw | Format::Luks | Format::Other(_) => None,
            Format::Qcow2 => Some(inspect(file).await?),
        };
        let disk_bytes = match format {
            Format::Other(_) => Some(disk_bytes(file, format, &gate(options)).await?),
            Format::Raw | Format::Luks | Format::Qcow2 => None,
        };
        let len = file.len().await;
        let len = len.map_err(|error| {
            cowslip::Error::io(format!("Could not determine the length of '{name}'"), error)
        })?;
        let inside = inspection.as_ref().and_then(Inspection::keys_place);
        let keys = match inside.or((format == Format::Luks).then_some(0..len)) {
            Some(place) => Some(luks::inspect(file, place).await?),
            None => None,
        };
        Ok(ImageFileInfo {
            filename: name.to_string(),
            full_name: None,
            protocol: Protocol::default(),
            format,
            file_len: len.next_multiple_of(SECTOR_BYTES),
            disk_bytes,
            disk_size: file.allocated_bytes(),
            extent_hint_bytes: file.extent_hint_bytes(),
            zero_methods: zero_methods(file.as_ref()),
            content: file.content_id(),
            storage: file.storage(),
            inspection,
            keys,
        })
    }

    /// The header of a qcow2 image.
    pub fn header(&self) -> Option<&Header> {
        self.inspection
            .as_ref()
            .map(|inspection| &inspection.header)
    }

    /// Whether no format stands over the protocol.
    pub fn is_bare(&self) -> bool {
        matches!(self.protocol, Protocol::Bare(_))
    }

    /// The size of its disk.
    pub fn virtual_size(&self) -> u64 {
        match (self.header(), &self.keys) {
            (Some(header), _) => header.size,
            (None, Some(keys)) => self.file_len.saturating_sub(keys.payload_offset),
            (None, None) => self.disk_bytes.unwrap_or(self.file_len),
        }
    }

    /// Its backing file: the name, and the format if the image has it.
    ///
    /// # Errors
    /// The format is not known.
    fn backing(&self) -> Result<Option<(&str, Option<Format>)>, CommandError> {
        let Some(header) = self.header() else {
            return Ok(None);
        };
        let Some(name) = &header.backing_file else {
            return Ok(None);
        };
        let format = header.backing_format().map(parse_format).transpose()?;
        Ok(Some((name, format)))
    }
}

/// Returns the description by which an image (the first) would name its backing file, if the name
/// (the second) is one.
///
/// # Errors
/// It describes nothing, or has options that the image could not be opened with.
pub fn description((named_by, name): (&str, &str)) -> Result<Option<Source>, CommandError> {
    if !is_description(name) {
        return Ok(None);
    }
    let source = ImageSpec::named(name, None).resolve()?;
    source.check_named_by(named_by, ChosenBy::Image)?;
    Ok(Some(source))
}

/// The way to the files that images name, for looking at them.
fn gate(options: &InspectOptions) -> NodeGate {
    NodeGate {
        host: HostGate {
            options: HostOptions::default(),
            policy: options.policy,
        },
        settings: OpenSettings {
            sharing: options.sharing,
            policy: options.policy,
            ..open::settings()
        },
    }
}

/// The files of a backing chain, with the data files of its images, as a set that must not be
/// overwritten. A data file that cannot be opened is left out: nothing that can be opened is it.
pub async fn read_set(
    chain: &[ImageFileInfo],
    read_as: ReadAs,
    options: &InspectOptions,
) -> ReadSet {
    let mut set = ReadSet::default();
    for layer in chain {
        set.add_stored(&layer.filename, layer.storage.clone(), read_as);
        let Some(name) = layer.header().and_then(Header::data_file_name) else {
            continue;
        };
        if let Ok(data) = gate(options)
            .open_async(&layer.request(name, Role::Data))
            .await
        {
            set.add(data.file.as_ref(), read_as);
        }
    }
    set
}

/// Checks that no other process writes to a data file of these images.
///
/// # Errors
/// The lock that says so.
pub async fn refuse_written_data(
    chain: &[ImageFileInfo],
    options: &InspectOptions,
) -> Result<(), CommandError> {
    for layer in chain {
        let Some(name) = layer.header().and_then(Header::data_file_name) else {
            continue;
        };
        if let Ok(data) = gate(options)
            .open_async(&layer.request(name, Role::Data))
            .await
        {
            let claimed = claim_file(&data.file, Claim::DESCRIBE);
            claimed.map_err(|error| CommandError::new(opening_reason(name, &error)))?;
        }
    }
    Ok(())
}

/// The layer below one, if it names one.
///
/// # Errors
/// It cannot be looked at.
pub async fn below(
    above: &ImageFileInfo,
    options: &InspectOptions,
) -> Result<Option<ImageFileInfo>, CommandError> {
    match above.backing()? {
        None => Ok(None),
        Some(named) => above.inspect_below(named, options).await.map(Some),
    }
}

/// A layer and those below it, as far as they can be opened, and once each.
pub async fn openable_chain(first: ImageFileInfo, options: &InspectOptions) -> Vec<ImageFileInfo> {
    let mut layers = vec![first];
    while layers.len() <= LAYERS_MAX
        && let Ok(Some(layer)) = below(&layers[layers.len() - 1], options).await
    {
        let known =
            |other: &ImageFileInfo| other.content.is_some() && other.content == layer.content;
        if layers.iter().any(known) {
            break;
        }
        layers.push(layer);
    }
    layers
}

/// A layer and those below it.
///
/// # Errors
/// `Could not open 'x': why`, or a chain that returns to one of its files.
pub async fn chain(
    first: ImageFileInfo,
    options: &InspectOptions,
) -> Result<Vec<ImageFileInfo>, CommandError> {
    let mut layers = vec![first];
    loop {
        let above = &layers[layers.len() - 1];
        let failed = |name: &str, why: CommandError| CommandError::opening(name, why.to_string());
        let backing = above
            .backing()
            .map_err(|why| failed(&above.filename, why))?;
        let Some((name, format)) = backing else {
            return Ok(layers);
        };
        let resolved = resolve_name(&above.filename, name);
        let layer = above.inspect_below((name, format), options).await;
        let layer = layer.map_err(|why| failed(&resolved, why))?;
        let known =
            |other: &ImageFileInfo| other.content.is_some() && other.content == layer.content;
        if layers.iter().any(known) || layers.len() > LAYERS_MAX {
            let text = format!("Backing file '{resolved}' creates an infinite loop.");
            return Err(CommandError::new(text));
        }
        layers.push(layer);
    }
}
