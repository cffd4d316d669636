//! [`Reach`]: what remote files need of the system while they are open, for programs that confine
//! themselves.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use url::Url;

use crate::environment::Environment;
use crate::object::Way;

/// Needs of all remote files that are open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// TCP ports that are connected to.
    pub ports: Vec<u16>,
    /// Directories whose files are read: addresses, certificates, credentials that are renewed.
    pub read: Vec<PathBuf>,
    /// Directories of caches, whose files are made, written and removed.
    pub written: Vec<PathBuf>,
}

/// HTTP, which metadata services speak; HTTPS; DNS.
const PORTS: [u16; 3] = [80, 443, 53];
/// Where names of hosts are looked up, and certificates.
const READ: [&str; 5] = [
    "/etc",
    "/run/systemd/resolve",
    "/usr/lib/ssl",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];
/// Variables with URLs of servers.
const SERVERS: [&str; 14] = [
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_STS",
    "AWS_ENDPOINT",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "all_proxy",
    "https_proxy",
    "http_proxy",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];
/// Variables with files of credentials.
const CREDENTIALS: [&str; 7] = [
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSL_CERT_FILE",
];

static OPEN: Mutex<Vec<(u64, Reach)>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<(u64, Reach)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The needs of the remote files that are open; nothing if none is.
pub fn reach() -> Option<Reach> {
    let open = open();
    let mut all: Option<Reach> = None;
    for (_, reach) in open.iter() {
        let sum = all.get_or_insert_default();
        sum.ports.extend(&reach.ports);
        sum.read.extend_from_slice(&reach.read);
        sum.written.extend_from_slice(&reach.written);
    }
    all
}

/// Counts a file among those that are open while it lives.
#[derive(Debug)]
pub(crate) struct Registered(u64);

impl Registered {
    pub(crate) fn new(reach: Reach) -> Registered {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        open().push((number, reach));
        Registered(number)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        open().retain(|(number, _)| *number != self.0);
    }
}

impl Reach {
    /// The needs of a file.
    pub(crate) fn of(way: &Way, cache: Option<&Path>) -> Reach {
        let Way {
            url,
            options,
            environment,
            ..
        } = way;
        let mut ports = PORTS.to_vec();
        ports.extend(url.port().filter(|_| url.scheme().is_web()));
        let profile = crate::credentials::Profile::of(environment).endpoint;
        let said = [&options.endpoint, &options.proxy].into_iter().flatten();
        let said = said.map(String::as_str);
        let servers = SERVERS.iter().filter_map(|name| environment.get(name));
        let servers = said.chain(servers).chain(profile.as_deref());
        ports.extend(servers.filter_map(port_of));
        let mut read: Vec<PathBuf> = READ.iter().map(PathBuf::from).collect();
        read.extend(credentials(environment));
        read.extend(options.ca_file.as_deref().and_then(directory));
        Reach {
            ports,
            read,
            written: cache.map(Path::to_path_buf).into_iter().collect(),
        }
    }
}

fn credentials(environment: &Environment) -> impl Iterator<Item = PathBuf> {
    let named = CREDENTIALS.iter().filter_map(|name| environment.get(name));
    let named = named.filter_map(|path| directory(Path::new(path)));
    let home = environment.get("HOME").map(PathBuf::from);
    let own = [".aws", ".config/gcloud", ".azure"];
    let own = own.map(|name| home.as_ref().map(|home| home.join(name)));
    named.chain(own.into_iter().flatten())
}

fn directory(path: &Path) -> Option<PathBuf> {
    let parent = path.parent()?;
    match parent.as_os_str().is_empty() {
        true => Some(PathBuf::from(".")),
        false => Some(parent.to_path_buf()),
    }
}

/// The port of a URL, or of `HOST:PORT` as proxies are named, too.
fn port_of(text: &str) -> Option<u16> {
    match text.contains("://") {
        true => Url::parse(text).ok()?.port_or_known_default(),
        false => text.rsplit_once(':')?.1.trim_end_matches('/').parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_servers_and_proxies_are_found() {
        for (text, port) in [
            ("http://minio:9000", Some(9000)),
            ("https://h/x", Some(443)),
            ("proxy:3128", Some(3128)),
            ("proxy:3128/", Some(3128)),
            ("socks5://u:p@h:1080", Some(1080)),
            ("nothing", None),
        ] {
            assert_eq!(port_of(text), port, "{text}");
        }
    }
}
