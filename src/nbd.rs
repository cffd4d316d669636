//! NBD servers, as command lines name them, and the way to one.
//!
//! | written | |
//! | --- | --- |
//! | `nbd://HOST[:PORT]/EXPORT`, `nbd+tcp://…` | over TCP |
//! | `nbd+unix:///EXPORT?socket=PATH` | over a Unix socket |
//! | `nbds://…`, `nbds+unix://…`, each with `tls-certificates=DIR` | the same over TLS, as libnbd names it |
//! | `nbds://[USER@]…`, `nbds+unix://[USER@]…`, each with `tls-psk-file=FILE` | the same with a key shared beforehand |
//! | `nbd:HOST:PORT[:exportname=EXPORT]`, `nbd:unix:PATH[:exportname=EXPORT]` | QEMU's older form |
//! | `driver=nbd,server.type=…`, `driver=nbd,host=…`, `driver=nbd,path=…` | as options; over TLS with `tls-creds=ID` |
//!
//! Sources: `doc/uri.md` of the NetworkBlockDevice project; nbd_connect_uri(3); qemu(1), "nbd".

use std::net::ToSocketAddrs;
use std::num::NonZeroU8;
use std::path::PathBuf;
use std::time::Duration;

use cowslip::file::Storage;
use cowslip_nbd::ClientError;
use cowslip_nbd::protocol::OptionReplyCode;
use cowslip_nbd::tls::{ClientTls, PeerCheck};
use cowslip_queue::Stream;

use crate::error::CommandError;
use crate::open;

mod file;
mod link;
mod requests;
mod unflushed;
mod worker;

pub use file::open;

/// The port that servers have by default (IANA).
const PORT: &str = "10809";

/// More connections than anybody has found a use for: nbdcopy takes four, unless it is told
/// otherwise.
const MOST_CONNECTIONS: NonZeroU8 = NonZeroU8::new(16).unwrap();

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of a host.
    Tcp {
        /// Name or address.
        host: String,
        /// Number, or name of a service.
        port: String,
    },
}

impl Address {
    /// Connects to the server.
    ///
    /// # Errors
    /// `Failed to connect to 'x': why`.
    pub async fn connect(&self) -> Result<Stream, CommandError> {
        let words = |error: &std::io::Error| cowslip::error::system_words(error);
        let (name, connected) = match self {
            Address::Unix(path) => (
                path.display().to_string(),
                Stream::connect_unix(path).await.map_err(|e| words(&e)),
            ),
            Address::Tcp { host, port } => {
                let name = format!("{host}:{port}");
                let resolved = (host.as_str(), port.parse().unwrap_or(0)).to_socket_addrs();
                let resolved = resolved.map_err(|_| {
                    CommandError::new(format!(
                        "address resolution failed for {name}: Name or service not known"
                    ))
                })?;
                let mut connected = Err("Name or service not known".to_string());
                for address in resolved {
                    connected = Stream::connect_tcp(address).await.map_err(|e| words(&e));
                    if connected.is_ok() {
                        break;
                    }
                }
                (name, connected)
            }
        };
        connected.map_err(|why| CommandError::new(format!("Failed to connect to '{name}': {why}")))
    }
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportName {
    /// The server.
    pub server: Address,
    /// The export; empty for the default one.
    pub export: String,
    /// How to speak to it over TLS; `None` is in the clear.
    pub tls: Option<TlsName>,
    /// How long a server that is not there is waited for.
    pub waits: Waits,
    /// How many connections there may be, where the server offers several.
    pub connections: NonZeroU8,
}

/// How long a server that is not there is waited for; not at all, unless that is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// When the export is opened (`open-timeout`).
    pub open: Duration,
    /// By requests, from when a connection was lost (`reconnect-delay`).
    pub reconnect: Duration,
}

/// What is said of TLS to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsName {
    /// What the client has.
    pub credentials: ClientSide,
    /// For whom the server's certificate has to be, if not for the host that is connected to.
    pub hostname: Option<String>,
}

/// Where a client's credentials are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientSide {
    /// The object of this ID.
    Object(String),
    /// The files of this directory, and what a URI says of the server's.
    Directory(PathBuf, PeerCheck),
    /// A user's key in this file; `None` is the user who runs the program.
    Keys(PathBuf, Option<String>),
}

impl TlsName {
    /// What speaks to the server at this address.
    ///
    /// # Errors
    /// The credentials cannot be used, or it is not known for whom the server's have to be.
    pub fn to_server(&self, server: &Address) -> Result<ClientTls, CommandError> {
        let credentials = match &self.credentials {
            ClientSide::Object(id) => open::object::client_credentials(id)?,
            ClientSide::Directory(path, check) => open::tls::client_of_directory(path, *check)?,
            ClientSide::Keys(path, user) => open::psk::client_of_file(path, user.as_deref())?,
        };
        let connected = match server {
            Address::Tcp { host, .. } => Some(host),
            Address::Unix(_) => None,
        };
        let hostname = self.hostname.as_ref().or(connected);
        let tls = credentials.to_server(hostname.map(String::as_str));
        tls.map_err(|error| CommandError::new(error.to_string()))
    }
}

/// Why a server has refused a client, which had sent `option` at last.
pub fn refused(error: &ClientError, option: &str) -> CommandError {
    match error {
        ClientError::Refused {
            reply: OptionReplyCode::ErrTlsRequired,
            message,
        } => CommandError::new(format!(
            "TLS negotiation required before option {option}\nDid you forget a valid tls-creds?\nserver reported: {message}"
        )),
        ClientError::Io(_) | ClientError::Protocol(_) => {
            CommandError::new(format!("Failed to negotiate with the server: {error}"))
        }
        error => CommandError::new(error.to_string()),
    }
}

impl ExportName {
    /// The URI by which QEMU tells of it, however it was named; TLS is no part of that.
    pub fn uri(&self) -> String {
        let export = &self.export;
        match &self.server {
            Address::Tcp { host, port } if export.is_empty() => format!("nbd://{host}:{port}"),
            Address::Tcp { host, port } => format!("nbd://{host}:{port}/{export}"),
            Address::Unix(path) => {
                let slash = if export.is_empty() { "" } else { "/" };
                format!("nbd+unix://{slash}{export}?socket={}", path.display())
            }
        }
    }

    /// Where its bytes are stored, as far as its name tells: two names of one socket are one
    /// server.
    pub fn storage(&self) -> Storage {
        use std::os::unix::fs::MetadataExt;
        let server = match &self.server {
            Address::Tcp { host, port } => format!("tcp:{host}:{port}"),
            Address::Unix(path) => match std::fs::metadata(path) {
                Ok(found) => format!("unix:{}:{}", found.dev(), found.ino()),
                Err(_) => format!("unix:{}", path.display()),
            },
        };
        Storage::named(&format!("{server}/{}", self.export))
    }

    /// Reads a file name that begins with `nbd:`, `nbd://`, `nbd+tcp://`, `nbd+unix://`, or with
    /// `nbds` in their place; `None` of others.
    ///
    /// # Errors
    /// It is not what it begins as.
    pub fn of_file_name(name: &str) -> Option<Result<ExportName, CommandError>> {
        for (scheme, tls) in [("nbd", Tls::Never), ("nbds", Tls::Always)] {
            let Some(rest) = name.strip_prefix(scheme) else {
                continue;
            };
            if let Some(rest) = rest.strip_prefix("+unix://") {
                return Some(over_unix(rest, tls));
            }
            let over = rest.strip_prefix("+tcp").unwrap_or(rest);
            if let Some(rest) = over.strip_prefix("://") {
                return Some(over_tcp(rest, tls));
            }
        }
        let rest = name.strip_prefix("nbd:")?;
        Some(older(rest))
    }

    /// What of the server's place options have said, if that is one.
    ///
    /// # Errors
    /// Something is missing, or said twice.
    pub fn of_options(pairs: &[(String, String)]) -> Result<ExportName, CommandError> {
        let of = |name: &str| {
            let found = pairs.iter().rev().find(|(given, _)| given == name);
            found.map(|(_, value)| value.clone())
        };
        let kind = of("server.type");
        let path = of("server.path").or(of("path"));
        let host = of("server.host").or(of("host"));
        let port = of("server.port").or(of("port"));
        let server = match (kind.as_deref(), path, host) {
            (None | Some("unix"), Some(path), None) => Address::Unix(PathBuf::from(path)),
            (None | Some("inet"), None, Some(host)) => Address::Tcp {
                host,
                port: port.unwrap_or(PORT.to_string()),
            },
            (None, None, None) => return Err(CommandError::new("NBD server address missing")),
            (None, Some(_), Some(_)) => {
                let text = "path and host may not be used at the same time";
                return Err(CommandError::new(text));
            }
            (Some("unix"), ..) => {
                return Err(CommandError::new("Parameter 'server.path' is missing"));
            }
            (Some("inet"), ..) => {
                return Err(CommandError::new("Parameter 'server.host' is missing"));
            }
            (Some(other), ..) => {
                let text = format!("Parameter 'server.type' does not accept value '{other}'");
                return Err(CommandError::new(text));
            }
        };
        let export = of("export").unwrap_or_default();
        let tls = match (of("tls-creds"), of("tls-hostname")) {
            (Some(id), hostname) => Some(TlsName {
                credentials: ClientSide::Object(id),
                hostname,
            }),
            (None, Some(_)) => {
                let text = "Parameter 'tls-hostname' is not permitted without 'tls-creds'";
                return Err(CommandError::new(text));
            }
            (None, None) => None,
        };
        let seconds = |name: &str| match of(name) {
            None => Ok(Duration::ZERO),
            Some(text) => text.parse::<u32>().map_or_else(
                |_| {
                    let text = format!("Parameter '{name}' expects a number");
                    Err(CommandError::new(text))
                },
                |seconds| Ok(Duration::from_secs(seconds.into())),
            ),
        };
        let waits = Waits {
            open: seconds("open-timeout")?,
            reconnect: seconds("reconnect-delay")?,
        };
        Ok(ExportName {
            server,
            export,
            tls,
            waits,
            connections: connections(of("connections").as_deref())?,
        })
    }

    /// Whether an option of this name says where a server is.
    pub fn is_option(name: &str) -> bool {
        let names = [
            "host",
            "port",
            "path",
            "export",
            "tls-creds",
            "tls-hostname",
            "open-timeout",
            "reconnect-delay",
            "connections",
        ];
        names.contains(&name) || name.starts_with("server.")
    }
}

/// Reads how many connections there may be: one, unless that is said.
fn connections(said: Option<&str>) -> Result<NonZeroU8, CommandError> {
    let Some(text) = said else {
        return Ok(NonZeroU8::MIN);
    };
    let number = text.parse().ok();
    number.filter(|n| *n <= MOST_CONNECTIONS).ok_or_else(|| {
        let text =
            format!("Parameter 'connections' expects a number between 1 and {MOST_CONNECTIONS}");
        CommandError::new(text)
    })
}

fn malformed(rest: &str) -> CommandError {
    CommandError::new(format!("'{rest}' names no NBD export"))
}

/// Whether a URI wants TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    Never,
    Always,
}

/// `[USER@]HOST[:PORT]/EXPORT[?QUERY]`; a host may be in brackets.
fn over_tcp(rest: &str, tls: Tls) -> Result<ExportName, CommandError> {
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut query = Query::of(query)?;
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let place = query.without_user(authority, tls)?;
    let (host, port) = host_and_port(place).ok_or_else(|| malformed(rest))?;
    Ok(ExportName {
        server: Address::Tcp {
            host: decoded(host)?,
            port: port.unwrap_or(PORT).to_string(),
        },
        export: decoded(export)?,
        tls: query.tls(tls)?,
        waits: Waits::default(),
        connections: NonZeroU8::MIN,
    })
}

/// `[USER@]/EXPORT?socket=PATH[&QUERY]`.
fn over_unix(rest: &str, tls: Tls) -> Result<ExportName, CommandError> {
    let (export, query) = rest.split_once('?').ok_or_else(|| malformed(rest))?;
    let mut query = Query::of(query)?;
    let (authority, _) = export.split_once('/').unwrap_or((export, ""));
    let export = match authority.strip_suffix('@') {
        Some(_) => {
            query.without_user(authority, tls)?;
            &export[authority.len()..]
        }
        None => export,
    };
    let export = export.strip_prefix('/').unwrap_or(export);
    let path = query.take("socket").ok_or_else(|| malformed(rest))?;
    Ok(ExportName {
        server: Address::Unix(PathBuf::from(path)),
        export: decoded(export)?,
        tls: query.tls(tls)?,
        waits: Waits::default(),
        connections: NonZeroU8::MIN,
    })
}

/// `HOST:PORT[:exportname=EXPORT]` or `unix:PATH[:exportname=EXPORT]`; not encoded in any way.
fn older(rest: &str) -> Result<ExportName, CommandError> {
    let (place, export) = match rest.split_once(":exportname=") {
        Some((place, export)) => (place, export.to_string()),
        None => (rest, String::new()),
    };
    let server = match place.strip_prefix("unix:") {
        Some("") => return Err(malformed(rest)),
        Some(path) => Address::Unix(PathBuf::from(path)),
        None => match host_and_port(place) {
            Some((host, Some(port))) => Address::Tcp {
                host: host.to_string(),
                port: port.to_string(),
            },
            _ => return Err(malformed(rest)),
        },
    };
    Ok(ExportName {
        server,
        export,
        tls: None,
        waits: Waits::default(),
        connections: NonZeroU8::MIN,
    })
}

fn host_and_port(text: &str) -> Option<(&str, Option<&str>)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return None,
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|number| number > 0);
    (!host.is_empty() && port.is_none_or(is_port)).then_some((host, port))
}

/// What a URI says behind its `?`; what is not taken out of it is not understood.
struct Query(Vec<(String, String)>);

impl Query {
    fn of(text: &str) -> Result<Query, CommandError> {
        let parts = text.split(['&', ';']).filter(|part| !part.is_empty());
        let pairs = parts.map(|part| {
            let (name, value) = part.split_once('=').ok_or_else(|| malformed(text))?;
            Ok((decoded(name)?, decoded(value)?))
        });
        Ok(Query(pairs.collect::<Result<_, CommandError>>()?))
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(given, _)| given == name)?;
        Some(self.0.remove(at).1)
    }

    /// The rest of an authority behind its `USER@`, who is kept as `tls-username` would be.
    fn without_user<'a>(&mut self, authority: &'a str, tls: Tls) -> Result<&'a str, CommandError> {
        let Some((user, place)) = authority.rsplit_once('@') else {
            return Ok(authority);
        };
        if tls == Tls::Never {
            // Whoever names a user expects that somebody asks for a proof.
            let text = "The user in an NBD URI is for keys over TLS: it has to begin with nbds";
            return Err(CommandError::new(text));
        }
        const NAME: &str = "tls-username";
        if self.0.iter().any(|(name, _)| name == NAME) {
            let text = "An NBD URI names the user twice, before '@' and as tls-username";
            return Err(CommandError::new(text));
        }
        self.0.push((NAME.to_string(), decoded(user)?));
        Ok(place)
    }

    /// What it says of TLS; it must say nothing else any more.
    fn tls(mut self, tls: Tls) -> Result<Option<TlsName>, CommandError> {
        let mut name = None;
        if tls == Tls::Always {
            let hostname = self.take("tls-hostname");
            // Without keys it means nothing, here as with libnbd.
            let user = self.take("tls-username").filter(|user| !user.is_empty());
            let check = match self.take("tls-verify-peer").as_deref() {
                None | Some("1" | "true" | "on") => PeerCheck::Required,
                Some("0" | "false" | "off") => PeerCheck::Off,
                Some(other) => {
                    let text =
                        format!("Parameter 'tls-verify-peer' does not accept value '{other}'");
                    return Err(CommandError::new(text));
                }
            };
            let credentials = match (self.take("tls-certificates"), self.take("tls-psk-file")) {
                (Some(directory), None) => ClientSide::Directory(PathBuf::from(directory), check),
                (None, Some(file)) => ClientSide::Keys(PathBuf::from(file), user),
                (Some(_), Some(_)) => {
                    return Err(CommandError::new(
                        "An NBD URI has either tls-certificates or tls-psk-file, not both",
                    ));
                }
                (None, None) => {
                    return Err(CommandError::new(
                        "An NBD URI with TLS needs tls-certificates=DIR, a directory with ca-cert.pem, or tls-psk-file=FILE",
                    ));
                }
            };
            name = Some(TlsName {
                credentials,
                hostname,
            });
        }
        match self.0.first() {
            None => Ok(name),
            Some((name, _)) => Err(CommandError::new(format!(
                "The part '{name}' of an NBD URI is not supported"
            ))),
        }
    }
}

/// A part of a URI without its escapes.
fn decoded(text: &str) -> Result<String, CommandError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = after
            .get(..2)
            .filter(|two| two.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|two| std::str::from_utf8(two).ok());
        let code = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        bytes.push(
            code.filter(|code| *code != 0)
                .ok_or_else(|| malformed(text))?,
        );
        rest = &after[2..];
    }
    String::from_utf8(bytes).map_err(|_| malformed(text))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let keys =
            |user: Option<&str>| ClientSide::Keys(PathBuf::from("/k"), user.map(str::to_string));
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
            let pairs = crate::options::split(text).unwrap();
            ExportName::of_options(&pairs).map_err(|error| error.to_string())
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
            let told = of(&format!("path=/s,connections={wrong}")).unwrap_err();
            assert!(told.contains("between 1 and 16"), "{told}");
        }
        for wrong in ["", "x", "-1", "1.5", "4294967296"] {
            for name in ["open-timeout", "reconnect-delay"] {
                let told = of(&format!("path=/s,{name}={wrong}")).unwrap_err();
                assert_eq!(told, format!("Parameter '{name}' expects a number"));
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
}
