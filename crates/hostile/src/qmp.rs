//! Fuzz target: a hostile client of the control protocol. Its bytes are read as a stream of JSON,
//! whole and byte by byte, which has to give the same; and a server answers them, as they are or
//! behind a negotiation, or as requests whose arguments are drawn from its own schema.

use std::pin::Pin;
use std::rc::Rc;

use cowslip_qmp::json::{Limits, Outcome, Reader, parse, to_text};
use cowslip_qmp::schema::{Declared, Schema, Type};
use cowslip_qmp::{Call, Event, Executing, Handler, QmpError, Server, ServerHandle, ServerOptions};
use serde_json::{Map, Value, json};

use crate::draw::Draw;
use crate::pipe;

const LIMITS: Limits = Limits {
    bytes: 2000,
    tokens: 300,
    depth: 20,
};

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    let kind = draw.byte();
    let negotiation = match kind & 4 {
        0 => &b"{'execute':'qmp_capabilities'}"[..],
        _ => b"",
    };
    let script = match kind % 4 {
        0 | 1 => [negotiation, draw.rest()].concat(),
        _ => [negotiation, &requests(&mut draw)].concat(),
    };
    read(&script);
    serve(&script);
}

fn outcomes(pieces: &[&[u8]]) -> Vec<Outcome> {
    let mut reader = Reader::new(LIMITS);
    let mut outcomes = Vec::new();
    for piece in pieces {
        let mut rest = *piece;
        while let Some(outcome) = reader.next(&mut rest) {
            outcomes.push(outcome);
        }
        assert!(rest.is_empty(), "a reader reads all");
    }
    outcomes
}

fn read(script: &[u8]) {
    let whole = outcomes(&[script]);
    let single: Vec<&[u8]> = script.chunks(1).collect();
    assert_eq!(whole, outcomes(&single));
    for value in whole.iter().flatten() {
        let text = to_text(value);
        assert!(text.is_ascii() && !text.contains('\n'));
        assert_eq!(parse(&text).as_ref(), Ok(value));
        // Numbers with a fraction may differ in their last bit: that reader is not exact.
        assert!(serde_json::from_str::<Value>(&text).is_ok(), "{text}");
    }
    for error in whole.iter().filter_map(|outcome| outcome.as_ref().err()) {
        assert!(error.to_string().starts_with("JSON "));
    }
}

/// A handler that succeeds where no result is asked for, and sends an event.
struct Nothing {
    handle: ServerHandle,
}

impl Handler for Nothing {
    fn execute<'a>(&'a self, call: Call<'a>) -> Executing<'a> {
        let data = json!({"id": call.name, "status": "running"});
        self.handle.emit(Event::new("JOB_STATUS_CHANGE", data));
        if call.name == "quit" {
            self.handle.stop();
        }
        let command = Schema::of_daemon().command(call.name).unwrap();
        let result = match &command.returns {
            None => Ok(json!({})),
            Some(Type::List(_)) => Ok(json!([])),
            Some(_) => Err(QmpError::generic("nothing")),
        };
        let answer: Pin<Box<dyn Future<Output = _>>> = Box::pin(std::future::ready(result));
        answer
    }
}

fn serve(script: &[u8]) {
    let queue = pipe::queue();
    queue.block_on(async {
        let server = Server::new(
            Schema::of_daemon(),
            ServerOptions {
                limits: LIMITS,
                events_max: 16,
                ..ServerOptions::default()
            },
        );
        let handler = Rc::new(Nothing {
            handle: server.handle(),
        });
        server.serve_client(handler, pipe::scripted(script)).await;
    });
}

fn requests(draw: &mut Draw<'_>) -> Vec<u8> {
    const REQUESTS_MAX: usize = 10;
    let schema = Schema::of_daemon();
    let names: Vec<&str> = schema.commands().map(|one| one.name.as_str()).collect();
    let mut script = Vec::new();
    for _ in 0..REQUESTS_MAX {
        if draw.is_empty() {
            break;
        }
        let name = draw.pick(&names);
        let command = schema.command(name).unwrap();
        let kind = Type::Named(command.arguments.clone());
        let arguments = value(schema, &kind, draw, 0);
        let id = draw.byte();
        let request = json!({"execute": name, "arguments": arguments, "id": id});
        script.extend_from_slice(to_text(&request).as_bytes());
    }
    script
}

/// A value of a type, or now and then of another.
fn value(schema: &Schema, kind: &Type, draw: &mut Draw<'_>, depth: usize) -> Value {
    const DEPTH_MAX: usize = 8;
    if draw.one_in(16) || depth > DEPTH_MAX {
        let bits = draw.number();
        return match draw.below(6) {
            0 => Value::Null,
            1 => (bits & 1 == 1).into(),
            2 => bits.into(),
            3 => bits.cast_signed().into(),
            4 => f64::from_bits(bits).into(),
            _ => String::from_utf8_lossy(draw.take(8)).into(),
        };
    }
    match kind {
        Type::Str => String::from_utf8_lossy(draw.take(4)).into(),
        Type::Integer(_) => (draw.number() >> draw.below(64)).into(),
        Type::Number => f64::from(draw.byte()).into(),
        Type::Bool => draw.one_in(2).into(),
        Type::Null | Type::Any => Value::Null,
        Type::List(element) => {
            let length = draw.below(4);
            let elements = (0..length).map(|_| value(schema, element, draw, depth + 1));
            elements.collect()
        }
        Type::Named(name) => match schema.declared(name).unwrap() {
            Declared::Enum(values) => {
                let at = draw.below(values.len() as u64) as usize;
                values[at].name.clone().into()
            }
            Declared::Alternate(kinds) => {
                let at = draw.below(kinds.len() as u64) as usize;
                value(schema, &kinds[at], draw, depth + 1)
            }
            Declared::Object(object) => {
                let mut members = Map::new();
                let mut next = Some(object);
                while let Some(object) = next {
                    for member in &object.members {
                        if !member.optional || draw.one_in(3) {
                            let drawn = value(schema, &member.kind, draw, depth + 1);
                            members.insert(member.name.clone(), drawn);
                        }
                    }
                    let tag = object.tag.as_ref().and_then(|tag| members.get(tag));
                    let case = tag.and_then(Value::as_str).unwrap_or_default();
                    let variant = object.variants.iter().find(|(of, _)| of == case);
                    next = variant.and_then(|(_, kind)| match schema.declared(kind) {
                        Some(Declared::Object(object)) => Some(object),
                        _ => None,
                    });
                }
                members.into()
            }
        },
    }
}
