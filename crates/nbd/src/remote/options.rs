//! Exports as options: `driver=nbd`.

use std::num::NonZeroU8;
use std::path::PathBuf;
use std::time::Duration;

use cowslip_block::options::{Kind, OptionEntry, Options, option};
use cowslip_block::{Error, Result};

use super::address::{Address, PORT};
use super::name::{ClientSide, ExportName, TlsName, Waits};

/// Limit of connections: four times nbdcopy's default.
const MOST_CONNECTIONS: NonZeroU8 = NonZeroU8::new(16).unwrap();

/// The options of `driver=nbd`.
#[rustfmt::skip] // An option a line.
pub const OPTIONS: &[OptionEntry] = &[
    option(
        "server.",
        Kind::Text,
        "",
        "Address of the server: type=unix and path, or type=inet, host and port",
    ),
    option("path", Kind::Text, "", "Path of the server's Unix socket"),
    option("host", Kind::Text, "", "Name or address of the server's host"),
    option("port", Kind::Text, PORT, "Port of the server"),
    option("export", Kind::Text, "", "Name of the export; empty for the default one"),
    option("tls-creds", Kind::Text, "", "ID of the credentials for TLS"),
    option("tls-hostname", Kind::Text, "", "Host name that the server's certificate has to match"),
    option(
        "open-timeout",
        Kind::Number,
        "0",
        "Seconds to retry while the server cannot be reached",
    ),
    option(
        "reconnect-delay",
        Kind::Number,
        "0",
        "Seconds that requests wait for a lost connection",
    ),
    option("connections", Kind::Number, "1", "Connections, where the server offers several"),
];

impl ExportName {
    /// Takes the export out of the options that describe it.
    ///
    /// # Errors
    /// Something is missing, or said twice.
    pub fn of_options(options: &mut Options) -> Result<ExportName> {
        let mut of = |name: &str| options.take(name);
        let kind = of("server.type");
        let path = of("path");
        let path = of("server.path").or(path);
        let host = of("host");
        let host = of("server.host").or(host);
        let port = of("port");
        let port = of("server.port").or(port);
        let server = match (kind.as_deref(), path, host) {
            (None | Some("unix"), Some(path), None) => Address::Unix(PathBuf::from(path)),
            (None | Some("inet"), None, Some(host)) => Address::Tcp {
                host,
                port: port.unwrap_or(PORT.to_string()),
            },
            (None, None, None) => return Err(Error::invalid("NBD server address missing")),
            (None, Some(_), Some(_)) => {
                let text = "path and host may not be used at the same time";
                return Err(Error::invalid(text));
            }
            (Some("unix"), ..) => {
                return Err(Error::invalid("Parameter 'server.path' is missing"));
            }
            (Some("inet"), ..) => {
                return Err(Error::invalid("Parameter 'server.host' is missing"));
            }
            (Some(other), ..) => {
                let text = format!("Parameter 'server.type' does not accept value '{other}'");
                return Err(Error::invalid(text));
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
                return Err(Error::invalid(text));
            }
            (None, None) => None,
        };
        let mut seconds = |name: &str| match of(name) {
            None => Ok(Duration::ZERO),
            Some(text) => text.parse::<u32>().map_or_else(
                |_| {
                    let text = format!("Parameter '{name}' expects a number");
                    Err(Error::invalid(text))
                },
                |seconds| Ok(Duration::from_secs(seconds.into())),
            ),
        };
        let waits = Waits {
            open: seconds("open-timeout")?,
            reconnect: seconds("reconnect-delay")?,
        };
        let connections = connections(of("connections").as_deref())?;
        // An address may say more than is needed to find it.
        options.take_group("server.");
        Ok(ExportName {
            server,
            export,
            tls,
            waits,
            connections,
        })
    }
}

/// Reads how many connections there may be: one, unless that is said.
fn connections(said: Option<&str>) -> Result<NonZeroU8> {
    let Some(text) = said else {
        return Ok(NonZeroU8::MIN);
    };
    let number = text.parse().ok();
    number.filter(|n| *n <= MOST_CONNECTIONS).ok_or_else(|| {
        let text =
            format!("Parameter 'connections' expects a number between 1 and {MOST_CONNECTIONS}");
        Error::invalid(text)
    })
}
