//! TLS: authentication of both sides, refusals before and after the handshake, peers that break the
//! protocol, and interoperation with other programs.
//!
//! `certificates/` holds the files of each party, under QEMU's file names; `make.sh` there
//! generates them.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::support::*;
use cowslip_block::disk::MemoryDisk;
use cowslip_nbd::client::ClientError;
use cowslip_nbd::export::Durability;
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::transmission::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::tls::{
    ClientCredentials, ClientTls, CredentialsError, Endpoint, Identity, PeerCheck, Pem, ServerTls,
    examine_own,
};
use cowslip_nbd::{Client, ConnectOptions, Server, ServerEvent, ServerOptions};
use cowslip_queue::{Backend, Buf, BufMut, Stream};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub(crate) mod both;

pub(crate) const DISK_BYTES: u64 = 64 << 20;

pub(crate) fn directory(party: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/certificates")
        .join(party)
}

fn file(party: &str, name: &str) -> Option<Vec<u8>> {
    std::fs::read(directory(party).join(name)).ok()
}

/// Calls `what` with the files of a party.
fn with_pem<T>(party: &str, side: &str, what: impl FnOnce(&Pem<'_>) -> T) -> T {
    let authorities = file(party, "ca-cert.pem").unwrap();
    let revoked = file(party, "ca-crl.pem");
    let certificates = file(party, &format!("{side}-cert.pem"));
    let key = file(party, &format!("{side}-key.pem"));
    what(&Pem {
        authorities: &authorities,
        revoked: revoked.as_deref(),
        identity: certificates.as_ref().map(|certificates| Identity {
            certificates,
            key: key.as_ref().unwrap(),
        }),
    })
}

pub(crate) fn server_tls(party: &str, check: PeerCheck) -> ServerTls {
    with_pem(party, "server", |pem| ServerTls::new(pem, check)).unwrap()
}

pub(crate) fn client_tls(party: &str, hostname: &str) -> ClientTls {
    let made = |pem: &Pem<'_>| ClientCredentials::new(pem, PeerCheck::Required);
    let credentials = with_pem(party, "client", made).unwrap();
    credentials.to_server(Some(hostname)).unwrap()
}

fn usual_client() -> ClientTls {
    client_tls("client", "localhost")
}

pub(crate) fn options(tls: ServerTls) -> ServerOptions {
    ServerOptions {
        tls: Some(tls),
        ..ServerOptions::default()
    }
}

/// A server, and why its clients have left.
pub(crate) struct Watched {
    running: Running,
    pub(crate) reasons: Arc<Mutex<Vec<String>>>,
}

impl Watched {
    pub(crate) fn start(backend: Backend, options: ServerOptions) -> Watched {
        let mut server = Server::new(options);
        server.add_export("", Arc::new(MemoryDisk::new("memory", DISK_BYTES)));
        let reasons = Arc::new(Mutex::new(Vec::new()));
        let observed = Arc::clone(&reasons);
        server.observe(move |event| {
            if let ServerEvent::Disconnected { reason, .. } = event {
                let reason = reason.clone().unwrap_or_default();
                observed.lock().unwrap().push(reason);
            }
        });
        Watched {
            running: Running::start(backend, server),
            reasons,
        }
    }

    fn usual() -> Watched {
        Watched::start(
            Backend::Auto,
            options(server_tls("server", PeerCheck::Required)),
        )
    }

    pub(crate) fn path(&self) -> &Path {
        &self.running.path
    }

    fn uri(&self, party: &str) -> String {
        format!(
            "nbds+unix:///?socket={}&tls-certificates={}&tls-hostname=localhost",
            self.path().display(),
            directory(party).display()
        )
    }

    /// Waits until a client has left for a reason like this.
    pub(crate) fn wait_for_reason(&self, reason: &str) {
        eventually(reason, || {
            let reasons = self.reasons.lock().unwrap();
            reasons.iter().any(|known| known.contains(reason))
        });
    }

    /// Checks that the server still serves its clients.
    pub(crate) fn still_serves(&self, tls: ClientTls) {
        queue(Backend::Threads).unwrap().block_on(async {
            let client = connect_tls(self.path(), tls).await.unwrap();
            client.read(0, BufMut::zeroed(4096)).await.unwrap();
            client.disconnect().await.unwrap();
        });
    }
}

pub(crate) async fn connect_tls(path: &Path, tls: ClientTls) -> Result<Client, ClientError> {
    let stream = Stream::connect_unix(path).await.unwrap();
    let options = ConnectOptions {
        tls: Some(tls),
        ..ConnectOptions::new("")
    };
    Client::connect(stream, &options).await
}

/// Bytes that differ from each other at all distances that matter here.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed | 1);
    (0..len).map(|_| random.next() as u8).collect()
}

#[test]
fn what_is_written_over_tls_is_read_back() {
    both::written_is_read_back(&|| server_tls("server", PeerCheck::Required), &usual_client);
}

#[test]
fn each_side_believes_only_whom_it_should() {
    const FINE: &str = "";
    for (server, client, hostname, said) in [
        ("server", "client", "localhost", FINE),
        ("server", "client", "127.0.0.1", FINE),
        ("server", "client", "::1", FINE),
        (
            "server",
            "client",
            "elsewhere.example",
            "does not match the hostname elsewhere.example",
        ),
        ("elsewhere", "client", "elsewhere.example", FINE),
        (
            "elsewhere",
            "client",
            "localhost",
            "does not match the hostname localhost",
        ),
        (
            "expired",
            "client",
            "localhost",
            "The certificate has expired",
        ),
        ("server", "bare", "localhost", "CertificateRequired"),
        ("server", "revoked", "localhost", "CertificateRevoked"),
        ("server", "stranger", "localhost", "UnknownCA"),
    ] {
        let label = format!("{server}, {client}, {hostname}");
        let tls = server_tls(server, PeerCheck::Required);
        let watched = Watched::start(Backend::Auto, options(tls));
        let outcome = queue(Backend::Threads).unwrap().block_on(async {
            let client = connect_tls(watched.path(), client_tls(client, hostname));
            let client = client.await.map_err(|error| error.to_string())?;
            client.disconnect().await.map_err(|error| error.to_string())
        });
        match outcome {
            Ok(()) => assert_eq!(said, FINE, "{label}"),
            Err(error) => assert!(said != FINE && error.contains(said), "{label}: {error}"),
        }
    }
}

#[test]
fn a_server_that_asks_for_no_certificate_needs_none() {
    let tls = server_tls("server", PeerCheck::Off);
    let watched = Watched::start(Backend::Auto, options(tls));
    queue(Backend::Threads).unwrap().block_on(async {
        let client = connect_tls(watched.path(), client_tls("bare", "localhost"));
        client.await.unwrap().disconnect().await.unwrap();
    });
}

#[test]
fn a_client_may_believe_everybody_but_has_to_say_so() {
    let expired = server_tls("expired", PeerCheck::Required);
    let watched = Watched::start(Backend::Auto, options(expired));
    let made = |pem: &Pem<'_>| ClientCredentials::new(pem, PeerCheck::Off);
    let credulous = with_pem("client", "client", made).unwrap();
    let made = |pem: &Pem<'_>| ClientCredentials::new(pem, PeerCheck::Required);
    let careful = with_pem("client", "client", made).unwrap();
    assert_eq!(
        careful.to_server(None).unwrap_err(),
        CredentialsError::NoHostname
    );
    assert!(matches!(
        careful.to_server(Some("no name")),
        Err(CredentialsError::Hostname(_))
    ));
    queue(Backend::Threads).unwrap().block_on(async {
        let client = connect_tls(watched.path(), credulous.to_server(None).unwrap());
        client.await.unwrap().disconnect().await.unwrap();
    });
}

#[test]
fn only_those_are_served_who_are_authorized() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let names = Arc::clone(&asked);
    let tls = server_tls("server", PeerCheck::Required).authorized_by(move |subject| {
        names.lock().unwrap().push(subject.to_string());
        names.lock().unwrap().len() == 1
    });
    let watched = Watched::start(Backend::Auto, options(tls));
    queue(Backend::Threads).unwrap().block_on(async {
        let tls = client_tls("client", "localhost");
        let first = connect_tls(watched.path(), tls.clone()).await.unwrap();
        first.disconnect().await.unwrap();
        assert!(
            connect_tls(watched.path(), tls).await.is_err(),
            "the second time"
        );
    });
    let subject = "C=DE,O=Cowslip tests\\, Inc.,CN=client";
    assert_eq!(*asked.lock().unwrap(), [subject, subject]);
    watched.wait_for_reason(&format!("authz check for {subject} is denied"));
    // A client without a certificate cannot be authorized, not even where none is required.
    let tls = server_tls("server", PeerCheck::Off).authorized_by(|_| true);
    let watched = Watched::start(Backend::Auto, options(tls));
    queue(Backend::Threads).unwrap().block_on(async {
        let client = connect_tls(watched.path(), client_tls("client", "localhost"));
        assert!(client.await.is_err());
    });
    watched.wait_for_reason("no name to be checked");
}

#[test]
fn mistakes_in_ones_own_credentials_are_found() {
    let own =
        |party: &str, side: &str, endpoint| with_pem(party, side, |pem| examine_own(pem, endpoint));
    for (party, side, endpoint) in [
        ("server", "server", Endpoint::Server),
        ("elsewhere", "server", Endpoint::Server),
        ("client", "client", Endpoint::Client),
        ("stranger", "client", Endpoint::Client),
        ("bare", "client", Endpoint::Client),
    ] {
        assert_eq!(own(party, side, endpoint), Ok(()), "{party}");
    }
    let expired = CredentialsError::Certificate("The certificate has expired".to_string());
    assert_eq!(own("expired", "server", Endpoint::Server), Err(expired));
    // A client's certificate is not a server's.
    let swapped = own("client", "client", Endpoint::Server).unwrap_err();
    assert!(
        matches!(swapped, CredentialsError::Certificate(_)),
        "{swapped}"
    );
    let made = |pem: &Pem<'_>| ServerTls::new(pem, PeerCheck::Required).unwrap_err();
    with_pem("server", "server", |pem| {
        let identity = pem.identity.unwrap();
        let key = &file("client", "client-key.pem").unwrap()[..];
        let with = |identity| made(&Pem { identity, ..*pem });
        assert_eq!(
            with(Some(Identity { key, ..identity })),
            CredentialsError::Mismatch
        );
        assert_eq!(with(None), CredentialsError::NoIdentity);
        let key = b"garbage";
        assert!(matches!(
            with(Some(Identity { key, ..identity })),
            CredentialsError::Key(_)
        ));
        let certificates = b"garbage";
        let garbage = with(Some(Identity {
            certificates,
            ..identity
        }));
        assert!(
            matches!(garbage, CredentialsError::Certificate(_)),
            "{garbage}"
        );
        let authorities = b"";
        assert!(matches!(
            made(&Pem {
                authorities,
                ..*pem
            }),
            CredentialsError::Authorities(_)
        ));
        let revoked = Some(&b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"[..]);
        assert!(matches!(
            made(&Pem { revoked, ..*pem }),
            CredentialsError::Revoked(_)
        ));
    });
}

/// A TLS client that sends arbitrary data, valid or not.
struct RawTls {
    stream: rustls::StreamOwned<rustls::ClientConnection, UnixStream>,
}

impl RawTls {
    /// Continues from a client that has been allowed to begin.
    fn over(client: RawClient) -> RawTls {
        let mut roots = rustls::RootCertStore::empty();
        let authority = file("client", "ca-cert.pem").unwrap();
        roots
            .add(CertificateDer::from_pem_slice(&authority).unwrap())
            .unwrap();
        let certificate = file("client", "client-cert.pem").unwrap();
        let key = file("client", "client-key.pem").unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(&certificate).unwrap()],
                PrivateKeyDer::from_pem_slice(&key).unwrap(),
            )
            .unwrap();
        let name = "localhost".try_into().unwrap();
        let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        RawTls {
            stream: rustls::StreamOwned::new(connection, client.stream),
        }
    }

    /// The code of the last reply to an option.
    fn answer(&mut self, option: OptionCode, data: &[u8]) -> OptionReplyCode {
        let mut message = Vec::new();
        encode_option(&mut message, option, data);
        self.stream.write_all(&message).unwrap();
        loop {
            let mut header = [0; OPTION_REPLY_HEADER_BYTES];
            self.stream.read_exact(&mut header).unwrap();
            let header = OptionReplyHeader::decode(&header).unwrap();
            let mut data = vec![0; header.len as usize];
            self.stream.read_exact(&mut data).unwrap();
            if header.reply == OptionReplyCode::Ack || header.reply.is_error() {
                return header.reply;
            }
        }
    }
}

pub(crate) fn go() -> Vec<u8> {
    InfoRequest {
        name: String::new(),
        infos: Vec::new(),
    }
    .encode()
}

fn contexts() -> Vec<u8> {
    MetaContextRequest {
        name: String::new(),
        queries: vec![BASE_ALLOCATION.to_owned()],
    }
    .encode()
}

#[test]
fn before_tls_nothing_is_revealed_or_agreed_on() {
    let watched = Watched::usual();
    let mut client = RawClient::greeted(watched.path());
    let required = OptionReplyCode::ErrTlsRequired;
    let too_long = vec![0; 20_000];
    for (option, data, reply) in [
        (OptionCode::List, &b""[..], required),
        (OptionCode::Info, &go(), required),
        (OptionCode::Go, &go(), required),
        (OptionCode::StructuredReply, b"", required),
        (OptionCode::ListMetaContext, &contexts(), required),
        (OptionCode::SetMetaContext, &contexts(), required),
        (OptionCode::ExtendedHeaders, b"", required),
        (OptionCode::Unknown(4711), b"x", required),
        (OptionCode::List, &too_long, required),
        (OptionCode::StartTls, b"x", OptionReplyCode::ErrInvalid),
        (OptionCode::StartTls, &too_long, OptionReplyCode::ErrTooBig),
    ] {
        client.option(option, data);
        let replies = client.replies();
        assert_eq!(replies.len(), 1, "{option:?}");
        assert_eq!(replies[0].0, reply, "{option:?}");
    }
    client.option(OptionCode::StartTls, b"");
    assert_eq!(client.replies(), [(OptionReplyCode::Ack, Vec::new())]);
    let mut client = RawTls::over(client);
    // Structured replies were asked for before; had that counted, this would be a success.
    let invalid = OptionReplyCode::ErrInvalid;
    assert_eq!(
        client.answer(OptionCode::SetMetaContext, &contexts()),
        invalid
    );
    assert_eq!(
        client.answer(OptionCode::StartTls, b""),
        invalid,
        "once is enough"
    );
    let ack = OptionReplyCode::Ack;
    assert_eq!(client.answer(OptionCode::StructuredReply, b""), ack);
    assert_eq!(client.answer(OptionCode::SetMetaContext, &contexts()), ack);
    assert_eq!(client.answer(OptionCode::Go, &go()), ack);
    let leave = Request::disconnect();
    client.stream.write_all(&leave.encode()).unwrap();
    // The server ends TLS before it hangs up, or this would be an error.
    assert_eq!(client.stream.read(&mut [0; 10]).unwrap(), 0);
}

#[test]
fn an_export_cannot_be_chosen_without_tls() {
    let watched = Watched::usual();
    let mut client = RawClient::greeted(watched.path());
    client.option(OptionCode::ExportName, b"");
    assert!(client.is_hung_up());
    watched.wait_for_reason("chose an export without TLS");
    let mut client = RawClient::greeted(watched.path());
    client.option(OptionCode::Abort, b"");
    assert_eq!(
        client.replies(),
        [(OptionReplyCode::Ack, Vec::new())],
        "leaving is allowed"
    );
    // Nor by a client that knows the oldest options only.
    let mut client = RawClient::silent(watched.path());
    client.receive(GREETING_BYTES);
    client.send(&encode_client_flags(ClientFlags::empty()));
    client.option(OptionCode::StartTls, b"");
    assert!(client.is_hung_up());
}

#[test]
fn bytes_before_the_handshake_are_not_taken_for_what_comes_after_it() {
    let watched = Watched::usual();
    both::early_bytes_are_not_believed(&watched, "TLS: ");
    watched.still_serves(usual_client());
}

#[test]
fn what_is_no_handshake_ends_the_connection() {
    let watched = Watched::usual();
    both::garbage_ends_the_connection(&watched, &[]);
    watched.still_serves(usual_client());
}

#[test]
fn a_handshake_that_is_never_finished_is_cut_off() {
    let tls = server_tls("server", PeerCheck::Required);
    both::endless_handshakes_are_cut_off(tls).still_serves(usual_client());
}

/// Passes bytes between a client and a server, until a test makes it corrupt the bytes from the
/// server.
pub(crate) struct Between {
    pub(crate) path: PathBuf,
    pub(crate) passed: Arc<AtomicU64>,
    /// The byte to be changed, counted in what the server sends; `u64::MAX` for none.
    pub(crate) spoil_at: Arc<AtomicU64>,
    pub(crate) thread: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Between {
    pub(crate) fn start(server: &Path) -> Between {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("between");
        let listener = UnixListener::bind(&path).unwrap();
        let passed = Arc::new(AtomicU64::new(0));
        let spoil_at = Arc::new(AtomicU64::new(u64::MAX));
        let (server, count, spoil) = (
            server.to_path_buf(),
            Arc::clone(&passed),
            Arc::clone(&spoil_at),
        );
        let thread = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut server = UnixStream::connect(server).unwrap();
            let (mut from_client, mut to_server) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            let upwards = std::thread::spawn(move || {
                drop(io::copy(&mut from_client, &mut to_server));
                drop(to_server.shutdown(Shutdown::Write));
            });
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = server.read(&mut bytes) {
                let start = count.fetch_add(len as u64, Ordering::Relaxed);
                let at = spoil.load(Ordering::Relaxed).wrapping_sub(start);
                if at < len as u64 {
                    bytes[at as usize] ^= 1;
                }
                if client.write_all(&bytes[..len]).is_err() {
                    break;
                }
            }
            drop(client.shutdown(Shutdown::Both));
            drop(server.shutdown(Shutdown::Both));
            upwards.join().unwrap();
        });
        Between {
            path,
            passed,
            spoil_at,
            thread,
            _directory: directory,
        }
    }
}

#[test]
fn bytes_that_are_changed_on_the_way_are_noticed() {
    let watched = Watched::usual();
    // The type that a record of TLS 1.3 shows has no meaning; the one that counts is encrypted.
    both::changed_bytes_are_noticed(&watched, &usual_client, Some(0));
    watched.still_serves(usual_client());
}

/// A server of one connection that says it has TLS and then does something else.
pub(crate) fn server_that(
    does: impl FnOnce(UnixStream) + Send + 'static,
) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || does(listener.accept().unwrap().0));
    (directory, path)
}

/// Greets a client with these flags and takes its first option; it has to be `STARTTLS`.
pub(crate) fn first_option(stream: &mut UnixStream, flags: HandshakeFlags) {
    stream.write_all(&encode_greeting(flags)).unwrap();
    stream.read_exact(&mut [0; CLIENT_FLAGS_BYTES]).unwrap();
    let mut header = [0; OPTION_HEADER_BYTES];
    if stream.read_exact(&mut header).is_ok() {
        let header = OptionHeader::decode(&header).unwrap();
        let expected = OptionHeader {
            option: OptionCode::StartTls,
            len: 0,
        };
        assert_eq!(header, expected, "before anything else");
    }
}

#[test]
fn a_client_with_tls_speaks_to_no_server_without() {
    let refusal = |reply, message: &'static str| {
        move |mut stream: UnixStream| {
            first_option(&mut stream, HandshakeFlags(3));
            let mut answer = Vec::new();
            encode_option_reply(&mut answer, OptionCode::StartTls, reply, message.as_bytes());
            stream.write_all(&answer).unwrap();
            // Nothing else comes, in the clear or not.
            let mut more = Vec::new();
            stream.read_to_end(&mut more).unwrap();
            assert_eq!(more, b"");
        }
    };
    let acknowledged = |more: Vec<u8>| {
        move |mut stream: UnixStream| {
            first_option(&mut stream, HandshakeFlags(3));
            let mut answer = Vec::new();
            encode_option_reply(&mut answer, OptionCode::StartTls, OptionReplyCode::Ack, b"");
            answer.extend(more);
            stream.write_all(&answer).unwrap();
            drop(stream.shutdown(Shutdown::Write));
            drop(io::copy(&mut stream, &mut io::sink()));
        }
    };
    let mut injected = Vec::new();
    encode_option_reply(&mut injected, OptionCode::Go, OptionReplyCode::Ack, b"");
    type Does = Box<dyn FnOnce(UnixStream) + Send>;
    let servers: [(Does, &str); 6] = [
        (
            Box::new(refusal(OptionReplyCode::ErrPolicy, "TLS not configured")),
            "Denied by server for option 5 (starttls)\nserver reported: TLS not configured",
        ),
        (
            Box::new(refusal(OptionReplyCode::ErrUnsupported, "")),
            "Server don't support STARTTLS option",
        ),
        (
            Box::new(|mut stream| first_option(&mut stream, HandshakeFlags::empty())),
            "Server does not support STARTTLS",
        ),
        (
            Box::new(acknowledged(injected)),
            "data before its TLS handshake",
        ),
        (
            Box::new(acknowledged(Vec::new())),
            "The TLS connection was non-properly terminated",
        ),
        (
            Box::new(acknowledged(vec![22, 3, 3, 0, 4, 14, 0, 0, 0])),
            "",
        ),
    ];
    for (does, said) in servers {
        let (_directory, path) = server_that(does);
        let outcome = queue(Backend::Threads)
            .unwrap()
            .block_on(async { connect_tls(&path, client_tls("client", "localhost")).await });
        let error = outcome.err().expect("there is no such session").to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn a_client_without_tls_is_refused_without_it() {
    let watched = Watched::usual();
    queue(Backend::Threads).unwrap().block_on(async {
        let stream = Stream::connect_unix(watched.path()).await.unwrap();
        let refused = Client::connect(stream, &ConnectOptions::new("")).await;
        let reply = match refused {
            Err(ClientError::Refused { reply, .. }) => reply,
            other => panic!("{:?}", other.err()),
        };
        assert_eq!(reply, OptionReplyCode::ErrTlsRequired);
        let stream = Stream::connect_unix(watched.path()).await.unwrap();
        assert!(Client::list(stream, None).await.is_err());
        let stream = Stream::connect_unix(watched.path()).await.unwrap();
        let tls = client_tls("client", "localhost");
        let listed = Client::list(stream, Some(&tls)).await.unwrap();
        assert_eq!(listed.len(), 1);
    });
}

fn succeeds(program: &str, arguments: &[&str]) -> String {
    let output = Program::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// libnbd's tools copy the disk of this address there and back.
pub(crate) fn copies_by_libnbd(uri: &str) {
    let output = succeeds("nbdinfo", &[uri]);
    assert!(output.contains("with TLS"), "{output}");
    let scratch = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| scratch.path().join(name));
    let data = pattern(9, DISK_BYTES as usize);
    std::fs::write(&one, &data).unwrap();
    succeeds("nbdcopy", &[one.to_str().unwrap(), uri]);
    succeeds("nbdcopy", &[uri, other.to_str().unwrap()]);
    assert!(std::fs::read(&other).unwrap() == data);
}

/// A server of nbdkit's over TLS, which ends with this.
pub(crate) struct Nbdkit {
    _ends: Ends,
    pub(crate) socket: PathBuf,
    _scratch: tempfile::TempDir,
}

impl Nbdkit {
    /// Starts it with options about its TLS, if it is installed.
    pub(crate) fn start(tls: impl FnOnce(&Path) -> Vec<String>) -> Option<Nbdkit> {
        if !installed("nbdkit") {
            return None;
        }
        let scratch = tempfile::tempdir().unwrap();
        let socket = scratch.path().join("nbdkit.sock");
        let mut nbdkit = Program::new("nbdkit");
        nbdkit.args(["-f", "--exit-with-parent", "--tls=require", "-U"]);
        nbdkit.arg(&socket).args(tls(scratch.path()));
        let child = nbdkit.args(["memory", "8M"]).spawn().unwrap();
        eventually("nbdkit listens", || UnixStream::connect(&socket).is_ok());
        Some(Nbdkit {
            _ends: Ends(child),
            socket,
            _scratch: scratch,
        })
    }

    /// A client reads what it has written.
    pub(crate) async fn keeps_data(&self, tls: ClientTls) {
        let client = connect_tls(&self.socket, tls).await.unwrap();
        let data = pattern(4, 3 << 20);
        let write = client.write(1234, Buf::copy_of(&data), Durability::Cached);
        write.await.unwrap();
        let read = client.read(1234, BufMut::zeroed(data.len())).await.unwrap();
        assert!(read[..] == data[..]);
        client.disconnect().await.unwrap();
    }
}

/// A program that ends with the test.
pub(crate) struct Ends(pub(crate) Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn libnbd_copies_to_and_from_our_server() {
    if !installed("nbdcopy") || !installed("nbdinfo") {
        return;
    }
    let watched = Watched::usual();
    let uri = watched.uri("client");
    copies_by_libnbd(&uri);
    for party in ["bare", "revoked", "stranger"] {
        let refused = Program::new("nbdinfo")
            .arg(watched.uri(party))
            .output()
            .unwrap();
        assert!(!refused.status.success(), "{party}");
    }
}

#[test]
fn our_client_speaks_to_nbdkit_over_tls() {
    let certificates = format!("--tls-certificates={}", directory("server").display());
    let options = |_: &Path| vec!["--tls-verify-peer".to_string(), certificates];
    let Some(nbdkit) = Nbdkit::start(options) else {
        return;
    };
    let socket = &nbdkit.socket;
    queue(Backend::Auto).unwrap().block_on(async {
        nbdkit.keeps_data(client_tls("client", "localhost")).await;
        let wrong = connect_tls(socket, client_tls("client", "elsewhere.example")).await;
        assert!(wrong.is_err());
        assert!(
            connect_tls(socket, client_tls("bare", "localhost"))
                .await
                .is_err()
        );
    });
}
