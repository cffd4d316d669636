//! The report for programs. Lists are written as they come, the rest of a file's members behind
//! them.

use cowslip_console::output::json_text;
use cowslip_queue::fiemap::{Flags, Record};
use serde_json::{Map, Value, json};

use crate::interleave::Interleaving;
use crate::join::{Joined, structure_name};
use crate::report::{FileReport, ImageReport};
use crate::sequential::{Reason, SKIP_BYTES, Sequential};
use crate::summary::{MARKS, Marked};
use crate::text::{flag_names, reason_text};

/// A line of a list, written in place: there may be millions. Names and words need no escapes.
struct Line<'a> {
    out: &'a mut String,
    is_begun: bool,
}

impl<'a> Line<'a> {
    fn new(out: &'a mut String) -> Line<'a> {
        Line {
            out,
            is_begun: false,
        }
    }

    fn name(&mut self, name: &str) {
        self.out
            .push_str(if self.is_begun { ", \"" } else { "{ \"" });
        self.out.push_str(name);
        self.out.push_str("\": ");
        self.is_begun = true;
    }

    fn number(&mut self, name: &str, number: Option<u64>) {
        self.name(name);
        match number {
            Some(number) => {
                let mut digits = [0; 20];
                let mut at = digits.len();
                let mut left = number;
                while left > 0 || at == digits.len() {
                    at -= 1;
                    digits[at] = b'0' + (left % 10) as u8;
                    left /= 10;
                }
                let digits = std::str::from_utf8(&digits[at..]);
                self.out.push_str(digits.unwrap_or("null"));
            }
            None => self.out.push_str("null"),
        }
    }

    fn end(mut self, flags: Flags) {
        self.name("flags");
        self.out.push('[');
        for (index, name) in flag_names(flags).enumerate() {
            self.out.push_str(if index > 0 { ", \"" } else { "\"" });
            self.out.push_str(name);
            self.out.push('"');
        }
        self.out.push_str("] }");
    }
}

/// A record in its list.
pub fn map_line(record: &Record, physical: Option<u64>, out: &mut String) {
    let mut line = Line::new(out);
    line.number("offset", Some(record.logical));
    line.number("length", Some(record.len));
    line.number("physical", physical);
    line.end(record.flags);
}

/// A piece of an image in its list.
pub fn guest_map_line(piece: &Joined, out: &mut String) {
    let mut line = Line::new(out);
    line.number("guest-offset", piece.guest);
    line.number("length", piece.guest.map(|_| piece.guest_len));
    line.name("what");
    line.out.push('"');
    line.out.push_str(piece.what.name());
    line.out.push('"');
    line.number("file-offset", piece.file);
    line.number("file-length", piece.file.map(|_| piece.file_len));
    line.number("physical", piece.physical);
    line.end(piece.flags);
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

/// Returns the facts about a file that precede its list.
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

/// Returns the sums of its records.
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

/// Returns the facts about the image in a file.
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

/// Returns the definitions of the figures.
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

    #[test]
    fn lines_of_lists_are_json() {
        let mut out = String::new();
        let piece = Joined {
            guest: Some(0),
            guest_len: u64::MAX,
            what: crate::join::What::Data,
            file: Some(7),
            file_len: 10,
            physical: None,
            flags: Flags::SHARED.with(Flags::DELAYED),
        };
        guest_map_line(&piece, &mut out);
        let read: Value = serde_json::from_str(&out).unwrap();
        let expected = json!({
            "guest-offset": 0, "length": u64::MAX, "what": "data", "file-offset": 7,
            "file-length": 10, "physical": null, "flags": ["shared", "delayed"],
        });
        assert_eq!(read, expected);
    }
}
