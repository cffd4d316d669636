//! Answers to `GET /metrics` over HTTP/1.1, one request a connection.
//!
//! Left out: everything that a collector of figures does not need: other methods and paths,
//! bodies, connections that stay. A client gets [`PATIENCE`] and [`HEAD_MAX`] bytes for its
//! request; [`CLIENTS_MAX`] are served at a time.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use cowslip_queue::{Buf, BufMut, Listener, Stream, sleep, spawn};
use futures_util::future::select;

/// Longest head of a request.
const HEAD_MAX: usize = 8 << 10;
/// Time for a request and its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Clients at a time; further ones wait to be accepted.
const CLIENTS_MAX: usize = 16;
/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// The figures at the moment of a request.
pub type Figures = Rc<dyn Fn() -> String>;

/// Answers clients for ever.
pub async fn serve(listener: Listener, figures: Figures) {
    let clients: Rc<Cell<usize>> = Rc::default();
    loop {
        while clients.get() >= CLIENTS_MAX {
            sleep(RETRY).await;
        }
        let Ok(stream) = listener.accept().await else {
            sleep(RETRY).await;
            continue;
        };
        clients.set(clients.get() + 1);
        let (clients, figures) = (Rc::clone(&clients), Rc::clone(&figures));
        spawn(async move {
            let answered = pin!(answer(&stream, &figures));
            select(answered, pin!(sleep(PATIENCE))).await;
            stream.shutdown();
            clients.set(clients.get() - 1);
        });
    }
}

async fn answer(stream: &Stream, figures: &Figures) {
    let head = match head(stream).await {
        Head::Whole(head) => head,
        Head::TooLong => return send(stream, &reply("431 Request Header Fields Too Large")).await,
        Head::Broken => return,
    };
    let text = match asked(&head) {
        Asked::Figures => whole("200 OK", &figures(), Body::Sent),
        Asked::Head => whole("200 OK", &figures(), Body::LeftOut),
        Asked::NotFound => reply("404 Not Found"),
        Asked::OtherMethod => reply("405 Method Not Allowed"),
        Asked::Nonsense => reply("400 Bad Request"),
    };
    send(stream, &text).await;
}

/// The head of a request.
enum Head {
    Whole(Vec<u8>),
    TooLong,
    /// The connection has ended before it.
    Broken,
}

async fn head(stream: &Stream) -> Head {
    let mut head = Vec::new();
    let mut buf = BufMut::zeroed(1024);
    loop {
        let (got, back) = stream.read(buf).await;
        buf = back;
        match got {
            Ok(0) | Err(_) => return Head::Broken,
            Ok(count) => head.extend_from_slice(&buf[..count]),
        }
        let is_whole = |end: &[u8]| head.windows(end.len()).any(|window| window == end);
        if is_whole(b"\r\n\r\n") || is_whole(b"\n\n") {
            return Head::Whole(head);
        }
        if head.len() > HEAD_MAX {
            return Head::TooLong;
        }
    }
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Figures,
    /// The same without the text.
    Head,
    NotFound,
    OtherMethod,
    Nonsense,
}

fn asked(head: &[u8]) -> Asked {
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else {
        return Asked::Nonsense;
    };
    let words: Vec<&str> = line.trim_end().split(' ').collect();
    let [method, target, version] = words[..] else {
        return Asked::Nonsense;
    };
    if !version.starts_with("HTTP/1.") {
        return Asked::Nonsense;
    }
    let path = target.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET", "/metrics") => Asked::Figures,
        ("HEAD", "/metrics") => Asked::Head,
        ("GET" | "HEAD", _) => Asked::NotFound,
        _ => Asked::OtherMethod,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Sent,
    LeftOut,
}

fn whole(status: &str, body: &str, is_sent: Body) -> String {
    let length = body.len();
    let body = match is_sent {
        Body::Sent => body,
        Body::LeftOut => "",
    };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

fn reply(status: &str) -> String {
    whole(status, &format!("{status}\n"), Body::Sent)
}

async fn send(stream: &Stream, text: &str) {
    // A client that has left needs no answer.
    drop(stream.write_all(vec![Buf::copy_of(text.as_bytes())]).await);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        for (head, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Asked::Figures),
            ("GET /metrics?a=b HTTP/1.0\n\n", Asked::Figures),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", Asked::Head),
            ("GET / HTTP/1.1\r\n\r\n", Asked::NotFound),
            ("POST /metrics HTTP/1.1\r\n\r\n", Asked::OtherMethod),
            ("GET /metrics\r\n\r\n", Asked::Nonsense),
            ("GET /metrics SPDY/3\r\n\r\n", Asked::Nonsense),
            ("{\"execute\": \"quit\"}\n\n", Asked::Nonsense),
            ("\r\n\r\n", Asked::Nonsense),
        ] {
            assert_eq!(asked(head.as_bytes()), expected, "{head}");
        }
        assert_eq!(asked(b"GET /\xff HTTP/1.1\r\n\r\n"), Asked::Nonsense);
    }

    #[test]
    fn an_answer_says_how_long_it_is() {
        let text = whole("200 OK", "a 1\n", Body::Sent);
        assert!(text.contains("\r\nContent-Length: 4\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\na 1\n"), "{text}");
        let text = whole("200 OK", "a 1\n", Body::LeftOut);
        assert!(text.contains("\r\nContent-Length: 4\r\n") && text.ends_with("\r\n\r\n"));
    }
}
