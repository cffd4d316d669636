//! Results as tables: a line for each job, node or export, columns as wide as they need to be.

use cowslip_console::size;
use serde_json::Value;

/// A column: its head, the side on which its texts begin, and its text for an element.
type Column = (&'static str, Side, fn(&Value) -> String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

use Side::{Left, Right};

const JOBS: &[Column] = &[
    ("JOB", Left, |it| text(it, &["id"])),
    ("TYPE", Left, |it| text(it, &["type"])),
    ("STATUS", Left, |it| text(it, &["status"])),
    ("DONE", Right, percent),
    ("BYTES", Right, |it| bytes(it, &["current-progress"])),
    ("OF", Right, |it| bytes(it, &["total-progress"])),
    ("ERROR", Left, |it| text(it, &["error"])),
];

const BLOCK_JOBS: &[Column] = &[
    ("JOB", Left, |it| text(it, &["device"])),
    ("TYPE", Left, |it| text(it, &["type"])),
    ("STATUS", Left, |it| text(it, &["status"])),
    ("BYTES", Right, |it| bytes(it, &["offset"])),
    ("OF", Right, |it| bytes(it, &["len"])),
    ("LIMIT/S", Right, |it| match number(it, &["speed"]) {
        Some(0) | None => "-".to_string(),
        Some(speed) => size::human(speed),
    }),
    ("ERROR", Left, |it| text(it, &["error"])),
];

/// A member of an export that is the view of a checkpoint.
pub const IS_VIEW: &str = "is-view";

const EXPORTS: &[Column] = &[
    ("EXPORT", Left, |it| text(it, &["id"])),
    ("TYPE", Left, |it| text(it, &["type"])),
    ("NODE", Left, |it| text(it, &["node-name"])),
    ("STATE", Left, |it| {
        let state = match (it["shutting-down"] == true, it[IS_VIEW] == true) {
            (true, _) => "ending",
            (false, true) => "checkpoint",
            (false, false) => "offered",
        };
        state.to_string()
    }),
    ("NAME", Left, |it| text(it, &["x-cowslip-name"])),
];

const NODES: &[Column] = &[
    ("NODE", Left, |it| text(it, &["node-name"])),
    ("DRIVER", Left, |it| text(it, &["drv"])),
    ("ACCESS", Left, |it| match it["ro"] == true {
        true => "read-only".to_string(),
        false => "read-write".to_string(),
    }),
    ("SIZE", Right, |it| bytes(it, &["image", "virtual-size"])),
    ("ON DISK", Right, |it| bytes(it, &["image", "actual-size"])),
    ("BELOW", Right, |it| text(it, &["backing_file_depth"])),
    ("BITMAPS", Right, |it| {
        let bitmaps = it["dirty-bitmaps"].as_array();
        bitmaps.map_or(0, Vec::len).to_string()
    }),
    ("FILE", Left, |it| text(it, &["file"])),
];

const CHECKPOINTS: &[Column] = &[
    ("CHECKPOINT", Left, |it| text(it, &["name"])),
    ("NODE", Left, |it| text(it, &["node"])),
    ("STATE", Left, |it| {
        if it["failure"].is_string() {
            return "failed".to_string();
        }
        let state = match (it["inconsistent"] == true, it["recording"] == true) {
            (true, _) => "inconsistent",
            _ if it["usable"] == false => "incomplete",
            (false, true) => "recording",
            (false, false) => "complete",
        };
        state.to_string()
    }),
    ("CHANGED", Right, |it| bytes(it, &["count"])),
    ("EXPORT", Left, |it| text(it, &["export-name"])),
    ("KEPT", Right, |it| bytes(it, &["stored-bytes"])),
];

const FIGURES: &[Column] = &[
    ("NODE", Left, |it| text(it, &["node-name"])),
    ("READS", Right, |it| text(it, &["stats", "rd_operations"])),
    ("BYTES", Right, |it| bytes(it, &["stats", "rd_bytes"])),
    ("MEAN", Right, |it| mean(it, "rd")),
    ("WRITES", Right, |it| text(it, &["stats", "wr_operations"])),
    ("BYTES", Right, |it| bytes(it, &["stats", "wr_bytes"])),
    ("MEAN", Right, |it| mean(it, "wr")),
    ("FLUSHES", Right, |it| {
        text(it, &["stats", "flush_operations"])
    }),
    ("MEAN", Right, |it| mean(it, "flush")),
    ("FAILED", Right, |it| {
        let kinds = ["rd", "wr", "flush", "unmap"];
        let failed = kinds.map(|kind| number(it, &["stats", &format!("failed_{kind}_operations")]));
        failed.into_iter().flatten().sum::<u64>().to_string()
    }),
];

/// The table of a command's result, if there is one for it.
pub fn of(command: &str, result: &Value) -> Option<String> {
    let columns = match command {
        "query-jobs" => JOBS,
        "query-block-jobs" => BLOCK_JOBS,
        "query-block-exports" => EXPORTS,
        "query-named-block-nodes" => NODES,
        "query-blockstats" => FIGURES,
        "x-cowslip-query-checkpoints" => CHECKPOINTS,
        _ => return None,
    };
    Some(table(columns, result.as_array()?))
}

fn table(columns: &[Column], elements: &[Value]) -> String {
    let mut lines = vec![
        columns
            .iter()
            .map(|(head, ..)| head.to_string())
            .collect::<Vec<_>>(),
    ];
    for element in elements {
        lines.push(columns.iter().map(|(.., of)| of(element)).collect());
    }
    let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max();
    let widths: Vec<usize> = (0..columns.len())
        .map(|at| width(at).unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in &lines {
        let mut shown = String::new();
        for ((cell, width), (_, side, _)) in line.iter().zip(&widths).zip(columns) {
            let cell = match side {
                Left => format!("{cell:<width$}  "),
                Right => format!("{cell:>width$}  "),
            };
            shown.push_str(&cell);
        }
        text.push_str(shown.trim_end());
        text.push('\n');
    }
    text
}

fn at<'a>(element: &'a Value, way: &[&str]) -> Option<&'a Value> {
    way.iter().try_fold(element, |value, name| value.get(name))
}

fn number(element: &Value, way: &[&str]) -> Option<u64> {
    at(element, way).and_then(Value::as_u64)
}

/// A value as text; control characters, which names of files may have, as escapes.
fn text(element: &Value, way: &[&str]) -> String {
    match at(element, way) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => printable(text),
        Some(other) => other.to_string(),
    }
}

/// A text without control characters.
pub fn printable(text: &str) -> String {
    let escaped = text.chars().map(|sign| match sign.is_control() {
        true => sign.escape_default().to_string(),
        false => sign.to_string(),
    });
    escaped.collect()
}

fn bytes(element: &Value, way: &[&str]) -> String {
    number(element, way).map_or("-".to_string(), size::human)
}

fn percent(job: &Value) -> String {
    let of = |name: &str| number(job, &[name]).unwrap_or(0);
    match (of("current-progress"), of("total-progress")) {
        (_, 0) => "-".to_string(),
        (done, total) => format!("{:.0} %", done as f64 * 100.0 / total as f64),
    }
}

/// The mean time of a kind of requests.
fn mean(element: &Value, kind: &str) -> String {
    let of = |what: &str| number(element, &["stats", &format!("{kind}_{what}")]).unwrap_or(0);
    match of("operations") {
        0 => "-".to_string(),
        count => format!("{} us", of("total_time_ns") / count / 1000),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_text() {
        let jobs = json!([
            {"id": "a-long-name", "type": "mirror", "status": "running",
             "current-progress": 1 << 20, "total-progress": 4 << 20},
            {"id": "b", "type": "create", "status": "concluded",
             "current-progress": 0, "total-progress": 0, "error": "it\nfailed"},
        ]);
        let expected = "\
JOB          TYPE    STATUS     DONE  BYTES     OF  ERROR
a-long-name  mirror  running    25 %  1 MiB  4 MiB
b            create  concluded     -    0 B    0 B  it\\nfailed
";
        assert_eq!(of("query-jobs", &jobs).unwrap(), expected);
        assert_eq!(of("query-version", &jobs), None);
        let view = json!([{"name": "c", "node": "n", "recording": true, "failure": "no space"}]);
        let views = of("x-cowslip-query-checkpoints", &view).unwrap();
        assert!(views.contains("failed"), "{views}");
    }

    #[test]
    fn the_mean_is_that_of_the_requests() {
        let stats = json!({"stats": {"rd_operations": 4, "rd_total_time_ns": 1_000_000}});
        assert_eq!(mean(&stats, "rd"), "250 us");
        assert_eq!(mean(&stats, "wr"), "-");
    }
}
