//! `convert` beside qemu-img's: the same words, exit codes and disks; maps that are equal where
//! clusters decide; and what is ours alone: interrupted, cancelled and refused conversions.
//!
//! Deliberate differences: a target whose conversion has failed does not stay; a source that is its
//! own target is refused also where no lock says so; a device or a name behind a protocol has our
//! words.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::golden::{self, copy_files, mapped, said, words};
use crate::support::rng::Rng;
use crate::support::{
    cowslip, eventually, outcome, peers_are_installed, qemu_img, run, scratch, scratch_beside,
    succeeds,
};

/// Command lines of `convert`, run one after the other on the same files.
const LINES: &str = "

a.raw
-O foo a.raw x
-f foo a.raw x
nosuch x
-O qcow2 a.raw /nosuch/x
-c a.raw x.raw
-C -c -O qcow2 a.raw x.qcow2
-C -S 4k a.raw x.raw
-S 0 -C a.raw x.raw
--salvage -C a.raw x.raw
-n -O raw a.raw nosuch.raw
-n -O qcow2 a.raw small.qcow2
-n -o cluster_size=4k -O qcow2 a.raw big.qcow2
--target-is-zero -O qcow2 a.raw big.qcow2
-B base.qcow2 -O qcow2 a.raw x.qcow2
-B base.qcow2 -F qcow2 -O raw a.raw x.raw
-F qcow2 -O qcow2 a.raw x.qcow2
-O qcow2 -o backing_file=base.qcow2 a.raw x.qcow2
-m 0 a.raw x
-m 17 a.raw x
-m abc a.raw x
-S 1 a.raw x
-S 1000 a.raw x
-S abc a.raw x
-S 1T a.raw x
-S 16777728 a.raw x
-r abc a.raw x
-r 12x a.raw x
-t foo a.raw x
-T foo a.raw x
--skip-broken-bitmaps a.raw x
--source-image-opts -f raw a.raw x
--image-opts -f raw a.raw x
--target-image-opts a.raw driver=raw,file.filename=x.raw
-n --target-image-opts -O raw a.raw driver=raw,file.filename=x.raw
-o help -O qcow2 a.raw x
-o help -O qcow2
-o help
-o bla=1 -O qcow2 a.raw x
-o cluster_size=3 -O qcow2 a.raw x
-O raw -o preallocation=metadata a.raw x
a.raw a.raw
-O qcow2 base.qcow2 base.qcow2
-q -p -O qcow2 a.raw p.qcow2
-6 a.raw x
-b base.qcow2 a.raw x
. x
a.raw .
a.raw foo:bar
";

/// Command lines that succeed: what they write, and what they ask.
const MADE: &[(&str, &str)] = &[
    ("a.raw", "-O qcow2 a.raw"),
    ("a.raw", "-O raw a.raw"),
    ("odd.raw", "-O qcow2 odd.raw"),
    ("odd.raw", "-O raw odd.raw"),
    ("src.qcow2", "-O raw src.qcow2"),
    ("src.qcow2", "-O qcow2 src.qcow2"),
    (
        "src.qcow2",
        "-f qcow2 -O qcow2 -o cluster_size=4k src.qcow2",
    ),
    ("src.qcow2", "-O qcow2 -o cluster_size=2M src.qcow2"),
    ("src.qcow2", "-O qcow2 -o cluster_size=512 src.qcow2"),
    ("src.qcow2", "-O qcow2 -o extended_l2=on src.qcow2"),
    ("src.qcow2", "-O qcow2 -o compat=0.10 src.qcow2"),
    ("src.qcow2", "-O qcow2 -o refcount_bits=1 src.qcow2"),
    ("ext.qcow2", "-O qcow2 ext.qcow2"),
    (
        "ext.qcow2",
        "-O qcow2 -o extended_l2=on,cluster_size=16k ext.qcow2",
    ),
    ("a.raw", "-c -O qcow2 a.raw"),
    ("a.raw", "-c -O qcow2 -o compression_type=zstd a.raw"),
    ("a.raw", "-c -O qcow2 -o cluster_size=4k a.raw"),
    (
        "a.raw",
        "-c -O qcow2 -o cluster_size=2M,compression_type=zstd a.raw",
    ),
    ("odd.raw", "-c -O qcow2 odd.raw"),
    ("src.qcow2", "-W -m 16 -c -O qcow2 src.qcow2"),
    ("src.qcow2", "-c -O qcow2 -o extended_l2=on src.qcow2"),
    ("zlib.qcow2", "-O raw zlib.qcow2"),
    (
        "zlib.qcow2",
        "-c -O qcow2 -o compression_type=zstd zlib.qcow2",
    ),
    ("zstd.qcow2", "-O qcow2 zstd.qcow2"),
    ("zstd.qcow2", "-m 1 -O raw zstd.qcow2"),
    ("a.raw", "-S 0 -O raw a.raw"),
    ("a.raw", "-S 0 -O qcow2 a.raw"),
    ("a.raw", "-S 0 -c -O qcow2 a.raw"),
    ("a.raw", "-S 64k -O raw a.raw"),
    ("a.raw", "-S 64k -O qcow2 a.raw"),
    ("a.raw", "-S 1M -O raw a.raw"),
    ("a.raw", "-S 512 -O qcow2 -o cluster_size=512 a.raw"),
    ("a.raw", "-O raw -o preallocation=falloc a.raw"),
    ("a.raw", "-O raw -o preallocation=full a.raw"),
    ("a.raw", "-O qcow2 -o preallocation=metadata a.raw"),
    ("a.raw", "-O qcow2 -o preallocation=falloc a.raw"),
    ("a.raw", "-O qcow2 -o preallocation=full a.raw"),
    ("chain4.qcow2", "-O raw chain4.qcow2"),
    ("chain4.qcow2", "-O qcow2 chain4.qcow2"),
    ("chain4.qcow2", "-c -O qcow2 chain4.qcow2"),
    (
        "chain4.qcow2",
        "-B chain3.qcow2 -F qcow2 -O qcow2 chain4.qcow2",
    ),
    (
        "chain4.qcow2",
        "-B chain3.qcow2 -F qcow2 -S 0 -O qcow2 chain4.qcow2",
    ),
    (
        "chain4.qcow2",
        "-B chain3.qcow2 -F qcow2 -c -O qcow2 chain4.qcow2",
    ),
    (
        "chain4.qcow2",
        "-B chain3.qcow2 -F qcow2 -O qcow2 -o extended_l2=on chain4.qcow2",
    ),
    (
        "chain4.qcow2",
        "-O qcow2 -o backing_file=chain3.qcow2,backing_fmt=qcow2 chain4.qcow2",
    ),
    ("a.raw", "-C -O raw a.raw"),
    ("src.qcow2", "-C -O raw src.qcow2"),
    ("src.qcow2", "-C -O qcow2 src.qcow2"),
    ("chain4.qcow2", "-C -O raw chain4.qcow2"),
    ("a.raw", "-t none -T none -O raw a.raw"),
    ("odd.raw", "-t none -T none -O qcow2 odd.raw"),
    ("src.qcow2", "-t directsync -T directsync -O raw src.qcow2"),
    ("a.raw", "-t writethrough -O qcow2 a.raw"),
    ("a.raw", "-r 100M -O qcow2 a.raw"),
    ("a.raw", "-U -O qcow2 a.raw"),
    (
        "a.raw",
        "--image-opts -O qcow2 driver=raw,file.filename=a.raw",
    ),
    ("data.qcow2", "-O raw data.qcow2"),
    ("a.raw", "-O qcow2 -o data_file=DATA a.raw"),
    ("a.raw", "-O qcow2 -o data_file=DATA,data_file_raw=on a.raw"),
    ("a.raw", "-O qcow2 -o size=1k a.raw"),
];

/// Sources of all kinds, made by QEMU's programs.
fn prepare(dir: &Path) {
    let qemu = |line: &str| {
        drop(run(Command::new("qemu-img")
            .current_dir(dir)
            .args(words(line))))
    };
    let io = |name: &str, commands: &[String]| {
        let mut io = Command::new("qemu-io");
        io.current_dir(dir).args(["-t", "unsafe"]);
        for command in commands {
            io.args(["-c", command]);
        }
        run(io.arg(name));
    };
    raw_source(dir);
    std::fs::write(dir.join("odd.raw"), [7; 70_001]).unwrap();
    qemu("create -q -f qcow2 base.qcow2 1M");
    qemu("create -q -f qcow2 big.qcow2 6M");
    qemu("create -q -f qcow2 small.qcow2 512k");
    qemu("create -q -f qcow2 src.qcow2 5000000");
    let mut rng = Rng::new(4);
    let writes = |rng: &mut Rng, disk: u64| -> Vec<String> {
        let one = |_| {
            let (at, len) = (rng.below(disk - 66_000), 1 + rng.below(65_000));
            match rng.below(6) {
                0 => format!("write -z {at} {len}"),
                1 => format!("write -P 0 {at} {len}"),
                pattern => format!("write -P {pattern} {at} {len}"),
            }
        };
        (0..12).map(one).collect()
    };
    io("src.qcow2", &writes(&mut rng, 5_000_000));
    qemu("create -q -f qcow2 -o extended_l2=on ext.qcow2 3M");
    io("ext.qcow2", &writes(&mut rng, 3 << 20));
    qemu("convert -c -O qcow2 a.raw zlib.qcow2");
    qemu("convert -c -O qcow2 -o compression_type=zstd a.raw zstd.qcow2");
    qemu("create -q -f qcow2 -o data_file=data.raw data.qcow2 2M");
    io("data.qcow2", &writes(&mut rng, 2 << 20));
    qemu("create -q -f qcow2 chain0.qcow2 2M");
    io("chain0.qcow2", &writes(&mut rng, 2 << 20));
    for layer in 1..5 {
        // Longer, shorter, and longer again.
        let size = [0, 3_000_000, 1 << 20, 4 << 20, 4 << 20][layer];
        let below = layer - 1;
        qemu(&format!(
            "create -q -f qcow2 -b chain{below}.qcow2 -F qcow2 chain{layer}.qcow2 {size}"
        ));
        let name = format!("chain{layer}.qcow2");
        io(&name, &writes(&mut rng, size.min(1 << 20)));
    }
}

/// 5 MiB: noise, text, zeroes that have their space, holes, and single blocks of data.
fn raw_source(dir: &Path) {
    let file = std::fs::File::create(dir.join("a.raw")).unwrap();
    file.set_len(5 << 20).unwrap();
    let mut rng = Rng::new(9);
    let mut noise = |len: usize| -> Vec<u8> { (0..len).map(|_| rng.below(256) as u8).collect() };
    let text: Vec<u8> = (0..400_000_u32).map(|i| (i / 700) as u8).collect();
    file.write_all_at(&noise(200_000), 0).unwrap();
    file.write_all_at(&text, 300_000).unwrap();
    file.write_all_at(&[0; 200_000], 900_000).unwrap();
    for block in 0..40 {
        file.write_all_at(&noise(4096), (2 << 20) + block * 12_288)
            .unwrap();
    }
    file.write_all_at(&[1], (5 << 20) - 1).unwrap();
}

#[test]
fn convert_says_what_qemu_img_says() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    prepare(here.path());
    copy_files(here.path(), there.path());
    let mut failures = String::new();
    for line in golden::lines(LINES) {
        let printed = |mut program: Command, dir: &Path| {
            said(&outcome(
                program.current_dir(dir).arg("convert").args(words(line)),
            ))
        };
        let ours = printed(golden::ours(), here.path());
        let theirs = printed(Command::new("qemu-img"), there.path());
        if ours != theirs {
            failures += &format!("convert {line}\n--- expected\n{theirs}--- actual\n{ours}");
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

fn info(dir: &Path, name: &str) -> serde_json::Value {
    let line = ["info", "--output=json", name];
    let info = run(Command::new("qemu-img").current_dir(dir).args(line));
    let mut info: serde_json::Value = serde_json::from_str(&info).unwrap();
    for key in ["actual-size", "children", "filename"] {
        info.as_object_mut().unwrap().remove(key);
    }
    info
}

#[test]
fn what_convert_makes_is_what_qemu_img_makes() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare(dir);
    for (source, line) in MADE {
        let format = if line.contains("-O raw") {
            "raw"
        } else {
            "qcow2"
        };
        let convert = |mut program: Command, target: &str| {
            let line = line.replace("DATA", &format!("{target}.data"));
            run(program
                .current_dir(dir)
                .arg("convert")
                .args(words(&line))
                .arg(target));
        };
        convert(cowslip(), "ours");
        convert(Command::new("qemu-img"), "theirs");
        let compare = ["compare", "-F", format, source, "ours"];
        let compared = outcome(Command::new("qemu-img").current_dir(dir).args(compare));
        let warned = said(&compared);
        // A raw file that ends within a sector is as long as its sectors.
        assert!(compared.status.success(), "{line}: {warned}");
        let (ours, mut theirs) = (info(dir, "ours"), info(dir, "theirs"));
        if let Some(data) = theirs.pointer_mut("/format-specific/data/data-file") {
            *data = "ours.data".into();
        }
        assert_eq!(ours, theirs, "{line}");
        if format == "qcow2" {
            let check = ["check", "ours"];
            let checked = run(Command::new("qemu-img").current_dir(dir).args(check));
            assert!(checked.starts_with("No errors"), "{line}: {checked}");
            // Of a large cluster that is written in part the rest stays a hole; what is written of
            // one that has its space is whole.
            let by_bytes = line.contains("2M") || line.contains("preallocation");
            let keys = match by_bytes {
                true => &["present", "data"][..],
                false => &["present", "zero", "data"],
            };
            // The programs may differ in the subclusters of a cluster that they write, and in the
            // clusters of a data file that count as written.
            if !line.contains("extended") && !line.contains("DATA") {
                assert_eq!(
                    mapped(dir, "ours", keys),
                    mapped(dir, "theirs", keys),
                    "{line}"
                );
            }
        } else if line.ends_with("a.raw") && !line.contains("falloc") {
            // Space that is only allocated counts as data once it was read, as it was for the
            // comparison.
            assert_eq!(
                mapped(dir, "ours", &["zero"]),
                mapped(dir, "theirs", &["zero"]),
                "{line}"
            );
        }
        if line.contains("-c ") {
            let len = |name: &str| std::fs::metadata(dir.join(name)).unwrap().len();
            let (ours, theirs) = (len("ours"), len("theirs"));
            let cluster = if line.contains("2M") {
                2 << 20
            } else {
                64 << 10
            };
            // Another library packs a little differently, and the last cluster is not cut.
            assert!(
                ours <= theirs + theirs / 20 + cluster,
                "{line}: {ours} for {theirs}"
            );
        }
        for target in ["ours", "theirs"] {
            std::fs::remove_file(dir.join(target)).unwrap();
        }
    }
}

#[test]
fn existing_targets_are_written_in_place() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare(dir);
    let upper_layer = "-n -B chain3.qcow2 -O qcow2 chain4.qcow2";
    // The target's format, words of its creation, and what is asked.
    let cases = [
        ("raw", "T 5M", "-n -O raw a.raw"),
        ("raw", "T 8M", "-n -O raw a.raw"),
        ("qcow2", "T 5M", "-n -O qcow2 a.raw"),
        ("qcow2", "T 5M", "-n --target-is-zero -O qcow2 a.raw"),
        ("qcow2", "T 5M", "-n -S 0 -O qcow2 a.raw"),
        ("qcow2", "-b big.qcow2 -F qcow2 T 5M", "-n -O qcow2 a.raw"),
        ("qcow2", "-b chain3.qcow2 -F qcow2 T 4M", upper_layer),
        ("qcow2", "-o extended_l2=on T 5M", "-n -c -O qcow2 a.raw"),
    ];
    for (format, create, line) in cases {
        let source = words(line).last().copied().unwrap();
        for (target, program) in [("ours", cowslip()), ("theirs", Command::new("qemu-img"))] {
            let create =
                format!("create -q -f {format} {create}").replace(" T ", &format!(" {target} "));
            run(Command::new("qemu-img")
                .current_dir(dir)
                .args(words(&create)));
            if !line.contains("is-zero") && !line.contains("-B") && !line.contains("-c") {
                // The old content must disappear.
                let write = ["-f", format, "-c", "write -P 77 1000000 2000000", target];
                run(Command::new("qemu-io").current_dir(dir).args(write));
            }
            let mut program = program;
            run(program
                .current_dir(dir)
                .arg("convert")
                .args(words(line))
                .arg(target));
            let compare = ["compare", "-F", format, source, target];
            let compared = run(Command::new("qemu-img").current_dir(dir).args(compare));
            assert!(
                compared.contains("identical"),
                "{target}: {line}: {compared}"
            );
            if format == "qcow2" {
                run(Command::new("qemu-img")
                    .current_dir(dir)
                    .args(["check", target]));
            }
        }
        let len = |name: &str| std::fs::metadata(dir.join(name)).unwrap().len();
        if format == "raw" {
            assert_eq!(len("ours"), len("theirs"), "{line}");
        }
    }
}

#[test]
fn several_sources_are_joined_sector_by_sector() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare(dir.path());
    for format in ["raw", "qcow2"] {
        for (program, target) in [(cowslip(), "ours"), (Command::new("qemu-img"), "theirs")] {
            let mut program = program;
            let line = [
                "convert", "-O", format, "odd.raw", "a.raw", "odd.raw", "a.raw", target,
            ];
            run(program.current_dir(&dir).args(line));
        }
        let line = [
            "compare", "-s", "-f", format, "-F", format, "ours", "theirs",
        ];
        run(Command::new("qemu-img").current_dir(&dir).args(line));
    }
}

#[test]
fn a_huge_sparse_disk_is_converted_in_no_time_and_no_space() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    let file = std::fs::File::create(dir.path().join("a.raw")).unwrap();
    file.set_len(1 << 40).unwrap();
    for part in 0..16 {
        file.write_all_at(&[part as u8 + 1; 100_000], part << 36)
            .unwrap();
    }
    for (from, to, format) in [("a.raw", "b.qcow2", "qcow2"), ("b.qcow2", "c.raw", "raw")] {
        run(cowslip()
            .current_dir(&dir)
            .args(["convert", "-O", format, from, to]));
        let blocks = std::fs::metadata(dir.path().join(to)).unwrap().blocks();
        assert!(blocks * 512 < 24 << 20, "{to} takes {blocks} blocks");
    }
    let line = ["compare", "-f", "raw", "-F", "raw", "a.raw", "c.raw"];
    run(Command::new("qemu-img").current_dir(&dir).args(line));
}

/// Garbles the compressed cluster of a guest's offset.
fn garble(dir: &Path, name: &str) {
    let path = dir.join(name);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    // The packed clusters lie behind five of metadata.
    file.write_all_at(&[0xff; 30_000], 400_000).unwrap();
}

#[test]
fn what_cannot_be_read_is_salvaged_or_told() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    // Noise of five bits a byte: it packs to about two thirds, so all clusters are compressed.
    let mut rng = Rng::new(1);
    let noise: Vec<u8> = (0..1 << 20).map(|_| rng.below(32) as u8).collect();
    std::fs::write(dir.join("noise.raw"), noise).unwrap();
    qemu_img(
        &["convert", "-c", "-O", "qcow2"],
        &[&dir.join("noise.raw"), &dir.join("base.qcow2")],
    );
    garble(dir, "base.qcow2");
    let create = "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2";
    run(Command::new("qemu-img")
        .current_dir(dir)
        .args(words(create)));
    let write = ["-c", "write -P 5 0 100k", "top.qcow2"];
    run(Command::new("qemu-io").current_dir(dir).args(write));
    let both = |line: &str, ours: &str, theirs: &str| {
        let printed = |mut program: Command, target: &str| {
            said(&outcome(
                program.current_dir(dir).args(words(line)).arg(target),
            ))
        };
        (
            printed(golden::ours(), ours),
            printed(Command::new("qemu-img"), theirs),
        )
    };
    let (ours, theirs) = both("convert -O raw --salvage top.qcow2", "ours", "theirs");
    assert_eq!(ours, theirs);
    assert!(ours.contains("warning: error while reading"), "{ours}");
    qemu_img(
        &["compare", "-s", "-f", "raw", "-F", "raw"],
        &[&dir.join("ours"), &dir.join("theirs")],
    );
    let (ours, theirs) = both("convert -q -O qcow2 --salvage top.qcow2", "quiet", "quiet2");
    assert_eq!(
        (ours.as_str(), theirs.as_str()),
        ("[exit status: 0]\n", "[exit status: 0]\n")
    );
    let refused = outcome(
        cowslip()
            .current_dir(dir)
            .args(words("convert -O raw top.qcow2 bad")),
    );
    let printed = said(&refused);
    assert!(
        printed.contains("error while reading at byte") && printed.contains("garbled"),
        "{printed}"
    );
    assert!(!dir.join("bad").exists(), "half a copy is left");
}

/// Starts a command that reports its progress as JSON, and waits until it copies.
fn copying(dir: &Path, line: &str) -> Child {
    let mut command = cowslip();
    let command = command.current_dir(dir).args(words(line));
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let reports = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    let begins = |report: std::io::Result<String>| report.unwrap().contains("\"stage\":\"copy\"");
    assert!(reports.into_iter().any(begins), "{line} has ended");
    child
}

#[test]
fn interrupted_conversions_leave_no_half_image() {
    let path = &scratch();
    let mut rng = Rng::new(1);
    let noise: Vec<u8> = (0..4 << 20).map(|_| rng.below(256) as u8).collect();
    std::fs::write(path.join("a.raw"), noise).unwrap();
    for (was_there, format) in [
        (false, "qcow2"),
        (false, "raw"),
        (true, "qcow2"),
        (true, "raw"),
    ] {
        let target = path.join("b");
        if was_there {
            std::fs::write(&target, vec![3; 100_000]).unwrap();
        }
        let line = format!("convert --progress=json -r 1M -O {format} a.raw b");
        let mut child = copying(path, &line);
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = child.wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(15), "{status}");
        match was_there {
            false => assert!(!target.exists(), "{format}: half a target is left"),
            true => assert_eq!(std::fs::metadata(&target).unwrap().len(), 0, "{format}"),
        }
        drop(std::fs::remove_file(&target));
    }
}

/// A killed program cannot remove its target: no program takes it for an image.
#[test]
fn targets_of_killed_programs_are_refused_until_they_are_made_again() {
    let path = &scratch();
    let mut rng = Rng::new(1);
    let noise: Vec<u8> = (0..4 << 20).map(|_| rng.below(256) as u8).collect();
    std::fs::write(path.join("a.raw"), noise).unwrap();
    for line in [
        "convert --progress=json -r 1M -O qcow2 a.raw b",
        "convert --progress=json -r 1M -O qcow2 -o cluster_size=512 a.raw b",
        "convert --progress=json -r 1M -t none -O qcow2 a.raw b",
        "dd --progress=json --rate-limit 1M -f raw -O qcow2 if=a.raw of=b",
    ] {
        let mut child = copying(path, line);
        child.kill().unwrap();
        child.wait().unwrap();
        // An io_uring of a killed process holds its files for some milliseconds.
        // An io_uring of a killed process holds its files for some milliseconds.
        let mut refused = String::new();
        eventually("the locks are gone", || {
            let output = cowslip().current_dir(path).args(["info", "b"]).output();
            refused = String::from_utf8(output.unwrap().stderr).unwrap();
            !refused.contains("lock")
        });
        let refusal = "Unsupported qcow2 feature(s): unfinished copy, to be made again";
        assert!(refused.contains(refusal), "{line}: {refused}");
        if peers_are_installed(&["qemu-img"]) {
            let output = Command::new("qemu-img")
                .current_dir(path)
                .args(["info", "b"])
                .output();
            let printed = String::from_utf8(output.unwrap().stderr).unwrap();
            let words = match line.contains("512") {
                true => "Unknown incompatible feature: 8000000000000000",
                false => refusal,
            };
            assert!(printed.contains(words), "{line}: {printed}");
        }
        succeeds(path, "convert -O qcow2 a.raw b");
        succeeds(path, "compare a.raw b");
        std::fs::remove_file(path.join("b")).unwrap();
    }
}

#[test]
fn progress_goes_from_nothing_to_all_and_never_back() {
    let dir = scratch();
    raw_source(dir.path());
    for line in [
        "convert -p -O qcow2 a.raw b",
        "convert -p -O raw -o preallocation=full a.raw c",
    ] {
        let printed = run(golden::ours().current_dir(&dir).args(words(line)));
        let percent = |part: &str| -> f64 { part.trim().trim_start_matches('(').parse().unwrap() };
        let steps = printed
            .split("/100%)\r")
            .map(str::trim)
            .filter(|part| !part.is_empty());
        let steps: Vec<f64> = steps.map(percent).collect();
        assert!(steps.is_sorted(), "{line}: {printed}");
        assert_eq!(
            (steps[0], steps[steps.len() - 1]),
            (0.0, 100.0),
            "{line}: {printed}"
        );
        assert!(printed.ends_with("(100.00/100%)\r\n"), "{printed}");
    }
}

#[test]
fn what_was_done_is_told_in_json() {
    let dir = scratch();
    raw_source(dir.path());
    let line = words("convert --json -O qcow2 a.raw b.qcow2");
    let report = run(cowslip().current_dir(&dir).args(line));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["virtual-size"], 5 << 20);
    let number = |key: &str| report[key].as_u64().unwrap();
    assert!(number("bytes-written") > 600_000 && number("bytes-written") <= number("bytes-read"));
    assert_eq!(number("bytes-lost"), 0);
    assert_eq!(report["format"], "qcow2");
}

/// Pieces are read and written side by side, and take their space in the order of the guest all the
/// same.
#[test]
fn what_is_converted_lies_in_the_order_of_the_guest() {
    let dir = scratch();
    let mut rng = Rng::new(7);
    let block: Vec<u8> = (0..1 << 20).map(|_| rng.below(256) as u8).collect();
    std::fs::write(dir.path().join("a.raw"), block.repeat(48)).unwrap();
    for options in ["", "-S 0", "-m 16"] {
        let line = format!("convert {options} -f raw -O qcow2 a.raw a.qcow2");
        succeeds(&dir, &line);
        let map = succeeds(&dir, "map --output=json a.qcow2");
        let map: serde_json::Value = serde_json::from_str(&map).unwrap();
        let extents = map.as_array().unwrap();
        assert_eq!(extents.len(), 1, "{options}: {map:#}");
    }
}

/// On a backing file is left out what the source has from its own; where it has none, or one that
/// ends before, it reads as zeroes, and so must the copy.
#[test]
fn a_copy_on_a_backing_file_reads_as_its_source() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let peer = |program: &str, words: &[&str]| {
        run(Command::new(program).current_dir(&dir).args(words));
    };
    for line in [
        "create -q -f qcow2 base.qcow2 1M",
        "create -q -f qcow2 short.qcow2 260k",
        "create -q -f qcow2 alone.qcow2 1M",
        "create -q -f qcow2 -o data_file=data.bin beside.qcow2 1M",
        "create -q -f raw holes.raw 1M",
        "create -q -f qcow2 -b short.qcow2 -F qcow2 longer.qcow2 1M",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 over.qcow2 1M",
    ] {
        peer("qemu-img", &words(line));
    }
    for (image, format, write) in [
        ("base.qcow2", "qcow2", "write -P 9 0 512k"),
        ("short.qcow2", "qcow2", "write -P 9 0 260k"),
        ("alone.qcow2", "qcow2", "write -P 5 640k 64k"),
        ("beside.qcow2", "qcow2", "write -P 5 100k 64k"),
        ("holes.raw", "raw", "write -P 5 100k 64k"),
        ("longer.qcow2", "qcow2", "write -P 5 200k 30k"),
        ("over.qcow2", "qcow2", "write -P 5 400k 300k"),
    ] {
        peer("qemu-io", &["-f", format, "-c", write, image]);
    }
    let sources = [
        "alone.qcow2",
        "beside.qcow2",
        "holes.raw",
        "longer.qcow2",
        "over.qcow2",
    ];
    for source in sources {
        for options in ["", "-c", "-W", "-S 0", "-o cluster_size=4k"] {
            let format = source.rsplit('.').next().unwrap();
            let line = format!(
                "convert -f {format} -O qcow2 -B base.qcow2 -F qcow2 {options} {source} x.qcow2"
            );
            run(golden::ours().current_dir(&dir).args(words(&line)));
            let compare = ["compare", "-f", format, "-F", "qcow2", source, "x.qcow2"];
            let compared = outcome(Command::new("qemu-img").current_dir(&dir).args(compare));
            assert!(compared.status.success(), "{line}: {}", said(&compared));
        }
    }
}
