//! Changes of what the header of an existing image says.
//!
//! One write of sector 0 is the moment of change, whatever the length of the header. Extensions and
//! the backing file's name may lie beyond that sector, so where they do the new ones are first
//! written elsewhere in the header's cluster, and sector 0 then skips to them over a padding
//! extension. Only when that is durable are they written where they belong, behind sector 0, which
//! goes last:
//!
//! | stage, with a barrier after each | what a crash after it leaves |
//! | --- | --- |
//! | extensions and name behind all that the header uses | the old header |
//! | sector 0: new fields, padding up to the copy | the new header, with padding |
//! | what belongs behind sector 0 (inside the padding) | the same |
//! | sector 0 as it shall be | the new header, and a copy that nothing refers to |
//!
//! The session ends with it: its tables were read under the old header. Another width of refcounts
//! is prepared before (`amend/width.rs`) and named by the same write.

use cowslip_queue::{Buf, BufMut};

use crate::Qcow2;
use crate::backing::Backing;
use crate::commit::roots::Flush;
use crate::create::Version;
use crate::header::extensions::{PADDING, PREFIX_BYTES, area_end};
use crate::header::{
    AllocationHint, BACKING_NAME_BYTES_MAX, CompressionType, Extensions, HEADER_BYTES,
    HEADER_BYTES_V2, Header, autoclear, compatible, incompatible,
};
use crate::job::Job;
use crate::policy::AllocPolicy;
use crate::units::round_up;
use crate::{Error, Result};

mod unflag;
mod width;

/// Bytes that the media write as a whole or not at all.
const SECTOR_BYTES: usize = 512;

/// The options to change; those that are `None` stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// The version of the format.
    pub version: Option<Version>,
    /// The width of refcounts in bits: a power of two, 64 at most.
    pub refcount_bits: Option<u32>,
    /// Whether refcount updates may be postponed.
    pub lazy_refcounts: Option<bool>,
    /// The name of the external data file; empty takes it out.
    pub data_file: Option<String>,
    /// Whether the data file alone is always a valid raw image; it can only cease to be.
    pub data_file_raw: Option<bool>,
    /// How space is to be allocated.
    pub alloc_policy: Option<AllocPolicy>,
    /// The backing file. It is not checked that the guest still sees the same data:
    /// a rebase keeps it.
    pub backing: Option<BackingFile>,
}

/// The backing file of an image, as its header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackingFile {
    /// No backing file.
    None,
    /// A backing file by name.
    File {
        /// Its name; a relative one is relative to the image.
        name: String,
        /// Its format's name, or that of a protocol which QEMU takes for one.
        format: String,
    },
}

impl Amendment {
    /// The change to another backing file, or to none.
    pub fn of_backing(backing: BackingFile) -> Amendment {
        Amendment {
            backing: Some(backing),
            ..Amendment::default()
        }
    }

    /// The header as it shall be. Texts are QEMU's.
    fn apply(&self, old: &Header) -> Result<Header> {
        let refuse = |text: String| Err(Error::Invalid(text));
        let mut new = old.clone();
        if self.version == Some(Version::V3) && old.version < 3 {
            upgrade(&mut new);
        }
        if let Some(bits) = self.refcount_bits {
            let may_differ = match self.version {
                Some(version) => version == Version::V3,
                None => old.version >= 3,
            };
            set_refcount_bits(&mut new, bits, may_differ)?;
        }
        if self.version == Some(Version::V2) && old.version >= 3 {
            downgrade(&mut new)?;
        }
        if self.data_file_raw == Some(true) && !old.is_data_file_raw() {
            return refuse("data-file-raw cannot be set on existing images".to_string());
        }
        if self.data_file_raw == Some(false) {
            new.autoclear_features &= !autoclear::DATA_FILE_RAW;
        }
        if let Some(name) = &self.data_file {
            if !old.has_data_file() {
                let text = "data-file can only be set for images that use an external data file";
                return refuse(text.to_string());
            }
            new.extensions.data_file = Some(name.clone()).filter(|name| !name.is_empty());
        }
        match self.lazy_refcounts {
            // A downgrade has cleared it.
            Some(true) if new.version < 3 && old.version >= 3 => {}
            Some(true) if new.version < 3 => {
                let text = "Lazy refcounts only supported with compatibility level 1.1 and above (use \
                            compat=1.1 or greater)";
                return refuse(text.to_string());
            }
            Some(true) => new.compatible_features |= compatible::LAZY_REFCOUNTS,
            Some(false) => new.compatible_features &= !compatible::LAZY_REFCOUNTS,
            None => {}
        }
        match self.alloc_policy {
            None => {}
            Some(AllocPolicy::Auto) => new.extensions.allocation = None,
            Some(_) if new.version < 3 => {
                return refuse("alloc_policy needs compat=1.1 or greater".to_string());
            }
            Some(policy) => {
                let hint = new.extensions.allocation;
                let hint = hint.unwrap_or(AllocationHint::new(policy));
                new.extensions.allocation = Some(AllocationHint { policy, ..hint });
            }
        }
        if let Some(backing) = &self.backing {
            set_backing(&mut new, backing)?;
        }
        Ok(new)
    }
}

/// Version 2 has 16 bits, whatever the version is so far.
fn set_refcount_bits(new: &mut Header, bits: u32, may_differ: bool) -> Result<()> {
    let text = if bits > 64 || !bits.is_power_of_two() {
        "Refcount width must be a power of two and may not exceed 64 bits"
    } else if bits != 16 && !may_differ {
        "Refcount widths other than 16 bits require compatibility level 1.1 or above (use \
         compat=1.1 or greater)"
    } else {
        new.refcount_order = bits.ilog2();
        return Ok(());
    };
    Err(Error::Invalid(text.to_string()))
}

fn set_backing(new: &mut Header, backing: &BackingFile) -> Result<()> {
    let (name, format) = match backing {
        BackingFile::None => (None, None),
        BackingFile::File { .. } if new.is_data_file_raw() => {
            let text = "an image whose data file is a raw image of the disk has no backing file";
            return Err(Error::Invalid(text.to_string()));
        }
        BackingFile::File { name, .. } if name.len() > BACKING_NAME_BYTES_MAX as usize => {
            return Err(Error::Invalid(format!(
                "the name of a backing file has {BACKING_NAME_BYTES_MAX} bytes at most"
            )));
        }
        BackingFile::File { name, format } => (Some(name.clone()), Some(format.clone())),
    };
    new.backing_file = name;
    new.extensions.backing_format = format;
    Ok(())
}

fn upgrade(new: &mut Header) {
    let standard = Extensions::for_new_image(3, 1 << new.cluster_bits);
    new.version = 3;
    new.header_length = HEADER_BYTES;
    new.unknown_fields = vec![0; HEADER_BYTES as usize - 105];
    new.extensions.feature_names = standard.feature_names;
}

fn downgrade(new: &mut Header) -> Result<()> {
    let refuse = |text: String| Err(Error::Invalid(text));
    let lacking = new.incompatible_features & !incompatible::DIRTY;
    if new.has_data_file() {
        return refuse("Cannot downgrade an image with a data file".to_string());
    }
    if lacking != 0 {
        return refuse(format!(
            "Cannot downgrade an image with incompatible features {lacking:#x} set"
        ));
    }
    if new.refcount_order != 4 {
        return refuse("compat=0.10 requires refcount_bits=16".to_string());
    }
    debug_assert_eq!(
        new.compression_type,
        CompressionType::Deflate,
        "it has a bit"
    );
    new.version = 2;
    new.header_length = HEADER_BYTES_V2;
    new.unknown_fields.clear();
    new.compatible_features = 0;
    new.autoclear_features = 0;
    new.extensions.feature_names = None;
    new.extensions.bitmaps = None;
    new.extensions.allocation = None;
    Ok(())
}

/// Writes in stages; the first one of them that writes sector 0 is the change. Pure.
type Stages = Vec<Vec<(usize, Vec<u8>)>>;

fn stages(cluster: &[u8], old: &Header, new: &mut Header) -> Result<Stages> {
    let used = used_bytes(cluster, old);
    let mut bytes = new.encode()?;
    if let Some(sector) = only_sector(cluster, &bytes, used) {
        return Ok(vec![vec![sector]]);
    }
    let start = new.header_length as usize;
    let copy_at = round_up(used.max(bytes.len()).max(SECTOR_BYTES) as u64, 8) as usize;
    let copy = bytes[start..].to_vec();
    let copy_end = copy_at + copy.len();
    if copy_end > cluster.len() || start + PREFIX_BYTES > SECTOR_BYTES {
        return Err(Error::Invalid(format!(
            "a cluster of {} bytes has no room to change the header so that a crash does no harm",
            cluster.len()
        )));
    }
    let mut skipping = new.clone();
    if skipping.backing_file_offset != 0 {
        skipping.backing_file_offset += (copy_at - start) as u64;
    }
    let mut sector = skipping.fixed_part();
    sector.extend(PADDING.to_be_bytes());
    sector.extend(((copy_at - start - PREFIX_BYTES) as u32).to_be_bytes());
    sector.resize(SECTOR_BYTES, 0);
    // The rest of the old header and of the copy is unused.
    bytes.resize(copy_at, 0);
    let behind = bytes.split_off(SECTOR_BYTES);
    let rest = vec![0; copy.len()];
    Ok(vec![
        vec![(copy_at, copy)],
        vec![(0, sector)],
        vec![(SECTOR_BYTES, behind)],
        vec![(0, bytes)],
        vec![(copy_at, rest)],
    ])
}

/// The one sector that changes, if it is one: it is written whole or not at all. `used` bytes of
/// `cluster` are the header's.
fn only_sector(cluster: &[u8], new: &[u8], used: usize) -> Option<(usize, Vec<u8>)> {
    let len = used
        .max(new.len())
        .next_multiple_of(SECTOR_BYTES)
        .min(cluster.len());
    let mut new = new.to_vec();
    new.resize(len, 0);
    // The bytes behind the old header may be anything.
    let mut old = cluster[..used].to_vec();
    old.resize(len, 0);
    let sectors = old
        .chunks(SECTOR_BYTES)
        .zip(new.chunks(SECTOR_BYTES))
        .enumerate();
    let changed = sectors.filter(|(_, (old, new))| old != new);
    let changed: Vec<usize> = changed.map(|(index, _)| index).collect();
    let at = match changed[..] {
        [] => 0,
        [index] => index * SECTOR_BYTES,
        [_, _, ..] => return None,
    };
    Some((at, new[at..len.min(at + SECTOR_BYTES)].to_vec()))
}

/// Returns how much of its cluster the header uses.
fn used_bytes(cluster: &[u8], header: &Header) -> usize {
    let name_len = header.backing_file.as_ref().map_or(0, String::len);
    let name_end = match header.backing_file_offset {
        0 => 0,
        offset => offset as usize + name_len,
    };
    let start = u64::from(header.header_length);
    let area = area_end(cluster, start, cluster.len() as u64);
    area.map_or(cluster.len(), |end| end as usize).max(name_end)
}

impl Qcow2 {
    /// Changes the header, and ends the session: nothing but closing may follow.
    pub async fn amend(&self, amendment: &Amendment, below: &dyn Backing, job: &Job) -> Result<()> {
        self.ready_for_changes().await?;
        let before = self.header();
        let version = amendment.apply(&before)?.version;
        if version > before.version && before.nb_snapshots > 0 {
            self.complete_snapshots(job).await?;
        }
        if version < before.version {
            self.refuse_for_version_2(before.size).await?;
            self.unflag_zero_clusters(below, job).await?;
            if before.nb_snapshots > 0 {
                self.unflag_snapshots(job).await?;
            }
            // Nothing could refer to their space any more.
            self.lock().bitmaps.remove_all();
        }
        self.close().await?;
        let changed = self.change_closed(amendment, job).await;
        self.end_session();
        changed
    }

    /// Changes the header of an image whose session has been written.
    async fn change_closed(&self, amendment: &Amendment, job: &Job) -> Result<()> {
        // The close may have changed it.
        let old = self.header();
        let mut new = amendment.apply(&old)?;
        if new == old {
            return Ok(());
        }
        let turn = self.turn.take().await;
        if new.refcount_order == old.refcount_order {
            return self.latch_if_cancelled(self.change_header(&old, new)).await;
        }
        let counts = self
            .write_new_counts(&turn, new.refcount_order, job)
            .await?;
        counts.name_in(&mut new);
        let change = async {
            self.change_header(&old, new).await?;
            self.uncount_replaced(&counts).await
        };
        self.latch_if_cancelled(change).await
    }

    /// Refuses what [`Qcow2::amend`] would refuse of this header with a disk of `size` bytes,
    /// before anything is done.
    ///
    /// # Errors
    /// As `amend`.
    pub async fn may_amend(&self, amendment: &Amendment, size: u64) -> Result<()> {
        let old = self.header();
        let mut new = amendment.apply(&old)?;
        if new.version < old.version {
            self.refuse_for_version_2(size).await?;
        }
        let cluster = self.first_cluster().await?;
        stages(&cluster, &old, &mut new).map(drop)
    }

    async fn first_cluster(&self) -> Result<BufMut> {
        self.file.read_new(0, self.geometry().cluster_bytes()).await
    }

    /// From one header to the other, in stages. Its extensions may have other places then.
    pub(crate) async fn change_header(&self, old: &Header, mut new: Header) -> Result<()> {
        self.unlatched(&self.lock())?;
        // The hint may have changed at the close.
        if let (Some(hint), Some(now)) = (
            &mut new.extensions.allocation,
            self.lock().committed.header.extensions.allocation,
        ) {
            hint.closes_ahead = now.closes_ahead;
        }
        let cluster = self.first_cluster().await?;
        for stage in stages(&cluster, old, &mut new)? {
            let writes = stage.into_iter();
            let writes = writes.map(|(at, bytes)| (at as u64, vec![Buf::from(bytes)]));
            self.write_root(writes.collect(), Flush::All).await?;
        }
        let parsed = Header::parse_damaged(&new.encode()?, self.name())?;
        self.lock().committed.set_header(parsed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::CreateOptions;

    fn parsed(bytes: &[u8]) -> Result<Header> {
        Header::parse(bytes, 1 << 40, "x")
    }

    /// The header of a new image, with its tables where they may be.
    fn fresh(options: &CreateOptions) -> (Header, Vec<u8>) {
        use futures_util::FutureExt;
        use std::sync::Arc;
        let file = Arc::new(crate::file::memory::MemoryFile::new("x", Vec::new(), 1));
        let made = crate::create::create(file.clone(), None, options);
        made.now_or_never().unwrap().unwrap();
        let bytes = file.contents()[..options.cluster_size as usize].to_vec();
        (parsed(&bytes).unwrap(), bytes)
    }

    /// Returns the header without the offsets of its parts.
    fn said(header: &Header) -> Header {
        let mut header = header.clone();
        header.backing_file_offset = 0;
        if let Some(hint) = &mut header.extensions.allocation {
            hint.data_offset = 0;
        }
        header
    }

    /// After each stage, and with its writes torn at any sector, the header is the old or the new
    /// one, and never the old one again once it was the new one.
    fn check(options: &CreateOptions, amendment: &Amendment) {
        let (old, mut disk) = fresh(options);
        let mut new = amendment.apply(&old).unwrap();
        let stages = stages(&disk, &old, &mut new).unwrap();
        let mut is_new = false;
        for stage in stages {
            for (at, bytes) in &stage {
                for sectors in 0..bytes.len().div_ceil(SECTOR_BYTES) {
                    // Each sector alone, and all up to it.
                    let part =
                        sectors * SECTOR_BYTES..bytes.len().min((sectors + 1) * SECTOR_BYTES);
                    for part in [part.clone(), 0..part.end] {
                        let mut torn = disk.clone();
                        torn[at + part.start..at + part.end].copy_from_slice(&bytes[part]);
                        let found = said(&parsed(&torn).unwrap());
                        assert!(found == said(&new) || (!is_new && found == said(&old)));
                    }
                }
                disk[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            is_new |= said(&parsed(&disk).unwrap()) == said(&new);
        }
        assert!(is_new);
        assert_eq!(
            parsed(&disk).unwrap().extensions.unknown,
            old.extensions.unknown
        );
        let encoded = new.encode().unwrap();
        assert_eq!(disk[..encoded.len()], encoded);
        assert!(disk[encoded.len()..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_crash_leaves_the_old_header_or_the_new_one() {
        let mut with_backing = CreateOptions::new(1 << 20);
        with_backing.backing_file = Some("b".repeat(700));
        with_backing.backing_format = Some("raw".to_string());
        let mut version_2 = with_backing.clone();
        version_2.version = Version::V2;
        let mut small = CreateOptions::new(1 << 20);
        small.cluster_size = 512;
        let plain = CreateOptions::new(1 << 20);
        let amendments = [
            Amendment {
                lazy_refcounts: Some(true),
                ..Amendment::default()
            },
            Amendment {
                alloc_policy: Some(AllocPolicy::Sparse),
                ..Amendment::default()
            },
            Amendment {
                version: Some(Version::V2),
                ..Amendment::default()
            },
            Amendment::of_backing(BackingFile::None),
            Amendment::of_backing(BackingFile::File {
                name: "new".repeat(50),
                format: "qcow2".to_string(),
            }),
        ];
        for options in [&with_backing, &small, &plain] {
            amendments
                .iter()
                .for_each(|amendment| check(options, amendment));
        }
        let up = Amendment {
            version: Some(Version::V3),
            ..Amendment::default()
        };
        check(&version_2, &up);
    }

    #[test]
    fn an_interrupted_change_is_the_start_of_the_next() {
        let (old, mut disk) = fresh(&CreateOptions::new(1 << 20));
        let sparse = Amendment {
            alloc_policy: Some(AllocPolicy::Sparse),
            ..Amendment::default()
        };
        let mut new = sparse.apply(&old).unwrap();
        for (at, bytes) in stages(&disk, &old, &mut new).unwrap()[..2].concat() {
            disk[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let half = parsed(&disk).unwrap();
        assert_eq!(said(&half), said(&new));
        let back = Amendment {
            alloc_policy: Some(AllocPolicy::Auto),
            ..Amendment::default()
        };
        let mut again = back.apply(&half).unwrap();
        for stage in stages(&disk, &half, &mut again).unwrap() {
            for (at, bytes) in stage {
                disk[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            let found = said(&parsed(&disk).unwrap());
            assert!(found == said(&half) || found == said(&again));
        }
        assert_eq!(said(&parsed(&disk).unwrap()), said(&old));
    }

    #[test]
    fn what_cannot_be_is_refused_in_qemus_words() {
        let (plain, _) = fresh(&CreateOptions::new(1 << 20));
        let refusal = |amendment: Amendment| match amendment.apply(&plain) {
            Err(Error::Invalid(text)) => text,
            other => panic!("{other:?}"),
        };
        let text = refusal(Amendment {
            data_file: Some("d".to_string()),
            ..Amendment::default()
        });
        assert!(text.starts_with("data-file can only be set"), "{text}");
        let text = refusal(Amendment {
            data_file_raw: Some(true),
            ..Amendment::default()
        });
        assert_eq!(text, "data-file-raw cannot be set on existing images");
    }
}
