//! Publications that stand still while others withdraw and prune, and answers that are lost.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cowslip_block::Job;
use cowslip_block::random::Random;
use cowslip_publish::catalog;
use cowslip_publish::location::{Location, Version};
use cowslip_publish::objects::{Existing, ObjectError, ObjectFuture, ObjectInfo, Objects};
use cowslip_publish::prune::{PruneOptions, prune};
use cowslip_publish::store::{Kind, Store};

use crate::shared::{change, open, publish_bytes, random_bytes, read_all, small_request};
use crate::simulated::{Client, Simulated, run};

const GRACE: Duration = Duration::from_secs(3600);

/// A client that stands still before one of its requests. All that its clock could tell it of that
/// it does not see, so that the store's answers have to do.
#[derive(Debug)]
struct Sleeper {
    client: Arc<Client>,
    store: Simulated,
    /// Requests before it stands still.
    left: AtomicU64,
    /// The last request looked for the lease: between that and its renewal the clocks decide, which
    /// a test of the crate itself shows.
    is_renewing: AtomicBool,
    has_slept: AtomicBool,
}

impl Sleeper {
    fn before(&self, looks_for_lease: bool) {
        let is_renewing = self.is_renewing.swap(looks_for_lease, Ordering::Relaxed);
        if self.has_slept.load(Ordering::Relaxed) || self.left.load(Ordering::Relaxed) > 0 {
            let left = self.left.load(Ordering::Relaxed);
            self.left.store(left.saturating_sub(1), Ordering::Relaxed);
            return;
        }
        if !is_renewing {
            self.has_slept.store(true, Ordering::Relaxed);
            meanwhile(&self.store);
        }
    }
}

/// The version that is built upon is withdrawn, and what nothing keeps is removed.
fn meanwhile(store: &Simulated) {
    let others = Store::new(store.client(), "sim");
    let first = Location {
        root: "sim".to_string(),
        name: "one".to_string(),
        version: Version::Number(1),
    };
    run(catalog::withdraw(&others, &first)).unwrap();
    store.world().clock_ms += 2 * GRACE.as_millis() as i64;
    let options = PruneOptions {
        grace: GRACE,
        dry_run: false,
        random: [8; 16],
    };
    run(prune(&others, &options, &Job::default())).unwrap();
}

fn is_lease(key: &str) -> bool {
    key.starts_with(&Kind::Leases.folder())
}

impl Objects for Sleeper {
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()> {
        self.before(false);
        self.client.put(key, bytes, existing)
    }

    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        self.before(false);
        self.client.get(key, range)
    }

    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo> {
        self.before(is_lease(key));
        self.client.info(key)
    }

    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        self.before(false);
        self.client.list(prefix)
    }

    fn delete(&self, key: &str) -> ObjectFuture<'_, ()> {
        self.before(false);
        self.client.delete(key)
    }
}

#[test]
fn a_publication_that_stood_still_gives_no_name_to_what_was_pruned() {
    let (mut given_up, mut done) = (0, 0);
    for at in 0.. {
        let mut rng = Random(17);
        let store = Simulated::new(at);
        let client = Store::new(store.client(), "sim");
        let mut bytes = random_bytes(&mut rng, 512 << 10);
        let request = small_request("one", &mut rng);
        run(publish_bytes(&client, &bytes, &request)).unwrap();
        change(&mut rng, &mut bytes);
        let sleeper = Arc::new(Sleeper {
            client: store.client(),
            store: store.clone(),
            left: AtomicU64::new(at),
            is_renewing: AtomicBool::new(false),
            has_slept: AtomicBool::new(false),
        });
        let slow = Store::new(sleeper.clone(), "sim");
        let published = run(publish_bytes(
            &slow,
            &bytes,
            &small_request("one", &mut rng),
        ));
        match published {
            Ok(_) => done += 1,
            Err(_) => given_up += 1,
        }
        for (name, numbers) in run(catalog::versions(&client)).unwrap() {
            for number in numbers {
                let disk = run(open(&client, &name, Version::Number(number))).unwrap();
                let read = run(read_all(&disk));
                assert!(read.is_ok(), "before request {at}: {:?}", read.map(drop));
            }
        }
        if !sleeper.has_slept.load(Ordering::Relaxed) {
            break;
        }
    }
    assert!(given_up > 10 && done > 3, "{given_up} {done}");
}

/// A client whose first answer to each write is lost; it repeats the request, or fails.
#[derive(Debug)]
struct Deaf {
    client: Arc<Client>,
    repeats: bool,
}

impl Objects for Deaf {
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()> {
        let key = key.to_string();
        Box::pin(async move {
            self.client.put(&key, bytes.clone(), existing).await?;
            match (self.repeats, existing) {
                (false, Existing::Keep) => Err(ObjectError::Failed("no answer".to_string())),
                _ => self.client.put(&key, bytes, existing).await,
            }
        })
    }

    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        self.client.get(key, range)
    }

    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo> {
        self.client.info(key)
    }

    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        self.client.list(prefix)
    }

    fn delete(&self, key: &str) -> ObjectFuture<'_, ()> {
        self.client.delete(key)
    }
}

#[test]
fn a_name_whose_answer_was_lost_is_given_once() {
    for repeats in [true, false] {
        let mut rng = Random(18);
        let store = Simulated::new(3);
        let client = store.client();
        let deaf = Store::new(Arc::new(Deaf { client, repeats }), "sim");
        for number in 1..=3 {
            let bytes = random_bytes(&mut rng, 64 << 10);
            let request = small_request("one", &mut rng);
            let done = run(publish_bytes(&deaf, &bytes, &request)).unwrap();
            assert_eq!(done.record.version, number);
            let disk = run(open(&deaf, "one", Version::Number(number))).unwrap();
            assert!(run(read_all(&disk)).unwrap() == bytes);
        }
        let versions = run(catalog::versions(&deaf)).unwrap();
        assert_eq!(versions["one"], [1, 2, 3]);
        // Another's name is no answer to ours.
        assert!(!run(deaf.put_new("a", vec![1])).is_ok_and(|is_new| !is_new));
        let other = Store::new(store.client(), "sim");
        assert!(!run(other.put_new("a", vec![2])).unwrap());
        assert!(!run(other.put_new("a", vec![1, 1])).unwrap());
    }
}
