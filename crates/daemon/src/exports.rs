//! Exports of a daemon: its nodes for clients over NBD, as vhost-user-blk devices and as files.
//!
//! The protocols are those of `serve`.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cowslip::error::system_words;
use cowslip_cmdline::open::object::{self, is_identifier};
use cowslip_console::output::is_called_as_qemu;
use cowslip_exports::nbd::{self, Listening};
use cowslip_exports::{Endpoint, Members, Served, Transport, TransportKind, transport_kind};
use cowslip_graph::LiveDisk;
use cowslip_nbd::export::MetadataContext;
use cowslip_nbd::server::Offered;
use cowslip_nbd::{Export as NbdExport, Server as NbdServer, ServerOptions};
use cowslip_qmp::QmpError;
use cowslip_queue::Event;
use serde_json::{Value, json};

use super::export::{Export, ImageOf, Running, Way, disk_of};
use super::given::Given;
use super::host::Daemon;
use super::nodes::Node;
use super::wait::Flag;
use super::words::{failed, refused};

/// Clients of the NBD server at a time, if nothing else is asked for.
const CONNECTIONS_MAX: usize = 100;
/// How long clients of an export that is removed may take for their replies.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// A type of exports, and the transport of one, if it has one of its own.
type Chosen = (&'static dyn TransportKind, Option<Box<dyn Transport>>);

impl Daemon {
    /// `nbd-server-start`.
    ///
    /// # Errors
    /// It runs; an address that cannot be listened on.
    pub fn nbd_server_start(&self, given: &Given) -> Result<Value, QmpError> {
        if self.exports.server.borrow().is_some() {
            return Err(refused("NBD server already running"));
        }
        let address = Members(&given.0).address("addr").map_err(failed)?;
        let tls = nbd::tls(given.text("tls-creds"), given.text("tls-authz"));
        let listening = Listening::on(&address).map_err(failed)?;
        let defaults = ServerOptions::default();
        let connections = given.number("max-connections")?;
        let connections = connections.map_or(CONNECTIONS_MAX, |most| most as usize);
        let seconds = given.number("handshake-max-seconds")?;
        let mut server = NbdServer::new(ServerOptions {
            connections_max: Some(connections).filter(|most| *most > 0),
            handshake_timeout: match seconds {
                None => defaults.handshake_timeout,
                Some(0) => Duration::MAX,
                Some(seconds) => Duration::from_secs(seconds),
            },
            tls: tls.map_err(failed)?,
            ..defaults
        });
        nbd::report_events(&mut server, &self.log);
        let (handle, ended) = (server.handle(), Rc::new(Flag::default()));
        let end = Rc::clone(&ended);
        cowslip_queue::spawn(async move {
            server.serve(vec![listening.listener]).await;
            drop(listening.name);
            end.set();
        });
        self.exports.server.replace(Some(Running { handle, ended }));
        Ok(json!({}))
    }

    /// `nbd-server-stop`.
    ///
    /// # Errors
    /// It does not run.
    pub async fn nbd_server_stop(&self) -> Result<Value, QmpError> {
        self.exports.nbd()?;
        let is_nbd = |export: &Rc<Export>| matches!(export.way, Way::Nbd(_));
        for export in self.exports.all().into_iter().filter(is_nbd) {
            self.end_export(&export).await;
        }
        if let Some(running) = self.exports.server.take() {
            running.handle.stop();
            running.ended.wait().await;
        }
        Ok(json!({}))
    }

    /// `block-export-add`.
    ///
    /// # Errors
    /// The ID is in use; no such node; the node or the transport refuses.
    pub async fn block_export_add(&self, given: &Given) -> Result<Value, QmpError> {
        let id = given.required("id")?.to_string();
        if !is_identifier(&id) {
            return Err(refused("Invalid block export id"));
        }
        if self.exports.find(&id).is_some() {
            return Err(QmpError::generic(format!(
                "Block export id '{id}' is already in use"
            )));
        }
        let node = self.nodes.named(given.required("node-name")?)?;
        if let Some(threads) = given.text("iothread")
            && !object::has_threads(threads)
        {
            let text = format!("iothread \"{threads}\" not found");
            return Err(QmpError::generic(text));
        }
        let is_writable = given.switch("writable")?.unwrap_or(false);
        let kind = given.required("type")?.to_string();
        if is_writable && node.is_read_only() {
            return Err(refused("Cannot export read-only node as writable"));
        }
        if node.is_filled.get() {
            node.may_change()?;
        }
        if is_writable {
            self.nodes.is_root(&node)?;
        }
        self.nodes.enter(&node, is_writable).await?;
        let port = LiveDisk::new(id.clone(), disk_of(&node, is_writable));
        let image = ImageOf::new(&node);
        let mut bitmaps = Vec::new();
        let way = match self.transport(&kind, given) {
            Ok((kind, Some(transport))) => self
                .serve(transport.as_ref(), (&node, &port))
                .await
                .map(|way| (kind.name(), way)),
            Ok((kind, None)) => match self
                .contexts(given, (&node, is_writable), (&port, &image))
                .await
            {
                Ok((contexts, in_use)) => {
                    bitmaps = in_use;
                    let way = self.offer_nbd(given, (&node, &port), contexts);
                    way.map(|way| (kind.name(), way))
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        let (kind, way) = match way {
            Ok(found) => found,
            Err(error) => {
                drop(self.nodes.leave(&node, is_writable).await);
                return Err(error);
            }
        };
        let shows = (image, bitmaps);
        let export = Export::new((id, kind), (node, port), (is_writable, way), shows);
        self.exports.add(export);
        Ok(json!({}))
    }

    fn offer_nbd(
        &self,
        given: &Given,
        (node, port): (&Node, &Arc<LiveDisk>),
        contexts: Vec<Arc<dyn MetadataContext>>,
    ) -> Result<Way, QmpError> {
        let server = self.exports.nbd()?;
        let name = given.text("name").unwrap_or(&node.name).to_string();
        let mut export = NbdExport::new(Arc::clone(port) as _);
        export.description = given.text("description").unwrap_or_default().to_string();
        export.shared_cache = true;
        export.contexts = contexts;
        match server.add_export(name.clone(), export) {
            true => Ok(Way::Nbd(name)),
            false => Err(QmpError::generic(format!(
                "NBD server already has export named '{name}'"
            ))),
        }
    }

    /// The transport of this type, with an export's arguments; `None` for NBD, whose exports are
    /// of the daemon's NBD server.
    fn transport(&self, name: &str, given: &Given) -> Result<Chosen, QmpError> {
        let kind = transport_kind(name).ok_or_else(|| {
            QmpError::generic(format!("Parameter 'type' does not accept value '{name}'"))
        })?;
        if let (Some(what), true) = (kind.needs_outside_of_sandbox(), self.is_confined.get()) {
            let text = format!("Exports of type '{name}' need {what}, which the sandbox refuses");
            return Err(refused(&text));
        }
        let transport = kind.of_export(Members(&given.0)).transpose();
        Ok((kind, transport.map_err(failed)?))
    }

    async fn serve(
        &self,
        transport: &dyn Transport,
        (node, port): (&Rc<Node>, &Arc<LiveDisk>),
    ) -> Result<Way, QmpError> {
        transport.has_predecessor(&self.log).map_err(failed)?;
        let served = Served {
            disk: Arc::clone(port) as _,
            image: node.image(),
            offset: 0,
            filename: node.filename(),
            is_alone: true,
            poll: self.poll,
            resized: Event::new().map_err(|error| failed(system_words(&error)))?,
            log: self.log.clone(),
        };
        let endpoint: Box<dyn Endpoint> = transport.listen(&served).await.map_err(failed)?;
        let (stop, inform) = (endpoint.stopper(), endpoint.informer());
        let ended = Rc::new(Flag::default());
        let end = Rc::clone(&ended);
        cowslip_queue::spawn(async move {
            drop(endpoint.serve().await);
            end.set();
        });
        Ok(Way::Own {
            path: transport.path().unwrap_or_default(),
            stop,
            inform,
            ended,
        })
    }

    /// `block-export-del`.
    ///
    /// # Errors
    /// There is none of this ID; it has clients, and they are not to be disconnected.
    pub async fn block_export_del(&self, given: &Given) -> Result<Value, QmpError> {
        let id = given.required("id")?;
        let export = self.exports.find(id);
        let export =
            export.ok_or_else(|| QmpError::generic(format!("Export '{id}' is not found")))?;
        let is_forced = given.text("mode") == Some("hard");
        if let (Way::Nbd(name), false) = (&export.way, is_forced) {
            let offered = self.exports.nbd()?.export(name);
            if offered.is_some_and(|offered: Arc<Offered>| offered.clients() > 0) {
                let text = format!("export '{id}' still in use");
                return Err(QmpError::generic(text));
            }
        }
        self.end_export(&export).await;
        Ok(json!({}))
    }

    /// `nbd-server-add`: an export whose ID is its name.
    ///
    /// # Errors
    /// As for [`Daemon::block_export_add`].
    pub async fn nbd_server_add(&self, given: &Given) -> Result<Value, QmpError> {
        let device = given.required("device")?;
        self.nodes.referred(device)?;
        let name = given.text("name").unwrap_or(device);
        let mut export = given.clone();
        if let Some(bitmap) = given.text("bitmap") {
            export.0.insert("bitmaps".to_string(), json!([bitmap]));
        }
        for (member, value) in [("type", "nbd"), ("id", name), ("node-name", device)] {
            export.0.insert(member.to_string(), value.into());
        }
        self.block_export_add(&export).await
    }

    /// `nbd-server-remove`.
    ///
    /// # Errors
    /// As for [`Daemon::block_export_del`].
    pub async fn nbd_server_remove(&self, given: &Given) -> Result<Value, QmpError> {
        let mut export = given.clone();
        let name = given.required("name")?.to_string();
        export.0.insert("id".to_string(), name.into());
        self.block_export_del(&export).await
    }

    /// Ends an export: its clients are disconnected, what they have asked for is done.
    pub async fn end_export(&self, export: &Rc<Export>) {
        if export.is_ending.replace(true) {
            return;
        }
        match &export.way {
            Way::Nbd(name) => {
                if let Ok(server) = self.exports.nbd()
                    && let Some(offered) = server.withdraw(name)
                {
                    server.gone(&offered, PATIENCE).await;
                }
            }
            Way::Own { stop, ended, .. } => {
                stop();
                ended.wait().await;
            }
        }
        self.exports.remove(export);
        let node = export.node();
        let left = self.nodes.leave(&node, export.is_writable()).await;
        if let Err(error) = left {
            self.log
                .write(format_args!("export '{}': {error}", export.id));
        }
        self.nodes.drop_unused(&node.chain()).await;
        self.emit("BLOCK_EXPORT_DELETED", json!({"id": export.id}));
    }

    /// `query-block-exports`.
    pub fn query_block_exports(&self) -> Value {
        let exports = self.exports.all();
        let describe = |export: &Rc<Export>| {
            let mut described = json!({
                "node-name": export.node().name,
                "shutting-down": export.is_ending.get(),
                "type": export.kind,
                "id": export.id,
            });
            if !is_called_as_qemu() {
                described["x-cowslip-name"] = export.name().into();
            }
            described
        };
        exports.iter().map(describe).collect()
    }
}
