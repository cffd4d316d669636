//! Servers over TLS: their certificates count.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

use cowslip_block::options::{self, Options};
use cowslip_remote::{Environment, RemoteFile, RemoteName, Scheme, Secrets};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::support::{block_on, read, server_of};

fn file(name: &str) -> PathBuf {
    let certificates = "../nbd/tests/certificates";
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(certificates)
        .join(name)
}

/// A port that speaks TLS and passes on to another address what comes.
fn terminator(to: std::net::SocketAddr) -> u16 {
    let chain = CertificateDer::pem_file_iter(file("server/server-cert.pem")).unwrap();
    let chain = chain.collect::<Result<Vec<_>, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(file("server/server-key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, config) = (stream.unwrap(), Arc::clone(&config));
            std::thread::spawn(move || drop(pass_on(stream, config, to)));
        }
    });
    port
}

/// One request and its answer at a time: the requests here fit into one record.
fn pass_on(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    to: std::net::SocketAddr,
) -> std::io::Result<()> {
    let connection = ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut secure = StreamOwned::new(connection, stream);
    let mut plain = TcpStream::connect(to)?;
    let mut buf = vec![0; 1 << 16];
    loop {
        let count = secure.read(&mut buf)?;
        if count == 0 {
            return Ok(());
        }
        plain.write_all(&buf[..count])?;
        let mut answer = Vec::new();
        let head = loop {
            let count = plain.read(&mut buf)?;
            answer.extend_from_slice(&buf[..count]);
            let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
            if let Some(end) = end {
                break end + 4;
            }
        };
        let text = String::from_utf8_lossy(&answer[..head]).to_ascii_lowercase();
        let (_, length) = text.split_once("content-length: ").unwrap();
        let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
        while answer.len() < head + length {
            let count = plain.read(&mut buf)?;
            answer.extend_from_slice(&buf[..count]);
        }
        secure.write_all(&answer)?;
    }
}

fn open(url: &str, more: &str) -> cowslip_block::Result<Arc<RemoteFile>> {
    let list = format!("url={url},readahead=0,wait-timeout=2{more}");
    let mut options = Options::new(options::split(&list).unwrap());
    let name = RemoteName::of_options(Scheme::Https, &mut options).unwrap();
    let environment = Environment::default();
    block_on(cowslip_remote::open(
        &name,
        Secrets::default(),
        &environment,
        ("a", false),
    ))
}

#[test]
fn certificates_of_servers_are_checked_unless_that_is_switched_off() {
    let (server, bytes) = server_of(300_000);
    let port = terminator(server.address());
    let url = format!("https://localhost:{port}/a");
    let ca = file("server/ca-cert.pem");
    let trusted = open(&url, &format!(",ca-file={}", ca.display())).unwrap();
    assert!(read(&trusted, 1000, 200_000).unwrap() == bytes[1000..201_000]);
    let why = open(&url, "").unwrap_err().to_string();
    assert!(why.contains("certificate"), "{why}");
    let unchecked = open(&url, ",sslverify=off").unwrap();
    assert!(read(&unchecked, 0, 10).unwrap() == bytes[..10]);
}
