//! Bitmaps as metadata contexts beside qemu-nbd's: what is refused, what is listed, and what
//! clients read of them.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::golden::{self, lines, words};
use crate::support::running::Running;
use crate::support::{cowslip, outcome, peers_are_installed, run, scratch};

/// How to make the images, with QEMU's programs.
const IMAGES: &str = "
qemu-img create -q -f qcow2 base.qcow2 4M
qemu-img bitmap --add -g 64k base.qcow2 bb
qemu-img bitmap --add -g 64k base.qcow2 both
qemu-img bitmap --add -g 512 base.qcow2 off
qemu-io -f qcow2 -c write_1M_130k base.qcow2
qemu-img bitmap --disable base.qcow2 off
qemu-img create -q -f qcow2 -F qcow2 -b base.qcow2 top.qcow2 8M
qemu-img bitmap --add -g 64k top.qcow2 b0
qemu-img bitmap --add -g 128k top.qcow2 b1
qemu-img bitmap --add top.qcow2 both
qemu-io -f qcow2 -c write_0_64k -c write_192k_64k -c write_2M_128k top.qcow2
qemu-img bitmap --disable top.qcow2 b1
qemu-img create -q -f qcow2 -F qcow2 -b base.qcow2 short.qcow2 1100000
qemu-img create -q -f qcow2 odd.qcow2 1000000
qemu-img bitmap --add -g 512 odd.qcow2 b
qemu-io -f qcow2 -c write_999000_1000 -c write_0_1 -c write_70k_5k odd.qcow2
qemu-img bitmap --add --clear -g 32k odd.qcow2 clean
qemu-img snapshot -c s1 odd.qcow2
";

/// Command lines that are refused before anything is served.
const REFUSED: &str = "
-f qcow2 -B nosuch top.qcow2
-f qcow2 -B b0 -B nosuch top.qcow2
-r -f qcow2 -B nosuch -B b0 top.qcow2
-f qcow2 --bitmap= top.qcow2
-f raw -B b0 top.qcow2
-f qcow2 -o 65536 -B b0 top.qcow2
-f qcow2 -B lost lost.qcow2
-r -f qcow2 -B lost lost.qcow2
-f qcow2 -B b0 missing.qcow2
-L -B b0 top.qcow2
-B
";

/// Command lines that serve, and the contexts that are read.
const SERVED: &str = "
-f qcow2 -B b0 top.qcow2
-f qcow2 -B b1 -B b0 -B b0 top.qcow2
-r -A -f qcow2 -B b0 -B bb -B both -B off -B b1 top.qcow2
-s -f qcow2 -B b0 -B bb top.qcow2
-f qcow2 -B bb -B off short.qcow2
-f qcow2 -B b -B clean odd.qcow2
-r -e 3 -f qcow2 -B b -D words odd.qcow2
-l s1 -f qcow2 -B b odd.qcow2
--image-opts -B b driver=qcow2,file.filename=odd.qcow2
";

fn theirs() -> Command {
    Command::new("qemu-nbd")
}

fn ours() -> Command {
    let mut command = cowslip();
    command.arg0("qemu-nbd");
    command
}

/// A server on the socket `socket` of a directory; ends with this value.
struct Server {
    child: Running,
    uri: String,
}

impl Server {
    fn start(command: &mut Command, dir: &Path, line: &[&str]) -> Server {
        let socket = dir.join("socket");
        command.current_dir(dir).args(["-t", "-k"]).arg(&socket);
        let child = Running::start(command.args(line).stdout(Stdio::null()));
        let begun = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{line:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Server {
            child,
            uri: format!("nbd+unix:///?socket={}", socket.display()),
        }
    }

    fn map(&self, context: &str) -> String {
        let map = format!("--map={context}");
        let mut nbdinfo = Command::new("nbdinfo");
        golden::said(&outcome(nbdinfo.arg(map).arg(&self.uri)))
    }

    /// Returns what clients see of it, without the preferred block size, in which the servers
    /// differ.
    fn seen(&self, dir: &Path, line: &[&str]) -> String {
        let listed = run(theirs()
            .current_dir(dir)
            .args(["-L", "-k"])
            .arg(dir.join("socket")));
        let mut seen: String = listed
            .lines()
            .filter(|line| !line.starts_with("  opt block"))
            .map(|line| format!("{line}\n"))
            .collect();
        let named = line.windows(2).filter(|pair| pair[0] == "-B");
        for pair in named {
            seen += &self.map(&format!("qemu:dirty-bitmap:{}", pair[1]));
        }
        seen + &self.map("qemu:dirty-bitmap:") + &self.map("qemu:dirty-bitmap:other")
    }

    /// Ends it in order, with its bitmaps stored.
    fn stop(mut self) {
        self.child.signal(rustix::process::Signal::TERM);
        assert!(self.child.wait().unwrap().success());
    }
}

/// The images, in a directory of their own.
fn images() -> crate::support::Scratch {
    let dir = scratch();
    for line in lines(IMAGES) {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        let words = words.map(|word| match word.starts_with("write_") {
            true => word.replace('_', " "),
            false => word.to_string(),
        });
        run(command.current_dir(dir.path()).args(words));
    }
    lose_a_bitmap(dir.path());
    dir
}

/// Makes an image whose session has ended without storing its bitmap.
fn lose_a_bitmap(dir: &Path) {
    for line in [
        "create -q -f qcow2 lost.qcow2 1M",
        "bitmap --add lost.qcow2 lost",
    ] {
        run(Command::new("qemu-img").current_dir(dir).args(words(line)));
    }
    let mut server = Server::start(&mut theirs(), dir, &["-f", "qcow2", "lost.qcow2"]);
    write(&server, &["write 0 1k"]);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    std::fs::remove_file(dir.join("socket")).unwrap();
}

fn write(server: &Server, commands: &[&str]) {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw"]);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    run(qemu_io.arg(&server.uri));
}

#[test]
fn what_cannot_be_offered_is_refused_in_the_same_words() {
    if !peers_are_installed(&["qemu-nbd", "qemu-img", "qemu-io", "nbdinfo"]) {
        return;
    }
    let dir = images();
    for line in lines(REFUSED) {
        let [theirs, ours] = [theirs(), ours()].map(|mut command| {
            command.current_dir(dir.path()).arg("-k");
            command.arg(dir.path().join("socket")).args(line.split(' '));
            golden::said(&outcome(&mut command))
        });
        assert_eq!(ours, theirs, "qemu-nbd {line}");
    }
}

#[test]
fn clients_see_the_bitmaps_that_they_see_of_qemu() {
    if !peers_are_installed(&["qemu-nbd", "qemu-img", "qemu-io", "nbdinfo"]) {
        return;
    }
    let dir = images();
    for line in lines(SERVED) {
        let line = words(line);
        let [theirs, ours] = [theirs(), ours()].map(|mut command| {
            let server = Server::start(&mut command, dir.path(), &line);
            let seen = server.seen(dir.path(), &line);
            server.stop();
            seen
        });
        assert_eq!(ours, theirs, "qemu-nbd {line:?}");
        assert!(ours.contains("dirty"), "{ours}");
    }
}

/// Written by clients meanwhile, and stored for good when the server ends.
#[test]
fn a_bitmap_that_is_served_follows_what_clients_write() {
    if !peers_are_installed(&["qemu-nbd", "qemu-img", "qemu-io", "nbdinfo"]) {
        return;
    }
    let line = ["-f", "qcow2", "-B", "b", "-B", "clean", "odd.qcow2"];
    let [theirs, ours] = [theirs(), ours()].map(|mut command| {
        let dir = images();
        let server = Server::start(&mut command, dir.path(), &line);
        let mut seen = server.map("qemu:dirty-bitmap:clean");
        write(&server, &["write 4096 512", "write -z 1k 3k"]);
        seen += &server.map("qemu:dirty-bitmap:b");
        write(&server, &["write 300k 100k", "write 976k 2"]);
        seen += &server.map("qemu:dirty-bitmap:b");
        seen += &server.map("qemu:dirty-bitmap:clean");
        server.stop();
        let again = ["-r", "-f", "qcow2", "-B", "clean", "odd.qcow2"];
        let server = Server::start(&mut self::theirs(), dir.path(), &again);
        seen + &server.map("qemu:dirty-bitmap:clean")
    });
    assert_eq!(ours, theirs);
}
