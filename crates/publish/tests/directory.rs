//! The same in a directory of the host.

use std::sync::Arc;
use std::time::Duration;

use cowslip_block::file::BlockFile;
use cowslip_block::random::Random;
use cowslip_block::{BufMut, Job};
use cowslip_publish::catalog;
use cowslip_publish::file::PublishedFile;
use cowslip_publish::location::{Location, Version};
use cowslip_publish::objects::Directory;
use cowslip_publish::prune::{PruneOptions, prune};
use cowslip_publish::store::Store;
use cowslip_queue::{Backend, Queue};

use crate::shared::{change, open, publish_bytes, random_bytes, read_all, small_request};

#[test]
fn a_directory_stores_published_disks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/with/the/first");
    check(Store::new(Arc::new(Directory::new(&path).unwrap()), "dir"));
    assert!(path.join("cowslip-published-1/names/one").is_dir());
}

#[test]
fn a_published_disk_is_read_without_a_queue() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(Arc::new(Directory::new(dir.path()).unwrap()), "dir");
    let mut rng = Random(42);
    let bytes = random_bytes(&mut rng, 2 << 20);
    let request = small_request("one", &mut rng);
    let disk = cowslip_queue::block_here(async {
        publish_bytes(&store, &bytes, &request).await.unwrap();
        open(&store, "one", Version::Newest).await.unwrap()
    });
    let file = PublishedFile::new(Arc::new(disk));
    // In order, so that it also reads ahead.
    for at in (0..bytes.len()).step_by(64 << 10) {
        let target = BufMut::zeroed(64 << 10).into();
        let (outcome, target) = cowslip_queue::block_here(file.read(at as u64, target));
        outcome.unwrap();
        assert!(target.to_vec() == bytes[at..at + (64 << 10)], "{at}");
    }
}

fn check(store: Store) {
    let mut rng = Random(41);
    let mut bytes = random_bytes(&mut rng, 2 << 20);
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(async {
        for version in 1..=3 {
            let request = small_request("one", &mut rng);
            let done = publish_bytes(&store, &bytes, &request).await.unwrap();
            assert_eq!(done.record.version, version);
            let disk = open(&store, "one", Version::Newest).await.unwrap();
            assert!(read_all(&disk).await.unwrap() == bytes);
            change(&mut rng, &mut bytes);
        }
        let location = Location {
            root: "dir".to_string(),
            name: "one".to_string(),
            version: Version::Number(2),
        };
        catalog::withdraw(&store, &location).await.unwrap();
        let options = |grace| PruneOptions {
            grace: Duration::from_millis(grace),
            dry_run: false,
            random: [3; 16],
        };
        let job = Job::default();
        let pruned = prune(&store, &options(3_600_000), &job).await.unwrap();
        assert_eq!((pruned.objects, pruned.leases), (0, 0));
        // The lease of the version that was withdrawn keeps its index.
        assert!(pruned.spared_objects >= 1, "{pruned:?}");
        // Times of a file system may be as coarse as a tick of its clock.
        std::thread::sleep(Duration::from_millis(60));
        let pruned = prune(&store, &options(30), &job).await.unwrap();
        assert!(pruned.objects >= 1, "{pruned:?}");
        assert_eq!(pruned.spared_objects, 0);
        assert_eq!(pruned.leases, 3);
        let versions = catalog::versions(&store).await.unwrap();
        assert_eq!(versions["one"], [1, 3]);
        let disk = open(&store, "one", Version::Newest).await.unwrap();
        read_all(&disk).await.unwrap();
        let missing = open(&store, "one", Version::Number(2)).await.unwrap_err();
        let text = "There is no published disk 'sim/one@2': its versions are @3, @1";
        assert_eq!(missing.to_string(), text);
    });
}
