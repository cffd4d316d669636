//! `check` and `map` against qemu-img: the same bytes on standard output, the same words on
//! standard error, the same exit code.
//!
//! Skips loudly where qemu-img and qemu-io are not installed.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::program;

/// A scratch directory with our binary under qemu-img's name.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Option<Bench> {
        for program in ["qemu-img", "qemu-io"] {
            if Command::new(program).arg("--version").output().is_err() {
                eprintln!("SKIPPED: {program} is not installed");
                return None;
            }
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        let ours = dir.path().join("bin/qemu-img");
        symlink(program(), ours).unwrap();
        Some(Bench { dir })
    }

    fn run(&self, program: impl AsRef<Path>, args: &[&str]) -> Output {
        Command::new(program.as_ref())
            .args(args)
            .current_dir(self.dir.path())
            .output()
            .unwrap()
    }

    /// Runs one of QEMU's tools, which must succeed.
    fn qemu(&self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let output = self.run(words[0], &words[1..]);
        assert!(output.status.success(), "{line}: {output:?}");
    }

    /// Makes an image and runs qemu-io commands on it.
    fn image(&self, name: &str, options: &str, commands: &[&str]) {
        self.qemu(&format!("qemu-img create -q -f qcow2 {options}").replace("NAME", name));
        for command in commands {
            let output = self.run("qemu-io", &["-f", "qcow2", "-c", command, name]);
            assert!(output.status.success(), "{command}: {output:?}");
        }
    }

    /// Writes all files back: what has no space yet may show as a hole, until it has.
    fn sync(&self) {
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::File::open(path).unwrap().sync_all().unwrap();
            }
        }
    }

    fn assert_same(&self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let theirs = self.run("qemu-img", &words);
        let ours = self.run(self.dir.path().join("bin/qemu-img"), &words);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}: stdout");
        assert_eq!(text(&ours.stderr), text(&theirs.stderr), "{line}: stderr");
        assert_eq!(
            ours.status.code(),
            theirs.status.code(),
            "{line}: exit code"
        );
    }

    /// The sound images of both tests.
    fn images(&self) -> [&'static str; 12] {
        let mut base = vec![0; 3 << 20];
        base[65536..131_072].fill(b'x');
        std::fs::write(self.dir.path().join("base.raw"), base).unwrap();
        self.image(
            "overlay",
            "-b base.raw -F raw NAME 4M",
            &["write 1M 64k", "write -z 1200k 128k"],
        );
        self.image(
            "top",
            "-b overlay -F qcow2 -o extended_l2=on NAME 4M",
            &["write 2M 4k", "write -z 2300k 8k"],
        );
        self.image("packed", "NAME 1M", &["write 0 64k", "write -c 64k 64k"]);
        self.image("empty", "NAME 0", &[]);
        self.image(
            "external",
            "-o data_file=data.raw NAME 1M",
            &["write 0 64k"],
        );
        self.image(
            "preallocated",
            "-o preallocation=metadata NAME 100M",
            &["write 128k 64k", "write 50M 100k", "write -z 60M 1M"],
        );
        self.image("zeroed", "NAME 1M", &["write 0 128k", "write -z 0 64k"]);
        self.image("odd", "NAME 100000", &["write 97k 512"]);
        self.image("old", "-o compat=0.10 NAME 8M", &["write 1M 3M"]);
        self.image("small", "-o cluster_size=512 NAME 8M", &["write 1M 30k"]);
        self.image(
            "subclusters",
            "-o extended_l2=on,cluster_size=2M NAME 100M",
            &[
                "write 1M 4k",
                "write 5M 4k",
                "write 30M 70k",
                "write -z 77M 64k",
            ],
        );
        self.image("many", "NAME 8M", &["write 1M 1M"]);
        self.qemu("qemu-img snapshot -c one many");
        [
            "overlay",
            "top",
            "packed",
            "empty",
            "external",
            "preallocated",
            "zeroed",
            "odd",
            "old",
            "small",
            "subclusters",
            "many",
        ]
    }
}

#[test]
fn check_prints_what_qemu_img_prints() {
    let Some(bench) = Bench::new() else { return };
    for name in bench.images() {
        bench.assert_same(&format!("check {name}"));
        bench.assert_same(&format!("check --output=json {name}"));
    }
    for line in [
        "check -f raw base.raw",
        "check base.raw",
        "check -T none overlay",
        "check -q overlay",
        "check -U overlay",
        "check --image-opts --output=json driver=qcow2,file.filename=top",
        "check",
        "check overlay top",
        "check -f nosuch overlay",
        "check -T nosuch overlay",
        "check --output=nosuch overlay",
        "check -r nosuch overlay",
        "check --image-opts -f qcow2 driver=qcow2,file.filename=top",
    ] {
        bench.assert_same(line);
    }
}

/// Changes a number of an image, in place.
fn patch(path: &Path, at: u64, change: impl FnOnce(u64) -> u64) {
    let mut bytes = std::fs::read(path).unwrap();
    let field = &mut bytes[at as usize..at as usize + 8];
    let value = u64::from_be_bytes((&*field).try_into().unwrap());
    field.copy_from_slice(&change(value).to_be_bytes());
    std::fs::write(path, bytes).unwrap();
}

fn word(path: &Path, at: u64) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap())
}

#[test]
fn check_of_a_broken_image_prints_what_qemu_img_prints() {
    let Some(bench) = Bench::new() else { return };
    let path = bench.dir.path().join("broken");
    type Change = fn(&Path);
    let cases: [Change; 5] = [
        |path| patch(path, word(path, 40), |entry| entry & !(1 << 63)),
        |path| {
            patch(path, word(path, word(path, 48)) + 8, |counts| {
                counts + 0x1_0000_0000
            })
        },
        |path| patch(path, word(path, word(path, 48)) + 8, |_| 0),
        |path| patch(path, word(path, 48), |entry| entry | 512),
        |path| patch(path, word(path, 48), |_| 1 << 40),
    ];
    for change in cases {
        bench.image("broken", "NAME 4M", &["write 0 256k"]);
        change(&path);
        for line in [
            "check broken",
            "check --output=json broken",
            "check -q broken",
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            let theirs = bench.run("qemu-img", &words);
            // One line of QEMU's is about its own state, not about the image.
            let their_errors: String = String::from_utf8_lossy(&theirs.stderr)
                .lines()
                .filter(|line| !line.starts_with("qcow2: Image is corrupt:"))
                .map(|line| format!("{line}\n"))
                .collect();
            let ours = bench.run(bench.dir.path().join("bin/qemu-img"), &words);
            assert_eq!(ours.stdout, theirs.stdout, "{line}");
            assert_eq!(
                String::from_utf8_lossy(&ours.stderr),
                their_errors,
                "{line}"
            );
            assert_eq!(ours.status.code(), theirs.status.code(), "{line}");
            assert_ne!(ours.status.code(), Some(0), "{line}");
        }
    }
}

/// Lines of QEMU's about its own state, not about the image.
fn without_own_state(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .lines()
        .filter(|line| !line.starts_with("qcow2: "))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Both programs report a repair that both can do in the same way: text, JSON, exit code.
#[test]
fn repair_prints_what_qemu_img_prints() {
    let Some(bench) = Bench::new() else { return };
    let path = bench.dir.path().join("broken");
    let copy = bench.dir.path().join("copy");
    type Change = fn(&Path);
    let cases: [Change; 7] = [
        |_| {},
        // COPIED missing from an L1 and from an L2 entry.
        |path| patch(path, word(path, 40), |entry| entry & !(1 << 63)),
        |path| {
            patch(path, word(path, word(path, 40)) & !(1 << 63), |entry| {
                entry & !(1 << 63)
            })
        },
        // Counts that are too high.
        |path| {
            patch(path, word(path, word(path, 48)) + 8, |counts| {
                counts + 0x1_0000_0000
            })
        },
        |path| {
            patch(path, word(path, word(path, 48)) + 16, |counts| {
                counts | 0x0001_0001
            })
        },
        // One data cluster twice.
        |path| {
            let table = word(path, word(path, 40)) & !(1 << 63);
            let first = word(path, table);
            patch(path, table + 8, |_| first);
        },
        // The dirty mark alone.
        |path| patch(path, 72, |bits| bits | 1),
    ];
    for (index, change) in cases.iter().enumerate() {
        bench.image("broken", "NAME 4M", &["write 0 256k"]);
        change(&path);
        for line in [
            "check -r all copy",
            "check -r all --output=json copy",
            "check -r leaks copy",
            "check -r leaks --output=json copy",
            "check -q -r all copy",
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            std::fs::copy(&path, &copy).unwrap();
            let theirs = bench.run("qemu-img", &words);
            let repaired = std::fs::read(&copy).unwrap();
            std::fs::copy(&path, &copy).unwrap();
            let ours = bench.run(bench.dir.path().join("bin/qemu-img"), &words);
            let case = format!("case {index}: {line}");
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{case}");
            // In another order: here counts fall after all else. QEMU reports the remaining ones
            // three times.
            let sorted = |printed: &str| {
                let mut lines: Vec<String> = printed.lines().map(String::from).collect();
                lines.sort();
                lines.dedup();
                lines
            };
            let theirs_told = without_own_state(&theirs.stderr);
            assert_eq!(sorted(&text(&ours.stderr)), sorted(&theirs_told), "{case}");
            assert_eq!(ours.status.code(), theirs.status.code(), "{case}");
            let mut image = std::fs::read(&copy).unwrap();
            if index == 5 {
                // The cluster that is freed: QEMU punches a hole there, here its bytes stay.
                let freed = 6 * 65536..7 * 65536;
                image[freed.clone()].copy_from_slice(&repaired[freed]);
            }
            assert!(image == repaired, "{case}: the images differ");
        }
    }
}

/// A plan says what, why and where, and changes nothing; not even the time of the last change.
#[test]
fn a_plan_and_a_repair_of_nothing_change_nothing() {
    let Some(bench) = Bench::new() else { return };
    bench.image("image", "NAME 4M", &["write 0 256k"]);
    let path = bench.dir.path().join("image");
    let ours = bench.dir.path().join("bin/qemu-img");
    let changed = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
    let before = changed(&path);
    let repair = bench.run(&ours, &["check", "-r", "all", "image"]);
    assert_eq!(repair.status.code(), Some(0), "{repair:?}");
    let plan = bench.run(&ours, &["check", "--plan", "image"]);
    assert_eq!(plan.status.code(), Some(0), "{plan:?}");
    assert_eq!(plan.stdout, b"There is nothing to repair.\n");
    assert_eq!(changed(&path), before);

    // An L2 entry beyond the end, and its cluster leaked.
    let table = word(&path, word(&path, 40)) & !(1 << 63);
    patch(&path, table, |_| 1 << 63 | 1 << 40);
    let before = (changed(&path), std::fs::read(&path).unwrap());
    let plan = bench.run(&ours, &["check", "--plan", "--output=json", "image"]);
    assert_eq!(plan.status.code(), Some(2), "{plan:?}");
    let steps: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    let steps = steps.as_array().unwrap();
    assert_eq!(steps.len(), 2, "{steps:?}");
    for step in steps {
        assert!(
            step["what"].is_string() && step["why"].is_string(),
            "{step}"
        );
    }
    assert_eq!(steps[0]["where"]["offset"], table);
    let loss = |step: usize| &steps[step]["possible-data-loss"];
    assert!(loss(0).is_string() && loss(1).is_null());
    assert_eq!(steps[1]["where"]["length"], 2, "refcounts of 16 bits");
    let human = bench.run(&ours, &["check", "--plan", "-r", "all", "image"]);
    let text = String::from_utf8_lossy(&human.stdout).into_owned();
    assert!(
        text.contains("because: L2 entry: a data cluster beyond"),
        "{text}"
    );
    assert!(text.contains("may lose: "), "{text}");
    assert!((changed(&path), std::fs::read(&path).unwrap()) == before);
}

/// Our leak repair refuses the same images as QEMU's, in the same way.
#[test]
fn leaks_alone_are_not_repaired_where_the_refcounts_are_lost() {
    let Some(bench) = Bench::new() else { return };
    bench.image("image", "NAME 4M", &["write 0 256k"]);
    let path = bench.dir.path().join("image");
    patch(&path, word(&path, 48), |_| 0);
    let before = std::fs::read(&path).unwrap();
    let ours = bench.dir.path().join("bin/qemu-img");
    let output = bench.run(ours, &["check", "-r", "leaks", "image"]);
    assert_eq!(output.status.code(), Some(1));
    let theirs = bench.run("qemu-img", &["check", "-r", "leaks", "image"]);
    assert_eq!(theirs.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("check -r all repairs it"), "{text}");
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn map_prints_what_qemu_img_prints() {
    let Some(bench) = Bench::new() else { return };
    let images = bench.images();
    bench.sync();
    for name in images {
        bench.assert_same(&format!("map {name}"));
        bench.assert_same(&format!("map --output=json {name}"));
    }
    for line in [
        "map -f raw base.raw",
        "map -f raw --output=json base.raw",
        "map --output=json --start-offset=1100k --max-length=100k overlay",
        "map --output=json --start-offset=1100001 --max-length=3 overlay",
        "map --output=json --start-offset=8M overlay",
        "map --start-offset=8M overlay",
        "map --max-length=0 --output=json overlay",
        "map --max-length=0 overlay",
        "map -U overlay",
        "map --start-offset=foo overlay",
        "map --start-offset=-5 overlay",
        "map --start-offset=1.5 overlay",
        "map --start-offset=99999999999999999999 overlay",
        "map --max-length=-1 overlay",
        "map --output=nosuch overlay",
        "map -f nosuch overlay",
        "map --image-opts driver=qcow2,file.filename=top",
        "map --image-opts -f qcow2 driver=qcow2,file.filename=top",
        "map",
        "map overlay top",
    ] {
        bench.assert_same(line);
    }
    let absolute = bench.dir.path().join("top");
    bench.assert_same(&format!("map {}", absolute.display()));
}
