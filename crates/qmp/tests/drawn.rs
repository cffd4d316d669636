//! Requests that are drawn from the schema, whole or broken in one place: qemu-storage-daemon
//! refuses what we refuse, in the same words, and nothing else for its form. And its schema has all
//! that ours declares.
//!
//! `COWSLIP_ROUNDS=n` draws more, `COWSLIP_SEED=n` others.

use std::collections::HashMap;

use cowslip_qmp::ServerOptions;
use cowslip_qmp::json::{parse, to_text};
use cowslip_qmp::schema::{Declared, Integer, Object, Schema, Type};
use serde_json::{Map, Value, json};

use crate::qemu::{Peer, error_of, reply};
use crate::support::Served;

/// Commands that QEMU's machines have, and its daemon has not: `descriptors.rs` compares them.
const OF_MACHINES: [&str; 5] = ["getfd", "closefd", "add-fd", "remove-fd", "query-fdsets"];

/// Commands that end a connection, or begin one.
const LEFT_OUT: [&str; 2] = ["quit", "qmp_capabilities"];

/// Members that are ours.
const OURS: [&str; 16] = [
    "alloc-policy",
    "zero-method",
    "connections",
    "endpoint",
    "region",
    "anonymous",
    "ca-file",
    "proxy",
    "wait-timeout",
    "on-failure",
    "block-size",
    "memory",
    "cache-dir",
    "cache-limit",
    "background",
    "trace",
];

/// Drivers that are ours.
const OUR_DRIVERS: [&str; 3] = ["az", "gs", "s3"];

/// Numbers from a seed (splitmix64).
struct Draw(u64);

impl Draw {
    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.number() % end as u64).unwrap()
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

struct Maker<'a> {
    schema: &'a Schema,
    draw: Draw,
    /// Places that are left before the one that is broken; `None` once it is.
    fuse: Option<usize>,
}

impl Maker<'_> {
    /// Whether the next place is the one to be broken.
    fn breaks(&mut self) -> bool {
        match self.fuse {
            Some(0) => {
                self.fuse = None;
                true
            }
            Some(left) => {
                self.fuse = Some(left - 1);
                false
            }
            None => false,
        }
    }

    fn strange(&mut self) -> Value {
        let strange = [
            json!(1),
            json!(-1),
            json!("text"),
            json!(""),
            json!(true),
            json!(null),
            json!([]),
            json!([1]),
            json!({}),
            json!({"a": 1}),
            json!(1.5),
            json!(u64::MAX),
            json!(1e30),
        ];
        self.draw.pick(&strange)
    }

    fn value(&mut self, kind: &Type, depth: usize) -> Value {
        if self.breaks() {
            return self.strange();
        }
        match kind {
            Type::Str => self.draw.pick(&["x", "y", ""]).into(),
            Type::Integer(Integer::Int | Integer::Uint64 | Integer::Size) => self
                .draw
                .pick(&[0i64, 1, -1, 512, i64::MAX, i64::MIN])
                .into(),
            Type::Integer(Integer::Signed(bits)) => {
                let limit = 1i64 << (bits - 1);
                self.draw
                    .pick(&[0, -limit, limit - 1, limit, -limit - 1])
                    .into()
            }
            Type::Integer(Integer::Unsigned(bits)) => self
                .draw
                .pick(&[0, 1, (1i64 << bits) - 1, 1 << bits, -1])
                .into(),
            Type::Number => json!(0.5),
            Type::Bool => self.draw.one_in(2).into(),
            Type::Null => Value::Null,
            Type::Any => json!({}),
            Type::List(element) => {
                let length = self.draw.below(3);
                (0..length).map(|_| self.value(element, depth)).collect()
            }
            Type::Named(name) => match self.schema.declared(name).unwrap() {
                Declared::Enum(values) => {
                    let is_theirs = |name: &str| !is_our_value(name);
                    let theirs = values.iter().filter(|value| is_theirs(&value.name));
                    let theirs: Vec<_> = theirs.cloned().collect();
                    self.draw.pick(&theirs).name.into()
                }
                Declared::Object(object) => self.object(object, depth).into(),
                Declared::Alternate(kinds) => {
                    // Nodes within nodes end somewhere.
                    let least = usize::from(depth > 4);
                    let at = least.min(kinds.len() - 1) + self.draw.below(kinds.len() - least);
                    self.value(&kinds[at].clone(), depth + 1)
                }
            },
        }
    }

    fn object(&mut self, object: &Object, depth: usize) -> Map<String, Value> {
        let mut members = Map::new();
        let mut next = Some(object);
        while let Some(object) = next {
            for member in &object.members {
                let left_out = member.optional && !self.draw.one_in(3);
                let name = member.name.as_str();
                // QEMU would wait for a server that does not come.
                let waits = name == "open-timeout";
                if OURS.contains(&name) || waits || left_out || self.breaks() {
                    continue;
                }
                let value = self.value(&member.kind, depth);
                members.insert(member.name.clone(), value);
            }
            let tag = object.tag.as_ref().and_then(|tag| members.get(tag));
            let case = tag.and_then(Value::as_str).unwrap_or_default();
            let variant = object.variants.iter().find(|(of, _)| of == case);
            next = variant.map(|(_, kind)| match self.schema.declared(kind) {
                Some(Declared::Object(object)) => object,
                _ => panic!("{kind} is an object"),
            });
        }
        if self.breaks() {
            members.insert("strange".into(), json!(1));
        }
        members
    }
}

/// Whether an error is about the form of the arguments. Handlers have others that sound alike.
fn is_of_form(desc: &str) -> bool {
    let ends = [" is missing", " is unexpected"];
    ends.iter()
        .any(|end| desc.starts_with("Parameter '") && desc.ends_with(end))
        || desc.starts_with("Invalid parameter type for")
        || desc.contains(" does not accept value '")
        || desc.contains("' expects uint")
        || desc.contains("' expects int")
}

/// The beginning of the names of commands that QEMU does not have, and of their jobs.
const OUR_COMMANDS: &str = "x-cowslip-";
/// The beginning of the names of events that QEMU does not have.
const OUR_EVENTS: &str = "X_COWSLIP_";

/// Whether a value of an enumeration is ours.
fn is_our_value(name: &str) -> bool {
    OUR_DRIVERS.contains(&name) || name.starts_with(OUR_COMMANDS)
}

#[test]
fn drawn_requests_are_judged_alike() {
    let Some(mut peer) = Peer::start() else {
        return;
    };
    let schema = Schema::of_daemon();
    let served = Served::new(ServerOptions::default());
    let mut ours = served.negotiated();
    let mut theirs = peer.negotiated();
    let from_environment =
        |name: &str, value: u64| std::env::var(name).map_or(value, |text| text.parse().unwrap());
    let seed = from_environment("COWSLIP_SEED", 1);
    let commands: Vec<_> = schema
        .commands()
        .filter(|command| !LEFT_OUT.contains(&command.name.as_str()))
        .filter(|command| !OF_MACHINES.contains(&command.name.as_str()))
        .filter(|command| !command.name.starts_with(OUR_COMMANDS))
        .collect();
    let (mut refused, mut ended) = (0, 0);
    let rounds = from_environment("COWSLIP_ROUNDS", 3000);
    for round in 0..rounds {
        let mut draw = Draw(seed << 32 | round);
        let command = draw.pick(&commands);
        let fuse = (!draw.one_in(4)).then(|| draw.below(12));
        let mut maker = Maker { schema, draw, fuse };
        let arguments = maker.value(&Type::Named(command.arguments.clone()), 0);
        let request = to_text(&json!({"execute": command.name, "arguments": arguments}));
        ours.send(&request);
        // It fails if QEMU has ended after its last answer.
        let sent = theirs.try_send(&request);
        let (our, their) = (
            reply(&mut ours),
            sent.map_or(String::new(), |()| reply(&mut theirs)),
        );
        assert!(!our.is_empty(), "seed {seed}, round {round}: {request}");
        if their.is_empty() {
            // Version 10.0.2 does not survive a reopening of nothing, nor a transaction that
            // enables a bitmap of a node that does not exist.
            eprintln!("QEMU has ended at {request}");
            peer = Peer::start().unwrap();
            theirs = peer.negotiated();
            ended += 1;
            continue;
        }
        let (our, their) = (error_of(&our), error_of(&their));
        let is_same = match (&our, &their) {
            (Some(our), Some(their)) if is_of_form(&our.1) || our.1.starts_with("QMP input") => {
                refused += 1;
                our == their
            }
            (_, Some((_, desc))) => !is_of_form(desc),
            _ => true,
        };
        assert!(
            is_same,
            "seed {seed}, round {round}: {request}\nours {our:?}\nQEMU {their:?}"
        );
    }
    eprintln!("{refused} were refused by both, in the same words");
    assert!(rounds < 3000 || refused > 500, "{refused}");
    assert!(ended <= rounds / 100, "{ended}");
    ours.send("{'execute':'quit'}");
    served.end();
}

/// A schema in its own words, types by name.
struct Described<'a>(HashMap<&'a str, &'a Value>);

impl<'a> Described<'a> {
    fn of(answer: &'a Value) -> Described<'a> {
        let entries = answer.as_array().unwrap().iter();
        Described(
            entries
                .map(|entry| (entry["name"].as_str().unwrap(), entry))
                .collect(),
        )
    }

    fn get(&self, name: &Value) -> &'a Value {
        self.0[name.as_str().unwrap()]
    }
}

fn list<'a>(entry: &'a Value, name: &str) -> &'a [Value] {
    entry.get(name).map_or(&[], |list| list.as_array().unwrap())
}

/// Compares types of ours and QEMU's, and what they are made of.
struct Comparison<'a> {
    ours: Described<'a>,
    theirs: Described<'a>,
    seen: Vec<(String, String)>,
    differences: Vec<String>,
}

impl Comparison<'_> {
    fn differ(&mut self, place: &str, why: &str) {
        self.differences.push(format!("{place}: {why}"));
    }

    /// `sent` is what we send: there our optional members may not be theirs that are not.
    fn types(&mut self, place: &str, our: &Value, their: &Value) {
        let pair = (our.to_string(), their.to_string());
        if self.seen.contains(&pair) {
            return;
        }
        self.seen.push(pair);
        let (our, their) = (self.ours.get(our), self.theirs.get(their));
        if our["meta-type"] != their["meta-type"] {
            return self.differ(place, "another sort of type");
        }
        match our["meta-type"].as_str().unwrap() {
            "builtin" => {
                if our != their {
                    self.differ(place, "another type");
                }
            }
            "array" => self.types(place, &our["element-type"], &their["element-type"]),
            "enum" => {
                for value in list(our, "members") {
                    let name = value["name"].as_str().unwrap_or_default();
                    if !is_our_value(name) && !list(their, "members").contains(value) {
                        self.differ(place, &format!("{value} is not there"));
                    }
                }
            }
            "alternate" => {
                for (our, their) in list(our, "members").iter().zip(list(their, "members")) {
                    self.types(place, &our["type"], &their["type"]);
                }
            }
            _ => self.objects(place, our, their),
        }
    }

    fn objects(&mut self, place: &str, our: &Value, their: &Value) {
        if our.get("tag") != their.get("tag") || our.get("features") != their.get("features") {
            self.differ(place, "another tag, or other features");
        }
        for member in list(our, "members") {
            let name = member["name"].as_str().unwrap();
            let same = list(their, "members")
                .iter()
                .find(|their| their["name"] == *name);
            let place = format!("{place}.{name}");
            match same {
                Some(their) => {
                    if member.get("default") != their.get("default") {
                        self.differ(&place, "optional on one side only");
                    }
                    if member.get("features") != their.get("features") {
                        self.differ(&place, "other features");
                    }
                    self.types(&place, &member["type"], &their["type"]);
                }
                None if OURS.contains(&name) || name.starts_with(OUR_COMMANDS) => {}
                None => self.differ(&place, "there is none"),
            }
        }
        for member in list(their, "members") {
            let missing = !list(our, "members")
                .iter()
                .any(|our| our["name"] == member["name"]);
            if missing && member.get("default").is_none() {
                self.differ(place, &format!("{member} is missing"));
            }
        }
        for variant in list(our, "variants") {
            let case = variant["case"].as_str().unwrap();
            let same = list(their, "variants")
                .iter()
                .find(|their| their["case"] == *case);
            match same {
                Some(their) => {
                    self.types(&format!("{place}={case}"), &variant["type"], &their["type"]);
                }
                None if is_our_value(case) => {}
                None => self.differ(place, &format!("there is no variant {case}")),
            }
        }
    }
}

#[test]
fn qemus_schema_has_what_ours_declares() {
    let Some(peer) = Peer::start() else { return };
    let mut client = peer.client();
    let theirs = client.execute("query-qmp-schema", json!({})).unwrap();
    // As a client gets it.
    let ours = parse(&to_text(&Schema::of_daemon().introspect())).unwrap();
    let mut comparison = Comparison {
        ours: Described::of(&ours),
        theirs: Described::of(&theirs),
        seen: Vec::new(),
        differences: Vec::new(),
    };
    let mut compared = 0;
    for entry in ours.as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        let is_entry = ["command", "event"]
            .iter()
            .any(|kind| entry["meta-type"] == *kind);
        let has_our_name = name.starts_with(OUR_COMMANDS) || name.starts_with(OUR_EVENTS);
        let is_ours = OF_MACHINES.contains(&name) || has_our_name;
        if !is_entry || is_ours {
            continue;
        }
        let Some(their) = comparison.theirs.0.get(name).copied() else {
            comparison.differ(name, "there is none");
            continue;
        };
        compared += 1;
        if entry.get("features") != their.get("features") {
            comparison.differ(name, "other features");
        }
        comparison.types(name, &entry["arg-type"], &their["arg-type"]);
        if let Some(returns) = entry.get("ret-type") {
            comparison.types(&format!("{name}->"), returns, &their["ret-type"]);
        }
    }
    assert!(compared > 50, "{compared}");
    assert!(
        comparison.differences.is_empty(),
        "{:#?}",
        comparison.differences
    );
}
