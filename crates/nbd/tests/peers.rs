//! Our server against other clients, our client against other servers. Skips loudly what is not
//! installed.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::*;
use cowslip_block::disk::MemoryDisk;
use cowslip_nbd::export::{Durability, Space, ZeroOptions};
use cowslip_nbd::protocol::OptionCode;
use cowslip_nbd::{Client, Export, Server, ServerEvent, ServerOptions};
use cowslip_queue::{Backend, Buf, BufMut, Stream};

/// Runs a program that must succeed and returns what it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{stdout}{stderr}",
        output.status
    );
    stdout
}

fn golden_and_default() -> Running {
    let mut server = Server::new(ServerOptions::default());
    server.add_export("", Arc::new(MemoryDisk::new("memory", 16 << 20)));
    let golden = Arc::new(MemoryDisk::new("golden", 5_000_000).read_only());
    let golden = Export {
        description: "a golden image".into(),
        ..golden.into()
    };
    server.add_export("golden", golden);
    Running::start(Backend::Auto, server)
}

#[test]
fn nbdinfo_and_qemu_nbd_list_our_exports() {
    let running = golden_and_default();
    if installed("nbdinfo") {
        let output = run("nbdinfo", &["--list", &running.uri()]);
        for line in [
            "export=\"golden\":",
            "description: a golden image",
            "export-size: 5000000",
            "is_read_only: true",
            "can_fast_zero: true",
            "block_size_maximum: 33554432",
            "base:allocation",
        ] {
            assert!(output.contains(line), "{line} in {output}");
        }
        let size = run("nbdinfo", &["--size", &running.uri()]);
        assert_eq!(size.trim(), "16777216");
    }
    if installed("qemu-nbd") {
        let path = running.path.to_str().unwrap();
        let output = run("qemu-nbd", &["-L", "-k", path]);
        for line in [
            "exports available: 2",
            " export: 'golden'",
            "  description: a golden image",
            "   base:allocation",
        ] {
            assert!(output.contains(line), "{line} in {output}");
        }
    }
}

#[test]
fn qemu_io_reads_what_it_wrote() {
    if !installed("qemu-io") {
        return;
    }
    let running = golden_and_default();
    let output = run(
        "qemu-io",
        &[
            "-f",
            "raw",
            &running.uri(),
            "-c",
            "write -P 7 1000 1M",
            "-c",
            "write -z -u 64k 64k",
            "-c",
            "write -z 128k 100",
            "-c",
            "write -z -n 256k 4k",
            "-c",
            "write -f -P 8 5M 4k",
            "-c",
            "discard 512k 64k",
            "-c",
            "flush",
            "-c",
            "read -P 7 1000 64536",
            "-c",
            "read -P 0 64k 64k",
            "-c",
            "read -P 0 128k 100",
            "-c",
            "read -P 7 131172 1000",
            "-c",
            "read -P 8 5M 4k",
            "-c",
            "aio_write -P 9 8M 4M",
            "-c",
            "aio_read -P 0 15M 1M",
            "-c",
            "aio_flush",
            "-c",
            "read -P 9 8M 4M",
        ],
    );
    assert!(!output.contains("Pattern verification failed"), "{output}");
    assert!(!output.contains("failed"), "{output}");
}

#[test]
fn qemu_io_agrees_on_extended_headers_and_zeroes_more_than_32_bits_say() {
    if !installed("qemu-io") {
        return;
    }
    let asked = Arc::new(AtomicBool::new(false));
    let mut server = Server::new(ServerOptions::default());
    server.add_export("", Arc::new(MemoryDisk::new("memory", 20 << 30)));
    server.observe({
        let asked = Arc::clone(&asked);
        move |event| {
            if let ServerEvent::Option { option, .. } = event
                && *option == OptionCode::ExtendedHeaders
            {
                asked.store(true, Ordering::Relaxed);
            }
        }
    });
    let running = Running::start(Backend::Auto, server);
    let commands = [
        "write -P 7 9G 1M",
        "write -z -n -u 1G 9G",
        "read -P 0 9G 1M",
        "write -P 8 5G 64k",
        "read -P 8 5G 64k",
        "discard 0 1G",
        "map",
        "flush",
    ];
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let words: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).collect();
    let output = run("qemu-io", &[&words[..], &[&running.uri()]].concat());
    assert!(!output.contains("failed"), "{output}");
    assert!(asked.load(Ordering::Relaxed), "they were not asked for");
}

#[test]
fn copies_through_us_are_equal() {
    let running = golden_and_default();
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    let mut random = Random(77);
    let mut bytes = vec![0u8; 16 << 20];
    // Data, holes and small pieces.
    for _ in 0..60 {
        let start = random.below(15 << 20) as usize;
        let len = random.below(400_000) as usize;
        bytes[start..start + len].fill_with(|| random.next() as u8);
    }
    std::fs::write(&source, &bytes).unwrap();
    let copy = directory.path().join("copy");
    let name = |path: &Path| path.to_str().unwrap().to_owned();
    if installed("nbdcopy") {
        run("nbdcopy", &[&name(&source), &running.uri()]);
        run("nbdcopy", &[&running.uri(), &name(&copy)]);
        assert!(
            std::fs::read(&copy).unwrap() == bytes,
            "nbdcopy's copy differs"
        );
        run(
            "nbdcopy",
            &["-S", "0", "--flush", &name(&source), &running.uri()],
        );
    }
    if installed("qemu-img") {
        let raw = ["-f", "raw", "-O", "raw"];
        let to_us = ["convert", "-n", &name(&source), &running.uri()];
        run("qemu-img", &[&to_us[..2], &raw, &to_us[2..]].concat());
        run(
            "qemu-img",
            &[
                "compare",
                "-f",
                "raw",
                "-F",
                "raw",
                &name(&source),
                &running.uri(),
            ],
        );
        let from_us = ["convert", &running.uri(), &name(&copy)];
        run("qemu-img", &[&from_us[..1], &raw, &from_us[1..]].concat());
        assert!(
            std::fs::read(&copy).unwrap() == bytes,
            "qemu-img's copy differs"
        );
    }
}

#[test]
fn nbdinfo_maps_our_allocation() {
    if !installed("nbdinfo") || !installed("qemu-io") {
        return;
    }
    let running = golden_and_default();
    run(
        "qemu-io",
        &["-f", "raw", &running.uri(), "-c", "write 64k 64k"],
    );
    let output = run("nbdinfo", &["--map", &running.uri()]);
    let fields: Vec<Vec<&str>> = output
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let expected = [
        vec!["0", "65536", "3", "hole,zero"],
        vec!["65536", "65536", "0", "data"],
        vec!["131072", "16646144", "3", "hole,zero"],
    ];
    assert_eq!(fields, expected);
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !installed("fio") {
        return;
    }
    let engines = run("fio", &["--enghelp"]);
    if !engines.contains("nbd") {
        eprintln!("SKIPPED: this fio has no nbd engine");
        return;
    }
    for backend in BACKENDS {
        let running = Running::with_export(backend, Arc::new(MemoryDisk::new("memory", 64 << 20)));
        let uri = format!("--uri={}", running.uri());
        // Fio leaves its verification state where it runs.
        let directory = tempfile::tempdir().unwrap();
        let output = Command::new("fio")
            .current_dir(directory.path())
            .args(["--name=verify", "--ioengine=nbd", &uri, "--rw=randwrite"])
            .args(["--bsrange=512-64k", "--iodepth=32", "--size=64M"])
            .args(["--verify=crc32c", "--verify_fatal=1", "--randrepeat=1"])
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{stdout}");
    }
}

/// A foreign server, until dropped.
struct Foreign(Child);

impl Foreign {
    fn start(program: &str, arguments: &[&str], socket: &Path) -> Foreign {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        eventually("the server listens", || socket.exists());
        Foreign(child)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Whether a foreign server has extended headers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extended {
    Yes,
    Perhaps,
}

fn use_foreign_server(socket: &Path, export: &str, extended: Extended) {
    queue(Backend::Auto).unwrap().block_on(async {
        let client = connect_with_patience(socket, export).await;
        assert_eq!(client.size(), 8 << 20);
        assert!(extended == Extended::Perhaps || client.export().extended_headers);
        let data = Buf::copy_of(&[5; 100_000]);
        let writes: Vec<_> = (0..50)
            .map(|nth| client.write(nth * 100_000, data.clone(), Durability::Cached))
            .collect();
        for write in writes {
            write.await.unwrap();
        }
        let how = ZeroOptions {
            space: Space::Release,
            durability: Durability::Durable,
            fast_only: false,
        };
        client.write_zeroes(1 << 20, 1 << 20, how).await.unwrap();
        client
            .trim(7 << 20, 4096, Durability::Cached)
            .await
            .unwrap();
        client.flush().await.unwrap();
        let buf = client.read(0, BufMut::zeroed(5_000_000)).await.unwrap();
        for (at, &byte) in buf.iter().enumerate() {
            let zeroed = (1 << 20..2 << 20).contains(&at);
            assert_eq!(byte, if zeroed { 0 } else { 5 }, "at {at}");
        }
        if client.export().contexts.is_empty() {
            eprintln!("this server has no block status");
        } else {
            let extents = client.block_status(0, 8 << 20).await.unwrap();
            assert!(extents.iter().map(|extent| extent.len).sum::<u64>() <= 8 << 20);
        }
        client.disconnect().await.unwrap();
        let stream = Stream::connect_unix(socket).await.unwrap();
        let exports = Client::list(stream, None).await.unwrap();
        assert_eq!((&*exports[0].name, exports[0].size), (export, 8 << 20));
    });
}

/// The socket of a server that has just been started may exist before it listens.
async fn connect_with_patience(socket: &Path, export: &str) -> Client {
    for _ in 0..500 {
        if Stream::connect_unix(socket).await.is_ok() {
            break;
        }
        cowslip_queue::sleep(std::time::Duration::from_millis(10)).await;
    }
    connect(socket, export).await
}

#[test]
fn our_client_uses_qemu_nbd() {
    if !installed("qemu-nbd") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::write(&image, vec![0; 8 << 20]).unwrap();
    let socket = directory.path().join("socket");
    let paths = [socket.to_str().unwrap(), image.to_str().unwrap()];
    let arguments = [
        "-t",
        "-f",
        "raw",
        "-e",
        "8",
        "-x",
        "disk",
        "--discard=unmap",
        "-k",
    ];
    let arguments = [&arguments[..], &paths].concat();
    let _server = Foreign::start("qemu-nbd", &arguments, &socket);
    // Since QEMU 8.2.
    use_foreign_server(&socket, "disk", Extended::Yes);
}

#[test]
fn our_client_uses_nbdkit() {
    if !installed("nbdkit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let path = socket.to_str().unwrap();
    let _server = Foreign::start("nbdkit", &["-f", "-U", path, "memory", "8M"], &socket);
    use_foreign_server(&socket, "", Extended::Perhaps);
}

/// The handshake of long ago, in which nothing is asked.
#[test]
fn our_client_uses_an_oldstyle_server() {
    if !installed("nbdkit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let path = socket.to_str().unwrap();
    let arguments = ["-f", "--oldstyle", "-U", path, "memory", "8M"];
    let _server = Foreign::start("nbdkit", &arguments, &socket);
    queue(Backend::Auto).unwrap().block_on(async {
        let client = connect_with_patience(&socket, "").await;
        assert_eq!(client.size(), 8 << 20);
        let data = Buf::copy_of(&[5; 100_000]);
        client.write(777, data, Durability::Cached).await.unwrap();
        // It offers flushes, too, but refuses them in this style.
        let buf = client.read(0, BufMut::zeroed(200_000)).await.unwrap();
        let is_data = |at| (777..100_777).contains(&at);
        assert!(
            buf.iter()
                .enumerate()
                .all(|(at, &byte)| (byte == 5) == is_data(at))
        );
        client.disconnect().await.unwrap();
        let stream = Stream::connect_unix(&socket).await.unwrap();
        let exports = Client::list(stream, None).await.unwrap();
        assert_eq!((&*exports[0].name, exports[0].size), ("", 8 << 20));
    });
}
