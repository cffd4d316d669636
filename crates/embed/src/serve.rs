//! A disk of an open image as an export of an NBD server, in a thread that the caller asks for.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use cowslip::{Error, Image, Result};
use cowslip_nbd::{Server, ServerHandle, ServerOptions};
use cowslip_queue::{Backend, Listener, PreparedQueue};

/// A server of one disk on a Unix socket, until it is stopped or dropped.
pub struct Serving {
    handle: ServerHandle,
    thread: Option<JoinHandle<()>>,
    /// Absolute: the process may go to another directory.
    socket: PathBuf,
    /// Device and inode of the socket.
    made: Option<(u64, u64)>,
}

impl std::fmt::Debug for Serving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Serving").field(&self.socket).finish()
    }
}

impl Serving {
    /// Serves an image, under the empty name, on a socket that is made.
    ///
    /// # Errors
    /// The socket cannot be made; the system refuses the thread or its descriptors.
    pub fn start(image: Arc<Image>, socket: &Path) -> Result<Serving> {
        let failed = |error: io::Error| {
            let context = format!("Could not serve on '{}'", socket.display());
            Error::io(context, error)
        };
        let prepared = PreparedQueue::new(Backend::Auto).map_err(failed)?;
        let mut server = Server::new(ServerOptions::default());
        server.add_export("", image);
        let handle = server.handle();
        let (started, outcome) = std::sync::mpsc::channel();
        let path = std::path::absolute(socket).map_err(failed)?;
        let work = move || {
            let begun = prepared.start().and_then(|queue| {
                let listener = Listener::unix(&path)?;
                Ok((queue, listener, identity(&path)))
            });
            match begun {
                Err(error) => drop(started.send(Err(error))),
                Ok((queue, listener, made)) => {
                    drop(started.send(Ok((path, made))));
                    queue.block_on(server.serve(vec![listener]));
                }
            }
        };
        let thread = std::thread::Builder::new().name("cowslip-nbd".to_string());
        let thread = thread.spawn(work).map_err(failed)?;
        let outcome = outcome.recv();
        let (socket, made) = outcome
            .map_err(|_| failed(io::ErrorKind::BrokenPipe.into()))?
            .map_err(failed)?;
        Ok(Serving {
            handle,
            thread: Some(thread),
            socket,
            made,
        })
    }

    /// Clients that are connected now.
    pub fn clients(&self) -> usize {
        self.handle.connections()
    }

    /// Stops reading requests, and returns when those that were begun have ended and their clients
    /// are disconnected.
    pub fn stop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            // It has nothing to say.
            drop(thread.join());
            // Nobody listens there any more; what another program has put there stays.
            if self.made.is_some() && identity(&self.socket) == self.made {
                drop(std::fs::remove_file(&self.socket));
            }
        }
    }
}

/// Device and inode of what has this name itself.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop();
    }
}
