//! `--object`: what command lines define beside images, and name by an ID: secrets, credentials for
//! TLS, and whom a server serves.
//!
//! They are defined before anything is opened, once for the process, and found by their IDs
//! wherever a specification or a list of options names one. Their bytes are in no message.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use cowslip::luks::Passphrase;
use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_console::output::worded;
use cowslip_nbd::remote::{Address, ClientSide, TlsName};
use cowslip_nbd::tls::{ClientCredentials, ClientTls, PSK_MISSING, ServerTls};
use cowslip_nodes::driver::Objects;
use cowslip_nodes::json;
use zeroize::Zeroizing;

use super::psk;
use super::tls::{self, Authorization, Credentials};

/// Secrets are short; a file that is named by mistake may not be.
const SECRET_BYTES_MAX: u64 = 1 << 20;

/// The types of objects, for messages.
const TYPES: &str = "secret, tls-creds-x509, tls-creds-psk, authz-simple and authz-list";

type Bytes = Zeroizing<Vec<u8>>;

/// Object that was defined.
#[derive(Clone)]
enum Object {
    Secret(Passphrase),
    Credentials(Credentials),
    Authorization(Authorization),
    /// Threads for requests, by QEMU's name. Servers choose theirs themselves, so it is a name and
    /// nothing else.
    Threads,
}

/// Constructor of an object of one type from its options.
type Make = fn(&[(String, String)]) -> Result<Object, CommandError>;

static OBJECTS: Mutex<BTreeMap<String, Object>> = Mutex::new(BTreeMap::new());

fn objects() -> MutexGuard<'static, BTreeMap<String, Object>> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Defines the objects of a command line, in order.
///
/// # Errors
/// As [`define`].
pub fn define_all(definitions: &[String]) -> Result<(), CommandError> {
    definitions.iter().try_for_each(|text| define(text))
}

/// Defines an object: `secret,id=ID,data=TEXT|file=PATH[,format=raw|base64]`, `tls-creds-x509,…`,
/// `authz-simple,…` or `authz-list,…` ([`tls`]), `tls-creds-psk,…` ([`psk`]), or the same as JSON.
///
/// # Errors
/// It is none of them, or not a whole one; in QEMU's words.
pub fn define(definition: &str) -> Result<(), CommandError> {
    let (id, object) = parse(definition)?;
    let mut objects = objects();
    if objects.contains_key(&id) {
        return Err(CommandError::new(worded(
            format!("attempt to add duplicate property '{id}' to object (type 'container')"),
            format!("There are two objects with the ID '{id}'"),
        )));
    }
    objects.insert(id, object);
    Ok(())
}

/// Removes an object. What was made by it stays as it is. Returns whether there was one.
pub fn remove(id: &str) -> bool {
    objects().remove(id).is_some()
}

/// Whether there are threads of this ID.
pub fn has_threads(id: &str) -> bool {
    matches!(objects().get(id), Some(Object::Threads))
}

/// The secret of this ID, as what opens an encrypted image.
///
/// # Errors
/// There is none, or it is no text.
pub fn passphrase(id: &str) -> Result<Passphrase, CommandError> {
    let objects = objects();
    let Some(Object::Secret(secret)) = objects.get(id) else {
        return Err(CommandError::new(format!("No secret with id '{id}'")));
    };
    let bytes = secret.bytes();
    if std::str::from_utf8(bytes).is_err() {
        let text = format!("Data from secret {id} is not valid UTF-8");
        return Err(CommandError::new(text));
    }
    if bytes.contains(&0) {
        // QEMU takes what is before it, which is hardly what is meant.
        let text = format!("Data from secret {id} contains a zero byte");
        return Err(CommandError::new(text));
    }
    Ok(secret.clone())
}

/// Whether there are secrets, which open encrypted images.
pub fn has_secrets() -> bool {
    let is_secret = |object: &Object| matches!(object, Object::Secret(_));
    objects().values().any(is_secret)
}

/// The server's credentials of this ID.
///
/// # Errors
/// There are none, or they are a client's.
pub fn server_credentials(id: &str) -> Result<ServerTls, CommandError> {
    match credentials(id)? {
        Credentials::Server(tls) => Ok(tls),
        Credentials::Client(_) => Err(CommandError::new(
            "Expected TLS credentials for a server endpoint",
        )),
    }
}

/// The client's credentials of this ID.
///
/// # Errors
/// There are none, or they are a server's.
pub fn client_credentials(id: &str) -> Result<ClientCredentials, CommandError> {
    match credentials(id)? {
        Credentials::Client(tls) => Ok(tls),
        Credentials::Server(_) => Err(CommandError::new(
            "Expected TLS credentials for a client endpoint",
        )),
    }
}

fn secret_of(bytes: &Bytes) -> Object {
    Object::Secret(Passphrase::new(bytes.to_vec()))
}

/// Objects that were defined, for images that name them.
#[derive(Clone, Copy, Debug)]
pub struct Defined;

impl Objects for Defined {
    fn passphrase(&self, id: &str) -> cowslip::Result<Passphrase> {
        passphrase(id).map_err(|why| cowslip::Error::invalid(why.to_string()))
    }

    fn tls_to(&self, server: &Address, name: &TlsName) -> cowslip::Result<ClientTls> {
        let found = match &name.credentials {
            ClientSide::Object(id) => client_credentials(id),
            ClientSide::Directory(path, check) => tls::client_of_directory(path, *check),
            ClientSide::Keys(path, user) => psk::client_of_file(path, user.as_deref()),
        };
        let credentials = found.map_err(|why| cowslip::Error::invalid(why.to_string()))?;
        name.to_server(server, &credentials)
    }
}

fn credentials(id: &str) -> Result<Credentials, CommandError> {
    match objects().get(id) {
        Some(Object::Credentials(credentials)) => Ok(credentials.clone()),
        Some(_) => {
            let text = format!("Object with id '{id}' is not TLS credentials");
            Err(CommandError::new(text))
        }
        None => Err(CommandError::new(format!(
            "No TLS credentials with id '{id}'"
        ))),
    }
}

/// Returns the authorization of this ID for a server.
///
/// # Errors
/// There is no such object.
pub fn authorization(id: &str) -> Result<Authorization, CommandError> {
    match objects().get(id) {
        Some(Object::Authorization(authorization)) => Ok(authorization.clone()),
        _ => Err(CommandError::new(format!("No authz object with id '{id}'"))),
    }
}

fn parse(definition: &str) -> Result<(String, Object), CommandError> {
    let refuse = |text: String| Err(CommandError::new(text));
    let pairs = pairs(definition)?;
    let Some(kind) = options::value(&pairs, "qom-type") else {
        return refuse(worded(
            "Parameter 'qom-type' is missing",
            format!("An object begins with its type: {TYPES}"),
        ));
    };
    if let Some(why) = unsupported(kind) {
        return refuse(format!("Objects of type '{kind}' are not supported{why}"));
    }
    let make: Make = match kind {
        "secret" => |pairs| secret(pairs).map(|bytes| secret_of(&bytes)),
        "tls-creds-psk" => |pairs| psk::credentials(pairs).map(Object::Credentials),
        "tls-creds-x509" => |pairs| tls::credentials(pairs).map(Object::Credentials),
        "authz-simple" => |pairs| tls::authorize_one(pairs).map(Object::Authorization),
        "authz-list" => |pairs| tls::authorize_list(pairs).map(Object::Authorization),
        "iothread" => |_| Ok(Object::Threads),
        other => {
            return refuse(worded(
                format!("Parameter 'qom-type' does not accept value '{other}'"),
                format!("'{other}' is not a type of objects; there are {TYPES}"),
            ));
        }
    };
    let id = identifier(&pairs)?;
    Ok((id, make(&pairs)?))
}

fn secret(pairs: &[(String, String)]) -> Result<Bytes, CommandError> {
    let refuse = |text: String| Err(CommandError::new(text));
    let value = |name| options::value(pairs, name);
    for (name, _) in pairs {
        match name.as_str() {
            "qom-type" | "id" | "data" | "file" | "format" => {}
            "keyid" | "iv" => {
                return refuse(format!(
                    "Secrets that are encrypted ('{name}') are not supported"
                ));
            }
            _ => return refuse(format!("Parameter '{name}' is unexpected")),
        }
    }
    let bytes = match (value("data"), value("file")) {
        (Some(_), Some(_)) => {
            return refuse("'file' and 'data' are mutually exclusive".to_string());
        }
        (None, None) => return refuse("Either 'file' or 'data' must be provided".to_string()),
        (Some(text), None) => Zeroizing::new(text.as_bytes().to_vec()),
        (None, Some(name)) => read(name)?,
    };
    match value("format") {
        None | Some("raw") => Ok(bytes),
        Some("base64") => from_base64(&bytes)
            .ok_or_else(|| CommandError::new("Base64 data contains invalid characters")),
        Some(other) => refuse(format!(
            "Parameter 'format' does not accept value '{other}'"
        )),
    }
}

/// Types of QEMU's that are none here, and what to do instead.
fn unsupported(kind: &str) -> Option<String> {
    let why = match kind {
        "tls-creds-psk" => return PSK_MISSING.map(|why| format!(": {why}")),
        "tls-creds-anon" => {
            ": without certificates neither side can authenticate the other; use tls-creds-x509"
        }
        "authz-list-file" => "; use authz-list",
        "authz-pam" => "; use authz-simple or authz-list",
        _ => return None,
    };
    Some(why.to_string())
}

fn identifier(pairs: &[(String, String)]) -> Result<String, CommandError> {
    let Some(id) = options::value(pairs, "id") else {
        return Err(CommandError::new("Parameter 'id' is missing"));
    };
    match is_identifier(id) {
        true => Ok(id.to_string()),
        false => Err(CommandError::new(
            "Parameter 'id' expects an identifier\n\
             Identifiers consist of letters, digits, '-', '.', '_', starting with a letter.",
        )),
    }
}

/// Names and values; the type is named or comes first.
fn pairs(definition: &str) -> Result<Vec<(String, String)>, CommandError> {
    if definition.starts_with('{') {
        return Ok(json::pairs(definition)?);
    }
    let (first, rest) = definition.split_once(',').unwrap_or((definition, ""));
    if first.contains('=') || first.is_empty() {
        return Ok(options::pairs(definition));
    }
    let mut pairs = vec![("qom-type".to_string(), first.to_string())];
    if !rest.is_empty() {
        pairs.extend(options::pairs(rest));
    }
    Ok(pairs)
}

/// Whether a text can be an ID.
pub fn is_identifier(id: &str) -> bool {
    let mut letters = id.chars();
    letters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

fn read(name: &str) -> Result<Bytes, CommandError> {
    let refused = |why: String| CommandError::new(format!("Unable to read {name}: {why}"));
    let failed = |error: &std::io::Error| {
        refused(format!(
            "Failed to open file \u{201c}{name}\u{201d}: {}",
            cowslip::error::system_words(error)
        ))
    };
    let file = std::fs::File::open(name).map_err(|error| failed(&error))?;
    // Memory for all of it at once: growing would leave copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(SECRET_BYTES_MAX as usize + 1));
    let mut file = file.take(SECRET_BYTES_MAX + 1);
    file.read_to_end(&mut bytes)
        .map_err(|error| failed(&error))?;
    match bytes.len() as u64 > SECRET_BYTES_MAX {
        true => Err(refused(format!(
            "it has more than {SECRET_BYTES_MAX} bytes"
        ))),
        false => Ok(bytes),
    }
}

/// Decodes base64 with padding; line ends do not count. `None` if it is something else.
fn from_base64(text: &[u8]) -> Option<Bytes> {
    // What QEMU takes, too: bits of the last letter that belong to no byte.
    const CONFIG: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true);
    const ENGINE: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, CONFIG);
    let letters = text.iter().copied().filter(|&letter| letter != b'\n');
    let mut line = Zeroizing::new(Vec::with_capacity(text.len()));
    line.extend(letters);
    // Memory for all of it at once, as above.
    let mut out = Zeroizing::new(vec![0; base64::decoded_len_estimate(line.len())]);
    let len = ENGINE.decode_slice(&*line, &mut out).ok()?;
    out.truncate(len);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(definition: &str) -> Result<(String, Vec<u8>), String> {
        let (id, object) = parse(definition).map_err(|error| error.to_string())?;
        match object {
            Object::Secret(secret) => Ok((id, secret.bytes().to_vec())),
            Object::Credentials(_) | Object::Authorization(_) | Object::Threads => {
                Err("no secret".to_string())
            }
        }
    }

    #[test]
    fn a_secret_is_given_in_several_ways() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "aHVudGVy\nMg==\n").unwrap();
        let file = format!("secret,id=a.b-c,file={},format=base64", path.display());
        let json = r#"{"qom-type":"secret","id":"a.b-c","data":"hunter2"}"#;
        for definition in [
            "secret,id=a.b-c,data=hunter2",
            "secret,id=a.b-c,data=hunter2,format=raw",
            "qom-type=secret,id=a.b-c,data=hunter2",
            "secret,id=a.b-c,data=aHVudGVyMg==,format=base64",
            &file,
            json,
        ] {
            let (id, bytes) = secret(definition).unwrap();
            assert_eq!((id.as_str(), &bytes[..]), ("a.b-c", &b"hunter2"[..]));
        }
        assert_eq!(secret("secret,id=a,data=x,,y").unwrap().1, b"x,y");
    }

    #[test]
    fn what_is_no_secret_is_refused_by_name() {
        for (definition, said) in [
            (
                "tls-creds-anon,id=a,dir=/x",
                "'tls-creds-anon' are not supported",
            ),
            ("rng-random,id=a", "'rng-random' is not a type of objects"),
            ("id=a,data=x", "An object begins with its type: secret,"),
            ("secret", "'id' is missing"),
            ("secret,id=1,data=x", "expects an identifier"),
            ("secret,id=a", "Either 'file' or 'data'"),
            ("secret,id=a,data=x,file=y", "mutually exclusive"),
            (
                "secret,id=a,data=x,format=hex",
                "does not accept value 'hex'",
            ),
            ("secret,id=a,data=x,keyid=b", "('keyid') are not supported"),
            ("secret,id=a,data=x,iv=b", "('iv') are not supported"),
            ("secret,id=a,data=x,foo=b", "'foo' is unexpected"),
            (
                "secret,id=a,file=/nonexistent/s",
                "No such file or directory",
            ),
            ("secret,id=a,data=a,format=base64", "invalid characters"),
            ("secret,id=a,data=a=aa,format=base64", "invalid characters"),
            ("secret,id=a,data=aaa?,format=base64", "invalid characters"),
            ("secret,id=a,data=====,format=base64", "invalid characters"),
        ] {
            let error = secret(definition).unwrap_err();
            assert!(error.contains(said), "{definition}: {error}");
        }
    }

    #[test]
    fn secrets_are_found_by_their_ids() {
        define("secret,id=found,data=x").unwrap();
        assert!(
            define("secret,id=found,data=y")
                .unwrap_err()
                .to_string()
                .contains("two objects with the ID 'found'")
        );
        assert!(passphrase("found").is_ok());
        let error = passphrase("lost").unwrap_err().to_string();
        assert_eq!(error, "No secret with id 'lost'");
        define("secret,id=binary,data=/w==,format=base64").unwrap();
        let error = passphrase("binary").unwrap_err().to_string();
        assert!(error.contains("not valid UTF-8"), "{error}");
    }
}
