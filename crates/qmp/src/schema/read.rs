//! Reads declarations.
//!
//! ```text
//! # A comment.
//! enum Colour: red green blue [deprecated]       (values may go on in lines that are indented)
//! struct Paint [feature]
//!     colour: Colour
//!     layers?: uint8 [unstable]
//! struct Varnish : Paint                         (has the members of Paint, and its own)
//!     gloss: [number]
//! union Coat by kind                             (or `: Base by kind`)
//!     kind: CoatKind
//!     = paint: Paint
//! alternate CoatOrName: Coat str
//! command coat-add (Coat) -> CoatId              (arguments of a type, and a result)
//!     | A sentence for people.
//! command coat-del                               (arguments of its own)
//!     id: str
//! event COAT_DRY limited by id
//!     | A sentence for people.
//!     id: str
//! ```
//!
//! Types: `str`, `int`, `int8` to `int64`, `uint8` to `uint64`, `size`, `number`, `bool`, `null`,
//! `any`, `[TYPE]`, and names that are declared, in any file.

use std::fmt;

use super::{
    Command, Declared, Entry, EnumValue, EventKind, Integer, Member, Object, Schema, Type,
};

/// An error in declarations, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclarationError {
    file: String,
    line: usize,
    text: String,
}

impl fmt::Display for DeclarationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}: {}", self.file, self.line, self.text)
    }
}

impl std::error::Error for DeclarationError {}

type Result<T> = std::result::Result<T, String>;

/// A declaration as it stands in its file: a head, and lines that are indented.
struct Block<'a> {
    file: &'a str,
    /// Number of the head's line, and the head.
    line: usize,
    head: &'a str,
    body: Vec<(usize, &'a str)>,
}

/// The members of an object that gets those of its base, once all are known.
struct Derived<'a> {
    file: &'a str,
    line: usize,
    name: String,
    base: &'a str,
}

impl Schema {
    /// Reads the declarations of files, each with its name.
    ///
    /// # Errors
    /// A line that declares nothing; a name that is declared twice or not at all.
    pub fn read(files: &[(&str, &str)]) -> std::result::Result<Schema, DeclarationError> {
        let mut schema = Schema::default();
        let mut derived = Vec::new();
        let mut blocks = Vec::new();
        for (file, text) in files {
            blocks.extend(blocks_of(file, text)?);
        }
        for block in &blocks {
            let read = schema.declare(block, &mut derived);
            read.map_err(|(line, text)| DeclarationError {
                file: block.file.to_string(),
                line,
                text,
            })?;
        }
        schema.derive(derived)?;
        for block in &blocks {
            let found = schema.check_names(block.head);
            found.map_err(|text| DeclarationError {
                file: block.file.to_string(),
                line: block.line,
                text,
            })?;
        }
        Ok(schema)
    }

    fn declare<'a>(
        &mut self,
        block: &Block<'a>,
        derived: &mut Vec<Derived<'a>>,
    ) -> std::result::Result<(), (usize, String)> {
        let at_head = |text: String| (block.line, text);
        let (keyword, head) = block.head.split_once(' ').unwrap_or((block.head, ""));
        match keyword {
            "enum" | "alternate" => {
                let (name, list) = head
                    .split_once(':')
                    .ok_or_else(|| at_head("a colon is missing".into()))?;
                let mut words = list.to_string();
                for (_, line) in &block.body {
                    words.push(' ');
                    words.push_str(line);
                }
                let declared = match keyword {
                    "enum" => enumeration(&words),
                    _ => words
                        .split_whitespace()
                        .map(kind_of)
                        .collect::<Result<_>>()
                        .map(Declared::Alternate),
                };
                self.add_type(name, declared.map_err(at_head)?)
                    .map_err(at_head)
            }
            "struct" | "union" => {
                let head = ObjectHead::of(head).map_err(at_head)?;
                let (mut object, _) = object_of(&block.body)?;
                object.features = head.features;
                object.tag = head.tag.map(str::to_string);
                if let Some(base) = head.base {
                    derived.push(Derived {
                        file: block.file,
                        line: block.line,
                        name: head.name.to_string(),
                        base,
                    });
                }
                self.add_type(head.name, Declared::Object(object))
                    .map_err(at_head)
            }
            "command" => self.command_of(head, block),
            "event" => self.event_of(head, block),
            _ => Err(at_head(format!("'{keyword}' declares nothing"))),
        }
    }

    fn command_of(
        &mut self,
        head: &str,
        block: &Block<'_>,
    ) -> std::result::Result<(), (usize, String)> {
        let at_head = |text: String| (block.line, text);
        let (head, features) = marks(head).map_err(at_head)?;
        let (head, returns) = match head.split_once("->") {
            Some((head, kind)) => (head.trim(), Some(kind_of(kind.trim()).map_err(at_head)?)),
            None => (head, None),
        };
        let (name, boxed) = match head.split_once('(') {
            Some((name, kind)) => (name.trim(), Some(kind.trim_end_matches(')').trim())),
            None => (head, None),
        };
        let (object, text) = object_of(&block.body)?;
        let arguments = match boxed {
            Some(kind) if object == Object::default() => kind.to_string(),
            Some(_) => return Err(at_head("it has arguments of a type and of its own".into())),
            None => self.add_anonymous(name, object).map_err(at_head)?,
        };
        let at = self.entries.len();
        if self.commands.insert(name.to_string(), at).is_some() {
            return Err(at_head(format!("'{name}' is declared twice")));
        }
        self.entries.push(Entry::Command(Command {
            name: name.to_string(),
            text,
            arguments,
            returns,
            features,
        }));
        Ok(())
    }

    fn event_of(
        &mut self,
        head: &str,
        block: &Block<'_>,
    ) -> std::result::Result<(), (usize, String)> {
        let at_head = |text: String| (block.line, text);
        let (name, rate_limited_by) = match head.split_once(" limited by ") {
            Some((name, members)) => {
                let members = members.split_whitespace().map(str::to_string);
                (name.trim(), Some(members.collect()))
            }
            None => (head.trim(), None),
        };
        let (object, text) = object_of(&block.body)?;
        let data = self.add_anonymous(name, object).map_err(at_head)?;
        let at = self.entries.len();
        if self.events.insert(name.to_string(), at).is_some() {
            return Err(at_head(format!("'{name}' is declared twice")));
        }
        self.entries.push(Entry::Event(EventKind {
            name: name.to_string(),
            text,
            data,
            rate_limited_by,
        }));
        Ok(())
    }

    /// Adds the arguments of a command or the data of an event. Types have no such names.
    fn add_anonymous(&mut self, of: &str, object: Object) -> Result<String> {
        if object == Object::default() {
            self.types
                .insert(EMPTY.to_string(), Declared::Object(object));
            return Ok(EMPTY.to_string());
        }
        let name = format!(" of {of}");
        self.add_type(&name, Declared::Object(object))?;
        Ok(name)
    }

    fn add_type(&mut self, name: &str, declared: Declared) -> Result<()> {
        match self.types.insert(name.to_string(), declared) {
            None => Ok(()),
            Some(_) => Err(format!("'{name}' is declared twice")),
        }
    }

    /// Gives objects the members of their bases. A base that has one itself comes first.
    fn derive(
        &mut self,
        mut derived: Vec<Derived<'_>>,
    ) -> std::result::Result<(), DeclarationError> {
        while !derived.is_empty() {
            let names: Vec<String> = derived.iter().map(|one| one.name.clone()).collect();
            let (ready, later): (Vec<_>, Vec<_>) = derived
                .into_iter()
                .partition(|one| !names.iter().any(|name| name == one.base));
            let stuck = ready.is_empty();
            for one in ready.iter().chain(later.iter().filter(|_| stuck)) {
                let base = match self.types.get(one.base) {
                    Some(Declared::Object(base)) if !stuck => base.members.clone(),
                    _ => {
                        return Err(DeclarationError {
                            file: one.file.to_string(),
                            line: one.line,
                            text: format!("'{}' is no object to have members of", one.base),
                        });
                    }
                };
                if let Some(Declared::Object(object)) = self.types.get_mut(&one.name) {
                    object.members.splice(0..0, base);
                }
            }
            derived = later;
        }
        Ok(())
    }

    /// Checks that all types that a declaration names exist, and are of the right sort.
    fn check_names(&self, head: &str) -> Result<()> {
        let name = head.split([' ', ':', '[']).nth(1).unwrap_or("");
        let (keyword, _) = head.split_once(' ').unwrap_or((head, ""));
        match keyword {
            "command" => {
                let command = self.command(name).ok_or("it has no name")?;
                self.check_object_declared(&command.arguments)?;
                command
                    .returns
                    .iter()
                    .try_for_each(|kind| self.check_names_in(kind))
            }
            "event" => {
                let event = self.event(name).ok_or("it has no name")?;
                self.check_object_declared(&event.data)
            }
            "struct" | "union" => self.check_object_declared(name),
            _ => match self.types.get(name) {
                Some(Declared::Alternate(kinds)) => {
                    kinds.iter().try_for_each(|kind| self.check_names_in(kind))
                }
                _ => Ok(()),
            },
        }
    }

    fn check_object_declared(&self, name: &str) -> Result<()> {
        let Some(Declared::Object(object)) = self.types.get(name) else {
            return Err(format!("there is no object '{name}'"));
        };
        for (at, member) in object.members.iter().enumerate() {
            self.check_names_in(&member.kind)?;
            if object.members[..at]
                .iter()
                .any(|other| other.name == member.name)
            {
                return Err(format!("'{}' is there twice", member.name));
            }
        }
        let Some(tag) = &object.tag else {
            return match object.variants.is_empty() {
                true => Ok(()),
                false => Err("variants need a tag".into()),
            };
        };
        let values = match object.members.iter().find(|member| member.name == *tag) {
            Some(Member {
                kind: Type::Named(kind),
                optional: false,
                ..
            }) => match self.types.get(kind) {
                Some(Declared::Enum(values)) => values,
                _ => return Err(format!("'{kind}' is no enumeration to tell variants apart")),
            },
            _ => return Err(format!("'{tag}' is no member to tell variants apart")),
        };
        for (case, kind) in &object.variants {
            if !values.iter().any(|value| value.name == *case) {
                return Err(format!("'{case}' is no value of '{tag}'"));
            }
            self.check_object_declared(kind)?;
        }
        Ok(())
    }

    fn check_names_in(&self, kind: &Type) -> Result<()> {
        match kind {
            Type::List(element) => self.check_names_in(element),
            Type::Named(name) if !self.types.contains_key(name) => {
                Err(format!("there is no type '{name}'"))
            }
            _ => Ok(()),
        }
    }
}

/// The type of no arguments.
pub(super) const EMPTY: &str = " empty";

fn blocks_of<'a>(
    file: &'a str,
    text: &'a str,
) -> std::result::Result<Vec<Block<'a>>, DeclarationError> {
    let mut blocks: Vec<Block<'a>> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        if !line.starts_with(' ') {
            blocks.push(Block {
                file,
                line: number,
                head: trimmed,
                body: Vec::new(),
            });
            continue;
        }
        let block = blocks.last_mut().ok_or_else(|| DeclarationError {
            file: file.to_string(),
            line: number,
            text: "it belongs to no declaration".to_string(),
        })?;
        block.body.push((number, trimmed));
    }
    Ok(blocks)
}

struct ObjectHead<'a> {
    name: &'a str,
    base: Option<&'a str>,
    tag: Option<&'a str>,
    features: Vec<String>,
}

impl<'a> ObjectHead<'a> {
    fn of(head: &'a str) -> Result<ObjectHead<'a>> {
        let (head, features) = marks(head)?;
        let (head, tag) = match head.split_once(" by ") {
            Some((head, tag)) => (head, Some(tag.trim())),
            None => (head, None),
        };
        let (name, base) = match head.split_once(':') {
            Some((name, base)) => (name.trim(), Some(base.trim())),
            None => (head.trim(), None),
        };
        Ok(ObjectHead {
            name,
            base,
            tag,
            features,
        })
    }
}

/// Splits marks in brackets from the end of a line.
fn marks(line: &str) -> Result<(&str, Vec<String>)> {
    let line = line.trim();
    let Some(inner) = line.strip_suffix(']') else {
        return Ok((line, Vec::new()));
    };
    // A list is a type: `[str]` follows a colon or an arrow.
    let (before, marks) = inner.rsplit_once('[').ok_or("a bracket is missing")?;
    match before.trim_end().ends_with([':', '>']) {
        true => Ok((line, Vec::new())),
        false => {
            let marks = marks.split_whitespace().map(str::to_string);
            Ok((before.trim_end(), marks.collect()))
        }
    }
}

fn enumeration(words: &str) -> Result<Declared> {
    let mut values: Vec<EnumValue> = Vec::new();
    for word in words.split_whitespace() {
        if let Some(mark) = word.strip_prefix('[') {
            let mark = mark.strip_suffix(']').ok_or("a bracket is missing")?;
            let value = values.last_mut().ok_or("a mark is of a value")?;
            value.features.push(mark.to_string());
        } else if values.iter().any(|value| value.name == word) {
            return Err(format!("'{word}' is there twice"));
        } else {
            values.push(EnumValue {
                name: word.to_string(),
                features: Vec::new(),
            });
        }
    }
    Ok(Declared::Enum(values))
}

/// Members and variants, and the text for people.
fn object_of(body: &[(usize, &str)]) -> std::result::Result<(Object, String), (usize, String)> {
    let mut object = Object::default();
    let mut text = String::new();
    for (number, line) in body {
        let at_line = |text: String| (*number, text);
        if let Some(sentence) = line.strip_prefix('|') {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(sentence.trim());
            continue;
        }
        let (line, features) = marks(line).map_err(at_line)?;
        let (name, kind) = line
            .split_once(':')
            .ok_or_else(|| at_line("a colon is missing".into()))?;
        let kind = kind.trim();
        if let Some(case) = name.strip_prefix('=') {
            let variant = (case.trim().to_string(), kind.to_string());
            object.variants.push(variant);
            continue;
        }
        let (name, optional) = match name.strip_suffix('?') {
            Some(name) => (name, true),
            None => (name, false),
        };
        object.members.push(Member {
            name: name.to_string(),
            kind: kind_of(kind).map_err(at_line)?,
            optional,
            features,
        });
    }
    Ok((object, text))
}

fn kind_of(word: &str) -> Result<Type> {
    if let Some(element) = word.strip_prefix('[') {
        let element = element.strip_suffix(']').ok_or("a bracket is missing")?;
        return Ok(Type::List(Box::new(kind_of(element)?)));
    }
    Ok(match word {
        "str" => Type::Str,
        "int" | "int64" => Type::Integer(Integer::Int),
        "int8" => Type::Integer(Integer::Signed(8)),
        "int16" => Type::Integer(Integer::Signed(16)),
        "int32" => Type::Integer(Integer::Signed(32)),
        "uint8" => Type::Integer(Integer::Unsigned(8)),
        "uint16" => Type::Integer(Integer::Unsigned(16)),
        "uint32" => Type::Integer(Integer::Unsigned(32)),
        "uint64" => Type::Integer(Integer::Uint64),
        "size" => Type::Integer(Integer::Size),
        "number" => Type::Number,
        "bool" => Type::Bool,
        "null" => Type::Null,
        "any" => Type::Any,
        "" => return Err("a type is missing".into()),
        name => Type::Named(name.to_string()),
    })
}
