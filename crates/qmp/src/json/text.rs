//! Strings with escapes, and values as text in QEMU's layout.

use std::io;

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

use super::SyntaxError;

/// The text of a string without its escapes.
pub(super) fn unescape(raw: &[u8]) -> Result<String, SyntaxError> {
    let raw = std::str::from_utf8(raw);
    let raw = raw.map_err(|_| SyntaxError::parse("invalid UTF-8 sequence in string"))?;
    let mut text = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let mut chars = rest[1..].chars();
        let plain = match chars.next() {
            Some(same @ ('"' | '\'' | '\\' | '/')) => Some(same),
            Some('b') => Some('\u{8}'),
            Some('f') => Some('\u{c}'),
            Some('n') => Some('\n'),
            Some('r') => Some('\r'),
            Some('t') => Some('\t'),
            Some('u') => None,
            _ => {
                return Err(SyntaxError::parse("invalid escape sequence in string"));
            }
        };
        if let Some(plain) = plain {
            text.push(plain);
            rest = chars.as_str();
            continue;
        }
        let (character, length) = code_point(rest).ok_or_else(|| {
            let shown: String = rest.chars().take(6).collect();
            SyntaxError::parse(format_args!("{shown} is not a valid Unicode character"))
        })?;
        text.push(character);
        rest = &rest[length..];
    }
    text.push_str(rest);
    Ok(text)
}

/// The character of an escape `\uXXXX`, or of two that are a surrogate pair, and their length.
fn code_point(text: &str) -> Option<(char, usize)> {
    const ESCAPE: usize = 6;
    let first = unit(text)?;
    if !(0xd800..0xdc00).contains(&first) {
        return Some((char::from_u32(first)?, ESCAPE));
    }
    let second = unit(&text[ESCAPE..])?;
    if !(0xdc00..0xe000).contains(&second) {
        return None;
    }
    let character = char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00));
    Some((character?, 2 * ESCAPE))
}

/// The number of an escape `\uXXXX` that the text begins with.
fn unit(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    match digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => u32::from_str_radix(digits, 16).ok(),
        false => None,
    }
}

/// QEMU's layout: a space after each comma and colon, and ASCII alone. Scripts compare texts.
struct Layout;

impl Formatter for Layout {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        to: &mut W,
        text: &str,
    ) -> io::Result<()> {
        let mut rest = text;
        // DEL is ASCII, and may not reach a terminal either.
        while let Some(at) = rest.find(|c: char| !c.is_ascii() || c == '\u{7f}') {
            to.write_all(&rest.as_bytes()[..at])?;
            let mut chars = rest[at..].chars();
            if let Some(character) = chars.next() {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(to, "\\u{unit:04X}")?;
                }
            }
            rest = chars.as_str();
        }
        to.write_all(rest.as_bytes())
    }
}

/// A value as text.
pub fn to_text(value: &Value) -> String {
    let mut text = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut text, Layout));
    written.expect("values are written to memory");
    String::from_utf8(text).expect("the layout has ASCII alone")
}

/// A value as a line of the protocol.
pub fn to_line(value: &Value) -> Vec<u8> {
    let mut line = to_text(value).into_bytes();
    line.extend_from_slice(b"\r\n");
    line
}
