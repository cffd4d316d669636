//! [`World`]: the disks of a simulated host, and what the steps of a change do to them.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::{BackingChoice, CopyOnRead, Format};
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::{Disk, Error, Image, Job, Result};
use cowslip_graph::{Drained, Held, Host, LiveDisk, Turn};

use crate::model::{Model, WriteId};
use crate::remembered::Content;
use crate::rng::Rng;
use crate::trace::Trace;

use super::figures::Figures;
use super::images::{Files, Style};
use super::kept::{Kept, Past};
use super::marks::Bitmap;

/// A disk with an image of its own, over the image of the disk below.
#[derive(Debug)]
pub(crate) struct Node {
    pub file: String,
    pub format: Format,
    pub live: Arc<LiveDisk>,
    image: RefCell<Arc<Image>>,
    backing: RefCell<Option<Rc<Node>>>,
    is_written: Cell<bool>,
    writers: Cell<usize>,
}

/// A guest's disk.
pub(crate) struct Port {
    pub number: u64,
    /// The disk in front of the node's.
    pub disk: Arc<LiveDisk>,
    pub node: RefCell<Rc<Node>>,
    pub model: Rc<RefCell<Model>>,
    /// Images that show the disk as well.
    pub also: RefCell<Vec<(String, Format)>>,
    /// Changes since the last backup.
    pub bitmap: RefCell<Option<Bitmap>>,
    pub kept: Rc<RefCell<Vec<Kept>>>,
    /// Checkpoints whose copies are complete, the oldest first.
    pub pasts: Rc<RefCell<Vec<Past>>>,
    /// Checkpoints that an image has to have: image and bitmap.
    pub alive: Rc<RefCell<Vec<(String, String)>>>,
    /// Requests of guests that are under way.
    pub requests: Cell<usize>,
    /// A script changes it.
    pub is_busy: Cell<bool>,
    /// Guests make no request.
    pub is_quiet: Cell<bool>,
    /// The script has ended, and guests may.
    pub has_ended: Cell<bool>,
}

impl Port {
    /// The files of the images each of which shows the disk.
    pub fn shown_by(&self) -> Vec<(String, Format)> {
        let node = self.node.borrow();
        let mut files = vec![(node.file.clone(), node.format)];
        let also = self.also.borrow();
        files.extend(also.iter().filter(|also| also.0 != node.file).cloned());
        files
    }

    /// Notes what a copy has to hold from now on.
    pub fn keep(&self, target: &Node, content: Content) {
        let mut kept = self.kept.borrow_mut();
        kept.push(Kept {
            file: target.file.clone(),
            format: target.format,
            size: size_of(target),
            content,
        });
        if kept.len() > 3 {
            kept.remove(0);
        }
    }
}

/// Flushes during a step and after it.
const STEP_FLUSHES: u64 = 10;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// All disks of a session.
pub(crate) struct World {
    pub files: Files,
    pub ports: Vec<Rc<Port>>,
    pub nodes: RefCell<Vec<Rc<Node>>>,
    /// The right to change the graph.
    pub turn: Turn<()>,
    pub spawned: RefCell<Vec<(String, Task)>>,
    pub failure: RefCell<Option<String>>,
    pub figures: Rc<RefCell<Figures>>,
    pub next: Rc<RefCell<u32>>,
    pub trace: Trace,
    /// Flushes to come that belong to a step.
    pub aimed: Cell<u64>,
}

impl Node {
    /// A disk that is no part of the graph, and is written.
    pub fn apart((file, format): (&str, Format), image: Image) -> Node {
        let image = Arc::new(image);
        Node {
            file: file.to_string(),
            format,
            live: LiveDisk::new(file, Arc::clone(&image) as _),
            image: RefCell::new(image),
            backing: RefCell::default(),
            is_written: Cell::new(true),
            writers: Cell::new(1),
        }
    }

    pub fn image(&self) -> Arc<Image> {
        Arc::clone(&self.image.borrow())
    }

    pub fn backing(&self) -> Option<Rc<Node>> {
        self.backing.borrow().clone()
    }

    pub fn chain(self: &Rc<Node>) -> Vec<Rc<Node>> {
        let below = |node: &Rc<Node>| node.backing();
        std::iter::successors(Some(Rc::clone(self)), below).collect()
    }

    fn alone(&self) -> Result<Image> {
        self.image().above(&Default::default())
    }

    /// Notes that a client came from the node below, or one that the image was frozen.
    pub fn count(&self, is_written: bool, writers: usize) {
        self.is_written.set(is_written);
        self.writers.set(writers);
    }

    /// Closes its own image.
    pub async fn close(&self) -> Result<()> {
        self.alone()?.close().await
    }
}

impl World {
    /// Notes the first failure.
    pub fn fail(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
    }

    /// Notes something about a disk.
    pub fn note(&self, port: &Port, text: impl FnOnce() -> String) {
        let number = port.number;
        self.trace.line(|| format!("disk {number}: {}", text()));
    }

    /// An error that no operation of the disk that was to fail explains is a failure.
    pub fn explain(&self, what: &str, error: &Error) {
        let (faults, _) = self.files.disk.delivered();
        if faults == 0 && self.files.disk.has_power() {
            self.fail(format!("{what} failed without a fault: {error}"));
        }
    }

    /// Notes a step that failed because an operation was to.
    pub fn note_outcome(&self, what: &str, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.explain(what, &error);
        }
    }

    pub fn request_id(&self) -> WriteId {
        let mut next = self.next.borrow_mut();
        *next += 1;
        *next
    }

    pub fn spawn(&self, name: &str, task: impl Future<Output = ()> + 'static) {
        let task = (name.to_string(), Box::pin(task) as Task);
        self.spawned.borrow_mut().push(task);
    }

    /// Opens an image as a node over another one.
    pub async fn add(
        &self,
        (file, format): (&str, Format),
        is_written: bool,
        backing: Option<Rc<Node>>,
    ) -> Result<Rc<Node>> {
        let opening = self
            .files
            .open((file, format), is_written, BackingChoice::None);
        let alone = opening.await?;
        let image = match &backing {
            Some(below) => alone.above(&below.image().stack())?,
            None => alone,
        };
        let node = Rc::new(Node {
            backing: RefCell::new(backing),
            ..Node::apart((file, format), image)
        });
        node.count(is_written, usize::from(is_written));
        self.nodes.borrow_mut().push(Rc::clone(&node));
        Ok(node)
    }

    /// Takes nodes out that nothing uses, and closes their images.
    pub async fn remove(&self, nodes: &[Rc<Node>]) {
        for node in nodes {
            let is_other = |other: &Rc<Node>| !Rc::ptr_eq(other, node);
            self.nodes.borrow_mut().retain(is_other);
            if let Err(error) = node.close().await {
                self.explain(&format!("closing {}", node.file), &error);
            }
        }
    }

    fn with_above(&self, node: &Rc<Node>) -> Vec<Rc<Node>> {
        let mut found = vec![Rc::clone(node)];
        let mut at = 0;
        while let Some(below) = found.get(at).cloned() {
            at += 1;
            let is_above = |other: &&Rc<Node>| {
                let backing = other.backing();
                backing.is_some_and(|backing| Rc::ptr_eq(&backing, &below))
            };
            let nodes = self.nodes.borrow();
            found.extend(nodes.iter().filter(is_above).cloned());
        }
        found
    }

    fn restack(&self, node: &Rc<Node>, held: &Held) -> Result<()> {
        for node in self.with_above(node) {
            let stack = node.backing().map(|below| below.image().stack());
            let image = node.image().above(&stack.unwrap_or_default())?;
            let image = Arc::new(image);
            node.image.replace(Arc::clone(&image));
            let drained = held.of(&node.live).expect("its requests are held back");
            drained.exchange(image);
        }
        Ok(())
    }

    /// Holds back the requests of these disks and their clients.
    pub async fn hold_all(&self, nodes: &[Rc<Node>]) -> Held {
        let mut held = Held::default();
        for node in nodes {
            held.clients.extend(self.hold_clients(node).await);
        }
        for node in nodes {
            held.disks.push(node.live.drain().await);
        }
        held
    }

    /// Has the clients of a disk that was frozen use the overlay that lies over it.
    pub fn move_up(&self, below: &Rc<Node>, overlay: &Rc<Node>, held: &Held) {
        below.count(false, 0);
        for port in self.ports_of(below) {
            let drained = held.of(&port.disk).expect("it was held back");
            port.node.replace(Rc::clone(overlay));
            port.also.borrow_mut().clear();
            port.bitmap.take();
            drained.exchange(Arc::clone(&overlay.live) as _);
        }
    }

    fn ports_of(&self, node: &Rc<Node>) -> Vec<Rc<Port>> {
        let uses = |port: &&Rc<Port>| Rc::ptr_eq(&port.node.borrow(), node);
        self.ports.iter().filter(uses).cloned().collect()
    }

    async fn open_for(&self, node: &Rc<Node>, is_written: bool) -> Result<()> {
        let held = Held {
            clients: Vec::new(),
            disks: self.hold(node).await,
        };
        self.open(node, is_written, &held).await
    }

    /// Makes an image, and opens it as a node, which nobody writes yet.
    pub async fn new_node(
        &self,
        (size, backing): (u64, Option<Rc<Node>>),
        rng: &mut Rng,
    ) -> Option<Rc<Node>> {
        let format = match backing.is_none() && rng.chance(15) {
            true => Format::Raw,
            false => Format::Qcow2,
        };
        let file = self.files.new_name("image");
        let named = backing.as_ref().map(|node| (&*node.file, node.format));
        let style = Style::draw(rng);
        let making = self.files.make((&file, format), (size, style), named);
        if let Err(error) = making.await {
            self.explain("making an image", &error);
            return None;
        }
        match self.add((&file, format), false, backing).await {
            Ok(node) => Some(node),
            Err(error) => {
                self.explain("opening an image", &error);
                None
            }
        }
    }

    /// Opens an image that is no part of the graph, to be written by a copy.
    ///
    /// # Errors
    /// Of the image.
    pub async fn open_target(&self, file: &str) -> Result<Rc<Node>> {
        let named = (file, Format::Qcow2);
        let image = self.files.open(named, true, BackingChoice::AsNamed);
        Ok(Rc::new(Node::apart(named, image.await?)))
    }
}

impl Host for World {
    type Node = Rc<Node>;
    type Error = Error;

    fn failed(error: Error) -> Error {
        error
    }

    fn live(&self, node: &Rc<Node>) -> Arc<LiveDisk> {
        Arc::clone(&node.live)
    }

    fn is_written(&self, node: &Rc<Node>) -> bool {
        node.is_written.get()
    }

    async fn hold_clients(&self, node: &Rc<Node>) -> Vec<Drained> {
        let mut held = Vec::new();
        for port in self.ports_of(node) {
            held.push(port.disk.drain().await);
        }
        held
    }

    async fn hold(&self, node: &Rc<Node>) -> Vec<Drained> {
        let mut held = Vec::new();
        for node in self.with_above(node) {
            held.push(node.live.drain().await);
        }
        held
    }

    async fn hold_above(&self, node: &Rc<Node>) -> Vec<Drained> {
        let mut held = Vec::new();
        for node in self.with_above(node).drain(1..) {
            held.push(node.live.drain().await);
        }
        held
    }

    async fn enter(&self, node: &Rc<Node>) -> Result<()> {
        if !node.is_written.get() {
            self.open_for(node, true).await?;
        }
        node.writers.set(node.writers.get() + 1);
        Ok(())
    }

    async fn leave(&self, node: &Rc<Node>) -> Result<()> {
        node.writers.set(node.writers.get() - 1);
        match node.is_written.get() && node.writers.get() == 0 {
            true => self.open_for(node, false).await,
            false => Ok(()),
        }
    }

    async fn resize(&self, node: &Rc<Node>, size: u64) -> Result<()> {
        node.image().resize(size).await
    }

    fn populate(
        &self,
        node: &Rc<Node>,
        range: Range<u64>,
        layers: u32,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let image = node.image();
        async move { image.populate(range, CopyOnRead::DownTo(layers)).await }
    }

    async fn freeze(&self, node: &Rc<Node>) -> Result<()> {
        self.aimed.set(STEP_FLUSHES);
        node.image().freeze().await
    }

    async fn name_backing(&self, node: &Rc<Node>, base: Option<&Rc<Node>>) -> Result<()> {
        self.aimed.set(STEP_FLUSHES);
        let backing = match base {
            None => BackingFile::None,
            Some(base) => BackingFile::File {
                name: base.file.clone(),
                format: base.format.name().to_string(),
            },
        };
        let amendment = Amendment::of_backing(backing);
        node.image().amend(&amendment, &Job::default()).await
    }

    async fn forget_bitmaps(&self, node: &Rc<Node>) -> Result<()> {
        for port in &self.ports {
            let mut alive = port.alive.borrow_mut();
            alive.retain(|(image, _)| *image != node.file);
        }
        let image = node.image();
        for info in image.bitmaps().await? {
            image
                .change_bitmap(&info.name, &BitmapChange::Remove)
                .await?;
        }
        Ok(())
    }

    async fn empty(&self, node: &Rc<Node>) -> Result<()> {
        self.aimed.set(STEP_FLUSHES);
        // The base has all that the image has.
        for port in self.ports_of(node) {
            let base = node.backing().map(|base| (base.file.clone(), base.format));
            port.also.borrow_mut().extend(base);
        }
        node.image().empty().await
    }

    async fn open(&self, node: &Rc<Node>, is_written: bool, held: &Held) -> Result<()> {
        let named = (&*node.file, node.format);
        let alone = node.alone()?;
        let before = node.is_written.get();
        let error = match self.files.reopen(&alone, named, is_written).await {
            Ok(image) => {
                node.is_written.set(is_written);
                node.image.replace(Arc::new(image));
                return self.restack(node, held);
            }
            Err(error) => error,
        };
        if let Ok(image) = self.files.reopen(&alone, named, before).await {
            node.image.replace(Arc::new(image));
            self.restack(node, held)?;
        }
        // Else it answers reads as it did.
        Err(error)
    }

    fn put_over(&self, node: &Rc<Node>, base: Option<&Rc<Node>>, held: &Held) -> Result<()> {
        let before = node.backing.replace(base.cloned());
        let stacked = self.restack(node, held);
        if stacked.is_err() {
            node.backing.replace(before);
            self.restack(node, held)?;
        }
        stacked
    }

    async fn move_clients(&self, from: &Rc<Node>, to: &Rc<Node>, held: Held) -> Result<()> {
        self.aimed.set(STEP_FLUSHES);
        let ports = self.ports_of(from);
        for port in &ports {
            self.enter(to).await?;
            let drained = held.of(&port.disk).expect("it was held back");
            port.node.replace(Rc::clone(to));
            let is_over = from.chain().iter().any(|node| Rc::ptr_eq(node, to));
            port.also.borrow_mut().clear();
            if is_over {
                // The image is empty, and shows the disk that its base shows.
                port.also
                    .borrow_mut()
                    .push((from.file.clone(), from.format));
            }
            port.bitmap.take();
            drained.exchange(Arc::clone(&to.live) as _);
        }
        drop(held);
        for _ in ports {
            self.leave(from).await?;
        }
        Ok(())
    }
}

/// The size of a node's disk.
pub(crate) fn size_of(node: &Node) -> u64 {
    node.live.size()
}
