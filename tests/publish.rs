//! `publish` and `pull` on directories: what is published, in place, pulled, interrupted, killed,
//! listed, withdrawn, pruned; and what is refused.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::golden::words;
use crate::support::rng::Rng;
use crate::support::running::signalled;
use crate::support::{cowslip, outcome, run, scratch, succeeds};

pub fn line(dir: &Path, line: &str) -> String {
    succeeds(dir, line)
}

pub fn json(dir: &Path, text: &str) -> Value {
    serde_json::from_str(&line(dir, text)).unwrap()
}

/// Runs a line that has to fail with exit code 1. Returns its complaint.
pub fn refused(dir: &Path, line: &str) -> String {
    let output = outcome(cowslip().current_dir(dir).args(words(line)));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{line}: {said}");
    assert!(output.stdout.is_empty(), "{line}");
    said
}

/// A raw disk: noise, with zeroes in between.
pub fn golden(dir: &Path, bytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(71);
    let mut disk = vec![0; bytes];
    for run in disk.chunks_mut(1 << 20).step_by(2) {
        for word in run.chunks_mut(8) {
            word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()]);
        }
    }
    std::fs::write(dir.join("golden.raw"), &disk).unwrap();
    disk
}

#[test]
fn a_disk_is_published_used_in_place_and_pulled() {
    let dir = &scratch();
    golden(dir, 16 << 20);
    line(dir, "convert -O qcow2 golden.raw golden.qcow2");
    let first = json(dir, "publish --json golden.qcow2 store/golden");
    assert_eq!(
        (&first["version"], &first["kept-bytes"]),
        (&1.into(), &0.into())
    );
    let data = first["data-bytes"].as_u64().unwrap();
    assert!((8 << 20..9 << 20).contains(&data), "{first}");
    let name = first["filename"].as_str().unwrap();
    assert!(name.starts_with("published:store/golden@"), "{name}");
    line(dir, &format!("compare -f raw {name} golden.raw"));
    let info = json(dir, &format!("info --output=json {name}"));
    assert_eq!(
        (&info["format"], &info["virtual-size"]),
        (&"raw".into(), &(16 << 20).into())
    );
    // An overlay, which is flattened into the second version.
    let full = name.replace("store", &dir.join("store").display().to_string());
    line(
        dir,
        &format!("create -q -f qcow2 -b {full} -F raw top.qcow2"),
    );
    let write = ["io", "-c", "write -q -P 7 3M 200k", "top.qcow2"];
    run(cowslip().current_dir(dir).args(write));
    let second = json(dir, "publish --json top.qcow2 store/golden");
    let new = second["new-bytes"].as_u64().unwrap();
    assert!(new < 500 << 10, "{second}");
    line(dir, "pull -q store/golden pulled.qcow2");
    line(dir, "compare pulled.qcow2 top.qcow2");
    line(dir, "check -q pulled.qcow2");
    line(dir, "pull -q -O raw store/golden@1 pulled.raw");
    line(dir, "compare -f raw pulled.raw golden.raw");
    assert!(!dir.join("pulled.raw.part").exists());
    let said = refused(dir, "pull store/golden pulled.raw");
    assert_eq!(said, "cowslip: 'pulled.raw' exists already\n");
    let listed = json(dir, "publish --list --json store");
    assert_eq!(listed.as_array().unwrap().len(), 2);
    assert_eq!(listed[1]["filename"], second["filename"]);
    // A name that was taken away stays readable until it is pruned, but not for a pull by number.
    line(dir, "publish -q --withdraw store/golden@1");
    assert_eq!(
        json(dir, "publish --list --json store")
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let said = refused(dir, "pull store/golden@1 x.qcow2");
    assert!(
        said.contains("There is no published disk 'store/golden@1'"),
        "{said}"
    );
    let pruned = json(dir, "publish --prune --json store");
    assert_eq!(
        (&pruned["removed-objects"], &pruned["dry-run"]),
        (&0.into(), &false.into())
    );
    line(dir, "compare pulled.qcow2 top.qcow2");
}

#[test]
fn words_say_what_may_not_have_been_meant() {
    let dir = &scratch();
    golden(dir, 1 << 20);
    let publish = "publish -f raw golden.raw store/golden";
    let said = line(dir, publish);
    assert!(said.contains("It is the first disk in 'store'."), "{said}");
    let said = line(dir, publish);
    let same = "It is the same disk as store/golden@1: nothing has changed since.";
    assert!(said.contains(same), "{said}");
    let said = line(dir, "publish -f raw golden.raw store/other");
    assert!(!said.contains("It is"), "{said}");
    for (line, said) in [
        (
            "pull store/gloden x",
            "the names there are 'golden', 'other'",
        ),
        ("pull store/golden@7 x", "its versions are @2, @1"),
        (
            "pull stroe/golden x",
            "'stroe' holds none at all; is the name of the store right?",
        ),
        (
            "publish --withdraw store/golden@3",
            "its versions are @2, @1",
        ),
    ] {
        let refused = refused(dir, line);
        assert!(refused.contains(said), "{line}: {refused}");
    }
    let none = "'stroe' holds no published disks.\n";
    assert_eq!(line(dir, "publish --list stroe"), none);
    let said = refused(dir, "publish --prune stroe");
    assert!(said.contains("There is no directory 'stroe'"), "{said}");
    // By its digest, the newest of the versions that are this disk.
    let listed = json(dir, "publish --list --json store");
    let pinned = listed[0]["filename"].as_str().unwrap();
    let digest = pinned.rsplit_once('@').unwrap().1;
    let withdraw = format!("publish --withdraw store/golden@{digest}");
    let said = line(dir, &withdraw);
    assert!(
        said.starts_with("Withdrawn golden@2.\ngolden@1 is the same disk: "),
        "{said}"
    );
    let said = line(dir, &withdraw);
    let lost = "Withdrawn golden@1.\nNo other version of golden is this disk: ";
    assert!(
        said.starts_with(lost) && said.contains("are lost then"),
        "{said}"
    );
    let said = refused(dir, &withdraw);
    assert!(said.contains("the names there are 'other'"), "{said}");
}

#[test]
fn a_relative_store_of_an_image_is_beside_the_image() {
    let dir = &scratch();
    golden(dir, 2 << 20);
    std::fs::create_dir(dir.join("vms")).unwrap();
    let first = json(dir, "publish --json -f raw golden.raw store/golden");
    let name = first["filename"].as_str().unwrap();
    let backing = name.replace("published:", "published:../");
    line(
        dir,
        &format!("create -q -f qcow2 -b {backing} -F raw vms/top.qcow2"),
    );
    for (place, image, raw) in [
        (dir.to_path_buf(), "vms/top.qcow2", "golden.raw"),
        (dir.join("vms"), "top.qcow2", "../golden.raw"),
    ] {
        line(&place, &format!("compare -f qcow2 -F raw {image} {raw}"));
        let chain = json(
            &place,
            &format!("info --backing-chain --output=json {image}"),
        );
        assert_eq!(chain.as_array().unwrap().len(), 2, "{chain}");
        assert_eq!(chain[0]["backing-filename"], backing);
    }
    let said = refused(
        dir,
        &format!("create -q -f qcow2 -b {name} -F raw vms/x.qcow2"),
    );
    assert!(said.contains("vms/store"), "{said}");
}

#[test]
fn what_cannot_be_is_refused() {
    let dir = &scratch();
    golden(dir, 1 << 20);
    line(dir, "publish -q -f raw golden.raw store/golden");
    for (line, said) in [
        ("publish golden.raw golden", "names no published disk"),
        ("publish golden.raw store/.x", "no name of a published disk"),
        ("publish golden.raw store/x@3", "gets the next one"),
        (
            "publish missing.raw store/x",
            "Could not open 'missing.raw'",
        ),
        ("publish --chunk-size 5k golden.raw store/x", "power of two"),
        (
            "publish --parent y golden.raw store/x",
            "no published disk 'store/y'",
        ),
        ("publish golden.raw ftp://host/x/y", "scheme 'ftp'"),
        ("publish golden.raw https://host/x/y", "web server"),
        ("publish golden.raw file://store/x", "three slashes"),
        (
            "publish --prune -n strore",
            "There is no directory 'strore'",
        ),
        ("publish --prune strore", "There is no directory 'strore'"),
        (
            "publish --prune file:///nowhere",
            "There is no directory '/nowhere'",
        ),
        (
            "publish -O qcow2 golden.raw missing/x.qcow2",
            "There is no directory 'missing' for 'missing/x.qcow2': make it first",
        ),
        ("publish --withdraw store/golden", "has no version"),
        ("publish --withdraw store/golden@2", "no published disk"),
        (
            "pull store/other x",
            "There is no published disk 'store/other'",
        ),
        (
            "pull nowhere/golden x",
            "There is no published disk 'nowhere/golden'",
        ),
        ("pull store/golden missing/x", "missing/x.part"),
        ("pull -O vmdk store/golden x", "vmdk"),
        (
            "pull -o backing_file=y store/golden x",
            "no option 'backing_file'",
        ),
        ("info published:store/golden", "another disk tomorrow"),
        ("info published:store/golden@1", "another disk tomorrow"),
        (
            "info --image-opts driver=published",
            "Parameter 'url' is missing",
        ),
    ] {
        let refused = refused(dir, line);
        assert!(refused.contains(said), "{line}: {refused}");
    }
    for name in ["strore", "missing"] {
        assert!(!dir.join(name).exists(), "{name}");
    }
    // Nor is anything written into a directory that holds nothing.
    std::fs::create_dir(dir.join("empty")).unwrap();
    assert!(line(dir, "publish --prune empty").contains("holds no published disks"));
    assert_eq!(std::fs::read_dir(dir.join("empty")).unwrap().count(), 0);
    // A chunk that is damaged is named, and nothing passes for the image.
    let packs = dir.join("store/cowslip-published-1/packs");
    let session = std::fs::read_dir(packs).unwrap().next().unwrap().unwrap();
    let pack = std::fs::read_dir(session.path()).unwrap().next().unwrap();
    let pack = pack.unwrap().path();
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    let said = refused(dir, "pull store/golden x");
    assert!(said.contains("is corrupt: chunk at offset"), "{said}");
    assert!(!dir.join("x").exists());
}

/// Ends a command by a signal when it has reported some of its work.
fn ended(dir: &Path, line: &str, signal: Signal) -> String {
    let mut command = cowslip();
    command.current_dir(dir).args(words(line));
    signalled(command, signal).concat()
}

#[test]
fn what_is_interrupted_or_killed_has_no_name_and_is_continued() {
    let dir = &scratch();
    golden(dir, 64 << 20);
    let publish = "publish -f raw golden.raw store/golden";
    for signal in [Signal::INT, Signal::KILL] {
        let paced = format!("{publish} --rate-limit 40M --progress=json");
        let said = ended(dir, &paced, signal);
        if signal == Signal::INT {
            let left = "cowslip: Cancelled: what was stored has no name; run publish again to continue, or leave it to \
                        '--prune store'";
            assert_eq!(said, left);
        }
        let listed = json(dir, "publish --list --json store");
        assert_eq!(listed, Value::Array(Vec::new()));
    }
    line(dir, &format!("{publish} -q"));
    let part = dir.join("x.part");
    for signal in [Signal::INT, Signal::KILL] {
        let paced = "pull --rate-limit 20M --progress=json store/golden x";
        let said = ended(dir, paced, signal);
        if signal == Signal::INT {
            let left =
                "cowslip: Cancelled: 'x.part' contains a part of it; run pull again to continue";
            assert_eq!(said, left);
        }
        assert!(part.exists() && !dir.join("x").exists());
    }
    let done = json(dir, "pull --json store/golden x");
    assert!(done["kept-bytes"].as_u64().unwrap() > 0, "{done}");
    line(dir, "compare x golden.raw");
    assert!(!part.exists());
}
