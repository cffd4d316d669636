//! The report for people. Pure.

use std::collections::BTreeMap;

use cowslip_console::size;
use cowslip_queue::fiemap::{Flags, Record};

use crate::interleave::Interleaving;
use crate::join::{Joined, structure_name};
use crate::report::{FileReport, ImageReport};
use crate::sequential::{Reason, SKIP_BYTES, Sequential};
use crate::summary::{Bucket, MARKS, Marked, Summary};

/// Characters of the longest bar.
const BAR: u64 = 40;

/// The character of bars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bars {
    /// `#`.
    Plain,
    /// Blocks.
    Blocks,
}

fn with_bytes(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", size::human(bytes))
}

fn counted(count: u64, of: &str) -> String {
    match count {
        1 => format!("1 {of}"),
        _ => format!("{count} {of}s"),
    }
}

/// The names of flags, for lists.
pub fn flag_names(flags: Flags) -> impl Iterator<Item = &'static str> {
    let all = [(Flags::LAST, "last"), (Flags::MERGED, "merged")];
    let marks = MARKS.into_iter().chain(all);
    marks.filter_map(move |(flag, name)| flags.has(flag).then_some(name))
}

/// Characters of a column of a list.
const COLUMN: usize = 16;

/// A line of a list, written in place: there may be millions.
struct Line<'a> {
    out: &'a mut String,
    /// Blanks that a further column wants before it.
    owed: usize,
}

impl<'a> Line<'a> {
    fn new(out: &'a mut String) -> Line<'a> {
        Line { out, owed: 0 }
    }

    fn text(&mut self, text: &str) {
        self.out.extend(std::iter::repeat_n(' ', self.owed));
        self.out.push_str(text);
        // Whatever a column has in it, the next begins apart.
        self.owed = COLUMN.saturating_sub(text.len()).max(1);
    }

    /// A number in hexadecimal, or a dash.
    fn number(&mut self, number: Option<u64>) {
        let Some(mut left) = number else {
            return self.text("-");
        };
        let mut digits = [b'0'; 18];
        let mut at = digits.len();
        while left > 0 || at == digits.len() {
            at -= 1;
            digits[at] = b"0123456789abcdef"[(left & 15) as usize];
            left >>= 4;
        }
        at -= 2;
        digits[at + 1] = b'x';
        self.text(std::str::from_utf8(&digits[at..]).unwrap_or("-"));
    }

    fn end(mut self, flags: Flags) {
        if flags != Flags::default() {
            for (index, name) in flag_names(flags).enumerate() {
                match index {
                    0 => self.text(name),
                    _ => *self.out += &format!(",{name}"),
                }
            }
        }
        self.out.push('\n');
    }
}

fn head_of_list(names: &[&str]) -> String {
    let mut out = String::new();
    let mut line = Line::new(&mut out);
    names.iter().for_each(|name| line.text(name));
    line.end(Flags::default());
    out
}

/// The head of the list of records.
pub fn map_head() -> String {
    head_of_list(&["Offset", "Length", "Physical", "Flags"])
}

/// A record in its list.
pub fn map_line(record: &Record, physical: Option<u64>, out: &mut String) {
    let mut line = Line::new(out);
    line.number(Some(record.logical));
    line.number(Some(record.len));
    line.number(physical);
    line.end(record.flags);
}

/// The head of the list of an image's pieces.
pub fn guest_map_head() -> String {
    head_of_list(&[
        "Guest offset",
        "Length",
        "What",
        "File offset",
        "File length",
        "Physical",
        "Flags",
    ])
}

/// A piece in its list.
pub fn guest_map_line(piece: &Joined, out: &mut String) {
    let mut line = Line::new(out);
    line.number(piece.guest);
    line.number(piece.guest.map(|_| piece.guest_len));
    line.text(piece.what.name());
    line.number(piece.file);
    line.number(piece.file.map(|_| piece.file_len));
    line.number(piece.physical);
    line.end(piece.flags);
}

/// The lines on a file before its list.
pub fn head(report: &FileReport<'_>) -> String {
    let host = report.host;
    let on = &host.on;
    let source = on.source.as_ref();
    let source = source.map_or(String::new(), |source| format!(" ({source})"));
    let mut lines = vec![
        format!("file: {}", host.name),
        format!(
            "file system: {}{source}, blocks of {} bytes",
            on.kind, on.block_bytes
        ),
        format!("found by: {}", host.method.name()),
    ];
    if let Some(shortcoming) = host.method.shortcoming() {
        lines.push(format!("    ({shortcoming})"));
    }
    if on.has_own_addresses() {
        let kind = &on.kind;
        lines.push(format!(
            "    (places are addresses of {kind}'s own, which it lays on its devices in chunks)"
        ));
    }
    lines.push(format!("size: {}", with_bytes(host.size)));
    lines.push(format!("allocated: {}", with_bytes(host.allocated)));
    lines.join("\n") + "\n"
}

fn marked(name: &str, marked: &Marked, of: &str) -> Option<String> {
    (marked.count > 0).then(|| {
        let count = counted(marked.count, of);
        format!("{name}: {count}, {}", with_bytes(marked.bytes))
    })
}

/// The lines on a file behind its list.
pub fn sums(report: &FileReport<'_>, bars: Bars) -> String {
    let summary = report.summary;
    let mut lines = vec![format!("extents: {}", summary.records)];
    lines.push(perfect_line(report, summary));
    if let Some(sizes) = summary.sizes() {
        let [min, median, max] = [sizes.min, sizes.median, sizes.max].map(size::human);
        lines.push(format!("lengths: min {min}, median {median}, max {max}"));
    }
    lines.extend(marked("holes", &summary.holes, "hole"));
    for ((_, name), found) in MARKS.iter().zip(&summary.marked) {
        lines.extend(marked(name, found, "extent"));
    }
    lines.extend(marked("beyond the end", &summary.beyond, "extent"));
    lines.push(match report.host.has_places() {
        true => read_line("sequential read of the file", report.read),
        false => "sequential read of the file: not known, as places are not".to_string(),
    });
    lines.extend(reason_lines(report.read, report.names));
    if report.changed {
        lines.push(
            "the file changed while its extents were read: they may show no state that it ever had"
                .into(),
        );
    }
    let buckets = summary.histogram();
    if !buckets.is_empty() {
        lines.push("extents by length:".to_string());
        lines.extend(histogram(&buckets, bars));
    }
    lines.join("\n") + "\n"
}

fn perfect_line(report: &FileReport<'_>, summary: &Summary) -> String {
    let perfect = summary.perfect();
    let on = &report.host.on;
    let limit = match on.limits.written {
        Some(longest) => format!("{} has {} at most in one", on.kind, size::human(longest)),
        None => format!("the longest extent of {} is not known", on.kind),
    };
    let indirect = match on.indirect {
        true => ", mapped block by block",
        false => "",
    };
    let limit = match (on.limits.written, on.limits.encoded) {
        (written, Some(encoded)) if written != Some(encoded) => {
            format!("{limit}, {} encoded", size::human(encoded))
        }
        _ => limit,
    };
    let times = match perfect {
        0 => String::new(),
        _ if summary.expressed() <= perfect => "; this is the optimum".to_string(),
        _ => format!(
            "; it has {:.1} times as many",
            summary.expressed() as f64 / perfect as f64
        ),
    };
    format!("perfect: {perfect} ({limit}{indirect}){times}")
}

fn read_line(what: &str, read: &Sequential) -> String {
    format!(
        "{what}: {}, {} ({:.1} a GiB), {}, score {:.4}",
        size::human(read.bytes),
        counted(read.runs, "contiguous run"),
        read.runs_per_gib(),
        counted(read.seeks, "seek"),
        read.score()
    )
}

/// A reason in words.
pub fn reason_text(reason: Reason, names: &[String]) -> String {
    match reason {
        Reason::OutOfOrder => "clusters out of guest order".to_string(),
        Reason::Metadata => "metadata between clusters".to_string(),
        Reason::Hole => "hole in the file".to_string(),
        Reason::HostFragmented => "host file in pieces".to_string(),
        Reason::Interleaved(other) => {
            let name = names.get(other).map_or("another file", String::as_str);
            format!("host file interleaved with '{name}'")
        }
    }
}

fn reason_lines(read: &Sequential, names: &[String]) -> Vec<String> {
    let mut reasons = read.reasons.clone();
    reasons.sort_by_key(|(_, breaks)| std::cmp::Reverse((breaks.seeks, breaks.runs)));
    let lines = reasons.iter().map(|(reason, breaks)| {
        let reason = reason_text(*reason, names);
        let seeks = counted(breaks.seeks, "seek");
        let times = match breaks.runs {
            1 => "once".to_string(),
            times => format!("{times} times"),
        };
        format!("    {reason}: {times}, {seeks}")
    });
    lines.collect()
}

fn histogram(buckets: &[Bucket], bars: Bars) -> Vec<String> {
    let most = buckets.iter().map(|bucket| bucket.count).max().unwrap_or(1);
    let mark = match bars {
        Bars::Plain => "#",
        Bars::Blocks => "█",
    };
    let lines = buckets.iter().map(|bucket| {
        // Every count has a bar, however small.
        let width = (u128::from(bucket.count) * u128::from(BAR)).div_ceil(u128::from(most.max(1)));
        let bar = mark.repeat(width as usize);
        let pad = " ".repeat(BAR as usize - width as usize);
        let least = size::human(bucket.least);
        let bytes = size::human(bucket.bytes);
        format!(
            "    {least:>9}.. {bar}{pad} {:>9} {bytes:>10}",
            bucket.count
        )
    });
    lines.collect()
}

/// The lines on the image in a file.
pub fn image(report: &ImageReport<'_>) -> String {
    let header = report.header;
    let geometry = header.geometry();
    let mut lines = vec![format!(
        "image: qcow2, virtual size {}, clusters of {}{}",
        with_bytes(header.size),
        size::human(geometry.cluster_bytes()),
        match geometry.extended_l2() {
            true => format!(
                ", subclusters of {}",
                size::human(geometry.subcluster_bytes())
            ),
            false => String::new(),
        }
    )];
    if let Some(name) = report.data_file {
        lines.push(format!("data file: {name}"));
    }
    let bytes = &report.join.bytes;
    let mut put = |name: &str, bytes: u64| {
        if bytes > 0 {
            lines.push(format!("{name}: {}", with_bytes(bytes)));
        }
    };
    put("data", bytes.data);
    put("compressed", bytes.compressed);
    put("stored for that", bytes.stored);
    put("zeroes", bytes.zero);
    put("not in this image", bytes.below);
    put("space for writes to those", bytes.reserved);
    put("data that is a hole in the file", bytes.in_holes);
    lines.push(metadata_line(report));
    let read = &report.join.read;
    lines.push(match report.has_places {
        true => read_line("sequential read of the guest", read),
        false => "sequential read of the guest: not known, as places are not".to_string(),
    });
    lines.extend(reason_lines(read, report.names));
    lines.join("\n") + "\n"
}

fn metadata_line(report: &ImageReport<'_>) -> String {
    let cluster_bytes = report.header.geometry().cluster_bytes();
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    let mut bytes = 0;
    for area in report.areas {
        *kinds.entry(structure_name(area.structure)).or_default() += area.len / cluster_bytes;
        bytes += area.len;
    }
    let kinds: Vec<String> = kinds
        .iter()
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    format!(
        "metadata: {} in {} ({})",
        with_bytes(bytes),
        counted(report.metadata_pieces, "piece"),
        kinds.join(", ")
    )
}

/// The section on files beside each other.
pub fn interleaving(device: &str, files: &[(&str, Interleaving)]) -> String {
    let mut text = format!("interleaving on {device}:\n");
    for (name, found) in files {
        text += &format!(
            "    {name}: {:.4} ({} of {} gaps between its runs have another of these files in them)\n",
            found.share(),
            found.shared_gaps,
            found.gaps
        );
    }
    text
}

/// Returns the definitions of the figures.
pub fn definitions() -> String {
    let skip = size::human(SKIP_BYTES);
    format!(
        "A seek goes backwards on the device, or forward over more than {skip}. The score is the share of a\n\
         sequential read's time that goes into seeks, if one takes as long as reading {skip}: 0 is none.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_counts_and_never_nothing() {
        let bucket = |least, count| Bucket {
            least,
            count,
            bytes: least * count,
        };
        let lines = histogram(
            &[bucket(4096, 1), bucket(8192, 0), bucket(16_384, 4000)],
            Bars::Plain,
        );
        let lens: Vec<usize> = lines.iter().map(|line| line.matches('#').count()).collect();
        assert_eq!(lens, [1, 0, 40]);
        assert!(lines[0].starts_with("        4 KiB.. #"), "{:?}", lines[0]);
    }

    #[test]
    fn lines_are_columns_of_hexadecimal_numbers() {
        let mut out = String::new();
        let record = Record {
            logical: 0,
            physical: 0xdead_beef_0000,
            len: u64::MAX,
            flags: Flags::UNWRITTEN.with(Flags::SHARED).with(Flags::LAST),
        };
        map_line(&record, Some(record.physical), &mut out);
        let rest = Record {
            flags: Flags::default(),
            len: 0x1000,
            ..record
        };
        map_line(&rest, None, &mut out);
        assert_eq!(
            out,
            "0x0             0xffffffffffffffff 0xdeadbeef0000  unwritten,shared,last\n\
             0x0             0x1000          -\n"
        );
        assert!(map_head().starts_with("Offset          Length          Physical"));
    }
}
