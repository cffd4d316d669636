//! Preparation of a run: the files of the image and of the chain below it, how they are opened, and
//! how the files themselves are checked between sessions.

use std::cell::OnceCell;
use std::sync::Arc;

use cowslip::file::{BlockFile, Capabilities};
use cowslip::image::{DetectZeroes, DiscardPolicy, Durability, Format, OpenOptions, ZeroOptions};
use cowslip::luks::{CipherMode, NewVolume, Passphrase, VolumeOptions};
use cowslip::qcow2::check::{self, CheckOptions, Finding};
use cowslip::qcow2::create::{self, CreateOptions, Version, create};
use cowslip::qcow2::header::Header;
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip::{Image, Job};
use cowslip_queue::BufMut;

use crate::anatomy;
use crate::cipher::{self, Cipher};
use crate::config::{Config, Data, Encryption, Kind, Layout, Prepared, Room, Round};
use crate::disk::content::{Content, PAGE_BYTES};
use crate::disk::{SimDisk, device};
use crate::drive::block_on;
use crate::inspect::{self, Findings, inspect};
use crate::model::{self, Granules, Model, WriteId, ZERO};
use crate::names::{DATA, TOP};
use crate::rng::Rng;
use crate::second_reader::Layer;
use crate::snapshots;
use crate::subject::{Plain, SimGate, Subject};

/// The content of the windows of a disk before the run.
#[derive(Clone, Debug)]
pub struct Initial {
    windows: Vec<(Granules, Vec<WriteId>)>,
}

impl Initial {
    /// Zeroes everywhere.
    fn zeroes(windows: &[Granules]) -> Initial {
        let windows = windows.iter();
        Initial {
            windows: windows
                .map(|range| {
                    (
                        range.clone(),
                        vec![ZERO; (range.end - range.start) as usize],
                    )
                })
                .collect(),
        }
    }

    /// Returns the content of granule `granule` of a window.
    pub fn at(&self, granule: u64) -> WriteId {
        let window = self.windows.iter().find(|w| w.0.contains(&granule));
        window.map_or(ZERO, |(range, ids)| ids[(granule - range.start) as usize])
    }

    /// Removes content beyond the end of a layer, which is not seen through the next one.
    fn cut(&mut self, config: &Config, size: u64) {
        for (range, ids) in &mut self.windows {
            for (granule, id) in range.clone().zip(ids) {
                if config.grain.start(granule) >= size {
                    *id = ZERO;
                }
            }
        }
    }

    fn set(&mut self, granule: u64, write: WriteId) {
        let window = self.windows.iter_mut().find(|w| w.0.contains(&granule));
        if let Some((range, ids)) = window {
            ids[(granule - range.start) as usize] = write;
        }
    }
}

/// Makes the files; what the guest finds in the top image.
///
/// # Errors
/// If the engine fails at it, or hangs.
pub(crate) fn build(
    config: &Config,
    seed: u64,
    disk: &SimDisk,
    rng: &mut Rng,
) -> Result<Initial, String> {
    let draw = &mut Rng::derived(seed, "initial", 0);
    let mut initial = Initial::zeroes(&config.windows);
    if config.kind != Kind::Qcow2 {
        match config.encryption {
            Encryption::None => add_raw((TOP, config.size, 1), config, disk, &mut initial, draw),
            _ => make_volume((config, seed), disk, (draw, rng), &mut initial)?,
        }
        return Ok(initial);
    }
    let mut backing = None;
    for (index, below) in config.below.iter().enumerate() {
        let name = below_name(index);
        let first = 100 * index as WriteId + 1;
        match &below.layout {
            None => add_raw((&name, below.size, first), config, disk, &mut initial, draw),
            Some(layout) => {
                let options = create_options(layout, below.size, backing.take());
                make(&name, config, (options, None), disk, rng)?;
                fill_layer(
                    (&name, below.size, first),
                    config,
                    disk,
                    (draw, rng),
                    &mut initial,
                )?;
            }
        }
        initial.cut(config, below.size);
        let format = if below.layout.is_some() {
            "qcow2"
        } else {
            "raw"
        };
        backing = Some((name, format));
    }
    let mut options = create_options(&config.layout, config.created_bytes, backing);
    options.preallocation = config.preallocation;
    options.alloc_policy = config.prepared.stored_policy;
    let data_file = (config.data != Data::Inside).then(|| DATA.to_string());
    options.data_file_raw = config.data == Data::ExternalRaw;
    options.data_file.clone_from(&data_file);
    options.encryption = encryption(config, seed)?;
    make(TOP, config, (options, data_file), disk, rng)?;
    if config.prepared.filled {
        let first = 100 * config.below.len() as WriteId + 1;
        let layer = (TOP, config.created_bytes, first);
        fill_layer(layer, config, disk, (draw, rng), &mut initial)?;
    }
    Ok(initial)
}

/// State of the file as it was made, to compare the later file with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Baseline {
    /// A fingerprint of what snapshots reach.
    snapshots: u64,
    /// The image and its data file, while bits are set that the first write has to clear.
    untouched: Option<(Content, Content)>,
}

/// An autoclear bit that nobody knows.
const UNKNOWN_AUTOCLEAR: u64 = 1 << 40;
/// Where the autoclear bits are.
const AUTOCLEAR_AT: u64 = 88;

/// Changes the image as no writer of ours does.
pub(crate) fn change(prepared: &Prepared, disk: &SimDisk) -> Baseline {
    if *prepared == Prepared::default() {
        return Baseline::default();
    }
    disk.edit(TOP, |content| {
        snapshots::add(content, prepared.snapshots);
        if prepared.autoclear {
            let bits = content.number(AUTOCLEAR_AT, 8) | UNKNOWN_AUTOCLEAR;
            content.write(AUTOCLEAR_AT, &bits.to_be_bytes());
        }
    });
    let content = disk.content(TOP).expect("it was made");
    Baseline {
        snapshots: inspect(&content).snapshots,
        untouched: prepared
            .autoclear
            .then(|| (content, disk.content(DATA).unwrap_or_default())),
    }
}

fn below_name(index: usize) -> String {
    format!("below{index}.img")
}

fn create_options(
    layout: &Layout,
    size: u64,
    backing: Option<(String, &'static str)>,
) -> CreateOptions {
    let mut options = CreateOptions::new(size);
    options.version = if layout.version == 2 {
        Version::V2
    } else {
        Version::V3
    };
    options.cluster_size = layout.cluster_bytes();
    options.extended_l2 = layout.extended_l2;
    options.refcount_bits = u64::from(layout.refcount_bits);
    options.lazy_refcounts = layout.lazy_refcounts;
    if let Some((name, format)) = backing {
        options.backing_file = Some(name);
        options.backing_format = Some(format.to_string());
    }
    options
}

/// The encryption of a new image.
fn encryption(config: &Config, seed: u64) -> Result<Option<create::Encryption>, String> {
    match config.encryption {
        Encryption::None => Ok(None),
        Encryption::Aes => Ok(Some(create::Encryption::Aes)),
        Encryption::Luks(mode) => {
            let volume = volume(mode, seed)?;
            Ok(Some(create::Encryption::Luks(Box::new(volume))))
        }
    }
}

/// A LUKS volume whose key costs little to open.
fn volume(mode: CipherMode, seed: u64) -> Result<NewVolume, String> {
    let options = VolumeOptions::cheap(mode, passphrase());
    let rng = &mut Rng::derived(seed, "keys", 0);
    let made = NewVolume::make(&options, &mut |bytes: &mut [u8]| {
        bytes.fill_with(|| rng.bits() as u8);
        Ok(())
    });
    made.map_err(|error| format!("making keys: {error}"))
}

/// Makes a LUKS volume, all of whose disk is written.
fn make_volume(
    (config, seed): (&Config, u64),
    disk: &SimDisk,
    (draw, rng): (&mut Rng, &mut Rng),
    initial: &mut Initial,
) -> Result<(), String> {
    let Encryption::Luks(mode) = config.encryption else {
        return Err("QEMU's old way needs an image".to_string());
    };
    let volume = volume(mode, seed)?;
    let start = volume.header().payload_offset;
    let content = match config.room {
        Room::Grows => Content::default(),
        Room::Fixed | Room::Scarce => garbage(start + config.size, draw),
    };
    disk.add_file(TOP, capabilities(config), content);
    let file = disk.open(TOP, true).expect("it was added");
    let (size, job) = (config.size, Job::default());
    let making = async move {
        create::create_luks(file, size, &volume, create::Preallocation::Off, &job).await
    };
    let made = block_on(disk, rng, "create", making)?;
    made.map_err(|error| format!("creating a LUKS volume: {error}"))?;
    let opening = open(config, &config.rounds[0], disk);
    let opened = block_on(disk, rng, "open", opening)?;
    let subject = opened.map_err(|error| format!("opening a LUKS volume: {error}"))?;
    let granules = config.windows[0].clone();
    let middle = draw.between(granules.start + 1, granules.end - 1);
    for (id, part) in [(1, granules.start..middle), (2, middle..granules.end)] {
        let at = config.grain.start(part.start);
        let mut buf = BufMut::zeroed((config.grain.start(part.end) - at) as usize);
        model::fill(&config.grain, id, part.clone(), &mut buf);
        part.for_each(|granule| initial.set(granule, id));
        let (subject, data) = (subject.clone(), buf.freeze());
        let writing = async move { subject.write(at, data, Durability::Cached).await };
        let wrote = block_on(disk, rng, "fill", writing)?;
        wrote.map_err(|error| format!("filling a LUKS volume: {error}"))?;
    }
    let closed = block_on(disk, rng, "close", async move { subject.close().await })?;
    closed.map_err(|error| format!("closing a LUKS volume: {error}"))
}

/// Returns the content of a device of this many bytes that holds old data, where space is taken
/// first.
fn garbage(len: u64, rng: &mut Rng) -> Content {
    /// The written part is short, since every look at a disk copies it.
    const WRITTEN_BYTES: u64 = 1 << 20;
    let mut content = Content::default();
    content.set_len(len);
    let mut at = 0;
    while at < len.min(WRITTEN_BYTES) {
        let part = (len - at).min(PAGE_BYTES);
        let byte = rng.between(1, 255) as u8;
        content.write(at, &vec![byte; part as usize]);
        at += part;
    }
    content
}

/// Key slots of a LUKS volume take no more.
const KEYS_BYTES: u64 = 2 << 20;

/// The length of a device that has room for what a run asks for, or for a part of it.
fn device_bytes(config: &Config, rng: &mut Rng) -> u64 {
    let cluster = config.layout.cluster_bytes();
    let bytes =
        |window: &Granules| config.grain.start(window.end) - config.grain.start(window.start);
    let windows = config.windows.iter().chain(&config.vm_state);
    let used: u64 = windows
        .map(|window| {
            let tables = bytes(window) / config.table_bytes() + 2;
            bytes(window).next_multiple_of(cluster) + (tables + 2) * cluster
        })
        .sum();
    let l1 = (config.size * 4 / config.table_bytes() * 8).next_multiple_of(cluster);
    let keys = match config.encryption {
        Encryption::Luks(_) => KEYS_BYTES,
        Encryption::None | Encryption::Aes => 0,
    };
    // Where the data file is the raw disk, all of it is mapped from the beginning.
    let mapped = match config.data {
        Data::ExternalRaw => (config.size * 4 / config.table_bytes() + 1) * cluster,
        Data::External | Data::Inside => 0,
    };
    let metadata = 2 * (l1 + mapped) + 24 * cluster + keys;
    let copies = 2 + 4 * u64::from(
        config
            .rounds
            .iter()
            .any(|round| round.snapshots_percent > 0),
    );
    let room = match config.room {
        Room::Scarce => used * rng.between(40, 150) / 100 + metadata,
        // Clusters that crashes leak, or that are freed only later, are missing.
        _ => used * copies * 3 + 8 * metadata + (1 << 20),
    };
    // The end cuts through a cluster, where that is not the unit of the device.
    let unit = u64::from(capabilities(config).space_alignment_bytes);
    let whole = room.next_multiple_of(cluster.max(unit));
    whole - rng.below(cluster.div_ceil(unit)) * unit
}

fn passphrase() -> Passphrase {
    Passphrase::new(cipher::PASSPHRASE.to_vec())
}

/// Returns the passphrase of the image under test, if it is encrypted.
pub(crate) fn key(config: &Config) -> Option<Passphrase> {
    (config.encryption != Encryption::None).then(passphrase)
}

/// The second reader's view of the image under test.
///
/// # Errors
/// What is wrong with its keys.
pub(crate) fn second(disk: &SimDisk, keys: &Keys) -> Result<Option<Layer>, String> {
    let (cipher, start) = keys.of(disk)?;
    Ok(Layer::open(disk, TOP).map(|layer| layer.encrypted(cipher, start)))
}

/// The cipher of the image under test, which no run changes: looked up once.
#[derive(Debug, Default)]
pub(crate) struct Keys(OnceCell<(Option<Cipher>, u64)>);

impl Keys {
    /// And where the disk begins in its file, if that is a LUKS volume.
    fn of(&self, disk: &SimDisk) -> Result<(Option<Cipher>, u64), String> {
        if let Some(known) = self.0.get() {
            return Ok(known.clone());
        }
        let content = disk.content(TOP).expect("the run has made it");
        let found = match Cipher::of_volume(&content)? {
            Some((cipher, start)) => (Some(cipher), start),
            None if inspect::is_image(&content) => (Cipher::of_image(&content)?, 0),
            None => (None, 0),
        };
        Ok(self.0.get_or_init(|| found).clone())
    }
}

fn capabilities(config: &Config) -> Capabilities {
    if config.room != Room::Grows && config.kind != Kind::Plain {
        // Larger than the unit of reads and writes, where these go through the page cache.
        let block_bytes = if config.zeroes_fast { 512 } else { 4096 };
        let mut capabilities = device(config.alignment_bytes, block_bytes);
        capabilities.zeroes_fast = config.zeroes_fast || config.punches_holes;
        return capabilities;
    }
    file_capabilities(config)
}

/// Returns the capabilities of a regular file.
fn file_capabilities(config: &Config) -> Capabilities {
    let mut capabilities = Capabilities::of_regular_file(config.alignment_bytes);
    capabilities.zeroes_fast = config.zeroes_fast;
    capabilities.punches_holes = config.punches_holes;
    // The reference asks the disk itself, where no adaptor makes its requests fit.
    if !config.punches_holes && config.kind != Kind::Plain {
        // As a block device has it, also through the page cache.
        capabilities.space_alignment_bytes = 4096;
    }
    capabilities
}

/// Creates a qcow2 image, and its data file if it has one.
fn make(
    name: &str,
    config: &Config,
    (options, data_file): (CreateOptions, Option<String>),
    disk: &SimDisk,
    rng: &mut Rng,
) -> Result<(), String> {
    let is_device = config.room != Room::Grows && name == TOP;
    let content = match is_device {
        true => garbage(device_bytes(config, rng), rng),
        false => Content::default(),
    };
    let files = match is_device {
        true => capabilities(config),
        false => file_capabilities(config),
    };
    disk.add_file(name, files.clone(), content);
    let file = disk.open(name, true).expect("it was added");
    let data_file: Option<Arc<dyn BlockFile>> = match data_file {
        None => None,
        Some(name) => {
            // A raw disk has the length of its file.
            let (files, content) = match options.data_file_raw || !is_device {
                true => (file_capabilities(config), Content::default()),
                false => {
                    // Whole clusters are filled.
                    let disk_bytes = config.size.max(config.created_bytes);
                    let bytes = disk_bytes.next_multiple_of(config.layout.cluster_bytes());
                    // A device ends where one of its blocks does.
                    let unit = u64::from(files.space_alignment_bytes);
                    (files, garbage((3 * bytes).next_multiple_of(unit), rng))
                }
            };
            disk.add_file(&name, files, content);
            Some(disk.open(&name, true).expect("it was added"))
        }
    };
    let making = async move { create(file, data_file, &options).await };
    let made = block_on(disk, rng, "create", making)?;
    made.map_err(|error| format!("creating {name}: {error}"))
}

/// Writes some bytes and zeroes into a layer.
fn fill_layer(
    (name, size, first): (&str, u64, WriteId),
    config: &Config,
    disk: &SimDisk,
    (draw, rng): (&mut Rng, &mut Rng),
    initial: &mut Initial,
) -> Result<(), String> {
    let file = disk.open(name, true).expect("the run has made it");
    let gate = SimGate(disk.clone());
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        passphrase: key(config).filter(|_| name == TOP),
        ..OpenOptions::default()
    };
    let opening = async move { Image::open(file, options, &gate).await };
    let opened = block_on(disk, rng, "open", opening)?;
    let image = Arc::new(opened.map_err(|error| format!("opening {name}: {error}"))?);
    let grain = &config.grain;
    // Another id for each write; layers are a hundred apart.
    let writes = if name == TOP { 60 } else { 8 };
    for id in first..first + writes {
        let Some(granules) = draw_run(config, size, draw) else {
            continue;
        };
        let zero = draw.chance(30);
        let start = grain.start(granules.start);
        let len = grain.start(granules.end) - start;
        let mut buf = BufMut::zeroed(len as usize);
        let written = if zero { ZERO } else { id };
        model::fill(grain, written, granules.clone(), &mut buf);
        for granule in granules {
            initial.set(granule, written);
        }
        let image = Arc::clone(&image);
        let writing = async move {
            if zero {
                image.write_zeroes(start, len, ZeroOptions::default()).await
            } else {
                image.write(start, buf.freeze(), Durability::Cached).await
            }
        };
        let wrote = block_on(disk, rng, "fill", writing)?;
        wrote.map_err(|error| format!("filling {name}: {error}"))?;
    }
    let closed = block_on(disk, rng, "close", async move { image.close().await })?;
    closed.map_err(|error| format!("closing {name}: {error}"))
}

/// A run of granules in a window, before `size`.
fn draw_run(config: &Config, size: u64, draw: &mut Rng) -> Option<Granules> {
    let window = draw.pick(&config.windows);
    let end = window.end.min(config.grain.index_of(size - 1) + 1);
    if window.start >= end {
        return None;
    }
    let start = draw.between(window.start, end - 1);
    Some(start..end.min(start + draw.between(1, 200)))
}

/// Adds a raw file of this size with some bytes in it, numbered from `first`.
fn add_raw(
    (name, size, first): (&str, u64, WriteId),
    config: &Config,
    disk: &SimDisk,
    initial: &mut Initial,
    draw: &mut Rng,
) {
    let mut content = Content::default();
    content.set_len(size);
    let grain = &config.grain;
    for id in first..first + 6 {
        let Some(granules) = draw_run(config, size, draw) else {
            continue;
        };
        let at = grain.start(granules.start);
        let mut bytes = vec![0; (grain.start(granules.end) - at) as usize];
        model::fill(grain, id, granules.clone(), &mut bytes);
        content.write(at, &bytes);
        for granule in granules {
            initial.set(granule, id);
        }
    }
    disk.add_file(name, capabilities(config), content);
}

/// Opens the image for a session.
///
/// # Errors
/// The engine's.
pub(crate) fn open(
    config: &Config,
    round: &Round,
    disk: &SimDisk,
) -> impl Future<Output = cowslip::Result<Subject>> + use<> {
    let file = disk.open(TOP, true).expect("the run has made it");
    let (disk, kind) = (disk.clone(), config.kind);
    let options = OpenOptions {
        format: Some(match kind {
            Kind::Qcow2 => Format::Qcow2,
            Kind::Raw if config.encryption != Encryption::None => Format::Luks,
            Kind::Raw | Kind::Plain => Format::Raw,
        }),
        writable: true,
        write_policy: round.write_policy,
        discard: round.discard,
        discard_no_unref: round.discard_no_unref,
        detect_zeroes: match round.discard {
            // Rounds that are changed after they were drawn.
            DiscardPolicy::Ignore if round.detect_zeroes == DetectZeroes::Unmap => DetectZeroes::On,
            _ => round.detect_zeroes,
        },
        zero_method: round.zero_method,
        alloc_policy: round.alloc_policy,
        cache_bytes: round.cache_bytes,
        copy_on_read: round.copy_on_read,
        compress: round.compress,
        bitmap_piece_bytes: round.bitmap_piece_bytes,
        passphrase: key(config),
        ..OpenOptions::default()
    };
    async move {
        if kind == Kind::Plain {
            return Ok(Subject::Plain(Arc::new(Plain::new(file))));
        }
        let image = Image::open(file, options, &SimGate(disk)).await?;
        Ok(Subject::Image(Arc::new(image)))
    }
}

/// Opens the image as it was when a snapshot was taken.
///
/// # Errors
/// The engine's.
pub(crate) fn open_at(
    config: &Config,
    disk: &SimDisk,
    id: &str,
) -> impl Future<Output = cowslip::Result<Subject>> + use<> {
    let file = disk.open(TOP, false).expect("the run has made it");
    let disk = disk.clone();
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        snapshot: Some(SnapshotChoice::Id(id.to_string())),
        passphrase: key(config),
        ..OpenOptions::default()
    };
    async move {
        let image = Image::open(file, options, &SimGate(disk)).await?;
        Ok(Subject::Image(Arc::new(image)))
    }
}

/// How many snapshots the image has.
pub(crate) fn snapshots(config: &Config, disk: &SimDisk) -> u64 {
    match config.kind {
        Kind::Qcow2 => disk.content(TOP).map_or(0, |content| content.number(60, 4)),
        Kind::Raw | Kind::Plain => 0,
    }
}

/// Leaves the image hardly any room before its refcount table must move, if the run asks for that.
pub(crate) fn cram(config: &Config, disk: &SimDisk) {
    // Files that nobody may touch before the first write are compared with what they were made as.
    if let (Some(spare), false) = (config.crammed, config.prepared.autoclear) {
        disk.edit(TOP, |content| anatomy::cram(content, spare));
    }
}

/// Checks the file as it stands, by the engine's check and by a reader that shares nothing with it.
///
/// # Errors
/// Corruptions.
pub(crate) fn check(
    (config, baseline, lag): (&Config, &Baseline, Lag),
    disk: &SimDisk,
    rng: &mut Rng,
) -> Result<Found, String> {
    if config.kind != Kind::Qcow2 {
        return Ok(Found::default());
    }
    let (findings, found) = examine(TOP, (disk, lag), rng)?;
    // Where a cipher numbers sectors by their place, clusters that move have other bytes.
    let is_encrypted = config.encryption != Encryption::None;
    let changes_snapshots =
        |round: &Round| round.snapshots_percent > 0 || (is_encrypted && round.compacts_percent > 0);
    let fixed = !config.rounds.iter().any(changes_snapshots);
    if findings.snapshots != baseline.snapshots && fixed {
        return Err("what snapshots reach has changed".to_string());
    }
    baseline.check(disk, &findings)?;
    Ok(found)
}

/// Examines an image by two checks that share nothing.
///
/// # Errors
/// Corruptions.
pub(crate) fn examine(
    name: &str,
    (disk, lag): (&SimDisk, Lag),
    rng: &mut Rng,
) -> Result<(Findings, Found), String> {
    let content = disk.content(name).expect("the run has made it");
    let findings = inspect(&content);
    if !findings.corruptions.is_empty() {
        return Err(format!("corrupt: {}", findings.corruptions.join("; ")));
    }
    if let ([first, ..], false) = (&findings.flags[..], lag.flags) {
        return Err(format!("corrupt: {first}"));
    }
    if let ([first, ..], false) = (&findings.low_counts[..], lag.counts) {
        return Err(format!(
            "dirty by a change of snapshots, and corrupt: {first}"
        ));
    }
    if findings.corrupt_bit {
        return Err("the image is marked corrupt".to_string());
    }
    let found = Found {
        leaks: findings.leaks,
        dirty: findings.dirty,
    };
    if findings.dirty {
        return Ok((findings, found));
    }
    let file: Arc<dyn BlockFile> = disk.open(name, false).expect("the run has made it");
    let head = content.bytes(0, content.len().min(1 << 16) as usize);
    let header = Header::parse(&head, content.len(), name);
    let header = header.map_err(|error| format!("the header is refused: {error}"))?;
    let checking = async move {
        let mut findings: Vec<Finding> = Vec::new();
        let checked =
            check::check_with_header(&file, &header, &CheckOptions::default(), &mut findings).await;
        checked.map(|result| (result, findings))
    };
    let checked = block_on(disk, rng, "check", checking)?;
    let (result, list) = checked.map_err(|error| format!("the check fails: {error}"))?;
    let is_flag = |f: &&Finding| matches!(f, Finding::CopiedL2 { .. } | Finding::CopiedData { .. });
    let flags = list.iter().filter(is_flag).count() as u64;
    let allowed = if lag.flags { flags } else { 0 };
    if result.corruptions > allowed || result.check_errors > 0 {
        let list: Vec<String> = list.iter().take(8).map(|f| format!("{f:?}")).collect();
        return Err(format!("check finds: {}", list.join("; ")));
    }
    if result.leaks != findings.leaks {
        let (check, inspect) = (result.leaks, findings.leaks);
        return Err(format!(
            "check finds {check} leaks, the second opinion {inspect}: {list:x?}"
        ));
    }
    Ok((findings, found))
}

/// Structures that may lag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lag {
    /// Counts, under the dirty bit: another program has left the image so.
    pub counts: bool,
    /// COPIED bits: a change of snapshots was cut short in version 2, which has no dirty bit.
    pub flags: bool,
}

/// Findings that are no errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Clusters that nobody uses.
    pub leaks: u64,
    /// Counts may lag.
    pub dirty: bool,
}

impl Baseline {
    /// Checks the structures that a session must not touch.
    ///
    /// # Errors
    /// If it has touched them.
    pub fn check(&self, disk: &SimDisk, findings: &Findings) -> Result<(), String> {
        match findings.autoclear & UNKNOWN_AUTOCLEAR {
            0 => Ok(()),
            _ => self.check_untouched(disk),
        }
    }

    /// While an unknown autoclear bit is set, nothing else may have changed (D5).
    fn check_untouched(&self, disk: &SimDisk) -> Result<(), String> {
        let Some((image, data)) = &self.untouched else {
            return Err("an autoclear bit was set".to_string());
        };
        for (name, before) in [(TOP, image), (DATA, data)] {
            let now = disk.content(name).unwrap_or_default();
            if now != *before {
                return Err(format!("{name} has changed under an unknown autoclear bit"));
            }
        }
        Ok(())
    }
}

/// Compares the second reader's view with `bytes`, which the engine has read from the files as they
/// are.
///
/// # Errors
/// If it finds something else.
pub(crate) fn compare(layer: &Layer, offset: u64, bytes: &[u8]) -> Result<(), String> {
    compare_with(
        |other, known| layer.read(offset, other, known),
        offset,
        bytes,
    )
}

/// The same for the VM state.
///
/// # Errors
/// Likewise.
pub(crate) fn compare_vm_state(layer: &Layer, offset: u64, bytes: &[u8]) -> Result<(), String> {
    let compared = compare_with(
        |other, known| layer.read_vm_state(offset, other, known),
        offset,
        bytes,
    );
    compared.map_err(|what| format!("VM state: {what}"))
}

fn compare_with(
    read: impl FnOnce(&mut [u8], &mut [bool]),
    offset: u64,
    bytes: &[u8],
) -> Result<(), String> {
    let mut other = vec![0; bytes.len()];
    let mut known = vec![false; bytes.len()];
    read(&mut other, &mut known);
    let differs = (0..bytes.len()).find(|i| known[*i] && other[*i] != bytes[*i]);
    match differs {
        None => Ok(()),
        Some(at) => Err(format!(
            "the second reader finds something else at {:#x} than the engine",
            offset + at as u64
        )),
    }
}

/// Checks after a close that a raw data file has the guest's data.
///
/// # Errors
/// Where it is not.
pub(crate) fn check_data(config: &Config, disk: &SimDisk, model: &mut Model) -> Result<(), String> {
    if config.kind != Kind::Qcow2 || config.data != Data::ExternalRaw {
        return Ok(());
    }
    let content = disk.content(DATA).expect("the run has made it");
    // A file that asks for aligned writes cannot end anywhere else.
    let size = model.size();
    let end = size.next_multiple_of(u64::from(config.alignment_bytes).max(512));
    // A VM state lies behind the disk.
    let longer = !config.vm_state.is_empty() && content.len() > size;
    if content.len() != size && content.len() != end && !longer {
        return Err(format!("the raw data file has {:#x} bytes", content.len()));
    }
    let grain = model.grain().clone();
    for window in model.windows() {
        for granule in model.on_disk(&window) {
            let start = grain.start(granule);
            let bytes = content.bytes(start, (grain.start(granule + 1) - start) as usize);
            let found = model::recognise(granule, &bytes);
            if let Some(known) = model.certain(granule)
                && found != model::Found::Own(known)
            {
                return Err(format!(
                    "the raw data file has {found:?} at {start:#x}, and the guest {known}"
                ));
            }
        }
    }
    Ok(())
}
