//! Images written here are read and checked by QEMU, and images written by QEMU are read, modified
//! and extended here, over the matrix of [`crate::support::shape`].
//!
//! Every case prints its seed. One case again: `COWSLIP_SEED=7
//! COWSLIP_SHAPE=v3-65536-extended-raw-rc16 cargo test --test command interop_matrix`. More of
//! them: `COWSLIP_SEEDS=20` runs twenty seeds of each, from `COWSLIP_SEED` on.
//!
//! QEMU is the oracle: what a disk reads as before our first operation is what `qemu-img convert`
//! says. Where the two disagree about a damaged image is not looked at here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;

use crate::support::engine::{How, exercise, open, verify, verify_extents};
use crate::support::model::Model;
use crate::support::rng::Rng;
use crate::support::shape::{Below, Files, Shape, Version};
use crate::support::{
    cowslip, number_from_environment, outcome, peers_are_installed, qemu_img, run, scratch,
};
use cowslip_queue::{Backend, Queue};

/// Runs a case for each shape of this cluster size and each seed, all of them even if some fail.
fn each(cluster_bytes: u64, direction: &str, case: fn(&Shape, &Path, &mut Rng)) {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let first = number_from_environment("COWSLIP_SEED").unwrap_or(1);
    let count = number_from_environment("COWSLIP_SEEDS").unwrap_or(1);
    let only = std::env::var("COWSLIP_SHAPE").ok();
    let mut failures = Vec::new();
    for shape in Shape::all(cluster_bytes) {
        if only.as_ref().is_some_and(|name| *name != shape.to_string()) {
            continue;
        }
        for seed in first..first + count {
            eprintln!("COWSLIP_SEED={seed} COWSLIP_SHAPE={shape} ({direction})");
            let directory = scratch();
            let mut rng = Rng::named(seed, &format!("{direction} {shape}"));
            let attempt = AssertUnwindSafe(|| case(&shape, directory.path(), &mut rng));
            if catch_unwind(attempt).is_err() {
                failures.push(format!("COWSLIP_SEED={seed} COWSLIP_SHAPE={shape}"));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{direction}: {} cases failed; replay one with cargo test --test command interop_matrix::{direction} and\n  {}",
        failures.len(),
        failures.join("\n  ")
    );
}

/// Both checkers accept the image.
fn check_with_both(image: &Path) {
    qemu_img(&["check", "-q", "-f", "qcow2"], &[image]);
    run(cowslip().args(["check", "-q", "-f", "qcow2"]).arg(image));
}

/// The image reads as the raw file, says QEMU.
fn compare_with_qemu(image: &Path, raw: &Path) {
    // A difference in size with zeroes behind it would be a warning only.
    let words = ["compare", "-f", "qcow2", "-F", "raw"];
    assert_eq!(qemu_img(&words, &[image, raw]), "Images are identical.\n");
}

/// Opens the image, runs operations, closes it, and does so again; grows it in between.
fn modify_here(image: &Path, model: &mut Model, shape: &Shape, may_grow: bool, rng: &mut Rng) {
    for session in 0..2 {
        let how = How::random(rng);
        eprintln!("  session {session}: {how:?}");
        let backend = if rng.once_in(3) {
            Backend::Threads
        } else {
            Backend::Auto
        };
        let queue = Queue::new(backend).expect("a queue can be made");
        queue.block_on(async {
            let opened = open(image, &how).await;
            verify(&opened, model).await;
            exercise(&opened, model, shape, &how, rng).await;
            let room = model.greatest_bytes() - model.disk_bytes;
            if may_grow && room >= 512 && rng.once_in(2) {
                model.disk_bytes += (1 + rng.below(room / 512)) * 512;
                eprintln!("  resize {}", model.disk_bytes);
                opened
                    .resize(model.disk_bytes)
                    .await
                    .unwrap_or_else(|e| panic!("resize: {e}"));
                exercise(&opened, model, shape, &how, rng).await;
            }
            verify(&opened, model).await;
            verify_extents(&opened, model).await;
            opened
                .close()
                .await
                .unwrap_or_else(|e| panic!("close: {e}"));
        });
    }
}

fn written_here(shape: &Shape, directory: &Path, rng: &mut Rng) {
    let files = Files::new(directory);
    let disk_bytes = shape.disk_bytes(rng);
    let below = files.make_below(shape, disk_bytes, rng);
    if rng.once_in(2) {
        files.create_with_cowslip(shape, &below, disk_bytes);
    } else {
        files.create_with_qemu(shape, "", &below, disk_bytes);
    }
    let truth = files.read_with_qemu(&["-f", "qcow2"]);
    let mut model = Model::of(shape, &truth);
    modify_here(&files.image, &mut model, shape, true, rng);
    check_with_both(&files.image);
    model.store(&truth);
    compare_with_qemu(&files.image, &truth);
}

/// A qemu-io command that changes the disk.
fn random_qemu_command(model: &Model, shape: &Shape, rng: &mut Rng) -> String {
    let (offset, len) = model.random_range(shape, rng);
    match rng.below(8) {
        0 => format!("write -z {offset} {len}"),
        1 => format!("write -z -u {offset} {len}"),
        2 => format!("discard {offset} {len}"),
        _ => format!("write -P {} {offset} {len}", rng.below(256)),
    }
}

/// Compressed writes to different clusters.
fn random_compressed_writes(model: &Model, shape: &Shape, rng: &mut Rng) -> Vec<String> {
    let mut clusters: Vec<u64> = Vec::new();
    for _ in 0..6 {
        let (offset, _) = model.random_range(shape, rng);
        clusters.push(offset / shape.cluster_bytes * shape.cluster_bytes);
    }
    clusters.sort_unstable();
    clusters.dedup();
    let command = |cluster: u64| {
        let end = (cluster + shape.cluster_bytes).min(model.disk_bytes);
        format!("write -c -P {} {cluster} {}", rng.below(256), end - cluster)
    };
    clusters.into_iter().map(command).collect()
}

/// Lets QEMU write: plainly, compressed, plainly again, each in a process of its own. In one
/// process, QEMU 10.0 goes on packing compressed data into a cluster that was freed and taken again
/// for other data in the meantime, and leaves an image that its own check refuses.
fn write_with_qemu(image: &Path, model: &Model, shape: &Shape, rng: &mut Rng) {
    for session in 0..3 {
        let commands: Vec<String> = if session == 1 {
            random_compressed_writes(model, shape, rng)
        } else {
            (0..12)
                .map(|_| random_qemu_command(model, shape, rng))
                .collect()
        };
        if session == 1 && shape.has_data_file() {
            continue;
        }
        let mut qemu_io = Command::new("qemu-io");
        // What it has written is read from the page cache: nothing has to be on the disk.
        qemu_io.args(["-f", "qcow2", "-d", "unmap", "-t", "unsafe"]);
        for command in commands {
            eprintln!("  qemu-io: {command}");
            qemu_io.args(["-c", &command]);
        }
        let output = outcome(qemu_io.arg(image));
        // QEMU refuses to compress over a cluster that is there already.
        assert!(
            output.status.success() || session == 1,
            "{qemu_io:?}: {}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
}

/// Options of `create` that change what is found in an image.
fn random_extras(shape: &Shape, rng: &mut Rng) -> String {
    let mut extras = String::new();
    if shape.version == Version::V3 {
        if rng.once_in(3) {
            extras.push_str(",lazy_refcounts=on");
        }
        if rng.once_in(2) && !shape.has_data_file() {
            extras.push_str(",compression_type=zstd");
        }
    }
    // QEMU reads all that is allocated: not a terabyte.
    let is_small = shape.table_bytes() <= 1 << 30;
    if rng.once_in(4) && is_small && !shape.has_backing() && shape.below != Below::RawDataFile {
        extras.push_str(",preallocation=metadata");
    }
    extras
}

fn written_by_qemu(shape: &Shape, directory: &Path, rng: &mut Rng) {
    let files = Files::new(directory);
    let disk_bytes = shape.disk_bytes(rng);
    let below = files.make_below(shape, disk_bytes, rng);
    files.create_with_qemu(shape, &random_extras(shape, rng), &below, disk_bytes);
    let empty = files.read_with_qemu(&["-f", "qcow2"]);
    write_with_qemu(&files.image, &Model::of(shape, &empty), shape, rng);
    // A snapshot shares every cluster: each of our writes must go elsewhere.
    let has_snapshot = shape.refcount_bits > 1 && !shape.has_data_file() && rng.once_in(2);
    if has_snapshot {
        qemu_img(&["snapshot", "-c", "first"], &[&files.image]);
        let model = Model::of(shape, &files.read_with_qemu(&["-f", "qcow2"]));
        write_with_qemu(&files.image, &model, shape, rng);
    }
    let snapshot = directory.join("snapshot.raw");
    if has_snapshot {
        qemu_img(
            &["convert", "-f", "qcow2", "-l", "first", "-O", "raw"],
            &[&files.image, &snapshot],
        );
    }
    let truth = files.read_with_qemu(&["-f", "qcow2"]);
    let mut model = Model::of(shape, &truth);
    modify_here(&files.image, &mut model, shape, !has_snapshot, rng);
    check_with_both(&files.image);
    model.store(&truth);
    compare_with_qemu(&files.image, &truth);
    if has_snapshot {
        let after = directory.join("after.raw");
        qemu_img(
            &["convert", "-f", "qcow2", "-l", "first", "-O", "raw"],
            &[&files.image, &after],
        );
        qemu_img(&["compare", "-f", "raw", "-F", "raw"], &[&snapshot, &after]);
    }
    back_to_qemu(&files, &model, shape, rng);
}

/// QEMU goes on with what we left, and we read what it made of it.
fn back_to_qemu(files: &Files, model: &Model, shape: &Shape, rng: &mut Rng) {
    write_with_qemu(&files.image, model, shape, rng);
    let model = Model::of(shape, &files.read_with_qemu(&["-f", "qcow2"]));
    check_with_both(&files.image);
    let how = How::random(rng);
    let queue = Queue::new(Backend::Auto).expect("a queue can be made");
    queue.block_on(async {
        let opened = open(&files.image, &how).await;
        verify(&opened, &model).await;
        verify_extents(&opened, &model).await;
        opened
            .close()
            .await
            .unwrap_or_else(|e| panic!("close: {e}"));
    });
}

macro_rules! matrix {
    ($($name:ident: $bytes:expr;)*) => {
        mod written_here {
            $(#[test] fn $name() { super::each($bytes, "written_here", super::written_here); })*
        }
        mod written_by_qemu {
            $(#[test] fn $name() { super::each($bytes, "written_by_qemu", super::written_by_qemu); })*
        }
    };
}

matrix! {
    clusters_of_512_bytes: 512;
    clusters_of_4_kib: 4 << 10;
    clusters_of_64_kib: 64 << 10;
    clusters_of_128_kib: 128 << 10;
    clusters_of_2_mib: 2 << 20;
}
