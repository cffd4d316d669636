//! User and password for a registry: those of the options, or of the file that programs for
//! containers keep them in.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use zeroize::Zeroizing;

use crate::environment::Environment;
use crate::options::StoreOptions;
use crate::url::ObjectUrl;

/// The variable that names the file, and its usual place in the home directory.
pub(crate) const FILE: (&str, &str) = ("REGISTRY_AUTH_FILE", ".docker/config.json");

/// The value of a header with user and password, if there are any.
pub(crate) fn basic(
    url: &ObjectUrl,
    options: &StoreOptions,
    environment: &Environment,
) -> Option<Zeroizing<String>> {
    if options.anonymous {
        return None;
    }
    if let Some(login) = &options.login {
        let pair = Zeroizing::new(format!("{}:{}", login.user, login.password.as_str()));
        let text = Zeroizing::new(BASE64_STANDARD.encode(pair.as_bytes()));
        return Some(Zeroizing::new(format!("Basic {}", text.as_str())));
    }
    let file = environment.file(FILE.0, FILE.1)?;
    let text = Zeroizing::new(std::fs::read(file).ok()?);
    let host = match url.port() {
        Some(port) => format!("{}:{port}", url.host()),
        None => url.host().to_string(),
    };
    let pair = Zeroizing::new(pair_of(&text, &host)?);
    Some(Zeroizing::new(format!("Basic {}", pair.as_str())))
}

/// User and password of a registry in a file, in base64.
fn pair_of(text: &[u8], host: &str) -> Option<String> {
    let all: Value = serde_json::from_slice(text).ok()?;
    let pair = all.get("auths")?.get(host)?.get("auth")?.as_str()?;
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    (!pair.is_empty() && pair.bytes().all(is_digit)).then(|| pair.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_pair_for_each_registry() {
        let text = br#"{"auths": {"quay.io": {"auth": "bWU6cHc="}, "h:5000": {"auth": "\n"}}}"#;
        assert_eq!(pair_of(text, "quay.io").as_deref(), Some("bWU6cHc="));
        for host in ["h:5000", "other"] {
            assert_eq!(pair_of(text, host), None);
        }
    }
}
