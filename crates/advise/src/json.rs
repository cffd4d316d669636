//! Advice for programs.

use serde_json::{Value, json};

use crate::answer::{Advice, Answer};
use crate::facts::{Facts, Format};
use crate::workload::{Requests, Workload};

/// The advice for an image.
pub fn as_json(facts: &Facts, workload: &Workload, advice: &Advice) -> Value {
    json!({
        "image": facts.image.name,
        "verdict": advice.verdict().name(),
        "advice": advice.answers.iter().map(answer).collect::<Vec<_>>(),
        "facts": facts_json(facts),
        "workload": workload_json(workload),
    })
}

/// The advice for the images of a directory.
pub fn directory_json(images: Vec<Value>) -> Value {
    json!({ "images": images })
}

fn answer(answer: &Answer) -> Value {
    let figures = answer.figures.iter();
    let figures: Vec<Value> = figures
        .map(|figure| json!({ "name": figure.name, "now": figure.now, "then": figure.then }))
        .collect();
    json!({
        "subject": answer.subject,
        "verdict": answer.verdict.name(),
        "text": answer.text,
        "reason": answer.reason,
        "figures": figures,
        "commands": answer.commands,
        "source": answer.source,
    })
}

fn facts_json(facts: &Facts) -> Value {
    let (image, space, order, host) = (&facts.image, &facts.space, &facts.order, &facts.host);
    json!({
        "format": match image.format {
            Format::Qcow2 => "qcow2",
            Format::Raw => "raw",
            Format::Other => "other",
        },
        "disk-bytes": image.disk_bytes,
        "cluster-bytes": image.cluster_bytes,
        "subclusters": image.has_subclusters,
        "alloc-policy": if image.is_sparse { "sparse" } else { "contiguous" },
        "depth": image.depth,
        "snapshots": image.snapshots,
        "bitmaps": image.bitmaps,
        "encrypted": image.is_encrypted,
        "file-bytes": space.file_bytes,
        "host-bytes": space.host_bytes,
        "unwritten-bytes": space.unwritten_bytes,
        "data-bytes": space.data_bytes,
        "used-bytes": space.used_bytes,
        "subcluster-bytes": space.subcluster_bytes,
        "metadata-bytes": space.metadata_bytes,
        "compressed-bytes": space.compressed_bytes,
        "scattered-permille": space.scattered_permille,
        "between-bytes": space.between_bytes,
        "other-bytes": space.other_bytes(),
        "extents": order.extents,
        "extents-perfect": order.perfect,
        "read-bytes": order.bytes,
        "read-runs": order.runs,
        "file-system": host.kind,
        "block-bytes": host.block_bytes,
        "free-bytes": host.free_bytes,
        "total-bytes": host.total_bytes,
        "reflink": host.has_reflink,
        "fallocate": host.has_fallocate,
        "rotational": host.is_rotational,
        "cache-bytes": facts.cache_bytes,
        "siblings": facts.siblings,
        "in-use": facts.is_in_use,
    })
}

fn workload_json(workload: &Workload) -> Value {
    let requests =
        |of: &Requests| json!({ "requests": of.count, "bytes": of.bytes, "in-order": of.in_order });
    json!({
        "name": workload.name,
        "reads": requests(&workload.reads),
        "writes": requests(&workload.writes),
        "discards": requests(&workload.discards),
        "flushes": workload.flushes,
        "first-writes": workload.first,
        "span-bytes": workload.span_bytes,
        "cache-hits": workload.cache.map(|(hits, _)| hits),
        "cache-misses": workload.cache.map(|(_, misses)| misses),
        "not-looked-at": workload.unknown,
    })
}
