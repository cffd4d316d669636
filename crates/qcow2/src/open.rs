//! Opening an image: the header, the roots, and what must hold before it may be written.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::entry::{EntryFormat, big_endian};
use super::geometry::{HostCluster, HostOffset};
use super::header::extensions::CryptoHeader;
use super::header::{CryptMethod, FIRST_READ_BYTES, Header};
use super::plan::Unref;
use crate::commit::probe::Probe;
use crate::commit::state::Committed;
use crate::control::bitmap::{self, Bitmaps};
use crate::control::snapshot;
use crate::durable::DurableWrites;
use crate::errno::{EACCES, EIO};
use crate::file::{AlignedFile, Brake, ChosenBy, Event, FileRequest, Gate, Numbering, Role};
use crate::files::{Entry, Files};
use crate::health::state::Health;
use crate::inspect::snapshot_table_bytes;
use crate::luks::{self, SectorCipher};
use crate::mapping::state::Mapping;
use crate::mapping::tables::Tables;
use crate::mapping::visits::Visits;
use crate::options::{DirtyImage, OpenOptions, RepairWatch};
use crate::path::gather::Gathering;
use crate::policy::ZeroMethod;
use crate::repair;
use crate::space::alloc::Fresh;
use crate::space::growth;
use crate::space::refcount::Refcounts;
use crate::space::state::HostSpace;
use crate::statistics::WriteStatistics;
use crate::sync::{Mutex, Turn, Waiters};
use crate::units::round_up;
use crate::{Counts, Qcow2, State};
use crate::{Error, Result};

/// The part of the memory for tables that the direct map takes at most, beside them.
const DIRECT_FRACTION: u64 = 16;

/// An image that is about to be opened.
pub struct OpenParameters<'a> {
    /// The file that holds the image.
    pub file: AlignedFile,
    /// Length of the file in bytes.
    pub file_len: u64,
    /// Options of the opening, access included.
    pub options: &'a OpenOptions,
    /// The way to its data file.
    pub gate: &'a dyn Gate,
    /// Where its data file is claimed.
    pub files: &'a Files,
    /// It is no backing file.
    pub is_top: bool,
}

/// Opens an image; changes nothing, but repairs one that was not closed cleanly and will be
/// written.
///
/// # Errors
/// If the file is no valid image, needs what is not supported or what cannot be opened, or is
/// marked corrupt and shall be written.
pub async fn open(opening: OpenParameters<'_>) -> Result<Qcow2> {
    let mut opening = opening;
    let mut header = read_header(&opening.file, opening.file_len).await?;
    let writable = opening.options.writable && opening.is_top;
    if writable {
        refuse_corrupt(&header)?;
    }
    if writable && header.is_dirty() {
        repair_dirty(&opening).await?;
        opening.file_len = opening.file.len().await?;
        header = read_header(&opening.file, opening.file_len).await?;
    }
    let OpenParameters { file, options, .. } = &opening;
    if let (Some(choice), true) = (&options.snapshot, opening.is_top) {
        header = snapshot::root_of(file, &header, choice).await?;
    }
    let format = header.entry_format();
    let data = match header.has_data_file() {
        true => open_data_file(&opening, &header, writable).await?,
        false if options.data_file.is_some() => {
            let text = "'data-file' can only be set for images with an external data file";
            return Err(Error::Invalid(text.to_string()));
        }
        false => file.clone(),
    };
    if opening.is_top {
        refuse_other_encryption(options, &header)?;
    }
    let data = decrypted(&opening, &header, data).await?;
    let l1 = read_table(file, header.l1_table_offset, header.l1_bytes()).await?;
    let knows_fresh = options.zero_method.knows_fresh() && !data.is_encrypted();
    let fresh = Fresh::knowing(knows_fresh);
    let mut state = fresh_state(header.clone(), l1, fresh, file.brake());
    // Layers below are asked in another way.
    if opening.is_top {
        let bytes = options.cache_bytes_or_default();
        state
            .mapping
            .tables
            .set_direct_bytes(bytes / DIRECT_FRACTION);
    }
    let mut image = Qcow2 {
        raw_data: header.is_data_file_raw(),
        format,
        compression: header.compression_type,
        discard: options.discard,
        unref: match options.discard_no_unref {
            true => Unref::Keep,
            false => Unref::Free,
        },
        policy: growth::Policy::decide(options.alloc_policy, header.extensions.allocation.as_ref()),
        zero_method: match data.is_encrypted() {
            // Space that reads as zeroes is none of the guest's zeroes.
            true => ZeroMethod::Write,
            false => options.zero_method,
        },
        write_policy: options.write_policy,
        writable,
        visits: Arc::clone(&state.visits),
        direct: Arc::clone(state.mapping.tables.direct()),
        size: Arc::clone(state.committed.size()),
        state: Mutex::new(state),
        turn: Turn::new(empty_counts(file.clone(), format)),
        vm_state: Turn::new(()),
        compaction: Turn::new(()),
        kept_space: Turn::new(()),
        fixed_end: (!file.capabilities().extends_with_zeroes)
            .then_some(opening.file_len >> format.geometry.cluster_bits()),
        sparse: OnceLock::new(),
        durable_writes: DurableWrites::default(),
        gathering: Gathering::default(),
        workers: options.workers.clone(),
        bitmap_piece_bytes: options.bitmap_piece_bytes_or_default(),
        probe: Probe::default(),
        file: file.clone(),
        data,
    };
    if writable {
        prepare_for_writes(&mut image, &header, &opening).await?;
    }
    Ok(image)
}

/// Reads the counts, and protects the metadata.
async fn prepare_for_writes(
    image: &mut Qcow2,
    header: &Header,
    opening: &OpenParameters<'_>,
) -> Result<()> {
    let (file, format) = (&opening.file, image.format);
    file.reach(Event::ReftableLoad).await;
    let table = read_table(
        file,
        header.refcount_table_offset,
        header.refcount_table_bytes(),
    )
    .await?;
    let refcounts = Refcounts::new(
        file.clone(),
        format,
        table,
        HostOffset(header.refcount_table_offset),
    )
    .within(opening.options.cache_bytes_or_default());
    let claimed = format.geometry.clusters_for(opening.file_len);
    image.lock().space.opened_with(claimed);
    let roots = roots(file, opening.file_len, header, &refcounts).await?;
    protect_metadata(image, &roots)?;
    image.lock().bitmaps = Bitmaps::new(bitmap::read_directory(file, header).await?);
    image.turn = Turn::new(Counts {
        refcounts,
        ..empty_counts(file.clone(), format)
    });
    Ok(())
}

async fn read_header(file: &AlignedFile, file_len: u64) -> Result<Header> {
    let mut bytes = file.read_new(0, FIRST_READ_BYTES.min(file_len)).await?;
    let wanted = Header::wanted_bytes(&bytes, file_len);
    if wanted > bytes.len() as u64 {
        bytes = file.read_new(0, wanted).await?;
    }
    Header::parse(&bytes, file_len, file.name())
}

/// Refuses an image that is marked corrupt: it is not written before its repair, which only the
/// user requests.
fn refuse_corrupt(header: &Header) -> Result<()> {
    if header.is_corrupt() {
        return Err(Error::Io {
            context:
                "qcow2: Image is corrupt; cannot be opened read/write (check -r all repairs it)"
                    .to_string(),
            source: std::io::Error::from_raw_os_error(EACCES),
        });
    }
    Ok(())
}

/// Repairs an image that was not closed cleanly. Its refcounts may be stale: until they are right,
/// clusters that look free may be in use.
async fn repair_dirty(opening: &OpenParameters<'_>) -> Result<()> {
    struct Watched<'a>(Option<&'a RepairWatch>);
    impl repair::Observer for Watched<'_> {
        fn event(&mut self, event: repair::Event<'_>) {
            if let Some(watch) = self.0 {
                (watch.0)(event);
            }
        }
    }
    let name = opening.file.name();
    let DirtyImage::Repair(at_open) = &opening.options.dirty else {
        return Err(Error::Unsupported {
            file: name.to_string(),
            feature: "writing an image that was not closed cleanly, before it is repaired \
                      (check -r all),"
                .into(),
        });
    };
    let options = repair::RepairOptions {
        scope: repair::Scope::All,
        memory_bytes_max: at_open.memory_bytes_max,
    };
    let mut watched = Watched(at_open.watch.as_ref());
    let outcome = repair::repair(opening.file.block_file(), &options, &mut watched).await?;
    if outcome.check.corruptions == 0 && outcome.check.check_errors == 0 {
        return Ok(());
    }
    Err(Error::Io {
        context: "Could not repair dirty image".to_string(),
        source: std::io::Error::from_raw_os_error(EIO),
    })
}

async fn open_data_file(
    opening: &OpenParameters<'_>,
    header: &Header,
    writable: bool,
) -> Result<AlignedFile> {
    let corrupt = |detail: &str| Error::Corrupt {
        file: opening.file.name().to_string(),
        structure: "header extension",
        offset: 0,
        detail: detail.to_string(),
    };
    let reached = match &opening.options.data_file {
        Some(file) => Ok(Arc::clone(file)),
        None => {
            let named = header.data_file_name();
            let unnamed = || Error::Invalid("'data-file' is required for this image".to_string());
            let named = named.ok_or_else(unnamed);
            let request = FileRequest {
                named_by: opening.file.name(),
                name: named?,
                role: Role::Data,
                writable,
                chosen_by: ChosenBy::Image,
            };
            let opened = opening.gate.open_async(&request).await;
            opened.map(|opened| opened.file)
        }
    };
    match reached {
        Ok(file) if file.id().is_some() && file.id() == opening.file.block_file().id() => {
            Err(corrupt("the image names itself as its data file"))
        }
        Ok(file) => match opening.files.enter(&file, Role::Data, writable)? {
            Entry::Again(_) => Err(corrupt("its data file is in use by an image of its chain")),
            Entry::Overlaps => Err(corrupt(
                "its data file is stored where another file of its chain is",
            )),
            Entry::New => {
                opening.files.claim_data_file(&file, writable)?;
                Ok(AlignedFile::new(file).stopped_with(&opening.file))
            }
        },
        Err(_) if opening.options.metadata_only => Ok(opening.file.clone()),
        Err(error) => Err(error),
    }
}

/// The file that guest data is in, with the image's cipher between. Under LUKS a sector's number is
/// its place in that file: the same data elsewhere is other bytes. In QEMU's old way it is its
/// place on the disk.
// Without `luks` no cipher can be made.
#[cfg_attr(not(feature = "luks"), allow(unused_variables))]
async fn decrypted(
    opening: &OpenParameters<'_>,
    header: &Header,
    data: AlignedFile,
) -> Result<AlignedFile> {
    if header.crypt_method == CryptMethod::None || opening.options.metadata_only {
        return Ok(data);
    }
    luks::check_built(opening.file.name())?;
    let passphrase = opening.options.passphrase.as_ref().ok_or_else(|| {
        Error::Key("Parameter 'encrypt.key-secret' is required for cipher".to_string())
    })?;
    let Some(crypto) = header.extensions.crypto_header else {
        let cipher = Arc::new(SectorCipher::of_password(passphrase));
        let data = data.encrypted(cipher, Numbering::Guest);
        return Ok(match header.has_data_file() {
            // It has everything where the disk has it.
            true => data.for_guest(0, 0).into_owned(),
            false => data,
        });
    };
    let place = place_of_keys(crypto, (&opening.file, opening.file_len))?;
    let key = (passphrase, &opening.options.workers);
    let (_, cipher) = luks::unlock(&opening.file, place, key).await?;
    Ok(data.encrypted(Arc::new(cipher), Numbering::Place(0)))
}

/// The method that the caller says is the image's, in QEMU's words.
fn refuse_other_encryption(options: &OpenOptions, header: &Header) -> Result<()> {
    let Some(said) = &options.encrypt_format else {
        return Ok(());
    };
    let text = match header.crypt_method.name() {
        Some(name) if name == said => return Ok(()),
        Some(name) => {
            format!("Header reported '{name}' encryption format but options specify '{said}'")
        }
        None => format!("No encryption in image header, but options specified format '{said}'"),
    };
    Err(Error::Invalid(text))
}

/// Returns where the LUKS volume of an image's keys is.
pub(super) fn place_of_keys(
    crypto: CryptoHeader,
    (file, file_len): (&AlignedFile, u64),
) -> Result<Range<u64>> {
    let end = crypto.offset.checked_add(crypto.length);
    let end = end
        .filter(|&end| end <= file_len)
        .ok_or_else(|| Error::Corrupt {
            file: file.name().to_string(),
            structure: "encryption header",
            offset: crypto.offset,
            detail: "it reaches beyond the end of the file".to_string(),
        })?;
    Ok(crypto.offset..end)
}

async fn read_table(file: &AlignedFile, offset: u64, bytes: u64) -> Result<Vec<u64>> {
    let table = file.read_new(offset, bytes).await?;
    Ok(table.chunks_exact(8).map(big_endian).collect())
}

fn empty_counts(file: AlignedFile, format: EntryFormat) -> Counts {
    Counts {
        refcounts: Refcounts::new(file, format, Vec::new(), HostOffset(0)),
        scanned: 0,
        grown_bytes: 0,
        step_bytes_max: u64::MAX,
        stepped_over: false,
        blocks_there: 0,
        dropped: BTreeSet::new(),
        compressed_tail: None,
        cannot_allocate: false,
        tables_allocated: 0,
        small_cycles: 0,
    }
}

fn fresh_state(header: Header, l1: Vec<u64>, fresh: Fresh, brake: Brake) -> State {
    let visits: Arc<Visits> = Arc::default();
    let tables = Tables::new(header.entry_format(), l1);
    State {
        mapping: Mapping::new(tables, Arc::clone(&visits)),
        space: HostSpace::new(fresh),
        committed: Committed::new(header),
        health: Health::new(brake, Arc::clone(&visits)),
        visits,
        bitmaps: Bitmaps::default(),
        writes: WriteStatistics::default(),
        maintenance: Waiters::default(),
    }
}

/// A structure that nothing else may share a cluster with.
struct Root {
    offset: u64,
    bytes: u64,
    structure: &'static str,
}

/// The structures that are reached without the L1 table. All of them lie within the file, which
/// also bounds the memory that protects them.
async fn roots(
    file: &AlignedFile,
    file_len: u64,
    header: &Header,
    refcounts: &Refcounts,
) -> Result<Vec<Root>> {
    let geometry = header.geometry();
    let root = |offset, bytes, structure| Root {
        offset,
        bytes,
        structure,
    };
    let table_bytes = header.refcount_table_bytes();
    let mut roots = vec![
        root(0, geometry.cluster_bytes(), "header"),
        root(header.refcount_table_offset, table_bytes, "refcount table"),
        root(header.l1_table_offset, header.l1_bytes(), "L1 table"),
    ];
    if header.nb_snapshots > 0 {
        let bytes = snapshot_table_bytes(file.block_file().as_ref(), header, file_len).await?;
        roots.push(root(header.snapshots_offset, bytes, "snapshot table"));
    }
    // A directory that is not consistent is not used; its extension may point anywhere.
    if let Some(bitmaps) = header.consistent_bitmaps() {
        let directory = root(
            bitmaps.bitmap_directory_offset,
            bitmaps.bitmap_directory_size,
            "bitmap directory",
        );
        roots.push(directory);
    }
    if let Some(crypto) = header.extensions.crypto_header {
        roots.push(root(crypto.offset, crypto.length, "encryption header"));
    }
    for index in 0..refcounts.table().len() as u64 {
        if let Some(block) = refcounts.block(index)? {
            roots.push(root(block.0, geometry.cluster_bytes(), "refcount block"));
        }
    }
    let end = round_up(file_len, geometry.cluster_bytes());
    let beyond = |root: &&Root| {
        let root_end = root.offset.checked_add(root.bytes);
        root_end.is_none_or(|root_end| root_end > end)
    };
    match roots.iter().find(beyond) {
        Some(root) => Err(root.corrupt(file.name(), "it reaches beyond the end of the file")),
        None => Ok(roots),
    }
}

impl Root {
    fn corrupt(&self, file: &str, detail: &str) -> Error {
        Error::Corrupt {
            file: file.to_string(),
            structure: self.structure,
            offset: self.offset,
            detail: detail.to_string(),
        }
    }
}

impl Qcow2 {
    /// Recomputes which clusters hold metadata, after roots have changed.
    pub(super) async fn protect_again(&self, refcounts: &Refcounts) -> Result<()> {
        let file_len = self.file.len().await?;
        let roots = roots(&self.file, file_len, &self.header(), refcounts).await?;
        {
            let mut state = self.lock();
            state.space.forget_metadata();
            state.mapping.forget_bad_tables();
        }
        protect_metadata(self, &roots)
    }
}

/// Marks all clusters that hold metadata (invariant S3). Roots that overlap each other make the
/// image unfit for writing; an L2 table that overlaps something, or another table that is the same
/// one, or lies beyond the end of the file, is never written through.
fn protect_metadata(image: &Qcow2, roots: &[Root]) -> Result<()> {
    let geometry = *image.geometry();
    let mut state = image.lock();
    let state = &mut *state;
    for root in roots {
        let first = root.offset >> geometry.cluster_bits();
        for cluster in first..first + geometry.clusters_for(root.bytes) {
            if !state.protect_cluster(HostCluster(cluster)) {
                return Err(root.corrupt(image.name(), "it overlaps other metadata"));
            }
        }
    }
    let mut bad = BTreeSet::new();
    for index in 0..state.mapping.tables.l1().len() as u64 {
        // An entry that does not decode is reported when something needs it.
        if let Ok(Some(table)) = state.mapping.tables.table(index) {
            let cluster = geometry.host_cluster(table.offset);
            if !state.space.protect_table(cluster) {
                state.mapping.refuse_table(index);
                bad.insert(table.offset);
            }
        }
    }
    if !bad.is_empty() {
        // Another entry may refer to it: a copy would free a table that is still in use.
        for index in 0..state.mapping.tables.l1().len() as u64 {
            let table = state.mapping.tables.table(index);
            if table.is_ok_and(|table| table.is_some_and(|table| bad.contains(&table.offset))) {
                state.mapping.refuse_table(index);
            }
        }
    }
    Ok(())
}
