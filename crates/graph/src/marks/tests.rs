//! Bitmaps whose changes fail: what they have then.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use cowslip_block::disk::{Disk, MemoryDisk};
use cowslip_block::job::Job;
use cowslip_block::{Buf, BufMut};
use futures_util::FutureExt;

use super::*;
use crate::checkpoint::{Checkpoint, Use, join, noted_changes};
use crate::host::Held;
use crate::live::{Drained, LiveDisk};

const SIZE: u64 = 8 << 10;
const CHUNK: u64 = 1 << 10;

/// A bitmap that is kept elsewhere. One of its changes may fail, and has happened in part then.
#[derive(Clone, Debug)]
struct Kept {
    map: Arc<DirtyMap>,
    fails: Rc<Cell<u32>>,
    log: Rc<RefCell<Vec<String>>>,
    name: &'static str,
}

impl Kept {
    fn new(name: &'static str, fails: &Rc<Cell<u32>>, marked: u64) -> Kept {
        let map = DirtyMap::new(SIZE, CHUNK);
        map.mark(marked..marked + 1);
        Kept {
            map,
            fails: Rc::clone(fails),
            log: Rc::default(),
            name,
        }
    }

    fn step(&self, what: &str) -> Result<(), String> {
        self.log.borrow_mut().push(format!("{} {what}", self.name));
        let left = self.fails.get();
        self.fails.set(left.wrapping_sub(1));
        match left {
            0 => Err("it was to fail".to_string()),
            _ => Ok(()),
        }
    }

    /// The chunks that are marked.
    fn chunks(&self) -> Vec<u64> {
        chunks(&self.map)
    }
}

fn chunks(map: &DirtyMap) -> Vec<u64> {
    let runs = map.runs(0..SIZE, usize::MAX);
    let dirty = runs.into_iter().filter(|(_, is_dirty)| *is_dirty);
    dirty
        .flat_map(|(run, _)| run.start / CHUNK..run.end / CHUNK)
        .collect()
}

impl Marks for Kept {
    type Error = String;

    fn is_enabled(&self) -> bool {
        self.map.is_enabled()
    }

    async fn marks(&self) -> Result<Arc<DirtyMap>, String> {
        self.step("is read")?;
        let copy = DirtyMap::new(SIZE, CHUNK);
        copy.merge(&self.map);
        Ok(copy)
    }

    async fn clear(&self) -> Result<(), String> {
        self.map.unmark(0..CHUNK);
        self.step("begins again")?;
        self.map.clear();
        Ok(())
    }

    async fn merge(&self, marks: &DirtyMap) -> Result<(), String> {
        self.step("gets marks")?;
        self.map.merge(marks);
        Ok(())
    }

    async fn enable(&self, is_enabled: bool) -> Result<(), String> {
        self.step(if is_enabled { "goes on" } else { "ends" })?;
        self.map.enable(is_enabled);
        Ok(())
    }
}

fn disk(byte: u8) -> Arc<LiveDisk> {
    let disk = MemoryDisk::new("disk", SIZE);
    let data = Buf::copy_of(&[byte; SIZE as usize]);
    let written = disk.write(0, data.into(), cowslip_block::file::Durability::Cached);
    written.now_or_never().unwrap().unwrap();
    LiveDisk::new("live", Arc::new(disk))
}

fn drain(live: &Arc<LiveDisk>) -> Drained {
    live.drain()
        .now_or_never()
        .expect("no request is under way")
}

fn write(live: &LiveDisk, chunk: u64) {
    let data = Buf::copy_of(&[9; CHUNK as usize]);
    let written = live.write(
        chunk * CHUNK,
        data.into(),
        cowslip_block::file::Durability::Cached,
    );
    written.now_or_never().unwrap().unwrap();
}

/// Each mode, with a copy that succeeds, fails, or never begins.
#[test]
fn a_bitmap_has_what_no_copy_has() {
    for rotates in [Rotates::OnSuccess, Rotates::Always, Rotates::Never] {
        for ends in 0..3 {
            let bitmap = Kept::new("bitmap", &Rc::new(Cell::new(u32::MAX)), 0);
            let (live, target) = (disk(1), Arc::new(MemoryDisk::new("copy", SIZE)));
            let drained = drain(&live);
            drained.add(Arc::clone(&bitmap.map) as _);
            let backup = Backup::new(Arc::clone(&live), Arc::clone(&target) as _, CHUNK);
            let wanted = backup.want_since((bitmap.clone(), rotates));
            let rotation = wanted.now_or_never().unwrap().unwrap();
            backup.freeze(&drained);
            drop(drained);
            assert_eq!(bitmap.chunks().is_empty(), rotates != Rotates::Never);
            write(&live, 3);
            let ended = match ends {
                0 => {
                    let run = backup.run(&Job::default()).now_or_never();
                    run.expect("nothing else is under way").unwrap();
                    let read = target.read(0, BufMut::zeroed(CHUNK as usize).into());
                    assert_eq!(read.now_or_never().unwrap().unwrap().to_vec()[0], 1);
                    rotation.end(true).now_or_never()
                }
                1 => rotation.end(false).now_or_never(),
                _ => rotation.take_back().now_or_never(),
            };
            ended.unwrap().unwrap();
            let expected = match (rotates, ends) {
                (Rotates::OnSuccess, 0) | (Rotates::Always, 0 | 1) => vec![3],
                _ => vec![0, 3],
            };
            assert_eq!(bitmap.chunks(), expected, "{rotates:?} {ends}");
        }
    }
}

#[test]
fn a_rotation_that_fails_leaves_the_bitmap_as_it_was() {
    for fails in 0..2 {
        let bitmap = Kept::new("bitmap", &Rc::new(Cell::new(fails)), 0);
        let (live, target) = (disk(1), Arc::new(MemoryDisk::new("copy", SIZE)));
        let backup = Backup::new(live, target, CHUNK);
        let wanted = backup.want_since((bitmap.clone(), Rotates::OnSuccess));
        wanted.now_or_never().unwrap().unwrap_err();
        assert_eq!(bitmap.chunks(), [0], "{fails}");
    }
}

/// Two disks, each of which has a checkpoint already. Each step fails in turn.
#[test]
fn a_checkpoint_is_of_all_disks_or_of_none() {
    const STEPS: u32 = 8;
    for fails in 0..=STEPS {
        let left = Rc::new(Cell::new(fails));
        let log = Rc::default();
        let of = |name, marked| Kept {
            log: Rc::clone(&log),
            ..Kept::new(name, &left, marked)
        };
        let lives = [disk(1), disk(1)];
        let held = Held {
            clients: Vec::new(),
            disks: lives.iter().map(drain).collect(),
        };
        let disks: Vec<Checkpoint<Kept>> = lives
            .iter()
            .map(|live| {
                let next = of("next", 5 * CHUNK);
                next.map.enable(false);
                let last = of("last", 0);
                for bitmap in [&next, &last] {
                    held.of(live).unwrap().add(Arc::clone(&bitmap.map) as _);
                }
                let target = Arc::new(MemoryDisk::new("copy", SIZE));
                Checkpoint {
                    live: Arc::clone(live),
                    last: Some(last),
                    next,
                    changed: Some(DirtyMap::new(SIZE, CHUNK)),
                    copy: Use::Backup(Backup::new(Arc::clone(live), target, CHUNK)),
                }
            })
            .collect();
        let taken = Checkpoint::take(&disks, &held).now_or_never().unwrap();
        drop(held);
        assert_eq!(taken.is_ok(), fails == STEPS, "{fails}: {:?}", log.borrow());
        for (live, disk) in lives.iter().zip(&disks) {
            let last = disk.last.as_ref().unwrap();
            write(live, 3);
            match taken {
                Ok(()) => {
                    assert_eq!(last.chunks(), [0]);
                    assert_eq!(disk.next.chunks(), [3]);
                    assert_eq!(chunks(disk.changed.as_ref().unwrap()), [0]);
                }
                Err(_) => {
                    assert_eq!(last.chunks(), [0, 3], "{fails}: {:?}", log.borrow());
                    assert!(!disk.next.is_enabled(), "{fails}");
                }
            }
        }
    }
}

#[test]
fn what_has_changed_since_a_checkpoint_outlives_the_next_one() {
    let fails = Rc::new(Cell::new(u32::MAX));
    let (first, second) = (
        Kept::new("first", &fails, 0),
        Kept::new("second", &fails, CHUNK),
    );
    first.map.enable(false);
    let both = [first.clone(), second.clone()];
    let noted = noted_changes(&both, (SIZE, CHUNK));
    let noted = noted.now_or_never().unwrap().unwrap();
    assert_eq!(chunks(&noted), [0], "the second one still notes changes");
    join(&first, &second).now_or_never().unwrap().unwrap();
    assert_eq!(first.chunks(), [0, 1]);
    assert!(first.is_enabled());
    join(&second, &first).now_or_never().unwrap().unwrap();
    assert_eq!(second.chunks(), [0, 1]);
}
