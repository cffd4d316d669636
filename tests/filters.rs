//! Filters below images: faults and stops (`blkdebug`), files that keep nothing (`null-co`), parts
//! of files (`raw` with `offset` and `size`). The same command lines with qemu-io give the same
//! text and the same bytes; an image that has met a fault has leaks at most, as both checkers see
//! it.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::golden::our_io;
use crate::support::rng::Rng;
use crate::support::{cowslip, outcome, qemu_img, run, scratch, scratch_beside};

const QEMU: &[&str] = &["qemu-io", "qemu-img"];

fn qemu_io() -> Command {
    Command::new("qemu-io")
}

/// Standard output and error with neither times nor prompts, and the exit status.
fn streams(output: &Output) -> (String, Option<i32>) {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text).replace("qemu-io> ", "");
    let timeless = text.lines().map(|line| match line.find(" ops; ") {
        Some(at) => &line[..at + 4],
        None => line,
    });
    (
        timeless.collect::<Vec<_>>().join("\n"),
        output.status.code(),
    )
}

fn output_of(program: fn() -> Command, directory: &Path, args: &[&str]) -> (String, Option<i32>) {
    let mut command = program();
    command.current_dir(directory).args(args);
    streams(&outcome(command.stdin(Stdio::null())))
}

/// Returns the output for a script on standard input.
fn script(
    program: fn() -> Command,
    directory: &Path,
    args: &[&str],
    lines: &str,
) -> (String, Option<i32>) {
    let mut child = program()
        .current_dir(directory)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(lines.as_bytes()).unwrap();
    drop(stdin);
    streams(&child.wait_with_output().unwrap())
}

/// A disk of 16 MiB: `a`.
fn make_image(at: &Path) {
    let create = ["create", "-q", "-f", "qcow2", "a", "16M"];
    run(Command::new("qemu-img").current_dir(at).args(create));
}

#[test]
fn mistakes_are_told_in_qemu_ios_words() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    make_image(at);
    let same = |args: &[&str]| {
        let theirs = output_of(qemu_io, at, args);
        assert_eq!(output_of(our_io, at, args), theirs, "{args:?}");
        theirs.0
    };
    for config in [
        "[inject-error]\nevent = \"foo\"\n",
        "[inject-error]\n",
        "[bogus]\nx = \"1\"\n",
        "[inject-error]\nfoo = \"1\"\n",
        "[inject-error]\nevent = \"none\"\nerrno = \"x\"\n",
        "junk\n",
        "[inject-error]\nevent = l2_load\n",
        "# c\n\n[inject-error]\nevent = \"none\"\niotype = \"zz\"\n",
        "[set-state]\nevent = \"write_aio\"\nnew_state = \"2\"\n",
        "[inject-error]\nevent = \"write_aio\"\nerrno = \"0\"\n",
    ] {
        std::fs::write(at.join("c"), config).unwrap();
        same(&["-c", "length", "blkdebug:c:a"]);
    }
    same(&["-c", "length", "blkdebug:none:a"]);
    same(&["-c", "length", "blkdebug:a"]);
    same(&["-c", "length", "null-co://x"]);
    for option in [
        "align=3",
        "align=4k,file.max-transfer=1k",
        "opt-write-zero=3",
        "max-write-zero=1k,file.align=4k",
        "opt-write-zero=3k,file.max-write-zero=4k",
        "opt-discard=3k,file.max-discard=3k,file.max-transfer=0",
        "opt-discard=5,file.align=4k",
        "max-transfer=8G",
        "foo=1",
        "inject-error.0.event=foo",
        "inject-error.0.errno=5",
        "inject-error.0.event=write_aio,file.inject-error.0.sector=x",
        "inject-error.0.event=write_aio,file.inject-error.0.bar=x",
        "inject-error.1.event=write_aio",
        "take-child-perms.0=write",
    ] {
        let list = format!("driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.{option}");
        same(&["--image-opts", "-c", "write -q 0 1k", &list]);
    }
    for list in [
        "driver=blkdebug",
        "driver=blkdebug,config=x,image.filename=a",
        "driver=null-co,size=3M",
        "driver=null-aio,foo=1",
        "driver=null-co,latency-ns=-1",
        "driver=raw,offset=512,size=1000,file.filename=a",
        "driver=raw,offset=32M,file.filename=a",
        "driver=raw,offset=512,size=64k,file.filename=a",
    ] {
        same(&["--image-opts", "-c", "length", list]);
    }
    for line in ["break x A", "resume A", "remove_break A"] {
        same(&["-c", line, "blkdebug::a"]);
        assert!(same(&["-c", line, "-f", "qcow2", "a"]).contains("Operation not supported"));
    }
    let lines = [
        "-c",
        "break read_aio A",
        "-c",
        "remove_break A",
        "-c",
        "read -q 0 512",
    ];
    same(&[&lines[..], &["blkdebug::a"]].concat());
}

#[test]
fn drivers_that_there_are_not_are_refused_by_name() {
    let directory = scratch();
    for driver in ["throttle", "blkverify", "quorum"] {
        let list = format!("driver={driver},file.filename=a");
        let args = ["--image-opts", "-c", "length", &list];
        let (text, code) = output_of(our_io, directory.path(), &args);
        assert!(
            text.contains(&format!("Driver '{driver}' is not supported; ")),
            "{text}"
        );
        assert_eq!((text.lines().count(), code), (1, Some(1)), "{text}");
    }
    let huge = directory.path().join("c");
    std::fs::File::create(&huge)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let (text, _) = output_of(our_io, directory.path(), &["-c", "length", "blkdebug:c:a"]);
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Requests to clusters that another one, stopped, has just taken.
const OVERLAPPING: &str = "\
break write_aio A
aio_write -P 10 0x18000 0x2000
wait_break A
aio_write -P 11 0x12000 0x2000
aio_write -P 12 0x1c000 0x2000
resume A
aio_flush
write -P 70 0x76000 0x8000
break write_aio A
aio_write -P 60 0x66000 0x2000
wait_break A
aio_write -P 61 0x6a000 0xe000
resume A
aio_flush
write -c -P 110 0xb0000 0x10000
discard 0xa0000 0x10000
break write_aio A
aio_write -P 100 0xa6000 0x2000
wait_break A
aio_write -P 101 0xaa000 0xe000
resume A
aio_flush
break cow_read A
aio_write -P 121 0xdc000 0x2000
wait_break A
aio_write -P 120 0xc4000 0x18000
resume A
aio_flush
";

/// Writes finer than the file's blocks, stopped between reading a block and writing it.
const FINER: &str = "\
aio_write -P 10 0x200 0x200
aio_flush
break pwritev_rmw_head A
aio_write -P 10 0x1200 0x200
wait_break A
aio_write -P 11 0x1400 0x200
resume A
aio_flush
break pwritev_rmw_after_tail A
aio_write -P 10 0x6000 0x200
wait_break A
break pwritev_rmw_after_head B
aio_write -P 10 0x7e00 0x200
wait_break B
aio_write -P 11 0x6800 0x1000
resume A
sleep 50
resume B
aio_flush
break pwritev A
aio_write -P 10 0x10000 0x800
wait_break A
break pwritev_rmw_after_tail B
aio_write -P 11 0x10000 0x400
break pwritev_done C
resume A
wait_break C
resume C
wait_break B
resume B
aio_flush
";

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn stopped_requests_leave_the_same_disk_as_with_qemu_io() {
    let Some(directory) = scratch_beside(QEMU) else {
        return;
    };
    let mut answers = Vec::new();
    for (name, program) in [("theirs", qemu_io as fn() -> Command), ("ours", our_io)] {
        let at = directory.path().join(name);
        std::fs::create_dir(&at).unwrap();
        let base = at.join("base");
        run(Command::new("truncate").args(["-s", "2M"]).arg(&base));
        run(qemu_io()
            .args(["-f", "raw", "-c", "write -q -P 7 0 2M"])
            .arg(&base));
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base"];
        qemu_img(&create, &[&at.join("a")]);
        run(Command::new("truncate")
            .args(["-s", "1M"])
            .arg(at.join("r")));
        let (overlapping, code) = script(program, &at, &["blkdebug::a"], OVERLAPPING);
        assert_eq!(code, Some(0), "{overlapping}");
        let list = "driver=raw,file.driver=blkdebug,file.align=4k,file.image.filename=r";
        let (finer, code) = script(program, &at, &["--image-opts", list], FINER);
        assert_eq!(code, Some(0), "{finer}");
        qemu_img(&["check", "-q"], &[&at.join("a")]);
        qemu_img(
            &["convert", "-O", "raw"],
            &[&at.join("a"), &at.join("flat")],
        );
        let bytes = ["flat", "r"].map(|file| std::fs::read(at.join(file)).unwrap());
        answers.push((overlapping, finer, bytes));
    }
    let [theirs, ours] = &answers[..] else {
        unreachable!("two programs");
    };
    // Requests that ran together end in any order.
    assert_eq!(sorted(&ours.0), sorted(&theirs.0));
    assert_eq!(sorted(&ours.1), sorted(&theirs.1));
    assert!(ours.2 == theirs.2, "the bytes differ");
}

#[test]
fn waiting_for_what_cannot_come_ends() {
    let Some(directory) = scratch_beside(QEMU) else {
        return;
    };
    make_image(directory.path());
    let lines = "break read_aio A\nwait_break A\n";
    let start = Instant::now();
    let (text, code) = script(our_io, directory.path(), &["blkdebug::a"], lines);
    assert!(text.starts_with("Could not wait for a request: "), "{text}");
    assert_eq!(code, Some(1));
    // Late requests would have been waited for.
    assert!(start.elapsed() >= Duration::from_secs(10));
}

/// Runs lines on an image, and `qemu-img map` afterwards: the faults that are met, and the ranges
/// that are data, show how requests were split.
fn cut_alike(at: &Path, (list, lines): (&str, &[&str]), status: i32) {
    let mut answers = Vec::new();
    for (name, program) in [("theirs", qemu_io as fn() -> Command), ("ours", our_io)] {
        let place = at.join(name);
        std::fs::create_dir_all(&place).unwrap();
        qemu_img(
            &["create", "-q", "-f", "qcow2"],
            &[&place.join("a"), Path::new("64M")],
        );
        std::fs::write(place.join("r"), vec![1; 1 << 20]).unwrap();
        let mut args = vec!["--image-opts"];
        lines.iter().for_each(|line| args.extend(["-c", line]));
        args.push(list);
        let (text, code) = output_of(program, &place, &args);
        assert_eq!(code, Some(status), "{name} {list} {lines:?}: {text}");
        qemu_img(&["check", "-q"], &[&place.join("a")]);
        let map = ["map", "--output=json", "-f", "qcow2", "a"];
        let map = run(Command::new("qemu-img").current_dir(&place).args(map));
        let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
        let without_offsets = map.into_iter().map(|mut extent| {
            extent.as_object_mut().unwrap().remove("offset");
            extent
        });
        let map: Vec<serde_json::Value> = without_offsets.collect();
        answers.push((text, map, std::fs::read(place.join("r")).unwrap()));
        std::fs::remove_dir_all(&place).unwrap();
    }
    let [theirs, ours] = &answers[..] else {
        unreachable!("two programs");
    };
    assert_eq!(ours.0, theirs.0, "{list} {lines:?}");
    assert_eq!(ours.1, theirs.1, "{list} {lines:?}");
    assert!(ours.2 == theirs.2, "{list} {lines:?}: the bytes differ");
}

#[test]
fn limits_cut_requests_as_qemus_do() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    let above = "driver=blkdebug,image.driver=qcow2,image.file.filename=a,align=512";
    let zeroes = "opt-write-zero=3M,max-write-zero=6M,max-transfer=64k";
    let list = format!("{above},{zeroes}");
    let lines = [
        "write -q -z 1M 16M",
        "write -q -z 20000k 1000",
        "write -q -P 3 1000 200k",
    ];
    cut_alike(at, (&list, &lines), 0);
    let list = format!("{above},opt-discard=3M,max-discard=3M");
    cut_alike(
        at,
        (&list, &["write -q 0 20M", "discard -q 1000001 15M"]),
        0,
    );
    // The third part of a write meets the fault, so two are there.
    let below = "driver=raw,file.driver=blkdebug,file.image.filename=r";
    let fault =
        "file.inject-error.0.event=none,file.inject-error.0.sector=300,file.inject-error.0.iotype";
    let list = format!("{below},file.max-transfer=64k,{fault}=write");
    cut_alike(at, (&list, &["write -q -P 5 0 256k"]), 1);
    cut_alike(
        at,
        (
            &format!("{list},file.align=4k"),
            &["write -q -P 5 1000 256k"],
        ),
        1,
    );
    let list = format!("{below},file.max-transfer=64k,{fault}=read");
    cut_alike(
        at,
        (
            &list,
            &["read -q 0 128k", "read -q 128k 32k", "read -q 64k 128k"],
        ),
        1,
    );
    // A range of less than a unit is not written as zeroes.
    let list = format!("{below},file.opt-write-zero=128k,{fault}=write-zeroes");
    cut_alike(at, (&list, &["write -q -z 140k 64k"]), 0);
    cut_alike(at, (&list, &["write -q -z 64k 512k"]), 1);
    let list = format!("{below},file.max-discard=64k,{fault}=discard");
    cut_alike(at, (&list, &["discard -q 0 128k"]), 0);
}

/// Requests that reach every event that the engine reports.
const ALL_OVER: &[&str] = &[
    "write -q 100 100",
    "write -q -c 3M 512",
    "read -q 1M 4k",
    "read -q 2M 512",
    "write -q -z 1M 32k",
    "discard -q 1056k 16k",
    "write -q 256k 512k",
    "flush",
    "truncate 64M",
    "write -q 40M 4k",
];

/// Events that those reach.
const REACHED: &[&str] = &[
    "l1_update",
    "l1_grow_alloc_table",
    "l1_grow_write_table",
    "l1_grow_activate_table",
    "l2_load",
    "l2_update",
    "l2_update_compressed",
    "l2_alloc_write",
    "read_aio",
    "read_backing_aio",
    "read_compressed",
    "write_aio",
    "write_compressed",
    "cow_read",
    "reftable_load",
    "refblock_load",
    "refblock_update_part",
    "refblock_alloc",
    "refblock_alloc_hookup",
    "refblock_alloc_write",
    "cluster_alloc",
    "cluster_alloc_bytes",
    "cluster_free",
    "flush_to_os",
    "flush_to_disk",
    "pwritev_rmw_head",
    "pwritev_rmw_after_head",
    "pwritev_rmw_tail",
    "pwritev_rmw_after_tail",
    "pwritev",
    "pwritev_done",
    "none",
];

/// An overlay with small clusters, some of them compressed, over a backing file: `a` over `base`.
fn make_overlay(at: &Path) {
    run(Command::new("truncate")
        .args(["-s", "4M"])
        .arg(at.join("base")));
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=512",
        "-F",
        "raw",
        "-b",
        "base",
    ];
    qemu_img(&create, &[&at.join("template")]);
    let lines = ["-c", "write -q 1M 64k", "-c", "write -q -c 2M 512"];
    run(qemu_io().current_dir(at).args(lines).arg("template"));
}

/// The work of [`ALL_OVER`] with a rule; then both checkers must find leaks at most. Whether a line
/// failed.
fn has_failed(at: &Path, rule: &str) -> bool {
    std::fs::copy(at.join("template"), at.join("a")).unwrap();
    let list = format!(
        "driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.align=512,file.inject-error.0.{}",
        rule.replace(',', ",file.inject-error.0.")
    );
    let mut args = vec!["--image-opts"];
    ALL_OVER.iter().for_each(|line| args.extend(["-c", line]));
    args.push(&list);
    let (text, code) = output_of(our_io, at, &args);
    assert!(matches!(code, Some(0 | 1)), "{rule}: {text}");
    for mut checker in [Command::new("qemu-img"), cowslip()] {
        let found = outcome(checker.current_dir(at).args(["check", "-f", "qcow2", "a"]));
        let verdict = found.status.code();
        let clean_or_leaks = matches!(verdict, Some(0 | 3));
        assert!(clean_or_leaks, "{rule}: {found:?} after {text}");
    }
    code == Some(1)
}

#[test]
fn after_a_fault_at_any_event_an_image_has_leaks_at_most() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    make_overlay(at);
    for event in REACHED {
        for rule in ["", ",once=on,errno=28"] {
            let rule = format!("event={event}{rule}");
            let failed = has_failed(at, &rule);
            assert!(failed || rule.contains("once"), "{rule} made nothing fail");
        }
    }
    assert!(
        !has_failed(at, "event=l1_shrink_write_table"),
        "never reported"
    );
}

#[test]
fn after_faults_at_random_places_an_image_has_leaks_at_most() {
    let Some(directory) = scratch_beside(QEMU) else {
        return;
    };
    make_overlay(directory.path());
    let mut rng = Rng::new(6);
    let mut failed = 0;
    for _ in 0..80 {
        let event = rng.pick(&["none", "write_aio", "l2_load", "pwritev"]);
        let kind = rng.pick(&["read", "write", "write-zeroes", "discard", "flush"]);
        let (once, errno) = (rng.pick(&["on", "off"]), rng.pick(&["5", "28"]));
        let sector = match rng.below(3) {
            0 => format!(",sector={}", rng.below(400)),
            _ => String::new(),
        };
        let rule = format!("event={event},iotype={kind},once={once},errno={errno}{sector}");
        failed += u32::from(has_failed(directory.path(), &rule));
    }
    assert!(failed >= 20, "only {failed} of the rules hit anything");
}

#[test]
fn a_part_of_a_file_is_a_disk() {
    let at = &scratch();
    std::fs::write(at.join("a"), vec![9u8; 8192]).unwrap();
    let list = "driver=raw,offset=512,size=1k,file.filename=a";
    let lines = ["-c", "write -q -P 3 0 512", "-c", "read -q -P 9 512 512"];
    let (text, code) = output_of(
        our_io,
        at,
        &[&["--image-opts"], &lines[..], &[list]].concat(),
    );
    assert_eq!((text.as_str(), code), ("", Some(0)));
    let bytes = std::fs::read(at.join("a")).unwrap();
    assert!(bytes.len() == 8192 && bytes[..512].iter().all(|&byte| byte == 9));
    assert!(bytes[512..1024].iter().all(|&byte| byte == 3));
    assert!(bytes[1024..].iter().all(|&byte| byte == 9));
    let (text, code) = output_of(our_io, at, &["--image-opts", "-c", "write -q 1k 512", list]);
    assert_eq!(code, Some(1), "{text}");
}
