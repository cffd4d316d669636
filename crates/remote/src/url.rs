//! [`ObjectUrl`]: the name of a remote object.

use std::borrow::Cow;
use std::fmt;

use cowslip_block::{Error, Result};
use url::{Position, Url};
use zeroize::Zeroizing;

use crate::options::Login;

/// Protocol of a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// A web server in the clear.
    Http,
    /// A web server over TLS.
    Https,
    /// Amazon S3 and its likes.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
    /// A registry of containers.
    Registry,
}

/// The names of all schemes.
pub const SCHEMES: &[&str] = &["http", "https", "s3", "gs", "az", "oci"];

impl Scheme {
    /// Its name in URLs.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
            Scheme::S3 => "s3",
            Scheme::Google => "gs",
            Scheme::Azure => "az",
            Scheme::Registry => "oci",
        }
    }

    /// The scheme of this name.
    pub fn of_name(name: &str) -> Option<Scheme> {
        let all = [
            Scheme::Http,
            Scheme::Https,
            Scheme::S3,
            Scheme::Google,
            Scheme::Azure,
            Scheme::Registry,
        ];
        all.into_iter().find(|scheme| scheme.name() == name)
    }

    /// Whether it is a web server's, and no object store's or registry's.
    pub fn is_web(self) -> bool {
        matches!(self, Scheme::Http | Scheme::Https)
    }

    /// Whether objects can be stored there, too.
    pub fn takes_objects(self) -> bool {
        matches!(self, Scheme::S3 | Scheme::Google | Scheme::Azure)
    }
}

/// A URL of an object, without secrets: the user and password that it may have are kept apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUrl {
    scheme: Scheme,
    url: Url,
    login: Option<Login>,
}

impl ObjectUrl {
    /// The URL in a name, if the name has one of these schemes.
    pub fn of_name(name: &str) -> Option<Result<ObjectUrl>> {
        let (scheme, _) = name.split_once("://")?;
        let scheme = Scheme::of_name(&scheme.to_ascii_lowercase())?;
        Some(ObjectUrl::parse(scheme, name))
    }

    fn parse(scheme: Scheme, name: &str) -> Result<ObjectUrl> {
        let refused = |why: &str| Error::invalid(format!("Invalid URL '{}': {why}", shown(name)));
        let mut url = Url::parse(name).map_err(|why| refused(&why.to_string()))?;
        if url.host_str().is_none_or(str::is_empty) {
            return Err(refused(match scheme {
                Scheme::Http | Scheme::Https | Scheme::Registry => "it names no server",
                Scheme::S3 | Scheme::Google | Scheme::Azure => "it names no bucket",
            }));
        }
        url.set_fragment(None);
        let decode = |text: &str| {
            let pair = format!("x={}", text.replace('+', "%2B"));
            let decoded = url::form_urlencoded::parse(pair.as_bytes()).next();
            decoded
                .map(|(_, value)| value.into_owned())
                .unwrap_or_default()
        };
        let login = match (url.username(), url.password()) {
            ("", None) => None,
            (user, password) => Some(Login {
                user: decode(user),
                password: Zeroizing::new(decode(password.unwrap_or_default())),
            }),
        };
        if login.is_some() && !scheme.is_web() {
            return Err(refused("credentials come from the environment"));
        }
        let cleared = url.set_username("").and(url.set_password(None));
        debug_assert!(cleared.is_ok(), "a URL with a host may have a user");
        Ok(ObjectUrl { scheme, url, login })
    }

    /// Its scheme.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The user that a web server's URL names.
    pub fn login(&self) -> Option<&Login> {
        self.login.as_ref()
    }

    /// The whole URL for requests, with its query, without user and password.
    pub fn whole(&self) -> &str {
        self.url.as_str()
    }

    /// The bucket or container, or the server's name.
    pub fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// The port of a web server.
    pub fn port(&self) -> Option<u16> {
        self.url.port_or_known_default()
    }

    /// The path, with its escapes, that begins with a slash; empty if there is none.
    pub fn path(&self) -> &str {
        self.url.path()
    }

    /// The query, if there is one. Often it has secrets.
    pub(crate) fn query(&self) -> Option<&str> {
        self.url.query()
    }

    /// The URL without its query, for messages: queries often have secrets.
    pub fn identity(&self) -> &str {
        &self.url[..Position::AfterPath]
    }

    /// The object, however requests for it are signed: the URL without the parameters of known
    /// signatures, which change from day to day. Any other parameter may select another object.
    /// Not for messages.
    pub fn resource(&self) -> String {
        let pairs: Vec<_> = self.url.query_pairs().collect();
        let signs = |pair: &&(Cow<'_, str>, Cow<'_, str>)| {
            is_of_signature(&pair.0, |name| pairs.iter().any(|(known, _)| known == name))
        };
        let others = pairs.iter().filter(|pair| !signs(pair));
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        let query = query.extend_pairs(others).finish();
        match query.is_empty() {
            true => self.identity().to_string(),
            false => format!("{}?{query}", self.identity()),
        }
    }
}

/// Whether a parameter of a query is one of a signature: of Amazon's (both versions and
/// CloudFront), Google's or Microsoft's. `has` says which others there are.
fn is_of_signature(name: &str, has: impl Fn(&str) -> bool) -> bool {
    const AZURE: [&str; 21] = [
        "sv", "ss", "srt", "sp", "se", "st", "spr", "sig", "sr", "sip", "skoid", "sktid", "skt",
        "ske", "sks", "skv", "sdd", "saoid", "suoid", "scid", "ses",
    ];
    match name {
        _ if name.starts_with("X-Amz-") || name.starts_with("X-Goog-") => true,
        "AWSAccessKeyId" | "GoogleAccessId" | "Key-Pair-Id" | "Signature" => has("Signature"),
        "Expires" | "Policy" => has("Signature"),
        _ => AZURE.contains(&name) && has("sig") && has("sv"),
    }
}

impl fmt::Display for ObjectUrl {
    /// For messages: without user, password and query.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.identity())?;
        match self.url.query() {
            Some(_) => f.write_str("?…"),
            None => Ok(()),
        }
    }
}

/// A name that is no whole URL, without what may be a password.
fn shown(name: &str) -> String {
    let (scheme, rest) = name.split_once("://").unwrap_or(("", name));
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let rest = match rest[..end].rfind('@') {
        Some(at) => &rest[at + 1..],
        None => rest,
    };
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(name: &str) -> ObjectUrl {
        ObjectUrl::of_name(name).unwrap().unwrap()
    }

    #[test]
    fn signatures_do_not_count_and_all_else_of_a_query_does() {
        let resource = |query: &str| url(&format!("https://h/get?{query}")).resource();
        for signed in [
            "X-Amz-Date=1&X-Amz-Signature=2",
            "AWSAccessKeyId=a&Expires=1&Signature=2",
            "Policy=a&Key-Pair-Id=b&Signature=c",
            "X-Goog-Signature=1",
            "sv=1&sr=b&se=2&sp=r&sig=3",
        ] {
            assert_eq!(resource(signed), "https://h/get", "{signed}");
            let selected = resource(&format!("img=a&{signed}"));
            assert_eq!(selected, "https://h/get?img=a", "{signed}");
        }
        assert_ne!(resource("img=a"), resource("img=b"));
        // Not one of a signature without the others.
        for plain in ["sp=a", "Expires=1", "Policy=x", "versionId=3"] {
            assert_eq!(resource(plain), format!("https://h/get?{plain}"));
        }
    }

    #[test]
    fn urls_name_objects_and_show_no_secrets() {
        let signed = url("https://me:p%40ss@host:8443/a%2Fb//c.qcow2?Signature=xyz#part");
        assert_eq!(
            signed.whole(),
            "https://host:8443/a%2Fb//c.qcow2?Signature=xyz"
        );
        assert_eq!(signed.to_string(), "https://host:8443/a%2Fb//c.qcow2?…");
        assert_eq!(signed.identity(), "https://host:8443/a%2Fb//c.qcow2");
        let login = signed.login().unwrap();
        assert_eq!(
            (login.user.as_str(), login.password.as_str()),
            ("me", "p@ss")
        );
        assert!(!format!("{signed:?}").contains("p@ss"));
        assert_eq!(signed.resource(), signed.identity());
        let bucket = url("s3://bucket/golden/a.qcow2");
        assert_eq!(
            (bucket.host(), bucket.path()),
            ("bucket", "/golden/a.qcow2")
        );
        assert_eq!(url("HTTP://Host/x").scheme(), Scheme::Http);
        assert_eq!(url("http://[::1]:80/x").whole(), "http://[::1]/x");
    }

    #[test]
    fn other_names_are_not_urls_and_broken_ones_are_refused() {
        for other in ["a.qcow2", "nbd://host/x", "https:host", "s4://b/x"] {
            assert!(ObjectUrl::of_name(other).is_none(), "{other}");
        }
        for (broken, why) in [
            ("http://", "Invalid URL 'http://': empty host"),
            (
                "http://u:p@ho st/x?q",
                "Invalid URL 'http://ho st/x': invalid international domain name",
            ),
            ("s3://", "Invalid URL 's3://': it names no bucket"),
            (
                "s3://key:secret@bucket/x",
                "Invalid URL 's3://bucket/x': credentials come from the environment",
            ),
        ] {
            let error = ObjectUrl::of_name(broken).unwrap().unwrap_err();
            assert_eq!(error.to_string(), why);
        }
    }
}
