//! [`Sample`], the figures of a daemon at one moment, and [`Interval`], what happened between two.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;
use serde_json::Value;

use crate::ctl::printable;

/// The kinds of requests, as the protocol names them.
const KINDS: [&str; 3] = ["rd", "wr", "flush"];

/// Figures at one moment.
pub struct Sample {
    moment: Instant,
    nodes: BTreeMap<String, Node>,
    jobs: Vec<Job>,
}

#[derive(Clone, Debug, Default)]
struct Node {
    counts: [Counts; 3],
    failed: u64,
    exports: Vec<String>,
    driver: String,
    size_bytes: Option<u64>,
    disk_bytes: Option<u64>,
}

/// Requests of one kind since the node is there.
#[derive(Clone, Debug, Default)]
struct Counts {
    requests: u64,
    bytes: u64,
    nanoseconds: u64,
    boundaries: Vec<u64>,
    bins: Vec<u64>,
}

#[derive(Clone, Debug)]
struct Job {
    id: String,
    kind: String,
    status: String,
    done: u64,
    total: u64,
    error: Option<String>,
}

impl Sample {
    /// Reads the answers of a daemon: about nodes' figures and exports, nodes and jobs. What an
    /// answer does not have is zero or not there.
    pub fn read(
        moment: Instant,
        (stats, exports): (&Value, &Value),
        (described, jobs): (&Value, &Value),
    ) -> Sample {
        let mut nodes: BTreeMap<String, Node> = BTreeMap::new();
        for figures in elements(stats) {
            nodes.insert(text(figures, "node-name"), Node::read(&figures["stats"]));
        }
        for export in elements(exports) {
            let node = nodes.entry(text(export, "node-name")).or_default();
            node.exports.push(text(export, "id"));
        }
        for description in elements(described) {
            let node = nodes.entry(text(description, "node-name")).or_default();
            node.driver = text(description, "drv");
            node.size_bytes = description["image"]["virtual-size"].as_u64();
            node.disk_bytes = description["image"]["actual-size"].as_u64();
        }
        let jobs = elements(jobs).map(|job| Job {
            id: text(job, "id"),
            kind: text(job, "type"),
            status: text(job, "status"),
            done: number(job, "current-progress"),
            total: number(job, "total-progress"),
            error: job["error"].as_str().map(printable),
        });
        let mut jobs: Vec<Job> = jobs.collect();
        jobs.sort_by(|one, other| one.id.cmp(&other.id));
        for node in nodes.values_mut() {
            node.exports.sort();
        }
        Sample {
            moment,
            nodes,
            jobs,
        }
    }
}

impl Node {
    fn read(stats: &Value) -> Node {
        let failed = KINDS.iter().chain(&["unmap"]);
        let failed = failed.map(|kind| number(stats, &format!("failed_{kind}_operations")));
        Node {
            counts: KINDS.map(|kind| Counts::read(stats, kind)),
            failed: failed.sum(),
            ..Node::default()
        }
    }
}

impl Counts {
    fn read(stats: &Value, kind: &str) -> Counts {
        let of = |what: &str| number(stats, &format!("{kind}_{what}"));
        let histogram = &stats[format!("{kind}_latency_histogram")];
        let numbers = |name: &str| {
            let list = elements(&histogram[name]);
            list.filter_map(Value::as_u64).collect()
        };
        Counts {
            requests: of("operations"),
            bytes: of("bytes"),
            nanoseconds: of("total_time_ns"),
            boundaries: numbers("boundaries"),
            bins: numbers("bins"),
        }
    }

    /// The requests since an earlier moment. A node of the same name that is another one began
    /// after it, with smaller counts.
    fn since(&self, earlier: &Counts) -> Counts {
        if earlier.requests > self.requests || earlier.nanoseconds > self.nanoseconds {
            return self.clone();
        }
        let bins = self.bins.iter().enumerate();
        let bins = bins.map(|(at, count)| {
            let before = earlier.bins.get(at).copied().unwrap_or(0);
            count.saturating_sub(before)
        });
        Counts {
            requests: self.requests - earlier.requests,
            bytes: self.bytes.saturating_sub(earlier.bytes),
            nanoseconds: self.nanoseconds - earlier.nanoseconds,
            boundaries: self.boundaries.clone(),
            bins: bins.collect(),
        }
    }
}

/// Requests of one kind in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Requests that have ended, a second.
    pub per_second: f64,
    /// Their bytes, a second.
    pub bytes_per_second: f64,
    /// The mean of their times.
    pub mean_us: Option<f64>,
    /// A bound of the times of 99 in 100.
    pub p99_us: Option<f64>,
}

impl Rates {
    fn of(counts: &Counts, seconds: f64) -> Rates {
        let us = |nanoseconds: f64| nanoseconds / 1000.0;
        let mean = counts.nanoseconds as f64 / counts.requests as f64;
        Rates {
            per_second: counts.requests as f64 / seconds,
            bytes_per_second: counts.bytes as f64 / seconds,
            mean_us: (counts.requests > 0).then_some(us(mean)),
            p99_us: quantile(&counts.boundaries, &counts.bins, 0.99).map(|it| us(it as f64)),
        }
    }
}

/// The upper boundary of the class in which the request is that is slower than a part of all; none
/// if there are no requests, or it is slower than all boundaries.
fn quantile(boundaries: &[u64], bins: &[u64], part: f64) -> Option<u64> {
    let all: u64 = bins.iter().sum();
    let wanted = ((all as f64 * part).ceil() as u64).max(1);
    let mut ended = 0;
    let class = bins.iter().position(|count| {
        ended += count;
        ended >= wanted
    });
    boundaries.get(class?).copied()
}

/// A disk in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Disk {
    /// The node.
    pub node: String,
    /// Its exports.
    pub exports: Vec<String>,
    /// Its driver.
    pub driver: String,
    /// Reads.
    pub reads: Rates,
    /// Writes.
    pub writes: Rates,
    /// Flushes.
    pub flushes: Rates,
    /// The mean number of requests in flight.
    pub depth: f64,
    /// Requests that have failed, a second.
    pub failed_per_second: f64,
    /// Size of the disk.
    pub size_bytes: Option<u64>,
    /// Space of its file on the host.
    pub disk_bytes: Option<u64>,
}

/// A job at the end of an interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobRow {
    /// Its ID.
    pub id: String,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its state.
    pub status: String,
    /// Bytes that it has done.
    pub done_bytes: u64,
    /// Bytes that it has to do.
    pub total_bytes: u64,
    /// Bytes that it has done in the interval, a second.
    pub bytes_per_second: f64,
    /// Why it has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Figures between two moments.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Its length.
    pub seconds: f64,
    /// The disks, by the names of their nodes.
    pub disks: Vec<Disk>,
    /// The jobs, by ID.
    pub jobs: Vec<JobRow>,
}

impl Interval {
    /// The differences between two samples.
    pub fn between(before: &Sample, now: &Sample) -> Interval {
        let length = now.moment.saturating_duration_since(before.moment);
        let seconds = length.as_secs_f64().max(1e-6);
        let none = Node::default();
        let disks = now.nodes.iter().map(|(name, node)| {
            let earlier = before.nodes.get(name).unwrap_or(&none);
            let counts = [0, 1, 2].map(|kind| node.counts[kind].since(&earlier.counts[kind]));
            let [reads, writes, flushes] =
                [0, 1, 2].map(|kind: usize| Rates::of(&counts[kind], seconds));
            let waited: u64 = counts.iter().map(|it| it.nanoseconds).sum();
            let failed = node.failed.saturating_sub(earlier.failed);
            Disk {
                node: name.clone(),
                exports: node.exports.clone(),
                driver: node.driver.clone(),
                reads,
                writes,
                flushes,
                depth: waited as f64 / 1e9 / seconds,
                failed_per_second: failed as f64 / seconds,
                size_bytes: node.size_bytes,
                disk_bytes: node.disk_bytes,
            }
        });
        let jobs = now.jobs.iter().map(|job| {
            let earlier = before.jobs.iter().find(|it| it.id == job.id);
            let done = earlier.map_or(job.done, |it| job.done.saturating_sub(it.done));
            JobRow {
                id: job.id.clone(),
                kind: job.kind.clone(),
                status: job.status.clone(),
                done_bytes: job.done,
                total_bytes: job.total,
                bytes_per_second: done as f64 / seconds,
                error: job.error.clone(),
            }
        });
        Interval {
            seconds,
            disks: disks.collect(),
            jobs: jobs.collect(),
        }
    }
}

fn elements(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn text(of: &Value, name: &str) -> String {
    printable(of[name].as_str().unwrap_or_default())
}

fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or(0)
}

#[cfg(test)]
pub mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn stats(reads: u64, nanoseconds: u64, bins: [u64; 3]) -> Value {
        json!([{"node-name": "a", "stats": {
            "rd_operations": reads, "rd_bytes": reads * 4096, "rd_total_time_ns": nanoseconds,
            "failed_wr_operations": reads / 10,
            "rd_latency_histogram": {"boundaries": [10_000, 20_000], "bins": bins},
        }}])
    }

    fn sample(moment: Instant, stats: &Value, done: u64) -> Sample {
        let exports = json!([{"id": "e", "node-name": "a"}, {"id": "d", "node-name": "a"}]);
        let nodes = json!([
            {"node-name": "a", "drv": "qcow2",
             "image": {"virtual-size": 1 << 30, "actual-size": 1 << 20}},
            {"node-name": "b", "drv": "file", "image": {}},
        ]);
        let jobs = json!([{"id": "j", "type": "mirror", "status": "running",
            "current-progress": done, "total-progress": 100 << 20}]);
        Sample::read(moment, (stats, &exports), (&nodes, &jobs))
    }

    /// An interval of two seconds in which the disk `a` had 200 reads, and a job moved 20 MiB.
    pub fn interval() -> Interval {
        let begun = Instant::now();
        let before = sample(begun, &stats(100, 1_000_000, [100, 0, 0]), 10 << 20);
        let after = stats(300, 5_000_000, [100, 198, 2]);
        let now = sample(begun + Duration::from_secs(2), &after, 30 << 20);
        Interval::between(&before, &now)
    }

    #[test]
    fn an_interval_has_the_differences() {
        let interval = interval();
        assert_eq!(interval.seconds, 2.0);
        let [a, b] = &interval.disks[..] else {
            panic!("{interval:?}")
        };
        assert_eq!((a.node.as_str(), a.driver.as_str()), ("a", "qcow2"));
        assert_eq!(a.exports, ["d", "e"]);
        let reads = Rates {
            per_second: 100.0,
            bytes_per_second: 409_600.0,
            mean_us: Some(20.0),
            p99_us: Some(20.0),
        };
        assert_eq!(a.reads, reads);
        assert_eq!(a.writes, Rates::default());
        assert_eq!(a.depth, 0.002);
        assert_eq!(a.failed_per_second, 10.0);
        assert_eq!((a.size_bytes, a.disk_bytes), (Some(1 << 30), Some(1 << 20)));
        assert_eq!((b.node.as_str(), b.size_bytes), ("b", None));
        assert_eq!(interval.jobs[0].bytes_per_second, f64::from(10 << 20));
    }

    #[test]
    fn a_node_that_has_begun_again_is_counted_from_its_beginning() {
        let begun = Instant::now();
        let before = sample(begun, &stats(100, 9_000_000, [100, 0, 0]), 0);
        let after = stats(10, 100_000, [10, 0, 0]);
        let now = sample(begun + Duration::from_secs(1), &after, 0);
        let disk = &Interval::between(&before, &now).disks[0];
        assert_eq!(disk.reads.per_second, 10.0);
        assert_eq!(disk.reads.mean_us, Some(10.0));
        assert_eq!(disk.failed_per_second, 0.0);
    }

    #[test]
    fn a_quantile_is_the_boundary_of_its_class() {
        let boundaries = [10, 20];
        assert_eq!(quantile(&boundaries, &[0, 0, 0], 0.5), None);
        assert_eq!(quantile(&boundaries, &[99, 1, 0], 0.99), Some(10));
        assert_eq!(quantile(&boundaries, &[99, 1, 0], 0.995), Some(20));
        assert_eq!(quantile(&boundaries, &[99, 0, 1], 1.0), None);
        assert_eq!(quantile(&[], &[], 0.5), None);
    }

    #[test]
    fn an_answer_of_another_shape_is_no_reason_to_end() {
        let odd = json!({"a": [1, 2]});
        let list = json!([1, {"node-name": 5, "stats": []}, {"id": "x\u{1b}[2J"}]);
        let begun = Instant::now();
        let sample = Sample::read(begun, (&odd, &list), (&list, &list));
        let interval = Interval::between(&sample, &sample);
        assert!(interval.jobs.iter().any(|job| job.id == "x\\u{1b}[2J"));
    }
}
