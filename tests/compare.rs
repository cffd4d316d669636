//! `compare` beside qemu-img: what both say, and with which status, of disks of other sizes and
//! allocation, of truncated files, and of reads that fail.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::path::Path;
use std::process::Command;

use crate::support::golden::{self, words};
use crate::support::{run, scratch_beside};

/// Pairs of disks: formats and names.
const PAIRS: &str = "
-f raw -F raw a.raw a2.raw
-f raw -F raw hole.raw a.raw
-f raw -F qcow2 a.raw a.qcow2
-f qcow2 -F raw other.qcow2 a.raw
-f raw -F qcow2 hole.raw written.qcow2
a.qcow2 other.qcow2
zero.qcow2 empty.qcow2
empty.qcow2 written.qcow2
written.qcow2 zero.qcow2
empty.qcow2 large.qcow2
large.qcow2 a.qcow2
nosuch a.qcow2
a.qcow2 nosuch
-f raw -F raw a.raw
-f foo a.raw a2.raw
";

/// Raw disks that are compared with `a.raw`, and that with them.
const OTHERS: [&str; 4] = ["other.raw", "short.raw", "padded.raw", "longer.raw"];

/// Pairs of which qemu-img decides by where extents end where they are stored differently.
const TRUNCATED: &str = "
cut.qcow2 a.qcow2
a.qcow2 cut.qcow2
far.qcow2 a.qcow2
far.qcow2 empty.qcow2
";

fn prepare(dir: &Path) {
    let data: Vec<u8> = (0..3_u32 << 20).map(|i| (i / 700 + 1) as u8 | 1).collect();
    let file = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).unwrap();
    file("a.raw", &data);
    file("a2.raw", &data);
    let mut other = data.clone();
    other[2_700_001] ^= 0x80;
    file("other.raw", &other);
    file("short.raw", &data[..2_000_000]);
    file("padded.raw", &[&data[..], &[0; 65536]].concat());
    file("longer.raw", &[&data[..], &[7; 65536]].concat());
    file("hole.raw", &[]);
    let hole = std::fs::File::options()
        .write(true)
        .open(dir.join("hole.raw"));
    hole.unwrap().set_len(3 << 20).unwrap();
    for line in [
        "convert -f raw -O qcow2 a.raw a.qcow2",
        "convert -f raw -O qcow2 other.raw other.qcow2",
        "create -q -f qcow2 empty.qcow2 3M",
        "create -q -f qcow2 zero.qcow2 3M",
        "create -q -f qcow2 written.qcow2 3M",
        "create -q -f qcow2 large.qcow2 4M",
    ] {
        run(Command::new("qemu-img").current_dir(dir).args(words(line)));
    }
    for (name, command) in [
        ("zero.qcow2", "write -z 0 3M"),
        ("written.qcow2", "write -P 0 0 3M"),
    ] {
        run(Command::new("qemu-io")
            .current_dir(dir)
            .args(["-c", command, name]));
    }
    let image = std::fs::read(dir.join("a.qcow2")).unwrap();
    file("cut.qcow2", &image[..1_700_000]);
    // The sixth cluster is beyond the end of the file.
    let l1 = u64::from_be_bytes(image[40..48].try_into().unwrap()) as usize;
    let l2 = u64::from_be_bytes(image[l1..l1 + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let entry = l2 as usize + 8 * 5;
    let mut far = image;
    far[entry..entry + 8].copy_from_slice(&(1 << 63 | 1_u64 << 40).to_be_bytes());
    file("far.qcow2", &far);
}

fn compare_all(lines: impl Iterator<Item = String>) {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare(dir.path());
    let differences = lines.map(|line| {
        let line = [&["compare"][..], &words(&line)].concat();
        golden::difference(&line, dir.path(), dir.path())
    });
    let differences: String = differences.collect();
    assert!(differences.is_empty(), "{differences}");
}

#[test]
fn disks_compare_as_with_qemu_img() {
    let others = OTHERS.map(|other| [("a.raw", other), (other, "a.raw")]);
    let raw = others.as_flattened().iter();
    let raw = raw.map(|(a, b)| format!("-f raw -F raw {a} {b}"));
    let pairs = golden::lines(PAIRS).map(str::to_string).chain(raw);
    let with = |pair: &str, all: &[&str]| -> Vec<String> {
        all.iter()
            .map(|options| format!("{options}{pair}"))
            .collect()
    };
    let pairs = pairs.flat_map(|pair| with(&pair, &["", "-s ", "-q ", "-s -q "]));
    let truncated = golden::lines(TRUNCATED).flat_map(|pair| with(pair, &["", "-q "]));
    compare_all(pairs.chain(truncated));
}

#[test]
fn a_failed_read_is_reported_as_by_qemu_img() {
    let mut lines = Vec::new();
    for sector in [0, 1, 2048, 4095, 4096, 6143, 6144, 6271] {
        let failing = format!(
            "driver=raw,file.driver=blkdebug,file.image.driver=file,\
             file.image.filename=longer.raw,file.inject-error.0.event=none,\
             file.inject-error.0.sector={sector},file.inject-error.0.errno=5"
        );
        for name in ["a.raw", "padded.raw", "hole.raw"] {
            let whole = format!("driver=raw,file.filename={name}");
            for options in ["", "-s ", "-q "] {
                lines.push(format!("{options}--image-opts {failing} {whole}"));
                lines.push(format!("{options}--image-opts {whole} {failing}"));
            }
        }
    }
    compare_all(lines.into_iter());
}
