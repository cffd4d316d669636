//! Preallocation as a job: interrupted it leaves nothing behind, it keeps its pace, reports how far
//! it is, and refuses what does not fit before it begins.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{cowslip, outcome, run, scratch, succeeds, wait_for_lock};

const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

fn start(dir: &Path, line: &str) -> Child {
    cowslip()
        .current_dir(dir)
        .args(line.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn used_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |stat| stat.blocks() * 512)
}

/// Waits until the file has so much space, then sends a signal.
fn signalled(child: Child, (path, at_least): (&Path, u64), signal: &str) -> Output {
    let begun = Instant::now();
    while used_bytes(path) < at_least {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it does not get far"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    run(Command::new("kill").args(["-s", signal, &child.id().to_string()]));
    child.wait_with_output().unwrap()
}

#[test]
fn an_interrupted_create_leaves_no_file() {
    for format in ["qcow2", "raw"] {
        let dir = scratch();
        let path = dir.path().join("x");
        let line = format!("create -f {format} -o preallocation=full --rate-limit 20M x 2G");
        let child = start(dir.path(), &line);
        let output = signalled(child, (&path, 4096), "INT");
        assert_eq!(output.status.signal(), Some(SIGINT), "{output:?}");
        assert!(!path.exists());
    }
}

#[test]
fn an_interrupted_resize_gives_back_what_it_took_and_can_be_repeated() {
    for format in ["qcow2", "raw"] {
        let dir = scratch();
        let path = dir.path().join("x");
        succeeds(dir.path(), &format!("create -q -f {format} x 64M"));
        let before = (used_bytes(&path), std::fs::metadata(&path).unwrap().len());
        let resize = format!("resize -f {format} --preallocation full x 164M");
        // It allocates first, then it writes at its pace.
        for (signal, number) in [("TERM", SIGTERM), ("INT", SIGINT), ("KILL", SIGKILL)] {
            let child = start(dir.path(), &format!("{resize} --rate-limit 10M"));
            let output = signalled(child, (&path, 64 << 20), signal);
            assert_eq!(output.status.signal(), Some(number), "{output:?}");
            if number == SIGKILL {
                break;
            }
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(text.contains("keeps its old size"), "{text}");
            let len = std::fs::metadata(&path).unwrap().len();
            assert!(len <= before.1 + (1 << 20), "{format}: {len}");
            assert!(used_bytes(&path) <= before.0 + (1 << 20), "{format}");
        }
        if format == "qcow2" {
            wait_for_lock(dir.path(), "x");
            let info = succeeds(dir.path(), "info --output=json x");
            assert!(
                info.contains(&format!("\"virtual-size\": {}", 64 << 20)),
                "{info}"
            );
            succeeds(dir.path(), "check x");
            succeeds(dir.path(), &resize);
            succeeds(dir.path(), "check x");
            let len = std::fs::metadata(&path).unwrap().len();
            assert!(
                len < 240 << 20,
                "what the killed one left was not used: {len}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_done() {
    let dir = scratch();
    let path = dir.path().join("x");
    for format in ["qcow2", "raw"] {
        for how in ["falloc", "full"] {
            let line = format!("create -q -f {format} -o preallocation={how} x 2T");
            let output = outcome(cowslip().current_dir(&dir).args(line.split_whitespace()));
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                text.contains("bytes are needed, its file system has"),
                "{text}"
            );
            assert!(text.contains("No space left on device"), "{text}");
            assert!(!path.exists());
        }
        succeeds(dir.path(), &format!("create -q -f {format} y 1M"));
        let before = std::fs::metadata(dir.path().join("y")).unwrap().len();
        let line = format!("resize -f {format} --preallocation=falloc y 2T");
        let output = outcome(cowslip().current_dir(&dir).args(line.split_whitespace()));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            text.contains("bytes are needed, its file system has"),
            "{text}"
        );
        let after = std::fs::metadata(dir.path().join("y")).unwrap().len();
        assert!(after <= before + (1 << 20), "{format}: {after}");
    }
}

#[test]
fn progress_is_told_for_people_for_programs_and_on_a_signal() {
    let dir = scratch();
    let said = succeeds(
        dir.path(),
        "create -q -p -f qcow2 -o preallocation=full x 32M",
    );
    assert!(
        said.starts_with("    (") && said.ends_with("    (100.00/100%)\r\n"),
        "{said:?}"
    );
    let output = outcome(
        cowslip()
            .current_dir(&dir)
            .args("resize --progress=json --preallocation=full x 64M".split_whitespace()),
    );
    let lines = String::from_utf8(output.stderr).unwrap();
    let last: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(last["done"], last["total"]);
    assert_eq!(last["stage"], "tables");

    let line = "create -q -f raw -o preallocation=full --rate-limit 8M y 32M";
    let begun = Instant::now();
    let child = start(dir.path(), line);
    let path = dir.path().join("y");
    while used_bytes(&path) == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Earlier nothing is predicted.
    std::thread::sleep(Duration::from_millis(2300).saturating_sub(begun.elapsed()));
    run(Command::new("kill").args(["-s", "USR1", &child.id().to_string()]));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.starts_with("    (") && text.contains("/100%)  ") && text.ends_with(" s left\n"),
        "{text:?}"
    );
    // 32 MiB at 8 MiB a second, but for the first pieces.
    assert!(
        begun.elapsed() > Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
}
