//! Objects for TLS: `tls-creds-x509`, which is a directory with QEMU's names of files,
//! `authz-simple` and `authz-list`.
//!
//! | file | what |
//! | --- | --- |
//! | `ca-cert.pem` | the authorities that are believed |
//! | `ca-crl.pem` | what they have revoked; may be missing |
//! | `server-cert.pem`, `server-key.pem` | who a server is |
//! | `client-cert.pem`, `client-key.pem` | who a client is; may be missing |
//!
//! Source: qemu(1), "tls-creds-x509", "authz-simple", "authz-list".

use std::io::Read;
use std::path::{Path, PathBuf};

use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_console::output::worded;
use cowslip_nbd::tls::{
    ClientCredentials, CredentialsError, Endpoint, Identity, PeerCheck, Pem, ServerTls, examine_own,
};
use serde::Deserialize;
use zeroize::Zeroizing;

/// Certificates are short, even some hundred of them; a file that is named by mistake may not be.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The credentials of one side.
#[derive(Clone, Debug)]
pub enum Credentials {
    /// Credentials of a server.
    Server(ServerTls),
    /// Credentials of a client.
    Client(ClientCredentials),
}

/// Examination of our own certificate before it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Examination {
    /// The certificate is examined as a peer would.
    Now,
    /// A peer finds out.
    Never,
}

/// The credentials that an object of type `tls-creds-x509` describes.
///
/// # Errors
/// An option that there is not, or a file that cannot be used; in QEMU's words where it has some.
pub fn credentials(pairs: &[(String, String)]) -> Result<Credentials, CommandError> {
    let (mut directory, mut endpoint) = (None, Endpoint::Client);
    let (mut check, mut examination) = (PeerCheck::Required, Examination::Now);
    for (name, value) in pairs {
        match name.as_str() {
            "qom-type" | "id" => {}
            "dir" => directory = Some(PathBuf::from(value)),
            "endpoint" => endpoint = self::endpoint(value)?,
            "verify-peer" if options::switch(name, value)? => check = PeerCheck::Required,
            "verify-peer" => check = PeerCheck::Off,
            "sanity-check" if options::switch(name, value)? => examination = Examination::Now,
            "sanity-check" => examination = Examination::Never,
            "priority" => return Err(no_priority()),
            "passwordid" => {
                return Err(CommandError::new(
                    "Private keys that are encrypted ('passwordid') are not supported",
                ));
            }
            _ => return Err(unexpected(name)),
        }
    }
    let directory = directory.ok_or_else(no_directory)?;
    let files = Files::of(directory, endpoint);
    files.credentials(check, examination)
}

/// The refusal of credentials without `dir=`.
pub(super) fn no_directory() -> CommandError {
    CommandError::new(worded(
        "Missing 'dir' property value",
        "TLS credentials need 'dir', the directory of their files",
    ))
}

/// The side that `endpoint=` names.
pub(super) fn endpoint(value: &str) -> Result<Endpoint, CommandError> {
    match value {
        "server" => Ok(Endpoint::Server),
        "client" => Ok(Endpoint::Client),
        _ => {
            let text = format!("Parameter 'endpoint' does not accept value '{value}'");
            Err(CommandError::new(text))
        }
    }
}

/// The refusal of `priority=`.
pub(super) fn no_priority() -> CommandError {
    CommandError::new(
        "Lists of ciphers ('priority') are not supported: TLS 1.2 and 1.3 are used with safe ciphers only",
    )
}

/// Returns the credentials of a client that has been given a directory of certificates, but no
/// object.
///
/// # Errors
/// A file that cannot be used.
pub fn client_of_directory(
    directory: &Path,
    check: PeerCheck,
) -> Result<ClientCredentials, CommandError> {
    let files = Files::of(directory.to_path_buf(), Endpoint::Client);
    match files.credentials(check, Examination::Now)? {
        Credentials::Client(credentials) => Ok(credentials),
        Credentials::Server(_) => unreachable!("these are a client's"),
    }
}

/// The files of one side.
struct Files {
    endpoint: Endpoint,
    authorities: PathBuf,
    revoked: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

pub(super) type Bytes = Zeroizing<Vec<u8>>;

impl Files {
    fn of(directory: PathBuf, endpoint: Endpoint) -> Files {
        let (certificate, key) = match endpoint {
            Endpoint::Server => ("server-cert.pem", "server-key.pem"),
            Endpoint::Client => ("client-cert.pem", "client-key.pem"),
        };
        Files {
            endpoint,
            authorities: directory.join("ca-cert.pem"),
            revoked: directory.join("ca-crl.pem"),
            certificate: directory.join(certificate),
            key: directory.join(key),
        }
    }

    fn credentials(
        &self,
        check: PeerCheck,
        examination: Examination,
    ) -> Result<Credentials, CommandError> {
        let authorities = needed(&self.authorities)?;
        let revoked = optional(&self.revoked)?;
        // One without the other is a mistake, for clients too.
        let has_identity =
            self.endpoint == Endpoint::Server || self.certificate.exists() || self.key.exists();
        let identity: Option<(Bytes, Bytes)> = match has_identity {
            true => Some((needed(&self.certificate)?, needed(&self.key)?)),
            false => None,
        };
        let pem = Pem {
            authorities: &authorities,
            revoked: revoked.as_deref().map(Vec::as_slice),
            identity: identity
                .as_ref()
                .map(|(certificates, key)| Identity { certificates, key }),
        };
        let credentials = match self.endpoint {
            Endpoint::Server => ServerTls::new(&pem, check).map(Credentials::Server),
            Endpoint::Client => ClientCredentials::new(&pem, check).map(Credentials::Client),
        };
        let credentials = credentials.map_err(|error| self.refused(&error))?;
        if examination == Examination::Now {
            examine_own(&pem, self.endpoint).map_err(|error| self.unconvincing(&error))?;
        }
        Ok(credentials)
    }

    fn side(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Server => "server",
            Endpoint::Client => "client",
        }
    }

    fn refused(&self, error: &CredentialsError) -> CommandError {
        let (certificate, key) = (self.certificate.display(), self.key.display());
        CommandError::new(match error {
            CredentialsError::Authorities(why) => {
                let name = self.authorities.display();
                format!("Unable to import CA certificate list {name}: {why}")
            }
            CredentialsError::Revoked(why) => {
                format!("Cannot load CRL '{}': {why}", self.revoked.display())
            }
            CredentialsError::Certificate(why) => {
                let side = self.side();
                format!("Unable to import {side} certificate {certificate}: {why}")
            }
            CredentialsError::Key(why) => {
                format!("Cannot load certificate '{certificate}' & key '{key}': {why}")
            }
            error => format!("Cannot load certificate '{certificate}' & key '{key}': {error}"),
        })
    }

    /// Our own certificate would not be believed.
    fn unconvincing(&self, error: &CredentialsError) -> CommandError {
        match error {
            CredentialsError::Certificate(why) => {
                let (own, authorities) = (self.certificate.display(), self.authorities.display());
                CommandError::new(format!(
                    "Our own certificate {own} failed validation against {authorities}: {why}"
                ))
            }
            error => self.refused(error),
        }
    }
}

/// A file that has to be there; its memory is wiped.
pub(super) fn needed(path: &Path) -> Result<Bytes, CommandError> {
    read(path).map_err(|error| inaccessible(path, &error))
}

fn optional(path: &Path) -> Result<Option<Bytes>, CommandError> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(inaccessible(path, &error)),
    }
}

fn inaccessible(path: &Path, error: &std::io::Error) -> CommandError {
    let (name, why) = (path.display(), cowslip::error::system_words(error));
    CommandError::new(format!("Unable to access credentials {name}: {why}"))
}

/// A whole file, whose memory is wiped: it may be a key.
fn read(path: &Path) -> std::io::Result<Bytes> {
    let file = std::fs::File::open(path)?;
    let len = file.metadata()?.len();
    if len > FILE_BYTES_MAX {
        return Err(std::io::ErrorKind::FileTooLarge.into());
    }
    // Memory for all of it at once: growing would leave copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(len as usize + 1));
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Clients that a server serves, by the subjects of their certificates or the names of their users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authorization {
    /// `authz-simple`: this one.
    Simple(String),
    /// `authz-list`: the first rule that matches counts.
    List(List),
}

/// Rules, and what counts where none matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    rules: Vec<Rule>,
    otherwise: Policy,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(rename = "match")]
    pattern: String,
    policy: Policy,
    #[serde(default)]
    format: PatternFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Policy {
    Deny,
    Allow,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PatternFormat {
    #[default]
    Exact,
    Glob,
}

impl Authorization {
    /// Whether the subject is served.
    pub fn allows(&self, subject: &str) -> bool {
        match self {
            Authorization::Simple(identity) => identity == subject,
            Authorization::List(list) => {
                let rule = list.rules.iter().find(|rule| match rule.format {
                    PatternFormat::Exact => rule.pattern == subject,
                    PatternFormat::Glob => {
                        matches_glob(rule.pattern.as_bytes(), subject.as_bytes())
                    }
                });
                rule.map_or(list.otherwise, |rule| rule.policy) == Policy::Allow
            }
        }
    }
}

/// Whether `*` (any text) and `?` (any byte) can stand for what makes the pattern the text.
fn matches_glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut in_text) = (0, 0);
    // Behind the last star, and how much of the text it has taken.
    let mut star: Option<(usize, usize)> = None;
    while in_text < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, in_text));
            }
            Some(&byte) if byte == b'?' || byte == text[in_text] => {
                at += 1;
                in_text += 1;
            }
            _ => {
                let Some((behind, taken)) = star else {
                    return false;
                };
                star = Some((behind, taken + 1));
                (at, in_text) = (behind, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|&byte| byte == b'*')
}

/// Returns the authorization that an object of type `authz-simple` describes.
///
/// # Errors
/// An option that there is not, or that is missing.
pub fn authorize_one(pairs: &[(String, String)]) -> Result<Authorization, CommandError> {
    let mut identity = None;
    for (name, value) in pairs {
        match name.as_str() {
            "qom-type" | "id" => {}
            "identity" => identity = Some(value.clone()),
            _ => return Err(unexpected(name)),
        }
    }
    let identity = identity.ok_or_else(|| CommandError::new("Parameter 'identity' is missing"))?;
    Ok(Authorization::Simple(identity))
}

/// Returns the authorization that an object of type `authz-list` describes: `policy=`, and
/// `rules.N.match=`, `rules.N.policy=`, `rules.N.format=`; in JSON a list of rules.
///
/// # Errors
/// An option that there is not, or that is missing.
pub fn authorize_list(pairs: &[(String, String)]) -> Result<Authorization, CommandError> {
    let mut otherwise = Policy::Deny;
    let mut rules: Vec<serde_json::Map<String, serde_json::Value>> = Vec::new();
    let of_rule =
        |error: serde_json::Error| CommandError::new(format!("Parameter 'rules': {error}"));
    for (name, value) in pairs {
        let text = || serde_json::Value::String(value.clone());
        match (name.as_str(), name.strip_prefix("rules.")) {
            ("qom-type" | "id", _) => {}
            ("policy", _) => otherwise = serde_json::from_value(text()).map_err(of_rule)?,
            ("rules", _) => rules = serde_json::from_str(value).map_err(of_rule)?,
            (_, Some(member)) => {
                let (index, member) = member.split_once('.').ok_or_else(|| unexpected(name))?;
                // In order, as QEMU wants them.
                let index: usize = index.parse().map_err(|_| unexpected(name))?;
                match index.cmp(&rules.len()) {
                    std::cmp::Ordering::Less => {}
                    std::cmp::Ordering::Equal => rules.push(serde_json::Map::new()),
                    std::cmp::Ordering::Greater => {
                        let text = format!("Parameter 'rules.{}' is missing", rules.len());
                        return Err(CommandError::new(text));
                    }
                }
                rules[index].insert(member.to_string(), text());
            }
            (_, None) => return Err(unexpected(name)),
        }
    }
    let rules: Result<Vec<Rule>, _> = rules
        .into_iter()
        .map(|rule| serde_json::from_value(rule.into()))
        .collect();
    let rules = rules.map_err(of_rule)?;
    Ok(Authorization::List(List { rules, otherwise }))
}

/// The refusal of an option that there is not.
pub(super) fn unexpected(name: &str) -> CommandError {
    CommandError::new(format!("Parameter '{name}' is unexpected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Result<Authorization, String> {
        authorize_list(&options::split(text).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let rules = list(
            "policy=deny,rules.0.match=CN=bad*,rules.0.policy=deny,rules.0.format=glob,\
             rules.1.match=CN=*,,O=x,rules.1.policy=allow,rules.1.format=glob,\
             rules.2.match=CN=*,rules.2.policy=allow",
        );
        let rules = rules.unwrap();
        for (subject, allowed) in [
            ("CN=good,O=x", true),
            ("CN=bad,O=x", false),
            ("CN=good,O=y", false),
            ("CN=*", true),
            ("CN=x", false),
            ("", false),
        ] {
            assert_eq!(rules.allows(subject), allowed, "{subject}");
        }
        assert!(
            !authorize_list(&[]).unwrap().allows("CN=x"),
            "nobody by default"
        );
        assert!(list("policy=allow").unwrap().allows("CN=x"));
        let json = vec![(
            "rules".to_string(),
            r#"[{"match":"a","policy":"allow","format":"exact"}]"#.to_string(),
        )];
        let json = authorize_list(&json).unwrap();
        assert!(json.allows("a") && !json.allows("b"));
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for (text, said) in [
            ("policy=maybe", "maybe"),
            ("foo=1", "'foo' is unexpected"),
            ("rules.0=1", "'rules.0' is unexpected"),
            ("rules.x.match=1", "'rules.x.match' is unexpected"),
            ("rules.1.match=1", "'rules.0' is missing"),
            ("rules.0.match=1", "policy"),
            ("rules.0.policy=allow", "match"),
            ("rules.0.match=1,rules.0.policy=allow,rules.0.x=1", "x"),
            (
                "rules.0.match=1,rules.0.policy=allow,rules.0.format=regex",
                "regex",
            ),
        ] {
            let error = list(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
        let one = |text| authorize_one(&options::split(text).unwrap());
        assert_eq!(
            one("id=a").unwrap_err().to_string(),
            "Parameter 'identity' is missing"
        );
        assert!(one("id=a,identity=x").unwrap().allows("x"));
        assert!(!one("id=a,identity=x").unwrap().allows("xy"));
    }

    #[test]
    fn stars_take_as_much_as_they_have_to() {
        for (pattern, text, matches) in [
            ("", "", true),
            ("*", "", true),
            ("?", "", false),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "aXbXbX", false),
            ("*ab", "aab", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("**", "x", true),
            ("a", "ab", false),
            ("ab", "a", false),
        ] {
            let found = matches_glob(pattern.as_bytes(), text.as_bytes());
            assert_eq!(found, matches, "{pattern} {text}");
        }
    }
}
