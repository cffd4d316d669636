//! [`locate`]: from a URL, its options and the environment to a store.

use std::sync::{Arc, Once};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cowslip_block::{Error, Result};
use http::{HeaderMap, HeaderValue};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig};

use crate::credentials::Profile;
use crate::environment::Environment;
use crate::guard::GuardedConnector;
use crate::options::{Certificates, Login, Retries, StoreOptions};
use crate::registry::{self, ImageName, RegistryConnector, basic};
use crate::upload::Multipart;
use crate::url::{ObjectUrl, Scheme};

/// Time in which a connection has to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// An object, or what lies below a prefix.
#[derive(Clone, Debug)]
pub struct Location {
    /// The store: a bucket, a container, or what lies below a URL of a web server.
    pub store: Arc<dyn ObjectStore>,
    /// Requests for uploads in parts; web servers and registries have none.
    pub multipart: Option<Multipart>,
    /// The object's path in the store. Of a web server or a registry, the URL is the store, and the
    /// path empty.
    pub path: Path,
}

/// The store and the path that a URL names. Nothing is sent. Requests have to be made on a tokio
/// runtime with I/O and time.
///
/// Credentials come from the variables that the providers' own programs use: `AWS_*`, `AZURE_*`,
/// `GOOGLE_*`; from `~/.aws/credentials` and `~/.aws/config`; from the files of Google's programs;
/// at last from the metadata service of the machine. Proxies come from `HTTPS_PROXY`, `HTTP_PROXY`,
/// `ALL_PROXY` and `NO_PROXY`, trusted certificates from `SSL_CERT_FILE`, `SSL_CERT_DIR` or the
/// system.
///
/// # Errors
/// The URL or an option cannot be; the certificates of `ca-file` cannot be read.
pub fn locate(
    url: &ObjectUrl,
    options: &StoreOptions,
    environment: &Environment,
) -> Result<Location> {
    choose_cryptography();
    let refused = |why: object_store::Error| Error::invalid(format!("Cannot use '{url}': {why}"));
    let client = client_options(url, options, environment)?;
    let retry = retry_config(options.retries);
    let connector = GuardedConnector {
        retries: options.retries,
        scheme: url.scheme(),
    };
    // Builders have no trait in common.
    macro_rules! built {
        ($builder:expr, $connector:expr) => {
            $builder
                .with_client_options(client)
                .with_retry(retry)
                .with_http_connector($connector)
                .build()
                .map_err(refused)?
        };
    }
    let (store, multipart) = match url.scheme() {
        Scheme::Http | Scheme::Https => {
            let server = built!(HttpBuilder::new().with_url(url.whole()), connector);
            (Arc::new(server) as Arc<dyn ObjectStore>, None)
        }
        Scheme::Registry => {
            let image = ImageName::of(url, options.endpoint.as_deref())?;
            let server = HttpBuilder::new().with_url(image.base());
            let connector = RegistryConnector {
                basic: basic(url, options, environment),
                image,
            };
            let server = built!(server, connector);
            (Arc::new(server) as Arc<dyn ObjectStore>, None)
        }
        Scheme::S3 => both(built!(amazon(url, options, environment), connector)),
        Scheme::Google => both(built!(google(url, options, environment), connector)),
        Scheme::Azure => both(built!(azure(url, options, environment), connector)),
    };
    let path = match url.scheme().is_web() || url.scheme() == Scheme::Registry {
        // The server's own spelling: repeated slashes and escapes are part of the name.
        true => Path::default(),
        false => Path::from_url_path(url.path())
            .map_err(|why| Error::invalid(format!("Invalid URL '{url}': {why}")))?,
    };
    Ok(Location {
        store,
        multipart,
        path,
    })
}

/// A store for requests of both kinds.
fn both<S: ObjectStore + MultipartStore>(store: S) -> (Arc<dyn ObjectStore>, Option<Multipart>) {
    let store = Arc::new(store);
    let multipart = Multipart(Arc::clone(&store) as Arc<dyn MultipartStore>);
    (store, Some(multipart))
}

/// The HTTP client asks the process which cryptography it uses.
fn choose_cryptography() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        // Another part of the program may have chosen before; that holds, too.
        drop(rustls::crypto::ring::default_provider().install_default());
    });
}

fn client_options(
    url: &ObjectUrl,
    options: &StoreOptions,
    environment: &Environment,
) -> Result<ClientOptions> {
    let agent = concat!("cowslip/", env!("CARGO_PKG_VERSION"));
    let mut client = ClientOptions::new()
        .with_user_agent(HeaderValue::from_static(agent))
        .with_timeout(options.timeout)
        .with_connect_timeout(CONNECT_TIMEOUT)
        // A URL of https never leads to a connection in the clear.
        .with_allow_http(allows_http(url, options, environment))
        .with_allow_invalid_certificates(options.certificates == Certificates::Unchecked);
    if let Some(path) = &options.ca_file {
        let shown = path.display();
        let refused =
            |why: String| Error::invalid(format!("Cannot use 'ca-file' '{shown}': {why}"));
        let pem = std::fs::read(path)
            .map_err(|error| refused(cowslip_block::error::system_words(&error)))?;
        let trusted = Certificate::from_pem_bundle(&pem).map_err(|why| refused(why.to_string()))?;
        if trusted.is_empty() {
            return Err(refused("it has no certificate".to_string()));
        }
        for certificate in trusted {
            client = client.with_root_certificate(certificate);
        }
    }
    if let Some(proxy) = &options.proxy {
        client = client.with_proxy_url(proxy);
    }
    if url.scheme().is_web() {
        let login = options.login.as_ref().or(url.login());
        client = client.with_default_headers(headers(login, options)?);
    }
    Ok(client)
}

fn allows_http(url: &ObjectUrl, options: &StoreOptions, environment: &Environment) -> bool {
    let said = match url.scheme() {
        Scheme::Http => return true,
        Scheme::Https => return false,
        Scheme::S3 => {
            let said = environment.get("AWS_ENDPOINT_URL_S3");
            said.or(environment.get("AWS_ENDPOINT_URL"))
                .or(environment.get("AWS_ENDPOINT"))
                .map(str::to_string)
                .or_else(|| Profile::of(environment).endpoint)
        }
        Scheme::Registry => {
            return registry::base(url, options.endpoint.as_deref()).starts_with("http://");
        }
        Scheme::Google => environment.get("GOOGLE_BASE_URL").map(str::to_string),
        Scheme::Azure => {
            let said = environment.get("AZURE_STORAGE_ENDPOINT");
            let said = said.or(environment.get("AZURE_ENDPOINT"));
            said.map(str::to_string)
        }
    };
    let endpoint = options.endpoint.clone().or(said);
    endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn headers(login: Option<&Login>, options: &StoreOptions) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    let mut add = |name, text: &str, option: &str| {
        let value = HeaderValue::from_str(text);
        let mut value = value.map_err(|_| {
            Error::invalid(format!("'{option}' has characters that no header can have"))
        })?;
        value.set_sensitive(true);
        headers.insert(name, value);
        Ok::<_, Error>(())
    };
    if let Some(Login { user, password }) = login {
        if user.contains(':') {
            return Err(Error::invalid("'username' must not contain a colon"));
        }
        let pair = zeroize::Zeroizing::new(format!("{user}:{}", password.as_str()));
        let text =
            zeroize::Zeroizing::new(format!("Basic {}", BASE64_STANDARD.encode(pair.as_bytes())));
        add(http::header::AUTHORIZATION, &text, "username")?;
    }
    if let Some(cookie) = &options.cookie {
        add(http::header::COOKIE, cookie, "cookie")?;
    }
    Ok(headers)
}

fn retry_config(retries: Retries) -> RetryConfig {
    match retries {
        Retries::ByStore(retry_timeout) => RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: usize::MAX,
            retry_timeout,
        },
        Retries::ByCaller => RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 0,
            retry_timeout: Duration::ZERO,
        },
    }
}

fn amazon(url: &ObjectUrl, options: &StoreOptions, environment: &Environment) -> AmazonS3Builder {
    let mut builder = AmazonS3Builder::new();
    let profile = Profile::of(environment);
    if let Some(region) = &profile.region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = &profile.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    for (name, value) in environment.group("AWS_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    // Keys of the environment come first, then those of the files, as in Amazon's programs.
    let is_said = |name| environment.get(name).is_some();
    let has_others = is_said("AWS_ACCESS_KEY_ID") || is_said("AWS_WEB_IDENTITY_TOKEN_FILE");
    if let (Some(credentials), false) = (profile.credentials, has_others) {
        builder = builder.with_credentials(credentials);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    if options.anonymous {
        builder = builder.with_skip_signature(true);
    }
    builder.with_bucket_name(url.host())
}

fn google(
    url: &ObjectUrl,
    options: &StoreOptions,
    environment: &Environment,
) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::new();
    if let Some(path) = environment.get("SERVICE_ACCOUNT") {
        builder = builder.with_service_account_path(path);
    }
    for (name, value) in environment.group("GOOGLE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_base_url(endpoint);
    }
    if options.anonymous {
        builder = builder.with_skip_signature(true);
    }
    builder.with_bucket_name(url.host())
}

fn azure(
    url: &ObjectUrl,
    options: &StoreOptions,
    environment: &Environment,
) -> MicrosoftAzureBuilder {
    let mut builder = MicrosoftAzureBuilder::new();
    for (name, value) in environment.group("AZURE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<AzureConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    if options.anonymous {
        builder = builder.with_config(AzureConfigKey::SkipSignature, "true");
    }
    builder.with_container_name(url.host())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        let variables = variables.iter();
        let owned = variables.map(|(name, value)| (name.to_string(), value.to_string()));
        owned.collect()
    }

    fn located(url: &str, options: &StoreOptions, variables: &[(&str, &str)]) -> Result<Location> {
        let url = ObjectUrl::of_name(url).unwrap().unwrap();
        locate(&url, options, &environment(variables))
    }

    #[test]
    fn each_scheme_has_a_store_and_a_path() {
        let options = StoreOptions::default();
        let azure = [
            ("AZURE_STORAGE_ACCOUNT_NAME", "me"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5"),
        ];
        for (url, path, store) in [
            ("http://localhost:1/a//b", "", "HttpStore"),
            ("https://host/a", "", "HttpStore"),
            (
                "s3://bucket/golden/a%20b.qcow2",
                "golden/a b.qcow2",
                "AmazonS3(bucket)",
            ),
            ("gs://bucket/x", "x", "GoogleCloudStorage(bucket)"),
            (
                "az://box/y",
                "y",
                "MicrosoftAzure { account: me, container: box }",
            ),
        ] {
            let location = located(url, &options, &azure).unwrap();
            assert_eq!(location.path.as_ref(), path, "{url}");
            assert_eq!(location.store.to_string(), store);
        }
    }

    #[test]
    fn regions_and_endpoints_come_from_options_before_the_environment() {
        let shown = |options: &StoreOptions, variables: &[(&str, &str)]| {
            format!(
                "{:?}",
                located("s3://b/x", options, variables).unwrap().store
            )
        };
        let variables = [
            ("AWS_REGION", "eu-north-1"),
            ("AWS_ENDPOINT_URL", "http://minio:9000"),
        ];
        let by_environment = shown(&StoreOptions::default(), &variables);
        assert!(
            by_environment.contains("eu-north-1") && by_environment.contains("http://minio:9000")
        );
        let options = StoreOptions {
            region: Some("us-east-2".to_string()),
            endpoint: Some("https://other".to_string()),
            ..StoreOptions::default()
        };
        let by_options = shown(&options, &variables);
        assert!(by_options.contains("us-east-2") && by_options.contains("https://other"));
        assert!(!by_options.contains("minio"));
    }

    #[test]
    fn certificates_that_cannot_be_used_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        let options = StoreOptions {
            ca_file: Some(path.clone()),
            ..StoreOptions::default()
        };
        let why = |options| {
            located("https://h/x", options, &[])
                .unwrap_err()
                .to_string()
        };
        let shown = path.display();
        assert_eq!(
            why(&options),
            format!("Cannot use 'ca-file' '{shown}': No such file or directory")
        );
        std::fs::write(&path, "no certificate\n").unwrap();
        assert_eq!(
            why(&options),
            format!("Cannot use 'ca-file' '{shown}': it has no certificate")
        );
    }

    #[test]
    fn logins_are_encoded_as_servers_expect() {
        for (plain, text) in [("", ""), ("a", "YQ=="), ("ab", "YWI="), ("abc", "YWJj")] {
            assert_eq!(BASE64_STANDARD.encode(plain), text);
        }
        let options = StoreOptions {
            login: Some(Login {
                user: "Aladdin".to_string(),
                password: "open sesame".to_string().into(),
            }),
            cookie: Some("a\nb".to_string().into()),
            ..StoreOptions::default()
        };
        let error = headers(options.login.as_ref(), &options).unwrap_err();
        assert_eq!(
            error.to_string(),
            "'cookie' has characters that no header can have"
        );
        let plain = StoreOptions::default();
        let map = headers(options.login.as_ref(), &plain).unwrap();
        // The example of RFC 7617.
        assert_eq!(map["authorization"], "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    }
}
