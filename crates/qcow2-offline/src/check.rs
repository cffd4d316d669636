//! Checks of an image, without changing it: every structure, every reference, every refcount.
//!
//! Promises: finds what QEMU's check finds, counts it as QEMU does and reports it in QEMU's words,
//! and looks for three things more ([`Finding::is_known_to_qemu`]). A hostile image costs a bounded
//! amount of memory and no panic. Leaves out: repair, and what guest data means.
//!
//! 1. What may be referenced is counted in memory ([`counts`]): header, L1 tables of the disk and
//!    of its snapshots, L2 tables, data and compressed clusters, the other tables. A table that
//!    several L1 entries share is read once, and what it references counts as often as it is
//!    referenced.
//! 2. The counts are compared with the refcounts on disk.
//! 3. COPIED is compared with the refcounts on disk. The first two steps determine whether any flag
//!    can be wrong at all, so the L2 tables of a sound image are read once only.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::file::BlockFile;
use crate::header::Header;
use crate::inspect::read_start;

mod bitmaps;
mod copied;
#[doc(hidden)]
pub mod counts;
mod findings;
#[doc(hidden)]
pub mod reader;
mod refcounts;
mod snapshots;
mod state;
#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use crate::entry::snapshot::SnapshotL1Flaw;
#[doc(hidden)]
pub use findings::Structure;
pub use findings::{Finding, Severity};
pub use state::{CheckOptions, CheckResult, Observer};

use reader::Reader;
use refcounts::Refcounts;
use state::{L1, Owner, State, count_l1, count_l2_tables};

/// Checks the image in `file`, which is not open elsewhere, and reports its findings to `observer`.
///
/// # Errors
/// If the file cannot be read, its header is unusable, the snapshot table cannot be made sense of,
/// or the image needs more memory than it may have. All other flaws of the image are findings.
pub async fn check(
    file: &Arc<dyn BlockFile>,
    options: &CheckOptions,
    observer: &mut dyn Observer,
) -> Result<CheckResult> {
    let start = read_start(file.as_ref()).await?;
    let header = Header::parse_damaged(&start, file.name())?;
    check_with_header(file, &header, options, observer).await
}

/// The same with a header that the caller has read. For structures that lie beyond the end of the
/// file to be findings, it must be parsed as that of an endless file (`u64::MAX`).
///
/// # Errors
/// As [`check`].
#[doc(hidden)]
pub async fn check_with_header(
    file: &Arc<dyn BlockFile>,
    header: &Header,
    options: &CheckOptions,
    observer: &mut dyn Observer,
) -> Result<CheckResult> {
    let reader = Reader::new(file).await?;
    let mut state = State::new(&reader, header, options, observer)?;
    let mut refcounts = count(&reader, &mut state).await?;
    copied::compare(&reader, &mut state, &mut refcounts).await?;
    refcounts.find_overlaps(&mut state).await?;
    Ok(state.result)
}

/// Checks as [`check`] does, but for COPIED, an image that may change meanwhile: returns what it
/// has read as tables.
///
/// # Errors
/// As [`check`]; with tables that have become something else, any.
#[doc(hidden)]
pub async fn check_counts(
    file: &Arc<dyn BlockFile>,
    header: &Header,
    observer: &mut dyn Observer,
) -> Result<TablesRead> {
    let reader = Reader::new(file).await?;
    let options = CheckOptions::default();
    let mut state = State::new(&reader, header, &options, observer)?;
    let mut refcounts = count(&reader, &mut state).await?;
    refcounts.find_overlaps(&mut state).await?;
    let bits = header.geometry().cluster_bits();
    let tables = state
        .l2_tables
        .list
        .iter()
        .map(|table| table.offset >> bits);
    let clusters = tables.chain(refcounts.blocks()).collect();
    let regions = state.regions.iter();
    let regions = regions.map(|part| part.first_cluster..part.first_cluster + part.clusters);
    Ok(TablesRead::of(clusters, regions.collect()))
}

/// Clusters of the file that a check has read as tables.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct TablesRead {
    clusters: Vec<u64>,
    regions: Vec<Range<u64>>,
}

impl TablesRead {
    /// These clusters, and the parts of the file that have several.
    pub fn of(mut clusters: Vec<u64>, regions: Vec<Range<u64>>) -> TablesRead {
        clusters.sort_unstable();
        TablesRead { clusters, regions }
    }

    /// Returns whether a cluster is one of them.
    pub fn contain(&self, cluster: u64) -> bool {
        let is_in_region = self.regions.iter().any(|region| region.contains(&cluster));
        is_in_region || self.clusters.binary_search(&cluster).is_ok()
    }
}

/// Counts all references, and compares them with the refcounts.
async fn count<'a>(reader: &'a Reader<'a>, state: &mut State<'_>) -> Result<Refcounts<'a>> {
    let header = state.header;
    let snapshots = snapshots::read(reader, state).await?;
    state.region(0, state.cluster_bytes, Structure::Header)?;
    let active = L1 {
        offset: header.l1_table_offset,
        entries: u64::from(header.l1_size),
        owner: Owner::Active,
    };
    count_l1(reader, state, active).await?;
    snapshots.count(reader, state).await?;
    count_l2_tables(reader, state).await?;
    state.region(
        header.snapshots_offset,
        snapshots.bytes,
        Structure::SnapshotTable,
    )?;
    let offset = header.refcount_table_offset;
    state.region(
        offset,
        header.refcount_table_bytes(),
        Structure::RefcountTable,
    )?;
    if let Some(crypto) = header.extensions.crypto_header {
        state.region(crypto.offset, crypto.length, Structure::CryptoHeader)?;
    }
    bitmaps::count(reader, state).await?;
    let refcounts = Refcounts::read(reader, state).await?;
    refcounts.count_blocks(state)?;
    let highest = refcounts.compare(state).await?;
    state.result.image_end_offset = (highest + 1) * state.cluster_bytes;
    Ok(refcounts)
}
