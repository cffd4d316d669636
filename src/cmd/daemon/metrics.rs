//! `--metrics`: figures of exports, nodes and jobs as text for Prometheus.
//!
//! Counters begin with the daemon, an export's with it. An export keeps its counters when its
//! clients go to another node; `cowslip_export_info` says which node they use now.

use std::rc::Rc;

use cowslip_graph::{Counted, Statistics};

use super::export::{Export, Way};
use super::host::Daemon;
use super::nodes::Node;

/// A line of labels in braces, or none.
type Labels<'a> = &'a [(&'a str, &'a str)];

/// Text that is being put together: metrics, each with its help, its type and its samples.
#[derive(Default)]
struct Text(String);

impl Text {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        self.0.push_str(&format!(
            "# HELP cowslip_{name} {help}\n# TYPE cowslip_{name} {kind}\n"
        ));
    }

    fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl std::fmt::Display) {
        let labels = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
        let labels = labels.collect::<Vec<_>>().join(",");
        let labels = match labels.is_empty() {
            true => labels,
            false => format!("{{{labels}}}"),
        };
        let line = format!("cowslip_{name}{labels} {value}\n");
        self.0.push_str(&line);
    }
}

fn escaped(value: &str) -> String {
    let value = value.replace('\\', "\\\\");
    value.replace('"', "\\\"").replace('\n', "\\n")
}

fn kinds(of: &Statistics) -> [(&'static str, Counted); 4] {
    [
        ("read", of.reads),
        ("write", of.writes),
        ("discard", of.discards),
        ("flush", of.flushes),
    ]
}

/// Counters of requests: their names behind the prefix, texts about them, and values.
type RequestMetric = (&'static str, &'static str, fn(&Counted) -> String);

const REQUESTS: [RequestMetric; 4] = [
    ("requests_total", "Requests that have ended well.", |it| {
        it.requests.to_string()
    }),
    (
        "bytes_total",
        "Bytes of requests that have ended well.",
        |it| it.bytes.to_string(),
    ),
    (
        "request_seconds_total",
        "Time from the beginnings of requests to their ends.",
        |it| (it.nanoseconds as f64 / 1e9).to_string(),
    ),
    (
        "failed_requests_total",
        "Requests that have failed.",
        |it| it.failed.to_string(),
    ),
];

/// A figure of a node: its name, its type, a text about it, and its value.
type NodeMetric = (&'static str, &'static str, &'static str, fn(&Node) -> u64);

const NODES: [NodeMetric; 7] = [
    (
        "node_size_bytes",
        "gauge",
        "Size of the disk.",
        Node::live_size,
    ),
    (
        "node_backing_depth",
        "gauge",
        "Images below the node.",
        |node| node.image().stack().depth() as u64 - 1,
    ),
    (
        "node_cache_budget_bytes",
        "gauge",
        "Memory that tables of the image may take.",
        |node| node.own_cache().budget_bytes,
    ),
    (
        "node_cache_used_bytes",
        "gauge",
        "Memory that tables of the image take.",
        |node| node.own_cache().used_bytes,
    ),
    (
        "node_cache_hits_total",
        "counter",
        "Times that a part of a table was asked for and there.",
        |node| node.own_cache().hits,
    ),
    (
        "node_cache_misses_total",
        "counter",
        "Times that a part of a table was read.",
        |node| node.own_cache().misses,
    ),
    (
        "node_cache_evicted_total",
        "counter",
        "Times that a part of a table made room for another.",
        |node| node.own_cache().evicted,
    ),
];

/// Figures of the requests to things of one sort, by their names.
fn requests(text: &mut Text, sort: &str, figures: &[(String, Statistics)]) {
    for (metric, help, value) in REQUESTS {
        let metric = format!("{sort}_{metric}");
        text.metric(&metric, "counter", help);
        for (name, statistics) in figures {
            for (kind, counted) in kinds(statistics) {
                let labels = [(sort, name.as_str()), ("kind", kind)];
                text.sample(&metric, &labels, value(&counted));
            }
        }
    }
}

impl Daemon {
    /// All figures.
    pub fn metrics(&self) -> String {
        let mut text = Text::default();
        text.metric("info", "gauge", "The release.");
        text.sample("info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
        text.metric(
            "control_clients",
            "gauge",
            "Clients of the control protocol.",
        );
        let clients = self.clients.borrow().as_ref().map_or(0, |it| it.clients());
        text.sample("control_clients", &[], clients);
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
        let figures: Vec<_> = exports
            .iter()
            .map(|export| (export.id.clone(), export.port().statistics()))
            .collect();
        requests(text, "export", &figures);
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
        let figures: Vec<_> = nodes
            .iter()
            .map(|node| (node.name.clone(), node.live.statistics()))
            .collect();
        requests(text, "node", &figures);
        for (name, kind, help, value) in NODES {
            text.metric(name, kind, help);
            for node in &nodes {
                text.sample(name, &[("node", &node.name)], value(node));
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_labels_are_escaped() {
        let mut text = Text::default();
        text.sample("x", &[("a", "q\"\\\nz"), ("b", "c")], 1.5);
        text.sample("y", &[], 2);
        assert_eq!(
            text.0,
            "cowslip_x{a=\"q\\\"\\\\\\nz\",b=\"c\"} 1.5\ncowslip_y 2\n"
        );
    }

    #[test]
    fn a_counter_has_a_sample_for_each_kind() {
        let reads = Counted {
            requests: 3,
            bytes: 4096,
            nanoseconds: 1_500_000,
            failed: 1,
        };
        let statistics = Statistics {
            reads,
            ..Statistics::default()
        };
        let mut text = Text::default();
        requests(&mut text, "node", &[("n".to_string(), statistics)]);
        for line in [
            "# TYPE cowslip_node_requests_total counter",
            "cowslip_node_requests_total{node=\"n\",kind=\"read\"} 3",
            "cowslip_node_bytes_total{node=\"n\",kind=\"read\"} 4096",
            "cowslip_node_request_seconds_total{node=\"n\",kind=\"read\"} 0.0015",
            "cowslip_node_failed_requests_total{node=\"n\",kind=\"read\"} 1",
            "cowslip_node_requests_total{node=\"n\",kind=\"flush\"} 0",
        ] {
            assert!(text.0.lines().any(|it| it == line), "{line}\n{}", text.0);
        }
    }
}
