//! [`Changing`]: a daemon's nodes as the disks of a change whose steps `cowslip_graph` orders.

use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::CopyOnRead;
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip_graph::{Attended, Drained, Held, Host, LiveDisk, Mirror};
use cowslip_nodes::Access;
use cowslip_qmp::QmpError;

use super::given::Given;
use super::host::Daemon;
use super::job::Job;
use super::nodes::Node;
use super::words::failed;

/// A command that changes the graph, and its arguments.
pub struct Changing<'a> {
    daemon: &'a Daemon,
    given: &'a Given,
}

impl<'a> Changing<'a> {
    /// A change by a command.
    pub fn by(daemon: &'a Daemon, given: &'a Given) -> Changing<'a> {
        Changing { daemon, given }
    }

    /// How an image names a node as its backing file.
    fn naming(&self, image: &Node, base: Option<&Rc<Node>>) -> BackingFile {
        match base {
            None => BackingFile::None,
            Some(base) => BackingFile::File {
                name: match self.given.text("backing-file") {
                    Some(name) => name.to_string(),
                    None => name_beside(&base.filename(), &image.filename()),
                },
                format: base.driver().to_string(),
            },
        }
    }
}

impl Host for Changing<'_> {
    type Node = Rc<Node>;
    type Error = QmpError;

    fn failed(error: cowslip::Error) -> QmpError {
        failed(error)
    }

    fn live(&self, node: &Rc<Node>) -> Arc<LiveDisk> {
        Arc::clone(&node.live)
    }

    fn is_written(&self, node: &Rc<Node>) -> bool {
        node.access() == Access::Write
    }

    async fn hold_clients(&self, node: &Rc<Node>) -> Vec<Drained> {
        self.daemon.hold_ports(node).await
    }

    async fn hold(&self, node: &Rc<Node>) -> Vec<Drained> {
        let nodes = &self.daemon.nodes;
        nodes.hold(&nodes.with_above(node)).await
    }

    async fn hold_above(&self, node: &Rc<Node>) -> Vec<Drained> {
        let nodes = &self.daemon.nodes;
        nodes.hold(&nodes.with_above(node)[1..]).await
    }

    async fn enter(&self, node: &Rc<Node>) -> Result<(), QmpError> {
        self.daemon.nodes.enter(node, true).await
    }

    async fn leave(&self, node: &Rc<Node>) -> Result<(), QmpError> {
        self.daemon.nodes.leave(node, true).await
    }

    async fn resize(&self, node: &Rc<Node>, size: u64) -> cowslip::Result<()> {
        node.image().resize(size).await
    }

    fn populate(
        &self,
        node: &Rc<Node>,
        range: Range<u64>,
        layers: u32,
    ) -> impl Future<Output = cowslip::Result<()>> + Send + 'static {
        let image = node.image();
        async move { image.populate(range, CopyOnRead::DownTo(layers)).await }
    }

    async fn freeze(&self, node: &Rc<Node>) -> cowslip::Result<()> {
        node.image().freeze().await
    }

    async fn name_backing(&self, node: &Rc<Node>, base: Option<&Rc<Node>>) -> cowslip::Result<()> {
        let amendment = Amendment::of_backing(self.naming(node, base));
        node.image()
            .amend(&amendment, &cowslip::Job::default())
            .await
    }

    async fn forget_bitmaps(&self, node: &Rc<Node>) -> cowslip::Result<()> {
        let image = node.image();
        for info in image.bitmaps().await? {
            image
                .change_bitmap(&info.name, &BitmapChange::Remove)
                .await?;
        }
        Ok(())
    }

    async fn empty(&self, node: &Rc<Node>) -> cowslip::Result<()> {
        node.image().empty().await
    }

    async fn open(&self, node: &Rc<Node>, writes: bool, held: &Held) -> Result<(), QmpError> {
        let access = match writes {
            true => Access::Write,
            false => Access::Read,
        };
        self.daemon.nodes.open_held(node, access, &held.disks).await
    }

    fn put_over(
        &self,
        node: &Rc<Node>,
        base: Option<&Rc<Node>>,
        held: &Held,
    ) -> Result<(), QmpError> {
        self.daemon
            .nodes
            .set_backing(node, base.cloned(), &held.disks)
    }

    async fn move_clients(
        &self,
        from: &Rc<Node>,
        to: &Rc<Node>,
        held: Held,
    ) -> Result<(), QmpError> {
        self.daemon.move_exports((from, to), held).await
    }
}

/// A job of a daemon, which asks the user before its last step.
pub struct Attending<'a>(pub &'a Rc<Daemon>, pub &'a Rc<Job>);

impl<'a> Attended<Changing<'_>> for Attending<'a> {
    type Turn = cowslip_graph::TurnGuard<'a, ()>;

    fn follows(&self, mirror: &Arc<Mirror>) {
        self.1.mirror.replace(Some(Arc::clone(mirror)));
    }

    fn is_ready(&self) {
        self.0.job_is_ready(self.1);
    }

    fn stays(&self) -> bool {
        self.1.stays()
    }

    async fn finalize(&self) -> Result<Self::Turn, QmpError> {
        self.0.finalize(self.1).await?;
        Ok(self.0.turn.take().await)
    }
}

impl Daemon {
    /// Holds the requests of all clients of a node back.
    pub async fn hold_ports(&self, node: &Rc<Node>) -> Vec<Drained> {
        let mut held = Vec::new();
        for export in self.exports.of(node) {
            held.push(export.port().drain().await);
        }
        held
    }

    /// Has the clients of a node, whose requests are held back, use another one; then lets requests
    /// go on.
    async fn move_exports(
        &self,
        (from, to): (&Rc<Node>, &Rc<Node>),
        held: Held,
    ) -> Result<(), QmpError> {
        let exports = self.exports.of(from);
        for export in &exports {
            // Its image is open for writing already, so this counts and does nothing else.
            self.nodes.enter(to, export.is_writable()).await?;
            let port = held.of(export.port());
            port.expect("it was held back")
                .exchange(export.moved_to(to));
        }
        drop(held);
        for export in exports {
            self.nodes.leave(from, export.is_writable()).await?;
            export.inform();
        }
        Ok(())
    }
}

/// The name of a file as an image names it: relative to the image, not to where this process runs.
pub fn name_beside(file: &str, image: &str) -> String {
    let (file_path, image_path) = (Path::new(file), Path::new(image));
    if file_path.is_absolute() || !file_path.exists() {
        // A path that means the same everywhere, or no file.
        return file.to_string();
    }
    match (
        file_path.parent() == image_path.parent(),
        file_path.file_name(),
    ) {
        (true, Some(name)) => name.to_string_lossy().into_owned(),
        _ => match std::path::absolute(file_path) {
            Ok(path) => path.to_string_lossy().into_owned(),
            Err(_) => file.to_string(),
        },
    }
}
