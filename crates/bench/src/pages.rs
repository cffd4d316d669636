//! A page of one table's results or of several: what was measured, then the machine, the stacks and
//! the commands. Made from the documents that `--json` prints. What is the same in several
//! documents is shown once.

use cowslip_console::error::CommandError;
use cowslip_console::size;
use serde_json::Value;

use crate::document::{Document, distinct};
use crate::page::{Align, Block, Page, Section, Table};
use crate::section::{allocate, section, title_of, writers};

/// The page of these results, in their order.
///
/// # Errors
/// A document is none of a table of `bench`.
pub fn page(documents: &[Value]) -> Result<Page, CommandError> {
    let mut sections = Vec::new();
    for document in documents {
        sections.push(section_of(document)?);
    }
    let all = || documents.iter().map(Document);
    sections.push(machine(documents));
    sections.push(stacks(documents));
    let title = match documents {
        [only] => format!("cowslip bench {}", Document(only).table()),
        _ => "cowslip bench".to_string(),
    };
    let mut page = Page::new(&title, sections);
    let dates = distinct(all().filter_map(|document| document.conditions()["date"].as_str()));
    let summary = [
        dates.first().copied(),
        first(documents, "versions", "cowslip"),
    ];
    page.subtitle = summary
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" · ");
    page.warnings = warnings(documents);
    Ok(page)
}

/// The section of a table, by its name.
fn section_of(document: &Value) -> Result<Section, CommandError> {
    let results = Document(document);
    match (results.table(), document["rows"].is_array()) {
        ("", _) | (_, false) => Err(CommandError::new(
            "This is not the result of a bench table, as --json prints it",
        )),
        ("allocate", true) => Ok(allocate::section(results)),
        ("writers", true) => Ok(writers::section(results)),
        (table, true) => match title_of(table) {
            Some(title) => Ok(section(title, results)),
            None => Err(CommandError::new(format!(
                "This is the result of a table that is not known here: '{table}'"
            ))),
        },
    }
}

/// Returns the results of a table, in a few lines of plain text.
pub fn summary(document: &Value) -> String {
    let document = Document(document);
    let lines = match document.table() {
        "allocate" => allocate::summary(document),
        "writers" => writers::summary(document),
        _ => document.ratios_in_lines(),
    };
    let mut out = format!("{}\n{lines}", document.table());
    if let Some(shortfall) = document.shortfall() {
        out += &format!("  {shortfall}\n");
    }
    out
}

fn first<'a>(documents: &'a [Value], of: &str, name: &str) -> Option<&'a str> {
    let mut values = documents
        .iter()
        .map(|document| &document["conditions"][of][name]);
    values.find_map(Value::as_str)
}

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

/// Returns the warnings of all documents and places, each once.
fn warnings(documents: &[Value]) -> Vec<String> {
    let conditions = || documents.iter().map(|document| &document["conditions"]);
    let of_runs = conditions().flat_map(|conditions| strings(&conditions["warnings"]));
    let of_places = places(documents).flat_map(|place| strings(&place["warnings"]));
    let all = distinct(of_runs.chain(of_places));
    all.into_iter().map(str::to_string).collect()
}

fn places(documents: &[Value]) -> impl Iterator<Item = &Value> {
    let places = documents
        .iter()
        .map(|document| &document["conditions"]["places"]);
    places.flat_map(|places| places.as_array().into_iter().flatten())
}

/// Returns a value as text for a reader; `None` for nothing.
fn words(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        Value::Bool(true) => Some("yes".to_string()),
        Value::Bool(false) => Some("no".to_string()),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().filter_map(words).collect();
            (!items.is_empty()).then(|| items.join(", "))
        }
        other => Some(other.to_string()),
    }
}

fn bytes(value: &Value) -> Option<String> {
    Some(size::human(value.as_u64()?))
}

/// Names and what they are.
type Known = Vec<(String, String)>;

/// Names with what they are; those of which nothing is known are left out.
fn facts<const N: usize>(facts: [(&str, Option<String>); N]) -> Known {
    let known = facts
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_string(), value?)));
    known.collect()
}

/// The machine, versions, and how each table was asked for.
fn machine(documents: &[Value]) -> Section {
    let mut section = Section::new("Machine, versions, commands");
    let mut machines: Vec<(Known, Vec<&str>)> = Vec::new();
    for document in documents {
        let document = Document(document);
        let (machine, versions) = (
            &document.conditions()["machine"],
            &document.conditions()["versions"],
        );
        let mut known = facts([
            ("Processor", words(&machine["processor"])),
            ("Processors", words(&machine["processors"])),
            ("Memory", bytes(&machine["memory-bytes"])),
            ("Kernel", words(&machine["kernel"])),
            ("Runs in", words(&machine["virtualization"])),
            ("Frequency governor", words(&machine["frequency-governors"])),
            ("On battery", words(&machine["on-battery"])),
        ]);
        for (program, version) in versions.as_object().into_iter().flatten() {
            let version = words(version).unwrap_or_else(|| "not installed".to_string());
            known.push((program.clone(), version));
        }
        match machines.iter_mut().find(|(facts, _)| *facts == known) {
            Some((_, tables)) => tables.push(document.table()),
            None => machines.push((known, vec![document.table()])),
        }
    }
    let are_several = machines.len() > 1;
    for (known, tables) in machines {
        if are_several {
            section.add(Block::Heading(format!(
                "Of {}",
                distinct(tables.into_iter()).join(", ")
            )));
        }
        section.add(Block::Facts(known));
    }
    let run = |document: &Value| {
        let conditions = &document["conditions"];
        let figure = |name: &str| words(&conditions[name]).unwrap_or_default();
        let fields = vec![
            figure("table"),
            figure("date"),
            bytes(&conditions["disk-bytes"])
                .or_else(|| bytes(&conditions["size-bytes"]))
                .unwrap_or_default(),
            figure("requests"),
            figure("repetitions"),
            words(&conditions["machine"]["load"]).unwrap_or_default(),
            figure("command"),
        ];
        (String::new(), fields)
    };
    let titles = [
        ("table", Align::Words),
        ("begun", Align::Words),
        ("disk or file", Align::Numbers),
        ("requests", Align::Numbers),
        ("runs", Align::Numbers),
        ("load before", Align::Numbers),
        ("command", Align::Words),
    ];
    let caption = "How tables were asked for";
    let table = Table::of(caption, &titles, documents.iter().map(run));
    section.add(Block::Table(table));
    section
}

/// Returns the stacks under the directories, each once.
fn stacks(documents: &[Value]) -> Section {
    let mut section = Section::new("File systems and devices");
    let mut seen: Vec<(&Value, &Value, &Value)> = Vec::new();
    for place in places(documents) {
        let stack = &place["stack"];
        // The same directory is measured again with another driver, or for another table; one of
        // the same name may have been on another file system.
        let known = (
            &stack["directory"],
            &stack["mount-options"],
            &place["filesystem-told"],
        );
        if seen.contains(&known) {
            continue;
        }
        seen.push(known);
        let name = words(&place["filesystem"]).unwrap_or_default();
        section.add(Block::Heading(name));
        let percent = stack["used-percent"].as_f64();
        section.add(Block::Facts(facts([
            ("Directory", words(&stack["directory"])),
            ("File system", words(&stack["filesystem-type"])),
            ("Mounted from", words(&stack["source"])),
            ("Mount options", words(&stack["mount-options"])),
            ("Size", bytes(&stack["size-bytes"])),
            ("Full", percent.map(|percent| format!("{percent:.0} %"))),
            ("Extent size hint", hint(&place["extent-hint-bytes"])),
            ("Cache mode", words(&place["cache"])),
            ("Drivers asked for", words(&place["aio"])),
            ("Driver of Cowslip", words(&place["aio-of-cowslip"])),
        ])));
        section.blocks.extend(devices(stack).map(Block::Table));
        let report = &place["filesystem-told"];
        if let (Some(title), Some(text)) = (words(&report["command"]), words(&report["output"])) {
            section.add(Block::Output { title, text });
        }
    }
    section
}

fn hint(value: &Value) -> Option<String> {
    match value.as_u64()? {
        0 => Some("none".to_string()),
        hint => Some(size::human(hint)),
    }
}

/// The devices of a stack, from the file system down.
fn devices(stack: &Value) -> Option<Table> {
    let devices = stack["devices"]
        .as_array()
        .filter(|devices| !devices.is_empty())?;
    let row = |device: &Value| {
        let depth = device["depth"].as_u64().unwrap_or(0).min(8);
        let above = "· ".repeat(usize::try_from(depth).unwrap_or(0));
        let field = |name: &str| words(&device[name]).unwrap_or_default();
        let fields = vec![
            format!("{above}{}", field("name")),
            field("kind"),
            field("detail"),
            bytes(&device["size-bytes"]).unwrap_or_default(),
            field("rotational"),
            field("scheduler"),
            field("discards"),
            field("dax"),
            field("write-cache"),
        ];
        (String::new(), fields)
    };
    let titles = [
        "device",
        "kind",
        "what",
        "size",
        "turns",
        "scheduler",
        "discards",
        "DAX",
        "write cache",
    ];
    let titles = titles.map(|title| (title, Align::Words));
    let caption = "Devices, from the file system down";
    Some(Table::of(caption, &titles, devices.iter().map(row)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn document(table: &str, kernel: &str) -> Value {
        json!({
            "conditions": {
                "table": table,
                "date": "2026-11-23 02:00:00 UTC",
                "command": format!("cowslip bench {table}"),
                "machine": { "kernel": kernel, "memory-bytes": 1u64 << 30 },
                "versions": { "cowslip": "cowslip 0.1.0", "fio": null },
                "warnings": ["noisy"],
                "places": [{
                    "filesystem": "ext4",
                    "stack": {
                        "directory": "/d", "used-percent": 12.0,
                        "devices": [{ "name": "vda", "kind": "disk", "depth": 0, "rotational": true }],
                    },
                    "warnings": ["noisy", "full"],
                }],
            },
            "rows": [],
        })
    }

    fn texts(page: &Page) -> String {
        format!("{page:?}")
    }

    #[test]
    fn conditions_that_documents_share_are_printed_once() {
        let page = page(&[document("flush", "6.18"), document("steady", "6.18")]).unwrap();
        assert_eq!(page.sections.len(), 4);
        let text = texts(&page);
        for (word, count) in [
            ("\"noisy\"", 1),
            ("\"full\"", 1),
            ("\"6.18\"", 1),
            ("\"vda\"", 1),
        ] {
            assert_eq!(text.matches(word).count(), count, "{word}: {text}");
        }
        assert!(text.contains("not installed") && text.contains("1 GiB") && text.contains("12 %"));
        for table in ["flush", "steady"] {
            assert!(text.contains(&format!("\"cowslip bench {table}\"")));
        }
    }

    #[test]
    fn machines_that_differ_are_listed_apart() {
        let text = texts(&page(&[document("flush", "6.18"), document("steady", "6.1")]).unwrap());
        assert!(
            text.contains("\"Of flush\"") && text.contains("\"Of steady\""),
            "{text}"
        );
    }

    #[test]
    fn what_is_no_result_is_refused() {
        for document in [
            json!(null),
            json!({}),
            json!({ "conditions": { "table": "x" } }),
        ] {
            assert!(page(&[document]).is_err());
        }
    }
}
