//! The text format of Prometheus, version 0.0.4: metrics, each with its help, its type and its
//! samples.

use std::fmt::{Display, Write};

use cowslip_graph::{Counted, LATENCY_BOUNDS, Statistics};

/// Labels with their values, which may have any character.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// Text that is being put together.
#[derive(Default)]
pub struct Text(pub String);

impl Text {
    /// Begins a metric; its samples follow.
    pub fn metric(&mut self, name: &str, kind: &str, help: &str) {
        self.put(format_args!(
            "# HELP cowslip_{name} {help}\n# TYPE cowslip_{name} {kind}\n"
        ));
    }

    /// A sample of a metric, or of a part of one.
    pub fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl Display) {
        self.put(format_args!("cowslip_{name}"));
        for (at, (name, value)) in labels.iter().enumerate() {
            let before = if at == 0 { '{' } else { ',' };
            self.put(format_args!("{before}{name}=\"{}\"", escaped(value)));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        self.put(format_args!("{end} {value}\n"));
    }

    fn put(&mut self, arguments: std::fmt::Arguments<'_>) {
        let written = self.0.write_fmt(arguments);
        written.expect("a string takes all of it");
    }

    /// A metric without labels.
    pub fn single(&mut self, (name, kind, help): (&str, &str, &str), value: impl Display) {
        self.metric(name, kind, help);
        self.sample(name, &[], value);
    }

    /// Figures of the requests to things of one sort, by their names. A histogram of latencies has
    /// the kinds of which there were requests.
    pub fn requests(&mut self, sort: &str, figures: &[(String, Statistics)]) {
        for (metric, help, value) in REQUESTS {
            let metric = format!("{sort}_{metric}");
            self.metric(&metric, "counter", help);
            for (name, statistics) in figures {
                for (kind, counted) in kinds(statistics) {
                    let labels = [(sort, name.as_str()), ("kind", kind)];
                    self.sample(&metric, &labels, value(counted));
                }
            }
        }
        let metric = format!("{sort}_request_duration_seconds");
        let help = "Times from the beginnings of requests to their ends, of those that ended well.";
        self.metric(&metric, "histogram", help);
        for (name, statistics) in figures {
            for (kind, counted) in kinds(statistics) {
                if counted.requests > 0 {
                    self.histogram(&metric, &[(sort, name), ("kind", kind)], counted);
                }
            }
        }
    }

    fn histogram(&mut self, metric: &str, labels: Labels<'_>, counted: &Counted) {
        let bounds = LATENCY_BOUNDS.iter().map(|it| seconds(*it).to_string());
        let bucket = format!("{metric}_bucket");
        let mut ended = 0;
        for (bound, count) in bounds.chain(["+Inf".into()]).zip(counted.latencies) {
            ended += count;
            let labels = [labels, &[("le", bound.as_str())]].concat();
            self.sample(&bucket, &labels, ended);
        }
        let sum = seconds(counted.nanoseconds);
        self.sample(&format!("{metric}_sum"), labels, sum);
        self.sample(&format!("{metric}_count"), labels, ended);
    }
}

fn escaped(value: &str) -> String {
    let value = value.replace('\\', "\\\\");
    value.replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

fn kinds(of: &Statistics) -> [(&'static str, &Counted); 4] {
    [
        ("read", &of.reads),
        ("write", &of.writes),
        ("discard", &of.discards),
        ("flush", &of.flushes),
    ]
}

/// Counters of requests: their names behind the prefix, texts about them, and values.
type RequestMetric = (&'static str, &'static str, fn(&Counted) -> u64);

const REQUESTS: [RequestMetric; 3] = [
    ("requests_total", "Requests that have ended well.", |it| {
        it.requests
    }),
    (
        "bytes_total",
        "Bytes of requests that have ended well.",
        |it| it.bytes,
    ),
    (
        "failed_requests_total",
        "Requests that have failed.",
        |it| it.failed,
    ),
];

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
    fn a_counter_has_a_sample_for_each_kind_and_a_histogram_the_kinds_with_requests() {
        let mut reads = Counted {
            requests: 3,
            bytes: 4096,
            nanoseconds: 1_500_000,
            failed: 1,
            ..Counted::default()
        };
        reads.latencies[2] = 2;
        reads.latencies[18] = 1;
        let statistics = Statistics {
            reads,
            ..Statistics::default()
        };
        let mut text = Text::default();
        text.requests("node", &[("n".to_string(), statistics)]);
        let read = "{node=\"n\",kind=\"read\"}";
        for line in [
            "# TYPE cowslip_node_requests_total counter".to_string(),
            format!("cowslip_node_requests_total{read} 3"),
            format!("cowslip_node_bytes_total{read} 4096"),
            format!("cowslip_node_failed_requests_total{read} 1"),
            "cowslip_node_requests_total{node=\"n\",kind=\"flush\"} 0".to_string(),
            "# TYPE cowslip_node_request_duration_seconds histogram".to_string(),
            bucket("0.00002", 0),
            bucket("0.00005", 2),
            bucket("5", 2),
            bucket("+Inf", 3),
            format!("cowslip_node_request_duration_seconds_sum{read} 0.0015"),
            format!("cowslip_node_request_duration_seconds_count{read} 3"),
        ] {
            assert!(text.0.lines().any(|it| it == line), "{line}\n{}", text.0);
        }
        let of_writes = "seconds_bucket{node=\"n\",kind=\"write\"";
        assert!(!text.0.contains(of_writes), "{}", text.0);
    }

    fn bucket(bound: &str, count: u64) -> String {
        let labels = format!("{{node=\"n\",kind=\"read\",le=\"{bound}\"}}");
        format!("cowslip_node_request_duration_seconds_bucket{labels} {count}")
    }
}
