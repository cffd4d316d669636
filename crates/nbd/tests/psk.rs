//! TLS with keys shared beforehand: who is served, what never is, peers that break it, OpenSSL's
//! own ends and other programs.
//!
//! Keys here are in nobody's use: they are made of letters for these tests.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::*;
use crate::tls::{
    Ends, Nbdkit, Watched, both, client_tls, connect_tls, copies_by_libnbd, first_option, options,
    server_that, server_tls,
};
use cowslip_nbd::client::ClientError;
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::tls::{
    ClientCredentials, ClientTls, CredentialsError, PeerCheck, ServerTls, SharedKeys,
};
use cowslip_nbd::{Client, ConnectOptions, ServerOptions};
use cowslip_queue::{Backend, Stream};
use openssl::dh::Dh;
use openssl::ssl::{
    Ssl, SslContext, SslContextBuilder, SslMethod, SslOptions, SslStream, SslVersion,
};

const KEYS: &str = "\
alice:616c696365207365637265742030313233343536373839616263646566303132
qemu:71656d7520736563726574203031323334353637383961626364656630313233
";

fn keys() -> SharedKeys {
    SharedKeys::parse(KEYS.as_bytes()).unwrap()
}

fn alices_key() -> Vec<u8> {
    keys().key_of("alice").unwrap().to_vec()
}

fn server() -> ServerTls {
    ServerTls::with_keys(keys()).unwrap()
}

fn user(name: &str) -> ClientTls {
    of(name, &keys())
}

fn of(name: &str, keys: &SharedKeys) -> ClientTls {
    let credentials = ClientCredentials::with_key_of(name, keys).unwrap();
    credentials.to_server(None).unwrap()
}

/// A client with a key that the server does not have for that name.
fn with_wrong_key(name: &str) -> ClientTls {
    let text = format!("{name}:{}", "77".repeat(32));
    of(name, &SharedKeys::parse(text.as_bytes()).unwrap())
}

fn usual() -> Watched {
    Watched::start(Backend::Auto, options(server()))
}

/// Checks that the server still serves its users.
fn still_serves(watched: &Watched) {
    watched.still_serves(user("alice"));
}

/// Why this client is not let in.
fn refused(path: &Path, tls: ClientTls) -> String {
    let queue = queue(Backend::Threads).unwrap();
    let outcome = queue.block_on(async { connect_tls(path, tls).await });
    outcome.err().expect("nobody should be served").to_string()
}

#[test]
fn what_is_written_with_a_key_is_read_back() {
    both::written_is_read_back(&server, &|| user("qemu"));
}

#[test]
fn who_has_no_key_is_not_served_and_does_not_learn_why() {
    let watched = usual();
    let wrong = refused(watched.path(), with_wrong_key("alice"));
    watched.wait_for_reason("(user \"alice\")");
    let unknown = refused(watched.path(), with_wrong_key("mallory"));
    watched.wait_for_reason("(there is no key for user \"mallory\")");
    assert!(wrong.contains("TLS handshake failed: "), "{wrong}");
    assert_eq!(wrong, unknown, "a name that is known and one that is not");
    // A name that is hardly one; and one with another user's key.
    refused(watched.path(), with_wrong_key(&"n".repeat(128)));
    let text = KEYS.replace("alice", "carol");
    let carol = SharedKeys::parse(text.as_bytes()).unwrap();
    refused(watched.path(), of("carol", &carol));
    still_serves(&watched);
}

#[test]
fn missing_keys_are_reported() {
    let error = ServerTls::with_keys(SharedKeys::default()).unwrap_err();
    assert_eq!(error, CredentialsError::NoKeys);
    let error = ClientCredentials::with_key_of("bob", &keys()).unwrap_err();
    assert_eq!(error, CredentialsError::NoSuchUser("bob".to_string()));
    for debug in [
        format!("{:?}", keys()),
        format!("{:?}", server()),
        format!("{:?}", user("alice")),
    ] {
        assert!(
            !debug.contains("616c") && !debug.contains("97, 108"),
            "{debug}"
        );
    }
}

#[test]
fn certificates_and_keys_do_not_mix() {
    let keyed = usual();
    let message = refused(keyed.path(), client_tls("client", "localhost"));
    assert!(message.contains("TLS: "), "{message}");
    still_serves(&keyed);
    // Nor does a client believe the certificate of a server that leaves its key alone, in either
    // version of TLS.
    for check in [PeerCheck::Required, PeerCheck::Off] {
        let certified = Watched::start(Backend::Auto, options(server_tls("server", check)));
        let message = refused(certified.path(), user("alice"));
        assert!(message.contains("TLS handshake failed: "), "{message}");
        assert!(message.contains("certificate verify failed"), "{message}");
    }
}

#[test]
fn a_plain_client_is_refused_without_tls() {
    let watched = usual();
    queue(Backend::Threads).unwrap().block_on(async {
        let stream = Stream::connect_unix(watched.path()).await.unwrap();
        let reply = match Client::connect(stream, &ConnectOptions::new("")).await {
            Err(ClientError::Refused { reply, .. }) => reply,
            other => panic!("{:?}", other.err()),
        };
        assert_eq!(reply, OptionReplyCode::ErrTlsRequired);
        let stream = Stream::connect_unix(watched.path()).await.unwrap();
        let listed = Client::list(stream, Some(&user("alice"))).await.unwrap();
        assert_eq!(listed.len(), 1);
    });
    // And a client with a key speaks to no server without TLS.
    let (_directory, path) = server_that(|mut stream| {
        first_option(&mut stream, HandshakeFlags(3));
        let mut answer = Vec::new();
        let reply = OptionReplyCode::ErrPolicy;
        encode_option_reply(
            &mut answer,
            OptionCode::StartTls,
            reply,
            b"TLS not configured",
        );
        stream.write_all(&answer).unwrap();
        let mut more = Vec::new();
        stream.read_to_end(&mut more).unwrap();
        assert_eq!(more, b"");
    });
    let message = refused(&path, user("alice"));
    assert!(
        message.contains("Denied by server for option 5"),
        "{message}"
    );
}

#[test]
fn only_those_users_are_served_who_are_authorized() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let names = Arc::clone(&asked);
    let tls = server().authorized_by(move |name| {
        names.lock().unwrap().push(name.to_string());
        name == "alice"
    });
    let watched = Watched::start(Backend::Auto, options(tls));
    still_serves(&watched);
    refused(watched.path(), user("qemu"));
    watched.wait_for_reason("TLS psk authz check for qemu is denied");
    // Authorization comes after authentication: a wrong key for Alice does not get there.
    refused(watched.path(), with_wrong_key("alice"));
    assert_eq!(*asked.lock().unwrap(), ["alice", "qemu"]);
}

#[test]
fn bytes_before_the_handshake_are_not_taken_for_what_comes_after_it() {
    let watched = usual();
    both::early_bytes_are_not_believed(&watched, "TLS handshake failed: ");
    still_serves(&watched);
}

#[test]
fn what_is_no_handshake_ends_the_connection() {
    let watched = usual();
    let more = [
        // Alerts that only warn, without end.
        [21, 3, 1, 0, 2, 1, 90].repeat(20_000),
        // As much as OpenSSL would still take.
        both::endless([1, 0xf0, 0]),
    ];
    both::garbage_ends_the_connection(&watched, &more);
    still_serves(&watched);
}

#[test]
fn a_handshake_that_is_never_finished_is_cut_off() {
    still_serves(&both::endless_handshakes_are_cut_off(server()));
}

#[test]
fn bytes_that_are_changed_on_the_way_are_noticed() {
    let watched = usual();
    both::changed_bytes_are_noticed(&watched, &|| user("alice"), None);
    still_serves(&watched);
}

/// OpenSSL's own context, with what a test makes of it.
fn raw_context(make: impl FnOnce(&mut SslContextBuilder)) -> SslContext {
    let mut builder = SslContextBuilder::new(SslMethod::tls()).unwrap();
    // Keys that our server would refuse must not fail over here.
    builder.set_security_level(0);
    builder.set_psk_client_callback(|_, _, identity, key| {
        identity[..6].copy_from_slice(b"alice\0");
        key[..32].copy_from_slice(&alices_key());
        Ok(32)
    });
    builder.set_psk_server_callback(|_, _, key| {
        key[..32].copy_from_slice(&alices_key());
        Ok(32)
    });
    make(&mut builder);
    builder.build()
}

/// OpenSSL's own client goes through our server's handshake: the version and the cipher, or why
/// not.
fn raw_client(watched: &Watched, context: &SslContext) -> Result<SslStream<UnixStream>, String> {
    let mut client = RawClient::greeted(watched.path());
    client.option(OptionCode::StartTls, b"");
    client.replies();
    let mut stream = SslStream::new(Ssl::new(context).unwrap(), client.stream).unwrap();
    let shaken = stream.connect();
    shaken.map_err(|error| error.to_string())?;
    let mut leave = Vec::new();
    encode_option(&mut leave, OptionCode::Abort, b"");
    stream
        .write_all(&leave)
        .map_err(|error| error.to_string())?;
    let mut reply = [0; OPTION_REPLY_HEADER_BYTES];
    stream
        .read_exact(&mut reply)
        .map_err(|error| error.to_string())?;
    Ok(stream)
}

#[test]
fn only_safe_versions_and_ciphers_are_spoken() {
    let watched = usual();
    let version = |version| {
        move |builder: &mut SslContextBuilder| {
            builder.set_min_proto_version(Some(version)).unwrap();
            builder.set_max_proto_version(Some(version)).unwrap();
        }
    };
    let old = |ciphers: &'static str| {
        move |builder: &mut SslContextBuilder| {
            version(SslVersion::TLS1_2)(builder);
            builder.set_cipher_list(ciphers).unwrap();
        }
    };
    let new = |ciphers: &'static str| {
        move |builder: &mut SslContextBuilder| {
            version(SslVersion::TLS1_3)(builder);
            builder.set_ciphersuites(ciphers).unwrap();
        }
    };
    let spoken = |context: SslContext| raw_client(&watched, &context);
    for (context, cipher) in [
        (raw_context(|_| ()), "TLS_AES_128_GCM_SHA256"),
        (
            raw_context(new("TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384")),
            "TLS_CHACHA20_POLY1305_SHA256",
        ),
        (
            raw_context(old("PSK:ECDHE-PSK-CHACHA20-POLY1305")),
            "ECDHE-PSK-CHACHA20-POLY1305",
        ),
    ] {
        let stream = spoken(context).unwrap();
        assert_eq!(stream.ssl().current_cipher().unwrap().name(), cipher);
    }
    for (context, message) in [
        (raw_context(version(SslVersion::TLS1_1)), "TLS 1.1"),
        (raw_context(new("TLS_AES_256_GCM_SHA384")), "SHA-384"),
        (
            raw_context(old("PSK-AES128-GCM-SHA256")),
            "no forward secrecy",
        ),
        (
            raw_context(old("PSK-CHACHA20-POLY1305:RSA-PSK-AES128-GCM-SHA256")),
            "nor here",
        ),
        (
            raw_context(old("ECDHE-PSK-AES128-CBC-SHA256")),
            "a cipher that does not authenticate",
        ),
        (raw_context(old("ECDHE-PSK-NULL-SHA256")), "none at all"),
        (raw_context(old("ADH-AES128-GCM-SHA256")), "no key"),
    ] {
        assert!(spoken(context).is_err(), "{message}");
    }
    // A client that would do without Diffie-Hellman in TLS 1.3 as well (SSL_OP_ALLOW_NO_DHE_KEX)
    // does it all the same.
    let context = raw_context(|builder| {
        builder.set_options(SslOptions::from_bits_retain(1 << 10));
    });
    let stream = spoken(context).unwrap();
    assert_eq!(stream.ssl().version_str(), "TLSv1.3");
    assert!(stream.ssl().peer_tmp_key().is_ok(), "forward secrecy");
    still_serves(&watched);
}

#[test]
fn the_older_version_does_not_reveal_known_names_either() {
    let watched = usual();
    let message = |name: &'static [u8]| {
        let context = raw_context(|builder| {
            let version = Some(SslVersion::TLS1_2);
            builder.set_max_proto_version(version).unwrap();
            builder.set_psk_client_callback(move |_, _, identity, key| {
                identity[..name.len()].copy_from_slice(name);
                key[..32].fill(9);
                Ok(32)
            });
        });
        raw_client(&watched, &context).map(drop).unwrap_err()
    };
    let known = message(b"alice\0");
    watched.wait_for_reason("(user \"alice\")");
    for stranger in [&b"mallory\0"[..], b"\0", b"\xff\xfe\0"] {
        assert_eq!(message(stranger), known);
    }
    watched.wait_for_reason("(there is no key for user \"mallory\")");
    still_serves(&watched);
}

/// OpenSSL's own server, to which our client speaks: what the client says.
fn with_raw_server(context: SslContext) -> String {
    let (_directory, path) = server_that(move |mut stream| {
        first_option(&mut stream, HandshakeFlags(3));
        let mut answer = Vec::new();
        encode_option_reply(&mut answer, OptionCode::StartTls, OptionReplyCode::Ack, b"");
        stream.write_all(&answer).unwrap();
        let mut stream = SslStream::new(Ssl::new(&context).unwrap(), stream).unwrap();
        if stream.accept().is_ok() {
            // Whatever is asked, an answer that says that we have come here.
            drop(stream.read(&mut [0; 100]));
            let mut answer = Vec::new();
            let reply = OptionReplyCode::ErrPolicy;
            encode_option_reply(&mut answer, OptionCode::ExtendedHeaders, reply, b"reached");
            encode_option_reply(&mut answer, OptionCode::StructuredReply, reply, b"reached");
            drop(stream.write_all(&answer));
            drop(stream.read(&mut [0; 100]));
        }
    });
    refused(&path, user("alice"))
}

#[test]
fn a_client_accepts_forward_secrecy_only() {
    let old = |ciphers: &'static str, dh: Option<Dh<openssl::pkey::Params>>| {
        raw_context(move |builder| {
            let version = Some(SslVersion::TLS1_2);
            builder.set_max_proto_version(version).unwrap();
            builder.set_cipher_list(ciphers).unwrap();
            if let Some(dh) = dh {
                builder.set_tmp_dh(&dh).unwrap();
            }
        })
    };
    let safe = || Some(Dh::get_2048_256().unwrap());
    for (server, is_fine) in [
        (raw_context(|_| ()), true),
        (old("ECDHE-PSK-CHACHA20-POLY1305", None), true),
        (old("DHE-PSK-AES256-GCM-SHA384", safe()), true),
        (old("DHE-PSK-AES128-GCM-SHA256", safe()), true),
        (
            old(
                "DHE-PSK-AES256-GCM-SHA384",
                Some(Dh::get_1024_160().unwrap()),
            ),
            false,
        ),
        (old("PSK-AES256-GCM-SHA384", None), false),
        (old("ECDHE-PSK-AES256-CBC-SHA384", None), false),
    ] {
        let message = with_raw_server(server);
        // A server that has gone through the handshake has our first option.
        assert_eq!(
            !message.contains("TLS handshake failed"),
            is_fine,
            "{message}"
        );
    }
    // One with another key for the same name.
    let other = raw_context(|builder| {
        builder.set_psk_server_callback(|_, _, key| {
            key[..32].fill(7);
            Ok(32)
        });
    });
    let message = with_raw_server(other);
    assert!(message.contains("TLS handshake failed"), "{message}");
}

#[test]
fn tickets_for_later_sessions_are_left_alone() {
    // What a server of OpenSSL sends by itself are tickets, after the handshake; they mean nothing
    // to us.
    let tickets = raw_context(|builder| builder.set_num_tickets(7).unwrap());
    let message = with_raw_server(tickets);
    assert!(!message.contains("TLS handshake failed"), "{message}");
}

/// Carries bytes between two sockets until one of them ends.
fn carry(one: &UnixStream, other: &UnixStream) {
    let (mut from, mut to) = (one.try_clone().unwrap(), other.try_clone().unwrap());
    std::thread::spawn(move || {
        drop(std::io::copy(&mut from, &mut to));
        drop(to.shutdown(Shutdown::Both));
        drop(from.shutdown(Shutdown::Both));
    });
}

#[test]
fn a_client_that_asks_for_new_keys_without_end_is_left() {
    if !installed("openssl") {
        return;
    }
    let patient = ServerOptions {
        handshake_timeout: Duration::from_secs(60),
        ..options(server())
    };
    let watched = Watched::start(Backend::Auto, patient);
    // OpenSSL's program knows nothing of NBD, so its way begins behind STARTTLS.
    let path = watched.path().to_path_buf();
    let (_directory, way) = server_that(move |stream| {
        let mut client = RawClient::greeted(&path);
        client.option(OptionCode::StartTls, b"");
        client.replies();
        carry(&stream, &client.stream);
        carry(&client.stream, &stream);
    });
    let key: String = alices_key().iter().map(|b| format!("{b:02x}")).collect();
    let mut program = Program::new("openssl");
    program
        .args(["s_client", "-tls1_3", "-psk_identity", "alice", "-psk"])
        .arg(key)
        .args(["-ciphersuites", "TLS_AES_128_GCM_SHA256", "-unix"])
        .arg(way)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut program = Ends(program.spawn().unwrap());
    let mut words = program.0.stdin.take().unwrap();
    let begun = Instant::now();
    let mut asked = 0;
    // A line with K asks for new keys on both sides; lines that arrive together count as one.
    while watched.reasons.lock().unwrap().is_empty() && begun.elapsed() < Duration::from_secs(50) {
        if words.write_all(b"K\n").is_err() {
            break;
        }
        asked += 1;
        std::thread::sleep(Duration::from_micros(200));
    }
    watched.wait_for_reason("sends too many messages without data");
    assert!(asked > 1000, "{asked} are not without end");
    still_serves(&watched);
}

fn keys_file(directory: &Path) -> PathBuf {
    let path = directory.join("keys.psk");
    std::fs::write(&path, KEYS).unwrap();
    path
}

#[test]
fn libnbd_copies_to_and_from_our_server_with_a_key() {
    if !installed("nbdcopy") || !installed("nbdinfo") {
        return;
    }
    let watched = usual();
    let scratch = tempfile::tempdir().unwrap();
    let file = keys_file(scratch.path());
    let uri = |user: &str, file: &Path| {
        let (socket, file) = (watched.path().display(), file.display());
        format!("nbds+unix://{user}@/?socket={socket}&tls-psk-file={file}")
    };
    let own = uri("alice", &file);
    copies_by_libnbd(&own);
    let wrong = scratch.path().join("wrong.psk");
    let text = format!("alice:{0}\nmallory:{0}\n", "42".repeat(32));
    std::fs::write(&wrong, text).unwrap();
    for user in ["alice", "mallory"] {
        let output = Program::new("nbdinfo").arg(uri(user, &wrong)).output();
        assert!(!output.unwrap().status.success(), "{user}");
    }
    still_serves(&watched);
}

#[test]
fn our_client_speaks_to_nbdkit_with_a_key() {
    let options = |scratch: &Path| vec![format!("--tls-psk={}", keys_file(scratch).display())];
    let Some(nbdkit) = Nbdkit::start(options) else {
        return;
    };
    let speaks = nbdkit.keeps_data(user("alice"));
    queue(Backend::Auto).unwrap().block_on(speaks);
    for tls in [
        with_wrong_key("alice"),
        with_wrong_key("mallory"),
        client_tls("client", "localhost"),
    ] {
        refused(&nbdkit.socket, tls);
    }
}
