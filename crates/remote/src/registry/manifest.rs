//! Manifests, indexes and challenges of registries, as they are read: nothing in them is believed
//! that is not checked.

use serde_json::Value;
use url::Url;

use super::name::is_digest;
use super::tar;

/// The types of manifests and indexes that are asked for.
pub(crate) const TYPES: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";

/// A layer that a manifest names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) bytes: u64,
}

impl Layer {
    fn of(value: &Value) -> Option<Layer> {
        let text = |name: &str| value.get(name).and_then(Value::as_str);
        Some(Layer {
            media_type: text("mediaType").unwrap_or_default().to_string(),
            digest: text("digest").filter(|it| is_digest(it))?.to_string(),
            bytes: value.get("size")?.as_u64()?,
        })
    }

    /// Whether its type says that it is an archive of files. Programs that push single files give
    /// them that type, too, so its bytes are looked at.
    pub(crate) fn is_archive(&self) -> bool {
        self.media_type.ends_with("tar") || self.media_type.is_empty()
    }
}

/// The kind of a blob, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By gzip or zstd.
    Compressed,
    Tar,
    Other,
}

impl Kind {
    pub(crate) fn of(beginning: &[u8]) -> Kind {
        let gzip = [0x1f, 0x8b, 8];
        let zstd = [0x28, 0xb5, 0x2f, 0xfd];
        match beginning {
            _ if beginning.starts_with(&gzip) || beginning.starts_with(&zstd) => Kind::Compressed,
            _ if tar::is_header(beginning) => Kind::Tar,
            _ => Kind::Other,
        }
    }
}

/// The digest of the manifest for this machine, if a manifest is an index of several.
pub(crate) fn of_platform(index: &Value) -> Result<Option<String>, String> {
    let Some(manifests) = index.get("manifests").and_then(Value::as_array) else {
        return Ok(None);
    };
    let ours = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let is_ours = |one: &&Value| {
        let platform = one.get("platform");
        let named = platform
            .and_then(|it| it.get("architecture"))
            .and_then(Value::as_str);
        named == Some(ours)
    };
    let chosen = match &manifests[..] {
        [only] => Some(only),
        several => several.iter().find(is_ours),
    };
    let digest = chosen
        .and_then(|one| one.get("digest"))
        .and_then(Value::as_str);
    match digest.filter(|digest| is_digest(digest)) {
        Some(digest) => Ok(Some(digest.to_string())),
        None => Err(format!(
            "none of its {} manifests is for {ours}",
            manifests.len()
        )),
    }
}

/// The layer that is meant: the only one, or that of a number (from 0) or a digest.
pub(crate) fn layer(manifest: &Value, wanted: Option<&str>) -> Result<Layer, String> {
    let layers = manifest.get("layers").and_then(Value::as_array);
    let layers: Vec<Layer> = match layers {
        Some(layers) => layers.iter().filter_map(Layer::of).collect(),
        None => return Err("the manifest has no layers".to_string()),
    };
    let chosen = match (wanted, &layers[..]) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(wanted), _) => match wanted.parse::<usize>() {
            Ok(number) => layers.get(number),
            Err(_) => layers.iter().find(|layer| layer.digest == wanted),
        },
    };
    chosen.cloned().ok_or_else(|| {
        let types = layers
            .iter()
            .take(8)
            .map(|layer| layer.media_type.escape_default().to_string());
        format!(
            "it has {} layers ({}), and '?layer=NUMBER' has to say which one the disk is",
            layers.len(),
            types.collect::<Vec<_>>().join(", ")
        )
    })
}

/// The code of an error in JSON, if it is a plain word.
pub(crate) fn code_in(text: &[u8]) -> Option<String> {
    let answer: Value = serde_json::from_slice(text).ok()?;
    let code = answer.get("errors")?.get(0)?.get("code")?.as_str()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    (code.len() <= 64 && code.bytes().all(is_plain)).then(|| code.to_string())
}

/// A registry's demand before it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer(TokenServer),
}

/// Where a token is to be had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenServer {
    realm: String,
    service: Option<String>,
    scope: Option<String>,
}

impl TokenServer {
    pub(crate) fn url(&self) -> Option<Url> {
        let mut url = Url::parse(&self.realm).ok()?;
        let named = [("service", &self.service), ("scope", &self.scope)];
        for (name, value) in named {
            if let Some(value) = value {
                url.query_pairs_mut().append_pair(name, value);
            }
        }
        Some(url)
    }
}

impl Challenge {
    /// Reads a header `WWW-Authenticate` (RFC 9110, section 11.6.1).
    pub(crate) fn parse(text: &str) -> Option<Challenge> {
        let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut server = TokenServer::default();
        while let Some((name, value)) = rest.split_once('=') {
            let (value, more) = match value.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => value.split_once(',').unwrap_or((value, "")),
            };
            match name.trim_matches([' ', ',']).to_ascii_lowercase().as_str() {
                "realm" => server.realm = value.to_string(),
                "service" => server.service = Some(value.to_string()),
                "scope" => server.scope = Some(value.to_string()),
                _ => {}
            }
            rest = more;
        }
        Some(Challenge::Bearer(server))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn challenges_say_where_tokens_are() {
        let text =
            "Bearer realm=\"https://auth.x/token\",service=\"reg.x\",scope=\"repository:a/b:pull\"";
        let Some(Challenge::Bearer(server)) = Challenge::parse(text) else {
            panic!("it is one");
        };
        assert_eq!(
            server.url().unwrap().as_str(),
            "https://auth.x/token?service=reg.x&scope=repository%3Aa%2Fb%3Apull"
        );
        assert_eq!(
            Challenge::parse("Basic realm=\"x\""),
            Some(Challenge::Basic)
        );
        assert_eq!(Challenge::parse("Negotiate"), None);
        assert_eq!(Challenge::parse("Bearer realm=\"never ends"), None);
    }

    #[test]
    fn one_layer_is_the_disk() {
        let digest = |byte: &str| format!("sha256:{}", byte.repeat(32));
        let layer_of = |byte: &str| json!({"mediaType": "a", "digest": digest(byte), "size": 5});
        let one = json!({"layers": [layer_of("ab")]});
        assert_eq!(layer(&one, None).unwrap().digest, digest("ab"));
        let two = json!({"layers": [layer_of("ab"), layer_of("cd")]});
        assert!(layer(&two, None).unwrap_err().contains("2 layers (a, a)"));
        assert_eq!(layer(&two, Some("1")).unwrap().digest, digest("cd"));
        assert_eq!(
            layer(&two, Some(&digest("ab"))).unwrap().digest,
            digest("ab")
        );
        assert!(layer(&two, Some("2")).is_err());
        let wrong = json!({"layers": [{"digest": "sha256:../../x", "size": 5}]});
        assert!(layer(&wrong, None).is_err());
        assert!(layer(&json!([]), None).is_err());
        assert_eq!(of_platform(&one), Ok(None));
        let index = json!({"manifests": [{"digest": digest("ef")}]});
        assert_eq!(of_platform(&index), Ok(Some(digest("ef"))));
        assert!(of_platform(&json!({"manifests": []})).is_err());
    }
}
