//! Keys that both sides have from somewhere else, and the users they belong to: the text of a
//! `keys.psk` as `psktool` writes it.
//!
//! Each line is `USER:KEY`, the key in hexadecimal digits. Empty lines count for nothing. A line
//! that is anything else is refused with its number, and what it says stays out of the message, as
//! half a key is still half a key.
//!
//! Source: psktool(1) of GnuTLS. RFC 4279 section 5.3 says that 128 bytes of a name and 64 of a key
//! have to be possible, RFC 9257 section 6 that a key needs 128 bits nobody can guess.

use std::collections::BTreeMap;
use std::fmt;

use zeroize::Zeroizing;

/// The longest name of a user, in bytes: what all implementations take, and the most that GnuTLS
/// takes.
pub const USER_BYTES_MAX: usize = 128;
/// The shortest key, in bytes. A recorded handshake allows an offline search for the key.
pub const KEY_BYTES_MIN: usize = 16;
/// The longest key, in bytes: the limit of OpenSSL since 1.1.1. `psktool` makes 32 bytes by
/// default.
pub const KEY_BYTES_MAX: usize = 256;

/// Users and their keys. The keys are wiped from memory when nobody has them any more.
#[derive(Clone, Default)]
pub struct SharedKeys {
    keys: BTreeMap<String, Zeroizing<Vec<u8>>>,
}

impl fmt::Debug for SharedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.keys.keys()).finish()
    }
}

/// Error in the text of a file of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeysError {
    /// The line that is wrong, counted from 1.
    pub line: usize,
    /// Why, for humans; without the line's text.
    pub why: String,
}

impl fmt::Display for KeysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.why)
    }
}

impl std::error::Error for KeysError {}

impl SharedKeys {
    /// Reads lines `USER:KEY`.
    ///
    /// # Errors
    /// The first line that is none.
    pub fn parse(text: &[u8]) -> Result<SharedKeys, KeysError> {
        let mut keys = SharedKeys::default();
        for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            let added = keys.add(line);
            added.map_err(|why| KeysError {
                line: index + 1,
                why,
            })?;
        }
        Ok(keys)
    }

    fn add(&mut self, line: &[u8]) -> Result<(), String> {
        let colon = line.iter().position(|&byte| byte == b':');
        let colon = colon
            .ok_or("it is not USER:KEY, the key in hexadecimal digits, as psktool writes it")?;
        let (user, key) = (&line[..colon], &line[colon + 1..]);
        let user = user_name(user)?;
        let key = from_hexadecimal(key)
            .ok_or("the key is not made of hexadecimal digits, two for each byte")?;
        match key.len() {
            0..KEY_BYTES_MIN => {
                return Err(format!(
                    "the key has {} bytes, and keys of fewer than {KEY_BYTES_MIN} can be guessed; make one with psktool",
                    key.len()
                ));
            }
            KEY_BYTES_MIN..=KEY_BYTES_MAX => {}
            longer => {
                return Err(format!(
                    "the key has {longer} bytes, more than {KEY_BYTES_MAX}"
                ));
            }
        }
        match self.keys.contains_key(user) {
            true => Err(format!("user {user:?} has a key already, above")),
            false => {
                self.keys.insert(user.to_string(), key);
                Ok(())
            }
        }
    }

    /// Whether there is no user.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The key of this user; `None` if there is no such user.
    pub fn key_of(&self, user: &str) -> Option<&[u8]> {
        self.keys.get(user).map(|key| key.as_slice())
    }
}

/// A name that both libraries send and find as it is written.
fn user_name(name: &[u8]) -> Result<&str, String> {
    if name.is_empty() {
        return Err("the user has no name".to_string());
    }
    if name.len() > USER_BYTES_MAX {
        let len = name.len();
        return Err(format!(
            "the user's name has {len} bytes, more than {USER_BYTES_MAX}"
        ));
    }
    if name[0] == b'#' {
        return Err(
            "neither comments nor names in hexadecimal digits, which begin with '#', are supported"
                .to_string(),
        );
    }
    let name = std::str::from_utf8(name).ok();
    let name = name.filter(|name| !name.contains(char::is_control));
    name.ok_or_else(|| "the user's name is not text".to_string())
}

fn from_hexadecimal(digits: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    // Memory for all of it at once: growing would leave copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    let digit = |byte: u8| char::from(byte).to_digit(16);
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    for pair in digits.chunks_exact(2) {
        let byte = digit(pair[0])? << 4 | digit(pair[1])?;
        bytes.push(u8::try_from(byte).expect("two digits are a byte"));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_their_keys() {
        let long = "0123456789abcdefABCDEF".repeat(3);
        let text = format!(
            "qemu:{}\n\n\u{e9} b:{long}\r\nlast:{}",
            "00".repeat(16),
            "ff".repeat(256)
        );
        let keys = SharedKeys::parse(text.as_bytes()).unwrap();
        assert_eq!(keys.key_of("qemu"), Some(&[0; 16][..]));
        assert_eq!(keys.key_of("last"), Some(&[255; 256][..]));
        let key = keys.key_of("\u{e9} b").unwrap();
        assert_eq!((key.len(), &key[..3]), (33, &[1, 0x23, 0x45][..]));
        assert_eq!(key[8..11], [0xab, 0xcd, 0xef]);
        assert_eq!(keys.key_of("qem"), None);
        assert_eq!(keys.key_of(""), None);
        assert!(!keys.is_empty() && SharedKeys::parse(b"\n").unwrap().is_empty());
        assert!(!format!("{keys:?}").contains("ff"));
    }

    #[test]
    fn lines_that_are_wrong_are_named_by_their_number_and_not_shown() {
        let good = "aabbccddeeff00112233445566778899";
        for (line, said) in [
            ("alice".to_string(), "not USER:KEY"),
            (good.to_string(), "not USER:KEY"),
            (format!(":{good}"), "no name"),
            (format!("{}:{good}", "n".repeat(129)), "129 bytes"),
            (format!("#616c:{good}"), "begin with '#'"),
            ("# a comment".to_string(), "not USER:KEY"),
            (format!("a\0b:{good}"), "not text"),
            (format!("a\tb:{good}"), "not text"),
            ("alice:".to_string(), "has 0 bytes"),
            (format!("alice:{}", &good[2..]), "has 15 bytes"),
            (format!("alice:{}", &good[1..]), "hexadecimal"),
            (format!("alice: {good}x"), "hexadecimal"),
            (format!("alice:{good} "), "hexadecimal"),
            (format!("alice:x:{good}"), "hexadecimal"),
            (format!("alice:{}", "ab".repeat(257)), "257 bytes"),
            (format!("bob:{good}"), "\"bob\" has a key already"),
        ] {
            let text = format!("bob:{good}\n\n{line}\ncarol:{good}\n");
            let error = SharedKeys::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.line, 3, "{line}");
            let message = error.to_string();
            assert!(message.contains(said), "{line}: {message}");
            assert!(!message.contains("bbccddee"), "{line}: {message}");
        }
        let binary = [&b"x\xff:"[..], good.as_bytes()].concat();
        assert!(SharedKeys::parse(&binary).is_err());
    }

    #[test]
    fn a_long_text_of_garbage_is_refused_at_its_first_line() {
        for byte in [b':', b'0', 0, 0xff, b'#', b' '] {
            let error = SharedKeys::parse(&vec![byte; 1 << 20]).unwrap_err();
            assert_eq!(error.line, 1);
        }
    }
}
