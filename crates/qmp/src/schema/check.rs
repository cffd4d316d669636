//! Values against their types, in QEMU's words and order: members as they are declared, what is
//! unexpected last.

use std::fmt;

use cowslip_block::size;
use serde_json::{Map, Number, Value};

use super::words::whole;
use super::{Command, Declared, EnumValue, EventKind, Integer, Object, Schema, Type};
use crate::error::QmpError;

/// A step from a value to one within it.
#[derive(Clone, Copy)]
enum Step<'a> {
    Member(&'a str),
    Element(usize),
}

/// The form in which values come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Json,
    /// From a command line: numbers, switches and `null` are texts.
    Words,
    /// The same, words that each set one argument: numbers are bare, so that a sign is not taken
    /// for an addition.
    Arguments,
}

impl Form {
    fn is_of_texts(self) -> bool {
        match self {
            Form::Json => false,
            Form::Words | Form::Arguments => true,
        }
    }
}

/// The way from the arguments to a value.
struct Path<'a> {
    steps: Vec<Step<'a>>,
    form: Form,
}

impl Path<'_> {
    fn new(form: Form) -> Self {
        Path {
            steps: Vec::new(),
            form,
        }
    }

    /// The last name, by which QEMU alone calls values of enumerations and of alternates, and
    /// numbers that are out of range. Elements of lists have none.
    fn last(&self) -> &str {
        match self.steps.last() {
            Some(Step::Member(name)) => name,
            _ => "null",
        }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steps.is_empty() {
            return f.write_str("null");
        }
        for (at, step) in self.steps.iter().enumerate() {
            match step {
                Step::Member(name) if at == 0 => f.write_str(name)?,
                Step::Member(name) => write!(f, ".{name}")?,
                Step::Element(index) if self.form.is_of_texts() => write!(f, ".{index}")?,
                Step::Element(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

type Result = std::result::Result<(), QmpError>;

fn wrong_type(name: impl fmt::Display, expected: &str) -> QmpError {
    QmpError::generic(format!(
        "Invalid parameter type for '{name}', expected: {expected}"
    ))
}

fn expects(name: impl fmt::Display, expected: impl fmt::Display) -> QmpError {
    QmpError::generic(format!("Parameter '{name}' expects {expected}"))
}

impl Schema {
    /// Checks the arguments of a command. A negative number for a type that has none is replaced by
    /// the one that it stands for.
    ///
    /// # Errors
    /// The first member that is missing, unexpected or of another type.
    pub fn check_command(&self, command: &Command, arguments: &mut Map<String, Value>) -> Result {
        self.check_object(&command.arguments, arguments, &mut Path::new(Form::Json))
    }

    /// Checks the data of an event.
    ///
    /// # Errors
    /// As for the arguments of a command.
    pub fn check_event(&self, event: &EventKind, data: &mut Map<String, Value>) -> Result {
        self.check_object(&event.data, data, &mut Path::new(Form::Json))
    }

    /// Checks the result of a command.
    ///
    /// # Errors
    /// As for its arguments.
    pub fn check_result(&self, command: &Command, result: &mut Value) -> Result {
        let mut path = Path::new(Form::Json);
        match (&command.returns, result) {
            (Some(kind), result) => self.check(kind, result, &mut path),
            (None, Value::Object(members)) if members.is_empty() => Ok(()),
            (None, _) => Err(wrong_type(&path, "empty object")),
        }
    }

    pub(super) fn check_json(&self, kind: &str, members: &mut Map<String, Value>) -> Result {
        self.check_object(kind, members, &mut Path::new(Form::Json))
    }

    /// Checks an object whose values are texts, and makes numbers and switches of those that are to
    /// be such.
    pub(super) fn check_words(&self, kind: &str, members: &mut Map<String, Value>) -> Result {
        self.check_object(kind, members, &mut Path::new(Form::Words))
    }

    /// As [`Schema::check_words`], for words that each set one argument.
    pub(super) fn check_arguments(&self, kind: &str, members: &mut Map<String, Value>) -> Result {
        self.check_object(kind, members, &mut Path::new(Form::Arguments))
    }

    fn check<'a>(&'a self, kind: &'a Type, value: &mut Value, path: &mut Path<'a>) -> Result {
        if path.form.is_of_texts() {
            read_word(kind, value, path)?;
        }
        let (fits, expected) = match kind {
            Type::Any => return Ok(()),
            Type::Integer(range) => return check_integer(*range, value, path),
            Type::Named(name) => return self.check_named(name, value, path),
            Type::List(element) => match value {
                Value::Array(elements) => {
                    for (at, value) in elements.iter_mut().enumerate() {
                        path.steps.push(Step::Element(at));
                        self.check(element, value, path)?;
                        path.steps.pop();
                    }
                    return Ok(());
                }
                _ => (false, "array"),
            },
            Type::Str => (value.is_string(), "string"),
            Type::Number => (value.is_number(), "number"),
            Type::Bool => (value.is_boolean(), "boolean"),
            Type::Null => (value.is_null(), "null"),
        };
        match fits {
            true => Ok(()),
            false => Err(wrong_type(path, expected)),
        }
    }

    fn check_named<'a>(&'a self, name: &'a str, value: &mut Value, path: &mut Path<'a>) -> Result {
        match self.named(name) {
            Declared::Enum(values) => check_enum(values, value, path),
            Declared::Object(_) => match value {
                Value::Object(members) => self.check_object(name, members, path),
                _ => Err(wrong_type(path, "object")),
            },
            Declared::Alternate(kinds) => {
                match kinds.iter().find(|kind| self.may_be(kind, value)) {
                    Some(kind) => self.check(kind, value, path),
                    None => Err(wrong_type(path.last(), name)),
                }
            }
        }
    }

    /// Whether the kind of a JSON value is that of a type.
    fn may_be(&self, kind: &Type, value: &Value) -> bool {
        match kind {
            Type::Str => value.is_string(),
            Type::Integer(_) => value.is_i64() || value.is_u64(),
            Type::Number => value.is_number(),
            Type::Bool => value.is_boolean(),
            Type::Null => value.is_null(),
            Type::Any => true,
            Type::List(_) => value.is_array(),
            Type::Named(name) => match self.named(name) {
                Declared::Enum(_) => value.is_string(),
                Declared::Object(_) => value.is_object(),
                Declared::Alternate(kinds) => kinds.iter().any(|kind| self.may_be(kind, value)),
            },
        }
    }

    fn check_object<'a>(
        &'a self,
        name: &'a str,
        members: &mut Map<String, Value>,
        path: &mut Path<'a>,
    ) -> Result {
        let mut known = Vec::new();
        // An object, and what a member of it adds, which may have such a member in turn.
        let mut next = Some(self.object(name));
        while let Some(object) = next {
            self.check_members(object, members, path)?;
            known.push(object);
            next = self.variant(object, members);
        }
        let is_known = |name: &str| {
            let mut all = known.iter().flat_map(|object| &object.members);
            all.any(|member| member.name == name)
        };
        match members.keys().find(|name| !is_known(name)) {
            None => Ok(()),
            Some(name) => {
                let steps = path.steps.iter().copied();
                let path = Path {
                    steps: steps.chain([Step::Member(name)]).collect(),
                    form: path.form,
                };
                let text = format!("Parameter '{path}' is unexpected");
                Err(QmpError::generic(text))
            }
        }
    }

    fn check_members<'a>(
        &'a self,
        object: &'a Object,
        members: &mut Map<String, Value>,
        path: &mut Path<'a>,
    ) -> Result {
        for member in &object.members {
            path.steps.push(Step::Member(&member.name));
            match members.get_mut(&member.name) {
                Some(value) => self.check(&member.kind, value, path)?,
                None if member.optional => {}
                None => {
                    let text = format!("Parameter '{path}' is missing");
                    return Err(QmpError::generic(text));
                }
            }
            path.steps.pop();
        }
        Ok(())
    }

    /// The further members that the tag of an object asks for.
    fn variant(&self, object: &Object, members: &Map<String, Value>) -> Option<&Object> {
        let tag = members.get(object.tag.as_deref()?)?.as_str()?;
        let (_, kind) = object.variants.iter().find(|(case, _)| case == tag)?;
        Some(self.object(kind))
    }
}

/// Makes what a type wants of a text.
fn read_word(kind: &Type, value: &mut Value, path: &Path<'_>) -> Result {
    let is_scalar = match kind {
        Type::List(_) | Type::Named(_) | Type::Any => false,
        Type::Str | Type::Integer(_) | Type::Number | Type::Bool | Type::Null => true,
    };
    if is_scalar && (value.is_object() || value.is_array()) {
        return Err(unexpected_group(path));
    }
    let Value::String(text) = &*value else {
        return Ok(());
    };
    if path.form == Form::Arguments && matches!(kind, Type::Integer(_)) {
        refuse_addition(text, path)?;
    }
    *value = match kind {
        Type::Integer(Integer::Size) => {
            let bytes = size::parse(text.trim_start());
            bytes.map_err(|_| expects(path, "size"))?.into()
        }
        Type::Integer(range) => {
            let number = whole(text).and_then(|number| match range {
                Integer::Uint64 | Integer::Unsigned(_) => {
                    let signed = || i64::try_from(number).ok().map(i64::cast_unsigned);
                    let number = u64::try_from(number).ok().or_else(signed);
                    number.map(Value::from)
                }
                _ => i64::try_from(number).ok().map(Value::from),
            });
            number.ok_or_else(|| expects(path, "integer"))?
        }
        Type::Number => {
            let number = text.parse::<f64>().ok().and_then(Number::from_f64);
            number.ok_or_else(|| expects(path, "number"))?.into()
        }
        Type::Bool => match text.as_str() {
            "on" | "yes" | "true" | "y" => true.into(),
            "off" | "no" | "false" | "n" => false.into(),
            _ => return Err(expects(path, "'on' or 'off'")),
        },
        Type::Null if text.is_empty() => Value::Null,
        _ => return Ok(()),
    };
    Ok(())
}

/// Refuses a number that may be meant as a change of the one that is there, or that a mistake in
/// quoting has put blanks around.
fn refuse_addition(text: &str, path: &Path<'_>) -> Result {
    match text.starts_with('+') || text.trim() != text {
        false => Ok(()),
        true => Err(QmpError::generic(format!(
            "Parameter '{path}' expects the new value, as a bare number, rather than '{text}'"
        ))),
    }
}

fn unexpected_group(path: &Path<'_>) -> QmpError {
    QmpError::generic(format!("Parameters '{path}.*' are unexpected"))
}

fn check_enum(values: &[EnumValue], value: &Value, path: &Path<'_>) -> Result {
    let Value::String(text) = value else {
        let is_group = path.form.is_of_texts() && (value.is_object() || value.is_array());
        return Err(match is_group {
            true => unexpected_group(path),
            false => wrong_type(path, "string"),
        });
    };
    match values.iter().any(|value| value.name == *text) {
        true => Ok(()),
        false => {
            let name = path.last();
            let text = format!("Parameter '{name}' does not accept value '{text}'");
            Err(QmpError::generic(text))
        }
    }
}

fn check_integer(range: Integer, value: &mut Value, path: &Path<'_>) -> Result {
    match range {
        Integer::Int => match value.is_i64() {
            true => Ok(()),
            false => Err(wrong_type(path, "integer")),
        },
        Integer::Signed(bits) => {
            let number = value.as_i64().ok_or_else(|| wrong_type(path, "integer"))?;
            let limit = 1i64 << (bits - 1);
            match (-limit..limit).contains(&number) {
                true => Ok(()),
                false => Err(expects(path.last(), format_args!("int{bits}_t"))),
            }
        }
        Integer::Unsigned(bits) => {
            let number = unsigned(value).ok_or_else(|| expects(path, "uint64"))?;
            match number < 1 << bits {
                true => Ok(()),
                false => Err(expects(path.last(), format_args!("uint{bits}_t"))),
            }
        }
        Integer::Uint64 | Integer::Size => {
            let number = unsigned(value).ok_or_else(|| expects(path, "uint64"))?;
            *value = number.into();
            Ok(())
        }
    }
}

fn unsigned(value: &Value) -> Option<u64> {
    let signed = || value.as_i64().map(i64::cast_unsigned);
    value.as_u64().or_else(signed)
}
