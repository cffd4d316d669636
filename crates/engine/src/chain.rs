//! Chains of images: opened through the caller's gate, read from the top down.
//!
//! Each layer is cut at its own size: what lies beyond it reads as zeroes, even where a layer
//! further down is longer. A chain is a value that each request takes once; layers below the first
//! are read-only.

use std::ops::Range;
use std::sync::Arc;

use cowslip_queue::IoVecMut;
use futures_util::future::{join, join_all};

use crate::Result;
use crate::file::{ChosenBy, Event, Gate, HostFile, Role};
use crate::image::{BackingChoice, OpenOptions};
use crate::policy::Format;
use crate::qcow2::header::CryptMethod;
use crate::qcow2::map::{Run, Source};
use crate::qcow2::{self, Qcow2, Wanted};
use crate::raw::{self, Raw};
use crate::{Error, file, foreign, luks};

mod files;

pub use files::{Entry, Files};

/// Layers of a chain at most: no user's chain is that long, and a hostile one ends.
const LAYERS_MAX: usize = 1000;

/// One image of a chain.
#[derive(Debug)]
pub enum Layer {
    /// Bytes as they are, or encrypted.
    Raw(Box<Raw>),
    /// qcow2.
    Qcow2(Box<Qcow2>),
}

impl Layer {
    /// Its format.
    pub fn format(&self) -> Format {
        match self {
            Layer::Raw(raw) => raw.format(),
            Layer::Qcow2(_) => Format::Qcow2,
        }
    }

    /// Whether it is raw for want of a better guess: nobody has named its format.
    pub fn is_guessed(&self) -> bool {
        match self {
            Layer::Raw(raw) => raw.file().is_guarded(),
            Layer::Qcow2(_) => false,
        }
    }

    /// Bytes of the disk that it holds.
    pub fn size(&self) -> u64 {
        match self {
            Layer::Raw(raw) => raw.size(),
            Layer::Qcow2(image) => image.size(),
        }
    }

    fn qcow2(&self) -> Option<&Qcow2> {
        match self {
            Layer::Raw(_) => None,
            Layer::Qcow2(image) => Some(image),
        }
    }

    /// Whether what it shows depends on the password that it was opened with, as in QEMU's old way
    /// to encrypt. (In a LUKS volume any password that opens it leads to the same key.)
    pub fn depends_on_password(&self) -> bool {
        match self {
            Layer::Raw(_) => false,
            Layer::Qcow2(image) => image.header().crypt_method == CryptMethod::Aes,
        }
    }

    /// The runs of a range within its size.
    pub async fn map(&self, range: Range<u64>) -> Result<Vec<Run>> {
        match self {
            Layer::Raw(raw) => Ok(raw.map(range)),
            Layer::Qcow2(image) => image.map(range).await,
        }
    }

    /// Its file, and its data file if it has one of its own.
    pub fn files(&self) -> impl Iterator<Item = &Arc<dyn file::BlockFile>> {
        let (file, data) = match self {
            Layer::Raw(raw) => (raw.file(), raw.file()),
            Layer::Qcow2(image) => (image.file(), image.data_file()),
        };
        let (file, data) = (file.block_file(), data.block_file());
        let separate = (!Arc::ptr_eq(file, data)).then_some(data);
        std::iter::once(file).chain(separate)
    }

    /// The file that holds the data of [`Source::Data`].
    pub fn data_file(&self) -> &HostFile {
        match self {
            Layer::Raw(raw) => raw.file(),
            Layer::Qcow2(image) => image.data_file(),
        }
    }
}

/// What lies below an image: its backing chain, possibly none.
#[derive(Clone, Debug, Default)]
pub struct Below(Arc<[Arc<Layer>]>);

impl Below {
    /// The layers, the uppermost first.
    pub fn new(layers: Vec<Arc<Layer>>) -> Below {
        Below(layers.into())
    }

    /// The layers.
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.0
    }

    /// The uppermost so many.
    pub fn uppermost(&self, count: usize) -> Below {
        Below(self.0[..count].into())
    }

    /// Bytes that the layer next below has; beyond, all reads as zeroes.
    pub fn size(&self) -> u64 {
        self.0.first().map_or(0, |layer| layer.size())
    }
}

/// A part of a read: the index of the layer that is asked next, where, and its buffer.
type Part = (usize, u64, IoVecMut);

/// Reads `offset..` through a layer on top and those below it.
pub async fn read(top: &Layer, below: &Below, offset: u64, buf: IoVecMut) -> Result<IoVecMut> {
    let len = buf.len() as u64;
    let runs = top.map(offset..offset + len).await?;
    match top {
        Layer::Qcow2(image) => read_runs(image, &runs, (offset, buf), below).await,
        Layer::Raw(raw) => {
            raw.file().reach(Event::ReadAio).await;
            raw.read(offset, buf).await
        }
    }
}

/// Reads runs of an image, and what it does not hold through the layers below. The runs cover the
/// buffer, which begins at `start`.
pub async fn read_runs(
    image: &Qcow2,
    runs: &[Run],
    (start, buf): (u64, IoVecMut),
    below: &Below,
) -> Result<IoVecMut> {
    if let [
        Run {
            source: Source::Data(host),
            ..
        },
    ] = runs
    {
        image.file().reach(Event::ReadAio).await;
        let file = image.data_file().for_guest(host.0, start);
        return file.read(host.0, buf).await;
    }
    let mut jobs = Jobs::default();
    let mut deeper = Vec::new();
    sort_out((start, buf), runs, |at, source, part| match source {
        Source::Below => deeper.push((0, at, part)),
        _ => jobs.add(at, source, part),
    });
    let ours = jobs.run(image.data_file(), (image.file(), Some(image)));
    let mut done = Vec::new();
    if deeper.is_empty() {
        done.extend(ours.await);
    } else {
        image.file().reach(Event::ReadBackingAio).await;
        let (ours, theirs) = join(ours, read_each(below.layers(), deeper)).await;
        done.extend(ours);
        done.extend(theirs);
    }
    assemble(done)
}

/// Cuts a buffer along runs.
fn sort_out(
    (start, buf): (u64, IoVecMut),
    runs: &[Run],
    mut take: impl FnMut(u64, Source, IoVecMut),
) {
    let mut rest = buf;
    let mut at = start;
    for run in runs {
        debug_assert_eq!(run.range.start, at, "runs cover the buffer");
        let part = rest.split_to((run.range.end - run.range.start) as usize);
        take(at, run.source, part);
        at = run.range.end;
    }
    // What no run covers would keep what the memory held before.
    assert!(rest.is_empty(), "runs cover the buffer");
}

/// Joins parts into the list that they were cut from.
fn assemble(parts: Vec<Result<(u64, IoVecMut)>>) -> Result<IoVecMut> {
    let mut parts = parts.into_iter().collect::<Result<Vec<_>>>()?;
    parts.sort_by_key(|(at, _)| *at);
    let start = parts.first().map_or(0, |(at, _)| *at);
    let mut whole = IoVecMut::default();
    for (at, part) in parts {
        assert_eq!(at, start + whole.len() as u64, "parts are neighbours");
        whole.append(part);
    }
    Ok(whole)
}

/// Parts of a read that one layer decides.
#[derive(Default)]
struct Jobs {
    plain: Vec<(u64, Source, IoVecMut)>,
    compressed: Vec<Wanted>,
}

impl Jobs {
    fn add(&mut self, at: u64, source: Source, part: IoVecMut) {
        match source {
            Source::Compressed(place, from) => self.compressed.push(Wanted {
                at,
                place,
                from,
                part,
            }),
            Source::Data(_) | Source::Zero(_) | Source::Below => {
                self.plain.push((at, source, part));
            }
        }
    }

    /// Reads them from the layer's data file; compressed ones from the image. The file of the layer
    /// itself is told.
    async fn run(
        self,
        file: &HostFile,
        (told, image): (&HostFile, Option<&Qcow2>),
    ) -> Vec<Result<(u64, IoVecMut)>> {
        let plain = self.plain.into_iter().map(|(at, source, part)| async move {
            let part = fetch((file, told), (at, source), part).await;
            part.map(|part| (at, part))
        });
        let plain = join_all(plain);
        match image.filter(|_| !self.compressed.is_empty()) {
            None => plain.await,
            Some(image) => {
                let (mut done, packed) = join(plain, image.read_compressed(self.compressed)).await;
                done.extend(packed);
                done
            }
        }
    }
}

async fn fetch(
    (file, told): (&HostFile, &HostFile),
    (at, source): (u64, Source),
    mut part: IoVecMut,
) -> Result<IoVecMut> {
    if let Source::Data(host) = source {
        told.reach(Event::ReadAio).await;
        return file.for_guest(host.0, at).read(host.0, part).await;
    }
    part.fill(0);
    Ok(part)
}

/// Reads parts through layers, without recursion: what a layer does not hold is asked of the next.
async fn read_each(layers: &[Arc<Layer>], mut work: Vec<Part>) -> Vec<Result<(u64, IoVecMut)>> {
    let mut jobs: Vec<Jobs> = layers.iter().map(|_| Jobs::default()).collect();
    let mut done = Vec::new();
    while let Some((index, at, mut part)) = work.pop() {
        let Some(layer) = layers.get(index) else {
            part.fill(0);
            done.push(Ok((at, part)));
            continue;
        };
        let present = layer.size().saturating_sub(at).min(part.len() as u64);
        if present < part.len() as u64 {
            let mut beyond = part.split_off(present as usize);
            beyond.fill(0);
            done.push(Ok((at + present, beyond)));
        }
        if present == 0 {
            continue;
        }
        match layer.map(at..at + present).await {
            Ok(runs) => sort_out((at, part), &runs, |at, source, part| match source {
                Source::Below => work.push((index + 1, at, part)),
                _ => jobs[index].add(at, source, part),
            }),
            Err(error) => done.push(Err(error)),
        }
    }
    let fetched = layers.iter().zip(jobs).map(|(layer, jobs)| {
        let told = layer.qcow2().map_or(layer.data_file(), Qcow2::file);
        jobs.run(layer.data_file(), (told, layer.qcow2()))
    });
    done.extend(join_all(fetched).await.into_iter().flatten());
    done
}

/// A run of the disk, and the layer that decides it (0 is the top); `None` if none does.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The run, in the terms of that layer.
    pub run: Run,
    /// The layer.
    pub depth: usize,
}

/// Who decides each byte of a range, through all layers: in order, covering it.
pub async fn decide(top: &Layer, below: &Below, range: Range<u64>) -> Result<Vec<Decided>> {
    let mut decided = Vec::new();
    let mut work = vec![(0usize, range)];
    while let Some((depth, range)) = work.pop() {
        let layer = if depth == 0 {
            Some(top)
        } else {
            below.layers().get(depth - 1).map(|layer| &**layer)
        };
        let Some(layer) = layer else {
            let run = Run {
                range,
                source: Source::Below,
            };
            decided.push(Decided {
                run,
                depth: depth - 1,
            });
            continue;
        };
        let present = range.start..range.end.min(layer.size().max(range.start));
        if present.end < range.end {
            // The layer above decides: it holds nothing here, and its backing file has ended.
            let run = Run {
                range: present.end..range.end,
                source: Source::Below,
            };
            let depth = depth.saturating_sub(1);
            decided.push(Decided { run, depth });
        }
        if present.start == present.end {
            continue;
        }
        for run in layer.map(present).await? {
            match run.source {
                Source::Below => work.push((depth + 1, run.range)),
                _ => decided.push(Decided { run, depth }),
            }
        }
    }
    decided.sort_by_key(|decided| decided.run.range.start);
    Ok(decided)
}

/// Whether the tables of the layers below say that a range reads as zeroes.
pub async fn decide_zero(below: &Below, range: Range<u64>) -> Result<bool> {
    let Some((first, rest)) = below.layers().split_first() else {
        return Ok(true);
    };
    let decided = decide(first, &Below(rest.into()), range).await?;
    Ok(decided
        .iter()
        .all(|d| matches!(d.run.source, Source::Zero(_) | Source::Below)))
}

/// How a backing file was named.
#[derive(Clone, Debug)]
pub struct Naming {
    /// The name of the image that it is the backing file of.
    pub named_by: String,
    /// Its name there, or in the caller's override.
    pub name: String,
    /// Who chose it.
    pub chosen_by: ChosenBy,
}

impl Naming {
    /// Asks for the file.
    pub fn request(&self, writable: bool) -> file::FileRequest<'_> {
        file::FileRequest {
            named_by: &self.named_by,
            name: &self.name,
            role: Role::Backing,
            writable,
            chosen_by: self.chosen_by,
        }
    }
}

/// Opens an image and all that it needs; also tells how those below were named.
///
/// # Errors
/// As [`crate::Image::open`].
pub async fn open(
    file: Arc<dyn file::BlockFile>,
    options: &OpenOptions,
    gate: &dyn Gate,
    files: &Files,
) -> Result<(Layer, Below, Vec<Naming>)> {
    let mut layers: Vec<Layer> = Vec::new();
    let mut namings = Vec::new();
    files.enter(&file, Role::Backing, options.writable)?;
    let mut next = Some((file, options.clone()));
    while let Some((file, options)) = next.take() {
        let name = file.name().to_string();
        let is_top = layers.is_empty();
        let opened = open_layer(file, &options, gate, (files, is_top)).await;
        let (layer, backing) = opened.map_err(|error| in_chain(error, layers.len()))?;
        layers.push(layer);
        let (backing, chosen_by) = match &options.backing {
            BackingChoice::None => (None, ChosenBy::Caller),
            BackingChoice::AsNamed => {
                let backing = in_named_format(backing, (&options, layers.len()))?;
                (backing, ChosenBy::Image)
            }
            BackingChoice::InFormat(format) => {
                let Some((name, _)) = backing else {
                    let text = "Could not open backing file: A block device must be specified for \"file\"";
                    return Err(Error::Invalid(text.to_string()));
                };
                (Some((name, Some(*format))), ChosenBy::Image)
            }
            BackingChoice::Override { name, format } => {
                // Another file, but of the format that the image names, as in QEMU.
                let named = match format {
                    None => in_named_format(backing, (&options, layers.len()))?,
                    Some(_) => None,
                };
                let format = format.or(named.and_then(|(_, format)| format));
                (Some((name.clone(), format)), ChosenBy::Caller)
            }
        };
        let Some((backing_name, format)) = backing else {
            break;
        };
        let could_not = |detail: &str| {
            Error::Invalid(format!(
                "Could not open backing file '{backing_name}' of '{name}': {detail}"
            ))
        };
        if layers.len() > LAYERS_MAX {
            return Err(could_not("the chain is too long"));
        }
        let naming = Naming {
            named_by: name.clone(),
            name: backing_name.clone(),
            chosen_by,
        };
        let reached = gate.reach(&naming.request(false)).await;
        let (backing_file, told) = match reached {
            Ok(reached) => (reached.file, reached.format),
            Err(_) if options.metadata_only => break,
            Err(error) => return Err(backing_failed(error, &backing_name)),
        };
        if let Some(why) = second_use(files.enter(&backing_file, Role::Backing, false)?) {
            return Err(could_not(why));
        }
        let options = OpenOptions {
            format: format.or(told),
            guessed: false,
            writable: false,
            backing: BackingChoice::AsNamed,
            data_file: None,
            ..options
        };
        namings.push(naming);
        next = Some((backing_file, options));
    }
    share_cache(&layers, options);
    let mut layers = layers.into_iter();
    let top = layers.next().expect("the loop opened one");
    let below = Below::new(layers.map(Arc::new).collect());
    Ok((top, below, namings))
}

/// Why a backing file cannot be used beside the files of the chain so far, if so.
fn second_use(entry: Entry) -> Option<&'static str> {
    match entry {
        Entry::New => None,
        Entry::Again(Role::Backing) => Some("the backing chain is a loop"),
        Entry::Again(Role::Data) => Some("it is the data file of an image of the chain"),
        Entry::Overlaps => Some("it is stored where another file of the chain is"),
    }
}

/// Shares the budget for L2 slices in proportion to what each image could use.
fn share_cache(layers: &[Layer], options: &OpenOptions) {
    let images = || layers.iter().filter_map(Layer::qcow2);
    let all: u64 = images().map(Qcow2::cache_bytes_wanted).sum();
    for image in images() {
        let budget = u128::from(options.cache_bytes_or_default());
        let share = budget * u128::from(image.cache_bytes_wanted()) / u128::from(all);
        image.set_cache_budget(share as u64);
    }
}

/// A conflict over a file of the layer at this depth, or what its key is, in QEMU's words.
fn in_chain(error: Error, depth: usize) -> Error {
    match error {
        Error::Key(why) => Error::Key("Could not open backing file: ".repeat(depth) + &why),
        Error::Locked(mut conflict) => {
            conflict.context = "Could not open backing file: ".repeat(depth);
            Error::Locked(conflict)
        }
        other => other,
    }
}

fn backing_failed(error: Error, name: &str) -> Error {
    match error {
        Error::Io { source, .. } => Error::io(
            format!("Could not open backing file: Could not open '{name}'"),
            source,
        ),
        other => other,
    }
}

/// A backing file's name and format, as the image has them.
type Backing = Option<(String, Option<String>)>;

/// The backing file in the format that the image at a depth names. Where only metadata is wanted,
/// one in a format that is not known ends the chain.
fn in_named_format(
    backing: Backing,
    (options, layers): (&OpenOptions, usize),
) -> Result<Option<(String, Option<Format>)>> {
    let Some((name, Some(format))) = backing else {
        return Ok(backing.map(|(name, _)| (name, None)));
    };
    match Format::from_name(&format) {
        Some(known) => Ok(Some((name, Some(known)))),
        None if options.metadata_only => Ok(None),
        None => {
            let opening = "Could not open backing file: ".repeat(layers);
            Err(Error::Invalid(format!(
                "{opening}Unknown driver '{format}'"
            )))
        }
    }
}

/// The format by its magic number.
async fn probe(file: &HostFile) -> Result<Format> {
    let there = foreign::PROBED_BYTES.min(file.len().await?);
    let start = file.read_new(0, there).await?;
    foreign::probe(&start, file.name())
}

async fn open_layer(
    file: Arc<dyn file::BlockFile>,
    options: &OpenOptions,
    gate: &dyn Gate,
    (files, is_top): (&Files, bool),
) -> Result<(Layer, Backing)> {
    let file = HostFile::new(file);
    let format = match options.format {
        Some(format) => format,
        None => probe(&file).await?,
    };
    files.claim_image(file.block_file(), (format, is_top, options.writable))?;
    if options.format.is_none() && probe(&file).await? != format {
        let text = format!("'{}' was made anew while it was being opened", file.name());
        return Err(Error::Invalid(text));
    }
    let file_len = file.len().await?;
    match format {
        Format::Raw | Format::Luks if is_top && options.snapshot.is_some() => {
            Err(Error::Unsupported {
                file: file.name().to_string(),
                feature: "an internal snapshot of a raw image".to_string(),
            })
        }
        Format::Luks => {
            let passphrase = options.passphrase(is_top).ok_or_else(|| {
                Error::Key("Parameter 'key-secret' is required for cipher".to_string())
            })?;
            let key = (passphrase, &options.workers);
            let (header, cipher) = luks::unlock(&file, 0..file_len, key).await?;
            let raw = Raw::encrypted(&file, file_len, (cipher, header.payload_offset))?;
            Ok((Layer::Raw(Box::new(raw)), None))
        }
        Format::Raw => {
            let file = match options.format.is_none() || options.guessed {
                true => file.guarded(),
                false => file,
            };
            // As with QEMU, a disk has whole sectors: the last one of a file that can grow reads as
            // zeroes behind its end.
            let size = match file.capabilities().extends_with_zeroes {
                true => file_len.next_multiple_of(raw::SECTOR_BYTES),
                false => file_len,
            };
            Ok((Layer::Raw(Box::new(Raw::new(file, size))), None))
        }
        Format::Qcow2 => {
            let opening = qcow2::Opening {
                file,
                file_len,
                options,
                gate,
                files,
                is_top,
            };
            let image = qcow2::open(opening).await?;
            let header = image.header();
            let format = header.backing_format().map(str::to_string);
            let backing = header.backing_file.clone().map(|name| (name, format));
            Ok((Layer::Qcow2(Box::new(image)), backing))
        }
    }
}
