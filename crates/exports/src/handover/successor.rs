//! The server that takes over.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cowslip::Image;
use cowslip::error::system_words;
use cowslip::file::{Claim, FileId};
use cowslip_console::error::CommandError;
use cowslip_queue::Stream;

use super::super::service::{RELEASE_MAX, RELEASE_PAUSE};
use super::super::socket_name::{Ownership, SocketName};
use super::super::transport::{Endpoint, Part, Served, Transport};
use super::predecessor::Door;
use super::wire::{self, Message};
use super::{State, Terms, VERSION};

/// State that another server has handed over. Until [`Taken::finish`] that one can go on.
pub struct Taken {
    stream: Stream,
    state: State,
    parts: Vec<Part>,
    /// Names of sockets become this server's at the end.
    ownership: Ownership,
}

fn failed(why: &str) -> CommandError {
    CommandError::new(format!(
        "Could not take over from the running server: {why}"
    ))
}

impl Taken {
    /// Has the server behind a door hand over. `None` if that server ends before it does so: then
    /// there is none any more.
    ///
    /// # Errors
    /// There is no server; it refuses.
    pub async fn from(door: &Path, terms: &Terms) -> Result<Option<Taken>, CommandError> {
        let stream = Stream::connect_unix(door).await;
        let stream = stream.map_err(|error| {
            let (door, why) = (door.display(), system_words(&error));
            failed(&format!("'{door}': {why}"))
        })?;
        let hello = Message::Hello {
            version: VERSION,
            terms: terms.clone(),
        };
        let answer = exchange(&stream, &hello).await?;
        match answer {
            Some((Message::Welcome, _)) => {}
            Some((Message::Refused(why), _)) => return Err(failed(&why)),
            Some(_) => return Err(failed("an unexpected answer")),
            None => return Ok(None),
        }
        match exchange(&stream, &Message::Prepared).await? {
            Some((Message::State(state), descriptors)) => {
                let mut descriptors = descriptors.into_iter();
                let ownership = Ownership::default();
                let parts = state.parts.iter().map(|(state, count)| Part {
                    state: state.clone(),
                    descriptors: descriptors.by_ref().take(*count).collect(),
                    ownership: Arc::clone(&ownership),
                });
                let parts: Vec<Part> = parts.collect();
                Ok(Some(Taken {
                    stream,
                    state: *state,
                    parts,
                    ownership,
                }))
            }
            Some((Message::Back(why) | Message::Refused(why), _)) => Err(failed(&why)),
            Some(_) => Err(failed("an unexpected answer")),
            None => Ok(None),
        }
    }

    /// Claims on the image's files that the other server holds meanwhile.
    pub fn claims(&self) -> Vec<(FileId, Claim)> {
        self.state.claims()
    }

    /// Checks that the image is the one that was served.
    ///
    /// # Errors
    /// It has another size or format.
    pub fn check(&self, image: &Image) -> Result<(), CommandError> {
        let (size, format) = (image.size(), image.layers()[0].format);
        if (size, format.name()) != (self.state.size, self.state.format.as_str()) {
            let State {
                size: theirs,
                format: their_format,
                ..
            } = &self.state;
            return Err(failed(&format!(
                "it serves {theirs} bytes of format {their_format}, and this one would serve \
                 {size} of format {}",
                format.name()
            )));
        }
        Ok(())
    }

    /// Makes endpoints of what was handed over, and the door.
    ///
    /// # Errors
    /// A part does not fit.
    pub async fn endpoints(
        &mut self,
        transports: &[&dyn Transport],
        (served, door): (&Served, &Path),
    ) -> Result<(Vec<Box<dyn Endpoint>>, Door), CommandError> {
        let mut parts = std::mem::take(&mut self.parts).into_iter();
        let mut endpoints = Vec::new();
        for transport in transports {
            let part = parts.next().ok_or_else(|| failed("a part is missing"))?;
            let endpoint = transport.take_over(served, part).await;
            endpoints.push(endpoint.map_err(|error| failed(&error.to_string()))?);
        }
        let listener = parts.next().and_then(|mut part| part.descriptors.pop());
        let listener = listener.ok_or_else(|| failed("its door is missing"))?;
        let door = Door::adopt(listener, SocketName::adopt(door, &self.ownership));
        let door = door.map_err(|error| failed(&system_words(&error)))?;
        Ok((endpoints, door))
    }

    /// Lets the other server go on.
    pub async fn fail(&self, error: &CommandError) {
        // It goes on too if this process ends without a word.
        drop(wire::send(&self.stream, &Message::Failed(error.to_string()), &[]).await);
    }

    /// Says that this server can serve, and waits until it shall. Returns whether the other one has
    /// ended by itself meanwhile.
    ///
    /// # Errors
    /// The other server goes on.
    pub async fn finish(self, image: &Image) -> Result<bool, CommandError> {
        let sent = wire::send(&self.stream, &Message::Ready, &[]).await;
        let answer = match sent {
            Ok(()) => wire::receive(&self.stream).await,
            Err(error) => Err(error),
        };
        let is_alone = match answer {
            Ok(Some((Message::Go, _))) => false,
            Ok(Some((Message::Back(why), _))) => return Err(failed(&why)),
            Ok(Some(_)) => return Err(failed("an unexpected answer")),
            Ok(None) | Err(_) => {
                // Nobody says who serves. The other one holds its claims for as long as it could.
                has_let_go(image).await?;
                true
            }
        };
        self.ownership.store(true, Ordering::Relaxed);
        Ok(is_alone)
    }
}

/// Waits until the other server, which has left without a word, has lost its claims: its ring keeps
/// files until the system has ended it.
async fn has_let_go(image: &Image) -> Result<(), CommandError> {
    let begun = Instant::now();
    loop {
        match image.ask_others() {
            Ok(()) => return Ok(()),
            Err(error) if begun.elapsed() > RELEASE_MAX => {
                let why = error.to_string();
                return Err(failed(&format!(
                    "it says nothing, and has not ended: {why}"
                )));
            }
            Err(_) => cowslip_queue::sleep(RELEASE_PAUSE).await,
        }
    }
}

async fn exchange(
    stream: &Stream,
    message: &Message,
) -> Result<Option<(Message, Vec<std::os::fd::OwnedFd>)>, CommandError> {
    // A refusal may come before the message is read: it is looked for whatever becomes of that.
    drop(wire::send(stream, message, &[]).await);
    match wire::receive(stream).await {
        Ok(answer) => Ok(answer),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(None),
        Err(error) => Err(failed(&system_words(&error))),
    }
}
