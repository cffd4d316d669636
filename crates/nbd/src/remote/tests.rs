//! Names of exports, read from file names and from options.

use std::num::NonZeroU8;
use std::path::PathBuf;
use std::time::Duration;

use cowslip_block::options::{Options, split};

use super::{Address, ClientSide, ExportName, TlsName, Waits};
use crate::tls::PeerCheck;

fn tcp(host: &str, port: &str, export: &str) -> ExportName {
    ExportName {
        server: Address::Tcp {
            host: host.to_string(),
            port: port.to_string(),
        },
        export: export.to_string(),
        tls: None,
        waits: Waits::default(),
        connections: NonZeroU8::MIN,
    }
}

fn unix(path: &str, export: &str) -> ExportName {
    ExportName {
        server: Address::Unix(PathBuf::from(path)),
        export: export.to_string(),
        tls: None,
        waits: Waits::default(),
        connections: NonZeroU8::MIN,
    }
}

fn over_tls(name: ExportName, credentials: ClientSide, hostname: Option<&str>) -> ExportName {
    let hostname = hostname.map(str::to_string);
    ExportName {
        tls: Some(TlsName {
            credentials,
            hostname,
        }),
        ..name
    }
}

#[test]
fn exports_are_named_in_three_ways() {
    let of = |name: &str| ExportName::of_file_name(name).unwrap().unwrap();
    assert_eq!(of("nbd://localhost"), tcp("localhost", "10809", ""));
    assert_eq!(of("nbd://[::1]:7/a%20b%2f"), tcp("::1", "7", "a b/"));
    assert_eq!(of("nbd+tcp://h:1/x/y"), tcp("h", "1", "x/y"));
    assert_eq!(of("nbd+unix:///x?socket=/tmp/a%25"), unix("/tmp/a%", "x"));
    assert_eq!(of("nbd+unix://?socket=s"), unix("s", ""));
    assert_eq!(
        of("nbd:localhost:10:exportname=a:b"),
        tcp("localhost", "10", "a:b")
    );
    assert_eq!(of("nbd:unix:/tmp/s"), unix("/tmp/s", ""));
    let directory = |check| ClientSide::Directory(PathBuf::from("/c d"), check);
    assert_eq!(
        of("nbds://h/x?tls-certificates=/c%20d"),
        over_tls(tcp("h", "10809", "x"), directory(PeerCheck::Required), None)
    );
    assert_eq!(
        of("nbds+unix:///?socket=/s&tls-hostname=h&tls-certificates=/c%20d&tls-verify-peer=0"),
        over_tls(unix("/s", ""), directory(PeerCheck::Off), Some("h"))
    );
    for other in ["nbd", "file:nbd:x", "./nbd://x", "nbdx:y"] {
        assert!(ExportName::of_file_name(other).is_none(), "{other}");
    }
    for wrong in [
        "nbd:",
        "nbd:x",
        "nbd:x:y",
        "nbd:x:0",
        "nbd:unix:",
        "nbd://",
        "nbd://h:99999/",
        "nbd://h/%4",
        "nbd://h/%zz",
        "nbd://h/%00",
        "nbd://[::1/x",
        "nbd://h/x?tls-certificates=y",
        "nbd+unix:///x",
        "nbd+unix:///x?path=y",
        "nbd+unix:///x?socket=s&tls-certificates=/c",
        "nbds://h/x",
        "nbds://h/x?tls-certificates=/c&tls-psk-file=/p",
        "nbds://h/x?tls-certificates=/c&tls-verify-peer=maybe",
        "nbds+unix:///x?tls-certificates=/c",
    ] {
        assert!(ExportName::of_file_name(wrong).unwrap().is_err(), "{wrong}");
    }
}

#[test]
fn users_of_keys_are_named_before_the_host_or_behind_it() {
    let of = |name: &str| ExportName::of_file_name(name).unwrap().unwrap();
    let keys = |user: Option<&str>| ClientSide::Keys(PathBuf::from("/k"), user.map(str::to_string));
    for (name, expected) in [
        (
            "nbds://h/x?tls-psk-file=/k",
            over_tls(tcp("h", "10809", "x"), keys(None), None),
        ),
        (
            "nbds://b%40c@[::1]:7/x?tls-psk-file=/k",
            over_tls(tcp("::1", "7", "x"), keys(Some("b@c")), None),
        ),
        (
            "nbds+unix://alice@/x/y?socket=/s&tls-psk-file=/k",
            over_tls(unix("/s", "x/y"), keys(Some("alice")), None),
        ),
        (
            "nbds+unix://alice@?socket=/s&tls-psk-file=/k",
            over_tls(unix("/s", ""), keys(Some("alice")), None),
        ),
        (
            "nbds+unix:///a@b?socket=/s&tls-psk-file=/k&tls-username=%2f&tls-hostname=h",
            over_tls(unix("/s", "a@b"), keys(Some("/")), Some("h")),
        ),
        (
            "nbds+unix://@/?socket=/s&tls-psk-file=/k",
            over_tls(unix("/s", ""), keys(None), None),
        ),
        (
            "nbds+unix://alice@/?socket=/s&tls-certificates=/c",
            over_tls(
                unix("/s", ""),
                ClientSide::Directory(PathBuf::from("/c"), PeerCheck::Required),
                None,
            ),
        ),
    ] {
        assert_eq!(of(name), expected, "{name}");
    }
    for wrong in [
        "nbds+unix:///x?tls-psk-file=/c",
        "nbd://h/x?tls-psk-file=/p",
        "nbd://alice@h/x",
        "nbd+unix://alice@/x?socket=s",
        "nbds://alice@/x?tls-psk-file=/p",
        "nbds://alice@h/x?tls-psk-file=/p&tls-username=bob",
        "nbds://%zz@h/x?tls-psk-file=/p",
    ] {
        assert!(ExportName::of_file_name(wrong).unwrap().is_err(), "{wrong}");
    }
}

#[test]
fn options_say_where_a_server_is() {
    let of = |text: &str| {
        let mut options = Options::new(split(text).unwrap());
        let read = ExportName::of_options(&mut options);
        assert!(read.is_err() || options == Options::default(), "{text}");
        read.map_err(|error| error.to_string())
    };
    assert_eq!(
        of("server.type=unix,server.path=/s,export=e"),
        Ok(unix("/s", "e"))
    );
    assert_eq!(of("path=/s"), Ok(unix("/s", "")));
    assert_eq!(of("host=h,port=5"), Ok(tcp("h", "5", "")));
    assert_eq!(
        of("server.type=inet,server.host=h"),
        Ok(tcp("h", "10809", ""))
    );
    let object = || ClientSide::Object("c".to_string());
    assert_eq!(
        of("path=/s,tls-creds=c"),
        Ok(over_tls(unix("/s", ""), object(), None))
    );
    assert_eq!(
        of("host=h,tls-creds=c,tls-hostname=x"),
        Ok(over_tls(tcp("h", "10809", ""), object(), Some("x")))
    );
    let waits = Waits {
        open: Duration::from_secs(7),
        reconnect: Duration::from_secs(u32::MAX.into()),
    };
    assert_eq!(
        of("path=/s,open-timeout=7,reconnect-delay=4294967295"),
        Ok(ExportName {
            waits,
            ..unix("/s", "")
        })
    );
    let many = |connections| ExportName {
        connections: NonZeroU8::new(connections).unwrap(),
        ..unix("/s", "")
    };
    assert_eq!(of("path=/s,connections=1"), Ok(many(1)));
    assert_eq!(of("path=/s,connections=16"), Ok(many(16)));
    for wrong in ["0", "17", "256", "x", ""] {
        let error = of(&format!("path=/s,connections={wrong}")).unwrap_err();
        assert!(error.contains("between 1 and 16"), "{error}");
    }
    for wrong in ["", "x", "-1", "1.5", "4294967296"] {
        for name in ["open-timeout", "reconnect-delay"] {
            let error = of(&format!("path=/s,{name}={wrong}")).unwrap_err();
            assert_eq!(error, format!("Parameter '{name}' expects a number"));
        }
    }
    assert!(
        of("host=h,tls-hostname=x")
            .unwrap_err()
            .contains("'tls-creds'")
    );
    assert_eq!(of("export=e").unwrap_err(), "NBD server address missing");
    assert!(
        of("path=/s,host=h")
            .unwrap_err()
            .contains("at the same time")
    );
    assert!(of("server.type=vsock").unwrap_err().contains("'vsock'"));
    assert!(of("server.type=unix").unwrap_err().contains("server.path"));
}
