//! The same names and images mean the same disk as in QEMU: what ours makes, QEMU's tools open, and
//! what ours refuses is refused before anything has changed.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::support::{cowslip, outcome, peers_are_installed, run, scratch};

const PEERS: &[&str] = &["qemu-img", "qemu-io"];

/// A scratch directory in which the programs run.
struct Bench(crate::support::Scratch);

impl Bench {
    fn new() -> Option<Bench> {
        peers_are_installed(PEERS).then(|| Bench(scratch()))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn theirs(&self, words: &[&str]) -> String {
        run(Command::new("qemu-img")
            .current_dir(self.0.path())
            .args(words))
    }

    /// Ours, under QEMU's name.
    fn ours(&self, words: &[&str]) -> Output {
        let mut command = cowslip();
        command.arg0("qemu-img").current_dir(self.0.path());
        outcome(command.args(words))
    }

    fn ours_succeeds(&self, words: &[&str]) -> String {
        let output = self.ours(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn io(&self, file: &str, commands: &[&str]) {
        let mut program = Command::new("qemu-io");
        program.current_dir(self.0.path());
        for command in commands {
            program.args(["-c", command]);
        }
        run(program.args(["-f", "qcow2", file]));
    }

    /// A qcow2 image of 1 MiB of that byte.
    fn image(&self, name: &str, byte: u8) {
        self.theirs(&["create", "-q", "-f", "qcow2", "new.qcow2", "1M"]);
        self.io("new.qcow2", &[&format!("write -P {byte} 0 1M")]);
        std::fs::rename(self.path("new.qcow2"), self.path(name)).unwrap();
    }

    fn over(&self, backing: &str, name: &str) {
        let words = [
            "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", backing, name,
        ];
        self.theirs(&words);
    }
}

#[test]
fn what_follows_the_protocol_of_files_is_a_path() {
    let Some(bench) = Bench::new() else { return };
    let odd = r#"json:{"driver":"qcow2","file.filename":"x.qcow2"}"#;
    let literal = format!("file:{odd}");
    bench.image("x.qcow2", 1);
    bench.over("x.qcow2", "top.qcow2");
    // Without a file of that name nobody could open the image.
    for words in [
        &["rebase", "-b", &literal, "-F", "qcow2", "top.qcow2"][..],
        &[
            "create", "-f", "qcow2", "-b", &literal, "-F", "qcow2", "no.qcow2",
        ],
    ] {
        let output = bench.ours(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {output:?}");
    }
    assert!(!bench.path("no.qcow2").exists());
    // With it, it is the file that is compared, and named.
    bench.image(odd, 9);
    bench.ours_succeeds(&["rebase", "-b", &literal, "-F", "qcow2", "top.qcow2"]);
    bench.theirs(&["compare", "x.qcow2", "top.qcow2"]);
    bench.ours_succeeds(&["compare", "x.qcow2", "top.qcow2"]);
}

#[test]
fn the_protocol_of_files_is_relative_to_the_current_directory() {
    let Some(bench) = Bench::new() else { return };
    std::fs::create_dir(bench.path("s")).unwrap();
    bench.image("base.qcow2", 1);
    bench.image("s/base.qcow2", 2);
    bench.over("file:base.qcow2", "s/top.qcow2");
    bench.io("s/top.qcow2", &["write -P 7 0 64k"]);
    bench.ours_succeeds(&["commit", "-q", "s/top.qcow2"]);
    bench.io("base.qcow2", &["read -P 7 0 64k", "read -P 1 64k 960k"]);
    bench.io("s/base.qcow2", &["read -P 2 0 1M"]);
}

#[test]
fn a_path_after_the_protocol_of_files_may_have_colons() {
    let Some(bench) = Bench::new() else { return };
    bench.image("a:b.qcow2", 3);
    let backed = ["-b", "file:a:b.qcow2", "-F", "qcow2"];
    bench.ours_succeeds(&[&["create", "-q", "-f", "qcow2"], &backed[..], &["c.qcow2"]].concat());
    bench.ours_succeeds(&["info", "--backing-chain", "c.qcow2"]);
    bench.theirs(&["compare", "file:a:b.qcow2", "c.qcow2"]);
    let target = [
        "-O",
        "qcow2",
        "-B",
        "file:a:b.qcow2",
        "-F",
        "qcow2",
        "c.qcow2",
        "d.qcow2",
    ];
    bench.ours_succeeds(&[&["convert"], &target[..]].concat());
    bench.ours_succeeds(&[&["rebase"], &backed[..], &["d.qcow2"]].concat());
    bench.theirs(&["compare", "file:a:b.qcow2", "d.qcow2"]);
}

#[test]
fn descriptions_that_no_image_opens_with_are_refused_before_anything_changes() {
    let Some(bench) = Bench::new() else { return };
    bench.image("x.qcow2", 1);
    bench.over("x.qcow2", "top.qcow2");
    let before = std::fs::read(bench.path("top.qcow2")).unwrap();
    for options in [
        r#""backing":null"#,
        r#""backing":{"driver":"qcow2","file.filename":"x.qcow2"}"#,
    ] {
        let name = format!(r#"json:{{"driver":"qcow2","file.filename":"x.qcow2",{options}}}"#);
        for words in [
            &["rebase", "-b", &name, "-F", "qcow2", "top.qcow2"][..],
            &[
                "create", "-f", "qcow2", "-b", &name, "-F", "qcow2", "no.qcow2",
            ],
        ] {
            let output = bench.ours(words);
            assert_eq!(output.status.code(), Some(1), "{words:?}: {output:?}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains("'backing' in the description"), "{said}");
        }
    }
    assert!(std::fs::read(bench.path("top.qcow2")).unwrap() == before);
    assert!(!bench.path("no.qcow2").exists());
}

#[test]
fn a_disk_of_no_bytes_has_no_bitmaps() {
    let Some(bench) = Bench::new() else { return };
    bench.theirs(&["create", "-q", "-f", "qcow2", "z.qcow2", "0"]);
    assert_eq!(
        bench
            .ours(&["bitmap", "--add", "z.qcow2", "b"])
            .status
            .code(),
        Some(1)
    );
    bench.theirs(&["create", "-q", "-f", "qcow2", "a.qcow2", "1M"]);
    bench.ours_succeeds(&["bitmap", "--add", "a.qcow2", "b"]);
    let shrunk = bench.ours(&["resize", "-q", "--shrink", "a.qcow2", "0"]);
    assert_eq!(shrunk.status.code(), Some(1), "{shrunk:?}");
    for name in ["z.qcow2", "a.qcow2"] {
        bench.theirs(&["check", "-q", name]);
        bench.io(name, &["length"]);
    }
}

#[test]
fn the_map_of_a_part_of_a_file_has_the_places_in_the_file() {
    let Some(bench) = Bench::new() else { return };
    std::fs::write(bench.path("b.raw"), vec![5; 256 << 10]).unwrap();
    let window = "driver=raw,offset=65536,size=131072,file.filename=b.raw";
    let below = r#"json:{"driver":"raw","offset":65536,"size":131072,"file.filename":"b.raw"}"#;
    bench.theirs(&[
        "create", "-q", "-f", "qcow2", "-b", below, "-F", "raw", "o.qcow2",
    ]);
    for format in ["--output=json", "--output=human"] {
        for image in [&["--image-opts", window][..], &["-f", "qcow2", "o.qcow2"]] {
            let words = [&["map", format], image].concat();
            let (ours, theirs) = (bench.ours_succeeds(&words), bench.theirs(&words));
            assert_eq!(ours, theirs, "{words:?}");
            assert!(theirs.contains(if format.ends_with("json") {
                "65536"
            } else {
                "0x10000"
            }));
        }
    }
}

#[test]
fn the_map_of_an_encrypted_image_has_no_places() {
    let Some(bench) = Bench::new() else { return };
    let secret = ["--object", "secret,id=s,data=abc"];
    let options = "extended_l2=on,encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let create = [
        "create", "-q", "-f", "qcow2", "-o", options, "e.qcow2", "1M",
    ];
    bench.theirs(&[&create[..1], &secret[..], &create[1..]].concat());
    let image = "driver=qcow2,encrypt.key-secret=s,file.filename=e.qcow2";
    let write = ["-c", "write 0 4k"];
    run(Command::new("qemu-io")
        .current_dir(bench.0.path())
        .args(secret)
        .args(write)
        .args(["--image-opts", image]));
    let map = ["--output=json", "--image-opts", image];
    let words = [&["map"], &secret[..], &map[..]].concat();
    assert_eq!(bench.ours_succeeds(&words), bench.theirs(&words));
}

#[test]
fn a_target_is_made_where_its_symbolic_links_lead() {
    let Some(bench) = Bench::new() else { return };
    std::fs::create_dir(bench.path("s")).unwrap();
    std::fs::write(bench.path("a.raw"), vec![5; 64 << 10]).unwrap();
    for (name, words) in [
        (
            "c",
            &["convert", "-f", "raw", "-O", "raw", "a.raw", "c"][..],
        ),
        ("d", &["dd", "-f", "raw", "-O", "raw", "if=a.raw", "of=d"]),
        ("e", &["create", "-q", "-f", "raw", "e", "64k"]),
    ] {
        let made = format!("s/{name}.bin");
        symlink(format!("s/{name}.link"), bench.path(name)).unwrap();
        symlink(format!("{name}.bin"), bench.path(&format!("s/{name}.link"))).unwrap();
        bench.ours_succeeds(words);
        assert!(bench.path(name).is_symlink());
        assert_eq!(
            bench.path(&made).metadata().unwrap().len(),
            64 << 10,
            "{made}"
        );
    }
    symlink("nowhere/x", bench.path("f")).unwrap();
    assert!(
        !bench
            .ours(&["create", "-f", "raw", "f", "64k"])
            .status
            .success()
    );
    assert!(bench.path("f").is_symlink());
}

#[test]
fn a_new_target_is_claimed_as_a_whole() {
    let Some(bench) = Bench::new() else { return };
    for (name, byte) in [("a.raw", 1), ("b.raw", 2)] {
        std::fs::write(bench.path(name), vec![byte; 8 << 20]).unwrap();
    }
    let convert = |source| {
        let mut command = cowslip();
        command.arg0("qemu-img").current_dir(bench.0.path());
        command.args(["convert", "-f", "raw", "-O", "raw", source, "t.raw"]);
        command.stderr(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    for round in 0..5 {
        let mut both = ["a.raw", "b.raw"].map(convert);
        let done = both.each_mut().map(|child| child.wait().unwrap().success());
        // One after the other both may succeed; the content is that of one of them.
        if done.contains(&true) {
            let made = std::fs::read(bench.path("t.raw")).unwrap();
            assert_eq!(made.len(), 8 << 20, "round {round}: {done:?}");
            let is_one = made.iter().all(|byte| *byte == made[0]) && [1, 2].contains(&made[0]);
            assert!(is_one, "round {round}: {done:?}");
        }
        drop(std::fs::remove_file(bench.path("t.raw")));
    }
}
