//! `create` and `info` beside qemu-img's: the same words, exit codes and files.
//!
//! Each case is a command line, run by both in directories of the same content. What differs on
//! purpose is in [`DELIBERATE`], with the reason.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::Command;

use crate::support::golden::{self, said, words};
use crate::support::{
    cowslip, outcome, peer_succeeds, peers_are_installed, program, qemu_img, run, scratch,
    scratch_beside, succeeds, twins,
};
use serde_json::json;

/// Command lines of `create`. `x` is the file that is made. Words are cut at blanks; `''` is an
/// empty one.
const CREATE: &str = "
-f qcow2 x 1M
-f qcow2
-f qcow2 x
-f foo x 1M
--bar x 1M
x 1M y
x 1001
-fqcow2 x 1M
x 1M -f qcow2 -q
-f raw -f qcow2 x 1M
-q -f qcow2 x 1M
-o help -f qcow2
-o help -f raw
-o help -f qcow2 x
-o help -f raw x
-f qcow2 x 1X
-f qcow2 x 16E
-f qcow2 x 8E
-f qcow2 x 7E
-f qcow2 x 2305843009213693951
-f qcow2 x ''
-f qcow2 x 1.5M
-f qcow2 x 0x100
-f qcow2 x 1000
-f qcow2 -o size=3M x 4M
-f qcow2 -o size=3M x
-f qcow2 -o size=0x100000 x
-f qcow2 -o size=-1 x
-f qcow2 -o '' x 1M
-f qcow2 -o , x 1M
-f qcow2 -o cluster_size=64k, x 1M
-f qcow2 -o foo=bar x 1M
-f qcow2 -o cluster_size=3 x 1M
-f qcow2 -o cluster_size=4M x 1M
-f qcow2 -o cluster_size=abc x 1M
-f qcow2 -o cluster_size=-1 x 1M
-f qcow2 -o cluster_size x 1M
-f qcow2 -o lazy_refcounts x 1M
-f qcow2 -o nolazy_refcounts x 1M
-f qcow2 -o lazy_refcounts=maybe x 1M
-f qcow2 -o lazy_refcounts=yes x 1M
-f qcow2 -o compat=v2,lazy_refcounts=on x 1M
-f qcow2 -o compat=1.1 x 1M
-f qcow2 -o compat=0.10 x 1M
-f qcow2 -o compat=v4 x 1M
-f qcow2 -o compat=v2,refcount_bits=8 x 1M
-f qcow2 -o compat=v2,extended_l2=on x 1M
-f qcow2 -o compat=v2,compression_type=zstd x 1M
-f qcow2 -o compat=v2,data_file=d x 1M
-f qcow2 -o refcount_bits=7 x 1M
-f qcow2 -o refcount_bits=0 x 1M
-f qcow2 -o refcount_bits=-1 x 1M
-f qcow2 -o refcount_bits=abc x 1M
-f qcow2 -o extended_l2=on,cluster_size=8k x 1M
-f qcow2 -o compression_type=lzo x 1M
-f qcow2 -o compression_type=zstd x 1M
-f qcow2 -o preallocation=some x 1M
-f qcow2 -o preallocation=metadata x 1M
-f qcow2 -o preallocation=falloc x 1M
-f qcow2 -o preallocation=full x 1M
-f qcow2 -o data_file_raw=on x 1M
-f qcow2 -o data_file=d,data_file_raw=on -b b.raw -F raw x 1M
-f qcow2 -o data_file=d x 1M
-f qcow2 -o data_file=d,data_file_raw=on x 1M
-f qcow2 -o data_file= x 1M
-f raw -o preallocation=falloc x 1M
-f raw -o preallocation=full x 1M
-f raw -o preallocation=metadata x 1M
-f raw -o preallocation=xx x 1M
-f raw -o cluster_size=64k x 1M
-f raw -b b.raw -F raw x 1M
-f qcow2 -F raw x 1M
-f qcow2 -b b.raw -F raw x
-f qcow2 -b b.raw -F raw x 3M
-f qcow2 -b a.qcow2 -F qcow2 x
-f qcow2 -b odd.raw -F raw x
-f qcow2 -b b.raw x
-f qcow2 -b b.raw -F foo x
-f qcow2 -b b.raw -F qcow2 x
-f qcow2 -b nonex -F raw x
-f qcow2 -b nonex -F raw x 1M
-f qcow2 -b nonex x 1M
-f qcow2 -b '' x 1M
-f qcow2 -b x -F qcow2 x 1M
-f qcow2 -u -b nonex -F raw x 1M
-f qcow2 -u -b nonex -F raw x
-f qcow2 -u -b nonex x 1M
-f qcow2 -u -b nonex -F foo x 1M
-f qcow2 -b a,b -F raw x
-f qcow2 -o backing_file=a,,b,backing_fmt=raw x
-f qcow2 -o backing_file=b.raw -o backing_fmt=raw,size=3M x
-f qcow2 -o backing_file=top.qcow2 -b a.qcow2 -F qcow2 x
-f qcow2 -o preallocation=metadata -b b.raw -F raw x
-f qcow2 -o preallocation=metadata,extended_l2=on -b b.raw -F raw x
-f qcow2 nodir/x 1M
-f qcow2 . 1M
-f qcow2 foo:x 1M
-f qcow2 file:x 1M
";

/// Command lines of `info`.
const INFO: &str = "
top.qcow2
a.qcow2
ext.qcow2
v2.qcow2
snap.qcow2
b.raw
odd.raw
aes.qcow2
marked.qcow2
alone.qcow2
sub/o.qcow2
--backing-chain top.qcow2
--backing-chain sub/o.qcow2
--backing-chain loop.qcow2
--backing-chain alone.qcow2
-U -f qcow2 top.qcow2
-f raw top.qcow2
-f qcow2 b.raw
-f foo b.raw
nonex
.
foo:b.raw
file:b.raw
a b
--image-opts driver=qcow2,file.filename=top.qcow2
--image-opts driver=raw,file.driver=file,file.filename=top.qcow2
--image-opts driver=qcow2,file.filename=nonex
--image-opts driver=qcow2,file.filename=ext.qcow2,data-file.filename=d.raw
--output=json --image-opts driver=qcow2,file.filename=ext.qcow2,data-file.filename=d.raw
json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"top.qcow2\"}}
";

/// Command lines after which the directories may differ, and why.
const DELIBERATE: &[(&str, &str)] = &[(
    "-f raw -o preallocation=metadata x 1M",
    "the refused file is not left behind",
)];

/// Files that the command lines name.
fn prepare(dir: &Path) {
    let make = |words: &[&str]| run(Command::new("qemu-img").current_dir(dir).args(words));
    std::fs::write(dir.join("b.raw"), vec![0; 1 << 20]).unwrap();
    std::fs::write(dir.join("a,b"), vec![0; 1 << 20]).unwrap();
    std::fs::write(dir.join("odd.raw"), [0; 1000]).unwrap();
    std::fs::create_dir(dir.join("sub")).unwrap();
    let create = ["create", "-q", "-f", "qcow2"];
    for line in [
        "-b b.raw -F raw a.qcow2",
        "-b a.qcow2 -F qcow2 top.qcow2 2M",
        "-o data_file=d.raw,data_file_raw=on,compression_type=zstd,extended_l2=on,\
         lazy_refcounts=on ext.qcow2 1G",
        "-o compat=v2,cluster_size=512 v2.qcow2 1M",
        "snap.qcow2 64M",
        "-u -b missing -F raw alone.qcow2 1M",
        "-u -b loop.qcow2 -F qcow2 loop2.qcow2 1M",
        "-u -b loop2.qcow2 -F qcow2 loop.qcow2 1M",
        "-u -b ../b.raw -F raw sub/o.qcow2 1M",
        "--object secret,id=s,data=abc -o encrypt.format=aes,encrypt.key-secret=s aes.qcow2 1M",
    ] {
        make(&[&create[..], &words(line)].concat());
    }
    for line in [
        "snapshot -c first snap.qcow2",
        "snapshot -c a-name-that-is-longer-than-its-column snap.qcow2",
        "bitmap --add snap.qcow2 one",
        "bitmap --add -g 128k --disable snap.qcow2 two",
    ] {
        make(&words(line));
    }
    let mut marked = std::fs::read(dir.join("top.qcow2")).unwrap();
    marked[79] = 3; // Dirty and corrupt.
    std::fs::write(dir.join("marked.qcow2"), marked).unwrap();
}

fn theirs(dir: &Path, verb: &str, line: &[&str]) -> String {
    said(&outcome(
        Command::new("qemu-img")
            .current_dir(dir)
            .arg(verb)
            .args(line),
    ))
}

fn ours(dir: &Path, verb: &str, line: &[&str]) -> String {
    said(&outcome(
        cowslip()
            .current_dir(dir)
            .args(["qemu-img", verb])
            .args(line),
    ))
}

#[test]
fn create_says_and_makes_what_qemu_img_does() {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    prepare(here.path());
    prepare(there.path());
    let mut failures = String::new();
    for line in CREATE.lines().filter(|line| !line.is_empty()) {
        for dir in [&here, &there] {
            for name in ["x", "d"] {
                std::fs::remove_file(dir.path().join(name)).ok();
            }
        }
        let expected = theirs(there.path(), "create", &words(line));
        let actual = ours(here.path(), "create", &words(line));
        if actual != expected {
            failures += &format!("create {line}\n--- expected\n{expected}--- actual\n{actual}");
        }
        let files = ["x", "d"].map(|name| {
            let read = |dir: &Path| std::fs::read(dir.join(name)).ok();
            read(here.path()) == read(there.path())
        });
        let deliberate = DELIBERATE.iter().any(|(known, _)| *known == line);
        if files != [true, true] && !deliberate {
            failures += &format!("create {line}\nthe files differ\n");
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn info_says_what_qemu_img_says() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    prepare(dir.path());
    let mut failures = String::new();
    for line in INFO.lines().filter(|line| !line.is_empty()) {
        for output in ["--output=human", "--output=json"] {
            let mut line = words(line);
            line.push(output);
            let expected = theirs(dir.path(), "info", &line);
            let actual = ours(dir.path(), "info", &line);
            if actual != expected {
                let line = line.join(" ");
                failures += &format!("info {line}\n--- expected\n{expected}--- actual\n{actual}");
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Sets these incompatible bits of an image, and the table of their names: kind, bit, name.
fn with_features(image: &[u8], bits: u64, names: &[(u8, u8, &[u8])]) -> Vec<u8> {
    let mut image = image.to_vec();
    image[72..80].copy_from_slice(&bits.to_be_bytes());
    let start = u32::from_be_bytes(image[100..104].try_into().unwrap()) as usize;
    image[start..4096].fill(0);
    if names.is_empty() {
        return image;
    }
    let entry = |(kind, bit, name): &(u8, u8, &[u8])| {
        let mut entry = [&[*kind, *bit], *name].concat();
        entry.resize(48, 0);
        entry
    };
    let table: Vec<u8> = names.iter().flat_map(entry).collect();
    let len = table.len() as u32;
    let parts = [
        &0x6803_f857_u32.to_be_bytes()[..],
        &len.to_be_bytes(),
        &table,
    ];
    let extension = parts.concat();
    image[start..start + extension.len()].copy_from_slice(&extension);
    image
}

#[test]
fn features_that_are_not_known_are_named_as_by_qemu_img() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    peer_succeeds(&dir, "qemu-img create -q -f qcow2 new.qcow2 1M");
    let image = std::fs::read(dir.path().join("new.qcow2")).unwrap();
    let long = [b'n'; 46];
    let tables: [&[(u8, u8, &[u8])]; 7] = [
        &[],
        &[(0, 63, b"c")],
        &[(0, 63, b"c"), (0, 61, b"a"), (0, 62, b"b")],
        &[
            (0, 61, b"first"),
            (0, 61, b"second"),
            (1, 62, b"compatible"),
        ],
        &[(0, 61, b""), (0, 62, b"b"), (0, 63, b"c")],
        &[(2, 63, b"autoclear"), (0, 17, b"not set"), (0, 62, b"b")],
        &[(0, 62, &long), (0, 5, b"next")],
    ];
    for names in tables {
        for bits in [1 << 63, 7 << 61, 1 << 62 | 1 << 5] {
            let image = with_features(&image, bits, names);
            std::fs::write(dir.path().join("a.qcow2"), image).unwrap();
            for line in [&["a.qcow2"][..], &["-f", "qcow2", "a.qcow2"]] {
                let [expected, actual] =
                    [theirs, ours].map(|program| program(dir.path(), "info", line));
                assert!(expected.contains("Unsupported"), "{expected}");
                assert_eq!(actual, expected, "{bits:x} {names:?}");
            }
        }
    }
}

#[test]
fn what_was_made_is_described_in_json() {
    let dir = scratch();
    let made = succeeds(dir.path(), "create --json -f qcow2 x 1M");
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    assert_eq!(made["options"]["size"], "1048576");
    let info = succeeds(dir.path(), "info --json x");
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["virtual-size"], 1 << 20);
    assert_eq!(info["format"], "qcow2");
    let limits = succeeds(dir.path(), "info --json --limits x");
    let limits: serde_json::Value = serde_json::from_str(&limits).unwrap();
    assert_eq!(limits["limits"]["discard-alignment"], 64 << 10);
    assert_eq!(limits["children"][0]["info"]["limits"]["max-iov"], 1024);
}

#[test]
fn all_that_changes_or_tells_an_image_speaks_json() {
    let dir = scratch();
    succeeds(dir.path(), "create -q -f qcow2 base 1M");
    succeeds(dir.path(), "create -q -f qcow2 -b base -F qcow2 x");
    for (line, place, expected) in [
        ("resize --json x 2M", "/virtual-size-before", json!(1 << 20)),
        ("resize --json x +1M", "/virtual-size", json!(3 << 20)),
        (
            "amend --json -o lazy_refcounts=on x",
            "/options",
            json!({ "lazy_refcounts": "on" }),
        ),
        ("snapshot --json -c one x", "/action", json!("create")),
        ("snapshot --json -l x", "/0/name", json!("one")),
        ("snapshot --json -d one x", "/name", json!("one")),
        (
            "bitmap --json --add --disable x b",
            "/actions",
            json!(["add", "disable"]),
        ),
        ("bitmap --json --remove x b", "/bitmap", json!("b")),
        ("commit --json x", "/emptied", json!(true)),
        (
            "rebase --json -u -b base -F qcow2 x",
            "/copied",
            json!(false),
        ),
        ("rebase --json -b '' x", "/backing-filename", json!(null)),
        ("check --json x", "/check-errors", json!(0)),
        ("map --json x", "/0/length", json!(3 << 20)),
        (
            "measure --json -O qcow2 x",
            "/fully-allocated",
            json!(3_473_408),
        ),
        ("compare --json x x", "/identical", json!(true)),
        ("clone --json --copy x y", "/target", json!("y")),
        (
            "dd --json -f qcow2 -O qcow2 if=x of=z bs=64k count=2",
            "/virtual-size",
            json!(128 << 10),
        ),
    ] {
        let report = succeeds(dir.path(), line);
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report.pointer(place), Some(&expected), "{line}: {report}");
    }
    let quiet = succeeds(dir.path(), "resize -q --json x 4M");
    assert_eq!(quiet, "");
}

#[test]
fn json_of_a_failure_is_a_message_and_an_exit_code() {
    let dir = scratch();
    for (line, code) in [
        ("create --json -f qcow2 none/x 1M", 1),
        ("create --json -f qcow2 -o cluster_size=3 x 1M", 1),
        ("check --json none", 1),
        ("info --json none", 1),
        ("map --json none", 1),
        ("measure --json -O qcow2 none", 1),
        ("resize --json none 1M", 1),
        ("amend --json -o compat=v3 none", 1),
        ("snapshot --json -l none", 1),
        ("snapshot --json -c s none", 1),
        ("bitmap --json --add none b", 1),
        ("commit --json none", 1),
        ("rebase --json -u -b '' none", 1),
        ("compare --json none none", 2),
        ("convert --json -O qcow2 none x", 1),
        ("dd --json if=none of=x", 1),
        ("clone --json none x", 1),
        ("allocate --json --size 1M none/x", 1),
        ("bench --json none", 1),
        ("extents --json none", 1),
    ] {
        let output = outcome(cowslip().current_dir(dir.path()).args(words(line)));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(text.starts_with("cowslip: "), "{line}: {text}");
        assert_eq!(text.lines().count(), 1, "{line}: {text}");
        assert!(output.stdout.is_empty(), "{line}: {output:?}");
    }
}

#[test]
fn the_allocation_policy_stays_in_an_image_that_qemu_changes() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let command =
        |mut command: Command, line: &str| run(command.current_dir(dir.path()).args(words(line)));
    std::fs::write(dir.path().join("base"), [7; 4096]).unwrap();
    command(cowslip(), "create -f qcow2 -o alloc_policy=sparse x 64M");
    let policy = || {
        let info = command(cowslip(), "info --json x");
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        info["format-specific"]["data"]["alloc-policy"].clone()
    };
    assert_eq!(policy(), "sparse");
    let write = ["-c", "write 0 1M", "x"];
    run(Command::new("qemu-io").current_dir(dir.path()).args(write));
    // These rewrite the header, with its extensions.
    command(Command::new("qemu-img"), "rebase -u -b base -F raw x");
    command(Command::new("qemu-img"), "amend -o lazy_refcounts=on x");
    command(Command::new("qemu-img"), "check x");
    assert_eq!(policy(), "sparse");
    let text = command(cowslip(), "info x");
    assert!(text.contains("    alloc policy: sparse\n"), "{text}");
    let listed = command(cowslip(), "create -f qcow2 -o help");
    assert!(listed.contains("  alloc_policy="), "{listed}");
    let refused = outcome(
        cowslip()
            .current_dir(dir.path())
            .args(words("create -f qcow2 -o alloc_policy=dense y 64M")),
    );
    assert_eq!(refused.status.code(), Some(1));
    assert!(!dir.path().join("y").exists());
}

/// Direct I/O to a first block that is a hole would reveal nothing about the alignment that it
/// needs.
#[test]
fn a_raw_file_begins_with_a_block_of_data_as_qemu_imgs_does() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    let run_both = |line: &str| {
        for (name, mut command) in [("ours", golden::ours()), ("theirs", twins::qemu_img())] {
            let line = line.replace("NAME", name);
            run(command.current_dir(dir.path()).args(words(&line)));
        }
    };
    run_both("create -q -f qcow2 NAME.empty 1M");
    for line in [
        "create -q -f raw NAME 0",
        "create -q -f raw NAME 512",
        "create -q -f raw NAME 3584",
        "create -q -f raw NAME 4k",
        "create -q -f raw NAME 1M",
        "create -q -f raw -o preallocation=falloc NAME 1M",
        "convert -f qcow2 -O raw NAME.empty NAME",
        "create -q -f qcow2 -o data_file=NAME NAME.qcow2 1M",
    ] {
        run_both(line);
        let map = |name| golden::mapped(dir.path(), name, &["data", "zero"]);
        assert_eq!(map("ours"), map("theirs"), "{line}");
        for name in ["ours", "theirs"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
    }
}

#[test]
fn an_image_is_not_made_over_its_own_backing_file() {
    let dir = scratch();
    let base = dir.path().join("base");
    std::fs::write(&base, [7; 4096]).unwrap();
    std::fs::hard_link(&base, dir.path().join("other-name")).unwrap();
    let line = [
        "create",
        "-f",
        "qcow2",
        "-b",
        "base",
        "-F",
        "raw",
        "other-name",
    ];
    let made = outcome(cowslip().current_dir(dir.path()).args(line));
    assert_eq!(made.status.code(), Some(1), "{}", said(&made));
    assert_eq!(std::fs::read(&base).unwrap(), [7; 4096]);
}

#[test]
fn an_encrypted_image_is_described_and_its_method_named() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    let image = dir.path().join("l.qcow2");
    let secret = [
        "create",
        "-q",
        "--object",
        "secret,id=s,data=abc",
        "-f",
        "qcow2",
        "-o",
    ];
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    run(Command::new("qemu-img")
        .args(secret)
        .arg(options)
        .arg(&image)
        .arg("1M"));
    let info = run(cowslip().args(["info"]).arg(&image));
    assert!(
        info.contains("encrypted: yes") && info.contains("format: luks"),
        "{info}"
    );
    assert!(qemu_img(&["info"], &[&image]).contains("encrypted: yes"));
}

#[test]
fn an_interrupted_creation_leaves_no_file() {
    let dir = scratch();
    let image = dir.path().join("x");
    let mut child = cowslip()
        .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=full"])
        .arg(&image)
        .arg("64G")
        .spawn()
        .unwrap();
    let has_begun = || std::fs::metadata(&image).is_ok_and(|file| file.len() > 1 << 20);
    while !has_begun() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    run(Command::new("kill").args(["-TERM", &child.id().to_string()]));
    assert!(!child.wait().unwrap().success());
    assert!(!image.exists());
}

/// A limit on the size of files is an error like any other, not the end of the process.
#[test]
fn a_file_beyond_the_limit_of_the_process_is_an_error() {
    let dir = scratch();
    let script = format!(
        "ulimit -f 64; exec {} create -q -f raw a 1M",
        program().display()
    );
    let mut shell = Command::new("sh");
    let refused = outcome(shell.current_dir(dir.path()).args(["-c", &script]));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(text.contains("File too large"), "{text}");
}
