//! TLS with keys shared beforehand on the command line: ours and QEMU's programs as servers and as
//! clients of each other, libnbd's and nbdkit beside them. The default build has none of it;
//! `nbd_tls.rs` tests its messages then.
//!
//! The details of the protocol are tested in `cowslip-nbd`.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::nbd_tls::{Server, disk, party, writes_and_copies};
use crate::support::whose::Whose;
use crate::support::{cowslip, golden, outcome, peers_are_installed, run, scratch, scratch_beside};

const KEYS: &str = "\
alice:616c696365207365637265742030313233343536373839616263646566303132
qemu:71656d7520736563726574203031323334353637383961626364656630313233
";

/// `keys/`, and `wrong/` with other keys for two of the users and one for an unknown user.
fn make_keys(directory: &Path) {
    let wrong = "0f".repeat(32);
    for (name, text) in [
        ("keys", KEYS.to_string()),
        (
            "wrong",
            format!("qemu:{wrong}\nalice:{wrong}\nmallory:{wrong}\n"),
        ),
    ] {
        std::fs::create_dir(directory.join(name)).unwrap();
        std::fs::write(directory.join(name).join("keys.psk"), text).unwrap();
    }
}

fn credentials(directory: &Path, what: &str) -> [String; 2] {
    let dir = directory.join("keys").display().to_string();
    let object = format!("tls-creds-psk,id=tls,dir={dir},{what}");
    ["--object".to_string(), object]
}

fn server_with_keys(whose: Whose, directory: &Path, disk: &Path, words: &[&str]) -> Server {
    let [object, definition] = credentials(directory, "endpoint=server");
    let tls = [object.as_str(), &definition, "--tls-creds", "tls"];
    Server::of(whose, disk, &[&tls, words].concat())
}

fn image(server: &Server) -> String {
    format!("driver=nbd,path={},tls-creds=tls", server.socket.display())
}

fn uri(server: &Server, user: &str, file: &Path) -> String {
    let (socket, file) = (server.socket.display(), file.display());
    format!("nbds+unix://{user}@/?socket={socket}&tls-psk-file={file}")
}

#[test]
fn a_disk_is_written_and_read_with_keys_by_both_programs() {
    if !peers_are_installed(&["qemu-nbd", "qemu-img", "qemu-io"]) {
        return;
    }
    let (ours, theirs) = (Whose::Ours, Whose::Theirs);
    let older = "endpoint=client,priority=NORMAL:-VERS-TLS1.3";
    for (server, client, words) in [
        (ours, ours, "endpoint=client"),
        (ours, ours, "endpoint=client,username=alice,verify-peer=off"),
        (ours, theirs, "endpoint=client"),
        (ours, theirs, "endpoint=client,username=alice"),
        (ours, theirs, older),
        (theirs, ours, "endpoint=client"),
        (theirs, ours, "endpoint=client,username=alice"),
    ] {
        let case = format!("server {server:?}, client {client:?} with {words}");
        let dir = scratch();
        make_keys(dir.path());
        let disk = disk(dir.path(), "qcow2");
        let served = server_with_keys(server, dir.path(), &disk, &["-f", "qcow2"]);
        let own = credentials(dir.path(), words);
        writes_and_copies(client, &own, (&image(&served), dir.path()), &case);
        let mut list = client.program("qemu-nbd");
        list.arg("-L").args(&own).args(["--tls-creds", "tls", "-k"]);
        let listed = run(list.arg(&served.socket));
        assert!(listed.contains("exports available: 1"), "{case}: {listed}");
        drop(served);
        let check = outcome(Command::new("qemu-img").arg("check").arg(&disk));
        assert!(check.status.success(), "{case}: {check:?}");
    }
}

#[test]
fn a_server_of_qemu_is_understood_in_either_version() {
    let Some(dir) = scratch_beside(&["qemu-nbd"]) else {
        return;
    };
    make_keys(dir.path());
    let disk = disk(dir.path(), "raw");
    for priority in [
        "NORMAL:-VERS-TLS1.3",
        "NORMAL:-VERS-TLS1.3:-CIPHER-ALL:+AES-256-GCM",
        "NORMAL:-VERS-TLS-ALL:+VERS-TLS1.3",
    ] {
        let words = format!("endpoint=server,priority={priority}");
        let [object, definition] = credentials(dir.path(), &words);
        let tls = [object.as_str(), &definition, "--tls-creds", "tls"];
        let served = Server::of(Whose::Theirs, &disk, &[&tls[..], &["-f", "raw"]].concat());
        let mut info = cowslip();
        info.arg("info")
            .args(credentials(dir.path(), "username=alice"));
        let printed = golden::said(&outcome(info.args(["--image-opts", &image(&served)])));
        assert!(printed.contains("32 MiB"), "{priority}: {printed}");
    }
}

/// Command lines that end at once, each said to both programs, in a directory with `keys/`,
/// `wrong/` and `disk.raw`.
const REFUSED: &str = "
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=/nonexistent --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=neither,dir=keys --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=keys,username=alice --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,dir=keys,username=alice --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=keys,verify-peer=maybe --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=keys,sanity-check=off --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=keys,foo=1 --tls-creds s disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=keys --tls-creds t disk.raw
qemu-nbd --object tls-creds-psk,id=s,endpoint=server,dir=keys --tls-creds s -L
qemu-img info --object tls-creds-psk,id=c,dir=/nonexistent --image-opts driver=nbd,path=none,tls-creds=c
qemu-img info --object tls-creds-psk,id=c,dir=keys,username=nobody --image-opts driver=nbd,path=none,tls-creds=c
qemu-img info --object tls-creds-psk,id=c,dir=keys,username=alic --image-opts driver=nbd,path=none,tls-creds=c
qemu-img info --object tls-creds-psk,id=c,dir=keys,endpoint=server --image-opts driver=nbd,path=none,tls-creds=c
";

/// Client lines against QEMU's server with keys, at `SOCKET`; and with the certificates in
/// `CERTIFICATES`.
const REFUSED_BY_A_SERVER: &str = "
qemu-img info --object tls-creds-psk,id=c,dir=wrong --image-opts driver=nbd,path=SOCKET,tls-creds=c
qemu-img info --object tls-creds-psk,id=c,dir=wrong,username=alice --image-opts driver=nbd,path=SOCKET,tls-creds=c
qemu-img info --object tls-creds-psk,id=c,dir=wrong,username=mallory --image-opts driver=nbd,path=SOCKET,tls-creds=c
qemu-nbd -L -k SOCKET --object tls-creds-psk,id=c,dir=wrong,username=alice --tls-creds c
qemu-img info nbd:unix:SOCKET
qemu-nbd -L -k SOCKET
";
const REFUSED_BY_A_PLAIN_SERVER: &str = "
qemu-img info --object tls-creds-psk,id=c,dir=keys --image-opts driver=nbd,path=SOCKET,tls-creds=c
qemu-nbd -L -k SOCKET --object tls-creds-psk,id=c,dir=keys --tls-creds c
";

fn both_say_the_same(dir: &Path, lines: &str, socket: &Path) {
    golden::refused_alike(dir, lines, &[("SOCKET", socket.display().to_string())]);
}

#[test]
fn lines_with_keys_are_refused_in_qemus_words() {
    let Some(dir) = scratch_beside(&["qemu-nbd", "qemu-img"]) else {
        return;
    };
    make_keys(dir.path());
    let disk = disk(dir.path(), "raw");
    both_say_the_same(dir.path(), REFUSED, Path::new("none"));
    let theirs = server_with_keys(Whose::Theirs, dir.path(), &disk, &["-f", "raw"]);
    both_say_the_same(dir.path(), REFUSED_BY_A_SERVER, &theirs.socket);
    drop(theirs);
    let plain = Server::of(Whose::Theirs, &disk, &["-f", "raw"]);
    both_say_the_same(dir.path(), REFUSED_BY_A_PLAIN_SERVER, &plain.socket);
}

#[test]
fn our_server_refuses_who_has_no_key_whoever_made_the_client() {
    let dir = scratch();
    make_keys(dir.path());
    let disk = disk(dir.path(), "raw");
    let served = server_with_keys(Whose::Ours, dir.path(), &disk, &["-f", "raw"]);
    let mut clients = vec![Whose::Ours];
    clients.extend(peers_are_installed(&["qemu-img"]).then_some(Whose::Theirs));
    let certificates = party("client").display().to_string();
    for client in clients {
        for object in [
            "tls-creds-psk,id=tls,dir=wrong".to_string(),
            "tls-creds-psk,id=tls,dir=wrong,username=mallory".to_string(),
            format!("tls-creds-x509,id=tls,dir={certificates}"),
        ] {
            let mut info = client.program("qemu-img");
            info.current_dir(dir.path())
                .args(["info", "--object", &object, "--image-opts"]);
            let options = format!("{},tls-hostname=localhost", image(&served));
            let printed = golden::said(&outcome(info.arg(options)));
            assert!(printed.contains("TLS"), "{client:?}, {object}: {printed}");
            assert!(printed.contains("[exit status: 1]"), "{object}: {printed}");
        }
        let mut info = client.program("qemu-img");
        info.args(["info", &format!("nbd:unix:{}", served.socket.display())]);
        let printed = golden::said(&outcome(&mut info));
        assert!(printed.contains("TLS negotiation required"), "{printed}");
    }
    let file = dir.path().join("keys/keys.psk");
    let printed = outcome(cowslip().args(["info", &uri(&served, "alice", &file)]));
    assert!(printed.status.success(), "{printed:?}");
}

#[test]
fn mistakes_in_files_of_keys_are_told_with_their_lines() {
    let dir = scratch();
    let disk = disk(dir.path(), "raw");
    let file = dir.path().join("keys.psk");
    let mut large = KEYS.repeat(1 << 16);
    large.push('\n');
    for (text, said) in [
        ("", "there is no key"),
        ("\n\n", "there is no key"),
        ("alice:616c6963652073656372657420303132\nbob\n", "line 2: "),
        ("alice:\n", "line 1: the key has 0 bytes"),
        ("alice:00ff\n", "line 1: the key has 2 bytes"),
        ("alice:616c6963652073656372657420303g32\n", "line 1: "),
        (&KEYS.repeat(2), "line 3: user \"alice\" has a key already"),
        (&large, "file too large"),
    ] {
        std::fs::write(&file, text).unwrap();
        let object = format!(
            "tls-creds-psk,id=tls,endpoint=server,dir={}",
            dir.path().display()
        );
        let mut serve = cowslip();
        serve.args(["serve", "--object", &object, "--tls-creds", "tls", "-k"]);
        serve.arg(dir.path().join("sock")).arg(&disk);
        let printed = golden::said(&outcome(&mut serve));
        assert!(printed.contains(said), "{said}: {printed}");
        assert!(printed.contains(&file.display().to_string()), "{printed}");
        assert!(printed.contains("[exit status: 1]"), "{printed}");
        assert!(!printed.contains("616c"), "no part of a key: {printed}");
        let uri = format!("nbds://alice@localhost:1/?tls-psk-file={}", file.display());
        let printed = golden::said(&outcome(cowslip().args(["info", &uri])));
        assert!(
            printed.contains("PSK file") || printed.contains(said),
            "{printed}"
        );
    }
}

#[test]
fn those_users_are_served_who_are_allowed() {
    let dir = scratch();
    make_keys(dir.path());
    let file = dir.path().join("keys/keys.psk");
    let disk = disk(dir.path(), "raw");
    let list = "authz-list,id=authz,rules.0.match=al*,rules.0.policy=allow,rules.0.format=glob";
    for (authz, allowed) in [
        ("authz-simple,id=authz,identity=alice", true),
        ("authz-simple,id=authz,identity=CN=alice", false),
        (list, true),
        (&list.replace("allow", "deny"), false),
    ] {
        let words = ["-f", "raw", "--object", authz, "--tls-authz", "authz"];
        let served = server_with_keys(Whose::Ours, dir.path(), &disk, &words);
        let printed = outcome(cowslip().args(["info", &uri(&served, "alice", &file)]));
        assert_eq!(printed.status.success(), allowed, "{authz}: {printed:?}");
        let printed = outcome(cowslip().args(["info", &uri(&served, "qemu", &file)]));
        assert!(!printed.status.success(), "{authz}: {printed:?}");
    }
}

#[test]
fn who_says_no_name_in_a_uri_is_who_runs_the_program() {
    let dir = scratch();
    let own = run(Command::new("id").arg("-un"));
    let own = own.trim();
    let file = dir.path().join("keys.psk");
    let key = "5a".repeat(32);
    std::fs::create_dir(dir.path().join("keys")).unwrap();
    let text = format!("{own}:{key}\nother:{}\n", "a5".repeat(32));
    std::fs::write(dir.path().join("keys/keys.psk"), &text).unwrap();
    std::fs::write(&file, format!("{own}:{key}\n")).unwrap();
    let disk = disk(dir.path(), "raw");
    // In its sandbox, as servers are by default.
    let socket = dir.path().join("sock");
    let mut serve = cowslip();
    serve
        .args(["serve", "-f", "raw", "--tls-creds", "tls"])
        .args(credentials(dir.path(), "endpoint=server"))
        .arg("-k");
    let served = Server::start(serve.arg(&socket).arg(&disk), &socket);
    let (at, keys) = (socket.display(), file.display());
    let unnamed = format!("nbds+unix:///?socket={at}&tls-psk-file={keys}");
    let printed = golden::said(&outcome(cowslip().args(["info", &unnamed])));
    assert!(printed.contains("32 MiB"), "{printed}");
    for named in [
        format!("{unnamed}&tls-username={own}"),
        uri(&served, own, &file),
    ] {
        let printed = golden::said(&outcome(cowslip().args(["info", &named])));
        assert!(printed.contains("32 MiB"), "{named}: {printed}");
    }
    let printed = golden::said(&outcome(
        cowslip().args(["info", &uri(&served, "other", &file)]),
    ));
    assert!(
        printed.contains("Username other not found in PSK file"),
        "{printed}"
    );
}

#[test]
fn an_export_of_nbdkit_is_copied() {
    let Some(dir) = scratch_beside(&["nbdkit"]) else {
        return;
    };
    make_keys(dir.path());
    let file = dir.path().join("keys/keys.psk");
    let socket = dir.path().join("nbdkit.sock");
    let mut nbdkit = Command::new("nbdkit");
    nbdkit
        .args(["-f", "--exit-with-parent", "--tls=require", "-U"])
        .arg(&socket)
        .arg(format!("--tls-psk={}", file.display()))
        .args(["pattern", "8M"])
        .stdin(Stdio::null());
    let served = Server::start(&mut nbdkit, &socket);
    let copy = dir.path().join("copy.raw");
    let from = uri(&served, "alice", &file);
    run(cowslip()
        .args(["convert", "-f", "raw", "-O", "raw", &from])
        .arg(&copy));
    let copy = std::fs::read(copy).unwrap();
    let words = copy.chunks_exact(8).enumerate();
    assert_eq!(copy.len(), 8 << 20);
    for (nth, word) in words {
        assert_eq!(word, (nth as u64 * 8).to_be_bytes(), "at {nth}");
    }
}
