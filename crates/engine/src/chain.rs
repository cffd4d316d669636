//! Chains of images: opened through the caller's gate, read from the top down.
//!
//! Each layer ends at its own size: ranges beyond it read as zeroes, even where a layer
//! further down is longer. A chain is a value that each request takes once; layers below the first
//! are read-only.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::run::{Run, Source};
use cowslip_block::joins::join_all;
use cowslip_queue::IoVecMut;

use crate::Result;
use crate::backing::{self, Backing, BackingFuture, Decided};
use crate::file::{self, AlignedFile, Event};
use crate::formats::Added;
use crate::policy::Format;
use crate::qcow2::header::CryptMethod;
use crate::raw::Raw;
use cowslip_qcow2::read::{Jobs, read_mapped, sort_out};
use cowslip_qcow2::{EpochGuard, Qcow2};

mod index;
mod naming;
mod open;

use index::{Index, REGION_BYTES, Region, SPAN_BYTES};

pub use naming::{Naming, Namings};
pub use open::{open, share_memory};

/// One image of a chain.
#[derive(Debug)]
pub enum Layer {
    /// Bytes as they are, or encrypted.
    Raw(Box<Raw>),
    /// A qcow2 image.
    Qcow2(Box<Qcow2>),
    /// An image of a format that a caller has added.
    Other(Box<Added>),
}

impl Layer {
    /// Format of the layer's image.
    pub fn format(&self) -> Format {
        match self {
            Layer::Raw(raw) => raw.format(),
            Layer::Qcow2(_) => Format::Qcow2,
            Layer::Other(added) => added.format(),
        }
    }

    /// Returns whether its format was not given, and raw is only a guess.
    pub fn is_guessed(&self) -> bool {
        match self {
            Layer::Raw(raw) => raw.file().is_guarded(),
            Layer::Qcow2(_) | Layer::Other(..) => false,
        }
    }

    /// Bytes of the disk that it holds.
    pub fn size(&self) -> u64 {
        match self {
            Layer::Raw(raw) => raw.size(),
            Layer::Qcow2(image) => image.size(),
            Layer::Other(added) => added.size(),
        }
    }

    /// It, if it is qcow2.
    pub fn qcow2(&self) -> Option<&Qcow2> {
        match self {
            Layer::Raw(_) | Layer::Other(..) => None,
            Layer::Qcow2(image) => Some(image),
        }
    }

    /// Returns whether what it shows depends on the password that it was opened with, as in QEMU's
    /// old way to encrypt. (In a LUKS volume any password that opens it leads to the same key.)
    pub fn depends_on_password(&self) -> bool {
        match self {
            Layer::Raw(_) | Layer::Other(..) => false,
            Layer::Qcow2(image) => image.header().crypt_method == CryptMethod::Aes,
        }
    }

    /// Returns whether its tables may change while it is read: it was opened for writing, and its
    /// session goes on.
    fn may_change(&self) -> bool {
        self.qcow2().is_some_and(Qcow2::may_change)
    }

    /// The runs of a range within its size.
    pub async fn map(&self, range: Range<u64>) -> Result<Vec<Run>> {
        match self {
            Layer::Raw(raw) => Ok(raw.map(range)),
            Layer::Qcow2(image) => image.map(range).await,
            Layer::Other(added) => added.map(range).await,
        }
    }

    /// Its file, and its data file if it has one of its own.
    pub fn files(&self) -> impl Iterator<Item = &Arc<dyn file::BlockFile>> {
        let (file, data) = (self.file().block_file(), self.data_file().block_file());
        let separate = (!Arc::ptr_eq(file, data)).then_some(data);
        std::iter::once(file).chain(separate)
    }

    /// The file that holds the layer's image.
    pub fn file(&self) -> &AlignedFile {
        match self {
            Layer::Raw(raw) => raw.file(),
            Layer::Qcow2(image) => image.file(),
            Layer::Other(added) => added.file(),
        }
    }

    /// The file that holds the data of [`Source::Data`].
    pub fn data_file(&self) -> &AlignedFile {
        match self {
            Layer::Raw(raw) => raw.file(),
            Layer::Qcow2(image) => image.data_file(),
            Layer::Other(added) => added.file(),
        }
    }
}

/// The backing chain of an image; empty if it has no backing file.
#[derive(Clone, Debug, Default)]
pub struct Below {
    layers: Arc<[Arc<Layer>]>,
    /// Where the layers have what, if there are several and none of them changes.
    index: Option<Arc<Index>>,
    /// One of them may be changing: something is committed into it.
    is_changing: bool,
}

impl Below {
    /// The layers, the uppermost first.
    pub fn new(layers: Vec<Arc<Layer>>) -> Below {
        let is_changing = layers.iter().any(|layer| layer.may_change());
        let has_index = layers.len() > 1 && !is_changing;
        Below {
            index: has_index.then(Arc::default),
            is_changing,
            layers: layers.into(),
        }
    }

    /// Makes durable what other processes have left of the layers in the system's caches, once for
    /// each of their files: a disk may have been served from one of them before, by a process that
    /// was killed.
    ///
    /// # Errors
    /// I/O.
    pub async fn flush_what_was_left(&self) -> Result<()> {
        for layer in self.layers.iter() {
            layer.file().flush_what_was_left().await?;
            if layer.files().count() > 1 {
                layer.data_file().flush_what_was_left().await?;
            }
        }
        Ok(())
    }

    /// Layers below the top, nearest first.
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// The first `count` layers from the top.
    pub fn uppermost(&self, count: usize) -> Below {
        Below::new(self.layers[..count].to_vec())
    }

    /// Sets the memory for the index of the layers, in bytes. Returns what it will not take.
    fn set_index_budget(&self, bytes: u64) -> u64 {
        match &self.index {
            Some(index) => {
                index.set_budget(bytes);
                0
            }
            None => bytes,
        }
    }

    /// The layers that decide a range, by the index: in order, covering it. `None` where the tables
    /// around it are damaged: that is no matter of a request that does not need them.
    async fn indexed(&self, range: Range<u64>) -> Option<Vec<Decided>> {
        let index = self.index.as_ref()?;
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let number = at / REGION_BYTES;
            let region = match index.get(number) {
                Some(region) => region,
                None => self.look_up(index, number).await?,
            };
            let end = range.end.min((number + 1).checked_mul(REGION_BYTES)?);
            found.extend(index::within(&region, &(at..end)));
            at = end;
        }
        Some(found)
    }

    /// Finds what a region holds, and those around it that the same slices of tables map.
    async fn look_up(&self, index: &Index, number: u64) -> Option<Region> {
        let slices = self.layers.iter().filter_map(|layer| layer.qcow2());
        let span = slices.map(Qcow2::slice_span_bytes).max();
        let span = span.unwrap_or(0).clamp(REGION_BYTES, SPAN_BYTES);
        let regions = span / REGION_BYTES;
        let first = number / regions * regions;
        let whole = first * REGION_BYTES..(first + regions).checked_mul(REGION_BYTES)?;
        let Ok(decided) = decide_whole(&self.layers, whole, index.has_all()).await else {
            // Perhaps the damage lies beside it.
            let whole = number * REGION_BYTES..(number + 1) * REGION_BYTES;
            let (top, below) = self.layers.split_first()?;
            let region = decide(top, below, whole).await.ok()?.into();
            index.keep(number, &region);
            return Some(region);
        };
        let decided: Region = decided.into();
        let mut wanted = None;
        for other in first..first + regions {
            let part = other * REGION_BYTES..(other + 1) * REGION_BYTES;
            let region = index::within(&decided, &part).into();
            index.keep(other, &region);
            if other == number {
                wanted = Some(region);
            }
        }
        wanted
    }

    /// Fills parts of reads from the layers that hold them, as the index has it.
    async fn read_indexed(&self, parts: Vec<backing::Part>) -> Vec<Result<backing::Part>> {
        let mut jobs: BTreeMap<usize, Jobs> = BTreeMap::new();
        let (mut done, mut others) = (Vec::new(), Vec::new());
        for (start, mut part) in parts {
            let range = start..start + part.len() as u64;
            let Some(decided) = self.indexed(range).await else {
                others.push((0, start, part));
                continue;
            };
            for Decided { run, depth } in decided {
                let mut piece = part.split_to((run.range.end - run.range.start) as usize);
                match run.source {
                    Source::Below => {
                        piece.fill(0);
                        done.push(Ok((run.range.start, piece)));
                    }
                    source => jobs
                        .entry(depth)
                        .or_default()
                        .add(run.range.start, source, piece),
                }
            }
            // A part that no run covers would keep the old contents of the memory.
            assert!(part.is_empty(), "runs cover the buffer");
        }
        let fetched = jobs.into_iter().map(|(depth, jobs)| {
            let layer = &self.layers[depth];
            let observed = layer.qcow2().map_or(layer.data_file(), Qcow2::file);
            jobs.run(layer.data_file(), (observed, layer.qcow2()))
        });
        done.extend(join_all(fetched).await.into_iter().flatten());
        if !others.is_empty() {
            done.extend(read_each(&self.layers, others).await);
        }
        done
    }

    /// Keeps what the tables of these layers refer to from being used for something else, until the
    /// visits end.
    pub(crate) async fn enter(&self) -> Vec<EpochGuard<'_>> {
        let mut visits = Vec::new();
        if self.is_changing {
            for image in self.layers.iter().filter_map(|layer| layer.qcow2()) {
                visits.push(image.enter().await);
            }
        }
        visits
    }
}

/// A part of a read: the index of the layer that is asked next, where, and its buffer.
type Part = (usize, u64, IoVecMut);

/// Reads `offset..` through a layer on top and those below it.
pub async fn read(top: &Layer, below: &Below, offset: u64, buf: IoVecMut) -> Result<IoVecMut> {
    let len = buf.len() as u64;
    let runs = top.map(offset..offset + len).await?;
    match top {
        Layer::Qcow2(image) => image.read_runs(&runs, (offset, buf), below).await,
        Layer::Raw(raw) => {
            raw.file().reach(Event::ReadAio).await;
            raw.read(offset, buf).await
        }
        Layer::Other(added) => {
            let file = added.file();
            read_mapped((file, file, None), &runs, (offset, buf), below).await
        }
    }
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
        let observed = layer.qcow2().map_or(layer.data_file(), Qcow2::file);
        jobs.run(layer.data_file(), (observed, layer.qcow2()))
    });
    done.extend(join_all(fetched).await.into_iter().flatten());
    done
}

/// Returns which layer decides each byte of a range, through all layers: in order, covering it.
pub async fn decide(top: &Layer, below: &[Arc<Layer>], range: Range<u64>) -> Result<Vec<Decided>> {
    let mut decided = Vec::new();
    let mut work = vec![(0usize, range)];
    while let Some((depth, range)) = work.pop() {
        let layer = if depth == 0 {
            Some(top)
        } else {
            below.get(depth - 1).map(|layer| &**layer)
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

/// The same for layers that do not change, each of which is asked once, for a range that few slices
/// of its tables map. These may leave its memory then, if nobody else uses them.
async fn decide_whole(
    layers: &[Arc<Layer>],
    range: Range<u64>,
    releases: bool,
) -> Result<Vec<Decided>> {
    let mut decided = Vec::new();
    // In order, and apart from each other.
    let mut open = vec![range];
    for (depth, layer) in layers.iter().enumerate() {
        let (Some(first), Some(last)) = (open.first(), open.last()) else {
            break;
        };
        let hull = first.start..last.end.min(layer.size());
        let runs = match hull.is_empty() {
            true => Vec::new(),
            false => layer.map(hull.clone()).await?,
        };
        if releases && let Some(image) = layer.qcow2() {
            image.release_slices(&hull);
        }
        let mut left: Vec<Range<u64>> = Vec::new();
        let mut runs = runs.iter().peekable();
        for part in std::mem::take(&mut open) {
            let mut at = part.start;
            while let Some(run) = runs
                .peek()
                .copied()
                .filter(|run| run.range.start < part.end)
            {
                let piece = run.range.start.max(at)..run.range.end.min(part.end);
                at = at.max(piece.end);
                match run.source {
                    _ if piece.is_empty() => {}
                    Source::Below => match left.last_mut() {
                        Some(last) if last.end == piece.start => last.end = piece.end,
                        _ => left.push(piece),
                    },
                    _ => {
                        let run = index::cut(run, &piece);
                        decided.push(Decided { run, depth });
                    }
                }
                if run.range.end > part.end {
                    break;
                }
                runs.next();
            }
            if at < part.end {
                // The layer above decides: it holds nothing here, and its backing file has ended.
                let run = Run {
                    range: at..part.end,
                    source: Source::Below,
                };
                let depth = depth.saturating_sub(1);
                decided.push(Decided { run, depth });
            }
        }
        open = left;
    }
    decided.extend(open.into_iter().map(|range| Decided {
        run: Run {
            range,
            source: Source::Below,
        },
        depth: layers.len() - 1,
    }));
    decided.sort_unstable_by_key(|decided| decided.run.range.start);
    Ok(decided)
}

impl Backing for Below {
    fn size(&self) -> u64 {
        self.layers.first().map_or(0, |layer| layer.size())
    }

    fn is_there(&self) -> bool {
        !self.layers.is_empty()
    }

    fn fill(&self, parts: Vec<backing::Part>) -> BackingFuture<'_, Vec<Result<backing::Part>>> {
        Box::pin(async move {
            if self.index.is_some() {
                return self.read_indexed(parts).await;
            }
            let parts = parts.into_iter().map(|(at, part)| (0, at, part)).collect();
            let _visits = self.enter().await;
            read_each(&self.layers, parts).await
        })
    }

    fn is_zero(&self, range: Range<u64>) -> BackingFuture<'_, Result<bool>> {
        Box::pin(async move {
            let decided = self.decide(range).await?;
            Ok(decided
                .iter()
                .all(|d| matches!(d.run.source, Source::Zero(_) | Source::Below)))
        })
    }

    fn decide(&self, range: Range<u64>) -> BackingFuture<'_, Result<Vec<Decided>>> {
        Box::pin(async move {
            if let Some(decided) = self.indexed(range.clone()).await {
                return Ok(decided);
            }
            let _visits = self.enter().await;
            match self.layers.split_first() {
                None => Ok(Vec::new()),
                Some((first, rest)) => decide(first, rest, range).await,
            }
        })
    }
}
