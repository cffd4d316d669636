//! Help about a verb: what it does, and its arguments as words of the command line, with their
//! defaults. Names and types are the schema's; the texts are those of `arguments.txt`.

use std::ffi::OsString;
use std::fmt::Write;

use cowslip_qmp::Schema;
use cowslip_qmp::schema::{Command, Declared, Integer, Member, Object, Type};

use super::{BYTES, EVENTS, SHORT};

/// Depth to which objects within arguments are shown.
const DEPTH_MAX: usize = 3;
/// Column in which texts begin, and where they end.
const TEXT_AT: usize = 34;
const WIDTH: usize = 100;

/// Texts about arguments.
const TEXTS: &str = include_str!("arguments.txt");

/// The arguments that have a text: one of a command, or one of all; and the text.
fn texts() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = TEXTS.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(": "))
}

/// The help about the verb of a command line, if it asks for that: `ctl SOCKET VERB --help`.
pub fn asked_for(args: &[OsString]) -> Option<String> {
    let words = args.iter().skip(1).filter_map(|arg| arg.to_str());
    let (options, plain): (Vec<&str>, Vec<&str>) = words.partition(|word| word.starts_with('-'));
    if !options.iter().any(|it| ["--help", "-h"].contains(it)) {
        return None;
    }
    match plain.as_slice() {
        ["ctl", _, verb, ..] if of_verb(verb).is_some() => of_verb(verb),
        // The socket may be left out for this.
        ["ctl", verb, ..] => of_verb(verb),
        _ => None,
    }
}

fn of_verb(verb: &str) -> Option<String> {
    if verb == EVENTS {
        return Some(
            "Usage: cowslip ctl [OPTIONS] SOCKET events [NAME]...\n\nPrints events as they come, \
             a line each, until interrupted: those of these names, or all.\n"
                .to_string(),
        );
    }
    let short = SHORT.iter().find(|(name, ..)| *name == verb);
    let schema = Schema::of_daemon();
    let command = schema.command(short.map_or(verb, |(_, command, _)| command))?;
    let mut help = Help {
        schema,
        command,
        text: String::new(),
    };
    help.write(verb);
    Some(help.text)
}

struct Help {
    schema: &'static Schema,
    command: &'static Command,
    text: String,
}

impl Help {
    fn write(&mut self, verb: &str) {
        let object = self.object(&self.command.arguments);
        let words = match object.is_some_and(|it| !it.members.is_empty()) {
            true => " NAME=VALUE...",
            false => "",
        };
        let name = &self.command.name;
        let _infallible = writeln!(
            self.text,
            "Usage: cowslip ctl [OPTIONS] SOCKET {verb}{words}\n"
        );
        let about = self.command.text.clone();
        self.paragraph(&about, 0);
        if verb != name {
            self.paragraph(&format!("It is short for the command {name}."), 0);
        }
        if let Some(object) = object {
            self.object_with_head("Arguments", ("", object), 0);
        }
        if let Some(Type::List(_) | Type::Named(_)) = self.command.returns {
            self.text
                .push_str("\nThe result is shown as a table or as JSON; --json: always as JSON.\n");
        }
        if self.starts_a_job() {
            self.text
                .push_str("\n--wait waits for the end of the job, with its progress.\n");
        }
        self.text
            .push_str("\n'cowslip ctl --help' describes the other options.\n");
    }

    fn starts_a_job(&self) -> bool {
        let object = self.object(&self.command.arguments);
        object.is_some_and(|it| it.members.iter().any(|member| member.name == "job-id"))
    }

    fn object(&self, name: &str) -> Option<&'static Object> {
        match self.schema.declared(name) {
            Some(Declared::Object(object)) => Some(object),
            _ => None,
        }
    }

    /// Members of an object, those that are needed first, and those of its variants.
    fn object_with_head(&mut self, head: &str, (prefix, object): (&str, &Object), depth: usize) {
        if !object.members.is_empty() {
            let _infallible = writeln!(self.text, "\n{head}:");
        }
        for optional in [false, true] {
            let members = object.members.iter();
            for member in members.filter(|member| member.optional == optional) {
                self.member(prefix, member, depth);
            }
        }
        let Some(tag) = &object.tag else { return };
        for (case, kind) in &object.variants {
            if let Some(object) = self.object(kind) {
                let head = format!("With {prefix}{tag}={case}");
                self.object_with_head(&head, (prefix, object), depth);
            }
        }
    }

    fn member(&mut self, prefix: &str, member: &Member, depth: usize) {
        let name = format!("{prefix}{}", member.name);
        let mut text = self.text_of(member).unwrap_or_default().to_string();
        if !member.optional {
            text.push_str(if text.is_empty() {
                "Needed"
            } else {
                "; needed"
            });
        }
        if member.features.iter().any(|it| it == "deprecated") {
            text.push_str("; deprecated");
        }
        let within = match &member.kind {
            Type::Named(kind) => self.object(kind).map(|it| (format!("{name}."), it)),
            Type::List(element) => match &**element {
                Type::Named(kind) => self.object(kind).map(|it| (format!("{name}.0."), it)),
                _ => None,
            },
            _ => None,
        };
        let is_nested = within.is_some();
        let words = match is_nested {
            true => format!("{name}.…"),
            false => format!("{name}={}", self.value_of(member)),
        };
        self.line(&words, &text);
        if let Some((prefix, object)) = within
            && depth < DEPTH_MAX
            && object.variants.len() < 5
        {
            for member in &object.members {
                self.member(&prefix, member, depth + 1);
            }
            let Some(tag) = &object.tag else { return };
            for (case, kind) in &object.variants {
                for member in self.object(kind).into_iter().flat_map(|it| &it.members) {
                    self.member(
                        &format!("({prefix}{tag}={case}) {prefix}"),
                        member,
                        DEPTH_MAX,
                    );
                }
            }
        }
    }

    fn text_of(&self, member: &Member) -> Option<&'static str> {
        let of = |wanted: &str| texts().find_map(|(of, text)| (of == wanted).then_some(text));
        let is_job = self.command.name.starts_with("block-job-") && member.name == "device";
        of(&format!("{} {}", self.command.name, member.name))
            .or_else(|| is_job.then_some("The job's ID"))
            .or_else(|| of(&member.name))
    }

    /// The sort of values.
    fn value_of(&self, member: &Member) -> String {
        match &member.kind {
            Type::Integer(Integer::Size) => "SIZE".to_string(),
            Type::Integer(_) if BYTES.contains(&member.name.as_str()) => "SIZE".to_string(),
            kind => self.sort(kind),
        }
    }

    fn sort(&self, kind: &Type) -> String {
        match kind {
            Type::Str => "TEXT".to_string(),
            Type::Integer(Integer::Size) => "SIZE".to_string(),
            Type::Integer(_) | Type::Number => "NUMBER".to_string(),
            Type::Bool => "on|off".to_string(),
            Type::Null => "null".to_string(),
            Type::Any => "JSON".to_string(),
            Type::List(element) => format!("[{}]", self.sort(element)),
            Type::Named(name) => match self.schema.declared(name) {
                Some(Declared::Enum(values)) => {
                    let values: Vec<&str> = values.iter().map(|it| it.name.as_str()).collect();
                    values.join("|")
                }
                Some(Declared::Alternate(kinds)) => {
                    let sorts: Vec<String> = kinds.iter().map(|kind| self.sort(kind)).collect();
                    sorts.join("|")
                }
                Some(Declared::Object(_)) | None => "{…}".to_string(),
            },
        }
    }

    fn line(&mut self, words: &str, text: &str) {
        let _infallible = write!(self.text, "  {words}");
        let width = words.chars().count() + 2;
        if text.is_empty() {
            self.text.push('\n');
            return;
        }
        match width < TEXT_AT - 1 {
            true => self.text.push_str(&" ".repeat(TEXT_AT - width)),
            false => {
                self.text.push('\n');
                self.text.push_str(&" ".repeat(TEXT_AT));
            }
        }
        self.paragraph(text, TEXT_AT);
    }

    /// Adds a text whose lines, but for the first, begin in this column.
    fn paragraph(&mut self, text: &str, indent: usize) {
        let mut column = indent;
        for (at, word) in text.split(' ').enumerate() {
            let width = word.chars().count();
            if at > 0 && column + 1 + width > WIDTH {
                self.text.push('\n');
                self.text.push_str(&" ".repeat(indent));
                column = indent;
            } else if at > 0 {
                self.text.push(' ');
                column += 1;
            }
            self.text.push_str(word);
            column += width;
        }
        self.text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_of_every_command_has_a_text() {
        for command in Schema::of_daemon().commands() {
            let help = Help {
                schema: Schema::of_daemon(),
                command,
                text: String::new(),
            };
            // Options of images are those of the drivers.
            if ["blockdev-add", "blockdev-reopen"].contains(&command.name.as_str()) {
                continue;
            }
            for member in help
                .object(&command.arguments)
                .into_iter()
                .flat_map(|it| &it.members)
            {
                assert!(
                    help.text_of(member).is_some(),
                    "{} {} has no text",
                    command.name,
                    member.name
                );
            }
        }
    }

    #[test]
    fn texts_are_about_arguments_that_there_are() {
        let schema = Schema::of_daemon();
        let of_commands = texts().filter_map(|(of, _)| of.split_once(' '));
        for (command, name) in of_commands {
            let text = of_verb(command).unwrap();
            assert!(text.contains(name), "{command} has no {name}");
        }
        assert!(schema.command("jobs").is_none() && of_verb("jobs").is_some());
        assert_eq!(of_verb("frobnicate"), None);
    }

    #[test]
    fn the_help_is_asked_for_with_and_without_a_socket() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        let asked = |line: &str| asked_for(&words(line));
        let compact = asked("cowslip ctl S compact --help").unwrap();
        assert!(compact.contains("idle-ms=NUMBER"), "{compact}");
        assert!(compact.contains("default: 64M"), "{compact}");
        assert_eq!(asked("cowslip ctl --json compact -h"), Some(compact));
        assert_eq!(asked("cowslip ctl --help"), None);
        assert_eq!(asked("cowslip ctl S frobnicate --help"), None);
        assert_eq!(asked("cowslip compact --help"), None);
        let export = asked("cowslip ctl S block-export-add --help").unwrap();
        assert!(export.contains("With type=vhost-user-blk:"), "{export}");
        assert!(
            export.lines().all(|line| line.chars().count() <= WIDTH),
            "{export}"
        );
    }
}
