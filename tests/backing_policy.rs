//! `--backing-policy`: which files the images of strangers may name, on all commands.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::support::{cowslip, outcome, run, scratch};

fn words(dir: &Path, words: &str) -> std::process::Command {
    let mut command = cowslip();
    command.current_dir(dir).args(words.split_whitespace());
    command
}

/// Exit code and standard error of a command.
fn verdict(dir: &Path, line: &str) -> (Option<i32>, String) {
    let output = outcome(words(dir, line).stdin(std::process::Stdio::null()));
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// `in/a.qcow2` with this backing file, unseen.
fn overlay(dir: &Path, name: &str, backing: &str) {
    run(&mut words(
        dir,
        &format!("create -q -u -f qcow2 -F raw -b {backing} in/{name} 1M"),
    ));
}

fn tree() -> crate::support::Scratch {
    let dir = scratch();
    fs::create_dir_all(dir.path().join("in/sub")).unwrap();
    for name in ["secret", "in/base", "in/sub/base"] {
        fs::write(dir.path().join(name), vec![b's'; 1 << 20]).unwrap();
    }
    symlink("../secret", dir.path().join("in/link")).unwrap();
    dir
}

/// The commands that open backing files.
const OPENING: [&str; 4] = [
    "map --backing-policy POLICY in/a.qcow2",
    "info --backing-chain --backing-policy POLICY in/a.qcow2",
    "io --backing-policy POLICY -r -c quit in/a.qcow2",
    "create -q -f qcow2 -F qcow2 --backing-policy POLICY -b a.qcow2 in/new.qcow2",
];

#[test]
fn every_command_keeps_to_the_policy() {
    let dir = &tree();
    let forbidden = |line: &str, policy: &str| {
        let (code, text) = verdict(dir, &line.replace("POLICY", policy));
        let refusal = format!("the backing policy '{policy}' forbids that");
        assert!(
            code == Some(1) && text.contains(&refusal),
            "{line} {policy}: {code:?} {text}"
        );
        assert!(text.contains("with the policy 'any'"), "{text}");
    };
    let allowed = |line: &str, policy: &str| {
        let (code, text) = verdict(dir, &line.replace("POLICY", policy));
        assert_eq!(code, Some(0), "{line} {policy}: {text}");
    };
    for hostile in [
        "../secret",
        "link",
        "/dev/zero",
        "/etc/passwd",
        "file:../secret",
    ] {
        overlay(dir, "a.qcow2", hostile);
        for line in OPENING {
            forbidden(line, "same-directory");
            forbidden(line, "none");
        }
    }
    for honest in ["base", "sub/base"] {
        overlay(dir, "a.qcow2", honest);
        for line in OPENING {
            allowed(line, "any");
            allowed(line, "same-directory");
            forbidden(line, "none");
        }
    }
    let socket = dir.join("s").display().to_string();
    for server in ["serve", "qemu-nbd"] {
        let line = format!("{server} -k {socket} --backing-policy POLICY in/a.qcow2");
        forbidden(&line, "none");
    }
    // Commands that open no other file are not affected.
    for line in [
        "info --backing-policy none in/a.qcow2",
        "check --backing-policy none in/a.qcow2",
    ] {
        allowed(line, "none");
    }
    // The user's own choice is none of the image's.
    let chosen = "map --backing-policy none --image-opts \
                  driver=qcow2,file.filename=in/a.qcow2,backing.file.filename=../secret,backing.driver=raw";
    allowed(chosen, "none");
    let (code, text) = verdict(dir, "map --backing-policy some in/a.qcow2");
    assert_eq!(code, Some(1));
    assert!(text.contains("not 'some'"), "{text}");
}

#[test]
fn names_with_protocols_are_refused() {
    let dir = &tree();
    for name in ["http://host/x", "fd:0"] {
        overlay(dir, "a.qcow2", name);
        for line in OPENING {
            for policy in ["any", "same-directory", "none"] {
                let (code, text) = verdict(dir, &line.replace("POLICY", policy));
                assert_eq!(code, Some(1), "{line} {policy} {name}: {text}");
            }
        }
    }
}

#[test]
fn descriptions_are_followed_under_the_policy_any_alone() {
    let dir = &tree();
    for (name, why) in [
        ("nbd:unix:in/nobody", "Failed to connect to 'in/nobody'"),
        ("json:{\"driver\":\"file\"}", "must be specified"),
        ("blkdebug::in/nobody", "No such file"),
    ] {
        overlay(dir, "a.qcow2", name);
        for line in OPENING {
            let (code, text) = verdict(dir, &line.replace("POLICY", "any"));
            assert!(
                code == Some(1) && text.contains(why),
                "{line} {name}: {text}"
            );
            for policy in ["same-directory", "none"] {
                let (code, text) = verdict(dir, &line.replace("POLICY", policy));
                assert_eq!(code, Some(1), "{line} {policy} {name}: {text}");
                assert!(
                    text.contains("forbids that"),
                    "{line} {policy} {name}: {text}"
                );
            }
        }
    }
}

#[test]
fn images_below_images_are_held_to_it_each_by_its_own_directory() {
    let dir = &tree();
    // in/a.qcow2 on in/sub/mid.qcow2, which names a file beside the first: not beside itself.
    overlay(dir, "sub/mid.qcow2", "../base");
    run(&mut words(
        dir,
        "create -q -u -f qcow2 -F qcow2 -b sub/mid.qcow2 in/a.qcow2 1M",
    ));
    let (code, text) = verdict(dir, "map --backing-policy same-directory in/a.qcow2");
    assert_eq!(code, Some(1));
    assert!(
        text.contains("'in/sub/mid.qcow2' names '../base' as its backing file"),
        "{text}"
    );
    overlay(dir, "sub/mid.qcow2", "base");
    let (code, text) = verdict(dir, "map --backing-policy same-directory in/a.qcow2");
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn data_files_are_held_to_it() {
    let dir = &tree();
    for (name, same_directory) in [("../data", 1), ("data", 0)] {
        run(&mut words(
            dir,
            &format!("create -q -f qcow2 -o data_file={name} in/a.qcow2 1M"),
        ));
        for (policy, expected) in [("any", 0), ("same-directory", same_directory), ("none", 1)] {
            for line in ["map POLICY in/a.qcow2", "io POLICY -c quit in/a.qcow2"] {
                let line = line.replace("POLICY", &format!("--backing-policy {policy}"));
                let (code, text) = verdict(dir, &line);
                assert_eq!(code, Some(expected), "{line} {name}: {text}");
                assert_eq!(text.contains("as its data file"), expected == 1, "{text}");
            }
        }
    }
}

#[test]
fn a_file_has_one_use_in_a_chain() {
    let dir = &tree();
    let refused = |line: &str, why: &str| {
        let (code, text) = verdict(dir, line);
        assert!(
            code == Some(1) && text.contains(why),
            "{line}: {code:?} {text}"
        );
    };
    // The data file is the backing file, by whatever name.
    run(&mut words(
        dir,
        "create -q -u -f qcow2 -o data_file=base -b other -F raw in/a.qcow2 1M",
    ));
    fs::hard_link(dir.join("in/base"), dir.join("in/other")).unwrap();
    for line in [
        "map in/a.qcow2",
        "io -c quit in/a.qcow2",
        "serve -k s in/a.qcow2",
    ] {
        refused(line, "it is the data file of an image of the chain");
    }
    // An image below has the data file of the one above, or has the one above.
    run(&mut words(
        dir,
        "create -q -u -f qcow2 -o data_file=d -b below.qcow2 -F qcow2 in/a.qcow2 1M",
    ));
    run(&mut words(
        dir,
        "create -q -f qcow2 -o data_file=d in/below.qcow2 1M",
    ));
    refused(
        "io -c quit in/a.qcow2",
        "its data file is in use by an image of its chain",
    );
    run(&mut words(
        dir,
        "create -q -u -f qcow2 -b b.qcow2 -F qcow2 in/a.qcow2 1M",
    ));
    run(&mut words(
        dir,
        "create -q -u -f qcow2 -b a.qcow2 -F qcow2 in/b.qcow2 1M",
    ));
    refused("map in/a.qcow2", "the backing chain is a loop");
    refused(
        "info --backing-chain in/a.qcow2",
        "creates an infinite loop",
    );
    run(&mut words(
        dir,
        "create -q -u -f qcow2 -b a.qcow2 -F qcow2 in/a2.qcow2 1M",
    ));
    fs::rename(dir.join("in/a2.qcow2"), dir.join("in/a.qcow2")).unwrap();
    refused("map in/a.qcow2", "the backing chain is a loop");
}
