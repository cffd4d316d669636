//! `--metrics`: figures of exports, nodes and jobs as text for Prometheus.
//!
//! Counters begin with the daemon, an export's with it, and those of an image (caches, allocation,
//! space) whenever it is opened: for writing by its first writer, and to be read when that has
//! left. An export keeps its counters when its clients go to another node; `cowslip_export_info`
//! says which node they use now.

use std::rc::Rc;

use cowslip::image::{CacheStatistics, SpaceStatistics, WriteStatistics};

use super::export::{Export, Way};
use super::host::Daemon;
use super::nodes::Node;

mod text;

use text::Text;

/// Figures of a node at one moment.
struct Figures {
    name: String,
    size: u64,
    depth: u64,
    in_flight: u64,
    cache: CacheStatistics,
    /// Of an image that is open for writing.
    written: Option<(WriteStatistics, SpaceStatistics)>,
}

impl Figures {
    fn of(node: &Rc<Node>) -> Figures {
        let image = node.image();
        let written = image.write_statistics().zip(image.space_statistics());
        Figures {
            name: node.name.clone(),
            size: image.size(),
            depth: image.stack().depth() as u64 - 1,
            in_flight: node.live.in_flight() as u64,
            cache: node.own_cache(),
            written: written.filter(|_| image.is_writable()),
        }
    }
}

/// A metric of nodes: its name, its type, a text about it, and its value, if a node has one.
type NodeMetric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Figures) -> Option<u64>,
);

const NODES: [NodeMetric; 13] = [
    ("node_size_bytes", "gauge", "Size of the disk.", |it| {
        Some(it.size)
    }),
    (
        "node_backing_depth",
        "gauge",
        "Images below the node.",
        |it| Some(it.depth),
    ),
    (
        "node_requests_in_flight",
        "gauge",
        "Requests that have begun and not ended.",
        |it| Some(it.in_flight),
    ),
    (
        "node_cache_budget_bytes",
        "gauge",
        "Memory that tables of the image may take.",
        |it| Some(it.cache.budget_bytes),
    ),
    (
        "node_cache_used_bytes",
        "gauge",
        "Memory that tables of the image take.",
        |it| Some(it.cache.used_bytes),
    ),
    (
        "node_cache_hits_total",
        "counter",
        "Times that a part of a table was asked for and there.",
        |it| Some(it.cache.hits),
    ),
    (
        "node_cache_misses_total",
        "counter",
        "Times that a part of a table was read.",
        |it| Some(it.cache.misses),
    ),
    (
        "node_cache_evicted_total",
        "counter",
        "Times that a part of a table made room for another.",
        |it| Some(it.cache.evicted),
    ),
    (
        "node_file_bytes",
        "gauge",
        "Length of the file that the image is in, with space ahead of need.",
        |it| Some(it.written?.1.file_bytes),
    ),
    (
        "node_file_grown_bytes",
        "gauge",
        "Growth of the file since the image was opened for writing.",
        |it| Some(it.written?.1.grown_bytes),
    ),
    (
        "node_free_bytes",
        "gauge",
        "Space in the file that is known to be free.",
        |it| Some(it.written?.1.free_bytes),
    ),
    (
        "node_quarantined_references",
        "gauge",
        "References to space that were dropped, and whose space is not free yet.",
        |it| Some(it.written?.1.quarantined),
    ),
    (
        "node_latched",
        "gauge",
        "1 if a failure keeps the image from being changed until it is opened again.",
        |it| Some(u64::from(it.written?.1.is_latched)),
    ),
];

/// A count of statistics.
type Count = fn(&WriteStatistics) -> u64;

/// The effects of writes on clusters, and their counts.
const ALLOCATION: [(&str, Count); 3] = [
    ("new", |it| it.new_space),
    ("filled", |it| it.filled),
    ("in-place", |it| it.in_place),
];

impl Daemon {
    /// All figures.
    pub fn metrics(&self) -> String {
        let mut text = Text::default();
        text.metric("info", "gauge", "The release.");
        text.sample("info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
        let clients = self.clients.borrow().as_ref().map_or(0, |it| it.clients());
        let help = "Clients of the control protocol.";
        text.single(("control_clients", "gauge", help), clients);
        text.metric(
            "control_commands_total",
            "counter",
            "Commands of clients of the control protocol.",
        );
        for (outcome, count) in [
            ("done", &self.commands_done),
            ("refused", &self.commands_refused),
        ] {
            let labels = [("outcome", outcome)];
            text.sample("control_commands_total", &labels, count.get());
        }
        self.export_metrics(&mut text);
        self.node_metrics(&mut text);
        self.job_metrics(&mut text);
        text.0
    }

    fn export_metrics(&self, text: &mut Text) {
        let exports = self.exports.all();
        text.metric(
            "export_info",
            "gauge",
            "Exports, and the nodes that they use.",
        );
        for export in &exports {
            let node = export.node();
            let access = match export.is_writable() {
                true => "read-write",
                false => "read-only",
            };
            let labels = [
                ("export", export.id.as_str()),
                ("type", export.kind),
                ("node", &node.name),
                ("access", access),
            ];
            text.sample("export_info", &labels, 1);
        }
        text.metric("export_clients", "gauge", "Clients of an NBD export.");
        for export in &exports {
            if let Some(clients) = self.clients_of(export) {
                text.sample("export_clients", &[("export", &export.id)], clients);
            }
        }
        let help = "Requests that have begun and not ended.";
        text.metric("export_requests_in_flight", "gauge", help);
        for export in &exports {
            let labels = [("export", export.id.as_str())];
            let in_flight = export.port().in_flight();
            text.sample("export_requests_in_flight", &labels, in_flight);
        }
        let figures: Vec<_> = exports
            .iter()
            .map(|export| (export.id.clone(), export.port().statistics()))
            .collect();
        text.requests("export", &figures);
    }

    fn clients_of(&self, export: &Rc<Export>) -> Option<usize> {
        let Way::Nbd(name) = &export.way else {
            return None;
        };
        let offered = self.exports.nbd().ok()?.export(name)?;
        Some(offered.clients())
    }

    fn node_metrics(&self, text: &mut Text) {
        let nodes = self.nodes.all();
        let requests: Vec<_> = nodes
            .iter()
            .map(|node| (node.name.clone(), node.live.statistics()))
            .collect();
        text.requests("node", &requests);
        let figures: Vec<Figures> = nodes.iter().map(Figures::of).collect();
        for (name, kind, help, value) in NODES {
            text.metric(name, kind, help);
            for node in &figures {
                if let Some(value) = value(node) {
                    text.sample(name, &[("node", &node.name)], value);
                }
            }
        }
        text.metric(
            "node_written_clusters_total",
            "counter",
            "Clusters that writes have touched, by what became of their space.",
        );
        for node in &figures {
            let Some((writes, _)) = &node.written else {
                continue;
            };
            for (space, count) in ALLOCATION {
                let labels = [("node", node.name.as_str()), ("space", space)];
                text.sample("node_written_clusters_total", &labels, count(writes));
            }
        }
    }

    fn job_metrics(&self, text: &mut Text) {
        let jobs = self.jobs.all();
        text.metric("job_info", "gauge", "Jobs, and their states.");
        for job in &jobs {
            let labels = [
                ("job", job.id.as_str()),
                ("type", job.kind),
                ("status", job.status.get().name()),
            ];
            text.sample("job_info", &labels, 1);
        }
        text.metric("job_done_bytes", "gauge", "Bytes that a job has done.");
        for job in &jobs {
            let done = job.work.progress().done_bytes;
            text.sample("job_done_bytes", &[("job", &job.id)], done);
        }
        text.metric("job_total_bytes", "gauge", "Bytes that a job has to do.");
        for job in &jobs {
            let total = job.work.progress().total_bytes;
            text.sample("job_total_bytes", &[("job", &job.id)], total);
        }
        text.metric("jobs_ended_total", "counter", "Jobs that have ended.");
        for ((kind, outcome), count) in &*self.jobs.ended.borrow() {
            let labels = [("type", *kind), ("outcome", outcome.name())];
            text.sample("jobs_ended_total", &labels, count);
        }
    }
}
