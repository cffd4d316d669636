//! Formats and protocols that QEMU has and we have not: each is named, with what to use in its
//! place, however it is met, and no file of theirs is taken for raw.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::golden::{self, words};
use crate::support::{cowslip, outcome, run, scratch, scratch_beside, succeeds};

/// Formats that the machine's qemu-img makes.
const MADE: &[&str] = &["vmdk", "vdi", "vhdx", "vpc", "qed", "qcow", "parallels"];

/// How verbs meet an image without a format, and the exit code for what they cannot open.
const MEETINGS: &[(&str, i32)] = &[
    ("info IMAGE", 1),
    ("info --output=json IMAGE", 1),
    ("check IMAGE", 1),
    ("map IMAGE", 1),
    ("convert -O raw IMAGE new", 1),
    ("compare IMAGE base.raw", 2),
    ("compare base.raw IMAGE", 2),
    ("resize IMAGE 2M", 1),
    ("snapshot -l IMAGE", 1),
    ("snapshot -c x IMAGE", 1),
    ("bitmap --add IMAGE x", 1),
    ("commit IMAGE", 1),
    ("rebase -b base.raw -F raw IMAGE", 1),
    ("amend -o size=2M IMAGE", 1),
    ("measure -O qcow2 IMAGE", 1),
    ("dd if=IMAGE of=new", 1),
    ("bench -c 1 IMAGE", 1),
    ("create -f qcow2 -b IMAGE -F FORMAT new", 1),
    ("info -f FORMAT IMAGE", 1),
    ("convert -f FORMAT -O raw IMAGE new", 1),
    ("compare -F FORMAT base.raw IMAGE", 2),
    ("info --image-opts driver=FORMAT,file.filename=IMAGE", 1),
    (
        "info json:{\"driver\":\"FORMAT\",\"file\":{\"driver\":\"file\",\"filename\":\"IMAGE\"}}",
        1,
    ),
    ("create -f FORMAT new 1M", 1),
    ("convert -O FORMAT base.raw new", 1),
    ("dd -O FORMAT if=base.raw of=new", 1),
    ("measure -O FORMAT --size 1M", 1),
    ("rebase -b IMAGE -F FORMAT over.qcow2", 1),
];

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A line as `qemu-img` would take it, by the command under test.
fn ours(dir: &Path, line: &str) -> Output {
    outcome(golden::ours().current_dir(dir).args(words(line)))
}

fn prepare(dir: &Path) {
    std::fs::write(dir.join("base.raw"), vec![1; 1 << 20]).unwrap();
    succeeds(dir, "create -q -f qcow2 -b base.raw -F raw over.qcow2");
}

#[test]
fn images_of_other_formats_are_named_and_left_alone() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    prepare(dir.path());
    for format in MADE {
        let image = format!("image.{format}");
        let create = format!("create -q -f {format} {image} 1M");
        run(Command::new("qemu-img")
            .current_dir(&dir)
            .args(words(&create)));
        let before = std::fs::read(dir.path().join(&image)).unwrap();
        for (line, code) in MEETINGS {
            let line = line.replace("IMAGE", &image).replace("FORMAT", format);
            let refused = ours(dir.path(), &line);
            let said = errors(&refused);
            assert_eq!(refused.status.code(), Some(*code), "{line}: {said}");
            let names = format!("'{format}' is not supported; ");
            assert!(said.contains(&names), "{line}: {said}");
            assert!(!dir.path().join("new").exists(), "{line}");
            assert!(
                std::fs::read(dir.path().join(&image)).unwrap() == before,
                "{line}"
            );
        }
        // Opened with the format raw, it shows its bytes.
        let copied = ours(dir.path(), &format!("convert -f raw -O raw {image} copy"));
        assert!(copied.status.success(), "{}", errors(&copied));
        let copy = std::fs::read(dir.path().join("copy")).unwrap();
        assert!(
            copy[..before.len()] == before && copy.len() < before.len() + 512,
            "{format}"
        );
        // The header may name it, as long as it is not opened.
        let named = ours(
            dir.path(),
            &format!("rebase -u -b {image} -F {format} over.qcow2"),
        );
        assert!(named.status.success(), "{}", errors(&named));
        let info = errors(&ours(dir.path(), "convert -O raw over.qcow2 new"));
        assert!(info.contains(&format!("'{format}'")), "{info}");
        let back = ours(dir.path(), "rebase -u -b base.raw -F raw over.qcow2");
        assert!(back.status.success(), "{}", errors(&back));
    }
}

#[test]
fn beginnings_of_formats_that_nobody_makes_are_known() {
    let dir = scratch();
    let mut bochs = b"Bochs Virtual HD Image\0".to_vec();
    let mut descriptor = b"# Disk DescriptorFile\nversion=1\nCID=1\n".to_vec();
    let mut cloop = b"#!/bin/sh\n#V2.0 Format\n".to_vec();
    for (format, bytes) in [
        ("bochs", &mut bochs),
        ("vmdk", &mut descriptor),
        ("cloop", &mut cloop),
    ] {
        bytes.resize(2048, 0);
        std::fs::write(dir.path().join("image"), bytes).unwrap();
        let said = errors(&ours(dir.path(), "info image"));
        assert!(
            said.contains(&format!("'{format}' is not supported")),
            "{said}"
        );
    }
}

#[test]
fn protocols_are_named() {
    let dir = scratch();
    prepare(dir.path());
    for (name, instead) in [
        ("ftp://localhost/a", "nbdkit -r curl"),
        ("ssh://localhost/a", "nbdkit ssh"),
        #[cfg(not(feature = "rbd"))]
        ("rbd:pool/image", "rbd device map"),
        ("iscsi://localhost/target/0", "iscsiadm"),
        ("gluster://localhost/volume/a", "mount -t glusterfs"),
        ("nfs://localhost/a", "mount -t nfs"),
        ("fat:directory", "mkfs.fat"),
        ("foo:a", "Unknown protocol 'foo'"),
    ] {
        for line in [
            "info NAME",
            "convert -O raw NAME new",
            "convert -O raw base.raw NAME",
            "create NAME 1M",
        ] {
            let line = line.replace("NAME", name);
            let refused = ours(dir.path(), &line);
            assert_eq!(refused.status.code(), Some(1), "{line}");
            assert!(
                errors(&refused).contains(instead),
                "{line}: {}",
                errors(&refused)
            );
        }
    }
    let options = "info json:{\"file.driver\":\"ftps\",\"file.url\":\"ftps://localhost/a\",\"file.timeout\":3600}";
    let said = errors(&ours(dir.path(), options));
    assert!(
        said.contains("'ftps' is not supported; let nbdkit serve it"),
        "{said}"
    );
}

/// A guest that writes such a header into a disk whose format was guessed would choose what opens
/// it next time.
#[test]
fn no_header_gets_into_a_disk_whose_format_was_guessed() {
    let Some(dir) = scratch_beside(&["qemu-io"]) else {
        return;
    };
    let mut header = b"KDMV".to_vec();
    header.resize(512, 0);
    std::fs::write(dir.path().join("header"), header).unwrap();
    let said = |mut program: Command| {
        std::fs::write(dir.path().join("disk"), vec![0; 1 << 20]).unwrap();
        let line = ["-c", "write -s header 0 512", "disk"];
        let output = outcome(program.current_dir(&dir).args(line));
        let disk = std::fs::read(dir.path().join("disk")).unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            disk[0],
        )
    };
    let mut ours = cowslip();
    ours.arg("qemu-io");
    let (ours, theirs) = (said(ours), said(Command::new("qemu-io")));
    assert_eq!(ours, theirs);
    assert_eq!(ours.2, 0);
}
