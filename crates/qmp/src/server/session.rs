//! A client, from its greeting to its end.

use std::cell::Cell;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;

use cowslip_queue::{Buf, Stream, sleep, spawn};
use futures_util::future::{Either, select};
use serde_json::{Map, Value, json};

use super::outbox::Outbox;
use super::{Call, Handler, ServerEvent, Shared};
use crate::descriptors::{Descriptors, Passed};
use crate::error::{ErrorClass, QmpError};
use crate::json::{Outcome, Reader, to_line};
use crate::schema::Command;

/// Bytes that are received at a time.
const RECEIVED_MAX: usize = 4096;

/// The connection of a client.
pub(super) struct Session {
    shared: Rc<Shared>,
    client: u64,
    stream: Stream,
    outbox: Rc<Outbox>,
    negotiated: Cell<bool>,
    passed: Passed,
}

/// A request as it came.
struct Request {
    command: String,
    arguments: Map<String, Value>,
}

impl Session {
    pub fn new(shared: Rc<Shared>, client: u64, stream: Stream) -> Rc<Session> {
        Rc::new(Session {
            shared,
            client,
            stream,
            outbox: Rc::new(Outbox::new()),
            negotiated: Cell::new(false),
            passed: Passed::default(),
        })
    }

    /// Sends an event, if the client has negotiated.
    pub fn send_event(&self, line: Buf) {
        if self.negotiated.get() {
            self.outbox.push_event(line, self.shared.options.events_max);
        }
    }

    fn send(&self, message: &Value) {
        self.outbox.push(Buf::copy_of(&to_line(message)));
    }

    /// Serves the client until it leaves, breaks the connection, or the server stops.
    pub async fn run(&self, handler: &dyn Handler) -> Result<(), String> {
        self.send(&json!({"QMP": {"version": self.version(), "capabilities": []}}));
        spawn(Rc::clone(&self.outbox).send(self.stream.clone()));
        let served = self.work(handler).await;
        let drained = pin!(self.outbox.drain());
        let timeout = pin!(sleep(self.shared.options.drain_timeout));
        select(drained, timeout).await;
        self.stream.shutdown();
        served
    }

    /// Reads and answers.
    async fn work(&self, handler: &dyn Handler) -> Result<(), String> {
        let mut reader = Reader::new(self.shared.options.limits);
        let mut bytes = [0; RECEIVED_MAX];
        loop {
            let mut descriptors = Vec::new();
            let got = self.receive(&mut bytes, &mut descriptors).await?;
            if got == 0 {
                return Ok(());
            }
            self.passed.arrive(descriptors);
            let mut input = &bytes[..got];
            while let Some(outcome) = reader.next(&mut input) {
                self.answer(handler, outcome).await;
                // Commands that have begun run to their ends; those that wait are not begun.
                let room = pin!(self.outbox.room());
                select(room, self.stopped()).await;
                if self.shared.stopped.get() {
                    return Ok(());
                }
            }
        }
    }

    /// Waits until the server is stopped.
    fn stopped(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(self.shared.changed.until(|| self.shared.stopped.get()))
    }

    /// Receives bytes; none if the client has left or the server is stopped.
    async fn receive(
        &self,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, String> {
        let received = self
            .stream
            .receive_some_with_descriptors(bytes, descriptors);
        let received = pin!(received);
        let broken = pin!(self.outbox.broken());
        match select(select(self.stopped(), broken), received).await {
            Either::Left((Either::Left(_), _)) => Ok(0),
            Either::Left((Either::Right((reason, _)), _)) => Err(reason),
            Either::Right((got, _)) => got.map_err(|error| error.to_string()),
        }
    }

    async fn answer(&self, handler: &dyn Handler, outcome: Outcome) {
        let value = match outcome {
            Ok(value) => value,
            Err(error) => {
                return self.send(&failure(None, &QmpError::generic(error.to_string())));
            }
        };
        let id = value.get("id").cloned();
        let result = match request_of(value) {
            Ok(request) => {
                let command = request.command.clone();
                let result = self.execute(handler, request).await;
                self.shared.notify(&ServerEvent::Executed {
                    client: self.client,
                    command: &command,
                    error: result.as_ref().err(),
                });
                result
            }
            Err(error) => Err(error),
        };
        self.send(&match result {
            Ok(result) => success(id, result),
            Err(error) => failure(id, &error),
        });
    }

    async fn execute(&self, handler: &dyn Handler, request: Request) -> Result<Value, QmpError> {
        let Request {
            command: name,
            mut arguments,
        } = request;
        let refuse = |text: &str| Err(QmpError::new(ErrorClass::CommandNotFound, text));
        match (self.negotiated.get(), name.as_str()) {
            (false, "qmp_capabilities") | (true, _) => {}
            (false, _) => {
                return refuse("Expecting capabilities negotiation with 'qmp_capabilities'");
            }
        }
        let schema = self.shared.schema;
        let command = schema.command(&name);
        let command = command.ok_or_else(|| QmpError::command_not_found(&name))?;
        if self.negotiated.get() && name == "qmp_capabilities" {
            return refuse("Capabilities negotiation is already complete, command ignored");
        }
        schema.check_command(command, &mut arguments)?;
        let descriptors = Descriptors {
            passed: &self.passed,
            sets: &self.shared.sets,
        };
        if let Some(result) = self.execute_own(&name, &arguments) {
            return result;
        }
        if let Some(result) = descriptors.execute(&name, &arguments) {
            return result;
        }
        let call = Call {
            name: &name,
            arguments,
            descriptors,
        };
        let result = handler.execute(call).await?;
        self.check_result(command, result)
    }

    /// Executes a command of the protocol itself; `None` if it is none.
    fn execute_own(
        &self,
        name: &str,
        arguments: &Map<String, Value>,
    ) -> Option<Result<Value, QmpError>> {
        let schema = self.shared.schema;
        Some(Ok(match name {
            "qmp_capabilities" => {
                let wanted = arguments.get("enable").and_then(Value::as_array);
                if let Some(one) = wanted.and_then(|wanted| wanted.first()) {
                    let one = one.as_str().unwrap_or_default();
                    let text = format!("Capability {one} not available");
                    return Some(Err(QmpError::generic(text)));
                }
                self.negotiated.set(true);
                json!({})
            }
            "query-version" => self.version(),
            "query-commands" => {
                let commands = schema.commands();
                commands
                    .map(|command| json!({"name": command.name}))
                    .collect()
            }
            "query-qmp-schema" => schema.introspect(),
            _ => return None,
        }))
    }

    fn version(&self) -> Value {
        let options = &self.shared.options;
        let [major, minor, micro] = options.version;
        json!({
            "qemu": {"micro": micro, "minor": minor, "major": major},
            "package": options.package,
        })
    }

    /// Checks what a handler returned, in builds with debug assertions: a mistake of the handler is
    /// the error of its command.
    fn check_result(&self, command: &Command, mut result: Value) -> Result<Value, QmpError> {
        if cfg!(debug_assertions)
            && let Err(error) = self.shared.schema.check_result(command, &mut result)
        {
            let text = format!("The result of {} is not of its type: {error}", command.name);
            return Err(QmpError::generic(text));
        }
        Ok(result)
    }
}

/// Reads a request, in QEMU's words.
fn request_of(value: Value) -> Result<Request, QmpError> {
    let refuse = |text: String| Err(QmpError::generic(text));
    let Value::Object(members) = value else {
        return refuse("QMP input must be a JSON object".into());
    };
    let mut command = None;
    let mut arguments = Map::new();
    for (name, value) in members {
        match (name.as_str(), value) {
            ("execute", Value::String(name)) => command = Some(name),
            ("execute", _) => {
                return refuse("QMP input member 'execute' must be a string".into());
            }
            ("arguments", Value::Object(members)) => arguments = members,
            ("arguments", _) => {
                return refuse("QMP input member 'arguments' must be an object".into());
            }
            ("id", _) => {}
            (name, _) => return refuse(format!("QMP input member '{name}' is unexpected")),
        }
    }
    match command {
        Some(command) => Ok(Request { command, arguments }),
        None => refuse("QMP input lacks member 'execute'".into()),
    }
}

fn success(id: Option<Value>, result: Value) -> Value {
    let mut message = Map::new();
    message.insert("return".into(), result);
    if let Some(id) = id {
        message.insert("id".into(), id);
    }
    message.into()
}

fn failure(id: Option<Value>, error: &QmpError) -> Value {
    let mut message = Map::new();
    if let Some(id) = id {
        message.insert("id".into(), id);
    }
    let error = json!({"class": error.class.name(), "desc": error.desc});
    message.insert("error".into(), error);
    message.into()
}
