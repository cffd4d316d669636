//! The mark on images that are being filled: after a crash at any moment either every program
//! refuses the image, or it has all that was written.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::crash::{Recorder, each_crash};
use crate::support::slow::NoFiles;
use cowslip::error::Feature;
use cowslip::file::Durability;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image, Result};

const DISK_BYTES: u64 = 1 << 20;
const PIECE_BYTES: u64 = 48 << 10;

async fn open(bytes: Vec<u8>, writable: bool) -> Result<Image> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable,
        ..OpenOptions::default()
    };
    let file = Arc::new(MemoryFile::new("image", bytes, 1));
    Image::open(file, options, &NoFiles).await
}

fn new_image(cluster_bytes: u64) -> Arc<Recorder> {
    let file = Recorder::new(Vec::new());
    let mut options = CreateOptions::new(DISK_BYTES);
    options.cluster_size = cluster_bytes;
    block_on(create(file.clone(), None, &options)).unwrap();
    Recorder::new(file.contents())
}

/// Fills the disk with ones, marked meanwhile. Returns the operations on the file by the time that
/// it was marked.
async fn fill(file: &Arc<Recorder>) -> usize {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        ..OpenOptions::default()
    };
    let image = Image::open(Arc::clone(file) as _, options, &NoFiles).await;
    let image = image.unwrap();
    image.mark_unfinished().await.unwrap();
    let marked = file.ops().len();
    for offset in (0..DISK_BYTES).step_by(PIECE_BYTES as usize) {
        let bytes = PIECE_BYTES.min(DISK_BYTES - offset) as usize;
        let data = Buf::from(vec![1; bytes]);
        image.write(offset, data, Durability::Cached).await.unwrap();
    }
    image.mark_finished().await.unwrap();
    image.close().await.unwrap();
    marked
}

/// Whether the disk is complete; false where the image is refused with the words of the mark.
async fn is_complete(bytes: Vec<u8>, writable: bool) -> bool {
    let image = match open(bytes, writable).await {
        Ok(image) => image,
        Err(Error::Unsupported { feature, .. }) => {
            let Feature::Qcow2(names) = feature else {
                panic!("{feature}");
            };
            assert_eq!(names, ["unfinished copy, to be made again"]);
            return false;
        }
        Err(error) => panic!("{error}"),
    };
    let data = image.read(0, BufMut::zeroed(DISK_BYTES as usize)).await;
    assert!(data.unwrap().iter().all(|&byte| byte == 1));
    image.close().await.unwrap();
    true
}

#[test]
fn a_crash_leaves_an_image_that_is_refused_or_complete() {
    // Small clusters have no room for the names of features.
    for cluster_bytes in [512, 64 << 10] {
        let file = new_image(cluster_bytes);
        let mut start = file.contents();
        let marked = block_on(fill(&file));
        let ops = file.ops();
        for op in &ops[..marked] {
            op.apply(&mut start, usize::MAX);
        }
        let (mut refused, mut complete) = (0, 0);
        each_crash(&start, &ops[marked..], |_, bytes| {
            for writable in [false, true] {
                match block_on(is_complete(bytes.to_vec(), writable)) {
                    true => complete += 1,
                    false => refused += 1,
                }
            }
        });
        assert!(refused > 10 && complete > 1, "{refused} {complete}");
        assert!(block_on(is_complete(file.contents(), true)));
    }
}
