//! The order of steps, as a host gets them.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use cowslip_block::disk::{Disk, DiskFuture, MemoryDisk};
use cowslip_block::{Error, Result};
use futures_util::FutureExt;

use super::*;
use crate::live::LiveDisk;

type Log = Arc<Mutex<Vec<String>>>;

/// A disk whose flushes are noted, and fail if they are to.
#[derive(Debug)]
struct Noted {
    memory: MemoryDisk,
    step: String,
    log: Log,
    fails: &'static str,
}

fn note(log: &Log, step: String, fails: &str) -> Result<()> {
    let outcome = match step == fails {
        true => Err(Error::Invalid("it was to fail".to_string())),
        false => Ok(()),
    };
    log.lock().unwrap().push(step);
    outcome
}

impl Disk for Noted {
    cowslip_block::forward_to_disk!(memory: name, size, features, read, write, zero, discard, extents);

    fn flush(&self) -> DiskFuture<'_, ()> {
        let flushed = note(&self.log, self.step.clone(), self.fails);
        Box::pin(std::future::ready(flushed))
    }
}

/// Disks by number, whose steps are noted.
struct Noting {
    disks: Vec<Arc<LiveDisk>>,
    log: Log,
    fails: &'static str,
    held: RefCell<Vec<u64>>,
}

impl Noting {
    fn new(fails: &'static str) -> Noting {
        let log = Log::default();
        let disk = |number| {
            let disk = Noted {
                memory: MemoryDisk::new("disk", 4096),
                step: format!("flush {number}"),
                log: Arc::clone(&log),
                fails,
            };
            LiveDisk::new("live", Arc::new(disk) as _)
        };
        Noting {
            disks: (0..3).map(disk).collect(),
            log: Arc::clone(&log),
            fails,
            held: RefCell::default(),
        }
    }

    fn step(&self, step: String) -> Result<()> {
        note(&self.log, step, self.fails)
    }

    fn steps(&self) -> String {
        self.log.lock().unwrap().join(", ")
    }
}

impl Host for Noting {
    type Node = usize;
    type Error = Error;

    fn failed(error: Error) -> Error {
        error
    }
    fn live(&self, node: &usize) -> Arc<LiveDisk> {
        Arc::clone(&self.disks[*node])
    }
    fn is_written(&self, _: &usize) -> bool {
        true
    }
    async fn hold_clients(&self, _: &usize) -> Vec<Drained> {
        Vec::new()
    }
    async fn hold(&self, node: &usize) -> Vec<Drained> {
        self.held.borrow_mut().push(*node as u64);
        vec![self.disks[*node].drain().await]
    }
    async fn hold_above(&self, _: &usize) -> Vec<Drained> {
        Vec::new()
    }
    async fn enter(&self, _: &usize) -> Result<()> {
        Ok(())
    }
    async fn leave(&self, _: &usize) -> Result<()> {
        Ok(())
    }
    async fn resize(&self, node: &usize, size: u64) -> Result<()> {
        self.step(format!("resize {node} {size}"))
    }
    fn populate(
        &self,
        _: &usize,
        _: Range<u64>,
        _: u32,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        std::future::ready(Ok(()))
    }
    async fn freeze(&self, node: &usize) -> Result<()> {
        self.step(format!("freeze {node}"))
    }
    async fn name_backing(&self, node: &usize, base: Option<&usize>) -> Result<()> {
        self.step(format!("name {base:?} in {node}"))
    }
    async fn forget_bitmaps(&self, node: &usize) -> Result<()> {
        self.step(format!("forget bitmaps of {node}"))
    }
    async fn empty(&self, node: &usize) -> Result<()> {
        self.step(format!("empty {node}"))
    }
    async fn open(&self, node: &usize, _: bool, _: &Held) -> Result<()> {
        self.step(format!("open {node}"))
    }
    fn put_over(&self, node: &usize, base: Option<&usize>, _: &Held) -> Result<()> {
        self.step(format!("put {node} over {base:?}"))
    }
    async fn move_clients(&self, from: &usize, to: &usize, _: Held) -> Result<()> {
        self.step(format!("move {from} to {to}"))
    }
}

/// An action about a disk, whose steps are noted.
struct Part<'a> {
    host: &'a Noting,
    number: usize,
}

impl Action<Noting> for Part<'_> {
    fn overlaid(&self) -> Option<usize> {
        Some(self.number)
    }
    async fn prepare(&mut self, _: &Held) -> Result<()> {
        self.host.step(format!("prepare {}", self.number))
    }
    async fn take_back(&mut self, _: &Held) {
        let taken_back = self.host.step(format!("take back {}", self.number));
        taken_back.unwrap();
    }
    fn commit(self, _: &Held) {
        self.host.step(format!("act {}", self.number)).unwrap();
    }
}

/// The steps of a transaction over two disks, and how many of its actions were not done.
fn transaction(fails: &'static str) -> (String, Option<usize>) {
    let host = Noting::new(fails);
    let (host, held) = (&host, Held::default());
    let parts = [0, 1].map(|number| Part { host, number }).into();
    let done = transact(host, (parts, &held));
    let done = done.now_or_never().unwrap();
    (host.steps(), done.err().map(|undone| undone.actions.len()))
}

#[test]
fn a_transaction_freezes_nothing_before_all_of_it_is_durable_and_does_all_or_nothing() {
    let none = |steps: &str| (format!("prepare 0, {steps}"), Some(2));
    assert_eq!(transaction("prepare 0"), ("prepare 0".to_string(), Some(2)));
    assert_eq!(transaction("prepare 1"), none("prepare 1, take back 0"));
    let back = "take back 1, take back 0";
    let steps = "prepare 1, flush 0, flush 1";
    assert_eq!(transaction("flush 1"), none(&format!("{steps}, {back}")));
    let steps = format!("{steps}, freeze 0, freeze 1");
    let again = format!("{steps}, open 0, open 1, {back}");
    assert_eq!(transaction("freeze 1"), none(&again));
    let all = format!("prepare 0, {steps}, act 0, act 1");
    assert_eq!(transaction("nothing"), (all, None));
}

/// The steps of a commit of two images into the base, and whether it succeeded.
fn giving(fails: &'static str) -> (String, bool) {
    let host = Noting::new(fails);
    let given = give_to_base(&host, (&0, &2), 2, Held::default());
    let given = given.now_or_never().unwrap();
    (host.steps(), given.is_ok())
}

#[test]
fn clients_go_to_the_base_when_the_image_is_empty_and_not_if_a_step_fails() {
    let named = "flush 0, name Some(2) in 0, open 0";
    let forgotten = format!("{named}, put 0 over Some(2), flush 0, forget bitmaps of 0");
    let emptied = format!("{forgotten}, empty 0, open 0");
    let all = format!("{emptied}, move 0 to 2");
    assert_eq!(giving("nothing"), (all, true));
    assert_eq!(giving("flush 0"), ("flush 0".to_string(), false));
    assert_eq!(giving("name Some(2) in 0"), (named.to_string(), false));
    assert_eq!(giving("forget bitmaps of 0"), (forgotten, false));
    assert_eq!(giving("empty 0"), (emptied, false));
}

#[test]
fn a_chain_is_shortened_when_the_header_says_so_durably() {
    let host = Noting::new("nothing");
    shorten(&host, &0, None).now_or_never().unwrap().unwrap();
    let steps = "flush 0, name None in 0, open 0, put 0 over None";
    assert_eq!(host.steps(), steps);
    let host = Noting::new("open 0");
    let shortened = shorten(&host, &0, None).now_or_never().unwrap();
    assert!(shortened.is_err());
    assert_eq!(host.steps(), "flush 0, name None in 0, open 0");
    assert_eq!(*host.held.borrow(), [0]);
}
