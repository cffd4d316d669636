//! `bench subclusters`: random first writes of 4 KiB, over all sizes of clusters, with and without
//! subclusters, on empty images and on images whose backing file is fully written.

use cowslip_console::error::CommandError;

use crate::cell::{Backing, Cell, Contestant, RawFile, Shape, Subclusters, short_size};
use crate::description::{Description, Source};
use crate::report::Row;
use crate::scale::Scale;
use crate::stage::{Stage, bench_process};

/// log2 of the sizes of clusters: 4 KiB to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 12..=21;
/// Extended L2 entries begin here.
const SUBCLUSTERS_FROM_BYTES: u64 = 16 << 10;
const REQUEST_BYTES: u64 = 4096;

/// The mail of 2019 that proposed subclusters.
const SOURCE: Source = Source {
    disk_bytes: 40 << 30,
    requests: 600_000,
    words: "Conditions of the source (2019): an SSD, random writes of 4 KiB to a qcow2 image of 40 GiB, with a \
            fully populated backing file or none; 8 subclusters a cluster. It says neither depth nor duration. \
            Here: 32 subclusters a cluster, as the format has them now, and 600 000 requests, each block once.",
};

/// The table.
pub const TABLE: Description = Description {
    zero_methods: &["zero-range", "write"],
    source: Some(SOURCE),
    ..Description::usual("subclusters", cells)
};

/// Its cells: neighbours differ in the size of clusters alone.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for backing in [Backing::None, Backing::Raw] {
            for subclusters in [Subclusters::Off, Subclusters::On] {
                for cluster_bytes in CLUSTER_BITS.map(|bits| 1 << bits) {
                    if subclusters == Subclusters::On && cluster_bytes < SUBCLUSTERS_FROM_BYTES {
                        continue;
                    }
                    let shape = Shape::new(cluster_bytes, subclusters, backing);
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
    Cell::new(
        shape,
        scale.writes(depth, REQUEST_BYTES),
        scale.contestants(&raw),
    )
}

/// Whether two cells differ in the size of clusters alone, by a factor of two.
fn is_next_size(smaller: &Cell, larger: &Cell) -> bool {
    let with_the_size_of_larger = Shape {
        cluster_bytes: larger.shape.cluster_bytes,
        ..smaller.shape
    };
    smaller.load == larger.load
        && with_the_size_of_larger == larger.shape
        && smaller.shape.cluster_bytes * 2 == larger.shape.cluster_bytes
}

/// The row of a contestant in a cell.
fn row_of<'a>(rows: &'a [Row], cell: &Cell, contestant: Contestant) -> Option<&'a Row> {
    let name = cell.name();
    rows.iter()
        .find(|row| row.cell == name && row.contestant == contestant)
}

/// Whether an image's row is below half of both its neighbours.
fn is_outlier(cells: &[Cell], rows: &[Row], cell: &Cell, contestant: Contestant) -> bool {
    let iops = |other: &Cell| row_of(rows, other, contestant).map(Row::iops);
    let smaller = cells.iter().find(|other| is_next_size(other, cell));
    let larger = cells.iter().find(|other| is_next_size(cell, other));
    match (iops(cell), smaller.and_then(iops), larger.and_then(iops)) {
        (Some(own), Some(smaller), Some(larger)) => own * 2.0 < smaller && own * 2.0 < larger,
        _ => false,
    }
}

fn images(cell: &Cell) -> impl Iterator<Item = Contestant> {
    let contestants = cell.contestants.iter().copied();
    contestants.filter(|c| c.is_cowslip() || *c == Contestant::QemuImg)
}

/// Measures the cells again that are below half of both their neighbours: chance does not strike
/// twice, a weakness does. The new rows.
///
/// # Errors
/// As [`Stage::measure`].
pub fn measure_outliers_again(
    stage: &Stage<'_>,
    cells: &[Cell],
    rows: &[Row],
) -> Result<Vec<Row>, CommandError> {
    let stands_out = |cell: &&Cell| images(cell).any(|c| is_outlier(cells, rows, cell, c));
    let mut again = Vec::new();
    for cell in cells.iter().filter(stands_out) {
        again.extend(stage.measure(cell, bench_process)?);
    }
    Ok(again)
}

/// The runs of these rows take the place of the old ones; what is an outlier still is marked. The
/// names of their cells.
pub fn replace(cells: &[Cell], again: Vec<Row>, rows: &mut [Row]) -> Vec<String> {
    let mut found: Vec<String> = again.iter().map(|row| row.cell.clone()).collect();
    found.dedup();
    for again in again {
        let same = |row: &&mut Row| row.cell == again.cell && row.contestant == again.contestant;
        if let Some(row) = rows.iter_mut().find(same) {
            row.runs = again.runs;
        }
    }
    for cell in cells.iter().filter(|cell| found.contains(&cell.name())) {
        for contestant in images(cell) {
            let mark = is_outlier(cells, rows, cell, contestant);
            let name = cell.name();
            let row = rows.iter_mut();
            let mut row = row.filter(|row| row.cell == name && row.contestant == contestant);
            if let Some(row) = row.next() {
                row.is_outlier = mark;
            }
        }
    }
    found
}

/// The second table: subclusters of a size against clusters of that size, on backed images, where
/// the unit is what a first write copies. `None` if there is no such pair.
pub fn by_unit(cells: &[Cell], rows: &[Row]) -> Option<String> {
    let mut text = String::new();
    let copying = |cell: &&Cell| cell.shape.backing == Backing::Raw;
    for cell in cells.iter().filter(copying) {
        let unit_bytes = cell.shape.unit_bytes();
        let of_plain_clusters = Shape::new(unit_bytes, Subclusters::Off, Backing::Raw);
        let plain = cells
            .iter()
            .find(|other| other.shape == of_plain_clusters && other.load == cell.load);
        let Some(plain) = plain.filter(|_| cell.shape.subclusters == Subclusters::On) else {
            continue;
        };
        for contestant in images(cell) {
            let iops = |cell| row_of(rows, cell, contestant).map(Row::iops);
            if let (Some(sub), Some(plain)) = (iops(cell), iops(plain)) {
                text += &format!(
                    "{:>6} {:20} {:>6} {sub:>9.0} {plain:>9.0}\n",
                    short_size(unit_bytes),
                    contestant.name(),
                    cell.load.depth,
                );
            }
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
    use crate::cell::CellLoad;
    use crate::report::Measurement;

    fn cells() -> [Cell; 4] {
        let sizes = [64 << 10, 128 << 10, 256 << 10, 512 << 10];
        sizes.map(|cluster_bytes| {
            Cell::new(
                Shape::new(cluster_bytes, Subclusters::Off, Backing::None),
                CellLoad::writes(1, 1, REQUEST_BYTES),
                vec![Contestant::QemuImg],
            )
        })
    }

    fn row(cell: &Cell, iops: f64) -> Row {
        let mut row = Row::new("fs", &cell.name(), Contestant::QemuImg);
        row.runs.push(Measurement {
            iops,
            figures: Vec::new(),
            output: serde_json::Value::Null,
            command: None,
        });
        row
    }

    fn rows(iops: [f64; 4]) -> Vec<Row> {
        let rows = cells().into_iter().zip(iops);
        rows.map(|(cell, iops)| row(&cell, iops)).collect()
    }

    fn outliers(iops: [f64; 4]) -> Vec<bool> {
        let (cells, rows) = (cells(), rows(iops));
        let outlier = |cell| is_outlier(&cells, &rows, cell, Contestant::QemuImg);
        cells.iter().map(outlier).collect()
    }

    #[test]
    fn an_outlier_is_below_half_of_both_neighbours() {
        assert_eq!(outliers([9.0, 4.0, 9.0, 1.0]), [false, true, false, false]);
        assert_eq!(outliers([9.0, 5.0, 9.0, 9.0]), [false; 4]);
        assert_eq!(outliers([9.0, 1.0, 1.5, 9.0]), [false; 4]);
    }

    #[test]
    fn what_is_measured_again_is_marked_if_it_stays_an_outlier() {
        for (again, mark) in [(4.0, true), (8.0, false)] {
            let mut rows = rows([9.0, 1.0, 9.0, 9.0]);
            let new = vec![row(&cells()[1], again)];
            assert_eq!(replace(&cells(), new, &mut rows), [cells()[1].name()]);
            let marks: Vec<bool> = rows.iter().map(|row| row.is_outlier).collect();
            assert_eq!(marks, [false, mark, false, false]);
            assert!((rows[1].iops() - again).abs() < 1e-9);
        }
    }
}
