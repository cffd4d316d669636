//! The server that hands over.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip::Image;
use cowslip_queue::{Event, Listener, Stream};

use super::super::log::Log;
use super::super::socket_name::SocketName;
use super::super::transport::AtRest;
use super::wire::{self, Message, within};
use super::{State, Terms};

/// How long a successor may take to introduce itself; to prepare itself, while this server serves;
/// and to open the image, while none does.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
const PREPARED_WITHIN: Duration = Duration::from_secs(30);
const READY_WITHIN: Duration = Duration::from_secs(5);

/// The socket on which a server waits for its successor.
pub struct Door {
    listener: Listener,
    name: SocketName,
}

impl Door {
    /// Opens the door of a server that has the name of its own socket.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn open(path: &Path) -> io::Result<Door> {
        let (listener, name) = SocketName::bind_beside(path)?;
        Ok(Door { listener, name })
    }

    /// The door of another server, which leaves it to this one.
    ///
    /// # Errors
    /// It is no socket.
    pub fn adopt(listener: OwnedFd, name: SocketName) -> io::Result<Door> {
        let listener = Listener::from_listening(listener)?;
        Ok(Door { listener, name })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        self.name.path()
    }

    /// Leaves the name to the successor.
    pub fn leave(self) {
        self.name.leave();
    }
}

/// A function that brings an endpoint to rest.
type Rester = Box<dyn Fn()>;

/// The place where the door's task and the server's meet.
pub struct Desk {
    terms: Terms,
    log: Log,
    /// The image that is served.
    image: RefCell<Arc<Image>>,
    /// Functions that bring the endpoints to rest. `None` of one that cannot.
    resters: RefCell<Vec<Option<Rester>>>,
    /// The successor, while it waits for the server to come to rest.
    successor: RefCell<Option<Stream>>,
    is_ending: Cell<bool>,
    /// Signalled when the server goes on.
    goes_on: Event,
}

impl Desk {
    /// A desk of this server.
    ///
    /// # Errors
    /// The system's refusal of an event.
    pub fn new(terms: Terms, log: Log, image: &Arc<Image>) -> io::Result<Rc<Desk>> {
        Ok(Rc::new(Desk {
            terms,
            log,
            image: RefCell::new(Arc::clone(image)),
            resters: RefCell::default(),
            successor: RefCell::default(),
            is_ending: Cell::new(false),
            goes_on: Event::new()?,
        }))
    }

    /// Serves on, or for the first time, over this image and these endpoints.
    pub fn serve(&self, image: &Arc<Image>, resters: Vec<Option<Rester>>) {
        *self.image.borrow_mut() = Arc::clone(image);
        *self.resters.borrow_mut() = resters;
        // An event of ours can always be signalled.
        drop(self.goes_on.signal());
    }

    /// From now on nobody takes over.
    pub fn end(&self) {
        self.is_ending.set(true);
    }

    /// Answers those who come to the door, one after the other.
    pub fn watch(self: &Rc<Self>, door: &Door) {
        let (desk, listener) = (Rc::clone(self), door.listener.clone());
        cowslip_queue::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok(stream) => desk.meet(stream).await,
                    // Such as too many open files: it may pass.
                    Err(_) => cowslip_queue::sleep(Duration::from_millis(100)).await,
                }
            }
        });
    }

    /// Hears a successor, and has the endpoints come to rest for it.
    async fn meet(&self, stream: Stream) {
        if let Err(why) = self.admit(&stream).await {
            self.log.write(format_args!("handover refused: {why}"));
            drop(wire::send(&stream, &Message::Refused(why), &[]).await);
            return;
        }
        drop(self.goes_on_taken());
        *self.successor.borrow_mut() = Some(stream);
        for rester in self.resters.borrow().iter().flatten() {
            rester();
        }
        drop(self.goes_on.wait().await);
    }

    /// Forgets that the server has gone on before.
    fn goes_on_taken(&self) -> io::Result<()> {
        match rustix::io::read(self.goes_on.as_fd(), &mut [0u8; 8]) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    async fn admit(&self, stream: &Stream) -> Result<(), String> {
        let words = |error: io::Error| error.to_string();
        // The mode of the socket says the same, but a process may have come before it was set.
        let peer = rustix::net::sockopt::socket_peercred(stream);
        let peer = peer.map_err(|error| words(error.into()))?;
        if peer.uid != rustix::process::geteuid() {
            return Err("it belongs to another user".to_string());
        }
        let hello = within(HELLO_WITHIN, wire::receive(stream));
        match hello.await.map_err(words)? {
            Some((Message::Hello { terms, .. }, _)) => {
                if let Some(why) = self.terms.refusal(&terms) {
                    return Err(why);
                }
            }
            Some(_) => return Err("an unexpected message".to_string()),
            None => return Err("it has left".to_string()),
        }
        if self.resters.borrow().iter().any(Option::is_none) {
            return Err("a transport of the running server cannot be handed over".to_string());
        }
        if self.is_ending.get() {
            return Err("the running server is ending".to_string());
        }
        let image = Arc::clone(&self.image.borrow());
        if !image.is_on_host_files() {
            return Err(
                "an image that is stored in another image cannot be handed over".to_string(),
            );
        }
        let welcomed = wire::send(stream, &Message::Welcome, &[]);
        welcomed.await.map_err(words)?;
        let prepared = within(PREPARED_WITHIN, wire::receive(stream));
        match prepared.await.map_err(words)? {
            Some((Message::Prepared, _)) => {}
            _ => return Err("it has left".to_string()),
        }
        // Most of what is to be written is written while the guest is still served.
        let flushed = image.flush().await;
        flushed.map_err(|error| error.to_string())
    }

    /// Hands over: the image, and endpoints at rest. Returns whether a successor serves now; if
    /// not, this server is to go on.
    pub async fn hand_over(&self, parts: &[Box<dyn AtRest>], door: &Door) -> bool {
        let Some(stream) = self.successor.borrow_mut().take() else {
            return false;
        };
        let begun = Instant::now();
        match self.try_to_hand_over(&stream, parts, door).await {
            Ok(closed) => {
                let [closed, whole] = [closed - begun, begun.elapsed()];
                self.log.write(format_args!(
                    "handed over to another server within {:.1} ms, of which closing the image \
                     took {:.1}",
                    whole.as_secs_f64() * 1e3,
                    closed.as_secs_f64() * 1e3
                ));
                true
            }
            Err(why) => {
                drop(wire::send(&stream, &Message::Back(why.clone()), &[]).await);
                self.log.write(format_args!(
                    "the handover failed, this server goes on: {why}"
                ));
                false
            }
        }
    }

    /// Returns when the image was closed.
    async fn try_to_hand_over(
        &self,
        stream: &Stream,
        resting: &[Box<dyn AtRest>],
        door: &Door,
    ) -> Result<Instant, String> {
        let words = |error: io::Error| error.to_string();
        let image = Arc::clone(&self.image.borrow());
        let layers = image.layers();
        let claims = image.end_session().await;
        let claims = claims.map_err(|error| format!("the image could not be closed: {error}"))?;
        let closed = Instant::now();
        let (mut parts, mut descriptors) = (Vec::new(), Vec::new());
        for endpoint in resting {
            let part = endpoint.part().map_err(words)?;
            parts.push((part.state, part.descriptors.len()));
            descriptors.extend(part.descriptors);
        }
        let listener = door.listener.as_fd().try_clone_to_owned();
        descriptors.push(listener.map_err(words)?);
        parts.push((serde_json::Value::Null, 1));
        let state = State {
            claims: State::claims_of(&claims),
            size: image.size(),
            format: layers[0].format.name().to_string(),
            parts,
        };
        let exchange = async {
            wire::send(stream, &Message::State(Box::new(state)), &descriptors).await?;
            wire::receive(stream).await
        };
        match within(READY_WITHIN, exchange).await.map_err(words)? {
            Some((Message::Ready, _)) => {}
            Some((Message::Failed(why), _)) => return Err(why),
            Some(_) => return Err("an unexpected answer".to_string()),
            None => return Err("the other server has ended".to_string()),
        }
        let go = wire::send(stream, &Message::Go, &[]);
        go.await.map_err(words)?;
        Ok(closed)
    }
}
