//! [`Reach`]: what remote files need of the system while they are open, for programs that confine
//! themselves.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use url::Url;

use crate::credentials::Profile;
use crate::environment::Environment;
use crate::options::StoreOptions;
use crate::registry;
use crate::url::{ObjectUrl, Scheme};

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

const HTTP: u16 = 80;
const HTTPS: u16 = 443;
const DNS: u16 = 53;
const AZURE_EMULATOR: u16 = 10000;
/// Where names of hosts are looked up, and certificates.
const READ: [&str; 5] = [
    "/etc",
    "/run/systemd/resolve",
    "/usr/lib/ssl",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];
/// Variables with URLs of proxies.
const PROXIES: [&str; 6] = [
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "all_proxy",
    "https_proxy",
    "http_proxy",
];
/// Variables with files of credentials.
const CREDENTIALS: [&str; 8] = [
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "REGISTRY_AUTH_FILE",
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

/// Counts needs among those of [`reach`] while it lives.
#[derive(Debug)]
#[must_use = "the needs are forgotten with it"]
pub struct Registered(u64);

impl Registered {
    /// Adds the needs of a file or a store.
    pub fn new(reach: Reach) -> Registered {
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
    /// The needs of an object, or of a store that is read, with a cache if there is one. Ports are
    /// those of the server that URL, options and environment name, of proxies, of DNS, and of the
    /// services that give credentials, where those are not known beforehand.
    pub fn of(
        url: &ObjectUrl,
        options: &StoreOptions,
        environment: &Environment,
        cache: Option<&Path>,
    ) -> Reach {
        let mut ports = vec![DNS];
        match url.scheme() {
            Scheme::Http | Scheme::Https => ports.extend(web_ports(url)),
            Scheme::Registry => ports.extend(registry_ports(url, options)),
            Scheme::S3 | Scheme::Google | Scheme::Azure => {
                ports.extend(store_ports(url, options, environment));
            }
        }
        let named = PROXIES.iter().filter_map(|name| environment.get(name));
        ports.extend(named.chain(options.proxy.as_deref()).filter_map(port_of));
        ports.sort_unstable();
        ports.dedup();
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

/// The port of a web server, and the usual ones of those that it may redirect to: never from https
/// into the clear.
fn web_ports(url: &ObjectUrl) -> impl Iterator<Item = u16> {
    let in_the_clear = (url.scheme() == Scheme::Http).then_some(HTTP);
    [url.port(), Some(HTTPS), in_the_clear]
        .into_iter()
        .flatten()
}

/// The port of a registry, and the usual ones of its server of tokens, and of those that it may
/// redirect to.
fn registry_ports(url: &ObjectUrl, options: &StoreOptions) -> Vec<u16> {
    let base = registry::base(url, options.endpoint.as_deref());
    let in_the_clear = base.starts_with("http://").then_some(HTTP);
    let all = [port_of(&base), Some(HTTPS), in_the_clear];
    all.into_iter().flatten().collect()
}

/// The ports of an object store, and of what gives credentials for it.
fn store_ports(url: &ObjectUrl, options: &StoreOptions, environment: &Environment) -> Vec<u16> {
    let profile = match url.scheme() {
        Scheme::S3 => Profile::of(environment),
        _ => Profile::default(),
    };
    let (endpoints, services): (&[&str], &[&str]) = match url.scheme() {
        Scheme::S3 => (
            &["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"],
            &[
                "AWS_ENDPOINT_URL_STS",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                "AWS_METADATA_ENDPOINT",
            ],
        ),
        Scheme::Google => (&["GOOGLE_BASE_URL"], &[]),
        _ => (
            &["AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"],
            &[
                "AZURE_MSI_ENDPOINT",
                "AZURE_IDENTITY_ENDPOINT",
                "AZURE_AUTHORITY_HOST",
            ],
        ),
    };
    let port_in = |name: &&str| port_of(environment.get(name)?);
    let mut ports: Vec<u16> = match &options.endpoint {
        Some(endpoint) => port_of(endpoint).into_iter().collect(),
        None => {
            let known = endpoints.iter().filter_map(port_in);
            known
                .chain(profile.endpoint.as_deref().and_then(port_of))
                .collect()
        }
    };
    if ports.is_empty() {
        ports.push(HTTPS);
    }
    let is_said = |name: &str| environment.get(name).is_some();
    if url.scheme() == Scheme::Azure && is_said("AZURE_STORAGE_USE_EMULATOR") {
        ports.push(AZURE_EMULATOR);
    }
    let has_keys = match url.scheme() {
        Scheme::S3 => {
            is_said("AWS_ACCESS_KEY_ID")
                || (profile.credentials.is_some() && !is_said("AWS_WEB_IDENTITY_TOKEN_FILE"))
        }
        Scheme::Google => false,
        _ => ["ACCOUNT_KEY", "ACCESS_KEY", "SAS_KEY", "SAS_TOKEN"]
            .iter()
            .any(|name| is_said(&format!("AZURE_STORAGE_{name}"))),
    };
    if !options.anonymous && !has_keys {
        ports.extend([HTTP, HTTPS]);
        ports.extend(services.iter().filter_map(port_in));
    }
    ports
}

fn credentials(environment: &Environment) -> impl Iterator<Item = PathBuf> {
    let named = CREDENTIALS.iter().filter_map(|name| environment.get(name));
    let named = named.filter_map(|path| directory(Path::new(path)));
    let home = environment.get("HOME").map(PathBuf::from);
    let own = [".aws", ".config/gcloud", ".azure", ".docker"];
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

    fn reach_of(url: &str, options: &StoreOptions, variables: &[(&str, &str)]) -> Vec<u16> {
        let url = ObjectUrl::of_name(url).unwrap().unwrap();
        let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
        let environment = variables.iter().map(owned).collect();
        Reach::of(&url, options, &environment, None).ports
    }

    #[test]
    fn ports_are_those_that_are_named() {
        let plain = StoreOptions::default();
        for (url, ports) in [
            ("http://h/x", vec![53, 80, 443]),
            ("http://h:8080/x", vec![53, 80, 443, 8080]),
            ("https://h/x", vec![53, 443]),
            ("https://h:8443/x", vec![53, 443, 8443]),
            ("s3://b/x", vec![53, 80, 443]),
            ("gs://b/x", vec![53, 80, 443]),
        ] {
            assert_eq!(reach_of(url, &plain, &[]), ports, "{url}");
        }
        let keys = ("AWS_ACCESS_KEY_ID", "k");
        let minio = ("AWS_ENDPOINT_URL", "http://minio:9000");
        let other = StoreOptions {
            endpoint: Some("http://other:9100".to_string()),
            ..plain.clone()
        };
        let anonymous = StoreOptions {
            anonymous: true,
            ..plain.clone()
        };
        let proxied = StoreOptions {
            proxy: Some("proxy:3128".to_string()),
            ..plain.clone()
        };
        for (options, variables, ports) in [
            (&plain, vec![keys], vec![53, 443]),
            (&plain, vec![keys, minio], vec![53, 9000]),
            (&plain, vec![minio], vec![53, 80, 443, 9000]),
            (&other, vec![keys, minio], vec![53, 9100]),
            (&anonymous, vec![minio], vec![53, 9000]),
            (&proxied, vec![keys], vec![53, 443, 3128]),
            (
                &plain,
                vec![keys, ("HTTPS_PROXY", "http://p:8000")],
                vec![53, 443, 8000],
            ),
            (
                &plain,
                vec![(
                    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                    "http://localhost:51/c",
                )],
                vec![51, 53, 80, 443],
            ),
        ] {
            assert_eq!(reach_of("s3://b/x", options, &variables), ports);
        }
        let emulator = [
            ("AZURE_STORAGE_USE_EMULATOR", "true"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "k"),
        ];
        assert_eq!(reach_of("az://b/x", &plain, &emulator), [53, 443, 10000]);
    }

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
