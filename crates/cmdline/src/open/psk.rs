//! Pre-shared keys: the object `tls-creds-psk`, which is a directory with a file `keys.psk`, and a
//! single such file, as URIs name it.
//!
//! The file has lines `USER:KEY`, as `psktool` writes them. A server accepts all of its users; a
//! client uses one: by default `qemu`, as in QEMU, and with URIs the user that runs the program, as
//! in libnbd.
//!
//! Source: qemu(1), "tls-creds-psk"; nbd_connect_uri(3).

use std::io::Read;
use std::path::{Path, PathBuf};

use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_nbd::tls::{
    ClientCredentials, CredentialsError, Endpoint, PSK_MISSING, ServerTls, SharedKeys,
};

use super::tls::{self, Credentials};

/// The file of a directory.
const FILE: &str = "keys.psk";
/// Name of a client by default.
const USER: &str = "qemu";
/// Limit of the bytes that are read of the system's list of users.
const PASSWD_BYTES_MAX: u64 = 4 << 20;

/// The credentials that an object of type `tls-creds-psk` describes.
///
/// # Errors
/// An option that there is not, or a file that cannot be used; in QEMU's words where it has some.
pub fn credentials(pairs: &[(String, String)]) -> Result<Credentials, CommandError> {
    let refuse = |text: &str| Err(CommandError::new(text));
    let (mut directory, mut user, mut endpoint) = (None, None, Endpoint::Client);
    for (name, value) in pairs {
        match name.as_str() {
            "qom-type" | "id" => {}
            "dir" => directory = Some(PathBuf::from(value)),
            "endpoint" => endpoint = tls::endpoint(value)?,
            "username" => user = Some(value.as_str()),
            // Both sides prove that they have the key, whatever this says: the handshake is that
            // proof.
            "verify-peer" => {
                options::switch(name, value)?;
            }
            "priority" => return Err(tls::no_priority()),
            _ => return Err(tls::unexpected(name)),
        }
    }
    if endpoint == Endpoint::Server && user.is_some() {
        return refuse("username should not be set when endpoint=server");
    }
    let Some(directory) = directory else {
        return Err(tls::no_directory());
    };
    let path = directory.join(FILE);
    let keys = read(&path)?;
    match endpoint {
        Endpoint::Server => {
            let tls = ServerTls::with_keys(keys).map_err(|error| unusable(&path, &error))?;
            Ok(Credentials::Server(tls))
        }
        Endpoint::Client => client(&path, user.unwrap_or(USER), &keys).map(Credentials::Client),
    }
}

/// Returns the credentials of a client that has been given a file of keys, but no object. Without a
/// name it is the user who runs the program.
///
/// # Errors
/// A file that cannot be used, or no key for the user in it.
pub fn client_of_file(path: &Path, user: Option<&str>) -> Result<ClientCredentials, CommandError> {
    if let Some(why) = PSK_MISSING {
        let text = format!("'tls-psk-file' is not supported: {why}");
        return Err(CommandError::new(text));
    }
    let keys = read(path)?;
    let own;
    let user = match user {
        Some(user) => user,
        None => {
            own = own_name().ok_or_else(|| {
                CommandError::new(
                    "The system has no name for the user of this process: give tls-username=NAME with tls-psk-file",
                )
            })?;
            &own
        }
    };
    client(path, user, &keys)
}

fn client(path: &Path, user: &str, keys: &SharedKeys) -> Result<ClientCredentials, CommandError> {
    let credentials = ClientCredentials::with_key_of(user, keys);
    credentials.map_err(|error| match error {
        CredentialsError::NoSuchUser(user) => {
            let path = path.display();
            CommandError::new(format!("Username {user} not found in PSK file {path}"))
        }
        error => unusable(path, &error),
    })
}

fn read(path: &Path) -> Result<SharedKeys, CommandError> {
    let text = tls::needed(path)?;
    SharedKeys::parse(&text).map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> CommandError {
    CommandError::new(format!("Cannot read PSK file {}: {why}", path.display()))
}

/// The name of the user who runs the program, as the system's own list has it.
fn own_name() -> Option<String> {
    let mut text = Vec::new();
    let file = std::fs::File::open("/etc/passwd").ok()?;
    file.take(PASSWD_BYTES_MAX).read_to_end(&mut text).ok()?;
    let own = rustix::process::geteuid().as_raw().to_string();
    name_of(&String::from_utf8_lossy(&text), &own)
}

/// Returns the name that belongs to a number, in lines `NAME:PASSWORD:NUMBER:…`.
fn name_of(passwd: &str, number: &str) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut parts = line.split(':');
        let name = parts.next()?;
        (parts.nth(1) == Some(number)).then(|| name.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_the_names_that_the_system_gives_them() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n# 7\n\nalice:x:1000:7::/:\nbob:x:7:7::/:\n";
        assert_eq!(name_of(passwd, "0").as_deref(), Some("root"));
        assert_eq!(name_of(passwd, "7").as_deref(), Some("bob"));
        assert_eq!(name_of(passwd, "1000").as_deref(), Some("alice"));
        assert_eq!(name_of(passwd, "100"), None);
    }
}
