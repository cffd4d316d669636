//! Compressed clusters: small and slow to write.

use crate::answer::{Answer, ByCopy, Verdict};
use crate::facts::{Facts, FileSystem};
use crate::figures::figure;
use crate::model::{self, Layout};
use crate::workload::Workload;

use super::lines::{human, quoted};

const SUBJECT: &str = "compression";
/// Processors that unpack at a time, where this was measured.
const PROCESSORS: f64 = 2.0;
const SOURCE: &str = "docs/advise.md#compressed-clusters";

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    let space = &facts.space;
    if space.compressed_bytes == 0 {
        return None;
    }
    let share = space.compressed_bytes as f64 / space.data_bytes.max(1) as f64;
    let stored = human(space.used_bytes);
    let unpack = ["unzstd-us", "inflate-us"].map(|name| figure(name, FileSystem::Ext4));
    let writes = workload.share_of(&workload.writes);
    if writes < 0.2 || share < 0.1 {
        let why = format!(
            "it is hardly written; {} of data take {stored}, and a read unpacks a cluster, which \
             takes a processor {:.0} microseconds (zstd) to {:.0} (zlib)",
            human(space.data_bytes),
            unpack[0],
            unpack[1]
        );
        let text = "the compressed image is right here";
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    let why = format!(
        "{:.0} % of the data is compressed: each first write to such a cluster unpacks it and \
         writes all of it elsewhere, so its space comes back as dead pieces",
        share * 100.0
    );
    let text = "write to an overlay, and keep the compressed image below it";
    let answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why);
    let on = facts.host.file_system();
    let rate = |unit_bytes| {
        let layout = Layout {
            cluster_bytes: facts.image.cluster_bytes,
            unit_bytes,
            is_backed: true,
            is_sparse: false,
        };
        model::first_writes(&layout, 1.0, on)
    };
    let unpack_us = unpack[usize::from(!facts.image.is_zstd)];
    let in_place = 1e6 / rate(facts.image.cluster_bytes) + unpack_us / PROCESSORS;
    let answer = answer.figure(
        "first writes a second to compressed clusters",
        1e6 / in_place,
        Some(rate(4096)),
    );
    if facts.image.backing.is_some() || facts.image.snapshots > 0 {
        return Some(answer.by_copy(&[]));
    }
    let name = &facts.image.name;
    let overlay = match name.rsplit_once('.') {
        Some((stem, extension)) if !extension.contains('/') => format!("{stem}.disk.{extension}"),
        _ => format!("{name}.disk"),
    };
    let base = name
        .rsplit_once('/')
        .map_or(name.as_str(), |(_, base)| base);
    let mut answer = answer;
    answer.by_copy = ByCopy::Superseded;
    Some(answer.command(format!(
        "cowslip create -f qcow2 -o cluster_size=128k,extended_l2=on -b {} -F qcow2 {}",
        quoted(base),
        quoted(&overlay)
    )))
}
