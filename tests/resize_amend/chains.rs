//! `compare`, `rebase` and `commit` beside qemu-img's: the same words and exit codes, and the same
//! disks.
//!
//! Deliberate differences, which the lines leave out: strict comparisons use what `map` reports for
//! each byte, where qemu-img's also differ where extents end; a compressed rebase of an image with
//! subclusters ends in an assertion there (10.0.2); a chain that would be a loop is refused as
//! such, `-u` or not; a rebase without `-F` is refused before anything is copied; a commit leaves
//! the image's file as short as it can be.

use std::path::Path;
use std::process::Command;

use super::words;
use crate::support::golden;
use crate::support::rng::Rng;
use crate::support::{
    cowslip, outcome, peers_are_installed, run, scratch, scratch_beside, succeeds,
};

/// The commands with which each of the programs makes its files, one a line.
const FILES: &str = "
qemu-img create -q -f qcow2 a.q 1M
qemu-img create -q -f qcow2 b.q 1M
qemu-img create -q -f qcow2 z.q 1M
qemu-img create -q -f qcow2 big.q 2M
qemu-img create -q -f qcow2 bigd.q 2M
qemu-img create -q -f qcow2 bigz.q 2M
qemu-img create -q -f raw r.raw 1M
qemu-img create -q -f qcow2 -o cluster_size=4k old.q 4M
qemu-img create -q -f qcow2 -o extended_l2=on new.q 4M
qemu-img create -q -f qcow2 small.q 1M
qemu-img create -q -f qcow2 plain.q 4M
qemu-img create -q -f qcow2 -b old.q -F qcow2 ov.q
qemu-img create -q -f qcow2 -o extended_l2=on -b ov.q -F qcow2 top.q
qemu-img create -q -f qcow2 -o cluster_size=2M -b top.q -F qcow2 over.q
qemu-img create -q -f qcow2 -o compat=0.10 -b old.q -F qcow2 v2.q
qemu-img create -q -f qcow2 -b r.raw -F raw onraw.q 4M
qemu-img create -q -f qcow2 -b small.q -F qcow2 onsmall.q 4M
qemu-img create -q -f qcow2 -b old.q -F qcow2 shorter.q 1000k
qemu-img create -q -f qcow2 -o data_file=d.raw,data_file_raw=on d.q 1M
qemu-img create -q -f qcow2 -o data_file=e.raw -b old.q -F qcow2 ext.q
qemu-io -f qcow2 b.q -c 'write -P 1 100k 4k'
qemu-io -f qcow2 z.q -c 'write -P 0 100k 4k'
qemu-io -f qcow2 bigd.q -c 'write -P 1 1500k 4k'
qemu-io -f qcow2 bigz.q -c 'write -P 0 1500k 4k'
qemu-io -f qcow2 old.q -c 'write -P 1 0 256k' -c 'write -P 3 2M 64k' -c 'write -P 4 3M 5k'
qemu-io -f qcow2 new.q -c 'write -P 2 128k 256k' -c 'write -P 3 2M 64k' -c 'write -P 5 3000k 2k'
qemu-io -f qcow2 ov.q -c 'write -P 9 1M 64k' -c 'write -z 0 64k'
qemu-io -f qcow2 top.q -c 'write -P 8 1100k 6k' -c 'write -z 130k 8k'
qemu-io -f qcow2 over.q -c 'write -P 7 3500k 6k'
qemu-io -f qcow2 v2.q -c 'write -P 9 1M 64k'
qemu-io -f qcow2 onraw.q -c 'write -P 9 2M 64k'
qemu-io -f qcow2 onsmall.q -c 'write -P 9 2M 64k'
qemu-io -f qcow2 shorter.q -c 'write -P 9 512k 64k'
qemu-io -f qcow2 ext.q -c 'write -P 9 100k 64k'
";

const COMPARE: &str = "
a.q a.q
a.q z.q
a.q b.q
-q a.q b.q
-p a.q z.q
-p a.q b.q
-p -q a.q b.q
-s a.q big.q
-s big.q a.q
a.q big.q
-q a.q big.q
-p a.q big.q
-p a.q bigd.q
a.q bigd.q
bigd.q a.q
a.q bigz.q
-s a.q bigz.q
a.q r.raw
-s a.q r.raw
-f raw r.raw a.q
-f raw -F raw r.raw r.raw
-f foo r.raw a.q
-F foo r.raw a.q
-f qcow2 r.raw a.q
nofile a.q
a.q nofile
a.q

a.q b.q z.q
-T foo a.q b.q
-T none a.q b.q
-U a.q a.q
--image-opts driver=qcow2,file.filename=a.q driver=qcow2,file.filename=z.q
--image-opts -f qcow2 a.q b.q
odd.raw odd2.raw
odd.raw odd3.raw
odd.raw r.raw
m.raw m2.raw
m.raw r.raw
r.raw m2.raw
torn.q m.raw
m.raw torn.q
-p m.raw torn.q
a.q torn.q
top.q ov.q
over.q top.q
over.q new.q
onraw.q r.raw
shorter.q old.q
";

const REBASE: &str = "
-b new.q -F qcow2 ov.q
-b new.q -F qcow2 top.q
-b new.q -F qcow2 over.q
-b new.q -F qcow2 v2.q
-b new.q -F qcow2 shorter.q
-b new.q -F qcow2 ext.q
-b new.q -F qcow2 plain.q
-b new.q -F raw ov.q
-b old.q -F qcow2 over.q
-b ov.q -F qcow2 over.q
-b small.q -F qcow2 ov.q
-b r.raw -F raw top.q
-b r.raw -F raw v2.q
-b onsmall.q -F qcow2 over.q
-b '' ov.q
-b '' top.q
-b '' v2.q
-b '' over.q
-b '' plain.q
-b '' -F raw ov.q
-c -b new.q -F qcow2 ov.q
-c -b '' over.q
-c -u -b new.q -F qcow2 ov.q
-q -b new.q -F qcow2 ov.q
-t none -T none -b new.q -F qcow2 ov.q
-U -b new.q -F qcow2 ov.q
--image-opts -b new.q -F qcow2 driver=qcow2,file.filename=ov.q
--image-opts -f qcow2 -b new.q -F qcow2 driver=qcow2,file.filename=ov.q
-u -b new.q -F qcow2 ov.q
-u -b nofile -F qcow2 ov.q
-u -b '' ov.q
-u ov.q
-u -F raw ov.q
-u -b nofile ov.q
-u -b nofile -F foo ov.q
-b nofile -F qcow2 ov.q
-q -b nofile -F qcow2 ov.q
-b nofile ov.q
-b new.q ov.q
-b new.q -F foo ov.q
-b new.q -F foo nofile
-b new.q -F qcow2 nofile
ov.q

-b new.q
-b new.q -F qcow2 ov.q top.q
-t foo -b new.q -F qcow2 ov.q
-T foo -b new.q -F qcow2 ov.q
-b new.q -F qcow2 r.raw
-u -b new.q -F qcow2 r.raw
-u -b new.q -F qcow2 -f raw r.raw
";

const COMMIT: &str = "
ov.q
top.q
over.q
v2.q
onraw.q
onsmall.q
shorter.q
ext.q
-d top.q
-q top.q
-p top.q
-b ov.q over.q
-b old.q over.q
-b top.q over.q
-b ./old.q top.q
-b nofile top.q
-b plain.q top.q
-b top.q top.q
-t none ov.q
-t foo ov.q
-r 1G ov.q
-r 0 ov.q
-r foo ov.q
-r -1 ov.q
plain.q
r.raw
-f raw r.raw
nofile

ov.q top.q
--image-opts driver=qcow2,file.filename=top.q
--image-opts -f qcow2 driver=qcow2,file.filename=top.q
";

/// Splits a command at blanks, but for what is between quotes.
fn quoted(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    let parts = parts.flat_map(|(index, part)| match index % 2 {
        0 => part.split_whitespace().map(str::to_string).collect(),
        _ => vec![part.to_string()],
    });
    parts.collect()
}

fn prepare(dir: &Path) {
    for line in FILES.trim().lines() {
        let words = quoted(line);
        run(Command::new(&words[0]).current_dir(dir).args(&words[1..]));
    }
    let raw = |name: &str, len: usize, data: Option<(usize, u8)>| {
        let mut bytes = vec![0; len];
        if let Some((at, byte)) = data {
            bytes[at] = byte;
        }
        std::fs::write(dir.join(name), bytes).unwrap();
    };
    raw("odd.raw", 1_000_000, None);
    raw("odd2.raw", 1_000_000, Some((999_999, 1)));
    raw("odd3.raw", 1_000_100, Some((1_000_099, 1)));
    raw("m.raw", 1 << 20, Some((70_000, 1)));
    raw("m2.raw", 1 << 20, Some((70_001, 1)));
    let convert = words("convert -c -O qcow2 m.raw torn.q");
    run(Command::new("qemu-img").current_dir(dir).args(convert));
    // The data of its compressed cluster, which cannot be decompressed.
    let torn = dir.join("torn.q");
    let mut bytes = std::fs::read(&torn).unwrap();
    bytes[5 << 16..].fill(0xff);
    std::fs::write(torn, bytes).unwrap();
}

fn copy(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// Returns the output of a program, without progress.
fn said(mut program: Command, (verb, line, dir): (&str, &str, &Path)) -> String {
    let output = outcome(program.current_dir(dir).arg(verb).args(words(line)));
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both).into_owned();
    let lines = text.split(['\r', '\n']);
    let lines = lines.filter(|line| !line.is_empty() && !line.ends_with("/100%)"));
    let lines: Vec<&str> = lines.collect();
    format!("{}\n[{}]\n", lines.join("\n"), output.status)
}

/// Returns the fields of the header about the backing file.
fn backing(dir: &Path, file: &str) -> [serde_json::Value; 3] {
    let line = ["info", "-U", "--output=json", file];
    let info = run(Command::new("qemu-img").current_dir(dir).args(line));
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    [
        "virtual-size",
        "backing-filename",
        "backing-filename-format",
    ]
    .map(|key| info[key].clone())
}

/// Runs each line from the same start with each program, and holds what they say, and the disks,
/// against each other.
fn beside_qemu_img(verb: &str, lines: &str) {
    let Some(start) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare(start.path());
    let mut failures = String::new();
    for line in lines[1..].trim_end_matches('\n').split('\n') {
        let dirs = [scratch(), scratch()];
        let [here, there] = [dirs[0].path(), dirs[1].path()];
        dirs.iter().for_each(|dir| copy(start.path(), dir.path()));
        let ours = said(golden::ours(), (verb, line, here));
        let theirs = said(Command::new("qemu-img"), (verb, line, there));
        if ours != theirs {
            failures += &format!("{verb} {line}\n--- expected\n{theirs}--- actual\n{ours}");
        }
        // The image is named last.
        let image = line.split([' ', '=']).next_back().unwrap_or_default();
        if verb == "compare" || !start.path().join(image).is_file() {
            continue;
        }
        if ours.ends_with("[exit status: 0]\n") {
            failures += &differences(line, image, [here, there]);
        } else {
            let bytes = |dir: &Path| std::fs::read(dir.join(image)).unwrap();
            assert!(bytes(here) == bytes(start.path()), "{line} changed it");
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

fn differences(line: &str, file: &str, [here, there]: [&Path; 2]) -> String {
    let [ours, theirs] = [here, there].map(|dir| backing(dir, file));
    let mut failures = String::new();
    if ours != theirs {
        failures += &format!("{line}\n{file}: {ours:?}\nexpected: {theirs:?}\n");
    }
    // An image that names a missing file cannot be read.
    if file == "ext.q" {
        // Its data file is found from its own directory only.
        let [ours, theirs] = [here, there].map(|dir| bytes(dir, file));
        if ours != theirs {
            failures += &format!("{line}\n{file}: the disks differ\n");
        }
    } else if ours[1] != "nofile" {
        let paths = [here, there].map(|dir| dir.join(file));
        let compared = outcome(Command::new("qemu-img").arg("compare").args(paths));
        if !compared.status.success() {
            failures += &format!("{line}\n{file}: {compared:?}\n");
        }
    }
    if file.ends_with(".q") && ours[1] != "nofile" {
        let check = ["check", "-f", "qcow2", file];
        let checked = outcome(Command::new("qemu-img").current_dir(here).args(check));
        if !checked.status.success() {
            let text = String::from_utf8_lossy(&checked.stdout).into_owned();
            failures += &format!("{line}\n{file}: {text}");
        }
    }
    failures
}

#[test]
fn compare_says_what_qemu_img_says() {
    beside_qemu_img("compare", COMPARE);
}

#[test]
fn compare_tells_what_it_looked_at() {
    let dir = scratch();
    let ours = |line: &str| {
        let output = outcome(cowslip().current_dir(&dir).args(quoted(line)));
        (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            output.status.code().unwrap(),
        )
    };
    let made = |line: &str| assert_eq!(ours(line).1, 0, "{line}");
    made("create -q -f qcow2 base.q 1G");
    made("io -f qcow2 base.q -c 'write -P 1 0 1M'");
    for name in ["a.q", "b.q"] {
        made(&format!("create -q -f qcow2 -b base.q -F qcow2 {name}"));
        made(&format!("io -f qcow2 {name} -c 'write -P 2 512M 64k'"));
    }
    let compared =
        |line: &str| -> serde_json::Value { serde_json::from_str(&ours(line).0).unwrap() };
    // Ranges that both take from the base, and ranges that both lack, are not read.
    let same = compared("compare --json a.q b.q");
    assert_eq!(same["identical"], true);
    assert_eq!(same["looked-at-bytes"], 64 << 10);
    made("io -f qcow2 b.q -c 'write -P 3 513M 512'");
    assert_eq!(ours("compare --json a.q b.q").1, 1);
    let differs = compared("compare --json a.q b.q");
    assert_eq!(differs["difference"], "content");
    assert_eq!(differs["offset"], 513 << 20);
    // Strictly, the rest of that cluster differs too, though it reads the same.
    assert_eq!(
        compared("compare -s --json a.q base.q")["difference"],
        "storage"
    );
    assert_eq!(ours("compare nofile a.q").1, 2);
    // Zeroes that are stored are not nothing.
    made("create -q -f qcow2 empty.q 1M");
    made("create -q -f qcow2 zeroes.q 1M");
    made("io -f qcow2 zeroes.q -c 'write -z 128k 64k'");
    assert_eq!(ours("compare empty.q zeroes.q").1, 0);
    let strict = ours("compare -s empty.q zeroes.q");
    let text = "Strict mode: Offset 131072 block status mismatch!\n";
    assert_eq!(strict, (text.to_string(), 1));
}

#[test]
fn rebase_says_and_does_what_qemu_img_does() {
    beside_qemu_img("rebase", REBASE);
}

#[test]
fn commit_says_and_does_what_qemu_img_does() {
    beside_qemu_img("commit", COMMIT);
}

#[test]
fn commit_leaves_the_base_as_qemu_img_does() {
    let Some(start) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare(start.path());
    // The line names the image; these are the bases.
    for (line, base) in [
        ("ov.q", "old.q"),
        ("onraw.q", "r.raw"),
        ("onsmall.q", "small.q"),
        ("shorter.q", "old.q"),
        ("-b old.q over.q", "old.q"),
        ("-b ov.q over.q", "ov.q"),
    ] {
        let both = [scratch(), scratch()];
        both.iter().for_each(|dir| copy(start.path(), dir.path()));
        let dirs = [both[0].path(), both[1].path()];
        let ours = golden::ours();
        assert!(said(ours, ("commit", line, dirs[0])).contains("Image committed."));
        let theirs = Command::new("qemu-img");
        said(theirs, ("commit", line, dirs[1]));
        let failures = differences(line, base, dirs);
        assert!(failures.is_empty(), "{failures}");
        if !line.starts_with("-b") {
            // QEMU's emptied images have the tables of new ones, ours too.
            let lens = dirs.map(|dir| std::fs::metadata(dir.join(line)).unwrap().len());
            assert!(lens[0] <= lens[1], "{line}: {lens:?}");
        }
    }
}

#[test]
fn a_chain_that_would_be_a_loop_is_refused() {
    let dir = scratch();
    let ours = |line: &str| {
        let output = outcome(cowslip().current_dir(&dir).args(words(line)));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code().unwrap(), text)
    };
    for line in [
        "create -q -f qcow2 base 1M",
        "create -q -f qcow2 -b base -F qcow2 mid",
        "create -q -f qcow2 -b mid -F qcow2 top",
    ] {
        assert_eq!(ours(line).0, 0, "{line}");
    }
    for how in ["", "-u "] {
        for new in ["top", "mid", "base"] {
            let (code, text) = ours(&format!("rebase {how}-b {new} -F qcow2 base"));
            assert!(
                code == 1 && text.contains("would be a loop"),
                "{how}{new}: {text}"
            );
        }
    }
    assert_eq!(ours("compare base top").0, 0);
}

#[test]
fn an_emptied_image_keeps_its_snapshots() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let peer = |line: &str| {
        let words = quoted(line);
        run(Command::new(&words[0]).current_dir(&dir).args(&words[1..]))
    };
    for line in [
        "qemu-img create -q -f qcow2 base.q 1M",
        "qemu-img create -q -f qcow2 -o cluster_size=4k -b base.q -F qcow2 top.q",
        "qemu-io -f qcow2 top.q -c 'write -P 1 0 300k' -c 'write -z 400k 100k'",
        "qemu-img snapshot -c then top.q",
        "qemu-io -f qcow2 top.q -c 'write -P 2 100k 300k'",
    ] {
        peer(line);
    }
    succeeds(&dir, "commit top.q");
    peer("qemu-img check -q top.q");
    peer("qemu-io -f qcow2 base.q -c 'read -P 1 0 100k' -c 'read -P 2 100k 300k'");
    peer("qemu-img snapshot -a then top.q");
    peer("qemu-img check -q top.q");
    // The data in the image itself.
    peer("qemu-io -f qcow2 top.q -c 'read -P 1 0 300k' -c 'read -P 0 400k 100k'");
}

#[test]
fn subclusters_are_rebased_compressed() {
    let dir = scratch();
    let ours = |line: &str| run(cowslip().current_dir(&dir).args(quoted(line)));
    for line in [
        "create -q -f qcow2 base.q 1M",
        "create -q -f qcow2 -o extended_l2=on -b base.q -F qcow2 top.q",
        "io -f qcow2 base.q -c 'write -P 1 100k 300k'",
        "io -f qcow2 top.q -c 'write -P 2 130k 4k' -c 'write -z 200k 8k'",
    ] {
        ours(line);
    }
    std::fs::copy(dir.path().join("top.q"), dir.path().join("before.q")).unwrap();
    ours("rebase -c -b '' top.q");
    ours("compare top.q before.q");
    assert!(ours("map --output=json top.q").contains("\"compressed\": true"));
    ours("check top.q");
}

/// An image of a random chain: how it is made, and its size.
fn random_image(rng: &mut Rng, (name, below): (&str, Option<&str>)) -> (String, u64) {
    let size = (rng.below(3000) + 800) << 9;
    if below.is_none() && rng.once_in(3) {
        return (format!("create -q -f raw {name} {size}"), size);
    }
    let options = *rng.pick(&[
        "cluster_size=512",
        "cluster_size=4k",
        "cluster_size=64k",
        "cluster_size=2M",
        "compat=0.10",
        "extended_l2=on,cluster_size=16k",
        "extended_l2=on,cluster_size=128k",
    ]);
    let below = below.map_or(String::new(), |below| {
        let format = if below.ends_with("-raw") {
            "raw"
        } else {
            "qcow2"
        };
        format!("-b {below} -F {format} ")
    });
    (
        format!("create -q -f qcow2 -o {options} {below}{name} {size}"),
        size,
    )
}

/// Makes a chain of `count` images, with some data in each. Returns the names, the top image last.
fn random_chain(dir: &Path, rng: &mut Rng, (prefix, count): (&str, u64)) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for index in 0..count {
        let below = names.last().cloned();
        let plain = format!("{prefix}{index}");
        let (line, size) = random_image(rng, (&plain, below.as_deref()));
        let is_raw = line.contains("-f raw");
        let name = format!("{plain}{}", if is_raw { "-raw" } else { "" });
        let line = line.replace(&plain, &name);
        run(Command::new("qemu-img").current_dir(dir).args(words(&line)));
        let mut io = Command::new("qemu-io");
        io.current_dir(dir)
            .args(["-f", if is_raw { "raw" } else { "qcow2" }]);
        for _ in 0..rng.below(6) + 1 {
            let start = rng.below(size >> 9) << 9;
            let len = ((rng.below(400) + 1) << 9).min(size - start);
            let command = match rng.below(4) {
                0 => format!("write -z {start} {len}"),
                _ => format!("write -P {} {start} {len}", rng.below(255) + 1),
            };
            io.args(["-c", &command]);
        }
        run(io.arg(&name));
        names.push(name);
    }
    names
}

/// Returns the content of an image as qemu-img reads it.
fn bytes(dir: &Path, name: &str) -> Vec<u8> {
    let format = if name.ends_with("-raw") {
        "raw"
    } else {
        "qcow2"
    };
    let line = ["convert", "-f", format, "-O", "raw", name, "all.bytes"];
    run(Command::new("qemu-img").current_dir(dir).args(line));
    std::fs::read(dir.join("all.bytes")).unwrap()
}

#[test]
fn chains_of_all_shapes_read_as_before() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    for seed in 0..6 {
        let rng = &mut Rng::new(seed);
        let dir = &scratch();
        let count = 3 + rng.below(3);
        let mut chain = random_chain(dir, rng, ("a", count));
        let top = chain.pop().unwrap();
        let count = 1 + rng.below(2);
        let other = random_chain(dir, rng, ("b", count)).pop().unwrap();
        let ours = |line: String| {
            succeeds(dir, &line);
            for name in chain
                .iter()
                .chain([&top])
                .filter(|name| !name.ends_with("-raw"))
            {
                let check = ["check", "-f", "qcow2", name];
                run(Command::new("qemu-img").current_dir(dir).args(check));
            }
        };
        let before = bytes(dir, &top);
        let reads_as_before = |what: &str, base: &str| {
            let found = bytes(dir, &top);
            assert!(found == before, "seed {seed}: {what} changed the disk");
            if !base.is_empty() {
                let found = bytes(dir, base);
                assert!(
                    found.starts_with(&before),
                    "seed {seed}: {what}: {base} differs"
                );
            }
        };
        let format = |name: &str| {
            if name.ends_with("-raw") {
                "raw"
            } else {
                "qcow2"
            }
        };
        let base = rng.pick(&chain).clone();
        ours(format!("commit -q -b {base} {top}"));
        reads_as_before("commit -b", &base);
        ours(format!("commit -q {top}"));
        reads_as_before("commit", chain.last().unwrap());
        ours(format!("rebase -b {other} -F {} {top}", format(&other)));
        reads_as_before("rebase", "");
        let back = rng.pick(&chain).clone();
        let compress = if rng.once_in(2) { "-c " } else { "" };
        ours(format!(
            "rebase {compress}-b {back} -F {} {top}",
            format(&back)
        ));
        reads_as_before("rebase back", "");
        ours(format!("rebase -b '' {top}"));
        reads_as_before("rebase to nothing", "");
    }
}
