//! Bad input, end to end: damaged and malicious images, broken chains, files that cannot be used,
//! full disks. Every command gives one clear error, QEMU's exit code, changes nothing, leaves
//! nothing half made, and never panics, hangs or eats the memory.
//!
//! `COWSLIP_SEED=n` replays one seed of the random damage. Comparisons with QEMU skip loudly where
//! its tools are missing, and so does what needs root.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

mod bench;

use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::support::cowslip;
use crate::support::golden::words;
use crate::support::rng::Rng;
use crate::support::whose::Whose;
use bench::{Bench, Outcome};

const IMAGE: &str = "image.qcow2";
const NEW: &str = "new.qcow2";

/// One of each command on an image.
const COMMANDS: [&[&str]; 7] = [
    &["qemu-img", "info", IMAGE],
    &["qemu-img", "check", "-f", "qcow2", IMAGE],
    &["qemu-img", "map", "-f", "qcow2", "--output=json", IMAGE],
    &["qemu-io", "-f", "qcow2", "-r", "-c", "read 0 256k", IMAGE],
    &[
        "qemu-img", "create", "-q", "-f", "qcow2", "-b", IMAGE, "-F", "qcow2", NEW,
    ],
    &["qemu-nbd", "-f", "qcow2", IMAGE],
    // Last, since it may change the image.
    &["qemu-io", "-f", "qcow2", "-c", "write -P 213 0 64k", IMAGE],
];

/// A change of an image: where in the file, and the bytes that go there.
type Patch = (u64, Vec<u8>);

fn word(at: u64, value: u64) -> Patch {
    (at, value.to_be_bytes().to_vec())
}

fn half(at: u64, value: u32) -> Patch {
    (at, value.to_be_bytes().to_vec())
}

/// 64 KiB clusters, 8 MiB. The layout is fixed: header, refcount table at 64 KiB, one block at 128
/// KiB, L1 at 192 KiB, the L2 table at 256 KiB, data from 320 KiB on.
fn make(bench: &Bench) {
    bench.must(&["qemu-img", "create", "-q", "-f", "qcow2", IMAGE, "8M"]);
    bench.must(&["qemu-io", "-f", "qcow2", "-c", "write -P 7 0 256k", IMAGE]);
}

const REFCOUNT_TABLE: u64 = 1 << 16;
const REFCOUNT_BLOCK: u64 = 2 << 16;
const L1: u64 = 3 << 16;
const L2: u64 = 4 << 16;
const DATA: u64 = 5 << 16;
const COPIED: u64 = 1 << 63;

/// Damage, by name.
fn damages() -> Vec<(&'static str, Vec<Patch>)> {
    vec![
        ("magic", vec![half(0, 0)]),
        ("version 9", vec![half(4, 9)]),
        ("backing offset beyond", vec![word(8, 1 << 40), half(16, 9)]),
        ("backing name too long", vec![word(8, 1024), half(16, 4096)]),
        ("cluster bits 0", vec![half(20, 0)]),
        ("cluster bits 63", vec![half(20, 63)]),
        ("size beyond L1", vec![word(24, 1 << 50)]),
        ("size 2^64 - 1", vec![word(24, u64::MAX)]),
        ("size 2^63 - 1", vec![word(24, i64::MAX as u64)]),
        ("encrypted", vec![half(32, 1)]),
        ("unknown encryption", vec![half(32, 77)]),
        ("L1 too large", vec![half(36, u32::MAX)]),
        ("L1 unaligned", vec![word(40, L1 + 8)]),
        ("L1 offset beyond 2^63", vec![word(40, u64::MAX << 16)]),
        (
            "refcount table unaligned",
            vec![word(48, REFCOUNT_TABLE + 512)],
        ),
        ("refcount table too large", vec![half(56, u32::MAX)]),
        ("no refcount table", vec![half(56, 0)]),
        (
            "too many snapshots",
            vec![half(60, u32::MAX), word(64, DATA)],
        ),
        ("unknown incompatible bit", vec![word(72, 1 << 63)]),
        ("refcount order 7", vec![half(96, 7)]),
        ("header length 0", vec![half(100, 0)]),
        ("header length beyond the cluster", vec![half(100, 1 << 20)]),
        ("compression type 9", vec![word(72, 8), (104, vec![9])]),
        (
            "extension beyond",
            vec![half(112, 0x1234_5678), half(116, u32::MAX)],
        ),
        ("L1 entry unaligned", vec![word(L1, (L2 + 512) | COPIED)]),
        ("L1 entry reserved bits", vec![word(L1, L2 | COPIED | 3)]),
        ("L2 entry unaligned", vec![word(L2, (DATA + 512) | COPIED)]),
        ("L2 entry to the header", vec![word(L2, 1 << 55 | COPIED)]),
        ("L2 table is the L1 table", vec![word(L1, L1 | COPIED)]),
        (
            "L2 table is the refcount block",
            vec![word(L1, REFCOUNT_BLOCK | COPIED)],
        ),
        ("data in the L1 table", vec![word(L2, L1 | COPIED)]),
        ("shared data in the L1 table", vec![word(L2, L1)]),
        (
            "data in the refcount table",
            vec![word(L2, REFCOUNT_TABLE | COPIED)],
        ),
        (
            "data in the refcount block",
            vec![word(L2, REFCOUNT_BLOCK | COPIED)],
        ),
        ("data in the L2 table", vec![word(L2, L2 | COPIED)]),
        ("compressed garbage", vec![word(L2, 1 << 62 | DATA)]),
        (
            "compressed beyond the end",
            vec![word(L2, 1 << 62 | 1 << 40)],
        ),
        (
            "refcount block unaligned",
            vec![word(REFCOUNT_TABLE, REFCOUNT_BLOCK + 512)],
        ),
        (
            "refcount block is the header",
            vec![word(REFCOUNT_TABLE, 1 << 62)],
        ),
        ("refcount table is the L1 table", vec![word(48, L1)]),
        ("bitmap directory beyond", bitmaps(1 << 40, 1 << 20)),
        ("bitmap directory without end", bitmaps(DATA, u64::MAX)),
    ]
}

/// A bitmaps extension in place of the feature name table.
fn bitmaps(offset: u64, bytes: u64) -> Vec<Patch> {
    vec![
        half(112, 0x2385_2875),
        half(116, 24),
        word(120, 1 << 32),
        word(128, bytes),
        word(136, offset),
        word(144, 0),
        word(88, 1),
    ]
}

fn apply(bench: &Bench, patches: &[Patch]) {
    let file = std::fs::File::options()
        .write(true)
        .open(bench.path(IMAGE))
        .unwrap();
    for (at, bytes) in patches {
        file.write_all_at(bytes, *at).unwrap();
    }
}

/// Runs all commands on the image; nothing changes but by a write that succeeds. Returns the
/// outcomes of ours and, where it is installed, QEMU's.
fn run_all(bench: &Bench, case: &str) -> Vec<(&'static [&'static str], Outcome, Option<Outcome>)> {
    let theirs_too = crate::support::peers_are_installed(&["qemu-img", "qemu-io", "qemu-nbd"]);
    COMMANDS
        .iter()
        .map(|&words| {
            let before = bench.files();
            let ours = bench.run(Whose::Ours, words);
            let creates = words[1] == "create";
            assert_eq!(
                bench.path(NEW).exists(),
                creates && ours.code == 0,
                "{case}: {words:?} leaves something: {ours:?}"
            );
            if creates && ours.code == 0 {
                std::fs::remove_file(bench.path(NEW)).unwrap();
            }
            let writes = words == COMMANDS[6];
            let mut after = bench.files();
            if writes && ours.code != 0 {
                take_back_corrupt_bit(&before[&bench.path(IMAGE)].1, bench, &mut after);
            }
            assert!(
                before == after || (writes && ours.code == 0),
                "{case}: {words:?} has changed a file: {ours:?}"
            );
            if writes {
                assert_structures_intact(case, &before, &after, &ours);
            }
            let image = &before[&bench.path(IMAGE)].1;
            std::fs::write(bench.path(IMAGE), image).unwrap();
            let theirs = theirs_too.then(|| bench.run(Whose::Theirs, words));
            std::fs::write(bench.path(IMAGE), image).unwrap();
            if bench.path(NEW).exists() {
                std::fs::remove_file(bench.path(NEW)).unwrap();
            }
            (words, ours, theirs)
        })
        .collect()
}

/// A write that meets metadata where guest data should be leaves one trace: the corrupt bit.
fn take_back_corrupt_bit(before: &[u8], bench: &Bench, after: &mut Files) {
    const INCOMPATIBLE_LOW_BYTE: usize = 79;
    const CORRUPT: u8 = 2;
    if let Some((_, image)) = after.get_mut(&bench.path(IMAGE))
        && let (Some(old), Some(new)) = (
            before.get(INCOMPATIBLE_LOW_BYTE),
            image.get_mut(INCOMPATIBLE_LOW_BYTE),
        )
        && *new == *old | CORRUPT
    {
        *new = *old;
    }
}

type Files = std::collections::BTreeMap<std::path::PathBuf, (u64, Vec<u8>)>;

/// The guest's 213s are nowhere in the structures (invariant S3).
fn assert_structures_intact(case: &str, before: &Files, after: &Files, ours: &Outcome) {
    for (path, (_, bytes)) in after {
        for (at, part) in bytes.chunks(8).enumerate().take(DATA as usize / 8) {
            let old = before[path].1.get(at * 8..at * 8 + part.len());
            assert!(
                part != [213; 8] || old == Some(part),
                "{case}: a guest's bytes at {:#x}: {ours:?}",
                at * 8
            );
        }
    }
}

/// Where our exit code is not QEMU's, and why.
fn may_differ(case: &str, words: &[&str], codes: (i32, i32)) -> bool {
    let verb = match words {
        _ if words == COMMANDS[6] => "write",
        ["qemu-io", ..] => "read",
        ["qemu-nbd", ..] => "serve",
        [_, verb, ..] => verb,
        _ => "",
    };
    match (case, verb) {
        // The specification reserves these bits; what is not understood is refused.
        ("L1 entry reserved bits", "map" | "read" | "write") => codes == (1, 0),
        // Writing would change, free or rely on metadata that something else claims, too.
        ("L2 table is the refcount block", "write")
        | ("shared data in the L1 table", "write")
        | ("compressed beyond the end", "write")
        | ("refcount block unaligned", "write" | "serve")
        | ("refcount block is the header", "write" | "serve")
        | ("refcount table is the L1 table", "write" | "serve") => codes == (1, 0),
        // QEMU cannot open it, and so not repair it; we say what is wrong, and can.
        ("refcount table unaligned", "check") => codes == (2, 1),
        // A check needs no key.
        ("encrypted", "check") => codes == (0, 1),
        // Guest data is read without looking at bitmaps; what writes refuses them, as QEMU does.
        ("bitmap directory beyond" | "bitmap directory without end", "map" | "read") => {
            codes == (0, 1)
        }
        _ => false,
    }
}

#[test]
fn damaged_structures_are_refused_as_by_qemu() {
    let bench = Bench::new();
    make(&bench);
    let sound = std::fs::read(bench.path(IMAGE)).unwrap();
    let mut wrong = Vec::new();
    for (case, patches) in damages() {
        std::fs::write(bench.path(IMAGE), &sound).unwrap();
        apply(&bench, &patches);
        for (words, ours, theirs) in run_all(&bench, case) {
            if let Some(theirs) = theirs
                && theirs.code != ours.code
                && !may_differ(case, words, (ours.code, theirs.code))
            {
                wrong.push(format!("{case}: {words:?}\n  {ours:?}\n  {theirs:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn truncated_images_are_errors_and_nothing_worse() {
    let bench = Bench::new();
    make(&bench);
    let sound = std::fs::read(bench.path(IMAGE)).unwrap();
    for len in [
        0,
        3,
        8,
        60,
        103,
        111,
        4096,
        L1 as usize,
        L2 as usize,
        DATA as usize + 9,
    ] {
        std::fs::write(bench.path(IMAGE), &sound[..len]).unwrap();
        run_all(&bench, &format!("cut to {len}"));
    }
}

#[test]
fn garbled_images_are_errors_and_nothing_worse() {
    let bench = Bench::new();
    make(&bench);
    let sound = std::fs::read(bench.path(IMAGE)).unwrap();
    let one = crate::support::number_from_environment("COWSLIP_SEED");
    let seeds = one.map_or(0..16, |seed| seed..seed + 1);
    for seed in seeds {
        let mut rng = Rng::new(seed);
        let mut bytes = sound.clone();
        for _ in 0..1 + rng.below(20) {
            let places = [0, 0, REFCOUNT_TABLE, REFCOUNT_BLOCK, L1, L2];
            let at = *rng.pick(&places) + rng.below(128);
            bytes[at as usize] = rng.next() as u8;
        }
        std::fs::write(bench.path(IMAGE), &bytes).unwrap();
        run_all(&bench, &format!("COWSLIP_SEED={seed}"));
    }
}

/// Says what is wrong, and with which file.
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no '{part}' in: {text}");
    }
}

#[test]
fn a_backing_file_that_cannot_be_used_is_named() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("directory")).unwrap();
    for (backing, why) in [
        ("missing.qcow2", "No such file or directory"),
        ("directory", "regular file"),
    ] {
        let unsafe_create = [
            "qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", backing,
        ];
        bench.must(&[&unsafe_create[..], &["-F", "raw", IMAGE, "1M"]].concat());
        let read = ["qemu-io", "-f", "qcow2", "-c", "read 0 4k", IMAGE];
        assert_says(&bench.refused(&read), &[backing, why]);
        let chain = ["qemu-img", "info", "--backing-chain", IMAGE];
        assert_says(&bench.refused(&chain), &[backing, why]);
        assert_says(&bench.refused(&["qemu-img", "map", IMAGE]), &[backing, why]);
        assert_says(&bench.refused(&["qemu-nbd", IMAGE]), &[backing, why]);
        let create = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", backing];
        let text = bench.refused(&[&create[..], &["-F", "raw", NEW]].concat());
        assert_says(&text, &[backing, why]);
        bench.must(&["qemu-img", "info", IMAGE]);
        bench.must(&["qemu-img", "check", IMAGE]);
    }
}

#[test]
fn cyclic_chains_end() {
    let bench = Bench::new();
    symlink(IMAGE, bench.path("loopi.qcow2")).unwrap();
    let unsafe_create = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b"];
    let create = |backing: &str, name: &str| {
        bench.must(&[&unsafe_create[..], &[backing, "-F", "qcow2", name, "1M"]].concat());
    };
    create(IMAGE, "other.qcow2");
    for backing in [IMAGE, "loopi.qcow2", "other.qcow2"] {
        // Creating such an image is refused, so the name is changed afterwards.
        create(&"x".repeat(backing.len()), IMAGE);
        let header = std::fs::read(bench.path(IMAGE)).unwrap();
        let name_at = u64::from_be_bytes(header[8..16].try_into().unwrap());
        apply(&bench, &[(name_at, backing.into())]);
        for words in [
            &["qemu-io", "-f", "qcow2", "-c", "read 0 4k", IMAGE][..],
            &["qemu-img", "info", "--backing-chain", IMAGE],
            &["qemu-img", "map", IMAGE],
            &["qemu-nbd", IMAGE],
        ] {
            assert_says(&bench.refused(words), &["qcow2", "loop"]);
        }
    }
}

#[test]
fn a_backing_file_wants_a_format() {
    let bench = Bench::new();
    make(&bench);
    let words = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", IMAGE, NEW];
    assert_says(&bench.refused(&words), &["without", "format"]);
    assert!(!bench.path(NEW).exists());
}

#[test]
fn a_data_file_that_cannot_be_used_is_named() {
    let bench = Bench::new();
    let create = words("qemu-img create -q -f qcow2 -o data_file=data.raw");
    bench.must(&[&create[..], &[IMAGE, "1M"]].concat());
    let write = ["qemu-io", "-f", "qcow2", "-c", "write 0 64k", IMAGE];
    std::fs::remove_file(bench.path("data.raw")).unwrap();
    assert_says(&bench.refused(&write), &["data.raw", "No such file"]);
    std::fs::create_dir(bench.path("data.raw")).unwrap();
    assert_says(&bench.refused(&write), &["data.raw", "Is a directory"]);
    std::fs::remove_dir(bench.path("data.raw")).unwrap();
    // Itself: guest data would overwrite the header.
    symlink(IMAGE, bench.path("data.raw")).unwrap();
    assert_says(&bench.refused(&write), &[IMAGE, "data file"]);
}

#[test]
fn sizes_that_overflow_are_refused() {
    let bench = Bench::new();
    for size in [
        "9223372036854775808",
        "16E",
        "99999999999999999999",
        "-1",
        "8E",
        "1Q",
    ] {
        let text = bench.refused(&["qemu-img", "create", "-q", "-f", "qcow2", NEW, size]);
        assert!(!text.trim().is_empty(), "{size}");
        assert!(!bench.path(NEW).exists(), "{size}");
    }
}

#[test]
fn a_guessed_raw_disk_never_becomes_qcow2() {
    let bench = Bench::new();
    make(&bench);
    std::fs::write(bench.path("disk.raw"), vec![0; 1 << 20]).unwrap();
    std::fs::copy(bench.path(IMAGE), bench.path("header")).unwrap();
    let text = bench.refused(&["qemu-io", "-c", "write -s header 0 512", "disk.raw"]);
    assert_says(&text, &["Operation not permitted"]);
    bench.must(&[
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write -s header 0 512",
        "disk.raw",
    ]);
}

/// A small file system in memory, for root only.
struct Small<'a>(&'a Path);

impl<'a> Small<'a> {
    fn mount(at: &'a Path) -> Option<Small<'a>> {
        std::fs::create_dir(at).unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"];
        let mounted = Command::new("mount").args(mount).arg(at).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Small(at));
        }
        eprintln!("SKIPPED: no permission to mount a small file system");
        None
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        Command::new("umount")
            .arg("-l")
            .arg(self.0)
            .status()
            .unwrap();
    }
}

#[test]
fn a_full_disk_leaves_sound_images_and_nothing_half_made() {
    let bench = Bench::new();
    let at = bench.path("small");
    let Some(_small) = Small::mount(&at) else {
        return;
    };
    let full = words("qemu-img create -q -f qcow2 -o preallocation=full");
    let text = bench.refused(&[&full[..], &["small/new.qcow2", "8M"]].concat());
    assert_says(&text, &["small/new.qcow2", "No space left on device"]);
    assert!(!at.join(NEW).exists());
    bench.must(&words("qemu-img create -q -f qcow2 small/a.qcow2 8M"));
    let write = [
        "qemu-io",
        "-f",
        "qcow2",
        "-c",
        "write 0 4M",
        "small/a.qcow2",
    ];
    let outcome = bench.run(Whose::Ours, &write);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert_says(
        &(outcome.stdout + &outcome.stderr),
        &["No space left on device"],
    );
    bench.must(&["qemu-img", "check", "small/a.qcow2"]);
}

#[test]
fn room_is_wanted_where_the_data_goes() {
    let bench = Bench::new();
    let at = bench.path("small");
    let Some(_small) = Small::mount(&at) else {
        return;
    };
    std::fs::write(bench.path("source.raw"), vec![5; 4 << 20]).unwrap();
    let convert = |data_file: &str, target: &str| {
        let option = format!("data_file={data_file}");
        let mut command = cowslip();
        command.args(["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", &option]);
        command.arg(bench.path("source.raw")).arg(target);
        command.current_dir(&at).output().unwrap()
    };
    let there = bench.path("data.raw");
    let fits = convert(there.to_str().unwrap(), "a.qcow2");
    assert!(fits.status.success(), "{fits:?}");
    let target = bench.path("b.qcow2");
    let refused = convert(
        at.join("data.raw").to_str().unwrap(),
        target.to_str().unwrap(),
    );
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_says(&said, &["Not started", "small/data.raw"]);
    assert!(!target.exists() && !at.join("data.raw").exists());
}

#[test]
fn a_read_only_file_system_is_read_and_not_written() {
    let bench = Bench::new();
    let at = bench.path("small");
    let Some(_small) = Small::mount(&at) else {
        return;
    };
    bench.must(&words("qemu-img create -q -f qcow2 small/a.qcow2 8M"));
    let remount = ["-o", "remount,ro"];
    assert!(
        Command::new("mount")
            .args(remount)
            .arg(&at)
            .status()
            .unwrap()
            .success()
    );
    bench.must(&[
        "qemu-io",
        "-f",
        "qcow2",
        "-r",
        "-c",
        "read 0 4k",
        "small/a.qcow2",
    ]);
    for words in [
        &[
            "qemu-io",
            "-f",
            "qcow2",
            "-c",
            "write 0 4k",
            "small/a.qcow2",
        ][..],
        &[
            "qemu-img",
            "create",
            "-q",
            "-f",
            "qcow2",
            "small/b.qcow2",
            "1M",
        ],
        &["qemu-nbd", "-f", "qcow2", "small/a.qcow2"],
    ] {
        assert_says(&bench.refused(words), &["small/", "Read-only file system"]);
    }
}

#[test]
fn a_file_without_permission_is_named() {
    let bench = Bench::new();
    make(&bench);
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o0);
    std::fs::set_permissions(bench.path(IMAGE), mode).unwrap();
    if std::fs::File::open(bench.path(IMAGE)).is_ok() {
        eprintln!("SKIPPED: root may read every file");
        return;
    }
    for words in COMMANDS {
        let outcome = bench.run(Whose::Ours, words);
        assert_ne!(outcome.code, 0, "{words:?}: {outcome:?}");
        assert_says(&outcome.stderr, &[IMAGE, "Permission denied"]);
    }
}

#[test]
fn options_about_images_are_not_for_verbs_that_open_none() {
    let said = |line: &str| {
        let output = cowslip().args(words(line)).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        (text, output.status.code())
    };
    for line in [
        "ctl socket query-version",
        "top socket",
        "umount a",
        "allocate --size 1M /nosuch/a",
        "extents /nosuch/a",
        "grow /nosuch/a",
        "demo --dir /nosuch/a",
        "completions bash",
        "manual /dev/null/pages",
    ] {
        let verb = words(line)[0];
        let (help, code) = said(&format!("{verb} --help"));
        assert_eq!(code, Some(0), "{help}");
        for option in ["--object", "--remote-"] {
            assert!(!help.contains(option), "{verb}: {help}");
        }
        for line in [
            format!("{line} --object secret,id=s,data=x"),
            format!("--object secret,id=s,data=x {line}"),
            format!("--remote-timeout 5 {line}"),
        ] {
            let (text, code) = said(&line);
            assert_eq!(code, Some(1), "{line}: {text}");
            assert!(
                text.contains(&format!("is not an option of '{verb}'")),
                "{line}: {text}"
            );
        }
    }
    for verb in ["info", "advise", "serve", "daemon", "bench", "compact"] {
        let (help, _) = said(&format!("{verb} --help"));
        assert!(help.contains("--object") && help.contains("--remote-cache"));
    }
}
