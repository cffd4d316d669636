//! The server in its sandbox: every operation works on both I/O engines, every thread is confined,
//! the socket's name goes at the end, `--sandbox=off` is what it says, and so are `on` and `auto`
//! where the kernel lacks something.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::env;
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use cowslip_nbd::export::{Durability, Space, ZeroOptions};
use cowslip_nbd::{Client, ConnectOptions};
use cowslip_queue::{Backend, Buf, BufMut, Queue, Stream};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::support::{cowslip, eventually, run, scratch, succeeds};

/// `(Seccomp, NoNewPrivs)` of every thread.
fn confinement(server: &Child) -> Vec<(String, String)> {
    let tasks = fs::read_dir(format!("/proc/{}/task", server.id())).unwrap();
    let status = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let of = |status: &str, field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.unwrap_or(": ?")
            .trim_start_matches([':', '\t'])
            .to_string()
    };
    status
        .map(|status| (of(&status, "Seccomp"), of(&status, "NoNewPrivs")))
        .collect()
}

fn start(directory: &Path, options: &[&str]) -> Child {
    let socket = directory.join("socket");
    let server = cowslip()
        .current_dir(directory)
        .args(["serve", "-k", "socket", "-f", "qcow2"])
        .args(options)
        .arg("top.qcow2")
        .spawn()
        .unwrap();
    // It listens before the sandbox is there; a greeting comes after.
    eventually("the server listens", || {
        UnixStream::connect(&socket).is_ok()
    });
    server
}

async fn every_operation(client: &Client, round: u64) {
    let at = round << 20;
    let read = client.read(at, BufMut::zeroed(65536)).await.unwrap();
    assert_eq!(read[100], 0);
    let data = Buf::from(vec![round as u8 + 1; 300_000]);
    client
        .write(at + 512, data.clone(), Durability::Cached)
        .await
        .unwrap();
    client
        .write(at + 512, data, Durability::Durable)
        .await
        .unwrap();
    client.flush().await.unwrap();
    let runs = client.block_status(at, 1 << 20).await.unwrap();
    assert!(runs.len() > 1, "{runs:?}");
    for (may_unmap, offset) in [(true, 0), (false, 65536)] {
        let how = ZeroOptions {
            space: Space::of_unmap(may_unmap),
            fast_only: false,
            durability: Durability::Cached,
        };
        client.write_zeroes(at + offset, 65536, how).await.unwrap();
    }
    client
        .trim(at + 131_072, 65536, Durability::Durable)
        .await
        .unwrap();
    client.cache(at, 4096).await.unwrap();
    let read = client.read(at, BufMut::zeroed(1 << 20)).await.unwrap();
    assert!(read[..196_608].iter().all(|&byte| byte == 0));
    assert!(
        read[196_608..300_512]
            .iter()
            .all(|&byte| byte == round as u8 + 1)
    );
}

fn serve_everything(options: &[&str], confined: bool) {
    let directory = scratch();
    let create = |args: &[&str]| {
        run(cowslip()
            .current_dir(directory.path())
            .args(["create", "-q", "-f", "qcow2"])
            .args(args));
    };
    create(&["base.qcow2", "64M"]);
    create(&["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]);
    let mut server = start(directory.path(), options);
    let queue = Queue::new(Backend::Threads).unwrap();
    queue.block_on(async {
        let socket = directory.path().join("socket");
        let mut clients = Vec::new();
        for _ in 0..3 {
            let stream = Stream::connect_unix(&socket).await.unwrap();
            clients.push(
                Client::connect(stream, &ConnectOptions::new(""))
                    .await
                    .unwrap(),
            );
        }
        for (client, round) in clients.iter().zip(0..) {
            every_operation(client, round).await;
        }
        let threads = confinement(&server);
        let expected = if confined { ("2", "1") } else { ("0", "0") };
        for (seccomp, no_new_privs) in &threads {
            assert_eq!((&**seccomp, &**no_new_privs), expected, "{threads:?}");
        }
        for client in clients {
            client.disconnect().await.unwrap();
        }
    });
    run(Command::new("kill").arg(server.id().to_string()));
    assert_eq!(server.wait().unwrap().code(), Some(0));
    assert!(
        !directory.path().join("socket").exists(),
        "the socket's name is left"
    );
    succeeds(directory.path(), "check -q top.qcow2");
}

#[test]
fn a_confined_server_does_everything_on_a_ring() {
    if Queue::new(Backend::Uring).is_err() {
        return eprintln!("SKIPPED: no io_uring here");
    }
    serve_everything(&["--aio", "io_uring"], true);
    serve_everything(&["--aio", "io_uring", "--cache", "none"], true);
    serve_everything(&["--aio", "io_uring", "--threads", "3"], true);
}

#[test]
fn a_confined_server_does_everything_on_threads() {
    serve_everything(&["--aio", "threads"], true);
    serve_everything(&["--aio", "threads", "--threads", "3"], true);
}

#[test]
fn a_server_is_confined_only_if_that_is_wanted() {
    serve_everything(&["--sandbox", "off"], false);
}

#[test]
fn a_server_in_the_background_is_confined_too() {
    let directory = scratch();
    succeeds(directory.path(), "create -q -f qcow2 a.qcow2 1M");
    succeeds(
        directory.path(),
        "serve -k socket --fork --pid-file pid -f qcow2 a.qcow2",
    );
    let pid = fs::read_to_string(directory.path().join("pid")).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap();
    assert!(status.contains("Seccomp:\t2"), "{status}");
    run(Command::new("kill").arg(pid.trim()));
    eventually("the socket's name is gone", || {
        !directory.path().join("socket").exists()
    });
}

/// Set for a test that runs itself again: the call that its system is to lack, and what it becomes.
const WITHOUT: &str = "COWSLIP_TEST_WITHOUT_CALL";
const ARGUMENTS: &str = "COWSLIP_TEST_ARGUMENTS";

/// In the test's second process: becomes `cowslip` on a kernel that lacks a call, as far as a
/// program can see: it gets ENOSYS. In the first process it returns.
fn become_cowslip_without_a_call() {
    let (Ok(call), Ok(arguments)) = (env::var(WITHOUT), env::var(ARGUMENTS)) else {
        return;
    };
    let filter = SeccompFilter::new(
        [(call.parse().unwrap(), Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        TargetArch::try_from(env::consts::ARCH).unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
    let error = cowslip().args(arguments.split(' ')).exec();
    panic!("not run: {error}");
}

/// A server on a kernel that lacks a call: with `on` it does not serve, with `auto` it does, and
/// either way it says what is missing.
fn serve_without(call: i64, test: &str, missing: &str) {
    let directory = scratch();
    succeeds(directory.path(), "create -q -f qcow2 a.qcow2 1M");
    let socket = directory.path().join("socket");
    let serve = |option: &str| {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "--nocapture", "--test-threads=1", test])
            .env(WITHOUT, call.to_string())
            .env(
                ARGUMENTS,
                format!("serve {option} -k socket -f qcow2 a.qcow2"),
            )
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    };
    let refused = serve("--sandbox=on").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains(missing), "{said}");
    assert!(
        said.contains("--sandbox=auto serves with what there is"),
        "{said}"
    );
    assert!(!socket.exists(), "it leaves its socket");

    for (option, warns) in [
        ("--discard=unmap", true),
        ("--sandbox=auto", true),
        ("--sandbox=off", false),
    ] {
        let mut server = serve(option).spawn().unwrap();
        let queue = Queue::new(Backend::Threads).unwrap();
        // The socket is there a moment before it is listened on.
        let mut stream = None;
        eventually("the server listens", || {
            stream = queue.block_on(Stream::connect_unix(&socket)).ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        queue.block_on(async {
            let options = ConnectOptions::new("");
            let client = Client::connect(stream, &options).await.unwrap();
            client.disconnect().await.unwrap();
        });
        run(Command::new("kill").arg(server.id().to_string()));
        let mut said = String::new();
        let mut errors = server.stderr.take().unwrap();
        errors.read_to_string(&mut said).unwrap();
        assert_eq!(server.wait().unwrap().code(), Some(0), "{said}");
        assert_eq!(said.contains(missing), warns, "{option}: {said}");
    }
}

#[test]
fn a_kernel_without_landlock_is_refused_or_told() {
    become_cowslip_without_a_call();
    serve_without(
        libc::SYS_landlock_create_ruleset,
        "serve_sandbox::a_kernel_without_landlock_is_refused_or_told",
        "sandbox: Landlock not supported by this kernel, seccomp on",
    );
}

#[test]
fn a_kernel_without_seccomp_is_refused_or_told() {
    become_cowslip_without_a_call();
    serve_without(
        libc::SYS_seccomp,
        "serve_sandbox::a_kernel_without_seccomp_is_refused_or_told",
        "seccomp failed",
    );
}
