//! A web server of the tests: objects in memory, with the faults that servers and networks have, a
//! link of limited speed, and a record of the requests.
//!
//! It serves `GET` and `HEAD` with one range, `If-Match` and `If-Unmodified-Since` (RFC 9110).
//! Under `/BUCKET/NAME` it is also as much of an S3 server as reading needs, and as uploads of
//! whole objects and of parts do (`web/s3.rs`). Signatures are not looked at.

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

mod s3;

/// Bytes sent at a time over a limited link.
const PACKET: usize = 16 << 10;
/// Bytes of a request's head.
const HEAD_MAX: usize = 64 << 10;

/// An object.
#[derive(Clone, Debug)]
pub struct WebObject {
    /// The bytes.
    pub bytes: Arc<Vec<u8>>,
    /// The ETag with its quotes, if the server says one.
    pub e_tag: Option<String>,
    /// The header `Last-Modified`, if the server says one.
    pub last_modified: Option<String>,
}

impl WebObject {
    /// An object with an ETag.
    pub fn tagged(bytes: Vec<u8>, tag: &str) -> WebObject {
        WebObject {
            bytes: Arc::new(bytes),
            e_tag: Some(format!("\"{tag}\"")),
            last_modified: Some("Thu, 26 Nov 2026 10:00:00 GMT".to_string()),
        }
    }
}

/// A fault of one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebFault {
    /// None.
    Nothing,
    /// This status instead, with this text.
    Status(u16, String),
    /// The connection ends before the answer.
    Reset,
    /// The connection ends after this many bytes of the body.
    CutAfter(usize),
    /// Nothing is sent for this long.
    Silence(Duration),
    /// The range begins this many bytes later than was asked for.
    Shifted(u64),
    /// The object is said to be this much longer.
    WrongLength(u64),
    /// The whole object, with status 200.
    WholeObject,
    /// The body is this much longer than its range, and the head says so.
    LongBody(usize),
    /// The first byte of the body is another.
    OtherBytes,
    /// The body goes on without end.
    EndlessBody,
    /// A status of success without any of the headers that say what it is.
    Bare,
    /// The ETag of another version.
    OtherTag(String),
    /// The request is done, and the connection ends before the answer.
    LostAnswer,
    /// An error whose text never ends.
    EndlessError,
    /// The object is at this URL.
    Redirect(String),
    /// Credentials are wanted first, as this header says.
    Challenge(String),
}

/// A request that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebRequest {
    /// The method.
    pub method: String,
    /// The path with its query.
    pub target: String,
    /// The range that was asked for; ends are exclusive.
    pub range: Option<Range<u64>>,
    /// All headers, with names in small letters.
    pub headers: HashMap<String, String>,
    /// Bytes of the body that were sent.
    pub sent: u64,
}

/// Properties of the link to all clients together.
#[derive(Clone, Copy, Debug, Default)]
pub struct WebLink {
    /// Time before each answer.
    pub latency: Duration,
    /// Bytes a second; 0 is no limit.
    pub bytes_per_second: u64,
}

type Judge = Box<dyn FnMut(&WebRequest) -> WebFault + Send>;

#[derive(Default)]
struct Shared {
    objects: Mutex<HashMap<String, WebObject>>,
    uploads: Mutex<s3::Uploads>,
    faults: Mutex<VecDeque<WebFault>>,
    judge: Mutex<Option<Judge>>,
    requests: Mutex<Vec<WebRequest>>,
    link: Mutex<WebLink>,
    /// The time at which the link has sent all that it was given.
    free_at: Mutex<Option<Instant>>,
    is_down: AtomicBool,
    ends: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server that runs until it is dropped.
pub struct WebServer {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl WebServer {
    /// Starts a server on a port of its own.
    ///
    /// # Errors
    /// There is no port or thread for it.
    pub fn start() -> io::Result<WebServer> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let served = Arc::clone(&shared);
        std::thread::Builder::new().spawn(move || {
            for stream in listener.incoming() {
                if served.ends.load(Ordering::Acquire) {
                    return;
                }
                let Ok(stream) = stream else {
                    continue;
                };
                let served = Arc::clone(&served);
                // A client that goes away is no failure of the server.
                std::thread::spawn(move || drop(serve(&stream, &served)));
            }
        })?;
        Ok(WebServer { shared, address })
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Puts an object under a path.
    pub fn put(&self, path: &str, object: WebObject) {
        lock(&self.shared.objects).insert(path.to_string(), object);
    }

    /// The bytes of an object, if there is one.
    pub fn object(&self, path: &str) -> Option<Arc<Vec<u8>>> {
        let objects = lock(&self.shared.objects);
        objects.get(path).map(|object| Arc::clone(&object.bytes))
    }

    /// Uploads that were begun, and neither completed nor given up.
    pub fn uploads(&self) -> usize {
        lock(&self.shared.uploads).open()
    }

    /// Makes faults of the next answers, in this order.
    pub fn fail(&self, faults: impl IntoIterator<Item = WebFault>) {
        lock(&self.shared.faults).extend(faults);
    }

    /// Faults that have not happened.
    pub fn faults_left(&self) -> usize {
        lock(&self.shared.faults).len()
    }

    /// Asks for the fault of each answer, where none is queued.
    pub fn judge(&self, judge: impl FnMut(&WebRequest) -> WebFault + Send + 'static) {
        *lock(&self.shared.judge) = Some(Box::new(judge));
    }

    /// Limits the link.
    pub fn limit(&self, link: WebLink) {
        *lock(&self.shared.link) = link;
    }

    /// Ends all connections as they come, or serves them again.
    pub fn set_down(&self, is_down: bool) {
        self.shared.is_down.store(is_down, Ordering::Release);
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<WebRequest> {
        lock(&self.shared.requests).clone()
    }

    /// Bytes of bodies that were sent so far.
    pub fn sent(&self) -> u64 {
        let requests = lock(&self.shared.requests);
        requests.iter().map(|request| request.sent).sum()
    }

    /// Forgets the requests.
    pub fn forget(&self) {
        lock(&self.shared.requests).clear();
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
    }
}

/// Serves a connection until it ends.
fn serve(stream: &TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    loop {
        let Some(request) = read_request(&mut reader)? else {
            return Ok(());
        };
        let content = read_content(&mut reader, &request)?;
        if shared.is_down.load(Ordering::Acquire) || shared.ends.load(Ordering::Acquire) {
            return Ok(());
        }
        let queued = lock(&shared.faults).pop_front();
        let fault = match (queued, lock(&shared.judge).as_mut()) {
            (Some(fault), _) => fault,
            (None, Some(judge)) => judge(&request),
            (None, None) => WebFault::Nothing,
        };
        let mut sent = Instant::now() + lock(&shared.link).latency;
        sleep_until(sent);
        let (head, body) = match answer((&request, content), &fault, shared) {
            Some(answer) => answer,
            None => {
                lock(&shared.requests).push(request);
                return Ok(());
            }
        };
        let length = match fault {
            WebFault::CutAfter(length) => length.min(body.len()),
            _ => body.len(),
        };
        // Noted before the client can know of it.
        let number = {
            let mut requests = lock(&shared.requests);
            requests.push(WebRequest {
                sent: length as u64,
                ..request
            });
            requests.len()
        };
        let mut writer = stream;
        writer.write_all(head.as_bytes())?;
        if fault == WebFault::EndlessError {
            loop {
                writer.write_all(&[b'x'; PACKET])?;
            }
        }
        for packet in body[..length].chunks(PACKET) {
            sent = pass_link(packet.len(), sent, shared);
            writer.write_all(packet)?;
        }
        if fault == WebFault::EndlessBody {
            loop {
                writer.write_all(&[b'x'; PACKET])?;
            }
        }
        if length < body.len() || number == 0 {
            return Ok(());
        }
    }
}

/// Waits until the link has sent this much, which it was given at a moment; returns when that was.
/// Moments are the link's: where this thread wakes too late, what follows is not late for that.
fn pass_link(bytes: usize, given: Instant, shared: &Shared) -> Instant {
    let rate = lock(&shared.link).bytes_per_second;
    if rate == 0 {
        return given;
    }
    let takes = Duration::from_secs_f64(bytes as f64 / rate as f64);
    let until = {
        let mut free_at = lock(&shared.free_at);
        let until = free_at.map_or(given, |at| at.max(given)) + takes;
        *free_at = Some(until);
        until
    };
    sleep_until(until);
    until
}

fn sleep_until(moment: Instant) {
    std::thread::sleep(moment.saturating_duration_since(Instant::now()));
}

fn read_request(reader: &mut BufReader<&TcpStream>) -> io::Result<Option<WebRequest>> {
    let mut lines = Vec::new();
    let mut total = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        total += line.len();
        let line = line.trim_end();
        if total > HEAD_MAX {
            return Ok(None);
        }
        if line.is_empty() {
            break;
        }
        lines.push(line.to_string());
    }
    let mut lines = lines.into_iter();
    let first = lines.next().unwrap_or_default();
    let mut words = first.split(' ').map(str::to_string);
    let (method, target) = (words.next(), words.next());
    let headers: HashMap<String, String> = lines
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_string()))
        })
        .collect();
    let range = headers.get("range").and_then(|value| {
        let (start, end) = value.strip_prefix("bytes=")?.split_once('-')?;
        Some(start.parse().ok()?..end.parse::<u64>().ok()? + 1)
    });
    Ok(Some(WebRequest {
        method: method.unwrap_or_default(),
        target: target.unwrap_or_default(),
        range,
        headers,
        sent: 0,
    }))
}

/// The body of a request.
fn read_content(reader: &mut BufReader<&TcpStream>, request: &WebRequest) -> io::Result<Vec<u8>> {
    let len = request.headers.get("content-length");
    let len = len.and_then(|len| len.parse().ok()).unwrap_or(0);
    let mut content = Vec::new();
    reader.take(len).read_to_end(&mut content)?;
    Ok(content)
}

/// Head and body of the answer; nothing if the connection ends instead.
fn answer(
    (request, content): (&WebRequest, Vec<u8>),
    fault: &WebFault,
    shared: &Shared,
) -> Option<(String, Vec<u8>)> {
    let plain = |status: u16, text: &str| {
        let head = format!(
            "HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n",
            text.len()
        );
        // What follows the head of such an answer would be taken for the next one.
        let body = match request.method.as_str() {
            "HEAD" => "",
            _ => text,
        };
        Some((head, body.as_bytes().to_vec()))
    };
    match fault {
        WebFault::Reset => return None,
        WebFault::Silence(time) => std::thread::sleep(*time),
        WebFault::Status(status, text) => return plain(*status, text),
        WebFault::Redirect(url) => {
            let head = format!("HTTP/1.1 302 x\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n");
            return Some((head, Vec::new()));
        }
        WebFault::Challenge(header) => {
            let head = format!(
                "HTTP/1.1 401 x\r\nWWW-Authenticate: {header}\r\nContent-Length: 0\r\n\r\n"
            );
            return Some((head, Vec::new()));
        }
        WebFault::EndlessError => {
            let head = "HTTP/1.1 500 x\r\nConnection: close\r\n\r\n".to_string();
            return Some((head, Vec::new()));
        }
        _ => {}
    }
    if !["GET", "HEAD"].contains(&request.method.as_str()) {
        let changed = s3::change(request, content, shared);
        return Some(changed).filter(|_| *fault != WebFault::LostAnswer);
    }
    let path = request.target.split('?').next().unwrap_or_default();
    let Some(object) = lock(&shared.objects).get(path).cloned() else {
        return plain(404, "no such object");
    };
    let asked_for = request.headers.get("if-match");
    if asked_for.is_some_and(|tag| Some(tag) != object.e_tag.as_ref()) {
        return plain(412, "");
    }
    let since = request.headers.get("if-unmodified-since");
    // Dates are compared as texts: the tests have but two.
    if let (Some(since), Some(changed)) = (since, &object.last_modified)
        && changed.split(' ').nth(4) > since.split(' ').nth(4)
    {
        return plain(412, "");
    }
    let len = object.bytes.len() as u64;
    let range = request
        .range
        .clone()
        .filter(|_| *fault != WebFault::WholeObject);
    let (status, shown, body) = match range {
        Some(range) if range.start >= len => return plain(416, ""),
        Some(range) => {
            let shift = match fault {
                WebFault::Shifted(bytes) => *bytes,
                _ => 0,
            };
            let end = range.end.min(len);
            let bytes = &object.bytes[range.start as usize..end as usize];
            (
                206,
                Some((range.start + shift, end + shift)),
                bytes.to_vec(),
            )
        }
        None => (200, None, object.bytes.to_vec()),
    };
    Some(respond(request, fault, &object, (status, shown, body)))
}

type Part = (u16, Option<(u64, u64)>, Vec<u8>);

fn respond(
    request: &WebRequest,
    fault: &WebFault,
    object: &WebObject,
    (status, shown, mut body): Part,
) -> (String, Vec<u8>) {
    if let WebFault::LongBody(more) = fault {
        body.resize(body.len() + more, 0xbd);
    }
    if let (WebFault::OtherBytes, Some(first)) = (fault, body.first_mut()) {
        *first ^= 1;
    }
    let length = match fault {
        WebFault::EndlessBody => 1 << 50,
        _ => body.len() as u64,
    };
    let mut head = format!("HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n");
    if *fault != WebFault::Bare {
        // QEMU and nbdkit look for it.
        head += "Accept-Ranges: bytes\r\n";
        if let Some((start, end)) = shown {
            let more = match fault {
                WebFault::WrongLength(more) => *more,
                _ => 0,
            };
            let len = object.bytes.len() as u64 + more;
            head += &format!("Content-Range: bytes {start}-{}/{len}\r\n", end - 1);
        }
        let tag = match fault {
            WebFault::OtherTag(tag) => Some(tag),
            _ => object.e_tag.as_ref(),
        };
        if let Some(tag) = tag {
            head += &format!("ETag: {tag}\r\n");
        }
        if let Some(changed) = &object.last_modified {
            head += &format!("Last-Modified: {changed}\r\n");
        }
    }
    head += "\r\n";
    if request.method == "HEAD" {
        body.clear();
    }
    (head, body)
}
