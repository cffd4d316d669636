//! The common parts of all reports: conditions, and the results for programs.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::run;

/// Returns the common conditions of all runs: these, and the machine.
pub fn conditions(mut conditions: Value) -> Value {
    let read = |path: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.trim().to_string()
    };
    conditions["kernel"] = json!(read("/proc/sys/kernel/osrelease"));
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    conditions["processors"] = json!(processors);
    conditions["load_average_before"] = json!(read("/proc/loadavg"));
    conditions
}

/// The name of a new file for results of this kind.
pub fn new_results(kind: &str, extension: &str) -> Result<PathBuf, String> {
    let directory = run::root().join("bench/results");
    fs::create_dir_all(&directory)
        .map_err(|e| format!("cannot make {}: {e}", directory.display()))?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    Ok(directory.join(format!("{kind}-{now}.{extension}")))
}

/// Writes results as JSON to a new file and returns its path.
pub fn write_results(kind: &str, results: &Value) -> Result<PathBuf, String> {
    let file = new_results(kind, "json")?;
    let text = serde_json::to_string_pretty(results).map_err(|e| e.to_string())?;
    fs::write(&file, text + "\n").map_err(|e| format!("cannot write {}: {e}", file.display()))?;
    Ok(file)
}
