//! Values of types from the words of a command line, as QEMU reads them: `driver=qcow2,
//! file.driver=file,file.filename=a,,b`. A name is a way into the value; a number in it is a place
//! in a list. A text that begins with a brace is JSON.
//!
//! All values are texts then, which the type makes numbers and switches of; those are written as
//! for QEMU: `on` and `off`, numbers of C, sizes with a suffix.

use serde_json::{Map, Value};

use super::{Command, Schema};
use crate::error::QmpError;
use crate::json::parse;

/// Longest part of a name, as in QEMU.
const PART_BYTES_MAX: usize = 127;

/// Most parts of a name: a chain of hundreds of images may be described so.
const PARTS_MAX: usize = 512;

type Result<T> = std::result::Result<T, QmpError>;

fn refuse<T>(text: String) -> Result<T> {
    Err(QmpError::generic(text))
}

/// A value that is being put together.
enum Node {
    /// Whole.
    Value(Value),
    /// Named parts, or places of a list.
    Group(Vec<(String, Node)>),
}

impl Schema {
    /// An object of a type, from a text. With an `implied` name the text may begin with the value
    /// of that alone: `null-co,node-name=n`.
    ///
    /// # Errors
    /// The text is no list of options, or its values are not of the type.
    pub fn object_of_text(
        &self,
        kind: &str,
        implied: Option<&str>,
        text: &str,
    ) -> Result<Map<String, Value>> {
        if text.starts_with('{') {
            return match parse(text) {
                Ok(Value::Object(mut members)) => {
                    self.check_json(kind, &mut members)?;
                    Ok(members)
                }
                Ok(_) => refuse("QMP input must be a JSON object".into()),
                Err(error) => refuse(error.to_string()),
            };
        }
        let mut root = Vec::new();
        for (name, value) in pairs(text, implied)? {
            insert(&mut root, &name, Value::String(value))?;
        }
        let mut members = object_of(root)?;
        self.check_words(kind, &mut members)?;
        Ok(members)
    }

    /// The arguments of a command, from words such as `node-name=n`. After `:=` the value is JSON:
    /// `bitmaps:=["a", "b"]`. Numbers are bare: none has a plus sign or blanks.
    ///
    /// # Errors
    /// As for [`Schema::object_of_text`].
    pub fn arguments_of_words<'a>(
        &self,
        command: &Command,
        words: impl IntoIterator<Item = &'a str>,
    ) -> Result<Map<String, Value>> {
        let mut root = Vec::new();
        for word in words {
            let Some((name, text)) = word.split_once('=') else {
                return refuse(format!("Expected '=' after parameter '{word}'"));
            };
            let (name, value) = match name.strip_suffix(':') {
                Some(name) => match parse(text) {
                    Ok(value) => (name, value),
                    Err(error) => return refuse(format!("Parameter '{name}': {error}")),
                },
                None => (name, Value::from(text)),
            };
            insert(&mut root, name, value)?;
        }
        let mut members = object_of(root)?;
        self.check_arguments(&command.arguments, &mut members)?;
        Ok(members)
    }
}

fn object_of(root: Vec<(String, Node)>) -> Result<Map<String, Value>> {
    let members = root.into_iter().map(|(name, node)| {
        let value = finish(node, &name)?;
        Ok((name, value))
    });
    members.collect()
}

/// Splits a text at commas; two of them are one in a value.
fn pairs(text: &str, implied: Option<&str>) -> Result<Vec<(String, String)>> {
    let mut pairs = Vec::new();
    let mut rest = text;
    let mut implied = implied;
    while !rest.is_empty() {
        let end = rest.find([',', '=']).unwrap_or(rest.len());
        let name = match (rest[end..].starts_with('='), implied.take()) {
            (true, _) => {
                let name = &rest[..end];
                rest = &rest[end + 1..];
                name
            }
            (false, Some(implied)) if end > 0 => implied,
            (false, _) if end == 0 => return refuse("Invalid parameter ''".into()),
            (false, _) => {
                let name = &rest[..end];
                return refuse(format!("Expected '=' after parameter '{name}'"));
            }
        };
        let (value, after) = value_of(rest);
        pairs.push((name.to_string(), value));
        rest = after;
    }
    Ok(pairs)
}

/// The value at the front of a text, and what follows the comma after it.
fn value_of(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(',') {
        value.push_str(before);
        rest = after;
        match rest.strip_prefix(',') {
            Some(after) => {
                value.push(',');
                rest = after;
            }
            None => return (value, rest),
        }
    }
    value.push_str(rest);
    (value, "")
}

fn insert(root: &mut Vec<(String, Node)>, name: &str, value: Value) -> Result<()> {
    let parts: Vec<&str> = name.split('.').collect();
    if parts.len() > PARTS_MAX {
        return refuse(format!("Parameter '{}' has too many parts", parts[0]));
    }
    for (at, part) in parts.iter().enumerate() {
        if !is_name(part) && (at == 0 || !is_place(part)) {
            return refuse(format!("Invalid parameter '{name}'"));
        }
        if part.len() > PART_BYTES_MAX {
            let which = if parts.len() > 1 { " fragment" } else { "" };
            return refuse(format!("Parameter{which} '{part}' is too long"));
        }
    }
    let mut group = root;
    for (at, part) in parts.iter().enumerate() {
        let is_last = at + 1 == parts.len();
        let index = match group.iter().position(|(name, _)| name == part) {
            Some(index) => index,
            None => {
                group.push((part.to_string(), Node::Group(Vec::new())));
                if is_last {
                    let last = group.last_mut();
                    last.expect("a part that was added").1 = Node::Value(value);
                    return Ok(());
                }
                group.len() - 1
            }
        };
        match (&mut group[index].1, is_last) {
            // The last one counts.
            (Node::Value(before), true) => {
                *before = value;
                return Ok(());
            }
            (Node::Group(parts), false) => group = parts,
            _ => {
                let way = parts[..=at].join(".");
                return refuse(format!("Parameters '{way}.*' used inconsistently"));
            }
        }
    }
    Ok(())
}

fn is_place(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_name(part: &str) -> bool {
    let rest = part.strip_prefix("__").unwrap_or(part);
    rest.starts_with(|first: char| first.is_ascii_alphabetic())
        && rest
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Makes lists of groups whose parts are places.
fn finish(node: Node, way: &str) -> Result<Value> {
    let parts = match node {
        Node::Value(value) => return Ok(value),
        Node::Group(parts) => parts,
    };
    let places = parts.iter().filter(|(name, _)| is_place(name)).count();
    let count = parts.len();
    let mut members = Map::new();
    let mut elements: Vec<Option<Value>> = (0..places).map(|_| None).collect();
    for (name, node) in parts {
        let value = finish(node, &format!("{way}.{name}"))?;
        if places == 0 {
            members.insert(name, value);
        } else if let Some(element) = name.parse().ok().and_then(|at: usize| elements.get_mut(at)) {
            *element = Some(value);
        }
    }
    if places == 0 {
        return Ok(members.into());
    }
    if places < count {
        return refuse(format!("Parameters '{way}.*' used inconsistently"));
    }
    if let Some(at) = elements.iter().position(Option::is_none) {
        return refuse(format!("Parameter '{way}.{at}' missing"));
    }
    Ok(elements.into_iter().flatten().collect())
}

/// A whole number as C reads it: with white space and a sign before it, in base 10, 16 or 8.
pub(super) fn whole(text: &str) -> Option<i128> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\u{b}', '\u{c}', '\r']);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let hexadecimal = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"));
    let (digits, base) = match hexadecimal {
        Some(digits) => (digits, 16),
        None if digits.len() > 1 && digits.starts_with('0') => (digits, 8),
        None => (digits, 10),
    };
    if !digits.starts_with(|first: char| first.is_digit(base)) {
        return None;
    }
    let number = i128::from_str_radix(digits, base).ok()?;
    Some(if negative { -number } else { number })
}
