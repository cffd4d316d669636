//! The images: made, filled and looked at by our own engine.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use cowslip::blocking::{BlockingDisk, wait};
use cowslip::file::BlockFile;
use cowslip::file::host::{CreateMode, HostGate, HostOptions, open_host_file};
use cowslip::image::OpenOptions;
use cowslip::qcow2::check::{CheckOptions, Finding, Observer, check};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{BufMut, Image};

use crate::runs::{REQUEST_BYTES, Requests, block, compare};

fn host(create: CreateMode) -> HostOptions {
    HostOptions {
        writable: true,
        create,
        ..HostOptions::default()
    }
}

/// Makes an empty image with the format's usual options.
pub fn make(path: &Path, disk_bytes: u64) {
    if path.exists() {
        fs::remove_file(path).expect("an image of before goes");
    }
    let file = open_host_file(path, &host(CreateMode::CreateNew)).expect("a new file");
    wait(create(file, None, &CreateOptions::new(disk_bytes))).expect("a new image");
}

fn open(path: &Path) -> BlockingDisk<Image> {
    let file = open_host_file(path, &host(CreateMode::OpenExisting)).expect("the image's file");
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    BlockingDisk::new(wait(Image::open(file, options, &HostGate::default())).expect("an image"))
}

/// Makes an image each of whose blocks has its content.
pub fn make_full(path: &Path, disk_bytes: u64) {
    make(path, disk_bytes);
    let disk = open(path);
    let mut batch = BufMut::zeroed(1 << 20);
    let count = batch.len() as u64;
    for start in (0..disk_bytes).step_by(batch.len()) {
        for at in (0..count).step_by(REQUEST_BYTES as usize) {
            let end = (at + REQUEST_BYTES) as usize;
            batch[at as usize..end].copy_from_slice(&block(start + at));
        }
        disk.write_at(&batch, start).expect("the image is filled");
    }
    disk.flush().expect("a flush");
    wait(disk.disk().close()).expect("the end");
}

/// Findings of a check of an image.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flaws {
    pub leaks: u64,
    pub corruptions: u64,
}

struct Silent;

impl Observer for Silent {
    fn finding(&mut self, _: &Finding) {}
}

/// Checks the tables of an image, and that all writes of a run are there.
pub fn verify(path: &Path, requests: &Requests) -> Flaws {
    let flaws = wait(check_tables(path));
    let disk = open(path);
    let mut bytes = BufMut::zeroed(REQUEST_BYTES as usize);
    for index in 0..requests.made() {
        let offset = requests.offset(index);
        disk.read_at(&mut bytes, offset).expect("a read");
        compare(offset, &bytes);
    }
    wait(disk.disk().close()).expect("the end");
    flaws
}

async fn check_tables(path: &Path) -> Flaws {
    let options = HostOptions::default();
    let file: Arc<dyn BlockFile> = open_host_file(path, &options).expect("the image's file");
    let result = check(&file, &CheckOptions::default(), &mut Silent).await;
    let result = result.expect("a check");
    Flaws {
        leaks: result.leaks,
        corruptions: result.corruptions,
    }
}
