//! Versions of which a bitmap says what has changed: `publish --track`, and `--bitmap`.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;

use crate::publish::{golden, json, line, refused};
use crate::support::{cowslip, run, scratch};

/// A qcow2 image of 8 MiB with noise.
fn image(dir: &Path) {
    golden(dir, 8 << 20);
    line(dir, "convert -O qcow2 golden.raw golden.qcow2");
}

fn write(dir: &Path, image: &str, request: &str) {
    let request = format!("write -q {request}");
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-c", &request, image]));
}

fn assert_same(dir: &Path, version: &str, image: &str) {
    drop(std::fs::remove_file(dir.join("pulled.qcow2")));
    line(dir, &format!("pull -q {version} pulled.qcow2"));
    line(dir, &format!("compare pulled.qcow2 {image}"));
}

/// The bitmaps of an image that begin with a version.
fn bitmaps(dir: &Path, image: &str) -> Vec<String> {
    let info = json(dir, &format!("info --output json {image}"));
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array();
    let names = bitmaps.into_iter().flatten();
    let names = names.map(|bitmap| bitmap["name"].as_str().unwrap().to_string());
    names
        .filter(|name| name.starts_with("published-"))
        .collect()
}

#[test]
fn what_has_changed_since_a_version_is_known_in_each_copy_of_an_image() {
    let dir = &scratch();
    image(dir);
    let words = line(dir, "publish --track golden.qcow2 store/golden");
    assert!(words.contains("All of the disk was read"), "{words}");
    std::fs::copy(dir.join("golden.qcow2"), dir.join("copy.qcow2")).unwrap();
    write(dir, "golden.qcow2", "-P 7 3M 200k");
    let words = line(dir, "publish --track golden.qcow2 store/golden");
    assert!(words.contains("changed since store/golden@1"), "{words}");
    assert_same(dir, "store/golden@2", "golden.qcow2");
    // The copy has gone another way since the first version, and has no bitmap of the second.
    write(dir, "copy.qcow2", "-P 8 5M 70k");
    let words = line(dir, "publish --track copy.qcow2 store/golden");
    assert!(words.contains("changed since store/golden@1"), "{words}");
    assert_same(dir, "store/golden@3", "copy.qcow2");
    // And the first one no bitmap of the third.
    let third = json(dir, "publish --json --track golden.qcow2 store/golden");
    assert!(third["new-bytes"].as_u64() < Some(64 << 10), "{third}");
    let bitmap = third["bitmap"].as_str().unwrap();
    assert_eq!(bitmaps(dir, "golden.qcow2").last().unwrap(), bitmap);
    assert_same(dir, "store/golden@4", "golden.qcow2");
    // The newest ones are kept.
    for _ in 0..3 {
        line(dir, "publish -q --track golden.qcow2 store/golden");
    }
    assert_eq!(bitmaps(dir, "golden.qcow2").len(), 4);
    line(dir, "check golden.qcow2");
    // Another store knows none of them.
    let words = line(dir, "publish --track golden.qcow2 other/golden");
    assert!(words.contains("All of the disk was read"), "{words}");
}

/// Changes below an image are in no bitmap of it.
#[test]
fn an_image_with_a_backing_file_is_read_as_a_whole() {
    let dir = &scratch();
    image(dir);
    line(dir, "create -q -f qcow2 -b golden.qcow2 -F qcow2 top.qcow2");
    line(dir, "publish -q --track top.qcow2 store/top");
    write(dir, "golden.qcow2", "-P 9 1M 4k");
    let words = line(dir, "publish --track top.qcow2 store/top");
    assert!(words.contains("All of the disk was read"), "{words}");
    assert_same(dir, "store/top@2", "top.qcow2");
    let bitmap = &bitmaps(dir, "top.qcow2")[0];
    let known = format!("publish --bitmap {bitmap} --parent top@1 top.qcow2 store/top");
    let said = refused(dir, &known);
    assert!(said.contains("has a backing file"), "{said}");
}

#[test]
fn a_bitmap_that_may_miss_changes_is_refused() {
    let dir = &scratch();
    image(dir);
    line(dir, "publish -q golden.qcow2 store/golden");
    line(dir, "publish -q --track golden.qcow2 store/golden");
    let known = bitmaps(dir, "golden.qcow2").remove(0);
    write(dir, "golden.qcow2", "-P 7 3M 200k");
    line(dir, "bitmap --add golden.qcow2 late");
    write(dir, "golden.qcow2", "-P 8 5M 200k");
    let publish = |rest: &str| format!("publish {rest} golden.qcow2 store/golden");
    let unknown = publish("--bitmap late --parent golden@1");
    let other = publish("--bitmap late --parent golden@2");
    let late = publish("--trust-bitmap --bitmap late --parent golden@2");
    let clear = format!("bitmap --clear golden.qcow2 {known}");
    let again = format!("bitmap --remove --add golden.qcow2 {known}");
    for (line, said) in [
        (
            &*unknown,
            "no record says that bitmap 'late' began with 'golden@1'",
        ),
        (&*other, "and 'late' is another one"),
        // On a disk of this size every difference is noticed.
        (&*late, "not all that has changed since"),
        (&*clear, "it can be removed"),
        (&*again, "it can be removed"),
        (
            &publish("--bitmap none --parent golden@2"),
            "'none' not found",
        ),
        (
            &publish("--bitmap late --parent golden@1 --parent golden@2"),
            "goes with one --parent",
        ),
        ("publish --track golden.raw store/raw", "can keep no bitmap"),
    ] {
        let refusal = refused(dir, line);
        assert!(refusal.contains(said), "{line}: {refusal}");
    }
    let third = publish(&format!("--json --bitmap {known} --parent golden@2"));
    let third = json(dir, &third);
    assert!(third["new-bytes"].as_u64() < Some(64 << 10), "{third}");
    assert_same(dir, "store/golden@3", "golden.qcow2");
    line(dir, "bitmap --disable golden.qcow2 late");
    let refusal = refused(dir, &late);
    assert!(refusal.contains("is disabled"), "{refusal}");
    // Cleared by another program, under its name.
    line(
        dir,
        &format!("qemu-img bitmap --clear golden.qcow2 {known}"),
    );
    let refusal = refused(
        dir,
        &publish(&format!("--bitmap {known} --parent golden@2")),
    );
    assert!(
        refusal.contains("not all that has changed since"),
        "{refusal}"
    );
    // A publication that there is none of leaves no bitmap.
    let before = bitmaps(dir, "golden.qcow2");
    let refusal = refused(dir, &publish("--track"));
    assert!(
        refusal.contains("not all that has changed since"),
        "{refusal}"
    );
    assert_eq!(bitmaps(dir, "golden.qcow2"), before);
    assert_same(dir, "store/golden@3", "golden.qcow2");
}
