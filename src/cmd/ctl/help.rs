//! Help about a verb: what it does, and its arguments as words of the command line, with their
//! defaults. Names and types are the schema's; the texts are here.

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

/// Texts about arguments of one command.
const OF_COMMAND: &[(&str, &str, &str)] = &[
    (
        "block-commit",
        "device",
        "The uppermost image of the chain, or the disk of an export",
    ),
    (
        "block-commit",
        "base-node",
        "The node that takes the data (by default the lowest one)",
    ),
    (
        "block-commit",
        "top-node",
        "The uppermost node whose data moves (by default the disk itself: the job is then ready \
         until it is completed)",
    ),
    (
        "block-stream",
        "base-node",
        "The node from which on the chain stays as it is (by default all that is below is copied)",
    ),
    (
        "block-dirty-bitmap-add",
        "granularity",
        "Bytes that a bit stands for, a power of two (default: the image's cluster, 4K to 64K)",
    ),
    (
        "block-job-cancel",
        "force",
        "End a mirror that is ready without a sound copy (default: off)",
    ),
    (
        "block-export-del",
        "mode",
        "'hard' disconnects clients (default: safe, which refuses while there are any)",
    ),
    (
        "blockdev-snapshot-sync",
        "mode",
        "Whether the overlay is made, or is there (default: absolute-paths, which makes it)",
    ),
    (
        "blockdev-mirror",
        "granularity",
        "Bytes of the parts that are noted as changed, a power of two",
    ),
    (
        "blockdev-mirror",
        "sync",
        "What is copied: all (full), what the image itself has (top), or only what is written \
         from now on (none)",
    ),
    (
        "blockdev-backup",
        "sync",
        "What is copied: all (full), what the image itself has (top), what a bitmap has \
         (incremental, bitmap), or only what is about to be overwritten (none)",
    ),
    ("block_resize", "size", "The size of the disk"),
    ("blockdev-create", "options", "The image or file"),
    (
        "nbd-server-add",
        "name",
        "The export's name (default: the node's)",
    ),
    (
        "block-export-add",
        "name",
        "The export's name (default: the node's)",
    ),
    ("object-add", "id", "The object's name"),
    ("object-del", "id", "The object's name"),
    ("block-export-add", "id", "A name for the export"),
    ("block-export-del", "id", "The export's name"),
    (
        "blockdev-snapshot-delete-internal-sync",
        "id",
        "The snapshot's ID",
    ),
    (
        "blockdev-snapshot-delete-internal-sync",
        "name",
        "The snapshot's name",
    ),
    (
        "blockdev-snapshot-internal-sync",
        "name",
        "The snapshot's name",
    ),
    (
        "x-cowslip-checkpoint-create",
        "name",
        "The checkpoint's name",
    ),
    ("x-cowslip-checkpoint-end", "name", "The checkpoint's name"),
    (
        "x-cowslip-checkpoint-delete",
        "name",
        "The checkpoint's name",
    ),
    (
        "x-cowslip-checkpoint-create",
        "target",
        "The node that the disk is written to",
    ),
    ("nbd-server-remove", "name", "The export's name"),
    (
        "nbd-server-remove",
        "mode",
        "'hard' disconnects clients (default: safe, which refuses while there are any)",
    ),
    (
        "change-backing-file",
        "device",
        "The uppermost node of the chain",
    ),
    (
        "block-dirty-bitmap-merge",
        "target",
        "The bitmap that is added to",
    ),
];

/// Texts about arguments of all commands, and about members of objects within them.
const OF_ALL: &[(&str, &str)] = &[
    (
        "actions",
        "What is to be done, as JSON: [{\"type\": …, \"data\": {…}}, …]",
    ),
    ("addr", "The address"),
    (
        "allocation-depth",
        "Show which image of the chain has each part (default: off)",
    ),
    ("allow-other", "Let other users use the file (default: off)"),
    (
        "auto-dismiss",
        "Take the job from the list when it has ended (default: on)",
    ),
    (
        "auto-finalize",
        "Let the job take its effect without job-finalize (default: on)",
    ),
    (
        "background",
        "Move only while clients leave the disk alone, and slowly: 20M a second if no speed is \
         given (default: off)",
    ),
    (
        "backing-file",
        "The name of the backing file that the image gets",
    ),
    (
        "backing-mask-protocol",
        "Name a backing file's format, not its protocol (default: off)",
    ),
    ("base", "The file of base-node"),
    ("base-node", "The node below which nothing changes"),
    ("bitmap", "The bitmap that says what has changed"),
    (
        "bitmap-mode",
        "When the bitmap forgets what was copied; needed with sync=bitmap",
    ),
    ("bitmaps", "Bitmaps by their names"),
    (
        "bottom",
        "The lowest node that is copied, in the place of base-node",
    ),
    (
        "budget",
        "Most bytes of host space that the work takes besides, for a time (default: 64M)",
    ),
    ("buf-size", "Accepted; copies choose for themselves"),
    (
        "copy-mode",
        "How writes reach the copy: later (background), or at once (default: background)",
    ),
    (
        "dedupe-backing",
        "Give back clusters that show what the backing file shows (default: off)",
    ),
    ("description", "A text for clients that list exports"),
    ("device", "The node that the command is about"),
    ("disabled", "Begin without noting anything (default: off)"),
    ("disks", "The disks"),
    ("driver", "The format or protocol"),
    ("enable", "Capabilities"),
    (
        "export-name",
        "Offer the disk to clients of NBD by this name, until the checkpoint is ended",
    ),
    ("fd", "The descriptor"),
    ("fdname", "The descriptor's name"),
    ("fdset-id", "The set of descriptors"),
    (
        "filter-node-name",
        "A name that is accepted; there is no such node",
    ),
    ("fixed-iothread", "Refuse rather than use another thread"),
    ("flat", "Leave out the images below (default: off)"),
    ("format", "The overlay's format (default: qcow2)"),
    ("granularity", "Bytes that a bit stands for, a power of two"),
    (
        "handshake-max-seconds",
        "Time for a client's first messages (default: 10)",
    ),
    ("host", "The host's name or address"),
    ("id", "The job's ID"),
    (
        "idle-ms",
        "Milliseconds for which clients have to leave the disk alone in the background (default: \
         500)",
    ),
    ("image-node-name", "The image whose header changes"),
    (
        "iothread",
        "The thread that serves it, an object of type iothread",
    ),
    ("job-id", "A name for the job (default: that of the device)"),
    ("logical-block-size", "Bytes of a block (default: 512)"),
    (
        "max-connections",
        "Most clients at a time; 0 is no limit (default: 100)",
    ),
    ("mountpoint", "The file that shows the disk"),
    ("name", "The bitmap's name"),
    ("node", "The node"),
    ("node-name", "The node"),
    ("nodes", "The nodes (by default all that have it)"),
    ("num-queues", "Most queues of the device (default: 8)"),
    (
        "on-error",
        "What becomes of the job after an error of a disk (default: report, which ends it)",
    ),
    (
        "on-source-error",
        "What becomes of the job after a failed read (default: report, which ends it)",
    ),
    (
        "on-target-error",
        "What becomes of the job after a failed write (default: report, which ends it)",
    ),
    ("opaque", "A text that query-fdsets shows"),
    (
        "options",
        "The nodes with all of their options, as they shall be",
    ),
    ("overlay", "The node that takes writes from now on"),
    (
        "parent",
        "The checkpoint since which changes are shown or copied (by default everything is)",
    ),
    ("path", "The socket's file"),
    (
        "persistent",
        "Keep the bitmap in the image when the daemon ends (default: off)",
    ),
    ("port", "The port"),
    ("properties", "Properties of the transaction"),
    ("qom-type", "The kind of object"),
    ("query-nodes", "Figures of all nodes (here: on)"),
    ("read-only", "Refuse writes (default: off)"),
    (
        "scratch",
        "The directory for what has to be kept while the views are there (default: that of each \
         image)",
    ),
    ("size", "The size"),
    ("snapshot-file", "The file of the overlay"),
    ("snapshot-node-name", "The name of the overlay's node"),
    ("speed", "Most bytes a second; 0 is no limit (default: 0)"),
    ("sync", "What is copied"),
    ("target", "The node that is written to"),
    (
        "target-size",
        "Refuse unless the file can get as short as that, and end when it is (by default it gets \
         as short as it can)",
    ),
    (
        "tls-authz",
        "The object that says which clients may connect",
    ),
    (
        "tls-creds",
        "The credentials, for TLS (by default connections are plain)",
    ),
    ("top", "The file of top-node"),
    ("top-node", "The uppermost node whose data moves"),
    ("type", "The kind"),
    ("writable", "Let clients write (default: off)"),
    (
        "zeroes",
        "Give back clusters that hold zeroes (default: off)",
    ),
];

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
        let own = OF_COMMAND
            .iter()
            .find(|(command, name, _)| *command == self.command.name && *name == member.name);
        let all = || OF_ALL.iter().find(|(name, _)| *name == member.name);
        let is_job = self.command.name.starts_with("block-job-") && member.name == "device";
        own.map(|(.., text)| *text)
            .or_else(|| is_job.then_some("The job's ID"))
            .or_else(|| all().map(|(_, text)| *text))
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
        for (command, name, _) in OF_COMMAND {
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
