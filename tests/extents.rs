//! `extents` against filefrag, xfs_bmap and btrfs's own tools, on hundreds of files of random
//! layout; images joined with their hosts against `map` and filefrag; and bad input. What mounts a
//! file system needs root and a loop device, and says so if it has neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use self::layouts::Abilities;
use crate::support::mounted::Mounted;
use crate::support::{cowslip, outcome, peers_are_installed, program, run, scratch, succeeds};

mod layouts;
mod peers;

/// Files of random layout on each file system.
const FILES: usize = 80;

fn ours(dir: &Path, line: &str) -> Output {
    outcome(cowslip().current_dir(dir).args(line.split_whitespace()))
}

fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    text
}

/// The report as JSON, its lists too.
fn report(dir: &Path, files: &[PathBuf], words: &[&str]) -> Value {
    let mut command = cowslip();
    command
        .current_dir(dir)
        .args(["extents", "--json", "--map"]);
    let text = run(command.args(words).args(files));
    serde_json::from_str(&text).unwrap()
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

/// Flags that only one side has words for.
fn comparable(flags: &str) -> Vec<String> {
    let known = [
        "last",
        "unwritten",
        "shared",
        "inline",
        "encoded",
        "delayed",
        "not-aligned",
        "merged",
    ];
    let mut flags: Vec<String> = flags
        .split(',')
        .map(|flag| match flag {
            "delalloc" => "delayed".to_string(),
            flag => flag.replace('_', "-"),
        })
        .filter(|flag| known.contains(&flag.as_str()))
        .collect();
    flags.sort();
    flags
}

/// The list of records of a file in the report.
fn records(file: &Value) -> Vec<peers::Extent> {
    let list = file["map"].as_array().unwrap();
    list.iter()
        .map(|line| {
            let flags = line["flags"].as_array().unwrap().iter();
            let flags: Vec<&str> = flags.map(|flag| flag.as_str().unwrap()).collect();
            peers::Extent {
                logical: number(&line["offset"]),
                len: number(&line["length"]),
                // filefrag shows 0 where there is no place.
                physical: line["physical"].as_u64().unwrap_or(0),
                flags: comparable(&flags.join(",")),
            }
        })
        .collect()
}

/// Returns a description of the difference, if there is one.
fn mismatch(name: &str, ours: &[peers::Extent], theirs: &[peers::Extent]) -> Option<String> {
    let at = (0..ours.len().max(theirs.len())).find(|&at| ours.get(at) != theirs.get(at))?;
    Some(format!(
        "{name}: {} and {} extents; the first that differs is {at}: {:?} and {:?}",
        ours.len(),
        theirs.len(),
        ours.get(at),
        theirs.get(at)
    ))
}

/// Makes files, lists their extents, and compares with filefrag. Returns the report and the files.
fn same_as_filefrag(mounted: &Mounted, abilities: Abilities) -> (Value, Vec<PathBuf>) {
    let files = layouts::make(&mounted.at, FILES, abilities);
    run(&mut Command::new("sync"));
    let report = report(&mounted.at, &files, &[]);
    let listed = report["files"].as_array().unwrap();
    assert_eq!(listed.len(), FILES);
    let theirs = peers::filefrag(&files);
    let mut mismatches = Vec::new();
    let mut extents = 0;
    for ((file, path), theirs) in listed.iter().zip(&files).zip(&theirs) {
        let ours = records(file);
        let theirs: Vec<_> = theirs
            .iter()
            .map(|extent| peers::Extent {
                flags: comparable(&extent.flags.join(",")),
                ..extent.clone()
            })
            .collect();
        extents += ours.len();
        assert_eq!(number(&file["extents"]), ours.len() as u64);
        assert_eq!(number(&file["size"]), path.metadata().unwrap().len());
        mismatches.extend(mismatch(&path.display().to_string(), &ours, &theirs));
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    eprintln!("{extents} extents of {FILES} files: the same as filefrag's");
    assert!(extents > 10 * FILES, "layouts that are too simple");
    (report, files)
}

/// There is no file with fewer extents than the fewest that are possible.
fn none_is_better_than_perfect(report: &Value) {
    for file in report["files"].as_array().unwrap() {
        let (extents, perfect) = (number(&file["extents"]), number(&file["perfect"]));
        assert!(
            extents >= perfect && (perfect > 0) == (extents > 0),
            "{file}"
        );
    }
}

#[test]
fn extents_on_ext4_are_those_of_filefrag() {
    let Some(mounted) = Mounted::beside(&["filefrag"], &["mkfs.ext4", "-q"]) else {
        return;
    };
    let (report, files) = same_as_filefrag(&mounted, Abilities::Fallocate);
    none_is_better_than_perfect(&report);
    let longest = &report["files"][0]["file-system"]["longest-extent"];
    assert_eq!(
        longest["written"].as_u64(),
        Some(32_768 * number(&report["files"][0]["file-system"]["block-size"]))
    );
    blocks_asked_one_by_one_agree(&mounted.at, &report, &files);
    holes_alone_agree(&mounted.at, &report, &files);
}

/// FIBMAP, on a file system that has FIEMAP too: the same places for what is written.
fn blocks_asked_one_by_one_agree(dir: &Path, all: &Value, files: &[PathBuf]) {
    let blocks = report(dir, files, &["--by", "fibmap"]);
    let mut compared = 0;
    for (file, other) in all["files"]
        .as_array()
        .unwrap()
        .iter()
        .zip(blocks["files"].as_array().unwrap())
    {
        assert_eq!(other["method"], "FIBMAP");
        let size =
            number(&file["size"]).next_multiple_of(number(&file["file-system"]["block-size"]));
        let mut expected: Vec<(u64, u64, u64)> = Vec::new();
        for extent in records(file) {
            if extent.flags.contains(&"unwritten".to_string()) || extent.logical >= size {
                continue;
            }
            let len = extent.len.min(size - extent.logical);
            match expected.last_mut() {
                Some((at, place, known))
                    if *at + *known == extent.logical && *place + *known == extent.physical =>
                {
                    *known += len;
                }
                _ => expected.push((extent.logical, extent.physical, len)),
            }
        }
        let listed = records(other);
        let listed: Vec<_> = listed
            .iter()
            .map(|e| (e.logical, e.physical, e.len))
            .collect();
        assert_eq!(listed, expected, "{}", file["filename"]);
        compared += listed.len();
    }
    eprintln!("{compared} extents by FIBMAP: the same as by FIEMAP");
}

/// SEEK_HOLE and SEEK_DATA: data is where something is written, and no place is reported.
fn holes_alone_agree(dir: &Path, all: &Value, files: &[PathBuf]) {
    let seen = report(dir, files, &["--by", "seek"]);
    for (file, other) in all["files"]
        .as_array()
        .unwrap()
        .iter()
        .zip(seen["files"].as_array().unwrap())
    {
        assert_eq!(other["method"], "SEEK_HOLE/SEEK_DATA");
        assert_eq!(other["sequential-read"], Value::Null);
        let written = records(file);
        for extent in written
            .iter()
            .filter(|e| !e.flags.contains(&"unwritten".to_string()))
        {
            let data = records(other);
            let end = (extent.logical + extent.len).min(number(&file["size"]));
            let holds = |e: &peers::Extent| e.logical <= extent.logical && e.logical + e.len >= end;
            assert!(
                data.iter().any(holds),
                "{}: {extent:?} {data:?}",
                file["filename"]
            );
        }
    }
}

#[test]
fn extents_of_files_without_extents_are_those_of_filefrag() {
    if !peers_are_installed(&["filefrag"]) {
        return;
    }
    // A journal makes it ext3; neither has extents.
    for format in [&["mkfs.ext2", "-q"][..], &["mkfs.ext3", "-q", "-b", "1024"]] {
        let Some(mounted) = Mounted::new(format) else {
            return;
        };
        let (report, _) = same_as_filefrag(&mounted, Abilities::Writes);
        none_is_better_than_perfect(&report);
        let on = &report["files"][0]["file-system"];
        assert_eq!(on["mapped-block-by-block"], true);
        let block = number(&on["block-size"]);
        assert_eq!(number(&on["longest-extent"]["written"]), 8 * block * block);
    }
}

#[test]
fn extents_on_xfs_are_those_of_filefrag_and_xfs_bmap() {
    let Some(mounted) = Mounted::beside(
        &["filefrag", "xfs_bmap"],
        &["mkfs.xfs", "-q", "-m", "reflink=1"],
    ) else {
        return;
    };
    let (report, files) = same_as_filefrag(&mounted, Abilities::Reflink);
    none_is_better_than_perfect(&report);
    let listed = report["files"].as_array().unwrap();
    let mut mismatches = Vec::new();
    for (file, path) in listed.iter().zip(&files) {
        let keep = |flag: &String| flag == "unwritten" || flag == "shared";
        let ours: Vec<_> = records(file)
            .into_iter()
            .map(|mut extent| {
                extent.flags.retain(keep);
                extent
            })
            .collect();
        let theirs = peers::xfs_bmap(path);
        mismatches.extend(mismatch(&path.display().to_string(), &ours, &theirs));
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    let shared = listed
        .iter()
        .map(|file| number(&file["shared"]["count"]))
        .sum::<u64>();
    assert!(shared > 0, "no file shares anything");
}

#[test]
fn extents_on_btrfs_are_those_of_filefrag_and_of_its_tree() {
    let Some(mounted) = Mounted::beside(&["filefrag", "btrfs"], &["mkfs.btrfs", "-q"]) else {
        return;
    };
    let (report, files) = same_as_filefrag(&mounted, Abilities::Compression);
    let tree = peers::btrfs_tree(&mounted.at.parent().unwrap().join("fs"));
    let listed = report["files"].as_array().unwrap();
    let mut mismatches = Vec::new();
    let mut encoded = 0;
    for (file, path) in listed.iter().zip(&files) {
        let keep = |flag: &String| ["unwritten", "encoded", "inline"].contains(&flag.as_str());
        let ours: Vec<_> = records(file)
            .into_iter()
            .map(|mut extent| {
                extent.flags.retain(keep);
                if extent.flags.contains(&"inline".to_string()) {
                    // The tree gives neither an offset nor a whole block.
                    (extent.len, extent.physical) = (0, 0);
                }
                extent
            })
            .collect();
        encoded += ours
            .iter()
            .filter(|e| e.flags.contains(&"encoded".to_string()))
            .count();
        let inode = path.metadata().unwrap().ino();
        let theirs = tree.get(&inode).cloned().unwrap_or_default();
        // The kernel joins what goes on, but not across all boundaries: both sides are joined here.
        let (ours, theirs) = (peers::joined(ours), peers::joined(theirs));
        mismatches.extend(mismatch(&path.display().to_string(), &ours, &theirs));
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    assert!(encoded > 0, "no file is compressed");
}

/// The guest's disk, cluster by cluster, by way of `map` and filefrag.
fn joined_layers_agree(mounted: &Mounted, options: &str) {
    let dir = mounted.at.as_path();
    let image = dir.join("joined.qcow2");
    let line = format!("create -q -f qcow2 -o {options} joined.qcow2 64M");
    assert!(ours(dir, &line).status.success());
    layouts::scribble_image(&image);
    run(&mut Command::new("sync"));
    let report = report(dir, std::slice::from_ref(&image), &[]);
    let file = &report["files"][0];
    let data_file = file["image"]["data-file"].as_str().map(PathBuf::from);
    let holder = data_file.clone().unwrap_or(image.clone());
    let host = peers::filefrag(std::slice::from_ref(&holder)).remove(0);
    let place = |offset: u64| {
        let extent = host
            .iter()
            .find(|e| (e.logical..e.logical + e.len).contains(&offset))?;
        Some(extent.physical + offset - extent.logical)
    };
    let text = succeeds(dir, "map --output=json joined.qcow2");
    let mapped: Value = serde_json::from_str(&text).unwrap();
    // The disk in blocks of 4 KiB: where the guest's bytes are on the device.
    let block = 4096;
    let mut expected = vec![None; (64 << 20) / block as usize];
    for run in mapped.as_array().unwrap() {
        let (start, len) = (number(&run["start"]), number(&run["length"]));
        if let (true, Some(offset)) = (run["data"] == true, run["offset"].as_u64()) {
            for at in (0..len).step_by(block as usize) {
                expected[((start + at) / block) as usize] = place(offset + at);
            }
        }
    }
    let mut listed = vec![None; expected.len()];
    let mut metadata = 0;
    for piece in file["guest-map"].as_array().unwrap() {
        metadata += u64::from(piece["guest-offset"].is_null());
        let (true, Some(physical)) = (piece["what"] == "data", piece["physical"].as_u64()) else {
            continue;
        };
        let (start, len) = (number(&piece["guest-offset"]), number(&piece["length"]));
        for at in (0..len).step_by(block as usize) {
            listed[((start + at) / block) as usize] = Some(physical + at);
        }
    }
    assert!(metadata >= 5, "header, L1, L2, refcounts: {metadata}");
    assert!(expected.iter().flatten().count() > 1000, "{options}");
    assert!(listed == expected, "{options}: the layers joined differ");
    let placed: Vec<u64> = expected.into_iter().flatten().collect();
    let runs = 1 + placed
        .windows(2)
        .filter(|pair| pair[0] + block != pair[1])
        .count();
    let seeks = placed
        .windows(2)
        .filter(|pair| pair[1] < pair[0] + block || pair[1] > pair[0] + block + (1 << 20));
    let read = &file["image"]["sequential-read"];
    assert_eq!(number(&read["runs"]), runs as u64, "{options}");
    let seeks = seeks.count() as u64;
    assert_eq!(number(&read["seeks"]), seeks, "{options}");
    let bytes = placed.len() as u64 * block;
    let score = (seeks << 20) as f64 / ((seeks << 20) + bytes) as f64;
    assert!((read["score"].as_f64().unwrap() - score).abs() < 1e-9);
    let reasons = read["reasons"].as_array().unwrap();
    let counted: u64 = reasons.iter().map(|reason| number(&reason["runs"])).sum();
    assert_eq!(
        counted,
        runs as u64 - 1,
        "{options}: each end of a run has one reason"
    );
    std::fs::remove_file(&image).unwrap();
    if let Some(name) = data_file {
        std::fs::remove_file(name).unwrap();
    }
}

#[test]
fn the_layers_of_an_image_are_joined() {
    let Some(mounted) = Mounted::beside(&["filefrag", "qemu-io"], &["mkfs.xfs", "-q"]) else {
        return;
    };
    let data_file = format!("data_file={}", mounted.at.join("joined.raw").display());
    for options in [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=128k,extended_l2=on",
        &data_file,
    ] {
        joined_layers_agree(&mounted, options);
    }
}

#[test]
fn files_written_in_turns_interleave_and_are_reasons() {
    let Some(mounted) = Mounted::beside(&["filefrag"], &["mkfs.ext4", "-q"]) else {
        return;
    };
    let (one, other) = (mounted.at.join("one"), mounted.at.join("other"));
    layouts::write_in_turns(&[one.clone(), other.clone()]);
    let report = report(&mounted.at, &[one.clone(), other.clone()], &[]);
    let expected: Vec<(u64, u64)> = {
        let lists = peers::filefrag(&[one, other]);
        peers::interleaving(&lists)
    };
    let listed = report["interleaving"][0]["files"]
        .as_array()
        .unwrap()
        .iter();
    let listed: Vec<(u64, u64)> = listed
        .map(|file| (number(&file["shared-gaps"]), number(&file["gaps"])))
        .collect();
    assert_eq!(listed, expected);
    assert!(
        listed
            .iter()
            .all(|&(shared, gaps)| shared > 2 && shared <= gaps),
        "{listed:?}"
    );
    let reasons = report["files"][0]["sequential-read"]["reasons"].to_string();
    assert!(
        reasons.contains("interleaved with") && reasons.contains("/other"),
        "{reasons}"
    );
}

#[test]
fn memory_file_systems_tell_holes_alone_and_say_so() {
    let dir = Path::new("/dev/shm");
    let is_tmpfs = rustix::fs::statfs(dir).is_ok_and(|found| found.f_type == 0x0102_1994);
    if !is_tmpfs {
        eprintln!("SKIPPED: /dev/shm is no tmpfs");
        return;
    }
    let dir = tempfile::tempdir_in(dir).unwrap();
    let path = dir.path().join("a");
    let file = std::fs::File::create(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 8192], 1 << 20).unwrap();
    file.set_len(2 << 20).unwrap();
    let text = run(cowslip().arg("extents").arg(&path));
    assert!(text.contains("found by: SEEK_HOLE/SEEK_DATA"), "{text}");
    assert!(text.contains("places are not"), "{text}");
    let listed = report(dir.path(), &[path], &[]);
    let listed = &listed["files"][0];
    assert_eq!(number(&listed["holes"]["count"]), 2);
    assert_eq!(number(&listed["map"][0]["offset"]), 1 << 20);
    assert!(listed["map"][0]["physical"].is_null());
}

/// Appended to, cut and punched meanwhile: the walk ends, and its records are in order.
#[test]
fn files_that_change_meanwhile_are_told_to_an_end() {
    let dir = scratch();
    let path = dir.path().join("busy");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = StopAtEnd(&stop);
        scope.spawn(|| layouts::change_until(&path, &stop));
        while !path.exists() {
            std::thread::yield_now();
        }
        for round in 0..40 {
            let words: &[&str] = if round % 2 == 0 { &[] } else { &["--sync"] };
            let listed = report(dir.path(), std::slice::from_ref(&path), words);
            let mut end = 0;
            for extent in records(&listed["files"][0]) {
                assert!(extent.logical >= end, "{extent:?} begins before {end}");
                end = extent.logical + extent.len;
            }
        }
        drop(ended);
    });
}

/// Ends the writer, however the test ends.
struct StopAtEnd<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn bad_input_is_one_clear_line_each() {
    let dir = &scratch();
    std::fs::write(dir.join("good"), [1; 5000]).unwrap();
    std::fs::create_dir(dir.join("directory")).unwrap();
    run(Command::new("mkfifo").arg(dir.join("fifo")));
    for (name, why) in [
        ("directory", "it is a directory"),
        ("fifo", "it is a FIFO"),
        ("/dev/null", "it is a character device"),
        ("absent", "No such file or directory"),
        ("nbd://localhost/x", "nbd"),
    ] {
        let text = complaint(&ours(dir, &format!("extents {name}")));
        assert!(text.contains(why) && text.contains(name), "{text}");
        // The others are reported all the same.
        let output = ours(dir, &format!("extents {name} good"));
        complaint(&output);
        assert!(String::from_utf8_lossy(&output.stdout).contains("file: good"));
    }
    if let Ok(found) = std::fs::metadata("/dev/loop0")
        && found.file_type().is_block_device()
    {
        let text = complaint(&ours(dir, "extents /dev/loop0"));
        assert!(text.contains("it is a block device"), "{text}");
    }
    assert_eq!(ours(dir, "extents").status.code(), Some(1));
    for wrong in ["--by=guess", "--draw=nicely", "--output=xml"] {
        let output = ours(dir, &format!("extents {wrong} good"));
        assert_eq!(output.status.code(), Some(1), "{wrong}");
    }
    let unwritable = ours(dir, "extents --svg=/nonexistent/a.svg good");
    assert!(complaint(&unwritable).contains("/nonexistent/a.svg"));
}

#[test]
fn files_without_permission_are_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: becoming another user needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("cowslip");
    std::fs::copy(program(), &copy).unwrap();
    for path in [dir.path(), &copy] {
        run(Command::new("chmod").arg("755").arg(path));
    }
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "x").unwrap();
    run(Command::new("chmod").arg("600").arg(&secret));
    let mut command = Command::new(&copy);
    command.arg("extents").arg(&secret).uid(65_534).gid(65_534);
    let text = complaint(&outcome(&mut command));
    assert!(text.contains("Permission denied"), "{text}");
    // Blocks one by one are for root.
    std::fs::write(dir.path().join("open"), "x").unwrap();
    let mut command = Command::new(&copy);
    command
        .args(["extents", "--by=fibmap"])
        .arg(dir.path().join("open"));
    let text = complaint(&outcome(command.uid(65_534).gid(65_534)));
    assert!(text.contains("FIBMAP"), "{text}");
}

#[test]
fn images_that_cannot_be_right_or_are_in_use_are_refused() {
    let dir = &scratch();
    assert!(ours(dir, "create -q -f qcow2 a.qcow2 1M").status.success());
    let mut bytes = std::fs::read(dir.join("a.qcow2")).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[l1 + 7] = 1;
    std::fs::write(dir.join("broken.qcow2"), &bytes).unwrap();
    let text = complaint(&ours(dir, "extents broken.qcow2"));
    assert!(text.contains("L1 table"), "{text}");
    assert!(ours(dir, "extents -f raw broken.qcow2").status.success());
    let text = complaint(&ours(dir, "extents -f vmdk a.qcow2"));
    assert!(text.contains("vmdk"), "{text}");
    // A writer elsewhere.
    let mut writer = cowslip();
    writer.current_dir(dir).args(["io", "a.qcow2"]);
    writer
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    let mut writer = writer.spawn().unwrap();
    std::io::Write::write_all(writer.stdin.as_mut().unwrap(), b"write 0 64k\n").unwrap();
    let mut first = [0; 1];
    std::io::Read::read_exact(writer.stdout.as_mut().unwrap(), &mut first).unwrap();
    // Whose lock it is takes further lines, as everywhere.
    let refused = ours(dir, "extents a.qcow2");
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(
        text.contains("Failed to get shared \"write\" lock"),
        "{text}"
    );
    assert!(ours(dir, "extents -U a.qcow2").status.success());
    drop(writer.stdin.take());
    assert!(writer.wait().unwrap().success());
    // A data file that is not there, or may not be named.
    assert!(
        ours(dir, "create -q -f qcow2 -o data_file=d.raw d.qcow2 1M")
            .status
            .success()
    );
    let text = complaint(&ours(dir, "extents --backing-policy=none d.qcow2"));
    assert!(text.contains("d.raw"), "{text}");
    std::fs::remove_file(dir.join("d.raw")).unwrap();
    let text = complaint(&ours(dir, "extents d.qcow2"));
    assert!(text.contains("d.raw"), "{text}");
}

#[test]
fn pictures_are_drawn_as_svg_and_as_text() {
    let dir = &scratch();
    assert!(ours(dir, "create -q -f qcow2 a.qcow2 64M").status.success());
    let io = [
        "io",
        "-f",
        "qcow2",
        "-c",
        "write 1M 2M",
        "-c",
        "write 32M 1M",
        "a.qcow2",
    ];
    run(cowslip().current_dir(dir).args(io));
    let text = succeeds(dir, "extents --sync --draw=always --svg=a.svg a.qcow2");
    assert!(text.contains("in the guest's order"), "{text}");
    assert!(text.contains("M metadata"), "{text}");
    let svg = std::fs::read_to_string(dir.join("a.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("class=\"m\""), "metadata is marked");
    // Not on a terminal: no picture unless it is asked for.
    let text = succeeds(dir, "extents a.qcow2");
    assert!(!text.contains("order"), "{text}");
}

#[test]
fn a_method_that_was_asked_for_is_not_said_to_be_the_only_one() {
    let dir = scratch();
    std::fs::write(dir.path().join("f"), [1; 4096]).unwrap();
    let text = succeeds(dir.path(), "extents --by seek f");
    assert!(text.contains("places are not"), "{text}");
    assert!(!text.contains("neither"), "{text}");
}
