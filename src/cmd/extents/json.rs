//! The report for programs. Lists are written as they come, the rest of a file's members behind them.

use cowslip_queue::fiemap::Record;
use serde_json::{Map, Value, json};

use super::interleave::Interleaving;
use super::join::{Joined, structure_name};
use super::report::{FileReport, ImageReport};
use super::sequential::{Reason, SKIP_BYTES, Sequential};
use super::summary::{MARKS, Marked};
use super::text::{flag_names, reason_text};
use crate::output::json_text;

fn flags(flags: cowslip_queue::fiemap::Flags) -> Value {
    let names = flag_names(flags);
    let names = names.split(',').filter(|name| !name.is_empty());
    Value::Array(names.map(Value::from).collect())
}

/// A record in its list.
pub fn map_line(record: &Record, physical: Option<u64>) -> String {
    let line = json!({
        "offset": record.logical,
        "length": record.len,
        "physical": physical,
        "flags": flags(record.flags),
    });
    line.to_string()
}

/// A piece of an image in its list.
pub fn guest_map_line(piece: &Joined) -> String {
    let line = json!({
        "guest-offset": piece.guest,
        "length": piece.guest.map(|_| piece.guest_len),
        "what": piece.what.name(),
        "file-offset": piece.file,
        "file-length": piece.file.map(|_| piece.file_len),
        "physical": piece.physical,
        "flags": flags(piece.flags),
    });
    line.to_string()
}

/// Members of an object at a depth, each with a comma behind it but for the last.
pub fn members(members: &Map<String, Value>, depth: usize) -> String {
    let indent = " ".repeat(depth * 4);
    let texts: Vec<String> = members
        .iter()
        .map(|(name, value)| {
            let value = json_text(value).replace('\n', &format!("\n{indent}"));
            format!("{indent}{}: {value}", Value::from(name.as_str()))
        })
        .collect();
    texts.join(",\n")
}

fn marked(found: &Marked) -> Value {
    json!({ "count": found.count, "bytes": found.bytes })
}

/// What is known of a file before its list.
pub fn head(report: &FileReport<'_>) -> Map<String, Value> {
    let host = report.host;
    let on = &host.on;
    let mut out = Map::new();
    out.insert("filename".into(), host.name.as_str().into());
    out.insert(
        "file-system".into(),
        json!({
            "type": on.kind,
            "source": on.source,
            "block-size": on.block_bytes,
            "mapped-block-by-block": on.indirect,
            "longest-extent": {
                "written": on.limits.written,
                "unwritten": on.limits.unwritten,
                "encoded": on.limits.encoded,
            },
        }),
    );
    out.insert("method".into(), host.method.name().into());
    out.insert("size".into(), host.size.into());
    out.insert("allocated".into(), host.allocated.into());
    out
}

/// What its records add up to.
pub fn sums(report: &FileReport<'_>) -> Map<String, Value> {
    let summary = report.summary;
    let mut out = Map::new();
    let mut put = |name: &str, value: Value| {
        out.insert(name.to_string(), value);
    };
    put("extents", summary.records.into());
    put("mapped", summary.bytes.into());
    put("perfect", summary.perfect().into());
    let lengths = summary
        .sizes()
        .map(|sizes| json!({ "min": sizes.min, "median": sizes.median, "max": sizes.max }));
    put("lengths", lengths.into());
    let histogram = summary.histogram().into_iter().map(
        |bucket| json!({ "from": bucket.least, "count": bucket.count, "bytes": bucket.bytes }),
    );
    put("histogram", histogram.collect());
    put("holes", marked(&summary.holes));
    for ((_, name), found) in MARKS.iter().zip(&summary.marked) {
        put(name, marked(found));
    }
    put("beyond-end", marked(&summary.beyond));
    let read = report.host.has_places();
    let read = read.then(|| sequential(report.read, report.names));
    put("sequential-read", read.into());
    put("changed", report.changed.into());
    out
}

fn sequential(read: &Sequential, names: &[String]) -> Value {
    let reasons = read.reasons.iter().map(|(reason, breaks)| {
        let mut out = json!({
            "reason": reason_text(*reason, names),
            "runs": breaks.runs,
            "seeks": breaks.seeks,
        });
        if let Reason::Interleaved(other) = reason {
            out["file"] = names.get(*other).map(String::as_str).into();
        }
        out
    });
    json!({
        "bytes": read.bytes,
        "runs": read.runs,
        "runs-per-gib": read.runs_per_gib(),
        "seeks": read.seeks,
        "score": read.score(),
        "reasons": reasons.collect::<Vec<_>>(),
    })
}

/// What is known of the image in a file.
pub fn image(report: &ImageReport<'_>) -> Value {
    let header = report.header;
    let geometry = header.geometry();
    let bytes = &report.join.bytes;
    let mut metadata = Map::new();
    for area in report.areas {
        let count = &mut metadata
            .entry(structure_name(area.structure))
            .or_insert(0.into());
        let more = area.len / geometry.cluster_bytes();
        **count = (count.as_u64().unwrap_or_default() + more).into();
    }
    let read = report.has_places;
    let read = read.then(|| sequential(&report.join.read, report.names));
    json!({
        "format": "qcow2",
        "virtual-size": header.size,
        "cluster-size": geometry.cluster_bytes(),
        "subcluster-size": geometry.subcluster_bytes(),
        "backing-filename": header.backing_file,
        "data-file": report.data_file,
        "data": bytes.data,
        "compressed": bytes.compressed,
        "compressed-stored": bytes.stored,
        "zero": bytes.zero,
        "below": bytes.below,
        "reserved": bytes.reserved,
        "data-in-holes": bytes.in_holes,
        "parts": report.join.parts,
        "metadata-clusters": metadata,
        "metadata-pieces": report.metadata_pieces,
        "sequential-read": read,
    })
}

/// Files beside each other on a device.
pub fn interleaving(device: &str, files: &[(&str, Interleaving)]) -> Value {
    let files = files.iter().map(|(name, found)| {
        json!({
            "filename": name,
            "gaps": found.gaps,
            "shared-gaps": found.shared_gaps,
            "share": found.share(),
        })
    });
    json!({ "device": device, "files": files.collect::<Vec<_>>() })
}

/// What the figures mean.
pub fn definitions() -> Value {
    json!({
        "seek-bytes": SKIP_BYTES,
        "score": "seeks * seek-bytes / (seeks * seek-bytes + bytes)",
        "interleaving": "share of a file's gaps on the device, between one run and the next, with another named file in them",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_stand_at_their_depth() {
        let Value::Object(object) = json!({ "a": 1, "b": { "c": [] } }) else {
            panic!("it is an object")
        };
        let text = members(&object, 1);
        assert_eq!(
            text,
            "    \"a\": 1,\n    \"b\": {\n        \"c\": [\n        ]\n    }"
        );
        let whole: Value = serde_json::from_str(&format!("{{{text}}}")).unwrap();
        assert_eq!(whole, Value::Object(object));
    }
}
