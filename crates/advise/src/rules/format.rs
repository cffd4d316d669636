//! Raw or qcow2, clone or overlay: what the format itself costs and gives.

use crate::answer::{Answer, Verdict};
use crate::facts::{Facts, FileSystem, Format};
use crate::model::{RawFile, raw_writes};
use crate::workload::Workload;

const SUBJECT: &str = "format";
const SOURCE: &str = "docs/how-to-allocate.md#when-do-raw-files-and-reflink-beat-qcow2";

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    let on = facts.host.file_system();
    match facts.image.format {
        Format::Raw if workload.discards.count == 0 => {
            let written = raw_writes(RawFile::Written, on);
            let why = "nothing is faster than a raw file that has its space; an image is worth it \
                       where snapshots, overlays, bitmaps or thin space are needed";
            let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, "it should stay raw", why);
            Some(answer.figure("writes a second once it is written", written, None))
        }
        Format::Qcow2 if facts.host.has_reflink && facts.image.backing.is_some() => {
            Some(overlay(facts, on))
        }
        _ => None,
    }
}

/// An overlay on a file system that could clone instead.
fn overlay(facts: &Facts, on: FileSystem) -> Answer {
    let why = match on {
        FileSystem::Btrfs => {
            "an overlay with subclusters takes 0.86 to 1.2 times the first writes of a reflink \
             clone here; a clone would have no snapshots of the format, and an extent for each \
             block that was written at random"
        }
        _ => {
            "an overlay with subclusters takes 2.6 times the first writes of a reflink clone here, \
             which shares and unshares block by block, each in a transaction"
        }
    };
    let count = facts.siblings;
    let text = match count {
        0 => "an overlay, although the file system could clone".to_string(),
        _ => format!("an overlay beside {count} others on the same image"),
    };
    Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why)
}
