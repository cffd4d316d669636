//! Descriptions of a daemon's nodes and their graph.

use std::rc::Rc;

use cowslip_graph::LATENCY_BOUNDS;
use serde_json::{Map, Value, json};

use super::host::Daemon;
use super::internal::describe_snapshots;
use super::nodes::Node;

impl Daemon {
    /// `query-named-block-nodes`, the last node first.
    pub async fn query_named_block_nodes(&self, is_flat: bool) -> Value {
        let mut found = Vec::new();
        for node in self.nodes.all().iter().rev() {
            let mut described = self.describe(node).await;
            if is_flat {
                // QEMU counts the images that it describes below.
                described["backing_file_depth"] = 0.into();
            }
            found.push(described);
        }
        found.into()
    }

    async fn describe(&self, node: &Rc<Node>) -> Value {
        let chain = node.chain();
        let backing = chain.get(1);
        let driver = driver(node);
        let described = node.described();
        let flag = |group: &str, name: &str| {
            let group = described.options.get(group).and_then(Value::as_object);
            let value = group.and_then(|group| group.get(name));
            value.and_then(Value::as_bool).unwrap_or(false)
        };
        let mut found = json!({
            "iops_rd": 0,
            "detect_zeroes": described.options.get("detect-zeroes").cloned().unwrap_or("off".into()),
            "active": true,
            "image": self.describe_image(node).await,
            "iops_wr": 0,
            "ro": node.is_read_only(),
            "node-name": node.name,
            "backing_file_depth": chain.len() - 1,
            "drv": driver,
            "iops": 0,
            "bps_wr": 0,
            "write_threshold": 0,
            "encrypted": node.is_encrypted(),
            "bps": 0,
            "bps_rd": 0,
            "cache": {
                "no-flush": flag("cache", "no-flush"),
                "direct": flag("cache", "direct"),
                "writeback": true,
            },
            "file": node.filename(),
        });
        if let Some(backing) = backing {
            found["backing_file"] = backing.filename().into();
        }
        let bitmaps = self.describe_bitmaps(node).await;
        if !bitmaps.is_empty() {
            found["dirty-bitmaps"] = bitmaps.into();
        }
        found
    }

    async fn describe_image(&self, node: &Rc<Node>) -> Value {
        let image = node.image();
        let layer = image.own_layer();
        let mut found = json!({
            "virtual-size": node.live_size(),
            "filename": node.filename(),
            "format": driver(node),
        });
        if let Some(header) = &layer.header {
            found["cluster-size"] = (1_u64 << header.cluster_bits).into();
            found["dirty-flag"] = header.is_dirty().into();
            if let Some(name) = &header.backing_file {
                found["backing-filename"] = name.as_str().into();
            }
            if let Some(format) = &header.extensions.backing_format {
                found["backing-filename-format"] = format.as_str().into();
            }
        }
        let snapshots = describe_snapshots(&image).await;
        if !snapshots.is_empty() {
            found["snapshots"] = snapshots.into();
        }
        if let Ok(metadata) = std::fs::metadata(node.filename()) {
            use std::os::unix::fs::MetadataExt;
            found["actual-size"] = (metadata.blocks() * 512).into();
        }
        found
    }

    /// `query-blockstats`: of all nodes, or of what clients use.
    pub fn query_blockstats(&self, of_nodes: bool) -> Value {
        if !of_nodes {
            return Value::Array(Vec::new());
        }
        let nodes = self.nodes.all();
        let describe = |node: &Rc<Node>| json!({"stats": figures(node), "node-name": node.name});
        nodes.iter().rev().map(describe).collect()
    }

    /// `x-debug-query-block-graph`.
    pub fn query_block_graph(&self) -> Value {
        let nodes = self.nodes.all();
        let number = |node: &Rc<Node>| {
            let place = nodes.iter().position(|other| Rc::ptr_eq(other, node));
            place.map_or(0, |place| place + 1)
        };
        let mut edges = Vec::new();
        for node in &nodes {
            if let Some(below) = node.backing() {
                edges.push(json!({
                    "parent": number(node),
                    "child": number(&below),
                    "name": "backing",
                    "perm": ["consistent-read"],
                    "shared-perm": ["consistent-read", "write-unchanged"],
                }));
            }
        }
        let mut described: Vec<Value> = nodes
            .iter()
            .map(|node| json!({"id": number(node), "type": "block-driver", "name": node.name}))
            .collect();
        for (place, export) in self.exports.all().iter().enumerate() {
            let id = nodes.len() + place + 1;
            described.push(json!({"id": id, "type": "block-backend", "name": export.id}));
            let perm = match export.is_writable() {
                true => json!(["consistent-read", "write"]),
                false => json!(["consistent-read"]),
            };
            edges.push(json!({
                "parent": id,
                "child": number(&export.node()),
                "name": "root",
                "perm": perm,
                "shared-perm": ["consistent-read", "write", "write-unchanged", "resize"],
            }));
        }
        json!({"edges": edges, "nodes": described})
    }
}

/// The driver by which a node was added: that of a protocol, whose images are raw, or of a format.
fn driver(node: &Node) -> String {
    let described = node.described();
    let named = described.options.get("driver").and_then(Value::as_str);
    named.unwrap_or(node.driver()).to_string()
}

/// The figures of a node's requests, as the protocol has them.
fn figures(node: &Node) -> Value {
    let counted = node.live.statistics();
    let mut found = Map::new();
    let mut put = |name: &str, value: u64| {
        found.insert(name.to_string(), value.into());
    };
    for (name, kind) in [
        ("rd", counted.reads),
        ("wr", counted.writes),
        ("unmap", counted.discards),
        ("flush", counted.flushes),
        ("zone_append", Default::default()),
    ] {
        if name != "flush" {
            put(&format!("{name}_bytes"), kind.bytes);
            put(&format!("{name}_merged"), 0);
        }
        put(&format!("{name}_operations"), kind.requests);
        put(&format!("{name}_total_time_ns"), kind.nanoseconds);
        put(&format!("failed_{name}_operations"), kind.failed);
        put(&format!("invalid_{name}_operations"), 0);
    }
    // No merging of requests, nor a highest offset: it is not kept.
    put("wr_highest_offset", 0);
    found.remove("flush_merged");
    found.insert("account_invalid".into(), true.into());
    found.insert("account_failed".into(), true.into());
    found.insert("timed_stats".into(), Value::Array(Vec::new()));
    // In QEMU they are there once a client has asked for them.
    for (name, kind) in [
        ("rd", counted.reads),
        ("wr", counted.writes),
        ("flush", counted.flushes),
    ] {
        if kind.requests > 0 {
            let histogram = json!({"boundaries": LATENCY_BOUNDS, "bins": kind.latencies});
            found.insert(format!("{name}_latency_histogram"), histogram);
        }
    }
    Value::Object(found)
}
