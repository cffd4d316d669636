//! `publish -O qcow2`: plain images in an S3 server in the process, and in directories: read by
//! all, interrupted, killed, refused, beside faults of the store.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.
#![cfg(feature = "remote")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cowslip_testbed::web::{WebFault, WebObject, WebServer};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::golden::words;
use crate::support::rng::Rng;
use crate::support::running::signalled;
use crate::support::{cowslip, outcome, peers_are_installed, qemu_img, run, scratch};

/// Bytes of a part.
const PART: u64 = 8 << 20;

/// A scratch directory with a disk, and a server with a bucket.
struct Store {
    dir: crate::support::Scratch,
    server: WebServer,
}

impl Store {
    /// With a raw disk of noise, with zeroes in between: enough data for four parts.
    fn new() -> Store {
        let mut rng = Rng::new(73);
        let mut disk = vec![0; 56 << 20];
        for run in disk.chunks_mut(1 << 20).step_by(2) {
            for word in run.chunks_mut(8) {
                word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()]);
            }
        }
        let dir = scratch();
        std::fs::write(dir.path().join("golden.raw"), disk).unwrap();
        let server = WebServer::start().unwrap();
        Store { dir, server }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn command(&self, line: &str) -> Command {
        let mut command = cowslip();
        command.current_dir(self.path()).args(words(line));
        for (name, value) in [
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_REGION", "us-east-1"),
        ] {
            command.env(name, value);
        }
        command.env("AWS_ENDPOINT_URL", self.server.url(""));
        command.env_remove("COWSLIP_CACHE").env_remove("http_proxy");
        command
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&run(&mut self.command(line))).unwrap()
    }

    /// Runs a line that has to fail with exit code 1. Returns its complaint.
    fn refused(&self, line: &str) -> String {
        let output = outcome(&mut self.command(line));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        said
    }

    fn object(&self, name: &str) -> Option<Vec<u8>> {
        let found = self.server.object(&format!("/images/{name}"));
        found.map(|bytes| bytes.to_vec())
    }

    /// Nothing of an upload is left, and there is no object.
    fn assert_nothing_is_left(&self, name: &str) {
        assert_eq!(self.server.uploads(), 0, "{name}");
        assert!(self.object(name).is_none(), "{name}");
    }

    /// Files of the scratch directory, but for the disk.
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name != "golden.raw").collect();
        names.sort();
        names
    }
}

const PLAIN: &str = "publish -f raw -O qcow2 golden.raw s3://images/golden.qcow2";

/// An image is what was published, for both programs.
fn assert_is_golden(store: &Store, image: &str) {
    run(&mut store.command(&format!("check -q {image}")));
    run(&mut store.command(&format!("compare -q -F raw {image} golden.raw")));
    if peers_are_installed(&["qemu-img"]) {
        let image = store.path().join(image);
        qemu_img(&["check", "-q"], &[&image]);
        let golden = store.path().join("golden.raw");
        qemu_img(&["compare", "-q", "-F", "raw"], &[&image, &golden]);
    }
}

#[test]
fn a_plain_image_is_uploaded_in_parts_and_read_by_all() {
    let store = Store::new();
    let done = store.json(&format!("{PLAIN} --json"));
    let bytes = store.object("golden.qcow2").unwrap();
    let len = bytes.len() as u64;
    assert_eq!(done["file-bytes"], len);
    assert_eq!(done["disk-bytes"], 56 << 20);
    assert_eq!(done["data-bytes"], 28 << 20);
    assert!(((28 << 20)..(29 << 20)).contains(&len), "{len}");
    assert_eq!(store.server.uploads(), 0);
    let requests = store.server.requests();
    let parts = requests.iter().filter(|one| one.method == "PUT");
    assert_eq!(parts.count() as u64, len.div_ceil(PART));
    assert!(done["e-tag"].as_str().unwrap().contains("-4"), "{done}");
    std::fs::write(store.path().join("got.qcow2"), &bytes).unwrap();
    assert_is_golden(&store, "got.qcow2");
    // Used in place, and as a backing file.
    let url = store.server.url("/images/golden.qcow2");
    run(&mut store.command(&format!("compare -q -F raw {url} golden.raw")));
    let s3 = "s3://images/golden.qcow2";
    run(&mut store.command(&format!("create -q -f qcow2 -F qcow2 -b {s3} top.qcow2")));
    run(&mut store.command("compare -q -F raw top.qcow2 golden.raw"));
    // What images may depend on is not replaced.
    let said = store.refused(PLAIN);
    assert!(said.contains("exists already"), "{said}");
    assert!(store.object("golden.qcow2") == Some(bytes));
}

#[test]
fn options_choose_the_form_of_a_plain_image() {
    let store = Store::new();
    run(&mut store.command("create -q -f qcow2 text.qcow2 64M"));
    let write = ["io", "-c", "write -q -P 7 3M 2M", "text.qcow2"];
    run(cowslip().current_dir(store.path()).args(write));
    let zstd = "publish -q -O qcow2 -c -o compression_type=zstd,cluster_size=32k text.qcow2";
    run(&mut store.command(&format!("{zstd} s3://images/text.qcow2")));
    let bytes = store.object("text.qcow2").unwrap();
    // One part, and so one request.
    assert!(bytes.len() < 300 << 10, "{}", bytes.len());
    std::fs::write(store.path().join("got.qcow2"), bytes).unwrap();
    run(&mut store.command("compare -q got.qcow2 text.qcow2"));
    let info = store.json("info --output=json got.qcow2");
    assert_eq!(info["cluster-size"], 32768);
    let details = &info["format-specific"]["data"];
    assert_eq!(details["compression-type"], "zstd");
    if peers_are_installed(&["qemu-img"]) {
        let got = store.path().join("got.qcow2");
        qemu_img(&["check", "-q"], &[&got]);
        let text = store.path().join("text.qcow2");
        qemu_img(&["compare", "-q"], &[&got, &text]);
    }
    // A file of the host, as a store.
    let to_file = "publish -f raw -O qcow2 golden.raw golden.qcow2";
    run(&mut store.command(to_file));
    assert_is_golden(&store, "golden.qcow2");
    let said = store.refused(to_file);
    assert!(said.contains("exists already"), "{said}");
    let part = signalled(
        store
            .command("publish -f raw -O qcow2 golden.raw x.qcow2 --rate-limit 40M --progress=json"),
        Signal::INT,
    )
    .concat();
    assert!(part.contains("nothing of it is left"), "{part}");
    assert_eq!(store.files(), ["golden.qcow2", "got.qcow2", "text.qcow2"]);
}

#[test]
fn what_is_interrupted_leaves_nothing_and_a_failing_store_no_wrong_object() {
    let store = Store::new();
    let paced = format!("{PLAIN} --rate-limit 40M --progress=json");
    let said = signalled(store.command(&paced), Signal::INT).concat();
    let left = "there is no 's3://images/golden.qcow2', and nothing of it is left";
    assert_eq!(said, format!("cowslip: Cancelled: {left}"));
    store.assert_nothing_is_left("golden.qcow2");
    // A kill may leave parts, of which nobody sees anything.
    signalled(store.command(&paced), Signal::KILL);
    assert!(store.object("golden.qcow2").is_none());
    let left = store.server.uploads();
    // Answers fail, and one is lost of a request that was done: the upload goes on.
    let (mut puts, mut ends) = (0, 0);
    store.server.judge(move |request| {
        puts += usize::from(request.method == "PUT");
        let is_end = request.method == "POST" && request.target.contains("uploadId");
        ends += usize::from(is_end);
        match (request.method.as_str(), puts) {
            ("PUT", 1) => WebFault::Status(503, "<Error><Code>SlowDown</Code></Error>".into()),
            ("PUT", 3) => WebFault::Reset,
            _ if is_end && ends == 1 => WebFault::LostAnswer,
            _ => WebFault::Nothing,
        }
    });
    run(&mut store.command(&format!("{PLAIN} -q")));
    assert_eq!(store.server.uploads(), left);
    std::fs::write(
        store.path().join("got.qcow2"),
        store.object("golden.qcow2").unwrap(),
    )
    .unwrap();
    assert_is_golden(&store, "got.qcow2");
    // Other bytes come back than those that were stored.
    store
        .server
        .judge(|request| match (request.method.as_str(), &request.range) {
            ("GET", Some(range)) if range.start == PART => WebFault::OtherBytes,
            _ => WebFault::Nothing,
        });
    let other = PLAIN.replace("golden.qcow2", "other.qcow2");
    let said = store.refused(&other);
    assert!(said.contains("it is removed"), "{said}");
    assert!(store.object("other.qcow2").is_none());
    run(&mut store.command(&format!("{other} -q --no-read-back")));
    assert!(store.object("other.qcow2") == store.object("golden.qcow2"));
    // A refused part ends the upload, and what is there of it goes.
    store
        .server
        .judge(|request| match request.target.contains("partNumber=3") {
            true => WebFault::Status(403, "<Error><Code>AccessDenied</Code></Error>".into()),
            false => WebFault::Nothing,
        });
    let said = store.refused(&PLAIN.replace("golden.qcow2", "third.qcow2"));
    assert!(said.contains("AccessDenied"), "{said}");
    assert!(store.object("third.qcow2").is_none());
    assert_eq!(store.server.uploads(), left);
}

#[test]
fn an_object_of_another_program_stays() {
    let store = Store::new();
    // Ours is there, and is read back at this rate.
    let mut publish = store.command(&format!("{PLAIN} -q --rate-limit 24M"));
    let publish = publish.stderr(Stdio::piped()).spawn().unwrap();
    while store.object("golden.qcow2").is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let theirs = WebObject::tagged(b"theirs".to_vec(), "theirs");
    store.server.put("/images/golden.qcow2", theirs);
    let ended = publish.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("another program has replaced it"), "{said}");
    assert_eq!(store.object("golden.qcow2").unwrap(), b"theirs");
}

#[test]
fn what_a_plain_image_cannot_be_is_refused() {
    let store = Store::new();
    let to = "golden.raw s3://images/x.qcow2";
    for (line, said) in [
        (format!("publish -O vmdk {to}"), "takes qcow2"),
        (
            format!("publish -O qcow2 -o backing_file=b,backing_fmt=raw {to}"),
            "cannot have a backing file",
        ),
        (
            format!("publish -O qcow2 -o cluster_size=3 {to}"),
            "Cluster size must be",
        ),
        (format!("publish -O qcow2 -o wrong=1 {to}"), "wrong"),
        (
            "publish -O qcow2 golden.raw https://host/x".to_string(),
            "takes no uploads",
        ),
        (
            "publish -O qcow2 golden.raw ftp://host/x".to_string(),
            "scheme 'ftp'",
        ),
        (
            "publish -O qcow2 missing.raw s3://images/x".to_string(),
            "Could not open 'missing.raw'",
        ),
    ] {
        let refused = store.refused(&line);
        assert!(refused.contains(said), "{line}: {refused}");
    }
    store.assert_nothing_is_left("x.qcow2");
}
