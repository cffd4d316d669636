//! Locks between processes: ours and QEMU's programs hold images against each other.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::running::Running;
use crate::support::{
    cowslip, outcome, peer_succeeds, peers_are_installed, program, qemu_img, run, scratch,
};

const PEERS: &[&str] = &["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

/// Our command under one of QEMU's names.
fn ours(name: &str) -> Command {
    let mut command = cowslip();
    command.arg0(name);
    command
}

/// `top.qcow2` on `base.qcow2`, and `r.raw`, in a directory of their own.
fn images() -> crate::support::Scratch {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    qemu_img(
        &["create", "-q", "-f", "qcow2"],
        &[&at("base.qcow2"), Path::new("4M")],
    );
    peer_succeeds(
        dir.path(),
        "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
    );
    fs::write(at("r.raw"), vec![7; 1 << 20]).unwrap();
    dir
}

/// Whether another process has locked one of the protocol's bytes.
fn is_held(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    let held = |start| cowslip_queue::lock::is_locked_by_others(file.as_fd(), start, 4).unwrap();
    held(100) || held(200)
}

/// A process that has images open; killed when it is dropped.
struct Holder(Running);

impl Holder {
    /// Starts it and waits until it holds all of `files`.
    fn start(mut command: Command, dir: &Path, files: &[&str]) -> Holder {
        command.current_dir(dir).stdin(Stdio::piped());
        command.stdout(Stdio::null());
        let mut child = Running::start(&mut command);
        let begun = Instant::now();
        while !files.iter().all(|name| is_held(&dir.join(name))) {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{command:?} ended: {ended:?}");
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{command:?} holds nothing"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        // It may be taking its last lock.
        std::thread::sleep(Duration::from_millis(20));
        Holder(child)
    }

    fn say(&mut self, line: &str) {
        use std::io::Write;
        let stdin = self.0.stdin.as_mut().unwrap();
        writeln!(stdin, "{line}").unwrap();
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

fn with(mut command: Command, args: &str) -> Command {
    command.args(args.split_whitespace());
    command
}

/// qemu-storage-daemon with the image exported.
fn daemon(image: &str, read_only: bool) -> Command {
    let mut command = Command::new("qemu-storage-daemon");
    let (read_only, writable) = if read_only {
        ("on", "off")
    } else {
        ("off", "on")
    };
    command.args([
        "--blockdev",
        &format!(
            "driver=qcow2,node-name=n,read-only={read_only},file.driver=file,file.filename={image}"
        ),
        "--nbd-server",
        "addr.type=unix,addr.path=qsd.sock",
        "--export",
        &format!("type=nbd,id=e,node-name=n,writable={writable}"),
    ]);
    command
}

/// Exit code and error lines.
type Verdict = (Option<i32>, Vec<String>);

fn verdict(command: &mut Command, dir: &Path) -> Verdict {
    let output = outcome(command.current_dir(dir).stdin(Stdio::null()));
    let errors = String::from_utf8_lossy(&output.stderr);
    (
        output.status.code(),
        errors.lines().map(str::to_string).collect(),
    )
}

/// Command lines that are tried while another process holds an image.
const ATTEMPTS: &[(&str, &str)] = &[
    ("qemu-img", "info top.qcow2"),
    ("qemu-img", "info -U top.qcow2"),
    ("qemu-img", "info --backing-chain top.qcow2"),
    ("qemu-img", "info -U --backing-chain top.qcow2"),
    ("qemu-img", "check top.qcow2"),
    ("qemu-img", "check -U top.qcow2"),
    ("qemu-img", "check base.qcow2"),
    ("qemu-img", "map top.qcow2"),
    ("qemu-img", "map -U top.qcow2"),
    (
        "qemu-img",
        "map --image-opts driver=qcow2,file.filename=top.qcow2,force-share=on",
    ),
    (
        "qemu-img",
        "map --image-opts driver=qcow2,file.filename=base.qcow2,file.locking=off",
    ),
    (
        "qemu-img",
        "create -q -f qcow2 -b top.qcow2 -F qcow2 new.qcow2",
    ),
    ("qemu-img", "compare top.qcow2 base.qcow2"),
    ("qemu-img", "compare -U top.qcow2 base.qcow2"),
    ("qemu-img", "rebase -b base.qcow2 -F qcow2 top.qcow2"),
    ("qemu-img", "commit top.qcow2"),
    ("qemu-io", "-r -c quit top.qcow2"),
    ("qemu-io", "-c quit top.qcow2"),
    ("qemu-io", "-U -c quit top.qcow2"),
    ("qemu-io", "-r -U -c quit top.qcow2"),
    ("qemu-io", "-c quit base.qcow2"),
    ("qemu-io", "-r -c quit base.qcow2"),
];

/// Attempts that every program must refuse while any process holds the file.
const REFUSED: &[(&str, &str)] = &[
    ("qemu-img", "create -q -f qcow2 HELD 1M"),
    ("qemu-img", "create -q -f raw HELD 1M"),
];

/// Files that a holder locks.
const BOTH: &[&str] = &["top.qcow2", "base.qcow2"];
const BASE: &[&str] = &["base.qcow2"];

/// Compares under each of these holders of an image: what it holds, and which files it locks.
fn compare_under<const N: usize>(holders: [(Command, &str, &[&str]); N]) {
    if peers_are_installed(PEERS) {
        for (holder, held, files) in holders {
            compare(holder, held, files);
        }
    }
}

/// Under one holder, our programs do as QEMU's: the same exit code, the same first two lines.
fn compare(holder: Command, held: &str, files: &[&str]) {
    let described = format!("{holder:?}");
    let dir = &images();
    let mut holder = Holder::start(holder, dir, files);
    let held_bytes = fs::read(dir.join(held)).unwrap();
    let attempts = ATTEMPTS
        .iter()
        .map(|(program, args)| (*program, (*args).to_string(), false));
    let refused = REFUSED
        .iter()
        .map(|(program, args)| (*program, args.replace("HELD", held), true));
    for (program, args, must_fail) in attempts.chain(refused) {
        let theirs = verdict(&mut with(Command::new(program), &args), dir);
        let our = verdict(&mut with(ours(program), &args), dir);
        let context = format!("{program} {args}\nunder {described}\n{theirs:?}\n{our:?}");
        if args == "check top.qcow2" && held == "base.qcow2" && theirs.0 == Some(1) {
            // Our check does not open backing files, so it does not care who writes them.
            assert_eq!(our.0, Some(0), "{context}");
            continue;
        }
        assert_eq!(our.0, theirs.0, "{context}");
        let two = |verdict: &Verdict| verdict.1.iter().take(2).cloned().collect::<Vec<_>>();
        assert_eq!(two(&our), two(&theirs), "{context}");
        assert!(!must_fail || our.0 == Some(1), "{context}");
        if our.1.iter().any(|line| line.contains("lock")) {
            let pid = format!("(pid {})", holder.pid());
            assert!(our.1.len() == 3 && our.1[2].contains(&pid), "{context}");
        }
    }
    assert_eq!(
        fs::read(dir.join(held)).unwrap(),
        held_bytes,
        "under {described}"
    );
    assert!(holder.0.try_wait().unwrap().is_none(), "{described} died");
}

fn qemu_io(args: &str) -> Command {
    with(Command::new("qemu-io"), args)
}

fn own(args: &str) -> Command {
    with(cowslip(), args)
}

#[test]
fn under_qemus_writers_we_refuse_what_qemu_refuses() {
    compare_under([
        (qemu_io("top.qcow2"), "top.qcow2", BOTH),
        (daemon("top.qcow2", false), "top.qcow2", BOTH),
        (qemu_io("base.qcow2"), "base.qcow2", BASE),
    ]);
}

#[test]
fn under_qemus_readers_we_refuse_what_qemu_refuses() {
    compare_under([
        (qemu_io("-r top.qcow2"), "top.qcow2", BOTH),
        (daemon("top.qcow2", true), "top.qcow2", BOTH),
        (qemu_io("-r top.qcow2"), "base.qcow2", BOTH),
        (qemu_io("-r base.qcow2"), "base.qcow2", BASE),
    ]);
}

#[test]
fn while_we_commit_nobody_gets_hold_of_the_base() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    let io = |args: &[&str], name: &str| {
        let mut command = Command::new("qemu-io");
        outcome(command.current_dir(dir).args(args).arg(name))
    };
    assert!(io(&["-c", "write -P 5 0 4M"], "top.qcow2").status.success());
    let before = fs::read(dir.join("top.qcow2")).unwrap();
    let commit = with(ours("qemu-img"), "commit --rate-limit 512k top.qcow2");
    let mut commit = Holder::start(commit, dir, &["top.qcow2", "base.qcow2"]);
    // As a reader it shares the base with others; as its writer it does not.
    let begun = Instant::now();
    while io(&["-r", "-c", "quit"], "base.qcow2").status.success() {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "it writes nothing"
        );
    }
    for (how, name) in [
        ("-r", "base.qcow2"),
        ("-r", "top.qcow2"),
        ("-n", "base.qcow2"),
    ] {
        let refused = io(&[how, "-c", "quit"], name);
        assert_eq!(refused.status.code(), Some(1), "{how} {name}");
    }
    assert!(commit.0.try_wait().unwrap().is_none(), "it has ended");
    run(Command::new("kill").args(["-s", "INT", &commit.pid().to_string()]));
    let status = commit.0.wait().unwrap();
    assert_eq!(status.signal(), Some(2));
    // The image is what it was, and the disk.
    assert!(fs::read(dir.join("top.qcow2")).unwrap() == before);
    assert!(io(&["-c", "read -P 5 0 4M"], "top.qcow2").status.success());
    run(ours("qemu-img")
        .current_dir(dir)
        .args(["commit", "-q", "top.qcow2"]));
    assert!(io(&["-c", "read -P 5 0 4M"], "base.qcow2").status.success());
    qemu_img(&["check", "-q"], &[&dir.join("top.qcow2")]);
}

#[test]
fn under_our_writers_qemu_refuses_what_it_refuses_under_its_own() {
    compare_under([
        (own("io top.qcow2"), "top.qcow2", BOTH),
        (own("serve -k s top.qcow2"), "top.qcow2", BOTH),
        (own("io base.qcow2"), "base.qcow2", BASE),
    ]);
}

#[test]
fn under_our_readers_qemu_refuses_what_it_refuses_under_its_own() {
    compare_under([
        (own("io -r top.qcow2"), "top.qcow2", BOTH),
        (own("serve -r -k s top.qcow2"), "top.qcow2", BOTH),
        (own("io -r top.qcow2"), "base.qcow2", BOTH),
    ]);
}

/// The bytes that a program locks in a file, as QEMU's locks them.
fn locked_bytes(path: &Path) -> Vec<u64> {
    let file = File::open(path).unwrap();
    let locked =
        |byte: &u64| cowslip_queue::lock::is_locked_by_others(file.as_fd(), *byte, 1).unwrap();
    (100..105).chain(200..205).filter(locked).collect()
}

#[test]
fn we_lock_the_bytes_that_qemu_locks() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    let create = |args: &str| {
        run(with(
            Command::new("qemu-img"),
            &format!("create -q -f qcow2 {args}"),
        )
        .current_dir(dir));
    };
    create("-o data_file=d.raw ext.qcow2 4M");
    create("-b r.raw -F raw over-raw.qcow2");
    let files = [
        "top.qcow2",
        "base.qcow2",
        "ext.qcow2",
        "d.raw",
        "over-raw.qcow2",
        "r.raw",
    ];
    let cases: &[(&str, &str, &[&str])] = &[
        ("qemu-io", "top.qcow2", &["top.qcow2", "base.qcow2"]),
        ("qemu-io", "-r top.qcow2", &["top.qcow2", "base.qcow2"]),
        ("qemu-io", "-r -U top.qcow2", &["top.qcow2", "base.qcow2"]),
        ("qemu-io", "ext.qcow2", &["ext.qcow2", "d.raw"]),
        ("qemu-io", "-r ext.qcow2", &["ext.qcow2", "d.raw"]),
        ("qemu-io", "over-raw.qcow2", &["over-raw.qcow2", "r.raw"]),
        ("qemu-io", "-f raw r.raw", &["r.raw"]),
        ("qemu-io", "-f raw -r r.raw", &["r.raw"]),
        (
            "qemu-nbd",
            "-k SOCKET top.qcow2",
            &["top.qcow2", "base.qcow2"],
        ),
        (
            "qemu-nbd",
            "-r -e 3 -k SOCKET top.qcow2",
            &["top.qcow2", "base.qcow2"],
        ),
        ("qemu-nbd", "-f raw -k SOCKET r.raw", &["r.raw"]),
        ("qemu-nbd", "-f raw -r -k SOCKET r.raw", &["r.raw"]),
        (
            "qemu-nbd",
            "-k SOCKET over-raw.qcow2",
            &["over-raw.qcow2", "r.raw"],
        ),
        ("qemu-nbd", "-k SOCKET ext.qcow2", &["ext.qcow2", "d.raw"]),
    ];
    let socket = dir.join("s").display().to_string();
    for (program, args, held) in cases {
        let args = args.replace("SOCKET", &socket);
        let locked = |command: Command| {
            let holder = Holder::start(with(command, &args), dir, held);
            let locked: Vec<_> = files
                .iter()
                .map(|name| locked_bytes(&dir.join(name)))
                .collect();
            drop(holder);
            locked
        };
        let theirs = locked(Command::new(program));
        assert_eq!(locked(ours(program)), theirs, "{program} {args}: {files:?}");
    }
}

#[test]
fn a_raw_image_that_is_written_is_not_made_anew() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    let holder = Holder::start(
        with(Command::new("qemu-io"), "-f raw r.raw"),
        dir,
        &["r.raw"],
    );
    let refused = verdict(
        &mut with(ours("qemu-img"), "create -q -f qcow2 r.raw 1M"),
        dir,
    );
    assert_eq!(refused.0, Some(1));
    assert_eq!(
        refused.1[0],
        "qemu-img: r.raw: Failed to get shared \"write\" lock"
    );
    // QEMU's has destroyed the file when it finds out.
    assert_eq!(fs::read(dir.join("r.raw")).unwrap(), vec![7; 1 << 20]);
    drop(holder);
    let server = with(cowslip(), "serve -f raw -k s r.raw");
    let server = Holder::start(server, dir, &["r.raw"]);
    for program in [ours("qemu-img"), Command::new("qemu-img")] {
        let refused = verdict(&mut with(program, "create -q -f raw r.raw 2M"), dir);
        assert_eq!(
            refused.1[0],
            "qemu-img: r.raw: Failed to get \"resize\" lock"
        );
    }
    drop(server);
    run(with(ours("qemu-img"), "create -q -f qcow2 r.raw 1M").current_dir(dir));
}

#[test]
fn a_data_file_is_locked_with_its_image() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    let create = "create -q -f qcow2 -o data_file=d.raw ext.qcow2 4M";
    run(with(cowslip(), create).current_dir(dir));
    let mut resizer = Holder::start(
        with(Command::new("qemu-io"), "-f raw d.raw"),
        dir,
        &["d.raw"],
    );
    resizer.say("truncate 4M");
    let begun = Instant::now();
    while !locked_bytes(&dir.join("d.raw")).contains(&103) {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "no lock for resizing"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let [theirs, our] = [Command::new("qemu-io"), ours("qemu-io")]
        .map(|program| verdict(&mut with(program, "-c quit ext.qcow2"), dir));
    assert_eq!(our.0, Some(1));
    assert_eq!(our.0, theirs.0);
    assert_eq!(our.1[..2], theirs.1[..2]);
    drop(resizer);
    // The image is free, but its data file would be cut: neither is touched.
    let holder = Holder::start(
        with(cowslip(), "io -r ext.qcow2"),
        dir,
        &["ext.qcow2", "d.raw"],
    );
    for name in ["ext.qcow2", "d.raw"] {
        let refused = verdict(&mut with(cowslip(), &format!("create -q {name} 1M")), dir);
        assert_eq!(refused.0, Some(1), "{name}: {refused:?}");
    }
    drop(holder);
    assert_eq!(fs::metadata(dir.join("d.raw")).unwrap().len(), 4 << 20);
}

#[test]
fn refusals_deep_in_a_chain_read_as_qemus() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    for line in [
        "create -q -f qcow2 -b top.qcow2 -F qcow2 third.qcow2",
        "create -q -f qcow2 -o data_file=d.raw ext.qcow2 4M",
        "create -q -f qcow2 -b ext.qcow2 -F qcow2 over-ext.qcow2",
    ] {
        run(with(Command::new("qemu-img"), line).current_dir(dir));
    }
    let base = "io base.qcow2";
    // A raw image of ours that is being resized holds what a data file does not share.
    let cases = [
        (base, "base.qcow2", "third.qcow2"),
        ("io -f raw d.raw", "d.raw", "over-ext.qcow2"),
    ];
    for (holder, held, image) in cases {
        let mut holder = Holder::start(with(cowslip(), holder), dir, &[held]);
        holder.say("truncate 4M");
        let begun = Instant::now();
        while !locked_bytes(&dir.join(held)).contains(&103) {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{held} is not resized"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let [theirs, our] = [Command::new("qemu-img"), ours("qemu-img")]
            .map(|program| verdict(&mut with(program, &format!("map {image}")), dir));
        assert_eq!((theirs.0, our.0), (Some(1), Some(1)), "{theirs:?} {our:?}");
        assert_eq!(our.1[..2], theirs.1[..2]);
    }
}

#[test]
fn reopening_keeps_what_is_held_and_asks_for_what_is_new() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    let top = dir.join("top.qcow2");
    let until = |bytes: &[u64]| {
        let begun = Instant::now();
        while locked_bytes(&top) != bytes {
            let locked = locked_bytes(&top);
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{locked:?} must be {bytes:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let both = &["top.qcow2", "base.qcow2"];
    let mut shell = Holder::start(with(cowslip(), "io -r top.qcow2"), dir, both);
    shell.say("reopen -w");
    until(&[100, 101, 103, 201, 203]);
    shell.say("write 0 64k");
    shell.say("reopen -r");
    until(&[100, 201, 203]);
    // A reader beside us: what is asked for now is refused, and the image stays open for reading.
    let reader = Holder::start(with(Command::new("qemu-io"), "-r top.qcow2"), dir, both);
    let script = "io -r -c reopen\\ -w -c read\\ 0\\ 64k top.qcow2";
    let mut contender = Command::new("sh");
    contender.args(["-c", &format!("'{}' {script}", program().display())]);
    let output = outcome(contender.current_dir(dir));
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert!(errors.contains("Failed to get \"write\" lock"), "{errors}");
    assert!(said.contains("read 65536/65536 bytes"), "{said}{errors}");
    drop(reader);
    shell.say("close");
    until(&[]);
    shell.say("open top.qcow2");
    until(&[100, 101, 103, 201, 203]);
    // Killed, nothing is left.
    drop(shell);
    assert_eq!(locked_bytes(&top), Vec::<u64>::new());
    let check = verdict(&mut with(Command::new("qemu-img"), "check top.qcow2"), dir);
    assert_ne!(check.0, Some(1), "{check:?}");
}

/// Our programs and QEMU's write a pattern of their own, wait, and read it back; a program that
/// finds it changed did not have exclusive access.
#[test]
fn of_contending_processes_only_one_writes() {
    if !peers_are_installed(PEERS) {
        return;
    }
    let dir = &images();
    let contend = |program: &'static str, is_ours: bool, pattern: u8| {
        let dir: PathBuf = dir.to_path_buf();
        move || {
            let mut held = 0;
            for _ in 0..15 {
                let mut command = if is_ours {
                    ours(program)
                } else {
                    Command::new(program)
                };
                command.args(["-c", &format!("write -P {pattern} 0 128k"), "-c", "sleep 5"]);
                command.args(["-c", &format!("read -P {pattern} 0 128k"), "top.qcow2"]);
                let output = outcome(command.current_dir(&dir).stdin(Stdio::null()));
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let errors = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(!said.contains("verification failed"), "{program}: {said}");
                if output.status.success() {
                    held += 1;
                } else {
                    assert!(errors.contains(" lock"), "{program}: {said}{errors}");
                }
            }
            held
        }
    };
    let contenders = [
        std::thread::spawn(contend("qemu-io", true, 1)),
        std::thread::spawn(contend("qemu-io", true, 2)),
        std::thread::spawn(contend("qemu-io", false, 3)),
    ];
    let held: u32 = contenders
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .sum();
    assert!(held > 3, "{held} were let in");
    qemu_img(&["check", "-q"], &[&dir.join("top.qcow2")]);
}

#[test]
fn what_cannot_be_resized_or_allocated_could_not_be_opened() {
    if !peers_are_installed(PEERS) {
        return;
    }
    // Others hold "nobody writes", and "nobody changes the length".
    for (byte, lock) in [(201, "write"), (203, "resize")] {
        for (format, name) in [("raw", "r.raw"), ("qcow2", "base.qcow2")] {
            let dir = &images();
            let before = fs::read(dir.join(name)).unwrap();
            let held = File::open(dir.join(name)).unwrap();
            cowslip_queue::lock::share(held.as_fd(), byte, 1).unwrap();
            let resize = ["resize", "-f", format, name, "8M"];
            let (code, theirs) = verdict(Command::new("qemu-img").args(resize), dir);
            let first = format!("Could not open '{name}': Failed to get \"{lock}\" lock");
            assert_eq!(code, Some(1));
            assert_eq!(theirs[0], format!("qemu-img: {first}"));
            let (code, own) = verdict(ours("qemu-img").args(resize), dir);
            assert_eq!((code, &own[..2]), (Some(1), &theirs[..2]), "{format}");
            for line in [
                &resize[..],
                &["allocate", "--size", "8M", name],
                &["clone", "--copy", "top.qcow2", name],
            ] {
                if line[0] == "clone" && format == "qcow2" {
                    continue; // The source's own backing file.
                }
                let (code, own) = verdict(cowslip().args(line), dir);
                assert_eq!(code, Some(1), "{line:?}: {own:?}");
                assert_eq!(own[0], format!("cowslip: {first}"), "{line:?}");
                assert_eq!(own[1], theirs[1], "{line:?}");
            }
            assert!(fs::read(dir.join(name)).unwrap() == before, "{format}");
        }
    }
}
