//! Results: rows of figures over the runs of a cell, as a table and for programs.

use cowslip_testbed::{Spread, TextColumns};
use serde::Serialize;

use super::measure::Measured;

/// The least, the middle and the most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Range {
    /// The least.
    pub min: f64,
    /// The middle.
    pub median: f64,
    /// The most.
    pub max: f64,
}

impl Range {
    /// `None` without values.
    fn known(values: Vec<f64>) -> Option<Range> {
        Spread::of(values).map(|spread| Range {
            min: spread.least,
            median: spread.median,
            max: spread.greatest,
        })
    }

    fn of(values: Vec<f64>) -> Range {
        let zero = Range {
            min: 0.0,
            median: 0.0,
            max: 0.0,
        };
        Range::known(values).unwrap_or(zero)
    }
}

/// A cell at a place: figures over all its runs, and the runs.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Row {
    /// The file system.
    pub filesystem: String,
    /// The cell.
    pub cell: String,
    /// Files of all runs.
    pub files: u64,
    /// Extents of a file.
    pub extents: Range,
    /// The fewest that a file could have.
    pub perfect: Range,
    /// Extents over the fewest, of a file.
    pub over_perfect: Range,
    /// The average extent of all files, in MiB.
    pub mean_extent_mib: f64,
    /// MiB/s until all is durable; `None` if nothing is written.
    pub write_mib_s: Option<Range>,
    /// MiB/s, one file after the other; `None` if there is nothing to read.
    pub read_mib_s: Option<Range>,
    /// MiB that were allocated behind ends, at the worst moment of a run; `None` of images, whose
    /// length is that of their space.
    pub peak_unused_mib: Option<Range>,
    /// KiB behind ends after the close, in all.
    pub lost_kib: f64,
    /// Writes that found no space while some was held.
    pub short_of_space: u64,
    /// Allocation groups with data.
    pub groups: Option<u64>,
    /// All runs.
    pub runs: Vec<Measured>,
}

/// MiB/s; `None` of nothing.
fn rate(bytes: u64, seconds: f64) -> Option<f64> {
    (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / MIB / seconds)
}

const MIB: f64 = (1_u64 << 20) as f64;

impl Row {
    /// Returns the row of these runs.
    pub fn new(place: &str, cell: &str, runs: Vec<Measured>) -> Row {
        let files = || runs.iter().flat_map(|run| &run.files);
        let of_runs = |value: fn(&Measured) -> Option<f64>| {
            Range::known(runs.iter().filter_map(value).collect())
        };
        let extents: u64 = files().map(|file| file.extents).sum();
        let bytes: u64 = files().map(|file| file.size).sum();
        Row {
            filesystem: place.to_string(),
            cell: cell.to_string(),
            files: files().count() as u64,
            extents: Range::of(files().map(|file| file.extents as f64).collect()),
            perfect: Range::of(files().map(|file| file.perfect as f64).collect()),
            over_perfect: Range::of(
                files()
                    .map(|file| file.extents as f64 / file.perfect.max(1) as f64)
                    .collect(),
            ),
            mean_extent_mib: bytes as f64 / extents.max(1) as f64 / MIB,
            write_mib_s: of_runs(|run| rate(run.written_bytes, run.write_seconds)),
            read_mib_s: of_runs(|run| rate(run.bytes, run.read_seconds)),
            peak_unused_mib: of_runs(|run| run.peak_unused.map(|bytes| bytes as f64 / MIB)),
            lost_kib: runs.iter().map(|run| run.lost).sum::<u64>() as f64 / 1024.0,
            short_of_space: runs.iter().map(|run| run.short_of_space).sum(),
            groups: runs.iter().filter_map(|run| run.groups).max(),
            runs,
        }
    }
}

/// A figure, or a stroke where there is none.
fn known(figure: Option<f64>, decimals: usize) -> String {
    figure.map_or("-".to_string(), |figure| format!("{figure:.decimals$}"))
}

/// The columns for these places and cells.
pub fn columns(places: &[String], cells: &[String]) -> TextColumns {
    let names = TextColumns::default().names("fs", places);
    names.names("cell", cells).numbers([
        ("files", 5),
        ("extents min/med/max", 20),
        ("perfect", 7),
        ("x med/max", 11),
        ("MiB/extent", 10),
        ("write MiB/s", 11),
        ("read MiB/s", 10),
        ("peak MiB", 8),
        ("lost KiB", 8),
        ("short", 5),
        ("groups", 6),
    ])
}

/// The fields of a row.
pub fn fields(row: &Row) -> Vec<String> {
    let Row {
        extents,
        perfect,
        over_perfect,
        ..
    } = row;
    vec![
        row.filesystem.clone(),
        row.cell.clone(),
        row.files.to_string(),
        format!(
            "{:.0}/{:.0}/{:.0}",
            extents.min, extents.median, extents.max
        ),
        format!("{:.0}", perfect.median),
        format!("{:.1}/{:.1}", over_perfect.median, over_perfect.max),
        format!("{:.2}", row.mean_extent_mib),
        known(row.write_mib_s.map(|range| range.median), 0),
        known(row.read_mib_s.map(|range| range.median), 0),
        known(row.peak_unused_mib.map(|range| range.max), 1),
        format!("{:.0}", row.lost_kib),
        row.short_of_space.to_string(),
        known(row.groups.map(|groups| groups as f64), 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::measure::Layout as FileLayout;
    use super::*;

    #[test]
    fn figures_are_over_all_files_of_all_runs() {
        let run = |extents: [u64; 2], seconds| Measured {
            files: extents
                .map(|extents| FileLayout {
                    size: 3 << 20,
                    extents,
                    perfect: 2,
                })
                .to_vec(),
            bytes: 6 << 20,
            written_bytes: 6 << 20,
            write_seconds: seconds,
            read_seconds: 0.0,
            peak_unused: Some(1 << 20),
            lost: 4096,
            short_of_space: 1,
            groups: Some(3),
        };
        let row = Row::new("xfs", "a", vec![run([2, 3], 1.0), run([4, 9], 3.0)]);
        assert_eq!((row.files, row.short_of_space, row.groups), (4, 2, Some(3)));
        assert_eq!((row.extents.min, row.extents.median), (2.0, 3.5));
        assert_eq!((row.over_perfect.max, row.lost_kib), (4.5, 8.0));
        let rate = row.write_mib_s.unwrap();
        assert_eq!((rate.min, rate.max), (2.0, 6.0));
        assert!(row.read_mib_s.is_none());
        let mut columns = columns(&["xfs".to_string()], &["a".to_string()]);
        let text = columns.row(&fields(&row));
        let (titles, line) = text.split_once('\n').unwrap();
        assert_eq!(titles.len(), line.trim_end().len(), "{text}");
        assert!(line.contains("2/4/9") || line.contains("2/3/9"), "{line}");
        assert!(line.contains("  -  "), "{line}");
    }
}
