//! Exports of NBD servers as files of the commands: QEMU's server and ours, beside QEMU's own
//! programs.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::golden::{ours, said};
use crate::support::running::Running;
use crate::support::twins::qemu_img;
use crate::support::{cowslip, outcome, peers_are_installed, run, scratch, scratch_beside};

/// A server; ends with this value.
struct Server {
    _process: Running,
    address: String,
}

impl Server {
    fn start(command: &mut Command, socket: &Path) -> Server {
        let child = Running::start(command.stdout(Stdio::null()));
        let begun = Instant::now();
        while !socket.exists() {
            assert!(begun.elapsed() < Duration::from_secs(30), "no socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        Server {
            _process: child,
            address: format!("nbd:unix:{}", socket.display()),
        }
    }

    /// QEMU's server of the bytes of a file.
    fn theirs(file: &Path, words: &[&str]) -> Server {
        let socket = file.with_extension("theirs");
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-f", "raw", "-k"]).arg(&socket);
        Server::start(command.args(words).arg(file), &socket)
    }

    /// Ours of an image.
    fn ours(file: &Path, words: &[&str]) -> Server {
        let socket = file.with_extension("ours");
        let mut command = cowslip();
        command.args(["serve", "--socket"]).arg(&socket);
        Server::start(command.args(words).arg(file), &socket)
    }
}

fn raw_file(dir: &Path, len: u64) -> PathBuf {
    let path = dir.join("disk");
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    path
}

/// Returns the output of the shell, without times.
fn io(address: &str, words: &[&str], commands: &[&str]) -> String {
    let mut shell = cowslip();
    shell.arg("io").args(words);
    for command in commands {
        shell.args(["-c", command]);
    }
    run(shell.arg(address))
}

#[test]
fn a_disk_is_written_and_read_back_over_either_server() {
    if !peers_are_installed(&["qemu-nbd", "qemu-io"]) {
        return;
    }
    for start in [Server::theirs, Server::ours] {
        let dir = scratch();
        let disk = raw_file(dir.path(), 128 << 20);
        let words: &[&str] = &["--cache", "writeback", "--discard", "unmap"];
        let server = start(&disk, &[words, &["-f", "raw"]].concat());
        let address = server.address.as_str();
        let printed = io(
            address,
            &["-f", "raw"],
            &[
                "write -P 7 1M 80M",
                "write -z 3M 1M",
                "write -P 9 1000 700",
                "flush",
                "read -P 7 1M 2M",
                "read -P 0 3M 1M",
                "read -P 7 4M 77M",
                "discard 20M 10M",
                "length",
            ],
        );
        assert!(
            printed.contains("wrote 83886080/83886080 bytes at offset 1048576"),
            "{printed}"
        );
        assert!(
            printed.contains("128 MiB") && !printed.contains("failed"),
            "{printed}"
        );
        drop(server);
        let checks = [
            "read -P 7 1M 2M",
            "read -P 0 3M 1M",
            "read -P 9 1000 700",
            "read -P 7 30M 51M",
        ];
        let mut theirs = Command::new("qemu-io");
        theirs.args(["-f", "raw"]).arg(&disk);
        for check in checks {
            theirs.args(["-c", check]);
        }
        let printed = run(&mut theirs);
        assert!(!printed.contains("failed"), "{printed}");
    }
}

/// An image whose file is somewhere else: everything that reads it works, and says what QEMU's
/// program says.
#[test]
fn an_image_in_an_export_is_mapped_checked_and_described() {
    let Some(dir) = scratch_beside(&["qemu-nbd", "qemu-img", "qemu-io"]) else {
        return;
    };
    let image = dir.path().join("image.qcow2");
    run(Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg("64M"));
    let write = [
        "-c",
        "write -P 5 3M 300k",
        "-c",
        "write -z 10M 5M",
        "-c",
        "write -P 6 40M 64k",
    ];
    run(Command::new("qemu-io").args(write).arg(&image));
    let server = Server::theirs(&image, &["-r", "--shared=4"]);
    let options = format!(
        "driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path={}",
        &server.address["nbd:unix:".len()..]
    );
    let url = format!(
        "nbd+unix:///?socket={}",
        &server.address["nbd:unix:".len()..]
    );
    for words in [
        vec!["map", "-U", "--output=json", "-f", "qcow2", &server.address],
        vec!["map", "-U", "--output=json", "-f", "raw", &url],
        vec!["map", "-U", "--output=json", "--image-opts", &options],
        vec!["check", "-U", "-f", "qcow2", &server.address],
        vec!["check", "-U", "--output=json", "-f", "qcow2", &url],
    ] {
        let theirs = run(Command::new("qemu-img").args(&words));
        let ours = run(cowslip().arg("qemu-img").args(&words));
        assert_eq!(ours, theirs, "{words:?}");
    }
    // Output names a server by its URI, however it was given.
    let bare = options.replace("driver=qcow2,file.driver=nbd", "driver=nbd");
    let bare = bare.replace("file.server", "server");
    for words in [
        vec!["info", "-U", &server.address],
        vec!["info", "-U", "--output=json", &url],
        vec!["info", "-U", "--image-opts", &options],
        vec!["info", "-U", "--image-opts", &bare],
        vec!["info", "-U", "--output=json", "--image-opts", &bare],
    ] {
        let theirs = run(Command::new("qemu-img").args(&words));
        let ours = run(cowslip().arg("qemu-img").args(&words));
        assert_eq!(ours, theirs, "{words:?}");
    }
    let printed = run(cowslip().args(["info", "-U", &server.address]));
    assert!(
        printed.contains("file format: qcow2") && printed.contains("virtual size: 64 MiB"),
        "{printed}"
    );
    assert!(printed.contains("disk size: unavailable"), "{printed}");
    let printed = io(
        &server.address,
        &["-U", "-r", "-f", "qcow2"],
        &["read -P 5 3M 300k", "read -P 0 11M 2M"],
    );
    assert!(!printed.contains("failed"), "{printed}");
}

/// A server's block status decides what of a disk is copied at all: of this one, what a second
/// suffices for.
#[test]
fn of_a_disk_of_holes_only_data_is_read() {
    if !peers_are_installed(&["qemu-nbd"]) {
        return;
    }
    for start in [Server::theirs, Server::ours] {
        let dir = scratch();
        let disk = raw_file(dir.path(), 1 << 40);
        let file = std::fs::OpenOptions::new().write(true).open(&disk);
        file.unwrap().write_all_at(&[7; 4096], 700 << 30).unwrap();
        let server = start(&disk, &["-r", "-f", "raw"]);
        let copy = dir.path().join("copy");
        let words = ["convert", "--json", "-f", "raw", "-O", "raw"];
        let printed = run(cowslip().args(words).arg(&server.address).arg(&copy));
        let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(printed["virtual-size"], 1u64 << 40);
        assert_eq!(printed["bytes-read"], 4096);
        let mut block = [0; 4096];
        let copy = std::fs::File::open(copy).unwrap();
        copy.read_exact_at(&mut block, 700 << 30).unwrap();
        assert_eq!(block, [7; 4096]);
    }
}

#[test]
fn what_a_server_does_not_offer_is_said() {
    let dir = scratch();
    let disk = raw_file(dir.path(), 1 << 20);
    let refused = |words: &[&str]| {
        let output = outcome(cowslip().args(words));
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let nobody = format!("nbd:unix:{}", dir.path().join("nobody").display());
    let printed = refused(&["map", &nobody]);
    assert!(
        printed.contains(&format!("Could not open '{nobody}': Failed to connect to ")),
        "{printed}"
    );
    assert!(printed.contains("No such file or directory"), "{printed}");
    let printed = refused(&["map", "nbd://localhost:1/"]);
    assert!(
        printed.contains("Failed to connect to 'localhost:1': Connection refused"),
        "{printed}"
    );
    assert!(refused(&["map", "nbd:x"]).contains("names no NBD export"));
    let server = Server::ours(&disk, &["-f", "raw", "-r"]);
    let printed = refused(&["map", &format!("{}:exportname=other", server.address)]);
    assert!(
        printed.contains("Requested export not available"),
        "{printed}"
    );
    let printed = refused(&["io", "-f", "raw", "-c", "write 0 4k", &server.address]);
    assert!(
        printed.contains("request on write denied without write permission"),
        "{printed}"
    );
}

/// An export cannot be made, but an image in it: to the last word as qemu-img, and with the same
/// disks.
#[test]
fn images_are_made_in_exports_as_qemu_img_makes_them() {
    if !peers_are_installed(&["qemu-nbd", "qemu-img"]) {
        return;
    }
    const LINES: &[&str] = &[
        "create -f raw EXPORT 8M",
        "create -f raw EXPORT 9M",
        "create -f raw -o preallocation=full EXPORT 1M",
        "create -f raw -o nocow=on EXPORT 1M",
        "create -f raw -o help EXPORT",
        "create -f qcow2 EXPORT 4G",
        "info -f qcow2 EXPORT",
        "check -f qcow2 EXPORT",
        "create -f qcow2 -o preallocation=metadata EXPORT 8M",
        "create -f qcow2 nbd:unix:DIR/nobody 1M",
        "convert -f raw -O raw DIR/source EXPORT",
        "convert -f raw -O raw DIR/large EXPORT",
        "convert -f raw -O qcow2 DIR/source EXPORT",
        "compare -f raw -F qcow2 DIR/source EXPORT",
        "check -q -f qcow2 EXPORT",
        "convert -c -f raw -O qcow2 DIR/large EXPORT",
        "compare -f raw -F qcow2 DIR/large EXPORT",
        "dd -f raw -O qcow2 bs=64k count=7 if=DIR/source of=EXPORT",
        "check -q -f qcow2 EXPORT",
        "dd -f raw -O raw bs=64k count=7 if=DIR/source of=EXPORT",
    ];
    let tell = |command: fn() -> Command| {
        let dir = scratch();
        let path = |name: &str| dir.path().join(name);
        let mut source = vec![0; 3 << 20];
        source[1_000_000..2_000_000].fill(7);
        std::fs::write(path("source"), &source).unwrap();
        source.resize(20 << 20, 0);
        std::fs::write(path("large"), &source).unwrap();
        std::fs::write(path("disk"), vec![9; 8 << 20]).unwrap();
        let server = Server::theirs(&path("disk"), &[]);
        let printed = LINES.iter().map(|line| {
            let here = dir.path().display().to_string();
            let line = line.replace("EXPORT", &server.address);
            let mut command = command();
            command.args(line.replace("DIR", &here).split(' '));
            said(&outcome(&mut command)).replace(&here, "DIR")
        });
        let printed: Vec<String> = printed.collect();
        drop(server);
        (printed, std::fs::read(path("disk")).unwrap())
    };
    let (theirs, their_disk) = tell(qemu_img);
    let (ours, our_disk) = tell(ours);
    for ((line, ours), theirs) in LINES.iter().zip(&ours).zip(&theirs) {
        assert_eq!(ours, theirs, "{line}");
    }
    // The last command made a raw disk of the first 448 KiB.
    assert!(our_disk[..448 << 10] == their_disk[..448 << 10]);
    assert_eq!(theirs.last().unwrap(), "[exit status: 0]\n");
}

#[test]
fn an_export_that_is_the_source_is_not_made_anew() {
    let dir = scratch();
    let disk = raw_file(dir.path(), 1 << 20);
    let server = Server::ours(&disk, &["-f", "raw"]);
    let words = ["convert", "-f", "raw", "-O", "qcow2"];
    let output = outcome(cowslip().args(words).args([&server.address; 2]));
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        printed.contains("must not be overwritten: it is read as a source"),
        "{printed}"
    );
    drop(server);
    assert_eq!(std::fs::read(&disk).unwrap(), vec![0; 1 << 20]);
}

/// How many reads a server that takes a tenth of a second for each had to do at the same time.
fn reads_together(words: &[&str]) -> usize {
    let dir = scratch();
    let [disk, socket, log, copy] =
        ["disk", "s", "log", "copy"].map(|name| dir.path().join(name).display().to_string());
    std::fs::write(&disk, vec![7; 64 << 20]).unwrap();
    let mut command = Command::new("nbdkit");
    command.args([
        "-f",
        "-r",
        "-t",
        "32",
        "--filter=log",
        "--filter=delay",
        "-U",
    ]);
    command.args([&socket, "file", &disk, "rdelay=100ms"]);
    let server = Server::start(command.arg(format!("logfile={log}")), Path::new(&socket));
    let convert = ["convert", "-q", "-f", "raw", "-O", "raw"];
    run(cowslip()
        .args(convert)
        .args(words)
        .args([&server.address, &copy]));
    drop(server);
    assert!(std::fs::read(&copy).unwrap() == vec![7; 64 << 20]);
    let (mut now, mut most) = (0, 0);
    for line in std::fs::read_to_string(log).unwrap().lines() {
        if line.contains(" ...Read id=") {
            now -= 1;
        } else if line.contains(" Read id=") {
            now += 1;
        }
        most = most.max(now);
    }
    most
}

/// A first read shows that the server is far away, and then twice the usual number of pieces is in
/// flight.
#[test]
fn a_server_that_is_far_is_asked_for_more_at_a_time() {
    if !peers_are_installed(&["nbdkit"]) {
        return;
    }
    let usual = reads_together(&["-m", "8"]);
    assert!((4..=8).contains(&usual), "{usual}");
    let far = reads_together(&[]);
    assert!((9..=17).contains(&far), "{far}");
}

/// The old content would be taken for an image of its old format.
#[test]
fn a_raw_disk_in_an_export_begins_with_zeroes_and_leaves_the_rest() {
    let Some(dir) = scratch_beside(&["qemu-nbd"]) else {
        return;
    };
    let disk = dir.path().join("disk");
    std::fs::write(&disk, vec![9; 1 << 20]).unwrap();
    let server = Server::theirs(&disk, &[]);
    run(cowslip().args(["create", "-q", "-f", "raw", &server.address, "1M"]));
    drop(server);
    let found = std::fs::read(&disk).unwrap();
    assert_eq!(found[..512], [0; 512]);
    assert!(found[512..].iter().all(|byte| *byte == 9));
}

#[test]
fn a_server_that_hangs_up_is_told_in_plain_words() {
    let dir = scratch();
    let socket = dir.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let address = format!("nbd:unix:{}", socket.display());
    let output = outcome(cowslip().args(["map", "-f", "raw", &address]));
    server.join().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        printed.contains("': Failed to negotiate with the server: "),
        "{printed}"
    );
    assert!(!printed.contains("os error"), "{printed}");
}
