//! Measurement: a Debian guest boots from a golden image behind 5 ms and 200 Mbit/s, until it asks
//! for a login. `COWSLIP_GUEST` names a directory with `vmlinuz`, `initrd.img` and `golden.qcow2`
//! (docs/testing.md says how they are made), `COWSLIP_GUEST_WAYS` the ways by which the image
//! comes, all of them by default; `COWSLIP_GUEST_ACCEL` the accelerator, `tcg` by default.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.
#![cfg(feature = "remote")]

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_testbed::web::{WebLink, WebObject, WebServer};

use crate::support::server::Server;
use crate::support::{cowslip, run, scratch};

/// Time for a boot. Without KVM it takes some 20 s, on a busy machine several times that.
const BOOT_WITHIN: Duration = Duration::from_secs(400);
const GOLDEN: &str = "/golden.qcow2";

struct Bench {
    /// Kernel, initial RAM disk, golden image.
    guest: PathBuf,
    dir: crate::support::Scratch,
    server: WebServer,
}

impl Bench {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = cowslip();
        command.current_dir(self.dir.path()).args(words);
        command.env_remove("COWSLIP_CACHE").env_remove("http_proxy");
        command
    }

    fn url(&self) -> String {
        self.server.url(GOLDEN)
    }

    /// Makes an overlay, which nothing has been written to.
    fn overlay(&self, base: &str) {
        let words = ["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2"];
        run(self.command(&words).arg("vm.qcow2"));
    }

    /// Serves the overlay, with further words, and boots from it.
    fn boot_served(&self, words: &[&str]) {
        let serve = ["serve", "--socket", "s", "vm.qcow2"];
        let mut command = self.command(&serve);
        let server = Server::start(command.args(words), &self.dir.path().join("s"));
        let disk = format!(
            "driver=nbd,server.type=unix,server.path={}",
            socket(&server)
        );
        self.boot(&format!("driver=raw,file.{}", disk.replace(",", ",file.")));
        // In order, so that it writes its trace.
        server.stop();
    }

    /// Boots from a block device of QEMU's, and waits for the login.
    fn boot(&self, disk: &str) {
        let accelerator = std::env::var("COWSLIP_GUEST_ACCEL");
        let accelerator = accelerator.unwrap_or_else(|_| "tcg".to_string());
        let mut command = Command::new("qemu-system-x86_64");
        command.args("-machine pc -m 512 -display none -nodefaults -no-reboot".split(' '));
        command.args(["-serial", "stdio", "-accel", &accelerator]);
        command.arg("-kernel").arg(self.guest.join("vmlinuz"));
        command.arg("-initrd").arg(self.guest.join("initrd.img"));
        command.args(["-append", "root=/dev/vda rw console=ttyS0"]);
        command.args(["-blockdev", &format!("node-name=disk,{disk}")]);
        command.args(["-device", "virtio-blk-pci,drive=disk"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut qemu = command.current_dir(self.dir.path()).spawn().unwrap();
        let mut console = qemu.stdout.take().unwrap();
        let begun = Instant::now();
        let (mut said, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            let count = console.read(&mut piece).unwrap();
            said.extend_from_slice(&piece[..count]);
            if said.windows(6).any(|found| found == b"login:") {
                break;
            }
            let is_late = count == 0 || begun.elapsed() > BOOT_WITHIN;
            assert!(!is_late, "{}", String::from_utf8_lossy(&said));
        }
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    }
}

fn socket(server: &Server) -> String {
    server.uri().split_once("socket=").unwrap().1.to_string()
}

/// A way by which the image comes.
type Way = (&'static str, &'static str, fn(&Bench));

/// The words of a start with a cache of its own.
const CACHED: [&str; 2] = ["--remote-cache", "one"];

const WAYS: [Way; 8] = [
    ("local", "a local file", |bench| {
        bench.overlay(bench.guest.join("golden.qcow2").to_str().unwrap());
        bench.boot_served(&[]);
    }),
    ("download", "the whole image first", |bench| {
        let url = bench.url();
        run(&mut bench.command(&["convert", "-O", "qcow2", &url, "copy.qcow2"]));
        bench.overlay("copy.qcow2");
        bench.boot_served(&[]);
        std::fs::remove_file(bench.dir.path().join("copy.qcow2")).unwrap();
    }),
    ("demand", "on demand, no cache", |bench| {
        bench.overlay(&bench.url());
        bench.boot_served(&[]);
    }),
    ("cache", "on demand, with a cache", |bench| {
        bench.overlay(&bench.url());
        bench.boot_served(&[&CACHED[..], &["--remote-record", "boot.trace"]].concat());
    }),
    ("second", "a second start", |bench| {
        bench.overlay(&bench.url());
        bench.boot_served(&CACHED);
    }),
    ("trace", "with a trace", |bench| {
        bench.overlay(&bench.url());
        bench.boot_served(&["--remote-cache", "two", "--remote-trace", "boot.trace"]);
    }),
    ("qemu", "QEMU's driver http", |bench| {
        let url = bench.url();
        bench.overlay(&url);
        let base = format!("backing.driver=qcow2,backing.file.driver=http,backing.file.url={url}");
        bench.boot(&format!(
            "driver=qcow2,file.driver=file,file.filename=vm.qcow2,{base}"
        ));
    }),
    ("nbdkit", "nbdkit's curl", |bench| {
        let url = bench.url();
        let mut command = Command::new("nbdkit");
        let at = bench.dir.path().join("n");
        command.args(["-f", "-r", "-U"]).arg(&at);
        let server = Server::start(command.args(["curl", &url]), &at);
        bench.overlay(&format!("nbd+unix:///?socket={}", socket(&server)));
        bench.boot("driver=qcow2,file.driver=file,file.filename=vm.qcow2");
    }),
];

/// Whether a way can be gone here; it says so if not.
fn is_there(way: &str) -> bool {
    let shown = match way {
        "qemu" => Command::new("qemu-img")
            .args(["info", "http://127.0.0.1:1/"])
            .output(),
        "nbdkit" => Command::new("nbdkit")
            .args(["--dump-plugin", "curl"])
            .output(),
        _ => return true,
    };
    let is_there = shown.is_ok_and(|shown| {
        let said = String::from_utf8_lossy(&shown.stderr).into_owned();
        !said.contains("Unknown protocol") && (way == "qemu" || shown.status.success())
    });
    if !is_there {
        println!("SKIPPED: {way} is not installed with what it needs");
    }
    is_there
}

#[test]
#[ignore = "a measurement of minutes, with a guest that is made before"]
fn a_guest_starts_from_a_golden_image_afar() {
    let Some(guest) = std::env::var_os("COWSLIP_GUEST").map(PathBuf::from) else {
        return eprintln!("SKIPPED: COWSLIP_GUEST names no directory with a guest");
    };
    let bytes = std::fs::read(guest.join("golden.qcow2")).unwrap();
    let mib = bytes.len() >> 20;
    let server = WebServer::start().unwrap();
    server.put(GOLDEN, WebObject::tagged(bytes, "one"));
    server.limit(WebLink {
        latency: Duration::from_millis(5),
        bytes_per_second: 25_000_000,
    });
    let bench = Bench {
        guest,
        dir: scratch(),
        server,
    };
    let wanted = std::env::var("COWSLIP_GUEST_WAYS").ok();
    let is_wanted = |way: &str| {
        let wanted = wanted.as_deref();
        wanted.is_none_or(|wanted| wanted.split(',').any(|other| other == way))
    };
    println!("an image of {mib} MiB");
    for (way, what, start) in WAYS {
        if !is_wanted(way) || !is_there(way) {
            continue;
        }
        drop(std::fs::remove_file(bench.dir.path().join("vm.qcow2")));
        bench.server.forget();
        let begun = Instant::now();
        start(&bench);
        let seconds = begun.elapsed().as_secs_f64();
        let sent = bench.server.sent() as f64 / f64::from(1 << 20);
        let requests = bench.server.requests().len();
        println!("{what:<26} {seconds:7.2} s {sent:8.1} MiB {requests:6} requests");
        if way == "second" {
            // Two starts differ by some of what runs at the same time.
            assert!(
                sent < 8.0,
                "a second start fetches hardly anything: {sent} MiB"
            );
        }
    }
}
