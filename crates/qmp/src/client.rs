//! The other side: connects, negotiates, executes commands and waits for events. It blocks, for
//! programs that do one thing after the other.
//!
//! Events that come while it waits for a reply are kept, in order, until they are asked for; a
//! client that never asks keeps [`EVENTS_MAX`] of them, and forgets the oldest.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Map, Value, json};

use crate::error::{ErrorClass, QmpError};
use crate::json::{Limits, Reader, to_line};

/// Events that a client keeps.
pub const EVENTS_MAX: usize = 65536;

/// Descriptors that one command can pass.
pub const DESCRIPTORS_MAX: usize = cowslip_queue::passing::DESCRIPTORS_MAX;

/// Limits of a message of a server: the answer about hundreds of disks has megabytes.
const LIMITS: Limits = Limits {
    bytes: 256 << 20,
    tokens: 32 << 20,
    depth: 2048,
};

/// A failure of a client.
#[derive(Debug)]
pub enum ClientError {
    /// The connection failed.
    Io(io::Error),
    /// The server has ended the connection.
    Closed,
    /// The server has sent something that is not of the protocol.
    Protocol(String),
    /// The server has refused a command, or it has failed.
    Refused(QmpError),
}

impl ClientError {
    /// Whether nothing listens at the socket.
    pub fn is_absence(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        match self {
            ClientError::Io(error) => matches!(error.kind(), NotFound | ConnectionRefused),
            _ => false,
        }
    }
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Io(error) => error.fmt(f),
            ClientError::Closed => f.write_str("the server has ended the connection"),
            ClientError::Protocol(text) => write!(f, "this is no server of QMP: {text}"),
            ClientError::Refused(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ClientError {}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> ClientError {
        ClientError::Io(error)
    }
}

type Result<T> = std::result::Result<T, ClientError>;

/// An event of a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Received {
    /// Its name.
    pub name: String,
    /// Its data.
    pub data: Map<String, Value>,
    /// When it was sent, by the server's clock; since 1970.
    pub time: Duration,
}

/// A message of a server.
enum Message {
    Event(Received),
    Reply(std::result::Result<Value, QmpError>, Option<Value>),
}

/// A connection to a server, negotiated.
pub struct Client {
    stream: UnixStream,
    reader: Reader,
    /// Bytes that were received and not read yet, from a position on.
    received: Vec<u8>,
    position: usize,
    greeting: Value,
    events: VecDeque<Received>,
    commands: u64,
}

impl Client {
    /// Connects to the socket of a server, and negotiates. A server that serves one client at a
    /// time greets when the others have left; `patience` is the time to wait for that, and for the
    /// end of the negotiation.
    ///
    /// # Errors
    /// Nobody listens there; what answers is no server of QMP; the time has passed.
    pub fn connect(path: &Path, patience: Option<Duration>) -> Result<Client> {
        Client::over(UnixStream::connect(path)?, patience)
    }

    /// Negotiates over a connection.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn over(stream: UnixStream, patience: Option<Duration>) -> Result<Client> {
        let mut client = Client {
            stream,
            reader: Reader::new(LIMITS),
            received: Vec::new(),
            position: 0,
            greeting: Value::Null,
            events: VecDeque::new(),
            commands: 0,
        };
        let deadline = patience.map(|patience| Instant::now() + patience);
        let late = || ClientError::Io(io::ErrorKind::TimedOut.into());
        let greeting = client.value(deadline)?.ok_or_else(late)?;
        client.greeting = match greeting {
            Value::Object(mut members) if members.contains_key("QMP") => {
                members.remove("QMP").unwrap_or_default()
            }
            other => return Err(strange("it greets with", &other)),
        };
        let accepted = client.request(("qmp_capabilities", json!({})), &[], deadline)?;
        accepted.map(|_| client).ok_or_else(late)
    }

    /// The server's greeting: its `version`, and `capabilities`.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Executes a command, and waits for its result.
    ///
    /// # Errors
    /// The connection fails; the command does.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.execute_passing(command, arguments, &[])
    }

    /// Executes a command that descriptors are passed with.
    ///
    /// # Errors
    /// As [`Client::execute`]; more than [`DESCRIPTORS_MAX`] descriptors.
    pub fn execute_passing(
        &mut self,
        command: &str,
        arguments: Value,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Value> {
        let result = self.request((command, arguments), descriptors, None)?;
        Ok(result.expect("without a deadline there is a result or an error"))
    }

    /// The result of a command; `None` if there is none before the time has passed.
    fn request(
        &mut self,
        (command, arguments): (&str, Value),
        descriptors: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Option<Value>> {
        self.commands += 1;
        let id = Value::from(self.commands);
        let mut request = Map::new();
        request.insert("execute".into(), command.into());
        if arguments
            .as_object()
            .is_none_or(|members| !members.is_empty())
        {
            request.insert("arguments".into(), arguments);
        }
        request.insert("id".into(), id.clone());
        self.send(&to_line(&request.into()), descriptors)?;
        loop {
            match self.message(deadline)? {
                Some(Message::Event(event)) => self.keep(event),
                Some(Message::Reply(result, of)) if of.as_ref() == Some(&id) => {
                    return result.map(Some).map_err(ClientError::Refused);
                }
                Some(Message::Reply(_, of)) => {
                    let of = of.unwrap_or_default();
                    return Err(strange("it answers what was not asked", &of));
                }
                None if deadline.is_some() => return Ok(None),
                // Without a deadline there is a message or an error.
                None => {}
            }
        }
    }

    /// The next event; `None` if there is none before the time has passed.
    ///
    /// # Errors
    /// The connection fails or ends.
    pub fn next_event(&mut self, patience: Option<Duration>) -> Result<Option<Received>> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        let deadline = patience.map(|patience| Instant::now() + patience);
        match self.message(deadline)? {
            Some(Message::Event(event)) => Ok(Some(event)),
            Some(Message::Reply(_, of)) => {
                let of = of.unwrap_or_default();
                Err(strange("it answers what was not asked", &of))
            }
            None => Ok(None),
        }
    }

    /// The next event that `wanted` chooses; those before it are dropped. `None` if there is none
    /// before the time has passed.
    ///
    /// # Errors
    /// The connection fails or ends.
    pub fn wait_for(
        &mut self,
        patience: Duration,
        mut wanted: impl FnMut(&Received) -> bool,
    ) -> Result<Option<Received>> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next_event(Some(left))? {
                Some(event) if wanted(&event) => return Ok(Some(event)),
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    fn keep(&mut self, event: Received) {
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn send(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        if descriptors.is_empty() {
            return Ok(self.stream.write_all(bytes)?);
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            let text = format!("a command passes at most {DESCRIPTORS_MAX} descriptors");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text).into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "the space is that of the most descriptors");
        let part = [IoSlice::new(bytes)];
        let flags = SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(&self.stream, &part, &mut control, flags);
        let sent = sent.map_err(io::Error::from)?;
        Ok(self.stream.write_all(&bytes[sent..])?)
    }

    /// The next message; `None` if the time has passed.
    fn message(&mut self, deadline: Option<Instant>) -> Result<Option<Message>> {
        let Some(value) = self.value(deadline)? else {
            return Ok(None);
        };
        let message = message_of(&value);
        message.map(Some).ok_or_else(|| strange("it sends", &value))
    }

    fn value(&mut self, deadline: Option<Instant>) -> Result<Option<Value>> {
        loop {
            let mut input = &self.received[self.position..];
            let outcome = self.reader.next(&mut input);
            self.position = self.received.len() - input.len();
            match outcome {
                Some(Ok(value)) => return Ok(Some(value)),
                Some(Err(error)) => return Err(ClientError::Protocol(error.to_string())),
                None => {}
            }
            if !self.receive(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Receives bytes; false if none came before the time has passed.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<bool> {
        const RECEIVED_MAX: usize = 64 << 10;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // No time at all would be no limit.
        let least = Duration::from_micros(1);
        let left = left.map(|left| left.max(least));
        self.stream.set_read_timeout(left)?;
        self.received.resize(RECEIVED_MAX, 0);
        let got = self.stream.read(&mut self.received);
        self.position = 0;
        self.received.truncate(got.as_ref().map_or(0, |got| *got));
        match got {
            Ok(0) => Err(ClientError::Closed),
            Ok(_) => Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => Ok(true),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(false),
                // It was stopped before it has read what was sent to it.
                io::ErrorKind::ConnectionReset => Err(ClientError::Closed),
                _ => Err(error.into()),
            },
        }
    }
}

fn strange(what: &str, value: &Value) -> ClientError {
    const SHOWN_MAX: usize = 200;
    let text: String = value.to_string().chars().take(SHOWN_MAX).collect();
    ClientError::Protocol(format!("{what} {text}"))
}

fn message_of(value: &Value) -> Option<Message> {
    let members = value.as_object()?;
    if let Some(name) = members.get("event") {
        let time = members.get("timestamp")?;
        let of = |unit| time.get(unit).and_then(Value::as_u64);
        // QEMU has -1 where it does not know the time.
        let time = Duration::from_secs(of("seconds").unwrap_or(0))
            + Duration::from_micros(of("microseconds").unwrap_or(0));
        let data = members.get("data").and_then(Value::as_object);
        return Some(Message::Event(Received {
            name: name.as_str()?.to_string(),
            data: data.cloned().unwrap_or_default(),
            time,
        }));
    }
    let id = members.get("id").cloned();
    if let Some(result) = members.get("return") {
        return Some(Message::Reply(Ok(result.clone()), id));
    }
    let error = members.get("error")?;
    let class = error.get("class").and_then(Value::as_str)?;
    let class = ErrorClass::ALL
        .into_iter()
        .find(|known| known.name() == class);
    let error = QmpError {
        class: class.unwrap_or(ErrorClass::GenericError),
        desc: error.get("desc").and_then(Value::as_str)?.to_string(),
    };
    Some(Message::Reply(Err(error), id))
}
