//! JSON on the command line: what QEMU takes, as names and values.

use serde_json::{Map, Value};

use cowslip_block::{Error, Result};

/// Members of members that are written as such: no node of QEMU's lies deeper.
const NESTED_MAX: usize = 64;

/// A JSON object as names and values: members of members, and of lists, joined by dots.
///
/// # Errors
/// It is no JSON, or no object.
pub fn pairs(json: &str) -> Result<Vec<(String, String)>> {
    let value: Value = serde_json::from_str(&double_quoted(json))
        .map_err(|error| Error::invalid(format!("Could not parse the JSON options: {error}")))?;
    let Value::Object(members) = value else {
        return Err(Error::invalid("Invalid JSON object given"));
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

/// A list whose file name may be a JSON object: its members, but for those that the list has
/// itself.
///
/// # Errors
/// As [`pairs`].
pub fn expanded(mut list: Vec<(String, String)>) -> Result<Vec<(String, String)>> {
    let is_json =
        |(name, value): &(String, String)| name == "filename" && value.starts_with("json:");
    let Some(at) = list.iter().position(is_json) else {
        return Ok(list);
    };
    let (_, value) = list.remove(at);
    let mut members = pairs(&value["json:".len()..])?;
    members.retain(|(name, _)| list.iter().all(|(given, _)| given != name));
    members.extend(list);
    Ok(members)
}

/// A list as one JSON object in QEMU's way of writing it: what stands before dots is a member that
/// has members.
pub fn text(list: &[(String, String)]) -> String {
    let mut whole = Value::Object(Map::new());
    for (name, value) in list {
        match name.matches('.').count() < NESTED_MAX {
            true => put(&mut whole, name, value),
            false => whole[name.as_str()] = value.as_str().into(),
        }
    }
    let mut out = String::new();
    write_spaced(&whole, &mut out);
    out
}

/// Of two words for the same thing the last counts.
fn put(whole: &mut Value, name: &str, value: &str) {
    if !whole.is_object() {
        *whole = Value::Object(Map::new());
    }
    match name.split_once('.') {
        Some((first, rest)) => put(&mut whole[first], rest, value),
        None => whole[name] = value.into(),
    }
}

fn write_spaced(value: &Value, out: &mut String) {
    let Value::Object(members) = value else {
        out.push_str(&value.to_string());
        return;
    };
    out.push('{');
    for (at, (name, member)) in members.iter().enumerate() {
        out.push_str(if at > 0 { ", " } else { "" });
        out.push_str(&Value::String(name.clone()).to_string());
        out.push_str(": ");
        write_spaced(member, out);
    }
    out.push('}');
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
    use cowslip_block::options;

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
    fn a_name_in_json_is_its_members_and_the_list_counts_for_more() {
        let pair = |(name, value): (&str, &str)| (name.to_string(), value.to_string());
        let list = [
            ("driver", "qcow2"),
            ("filename", r#"json:{"driver":"raw","file.filename":"a"}"#),
        ];
        let list = expanded(list.map(pair).to_vec()).unwrap();
        assert_eq!(
            list,
            [("file.filename", "a"), ("driver", "qcow2")].map(pair)
        );
        let plain = [("filename", "a")].map(pair).to_vec();
        assert_eq!(expanded(plain.clone()).unwrap(), plain);
    }

    #[test]
    fn a_list_is_written_as_one_object() {
        let list =
            options::split("driver=qcow2,file.driver=file,file.filename=a\"b,file=x").unwrap();
        let whole = r#"{"driver": "qcow2", "file": "x"}"#;
        assert_eq!(text(&list), whole);
        let nested = r#"{"driver": "qcow2", "file": {"driver": "file", "filename": "a\"b"}}"#;
        assert_eq!(text(&list[..3]), nested);
        assert_eq!(pairs(nested).unwrap(), list[..3]);
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
