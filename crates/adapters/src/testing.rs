//! An image in a file, and requests that any adapter can carry out, against a model of the disk.
#![allow(clippy::unwrap_used)] // Failing a test is a panic.

use std::sync::Arc;

use cowslip::blocking::wait;
use cowslip::file::BlockFile;
use cowslip::file::host::{CreateMode, HostGate, HostOptions, open_host_file};
use cowslip::image::{DiscardPolicy, OpenOptions};
use cowslip::qcow2::check::{CheckOptions, check};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Image, SharedMemory};

pub const SIZE: u64 = 2 << 20;

/// An image that vanishes with the test.
pub struct Scratch {
    dir: tempfile::TempDir,
    pub file: Arc<dyn BlockFile>,
    pub image: Arc<Image>,
}

fn host(create: CreateMode) -> HostOptions {
    HostOptions {
        writable: true,
        create,
        ..HostOptions::default()
    }
}

impl Scratch {
    pub fn new() -> Scratch {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let (file, image) = wait(async {
            let file = open_host_file(&path, &host(CreateMode::CreateNew)).unwrap();
            create(file, None, &CreateOptions::new(SIZE)).await.unwrap();
            let file = open_host_file(&path, &host(CreateMode::OpenExisting)).unwrap();
            let options = OpenOptions {
                writable: true,
                discard: DiscardPolicy::Unmap,
                ..OpenOptions::default()
            };
            let image = Image::open(Arc::clone(&file), options, &HostGate::default()).await;
            (file, image.unwrap())
        });
        Scratch {
            dir,
            file,
            image: Arc::new(image),
        }
    }

    /// Closes the image and has it checked.
    pub fn end(self, model: &[u8]) {
        let mut bytes = vec![0; SIZE as usize];
        let disk = cowslip::blocking::BlockingDisk::from(Arc::clone(&self.image));
        disk.read_at(&mut bytes, 0).unwrap();
        assert!(bytes == model, "the disk is what the model is");
        wait(self.image.close()).unwrap();
        drop((disk, self.image, self.file));
        let path = self.dir.path().join("disk");
        let file = open_host_file(&path, &HostOptions::default()).unwrap();
        let options = CheckOptions::default();
        let mut findings = Vec::new();
        wait(check(&file, &options, &mut findings)).unwrap();
        assert!(findings.is_empty(), "{findings:?}");
    }
}

/// The bytes of a request whose halves lie at the beginning of the memory and at 128 KiB.
pub fn read_halves(memory: &SharedMemory, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let (head, tail) = bytes.split_at_mut(len / 2);
    memory.read(0, head);
    memory.read(1 << 17, tail);
    bytes
}

/// A request of an adapter's test.
#[derive(Clone, Debug)]
pub enum Ask {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Flush,
}

/// Draws requests from a seed, and knows the disk that they make.
pub struct Model {
    state: u64,
    pub bytes: Vec<u8>,
    /// Offsets and lengths are multiples of this.
    unit: u64,
}

impl Model {
    pub fn new(seed: u64, unit: u64) -> Model {
        Model {
            state: seed,
            bytes: vec![0; SIZE as usize],
            unit,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005);
        self.state = self.state.wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % end
    }

    /// The next request, which the model has carried out.
    pub fn next(&mut self) -> Ask {
        let len = (1 + self.below(65536 / self.unit)) * self.unit;
        let offset = self.below((SIZE - len) / self.unit + 1) * self.unit;
        let range = offset as usize..(offset + len) as usize;
        match self.below(8) {
            0..3 => Ask::Read(offset, len as usize),
            3..6 => {
                let first = self.below(256) as u8;
                let bytes: Vec<u8> = (0..len).map(|i| first.wrapping_add(i as u8)).collect();
                self.bytes[range].copy_from_slice(&bytes);
                Ask::Write(offset, bytes)
            }
            6 => {
                self.bytes[range].fill(0);
                Ask::Zero(offset, len)
            }
            _ => Ask::Flush,
        }
    }

    /// Compares what was read.
    pub fn check(&self, offset: u64, read: &[u8]) {
        let range = offset as usize..offset as usize + read.len();
        assert!(
            read == &self.bytes[range],
            "{} bytes at {offset}",
            read.len()
        );
    }
}
