//! Results: rows of figures over the runs of a cell, as a table and for programs.

use cowslip_testbed::{Spread, TextColumns};
use serde_json::{Value, json};

use super::measure::{Layout as FileLayout, Measured};

const MIB: f64 = (1_u64 << 20) as f64;

/// The least, the middle and the most; null without values.
fn range(values: impl Iterator<Item = f64>) -> Value {
    Spread::of(values.collect()).map_or(
        Value::Null,
        |spread| json!({ "min": spread.least, "median": spread.median, "max": spread.greatest }),
    )
}

/// MiB/s; `None` of nothing.
fn rate(bytes: u64, seconds: f64) -> Option<f64> {
    (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / MIB / seconds)
}

/// Returns the row of a cell at a place for programs: figures over all files of these runs, and the
/// runs. Rates are until all is durable, and of reading one file after the other.
pub fn row(place: &str, cell: &str, runs: &[Measured]) -> Value {
    let files = || runs.iter().flat_map(|run| &run.files);
    let of_files = |value: fn(&FileLayout) -> f64| range(files().map(value));
    let of_runs = |value: fn(&Measured) -> Option<f64>| range(runs.iter().filter_map(value));
    let extents: u64 = files().map(|file| file.extents).sum();
    let bytes: u64 = files().map(|file| file.size).sum();
    json!({
        "filesystem": place,
        "cell": cell,
        "files": files().count(),
        "extents": of_files(|file| file.extents as f64),
        "perfect": of_files(|file| file.perfect as f64),
        "over-perfect": of_files(|file| file.extents as f64 / file.perfect.max(1) as f64),
        "mean-extent-mib": bytes as f64 / extents.max(1) as f64 / MIB,
        "write-mib-s": of_runs(|run| rate(run.written_bytes, run.write_seconds)),
        "read-mib-s": of_runs(|run| rate(run.bytes, run.read_seconds)),
        "peak-unused-mib": of_runs(|run| run.peak_unused.map(|bytes| bytes as f64 / MIB)),
        "lost-kib": runs.iter().map(|run| run.lost).sum::<u64>() as f64 / 1024.0,
        "short-of-space": runs.iter().map(|run| run.short_of_space).sum::<u64>(),
        "groups": runs.iter().filter_map(|run| run.groups).max(),
        "runs": runs,
    })
}

/// A figure, or a stroke where there is none.
fn known(figure: &Value, decimals: usize) -> String {
    let figure = figure.as_f64();
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
pub fn fields(row: &Value) -> Vec<String> {
    let name = |name: &str| row[name].as_str().unwrap_or_default().to_string();
    let number = |name: &str, decimals| known(&row[name], decimals);
    let of = |name: &str, end: &str, decimals| known(&row[name][end], decimals);
    let extents = ["min", "median", "max"].map(|end| of("extents", end, 0));
    let over = ["median", "max"].map(|end| of("over-perfect", end, 1));
    vec![
        name("filesystem"),
        name("cell"),
        number("files", 0),
        extents.join("/"),
        of("perfect", "median", 0),
        over.join("/"),
        number("mean-extent-mib", 2),
        of("write-mib-s", "median", 0),
        of("read-mib-s", "median", 0),
        of("peak-unused-mib", "max", 1),
        number("lost-kib", 0),
        number("short-of-space", 0),
        number("groups", 0),
    ]
}

#[cfg(test)]
mod tests {
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
        let row = row("xfs", "a", &[run([2, 3], 1.0), run([4, 9], 3.0)]);
        let counts = ["files", "short-of-space", "groups"].map(|name| row[name].as_u64());
        assert_eq!(counts, [Some(4), Some(2), Some(3)]);
        assert_eq!(
            row["extents"],
            json!({ "min": 2.0, "median": 3.5, "max": 9.0 })
        );
        assert_eq!(row["over-perfect"]["max"], 4.5);
        assert_eq!(row["lost-kib"], 8.0);
        assert_eq!(
            row["write-mib-s"],
            json!({ "min": 2.0, "median": 4.0, "max": 6.0 })
        );
        assert!(row["read-mib-s"].is_null());
        let mut columns = columns(&["xfs".to_string()], &["a".to_string()]);
        let text = columns.row(&fields(&row));
        let (titles, line) = text.split_once('\n').unwrap();
        assert_eq!(titles.len(), line.trim_end().len(), "{text}");
        assert!(line.contains("2/4/9") || line.contains("2/3/9"), "{line}");
        assert!(line.contains("  -  "), "{line}");
    }
}
