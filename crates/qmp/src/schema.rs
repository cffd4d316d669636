//! The commands, events and types of the protocol, declared once.
//!
//! The declarations are the files of `crates/qmp/schema/`; names and types are the protocol's. They
//! check the arguments of commands ([`Schema::check_command`]), and what is sent; they
//! make values of the words of a command line ([`Schema::object_of_text`]); they answer
//! `query-qmp-schema` ([`Schema::introspect`]); they are the list of commands for people.
//!
//! Clients find by the schema which features a server has: it declares what this one does, and
//! nothing else.

use std::collections::HashMap;
use std::sync::OnceLock;

mod check;
mod introspect;
mod read;
mod words;

pub use read::DeclarationError;

/// A type of values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// Text.
    Str,
    /// A number without a fraction.
    Integer(Integer),
    /// A number.
    Number,
    /// `true` or `false`.
    Bool,
    /// `null`.
    Null,
    /// Any value.
    Any,
    /// A list of values of one type.
    List(Box<Type>),
    /// A type that is declared, by its name.
    Named(String),
}

/// A range of whole numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integer {
    /// 64 bits with a sign.
    Int,
    /// 8 to 32 bits with a sign.
    Signed(u32),
    /// 8 to 32 bits without a sign.
    Unsigned(u32),
    /// 64 bits without a sign. As in QEMU, a negative number stands for itself plus 2^64.
    Uint64,
    /// The same, a number of bytes: words of a command line may have a suffix.
    Size,
}

/// A member of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: Type,
    /// Whether it may be left out.
    pub optional: bool,
    /// Marks for clients, such as `deprecated`.
    pub features: Vec<String>,
}

/// A value of an enumeration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnumValue {
    /// The value.
    pub name: String,
    /// Marks for clients.
    pub features: Vec<String>,
}

/// An object, or one of several that a member of it tells apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Object {
    /// Its members, with those that it has from another type.
    pub members: Vec<Member>,
    /// The member that says which further members there are.
    pub tag: Option<String>,
    /// The type that has the further members, for values of the tag that have such.
    pub variants: Vec<(String, String)>,
    /// Marks for clients.
    pub features: Vec<String>,
}

/// A type that is declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Declared {
    /// One of a number of texts.
    Enum(Vec<EnumValue>),
    /// An object.
    Object(Object),
    /// One of several types, which the kind of the JSON value tells apart.
    Alternate(Vec<Type>),
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Its name.
    pub name: String,
    /// Sentences for people.
    pub text: String,
    /// The name of the type of its arguments. It may be one that is not declared by a name.
    pub arguments: String,
    /// The type of its result; an empty object where there is none.
    pub returns: Option<Type>,
    /// Marks for clients.
    pub features: Vec<String>,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventKind {
    /// Its name.
    pub name: String,
    /// Sentences for people.
    pub text: String,
    /// The name of the type of its data.
    pub data: String,
    /// At most one a second is sent of those that agree in these members; `None` is no limit.
    pub rate_limited_by: Option<Vec<String>>,
}

/// A command or an event, in the order of declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A command.
    Command(Command),
    /// An event.
    Event(EventKind),
}

/// Declarations of one protocol.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    entries: Vec<Entry>,
    commands: HashMap<String, usize>,
    events: HashMap<String, usize>,
    types: HashMap<String, Declared>,
}

/// The files, in the order in which clients see what they declare.
const FILES: &[(&str, &str)] = &[
    ("control.schema", include_str!("../schema/control.schema")),
    ("jobs.schema", include_str!("../schema/jobs.schema")),
    ("nodes.schema", include_str!("../schema/nodes.schema")),
    ("bitmaps.schema", include_str!("../schema/bitmaps.schema")),
    ("block.schema", include_str!("../schema/block.schema")),
    (
        "checkpoints.schema",
        include_str!("../schema/checkpoints.schema"),
    ),
    (
        "compaction.schema",
        include_str!("../schema/compaction.schema"),
    ),
    ("queries.schema", include_str!("../schema/queries.schema")),
    ("exports.schema", include_str!("../schema/exports.schema")),
    ("objects.schema", include_str!("../schema/objects.schema")),
    (
        "descriptors.schema",
        include_str!("../schema/descriptors.schema"),
    ),
];

/// Events that the protocol has besides, for other servers.
const FURTHER: &[(&str, &str)] = &[("errors.schema", include_str!("../schema/errors.schema"))];

impl Schema {
    /// The schema of the daemon, with events about errors.
    ///
    /// # Panics
    /// As [`Schema::of_daemon`].
    pub fn with_further() -> &'static Schema {
        static SCHEMA: OnceLock<Schema> = OnceLock::new();
        SCHEMA.get_or_init(|| {
            let files: Vec<_> = FILES.iter().chain(FURTHER).copied().collect();
            match Schema::read(&files) {
                Ok(schema) => schema,
                Err(error) => panic!("the schema is part of the program: {error}"),
            }
        })
    }

    /// The schema of the daemon.
    ///
    /// # Panics
    /// Never: a test reads the declarations, which are part of the program.
    pub fn of_daemon() -> &'static Schema {
        static SCHEMA: OnceLock<Schema> = OnceLock::new();
        SCHEMA.get_or_init(|| match Schema::read(FILES) {
            Ok(schema) => schema,
            Err(error) => panic!("the schema is part of the program: {error}"),
        })
    }

    /// All commands and events, in the order of declaration.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// All commands, in the order of declaration.
    pub fn commands(&self) -> impl Iterator<Item = &Command> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Command(command) => Some(command),
            Entry::Event(_) => None,
        })
    }

    /// The command of this name.
    pub fn command(&self, name: &str) -> Option<&Command> {
        match &self.entries[*self.commands.get(name)?] {
            Entry::Command(command) => Some(command),
            Entry::Event(_) => None,
        }
    }

    /// The event of this name.
    pub fn event(&self, name: &str) -> Option<&EventKind> {
        match &self.entries[*self.events.get(name)?] {
            Entry::Event(event) => Some(event),
            Entry::Command(_) => None,
        }
    }

    /// The type of this name.
    pub fn declared(&self, name: &str) -> Option<&Declared> {
        self.types.get(name)
    }

    /// The object of this name, which the declarations have: they were checked when they were read.
    fn object(&self, name: &str) -> &Object {
        match self.types.get(name) {
            Some(Declared::Object(object)) => object,
            _ => panic!("'{name}' is an object of the schema"),
        }
    }

    /// A type of this name.
    fn named(&self, name: &str) -> &Declared {
        let declared = self.types.get(name);
        declared.unwrap_or_else(|| panic!("'{name}' is a type of the schema"))
    }
}

#[cfg(test)]
mod tests;
