//! `grow` beside writers on loop-mounted ext4 and XFS: fewer extents, no byte lost, no space left,
//! no writer without space. Tests that mount a file system need root and a loop device, and say so
//! if they have neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::mounted::Mounted;
use crate::support::rng::Rng;
use crate::support::running::Running;
use crate::support::{cowslip, outcome, scratch};

const PIECE: usize = 64 << 10;

/// `grow`, running.
struct Grow {
    child: Running,
    stdout: BufReader<ChildStdout>,
    lines: Vec<Value>,
}

impl Grow {
    fn start(words: &[&str], path: &Path) -> Grow {
        let mut command = cowslip();
        command.args(["grow", "--json"]).args(words).arg(path);
        let mut child = Running::start(command.stdout(Stdio::piped()));
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut grow = Grow {
            child,
            stdout,
            lines: Vec::new(),
        };
        assert!(grow.next()["watching"].is_array());
        grow
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "it has ended");
        serde_json::from_str(&line).unwrap()
    }

    /// Reads until an event of a file is reported.
    fn until(&mut self, event: &str, file: &Path) -> Value {
        loop {
            let line = self.next();
            self.lines.push(line.clone());
            if line["event"] == event && line["file"] == file.display().to_string() {
                return line;
            }
        }
    }

    /// Ends it; its events and its summary.
    fn end(mut self) -> (Vec<Value>, Value) {
        self.child.signal(Signal::TERM);
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success());
        let rest = rest.lines().map(|line| serde_json::from_str(line).unwrap());
        self.lines.extend(rest);
        let summary = self.lines.pop().unwrap()["summary"].clone();
        (std::mem::take(&mut self.lines), summary)
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

/// Returns the byte of a file at an offset: every piece of every file differs.
fn byte(file: usize, at: u64) -> u8 {
    (at / 512 * 31 + at + file as u64 * 101) as u8
}

fn bytes(file: usize, at: u64, len: usize) -> Vec<u8> {
    (at..at + len as u64).map(|at| byte(file, at)).collect()
}

fn expect_content(path: &Path, file: usize, size: u64) {
    let found = fs::read(path).unwrap();
    assert_eq!(found.len() as u64, size, "{}", path.display());
    let differs = (0u64..).zip(&found).find(|(at, b)| byte(file, *at) != **b);
    assert_eq!(differs, None, "{}", path.display());
}

fn extents(path: &Path) -> usize {
    let file = File::open(path).unwrap();
    cowslip_queue::fiemap::extents(&file).unwrap().len()
}

/// Space that a file has over what its length needs.
fn excess(path: &Path) -> u64 {
    let found = fs::metadata(path).unwrap();
    (found.blocks() * 512).saturating_sub(found.len().next_multiple_of(4096))
}

/// Waits until no file has space behind its end. Metadata of ext4 (an extent block) counts as such.
fn expect_no_excess(paths: &[PathBuf]) {
    let begun = Instant::now();
    for path in paths {
        while excess(path) > 8192 {
            let waited = begun.elapsed() < Duration::from_secs(20);
            assert!(waited, "{} keeps {} bytes", path.display(), excess(path));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn direct(path: &Path) -> File {
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let mut options = OpenOptions::new();
    let options = options.create(true).truncate(false).write(true);
    options.custom_flags(flags).open(path).unwrap()
}

/// A piece of a file in memory that direct writes take.
struct Aligned(Vec<u8>);

impl Aligned {
    fn of(file: usize, at: u64) -> Aligned {
        let mut room = vec![0; PIECE + 4096];
        let start = room.as_ptr().align_offset(4096);
        room[start..start + PIECE].copy_from_slice(&bytes(file, at, PIECE));
        Aligned(room)
    }

    fn bytes(&self) -> &[u8] {
        let start = self.0.as_ptr().align_offset(4096);
        &self.0[start..start + PIECE]
    }
}

/// Files that are written side by side, directly, in turns; each stays open.
fn write_side_by_side(dir: &Path, files: usize, pieces: u64) -> Vec<PathBuf> {
    fs::create_dir(dir).unwrap();
    let paths: Vec<PathBuf> = (0..files).map(|n| dir.join(format!("{n}"))).collect();
    let open: Vec<File> = paths.iter().map(|path| direct(path)).collect();
    write_pieces(&open, 0..pieces);
    paths
}

fn write_pieces(open: &[File], pieces: std::ops::Range<u64>) {
    for piece in pieces {
        let at = piece * PIECE as u64;
        for (number, file) in open.iter().enumerate() {
            file.write_all_at(Aligned::of(number, at).bytes(), at)
                .unwrap();
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Ext4,
    Xfs,
}

fn on_both(run: fn(&Path)) {
    for kind in [Kind::Ext4, Kind::Xfs] {
        on(kind, run);
    }
}

fn on(kind: Kind, run: impl FnOnce(&Path)) {
    let mkfs = match kind {
        Kind::Ext4 => "mkfs.ext4",
        Kind::Xfs => "mkfs.xfs",
    };
    if let Some(mounted) = Mounted::new(&[mkfs, "-q"]) {
        run(&mounted.at);
    }
}

/// How many extents eight files get, without and with `grow`.
fn extents_without_and_with(at: &Path) -> (usize, usize) {
    let (files, pieces) = (8, 192);
    let plain = write_side_by_side(&at.join("plain"), files, pieces);
    let dir = at.join("grown");
    fs::create_dir(&dir).unwrap();
    let grow = Grow::start(&[], &dir);
    let paths: Vec<PathBuf> = (0..files).map(|n| dir.join(format!("{n}"))).collect();
    let open: Vec<File> = paths.iter().map(|path| direct(path)).collect();
    write_pieces(&open, 0..pieces);
    drop(open);
    expect_no_excess(&paths);
    let (_, summary) = grow.end();
    assert_eq!(number(&summary["left"]), 0);
    assert!(number(&summary["given-back"]) > 0, "{summary}");
    for (number, path) in paths.iter().enumerate() {
        expect_content(path, number, pieces * PIECE as u64);
    }
    let count = |paths: &[PathBuf]| paths.iter().map(|path| extents(path)).sum::<usize>();
    let (without, with) = (count(&plain), count(&paths));
    eprintln!("{}: {without} extents, with grow {with}", at.display());
    (without, with)
}

#[test]
fn files_that_are_written_side_by_side_get_few_extents() {
    on(Kind::Xfs, |at| {
        let (without, with) = extents_without_and_with(at);
        assert!(without > 400, "nothing to improve: {without}");
        assert!(with * 3 < without, "{without}, with grow {with}");
    });
    // ext4 gives each file a window of its own.
    on(Kind::Ext4, |at| {
        let (without, with) = extents_without_and_with(at);
        assert!(with <= without, "{without}, with grow {with}");
    });
}

/// Appends of any length; opened, closed, left alone for a moment, renamed: with cuts in between.
fn append_at_random(dir: &Path, number: usize, until: Instant) -> (PathBuf, u64) {
    let mut rng = Rng::new(number as u64 + 1);
    let mut path = dir.join(format!("{number}"));
    let (mut at, mut names) = (0, 0);
    while Instant::now() < until {
        let mut options = OpenOptions::new();
        let mut file = options.create(true).append(true).open(&path).unwrap();
        for _ in 0..=rng.below(6) {
            let len = rng.below(200 << 10) as usize;
            file.write_all(&bytes(number, at, len)).unwrap();
            at += len as u64;
            if rng.once_in(3) {
                std::thread::sleep(Duration::from_micros(rng.below(4000)));
            }
        }
        if rng.once_in(8) {
            names += 1;
            let renamed = dir.join(format!("{number}-{names}"));
            fs::rename(&path, &renamed).unwrap();
            path = renamed;
        }
        drop(file);
        std::thread::sleep(Duration::from_micros(rng.below(30_000)));
    }
    (path, at)
}

#[test]
fn no_byte_is_lost_while_files_are_cut_and_appended_to() {
    on_both(|at| {
        let grow = Grow::start(&["--idle", "0.02"], at);
        let until = Instant::now() + Duration::from_millis(1500);
        let written: Vec<(PathBuf, u64)> = std::thread::scope(|scope| {
            let writers = (0..4).map(|n| scope.spawn(move || append_at_random(at, n, until)));
            let writers: Vec<_> = writers.collect();
            writers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        let paths: Vec<PathBuf> = written.iter().map(|(path, _)| path.clone()).collect();
        expect_no_excess(&paths);
        let (events, summary) = grow.end();
        let cuts = events.iter().filter(|line| line["event"] == "given-back");
        let cuts = cuts.count();
        eprintln!("{}: {cuts} cuts, {summary}", at.display());
        assert!(cuts > 10 && number(&summary["steps"]) > 10, "{summary}");
        for (number, (path, size)) in written.iter().enumerate() {
            expect_content(path, number, *size);
        }
    });
}

/// Appends pieces to a file in one opening, through the page cache.
fn append(path: &Path, pieces: std::ops::Range<u64>, pause: Duration) {
    let mut options = OpenOptions::new();
    let mut file = options.create(true).append(true).open(path).unwrap();
    for piece in pieces {
        file.write_all(&bytes(0, piece * PIECE as u64, PIECE))
            .unwrap();
        std::thread::sleep(pause);
    }
}

/// More is written while `grow` is stopped; the space that the file system adds goes back.
fn goes_on_and_keeps_no_space(grow: Grow, path: &Path) {
    append(path, 48..51, Duration::ZERO);
    append(path, 51..112, Duration::ZERO);
    assert!(excess(path) > 8192, "nothing to give back");
    grow.child.signal(Signal::CONT);
    expect_no_excess(&[path.to_path_buf()]);
    grow.end();
    expect_content(path, 0, 112 * PIECE as u64);
}

/// XFS does not release space on its own from a file that was preallocated once.
#[test]
fn space_that_a_file_system_adds_to_a_file_given_steps_before_is_given_back() {
    on(Kind::Xfs, |at| {
        let mut grow = Grow::start(&["--idle", "0.02"], at);
        let path = at.join("a");
        append(&path, 0..48, Duration::from_millis(5));
        grow.until("given-back", &path);
        // It is forgotten, and what comes next is seen at once with its end.
        std::thread::sleep(Duration::from_millis(300));
        grow.child.signal(Signal::STOP);
        goes_on_and_keeps_no_space(grow, &path);
    });
}

/// The file has another name when more is written than was when its space was given back.
#[test]
fn a_renamed_file_that_was_given_steps_keeps_no_space_either() {
    on(Kind::Xfs, |at| {
        let mut grow = Grow::start(&["--idle", "30"], at);
        let (path, renamed) = (at.join("a"), at.join("b"));
        append(&path, 0..48, Duration::from_millis(5));
        grow.until("given-back", &path);
        grow.child.signal(Signal::STOP);
        fs::rename(&path, &renamed).unwrap();
        goes_on_and_keeps_no_space(grow, &renamed);
    });
}

#[test]
fn a_file_that_is_opened_for_each_write_keeps_its_space_until_it_is_left() {
    on_both(|at| {
        let mut grow = Grow::start(&["--idle", "0.5"], at);
        let path = at.join("a");
        for piece in 0..64 {
            let offset = piece * PIECE as u64;
            direct(&path)
                .write_all_at(Aligned::of(0, offset).bytes(), offset)
                .unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        let kept = grow.until("kept", &path);
        assert!(number(&kept["bytes"]) > 0);
        expect_no_excess(std::slice::from_ref(&path));
        let (_, summary) = grow.end();
        // Steps that grow: if each close gave back what there was, there would be one a write.
        assert!(number(&summary["steps"]) < 24, "{summary}");
        expect_content(&path, 0, 64 * PIECE as u64);
    });
}

#[test]
fn a_nearly_full_file_system_is_left_to_its_writers() {
    on_both(|at| {
        let free = || {
            let space = rustix::fs::statvfs(at).unwrap();
            space.f_bavail * space.f_frsize
        };
        let room = 40 << 20;
        let filler = File::create(at.join("filler")).unwrap();
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&filler, flags, 0, free() - room).unwrap();
        let dir = at.join("grown");
        fs::create_dir(&dir).unwrap();
        let grow = Grow::start(&[], &dir);
        // Four fifths of the space: no writer runs out, whichever of them holds some ahead.
        let pieces = room * 4 / 5 / 4 / PIECE as u64;
        let paths: Vec<PathBuf> = (0..4).map(|n| dir.join(format!("{n}"))).collect();
        let open: Vec<File> = paths.iter().map(|path| direct(path)).collect();
        write_pieces(&open, 0..pieces);
        drop(open);
        expect_no_excess(&paths);
        let (_, summary) = grow.end();
        eprintln!("{}: {summary}", at.display());
        assert!(number(&summary["held-max"]) < room / 2, "{summary}");
    });
}

#[test]
fn files_that_shrink_or_go_away_owe_nothing() {
    on_both(|at| {
        let mut grow = Grow::start(&["--idle", "0.5"], at);
        let [cut, deleted, replaced, moved] =
            ["cut", "deleted", "replaced", "moved"].map(|n| at.join(n));
        let away = at.join("below");
        fs::create_dir(&away).unwrap();
        let paths = [&cut, &deleted, &replaced, &moved];
        let open = paths.map(|path| direct(path));
        write_pieces(&open, 0..64);
        for path in paths {
            grow.until("allocated", path);
        }
        open[0].set_len(PIECE as u64).unwrap();
        fs::remove_file(&deleted).unwrap();
        fs::write(at.join("new"), "new").unwrap();
        fs::rename(at.join("new"), &replaced).unwrap();
        let moved_away = away.join("moved");
        fs::rename(&moved, &moved_away).unwrap();
        // It goes on from where it was cut.
        open[0]
            .write_all_at(Aligned::of(0, PIECE as u64).bytes(), PIECE as u64)
            .unwrap();
        drop(open);
        expect_no_excess(&[cut.clone(), replaced.clone(), moved_away.clone()]);
        expect_content(&cut, 0, 2 * PIECE as u64);
        expect_content(&moved_away, 3, 64 * PIECE as u64);
        assert_eq!(fs::read(&replaced).unwrap(), b"new");
        let (_, summary) = grow.end();
        assert_eq!(number(&summary["left"]), 0, "{summary}");
    });
}

#[test]
fn what_is_open_at_the_end_is_named_and_given_back_later() {
    on_both(|at| {
        for signal in [Signal::TERM, Signal::KILL] {
            let path = at.join(format!("{signal:?}"));
            let mut grow = Grow::start(&[], &path);
            let open = [direct(&path)];
            write_pieces(&open, 0..64);
            grow.until("allocated", &path);
            if signal == Signal::TERM {
                let (events, summary) = grow.end();
                let left: Vec<_> = events.iter().filter(|e| e["event"] == "left").collect();
                assert_eq!(left.len(), 1, "{events:?}");
                assert_eq!(left[0]["bytes"], summary["left"]);
            } else {
                grow.child.signal(signal);
                drop(grow);
            }
            let trim = || outcome(cowslip().args(["grow", "--trim"]).arg(at));
            // Not while another process may be writing.
            let held = excess(&path);
            assert!(held > 8192, "{held}");
            assert!(trim().status.success());
            assert_eq!(excess(&path), held);
            write_pieces(&open, 64..65);
            drop(open);
            let modified = fs::metadata(&path).unwrap().modified().unwrap();
            let trimmed = trim();
            assert!(trimmed.status.success(), "{trimmed:?}");
            expect_no_excess(std::slice::from_ref(&path));
            assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), modified);
            expect_content(&path, 0, 65 * PIECE as u64);
        }
    });
}

#[test]
fn an_end_that_only_moves_is_no_growth() {
    on_both(|at| {
        let path = at.join("a");
        let mut grow = Grow::start(&[], &path);
        let open = [direct(&path)];
        write_pieces(&open, 0..16);
        grow.until("allocated", &path);
        std::thread::sleep(Duration::from_millis(100));
        let leap = 200 << 20;
        open[0].set_len(leap).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        // Written again, it is given space as before.
        write_pieces(&open, 3200..3216);
        std::thread::sleep(Duration::from_millis(100));
        drop(open);
        let (events, _) = grow.end();
        let at_leap = |event: &&Value| event["event"] == "allocated" && event["size"] == leap;
        let allocated: Vec<_> = events.iter().filter(at_leap).collect();
        assert!(allocated.is_empty(), "{allocated:?}");
    });
}

#[test]
fn files_with_rights_that_a_change_takes_away_are_left_alone() {
    on_both(|at| {
        let space_behind = |path: &Path| {
            let file = direct(path);
            write_pieces(std::slice::from_ref(&file), 0..16);
            let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, 1 << 20, 1 << 20).unwrap();
        };
        let name = "security.capability";
        let capable = at.join("capable");
        space_behind(&capable);
        // Version 2, effective: CAP_NET_RAW may be had.
        let mut capability = [0; 20];
        capability[..8].copy_from_slice(&[1, 0, 0, 2, 0, 0x20, 0, 0]);
        let none = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&capable, name, &capability, none).unwrap();
        let modes = [("user", 0o4755), ("group", 0o2755)];
        for (name, mode) in modes {
            space_behind(&at.join(name));
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(at.join(name), mode).unwrap();
        }
        let trimmed = outcome(cowslip().args(["grow", "--trim"]).arg(at));
        let said = String::from_utf8_lossy(&trimmed.stdout).into_owned();
        for why in ["capabilities", "set-user-ID", "set-group-ID"] {
            let why = format!("skipped: it has {}", why_words(why));
            assert!(said.contains(&why), "{said}");
        }
        let mut found = [0; 20];
        let len = rustix::fs::getxattr(&capable, name, &mut found).unwrap();
        assert_eq!((len, found), (20, capability));
        for (name, mode) in modes {
            assert_eq!(fs::metadata(at.join(name)).unwrap().mode() & 0o7777, mode);
            assert!(excess(&at.join(name)) > 0);
        }
    });
}

fn why_words(rights: &str) -> String {
    match rights {
        "capabilities" => rights.to_string(),
        bit => format!("the bit {bit}"),
    }
}

#[test]
fn files_that_others_than_this_kernel_open_are_left_alone() {
    let Some(mounted) = Mounted::fuse(128 << 20) else {
        return;
    };
    let at = &mounted.at;
    let path = at.join("a");
    let write = |from: u64, to: u64| {
        let mut file = OpenOptions::new();
        let mut file = file.create(true).append(true).open(&path).unwrap();
        for piece in from..to {
            let bytes = bytes(0, piece * PIECE as u64, PIECE);
            file.write_all(&bytes).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let mut grow = Grow::start(&[], at);
    write(0, 32);
    let left = grow.until("left-alone", &path);
    assert!(left["why"].as_str().unwrap().contains(WHY), "{left}");
    write(32, 64);
    let (events, _) = grow.end();
    let allocated = events.iter().filter(|e| e["event"] == "allocated");
    assert_eq!(allocated.count(), 0, "{events:?}");
    expect_content(&path, 0, 64 * PIECE as u64);
    let other = at.join("b");
    let file = File::create(&other).unwrap();
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, flags, 0, 2 << 20).unwrap();
    drop(file);
    let trimmed = outcome(cowslip().args(["grow", "--trim"]).arg(&other));
    let said = String::from_utf8_lossy(&[trimmed.stdout, trimmed.stderr].concat()).into_owned();
    assert!(said.contains(WHY), "{said}");
    assert!(excess(&other) > 0);
}

/// Why files are left alone on such file systems.
const WHY: &str = "leases on its file system do not cover all processes that may open it";

#[test]
fn a_standard_output_that_fails_ends_it_and_leaves_nothing() {
    on_both(|at| {
        let path = at.join("a");
        let mut command = cowslip();
        command.args(["grow", "--json"]).arg(&path);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        let open = [direct(&path)];
        write_pieces(&open, 0..16);
        line.clear();
        lines.read_line(&mut line).unwrap();
        assert!(line.contains("allocated"), "{line}");
        drop(lines);
        // Until there is a step that it could not report.
        let (mut written, mut held) = (16, u64::MAX);
        while excess(&path) <= held {
            held = excess(&path);
            write_pieces(&open, written..written + 1);
            written += 1;
            assert!(written < 2000, "it allocates nothing more");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(open);
        assert_eq!(child.wait().unwrap().code(), Some(141));
        expect_no_excess(std::slice::from_ref(&path));
        expect_content(&path, 0, written * PIECE as u64);
    });
}

#[test]
fn only_regular_files_of_the_directory_itself_are_touched() {
    on_both(|at| {
        let (dir, outside) = (at.join("dir"), at.join("outside"));
        fs::create_dir_all(dir.join("below")).unwrap();
        symlink(&outside, dir.join("link")).unwrap();
        let fifo = dir.join("fifo");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
        let grow = Grow::start(&["--once", "--idle", "0.1"], &dir);
        let paths = [dir.join("link"), dir.join("below/a"), dir.join("a")];
        let open = paths.each_ref().map(|path| direct(path));
        write_pieces(&open, 0..64);
        let ours = excess(&paths[2]);
        assert!(excess(&outside) <= 8192 && excess(&paths[1]) <= 8192);
        assert!(ours > 8192, "{ours}");
        drop(open);
        // It ends on its own.
        let mut grow = grow;
        assert!(grow.child.wait().unwrap().success());
        expect_no_excess(&paths[2..]);
    });
}

#[test]
fn what_cannot_be_watched_is_refused_in_a_line() {
    let dir = scratch();
    symlink("x", dir.path().join("link")).unwrap();
    for (words, why) in [
        (vec!["link"], "symbolic link"),
        (vec!["/dev/null"], "neither a regular file nor a directory"),
        (vec!["none/x"], "No such file"),
        (vec!["--policy", "fixed=1", "."], "fixed size"),
        (vec!["--trim", "none"], "No such file"),
        (vec!["--trim", "/dev/null"], "not a regular file"),
        (vec!["--idle", "soon", "."], "not a number of seconds"),
        (vec!["--trim", "--once", "."], "cannot be used with"),
    ] {
        let output = outcome(cowslip().current_dir(dir.path()).arg("grow").args(&words));
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(why), "{words:?}: {text}");
        assert!(text.lines().count() <= 2, "{text}");
    }
    // Nothing to do, and a limit of time.
    let mut grow = Grow::start(&["--for", "0.05"], dir.path());
    assert!(grow.child.wait().unwrap().success());
}
