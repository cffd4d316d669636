//! Disks in a registry: a server in the process, with tokens, redirects and all faults; and one of
//! others, `registry` of Debian's `docker-registry`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip_block::options::{self, Options};
use cowslip_remote::{Environment, RemoteFile, RemoteName, Scheme, Secrets};
use cowslip_testbed::web::{WebFault, WebObject, WebServer};
use sha2::{Digest, Sha256};

use crate::support::{block_on, pattern, read};

const RAW: &str = "application/vnd.example.disk.raw";
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

fn digest(bytes: &[u8]) -> String {
    let found = Sha256::digest(bytes);
    let digits: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// A manifest of layers, with their types.
fn manifest(layers: &[(&str, &[u8])]) -> String {
    let layer = |(media_type, bytes): &(&str, &[u8])| {
        let (digest, size) = (digest(bytes), bytes.len());
        format!("{{\"mediaType\":\"{media_type}\",\"digest\":\"{digest}\",\"size\":{size}}}")
    };
    let layers: Vec<String> = layers.iter().map(layer).collect();
    let (config, layers) = (digest(b"{}"), layers.join(","));
    format!(
        "{{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\
         \"config\":{{\"mediaType\":\"application/vnd.oci.empty.v1+json\",\"digest\":\"{config}\",\
         \"size\":2}},\"layers\":[{layers}]}}"
    )
}

/// Puts an image into a registry of the process, under the tag `one`.
fn put(server: &WebServer, layers: &[(&str, &[u8])]) -> String {
    let manifest = manifest(layers).into_bytes();
    let named = digest(&manifest);
    for name in ["one", &named] {
        let object = WebObject::tagged(manifest.clone(), "manifest");
        server.put(&format!("/v2/disks/golden/manifests/{name}"), object);
    }
    for (_, bytes) in layers {
        let path = format!("/v2/disks/golden/blobs/{}", digest(bytes));
        let mut object = WebObject::tagged(bytes.to_vec(), "any");
        object.e_tag = None;
        server.put(&path, object);
    }
    named
}

fn url(server: &WebServer, reference: &str) -> String {
    let base = server.url("/disks/golden");
    format!("oci://{}{reference}", base.trim_start_matches("http://"))
}

fn open(url: &str, more: &str) -> Result<Arc<RemoteFile>, String> {
    let list = format!("url={url},readahead=0{more}");
    let mut options = Options::new(options::split(&list).unwrap());
    let name = RemoteName::of_options(Scheme::Registry, &mut options);
    let name = name.map_err(|error| error.to_string())?;
    let secrets = Secrets {
        password: name.user.is_some().then(|| "pass".to_string().into()),
        cookie: None,
    };
    let environment = Environment::default();
    let opened = cowslip_remote::open(&name, secrets, &environment, ("a", false));
    block_on(opened).map_err(|error| error.to_string())
}

fn assert_reads(file: &RemoteFile, bytes: &[u8]) {
    let len = block_on(cowslip_block::file::BlockFile::len(file)).unwrap();
    assert_eq!(len, bytes.len() as u64);
    for (at, len) in [(0, 10), (bytes.len() - 1000, 1000), (123_456, 200_000)] {
        assert!(
            read(file, at as u64, len).unwrap() == bytes[at..at + len],
            "{at}"
        );
    }
}

/// An archive as programs for containers make it, with a file in a folder.
fn archive(bytes: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, kind, content) in [("disk/", b'5', &[][..]), ("disk/golden.img", b'0', bytes)] {
        let mut header = vec![0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        header[156] = kind;
        header[257..262].copy_from_slice(b"ustar");
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        archive.extend(header);
        archive.extend(content);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

#[test]
fn a_disk_is_a_blob_or_a_file_in_an_archive() {
    let bytes = pattern(1_000_000, 1);
    let server = WebServer::start().unwrap();
    let named = put(&server, &[(RAW, &bytes)]);
    for reference in [
        ":one".to_string(),
        format!("@{named}"),
        format!(":one@{named}"),
    ] {
        assert_reads(&open(&url(&server, &reference), "").unwrap(), &bytes);
    }
    // Single files are often pushed under the type of an archive.
    put(&server, &[(TAR, &bytes)]);
    assert_reads(&open(&url(&server, ":one"), "").unwrap(), &bytes);
    let archive = archive(&bytes);
    put(&server, &[(TAR, &archive)]);
    assert_reads(&open(&url(&server, ":one"), "").unwrap(), &bytes);
    // A disk that is an archive, of a type that says that it is a disk.
    put(&server, &[(RAW, &archive)]);
    assert_reads(&open(&url(&server, ":one"), "").unwrap(), &archive);
    put(&server, &[(RAW, b"{}"), (RAW, &bytes)]);
    assert_reads(&open(&url(&server, ":one?layer=1"), "").unwrap(), &bytes);
    // Of several machines: this one's.
    let ours = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "amd64"
    };
    let named = put(&server, &[(RAW, &bytes)]);
    let index = format!(
        "{{\"manifests\":[{{\"digest\":\"{}\",\"platform\":{{\"architecture\":\"s390x\"}}}},\
         {{\"digest\":\"{named}\",\"platform\":{{\"architecture\":\"{ours}\"}}}}]}}",
        digest(b"other")
    );
    let index = WebObject::tagged(index.into_bytes(), "index");
    server.put("/v2/disks/golden/manifests/one", index);
    assert_reads(&open(&url(&server, ":one"), "").unwrap(), &bytes);
}

#[test]
fn what_is_no_disk_is_refused_at_once() {
    let server = WebServer::start().unwrap();
    let bytes = pattern(100_000, 1);
    let mut compressed = bytes.clone();
    compressed[..3].copy_from_slice(&[0x1f, 0x8b, 8]);
    let mut two_files = archive(&bytes);
    two_files.truncate(two_files.len() - 1024);
    two_files.extend(archive(&bytes));
    let begun = Instant::now();
    for (layers, said) in [
        (
            vec![(TAR, &compressed[..])],
            "is compressed, and no part of it can be read",
        ),
        (
            vec![(RAW, &bytes[..]), (RAW, &bytes[..])],
            "it has 2 layers",
        ),
        (vec![], "it has 0 layers"),
        (vec![(TAR, &two_files[..])], "2 are in the folder 'disk'"),
    ] {
        put(&server, &layers);
        let error = open(&url(&server, ":one"), "").unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    let named = put(&server, &[(RAW, &bytes)]);
    let other = WebObject::tagged(b"{}".to_vec(), "x");
    server.put(&format!("/v2/disks/golden/manifests/{named}"), other);
    let error = open(&url(&server, &format!("@{named}")), "").unwrap_err();
    assert!(error.contains("another digest than its name"), "{error}");
    let error = open(&url(&server, ":none"), "").unwrap_err();
    assert!(error.contains("404"), "{error}");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "nothing is waited for"
    );
}

/// Tokens are asked for where the registry says, and again when they have expired; what fails is
/// repeated, as with all servers.
#[test]
fn tokens_are_renewed_and_faults_waited_for() {
    let bytes = pattern(1_000_000, 1);
    let server = WebServer::start().unwrap();
    put(&server, &[(RAW, &bytes)]);
    server.put(
        "/token",
        WebObject::tagged(b"{\"token\":\"t1\"}".to_vec(), "t"),
    );
    let realm = server.url("/token");
    let challenge = format!("Bearer realm=\"{realm}\",service=\"x\",scope=\"repository:a:pull\"");
    let accept = |token: &'static str| {
        let challenge = challenge.clone();
        server.judge(move |request| {
            let header = request.headers.get("authorization").map(String::as_str);
            let is_token_server = request.target.starts_with("/token");
            let wanted = match is_token_server {
                true => "Basic bWU6cGFzcw==",
                false => token,
            };
            match header == Some(wanted) {
                true => WebFault::Nothing,
                false if is_token_server => WebFault::Status(401, String::new()),
                false => WebFault::Challenge(challenge.clone()),
            }
        });
    };
    accept("Bearer t1");
    let error = open(&url(&server, ":one"), "").unwrap_err();
    assert!(error.contains("401"), "{error}");
    let file = open(&url(&server, ":one"), ",username=me,password-secret=s").unwrap();
    assert!(read(&file, 1000, 10).unwrap() == bytes[1000..1010]);
    server.put(
        "/token",
        WebObject::tagged(b"{\"token\":\"t2\"}".to_vec(), "t"),
    );
    accept("Bearer t2");
    server.fail([WebFault::Reset, WebFault::CutAfter(100)]);
    assert!(read(&file, 500_000, 1000).unwrap() == bytes[500_000..501_000]);
    let asked = server.requests();
    let asked = asked
        .iter()
        .filter(|request| request.target.starts_with("/token?"));
    assert!(
        asked
            .clone()
            .all(|it| it.target.contains("scope=repository%3Aa%3Apull"))
    );
    assert!(asked.count() >= 2);
}

/// A server that is running, and ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Sends a request, and returns the answer's status line and headers.
fn request(address: &str, head: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let len = body.len();
    let head =
        format!("{head} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len}\r\nContent-Type: ");
    let head = match body.first() {
        Some(b'{') => head + "application/vnd.oci.image.manifest.v1+json",
        _ => head + "application/octet-stream",
    };
    stream
        .write_all((head + "\r\nConnection: close\r\n\r\n").as_bytes())
        .unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// `cargo nextest run -p cowslip-remote --run-ignored only registry`
#[test]
#[ignore = "needs docker-registry"]
fn a_registry_of_others_has_a_disk() {
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let address = free.to_string();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().display();
    let config = format!(
        "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {root}/data\nhttp:\n  addr: {address}\n"
    );
    let path = dir.path().join("config.yml");
    std::fs::write(&path, config).unwrap();
    let server = Command::new("docker-registry")
        .arg("serve")
        .arg(&path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _running = Running(server.unwrap());
    let begun = Instant::now();
    while TcpStream::connect(&address).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it starts");
        std::thread::sleep(Duration::from_millis(50));
    }
    let bytes = pattern(3_000_000, 1);
    for blob in [&bytes[..], b"{}"] {
        let begun = request(&address, "POST /v2/disks/golden/blobs/uploads/", b"");
        let location = begun
            .lines()
            .find_map(|line| line.strip_prefix("Location: "));
        let location = location.unwrap().split_once(&address).unwrap().1;
        let put = format!("PUT {location}&digest={}", digest(blob));
        let done = request(&address, &put, blob);
        assert!(done.starts_with("HTTP/1.1 201"), "{done}");
    }
    let manifest = manifest(&[(RAW, &bytes)]);
    let done = request(
        &address,
        "PUT /v2/disks/golden/manifests/one",
        manifest.as_bytes(),
    );
    assert!(done.starts_with("HTTP/1.1 201"), "{done}");
    let named = digest(manifest.as_bytes());
    for reference in [":one".to_string(), format!("@{named}")] {
        let file = open(&format!("oci://{address}/disks/golden{reference}"), "").unwrap();
        assert_reads(&file, &bytes);
    }
    let error = open(&format!("oci://{address}/disks/golden:none"), "").unwrap_err();
    assert!(
        error.contains("404 Not Found' (MANIFEST_UNKNOWN)"),
        "{error}"
    );
}
