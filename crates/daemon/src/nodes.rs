//! [`Nodes`]: the disks of a daemon by name, and which of them lies below which.
//!
//! A node has one image's own layer open, over the layers of the node below it. So a change below
//! gives all nodes above it new chains ([`Nodes::restack`]), and the layers themselves stay open.
//! A node is open for writing while a client or a job writes: as in QEMU, a disk that nobody writes
//! keeps other processes from nothing.
//!
//! Left out: nodes over the disk of another node by its name, but for backing files; what lies
//! below a format is described with it, or is the name of a protocol's node.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::{BackingChoice, CacheStatistics};
use cowslip::{Disk, Image};
use cowslip_cmdline::open;
use cowslip_graph::{DirtyMap, Drained, LiveDisk};
use cowslip_nodes::{
    Access, OpenSettings, Source, drivers, json, open_source, open_source_beside, reopen_source,
};
use cowslip_qmp::{FdSets, QmpError};
use serde_json::{Map, Value, json};

use super::given::Given;
use super::passed::Passed;
use super::shown::Shown;
use super::words::{failed, not_opened};

/// Longest name of a node, as in QEMU.
const NAME_MAX: usize = 31;

/// Options of a node, as they came.
pub type Options = Map<String, Value>;

type Adding<'a> = Pin<Box<dyn Future<Output = Result<Rc<Node>, QmpError>> + 'a>>;

/// How a node is opened.
pub struct Described {
    /// Its options, without the name.
    pub options: Options,
    /// The same, as the images and files that they describe.
    pub source: Source,
}

impl Described {
    /// That of these options.
    ///
    /// # Errors
    /// They describe nothing.
    pub fn of(options: Options) -> Result<Described, QmpError> {
        let text = Value::from(options.clone()).to_string();
        let pairs = json::pairs(&text).map_err(failed)?;
        let source = Source::of_pairs(pairs, 0, &drivers::standard());
        let mut source = source.map_err(failed)?;
        let filename = source.filename.clone();
        source.say_given(&filename);
        Ok(Described { options, source })
    }
}

/// A disk with a name.
pub struct Node {
    /// Its name.
    pub name: String,
    /// No command has added it by itself: it goes when nothing uses it any more.
    pub is_implicit: bool,
    /// Its disk, for all who use it.
    pub live: Arc<LiveDisk>,
    /// The bitmaps in memory that follow its changes.
    pub memory_bitmaps: RefCell<Vec<(String, Arc<DirtyMap>)>>,
    /// The disk that its clients see in the place of its image: a view of the node below.
    pub cover: RefCell<Option<Arc<dyn Disk>>>,
    /// Names of bitmaps that operations use.
    pub busy_bitmaps: RefCell<Vec<String>>,
    /// The kind of the job that keeps everybody from changing its place.
    pub job: RefCell<Option<String>>,
    /// The job changes what it shows, so that clients cannot come meanwhile.
    pub is_filled: Cell<bool>,
    described: RefCell<Rc<Described>>,
    settings: RefCell<OpenSettings>,
    /// The image, with its chain.
    pub shown: Arc<Shown>,
    backing: RefCell<Option<Rc<Node>>>,
    /// Nodes of protocols that it is over.
    files: Vec<Rc<Node>>,
    users: Cell<usize>,
    writers: Cell<usize>,
}

impl Node {
    /// The image, with its chain.
    pub fn image(&self) -> Arc<Image> {
        self.shown.get()
    }

    /// The node below.
    pub fn backing(&self) -> Option<Rc<Node>> {
        self.backing.borrow().clone()
    }

    /// How it is opened.
    pub fn described(&self) -> Rc<Described> {
        Rc::clone(&self.described.borrow())
    }

    /// Has it be opened in another way from the next time on. Returns the way so far.
    pub fn describe(&self, described: Rc<Described>) -> Rc<Described> {
        self.described.replace(described)
    }

    /// Whether it is never written.
    pub fn is_read_only(&self) -> bool {
        self.described().source.common.read_only
    }

    /// Whether clients or jobs write it.
    pub fn is_written(&self) -> bool {
        self.writers.get() > 0
    }

    /// Nodes of protocols that it is over.
    pub fn files(&self) -> &[Rc<Node>] {
        &self.files
    }

    /// The size of its disk in bytes.
    pub fn live_size(&self) -> u64 {
        self.image().size()
    }

    /// Whether its image is encrypted.
    pub fn is_encrypted(&self) -> bool {
        use cowslip::qcow2::CryptMethod;
        let layer = self.image().own_layer();
        let of_image = layer
            .header
            .is_some_and(|it| it.crypt_method != CryptMethod::None);
        of_image || layer.format == cowslip::image::Format::Luks
    }

    /// Whether clients or jobs use it.
    pub fn is_used(&self) -> bool {
        self.users.get() > 0
    }

    /// Whether its image is open for writing.
    pub fn access(&self) -> Access {
        self.settings.borrow().access
    }

    /// Whether its options name this object: it is opened again by them.
    pub fn needs_object(&self, id: &str) -> bool {
        let described = self.described();
        let mut waiting: Vec<&Value> = described.options.values().collect();
        while let Some(value) = waiting.pop() {
            match value {
                Value::String(text) if text == id => return true,
                Value::Object(members) => waiting.extend(members.values()),
                Value::Array(elements) => waiting.extend(elements),
                _ => {}
            }
        }
        false
    }

    /// The name of its driver.
    pub fn driver(&self) -> &'static str {
        self.image().layers()[0].format.name()
    }

    /// The file that its image is in.
    pub fn filename(&self) -> String {
        self.described().source.filename.clone()
    }

    /// The cache of the image's own tables, without those below.
    pub fn own_cache(&self) -> CacheStatistics {
        self.image().own_cache_statistics()
    }

    /// The image's own layer, without those below.
    ///
    /// # Errors
    /// Of the engine.
    pub fn alone(&self) -> Result<Image, QmpError> {
        self.image().above(&Default::default()).map_err(failed)
    }

    fn put(&self, image: Image) -> Arc<Image> {
        let image = Arc::new(image);
        self.shown.put(Arc::clone(&image));
        image
    }

    /// Has clients see its own chain again.
    pub async fn uncover(&self) {
        let held = self.live.drain().await;
        if self.cover.take().is_some() {
            held.exchange(self.image());
        }
    }

    /// The nodes of its chain, itself first.
    pub fn chain(self: &Rc<Node>) -> Vec<Rc<Node>> {
        let below = |node: &Rc<Node>| node.backing();
        std::iter::successors(Some(Rc::clone(self)), below).collect()
    }

    /// Refuses what a job, or a node above, keeps from being done.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn may_change(&self) -> Result<(), QmpError> {
        match &*self.job.borrow() {
            None => Ok(()),
            Some(job) => Err(QmpError::generic(format!(
                "Node '{}' is busy: block device is in use by block job: {job}",
                self.name
            ))),
        }
    }
}

/// All nodes, in the order in which they were added.
#[derive(Default)]
pub struct Nodes {
    list: RefCell<Vec<Rc<Node>>>,
    generated: Cell<u64>,
    /// Files that clients have passed.
    pub passed: RefCell<Option<Arc<FdSets>>>,
}

/// The place of a new node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Root,
    Below,
}

/// The node below a new one.
enum Below {
    AsNamed,
    Nothing,
    Node(Rc<Node>),
}

impl Nodes {
    /// All of them.
    pub fn all(&self) -> Vec<Rc<Node>> {
        self.list.borrow().clone()
    }

    /// The node of this name, if there is one.
    pub fn find(&self, name: &str) -> Option<Rc<Node>> {
        self.list
            .borrow()
            .iter()
            .find(|it| it.name == name)
            .cloned()
    }

    /// The node that another one refers to by this name.
    ///
    /// # Errors
    /// There is none.
    pub fn referred(&self, name: &str) -> Result<Rc<Node>, QmpError> {
        self.find(name).ok_or_else(|| {
            let text = format!("Cannot find device='{name}' nor node-name='{name}'");
            QmpError::generic(text)
        })
    }

    /// The node of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(&self, name: &str) -> Result<Rc<Node>, QmpError> {
        self.find(name).ok_or_else(|| {
            let text = format!("Cannot find device='' nor node-name='{name}'");
            QmpError::generic(text)
        })
    }

    /// The node of a command that names a device or a node. A daemon has no devices.
    ///
    /// # Errors
    /// There is none.
    pub fn of_device_or_name(&self, given: &Given) -> Result<Rc<Node>, QmpError> {
        let device = given.text("device").unwrap_or_default();
        let name = given.text("node-name").unwrap_or_default();
        self.find(name).ok_or_else(|| {
            let text = format!("Cannot find device='{device}' nor node-name='{name}'");
            QmpError::generic(text)
        })
    }

    /// The nodes right above one.
    pub fn parents(&self, node: &Rc<Node>) -> Vec<Rc<Node>> {
        let is_parent = |other: &&Rc<Node>| {
            let is_above = other
                .backing()
                .is_some_and(|below| Rc::ptr_eq(&below, node));
            is_above || other.files.iter().any(|file| Rc::ptr_eq(file, node))
        };
        self.list
            .borrow()
            .iter()
            .filter(is_parent)
            .cloned()
            .collect()
    }

    /// The nodes whose chains have this one: itself, and those above, each behind what is below it.
    pub fn with_above(&self, node: &Rc<Node>) -> Vec<Rc<Node>> {
        let mut found = vec![Rc::clone(node)];
        let mut at = 0;
        while let Some(below) = found.get(at).cloned() {
            at += 1;
            let is_above = |other: &&Rc<Node>| {
                other
                    .backing()
                    .is_some_and(|backing| Rc::ptr_eq(&backing, &below))
            };
            let above = self
                .list
                .borrow()
                .iter()
                .filter(is_above)
                .cloned()
                .collect::<Vec<_>>();
            found.extend(above);
        }
        found
    }

    /// Refuses a node that lies below another one.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn is_root(&self, node: &Rc<Node>) -> Result<(), QmpError> {
        match self.parents(node).first() {
            None => Ok(()),
            Some(parent) => Err(in_chain(node, parent)),
        }
    }

    fn generated_name(&self) -> String {
        loop {
            self.generated.set(self.generated.get() + 1);
            let name = format!("#block{:03}", self.generated.get());
            if self.find(&name).is_none() {
                return name;
            }
        }
    }

    fn name_for(&self, options: &mut Options, place: Place) -> Result<String, QmpError> {
        let name = match (options.remove("node-name"), place) {
            (Some(Value::String(name)), _) => name,
            (_, Place::Below) => return Ok(self.generated_name()),
            (_, Place::Root) => {
                let text = "'node-name' must be specified for the root node";
                return Err(QmpError::generic(text));
            }
        };
        if !is_well_formed(&name) {
            return Err(QmpError::generic(format!("Invalid node-name: '{name}'")));
        }
        if name.len() > NAME_MAX {
            return Err(QmpError::generic("Node name too long"));
        }
        match self.find(&name) {
            None => Ok(name),
            Some(_) => Err(QmpError::generic(format!(
                "Duplicate nodes with node-name='{name}'"
            ))),
        }
    }

    /// Adds a node, and those below it that its options describe.
    ///
    /// # Errors
    /// Its name; `Could not open 'x': why`. Nothing is added then.
    pub async fn add(&self, options: Options) -> Result<Rc<Node>, QmpError> {
        self.add_owned(options, Place::Root).await
    }

    /// The same of a node that goes when nothing uses it any more.
    ///
    /// # Errors
    /// As for [`Nodes::add`].
    pub async fn add_implicit(&self, options: Options) -> Result<Rc<Node>, QmpError> {
        self.add_owned(options, Place::Below).await
    }

    async fn add_owned(&self, options: Options, place: Place) -> Result<Rc<Node>, QmpError> {
        let before = self.all();
        let added = self.add_at(options, place).await;
        if added.is_err() {
            for node in self.all().into_iter().rev() {
                if !before.iter().any(|other| Rc::ptr_eq(other, &node)) {
                    // It was only read.
                    drop(self.take_out(&node).await);
                }
            }
        }
        added
    }

    fn add_at(&self, mut options: Options, place: Place) -> Adding<'_> {
        Box::pin(async move {
            let name = self.name_for(&mut options, place)?;
            let below = match options.remove("backing") {
                None => Below::AsNamed,
                Some(Value::String(name)) if !name.is_empty() => {
                    let found = self.referred(&name).map_err(|error| {
                        failed(format_args!("Could not open backing file: {error}"))
                    })?;
                    Below::Node(found)
                }
                Some(Value::Object(inner)) => Below::Node(self.add_at(inner, Place::Below).await?),
                Some(_) => Below::Nothing,
            };
            let mut files = Vec::new();
            for child in ["file", "data-file", "image"] {
                let node = match options.get(child) {
                    Some(Value::String(name)) => self.referred(name)?,
                    Some(Value::Object(inner)) if inner.contains_key("node-name") => {
                        self.add_at(inner.clone(), Place::Below).await?
                    }
                    _ => continue,
                };
                options.insert(child.to_string(), node.described().options.clone().into());
                files.push(node);
            }
            let node = self.open(name, (options, place), (below, files)).await?;
            Ok(node)
        })
    }

    async fn open(
        &self,
        name: String,
        (options, place): (Options, Place),
        (below, files): (Below, Vec<Rc<Node>>),
    ) -> Result<Rc<Node>, QmpError> {
        let described = Described::of(options)?;
        let mut settings = OpenSettings {
            access: Access::Read,
            workers: open::workers(),
            backing: match below {
                Below::AsNamed => BackingChoice::AsNamed,
                Below::Nothing | Below::Node(_) => BackingChoice::None,
            },
            ..open::settings()
        };
        let passed = self.passed.borrow().as_ref().map(Passed::of);
        settings.environment.passed = passed.map(|it| Arc::new(it) as _);
        let image = open_source(&described.source, &settings).await;
        let image = image.map_err(not_opened)?;
        let settings = OpenSettings {
            backing: BackingChoice::None,
            ..settings
        };
        let backing = match below {
            Below::AsNamed => self.implicit(&image, &settings),
            Below::Nothing => None,
            Below::Node(node) => Some(node),
        };
        let image = match &backing {
            Some(backing) => image.above(&backing.image().stack()).map_err(failed)?,
            None => image,
        };
        // A node below may have got the name in the same command.
        if self.find(&name).is_some() {
            let text = format!("Duplicate nodes with node-name='{name}'");
            return Err(QmpError::generic(text));
        }
        let node = Self::node((name, place), described, (image, settings));
        let node = Rc::new(Node {
            backing: RefCell::new(backing),
            files,
            ..node
        });
        self.list.borrow_mut().push(Rc::clone(&node));
        Ok(node)
    }

    fn node(
        (name, place): (String, Place),
        described: Described,
        (image, settings): (Image, OpenSettings),
    ) -> Node {
        let image = Arc::new(image);
        Node {
            live: LiveDisk::new(name.clone(), Arc::clone(&image) as _),
            is_implicit: place == Place::Below,
            name,
            memory_bitmaps: RefCell::default(),
            busy_bitmaps: RefCell::default(),
            cover: RefCell::default(),
            job: RefCell::default(),
            is_filled: Cell::new(false),
            described: RefCell::new(Rc::new(described)),
            settings: RefCell::new(settings),
            shown: Shown::new(image),
            backing: RefCell::default(),
            files: Vec::new(),
            users: Cell::new(0),
            writers: Cell::new(0),
        }
    }

    /// Nodes for the layers below an image that was opened with its chain; the uppermost of them.
    fn implicit(&self, image: &Image, settings: &OpenSettings) -> Option<Rc<Node>> {
        let stack = image.stack();
        let mut backing: Option<Rc<Node>> = None;
        for depth in (1..stack.depth()).rev() {
            let image = stack.from(depth).to_image().expect("there is a layer");
            let layer = image.own_layer();
            let options = json!({"driver": layer.format.name(), "file": {"filename": layer.name}});
            let Value::Object(options) = options else {
                unreachable!("it is an object");
            };
            let pairs = [
                ("driver".to_string(), layer.format.name().to_string()),
                ("file.filename".to_string(), layer.name.clone()),
            ];
            let registry = &settings.environment.registry;
            // What was opened by this name can be named again.
            let source = Source::of_pairs(pairs.to_vec(), 0, registry);
            let Ok(mut source) = source else {
                break;
            };
            source.say_given(&layer.name);
            let place = (self.generated_name(), Place::Below);
            let described = Described { options, source };
            let node = Self::node(place, described, (image, settings.clone()));
            let node = Rc::new(Node {
                backing: RefCell::new(backing.take()),
                ..node
            });
            self.list.borrow_mut().push(Rc::clone(&node));
            backing = Some(node);
        }
        backing
    }

    /// Removes a node that nobody uses.
    ///
    /// # Errors
    /// In QEMU's words; the image could not be closed.
    pub async fn delete(&self, name: &str) -> Result<(), QmpError> {
        let Some(node) = self.find(name) else {
            let text = format!("Failed to find node with node-name='{name}'");
            return Err(QmpError::generic(text));
        };
        if let Some("commit" | "stream") = node.job.borrow().as_deref() {
            node.may_change()?;
        }
        if node.users.get() > 0 {
            return Err(QmpError::generic(format!("Node {name} is in use")));
        }
        if node.job.borrow().is_some() {
            let text = format!("Block device {name} is in use");
            return Err(QmpError::generic(text));
        }
        let parents = self.parents(&node);
        let is_below = |parent: &&Rc<Node>| {
            let below = parent.backing();
            below.is_some_and(|below| Rc::ptr_eq(&below, &node))
        };
        if let Some(parent) = parents.iter().find(is_below) {
            return Err(in_chain(&node, parent));
        }
        if node.is_implicit {
            let text = format!("Node {name} is not owned by the monitor");
            return Err(QmpError::generic(text));
        }
        if !parents.is_empty() {
            let text = format!("Block device {name} is in use");
            return Err(QmpError::generic(text));
        }
        self.take_out(&node).await
    }

    /// Closes a node and takes it out, and the nodes below that were made for it.
    fn take_out<'a>(
        &'a self,
        node: &Rc<Node>,
    ) -> Pin<Box<dyn Future<Output = Result<(), QmpError>> + 'a>> {
        let node = Rc::clone(node);
        Box::pin(async move {
            self.list
                .borrow_mut()
                .retain(|other| !Rc::ptr_eq(other, &node));
            let closed = node.alone()?.close().await.map_err(failed);
            let below = node
                .backing
                .take()
                .into_iter()
                .chain(node.files.iter().cloned());
            for below in below.collect::<Vec<_>>() {
                let is_over = below.is_implicit && self.parents(&below).is_empty();
                if is_over && below.users.get() == 0 {
                    self.take_out(&below).await?;
                }
            }
            closed
        })
    }

    /// Closes all of them.
    ///
    /// # Errors
    /// The first image that could not be closed.
    pub async fn close(&self) -> Result<(), QmpError> {
        let mut closed = Ok(());
        while let Some(node) = self
            .all()
            .into_iter()
            .find(|it| self.parents(it).is_empty())
        {
            closed = closed.and(self.take_out(&node).await);
        }
        closed
    }

    /// Holds the requests of nodes back.
    pub async fn hold(&self, nodes: &[Rc<Node>]) -> Vec<Drained> {
        let mut held = Vec::new();
        for node in nodes {
            held.push(node.live.drain().await);
        }
        held
    }

    /// Opens a node that was frozen for writing again, for a writer that it still has.
    ///
    /// # Errors
    /// It cannot be opened for writing.
    pub async fn open_for_writers(&self, node: &Rc<Node>) -> Result<(), QmpError> {
        match node.access() {
            Access::Read => self.open_for(node, Access::Write).await,
            Access::Write => Ok(()),
        }
    }

    /// Counts a user of a node, and opens it for writing if the user will write.
    ///
    /// # Errors
    /// It is read-only, or cannot be opened for writing.
    pub async fn enter(&self, node: &Rc<Node>, writes: bool) -> Result<(), QmpError> {
        if writes && node.is_read_only() {
            return Err(QmpError::generic(format!(
                "Block node '{}' is read-only",
                node.name
            )));
        }
        let below = node.backing().map_or_else(Vec::new, |below| below.chain());
        // A job knows what it does to its chain.
        let is_in_job = node.job.borrow().is_some();
        if let Some(below) = below.iter().find(|below| below.is_written() && !is_in_job) {
            // It changes under the node.
            let text = format!("Node '{}' is busy: it is being written", below.name);
            return Err(QmpError::generic(text));
        }
        if writes && node.settings.borrow().access == Access::Read {
            self.open_for(node, Access::Write).await?;
        }
        node.users.set(node.users.get() + 1);
        node.writers.set(node.writers.get() + usize::from(writes));
        Ok(())
    }

    /// Counts a user out. The last one that writes leaves the image closed in order, and open to be
    /// read.
    ///
    /// # Errors
    /// The image could not be closed in order.
    pub async fn leave(&self, node: &Rc<Node>, writes: bool) -> Result<(), QmpError> {
        node.users.set(node.users.get() - 1);
        node.writers.set(node.writers.get() - usize::from(writes));
        if !node.is_used() && node.cover.borrow().is_some() {
            node.uncover().await;
        }
        let is_written = node.settings.borrow().access == Access::Write;
        match writes && is_written && node.writers.get() == 0 {
            true => self.open_for(node, Access::Read).await,
            false => Ok(()),
        }
    }

    /// Counts a user out that has gone to a node above, where the image stays as it is.
    pub fn count_out(&self, node: &Rc<Node>, writes: bool) {
        node.users.set(node.users.get() - 1);
        node.writers.set(node.writers.get() - usize::from(writes));
    }

    /// Opens a node's own layer again, and gives those above it new chains.
    ///
    /// # Errors
    /// `Could not open 'x': why`: then it is open as before, if that is possible.
    async fn open_for(&self, node: &Rc<Node>, access: Access) -> Result<(), QmpError> {
        if let Some((image, settings)) = Self::open_beside(node, access).await {
            let before = node.alone()?;
            let held = self.hold(&self.with_above(node)).await;
            node.settings.replace(settings);
            self.replace(node, image, &held)?;
            drop(held);
            // It was only read: nothing of it is lost.
            drop(before.give_way().await);
            return Ok(());
        }
        let held = self.hold(&self.with_above(node)).await;
        self.open_held(node, access, &held).await
    }

    /// Opens a node that is only read once more, for writing, while clients read it: they wait for
    /// the exchange alone. `None` if that cannot be done, or fails: what is wrong is found again.
    async fn open_beside(node: &Rc<Node>, access: Access) -> Option<(Image, OpenSettings)> {
        let alone = node.alone().ok()?;
        let described = node.described();
        let is_over_image = described.source.image_below().is_some();
        if access != Access::Write || is_over_image || !alone.can_be_opened_beside() {
            return None;
        }
        let settings = OpenSettings {
            access,
            ..node.settings.borrow().clone()
        };
        let opened = open_source_beside(&alone, &described.source, &settings).await;
        opened.ok().map(|image| (image, settings))
    }

    /// The same, while the requests of the node and of those above it are held back.
    ///
    /// # Errors
    /// As for [`Nodes::open_for`].
    pub async fn open_held(
        &self,
        node: &Rc<Node>,
        access: Access,
        held: &[Drained],
    ) -> Result<(), QmpError> {
        let before = node.settings.borrow().clone();
        let settings = OpenSettings {
            access,
            ..before.clone()
        };
        let alone = node.alone()?;
        let error = match open_again(&alone, &node.described().source, &settings).await {
            Ok(image) => {
                node.settings.replace(settings);
                return self.replace(node, image, held);
            }
            Err(error) => error,
        };
        if let Ok(image) = open_again(&alone, &node.described().source, &before).await {
            self.replace(node, image, held)?;
        }
        // Else it answers reads as it did.
        Err(error)
    }

    /// Notes that a node's image was frozen: it is open to be read.
    pub fn is_frozen(&self, node: &Rc<Node>) {
        node.settings.borrow_mut().access = Access::Read;
    }

    /// Puts an image that was opened alone in the place of a node's, under the requests that are
    /// held back, and gives those above it new chains.
    fn replace(&self, node: &Rc<Node>, alone: Image, held: &[Drained]) -> Result<(), QmpError> {
        if alone.is_writable() {
            maintain(&alone);
        }
        node.put(alone);
        self.restack(node, held)
    }

    /// Gives a node, and those above it, chains of the layers that the nodes below have now. Their
    /// requests are held back.
    ///
    /// # Errors
    /// A chain that would be a loop.
    pub fn restack(&self, node: &Rc<Node>, held: &[Drained]) -> Result<(), QmpError> {
        for node in self.with_above(node) {
            let stack = node.backing().map(|below| below.image().stack());
            let image = node.image().above(&stack.unwrap_or_default());
            let image = node.put(image.map_err(failed)?);
            let disk = node.cover.borrow().clone().unwrap_or(image);
            let drained = held.iter().find(|it| Arc::ptr_eq(it.live(), &node.live));
            drained.expect("its requests are held back").exchange(disk);
        }
        Ok(())
    }

    /// Puts another node below one, whose requests are held back, with those above.
    ///
    /// # Errors
    /// A chain that would be a loop.
    pub fn set_backing(
        &self,
        node: &Rc<Node>,
        backing: Option<Rc<Node>>,
        held: &[Drained],
    ) -> Result<(), QmpError> {
        let before = node.backing.replace(backing);
        let stacked = self.restack(node, held);
        if stacked.is_err() {
            node.backing.replace(before);
            self.restack(node, held)?;
        }
        stacked
    }

    /// Removes those of these nodes, and below them, that no command has added and nothing uses.
    pub async fn drop_unused(&self, nodes: &[Rc<Node>]) {
        for node in nodes {
            let is_there = self.find(&node.name).is_some();
            let is_used = node.users.get() > 0 || !self.parents(node).is_empty();
            if is_there && node.is_implicit && !is_used {
                // It was read only; what fails is the end of its lock, which its file has, too.
                drop(self.take_out(node).await);
            }
        }
    }
}

/// Opens an image again in another way. One over the disk of another image is closed first.
async fn open_again(
    image: &Image,
    source: &Source,
    settings: &OpenSettings,
) -> Result<Image, QmpError> {
    match source.image_below() {
        None => {
            let opened = reopen_source(image, source, settings).await;
            opened.map_err(not_opened)
        }
        Some(_) => {
            image.close().await.map_err(failed)?;
            open_source(source, settings).await.map_err(not_opened)
        }
    }
}

/// Grows the image's file ahead of need, and writes metadata back, until it is closed.
fn maintain(image: &Image) {
    // Not the layers below: they may leave the chain before that.
    if let Ok(alone) = image.above(&Default::default()) {
        cowslip_queue::spawn(async move { alone.maintain().await });
    }
}

/// The refusal of what the place of a node below another one does not allow.
pub fn in_chain(node: &Node, above: &Node) -> QmpError {
    QmpError::generic(format!(
        "Node '{}' is busy: node is used as backing hd of '{}'",
        node.name, above.name
    ))
}

/// As QEMU has identifiers.
fn is_well_formed(name: &str) -> bool {
    let signs = |sign: char| sign.is_ascii_alphanumeric() || "-._".contains(sign);
    let starts = name.starts_with(|sign: char| sign.is_ascii_alphabetic());
    starts && name.chars().all(signs)
}
