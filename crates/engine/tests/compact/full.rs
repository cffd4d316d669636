//! Compaction on a file system that is full, or nearly.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cowslip::errno::ENOSPC;
use cowslip::file::Durability;
use cowslip::job::{Attendant, Moment};
use cowslip::qcow2::compact::{CompactOptions, Compaction};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, Error, Image, Job, Result};

use crate::snapshots::read;
use crate::support::sparse::{BLOCK, Sparse};
use crate::support::{block_on, our_check};

const CLUSTER: u64 = 64 << 10;
const CLUSTERS: u64 = 200;

/// Counts the looks at all tables: a check or a survey begins with nothing to move.
struct Looks(Arc<AtomicUsize>);

impl Attendant for Looks {
    fn pace(&self, bytes: u64) -> Option<Moment> {
        self.0.fetch_add(usize::from(bytes == 0), Ordering::Relaxed);
        None
    }
}

/// An image, written from the end of its disk to the beginning, whose first half lies in holes: the
/// end of the disk was discarded.
fn half_empty() -> (Arc<Sparse>, Image) {
    let file = Sparse::new(Vec::new());
    let options = CreateOptions::new(CLUSTERS * CLUSTER);
    block_on(create(file.clone(), None, &options)).unwrap();
    let image = Sparse::open(&file);
    for number in (0..CLUSTERS).rev() {
        let data = Buf::copy_of(&vec![number as u8 + 1; CLUSTER as usize]);
        block_on(image.write(number * CLUSTER, data, Durability::Cached)).unwrap();
    }
    block_on(image.flush()).unwrap();
    let half = CLUSTERS / 2 * CLUSTER;
    block_on(image.discard(half, half)).unwrap();
    block_on(image.flush()).unwrap();
    (file, image)
}

/// Compacts, and returns how often it has looked at all tables.
fn compact(image: &Image, defragment: bool) -> (Result<Compaction>, usize) {
    let looks = Arc::new(AtomicUsize::new(0));
    let job = Job::attended(Looks(Arc::clone(&looks)));
    let options = CompactOptions {
        defragment,
        ..CompactOptions::default()
    };
    let done = block_on(image.compact(&options, &job));
    (done, looks.load(Ordering::Relaxed))
}

#[test]
fn without_any_space_it_gives_up_at_once() {
    for (defragment, most) in [(false, 2), (true, 4)] {
        let (file, image) = half_empty();
        let disk = read(&image);
        file.leave(0);
        let (done, looks) = compact(&image, defragment);
        assert!(
            matches!(&done, Err(Error::Io { source, .. }) if source.raw_os_error() == Some(ENOSPC)),
            "{done:?}"
        );
        assert!(looks <= most, "defragment {defragment}: {looks} looks");
        // Nothing is lost, and with some space it does what it could not do.
        assert!(read(&image) == disk);
        file.leave((2 * CLUSTER / BLOCK) as usize);
        let (done, _) = compact(&image, defragment);
        let done = done.unwrap();
        assert!(done.file_bytes <= (CLUSTERS / 2 + 8) * CLUSTER, "{done:?}");
        assert!(read(&image) == disk);
        block_on(image.close()).unwrap();
        let checked = our_check(file.memory.contents(), &mut Vec::new()).unwrap();
        assert_eq!((checked.corruptions, checked.leaks), (0, 0));
    }
}

#[test]
fn with_space_for_few_clusters_it_takes_no_further_look_at_the_tables() {
    for clusters in [1, 3, 10] {
        let (file, image) = half_empty();
        let disk = read(&image);
        file.leave((clusters * CLUSTER / BLOCK) as usize);
        let (done, looks) = compact(&image, false);
        let done = done.unwrap();
        assert_eq!(done.moved_bytes, CLUSTERS / 2 * CLUSTER);
        assert_eq!(looks, 2, "a check and a survey");
        assert!(read(&image) == disk);
        block_on(image.close()).unwrap();
    }
}
