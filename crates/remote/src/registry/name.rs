//! [`ImageName`]: an image in a registry.

use cowslip_block::{Error, Result};

use crate::url::ObjectUrl;

/// The tag that is meant where none is named, as in all programs for containers.
const LATEST: &str = "latest";

/// An image in a registry, and which of its layers is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageName {
    /// The registry's URL, without a slash at its end.
    base: String,
    repository: String,
    /// A tag, or a digest.
    reference: String,
    layer: Option<String>,
}

impl ImageName {
    /// The image of `oci://HOST/REPOSITORY[:TAG|@DIGEST][?layer=NUMBER|DIGEST]`, at another server
    /// if one is named.
    ///
    /// # Errors
    /// The URL has no repository, or what is no tag, digest or layer.
    pub(crate) fn of(url: &ObjectUrl, endpoint: Option<&str>) -> Result<ImageName> {
        let refused = |why: &str| Err(Error::invalid(format!("Invalid URL '{url}': {why}")));
        let path = url.path().trim_start_matches('/');
        let (repository, reference) = match path.split_once('@') {
            // A tag beside a digest says nothing.
            Some((name, digest)) => (without_tag(name).0, digest),
            None => without_tag(path),
        };
        let is_part = |part: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            !part.is_empty() && !part.starts_with('.') && part.bytes().all(allowed)
        };
        if !repository.split('/').all(is_part) {
            return refused("it names no repository");
        }
        let is_reference = is_digest(reference) || (is_part(reference) && reference.len() <= 128);
        if !is_reference {
            return refused("it has neither a tag nor a digest 'sha256:…'");
        }
        let layer = match url.query() {
            None => None,
            Some(query) => match query.strip_prefix("layer=") {
                Some(layer) if is_digest(layer) || layer.parse::<u32>().is_ok() => {
                    Some(layer.to_string())
                }
                _ => return refused("only 'layer=NUMBER' or 'layer=sha256:…' can follow"),
            },
        };
        Ok(ImageName {
            base: base(url, endpoint),
            repository: repository.to_string(),
            reference: reference.to_string(),
            layer,
        })
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn is_in_the_clear(&self) -> bool {
        self.base.starts_with("http://")
    }

    pub(crate) fn reference(&self) -> &str {
        &self.reference
    }

    pub(crate) fn layer(&self) -> Option<&str> {
        self.layer.as_deref()
    }

    pub(crate) fn manifest_url(&self, reference: &str) -> String {
        format!("{}/v2/{}/manifests/{reference}", self.base, self.repository)
    }

    pub(crate) fn blob_url(&self, digest: &str) -> String {
        format!("{}/v2/{}/blobs/{digest}", self.base, self.repository)
    }
}

/// The repository and the tag of a name.
fn without_tag(name: &str) -> (&str, &str) {
    name.rsplit_once(':').unwrap_or((name, LATEST))
}

/// The URL of the registry: over TLS, but for this machine, as in all programs for containers.
pub(crate) fn base(url: &ObjectUrl, endpoint: Option<&str>) -> String {
    if let Some(endpoint) = endpoint {
        return endpoint.trim_end_matches('/').to_string();
    }
    let host = url.host();
    let is_local = host == "localhost" || host.starts_with("127.") || host == "[::1]";
    let scheme = if is_local { "http" } else { "https" };
    match url.port() {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    }
}

/// Whether a text is a digest by SHA-256.
pub(crate) fn is_digest(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    digits.len() == 64 && digits.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> std::result::Result<ImageName, String> {
        let url = ObjectUrl::of_name(text).unwrap().unwrap();
        ImageName::of(&url, None).map_err(|error| error.to_string())
    }

    #[test]
    fn images_have_names_as_containers_do() {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        for (text, manifest) in [
            (
                "oci://quay.io/disks/fedora",
                "https://quay.io/v2/disks/fedora/manifests/latest",
            ),
            ("oci://quay.io/a:40", "https://quay.io/v2/a/manifests/40"),
            (
                "oci://127.0.0.1:5000/a/b:c-1",
                "http://127.0.0.1:5000/v2/a/b/manifests/c-1",
            ),
            (
                &format!("oci://quay.io:444/a:x@{digest}?layer=2"),
                &format!("https://quay.io:444/v2/a/manifests/{digest}"),
            ),
        ] {
            let name = name(text).unwrap();
            assert_eq!(name.manifest_url(name.reference()), manifest);
        }
        for text in [
            "oci://quay.io",
            "oci://quay.io/a/.b",
            "oci://quay.io/a@sha256:12",
            "oci://quay.io/a:",
            "oci://quay.io/a?layer=x",
            "oci://quay.io/a?other=1",
        ] {
            assert!(
                name(text).is_err_and(|why| why.starts_with("Invalid URL")),
                "{text}"
            );
        }
    }
}
