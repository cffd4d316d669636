//! Figures of those who asked first, as they told them, beside ours: other machines, other years, other versions.
//! What can be compared is how the rows of one column differ from each other.

use crate::page::{
    Align, Bar, BarGroup, Bars, Block, Kind, RowGroup, Scale, Section, Series, Table, TableRow,
    grouped,
};
use crate::told::Told;

/// A table of somebody's.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// The table of ours that measures the same.
    pub table: &'static str,
    /// What it is about.
    pub title: &'static str,
    /// Who told it, where and when.
    pub origin: &'static str,
    /// Under which conditions, as far as is told.
    pub conditions: &'static str,
    /// What rows are.
    pub rows_are: &'static str,
    /// Titles of its columns of figures, with their units.
    pub columns: &'static [&'static str],
    /// Titles of our columns beside them.
    pub ours: &'static [&'static str],
    /// Its rows.
    pub rows: &'static [SourceRow],
}

/// A row of it.
#[derive(Clone, Copy, Debug)]
pub struct SourceRow {
    /// As the source has it.
    pub name: &'static str,
    /// One for each column, as it was told; empty for none.
    pub figures: &'static [&'static str],
    /// How names of cells of ours begin that measure this; empty for none.
    pub cell: &'static str,
    /// Who of ours is beside it, one for each of our columns; empty for nobody.
    pub contestants: &'static [&'static str],
}

const fn row(
    name: &'static str,
    figures: &'static [&'static str],
    cell: &'static str,
    contestants: &'static [&'static str],
) -> SourceRow {
    SourceRow {
        name,
        figures,
        cell,
        contestants,
    }
}

/// Ours and QEMU's, with their defaults.
const BOTH: &[&str] = &["cowslip", "qemu-img"];
const HERE: &[&str] = &["Cowslip here, IOPS", "QEMU here, IOPS"];

const SUBCLUSTERS_2019: &str =
    "Alberto Garcia, [RFC] Re-evaluating subcluster allocation for qcow2 images, qemu-devel";
const GARCIA_2019: &str = "An SSD, random writes of 4 KiB, an image of 40 GB, a prototype of QEMU of that summer, an L2 \
                           cache that covers the disk; depth and duration are not told.";
const PREALLOCATION_2020: &str = "[PATCH 0/1] qcow2: Skip copy-on-write when allocating a zero cluster, qemu-block and linux-xfs";
const GARCIA_2020: &str = "fio in a guest (Linux 4.9), 25 GB, random writes of 4 KiB at depth 32, O_DIRECT, 60 s after a \
                           ramp of 5 s; QEMU 5.1, clusters of 64 KiB; the host: Linux 4.19, LVM on LUKS on a SATA SSD, \
                           a file system of 125 GB.";

/// All of them.
pub const SOURCES: &[Source] = &[
    Source {
        table: "subclusters",
        title: "The source: backing file, subclusters",
        origin: SUBCLUSTERS_2019,
        conditions: GARCIA_2019,
        rows_are: "cluster",
        columns: &[
            "32 subclusters (11 July 2019), IOPS",
            "8 subclusters (27 and 28 June 2019), IOPS",
        ],
        ours: HERE,
        rows: &[
            row("4 KB", &["80", "101"], "", &[]),
            row("8 KB", &["108", "299"], "", &[]),
            row("16 KB", &["3440", "7555"], "16K/512, backed", BOTH),
            row("32 KB", &["10718", "13038"], "32K/1K, backed", BOTH),
            row("64 KB", &["12569", "10613"], "64K/2K, backed", BOTH),
            row("128 KB", &["11444", "4907"], "128K/4K, backed", BOTH),
            row("256 KB", &["9335", "2618"], "256K/8K, backed", BOTH),
            row("512 KB", &["185", "1678"], "512K/16K, backed", BOTH),
            row("1 MB", &["2477", "863"], "1M/32K, backed", BOTH),
            row("2 MB", &["1536", "571"], "2M/64K, backed", BOTH),
        ],
    },
    Source {
        table: "subclusters",
        title: "The source: backing file, no subclusters",
        origin: SUBCLUSTERS_2019,
        conditions: GARCIA_2019,
        rows_are: "cluster",
        columns: &["11 July 2019, IOPS", "27 and 28 June 2019, IOPS"],
        ours: HERE,
        rows: &[
            row("4 KB", &["92", "101"], "4K, backed", BOTH),
            row("8 KB", &["417", "420"], "8K, backed", BOTH),
            row("16 KB", &["3347", "3389"], "16K, backed", BOTH),
            row("32 KB", &["2435", "2476"], "32K, backed", BOTH),
            row("64 KB", &["1622", "1680"], "64K, backed", BOTH),
            row("128 KB", &["866", "873"], "128K, backed", BOTH),
            row("256 KB", &["561", "568"], "256K, backed", BOTH),
            row("512 KB", &["353", "365"], "512K, backed", BOTH),
            row("1 MB", &["212", "212"], "1M, backed", BOTH),
            row("2 MB", &["123", "124"], "2M, backed", BOTH),
        ],
    },
    Source {
        table: "subclusters",
        title: "The source: empty image, subclusters (8 a cluster)",
        origin: SUBCLUSTERS_2019,
        conditions: GARCIA_2019,
        rows_are: "cluster",
        columns: &[
            "zeroes by fallocate() (27 June 2019), IOPS",
            "by pwritev(), IOPS",
        ],
        ours: HERE,
        rows: &[
            row("4 KB", &["103", "101"], "", &[]),
            row("32 KB", &["13203", "12366"], "32K/1K, empty", BOTH),
            row("64 KB", &["12491", "11735"], "64K/2K, empty", BOTH),
            row("128 KB", &["12550", "8700"], "128K/4K, empty", BOTH),
            row("256 KB", &["12790", "6172"], "256K/8K, empty", BOTH),
            row("512 KB", &["12961", "4038"], "512K/16K, empty", BOTH),
            row("1 MB", &["13752", "1916"], "1M/32K, empty", BOTH),
            row("2 MB", &["14468", "1181"], "2M/64K, empty", BOTH),
        ],
    },
    Source {
        table: "subclusters",
        title: "The source: empty image, no subclusters",
        origin: SUBCLUSTERS_2019,
        conditions: GARCIA_2019,
        rows_are: "cluster",
        columns: &[
            "zeroes by fallocate() (27 June 2019), IOPS",
            "by pwritev(), IOPS",
        ],
        ours: HERE,
        rows: &[
            row("4 KB", &["101", "101"], "4K, empty", BOTH),
            row("32 KB", &["11752", "6306"], "32K, empty", BOTH),
            row("64 KB", &["13432", "4267"], "64K, empty", BOTH),
            row("128 KB", &["13967", "1976"], "128K, empty", BOTH),
            row("256 KB", &["14534", "1213"], "256K, empty", BOTH),
            row("512 KB", &["14776", "684"], "512K, empty", BOTH),
            row("1 MB", &["14956", "358"], "1M, empty", BOTH),
            row("2 MB", &["14776", "260"], "2M, empty", BOTH),
        ],
    },
    Source {
        table: "preallocation",
        title: "The source: a qcow2 image",
        origin: PREALLOCATION_2020,
        conditions: GARCIA_2020,
        rows_are: "preallocation",
        columns: &[
            "XFS (Alberto Garcia, 20 August 2020), IOPS",
            "ext4 (20 August), IOPS",
            "XFS, aio=native (21 August), IOPS",
        ],
        ours: HERE,
        rows: &[
            row(
                "off",
                &["8139", "11688", "7649"],
                "64K, preallocation off",
                BOTH,
            ),
            row(
                "off (w/o ZERO_RANGE)",
                &["2965", "2780", "2779"],
                "64K, preallocation off",
                &["cowslip write", ""],
            ),
            row(
                "metadata",
                &["7768", "9132", "8265"],
                "64K, preallocation metadata",
                BOTH,
            ),
            row(
                "falloc",
                &["7742", "13108", "7956"],
                "64K, preallocation falloc",
                BOTH,
            ),
            row(
                "full",
                &["41389", "16351", "56668"],
                "64K, preallocation full",
                BOTH,
            ),
        ],
    },
    Source {
        table: "preallocation",
        title: "The source: a raw file, no guest",
        origin: PREALLOCATION_2020,
        conditions: "fio on the host, 25 GB, random writes of 4 KiB at depth 32, O_DIRECT, up to 300 s; the rest as above. \
                     As was found later, fio had preallocated the file by itself (fallocate) in the first row too.",
        rows_are: "preallocation",
        columns: &["XFS (Alberto Garcia, 25 August 2020), IOPS", "ext4, IOPS"],
        ours: &["raw file here, IOPS"],
        rows: &[
            row(
                "off",
                &["7277", "43260"],
                "64K, preallocation off",
                &["raw sparse"],
            ),
            row(
                "fallocate",
                &["7299", "42810"],
                "64K, preallocation falloc",
                &["raw allocated"],
            ),
            row(
                "full",
                &["88404", "83197"],
                "64K, preallocation full",
                &["raw written"],
            ),
        ],
    },
    Source {
        table: "preallocation",
        title: "The source: a raw file on XFS, preallocated or with an extent size hint",
        origin: PREALLOCATION_2020,
        conditions: "Brian Foster, 21 August 2020: the same command of fio in a virtual machine on an SSD.",
        rows_are: "file",
        columns: &[
            "300 s, no ramp, about, IOPS",
            "60 s after a ramp of 60 s, about, IOPS",
        ],
        ours: &["raw file here, IOPS"],
        rows: &[
            row(
                "preallocated, 25 GB",
                &["5800", "5500"],
                "64K, preallocation falloc",
                &["raw allocated"],
            ),
            row(
                "sparse, hint of 64K",
                &["6200", "5000"],
                "64K, preallocation off",
                &["raw hint 64K"],
            ),
        ],
    },
    Source {
        table: "metadata",
        title: "The source: what was expected of 8 TiB, all allocated",
        origin: "Denis Lunev, in the same discussion, 27 and 28 June 2019, qemu-devel",
        conditions: "Reasoning, not measurement: an L2 cache of 128 MiB, half of it for L2 tables.",
        rows_are: "image",
        columns: &["random I/O", "L2 tables"],
        ours: &["Cowslip here, 128 MiB, IOPS", "the same without a limit"],
        rows: &[
            row(
                "64K clusters",
                &["halved, by metadata read again", "1 GiB"],
                "64K, contiguous",
                LIMITED,
            ),
            row(
                "1M clusters",
                &["near native", "64 MiB"],
                "1M, contiguous",
                LIMITED,
            ),
            row(
                "1M clusters, subclusters of 64K",
                &["near native", ""],
                "1M/32K, contiguous",
                LIMITED,
            ),
        ],
    },
    Source {
        table: "allocate",
        title: "The source: allocating 1 GB, time until the call returned",
        origin: "Amit Shah, [PATCH] Use posix_fallocate() to allocate disk space, libvir-list, 2 March 2009",
        conditions: "A new file of 1 GB on partitions of 5 GB of one machine, in seconds, about; each method with a file of its \
                     own, side by side on one file system.",
        rows_are: "method",
        columns: &["ext4, s", "XFS, s", "ext3, s", "btrfs, s"],
        ours: &[],
        rows: &[
            row("posix_fallocate", &["0", "0", "18", "0"], "", &[]),
            row("mmap and memset", &["13", "14", "20", "18"], "", &[]),
            row("chunks of 4096", &["15", "18", "22", "17"], "", &[]),
            row("chunks of 8192", &["18", "19", "24", "19"], "", &[]),
        ],
    },
    Source {
        table: "allocate",
        title: "The source: extents of these files",
        origin: "Amit Shah, [PATCH] Use posix_fallocate() to allocate disk space, libvir-list, 2 March 2009",
        conditions: "As filefrag counted them; for ext3 it called 9 perfect; btrfs could not tell.",
        rows_are: "method",
        columns: &["ext4", "XFS", "ext3"],
        ours: &[],
        rows: &[
            row("posix_fallocate", &["1", "1", "9"], "", &[]),
            row("mmap and memset", &["38", "2", "44"], "", &[]),
            row("chunks of 4096", &["29", "3", "38"], "", &[]),
            row("chunks of 8192", &["20", "4", "9"], "", &[]),
        ],
    },
    Source {
        table: "writers",
        title: "The source: extents of four files of 64 GB, written side by side",
        origin: "The patch that brought dynamic speculative preallocation to XFS, xfs mailing list",
        conditions: "XFS of 16 TB, inode64, so all files in one allocation group; dd with blocks of 64 KiB, 700 MB/s in all.",
        rows_are: "file",
        columns: &["default before", "allocsize=1g", "dynamic"],
        ours: &[],
        rows: &[
            row("test.0", &["777", "64", "9"], "", &[]),
            row("test.1", &["196", "64", "9"], "", &[]),
            row("test.2", &["804", "64", "9"], "", &[]),
            row("test.3", &["784", "64", "9"], "", &[]),
        ],
    },
];

/// From here on figures differ by orders of magnitude.
const WIDE: f64 = 50.0;

const LIMITED: &[&str] = &["cowslip 128M", "cowslip unlimited"];

/// Adds what sources there are of a table to its section: of those whose cells were measured, and of those that have
/// none.
pub fn add(told: Told<'_>, section: &mut Section) {
    let of_table = SOURCES.iter().filter(|source| source.table == told.table());
    let measured = |source: &&Source| {
        let has_cells = source.rows.iter().any(|row| !row.cell.is_empty());
        !has_cells
            || source
                .rows
                .iter()
                .any(|row| told.rows().any(|ours| row.measures(ours.cell())))
    };
    let sources: Vec<&Source> = of_table.filter(measured).collect();
    if sources.is_empty() {
        return;
    }
    section.add(Block::Heading("Beside those who asked first".to_string()));
    let text = "Their figures are of other machines, years and versions. What compares is how rows of one column differ.";
    section.add(Block::Prose(text.to_string()));
    for source in sources {
        let table = source.beside(told);
        section.blocks.extend(source.chart(told).map(Block::Bars));
        section.add(Block::Prose(format!(
            "Source: {}. {}",
            source.origin, source.conditions
        )));
        section.add(Block::Table(table));
    }
}

impl SourceRow {
    /// Whether a cell of this name measures the same. All sources that tell a depth tell 32; without that they are held
    /// against it too.
    fn measures(&self, cell: &str) -> bool {
        let rest = cell.strip_prefix(self.cell);
        let mut parts = cell.split(", ");
        let is_of_depth = parts.all(|part| !part.starts_with("depth ") || part == "depth 32");
        !self.cell.is_empty()
            && is_of_depth
            && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(','))
    }

    /// The median of ours in that column on a file system, in its first cell that measures this.
    fn here(&self, told: Told<'_>, filesystem: &str, column: usize) -> Option<f64> {
        let wanted = self
            .contestants
            .get(column)
            .filter(|name| !name.is_empty())?;
        let mut found = told.rows().filter(|row| {
            self.measures(row.cell())
                && row.filesystem() == filesystem
                && row.contestant() == *wanted
        });
        Some(found.next()?.spread("iops")?.median)
    }

    fn figure(&self, column: usize) -> Option<f64> {
        self.figures.get(column)?.parse().ok()
    }
}

impl Source {
    /// Its figures, with ours of each file system beside them.
    pub fn beside(&self, told: Told<'_>) -> Table {
        let filesystems = told.filesystems();
        let places = || {
            filesystems
                .iter()
                .flat_map(|place| (0..self.ours.len()).map(move |ours| (*place, ours)))
        };
        let mut columns = vec![(self.rows_are.to_string(), Align::Words)];
        columns.extend(
            self.columns
                .iter()
                .map(|title| (title.to_string(), Align::Numbers)),
        );
        columns.extend(
            places().map(|(place, ours)| (format!("{}, {place}", self.ours[ours]), Align::Numbers)),
        );
        let row = |row: &SourceRow| {
            let mut fields = vec![row.name.to_string()];
            let told_there = |(index, text): (usize, &&str)| {
                row.figure(index)
                    .map_or(text.to_string(), |number| grouped(number, 0))
            };
            fields.extend(row.figures.iter().enumerate().map(told_there));
            fields.extend(places().map(|(place, ours)| {
                let here = row.here(told, place, ours);
                here.map_or(String::new(), |number| grouped(number, 0))
            }));
            TableRow {
                fields,
                ..TableRow::default()
            }
        };
        Table {
            caption: self.title.to_string(),
            columns,
            groups: vec![RowGroup {
                title: String::new(),
                rows: self.rows.iter().map(row).collect(),
            }],
        }
    }

    /// Where a row is a hundred times another, an even axis shows nothing of the lesser.
    fn scale(&self) -> Scale {
        let columns = 0..self.columns.len();
        let rows = self.rows.iter();
        let figures: Vec<f64> = rows
            .flat_map(|row| columns.clone().filter_map(|column| row.figure(column)))
            .collect();
        let least = figures.iter().copied().fold(f64::INFINITY, f64::min);
        let most = figures.iter().copied().fold(0.0, f64::max);
        match most > WIDE * least {
            true => Scale::Logarithmic,
            false => Scale::Linear,
        }
    }

    /// The same as bars, where its figures are numbers and ours are beside them.
    fn chart(&self, told: Told<'_>) -> Option<Bars> {
        let filesystems = told.filesystems();
        let is_drawn = self.rows.iter().all(|row| row.figure(0).is_some()) && !self.ours.is_empty();
        let there = self
            .columns
            .iter()
            .map(|title| (format!("source: {title}"), Kind::Source));
        let places: Vec<(&str, usize)> = filesystems
            .iter()
            .flat_map(|place| (0..self.ours.len()).map(move |ours| (*place, ours)))
            .collect();
        let here = places.iter().map(|(place, ours)| {
            let kind = match self.ours[*ours] {
                title if title.starts_with("Cowslip") => Kind::Ours,
                title if title.starts_with("QEMU") => Kind::Peer,
                _ => Kind::Yardstick,
            };
            (format!("{}, {place}", self.ours[*ours]), kind)
        });
        let bar = |value: f64| Bar {
            value,
            least: value,
            most: value,
        };
        let group = |row: &SourceRow| {
            let there = (0..self.columns.len()).map(|column| row.figure(column).map(bar));
            let here = places
                .iter()
                .map(|(place, ours)| row.here(told, place, *ours).map(bar));
            BarGroup {
                name: row.name.to_string(),
                bars: there.chain(here).collect(),
            }
        };
        is_drawn.then(|| Bars {
            title: self.title.to_string(),
            unit: "operations a second, more is better".to_string(),
            scale: self.scale(),
            series: Series::numbered(there.chain(here)),
            groups: self.rows.iter().map(group).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_row_has_a_figure_for_each_column() {
        for source in SOURCES {
            for row in source.rows {
                assert_eq!(
                    row.figures.len(),
                    source.columns.len(),
                    "{} {}",
                    source.title,
                    row.name
                );
                let ours = if row.cell.is_empty() {
                    0
                } else {
                    source.ours.len()
                };
                assert_eq!(row.contestants.len(), ours, "{} {}", source.title, row.name);
            }
        }
    }

    /// Cells are found by the beginning of their names: of those that their tables have.
    #[test]
    fn each_cell_is_one_of_its_table() {
        use crate::tables::cell_names;
        for source in SOURCES {
            let Some(names) = cell_names(source.table) else {
                continue;
            };
            for row in source.rows.iter().filter(|row| !row.cell.is_empty()) {
                let found = names.iter().any(|name| row.measures(name));
                assert!(
                    found,
                    "{} is no cell of {}: {names:?}",
                    row.cell, source.table
                );
            }
        }
    }

    #[test]
    fn ours_stand_beside_the_row_that_they_measure() {
        let of = |cell: &str, contestant: &str, iops: f64| {
            json!({
                "filesystem": "xfs", "cell": cell, "contestant": contestant, "runs": [{ "iops": iops }],
            })
        };
        let document = json!({
            "conditions": { "table": "subclusters" },
            "rows": [
                of("64K, backed, depth 1", "cowslip", 7.0),
                of("64K, backed, depth 32", "cowslip", 5000.0),
                of("64K, backed, depth 32", "qemu-img", 2000.0),
            ],
        });
        let mut section = Section::new("x");
        add(Told(&document), &mut section);
        let tables = section.blocks.iter().filter_map(|block| match block {
            Block::Table(table) => Some(table),
            _ => None,
        });
        let tables: Vec<&Table> = tables.collect();
        assert_eq!(tables.len(), 1, "the others measure other cells");
        let row = tables[0].groups[0]
            .rows
            .iter()
            .find(|row| row.fields[0] == "64 KB");
        let plain = row
            .unwrap()
            .fields
            .iter()
            .map(|field| field.replace('\u{202f}', ""));
        assert_eq!(
            plain.collect::<Vec<_>>(),
            ["64 KB", "1622", "1680", "5000", "2000"]
        );
        let prose = section.blocks.iter().any(|block| {
            matches!(block, Block::Prose(text) if text.starts_with("Source: Alberto Garcia"))
        });
        assert!(prose);
    }
}
