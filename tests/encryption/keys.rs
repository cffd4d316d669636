//! `amend` of key slots beside qemu-img's: the same words, exit codes and slots, and images that
//! the other program opens.
//!
//! Deliberate differences: a slot in use is replaced over an empty one, so that something opens the
//! image all the time; what is erased is overwritten once.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;

use crate::support::golden::{self, words};
use crate::support::whose::Whose;
use crate::support::{outcome, peers_are_installed, scratch, scratch_beside};

const SECRETS: [&str; 5] = [
    "secret,id=s0,data=k0",
    "secret,id=s1,data=k1",
    "secret,id=s2,data=k2",
    "secret,id=bin,data=/w==,format=base64",
    "secret,id=s0-again,data=k0",
];

/// Changes one after the other, each of what the one before has left: the secret that opens the
/// image, and options, without their prefix. Few of them add keys, since QEMU takes a second for
/// that.
const CHANGES: &str = "
s0 state=active,new-secret=s1,iter-time=10,keyslot=6
s1 state=active,new-secret=s0-again,iter-time=0
s0 state=active,new-secret=s2,iter-time=10,keyslot=6
s0 state=active,new-secret=s2,iter-time=10,keyslot=6 --force
s1 state=inactive,keyslot=0
s2 state=inactive,keyslot=0,old-secret=s2
s2 state=inactive,keyslot=1,old-secret=s2
s2 state=inactive,keyslot=3,old-secret=s2 --force
s2 state=inactive,old-secret=s1
s2 state=inactive,keyslot=2
s2 state=inactive,keyslot=2 --force
s2 state=inactive,old-secret=s0
s0 state=active,new-secret=s1
s2 state=inactive,old-secret=s2
s2 state=inactive,keyslot=6
s2 state=active,new-secret=s1,keyslot=8
s2 state=active,new-secret=s1,keyslot=-1
s2 state=active,new-secret=s1,keyslot=x
s2 state=active,new-secret=s1,iter-time=x
s2 state=active,new-secret=none
s2 state=active,new-secret=bin
s2 state=active
s2 state=active,new-secret=s1,old-secret=s2
s2 state=inactive
s2 state=inactive,new-secret=s1,keyslot=6
s2 state=inactive,iter-time=10,keyslot=6 --force
s2 state=inactive,old-secret=none
s2 state=inactive,old-secret=bin
s2 state=inactive,keyslot=9 --force
s2 new-secret=s1
s2 keyslot=1
s2 state=foo
s2 state=active,new-secret=s1,foo=1
s2 state=active,new-secret=s1,key-secret=s0
s2 state=active,new-secret=s1,hash-alg=sha1
none state=inactive,keyslot=6
s2 state=inactive,old-secret=s2 --force
s2 state=inactive,keyslot=0 --force
";

/// The same of a LUKS volume, where options have no prefix.
const CHANGES_OF_VOLUME: &str = "
s0 state=active,new-secret=s1,iter-time=10
s1 state=inactive,old-secret=s0
s1 state=inactive,keyslot=1
s1 state=active,new-secret=s0,keyslot=x
s1 keyslot=1
s1 state=inactive,keyslot=1 --force
";

/// The prefix of the options of keys.
fn prefix(format: &str) -> &'static str {
    match format {
        "qcow2" => "encrypt.",
        _ => "",
    }
}

fn opened_by(format: &str, secret: &str) -> String {
    let prefix = prefix(format);
    format!("driver={format},file.filename=image,{prefix}key-secret={secret}")
}

/// A command line of `amend` with all secrets.
fn amend_line(format: &str, secret: &str, change: &str) -> Vec<String> {
    let mut rest = change.split(' ');
    let options = rest.next().unwrap().split(',');
    let options: Vec<String> = options
        .map(|option| format!("{}{option}", prefix(format)))
        .collect();
    let secrets = SECRETS.iter().flat_map(|secret| ["--object", secret]);
    let mut line = vec!["amend".to_string()];
    line.extend(secrets.map(str::to_string));
    line.extend(["--image-opts".to_string(), opened_by(format, secret)]);
    line.extend(["-o".to_string(), options.join(",")]);
    line.extend(rest.map(str::to_string));
    line
}

/// Which slots are in use, and which secrets open the image.
fn state(whose: Whose, dir: &Path, format: &str) -> String {
    let file = std::fs::read(dir.join("image")).unwrap();
    let magic = b"LUKS\xba\xbe";
    let start = file
        .windows(6)
        .position(|six| six == magic)
        .expect("a header");
    let is_used = |slot: &usize| file[start + 208 + 48 * slot..][..4] == [0, 0xac, 0x71, 0xf3];
    let used: Vec<usize> = (0..8).filter(is_used).collect();
    let opens = |secret: &&&str| {
        let mut map = whose.program_in("qemu-img", dir);
        map.arg("map");
        for secret in SECRETS {
            map.args(["--object", secret]);
        }
        map.args(["--image-opts", &opened_by(format, secret)]);
        outcome(&mut map).status.success()
    };
    let opening = ["s0", "s1", "s2"];
    let opening: Vec<&&str> = opening.iter().filter(opens).collect();
    format!("{used:?} {opening:?}")
}

#[test]
fn key_slots_are_changed_as_qemu_img_changes_them() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    for (format, changes) in [("qcow2", CHANGES), ("luks", CHANGES_OF_VOLUME)] {
        let dirs = [scratch(), scratch()];
        let maker = Whose::BOTH[usize::from(format == "luks")];
        let prefix = prefix(format);
        let mut create = maker.program_in("qemu-img", dirs[0].path());
        let encrypted = if format == "qcow2" {
            "encrypt.format=luks,"
        } else {
            ""
        };
        let options = format!("{encrypted}{prefix}key-secret=s0,{prefix}iter-time=10");
        create.args(["create", "-q", "--object", SECRETS[0], "-f", format]);
        super::run(create.args(["-o", &options, "image", "1M"]));
        std::fs::copy(dirs[0].path().join("image"), dirs[1].path().join("image")).unwrap();
        let mut failures = String::new();
        for line in golden::lines(changes) {
            let (secret, change) = line.split_once(' ').unwrap();
            let mut said = Vec::new();
            for (whose, dir) in Whose::BOTH.iter().zip(&dirs) {
                let before = std::fs::read(dir.path().join("image")).unwrap();
                let mut program = whose.program_in("qemu-img", dir.path());
                let done = outcome(program.args(amend_line(format, secret, change)));
                let after = std::fs::read(dir.path().join("image")).unwrap();
                let is_changed = before != after;
                let mut text = format!("{}changed: {is_changed}\n", golden::said(&done));
                if is_changed {
                    // Each looks at what the other has written.
                    let reader = Whose::BOTH[usize::from(*whose == Whose::Ours)];
                    text += &state(reader, dir.path(), format);
                }
                said.push(text);
            }
            if said[0] != said[1] {
                failures += &format!(
                    "{format} {line}\n--- expected\n{}--- actual\n{}",
                    said[1], said[0]
                );
            }
        }
        assert!(failures.is_empty(), "{failures}");
        let dir = dirs[0].path();
        assert_eq!(state(Whose::Ours, dir, format), "[] []");
    }
}

/// The disk is the same under another passphrase, and a change of keys goes together with others.
#[test]
fn data_and_other_options_are_as_they_were() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let create = format!("create -q -f qcow2 -o {} image 1M", super::QCOW2_KEYS);
    Whose::Ours.img(dir, &create);
    let image = super::opened("qcow2", "image");
    Whose::Ours.io(dir, &image, &["write -P 7 1000 300000".to_string()]);
    let disk = Whose::Ours.disk(dir, &image);
    let new = "encrypt.state=active,encrypt.new-secret=t,encrypt.iter-time=10";
    let amend = format!(
        "amend --object secret,id=t,data=t --image-opts -o lazy_refcounts=on,{new},size=2M {image}"
    );
    Whose::Ours.img(dir, &amend);
    let by_new = "driver=qcow2,file.filename=image,encrypt.key-secret=t";
    let convert = format!("convert --object secret,id=t,data=t --image-opts -O raw {by_new} all");
    Whose::Theirs.img(dir, &convert);
    let all = std::fs::read(dir.join("all")).unwrap();
    assert!(all[..disk.len()] == disk && all.len() == 2 << 20);
    let info = Whose::Theirs.img(dir, "info image");
    assert!(info.contains("lazy refcounts: true"), "{info}");
    // A refused change leaves the image as it is.
    let before = std::fs::read(dir.join("image")).unwrap();
    for options in [
        "size=3M,encrypt.state=inactive",
        "size=3M,encrypt.keyslot=1",
        "refcount_bits=3,encrypt.state=active,encrypt.new-secret=s,encrypt.iter-time=10",
    ] {
        let mut program = Whose::Ours.program_in("qemu-img", dir);
        program.args(["amend", "--image-opts", &image, "-o", options]);
        let refused = outcome(program.args(super::KEY));
        assert_eq!(refused.status.code(), Some(1), "{options}");
        assert!(std::fs::read(dir.join("image")).unwrap() == before);
    }
}

/// A minute of PBKDF2 reports its progress, and ends at once when it is interrupted.
#[test]
fn an_interrupted_change_leaves_the_slots_as_they_were() {
    let dir = &scratch();
    let create = format!("create -q -f luks -o {} image 1M", super::LUKS_KEYS);
    Whose::Ours.img(dir, &create);
    let before = std::fs::read(dir.join("image")).unwrap();
    let mut program = crate::support::cowslip();
    program.current_dir(dir).args(words(
        "amend --object secret,id=s,data=hunter2 --object secret,id=t,data=t --progress=json --image-opts -o \
         state=active,new-secret=t,iter-time=60000",
    ));
    let amend = program
        .arg(super::opened("luks", "image"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut amend = amend.spawn().unwrap();
    let mut prompts = BufReader::new(amend.stderr.take().unwrap()).lines();
    let first = prompts.next().unwrap().unwrap();
    assert!(first.contains("\"stage\":\"keys\""), "{first}");
    let pid = rustix::process::Pid::from_child(&amend);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let rest: Vec<String> = prompts.map_while(Result::ok).collect();
    let ended = amend.wait().unwrap();
    assert_eq!(ended.signal(), Some(2), "{ended}: {rest:?}");
    assert!(
        rest.last()
            .unwrap()
            .contains("Cancelled: nothing was changed")
    );
    assert!(std::fs::read(dir.join("image")).unwrap() == before);
}
