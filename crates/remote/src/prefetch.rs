//! Work ahead of the guest beyond its sequences: a trace that is replayed, and the rest of the
//! object in the background. Both need a cache: memory would forget what they bring.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};

use crate::blocks::{Blocks, Traced, Urgency};
use crate::cache::CacheFile;
use crate::runtime;

/// Blocks of a trace that are asked for and have not come.
const TRACE_BYTES: u64 = 2 << 20;
/// Bytes of it that are asked for at a time.
const PIECE_BYTES: u64 = 256 << 10;
/// Quiet after which the background goes on.
const QUIET: Duration = Duration::from_millis(200);
/// Bytes that the background fetches at a time.
const BACKGROUND_BYTES: u64 = 256 << 10;

/// Work that waits for [`release`].
#[derive(Default)]
struct Held {
    is_held: bool,
    works: Vec<Box<dyn FnOnce() + Send>>,
}

static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// Holds back the work of this module, until [`release`]: for programs that open files, and want
/// all to be quiet before they confine themselves.
pub fn hold() {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    held.get_or_insert_default().is_held = true;
}

/// Begins the work that was held back.
pub fn release() {
    let held = {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        held.take().unwrap_or_default()
    };
    held.works.into_iter().for_each(|work| work());
}

fn begin(work: impl FnOnce() + Send + 'static) {
    {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = held.as_mut().filter(|held| held.is_held) {
            held.works.push(Box::new(work));
            return;
        }
    }
    work();
}

/// Asks for ranges in their order. It ends with the file.
pub(crate) fn replay(blocks: &Arc<Blocks>, ranges: Vec<Range<u64>>) {
    let blocks = Arc::clone(blocks);
    begin(move || replay_now(&blocks, ranges));
}

/// Caches the whole object at a rate in bytes a second, while the guest is quiet.
pub(crate) fn fill(blocks: &Arc<Blocks>, rate: u64) {
    let blocks = Arc::clone(blocks);
    begin(move || fill_now(&blocks, rate));
}

fn replay_now(blocks: &Arc<Blocks>, ranges: Vec<Range<u64>>) {
    let Some(cache) = blocks.cache.clone() else {
        return;
    };
    let Ok(entered) = runtime::enter() else {
        return;
    };
    let mut traced = Traced::default();
    for range in &ranges {
        traced.add(blocks.blocks_of(range));
    }
    blocks.expect(traced);
    let blocks = Arc::downgrade(blocks);
    entered.spawn(async move {
        let replayed = replay_all(&blocks, &cache, ranges).await;
        // A failure is the guest's to see, if it comes to read this. What was not fetched follows
        // its reads again.
        if (replayed.is_err() || cache.is_off())
            && let Some(blocks) = blocks.upgrade()
        {
            blocks.expect(Traced::default());
        }
    });
}

/// Asks for the next ranges while the ones before are on their way, so that the way is never idle.
async fn replay_all(
    blocks: &Weak<Blocks>,
    cache: &CacheFile,
    ranges: Vec<Range<u64>>,
) -> Result<(), Arc<str>> {
    let mut under_way = FuturesUnordered::new();
    let mut waiting = 0;
    for range in ranges {
        let Some(all) = live(blocks) else {
            return Ok(());
        };
        let unit = (PIECE_BYTES / all.block_bytes()).max(1);
        let numbers = all.blocks_of(&range);
        for start in numbers.clone().step_by(unit as usize) {
            let end = numbers.end.min(start + unit);
            let Some(first) = (start..end).find(|block| !cache.is_verified(*block)) else {
                continue;
            };
            let range = all.range_of(first..end);
            let bytes = range.end - range.start;
            while waiting > 0
                && waiting + bytes > TRACE_BYTES
                && let Some(done) = under_way.next().await
            {
                waiting -= done?;
            }
            let all = Arc::clone(&all);
            waiting += bytes;
            under_way.push(async move {
                all.read(first..end, Urgency::Trace).await?;
                Ok::<u64, Arc<str>>(bytes)
            });
            // Begins it, and ends those that have ended.
            while let Some(done) = under_way.next().now_or_never().flatten() {
                waiting -= done?;
            }
        }
    }
    while let Some(done) = under_way.next().await {
        done?;
    }
    Ok(())
}

fn fill_now(blocks: &Arc<Blocks>, rate: u64) {
    let Some(cache) = blocks.cache.clone() else {
        return;
    };
    let Ok(entered) = runtime::enter() else {
        return;
    };
    let blocks = Arc::downgrade(blocks);
    entered.spawn(async move {
        let mut at = 0;
        loop {
            let Some(quiet) = live(&blocks).map(|blocks| blocks.is_quiet_since()) else {
                return;
            };
            if quiet.is_none_or(|quiet| quiet < QUIET) {
                tokio::time::sleep(QUIET / 2).await;
                continue;
            }
            let Some(blocks) = live(&blocks) else {
                return;
            };
            let Some(first) = (at..blocks.count()).find(|block| !cache.is_verified(*block)) else {
                return;
            };
            let most = (BACKGROUND_BYTES / blocks.block_bytes()).max(1);
            at = blocks.count().min(first + most);
            let begun = tokio::time::Instant::now();
            let is_lost = blocks.read(first..at, Urgency::Background).await.is_err();
            if is_lost || cache.is_off() {
                return;
            }
            let bytes = blocks.range_of(first..at);
            let time = Duration::from_secs_f64((bytes.end - bytes.start) as f64 / rate as f64);
            drop(blocks);
            tokio::time::sleep_until(begun + time).await;
        }
    });
}

/// The blocks, while they are read.
fn live(blocks: &Weak<Blocks>) -> Option<Arc<Blocks>> {
    blocks
        .upgrade()
        .filter(|blocks| !blocks.object.is_abandoned())
}
