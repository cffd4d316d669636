//! [`StoreOptions`]: what is said of a server beside its URL.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use zeroize::Zeroizing;

/// Options of the way to an object. Those that are not set come from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// URL of the server of `s3://`, `gs://` or `az://`, if not the provider's (`endpoint=`).
    pub endpoint: Option<String>,
    /// Region of a bucket (`region=`).
    pub region: Option<String>,
    /// PEM file of certificates that are trusted beside the system's (`ca-file=`).
    pub ca_file: Option<PathBuf>,
    /// Treatment of the server's certificate (`sslverify=`).
    pub certificates: Certificates,
    /// User of a web server (`username=`, `password-secret=`).
    pub login: Option<Login>,
    /// Text of the header `Cookie` for a web server (`cookie=`, `cookie-secret=`).
    pub cookie: Option<Zeroizing<String>>,
    /// URL of a proxy (`proxy=`).
    pub proxy: Option<String>,
    /// Requests to an object store are not signed (`anonymous=on`).
    pub anonymous: bool,
    /// Longest time of one attempt of a request (`timeout=`).
    pub timeout: Duration,
    /// Where failed requests are repeated.
    pub retries: Retries,
}

impl Default for StoreOptions {
    fn default() -> StoreOptions {
        StoreOptions {
            endpoint: None,
            region: None,
            ca_file: None,
            certificates: Certificates::Checked,
            login: None,
            cookie: None,
            proxy: None,
            anonymous: false,
            timeout: Duration::from_secs(30),
            retries: Retries::ByStore(Duration::from_secs(180)),
        }
    }
}

/// Treatment of a server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Certificates {
    /// It has to be valid, and for the name of the server.
    #[default]
    Checked,
    /// Any certificate is accepted: the connection may lead to anybody.
    Unchecked,
}

/// Where failed requests are repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retries {
    /// In the store, for so long.
    ByStore(Duration),
    /// By the caller: each request is one attempt.
    ByCaller,
}

/// A user of a web server.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The user's name.
    pub user: String,
    /// The user's password; it may be empty.
    pub password: Zeroizing<String>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}
