//! Images in Ceph RBD, by all commands that open or make images, through Ceph's libraries over
//! plain files. With a cluster: `cargo xtask ceph`.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.
#![cfg(feature = "rbd")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_testbed::ceph::FakeCeph;

use crate::support::running::Running;
use crate::support::server::Server;
use crate::support::{cowslip, eventually, outcome, run, scratch};

/// A cluster with a raw golden image of 4 MiB in its pool `rbd`, and the same image locally.
struct Cluster {
    dir: crate::support::Scratch,
    ceph: FakeCeph,
}

/// A cluster; `None` where there is no C compiler, which is said.
fn cluster() -> Option<Cluster> {
    let dir = scratch();
    let Some(ceph) = FakeCeph::make(&dir.path().join("ceph")).unwrap() else {
        eprintln!("SKIPPED: not installed: cc");
        return None;
    };
    let cluster = Cluster { dir, ceph };
    cluster.ours("create -q -f raw golden.raw 4M");
    cluster.ours("io -f raw -c write__-P__1__0__1M -c write__-P__2__3M__64k golden.raw");
    cluster.ours("convert -f raw -O raw golden.raw rbd:rbd/golden");
    let snapshot = cluster.ceph.image("rbd/golden@v1");
    std::fs::copy(cluster.ceph.image("rbd/golden"), snapshot).unwrap();
    Some(cluster)
}

impl Cluster {
    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A command line; words that belong together are joined by `__`.
    fn command(&self, line: &str) -> Command {
        let mut command = cowslip();
        let words = line.split(' ').map(|word| word.replace("__", " "));
        command.current_dir(self.path()).args(words);
        command.env("COWSLIP_RBD_LIBRARIES", self.ceph.directory());
        command.env_remove("COWSLIP_REMOTE_TIMEOUT");
        command
    }

    fn ours(&self, line: &str) -> String {
        run(&mut self.command(line))
    }

    fn refused(&self, line: &str, why: &str) {
        let output = outcome(&mut self.command(line));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {text}");
        assert!(text.contains(why), "{line}: {text}");
    }

    /// Checks that the libraries were used as they may be, and that all that was opened was closed.
    fn check(&self) {
        let calls = self.ceph.calls().unwrap();
        let count = |begins: &str| calls.iter().filter(|call| call.starts_with(begins)).count();
        assert_eq!(count("FORBIDDEN"), 0, "{calls:?}");
        assert_eq!(count("rados_create"), count("rados_shutdown"), "{calls:?}");
    }
}

#[test]
fn every_command_opens_an_image_in_ceph() {
    let Some(cluster) = cluster() else { return };
    let info = cluster.ours("info rbd:rbd/golden");
    assert!(
        info.contains("file format: raw") && info.contains("4 MiB"),
        "{info}"
    );
    assert!(info.contains("protocol type: rbd"), "{info}");
    cluster.ours("compare -f raw -F raw golden.raw rbd:rbd/golden");
    let map = cluster.ours("map --output=json -f raw rbd:rbd/golden");
    let zeroes =
        r#""start": 1048576, "length": 2097152, "depth": 0, "present": true, "zero": true"#;
    assert!(map.contains(zeroes), "{map}");
    cluster.ours("convert -O qcow2 rbd:rbd/golden@v1 local.qcow2");
    cluster.ours("compare -F raw local.qcow2 golden.raw");
    cluster.ours("dd if=rbd:rbd/golden of=part.raw bs=64k count=2");
    cluster.ours("measure -O qcow2 rbd:rbd/golden");
    cluster.ours("qemu-img info rbd:rbd/golden");
    for line in [
        "info --image-opts driver=rbd,pool=rbd,image=golden,snapshot=v1",
        "info --image-opts driver=raw,file.driver=rbd,file.pool=rbd,file.image=golden,file.server.0.host=::1",
        "info json:{\"driver\":\"rbd\",\"pool\":\"rbd\",\"image\":\"golden\",\"server\":[{\"host\":\"a\",\"port\":\"1\"}]}",
    ] {
        assert!(cluster.ours(line).contains("4 MiB"), "{line}");
    }
    cluster.ours("info --object secret,id=k,data=SECRET --image-opts driver=rbd,pool=rbd,image=golden,key-secret=k");
    let calls = cluster.ceph.calls().unwrap();
    for call in [
        "rados_conf_set mon_host=[::1]",
        "rados_conf_set mon_host=a:1",
        "rados_conf_set key=SECRET",
    ] {
        assert!(calls.iter().any(|made| made == call), "{call}");
    }
    cluster.check();
}

#[test]
fn images_in_ceph_are_made_written_and_resized() {
    let Some(cluster) = cluster() else { return };
    cluster.ours("create -q -f qcow2 rbd:rbd/vm.qcow2 8M");
    cluster.ours(
        "io -c write__-P__5__1M__300k -c write__-z__1M__64k -c discard__2M__1M rbd:rbd/vm.qcow2",
    );
    cluster.ours("io -r -c read__-P__5__1088k__200k -c read__-P__0__1M__64k rbd:rbd/vm.qcow2");
    cluster.ours("check rbd:rbd/vm.qcow2");
    cluster.ours("resize rbd:rbd/vm.qcow2 +8M");
    cluster.ours("snapshot -c one rbd:rbd/vm.qcow2");
    cluster.ours("convert -f raw -O qcow2 golden.raw rbd:rbd/copy");
    cluster.ours("compare -F raw rbd:rbd/copy golden.raw");
    cluster.ours("check rbd:rbd/copy");
    // A raw one, at the length that it is to have, into an image that exists too.
    cluster.ours("resize -q -f raw rbd:rbd/golden 6M");
    cluster.ours("io -f raw -c write__-P__9__5M__1M rbd:rbd/golden");
    cluster.ours("convert -f raw -O raw golden.raw rbd:rbd/golden");
    let image = cluster.ceph.image("rbd/golden");
    let local = std::fs::read(cluster.path().join("golden.raw")).unwrap();
    assert!(std::fs::read(image).unwrap() == local);
    cluster.refused(
        "convert -f raw -O raw golden.raw rbd:rbd/golden@v1",
        "does not support image creation",
    );
    cluster.refused(
        "io -f raw -c write__0__4k rbd:rbd/golden@v1",
        "the snapshot 'v1' cannot be written",
    );
    cluster.refused("create -f raw rbd:none/x 1M", "Ceph has no pool 'none' (-2");
    cluster.check();
}

#[test]
fn a_local_overlay_on_a_golden_image_is_served() {
    let Some(cluster) = cluster() else { return };
    cluster.ours("create -q -f qcow2 -b rbd:rbd/golden@v1 -F raw vm.qcow2");
    let chain = cluster.ours("info --backing-chain vm.qcow2");
    assert!(chain.contains("image: rbd:rbd/golden@v1"), "{chain}");
    // Its files are opened by each call: the libraries over plain files need more than Ceph's.
    let mut command = cluster.command("serve --sandbox=off -k socket vm.qcow2");
    let server = Server::start(&mut command, &cluster.path().join("socket"));
    let uri = server.uri();
    cluster.ours(&format!(
        "io -f raw -c read__-P__1__0__1M -c read__-P__2__3M__64k -c write__-P__7__512k__100k -c read__-P__7__512k__100k {uri}"
    ));
    server.stop();
    let calls = cluster.ceph.calls().unwrap();
    assert!(
        !calls.iter().any(|call| call.starts_with("aio_w 524288")),
        "{calls:?}"
    );
    cluster.ours("io -f raw -r -c read__-P__1__0__1M rbd:rbd/golden@v1");
    cluster.ours("convert -O qcow2 vm.qcow2 flat.qcow2");
    cluster.ours("compare vm.qcow2 flat.qcow2");
    cluster.check();
}

#[test]
fn images_choose_no_files_of_ceph() {
    let Some(cluster) = cluster() else { return };
    let conf = cluster.ceph.directory().join("ceph.conf");
    std::fs::write(cluster.path().join("guest.conf"), "mon_host = a\n").unwrap();
    // Named by the user it is read.
    let named = format!("info rbd:rbd/golden:conf={}", conf.display());
    cluster.ours(&named);
    for option in ["conf=guest.conf", "log_file=log", "admin_socket=socket"] {
        let why = match option.starts_with("conf") {
            true => "'conf' in the description of its backing file is not supported",
            false => "'SETTING=VALUE' in the description of its backing file is not supported",
        };
        let name = format!("rbd:rbd/golden@v1:{option}");
        cluster.ours(&format!(
            "create -q -u -f qcow2 -b {name} -F raw evil.qcow2 4M"
        ));
        cluster.refused("io -c read__0__4k evil.qcow2", why);
    }
    cluster.ours("create -q -u -f qcow2 -b rbd:rbd/golden@v1:id=me -F raw vm.qcow2 4M");
    cluster.ours("io -c read__-P__1__0__4k vm.qcow2");
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let dir = scratch();
    std::fs::write(dir.path().join("a.raw"), [0; 512]).unwrap();
    for line in [
        "info rbd:pool/image",
        "convert -O raw rbd:pool/image new.raw",
        "convert -f raw -O raw a.raw rbd:pool/image",
        "create -f raw rbd:pool/image 1M",
    ] {
        let mut command = cowslip();
        command.current_dir(dir.path()).args(line.split(' '));
        command.env("COWSLIP_RBD_LIBRARIES", dir.path());
        let output = outcome(&mut command);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {text}");
        for words in [
            "librados.so.2",
            "install librbd1, or map it as a block device: rbd device map pool/image",
        ] {
            assert!(text.contains(words), "{line}: {text}");
        }
    }
}

/// A server ends within seconds of its signal, although the cluster owes it an answer; its overlay
/// is closed in order.
#[test]
fn a_server_whose_cluster_does_not_answer_ends_soon() {
    let Some(cluster) = cluster() else { return };
    cluster.ours("create -q -f qcow2 -b rbd:rbd/golden@v1 -F raw vm.qcow2");
    let mut command = cluster.command("serve --sandbox=off -k socket vm.qcow2");
    let server = Server::start(&mut command, &cluster.path().join("socket"));
    let uri = server.uri();
    cluster.ours(&format!("io -f raw -c write__-P__7__0__64k {uri}"));
    cluster.ceph.put("hold", "").unwrap();
    let mut reading = cluster.command(&format!("io -r -f raw -c read__1M__64k {uri}"));
    let mut reading = Running::start(reading.stdout(Stdio::null()).stderr(Stdio::null()));
    eventually("the guest waits", || {
        let calls = cluster.ceph.calls().unwrap();
        calls.iter().any(|call| call.starts_with("aio_r 1048576"))
    });
    let begun = Instant::now();
    server.stop();
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    reading.wait().unwrap();
    cluster.ceph.remove("hold").unwrap();
    cluster.ours("check vm.qcow2");
    cluster.ours("io -c read__-P__7__0__64k vm.qcow2");
}

/// A program does not hang at its end on a cluster that has gone.
#[test]
fn a_cluster_that_is_gone_holds_nothing_up_for_long() {
    let Some(cluster) = cluster() else { return };
    cluster.ceph.put("deaf", "").unwrap();
    let begun = Instant::now();
    cluster.refused(
        "--remote-timeout 1 info rbd:rbd/golden",
        "Ceph has not opened image 'golden' of pool 'rbd' within 1 seconds",
    );
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}
