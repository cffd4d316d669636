//! Stores of others as those of published disks, and what hostile ones can cost.

use std::time::Duration;

use cowslip_block::disk::{Disk, MemoryDisk};
use cowslip_block::file::Durability;
use cowslip_block::{Buf, BufMut, Job, Workers};
use cowslip_publish::catalog;
use cowslip_publish::disk::{CACHE_BYTES, PublishedDisk};
use cowslip_publish::location::{Location, Version};
use cowslip_publish::prune::{PruneOptions, prune};
use cowslip_publish::publish::{Request, publish};
use cowslip_publish::pull::{Before, pull};
use cowslip_publish::store::Store;
use cowslip_queue::block_here;
use cowslip_remote::object_store::memory::InMemory;
use cowslip_remote::{Environment, ObjectUrl, Retries, StoreOptions, locate};
use cowslip_testbed::moto::Moto;
use cowslip_testbed::web::{WebFault, WebObject, WebServer};

use super::*;

fn request(random: u8) -> Request {
    Request {
        name: "one".to_string(),
        parents: Vec::new(),
        changed: None,
        tracked_by: None,
        sizes: None,
        level: 1,
        pack_bytes: 1 << 20,
        reads_back: true,
        random: [random; 16],
        renewed_after: Duration::from_secs(60),
    }
}

fn location(number: u32) -> Location {
    Location {
        root: "memory".to_string(),
        name: "one".to_string(),
        version: Version::Number(number),
    }
}

/// The bytes of a version, read in place, and those of a disk that it was pulled to.
async fn read_back(store: &Store, number: u32) -> Vec<u8> {
    let location = location(number);
    let digest = catalog::index_digest(store, &location).await.unwrap();
    let way = (CACHE_BYTES, Workers::default());
    let disk = PublishedDisk::open(store, digest, "memory", way);
    let disk = disk.await.unwrap();
    let bytes = || BufMut::zeroed(disk.size() as usize).into();
    let read = disk.read(0, bytes()).await.unwrap().to_vec();
    let target = MemoryDisk::new("pulled", disk.size());
    let way = (&Workers::default(), &Job::default());
    pull(&disk, &target, Before::Zeroes, way).await.unwrap();
    assert!(target.read(0, bytes()).await.unwrap().to_vec() == read);
    read
}

#[test]
fn a_store_of_another_crate_stores_published_disks() {
    let folder = Adapter::new(Arc::new(InMemory::new()), "/a/folder/");
    check(
        &Store::new(Arc::new(folder), "memory"),
        Duration::from_millis(1),
    );
}

/// `cargo nextest run -p cowslip-nodes --features remote --run-ignored only moto`
#[test]
#[ignore = "needs moto_server"]
fn an_s3_server_of_others_stores_published_disks_moto() {
    let moto = Moto::start().unwrap();
    moto.put("/images", b"").unwrap();
    let environment = [
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ];
    let environment = environment.map(|(name, value)| (name.to_string(), value.to_string()));
    let options = StoreOptions {
        endpoint: Some(moto.url()),
        ..StoreOptions::default()
    };
    let url = ObjectUrl::of_name("s3://images/some/folder")
        .unwrap()
        .unwrap();
    let located = locate(&url, &options, &environment.into_iter().collect()).unwrap();
    let folder = Adapter::new(located.store, located.path.as_ref());
    // Its times have a resolution of a second.
    check(&Store::new(Arc::new(folder), "s3"), Duration::from_secs(2));
}

/// Publishes three versions, reads and pulls them, withdraws and prunes; times of the store are as
/// fine as `tick`.
fn check(store: &Store, tick: Duration) {
    let disk = MemoryDisk::new("disk", 3 << 20);
    let mut bytes = vec![0; 3 << 20];
    let (workers, job) = (Workers::default(), Job::default());
    block_here(async {
        for number in 1..=3_u32 {
            let changed = &mut bytes[number as usize * 500_000..][..400_000];
            for (at, byte) in (number..).zip(changed) {
                *byte = (at.wrapping_mul(2_654_435_761) >> 24) as u8;
            }
            let data = Buf::copy_of(&bytes).into();
            disk.write(0, data, Durability::Cached).await.unwrap();
            let done = publish(&disk, store, &request(number as u8), &workers, &job).await;
            assert_eq!(done.unwrap().record.version, number);
            assert!(read_back(store, number).await == bytes);
        }
        catalog::withdraw(store, &location(1)).await.unwrap();
        std::thread::sleep(3 * tick);
        let options = PruneOptions {
            grace: tick,
            dry_run: false,
            random: [9; 16],
        };
        let pruned = prune(store, &options, &job).await.unwrap();
        assert!(pruned.objects >= 1 && pruned.leases == 3, "{pruned:?}");
        let versions = catalog::versions(store).await.unwrap();
        assert_eq!(versions["one"], [2, 3]);
        assert!(read_back(store, 3).await == bytes);
    });
}

#[test]
fn a_list_ends_where_it_would_take_too_much_memory() {
    let mut folder = Adapter::new(Arc::new(InMemory::new()), "");
    folder.list_bytes_max = 1000;
    block_here(async {
        for number in 0..20 {
            let key = format!("a/{number:02}");
            let put = folder.put(&key, vec![1], Existing::Replace);
            put.await.unwrap();
            let listed = folder.list("a").await.map(|listed| listed.len());
            match listed {
                Ok(count) => assert!(count == number + 1 && count <= 14, "{count}"),
                Err(error) => {
                    let said =
                        "The list is too long: after 14 objects it would take more than 1000 bytes";
                    assert_eq!(error.to_string(), said);
                    assert!(number >= 14);
                }
            }
        }
    });
}

/// A bucket on a web server with a fault.
fn bucket(fault: WebFault) -> (WebServer, Adapter) {
    let server = WebServer::start().unwrap();
    server.put("/bucket/a", WebObject::tagged(vec![7; 100_000], "one"));
    let list = b"<ListBucketResult></ListBucketResult>".to_vec();
    server.put("/bucket", WebObject::tagged(list, "two"));
    server.judge(move |_| fault.clone());
    let url = ObjectUrl::of_name("s3://bucket/").unwrap().unwrap();
    let options = StoreOptions {
        endpoint: Some(server.url("")),
        region: Some("here".to_string()),
        anonymous: true,
        retries: Retries::ByCaller,
        ..StoreOptions::default()
    };
    let located = locate(&url, &options, &Environment::default()).unwrap();
    let folder = Adapter::new(located.store, located.path.as_ref());
    (server, folder)
}

#[test]
fn bodies_that_are_too_long_or_never_end_are_not_kept() {
    let (_server, folder) = bucket(WebFault::Nothing);
    assert_eq!(block_here(folder.get("a", 10..20)).unwrap(), [7; 10]);
    assert_eq!(block_here(folder.list("a")).unwrap(), []);
    for fault in [WebFault::LongBody(5000), WebFault::EndlessBody] {
        let (_server, folder) = bucket(fault);
        let read = block_here(folder.get("a", 10..20)).map_err(|error| error.to_string());
        let said = "more than 10 bytes came, which were asked for";
        assert_eq!(read, Err(said.to_string()));
    }
    let (_server, folder) = bucket(WebFault::EndlessBody);
    let listed = block_here(folder.list("a")).unwrap_err().to_string();
    assert!(listed.contains("has more than 16777216 bytes"), "{listed}");
}
