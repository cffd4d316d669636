//! Random requests to a disk that others write to as well, each checked against the history.

#![allow(dead_code)] // Shared by tests that use parts of it.

use std::ops::Range;

use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::{Buf, BufMut, Image, Result};

use super::history::{History, SECTOR_BYTES, ZEROES, content};
use cowslip_block::random::Random;

/// The mix of requests.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    pub cluster_bytes: u64,
    /// Unit that a discard zeroes where nothing is compressed: a subcluster, or a cluster if there
    /// are none.
    pub discard_bytes: u64,
    /// Clusters that are written over and over.
    pub hot_clusters: u64,
    /// The most sectors of one request.
    pub sectors_max: u64,
    pub discards: bool,
    pub compressed: bool,
    /// Every write is durable when it completes.
    pub writethrough: bool,
}

const SECTOR: u64 = SECTOR_BYTES as u64;

fn sectors(range: &Range<u64>) -> Range<usize> {
    (range.start / SECTOR) as usize..(range.end / SECTOR) as usize
}

/// The whole units within a range.
fn whole_units(range: &Range<u64>, unit_bytes: u64) -> Range<u64> {
    let start = range.start.next_multiple_of(unit_bytes);
    start..(range.end / unit_bytes * unit_bytes).max(start)
}

/// A range in whole sectors: often in the hot part, often at the edges of clusters.
fn range(rng: &mut Random, mix: &Mix, size: u64) -> Range<u64> {
    let clusters = size / mix.cluster_bytes;
    let hot = rng.chance(70);
    let cluster = rng.below(if hot {
        mix.hot_clusters.min(clusters)
    } else {
        clusters
    });
    let within = match rng.below(3) {
        0 => 0,
        _ => rng.below(mix.cluster_bytes / SECTOR) * SECTOR,
    };
    let start = cluster * mix.cluster_bytes + within;
    let len = match rng.below(4) {
        0 => mix.cluster_bytes,
        _ => (1 + rng.below(mix.sectors_max)) * SECTOR,
    };
    start..(start + len).min(size)
}

/// One request. What fails may show or not.
///
/// # Panics
/// If it reads what no order of the requests explains.
pub async fn one(image: &Image, history: &History, rng: &mut Random, mix: &Mix) -> Result<()> {
    let range = range(rng, mix, image.size());
    let (at, len) = (range.start, range.end - range.start);
    match rng.below(100) {
        0..35 => write(image, history, range, rng.chance(15) || mix.writethrough).await?,
        35..65 => {
            let reading = history.begin_read((at / SECTOR) as usize);
            let buf = BufMut::zeroed(len as usize);
            let read = image.read(at, buf).await;
            let seen = match &read {
                Ok(bytes) => history.end_read(reading, bytes),
                Err(_) => history.end_read(reading, &[]),
            };
            seen.unwrap_or_else(|wrong| panic!("a read of {range:#x?}: {wrong}"));
            drop(read?);
        }
        65..78 => {
            let options = ZeroOptions {
                space: Space::of_unmap(rng.chance(50)),
                durability: Durability::of_fua(rng.chance(10) || mix.writethrough),
                fast_only: false,
            };
            let writing = history.begin_write(sectors(&range), ZEROES);
            image.write_zeroes(at, len, options).await?;
            history.end_write(writing, options.durability == Durability::Durable);
        }
        78..88 if mix.discards => {
            // Whole units read as zeroes, and what is left keeps its bytes. A part of a compressed
            // cluster may stay: that is a write that never ends.
            let units = whole_units(&range, mix.discard_bytes);
            let sure = match mix.compressed {
                true => whole_units(&range, mix.cluster_bytes),
                false => units.clone(),
            };
            let writing = history.begin_write(sectors(&sure), ZEROES);
            if sure.is_empty() {
                let _shows_for_ever = history.begin_write(sectors(&units), ZEROES);
            } else {
                for part in [units.start..sure.start, sure.end..units.end] {
                    let _shows_for_ever = history.begin_write(sectors(&part), ZEROES);
                }
            }
            image.discard(at, len).await?;
            history.end_write(writing, mix.writethrough);
        }
        88..91 if mix.compressed => {
            let at = at / mix.cluster_bytes * mix.cluster_bytes;
            let whole = sectors(&(at..at + mix.cluster_bytes));
            let value = history.fresh_value();
            let data = content(value, whole.start, whole.len());
            let writing = history.begin_write(whole, value);
            image.write_compressed(at, Buf::from(data)).await?;
            history.end_write(writing, mix.writethrough);
        }
        91..94 => {
            let extents = image.extents(at, len, 16).await?;
            assert_eq!(extents.first().map(|extent| extent.start), Some(at));
        }
        _ => {
            let begun = history.begin_flush();
            image.flush().await?;
            history.end_flush(begun);
        }
    }
    Ok(())
}

/// A request to be dropped at any moment.
pub async fn doomed(image: &Image, history: &History, rng: &mut Random, mix: &Mix) -> Result<()> {
    let range = range(rng, mix, image.size());
    let (at, len) = (range.start, range.end - range.start);
    let kind = rng.below(8);
    if kind < 5 {
        let unit = mix.cluster_bytes;
        let touched = at / unit * unit..range.end.next_multiple_of(unit).min(image.size());
        history.undefine(sectors(&touched));
    }
    let data = |len| Buf::from(vec![0xdd; len as usize]);
    match kind {
        0 | 1 => {
            let fua = rng.chance(30);
            image.write(at, data(len), Durability::of_fua(fua)).await
        }
        2 => image.write_zeroes(at, len, ZeroOptions::default()).await,
        3 => image.discard(at, len).await,
        4 if mix.compressed => {
            let at = at / mix.cluster_bytes * mix.cluster_bytes;
            image.write_compressed(at, data(mix.cluster_bytes)).await
        }
        4 | 5 => image.read(at, BufMut::zeroed(len as usize)).await.map(drop),
        6 => {
            image.maintain().await;
            Ok(())
        }
        _ => image.flush().await,
    }
}

/// One write, of a value of its own.
pub async fn write(image: &Image, history: &History, range: Range<u64>, fua: bool) -> Result<()> {
    let sectors = sectors(&range);
    let value = history.fresh_value();
    let data = content(value, sectors.start, sectors.len());
    let writing = history.begin_write(sectors, value);
    image
        .write(range.start, Buf::from(data), Durability::of_fua(fua))
        .await?;
    history.end_write(writing, fua);
    Ok(())
}
