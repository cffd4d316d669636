//! `bench subclusters`: random first writes of 4 KiB, over all sizes of clusters, with and without
//! subclusters, on empty images and on images whose backing file is fully written.

use super::cell::{Backing, Cell, CellLoad, Contestant, RawFile, Shape, Subclusters, short_size};
use super::report::Row;
use super::stage::Stage;
use super::tables::Scale;
use crate::error::CommandError;

/// log2 of the sizes of clusters: 4 KiB to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 12..=21;
/// Extended L2 entries begin here.
const SUBCLUSTERS_FROM_BYTES: u64 = 16 << 10;
const REQUEST_BYTES: u64 = 4096;

/// Its cells: neighbours differ in the size of clusters alone.
pub fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for backing in [Backing::None, Backing::Raw] {
            for subclusters in [Subclusters::Off, Subclusters::On] {
                for cluster_bytes in CLUSTER_BITS.map(|bits| 1 << bits) {
                    if subclusters == Subclusters::On && cluster_bytes < SUBCLUSTERS_FROM_BYTES {
                        continue;
                    }
                    let shape = Shape {
                        cluster_bytes,
                        subclusters,
                        backing,
                    };
                    cells.push(cell(scale, shape, *depth));
                }
            }
        }
    }
    cells
}

fn cell(scale: &Scale, shape: Shape, depth: u64) -> Cell {
    let mut raw = vec![RawFile::Sparse, RawFile::Allocated, RawFile::Written];
    if shape.backing == Backing::Raw {
        raw.push(RawFile::Clone);
    }
    Cell {
        shape,
        load: CellLoad {
            requests: scale.requests_at(depth, REQUEST_BYTES),
            depth,
            request_bytes: REQUEST_BYTES,
            flush_interval: 0,
        },
        contestants: scale.contestants(&raw),
    }
}

/// Whether two rows differ in the size of clusters alone, by a factor of two.
fn is_next_size(smaller: &Row, larger: &Row) -> bool {
    let same_series = (
        smaller.shape.subclusters,
        smaller.shape.backing,
        smaller.depth,
    ) == (larger.shape.subclusters, larger.shape.backing, larger.depth);
    same_series
        && smaller.contestant == larger.contestant
        && smaller.shape.cluster_bytes * 2 == larger.shape.cluster_bytes
}

fn is_outlier(rows: &[Row], row: &Row) -> bool {
    let smaller = rows.iter().find(|other| is_next_size(other, row));
    let larger = rows.iter().find(|other| is_next_size(row, other));
    let is_below_half_of = |other: &Row| row.iops() * 2.0 < other.iops();
    matches!((smaller, larger), (Some(smaller), Some(larger))
        if is_below_half_of(smaller) && is_below_half_of(larger))
}

/// Marks the rows of images that are below half of both their neighbours, and measures their cells
/// again: chance does not strike twice, a weakness does. The new runs take the place of the old ones.
///
/// # Errors
/// As [`Stage::measure`].
pub fn measure_outliers_again(
    stage: &Stage<'_>,
    cells: &[Cell],
    rows: &mut [Row],
) -> Result<(), CommandError> {
    let is_image =
        |row: &Row| matches!(row.contestant, Contestant::Cowslip(_) | Contestant::QemuImg);
    let found = rows
        .iter()
        .filter(|row| is_image(row) && is_outlier(rows, row));
    let mut names: Vec<String> = found.map(|row| row.cell.clone()).collect();
    names.dedup();
    for cell in cells.iter().filter(|cell| names.contains(&cell.name())) {
        for again in stage.measure(cell)? {
            let same =
                |row: &&mut Row| row.cell == again.cell && row.contestant == again.contestant;
            if let Some(row) = rows.iter_mut().find(same) {
                row.runs = again.runs;
            }
        }
    }
    let marks: Vec<bool> = rows
        .iter()
        .map(|row| names.contains(&row.cell) && is_image(row) && is_outlier(rows, row))
        .collect();
    for (row, mark) in rows.iter_mut().zip(marks) {
        row.is_outlier = mark;
    }
    Ok(())
}

/// The second table: subclusters of a size against clusters of that size, ours on backed images, where
/// the unit is what a first write copies. `None` if there is no such pair.
pub fn by_unit(rows: &[Row]) -> Option<String> {
    let mut text = String::new();
    let candidates = rows.iter().filter(|row| {
        row.contestant == Contestant::Cowslip("auto") || row.contestant == Contestant::QemuImg
    });
    for row in candidates.filter(|row| row.shape.subclusters == Subclusters::On) {
        let plain = rows.iter().find(|other| {
            other.shape.subclusters == Subclusters::Off
                && other.shape.unit_bytes() == row.shape.unit_bytes()
                && (other.shape.backing, other.depth) == (row.shape.backing, row.depth)
                && other.contestant == row.contestant
        });
        if let Some(plain) = plain.filter(|_| row.shape.backing == Backing::Raw) {
            text += &format!(
                "{:>6} {:20} {:>6} {:>9.0} {:>9.0}\n",
                short_size(row.shape.unit_bytes()),
                row.contestant.name(),
                row.depth,
                row.iops(),
                plain.iops(),
            );
        }
    }
    let place = &rows.first()?.filesystem;
    let head = format!(
        "By the unit that is copied ({place}, backed): IOPS of subclusters and of clusters of that size\n\
         {:>6} {:20} {:>6} {:>9} {:>9}\n",
        "unit", "", "depth", "sub", "cluster"
    );
    (!text.is_empty()).then(|| head + &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::bench::report::Measurement;
    use crate::host_usage::HostUsage;

    fn row(cluster_bytes: u64, iops: f64) -> Row {
        let cell = Cell {
            shape: Shape {
                cluster_bytes,
                subclusters: Subclusters::Off,
                backing: Backing::None,
            },
            load: CellLoad {
                requests: 1,
                depth: 1,
                request_bytes: REQUEST_BYTES,
                flush_interval: 0,
            },
            contestants: Vec::new(),
        };
        let mut row = Row::new("fs", &cell, Contestant::QemuImg);
        row.runs.push(Measurement {
            seconds: 1.0,
            iops,
            cpu_us: 1.0,
            peak_rss_bytes: 0,
            host: HostUsage {
                bytes: 0,
                extents: None,
            },
            device_flushes: None,
            told: None,
        });
        row
    }

    #[test]
    fn an_outlier_is_below_half_of_both_neighbours() {
        let sizes = [64 << 10, 128 << 10, 256 << 10, 512 << 10];
        let outliers = |iops: [f64; 4]| -> Vec<bool> {
            let rows: Vec<Row> = sizes.iter().zip(iops).map(|(s, i)| row(*s, i)).collect();
            rows.iter().map(|row| is_outlier(&rows, row)).collect()
        };
        assert_eq!(outliers([9.0, 4.0, 9.0, 1.0]), [false, true, false, false]);
        assert_eq!(outliers([9.0, 5.0, 9.0, 9.0]), [false; 4]);
        assert_eq!(outliers([9.0, 1.0, 1.5, 9.0]), [false; 4]);
    }
}
