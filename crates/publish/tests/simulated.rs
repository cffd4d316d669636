//! A store in memory whose clients run in turns, by a seed: each request takes several turns, may
//! fail with or without effect, and a client may be killed at any request.

use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use cowslip_block::random::Random;
use cowslip_publish::objects::{Existing, ObjectError, ObjectFuture, ObjectInfo, Objects};

/// Keys of one page of a list.
const PAGE: usize = 3;

/// An object, and when it was written.
pub type Stored = (Arc<Vec<u8>>, i64);

/// The contents of a store.
#[derive(Debug)]
pub struct World {
    pub objects: BTreeMap<String, Stored>,
    pub clock_ms: i64,
    pub rng: Random,
    pub put_bytes: u64,
    pub requests: u64,
    /// Puts of killed clients that the store has not got to.
    late: Vec<(String, Arc<Vec<u8>>, Existing)>,
}

/// A store, for all clients.
#[derive(Clone, Debug)]
pub struct Simulated(Arc<Mutex<World>>);

impl Simulated {
    pub fn new(seed: u64) -> Simulated {
        Simulated(Arc::new(Mutex::new(World {
            objects: BTreeMap::new(),
            clock_ms: 1_000_000_000,
            rng: Random(seed),
            put_bytes: 0,
            requests: 0,
            late: Vec::new(),
        })))
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// A client without faults.
    pub fn client(&self) -> Arc<Client> {
        self.client_with(None, false)
    }

    /// A client that is killed at a request, and whose requests fail now and then.
    pub fn client_with(&self, killed_after: Option<u64>, has_faults: bool) -> Arc<Client> {
        Arc::new(Client {
            store: self.clone(),
            left: Mutex::new(killed_after),
            has_faults,
            is_dead: AtomicBool::new(false),
        })
    }

    /// Requests that were under way when their clients were killed take effect now, or never.
    pub fn settle(&self) {
        let mut world = self.world();
        for (key, bytes, existing) in std::mem::take(&mut world.late) {
            if world.rng.one_in(2) {
                world.put(&key, bytes, existing);
            }
        }
    }
}

impl World {
    fn put(&mut self, key: &str, bytes: Arc<Vec<u8>>, existing: Existing) -> bool {
        if existing == Existing::Keep && self.objects.contains_key(key) {
            return false;
        }
        self.put_bytes += bytes.len() as u64;
        let now = self.clock_ms;
        self.objects.insert(key.to_string(), (bytes, now));
        true
    }
}

/// A client of the store.
#[derive(Debug)]
pub struct Client {
    store: Simulated,
    /// Requests before it is killed.
    left: Mutex<Option<u64>>,
    has_faults: bool,
    is_dead: AtomicBool,
}

/// The outcome of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Done,
    Fails,
    FailsDone,
    /// The client is dead, and the request may be done later.
    Dead,
}

impl Client {
    pub fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Relaxed)
    }

    /// Takes some turns, then decides.
    async fn fate(&self) -> Fate {
        let turns = self.store.world().rng.below(4);
        for _ in 0..turns {
            turn().await;
        }
        if self.is_dead() {
            return Fate::Dead;
        }
        let mut world = self.store.world();
        world.clock_ms += 1;
        world.requests += 1;
        let mut left = self.left.lock().unwrap();
        if let Some(left) = &mut *left {
            match left.checked_sub(1) {
                Some(less) => *left = less,
                None => {
                    self.is_dead.store(true, Ordering::Relaxed);
                    return Fate::Dead;
                }
            }
        }
        if self.has_faults && world.rng.one_in(40) {
            return match world.rng.one_in(2) {
                true => Fate::Fails,
                false => Fate::FailsDone,
            };
        }
        Fate::Done
    }

    /// The answer to a read.
    async fn answer<T>(
        &self,
        read: impl FnOnce(&mut World) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        match self.fate().await {
            Fate::Done => read(&mut self.store.world()),
            Fate::Dead => std::future::pending().await,
            Fate::Fails | Fate::FailsDone => Err(fault()),
        }
    }
}

fn fault() -> ObjectError {
    ObjectError::Failed("503 Slow Down".to_string())
}

impl Objects for Client {
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()> {
        let (key, bytes) = (key.to_string(), Arc::new(bytes));
        Box::pin(async move {
            match self.fate().await {
                Fate::Done => match self.store.world().put(&key, bytes, existing) {
                    true => Ok(()),
                    false => Err(ObjectError::Exists),
                },
                Fate::FailsDone => {
                    self.store.world().put(&key, bytes, existing);
                    Err(fault())
                }
                Fate::Fails => Err(fault()),
                Fate::Dead => {
                    self.store.world().late.push((key, bytes, existing));
                    std::future::pending().await
                }
            }
        })
    }

    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        let key = key.to_string();
        Box::pin(self.answer(move |world| {
            let (bytes, _) = world.objects.get(&key).ok_or(ObjectError::Missing)?;
            let part = bytes.get(range.start as usize..range.end as usize);
            let short = || ObjectError::Failed("416 Range Not Satisfiable".to_string());
            part.map(<[u8]>::to_vec).ok_or_else(short)
        }))
    }

    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo> {
        let key = key.to_string();
        Box::pin(self.answer(move |world| {
            let found = world.objects.get(&key).ok_or(ObjectError::Missing)?;
            Ok(info(&key, found))
        }))
    }

    /// In pages, between which others have their turns.
    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        let prefix = format!("{prefix}/");
        Box::pin(async move {
            let mut found: Vec<ObjectInfo> = Vec::new();
            loop {
                let last = found.last().map(|info| info.key.clone());
                let prefix = &prefix;
                let page = self.answer(move |world| {
                    let page = world.objects.iter().filter(|(key, _)| {
                        let is_next = last.as_ref().is_none_or(|last| *key > last);
                        key.starts_with(prefix) && is_next
                    });
                    let page = page.take(PAGE).map(|(key, stored)| info(key, stored));
                    Ok(page.collect::<Vec<_>>())
                });
                let page = page.await?;
                let is_last = page.len() < PAGE;
                found.extend(page);
                if is_last {
                    return Ok(found);
                }
            }
        })
    }

    fn delete(&self, key: &str) -> ObjectFuture<'_, ()> {
        let key = key.to_string();
        Box::pin(async move {
            let fate = self.fate().await;
            {
                let mut world = self.store.world();
                let is_done = fate != Fate::Fails && (fate != Fate::Dead || world.rng.one_in(2));
                if is_done {
                    world.objects.remove(&key);
                }
            }
            match fate {
                Fate::Done => Ok(()),
                Fate::Dead => std::future::pending().await,
                Fate::Fails | Fate::FailsDone => Err(fault()),
            }
        })
    }
}

fn info(key: &str, (bytes, written_ms): &Stored) -> ObjectInfo {
    ObjectInfo {
        key: key.to_string(),
        bytes: bytes.len() as u64,
        written_ms: *written_ms,
    }
}

/// Lets others have a turn.
async fn turn() {
    let mut is_over = false;
    std::future::poll_fn(|context| match std::mem::replace(&mut is_over, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

/// A program: a future, and the client by which it is killed.
pub type Program<'a> = (Pin<Box<dyn Future<Output = ()> + 'a>>, Arc<Client>);

/// Runs programs in turns, until each has ended or is dead.
pub fn run_all(programs: Vec<Program<'_>>, rng: &mut Random) {
    let mut programs = programs;
    let mut context = Context::from_waker(Waker::noop());
    while !programs.is_empty() {
        let at = rng.below(programs.len() as u64) as usize;
        let (future, client) = &mut programs[at];
        if future.as_mut().poll(&mut context).is_ready() || client.is_dead() {
            drop(programs.swap_remove(at));
        }
    }
}

/// Runs one program to its end.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..10_000_000 {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
    panic!("it does not end");
}
