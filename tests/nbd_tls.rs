//! TLS on the command line: ours and QEMU's programs as servers and as clients of each other,
//! libnbd's beside them.
//!
//! The details of the protocol are tested in `cowslip-nbd`, whose certificates these are.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::running::Running;
use crate::support::whose::Whose;
use crate::support::{cowslip, golden, outcome, peers_are_installed, run, scratch, scratch_beside};

/// Returns the directory with the certificates of a party.
pub(crate) fn party(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("crates/nbd/tests/certificates").join(name)
}

fn credentials(endpoint: &str, name: &str) -> [String; 2] {
    let dir = party(name);
    let object = format!(
        "tls-creds-x509,id=tls,endpoint={endpoint},dir={}",
        dir.display()
    );
    ["--object".to_string(), object]
}

/// A server that listens on a Unix socket; ends with this value.
pub(crate) struct Server {
    _child: Running,
    pub(crate) socket: PathBuf,
}

impl Server {
    pub(crate) fn start(command: &mut Command, socket: &Path) -> Server {
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        let server = Server {
            _child: Running::start(command),
            socket: socket.to_path_buf(),
        };
        let begun = Instant::now();
        // Not when its name is there: it listens a little later.
        while UnixStream::connect(socket).is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "it does not listen"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }

    /// `qemu-nbd` with these words.
    pub(crate) fn of(whose: Whose, disk: &Path, words: &[&str]) -> Server {
        let socket = disk.with_extension(format!("{whose:?}"));
        let mut command = whose.program("qemu-nbd");
        command.args(["-t", "-e", "0", "-k"]).arg(&socket);
        Server::start(command.args(words).arg(disk), &socket)
    }

    fn with_tls(whose: Whose, disk: &Path, words: &[&str]) -> Server {
        let [object, definition] = credentials("server", "server");
        let tls = [object.as_str(), &definition, "--tls-creds", "tls"];
        Server::of(whose, disk, &[&tls, words].concat())
    }

    fn image(&self) -> String {
        let socket = self.socket.display();
        format!("driver=nbd,path={socket},tls-creds=tls,tls-hostname=localhost")
    }

    fn uri(&self, name: &str) -> String {
        let (socket, dir) = (self.socket.display(), party(name));
        format!(
            "nbds+unix:///?socket={socket}&tls-hostname=localhost&tls-certificates={}",
            dir.display()
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.socket));
    }
}

pub(crate) fn disk(dir: &Path, format: &str) -> PathBuf {
    let path = dir.join(format!("disk.{format}"));
    let words = ["create", "-q", "-f", format];
    run(Whose::Ours
        .program("qemu-img")
        .args(words)
        .arg(&path)
        .arg("32M"));
    path
}

/// A client writes to a disk of 32 MiB, reads it, and copies it into a directory.
pub(crate) fn writes_and_copies(
    client: Whose,
    own: &[String],
    (image, dir): (&str, &Path),
    case: &str,
) {
    let mut shell = client.program("qemu-io");
    shell.args(own);
    for command in [
        "write -P 7 1000 20M",
        "write -z 3M 1M",
        "flush",
        "read -P 0 3M 1M",
        "read -P 7 4M 8M",
    ] {
        shell.args(["-c", command]);
    }
    let said = run(shell.args(["--image-opts", image]));
    assert!(!said.contains("failed"), "{case}: {said}");
    let copy = dir.join("copy.raw");
    let mut convert = client.program("qemu-img");
    convert
        .arg("convert")
        .args(own)
        .args(["--image-opts", image, "-O", "raw"]);
    run(convert.arg(&copy));
    let copy = std::fs::read(copy).unwrap();
    let expected = |at: usize| match at {
        3145728..4194304 => 0,
        1000..20972520 => 7,
        _ => 0,
    };
    assert_eq!(copy.len(), 32 << 20, "{case}");
    assert!((0..copy.len()).all(|at| copy[at] == expected(at)), "{case}");
}

#[test]
fn a_disk_is_written_and_read_over_tls_by_both_programs() {
    if !peers_are_installed(&["qemu-nbd", "qemu-img", "qemu-io"]) {
        return;
    }
    let (ours, theirs) = (Whose::Ours, Whose::Theirs);
    for (server, client) in [(ours, ours), (ours, theirs), (theirs, ours)] {
        let case = format!("server {server:?}, client {client:?}");
        let dir = scratch();
        let image = disk(dir.path(), "qcow2");
        let served = Server::with_tls(server, &image, &["-f", "qcow2"]);
        let own = credentials("client", "client");
        writes_and_copies(client, &own, (&served.image(), dir.path()), &case);
        let mut list = client.program("qemu-nbd");
        list.arg("-L")
            .args(&own)
            .args(["--tls-creds", "tls", "--tls-hostname", "localhost", "-k"]);
        let listed = run(list.arg(&served.socket));
        assert!(listed.contains("exports available: 1"), "{case}: {listed}");
        // As a URI, too, which QEMU does not take.
        if client == ours {
            let info = run(ours
                .program("qemu-img")
                .arg("info")
                .arg(served.uri("client")));
            assert!(info.contains("32 MiB"), "{case}: {info}");
        }
        drop(served);
        let check = outcome(Command::new("qemu-img").arg("check").arg(&image));
        assert!(check.status.success(), "{case}: {check:?}");
    }
}

#[test]
fn over_tcp_the_certificate_is_for_the_host_that_is_named() {
    let dir = scratch();
    let image = disk(dir.path(), "raw");
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut command = cowslip();
    command
        .args(["serve", "-f", "raw", "--tls-creds", "tls"])
        .args(credentials("server", "server"))
        .args(["--listen", &format!("127.0.0.1:{port}")])
        .arg(&image)
        .stderr(Stdio::null());
    let _ends_with_the_test = Running::start(&mut command);
    let size = |name: &str, host: &str| {
        let dir = party(name);
        let uri = format!("nbds://{host}:{port}/?tls-certificates={}", dir.display());
        outcome(cowslip().args(["info", &uri]))
    };
    let begun = Instant::now();
    while !size("client", "127.0.0.1").status.success() {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{:?}",
            size("client", "127.0.0.1")
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(size("client", "localhost").status.success());
    // The same host by an address that its certificate does not have.
    let refused = golden::said(&size("client", "127.0.0.2"));
    assert!(
        refused.contains("does not match the hostname") || refused.contains("Connection refused"),
        "{refused}"
    );
    let refused = golden::said(&size("bare", "localhost"));
    assert!(refused.contains("CertificateRequired"), "{refused}");
}

/// Command lines that end at once, each said to both programs. `@NAME` is the directory of that
/// party.
const REFUSED: &str = "
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=/nonexistent --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=neither,dir=@server --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,dir=@client --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=@client --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=@server,verify-peer=maybe --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=@server,foo=1 --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=@server --tls-creds t disk.raw
qemu-nbd --object secret,id=s,data=x --tls-creds s disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=@server --tls-creds s --tls-hostname h disk.raw
qemu-nbd --object tls-creds-x509,id=s,endpoint=server,dir=@server --tls-creds s -L
qemu-nbd --tls-creds s disk.raw
qemu-nbd --tls-authz a disk.raw
qemu-nbd --tls-hostname h disk.raw
qemu-nbd --tls-hostname h -L
qemu-nbd --object authz-simple,id=a disk.raw
qemu-nbd --object authz-simple,id=a,identity=x,foo=1 disk.raw
qemu-img info --object tls-creds-x509,id=c,dir=@client --image-opts driver=nbd,path=none,tls-creds=d
qemu-img info --object secret,id=c,data=x --image-opts driver=nbd,path=none,tls-creds=c
qemu-img info --object tls-creds-x509,id=c,endpoint=server,dir=@server --image-opts driver=nbd,path=none,tls-creds=c
qemu-img info --object tls-creds-x509,id=c,dir=/nonexistent --image-opts driver=nbd,path=none,tls-creds=c
";

/// Those that meet a server with TLS, and those that meet one without, at `SOCKET`.
const REFUSED_BY_A_SERVER: &str = "
qemu-img info --object tls-creds-x509,id=c,dir=@client --image-opts driver=nbd,path=SOCKET,tls-creds=c
qemu-img info --object tls-creds-x509,id=c,dir=@client --image-opts driver=nbd,path=SOCKET,tls-creds=c,tls-hostname=elsewhere.example
qemu-img info nbd:unix:SOCKET
qemu-nbd -L -k SOCKET
qemu-nbd -L -k SOCKET --object tls-creds-x509,id=c,dir=@client --tls-creds c
qemu-nbd -L -k SOCKET --object tls-creds-x509,id=c,dir=@client --tls-creds c --tls-hostname elsewhere.example
";
const REFUSED_BY_A_PLAIN_SERVER: &str = "
qemu-img info --object tls-creds-x509,id=c,dir=@client --image-opts driver=nbd,path=SOCKET,tls-creds=c,tls-hostname=localhost
qemu-nbd -L -k SOCKET --object tls-creds-x509,id=c,dir=@client --tls-creds c --tls-hostname localhost
";

fn both_say_the_same(dir: &Path, lines: &str, socket: &Path) {
    let certificates = party("").display().to_string();
    let values = [
        ("@", certificates),
        ("SOCKET", socket.display().to_string()),
    ];
    golden::refused_alike(dir, lines, &values);
}

#[test]
fn what_is_refused_is_refused_in_qemus_words() {
    let Some(dir) = scratch_beside(&["qemu-nbd", "qemu-img"]) else {
        return;
    };
    let image = disk(dir.path(), "raw");
    both_say_the_same(dir.path(), REFUSED, Path::new("none"));
    let theirs = Server::with_tls(Whose::Theirs, &image, &["-f", "raw"]);
    both_say_the_same(dir.path(), REFUSED_BY_A_SERVER, &theirs.socket);
    drop(theirs);
    for server in [Whose::Theirs, Whose::Ours] {
        let plain = Server::of(server, &image, &["-f", "raw"]);
        both_say_the_same(dir.path(), REFUSED_BY_A_PLAIN_SERVER, &plain.socket);
    }
}

#[test]
fn what_is_not_supported_is_named() {
    for (object, said) in [
        #[cfg(not(feature = "psk"))]
        (
            "tls-creds-psk,id=a,dir=/x,endpoint=client",
            "'tls-creds-psk' are not supported: keys shared beforehand need OpenSSL's library",
        ),
        (
            "tls-creds-anon,id=a,endpoint=client",
            "'tls-creds-anon' are not supported",
        ),
        ("authz-pam,id=a,service=x", "'authz-pam' are not supported"),
        (
            "authz-list-file,id=a,filename=x",
            "'authz-list-file' are not supported",
        ),
        (
            "tls-creds-x509,id=a,dir=/x,priority=NORMAL",
            "('priority') are not supported",
        ),
        (
            "tls-creds-x509,id=a,dir=/x,passwordid=s",
            "('passwordid') are not supported",
        ),
    ] {
        let printed = golden::said(&outcome(
            cowslip().args(["info", "--object", object, "none"]),
        ));
        assert!(
            printed.contains(said) && printed.contains("[exit status: 1]"),
            "{object}: {printed}"
        );
    }
    #[cfg(not(feature = "psk"))]
    {
        let uri = "nbds+unix:///?socket=none&tls-psk-file=/none";
        let printed = golden::said(&outcome(cowslip().args(["info", uri])));
        assert!(printed.contains("--features psk"), "{printed}");
    }
}

#[test]
fn credentials_that_no_peer_would_believe_are_refused_at_the_start() {
    let dir = scratch();
    let image = disk(dir.path(), "raw");
    let started = |certificates: &Path, more: &str| {
        let certificates = certificates.display();
        let object = format!("tls-creds-x509,id=tls,endpoint=server,dir={certificates}{more}");
        let mut serve = cowslip();
        serve.args(["serve", "--object", &object, "--tls-creds", "tls", "-k"]);
        golden::said(&outcome(serve.arg(dir.path().join("sock")).arg(&image)))
    };
    let expired = started(&party("expired"), "");
    assert!(
        expired.contains("failed validation") && expired.contains("has expired"),
        "{expired}"
    );
    let none = "no certificate was found";
    for (file, with, said) in [
        ("server-key.pem", "client/client-key.pem", "do not match"),
        ("ca-cert.pem", "stranger/client-cert.pem", "known issuer"),
        ("server-cert.pem", "client/client-cert.pem", "do not match"),
        ("server-cert.pem", "server/server-key.pem", none),
    ] {
        let mixed = scratch();
        for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
            std::fs::copy(party("server").join(name), mixed.path().join(name)).unwrap();
        }
        std::fs::copy(party(with), mixed.path().join(file)).unwrap();
        let printed = started(mixed.path(), "");
        let named = format!("{}/{file}", mixed.path().display());
        assert!(printed.contains(said), "{file}: {printed}");
        assert!(
            printed.contains(&named) && printed.contains("[exit status: 1]"),
            "{file}: {printed}"
        );
    }
}

#[test]
fn those_are_served_who_are_allowed() {
    let dir = scratch();
    let image = disk(dir.path(), "raw");
    let subject = r"C=DE,,O=Cowslip tests\,, Inc.,,CN=client";
    let list =
        "authz-list,id=authz,rules.0.match=*CN=client,rules.0.policy=allow,rules.0.format=glob";
    for (authz, allowed) in [
        (format!("authz-simple,id=authz,identity={subject}"), true),
        (
            "authz-simple,id=authz,identity=CN=client".to_string(),
            false,
        ),
        (list.to_string(), true),
        (list.replace("allow", "deny"), false),
    ] {
        let socket = dir.path().join("sock");
        let mut serve = cowslip();
        serve.args([
            "serve",
            "-f",
            "raw",
            "--tls-creds",
            "tls",
            "--tls-authz",
            "authz",
        ]);
        serve
            .args(credentials("server", "server"))
            .args(["--object", &authz, "-k"]);
        let served = Server::start(serve.arg(&socket).arg(&image), &socket);
        let printed = outcome(cowslip().args(["info", &served.uri("client")]));
        assert_eq!(printed.status.success(), allowed, "{authz}: {printed:?}");
        if peers_are_installed(&["nbdinfo"]) {
            let printed = outcome(Command::new("nbdinfo").args(["--size", &served.uri("client")]));
            assert_eq!(printed.status.success(), allowed, "{authz}: {printed:?}");
        }
    }
    let mut serve = cowslip();
    serve.args(["serve", "--tls-creds", "tls", "--tls-authz", "nobody"]);
    let printed = golden::said(&outcome(
        serve.args(credentials("server", "server")).arg(&image),
    ));
    assert!(
        printed.contains("No authz object with id 'nobody'"),
        "{printed}"
    );
}

#[test]
fn certificates_of_revoked_and_of_other_authorities_are_refused() {
    let dir = scratch();
    let image = disk(dir.path(), "raw");
    let served = Server::with_tls(Whose::Ours, &image, &["-f", "raw"]);
    for (name, said) in [
        ("revoked", "CertificateRevoked"),
        ("stranger", "UnknownCA"),
        ("bare", "CertificateRequired"),
    ] {
        let printed = golden::said(&outcome(cowslip().args(["info", &served.uri(name)])));
        assert!(printed.contains(said), "{name}: {printed}");
    }
    let printed = outcome(cowslip().args(["info", &served.uri("client")]));
    assert!(printed.status.success(), "{printed:?}");
}
