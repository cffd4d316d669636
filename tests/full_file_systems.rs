//! Durable writes on file systems that are full, where overwriting takes space: a write that finds
//! none fails, and the image goes on.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::mounted::Mounted;
use crate::support::{cowslip, peers_are_installed, run};

const MIB: u64 = 1 << 20;

/// Takes all free space.
fn fill_up(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("filler");
    let mut filler = std::fs::File::create(&path).unwrap();
    for bytes in [MIB as usize, 4096] {
        let bytes = vec![1; bytes];
        while filler.write_all(&bytes).is_ok() {}
        // What the page cache has taken and the file system has no space for.
        drop(filler.sync_all());
    }
    path
}

/// A shell with an image whose commands are answered one by one.
struct Shell {
    process: std::process::Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Shell {
    fn open(dir: &Path, image: &[&str]) -> Shell {
        let mut command = cowslip();
        let command = command.current_dir(dir).arg("io").args(image);
        let process = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = process.stderr(Stdio::inherit()).spawn().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Shell { process, answers }
    }

    /// The first line that a command prints.
    fn answer(&mut self, line: &str) -> String {
        let input = self.process.stdin.as_mut().unwrap();
        writeln!(input, "{line}").unwrap();
        // One more command, whose answer ends that of the first.
        writeln!(input, "length").unwrap();
        let mut first = None;
        loop {
            let mut answer = String::new();
            assert!(self.answers.read_line(&mut answer).unwrap() > 0, "{line}");
            let answer = answer.trim_start_matches("cowslip io> ").trim_end();
            if answer == "8 MiB" {
                return first.unwrap_or_default();
            }
            first.get_or_insert(answer.to_string());
        }
    }

    fn end(mut self) {
        drop(self.process.stdin.take());
        // A command has failed.
        assert_eq!(self.process.wait().unwrap().code(), Some(1));
    }
}

#[test]
fn overwrites_that_take_space_fail_alone() {
    let systems: [(&[&str], u64); 2] = [
        (&["mkfs.xfs", "-q", "-m", "reflink=1"], 320 * MIB),
        (&["mkfs.btrfs", "-q", "--mixed"], 256 * MIB),
    ];
    for (format, bytes) in systems {
        if !peers_are_installed(&[format[0], "qemu-img"]) {
            continue;
        }
        let Some(mounted) = Mounted::of_size(format, bytes) else {
            return;
        };
        let dir = mounted.at.as_path();
        for (image, options) in [("a.qcow2", &["-f", "qcow2"]), ("a.raw", &["-f", "raw"])] {
            let kind = options[1];
            run(cowslip()
                .current_dir(dir)
                .args(["create", "-q"])
                .args(options)
                .args([image, "8M"]));
            let write = ["io", "-c", "write -P 1 0 8M", "-c", "flush"];
            run(cowslip()
                .current_dir(dir)
                .args(write)
                .args(options)
                .arg(image));
            run(Command::new("cp")
                .current_dir(dir)
                .args(["--reflink=always", image, "copy"]));
            let filler = fill_up(dir);
            let what = format!("{} {kind}", format[0]);
            let mut shell = Shell::open(dir, &[options[0], options[1], image]);
            let failed = shell.answer("write -f -P 2 1M 4M");
            assert_eq!(failed, "write failed: No space left on device", "{what}");
            std::fs::remove_file(&filler).unwrap();
            run(Command::new("sync").arg("-f").arg(dir));
            let written = shell.answer("write -f -P 3 1M 4M");
            assert!(
                written.starts_with("wrote 4194304/4194304 bytes"),
                "{what}: {written}"
            );
            shell.end();
            let read = [
                "io",
                "-c",
                "read -P 1 0 1M",
                "-c",
                "read -P 3 1M 4M",
                "-c",
                "read -P 1 5M 3M",
            ];
            run(cowslip()
                .current_dir(dir)
                .args(read)
                .args(options)
                .arg(image));
            if kind == "qcow2" {
                run(Command::new("qemu-img")
                    .current_dir(dir)
                    .args(["check", "-q", image]));
            }
            std::fs::remove_file(dir.join("copy")).unwrap();
            run(Command::new("sync").arg("-f").arg(dir));
        }
    }
}
