//! Reads of guest data: parts of a buffer from where the mapping says that they are.

use std::pin::pin;

use cowslip_block::joins::{join, join_all};
use cowslip_queue::IoVecMut;

use crate::Result;
use crate::backing::Backing;
use crate::file::{AlignedFile, Event};
use crate::run::{Run, Source};
use crate::{CompressedPart, Qcow2};

impl Qcow2 {
    /// Reads runs of the image, and those it does not hold from the disk behind it. The runs cover
    /// the buffer, which begins at `start`.
    pub async fn read_runs(
        &self,
        runs: &[Run],
        (start, buf): (u64, IoVecMut),
        backing: &dyn Backing,
    ) -> Result<IoVecMut> {
        if let [
            Run {
                source: Source::Data(host),
                ..
            },
        ] = runs
        {
            self.file().reach(Event::ReadAio).await;
            let file = self.data_file().for_guest(host.0, start);
            return file.read(host.0, buf).await;
        }
        let files = (self.data_file(), self.file(), Some(self));
        read_mapped(files, runs, (start, buf), backing).await
    }
}

/// Reads runs of a layer: data from its data file, events reported to its own, compressed clusters
/// by the image.
pub async fn read_mapped(
    (data, own, image): (&AlignedFile, &AlignedFile, Option<&Qcow2>),
    runs: &[Run],
    (start, buf): (u64, IoVecMut),
    backing: &dyn Backing,
) -> Result<IoVecMut> {
    let mut jobs = Jobs::default();
    let mut deeper = Vec::new();
    sort_out((start, buf), runs, |at, source, part| match source {
        Source::Below => deeper.push((at, part)),
        _ => jobs.add(at, source, part),
    });
    let ours = jobs.run(data, (own, image));
    let mut done = Vec::new();
    if deeper.is_empty() {
        done.extend(ours.await);
    } else {
        own.reach(Event::ReadBackingAio).await;
        let (ours, theirs) = join(pin!(ours), backing.fill(deeper)).await;
        done.extend(ours);
        done.extend(theirs);
    }
    assemble(done)
}

/// Cuts a buffer along runs.
pub fn sort_out(
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
    // A part that no run covers would keep the old contents of the memory.
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
pub struct Jobs {
    plain: Vec<(u64, Source, IoVecMut)>,
    compressed: Vec<CompressedPart>,
}

impl Jobs {
    /// Adds a part that the layer decides.
    pub fn add(&mut self, at: u64, source: Source, part: IoVecMut) {
        match source {
            Source::Compressed(place, from) => self.compressed.push(CompressedPart {
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

    /// Reads them from the layer's data file; compressed ones from the image. The layer's own
    /// file sees the events.
    pub async fn run(
        self,
        file: &AlignedFile,
        (own, image): (&AlignedFile, Option<&Qcow2>),
    ) -> Vec<Result<(u64, IoVecMut)>> {
        let plain = self.plain.into_iter().map(|(at, source, part)| async move {
            let part = fetch((file, own), (at, source), part).await;
            part.map(|part| (at, part))
        });
        let plain = join_all(plain);
        match image.filter(|_| !self.compressed.is_empty()) {
            None => plain.await,
            Some(image) => {
                let packed = image.read_compressed(self.compressed);
                let (mut done, packed) = join(plain, packed).await;
                done.extend(packed);
                done
            }
        }
    }
}

async fn fetch(
    (file, own): (&AlignedFile, &AlignedFile),
    (at, source): (u64, Source),
    mut part: IoVecMut,
) -> Result<IoVecMut> {
    if let Source::Data(host) = source {
        own.reach(Event::ReadAio).await;
        return file.for_guest(host.0, at).read(host.0, part).await;
    }
    part.fill(0);
    Ok(part)
}
