//! `checkpoint`: checkpoints of images that nothing uses, which a daemon and QEMU see, too.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{cowslip, outcome, peers_are_installed, qemu_img, run, scratch};

fn ours(dir: &Path, words: &str) -> String {
    run(cowslip().current_dir(dir).args(words.split(' ')))
}

fn json_of(dir: &Path, words: &str) -> Value {
    serde_json::from_str(&ours(dir, words)).unwrap()
}

fn refused(dir: &Path, words: &str) -> String {
    let done = outcome(cowslip().current_dir(dir).args(words.split(' ')));
    assert_eq!(done.status.code(), Some(1), "{words}");
    String::from_utf8(done.stderr).unwrap()
}

fn write(dir: &Path, command: &str, image: &str) {
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-c", command, image]));
}

#[test]
fn what_has_changed_since_a_checkpoint_is_in_it_and_those_behind_it() {
    let dir = &scratch();
    for image in ["a", "b"] {
        ours(dir, &format!("create -q -f qcow2 {image}.qcow2 8M"));
    }
    let both = "a.qcow2 b.qcow2";
    ours(dir, &format!("checkpoint --create mon {both}"));
    write(dir, "write -P 1 1M 64k", "a.qcow2");
    ours(dir, &format!("checkpoint --create tue {both}"));
    write(dir, "write -P 2 2M 64k", "a.qcow2");
    ours(dir, "checkpoint --create wed a.qcow2");
    write(dir, "write -P 3 3M 64k", "a.qcow2");
    let since = |name: &str| {
        let found = json_of(dir, &format!("checkpoint --since {name} --json a.qcow2"));
        let starts = found.as_array().unwrap().iter();
        starts
            .map(|range| range["start"].as_u64().unwrap() >> 20)
            .collect::<Vec<_>>()
    };
    assert_eq!(since("mon"), [1, 2, 3]);
    assert_eq!(since("tue"), [2, 3]);
    assert_eq!(since("wed"), [3]);
    let text = ours(dir, "checkpoint --since wed a.qcow2");
    assert_eq!(text, "a.qcow2: 3145728 65536\n");
    let text = ours(dir, "checkpoint a.qcow2 b.qcow2");
    let expected = "a.qcow2: mon: 65536 bytes changed until the next\n\
        a.qcow2: tue: 65536 bytes changed until the next\n\
        a.qcow2: wed: 65536 bytes changed so far\n\
        b.qcow2: mon: 0 bytes changed until the next\n\
        b.qcow2: tue: 0 bytes changed so far\n";
    assert_eq!(text, expected);
    // What a deleted one had counts for the one before; the last one goes on.
    ours(dir, "checkpoint --delete tue a.qcow2");
    assert_eq!((since("mon"), since("wed")), (vec![1, 2, 3], vec![3]));
    ours(dir, "checkpoint --delete wed a.qcow2");
    write(dir, "write -P 4 5M 64k", "a.qcow2");
    assert_eq!(since("mon"), [1, 2, 3, 5]);
    if peers_are_installed(&["qemu-img"]) {
        let info = qemu_img(&["info", "--output=json"], &[&dir.join("a.qcow2")]);
        let info: Value = serde_json::from_str(&info).unwrap();
        let bitmaps = &info["format-specific"]["data"]["bitmaps"];
        assert_eq!(
            bitmaps,
            &json!([{"name": "checkpoint-mon", "flags": ["auto"], "granularity": 65536}])
        );
        qemu_img(&["check", "-q"], &[&dir.join("a.qcow2")]);
    }
}

#[test]
fn checkpoints_that_cannot_be_are_in_no_image() {
    let dir = &scratch();
    for image in ["a", "b"] {
        ours(dir, &format!("create -q -f qcow2 {image}.qcow2 1M"));
    }
    ours(dir, "create -q -f qcow2 -o compat=0.10 old.qcow2 1M");
    ours(dir, "checkpoint --create one b.qcow2");
    let before = json_of(dir, "checkpoint --json a.qcow2 b.qcow2");
    for (words, why) in [
        (
            "--create one a.qcow2 b.qcow2",
            "'b.qcow2' has a checkpoint 'one' already",
        ),
        ("--create two a.qcow2 b.qcow2 old.qcow2", "qcow2 v2"),
        ("--create two a.qcow2 missing.qcow2", "missing.qcow2"),
        ("--create a/b a.qcow2", "Invalid checkpoint name 'a/b'"),
        (
            "--delete one a.qcow2 b.qcow2",
            "'a.qcow2' has no checkpoint 'one'",
        ),
        ("--since two b.qcow2", "'b.qcow2' has no checkpoint 'two'"),
    ] {
        let error = refused(dir, &format!("checkpoint {words}"));
        assert!(error.contains(why), "{error}");
        assert_eq!(json_of(dir, "checkpoint --json a.qcow2 b.qcow2"), before);
    }
    // One that was not saved can only be deleted.
    lose(&dir.join("b.qcow2"), "checkpoint-one");
    let error = refused(dir, "checkpoint --since one b.qcow2");
    assert!(error.contains("a full backup is needed"), "{error}");
    assert_eq!(
        ours(dir, "checkpoint b.qcow2"),
        "b.qcow2: one: inconsistent\n"
    );
    // It cannot be used any more, nor can those before it; a new one takes their place.
    ours(dir, "checkpoint --create two b.qcow2");
    let left = "b.qcow2: two: 0 bytes changed so far\n";
    assert_eq!(ours(dir, "checkpoint b.qcow2"), left);
}

/// Where the second of two images cannot be written, no image has the checkpoint, or the error says
/// which has it.
#[test]
fn a_checkpoint_that_only_some_images_have_is_named() {
    let dir = &scratch();
    let mut named = 0;
    for flushes in 0..6 {
        for image in ["a", "b"] {
            ours(dir, &format!("create -q -f qcow2 {image}.qcow2 1M"));
        }
        let next =
            |state| json!({"event": "flush_to_disk", "state": state, "new_state": state + 1});
        let fails = json!({"event": "flush_to_disk", "state": flushes + 1, "errno": 5});
        let failing = json!({"driver": "qcow2", "file": {
            "driver": "blkdebug",
            "image": {"driver": "file", "filename": "b.qcow2"},
            "set-state": (1..=flushes).map(next).collect::<Vec<_>>(),
            "inject-error": [fails],
        }});
        let create = format!("checkpoint --create one a.qcow2 json:{failing}");
        let done = outcome(cowslip().current_dir(dir).args(create.split(' ')));
        let error = String::from_utf8(done.stderr).unwrap();
        let has = |image| !ours(dir, &format!("checkpoint {image}.qcow2")).is_empty();
        match (done.status.success(), has("a"), has("b")) {
            (true, true, true) | (false, false, false) => {}
            // Of a flush that has failed, the bytes may be there.
            (false, true, _) => {
                named += 1;
                let remedy = "checkpoint --delete one a.qcow2";
                assert!(error.trim_end().ends_with(remedy), "{error}");
                ours(dir, remedy);
                assert!(!has("a"));
            }
            other => panic!("{flushes}: {other:?}: {error}"),
        }
    }
    assert!(named > 0, "no close has failed");
}

/// Says in the file that a checkpoint was not saved, as a crash leaves it.
fn lose(path: &Path, checkpoint: &str) {
    let mut image = std::fs::read(path).unwrap();
    let name = checkpoint.as_bytes();
    // Directories of before may be in the file, too.
    let places: Vec<usize> = (0..image.len() - name.len())
        .filter(|&at| image[at..].starts_with(name))
        .collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| image[at - 9] |= 1);
    std::fs::write(path, image).unwrap();
}

/// Whatever becomes of a checkpoint, those before it do not seem to know what it has noted.
#[test]
fn changes_that_nothing_has_noted_are_missed_by_no_backup() {
    let dir = &scratch();
    let image = dir.join("a.qcow2");
    let begin = || {
        ours(dir, "create -q -f qcow2 a.qcow2 8M");
        for checkpoint in ["mon", "tue"] {
            ours(dir, &format!("checkpoint --create {checkpoint} a.qcow2"));
        }
        write(dir, "write -P 1 1M 64k", "a.qcow2");
    };
    // Lost in a crash, and deleted.
    begin();
    lose(&image, "checkpoint-tue");
    ours(dir, "checkpoint --delete tue a.qcow2");
    assert_eq!(ours(dir, "checkpoint a.qcow2"), "");
    // Lost, and left behind by a copy.
    begin();
    ours(dir, "checkpoint --create wed a.qcow2");
    lose(&image, "checkpoint-tue");
    let words = "convert -q -O qcow2 --bitmaps --skip-broken-bitmaps a.qcow2 b.qcow2";
    ours(dir, words);
    let left = "b.qcow2: wed: 0 bytes changed so far\n";
    assert_eq!(ours(dir, "checkpoint b.qcow2"), left);
    // Copied with a snapshot that is older.
    begin();
    ours(dir, "snapshot -c old a.qcow2");
    write(dir, "write -P 3 3M 64k", "a.qcow2");
    ours(dir, "checkpoint --create wed a.qcow2");
    ours(dir, "convert -q -O qcow2 -l old --bitmaps a.qcow2 b.qcow2");
    assert_eq!(ours(dir, "checkpoint b.qcow2"), "");
    // Removed as a bitmap, which only QEMU's tools do.
    begin();
    for action in ["remove", "clear", "disable", "enable"] {
        let error = refused(dir, &format!("bitmap --{action} a.qcow2 checkpoint-tue"));
        assert!(error.contains("'checkpoint --delete tue'"), "{error}");
    }
    ours(dir, "qemu-img bitmap --remove a.qcow2 checkpoint-tue");
    write(dir, "write -P 2 2M 64k", "a.qcow2");
    let error = refused(dir, "checkpoint --since mon a.qcow2");
    assert!(error.contains("'checkpoint-mon', notes nothing"), "{error}");
    let listed = json_of(dir, "checkpoint --json a.qcow2");
    assert_eq!(listed[0]["usable"], false);
    let text = ours(dir, "checkpoint a.qcow2");
    assert!(text.contains("a full backup is needed"), "{text}");
    ours(dir, "checkpoint --create wed a.qcow2");
    let error = refused(dir, "checkpoint --since mon a.qcow2");
    assert!(error.contains("no checkpoint 'mon'"), "{error}");
}
