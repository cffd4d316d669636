//! Snapshots that QEMU's tools make are applied and deleted here, and the other way round.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use cowslip::file::memory::MemoryFile;
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::create::Version;
use cowslip::{Buf, Error, Job};

use super::{Model, Random, SHAPES, by_id, checked_clean, named, open, read, read_at};
use crate::support::{Image, block_on, peers_are_installed};

/// Runs qemu-img in the image's directory.
fn qemu_img(dir: &Path, args: &[&str]) {
    let run = Command::new("qemu-img")
        .args(args)
        .current_dir(dir)
        .output();
    let run = run.unwrap();
    assert!(run.status.success(), "qemu-img {args:?}: {run:?}");
}

/// Returns the content of the disk, or of a snapshot, as QEMU's tools read it.
fn qemu_reads(image: &Image, snapshot: Option<&str>) -> Vec<u8> {
    let mut args = vec!["convert", "-O", "raw"];
    let choice = snapshot.map(|id| format!("snapshot.id={id}"));
    if let Some(choice) = &choice {
        args.extend(["-l", choice]);
    }
    args.extend(["image.qcow2", "out.raw"]);
    qemu_img(image.dir(), &args);
    std::fs::read(image.dir().join("out.raw")).unwrap()
}

/// One side's turn: some work on the image.
fn ours(image: &mut Image, model: &mut Model, random: &mut Random) {
    let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
    let opened = open(file.clone());
    for _ in 0..15 {
        model.step(&opened, random);
    }
    block_on(opened.close()).unwrap();
    image.bytes = file.contents();
    image.save();
}

fn theirs(image: &mut Image, model: &mut Model, random: &mut Random) {
    for _ in 0..4 {
        match (random.below(4), model.position(random)) {
            (0, _) if model.snapshots.len() < 4 => {
                let name = format!("q{}", random.below(1000));
                image.img(&["snapshot", "-c", &name, "image.qcow2"]);
                let highest = model
                    .snapshots
                    .iter()
                    .map(|(id, _)| id.parse::<u64>().unwrap());
                let id = highest.max().unwrap_or(0) + 1;
                model.snapshots.push((id.to_string(), model.disk.clone()));
            }
            (1, Some(position)) => {
                let (id, content) = model.snapshots[position].clone();
                image.img(&["snapshot", "-a", &id, "image.qcow2"]);
                model.disk = content;
            }
            (2, Some(position)) => {
                // QEMU's takes a name, which more than one may have.
                let names = names(image);
                let name = names[position].clone();
                let first = names.iter().position(|other| *other == name).unwrap();
                image.img(&["snapshot", "-d", &name, "image.qcow2"]);
                model.snapshots.remove(first);
            }
            _ => {
                let size = model.disk.len() as u64;
                let start = random.below(size / 512) * 512;
                let len = (1 + random.below(60)).min((size - start) / 512) * 512;
                let byte = 1 + random.below(255) as u8;
                image.io(&[&format!("write -P {byte} {start} {len}")]);
                model.disk[start as usize..(start + len) as usize].fill(byte);
            }
        }
    }
}

fn names(image: &Image) -> Vec<String> {
    let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
    let opened = open(file);
    let list = block_on(opened.snapshots()).unwrap();
    list.into_iter().map(|snapshot| snapshot.name).collect()
}

#[test]
fn both_sides_change_snapshots_in_turn() {
    if !peers_are_installed() {
        return;
    }
    for (create_options, size) in SHAPES {
        let mut image = Image::create(create_options, &size.to_string(), &[]);
        let mut model = Model::new(size);
        let random = &mut Random(size + create_options.len() as u64);
        for turn in 0..4 {
            let what = format!("{create_options}, turn {turn}");
            match turn % 2 {
                0 => ours(&mut image, &mut model, random),
                _ => theirs(&mut image, &mut model, random),
            }
            let (verdict, findings) = image.our_check();
            assert_eq!(verdict.exit_code, 0, "{what}: {findings:?}");
            assert_eq!(image.qemu_check().exit_code, 0, "{what}");
            let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
            model.judge(&file, &what);
            assert!(
                qemu_reads(&image, None) == model.disk,
                "{what}: QEMU's read"
            );
            // QEMU gives a snapshot the size that the disk has now.
            let same = |content: &Vec<u8>| content.len() == model.disk.len();
            let some = model
                .snapshots
                .iter()
                .rev()
                .find(|(_, content)| same(content));
            if let Some((id, content)) = some {
                assert!(
                    qemu_reads(&image, Some(id)) == *content,
                    "{what}: QEMU's read of {id}"
                );
            }
        }
    }
}

#[test]
fn a_snapshot_is_written_as_qemus_tools_write_it() {
    if !peers_are_installed() {
        return;
    }
    for create_options in ["", "compat=0.10", "cluster_size=512"] {
        let commands = ["write -P 1 0 200k"];
        let mut theirs = Image::create(create_options, "1M", &commands);
        let image = theirs.copy();
        theirs.img(&["snapshot", "-c", "a name", "image.qcow2"]);
        let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
        let opened = open(file.clone());
        let date = theirs.get(theirs.snapshots() + 16, 4) as u32;
        let nsec = theirs.get(theirs.snapshots() + 20, 4) as u32;
        let mut new = named("a name");
        (new.date_sec, new.date_nsec) = (date, nsec);
        block_on(opened.create_snapshot(&new, &Job::default())).unwrap();
        block_on(opened.close()).unwrap();
        let mut ours = image.copy();
        ours.bytes = file.contents();
        let entry = |image: &Image| {
            let at = image.snapshots() as usize;
            // Where the L1 table is, is another matter.
            image.bytes[at + 8..at + 40 + 24 + 1 + 6].to_vec()
        };
        assert_eq!(entry(&ours), entry(&theirs), "{create_options}");
        assert_eq!(ours.qemu_check().exit_code, 0);
    }
}

/// The L1 table of a snapshot with VM state goes beyond the end of the disk.
#[test]
fn the_state_of_a_vm_beyond_the_disk_is_kept_and_counted() {
    if !peers_are_installed() {
        return;
    }
    let mut image = Image::create("cluster_size=4096", "1M", &["write -P 1 0 64k"]);
    // As QEMU saves it: data behind the disk, in a table of its own, in the image that becomes a
    // snapshot.
    image.img(&["resize", "-q", "image.qcow2", "5M"]);
    image.io(&["write -P 9 4M 12k"]);
    image.img(&["snapshot", "-c", "vm", "image.qcow2"]);
    let at = image.snapshots();
    image.set_word(at + 40, 12 << 10);
    image.set_word(at + 48, 1 << 20);
    image.save();
    image.img(&["resize", "-q", "--shrink", "image.qcow2", "1M"]);
    image.io(&["write -P 2 0 4k"]);
    assert_eq!(image.qemu_check().exit_code, 0);

    let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
    let opened = open(file.clone());
    let vm_state = block_on(opened.snapshots()).unwrap()[0].vm_state_size;
    assert_eq!(vm_state, 12 << 10);
    block_on(opened.create_snapshot(&named("later"), &Job::default())).unwrap();
    block_on(opened.apply_snapshot(&by_id("1"), &Job::default())).unwrap();
    assert_eq!(opened.size(), 1 << 20);
    assert!(read(&opened)[..64 << 10].iter().all(|&byte| byte == 1));
    // The area behind the disk is the VM's; it is discarded when the disk grows over it.
    block_on(opened.close()).unwrap();
    checked_clean(&file, "applied");
    image.bytes = file.contents();
    assert_eq!(image.qemu_check().exit_code, 0);
    let l1_size = image.get(36, 4);
    assert_eq!(l1_size, 3, "the table of the VM's state is there");

    let opened = open(file.clone());
    block_on(opened.delete_snapshot(&by_id("2"), &Job::default())).unwrap();
    block_on(opened.resize(6 << 20)).unwrap();
    assert!(read(&opened)[1 << 20..].iter().all(|&byte| byte == 0));
    block_on(opened.apply_snapshot(&by_id("1"), &Job::default())).unwrap();
    block_on(opened.delete_snapshot(&by_id("1"), &Job::default())).unwrap();
    block_on(opened.close()).unwrap();
    checked_clean(&file, "deleted");
    image.bytes = file.contents();
    assert_eq!(image.qemu_check().exit_code, 0);
}

#[test]
fn what_cannot_be_counted_is_refused_and_nothing_changes() {
    if !peers_are_installed() {
        return;
    }
    for (bits, most) in [(1, 0), (2, 2), (4, 14)] {
        let create_options = format!("cluster_size=4096,refcount_bits={bits}");
        let mut image = Image::create(&create_options, "1M", &["write -P 1 0 64k"]);
        let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
        let opened = open(file.clone());
        let mut model = Model::new(1 << 20);
        model.disk[..64 << 10].fill(1);
        for _ in 0..most {
            model.create(&opened, "s");
        }
        let refused = block_on(opened.create_snapshot(&named("s"), &Job::default()));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("references already"), "{text}");
        // The count of what is there already is not raised, so there is room for applying one.
        if most > 0 {
            model.apply(&opened, 0);
        }
        let data = Buf::copy_of(&[7; 4096]);
        block_on(opened.write(4096, data, Default::default())).unwrap();
        model.disk[4096..8192].fill(7);
        block_on(opened.close()).unwrap();
        checked_clean(&file, &create_options);
        model.judge(&file, &create_options);
        image.bytes = file.contents();
        assert_eq!(image.qemu_check().exit_code, 0, "{create_options}");
    }
}

#[test]
fn a_damaged_image_keeps_its_snapshots() {
    if !peers_are_installed() {
        return;
    }
    let mut image = Image::create("cluster_size=4096", "1M", &["write -P 1 0 64k"]);
    image.img(&["snapshot", "-c", "s", "image.qcow2"]);
    // A data cluster has one reference, as far as the counts know: deleting the snapshot would free
    // it.
    let cluster = (image.word(image.l2()) & crate::support::OFFSET_MASK) / 4096;
    image.set(image.refcount_block() + cluster * 2, 2, 1);
    let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
    let opened = open(file.clone());
    let refused = block_on(opened.delete_snapshot(&by_id("1"), &Job::default()));
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    block_on(opened.close()).unwrap();
    assert_eq!(read_at(file, "1")[..64 << 10], vec![1; 64 << 10]);
}

/// Leaves so much of the extra data of each of the two snapshots, as old tools wrote it.
fn shorten_extra_data(image: &mut Image, left: [usize; 2]) {
    let start = image.snapshots() as usize;
    let mut table = Vec::new();
    let mut at = start;
    for left in left {
        let names_at = at + 40 + 24;
        let padded = [
            &image.bytes[at..at + 40 + left],
            &image.bytes[names_at..][..2],
        ]
        .concat();
        let begins = table.len();
        table.extend(padded);
        table[begins + 36..][..4].copy_from_slice(&(left as u32).to_be_bytes());
        table.resize(table.len().next_multiple_of(8), 0);
        at = names_at + 8;
    }
    image.bytes.resize(image.bytes.len().max(at), 0);
    image.bytes[start..at].fill(0);
    image.bytes[start..][..table.len()].copy_from_slice(&table);
    image.save();
}

#[test]
fn a_snapshot_table_that_is_written_anew_has_all_that_version_3_demands() {
    if !peers_are_installed() {
        return;
    }
    let job = Job::default();
    let to_version_3 = Amendment {
        version: Some(Version::V3),
        ..Amendment::default()
    };
    for (create_options, left) in [
        ("", [0, 8]),
        ("compat=0.10", [0, 24]),
        ("compat=0.10", [8, 16]),
    ] {
        let mut image = Image::create(create_options, "1M", &["write -P 1 0 200k"]);
        for name in ["a", "b"] {
            image.img(&["snapshot", "-c", name, "image.qcow2"]);
        }
        shorten_extra_data(&mut image, left);
        for change in ["create", "delete", "amend"] {
            let what = format!("{create_options} {left:?} {change}");
            let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
            let opened = open(file.clone());
            match change {
                "create" => drop(block_on(opened.create_snapshot(&named("c"), &job)).unwrap()),
                "delete" => block_on(opened.delete_snapshot(&by_id("2"), &job)).unwrap(),
                _ if create_options.is_empty() => continue,
                _ => block_on(opened.amend(&to_version_3, &job)).unwrap(),
            }
            block_on(opened.close()).unwrap();
            checked_clean(&file, &what);
            let mut now = image.copy();
            now.bytes = file.contents();
            assert_eq!(now.qemu_check().exit_code, 0, "{what}");
            let extra = now.get(now.snapshots() + 36, 4);
            assert_eq!(extra, 24, "{what}");
            let disk_bytes = now.get(now.snapshots() + 40 + 8, 8);
            assert_eq!(disk_bytes, 1 << 20, "{what}");
            assert_eq!(
                read_at(file, "1")[..200 << 10],
                vec![1; 200 << 10],
                "{what}"
            );
        }
    }
}

#[test]
fn an_image_without_a_disk_has_snapshots_too() {
    if !peers_are_installed() {
        return;
    }
    let mut image = Image::create("", "0", &[]);
    let file = Arc::new(MemoryFile::new("image", image.bytes.clone(), 1));
    let opened = open(file.clone());
    let job = Job::default();
    for name in ["a", "b"] {
        block_on(opened.create_snapshot(&named(name), &job)).unwrap();
    }
    block_on(opened.resize(1 << 20)).unwrap();
    block_on(opened.apply_snapshot(&by_id("2"), &job)).unwrap();
    block_on(opened.delete_snapshot(&by_id("1"), &job)).unwrap();
    assert_eq!(opened.size(), 0);
    block_on(opened.close()).unwrap();
    checked_clean(&file, "no disk");
    image.bytes = file.contents();
    assert_eq!(image.qemu_check().exit_code, 0);
    image.img(&["snapshot", "-a", "b", "image.qcow2"]);
    image.img(&["snapshot", "-d", "b", "image.qcow2"]);
    assert_eq!(image.our_check().0.exit_code, 0);
}
