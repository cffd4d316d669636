//! Servers without FUA, and without flushes: an export as a file keeps the promises of a file with
//! the requests that its server has.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use crate::support::queue;
use cowslip_block::file::{BlockFile, Durability};
use cowslip_block::options::{Options, split};
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::transmission::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::remote::{ExportName, open};
use cowslip_queue::{Backend, Buf, BufMut};
use tempfile::TempDir;

const SIZE: u64 = 1 << 20;

/// A server of one export that answers every request with success. It hangs up when it is asked to
/// read [`FATAL`], once.
struct Plain {
    directory: TempDir,
    requests: Arc<Mutex<Vec<(Command, CommandFlags)>>>,
}

/// The place whose first read ends the connection.
const FATAL: u64 = 8192;

impl Plain {
    fn start(flags: TransmissionFlags) -> Plain {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        // It ends with the test's process.
        std::thread::spawn(move || {
            let mut has_hung_up = false;
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                shake_hands(&mut stream, flags);
                while let Some(request) = next_request(&mut stream) {
                    let is_read = request.command == Command::Read;
                    if is_read && request.offset == FATAL && !has_hung_up {
                        has_hung_up = true;
                        break;
                    }
                    seen.lock().unwrap().push((request.command, request.flags));
                    let mut reply = encode_simple_reply(request.cookie, None).to_vec();
                    if is_read {
                        reply.resize(reply.len() + request.len as usize, 0);
                    }
                    stream.write_all(&reply).unwrap();
                }
            }
        });
        Plain {
            directory,
            requests,
        }
    }

    async fn open(&self) -> Arc<dyn BlockFile> {
        let socket = self.directory.path().join("s");
        let options = format!("path={},reconnect-delay=60", socket.display());
        let mut options = Options::new(split(&options).unwrap());
        let name = ExportName::of_options(&mut options).unwrap();
        open(&name, None, "export", true).await.unwrap()
    }

    fn requests(&self) -> Vec<(Command, CommandFlags)> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

/// The oldest handshake of all: the name of the export, and no replies to options.
fn shake_hands(stream: &mut UnixStream, flags: TransmissionFlags) {
    let greeting = encode_greeting(HandshakeFlags::empty());
    stream.write_all(&greeting).unwrap();
    let mut option = [0; CLIENT_FLAGS_BYTES + OPTION_HEADER_BYTES];
    stream.read_exact(&mut option).unwrap();
    let reply = encode_export_name_reply(SIZE, flags);
    stream.write_all(&reply).unwrap();
    stream.write_all(&[0; EXPORT_NAME_PADDING_BYTES]).unwrap();
}

/// The next request, without its payload; `None` at the end.
fn next_request(stream: &mut UnixStream) -> Option<Request> {
    let mut header = [0; REQUEST_BYTES];
    stream.read_exact(&mut header).ok()?;
    let request = Request::decode(&header).unwrap();
    if request.command == Command::Write {
        let mut payload = vec![0; request.len as usize];
        stream.read_exact(&mut payload).unwrap();
    }
    (request.command != Command::Disconnect).then_some(request)
}

fn some_bytes() -> Buf {
    Buf::from(vec![7; 4096])
}

#[test]
fn a_durable_write_to_a_server_without_fua_is_followed_by_a_flush() {
    let plain = CommandFlags::empty();
    let fua = CommandFlags::FUA;
    let cases = [
        (
            TransmissionFlags::SEND_FLUSH,
            vec![(Command::Write, plain), (Command::Flush, plain)],
        ),
        (
            TransmissionFlags::SEND_FLUSH.with(TransmissionFlags::SEND_FUA),
            vec![(Command::Write, fua)],
        ),
        // Such a server has no cache that it may lose.
        (TransmissionFlags::empty(), vec![(Command::Write, plain)]),
    ];
    for (flags, expected) in cases {
        let server = Plain::start(TransmissionFlags::HAS_FLAGS.with(flags));
        queue(Backend::Threads).unwrap().block_on(async {
            let file = server.open().await;
            let written = file.write(0, some_bytes().into(), Durability::Durable);
            written.await.unwrap();
        });
        assert_eq!(server.requests(), expected, "{flags:?}");
    }
}

#[test]
fn a_flush_reports_lost_writes_whatever_requests_the_server_has() {
    for flags in [TransmissionFlags::SEND_FLUSH, TransmissionFlags::empty()] {
        for durability in [Durability::Cached, Durability::Durable] {
            let server = Plain::start(TransmissionFlags::HAS_FLAGS.with(flags));
            queue(Backend::Threads).unwrap().block_on(async {
                let file = server.open().await;
                let written = file.write(0, some_bytes().into(), Durability::Cached);
                written.await.unwrap();
                let (read, _) = file.read(FATAL, BufMut::zeroed(512).into()).await;
                read.unwrap();
                // The loss is reported by whatever makes durable: a flush, or a durable write that
                // takes one.
                let lost = match durability {
                    Durability::Cached => file.flush().await,
                    Durability::Durable => file.write(0, some_bytes().into(), durability).await,
                };
                let lost = lost.unwrap_err().to_string();
                assert!(lost.contains("the connection was lost"), "{lost}");
                file.flush().await.unwrap();
            });
        }
    }
}
