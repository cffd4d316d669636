//! The document has the lists that the schema makes. `COWSLIP_UPDATE=1` writes them.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use cowslip_qmp::Schema;
use cowslip_qmp::schema::{Declared, Entry};

/// Longest line of a document, as everywhere in the repository.
const LINE_MAX: usize = 100;

/// The names of the members of an object; optional ones in brackets, and the one that says which
/// further ones there are with an ellipsis.
fn members(schema: &Schema, of: &str) -> String {
    let Some(Declared::Object(object)) = schema.declared(of) else {
        panic!("{of} is an object");
    };
    let named = object.members.iter().map(|member| {
        let more = if object.tag.as_ref() == Some(&member.name) {
            "…"
        } else {
            ""
        };
        match member.optional {
            true => format!("[{}]", member.name),
            false => format!("{}{more}", member.name),
        }
    });
    named.collect::<Vec<_>>().join(" ")
}

fn table(schema: &Schema) -> String {
    let mut text = String::new();
    let heads = [("command", "arguments"), ("event", "data")];
    for (at, (head, second)) in heads.into_iter().enumerate() {
        write!(text, "\n| {head} | | {second} |\n| --- | --- | --- |\n").unwrap();
        for entry in schema.entries() {
            let (name, says, of) = match entry {
                Entry::Command(one) if at == 0 => (&one.name, &one.text, &one.arguments),
                Entry::Event(one) if at == 1 => (&one.name, &one.text, &one.data),
                _ => continue,
            };
            let members = members(schema, of);
            let members = match members.is_empty() {
                true => String::new(),
                false => format!("`{members}` "),
            };
            writeln!(text, "| `{name}` | {says} | {members}|").unwrap();
        }
    }
    text
}

#[test]
fn the_document_lists_what_the_schema_declares() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/qmp.md");
    let document = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- commands -->\n", "<!-- end -->");
    let (before, rest) = document.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    let expected = format!(
        "{before}{begin}{}\n{end}{after}",
        table(Schema::of_daemon())
    );
    if std::env::var_os("COWSLIP_UPDATE").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    assert!(
        document == expected,
        "COWSLIP_UPDATE=1 writes the lists of docs/qmp.md"
    );
    let long = before
        .lines()
        .chain(after.lines())
        .find(|line| line.chars().count() > LINE_MAX && !line.starts_with(['|', '{']));
    assert_eq!(long, None);
}
