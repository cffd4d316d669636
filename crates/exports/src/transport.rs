//! [`Transport`]: a protocol by which clients reach a disk, such as NBD.
//!
//! The protocol itself is a crate that serves a [`Disk`]. Its file here declares its options, reads
//! what a command line or a daemon says of it (`registry.rs` has a line for it), and makes the
//! endpoint that clients connect to. A server (`service.rs`) runs any
//! number of transports over one image, in this order:
//!
//! 1. [`Transport::listen`], when the image is open and locked,
//! 2. [`Endpoint::rights`], when all files are open; then the sandbox closes,
//! 3. [`Endpoint::serve`], until all endpoints have ended; then the image is closed,
//! 4. the names that they have made, such as those of sockets, are removed.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cowslip::{Disk, Image};
use cowslip_console::error::CommandError;
use cowslip_queue::Event;

use super::log::Log;
use super::sandbox::Rights;
use super::socket_name::Ownership;

/// Work on the thread of the server's queue.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The names that an endpoint has made: dropping them removes them.
pub type Names = Option<Box<dyn Name>>;

/// A name in a directory that vanishes when it is dropped.
pub trait Name {
    /// Leaves it to a successor, if that uses it too.
    fn leave(self: Box<Self>);
}

/// A protocol, with its options.
pub trait Transport {
    /// Whether another server was, or is, where this one will listen. If that one was killed, the
    /// system releases its locks a little later. What it has left in the way is cleared.
    ///
    /// # Errors
    /// That cannot be cleared.
    fn has_predecessor(&self, log: &Log) -> Result<bool, CommandError> {
        let _nothing_to_report = log;
        Ok(false)
    }

    /// The socket or the file by which clients find it, if it has one.
    fn path(&self) -> Option<PathBuf> {
        self.door()
    }

    /// The socket beside which a server listens for its successor, if that can take over from it
    /// (`handover.rs`).
    fn door(&self) -> Option<PathBuf> {
        None
    }

    /// Options that a successor must have as well. `None`: there cannot be a successor.
    fn terms(&self) -> Option<serde_json::Value> {
        None
    }

    /// The device that clients see, which a successor must show as well, by the names of options:
    /// an object, or null.
    fn shown(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Makes an endpoint of the parts of another process, which is at rest.
    ///
    /// # Errors
    /// The parts do not fit the options, or the image.
    fn take_over<'a>(
        &'a self,
        _served: &'a Served,
        _part: Part,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        let text = "this transport cannot be handed over";
        Box::pin(std::future::ready(Err(CommandError::new(text.to_string()))))
    }

    /// Makes an endpoint, to which clients can connect from now on. They wait until it serves.
    ///
    /// # Errors
    /// An address that cannot be listened on; options that do not fit the image.
    fn listen<'a>(
        &'a self,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>>;
}

/// An address that clients can connect to.
pub trait Endpoint: 'static {
    /// Rights that it needs beyond those of answering requests, until it has ended.
    fn rights(&self) -> Rights;

    /// A function that asks the endpoint to stop, before or while it serves: it accepts no more
    /// requests, and ends when those that were started have completed.
    fn stopper(&self) -> Box<dyn Fn()>;

    /// A function that lets clients know that the disk has another size; by default they find out
    /// when they look.
    fn informer(&self) -> Box<dyn Fn()> {
        Box::new(|| ())
    }

    /// Serves until it is stopped, or ends by itself as its options say. Returns its names, which
    /// are removed once the image is closed.
    fn serve(self: Box<Self>) -> LocalFuture<'static, Names>;

    /// A function that asks the endpoint to come to rest, with all requests completed that it has
    /// taken. `None`: it cannot.
    fn rester(&self) -> Option<Box<dyn Fn()>> {
        None
    }

    /// Serves until it is stopped, ends by itself, or has come to rest.
    fn serve_or_rest(self: Box<Self>) -> LocalFuture<'static, Outcome> {
        Box::pin(async move { Outcome::Ended(self.serve().await) })
    }
}

/// How an endpoint has ended its work.
pub enum Outcome {
    /// For good.
    Ended(Names),
    /// Another process can go on with it, or this one.
    AtRest(Box<dyn AtRest>),
}

/// An endpoint that has come to rest.
pub trait AtRest {
    /// State for another process.
    ///
    /// # Errors
    /// The system's refusal of a copy of a descriptor.
    fn part(&self) -> io::Result<Part>;

    /// Goes on in this process, over an image that was opened again.
    ///
    /// # Errors
    /// The image does not fit any more.
    fn go_on<'a>(
        self: Box<Self>,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>>;

    /// Leaves the name of the socket to the other process.
    fn leave(self: Box<Self>);
}

/// State of an endpoint on its way to another process.
pub struct Part {
    /// Its description.
    pub state: serde_json::Value,
    /// Descriptors that the description refers to by their numbers.
    pub descriptors: Vec<OwnedFd>,
    /// Whether its socket's name is the receiver's to remove.
    pub ownership: Ownership,
}

/// An image that is served.
pub struct Served {
    /// The disk that clients see: the image's, or the part of it that follows `offset`.
    pub disk: Arc<dyn Disk>,
    /// The image, for what a disk does not know: layers and bitmaps.
    pub image: Arc<Image>,
    /// The first byte of the image that clients see.
    pub offset: u64,
    /// The image's file, as the user named it.
    pub filename: String,
    /// Whether one transport alone serves the image.
    pub is_alone: bool,
    /// Longest time for which threads poll before they sleep.
    pub poll: Duration,
    /// Signalled when a transport has changed the size of the disk: the others are informed.
    pub resized: Event,
    /// The place for events.
    pub log: Log,
}
