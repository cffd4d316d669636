//! `cowslip demo`, small: every row is there, read back, and clean.

use crate::support::{cowslip, program, run, scratch};

#[test]
fn a_small_demonstration_has_two_clean_rows_and_leaves_nothing() {
    let directory = scratch();
    let text = run(cowslip()
        .args([
            "demo",
            "--json",
            "--size",
            "32",
            "--operations",
            "500",
            "--dir",
        ])
        .arg(directory.path()));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() >= 2, "{text}");
    for (row, subclusters) in rows.iter().zip([true, false]) {
        assert_eq!(row["server"], "cowslip");
        assert_eq!(row["extended-l2"], subclusters);
        assert_eq!(row["check"], "clean");
        assert_eq!(row["read-back"], "identical");
        assert_eq!(row["guest-bytes"], 500 * 4096);
        assert!(row["iops"].as_f64().unwrap() > 0.0);
        assert!(row["host-bytes"].as_u64().unwrap() >= 500 * 4096);
    }
    for row in rows {
        assert_ne!(row["qemu-img-check"], "BAD", "{text}");
    }
    // Without subclusters every write copies a cluster.
    let written = |row: &serde_json::Value| row["file-bytes"].as_u64();
    if let (Some(with), Some(without)) = (written(&rows[0]), written(&rows[1])) {
        assert!(
            with <= without,
            "subclusters wrote {with}, clusters {without}"
        );
    }
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_relative_directory_and_links_in_qemus_names_change_nothing() {
    let directory = scratch();
    let links = directory.path().join("links");
    std::fs::create_dir(&links).unwrap();
    for name in ["qemu-img", "qemu-nbd", "qemu-storage-daemon"] {
        std::os::unix::fs::symlink(program(), links.join(name)).unwrap();
    }
    let words = "demo --json --size 16 --operations 20 --dir here".split(' ');
    let mut command = cowslip();
    let command = command.current_dir(directory.path()).args(words);
    // Nothing else is in this path.
    let output = crate::support::outcome(command.env("PATH", &links));
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaints}");
    assert!(
        complaints.contains("is Cowslip under QEMU's name"),
        "{complaints}"
    );
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert!(
        rows.iter().all(|row| row["server"] == "cowslip"),
        "{rows:?}"
    );
    assert!(
        rows.iter().all(|row| row["qemu-img-check"] != "clean"),
        "{rows:?}"
    );
}

#[test]
fn a_directory_that_cannot_be_made_is_one_clear_error() {
    let output = crate::support::outcome(cowslip().args(["demo", "--dir", "/proc/nothing"]));
    assert_eq!(output.status.code(), Some(1));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(
        words.starts_with("cowslip: Could not create '/proc/nothing/"),
        "{words}"
    );
}
