//! A server with a small handler on a thread of its own, and a client that sends bytes.

use std::cell::RefCell;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use cowslip_qmp::schema::Type;
use cowslip_qmp::{
    Call, Client, Event, Executing, Handler, QmpError, Schema, Server, ServerHandle, ServerOptions,
};
use cowslip_queue::{Backend, Listener, Queue};
use rustix::fs::OFlags;
use serde_json::{Value, json};

/// Executes a few commands: `quit`; `job-pause` and `job-resume` send events; `block-job-pause` and
/// what has more than a list for a result fail, all others succeed without doing anything.
struct Small {
    handle: ServerHandle,
    calls: RefCell<Vec<String>>,
}

impl Small {
    fn call(&self, call: &Call<'_>) -> Result<Value, QmpError> {
        self.calls.borrow_mut().push(call.name.to_string());
        match call.name {
            "quit" => self.handle.stop(),
            "job-pause" => {
                let id = call.arguments["id"].as_str().unwrap();
                let count = id.parse().unwrap_or(1);
                for _ in 0..count {
                    let data = json!({"id": id, "status": "paused"});
                    self.handle.emit(Event::new("JOB_STATUS_CHANGE", data));
                }
            }
            "job-resume" => {
                for at in 0..10 {
                    let data = json!({
                        "qom-path": "", "device": call.arguments["id"], "operation": "read",
                        "action": "report", "reason": format!("{at}"),
                    });
                    self.handle.emit(Event::new("BLOCK_IO_ERROR", data));
                }
            }
            "block-job-pause" => {
                return Err(QmpError::new(
                    cowslip_qmp::ErrorClass::DeviceNotActive,
                    format!("Block job '{}' not found", call.arguments["device"]),
                ));
            }
            _ => {}
        }
        if call.name == "blockdev-del" {
            let name = call.arguments["node-name"].as_str().unwrap();
            // The length of a file of a set, or of one that has a name, as an error.
            let sets = call.descriptors.sets();
            let file = match sets.open(Path::new(name), OFlags::RDONLY)? {
                Some(file) => file,
                None => call.descriptors.take(name)?,
            };
            let length = std::fs::File::from(file).metadata().unwrap().len();
            return Err(QmpError::generic(format!("{length} bytes")));
        }
        let command = Schema::with_further().command(call.name).unwrap();
        match &command.returns {
            None => Ok(json!({})),
            Some(Type::List(_)) => Ok(json!([])),
            Some(_) => Err(QmpError::generic("There is nothing here")),
        }
    }
}

impl Handler for Small {
    fn execute<'a>(&'a self, call: Call<'a>) -> Executing<'a> {
        Box::pin(async move { self.call(&call) })
    }
}

/// A server that runs until a client says `quit`.
pub struct Served {
    _dir: tempfile::TempDir,
    pub path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub fn new(options: ServerOptions) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = Listener::unix(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let server = Server::new(Schema::with_further(), options);
            let handler = Rc::new(Small {
                handle: server.handle(),
                calls: RefCell::default(),
            });
            let queue = Queue::new(Backend::Auto).unwrap();
            queue.block_on(server.serve(handler, vec![listener], Vec::new()));
        });
        Served {
            _dir: dir,
            path,
            thread: Some(thread),
        }
    }

    pub fn connect(&self) -> Raw {
        Raw::connect(&self.path).unwrap()
    }

    /// A client that has negotiated.
    pub fn negotiated(&self) -> Raw {
        let mut client = self.connect();
        client.line();
        assert_eq!(
            client.ask("{'execute':'qmp_capabilities'}"),
            "{\"return\": {}}"
        );
        client
    }

    /// Has the server end, and waits for that.
    pub fn quit(self, client: &mut Client) {
        client.execute("quit", json!({})).unwrap();
        self.end();
    }

    /// Waits until the server has ended.
    pub fn end(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A client that sends bytes and receives lines.
pub struct Raw {
    pub stream: UnixStream,
    received: Vec<u8>,
}

impl Raw {
    pub fn connect(path: &Path) -> io::Result<Raw> {
        let stream = UnixStream::connect(path)?;
        // Longer than any answer takes; a test that waits in vain ends.
        let timeout = Some(Duration::from_secs(20));
        stream.set_read_timeout(timeout).unwrap();
        Ok(Raw {
            stream,
            received: Vec::new(),
        })
    }

    pub fn send(&mut self, text: &str) {
        self.try_send(text).unwrap();
    }

    pub fn try_send(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(text.as_bytes())
    }

    /// Sends the beginning of a text, as much as the connection takes now.
    pub fn try_send_some(&mut self, text: &str) -> Option<usize> {
        self.stream.write(text.as_bytes()).ok()
    }

    /// The next line, without its end; empty at the end of the connection.
    pub fn line(&mut self) -> String {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return String::from_utf8(line).unwrap().trim_end().to_string();
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return String::new(),
                Ok(got) => self.received.extend_from_slice(&bytes[..got]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return String::new(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Sends a line, and returns the next one.
    pub fn ask(&mut self, text: &str) -> String {
        // In one piece: a server may act on a whole object before its line ends, and leave.
        self.send(&format!("{text}\n"));
        self.line()
    }
}
