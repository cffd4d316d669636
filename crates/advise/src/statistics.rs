//! [`Statistics`]: what the engine counted, as `daemon --metrics`, `query-blockstats` or a server's
//! report on SIGUSR1 give it. The text may be anybody's.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use crate::workload::Workload;

/// Nodes at most: more are no statistics of ours.
const NODES_MAX: usize = 100_000;

/// Counters of a node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct Node {
    /// Number and bytes of reads, writes, discards.
    requests: [(u64, u64); 3],
    flushes: u64,
    hits: u64,
    misses: u64,
    has_cache: bool,
    /// Clusters that writes took, filled, and found.
    clusters: [u64; 3],
}

/// Counters of all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Statistics {
    nodes: BTreeMap<String, Node>,
}

/// Statistics that say nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatisticsError {
    /// The text is in none of the forms.
    NotStatistics,
    /// Several nodes, of which none is chosen, or another one; their names.
    WhichNode(Vec<String>),
}

impl fmt::Display for StatisticsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatisticsError::NotStatistics => f.write_str(
                "these are no statistics: neither metrics of a daemon, nor the result of \
                 query-blockstats, nor the report of a server",
            ),
            StatisticsError::WhichNode(names) => {
                let shown: Vec<&str> = names.iter().take(10).map(String::as_str).collect();
                write!(f, "which node? There are {}", shown.join(", "))?;
                match names.len() > shown.len() {
                    true => write!(f, " and {} more", names.len() - shown.len()),
                    false => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for StatisticsError {}

impl Statistics {
    /// Reads statistics.
    ///
    /// # Errors
    /// The text is in none of the forms.
    pub fn parse(text: &str) -> Result<Statistics, StatisticsError> {
        let statistics = match text.trim_start().starts_with(['{', '[']) {
            true => Statistics::of_json(text),
            false => Statistics::of_metrics(text),
        };
        let counted = |it: &Statistics| !it.nodes.is_empty();
        let statistics = statistics.filter(counted);
        // A log of a server: its last report counts.
        let reported = || text.lines().rev().find_map(Statistics::of_line);
        let statistics = statistics.or_else(|| reported().filter(counted));
        statistics.ok_or(StatisticsError::NotStatistics)
    }

    /// The report in a line of a log, behind the name of the program, and perhaps a time.
    fn of_line(line: &str) -> Option<Statistics> {
        Statistics::of_json(&line[line.find('{')?..])
    }

    fn node(&mut self, name: &str) -> Option<&mut Node> {
        if self.nodes.len() >= NODES_MAX && !self.nodes.contains_key(name) {
            return None;
        }
        Some(self.nodes.entry(name.to_string()).or_default())
    }

    fn of_metrics(text: &str) -> Option<Statistics> {
        let mut statistics = Statistics::default();
        for line in text.lines() {
            let Some(line) = line.strip_prefix("cowslip_node_") else {
                continue;
            };
            let (name, rest) = line.split_once('{')?;
            let (labels, value) = rest.rsplit_once("} ")?;
            let labels = labels_of(labels);
            let label = |wanted: &str| labels.iter().find(|(name, _)| name == wanted);
            let Some((_, node)) = label("node") else {
                continue;
            };
            // Counters are whole numbers; sums of seconds are not asked for.
            let Ok(value) = value.trim().parse::<u64>() else {
                continue;
            };
            let node = statistics.node(node)?;
            let kind = label("kind").map(|(_, kind)| kind.as_str());
            let at = ["read", "write", "discard"];
            let at = at.iter().position(|it| Some(*it) == kind);
            match (name, at) {
                ("requests_total", Some(at)) => node.requests[at].0 = value,
                ("bytes_total", Some(at)) => node.requests[at].1 = value,
                ("requests_total", None) if kind == Some("flush") => node.flushes = value,
                ("cache_hits_total", _) => (node.hits, node.has_cache) = (value, true),
                ("cache_misses_total", _) => node.misses = value,
                ("written_clusters_total", _) => {
                    let space = label("space").map(|(_, space)| space.as_str());
                    let all = ["new", "filled", "in-place"];
                    if let Some(at) = all.iter().position(|it| Some(*it) == space) {
                        node.clusters[at] = value;
                    }
                }
                _ => {}
            }
        }
        Some(statistics)
    }

    fn of_json(text: &str) -> Option<Statistics> {
        let value: Value = serde_json::from_str(text).ok()?;
        let mut statistics = Statistics::default();
        let count = |of: &Value, name: &str| of.get(name).and_then(Value::as_u64);
        if let Some(cache) = value.get("cache") {
            let node = statistics.node("")?;
            node.hits = count(cache, "hits")?;
            node.misses = count(cache, "misses")?;
            node.has_cache = true;
            return Some(statistics);
        }
        let list = value.get("return").unwrap_or(&value).as_array()?;
        for entry in list {
            let stats = entry.get("stats")?;
            let names = [entry.get("node-name"), entry.get("device")];
            let name = names.iter().find_map(|name| name.and_then(Value::as_str));
            let node = statistics.node(name.unwrap_or_default())?;
            for (at, kind) in ["rd", "wr", "unmap"].iter().enumerate() {
                let of = |what: &str| count(stats, &format!("{kind}_{what}")).unwrap_or(0);
                node.requests[at] = (of("operations"), of("bytes"));
            }
            node.flushes = count(stats, "flush_operations").unwrap_or(0);
        }
        Some(statistics)
    }

    /// The workload of a node, by its name, or of the only one.
    ///
    /// # Errors
    /// There are several, or none of that name.
    pub fn workload(&self, node: Option<&str>) -> Result<Workload, StatisticsError> {
        let chosen = match node {
            Some(name) => self.nodes.get_key_value(name),
            None if self.nodes.len() == 1 => self.nodes.first_key_value(),
            None => None,
        };
        let names = || self.nodes.keys().cloned().collect();
        let (name, node) = chosen.ok_or_else(|| StatisticsError::WhichNode(names()))?;
        let label = match name.as_str() {
            "" => "statistics of a server".to_string(),
            name => format!("statistics of node '{name}'"),
        };
        let mut workload = Workload::counted(&label, node.requests, node.flushes);
        workload.cache = node.has_cache.then_some((node.hits, node.misses));
        let [new, filled, in_place] = node.clusters;
        let all = new.saturating_add(filled).saturating_add(in_place);
        if all > 0 {
            workload.first = Some(new.saturating_add(filled) as f64 / all as f64);
        }
        Ok(workload)
    }
}

/// Labels of a sample: `a="b",c="d"`, with escapes.
fn labels_of(text: &str) -> Vec<(String, String)> {
    let mut labels = Vec::new();
    let mut rest = text;
    while let Some((name, after)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut letters = after.char_indices();
        let mut end = after.len();
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' => {
                    end = at;
                    break;
                }
                '\\' => match letters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, other)) => value.push(other),
                    None => {}
                },
                other => value.push(other),
            }
        }
        labels.push((name.trim_start_matches(',').to_string(), value));
        rest = after.get(end + 1..).unwrap_or_default();
    }
    labels
}
