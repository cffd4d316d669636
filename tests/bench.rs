//! `bench FILE` beside qemu-img's: the same words and exit codes for the same command lines.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{
    cowslip, create_image, outcome, peers_are_installed, qemu_img, run, scratch, scratch_beside,
};

/// Command lines of `bench`; words are cut at blanks.
const LINES: &str = "
-c 10
-c 10 a.qcow2
-c 0x10 a.qcow2
-c +5 a.qcow2
-c 10 -w a.qcow2
-c 10 -w -f raw r.raw
-c 0 a.qcow2
-c -1 a.qcow2
-c 1k a.qcow2
-c 1.5 a.qcow2
-c x a.qcow2
-c 99999999999999999999999 a.qcow2
-d 0 a.qcow2
-d 1k a.qcow2
-d x a.qcow2
-s 0 a.qcow2
-s x a.qcow2
-s 2G a.qcow2
-s 1000 -c 10 a.qcow2
-s 1.5k -c 1 a.qcow2
-S x a.qcow2
-S 4G a.qcow2
-S 0 -c 10 a.qcow2
-S 1k -s 64k -c 10 a.qcow2
-S 32k -s 8k -o 1000 -c 512 a.qcow2
-o x a.qcow2
-o -1 a.qcow2
-o 9E a.qcow2
-o 16M -c 10 a.qcow2
-o 17M -c 10 a.qcow2
-o 16777215 -s 1 -c 3 -d 1 a.qcow2
-q -c 10 a.qcow2
-t foo a.qcow2
-t none -c 10 a.qcow2
-t directsync -w -c 10 a.qcow2
-i foo a.qcow2
-i io_uring -c 10 a.qcow2
-i threads -c 10 a.qcow2
-i native -c 10 a.qcow2
-n -c 10 a.qcow2
-n -t none -c 10 a.qcow2
--native --cache=none --count=10 a.qcow2
--flush-interval 2 -c 10 a.qcow2
--flush-interval 2 -w -c 10 a.qcow2
--flush-interval x -w a.qcow2
--flush-interval 1k -w a.qcow2
--flush-interval -1 -w a.qcow2
--flush-interval 0 -w -c 100 a.qcow2
--flush-interval 8 -w -d 4 -c 100 a.qcow2
--flush-interval 8 -w -d 4 -c 100 --no-drain a.qcow2
--flush-interval 1 -w -d 1 -c 9 a.qcow2
--no-drain -c 10 a.qcow2
--pattern 5 -c 10 a.qcow2
--pattern 0x11 -w -c 10 a.qcow2
--pattern 256 -w a.qcow2
--pattern x -w a.qcow2
-U -c 10 a.qcow2
-U -w -c 10 a.qcow2
--image-opts -f raw a.qcow2
--image-opts -c 10 driver=qcow2,file.filename=a.qcow2
--image-opts -n -c 10 driver=qcow2,file.filename=a.qcow2
-f foo a.qcow2
nope.qcow2
a.qcow2 b
-z
--bar a.qcow2
-c 10 -s 4k -o 1k -f raw r.raw
-c 400 -s 4k -f raw r.raw
-c 10 -s 2M -w -f raw r.raw
-c 10 -t none -s 100 -f raw r.raw
";

/// Returns the output without the seconds.
fn text(output: &Output) -> String {
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = printed.split(' ').map(|word| {
        let is_time = word.contains('.') && word.parse::<f64>().is_ok();
        if is_time { "N" } else { word }
    });
    let printed: Vec<&str> = words.collect();
    format!(
        "{}{}[{}]\n",
        printed.join(" "),
        String::from_utf8_lossy(&output.stderr),
        output.status
    )
}

fn bench(mut command: Command, dir: &Path, line: &str) -> String {
    let command = command.current_dir(dir).args(line.split_whitespace());
    text(&outcome(command))
}

#[test]
fn bench_says_what_qemu_img_does() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    qemu_img(
        &["create", "-q", "-f", "qcow2"],
        &[&dir.path().join("a.qcow2"), Path::new("16M")],
    );
    std::fs::write(dir.path().join("r.raw"), vec![1; 1_000_448]).unwrap();
    let mut failures = String::new();
    for line in LINES.lines().filter(|line| !line.is_empty()) {
        let mut theirs = Command::new("qemu-img");
        theirs.arg("bench");
        let theirs = bench(theirs, dir.path(), line);
        for name in ["qemu-img", "cowslip"] {
            // Under the own name the attempt is named once.
            let twice = "Could not open 'nope.qcow2': Could not open 'nope.qcow2': ";
            let expected = match name {
                "qemu-img" => theirs.clone(),
                _ => theirs.replace(twice, "Could not open 'nope.qcow2': "),
            };
            let mut ours = cowslip();
            ours.args([name, "bench"]);
            let actual = bench(ours, dir.path(), line)
                .replace(&format!("{name} bench --help"), "qemu-img bench --help");
            let actual = actual.replace(&format!("{name}:"), "qemu-img:");
            let actual = actual.replace(&format!("{name} bench:"), "qemu-img bench:");
            if actual != expected {
                failures += &format!("bench {line}\n--- expected\n{expected}--- actual\n{actual}");
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    qemu_img(&["check", "-q"], &[&dir.path().join("a.qcow2")]);
}

#[test]
fn the_figures_are_told_in_json_and_the_bytes_are_there() {
    let dir = scratch();
    let image = dir.path().join("a.qcow2");
    create_image(&image, "4M");
    // 1024 blocks at a step that is coprime to them: each once.
    let report = run(cowslip()
        .args("bench --json -w -c 1024 -d 8 -S 1568768 --pattern 7".split(' '))
        .args(["--flush-interval", "16"])
        .arg(&image));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["requests"], 1024);
    assert_eq!(report["flushes"], 64);
    let series = report["series"].as_array().unwrap();
    let sum = |steps: &serde_json::Value| -> u64 {
        let steps = steps.as_array().unwrap();
        steps.iter().map(|step| step.as_u64().unwrap()).sum()
    };
    assert_eq!(sum(&report["series"]), 1024);
    let allocated = &report["series-allocated"];
    assert!(allocated["cluster"].as_array().unwrap().len() <= series.len());
    let found = ["cluster", "subcluster", "nothing"].map(|what| sum(&allocated[what]));
    // 64 clusters; what joined a write that had just taken one is in between.
    assert_eq!((found[0], found.iter().sum::<u64>()), (64, 1024));
    assert!(report["latency-us"]["p50"].as_f64() <= report["latency-us"]["p99.9"].as_f64());
    run(cowslip().args(["io", "-c", "read -P 7 0 4M"]).arg(&image));
    run(cowslip()
        .args("bench --json -w -c 1024 --random 3 --pattern 9".split(' '))
        .arg(&image));
    run(cowslip().args(["io", "-c", "read -P 9 0 4M"]).arg(&image));
    run(cowslip().arg("check").arg(&image));
}

fn json(command: &mut Command) -> serde_json::Value {
    serde_json::from_str(&run(command)).unwrap()
}

/// Each contestant of each cell has run, and nothing is left behind.
fn tiny_table(line: &str) -> serde_json::Value {
    let dir = scratch();
    let table = json(
        cowslip()
            .arg("bench")
            .args(line.split_whitespace())
            .args(["--json", "--repetitions=2", "--dir"])
            .arg(dir.path())
            .args((!line.contains("--size")).then_some("--size=64M")),
    );
    let rows = table["rows"].as_array().unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        let runs = row["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2, "{row}");
        assert!(runs.iter().all(|run| run["iops"].as_f64() > Some(0.0)));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    table
}

fn contestants<'a>(table: &'a serde_json::Value, cell: &str) -> Vec<&'a str> {
    let rows = table["rows"].as_array().unwrap().iter();
    let rows = rows.filter(|row| row["cell"] == cell);
    rows.map(|row| row["contestant"].as_str().unwrap())
        .collect()
}

#[test]
fn the_table_of_subclusters_has_all_contestants() {
    let table = tiny_table("subclusters --requests=64 --depths=32 --cells=64K,");
    let ours = [
        "cowslip",
        "cowslip sparse",
        "cowslip zero-range",
        "cowslip write",
    ];
    let mut expected = ours.to_vec();
    if peers_are_installed(&["qemu-img"]) {
        expected.push("qemu-img");
    }
    expected.extend(["raw sparse", "raw allocated", "raw written"]);
    assert_eq!(contestants(&table, "64K, empty, depth 32"), expected);
    let backed = contestants(&table, "64K, backed, depth 32");
    assert!(backed.starts_with(&expected), "{backed:?}");
}

#[test]
fn places_are_measured_with_the_driver_that_is_asked_for() {
    let table = tiny_table(
        "preallocation --requests=64 --depths=32 --policies=auto --cells=off --aio=threads",
    );
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| {
        let place = row["filesystem"].as_str().unwrap();
        place.ends_with(", threads")
    }));
    assert_eq!(
        table["conditions"]["places"][0]["aio-of-cowslip"],
        "threads"
    );
}

#[test]
fn the_table_of_flushes_counts_them() {
    let table = tiny_table("flush --requests=32 --policies=auto");
    for row in table["rows"].as_array().unwrap() {
        let cell = row["cell"].as_str().unwrap();
        let interval: u64 = cell.rsplit(' ').next().unwrap().parse().unwrap();
        for run in row["runs"].as_array().unwrap() {
            let report = &run["told"];
            if !report.is_null() {
                let due = report["requests"].as_u64().unwrap() / interval;
                assert_eq!(report["flushes"], due, "{row}");
            }
        }
    }
}

#[test]
fn the_table_of_discards_tells_space_over_live_data() {
    let table = tiny_table("discard --policies=sparse");
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.len() >= 4);
    for run in rows.iter().flat_map(|row| row["runs"].as_array().unwrap()) {
        assert!(run["over live"].as_f64() > Some(0.9), "{run}");
    }
}

#[test]
fn the_table_of_served_images_has_both_servers_under_one_client() {
    if !peers_are_installed(&["fio", "qemu-img", "qemu-storage-daemon"]) {
        return;
    }
    let table =
        tiny_table("served --requests=200 --depths=32 --peers=qemu-storage-daemon --cells=64K/2K");
    let both = ["cowslip", "qemu-storage-daemon"];
    assert_eq!(contestants(&table, "64K/2K, backed, depth 32"), both);
    let ours = &table["rows"][0];
    assert!(ours["times-qemu-img"].as_f64() > Some(0.0), "{ours}");
    assert!(ours["runs"][0]["CPU us"].as_f64() >= Some(0.0), "{ours}");
}

#[test]
fn the_table_of_vhost_user_has_one_image_both_servers_and_restarts() {
    let line = "vhost-user --requests=800 --depths=4,1 --size=4M";
    let table = tiny_table(line);
    let both = match peers_are_installed(&["qemu-img", "qemu-storage-daemon"]) {
        true => vec!["cowslip", "qemu-storage-daemon"],
        false => vec!["cowslip"],
    };
    for cell in [
        "64K, filled, depth 1, reads, vhost-user",
        "64K, filled, depth 4, overwrites, vhost-user",
        "64K/2K, empty, depth 4, vhost-user",
        "64K, filled, depth 4, reads, NBD",
    ] {
        assert_eq!(contestants(&table, cell), both, "{cell}");
    }
    for row in table["rows"].as_array().unwrap() {
        let run = &row["runs"][0];
        let cell = row["cell"].as_str().unwrap();
        let is_restarted = cell.ends_with("killed") || cell.ends_with("handed over");
        assert_eq!(run["gap ms"].as_f64() > Some(0.0), is_restarted, "{row}");
        assert_eq!(run["p50 us"].as_f64() > Some(0.0), !is_restarted, "{row}");
        assert_eq!(run["CPU us"].is_f64(), !is_restarted, "{row}");
    }
    let restarted = "64K, filled, depth 4, overwrites, handed over";
    assert_eq!(contestants(&table, restarted), ["cowslip"]);
}

#[test]
fn the_table_of_fuse_has_both_servers_under_one_client() {
    let can_mount = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can_mount {
        eprintln!("SKIPPED: /dev/fuse and root are needed");
        return;
    }
    if !peers_are_installed(&["fio", "qemu-img", "qemu-storage-daemon"]) {
        return;
    }
    let table = tiny_table("fuse --requests=200 --depths=4 --size=4M");
    for cell in ["reads", "overwrites"] {
        let cell = format!("64K, filled, depth 4, {cell}, FUSE");
        assert_eq!(
            contestants(&table, &cell),
            ["cowslip", "qemu-storage-daemon"]
        );
    }
    assert!(table["rows"][0]["times-qemu-img"].as_f64() > Some(0.0));
}

#[test]
fn the_table_of_threads_holds_many_against_one() {
    let table = tiny_table("threads --requests=4000 --depths=4 --size=4M");
    let names = contestants(&table, "64K, contiguous, depth 4, overwrites");
    let ours = [
        "cowslip 1 thread",
        "cowslip 2 threads",
        "cowslip 4 threads",
        "cowslip 2 processes",
    ];
    assert_eq!(names[..4], ours);
    for row in table["rows"].as_array().unwrap() {
        let name = row["contestant"].as_str().unwrap();
        let is_many = name.ends_with('s');
        assert_eq!(
            row["times-one-thread"].as_f64() > Some(0.0),
            is_many,
            "{row}"
        );
    }
}

#[test]
fn the_tables_of_programs_hold_ours_against_qemu_img() {
    if !peers_are_installed(&["qemu-img", "qemu-nbd", "nbdcopy"]) {
        return;
    }
    let check = tiny_table("check --size=1G --cells=empty");
    for cell in ["1 GiB, empty, cold", "1 GiB, empty, warm"] {
        assert_eq!(contestants(&check, cell), ["cowslip", "qemu-img"]);
    }
    let convert = tiny_table("convert --size=4M --cells=pieces");
    let copied = "raw in 4 KiB pieces to qcow2, page cache, nbdcopy";
    assert_eq!(contestants(&convert, copied), ["nbdcopy"]);
    let direct = "raw in 4 KiB pieces to qcow2, direct";
    assert_eq!(contestants(&convert, direct), ["cowslip", "qemu-img"]);
    let ours = &convert["rows"][0];
    assert!(ours["times-qemu-img"].as_f64() > Some(0.0), "{ours}");
    assert_eq!(ours["runs"][0]["must x QEMU"], 1.5, "{ours}");
    assert!(ours["runs"][0]["MiB"].as_f64() > Some(0.0), "{ours}");
}

#[test]
fn threads_write_all_that_one_would() {
    let dir = scratch();
    let image = dir.path().join("a.qcow2");
    let words = ["create", "-q", "-f", "qcow2"];
    run(cowslip().args(words).arg(&image).arg("4M"));
    for (order, pattern) in [("--step-size=1568768", 7), ("--random=3", 9)] {
        let report = json(
            cowslip()
                .args("bench --json -w -c 1024 -d 4 --threads 3".split(' '))
                .args([order, &format!("--pattern={pattern}")])
                .arg(&image),
        );
        let series = report["series"].as_array().unwrap().iter();
        assert_eq!(series.map(|step| step.as_u64().unwrap()).sum::<u64>(), 1024);
        let read = format!("read -P {pattern} 0 4M");
        run(cowslip().args(["io", "-c", &read]).arg(&image));
    }
    run(cowslip().arg("check").arg(&image));
}

#[test]
fn the_tables_of_allocated_images_compare_with_a_written_raw_file() {
    let steady = tiny_table("steady --requests=64 --depths=32");
    let cells = [
        "64K, filled, depth 32, reads",
        "64K/2K, filled, depth 32, overwrites",
    ];
    let trimmed = contestants(&steady, "64K, trimmed, depth 32");
    assert_eq!(trimmed[trimmed.len() - 2..], ["raw sparse", "raw written"]);
    for cell in cells {
        let contestants = contestants(&steady, cell);
        assert_eq!(contestants.first(), Some(&"cowslip"));
        assert_eq!(contestants.last(), Some(&"raw written"));
    }
    let preallocation = tiny_table("preallocation --requests=64 --depths=32");
    let full = contestants(&preallocation, "64K, preallocation full, depth 32");
    assert_eq!(full.last(), Some(&"raw written"));
}

#[test]
fn the_table_of_fragmentation_reads_what_was_filled() {
    let table = tiny_table("fragmentation --requests=64 --policies=sparse --size=4M --cells=64K,");
    for row in table["rows"].as_array().unwrap() {
        let runs = row["runs"].as_array().unwrap();
        assert!(runs.iter().all(|run| run["in order MiB/s"].is_f64()));
    }
}

#[test]
fn the_table_of_metadata_holds_budgets_against_none() {
    let table = tiny_table("metadata --requests=64 --depths=8 --size=1G --cells=1M/32K,");
    let rows = table["rows"].as_array().unwrap();
    // Two layouts, reads and overwrites.
    let cells = rows.iter().filter(|row| row["contestant"] == "cowslip 64M");
    assert_eq!(cells.count(), 4);
    for row in rows {
        let ours = row["contestant"].as_str().unwrap().starts_with("cowslip");
        assert_eq!(row["times-unlimited"].is_f64(), ours, "{row}");
        for run in row["runs"].as_array().unwrap() {
            assert!(run["RSS MiB"].as_f64() > Some(0.0));
            assert_eq!(run["open ms"].is_f64(), ours);
            if ours && row["cell"].as_str().unwrap().ends_with("reads") {
                assert_eq!(
                    (run["hits"].as_f64(), run["misses"].as_f64()),
                    (Some(64.0), Some(0.0))
                );
            }
        }
    }
}

/// A cloud kernel: one that is installed, or the one that `cargo xtask test` has unpacked.
pub fn guest_kernel() -> Option<PathBuf> {
    let unpacked = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("guest-kernel");
    let mut found = None;
    for directory in [Path::new("/boot"), &unpacked.join("boot")] {
        for entry in std::fs::read_dir(directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with("vmlinuz-") && name.contains("cloud") {
                found = Some(path);
            }
        }
    }
    assert!(
        found.is_some() || std::env::var_os("COWSLIP_REQUIRE_PEERS").is_none(),
        "there is no cloud kernel"
    );
    if found.is_none() {
        eprintln!("SKIPPED: there is no cloud kernel for a guest");
    }
    found
}

/// Without KVM, which is everywhere.
#[test]
fn the_table_of_guests_has_equal_operations_in_each() {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("SKIPPED: guests are for x86-64 only");
        return;
    }
    if !peers_are_installed(&["qemu-system-x86_64", "qemu-img"]) {
        return;
    }
    let Some(kernel) = guest_kernel() else { return };
    let dir = scratch();
    let table = json(
        cowslip()
            .args("bench guest --json --accel=tcg --repetitions=1 --size=16M".split(' '))
            .args(["--requests=64", "--depths=32", "--cells=64K/2K, backed"])
            .arg("--kernel")
            .arg(kernel)
            .arg("--dir")
            .arg(dir.path()),
    );
    assert_eq!(table["conditions"]["guest"]["accelerator"], "TCG");
    let expected = [
        "cowslip",
        "cowslip vhost-user",
        "qemu driver",
        "raw written",
    ];
    assert_eq!(contestants(&table, "64K/2K, backed, depth 32"), expected);
    for row in table["rows"].as_array().unwrap() {
        let run = &row["runs"][0];
        assert!(run["iops"].as_f64() > Some(0.0), "{row}");
        assert!(run["overwrites"].as_f64() > Some(0.0), "{row}");
        for part in ["first", "overwrites"] {
            assert_eq!(run["told"][part]["requests"], 64, "{row}");
        }
    }
    let ours = &table["rows"][0];
    assert!(ours["times-qemu-img"].is_f64() && ours["times-raw-written"].is_f64());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn process_one_of_a_guest_is_nothing_for_a_host() {
    let refused = outcome(cowslip().arg("guest-init"));
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("process 1 of a guest"), "{text}");
}

#[test]
fn flushes_are_told_with_what_is_before_them() {
    let dir = scratch();
    let image = dir.path().join("a.qcow2");
    create_image(&image, "1M");
    let report = run(cowslip()
        .args("bench -w -c 96 -d 8 --flush-interval 32 --tell-flushes".split(' '))
        .arg(&image));
    let report: Vec<_> = report
        .lines()
        .filter(|line| line.starts_with("Flushed"))
        .collect();
    let expected = [32, 64, 96].map(|count| format!("Flushed after {count} requests"));
    assert_eq!(report, expected);
}

#[test]
fn the_conditions_of_a_source_are_told() {
    let line =
        "subclusters --conditions=seed --requests=64 --depths=32 --policies=auto --cells=32K,";
    let table = tiny_table(line);
    let note = table["notes"][0].as_str().unwrap();
    assert!(note.contains("40 GiB"), "{note}");
}

#[test]
fn an_interrupted_table_leaves_nothing() {
    let dir = scratch();
    let mut table = cowslip()
        .args("bench subclusters --size=16M --repetitions=1000 --dir".split(' '))
        .arg(dir.path())
        .spawn()
        .unwrap();
    let entries = |path: &Path| std::fs::read_dir(path).unwrap().count();
    while entries(dir.path()) == 0 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::thread::sleep(std::time::Duration::from_millis(300));
    run(Command::new("kill").args(["-INT", &table.id().to_string()]));
    assert!(!table.wait().unwrap().success());
    // A cell that begins just then may leave its image.
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entries(&entry.unwrap().path()))
        .collect();
    assert!(left.iter().all(|entries| *entries <= 1), "{left:?}");
}

/// Begins a table of six cells, with its output on a pipe.
fn begin(words: &[&str], dir: &Path) -> std::process::Child {
    let mut table = cowslip();
    table.args(["bench", "steady", "--size=16M", "--requests=64"]);
    table.args(["--depths=1", "--peers=none"]).args(words);
    table.arg("--dir").arg(dir);
    table.stdout(std::process::Stdio::piped());
    table.spawn().unwrap()
}

fn interrupt(table: &std::process::Child) {
    run(Command::new("kill").args(["-INT", &table.id().to_string()]));
}

/// Interrupted as soon as its first cell is there: the cell was printed before the end, and the
/// summary mentions it.
#[test]
fn the_cells_that_are_done_outlive_an_interruption() {
    let dir = scratch();
    let mut table = begin(&["--repetitions=20"], dir.path());
    let mut lines = BufReader::new(table.stdout.take().unwrap()).lines();
    let mut next = || lines.next().map(Result::unwrap);
    let titles = next().unwrap();
    let rows = [next().unwrap(), next().unwrap()];
    interrupt(&table);
    assert!(titles.starts_with("fs ") && titles.contains("x written"));
    for (row, contestant) in rows.iter().zip(["  cowslip  ", "  raw written  "]) {
        assert!(row.contains("64K, filled, depth 1, reads  "), "{row}");
        assert!(row.contains(contestant), "{row}");
        // Under the title of the first number, to the right.
        let end = titles.find("IOPS").unwrap() + 4;
        let iops: f64 = row[..end].rsplit(' ').next().unwrap().parse().unwrap();
        assert!(iops > 0.0 && row[end..].starts_with(' '), "{row}");
    }
    let rest: Vec<String> = std::iter::from_fn(next).collect();
    let end = rest.last().unwrap();
    assert!(end.starts_with("Interrupted: ") && end.ends_with(" of 6 cells are finished."));
    let status = table.wait().unwrap();
    assert_eq!(status.signal(), Some(2), "{status}");
}

/// The document for programs comes once, whole, with what is done.
#[test]
fn an_interruption_ends_the_json_in_order() {
    let dir = scratch();
    let mut table = begin(&["--repetitions=20", "--json"], dir.path());
    // The image of the last three cells has extended entries: three are done then, or a few more.
    let is_extended = |image: &Path| {
        let mut header = [0; 80];
        let read = std::fs::File::open(image).and_then(|mut file| file.read_exact(&mut header));
        read.is_ok() && header[79] & 0x10 != 0
    };
    let image = || {
        let place = std::fs::read_dir(dir.path()).unwrap().next()?;
        Some(place.unwrap().path().join("image.qcow2"))
    };
    while !image().is_some_and(|image| is_extended(&image)) {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    interrupt(&table);
    let mut text = String::new();
    table
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["interrupted"], true);
    assert_eq!(report["cells-planned"], 6);
    let finished = report["cells-finished"].as_u64().unwrap();
    assert!((3..6).contains(&finished), "{finished}");
    let rows = report["rows"].as_array().unwrap();
    // The third cell has a sparse file and both policies too.
    assert_eq!(rows.len() as u64, finished * 2 + 2);
    for row in rows.iter().filter(|row| row["contestant"] == "cowslip") {
        let runs = row["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 20);
        assert!(runs.iter().all(|run| run["times-raw-written"].is_f64()));
    }
    assert_eq!(table.wait().unwrap().signal(), Some(2));
}

#[test]
fn the_table_of_writers_tells_extents_and_space() {
    let dir = scratch();
    let mut command = cowslip();
    command.args("bench writers --json --size 64M --runs 1 --cells".split(' '));
    let table = json(command.arg("stream direct 4 ").arg("--dir").arg(dir.path()));
    assert_eq!(table["interrupted"], false);
    let rows = table["rows"].as_array().unwrap();
    let of = |help: &str| {
        let cell = format!("stream direct 4 {help}");
        let row = rows.iter().find(|row| row["cell"] == cell.as_str());
        row.unwrap_or_else(|| panic!("{help}: {table}"))
    };
    for help in ["none", "fixed=1M", "dynamic", "grow"] {
        let row = of(help);
        assert_eq!(row["files"], 4);
        assert_eq!(row["lost-kib"], 0.0, "{row}");
        assert_eq!(row["short-of-space"], 0);
        let extents = row["extents"]["median"].as_f64().unwrap();
        assert!((1.0..=256.0).contains(&extents), "{row}");
        assert_eq!(row["runs"][0]["bytes"], 64 << 20);
    }
    assert!(of("dynamic")["peak-unused-mib"]["max"].as_f64().unwrap() > 0.0);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn interrupted_writers_leave_nothing() {
    let dir = scratch();
    let mut command = cowslip();
    command.args("bench writers --runs 1 --size 4G --cells stream --dir".split(' '));
    let mut table = command.arg(dir.path()).spawn().unwrap();
    let found = |at: &Path| std::fs::read_dir(at).unwrap().next().is_some();
    while !found(dir.path()) && table.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    interrupt(&table);
    let status = table.wait().unwrap();
    assert!(status.signal().is_some(), "{status}");
    assert!(!found(dir.path()));
}

/// The longest part of making a file system is to write the file that it is on.
#[test]
fn an_interruption_while_a_file_system_is_made_leaves_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may mount");
        return;
    }
    for line in ["steady --quick", "allocate --size=1G", "writers", "all"] {
        let dir = scratch();
        let mut command = cowslip();
        command.arg("bench").args(line.split(' '));
        command.arg("--loop=ext4").arg("--dir").arg(dir.path());
        let mut table = command.spawn().unwrap();
        let is_written = || -> bool {
            let mut directories = vec![dir.path().to_path_buf()];
            while let Some(directory) = directories.pop() {
                for entry in std::fs::read_dir(directory).unwrap().flatten() {
                    match entry.file_type() {
                        Ok(kind) if kind.is_dir() => directories.push(entry.path()),
                        _ if entry.file_name().to_string_lossy().ends_with("-filesystem") => {
                            return true;
                        }
                        _ => {}
                    }
                }
            }
            false
        };
        while !is_written() && table.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        interrupt(&table);
        let status = table.wait().unwrap();
        assert_eq!(status.signal(), Some(2), "{line}: {status}");
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert!(left.is_empty(), "{line}: {left:?}");
    }
}

#[test]
fn the_model_of_writers_tells_its_error() {
    let report = json(cowslip().args("bench writers --model --json".split(' ')));
    assert_eq!(report["fit"]["is-sketch"], true);
    let rows = report["rows"].as_array().unwrap();
    // The sizes of the mail that asked first: near what is possible, where its own rule is not.
    for writers in [4, 16, 64] {
        let over_perfect = |rule: &str| {
            let scene = format!("{writers} x 64 GiB, 15 TiB");
            let row = rows
                .iter()
                .find(|r| r["scene"] == scene.as_str() && r["rule"] == rule);
            row.unwrap_or_else(|| panic!("{scene} {rule}"))["over-perfect"]
                .as_f64()
                .unwrap()
        };
        assert!(over_perfect("ours") <= 1.5);
        assert!(over_perfect("seed: both") > 1.5);
    }
}

#[test]
fn peers_take_part_if_they_are_named() {
    let without = tiny_table("steady --requests=64 --depths=32 --cells=64K, --peers=none");
    let cell = "64K, filled, depth 32, reads";
    assert_eq!(contestants(&without, cell), ["cowslip", "raw written"]);
    if !peers_are_installed(&["qemu-img", "qemu-nbd"]) {
        return;
    }
    let with = tiny_table("discard --policies=sparse --cells=2M/64K --peers=qemu-nbd");
    let cell = "2M/64K, empty, depth 32";
    assert_eq!(contestants(&with, cell), ["cowslip sparse", "qemu-nbd"]);
    assert!(with["rows"][0]["times-qemu-img"].is_f64());
    for run in with["rows"][0]["runs"].as_array().unwrap() {
        assert!(run["times-qemu-img"].is_f64(), "{run}");
    }
}

#[test]
fn a_list_of_cells_measures_nothing() {
    let listed = run(cowslip().args("bench steady --list --depths=32 --cells=64K,".split(' ')));
    let expected = [
        "64K, filled, depth 32, reads",
        "64K, filled, depth 32, overwrites",
        "64K, trimmed, depth 32",
    ];
    assert_eq!(listed.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn requests_over_time_are_drawn_with_what_they_allocated() {
    let dir = scratch();
    // Enough for several steps of a tenth of a second, however fast the disk is.
    let table = run(cowslip()
        .args("bench preallocation --series --size=128M --requests=32000 --depths=4".split(' '))
        .args("--cells=off --peers=none --policies=auto --zero-methods=auto".split(' '))
        .args(["--repetitions=1", "--dir"])
        .arg(dir.path()));
    let drawn = |line: &&str| line.contains(" IOPS in 0.");
    let drawn: Vec<&str> = table.lines().filter(drawn).collect();
    assert!(!drawn.is_empty(), "{table}");
    // Lines that begin with the contestants' names are drawn for the image; a raw file has no
    // clusters.
    let ours = drawn.iter().find(|line| line.trim().starts_with("cowslip"));
    assert!(ours.unwrap().contains("% took a cluster"), "{table}");
    assert!(drawn[0].contains(['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']));
    let raw = drawn.iter().filter(|line| line.contains("raw"));
    assert!(raw.clone().all(|line| !line.contains("took")), "{table}");
}

#[test]
fn tables_refuse_what_they_cannot_do() {
    for (line, words) in [
        ("steady --depths=0", "expect numbers above 0"),
        (
            "flush --depths=8",
            "--depths: 'flush' has numbers of its own",
        ),
        ("fragmentation --depths=8", "--depths: 'fragmentation'"),
        ("discard --depths=8", "--depths: 'discard'"),
        ("compact --requests=8", "--requests: 'compact'"),
        ("flush --requests=0", "expect numbers above 0"),
        ("flush --size=x", "Invalid size specified: 'x'."),
        ("flush --policies=dense", "--policies expects auto"),
        ("flush --yardsticks=dd", "--yardsticks expects cowslip"),
        ("flush --loop=zfs", "--loop expects ext4, xfs"),
        ("flush --loop=ext4 --keep", "use --dir"),
        ("flush --cells=nothing", "No cell has a name"),
        ("flush --dir=/nonexistent", "/nonexistent"),
        ("flush --quick --size=1G", "cannot be used with"),
        ("writers --runs=0", "--runs expects a number above 0"),
        ("writers --size=1k", "Invalid size"),
        ("writers --cells=none-such", "No cell"),
        ("writers --loop=zfs", "--loop expects"),
        ("flush --conditions=seed", "has no source"),
        ("flush --peers=qemu-nbd", "--peers: 'qemu-nbd'"),
        ("discard --peers=none,qemu-nbd", "--peers: 'none'"),
        ("flush --series --json", "cannot be used with"),
        ("guest --accel=xen", "--accel expects kvm or tcg"),
        (
            "guest --kernel=/nonexistent",
            "Could not read '/nonexistent'",
        ),
        ("guest --kernel=/proc/version", "is not a kernel"),
        (
            "flush --conditions=mine",
            "--conditions expects own or seed",
        ),
    ] {
        let refused = outcome(cowslip().arg("bench").args(line.split_whitespace()));
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{line}: {text}");
        assert!(text.contains(words), "{line}: {text}");
    }
    // A file of a table's name is measured by its path.
    let dir = scratch();
    run(cowslip()
        .current_dir(dir.path())
        .args("create -q -f qcow2 flush 1M".split(' ')));
    for line in ["bench -c 8 ./flush", "qemu-img bench -c 8 flush"] {
        let report = run(cowslip().current_dir(dir.path()).args(line.split(' ')));
        assert!(report.starts_with("Sending 8 read requests"), "{report}");
    }
}
