//! Sound images, and what the ways to break one have in common.

use crate::support::{COPIED, Image};

/// The size of a cluster where none is chosen.
pub const CLUSTER: u64 = 65536;

/// A sound image, before something is broken in it.
#[derive(Clone, Copy)]
pub struct Base {
    pub options: &'static str,
    pub commands: &'static [&'static str],
    pub after: &'static [&'static [&'static str]],
}

pub const PLAIN: Base = Base {
    options: "",
    commands: &[
        "write -P 1 0 64k",
        "write -P 2 64k 64k",
        "write -P 3 1M 128k",
    ],
    after: &[],
};
pub const OLD: Base = Base {
    options: "compat=0.10",
    ..PLAIN
};
pub const SMALL: Base = Base {
    options: "cluster_size=4k",
    commands: &["write -P 1 0 4k", "write -P 2 2M 8k", "write -P 3 8k 20k"],
    ..PLAIN
};
pub const EXTENDED: Base = Base {
    options: "extended_l2=on",
    commands: &[
        "write -P 1 0 64k",
        "write -P 2 68k 4k",
        "write -z 100k 8k",
        "write -P 3 1M 128k",
    ],
    ..PLAIN
};
pub const PACKED: Base = Base {
    commands: &[
        "write -P 1 0 64k",
        "write -c -P 2 64k 64k",
        "write -c -P 4 128k 64k",
    ],
    ..PLAIN
};
pub const EXTENDED_PACKED: Base = Base {
    options: "extended_l2=on",
    ..PACKED
};
pub const DATA_FILE: Base = Base {
    options: "data_file=data.raw",
    ..PLAIN
};
pub const SNAPSHOT: Base = Base {
    after: &[&["snapshot", "-c", "s", "image.qcow2"]],
    ..PLAIN
};
pub const OLD_SNAPSHOT: Base = Base {
    options: "compat=0.10",
    ..SNAPSHOT
};
pub const BITMAP: Base = Base {
    after: &[&["bitmap", "--add", "image.qcow2", "b0"]],
    ..PLAIN
};
pub const OVERLAY: Base = Base {
    options: "backing_file=base.raw,backing_fmt=raw",
    commands: &[
        "write -P 1 0 64k",
        "write -P 2 64k 20k",
        "write -z 256k 64k",
    ],
    ..PLAIN
};
pub const LAZY: Base = Base {
    options: "lazy_refcounts=on",
    ..PLAIN
};

impl Base {
    pub fn make(&self) -> Image {
        let mut image = Image::create_beside(self.options, "4M", |dir| {
            let base: Vec<u8> = (0..4u32 << 20).map(|i| (i / 4096 + 100) as u8).collect();
            std::fs::write(dir.join("base.raw"), base).unwrap();
        });
        image.io(self.commands);
        for args in self.after {
            image.img(args);
        }
        image
    }
}

/// Accessors that the breaking steps share.
pub trait Breaking {
    fn entry(&self, index: u64) -> u64;
    fn count(&mut self, cluster: u64, count: u64);
    fn l2_entry(&mut self, index: u64, change: impl FnOnce(u64) -> u64);
    fn add_cluster(&mut self) -> u64;
}

impl Breaking for Image {
    /// An L2 entry without COPIED.
    fn entry(&self, index: u64) -> u64 {
        self.word(self.l2() + 8 * index) & !COPIED
    }
    /// Sets a refcount of any width.
    fn count(&mut self, cluster: u64, count: u64) {
        let order = self.get(96, 4);
        let order = if self.get(4, 4) == 2 { 4 } else { order };
        let block = self.refcount_block();
        if order >= 3 {
            let width = 1 << (order - 3);
            self.set(block + cluster * width, width as usize, count);
            return;
        }
        let bits = 1 << order;
        let at = block + cluster * bits / 8;
        let shift = cluster * bits % 8;
        let mask = ((1 << bits) - 1) << shift;
        let byte = self.get(at, 1) & !mask | count << shift;
        self.set(at, 1, byte);
    }
    fn l2_entry(&mut self, index: u64, change: impl FnOnce(u64) -> u64) {
        self.map_word(self.l2() + 8 * index, change);
    }
    fn add_cluster(&mut self) -> u64 {
        let len = self.bytes.len().next_multiple_of(CLUSTER as usize);
        self.bytes.resize(len + CLUSTER as usize, 0x77);
        len as u64 / CLUSTER
    }
}
