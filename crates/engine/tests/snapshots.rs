//! Internal snapshots against a model: what the disk and every snapshot hold, in images that QEMU's
//! tools and this engine change in turn; cut short at every write by a crash, by the job's being
//! cancelled, and by a full disk.

mod beside_requests;
mod cut_short;
mod downgrade;
mod exchange;

use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{BackingChoice, DiscardPolicy, Durability, OpenOptions, Space, ZeroOptions};
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, BufMut, Image, Job};

use crate::support::block_on;

fn options() -> OpenOptions {
    OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        backing: BackingChoice::None,
        cache_bytes: 8 * 4096,
        ..OpenOptions::default()
    }
}

pub(crate) fn open(file: Arc<dyn BlockFile>) -> Image {
    block_on(Image::open(file, options(), &NoFiles)).unwrap()
}

pub(crate) fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

/// The disk as it was when a snapshot was taken.
pub(crate) fn read_at(file: Arc<dyn BlockFile>, id: &str) -> Vec<u8> {
    let options = OpenOptions {
        backing: BackingChoice::None,
        snapshot: Some(SnapshotChoice::Id(id.to_string())),
        ..OpenOptions::default()
    };
    read(&block_on(Image::open(file, options, &NoFiles)).unwrap())
}

fn named(name: &str) -> NewSnapshot {
    NewSnapshot {
        name: name.to_string(),
        date_sec: 1_700_000_000,
        date_nsec: 5,
    }
}

fn by_id(id: &str) -> SnapshotChoice {
    SnapshotChoice::Id(id.to_string())
}

/// A generator of test values: Knuth's MMIX constants.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The contents of the disk and its snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    pub(crate) disk: Vec<u8>,
    /// IDs and contents.
    pub(crate) snapshots: Vec<(String, Vec<u8>)>,
}

impl Model {
    pub(crate) fn new(size: u64) -> Model {
        Model {
            disk: vec![0; size as usize],
            snapshots: Vec::new(),
        }
    }

    fn position(&self, random: &mut Random) -> Option<usize> {
        let count = self.snapshots.len() as u64;
        (count > 0).then(|| random.below(count) as usize)
    }

    /// Reads the model of an image.
    pub(crate) fn of(file: &Arc<MemoryFile>) -> Model {
        let image = open(file.clone());
        let disk = read(&image);
        let list = block_on(image.snapshots()).unwrap();
        block_on(image.close()).unwrap();
        let content = |id: &String| read_at(file.clone(), id);
        Model {
            disk,
            snapshots: list
                .iter()
                .map(|s| (s.id.clone(), content(&s.id)))
                .collect(),
        }
    }

    pub(crate) fn write(&mut self, image: &Image, random: &mut Random) {
        let size = self.disk.len() as u64;
        let start = random.below(size);
        let len = 1 + random.below((size - start).min(40_000));
        let range = start as usize..(start + len) as usize;
        match random.below(6) {
            0 => {
                self.disk[range].fill(0);
                let zero = ZeroOptions {
                    space: Space::of_unmap(random.below(2) == 0),
                    ..ZeroOptions::default()
                };
                block_on(image.write_zeroes(start, len, zero)).unwrap();
            }
            1 => {
                block_on(image.discard(start, len)).unwrap();
                let now = block_on(image.read(start, BufMut::zeroed(len as usize))).unwrap();
                for (new, old) in now.iter().zip(&mut self.disk[range]) {
                    assert!(*new == 0 || new == old);
                    *old = *new;
                }
            }
            _ => {
                let seed = random.below(250);
                let data: Vec<u8> = (0..len).map(|i| (i / 9 + seed) as u8 | 1).collect();
                self.disk[range].copy_from_slice(&data);
                let data = Buf::from(data);
                block_on(image.write(start, data, Durability::Cached)).unwrap();
            }
        }
    }

    /// A whole cluster, compressed.
    pub(crate) fn compress(&mut self, image: &Image, random: &mut Random) {
        let unit = image.layers()[0]
            .header
            .as_ref()
            .unwrap()
            .geometry()
            .cluster_bytes();
        let size = self.disk.len() as u64;
        let start = random.below(size.div_ceil(unit)) * unit;
        let len = unit.min(size - start);
        let data = vec![1 + random.below(255) as u8; len as usize];
        self.disk[start as usize..(start + len) as usize].copy_from_slice(&data);
        block_on(image.write_compressed(start, Buf::from(data))).unwrap();
    }

    pub(crate) fn create(&mut self, image: &Image, name: &str) {
        let id = block_on(image.create_snapshot(&named(name), &Job::default())).unwrap();
        self.snapshots.push((id, self.disk.clone()));
    }

    fn apply(&mut self, image: &Image, position: usize) {
        let (id, content) = self.snapshots[position].clone();
        block_on(image.apply_snapshot(&by_id(&id), &Job::default())).unwrap();
        self.disk = content;
    }

    pub(crate) fn delete(&mut self, image: &Image, position: usize) {
        let (id, _) = self.snapshots.remove(position);
        block_on(image.delete_snapshot(&by_id(&id), &Job::default())).unwrap();
    }

    pub(crate) fn step(&mut self, image: &Image, random: &mut Random) {
        match (random.below(12), self.position(random)) {
            (0, _) if self.snapshots.len() < 4 => self.create(image, "s"),
            (1, Some(position)) => self.apply(image, position),
            (2, Some(position)) => self.delete(image, position),
            (3, _) => block_on(image.flush()).unwrap(),
            (4, _) => self.compress(image, random),
            (5, _) if image.layers()[0].header.as_ref().unwrap().version > 2 => {
                let most = 1 + random.below(600_000) / 512 * 512 + 511;
                self.disk.resize(most as usize, 0);
                block_on(image.resize(most)).unwrap();
            }
            _ => self.write(image, random),
        }
    }

    /// Everything reads as it must.
    pub(crate) fn judge(&self, file: &Arc<MemoryFile>, what: &str) {
        let found = Model::of(file);
        assert_eq!(found.disk.len(), self.disk.len(), "{what}: size");
        assert!(found.disk == self.disk, "{what}: the disk differs");
        let ids = |model: &Model| -> Vec<String> {
            model.snapshots.iter().map(|(id, _)| id.clone()).collect()
        };
        assert_eq!(ids(&found), ids(self), "{what}");
        for ((id, found), (_, wanted)) in found.snapshots.iter().zip(&self.snapshots) {
            assert!(found == wanted, "{what}: snapshot {id} differs");
        }
    }
}

/// Creation options of the shapes, and the size of the disk.
pub(crate) const SHAPES: [(&str, u64); 10] = [
    ("", 300 << 10),
    ("compat=0.10", 300 << 10),
    ("cluster_size=512", 200 << 10),
    ("cluster_size=4096", 500_224),
    ("cluster_size=4096,compat=0.10", 500_224),
    ("cluster_size=512,refcount_bits=4", 100 << 10),
    ("cluster_size=4096,refcount_bits=8", 300 << 10),
    ("cluster_size=4096,refcount_bits=64", 300 << 10),
    ("extended_l2=on,cluster_size=16384", 400 << 10),
    (
        "extended_l2=on,cluster_size=65536,lazy_refcounts=on",
        300 << 10,
    ),
];

pub(crate) fn checked_clean(file: &MemoryFile, what: &str) {
    let mut findings = Vec::new();
    let result = crate::support::our_check(file.contents(), &mut findings).unwrap();
    assert!(result.is_clean(), "{what}: {findings:?}");
}

pub(crate) fn made(create_options: &str, size: u64) -> Vec<u8> {
    crate::support::Image::create(create_options, &size.to_string(), &[]).bytes
}

#[test]
fn every_snapshot_reads_as_it_was() {
    if !crate::support::peers_are_installed() {
        return;
    }
    for (create_options, size) in SHAPES {
        let mut bytes = made(create_options, size);
        for seed in 0..3 {
            let random = &mut Random(seed * 77 + size);
            let mut model = Model::new(size);
            for session in 0..3 {
                let what = format!("{create_options}, seed {seed}, session {session}");
                let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
                let image = open(file.clone());
                for _ in 0..40 {
                    model.step(&image, random);
                }
                assert!(read(&image) == model.disk, "{what}: before closing");
                block_on(image.close()).unwrap();
                checked_clean(&file, &what);
                model.judge(&file, &what);
                bytes = file.contents();
            }
            bytes = made(create_options, size);
        }
    }
}
