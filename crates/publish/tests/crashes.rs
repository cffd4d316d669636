//! Publications, withdrawals, prunings and pulls at the same time, killed at any request, on a
//! store whose requests fail: nothing wrong is readable afterwards, and what was published stays.
//!
//! `COWSLIP_PUBLISH_SEED=S COWSLIP_PUBLISH_SEEDS=1 cargo test -p cowslip-publish crashes` replays a
//! seed; more seeds are a soak.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use cowslip_block::random::Random;
use cowslip_block::{Job, Workers};
use cowslip_publish::catalog;
use cowslip_publish::digest::Digest;
use cowslip_publish::index::Index;
use cowslip_publish::location::{Location, Version};
use cowslip_publish::prune::{PruneOptions, prune};
use cowslip_publish::publish::{Parent, Published};
use cowslip_publish::pull::{Before, pull};
use cowslip_publish::store::{FOLDER, Kind, Store, index_key, pack_key};

use crate::shared::{
    bytes_of, change, disk_of, open, open_digest, publish_bytes, random_bytes, read_all,
    small_request,
};
use crate::simulated::{Program, Simulated, run, run_all};

const GRACE: Duration = Duration::from_secs(3600);
const NAMES: [&str; 2] = ["one", "two"];

/// The state of a seed.
struct Run {
    store: Simulated,
    rng: Random,
    /// Bytes of the disks.
    disks: [Vec<u8>; 2],
    /// All bytes that were ever published under a name.
    tried: BTreeMap<&'static str, Vec<Vec<u8>>>,
    /// Versions that must be there: name, number, and the bytes.
    published: BTreeMap<(&'static str, u32), Vec<u8>>,
}

fn environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn what_is_killed_or_fails_leaves_nothing_wrong() {
    let first = environment("COWSLIP_PUBLISH_SEED", 1);
    for seed in first..first + environment("COWSLIP_PUBLISH_SEEDS", 40) {
        let outcome = std::panic::catch_unwind(|| Run::new(seed).go());
        if let Err(panic) = outcome {
            eprintln!("COWSLIP_PUBLISH_SEED={seed} COWSLIP_PUBLISH_SEEDS=1");
            std::panic::resume_unwind(panic);
        }
    }
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut rng = Random(seed);
        let disks = [(); 2].map(|()| {
            let len = (64 + rng.below(100) as usize) * 4096 + rng.below(3) as usize * 512;
            random_bytes(&mut rng, len)
        });
        Run {
            store: Simulated::new(seed ^ 0x5eed),
            rng,
            disks,
            tried: BTreeMap::new(),
            published: BTreeMap::new(),
        }
    }

    fn go(mut self) {
        for _ in 0..environment("COWSLIP_PUBLISH_STEPS", 12) {
            self.step();
            self.store.settle();
            self.check();
            if self.rng.one_in(3) {
                self.store.world().clock_ms += 2 * GRACE.as_millis() as i64;
            }
        }
        self.end();
    }

    /// Some programs at once.
    fn step(&mut self) {
        for disk in &mut self.disks {
            for _ in 0..self.rng.below(4) {
                change(&mut self.rng, disk);
            }
        }
        let outcomes = Mutex::new(Vec::new());
        let withdrawn = Mutex::new(Vec::new());
        let mut programs: Vec<Program<'_>> = Vec::new();
        for _ in 0..1 + self.rng.below(4) {
            let killed_after = self.rng.one_in(2).then(|| self.rng.below(60));
            let client = self.store.client_with(killed_after, self.rng.one_in(3));
            let store = Store::new(client.clone(), "sim");
            let at = self.rng.below(2) as usize;
            let (name, other) = (NAMES[at], NAMES[1 - at]);
            let mut rng = Random(self.rng.next());
            match self.rng.below(5) {
                0..=1 => {
                    let bytes = self.disks[at].clone();
                    self.tried.entry(name).or_default().push(bytes.clone());
                    let outcomes = &outcomes;
                    let program = async move {
                        let mut request = small_request(name, &mut rng);
                        if rng.one_in(2) {
                            request.parents.extend(newest(&store, other).await);
                        }
                        if let Ok(done) = publish_bytes(&store, &bytes, &request).await {
                            outcomes.lock().unwrap().push((name, done, bytes));
                        }
                    };
                    programs.push((Box::pin(program), client));
                }
                2 => {
                    let withdrawn = &withdrawn;
                    let program = async move {
                        let Ok(Some(number)) = catalog::newest(&store, name).await else {
                            return;
                        };
                        // Killed or failed, it may be withdrawn or not.
                        withdrawn.lock().unwrap().push((name, number));
                        drop(catalog::withdraw(&store, &location(name, number)).await);
                    };
                    programs.push((Box::pin(program), client));
                }
                3 => {
                    let options = prune_options(&mut rng);
                    let program = async move {
                        drop(prune(&store, &options, &Job::default()).await);
                    };
                    programs.push((Box::pin(program), client));
                }
                _ => {
                    let program = async move { read_beside(&store, name).await };
                    programs.push((Box::pin(program), client));
                }
            }
        }
        run_all(programs, &mut self.rng);
        self.note(outcomes.into_inner().unwrap());
        for version in withdrawn.into_inner().unwrap() {
            self.published.remove(&version);
        }
    }

    fn note(&mut self, outcomes: Vec<(&'static str, Published, Vec<u8>)>) {
        for (name, done, bytes) in outcomes {
            self.published.insert((name, done.record.version), bytes);
        }
    }

    /// Every name stands for a whole disk that was published under it, and none is missing.
    fn check(&self) {
        let store = Store::new(self.store.client(), "sim");
        let versions = run(catalog::versions(&store)).unwrap();
        for (name, numbers) in &versions {
            for number in numbers {
                let disk = run(open(&store, name, Version::Number(*number))).unwrap();
                let read = run(read_all(&disk)).unwrap();
                let tried = &self.tried[name.as_str()];
                assert!(tried.contains(&read), "{name}@{number} is another disk");
            }
        }
        for ((name, number), bytes) in &self.published {
            let is_there = versions.get(*name).is_some_and(|all| all.contains(number));
            assert!(is_there, "{name}@{number} is gone");
            let disk = run(open(&store, name, Version::Number(*number))).unwrap();
            assert!(run(read_all(&disk)).unwrap() == *bytes, "{name}@{number}");
        }
    }

    /// After the last publication a pruning leaves what names refer to, and nothing else.
    fn end(mut self) {
        let store = Store::new(self.store.client(), "sim");
        self.store.world().clock_ms += 30 * GRACE.as_millis() as i64;
        let options = prune_options(&mut self.rng);
        run(prune(&store, &options, &Job::default())).unwrap();
        self.check();
        let mut needed = HashSet::new();
        for (name, numbers) in run(catalog::versions(&store)).unwrap() {
            for number in numbers {
                needed.insert(format!("{FOLDER}/names/{name}/{number:010}"));
                let record = run(store.version(&name, number)).unwrap().unwrap();
                let digest = Digest::from_hex(&record.index).unwrap();
                needed.insert(index_key(digest));
                let index: Index = run(store.index(digest)).unwrap().unwrap();
                needed.extend(index.packs.iter().map(pack_key));
            }
        }
        let there: HashSet<String> = self.store.world().objects.keys().cloned().collect();
        assert_eq!(there, needed);
    }
}

fn location(name: &str, number: u32) -> Location {
    Location {
        root: "sim".to_string(),
        name: name.to_string(),
        version: Version::Number(number),
    }
}

fn prune_options(rng: &mut Random) -> PruneOptions {
    let mut random = [0; 16];
    rng.fill(&mut random);
    PruneOptions {
        grace: GRACE,
        dry_run: false,
        random,
    }
}

async fn newest(store: &Store, name: &str) -> Option<Parent> {
    let version = catalog::newest(store, name).await.ok()??;
    let record = store.version(name, version).await.ok()??;
    Some(Parent {
        name: name.to_string(),
        version,
        index: Digest::from_hex(&record.index)?,
    })
}

/// A pull beside everything else has the right bytes, or fails.
async fn read_beside(store: &Store, name: &str) {
    let Ok(disk) = open(store, name, Version::Newest).await else {
        return;
    };
    let target = disk_of(&vec![0; disk.size() as usize]);
    let (workers, job) = (Workers::default(), Job::default());
    let pulled = pull(&disk, &target, Before::Zeroes, (&workers, &job)).await;
    if pulled.is_ok()
        && let Ok(read) = read_all(&disk).await
    {
        assert!(bytes_of(&target) == read, "a pull differs from a read");
    }
}

/// A store to which bytes were published as `one`.
fn published(seed: u64, bytes: &[u8], rng: &mut Random) -> Simulated {
    let store = Simulated::new(seed);
    let client = Store::new(store.client(), "sim");
    let request = small_request("one", rng);
    run(publish_bytes(&client, bytes, &request)).unwrap();
    store
}

#[test]
fn a_publication_killed_at_each_request_is_continued() {
    let mut rng = Random(5);
    let bytes = random_bytes(&mut rng, 1 << 20);
    let whole = {
        let store = published(1, &bytes, &mut rng);
        let world = store.world();
        (world.requests, world.put_bytes)
    };
    for killed_after in 0..whole.0 {
        let store = Simulated::new(killed_after);
        let client = store.client_with(Some(killed_after), false);
        let killed = Store::new(client.clone(), "sim");
        let request = small_request("one", &mut rng);
        let program = async {
            drop(publish_bytes(&killed, &bytes, &request).await);
        };
        run_all(vec![(Box::pin(program), client)], &mut rng);
        store.settle();
        let again = Store::new(store.client(), "sim");
        let there = run(catalog::newest(&again, "one")).unwrap();
        let before = store.world().put_bytes;
        let done = run(publish_bytes(
            &again,
            &bytes,
            &small_request("one", &mut rng),
        ))
        .unwrap();
        assert_eq!(done.record.version, there.unwrap_or(0) + 1);
        let added = store.world().put_bytes - before;
        let digest = Digest::from_hex(&done.record.index).unwrap();
        let disk = run(open_digest(&again, digest)).unwrap();
        assert!(run(read_all(&disk)).unwrap() == bytes);
        // At most what was under way when it was killed is stored twice.
        let lost = 5 * (160 << 10);
        assert!(
            before + added <= whole.1 + lost,
            "{killed_after}: {before} and {added} of {}",
            whole.1
        );
    }
}

#[test]
fn a_pull_killed_at_each_request_is_continued_from_any_remains() {
    let mut rng = Random(6);
    let bytes = random_bytes(&mut rng, (1 << 20) + 512);
    let store = published(2, &bytes, &mut rng);
    let client = Store::new(store.client(), "sim");
    let (workers, job) = (Workers::default(), Job::default());
    for killed_after in 0..40 {
        let target = disk_of(&vec![0; bytes.len()]);
        let killed = store.client_with(Some(killed_after), false);
        let from = Store::new(killed.clone(), "sim");
        let program = async {
            let Ok(disk) = open(&from, "one", Version::Newest).await else {
                return;
            };
            drop(pull(&disk, &target, Before::Zeroes, (&workers, &job)).await);
        };
        run_all(vec![(Box::pin(program), killed)], &mut rng);
        // What a power failure may leave of it.
        let mut remains = bytes_of(&target);
        if rng.one_in(2) {
            change(&mut rng, &mut remains);
        }
        let target = disk_of(&remains);
        let disk = run(open(&client, "one", Version::Newest)).unwrap();
        let pulled = run(pull(&disk, &target, Before::Interrupted, (&workers, &job))).unwrap();
        assert!(bytes_of(&target) == bytes, "{killed_after}");
        assert!(pulled.kept_bytes <= pulled.data_bytes);
        let again = run(pull(&disk, &target, Before::Interrupted, (&workers, &job))).unwrap();
        assert_eq!(again.kept_bytes, again.data_bytes);
    }
}

#[test]
fn a_pruning_without_an_index_removes_nothing() {
    let mut rng = Random(7);
    let bytes = random_bytes(&mut rng, 1 << 20);
    let store = Simulated::new(3);
    let client = Store::new(store.client(), "sim");
    for name in NAMES {
        run(publish_bytes(
            &client,
            &bytes,
            &small_request(name, &mut rng),
        ))
        .unwrap();
    }
    store.world().clock_ms += 30 * GRACE.as_millis() as i64;
    let record = run(client.version("one", 1)).unwrap().unwrap();
    let key = format!("{}/{}", Kind::Indexes.folder(), record.index);
    let index = store.world().objects.remove(&key).unwrap();
    let before = store.world().objects.clone();
    let options = prune_options(&mut rng);
    let refused = run(prune(&client, &options, &Job::default())).unwrap_err();
    assert!(
        refused.to_string().contains("a name refers to it"),
        "{refused}"
    );
    assert_eq!(before, store.world().objects);
    let mut damaged = index.0.to_vec();
    damaged[200] ^= 1;
    store.world().objects.insert(key, (damaged.into(), index.1));
    let before = store.world().objects.clone();
    assert!(run(prune(&client, &options, &Job::default())).is_err());
    assert_eq!(before, store.world().objects);
}
