//! Facts about prepared images.

use crate::facts::{Engine, Facts, Format, Host, Image, Order, Space};

pub(crate) const GIB: u64 = 1 << 30;

/// An image of 64 KiB clusters without backing file, half full, on a file system with room.
pub(crate) fn facts(on: &str) -> Facts {
    Facts {
        image: Image {
            name: "vm.qcow2".to_string(),
            format: Format::Qcow2,
            disk_bytes: 40 * GIB,
            cluster_bytes: 65_536,
            depth: 1,
            ..Image::default()
        },
        space: Space {
            file_bytes: 20 * GIB,
            host_bytes: 20 * GIB,
            data_bytes: 20 * GIB,
            used_bytes: 20 * GIB,
            metadata_bytes: 4 << 20,
            ..Space::default()
        },
        order: Order {
            bytes: 20 * GIB,
            runs: Some(40),
            extents: 40,
            perfect: 20,
        },
        host: Host {
            kind: on.to_string(),
            block_bytes: 4096,
            free_bytes: 400 * GIB,
            total_bytes: 1000 * GIB,
            has_reflink: on != "ext4" && on != "ext2",
            has_fallocate: on != "ext2",
            is_rotational: false,
        },
        cache_bytes: 32 << 20,
        engine: Engine::Cowslip,
        siblings: 0,
        is_in_use: false,
    }
}

/// An image that was filled at random under the policy sparse.
pub(crate) fn scattered(on: &str) -> Facts {
    let mut facts = facts(on);
    facts.space.data_bytes = GIB / 2;
    facts.space.used_bytes = GIB / 2;
    facts.space.host_bytes = GIB / 2;
    facts.order = Order {
        bytes: GIB / 2,
        runs: Some(126_025),
        extents: 126_025,
        perfect: 1,
    };
    facts
}

/// An overlay that has little data so far.
pub(crate) fn overlay(on: &str) -> Facts {
    let mut facts = facts(on);
    facts.image.backing = Some(("golden.raw".to_string(), Some("raw".to_string())));
    facts.image.lowest = facts.image.backing.clone();
    facts.image.depth = 2;
    facts.space = Space {
        file_bytes: GIB,
        host_bytes: GIB,
        data_bytes: GIB,
        used_bytes: GIB,
        metadata_bytes: 1 << 20,
        ..Space::default()
    };
    facts.order = Order {
        bytes: GIB,
        runs: Some(9),
        extents: 9,
        perfect: 5,
    };
    facts
}

/// A raw file of 40 GiB of which the host holds this many bytes.
pub(crate) fn raw(on: &str, host_bytes: u64) -> Facts {
    let mut facts = facts(on);
    facts.image.name = "disk.raw".to_string();
    facts.image.format = Format::Raw;
    facts.space = Space {
        file_bytes: facts.image.disk_bytes,
        host_bytes,
        ..Space::default()
    };
    facts.order.bytes = host_bytes;
    facts
}
