//! The conditions under which a table is made: the machine, the storage stack under each directory,
//! the versions of all programs involved, the command line, and warnings about the figures. They
//! are written once, in the report's JSON; pages are made from that.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use cowslip_console::time::date_and_time;
use cowslip_testbed::machine::{BUSY, Machine, Root};
use cowslip_testbed::output_of;
use cowslip_testbed::stack::Stack;
use serde_json::{Map, Value, json};

use crate::peer_path;
use crate::reporter::Outlet;

/// Programs that take part or make file systems, and how they are asked for their versions.
const PROGRAMS: [(&str, &str); 8] = [
    ("qemu-img", "--version"),
    ("qemu-storage-daemon", "--version"),
    ("qemu-nbd", "--version"),
    ("qemu-system-x86_64", "--version"),
    ("fio", "--version"),
    ("mkfs.ext4", "-V"),
    ("mkfs.xfs", "-V"),
    ("mkfs.btrfs", "--version"),
];

/// A word as a shell takes it.
pub fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A command line as a shell takes it.
pub fn command_line<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> String {
    let words: Vec<String> = words.into_iter().map(quoted).collect();
    words.join(" ")
}

/// A command that was run, as a shell takes it.
pub fn line_of(command: &std::process::Command) -> String {
    command_line(std::iter::once(command.get_program()).chain(command.get_args()))
}

/// Returns the arguments of a table, with the conditions under which it goes to this outlet. Places
/// are added to that.
pub fn of_table(asked: Value, outlet: &Outlet) -> Value {
    let mut conditions = asked;
    let mut run = of_run();
    if let Some(command) = &outlet.command {
        run["command"] = json!(command);
    }
    if !outlet.earlier.is_empty()
        && let Some(warnings) = run["warnings"].as_array_mut()
    {
        // That was this command itself.
        warnings.retain(|warning| warning != BUSY);
    }
    if let (Some(conditions), Value::Object(run)) = (conditions.as_object_mut(), run) {
        conditions.extend(run);
        conditions.insert("places".to_string(), json!([]));
    }
    conditions
}

/// A place of that table has these conditions.
pub fn add_place(conditions: &mut Value, place: Value) {
    if let Some(places) = conditions["places"].as_array_mut() {
        places.push(place);
    }
}

/// The machine, the versions, the time, this process's command line.
fn of_run() -> Value {
    let machine = Machine::look(&Root::default());
    let mut warnings = machine.warnings();
    if cfg!(debug_assertions) {
        let text =
            "Cowslip was built without optimisation: its figures say nothing. Use a release build.";
        warnings.push(text.to_string());
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let args: Vec<_> = std::env::args_os().collect();
    json!({
        "date": format!("{} UTC", date_and_time(now.map_or(0, |now| now.as_secs()))),
        "command": command_line(args.iter().map(AsRef::as_ref)),
        "machine": machine,
        "versions": versions(),
        "warnings": warnings,
    })
}

fn versions() -> Value {
    let mut versions = Map::new();
    let own = format!("cowslip {}", env!("CARGO_PKG_VERSION"));
    versions.insert("cowslip".to_string(), json!(own));
    for (program, word) in PROGRAMS {
        let path = match program.starts_with("qemu-") {
            true => peer_path::of(program),
            false => program.into(),
        };
        let output = output_of(&path.to_string_lossy(), &[word]);
        let line = output.as_deref().and_then(|text| text.lines().next());
        versions.insert(program.to_string(), json!(line.map(str::trim)));
    }
    Value::Object(versions)
}

/// Returns the stack of devices under a directory, with the report of its file system's tool.
pub fn of_directory(directory: &Path) -> Value {
    let stack = match Stack::look(&Root::default(), directory) {
        Ok(stack) => stack,
        Err(error) => return json!({ "warnings": [format!("{}: {error}", directory.display())] }),
    };
    let hint = File::open(directory);
    let hint = hint.and_then(|file| cowslip_queue::attributes::extent_hint_bytes(&file));
    json!({
        "stack": stack,
        "extent-hint-bytes": hint.ok(),
        "filesystem-told": output_of_filesystem(&stack),
        "warnings": stack.warnings(),
    })
}

/// Returns the report of a file system's tool on it.
fn output_of_filesystem(stack: &Stack) -> Value {
    let directory = stack.directory.to_string_lossy();
    let source = stack.source.as_deref().unwrap_or_default();
    let command: &[&str] = match stack.filesystem_type.as_deref() {
        Some("xfs") => &["xfs_info", &directory],
        Some("ext2" | "ext3" | "ext4") => &["dumpe2fs", "-h", source],
        Some("btrfs") => &["btrfs", "filesystem", "usage", &directory],
        _ => return Value::Null,
    };
    let output = output_of(command[0], &command[1..]);
    json!({
        "command": command_line(command.iter().map(AsRef::as_ref)),
        "output": output.unwrap_or_else(|| {
            format!("{} is not there, or shows this user nothing.", command[0])
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_can_be_pasted_into_a_shell() {
        let words = ["cowslip", "bench", "--dir=/a b", "it's", "", "$x"].map(OsStr::new);
        let line = command_line(words);
        assert_eq!(line, r"cowslip bench '--dir=/a b' 'it'\''s' '' '$x'");
        let back = output_of("sh", &["-c", &format!("printf '[%s]' {line}")]);
        assert_eq!(back.unwrap(), "[cowslip][bench][--dir=/a b][it's][][$x]");
    }

    #[test]
    fn a_run_describes_itself() {
        let run = of_run();
        assert!(run["command"].as_str().unwrap().contains("cowslip"));
        assert!(run["machine"]["processors"].as_u64() > Some(0));
        assert!(run["versions"]["cowslip"].is_string());
        let here = of_directory(&std::env::temp_dir());
        assert!(here["stack"]["filesystem-type"].is_string(), "{here}");
        let nowhere = of_directory(Path::new("/no/such/directory"));
        assert!(
            nowhere["warnings"][0]
                .as_str()
                .unwrap()
                .contains("No such file")
        );
    }
}
