//! [`Export`]: a node as clients have it.
//!
//! An export has a disk of its own ([`LiveDisk`]) in front of its node's, which goes to another
//! node at a snapshot or at the end of a job.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use cowslip::disk::ReadOnlyDisk;
use cowslip::{Disk, Image};
use cowslip_graph::LiveDisk;
use cowslip_nbd::ServerHandle;
use cowslip_qmp::QmpError;

use super::bitmap::InUse;
use super::nodes::Node;
use super::shown::Shown;
use super::wait::Flag;
use super::words::refused;

/// A node for clients.
pub struct Export {
    /// Its name for commands.
    pub id: String,
    /// The protocol.
    pub kind: &'static str,
    node: RefCell<Rc<Node>>,
    port: Arc<LiveDisk>,
    is_writable: bool,
    /// The image of the node, for what shows its chain.
    image: Arc<ImageOf>,
    /// Bitmaps that clients see.
    _bitmaps: Vec<InUse>,
    /// It is being removed.
    pub is_ending: Cell<bool>,
    /// The way to its clients.
    pub way: Way,
}

/// The way to the clients of an export.
pub enum Way {
    /// An export of the NBD server, by its name there.
    Nbd(String),
    /// A transport of its own.
    Own {
        /// The socket or the file.
        path: PathBuf,
        /// Asks it to end.
        stop: Box<dyn Fn()>,
        /// Lets clients know of another size.
        inform: Box<dyn Fn()>,
        /// It has ended.
        ended: Rc<Flag>,
    },
}

impl Export {
    /// An export of a node, whose disk is `port`.
    pub fn new(
        (id, kind): (String, &'static str),
        (node, port): (Rc<Node>, Arc<LiveDisk>),
        (is_writable, way): (bool, Way),
        (image, bitmaps): (Arc<ImageOf>, Vec<InUse>),
    ) -> Export {
        Export {
            id,
            kind,
            node: RefCell::new(node),
            port,
            is_writable,
            image,
            _bitmaps: bitmaps,
            is_ending: Cell::new(false),
            way,
        }
    }

    /// The node that clients use.
    pub fn node(&self) -> Rc<Node> {
        Rc::clone(&self.node.borrow())
    }

    /// The disk of its clients.
    pub fn port(&self) -> &Arc<LiveDisk> {
        &self.port
    }

    /// Whether clients may write.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The name by which clients find it: of the export, or the path of a socket or a file.
    pub fn name(&self) -> String {
        match &self.way {
            Way::Nbd(name) => name.clone(),
            Way::Own { path, .. } => path.display().to_string(),
        }
    }

    /// Lets clients know that the disk has another size.
    pub fn inform(&self) {
        if let Way::Own { inform, .. } = &self.way {
            inform();
        }
    }

    /// Has clients use another node from now on; their requests are held back.
    pub fn moved_to(&self, node: &Rc<Node>) -> Arc<dyn Disk> {
        self.node.replace(Rc::clone(node));
        self.image.follow(&node.shown);
        disk_of(node, self.is_writable)
    }
}

/// The image of the node that clients use, whichever that is; for other threads, too.
pub struct ImageOf(Mutex<Arc<Shown>>);

impl ImageOf {
    /// That of a node.
    pub fn new(node: &Node) -> Arc<ImageOf> {
        Arc::new(ImageOf(Mutex::new(Arc::clone(&node.shown))))
    }

    /// The image, now.
    pub fn get(&self) -> Arc<Image> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get()
    }

    fn follow(&self, shown: &Arc<Shown>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(shown);
    }
}

/// The disk of a node for an export.
pub fn disk_of(node: &Node, is_writable: bool) -> Arc<dyn Disk> {
    let live: Arc<dyn Disk> = Arc::clone(&node.live) as _;
    match is_writable {
        true => live,
        false => Arc::new(ReadOnlyDisk(live)),
    }
}

/// The NBD server, while it runs.
pub struct Running {
    /// Its handle.
    pub handle: ServerHandle,
    /// It has ended.
    pub ended: Rc<Flag>,
}

/// All exports, the last one first, and the NBD server.
#[derive(Default)]
pub struct Exports {
    list: RefCell<Vec<Rc<Export>>>,
    /// The NBD server, while it runs.
    pub server: RefCell<Option<Running>>,
}

impl Exports {
    /// All of them.
    pub fn all(&self) -> Vec<Rc<Export>> {
        self.list.borrow().clone()
    }

    /// Adds one.
    pub fn add(&self, export: Export) {
        self.list.borrow_mut().insert(0, Rc::new(export));
    }

    /// Takes one out.
    pub fn remove(&self, export: &Rc<Export>) {
        let is_other = |other: &Rc<Export>| !Rc::ptr_eq(other, export);
        self.list.borrow_mut().retain(is_other);
    }

    /// The export of this ID.
    pub fn find(&self, id: &str) -> Option<Rc<Export>> {
        self.list.borrow().iter().find(|it| it.id == id).cloned()
    }

    /// Those whose clients use a node.
    pub fn of(&self, node: &Rc<Node>) -> Vec<Rc<Export>> {
        let uses = |it: &&Rc<Export>| Rc::ptr_eq(&it.node(), node);
        self.list.borrow().iter().filter(uses).cloned().collect()
    }

    /// The NBD server.
    ///
    /// # Errors
    /// It does not run.
    pub fn nbd(&self) -> Result<ServerHandle, QmpError> {
        match &*self.server.borrow() {
            Some(running) => Ok(running.handle.clone()),
            None => Err(refused("NBD server not running")),
        }
    }
}
