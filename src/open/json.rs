//! JSON on the command line: what QEMU takes, as names and values.

use serde_json::Value;

use crate::error::CommandError;

/// A JSON object as names and values: members of members, and of lists, joined by dots.
///
/// # Errors
/// It is no JSON, or no object.
pub fn pairs(json: &str) -> Result<Vec<(String, String)>, CommandError> {
    let value: Value = serde_json::from_str(&double_quoted(json))
        .map_err(|error| CommandError::new(format!("Could not parse the JSON options: {error}")))?;
    let Value::Object(members) = value else {
        return Err(CommandError::new("Invalid JSON object given"));
    };
    let mut open: Vec<(String, Value)> = members.into_iter().rev().collect();
    let mut out = Vec::new();
    while let Some((name, value)) = open.pop() {
        match value {
            Value::Object(members) => {
                let inner = members.into_iter().rev();
                open.extend(inner.map(|(member, value)| (format!("{name}.{member}"), value)));
            }
            Value::Array(items) => {
                let inner = items.into_iter().enumerate().rev();
                open.extend(inner.map(|(at, value)| (format!("{name}.{at}"), value)));
            }
            Value::String(text) => out.push((name, text)),
            Value::Null => out.push((name, String::new())),
            Value::Bool(on) => out.push((name, if on { "on" } else { "off" }.into())),
            Value::Number(number) => out.push((name, number.to_string())),
        }
    }
    Ok(out)
}

/// The text with strings in double quotes alone: QEMU takes single ones too, which shells prefer.
fn double_quoted(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut quote = None;
    let mut chars = json.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(_), '\\') => match chars.next() {
                Some('\'') => out.push('\''),
                escaped => out.extend(std::iter::once('\\').chain(escaped)),
            },
            (Some('\''), '"') => out.push_str("\\\""),
            (Some(open), _) if c == open => {
                quote = None;
                out.push('"');
            }
            (None, '\'' | '"') => {
                quote = Some(c);
                out.push('"');
            }
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_items_are_joined_by_dots() {
        let list = pairs(r#"{"a":{"b":[{"c":1},"x"]},"d":null,"e":true}"#).unwrap();
        let list: Vec<String> = list
            .into_iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        assert_eq!(list, ["a.b.0.c=1", "a.b.1=x", "d=", "e=on"]);
    }

    #[test]
    fn strings_may_be_in_single_quotes() {
        for (given, value) in [
            ("{'a': 'b'}", "b"),
            (r#"{"a": "it's"}"#, "it's"),
            (r#"{'a': 'it\'s'}"#, "it's"),
            (r#"{'a': 'say "x"'}"#, r#"say "x""#),
            (r#"{"a": "x\"y\\"}"#, r#"x"y\"#),
            (r#"{'a': 'é\n'}"#, "é\n"),
        ] {
            assert_eq!(
                pairs(given).unwrap(),
                [("a".to_string(), value.to_string())],
                "{given}"
            );
        }
        for given in ["{'a': 'b}", "{'a': \"b'}", "{a: 'b'}", "{'a': '\\", "'x'"] {
            assert!(pairs(given).is_err(), "{given}");
        }
    }
}
