//! `az://` and `gs://` against servers by others: Azurite (`npm install azurite`), and
//! fake-gcs-server, which takes no uploads in the form of Google's XML interface, so what is there
//! is read.
//! `cargo nextest run -p cowslip-cli --run-ignored only remote_servers`
#![allow(clippy::unwrap_used)] // A panic is the report of a test.
#![cfg(feature = "remote")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::golden::words;
use crate::support::rng::Rng;
use crate::support::{cowslip, outcome, run, scratch};

/// A server that is running, and ends with this.
struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Server {
    /// Starts a program, whose arguments follow from its port.
    fn start(program: &str, words: impl Fn(&str) -> Vec<String>) -> Server {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
        let free = free.unwrap();
        let child = Command::new(program)
            .args(words(&free.port().to_string()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = child.unwrap_or_else(|error| panic!("{program}: {error}"));
        let server = Server {
            child,
            address: free.to_string(),
        };
        let begun = Instant::now();
        while TcpStream::connect(&server.address).is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "{program} starts"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// The status line of the answer to a request.
    fn post(&self, path: &str, content_type: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {content_type}\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.lines().next().unwrap_or_default().to_string()
    }
}

/// The account that Azurite has, and its key, which are no secret.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// Makes the container `images`, by a request that is signed.
const MAKE_CONTAINER: &str = r#"
import base64, email.utils, hashlib, hmac, http.client, sys
address, account, key = sys.argv[1:]
date, version = email.utils.formatdate(usegmt=True), '2021-08-06'
text = 'PUT' + '\n' * 12 + f'x-ms-date:{date}\nx-ms-version:{version}\n'
text += f'/{account}/{account}/images\nrestype:container'
sign = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
sign = f'SharedKey {account}:{base64.b64encode(sign).decode()}'
headers = {'x-ms-date': date, 'x-ms-version': version, 'Authorization': sign, 'Content-Length': '0'}
connection = http.client.HTTPConnection(address)
connection.request('PUT', f'/{account}/images?restype=container', headers=headers)
assert connection.getresponse().status == 201
"#;

/// A scratch directory with a raw disk of 20 MiB, and the environment of commands.
struct Host {
    dir: crate::support::Scratch,
    variables: Vec<(&'static str, String)>,
}

impl Host {
    fn new(variables: Vec<(&'static str, String)>) -> Host {
        let dir = scratch();
        let mut rng = Rng::new(79);
        let mut disk = vec![0; 20 << 20];
        for word in disk.chunks_mut(8) {
            word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()]);
        }
        std::fs::write(dir.path().join("golden.raw"), disk).unwrap();
        Host { dir, variables }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn command(&self, line: &str) -> Command {
        let mut command = cowslip();
        command.current_dir(self.path()).args(words(line));
        for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(name);
        }
        for (name, value) in &self.variables {
            command.env(name, value);
        }
        command
    }

    fn line(&self, line: &str) -> String {
        run(&mut self.command(line))
    }

    fn refused(&self, command: &mut Command, said: &str) {
        let output = outcome(command);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {text}");
        assert!(text.contains(said), "{command:?}: {text}");
        assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    }
}

#[test]
#[ignore = "needs azurite-blob"]
fn azure_by_azurite() {
    let server = Server::start("azurite-blob", |port| {
        let fixed = "--blobHost 127.0.0.1 --inMemoryPersistence --silent --disableTelemetry";
        let mut all: Vec<String> = words(fixed).into_iter().map(str::to_string).collect();
        all.extend(["--blobPort".to_string(), port.to_string()]);
        all
    });
    let arguments = ["-c", MAKE_CONTAINER, &server.address, ACCOUNT, KEY];
    run(Command::new("python3").args(arguments));
    let host = Host::new(vec![
        ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT.to_string()),
        ("AZURE_STORAGE_ACCOUNT_KEY", KEY.to_string()),
        (
            "AZURE_STORAGE_ENDPOINT",
            format!("http://{}/{ACCOUNT}", server.address),
        ),
    ]);
    // A plain image: in parts, and in one request; read, cached, and not replaced.
    host.line("publish -q -O qcow2 golden.raw az://images/plain.qcow2");
    host.line("create -q -f qcow2 small.qcow2 1M");
    host.line("publish -q -O qcow2 small.qcow2 az://images/small.qcow2");
    host.line("compare -F raw az://images/plain.qcow2 golden.raw");
    host.line("compare az://images/small.qcow2 small.qcow2");
    let mut cached = host.command("compare -F raw az://images/plain.qcow2 golden.raw");
    run(cached.env("COWSLIP_CACHE", host.path().join("cache")));
    assert!(host.line("cache verify --dir cache").contains("20.3 MiB"));
    let exists = "'az://images/plain.qcow2' exists already";
    host.refused(
        &mut host.command("publish -q -O qcow2 small.qcow2 az://images/plain.qcow2"),
        exists,
    );
    // In chunks.
    for _ in 0..2 {
        host.line("publish -q golden.raw az://images/some/golden");
    }
    host.line("publish -q --withdraw az://images/some/golden@1");
    host.line("publish -q --prune az://images/some");
    host.line("pull -q -O raw az://images/some/golden pulled.raw");
    host.line("compare -f raw -F raw golden.raw pulled.raw");
    // Whatever is wrong.
    let refused = "the server answers '403 Forbidden' (AuthorizationFailure)";
    for line in [
        "info az://images/plain.qcow2",
        "publish golden.raw az://images/some/golden",
        "pull az://images/some/golden x",
    ] {
        let mut command = host.command(line);
        host.refused(
            command.env("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc="),
            refused,
        );
    }
    for (line, said) in [
        ("info az://images/none", "'404 Not Found' (BlobNotFound)"),
        ("info az://none/none", "'404 Not Found' (ContainerNotFound)"),
        (
            "publish golden.raw az://none/x/y",
            "'404 Not Found' (ContainerNotFound)",
        ),
    ] {
        host.refused(&mut host.command(line), said);
    }
}

#[test]
#[ignore = "needs fake-gcs-server"]
fn google_by_fake_gcs_server() {
    let server = Server::start("fake-gcs-server", |port| {
        let fixed = "-scheme http -host 127.0.0.1 -backend memory -public-host";
        let mut all: Vec<String> = words(fixed).into_iter().map(str::to_string).collect();
        all.extend([format!("127.0.0.1:{port}"), "-port".into(), port.into()]);
        all
    });
    let credentials =
        r#"{"disable_oauth":true,"client_email":"","private_key":"","private_key_id":""}"#;
    let host = Host::new(vec![
        ("GOOGLE_SERVICE_ACCOUNT_KEY", credentials.to_string()),
        ("GOOGLE_BASE_URL", format!("http://{}", server.address)),
    ]);
    host.line("convert -f raw -O qcow2 golden.raw golden.qcow2");
    let made = server.post(
        "/storage/v1/b?project=p",
        "application/json",
        br#"{"name":"images"}"#,
    );
    assert!(made.contains(" 200 "), "{made}");
    let put = |object: &str, bytes: &[u8]| {
        let path = format!("/upload/storage/v1/b/images/o?uploadType=media&name={object}");
        let made = server.post(&path, "application/octet-stream", bytes);
        assert!(made.contains(" 200 "), "{made}");
    };
    put(
        "golden.qcow2",
        &std::fs::read(host.path().join("golden.qcow2")).unwrap(),
    );
    host.line("compare -F raw gs://images/golden.qcow2 golden.raw");
    let mut cached = host.command("compare -F raw gs://images/golden.qcow2 golden.raw");
    run(cached.env("COWSLIP_CACHE", host.path().join("cache")));
    host.line("cache verify --dir cache");
    // Published disks, of which each object is put there.
    host.line("publish -q golden.raw store/golden");
    put_all(&host.path().join("store"), "", &put);
    host.line("publish --list gs://images");
    host.line("pull -q -O raw gs://images/golden pulled.raw");
    host.line("compare -f raw -F raw golden.raw pulled.raw");
    host.refused(
        &mut host.command("info gs://images/none"),
        "'404 Not Found'",
    );
}

/// Puts all files below a directory.
fn put_all(directory: &Path, prefix: &str, put: &impl Fn(&str, &[u8])) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let key = format!("{prefix}{name}");
        match entry.file_type().unwrap().is_dir() {
            true => put_all(&entry.path(), &format!("{key}/"), put),
            false => put(&key, &std::fs::read(entry.path()).unwrap()),
        }
    }
}
