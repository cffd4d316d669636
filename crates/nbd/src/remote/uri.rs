//! Exports as file names: URIs, and QEMU's older form.

use std::num::NonZeroU8;
use std::path::PathBuf;

use cowslip_block::{Error, Result};

use super::address::{Address, PORT};
use super::name::{ClientSide, ExportName, TlsName, Waits};
use crate::tls::PeerCheck;

impl ExportName {
    /// Reads a file name that begins with `nbd:`, `nbd://`, `nbd+tcp://`, `nbd+unix://`, or with
    /// `nbds` in their place; `None` of others.
    ///
    /// # Errors
    /// It is not what it begins as.
    pub fn of_file_name(name: &str) -> Option<Result<ExportName>> {
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
}

fn malformed(rest: &str) -> Error {
    Error::invalid(format!("'{rest}' names no NBD export"))
}

/// Whether a URI wants TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    Never,
    Always,
}

/// `[USER@]HOST[:PORT]/EXPORT[?QUERY]`; a host may be in brackets.
fn over_tcp(rest: &str, tls: Tls) -> Result<ExportName> {
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
fn over_unix(rest: &str, tls: Tls) -> Result<ExportName> {
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
fn older(rest: &str) -> Result<ExportName> {
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

/// The query of a URI. A part that is not taken is refused.
struct Query(Vec<(String, String)>);

impl Query {
    fn of(text: &str) -> Result<Query> {
        let parts = text.split(['&', ';']).filter(|part| !part.is_empty());
        let pairs = parts.map(|part| {
            let (name, value) = part.split_once('=').ok_or_else(|| malformed(text))?;
            Ok((decoded(name)?, decoded(value)?))
        });
        Ok(Query(pairs.collect::<Result<_>>()?))
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(given, _)| given == name)?;
        Some(self.0.remove(at).1)
    }

    /// The rest of an authority behind its `USER@`, who is kept as `tls-username` would be.
    fn without_user<'a>(&mut self, authority: &'a str, tls: Tls) -> Result<&'a str> {
        let Some((user, place)) = authority.rsplit_once('@') else {
            return Ok(authority);
        };
        if tls == Tls::Never {
            // A user's name promises a proof of identity, which a connection in the clear lacks.
            let text = "The user in an NBD URI is for keys over TLS: it has to begin with nbds";
            return Err(Error::invalid(text));
        }
        const NAME: &str = "tls-username";
        if self.0.iter().any(|(name, _)| name == NAME) {
            let text = "An NBD URI names the user twice, before '@' and as tls-username";
            return Err(Error::invalid(text));
        }
        self.0.push((NAME.to_string(), decoded(user)?));
        Ok(place)
    }

    /// Takes the parameters of TLS, and refuses the rest.
    fn tls(mut self, tls: Tls) -> Result<Option<TlsName>> {
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
                    return Err(Error::invalid(text));
                }
            };
            let credentials = match (self.take("tls-certificates"), self.take("tls-psk-file")) {
                (Some(directory), None) => ClientSide::Directory(PathBuf::from(directory), check),
                (None, Some(file)) => ClientSide::Keys(PathBuf::from(file), user),
                (Some(_), Some(_)) => {
                    return Err(Error::invalid(
                        "An NBD URI has either tls-certificates or tls-psk-file, not both",
                    ));
                }
                (None, None) => {
                    return Err(Error::invalid(
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
            Some((name, _)) => Err(Error::invalid(format!(
                "The part '{name}' of an NBD URI is not supported"
            ))),
        }
    }
}

/// A part of a URI without its escapes.
fn decoded(text: &str) -> Result<String> {
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
