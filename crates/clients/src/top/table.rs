//! The figures of disks and jobs as texts in columns.

use cowslip_console::size;

use super::Sort;
use super::sample::{Disk, Interval, JobRow, Rates};

/// A head of a column of disks, and whether its texts end together.
pub const DISKS: [(&str, bool); 14] = [
    ("DISK", false),
    ("NODE", false),
    ("READ/s", true),
    ("BYTES/s", true),
    ("MEAN", true),
    ("P99", true),
    ("WRITE/s", true),
    ("BYTES/s", true),
    ("MEAN", true),
    ("P99", true),
    ("FLUSH/s", true),
    ("DEPTH", true),
    ("FAIL/s", true),
    ("ON DISK", true),
];

/// The same of jobs.
pub const JOBS: [(&str, bool); 7] = [
    ("JOB", false),
    ("TYPE", false),
    ("STATUS", false),
    ("DONE", true),
    ("OF", true),
    ("BYTES/s", true),
    ("LEFT", true),
];

/// The disks to be shown, in order: those with exports, or all; all too if none has an export.
pub fn shown(interval: &Interval, (sort, all): (Sort, bool)) -> Vec<&Disk> {
    let has_exports = |disk: &&Disk| !disk.exports.is_empty();
    let all = all || !interval.disks.iter().any(|disk| has_exports(&disk));
    let mut disks: Vec<&Disk> = interval
        .disks
        .iter()
        .filter(|disk| all || has_exports(disk))
        .collect();
    let sum = |disk: &Disk, of: fn(&Rates) -> f64| of(&disk.reads) + of(&disk.writes);
    let key = |disk: &Disk| match sort {
        Sort::Name => 0.0,
        Sort::Requests => sum(disk, |it| it.per_second) + disk.flushes.per_second,
        Sort::Bytes => sum(disk, |it| it.bytes_per_second),
        Sort::Latency => {
            let mean = |rates: &Rates| rates.mean_us.unwrap_or(0.0);
            mean(&disk.reads).max(mean(&disk.writes))
        }
    };
    // The order of names stays among equals.
    disks.sort_by(|one, other| key(other).total_cmp(&key(one)));
    disks
}

/// The texts of a disk.
pub fn disk(disk: &Disk) -> Vec<String> {
    let name = match disk.exports.is_empty() {
        true => "-".to_string(),
        false => disk.exports.join(","),
    };
    let mut cells = vec![name, disk.node.clone()];
    for rates in [&disk.reads, &disk.writes] {
        cells.extend([
            rate(rates.per_second),
            size::human(rates.bytes_per_second as u64),
            time(rates.mean_us),
            time(rates.p99_us),
        ]);
    }
    cells.extend([
        rate(disk.flushes.per_second),
        format!("{:.1}", disk.depth),
        rate(disk.failed_per_second),
        disk.disk_bytes.map_or("-".to_string(), size::human),
    ]);
    cells
}

/// The texts of a job.
pub fn job(job: &JobRow) -> Vec<String> {
    let left = job.total_bytes.saturating_sub(job.done_bytes);
    vec![
        job.id.clone(),
        job.kind.clone(),
        match &job.error {
            Some(error) => format!("{}: {error}", job.status),
            None => job.status.clone(),
        },
        format!("{:.0} %", part_done(job) * 100.0),
        size::human(job.total_bytes),
        size::human(job.bytes_per_second as u64),
        match job.bytes_per_second as u64 {
            0 => "-".to_string(),
            rate => duration(left / rate),
        },
    ]
}

/// The part of a job that is done, from 0 to 1.
pub fn part_done(job: &JobRow) -> f64 {
    match job.total_bytes {
        0 => 0.0,
        total => (job.done_bytes as f64 / total as f64).min(1.0),
    }
}

/// The figures of an interval as lines.
pub fn text(interval: &Interval, order: (Sort, bool)) -> String {
    let disks = shown(interval, order).into_iter().map(disk).collect();
    let mut text = lines(&DISKS, disks);
    if !interval.jobs.is_empty() {
        text.push('\n');
        text.push_str(&lines(&JOBS, interval.jobs.iter().map(job).collect()));
    }
    text
}

/// The width of each column, in characters.
pub fn widths(heads: &[(&str, bool)], rows: &[Vec<String>]) -> Vec<usize> {
    let width = |at: usize| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.chain([heads[at].0.len()]).max().unwrap_or(0)
    };
    (0..heads.len()).map(width).collect()
}

fn lines(heads: &[(&str, bool)], rows: Vec<Vec<String>>) -> String {
    let widths = widths(heads, &rows);
    let head: Vec<String> = heads.iter().map(|(head, _)| (*head).to_string()).collect();
    let mut text = String::new();
    for row in [head].iter().chain(&rows) {
        let mut line = String::new();
        for ((cell, width), (_, is_right)) in row.iter().zip(&widths).zip(heads) {
            match is_right {
                true => line.push_str(&format!("{cell:>width$}  ")),
                false => line.push_str(&format!("{cell:<width$}  ")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn rate(rate: f64) -> String {
    match rate {
        0.0 => "0".to_string(),
        rate if rate < 9.95 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

fn time(us: Option<f64>) -> String {
    match us {
        None => "-".to_string(),
        Some(us) if us < 9999.5 => format!("{us:.0} us"),
        Some(us) if us < 9_999_500.0 => format!("{:.0} ms", us / 1000.0),
        Some(us) => format!("{:.0} s", us / 1_000_000.0),
    }
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{}:{:02} min", seconds / 60, seconds % 60),
        _ => format!("{}:{:02} h", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::interval;
    use super::*;

    #[test]
    fn disks_and_jobs_are_tables() {
        let expected = "\
DISK  NODE  READ/s  BYTES/s   MEAN    P99  WRITE/s  BYTES/s  MEAN  P99  FLUSH/s  DEPTH  FAIL/s  ON DISK
d,e   a        100  400 KiB  20 us  20 us        0      0 B     -    -        0    0.0      10    1 MiB

JOB  TYPE    STATUS   DONE       OF  BYTES/s  LEFT
j    mirror  running  30 %  100 MiB   10 MiB   7 s
";
        assert_eq!(text(&interval(), (Sort::Name, false)), expected);
    }

    #[test]
    fn disks_without_exports_are_shown_on_demand_and_where_none_has_one() {
        let mut interval = interval();
        let names = |interval: &Interval, all| {
            let disks = shown(interval, (Sort::Name, all));
            disks.iter().map(|it| it.node.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&interval, false), ["a"]);
        assert_eq!(names(&interval, true), ["a", "b"]);
        interval.disks[0].exports.clear();
        assert_eq!(names(&interval, false), ["a", "b"]);
    }

    #[test]
    fn an_order_begins_with_the_most() {
        let mut interval = interval();
        interval.disks[1].writes.per_second = 200.0;
        interval.disks[1].reads.mean_us = Some(1.0);
        for (sort, first) in [
            (Sort::Name, "a"),
            (Sort::Requests, "b"),
            (Sort::Bytes, "a"),
            (Sort::Latency, "a"),
        ] {
            assert_eq!(shown(&interval, (sort, true))[0].node, first, "{sort:?}");
        }
    }

    #[test]
    fn times_have_units_that_fit() {
        let times = [Some(0.4), Some(9999.0), Some(12_000.0), Some(2e7), None];
        let texts = times.map(time);
        assert_eq!(texts, ["0 us", "9999 us", "12 ms", "20 s", "-"]);
        let durations = [5, 65, 7260].map(duration);
        assert_eq!(durations, ["5 s", "1:05 min", "2:01 h"]);
    }
}
