//! `compact`: beside QEMU's check and compare, with snapshots, bitmaps, encryption and backing
//! files; its plan; on a file system that is full; interrupted and killed.
//! `COWSLIP_COMPACT_MIB` is the size of the image on the full file system (96), and
//! `COWSLIP_COMPACT_KILLS` how often a compaction is killed (6).
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod aged;
mod background;
mod whole_extents;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::mounted::Mounted;
use crate::support::{
    Scratch, cowslip, number_from_environment, outcome, peers_are_installed, run, scratch,
    scratch_beside, succeeds, wait_for_lock,
};

fn ours(dir: &Path, line: &str) -> Output {
    outcome(cowslip().current_dir(dir).args(line.split_whitespace()))
}

fn qemu(dir: &Path, program: &str, line: &str) -> String {
    let mut command = Command::new(program);
    run(command.current_dir(dir).args(line.split_whitespace()))
}

fn qemu_io(dir: &Path, image: &str, commands: &[String]) {
    let mut command = Command::new("qemu-io");
    command
        .current_dir(dir)
        .args(["-f", "qcow2", "-d", "unmap"]);
    for line in commands {
        command.args(["-c", line]);
    }
    run(command.arg(image));
}

/// A file system of this size, of which so much is reserved, if there can be one, and QEMU's
/// programs.
fn small_file_system(bytes: u64, reserved_percent: &str) -> Option<Mounted> {
    let is_possible = peers_are_installed(&["qemu-img", "qemu-io", "mkfs.ext4"]);
    let format = ["mkfs.ext4", "-q", "-m", reserved_percent];
    is_possible
        .then(|| Mounted::of_size(&format, bytes))
        .flatten()
}

/// Checks images of each kind in a directory of its own, if QEMU is there.
fn with_each(options: &[&str], check: impl Fn(&Path, &str)) {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        options
            .iter()
            .for_each(|options| check(&scratch(), options));
    }
}

/// A directory with an image of 64 MiB, which is filled so; `None` without QEMU.
fn with_image(fill: impl Fn(&Path)) -> Option<Scratch> {
    let dir = scratch_beside(&["qemu-img", "qemu-io"])?;
    succeeds(&dir, "create -q -f qcow2 a.qcow2 64M");
    fill(&dir);
    Some(dir)
}

/// The disk as a raw file elsewhere, and its name.
fn raw_copy(dir: &Path) -> (Scratch, String) {
    let holder = scratch();
    let raw = holder.path().join("a.raw").display().to_string();
    qemu(dir, "qemu-img", &format!("convert -O raw a.qcow2 {raw}"));
    (holder, raw)
}

/// Writes each of these MiB with a byte of its own.
fn write_each(dir: &Path, image: &str, all: impl IntoIterator<Item = u64>, from: u64) {
    let write = |at: u64| format!("write -P {} {at}M 1M", (at + from) % 250 + 1);
    qemu_io(dir, image, &all.into_iter().map(write).collect::<Vec<_>>());
}

/// Takes all of the file system's space.
fn fill_up(dir: &Path) {
    let mut filler = std::fs::File::create(dir.join("filler")).unwrap();
    for bytes in [1 << 20, 4096] {
        let zeroes = vec![1; bytes];
        while std::io::Write::write_all(&mut filler, &zeroes).is_ok() {}
    }
    filler.sync_all().unwrap();
    assert!(free_bytes(dir) < 4096, "{}", free_bytes(dir));
}

/// Takes the file system's space but for this much.
fn fill_up_to(dir: &Path, left: u64) {
    let filler = std::fs::File::create(dir.join("filler")).unwrap();
    let bytes = free_bytes(dir).saturating_sub(left);
    rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Writes `mib` MiB, and every other one once more under a snapshot that is then deleted: half as
/// much is dead. The host keeps the space of what is dead.
fn age(dir: &Path, image: &str, mib: u64) {
    write_each(dir, image, 0..mib, 0);
    qemu(dir, "qemu-img", &format!("snapshot -c dead {image}"));
    write_each(dir, image, (0..mib).step_by(2), 77);
    delete_dead(dir, image);
}

/// Deletes the snapshot, and leaves the host's space.
fn delete_dead(dir: &Path, image: &str) {
    let kept = "driver=qcow2,discard=ignore,pass-discard-snapshot=off,file.driver=file";
    let delete = format!("snapshot --image-opts -d dead {kept},file.filename={image}");
    qemu(dir, "qemu-img", &delete);
}

fn length(dir: &Path, name: &str) -> u64 {
    std::fs::metadata(dir.join(name)).unwrap().len()
}

fn blocks(dir: &Path, name: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    512 * std::fs::metadata(dir.join(name)).unwrap().blocks()
}

#[test]
fn dead_space_comes_back_and_every_byte_stays() {
    let all = [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=64k,extended_l2=on",
        "cluster_size=64k,compat=0.10",
        "cluster_size=32k,refcount_bits=1",
        "cluster_size=64k,refcount_bits=64,lazy_refcounts=on",
    ];
    with_each(&all, |dir, options| {
        succeeds(dir, &format!("create -q -f qcow2 -o {options} a.qcow2 64M"));
        // Snapshots need wider counts.
        match options.ends_with("refcount_bits=1") {
            true => {
                write_each(dir, "a.qcow2", 0..16, 0);
                let gone = (0..16).step_by(2).map(|at| format!("discard {at}M 1M"));
                qemu_io(dir, "a.qcow2", &gone.collect::<Vec<_>>());
            }
            false => age(dir, "a.qcow2", 16),
        }
        qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
        let before = length(dir, "a.qcow2");
        let plan = json(&succeeds(dir, "compact --plan --json a.qcow2"));
        let done = json(&succeeds(dir, "compact --json --budget 2M a.qcow2"));
        assert_eq!(length(dir, "a.qcow2"), done["file-length"], "{options}");
        assert_eq!(done["file-length-before"], before);
        assert_eq!(plan["file-length-after"], done["file-length"], "{options}");
        assert_eq!(plan["moved-bytes"], done["moved-bytes"], "{options}");
        assert!(before - length(dir, "a.qcow2") > 6 << 20, "{options}");
        // Dead space before the end is holes.
        let live = 16 << 20;
        assert!(blocks(dir, "a.qcow2") < live + (2 << 20), "{options}");
        qemu(dir, "qemu-img", "check a.qcow2");
        qemu(dir, "qemu-img", "compare a.raw a.qcow2");
        let again = json(&succeeds(dir, "compact --json a.qcow2"));
        assert_eq!(again["moved-bytes"], 0, "{options}");
        let words = succeeds(dir, "compact --plan a.qcow2");
        assert!(words.contains("would have"), "{words}");
    });
}

#[test]
fn snapshots_bitmaps_and_layers_below_stay() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    succeeds(dir, "create -q -f qcow2 base.qcow2 48M");
    qemu_io(dir, "base.qcow2", &["write -P 99 20M 20M".to_string()]);
    succeeds(dir, "create -q -f qcow2 -b base.qcow2 -F qcow2 a.qcow2");
    qemu_io(dir, "a.qcow2", &["write -P 5 0 12M".to_string()]);
    qemu(dir, "qemu-img", "snapshot -c first a.qcow2");
    qemu(dir, "qemu-img", "bitmap --add a.qcow2 kept");
    age(dir, "a.qcow2", 10);
    qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
    qemu(dir, "qemu-img", "convert -O raw -l first a.qcow2 first.raw");
    let bitmaps = qemu(dir, "qemu-img", "info --output=json a.qcow2");
    let bitmaps = json(&bitmaps)["format-specific"]["data"]["bitmaps"].clone();
    let before = length(dir, "a.qcow2");
    succeeds(dir, "compact a.qcow2");
    assert!(length(dir, "a.qcow2") < before);
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", "compare a.raw a.qcow2");
    qemu(dir, "qemu-img", "convert -O raw -l first a.qcow2 again.raw");
    qemu(dir, "qemu-img", "compare first.raw again.raw");
    let after = qemu(dir, "qemu-img", "info --output=json a.qcow2");
    assert_eq!(json(&after)["format-specific"]["data"]["bitmaps"], bitmaps);
}

#[test]
fn lines_that_ask_for_what_cannot_be_are_refused() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 a.qcow2 64M");
    succeeds(dir, "create -q -f raw a.raw 1M");
    let before = std::fs::read(dir.join("a.qcow2")).unwrap();
    for (line, words) in [
        (
            "compact --target-size 100k a.qcow2",
            "cannot be shorter than",
        ),
        ("compact --budget nonsense a.qcow2", "budget"),
        ("compact -f raw a.raw", "compacting a raw image"),
        ("compact missing.qcow2", "missing.qcow2"),
    ] {
        let output = ours(dir, line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(words), "{line}: {said}");
    }
    assert_eq!(std::fs::read(dir.join("a.qcow2")).unwrap(), before);
}

#[test]
fn space_that_was_never_written_stays_a_hole() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    succeeds(
        dir,
        "create -q -f qcow2 -o preallocation=metadata a.qcow2 32M",
    );
    let commands = ["write -P 7 31M 1M", "discard 0 16M"].map(String::from);
    qemu_io(dir, "a.qcow2", &commands);
    qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
    let plan = json(&succeeds(dir, "compact --plan --json a.qcow2"));
    assert!(plan["moved-bytes"].as_u64().unwrap() > 12 << 20, "{plan}");
    let before = blocks(dir, "a.qcow2");
    succeeds(dir, "compact a.qcow2");
    assert!(length(dir, "a.qcow2") < 18 << 20);
    // Some of it are tables, of whose space the file system had not decided.
    assert!(blocks(dir, "a.qcow2") <= before + (64 << 10), "{before}");
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", "compare a.raw a.qcow2");
}

/// Scattered writes into clusters whose space is allocated as a whole; QEMU compares.
#[test]
fn space_of_subclusters_that_were_never_written_comes_back() {
    let Some(mounted) = small_file_system(160 << 20, "5") else {
        return;
    };
    let dir = mounted.at.as_path();
    qemu(dir, "qemu-img", "create -q -f raw golden.raw 64M");
    let line =
        "create -q -f qcow2 -o extended_l2=on,cluster_size=128k -b golden.raw -F raw a.qcow2";
    succeeds(dir, line);
    let mut guest = cowslip();
    guest.current_dir(dir).args(["io", "-f", "qcow2"]);
    for at in (0..64 << 10).step_by(132) {
        guest.args(["-c", &format!("write -P {} {at}k 4k", at % 250 + 1)]);
    }
    run(guest.arg("a.qcow2"));
    qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
    let before = blocks(dir, "a.qcow2");
    assert!(before > 60 << 20, "clusters have their space: {before}");
    let advice = json(&succeeds(
        dir,
        "advise --json --workload read-mostly a.qcow2",
    ));
    let plan = json(&succeeds(dir, "compact --plan --json a.qcow2"));
    let promised = plan["subcluster-bytes"].as_u64().unwrap();
    assert!(promised > 55 << 20, "{plan}");
    assert_eq!(advice["facts"]["subcluster-bytes"], promised);
    let kept = json(&succeeds(dir, "compact --json --keep-subclusters a.qcow2"));
    assert_eq!(kept["subcluster-bytes"], 0);
    assert!(blocks(dir, "a.qcow2") > 55 << 20);
    let done = json(&succeeds(dir, "compact --json a.qcow2"));
    assert_eq!(done["subcluster-bytes"], promised);
    let after = blocks(dir, "a.qcow2");
    // 497 blocks of data, and few clusters of tables.
    assert!(after < 4 << 20, "{after}");
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", "compare a.raw a.qcow2");
    // The guest goes on.
    qemu_io(dir, "a.qcow2", &["write -P 9 8k 64k".to_string()]);
    qemu(dir, "qemu-img", "check a.qcow2");
    let words = succeeds(dir, "compact a.qcow2");
    assert!(!words.contains("subclusters"), "{words}");
}

/// The guest has written zeroes, and bytes of the backing file, compressed and not; QEMU compares.
#[test]
fn clusters_that_need_no_space_lose_it() {
    let all = [
        "cluster_size=64k",
        "cluster_size=4k,compat=0.10",
        "cluster_size=64k,extended_l2=on",
    ];
    with_each(&all, |dir, options| {
        succeeds(dir, "create -q -f qcow2 base.qcow2 24M");
        qemu_io(dir, "base.qcow2", &["write -P 99 0 12M".to_string()]);
        let line = format!("create -q -f qcow2 -o {options} -b base.qcow2 -F qcow2 a.qcow2");
        succeeds(dir, &line);
        let writes = [
            "write -P 99 0 4M",
            "write -c -P 99 4M 64k",
            "write -P 0 5M 4M",
            "write -P 0 14M 2M",
            // Halves of clusters: one like the base, one not.
            "write -P 98 10M 32k",
            "write -P 99 10272k 32k",
            "write -P 7 11M 1M",
        ];
        qemu_io(dir, "a.qcow2", &writes.map(String::from));
        qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
        let words = "--json --zeroes --dedupe-backing a.qcow2";
        let plan = json(&succeeds(dir, &format!("compact --plan {words}")));
        // What comes back by the options counts for the size that is asked for.
        let least = &plan["file-length-after"];
        let done = json(&succeeds(
            dir,
            &format!("compact --target-size {least} {words}"),
        ));
        let redundant = done["redundant-bytes"].as_u64().unwrap();
        assert_eq!(plan["redundant-bytes"], redundant, "{options}");
        // Version 2 has no flag for zeroes above other data.
        let zero = match options.ends_with("0.10") {
            true => 2 << 20,
            false => 6 << 20,
        };
        // Clusters that are as small, or have subclusters, can lose a half.
        let unit = match options {
            "cluster_size=64k" => 0,
            _ => 32 << 10,
        };
        assert_eq!(redundant, (4 << 20) + (64 << 10) + zero + unit, "{options}");
        qemu(dir, "qemu-img", "check a.qcow2");
        qemu(dir, "qemu-img", "compare a.raw a.qcow2");
        let map = json(&qemu(dir, "qemu-img", "map --output=json a.qcow2"));
        let own = |extent: &&Value| extent["depth"] == 0 && extent["data"] == true;
        let own = map.as_array().unwrap().iter().filter(own);
        let own: u64 = own.map(|it| it["length"].as_u64().unwrap()).sum();
        let kept = (1 << 20) + (if unit > 0 { 32 << 10 } else { 64 << 10 });
        let zero = (6 << 20) - zero;
        assert_eq!(own, kept + zero, "{options}: {map}");
        let again = json(&succeeds(
            dir,
            "compact --json --zeroes --dedupe-backing a.qcow2",
        ));
        assert_eq!(again["redundant-bytes"], 0, "{options}");
    });
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 a.qcow2 1M");
    let refused = ours(dir, "compact --dedupe-backing a.qcow2");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("there is no backing file"), "{said}");
}

/// Writes `mib` MiB a few clusters at a time, in no order.
fn scatter(dir: &Path, image: &str, mib: u64) {
    let parts = mib << 3;
    // It has no factor in common with a power of two.
    let at = |part: u64| part * 1_000_003 % parts;
    let write = |part: u64| format!("write -P {} {}k 128k", at(part) % 250 + 1, at(part) * 128);
    let all: Vec<String> = (0..parts).map(write).collect();
    for some in all.chunks(100) {
        qemu_io(dir, image, some);
    }
}

/// The guest's order, as QEMU maps it: how many extents there are in the file.
fn extents_of(dir: &Path, image: &str) -> usize {
    let map = json(&qemu(
        dir,
        "qemu-img",
        &format!("map --output=json {image}"),
    ));
    let mut next = None;
    let mut extents = 0;
    for extent in map.as_array().unwrap() {
        let of = |name: &str| extent[name].as_u64();
        if let (Some(start), Some(at), Some(len)) = (of("start"), of("offset"), of("length")) {
            extents += usize::from(next != Some((start, at)));
            next = Some((start + len, at + len));
        }
    }
    extents
}

/// Puts the image of these options in order; the plan and QEMU agree.
fn put_in_order(dir: &Path, options: &str, (object, name): (&str, &str)) {
    let image = format!("{object} --image-opts {name}");
    let convert = format!("convert {object} --image-opts -O raw {name} a.raw");
    qemu(dir, "qemu-img", &convert);
    let before = extents_of(dir, &image);
    let planning = format!("compact --plan --defragment {image}");
    let plan = json(&succeeds(dir, &format!("{planning} --json")));
    let words = succeeds(dir, &planning);
    assert!(words.contains("is perfect"), "{words}");
    let line = format!("compact --json --budget 2M --defragment {image}");
    let done = json(&succeeds(dir, &line));
    let figure = |of: &Value, name: &str| of[name].as_u64().unwrap();
    assert_eq!(plan["extents"], done["extents-before"], "{options}");
    assert_eq!(plan["extents-perfect"], done["extents-perfect"]);
    let now = figure(&done, "extents");
    let perfect = figure(&done, "extents-perfect");
    assert!(5 * now <= 6 * perfect, "{options}: {done}");
    assert!(figure(&done, "extents-before") > 30, "{options}: {done}");
    let expected = figure(&plan, "extents-after");
    assert!(5 * expected <= 6 * perfect, "{options}: {plan}");
    // Subclusters that were not written part what the clusters do not; so do compressed ones.
    // Encrypted clusters have no place in QEMU's map.
    if object.is_empty() {
        let after = extents_of(dir, &image);
        assert!(after < before, "{options}: {after}, {before}");
        assert!(after <= now as usize + 6, "{options}: {after}, {now}");
    }
    qemu(dir, "qemu-img", &format!("check {image}"));
    let raw = "driver=raw,file.filename=a.raw";
    let compare = format!("compare {object} --image-opts {raw} {name}");
    qemu(dir, "qemu-img", &compare);
    let again = json(&succeeds(dir, &line));
    assert_eq!(again["moved-bytes"], 0, "{options}: {again}");
}

#[test]
fn a_disk_that_was_written_at_random_gets_the_guests_order() {
    let all = [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=64k,extended_l2=on",
    ];
    with_each(&all, |dir, options| {
        succeeds(dir, &format!("create -q -f qcow2 -o {options} a.qcow2 32M"));
        scatter(dir, "a.qcow2", 16);
        let changes = ["discard 5M 1M", "write -c 20M 64k"].map(String::from);
        qemu_io(dir, "a.qcow2", &changes);
        qemu(dir, "qemu-img", "snapshot -c kept a.qcow2");
        qemu_io(dir, "a.qcow2", &["write -P 7 0 2M".to_string()]);
        qemu(dir, "qemu-img", "convert -O raw -l kept a.qcow2 kept.raw");
        let name = "driver=qcow2,file.filename=a.qcow2";
        put_in_order(dir, options, ("", name));
        qemu(dir, "qemu-img", "convert -O raw -l kept a.qcow2 again.raw");
        qemu(dir, "qemu-img", "compare kept.raw again.raw");
    });
}

#[test]
fn an_encrypted_disk_gets_the_guests_order() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let object = "--object secret,id=s,data=swordfish";
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let line = format!("create -q {object} -f qcow2 -o {options} a.qcow2 32M");
    succeeds(dir, &line);
    let name = "driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
    for part in 0..64 {
        let at = part * 27 % 64 * 512;
        let command = format!("write -P {} {at}k 512k", part + 1);
        let mut write = Command::new("qemu-io");
        write.current_dir(dir).args(object.split(' '));
        run(write.args(["--image-opts", name, "-c", &command]));
    }
    put_in_order(dir, options, (object, name));
}

#[test]
fn a_disk_in_a_data_file_keeps_its_places() {
    let dir = &scratch();
    for raw in ["on", "off"] {
        let options = format!("data_file=d.{raw},data_file_raw={raw}");
        succeeds(dir, &format!("create -q -f qcow2 -o {options} a.qcow2 1M"));
        for plan in ["", "--plan"] {
            let refused = ours(dir, &format!("compact {plan} --defragment a.qcow2"));
            let said = String::from_utf8_lossy(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{said}");
            assert!(said.contains("whose data is in a data file"), "{said}");
        }
    }
}

/// A server compacts the file while its clients leave it alone, once more when they have changed
/// something, and ends in order.
#[test]
fn a_server_compacts_the_file_that_nobody_uses() {
    let Some(dir) = &with_image(|dir| age(dir, "a.qcow2", 24)) else {
        return;
    };
    qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
    let before = length(dir, "a.qcow2");
    let often = "--compact-idle-ms 50 --compact-pause 1";
    let serve = format!("serve --socket s.sock --compact-background 64M/s {often} a.qcow2");
    let mut server = cowslip();
    server.current_dir(dir).args(serve.split(' '));
    let mut server = server.spawn().unwrap();
    let shorter_by = |bytes: u64, before: u64| {
        let begun = std::time::Instant::now();
        while length(dir, "a.qcow2") + bytes > before {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "nothing comes back"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    shorter_by(6 << 20, before);
    let compacted = length(dir, "a.qcow2");
    let mut discard = Command::new("qemu-io");
    discard.current_dir(dir).args(["-f", "raw", "-d", "unmap"]);
    discard.args(["-c", "discard 0 8M", "nbd+unix:///?socket=s.sock"]);
    run(&mut discard);
    shorter_by(7 << 20, compacted);
    let mut same = Command::new("qemu-io");
    same.current_dir(dir).args(["-f", "raw"]);
    run(same.args(["-c", "write -z 0 8M", "a.raw"]));
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", "compare a.raw a.qcow2");
    let refused = ours(dir, "serve --socket s.sock --compact-background 0 a.qcow2");
    assert_eq!(refused.status.code(), Some(1));
}

fn free_bytes(dir: &Path) -> u64 {
    let free = rustix::fs::statvfs(dir).unwrap();
    free.f_bavail * free.f_frsize
}

#[test]
fn a_full_file_system_gets_its_space_back() {
    let mib = number_from_environment("COWSLIP_COMPACT_MIB").unwrap_or(96);
    let Some(mounted) = small_file_system((mib * 2 + 32) << 20, "5") else {
        return;
    };
    let dir = mounted.at.as_path();
    let size = mib << 20;
    succeeds(dir, &format!("create -q -f qcow2 a.qcow2 {size}"));
    age(dir, "a.qcow2", mib);
    let (_holder, raw) = raw_copy(dir);
    // All but a little is filled.
    let left = 8 << 20;
    fill_up_to(dir, left);
    let before = blocks(dir, "a.qcow2");
    succeeds(dir, "compact --budget 4M a.qcow2");
    assert!(before - blocks(dir, "a.qcow2") >= size * 2 / 5);
    assert!(free_bytes(dir) >= left / 2 + size * 2 / 5);
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", &format!("compare {raw} a.qcow2"));
}

/// Not one block is free, and the first places that data moves to are holes: what is free behind
/// them comes back first.
#[test]
fn without_one_free_block_it_goes_on_with_what_comes_back() {
    let Some(mounted) = small_file_system(96 << 20, "0") else {
        return;
    };
    let dir = mounted.at.as_path();
    succeeds(dir, "create -q -f qcow2 a.qcow2 32M");
    write_each(dir, "a.qcow2", 0..32, 0);
    qemu(dir, "qemu-img", "snapshot -c dead a.qcow2");
    write_each(dir, "a.qcow2", (1..32).step_by(2), 100);
    delete_dead(dir, "a.qcow2");
    qemu_io(
        dir,
        "a.qcow2",
        &["discard 0 1M", "discard 2M 1M"].map(String::from),
    );
    let (_holder, raw) = raw_copy(dir);
    fill_up(dir);
    succeeds(dir, "compact -q --budget 1M a.qcow2");
    assert!(length(dir, "a.qcow2") < 32 << 20);
    assert!(free_bytes(dir) > 16 << 20, "{}", free_bytes(dir));
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", &format!("compare {raw} a.qcow2"));
}

/// A disk is shrunk, and its file with it, on a file system that has no room for a second one.
#[test]
fn a_disk_is_shrunk_on_a_full_file_system() {
    let Some(mounted) = small_file_system(160 << 20, "5") else {
        return;
    };
    let dir = mounted.at.as_path();
    succeeds(dir, "create -q -f qcow2 a.qcow2 96M");
    // The end of the disk lies at the beginning of the file.
    write_each(dir, "a.qcow2", (0..96).rev(), 0);
    fill_up_to(dir, 2 << 20);
    succeeds(dir, "resize -q --shrink a.qcow2 40M");
    succeeds(dir, "compact -q --budget 1M a.qcow2");
    assert!(length(dir, "a.qcow2") < 41 << 20);
    assert!(free_bytes(dir) > 54 << 20, "{}", free_bytes(dir));
    qemu(dir, "qemu-img", "check a.qcow2");
    let read = |at: u64| format!("read -P {} {at}M 1M", at + 1);
    let reads: Vec<String> = (0..40).map(read).collect();
    qemu_io(dir, "a.qcow2", &reads);
}

#[test]
fn killed_and_interrupted_compactions_lose_nothing() {
    let Some(dir) = &with_image(|dir| age(dir, "a.qcow2", 32)) else {
        return;
    };
    let was = length(dir, "a.qcow2");
    let now = kill_and_interrupt(dir, "compact --budget 1M --rate-limit 20M a.qcow2", was);
    assert!(now <= was, "it grows");
    succeeds(dir, "compact -q a.qcow2");
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", "compare a.raw a.qcow2");
    assert!(length(dir, "a.qcow2") < 33 << 20);
}

#[test]
fn killed_and_interrupted_defragmentations_lose_nothing() {
    let Some(dir) = &with_image(|dir| scatter(dir, "a.qcow2", 24)) else {
        return;
    };
    // For what is in the way, and as leaks after each that is killed.
    let most = 2 * length(dir, "a.qcow2");
    let line = "compact --budget 1M --rate-limit 20M --defragment a.qcow2";
    kill_and_interrupt(dir, line, most);
    succeeds(dir, "compact -q --defragment a.qcow2");
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", "compare a.raw a.qcow2");
    assert_eq!(extents_of(dir, "a.qcow2"), 1);
    assert!(length(dir, "a.qcow2") < 25 << 20);
}

/// Kills a compaction some times at a random moment, and interrupts it at last: each leaves what
/// there was, and no longer a file than `most`. Returns its length at last.
fn kill_and_interrupt(dir: &Path, line: &str, most: u64) -> u64 {
    qemu(dir, "qemu-img", "convert -O raw a.qcow2 a.raw");
    let kills = number_from_environment("COWSLIP_COMPACT_KILLS").unwrap_or(6);
    let mut was = most;
    for kill in 0..=kills {
        let changed = std::fs::metadata(dir.join("a.qcow2")).unwrap();
        let changed = changed.modified().unwrap();
        let mut command = cowslip();
        let mut child = command
            .current_dir(dir)
            .args(line.split(' '))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let signal = match kill == kills {
            true => Signal::INT,
            false => Signal::KILL,
        };
        // A signal that comes before it has begun leaves what those before it have left.
        while signal == Signal::INT && child.try_wait().unwrap().is_none() {
            let now = std::fs::metadata(dir.join("a.qcow2")).unwrap();
            if now.modified().unwrap() != changed {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(30 + 37 * kill % 200));
        if child.try_wait().unwrap().is_none() {
            // It may have ended since; its number stays until it is waited for.
            kill_process(Pid::from_child(&child), signal).unwrap();
        }
        child.wait().unwrap();
        wait_for_lock(dir, "a.qcow2");
        let mut check = Command::new("qemu-img");
        let checked = outcome(check.current_dir(dir).args(["check", "a.qcow2"]));
        let code = checked.status.code();
        let said = String::from_utf8_lossy(&checked.stdout);
        // 3: leaks, which an interrupted one does not leave.
        assert!(
            code == Some(0) || (code == Some(3) && kill < kills),
            "{said}"
        );
        qemu(dir, "qemu-img", "compare a.raw a.qcow2");
        let now = length(dir, "a.qcow2");
        assert!(now <= was, "it grows");
        if !line.contains("defragment") {
            was = now;
        }
    }
    length(dir, "a.qcow2")
}
