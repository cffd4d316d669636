//! `bench FILE` beside qemu-img's: the same words and exit codes for the same command lines.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::{Command, Output};

use support::{cowslip, outcome, peers_are_installed, qemu_img, run, scratch};

mod support;

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

/// What was printed, with the seconds left out.
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
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    let dir = scratch();
    qemu_img(
        &["create", "-q", "-f", "qcow2"],
        &[&dir.path().join("a.qcow2"), Path::new("16M")],
    );
    std::fs::write(dir.path().join("r.raw"), vec![1; 1_000_448]).unwrap();
    let mut failures = String::new();
    for line in LINES.lines().filter(|line| !line.is_empty()) {
        let mut theirs = Command::new("qemu-img");
        theirs.arg("bench");
        let expected = bench(theirs, dir.path(), line);
        for name in ["qemu-img", "cowslip"] {
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
    run(cowslip()
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg("4M"));
    // 1024 blocks at a step that is coprime to them: each once.
    let told = run(cowslip()
        .args("bench --json -w -c 1024 -d 8 -S 1564672 --pattern 7".split(' '))
        .args(["--flush-interval", "16"])
        .arg(&image));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["requests"], 1024);
    assert_eq!(told["flushes"], 64);
    let series = told["series"].as_array().unwrap();
    let ended: u64 = series.iter().map(|step| step.as_u64().unwrap()).sum();
    assert_eq!(ended, 1024);
    assert!(told["latency-us"]["p50"].as_f64() <= told["latency-us"]["p99.9"].as_f64());
    run(cowslip().args(["io", "-c", "read -P 7 0 4M"]).arg(&image));
    run(cowslip()
        .args("bench --json -w -c 1024 --random 3 --pattern 9".split(' '))
        .arg(&image));
    run(cowslip().args(["io", "-c", "read -P 9 0 4M"]).arg(&image));
    run(cowslip().arg("check").arg(&image));
}
