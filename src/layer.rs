//! One file of a chain, looked at from outside: format, sizes, header. For reports and for the
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
    self, ImageSpec, NodeGate, OpenHow, Source, claim_file, is_description, local_name, open_file,
    opening_reason, parse_format, probe,
};
use cowslip_filters::Breakpoints;
use cowslip_nodes::driver::FileHow;
use cowslip_nodes::{Bottom, disk_bytes};

const SECTOR_BYTES: u64 = 512;

/// Layers of a chain at most, as the engine has it: what lies in other images has no identity.
const LAYERS_MAX: usize = 1000;

/// A file and what it says of itself.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The name that it was opened by.
    pub filename: String,
    /// The name that says all of it, if the file's alone does not.
    pub full_name: Option<String>,
    /// What holds the file.
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
    /// Which bytes it shows.
    pub content: Option<ContentId>,
    /// Where its bytes are stored.
    pub storage: Storage,
    /// What a qcow2 image says of itself.
    pub inspection: Option<Inspection>,
    /// The header of a LUKS volume, or of the keys in an encrypted image.
    pub keys: Option<luks::Header>,
}

/// What holds a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// The host's file system, or a protocol that is presented like one.
    #[default]
    File,
    /// An NBD server.
    Nbd,
    /// The same, and no format stands over it.
    BareNbd,
}

/// What the file's system has for zeroes.
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

/// How files are looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    /// What other processes may do meanwhile.
    pub sharing: Sharing,
    /// Whether the first file is locked.
    pub locking: Locking,
    /// What the first file has to be.
    pub driver: Driver,
    /// Which further files the images may name.
    pub policy: BackingPolicy,
}

impl Layer {
    /// Looks at a file; its format is probed if it is not given.
    ///
    /// # Errors
    /// Why it could not be opened, without the leading "Could not open".
    pub async fn look(
        filename: &str,
        format: Option<Format>,
        look: &Look,
    ) -> Result<Layer, CommandError> {
        let options = HostOptions {
            locking: look.locking,
            driver: look.driver,
            ..HostOptions::default()
        };
        let file = open_host_file(filename.as_ref(), &options);
        Layer::look_at(file, filename, format, look).await
    }

    /// Looks at what the command line names.
    ///
    /// # Errors
    /// As [`Layer::look`].
    pub async fn look_source(source: &Source, look: &Look) -> Result<Layer, CommandError> {
        if source.image.copy_on_read.is_some() {
            return Err(CommandError::new("Block node is read-only"));
        }
        let mut layer = Layer::look_named(source, look).await?;
        source.check_file_options()?;
        source.check_image_options(layer.format)?;
        layer.full_name.clone_from(&source.full_name);
        Ok(layer)
    }

    async fn look_named(source: &Source, look: &Look) -> Result<Layer, CommandError> {
        let (name, format) = (&source.filename, source.format);
        let is_plain = source.filters.is_empty() && source.image.limits == Default::default();
        let uri = match &source.bottom {
            Bottom::Protocol { node, bare } if is_plain => Some((node, node.uri(), bare.is_some())),
            _ => None,
        };
        match (uri, &source.bottom) {
            (Some((node, Some(uri), is_bare)), _) => {
                let (host, breakpoints) = (HostOptions::default(), Breakpoints::default());
                let opened = node.open(FileHow {
                    name,
                    host: &host,
                    objects: &object::Defined,
                    breakpoints: &breakpoints,
                });
                let file = opened.await?;
                let mut layer = Layer::look_at(Ok(file), name, format, look).await?;
                layer.filename = uri;
                layer.protocol = match is_bare {
                    true => Protocol::BareNbd,
                    false => Protocol::Nbd,
                };
                Ok(layer)
            }
            (None, Bottom::Host) if is_plain => {
                let driver = source.host.driver;
                Layer::look(name, format, &Look { driver, ..*look }).await
            }
            _ => {
                let how = OpenHow {
                    sharing: look.sharing,
                    ..open::how()
                };
                let file = open_file(source, &how).await?;
                Layer::look_at(Ok(file), name, format, look).await
            }
        }
    }

    /// The name to tell of.
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
    async fn look_below(
        &self,
        (name, format): (&str, Option<Format>),
        look: &Look,
    ) -> Result<Layer, CommandError> {
        let request = self.request(name, Role::Backing);
        let (file, format_of_gate) = match gate(look).reach(&request).await {
            Ok(reached) => (Ok(reached.file), reached.format),
            Err(
                cowslip::Error::Invalid(why)
                | cowslip::Error::Opening {
                    what: Opening::Backing,
                    why,
                },
            ) => return Err(CommandError::new(why)),
            Err(error) if is_description(name) => {
                return Err(CommandError::new(opening_reason(name, &error)));
            }
            Err(error) => (Err(error), None),
        };
        // The names to tell of: the file's, and the one that says all of it.
        let (path, full_name) = match is_description(name) {
            true => {
                let source = ImageSpec::named(name, None).resolve()?;
                (source.filename, source.full_name)
            }
            false => (local_name(&resolve_name(&self.filename, name))?, None),
        };
        let mut layer = Layer::look_at(file, &path, format.or(format_of_gate), look).await?;
        layer.full_name = full_name;
        Ok(layer)
    }

    /// Looks at what an image would name, as [`resolve_name`] resolves it.
    ///
    /// # Errors
    /// As [`Layer::look`].
    pub async fn look_resolved(
        resolved: &str,
        format: Option<Format>,
        look: &Look,
    ) -> Result<Layer, CommandError> {
        if !is_description(resolved) {
            return Layer::look(&local_name(resolved)?, format, look).await;
        }
        let mut source = ImageSpec::named(resolved, None).resolve()?;
        source.format = format.or(source.format);
        Layer::look_source(&source, look).await
    }

    async fn look_at(
        file: cowslip::Result<Arc<dyn BlockFile>>,
        name: &str,
        format: Option<Format>,
        look: &Look,
    ) -> Result<Layer, CommandError> {
        let refused = |error: cowslip::Error| CommandError::new(opening_reason(name, &error));
        let file = file.map_err(refused)?;
        let layer = Layer::of_file(&file, name, format, look).await;
        layer.map_err(refused)
    }

    async fn of_file(
        file: &Arc<dyn BlockFile>,
        name: &str,
        format: Option<Format>,
        look: &Look,
    ) -> cowslip::Result<Layer> {
        let format = match format {
            Some(format) => format,
            None => probe(&read_start(file.as_ref()).await?, name)?,
        };
        let is_claimed = match look.sharing {
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
            Format::Other(_) => Some(disk_bytes(file, format, &gate(look)).await?),
            Format::Raw | Format::Luks | Format::Qcow2 => None,
        };
        let len = file.len().await;
        let len = len.map_err(|error| {
            cowslip::Error::io(format!("Could not tell the length of '{name}'"), error)
        })?;
        let inside = inspection.as_ref().and_then(Inspection::keys_place);
        let keys = match inside.or((format == Format::Luks).then_some(0..len)) {
            Some(place) => Some(luks::inspect(file, place).await?),
            None => None,
        };
        Ok(Layer {
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

    /// The size of its disk.
    pub fn virtual_size(&self) -> u64 {
        match (self.header(), &self.keys) {
            (Some(header), _) => header.size,
            (None, Some(keys)) => self.file_len.saturating_sub(keys.payload_offset),
            (None, None) => self.disk_bytes.unwrap_or(self.file_len),
        }
    }

    /// Its backing file: the name, and the format if the image tells.
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

/// The way to the files that images name, for looking at them.
fn gate(look: &Look) -> NodeGate {
    NodeGate {
        host: HostGate {
            options: HostOptions::default(),
            policy: look.policy,
        },
        how: OpenHow {
            sharing: look.sharing,
            policy: look.policy,
            ..open::how()
        },
    }
}

/// The files of a backing chain, with the data files of its images, as a set that must not be
/// overwritten. A data file that cannot be opened is left out: nothing that can be opened is it.
pub async fn read_set(chain: &[Layer], read_as: ReadAs, look: &Look) -> ReadSet {
    let mut set = ReadSet::default();
    for layer in chain {
        set.add_stored(&layer.filename, layer.storage.clone(), read_as);
        let Some(name) = layer.header().and_then(Header::data_file_name) else {
            continue;
        };
        if let Ok(data) = gate(look).reach(&layer.request(name, Role::Data)).await {
            set.add(data.file.as_ref(), read_as);
        }
    }
    set
}

/// Looks whether somebody may be writing to a data file of these images.
///
/// # Errors
/// The lock that says so.
pub async fn refuse_written_data(chain: &[Layer], look: &Look) -> Result<(), CommandError> {
    for layer in chain {
        let Some(name) = layer.header().and_then(Header::data_file_name) else {
            continue;
        };
        if let Ok(data) = gate(look).reach(&layer.request(name, Role::Data)).await {
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
pub async fn below(above: &Layer, look: &Look) -> Result<Option<Layer>, CommandError> {
    match above.backing()? {
        None => Ok(None),
        Some(named) => above.look_below(named, look).await.map(Some),
    }
}

/// A layer and those below it, as far as they can be opened, and once each.
pub async fn openable_chain(first: Layer, look: &Look) -> Vec<Layer> {
    let mut layers = vec![first];
    while layers.len() <= LAYERS_MAX
        && let Ok(Some(layer)) = below(&layers[layers.len() - 1], look).await
    {
        let known = |other: &Layer| other.content.is_some() && other.content == layer.content;
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
pub async fn chain(first: Layer, look: &Look) -> Result<Vec<Layer>, CommandError> {
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
        let layer = above.look_below((name, format), look).await;
        let layer = layer.map_err(|why| failed(&resolved, why))?;
        let known = |other: &Layer| other.content.is_some() && other.content == layer.content;
        if layers.iter().any(known) || layers.len() > LAYERS_MAX {
            let text = format!("Backing file '{resolved}' creates an infinite loop.");
            return Err(CommandError::new(text));
        }
        layers.push(layer);
    }
}
