//! The answer to `query-qmp-schema`: commands and events by name, types by number, in the order in
//! which they are first needed. Types that have names in JSON keep them.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::read::EMPTY;
use super::{Declared, Entry, Member, Object, Schema, Type};

/// Numbers of the types that are in use.
struct Names<'a> {
    schema: &'a Schema,
    /// Types in the order of their first use.
    used: Vec<Type>,
    numbers: HashMap<String, usize>,
}

impl Names<'_> {
    /// The name of a type in the answer, which describes the type later.
    fn name(&mut self, kind: &Type) -> String {
        match kind {
            Type::Named(name) => self.name_of(name),
            Type::List(element) => {
                // The list stands before what it is a list of.
                self.note(kind);
                format!("[{}]", self.name(element))
            }
            _ => {
                self.note(kind);
                builtin(kind).0.to_string()
            }
        }
    }

    fn name_of(&mut self, name: &str) -> String {
        let next = self.numbers.len();
        let number = *self.numbers.entry(name.to_string()).or_insert(next);
        if number == next {
            self.used.push(Type::Named(name.to_string()));
        }
        number.to_string()
    }

    fn note(&mut self, kind: &Type) {
        let is_same = |other: &Type| match (other, kind) {
            (Type::Integer(_), Type::Integer(_)) => true,
            _ => other == kind,
        };
        if !self.used.iter().any(is_same) {
            self.used.push(kind.clone());
        }
    }

    fn member(&mut self, member: &Member) -> Value {
        let mut described = Map::new();
        described.insert("name".into(), member.name.clone().into());
        if member.optional {
            described.insert("default".into(), Value::Null);
        }
        described.insert("type".into(), self.name(&member.kind).into());
        add_features(&mut described, &member.features);
        Value::Object(described)
    }

    fn object(&mut self, object: &Object) -> Map<String, Value> {
        let mut described = Map::new();
        if let Some(tag) = &object.tag {
            described.insert("tag".into(), tag.clone().into());
            described.insert("variants".into(), self.variants(object, tag).into());
        }
        let members = object.members.iter().map(|member| self.member(member));
        let members: Vec<Value> = members.collect();
        described.insert("members".into(), members.into());
        described.insert("meta-type".into(), "object".into());
        add_features(&mut described, &object.features);
        described
    }

    /// The variants that are declared, and those of all other values, which add nothing.
    fn variants(&mut self, object: &Object, tag: &str) -> Vec<Value> {
        let declared = object.variants.iter();
        let mut cases: Vec<(&str, &str)> = declared
            .map(|(case, kind)| (case.as_str(), kind.as_str()))
            .collect();
        let kind = object.members.iter().find(|member| member.name == tag);
        let values = match kind.map(|member| &member.kind) {
            Some(Type::Named(name)) => match self.schema.named(name) {
                Declared::Enum(values) => values.as_slice(),
                _ => &[],
            },
            _ => &[],
        };
        for value in values {
            if !cases.iter().any(|(case, _)| *case == value.name) {
                cases.push((&value.name, EMPTY));
            }
        }
        let described = cases.into_iter();
        described
            .map(|(case, kind)| json!({"case": case, "type": self.name_of(kind)}))
            .collect()
    }

    fn describe(&mut self, kind: &Type) -> Value {
        let mut described = Map::new();
        let name = self.name(kind);
        match kind {
            Type::Named(declared) => match self.schema.named(declared) {
                Declared::Object(object) => described = self.object(object),
                Declared::Enum(values) => {
                    let members = values.iter().map(|value| {
                        let mut member = Map::new();
                        member.insert("name".into(), value.name.clone().into());
                        add_features(&mut member, &value.features);
                        Value::Object(member)
                    });
                    described.insert("members".into(), members.collect());
                    described.insert("meta-type".into(), "enum".into());
                    let values = values.iter().map(|value| Value::from(value.name.as_str()));
                    described.insert("values".into(), values.collect());
                }
                Declared::Alternate(kinds) => {
                    let members = kinds.iter().map(|kind| json!({"type": self.name(kind)}));
                    described.insert("members".into(), members.collect());
                    described.insert("meta-type".into(), "alternate".into());
                }
            },
            Type::List(element) => {
                described.insert("element-type".into(), self.name(element).into());
                described.insert("meta-type".into(), "array".into());
            }
            _ => {
                described.insert("json-type".into(), builtin(kind).1.into());
                described.insert("meta-type".into(), "builtin".into());
            }
        }
        with_name(&name, described)
    }
}

/// The name and the JSON type of a type that is built in.
fn builtin(kind: &Type) -> (&'static str, &'static str) {
    match kind {
        Type::Integer(_) => ("int", "int"),
        Type::Number => ("number", "number"),
        Type::Bool => ("bool", "boolean"),
        Type::Null => ("null", "null"),
        Type::Any => ("any", "value"),
        Type::Str | Type::List(_) | Type::Named(_) => ("str", "string"),
    }
}

fn add_features(to: &mut Map<String, Value>, features: &[String]) {
    if !features.is_empty() {
        to.insert("features".into(), features.into());
    }
}

fn with_name(name: &str, described: Map<String, Value>) -> Value {
    let mut whole = Map::new();
    whole.insert("name".into(), name.into());
    whole.extend(described);
    Value::Object(whole)
}

impl Schema {
    /// The answer to `query-qmp-schema`.
    pub fn introspect(&self) -> Value {
        let mut names = Names {
            schema: self,
            used: Vec::new(),
            numbers: HashMap::new(),
        };
        let mut described = Vec::new();
        for entry in &self.entries {
            let mut one = Map::new();
            let name = match entry {
                Entry::Command(command) => {
                    let arguments = names.name_of(&command.arguments);
                    let returns = match &command.returns {
                        Some(kind) => names.name(kind),
                        None => names.name_of(EMPTY),
                    };
                    one.insert("ret-type".into(), returns.into());
                    one.insert("meta-type".into(), "command".into());
                    one.insert("arg-type".into(), arguments.into());
                    add_features(&mut one, &command.features);
                    &command.name
                }
                Entry::Event(event) => {
                    one.insert("meta-type".into(), "event".into());
                    one.insert("arg-type".into(), names.name_of(&event.data).into());
                    &event.name
                }
            };
            described.push(with_name(name, one));
        }
        let mut at = 0;
        while let Some(kind) = names.used.get(at).cloned() {
            described.push(names.describe(&kind));
            at += 1;
        }
        described.into()
    }
}
