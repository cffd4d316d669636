//! The command line of `qemu-storage-daemon`: its order, its doors, and its complaints beside
//! QEMU's.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{cowslip, outcome, peers_are_installed, run, scratch};

fn daemon(dir: &Path) -> Command {
    let mut command = cowslip();
    command.current_dir(dir).arg("qemu-storage-daemon");
    command
}

/// The daemon with a monitor on its standard input and output, which are pipes.
fn monitored_by_pipes(dir: &Path) -> Child {
    daemon(dir)
        .args(["--chardev", "stdio,id=c", "--monitor", "c"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the daemon starts")
}

/// A directory with an image, `a.qcow2`.
fn with_image() -> crate::support::Scratch {
    let dir = scratch();
    let words = ["create", "-q", "-f", "qcow2", "a.qcow2", "1M"];
    run(cowslip().current_dir(dir.path()).args(words));
    dir
}

/// The exit code of a line that ends by itself, and standard error.
fn ends(command: &mut Command, words: &[&str]) -> (Option<i32>, String) {
    let output = outcome(command.args(words).stdin(Stdio::null()));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), text)
}

#[test]
fn directories_of_a_sandbox_that_is_not_asked_for_are_refused() {
    let dir = with_image();
    let words = ["--sandbox-dir", ".", "--pidfile", "pid", "--control", "c"];
    let mut own = cowslip();
    own.current_dir(dir.path()).arg("daemon");
    for mut command in [own, daemon(dir.path())] {
        let (code, text) = ends(&mut command, &words);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("without --sandbox=on"), "{text}");
    }
}

#[test]
fn reports_that_nobody_would_see_are_refused() {
    let dir = with_image();
    let mut command = cowslip();
    let words = ["daemon", "--daemonize", "--verbose", "--control", "c"];
    let (code, text) = ends(command.current_dir(dir.path()), &words);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("--verbose: in the background"), "{text}");
    assert!(!dir.path().join("c").exists());
}

#[test]
fn lines_are_refused_in_the_words_of_qemu() {
    if !peers_are_installed(&["qemu-storage-daemon"]) {
        return;
    }
    let dir = with_image();
    std::fs::write(dir.path().join("zeroes"), [0; 4096]).unwrap();
    let mut differences = Vec::new();
    for line in [
        "--bad",
        "-x",
        "--blockdev",
        "disk.img",
        "--blockdev nope",
        "--blockdev nope disk.img",
        "--blockdev nope --bad",
        "--blockdev null-co,node-name=a,b",
        "--blockdev null-co",
        "--blockdev null-co,node-name=1",
        "--blockdev null-co,node-name=a,size=x",
        "--blockdev null-co,node-name=a,foo=1",
        "--blockdev {\"driver\":\"null-co\"}",
        "--blockdev {\"driver\":1}",
        "--blockdev file,node-name=a,filename=nowhere",
        "--blockdev qcow2,node-name=a,file=b",
        "--blockdev qcow2,node-name=a,file.driver=file,file.filename=nowhere",
        "--blockdev qcow2,node-name=a,file.driver=file,file.filename=zeroes",
        "--blockdev null-co,node-name=a --blockdev null-co,node-name=a",
        "--export nbd,id=e,node-name=n --blockdev null-co,node-name=n",
        "--blockdev null-co,node-name=n --export nbd,id=e,node-name=n",
        "--export bogus,id=e,node-name=n",
        "--export nbd,node-name=n",
        "--nbd-server addr.type=bogus",
        "--nbd-server addr.type=unix",
        "--monitor c",
        "--chardev stdio,id=c --monitor c,foo=1",
        "--chardev stdio,id=c --chardev stdio,id=d",
        "--chardev path=s,id=c",
        "--chardev socket,path=s,server=on",
        "--chardev socket,path=s,server=on,wait=off,id=c,foo=1",
    ] {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut qemu = Command::new("qemu-storage-daemon");
        let theirs = ends(qemu.current_dir(dir.path()), &words);
        let ours = ends(&mut daemon(dir.path()), &words);
        if ours != theirs || ours.0 != Some(1) {
            differences.push(format!("{line}:\nours {ours:?}\nQEMU {theirs:?}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn standard_input_and_output_are_a_monitor() {
    let dir = with_image();
    let mut child = monitored_by_pipes(dir.path());
    let mut requests = child.stdin.take().unwrap();
    let mut replies = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut reply =
        || -> Value { serde_json::from_str(&replies.next().unwrap().unwrap()).unwrap() };
    assert!(reply()["QMP"]["version"].is_object());
    for (request, expected) in [
        ("qmp_capabilities", json!({"return": {}})),
        ("query-jobs", json!({"return": []})),
        ("quit", json!({"return": {}})),
    ] {
        writeln!(requests, "{}", json!({"execute": request})).unwrap();
        assert_eq!(reply(), expected);
    }
    assert!(child.wait().unwrap().success());
}

#[test]
fn replies_are_written_before_the_daemon_ends() {
    let dir = with_image();
    let mut child = monitored_by_pipes(dir.path());
    let text = r#"{"execute":"qmp_capabilities"}{"execute":"query-qmp-schema"}{"execute":"quit"}"#;
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 4);
    assert_eq!(text.lines().last(), Some(r#"{"return": {}}"#));
}

#[test]
fn options_are_followed_in_the_order_of_the_line() {
    let dir = with_image();
    // The server is there before the node, the node before its export; the line is JSON in part.
    let words = [
        "--pidfile",
        "pid",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd,max-connections=0",
        "--blockdev",
        r#"{"driver":"file","node-name":"f","filename":"a.qcow2"}"#,
        "--blockdev",
        "qcow2,node-name=n,file=f,discard=unmap",
        "--export",
        "nbd,id=e,node-name=n,name=disk,writable=on",
        "--chardev",
        "socket,id=c,path=qmp,server=on,wait=off",
        "--monitor",
        "chardev=c,mode=control",
        "--daemonize",
    ];
    // By a link of that name.
    let link = dir.path().join("qemu-storage-daemon");
    symlink(cowslip().get_program(), &link).unwrap();
    let begun = outcome(Command::new(&link).current_dir(dir.path()).args(words));
    assert!(begun.status.success(), "{begun:?}");
    // All is there when the parent has ended.
    let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
    assert!(Path::new("/proc").join(pid.trim()).exists());
    let ctl = |words: &[&str]| {
        let mut command = cowslip();
        run(command
            .current_dir(dir.path())
            .args(["ctl", "qmp"])
            .args(words))
    };
    let exports: Value = serde_json::from_str(&ctl(&["exports", "--json"])).unwrap();
    assert_eq!(exports[0]["id"], "e");
    let uri = "nbd+unix:///disk?socket=nbd";
    let words = ["io", "-f", "raw", "-c", "write -P 7 0 64k", uri];
    run(cowslip().current_dir(dir.path()).args(words));
    ctl(&["quit"]);
    let begun = Instant::now();
    while dir.path().join("pid").exists() {
        assert!(begun.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!dir.path().join("qmp").exists());
}

#[test]
fn a_secret_is_in_no_message() {
    let dir = with_image();
    for words in [
        ["--object", "secret,id=s,data=hush,foo=1"],
        [
            "--object",
            r#"{"qom-type":"secret","id":"s","data":"hush","foo":1}"#,
        ],
    ] {
        let (code, text) = ends(&mut daemon(dir.path()), &words);
        assert_eq!(code, Some(1));
        assert!(
            text.contains("--object: ") && !text.contains("hush"),
            "{text}"
        );
    }
}

#[test]
fn a_client_may_listen_for_the_daemon() {
    let dir = &scratch();
    let listener = std::os::unix::net::UnixListener::bind(dir.join("client")).unwrap();
    let mut command = cowslip();
    command.current_dir(dir).arg("qemu-storage-daemon").args([
        "--chardev",
        "socket,id=c,path=client",
        "--monitor",
        "c",
    ]);
    let mut daemon = command.stdin(std::process::Stdio::null()).spawn().unwrap();
    let (stream, _) = listener.accept().unwrap();
    let mut client = cowslip_qmp::Client::over(stream, None).unwrap();
    client.execute("quit", serde_json::json!({})).unwrap();
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
    // Nobody listens.
    drop(listener);
    let said = command.output().unwrap();
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(
        text.contains("Failed to connect to 'client': Connection refused"),
        "{text}"
    );
}

#[test]
fn clients_learn_of_the_jobs_that_quit_ends() {
    let dir = &scratch();
    for words in [
        &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"][..],
        &[
            "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2",
        ],
    ] {
        run(cowslip().current_dir(dir).args(words));
    }
    let mut command = cowslip();
    command.current_dir(dir).args([
        "daemon",
        "--control",
        "qmp",
        "--blockdev",
        "qcow2,node-name=b,file.driver=file,file.filename=b.qcow2",
    ]);
    let _daemon = crate::support::server::Server::start(&mut command, &dir.join("qmp"));
    let mut client = cowslip_qmp::Client::connect(&dir.join("qmp"), None).unwrap();
    client
        .execute("block-commit", json!({"device": "b", "job-id": "j"}))
        .unwrap();
    client.execute("quit", json!({})).unwrap();
    let mut names = Vec::new();
    // Those that came before the reply.
    while let Ok(Some(event)) = client.next_event(Some(Duration::ZERO)) {
        names.push(event.name);
    }
    assert!(
        names.iter().any(|name| name == "BLOCK_JOB_CANCELLED"),
        "{names:?}"
    );
}

#[test]
fn a_daemon_that_nobody_can_reach_says_so() {
    let dir = with_image();
    let image = "qcow2,node-name=a,file.driver=file,file.filename=a.qcow2";
    for words in [&[][..], &["--blockdev", image], &["--metrics", "./m"]] {
        let mut daemon = cowslip();
        daemon.current_dir(dir.path()).arg("daemon");
        let (code, said) = ends(&mut daemon, words);
        assert!(
            code == Some(1) && said.contains("Nobody could reach the daemon: --control"),
            "{words:?}: {code:?} {said}"
        );
    }
}

#[test]
fn errors_say_what_names_are_relative_to_but_not_under_qemus_name() {
    let dir = with_image();
    let words = [
        "--blockdev",
        "qcow2,node-name=a,file.driver=file,file.filename=nowhere",
    ];
    let mut ours = cowslip();
    ours.current_dir(dir.path()).arg("daemon");
    let (_, said) = ends(&mut ours, &words);
    let here = dir.path().canonicalize().unwrap();
    let note = format!("(names are relative to '{}')", here.display());
    assert!(
        said.contains("'nowhere': No such file") && said.contains(&note),
        "{said}"
    );
    let (_, said) = ends(&mut daemon(dir.path()), &words);
    assert!(
        said.contains("'nowhere'") && !said.contains("relative"),
        "{said}"
    );
}
