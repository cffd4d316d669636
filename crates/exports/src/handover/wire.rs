//! Messages between a server and its successor: a length, a number of descriptors, and JSON; then
//! the descriptors, some with each byte that follows.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::time::Duration;

use cowslip_queue::{Stream, passing};
use futures_util::future::{Either, select};
use serde::{Deserialize, Serialize};

use super::{State, Terms, VERSION};

/// Longest message, and most descriptors of one: 256 rings and 509 regions of memory are below.
const BYTES_MAX: usize = 1 << 20;
const DESCRIPTORS_MAX: usize = 2048;

/// Messages, in the order in which they are sent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Message {
    /// The successor: may I?
    Hello { version: u32, terms: Terms },
    /// The server: prepare yourself.
    Welcome,
    /// The server: no, for this reason. The last message.
    Refused(String),
    /// The successor: I am prepared.
    Prepared,
    /// The server: my queues are at rest, and my session with the image has ended.
    State(Box<State>),
    /// The successor: I can serve.
    Ready,
    /// The successor: I cannot, for this reason. The last message.
    Failed(String),
    /// The server: serve. From now on I do not. The last message.
    Go,
    /// The server: I go on myself, for this reason. The last message.
    Back(String),
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// Sends a message with descriptors.
pub(super) async fn send(
    stream: &Stream,
    message: &Message,
    descriptors: &[OwnedFd],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        return Err(invalid("a message that is too long"));
    }
    let mut bytes = Vec::with_capacity(8 + text.len());
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend((descriptors.len() as u32).to_le_bytes());
    bytes.extend(text);
    stream.send_with_descriptors(&bytes, &[]).await?;
    for batch in descriptors.chunks(passing::DESCRIPTORS_MAX) {
        let batch: Vec<BorrowedFd<'_>> = batch.iter().map(AsFd::as_fd).collect();
        stream.send_with_descriptors(&[0], &batch).await?;
    }
    Ok(())
}

/// Receives a message with its descriptors; none at the end of the connection.
pub(super) async fn receive(stream: &Stream) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let mut lengths = [0; 8];
    let Some(()) = fill(stream, &mut lengths).await? else {
        return Ok(None);
    };
    let [len, count] = [0, 4].map(|at| {
        let field = [0, 1, 2, 3].map(|byte| lengths[at + byte]);
        u32::from_le_bytes(field) as usize
    });
    if len > BYTES_MAX || count > DESCRIPTORS_MAX {
        return Err(invalid("a message that is too long"));
    }
    let mut text = vec![0; len];
    let Some(()) = fill(stream, &mut text).await? else {
        return Ok(None);
    };
    let mut descriptors = Vec::new();
    while descriptors.len() < count {
        let mut batch = Vec::new();
        let got = stream
            .receive_with_descriptors(&mut [0], &mut batch)
            .await?;
        if got == 0 {
            return Ok(None);
        }
        if batch.is_empty() {
            return Err(invalid("descriptors are missing"));
        }
        descriptors.append(&mut batch);
    }
    Ok(Some((parse(&text)?, descriptors)))
}

/// Another version may have another form, but says which it is.
fn parse(text: &[u8]) -> io::Result<Message> {
    let value: serde_json::Value = serde_json::from_slice(text)?;
    let version = &value["hello"]["version"];
    if !version.is_null() && version.as_u64() != Some(u64::from(VERSION)) {
        return Err(invalid(format!(
            "its version of the handover is {version}, and this server's is {VERSION}"
        )));
    }
    Ok(serde_json::from_value(value)?)
}

/// Fills a slice; none if the connection ends before.
async fn fill(stream: &Stream, to: &mut [u8]) -> io::Result<Option<()>> {
    let mut none = Vec::new();
    let got = stream.receive_with_descriptors(to, &mut none).await?;
    Ok((got == to.len()).then_some(()))
}

/// Waits, but not for ever.
pub(super) async fn within<T>(
    limit: Duration,
    wait: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let (wait, sleep) = (pin!(wait), pin!(cowslip_queue::sleep(limit)));
    match select(wait, sleep).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer within {} s", limit.as_secs()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use cowslip_queue::{Backend, Queue};

    use super::*;

    #[test]
    fn messages_arrive_with_all_their_descriptors() {
        let (one, two) = UnixStream::pair().unwrap();
        let (one, two) = (Stream::from_fd(one.into()), Stream::from_fd(two.into()));
        let file = tempfile::tempfile().unwrap();
        let copy = |_| file.as_fd().try_clone_to_owned().unwrap();
        let descriptors: Vec<OwnedFd> = (0..35).map(copy).collect();
        let queue = Queue::new(Backend::Auto).unwrap();
        queue.block_on(async {
            let message = Message::Back("why".to_string());
            send(&one, &message, &descriptors).await.unwrap();
            send(&one, &Message::Go, &[]).await.unwrap();
            let (message, passed) = receive(&two).await.unwrap().unwrap();
            assert!(matches!(message, Message::Back(why) if why == "why"));
            assert_eq!(passed.len(), 35);
            let (message, passed) = receive(&two).await.unwrap().unwrap();
            assert!(matches!(message, Message::Go) && passed.is_empty());
            drop(one);
            assert!(receive(&two).await.unwrap().is_none());
        });
    }

    #[test]
    fn another_version_is_refused_whatever_its_form() {
        let error = parse(br#"{"hello": {"version": 9, "new": 1}}"#).unwrap_err();
        assert!(error.to_string().contains("version of the handover is 9"));
        assert!(parse(b"{").is_err() && parse(br#"{"hello": {}}"#).is_err());
    }
}
