//! Images on a web server, by all commands that open images.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.
#![cfg(feature = "remote")]

use std::path::Path;

use cowslip_testbed::web::{WebLink, WebObject, WebServer};

use crate::support::golden_image::Golden;
use crate::support::server::Server;
use crate::support::{outcome, run};

fn golden() -> Golden {
    Golden::new(
        "/golden.qcow2",
        "-c write__-P__1__0__1M -c write__-P__2__3M__64k",
    )
}

impl Golden {
    fn ours(&self, line: &str) -> String {
        run(&mut self.command(line))
    }

    /// Exit code and standard error.
    fn verdict(&self, line: &str) -> (Option<i32>, String) {
        let output = outcome(&mut self.command(line));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    }
}

#[test]
fn every_command_reads_an_image_at_a_url() {
    let golden = golden();
    let info = golden.ours("info URL");
    assert!(
        info.contains("file format: qcow2") && info.contains("4 MiB"),
        "{info}"
    );
    assert!(
        golden
            .ours("compare URL golden.qcow2")
            .contains("identical")
    );
    golden.ours("check URL");
    golden.ours("convert -O raw URL local.raw");
    golden.ours("compare -F raw golden.qcow2 local.raw");
    golden.ours("measure -O qcow2 URL");
    assert!(golden.ours("map URL").contains("/golden.qcow2"));
    golden.ours("dd if=URL of=part.raw bs=64k count=2");
    golden.ours("io -r -c read__-P__2__3M__64k URL");
    golden.ours("qemu-img info URL");
    golden.ours("info --image-opts driver=qcow2,file.driver=http,file.url=URL,file.readahead=256k,file.timeout=5");
    golden.ours(
        "info json:{\"file.driver\":\"http\",\"file.filename\":\"URL\",\"file.sslverify\":false}",
    );
}

/// A read that takes longer than the one that measures the distance holds up nothing.
#[test]
fn an_image_behind_a_slow_link_is_converted() {
    let golden = golden();
    golden.server.limit(WebLink {
        latency: std::time::Duration::from_millis(25),
        bytes_per_second: 0,
    });
    golden.ours("convert -O raw URL local.raw");
    golden.server.limit(WebLink::default());
    golden.ours("compare -F raw URL local.raw");
}

#[test]
fn overlays_stand_on_an_image_at_a_url() {
    let golden = golden();
    golden.ours("create -q -f qcow2 -b URL -F qcow2 vm.qcow2");
    let chain = golden.ours("info --backing-chain vm.qcow2");
    assert!(
        chain.contains(&golden.server.url("/golden.qcow2")),
        "{chain}"
    );
    golden.ours(
        "io -c read__-P__1__0__1M -c write__-P__7__512k__64k -c read__-P__7__512k__64k vm.qcow2",
    );
    // What is read through copy-on-read needs no server afterwards.
    golden.ours("io -C -c read__-P__2__3M__64k vm.qcow2");
    golden.server.forget();
    golden.ours("rebase -b URL -F qcow2 vm.qcow2");
    golden.ours("convert -O qcow2 vm.qcow2 flat.qcow2");
    golden.ours("compare vm.qcow2 flat.qcow2");
    golden.ours("check vm.qcow2");
}

#[test]
fn a_disk_in_a_registry_is_an_image() {
    let golden = golden();
    let bytes = std::fs::read(golden.path().join("golden.qcow2")).unwrap();
    // No part of a blob can be compared with its digest.
    let digest = format!("sha256:{}", "0a".repeat(32));
    let manifest = format!(
        "{{\"layers\":[{{\"mediaType\":\"a/b\",\"digest\":\"{digest}\",\"size\":{}}}]}}",
        bytes.len()
    );
    let put = |path: &str, bytes: Vec<u8>| {
        golden.server.put(path, WebObject::tagged(bytes, "any"));
    };
    put("/v2/disks/golden/manifests/7", manifest.into_bytes());
    put(&format!("/v2/disks/golden/blobs/{digest}"), bytes);
    let oci = golden
        .server
        .url("/disks/golden:7")
        .replace("http://", "oci://");
    golden.ours(&format!("create -q -f qcow2 -b {oci} -F qcow2 vm.qcow2"));
    golden.ours("io -c read__-P__2__3M__64k -c write__-P__7__512k__64k vm.qcow2");
    golden.ours(&format!("compare {oci} golden.qcow2"));
    let mut cached = golden.command(&format!("convert -O raw {oci} local.raw"));
    run(cached.env("COWSLIP_CACHE", golden.path().join("cache")));
    golden.ours("compare -F raw golden.qcow2 local.raw");
    assert!(golden.ours("cache list --dir cache").contains(&digest));
    let (code, text) = golden.verdict(&format!("info {oci}.none"));
    let missing = "disks/golden:7.none': the server answers '404 Not Found'";
    assert!(code == Some(1) && text.contains(missing), "{text}");
    let (code, text) = golden.verdict(&format!("publish golden.qcow2 {oci}/x"));
    assert!(code == Some(1) && text.contains("in a registry"), "{text}");
}

#[test]
fn what_cannot_be_is_said() {
    let golden = golden();
    let refused = |line: &str, why: &str| {
        let (code, text) = golden.verdict(line);
        assert!(
            code == Some(1) && text.contains(why),
            "{line}: {code:?} {text}"
        );
    };
    refused("io -c write__0__4k URL", "http objects are read-only");
    refused(
        "convert -O raw golden.qcow2 URL",
        "Protocol driver 'http' does not support image creation",
    );
    refused(
        "create -f qcow2 URL 1M",
        "Protocol driver 'http' does not support image creation",
    );
    refused("info URL.none", "the server answers '404 Not Found'");
    refused("info http://", "Invalid URL");
    refused(
        "info --image-opts driver=http,url=URL,nonsense=1",
        "nonsense",
    );
    let missing = "/golden.qcow2.none': the server answers '404 Not Found'";
    refused("create -f qcow2 -b URL.none -F qcow2 vm.qcow2", missing);
    golden.ours("create -q -u -f qcow2 -b URL.none -F qcow2 vm.qcow2 4M");
    for line in [
        "io -c read__0__512 vm.qcow2",
        "convert -O raw vm.qcow2 x.raw",
        "map vm.qcow2",
    ] {
        refused(line, missing);
    }
    golden.ours("create -q -f qcow2 -b URL -F qcow2 vm.qcow2");
    refused(
        "map --backing-policy same-directory vm.qcow2",
        "the backing policy 'same-directory' forbids that",
    );
}

/// An image may name what is read, and no files that are made or emptied.
#[test]
fn the_header_of_an_image_chooses_no_file_that_is_written() {
    let golden = golden();
    let option = "cache-dir";
    let backing = format!(
        "json:{{\"driver\":\"http\",\"url\":\"URL\",\"{option}\":\"{}/precious\"}}",
        golden.path().display()
    );
    golden.ours(&format!(
        "create -q -u -f qcow2 -b {backing} -F qcow2 evil.qcow2 4M"
    ));
    // What the command line itself names may have been made.
    drop(std::fs::remove_dir_all(golden.path().join("precious")));
    std::fs::write(golden.path().join("precious"), "data").unwrap();
    let (code, text) = golden.verdict("io -r -c read__0__64k evil.qcow2");
    let why = format!("'{option}' in the description of its backing file");
    assert!(code == Some(1) && text.contains(&why), "{code:?} {text}");
    assert_eq!(
        std::fs::read(golden.path().join("precious")).unwrap(),
        b"data"
    );
}

#[test]
fn an_image_that_changes_is_an_error_for_the_guest() {
    let golden = golden();
    golden.ours("create -q -f qcow2 -b URL -F qcow2 vm.qcow2");
    let socket = golden.path().join("s");
    let mut serve = golden.command("serve --socket s --sandbox off vm.qcow2");
    let said = golden.path().join("said");
    serve.stderr(std::fs::File::create(&said).unwrap());
    let server = Server::start(&mut serve, &socket);
    golden.ours(&format!(
        "io -r -f raw -c read__-P__1__0__64k {}",
        server.uri()
    ));
    golden
        .server
        .put("/golden.qcow2", WebObject::tagged(vec![9; 4 << 20], "v2"));
    let (code, text) = golden.verdict(&format!(
        "io -r -f raw -c read__-P__2__3M__64k {}",
        server.uri()
    ));
    assert!(code == Some(1) || text.contains("error"), "{code:?} {text}");
    // Once, whatever is reported otherwise.
    let said = std::fs::read_to_string(said).unwrap();
    let url = golden.server.url("/golden.qcow2");
    let words = format!("{url}: it has changed since it was opened, and reads of it fail");
    assert_eq!(said.matches(&words).count(), 1, "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// The sandbox leaves what a remote image needs: it connects again after the server was away, and
/// fills its cache.
#[test]
fn a_confined_server_reads_on_and_a_second_one_reads_from_the_cache() {
    let golden = golden();
    golden.ours("create -q -f qcow2 -b URL -F qcow2 vm.qcow2");
    let serve = |name: &str| {
        let line =
            format!("serve --socket {name} --remote-cache cache --remote-timeout 20 vm.qcow2");
        Server::start(&mut golden.command(&line), &golden.path().join(name))
    };
    let read = |server: &Server, what: &str| {
        golden.ours(&format!("io -r -f raw -c read__{what} {}", server.uri()));
    };
    let one = serve("one");
    read(&one, "-P__1__0__64k");
    golden.server.set_down(true);
    let uri = one.uri();
    std::thread::scope(|scope| {
        scope.spawn(|| golden.ours(&format!("io -r -f raw -c read__-P__2__3M__64k {uri}")));
        std::thread::sleep(std::time::Duration::from_millis(400));
        golden.server.set_down(false);
    });
    drop(one);
    golden.server.forget();
    let two = serve("two");
    read(&two, "-P__1__0__64k");
    read(&two, "-P__2__3M__64k");
    assert!(
        golden.server.sent() < 16,
        "{} bytes again",
        golden.server.sent()
    );
    let list = golden.ours("cache list --dir cache --json");
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["images"][0]["url"], golden.server.url("/golden.qcow2"));
    assert_eq!(list["images"][0]["etag"], "\"v1\"");
    assert_eq!(list["images"][0]["in-use"], true);
}

/// Puts the files below a directory on a server, as the objects of a bucket.
fn put_all(server: &WebServer, (directory, bucket): (&Path, &str)) {
    let mut folders = vec![directory.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let key = path.strip_prefix(directory).unwrap().display();
            let bytes = std::fs::read(&path).unwrap();
            server.put(&format!("/{bucket}/{key}"), WebObject::tagged(bytes, "v1"));
        }
    }
}

/// Connections end when the server confines itself, so these are made afterwards: to a store whose
/// address the environment names, for an object as an image, and for a published disk.
#[test]
fn a_confined_server_reads_objects_and_published_disks_of_a_store() {
    let golden = golden();
    let published = golden.ours("publish --json golden.qcow2 store/golden");
    let published: serde_json::Value = serde_json::from_str(&published).unwrap();
    let name = published["filename"].as_str().unwrap();
    put_all(&golden.server, (&golden.path().join("store"), "images"));
    let plain = std::fs::read(golden.path().join("golden.qcow2")).unwrap();
    let object = WebObject::tagged(plain, "v1");
    golden.server.put("/images/golden.qcow2", object);
    let of_store = |line: &str| {
        let mut command = golden.command(line);
        command
            .env("AWS_ENDPOINT_URL", golden.server.url(""))
            .env("AWS_ACCESS_KEY_ID", "id")
            .env("AWS_SECRET_ACCESS_KEY", "key")
            .env("HOME", golden.path());
        command
    };
    let digest = name.rsplit_once('@').unwrap().1;
    let published = format!("-f raw published:s3://images/golden@{digest}");
    for (socket, image) in [("a", "s3://images/golden.qcow2"), ("b", &*published)] {
        let line = format!("serve --read-only --socket {socket} {image}");
        let server = Server::start(&mut of_store(&line), &golden.path().join(socket));
        let read = "io -r -f raw -c read__-P__1__0__1M -c read__-P__2__3M__64k";
        golden.ours(&format!("{read} {}", server.uri()));
    }
}

#[test]
fn the_cache_is_listed_verified_and_pruned() {
    let golden = golden();
    golden.ours("convert --remote-cache cache -O raw URL local.raw");
    let list = golden.ours("cache list --dir cache");
    assert!(
        list.contains("/golden.qcow2 (ETag") && list.contains("1 images take"),
        "{list}"
    );
    assert!(
        golden
            .ours("cache verify --dir cache")
            .contains(", 0 damaged")
    );
    let data = std::fs::read_dir(golden.path().join("cache")).unwrap();
    let mut data = data.map(|entry| entry.unwrap().path());
    let data = data
        .find(|path| path.extension().unwrap() == "data")
        .unwrap();
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(data).unwrap();
    file.write_all_at(b"damage", 1000).unwrap();
    let mut verify = golden.command("cache verify --json");
    let output = outcome(verify.env("COWSLIP_CACHE", golden.path().join("cache")));
    assert_eq!(output.status.code(), Some(2));
    let verified: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        verified["images"][0]["damaged-offsets"],
        serde_json::json!([0])
    );
    golden.ours("compare --remote-cache cache -F raw URL local.raw");
    let pruned = golden.ours("cache prune --dir cache --all");
    assert!(
        pruned.starts_with("removed ") && pruned.ends_with("0 B are taken\n"),
        "{pruned}"
    );
    assert_eq!(golden.verdict("cache list --dir none").0, Some(1));
}

#[test]
fn a_daemon_opens_images_at_urls() {
    let golden = golden();
    golden.ours("create -q -f qcow2 -b URL -F qcow2 vm.qcow2");
    let socket = golden.path().join("n");
    let line = "daemon --blockdev driver=http,node-name=web,url=URL,readahead=65536 \
                --blockdev driver=qcow2,node-name=golden,file=web \
                --nbd-server addr.type=unix,addr.path=n \
                --export type=nbd,id=e,node-name=golden,name=";
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let server = Server::start(&mut golden.command(&line), &socket);
    golden.ours(&format!(
        "io -r -f raw -c read__-P__2__3M__64k {}",
        server.uri()
    ));
}
