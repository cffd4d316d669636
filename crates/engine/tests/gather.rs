//! Writes of several requests that go down in one I/O: a failure stays with the request that it
//! concerns.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::slow::{FAILING, NoFiles, SlowFile};
use cowslip::image::{Durability, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Image};
use futures_util::future::join_all;

const CLUSTER: u64 = 4096;

fn open(file: &Arc<SlowFile>) -> Image {
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

/// Writes whole clusters at once; which of the writes succeed.
fn write_all(image: &Image, clusters: &[(u64, u8)]) -> Vec<bool> {
    let writes = clusters.iter().map(|&(cluster, byte)| {
        let data = Buf::copy_of(&[byte; CLUSTER as usize]);
        image.write(cluster * CLUSTER, data, Durability::Cached)
    });
    let done = block_on(join_all(writes));
    done.iter().map(Result::is_ok).collect()
}

#[test]
fn one_that_fails_leaves_those_beside_it_unharmed() {
    let file = SlowFile::new(Vec::new());
    let create_options = CreateOptions {
        cluster_size: CLUSTER,
        ..CreateOptions::new(1 << 20)
    };
    block_on(create(file.clone(), None, &create_options)).unwrap();
    let image = open(&file);
    // Space for tables and data is there, so that the four ask for their clusters together.
    assert_eq!(write_all(&image, &[(100, 1)]), [true]);
    let before = file.writes().len();
    let clusters = [(7, FAILING), (3, 0x11), (90, 0x22), (5, 0x33)];
    assert_eq!(write_all(&image, &clusters), [false, true, true, true]);
    let writes = file.writes().split_off(before);
    let joined = writes[0].clone();
    assert_eq!(joined.end - joined.start, 4 * CLUSTER, "{writes:x?}");
    // Then each alone.
    let mut again = writes[1..5].to_vec();
    again.sort_by_key(|write| write.start);
    for (number, write) in (0..).zip(again) {
        let start = joined.start + number * CLUSTER;
        assert_eq!(write, start..start + CLUSTER, "{writes:x?}");
    }
    let holds = |image: &Image| {
        for (cluster, byte) in clusters {
            let expected = if byte == FAILING { 0 } else { byte };
            let buf = BufMut::zeroed(CLUSTER as usize);
            let read = block_on(image.read(cluster * CLUSTER, buf)).unwrap();
            assert!(
                read[..] == [expected; CLUSTER as usize],
                "cluster {cluster}"
            );
        }
    };
    holds(&image);
    block_on(image.close()).unwrap();
    holds(&open(&file));
}
