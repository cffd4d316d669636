//! Files in memory of which one change fails: done all the same, in part, or not at all. Later ones
//! succeed.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, FileRequest, Gate, Space};
use cowslip_queue::{Buf, IoVec, Pending};

/// How much of the change that fails is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    All,
    /// The first half of its sectors; of a flush, of what it should have covered.
    Half,
    Nothing,
}

/// The change that fails, counted from 0 over all files, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strike {
    pub at: usize,
    pub reach: Reach,
    pub errno: i32,
}

/// A change of a file, or a flush.
#[derive(Clone, Debug)]
enum Change {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Discard(u64, u64),
    Allocate(u64, u64),
    SetLen(u64),
    Flush,
}

impl Change {
    fn describe(&self) -> String {
        match self {
            Change::Write(at, data) => format!("write {at:#x}+{:#x}", data.len()),
            other => format!("{other:x?}"),
        }
    }

    /// Returns the part of a write that is carried out.
    fn part(at: u64, data: &[u8], reach: Reach) -> &[u8] {
        match reach {
            Reach::All => data,
            // A sector is written whole or not at all.
            Reach::Half => {
                let end = (at + data.len() as u64 / 2) / 512 * 512;
                &data[..end.saturating_sub(at) as usize]
            }
            Reach::Nothing => &[],
        }
    }

    /// Does it, or the first half of its sectors.
    fn apply(&self, bytes: &mut Vec<u8>, reach: Reach) {
        let extend = |bytes: &mut Vec<u8>, end: u64| {
            if (bytes.len() as u64) < end {
                bytes.resize(end as usize, 0);
            }
        };
        match self {
            _ if reach == Reach::Nothing => {}
            Change::Write(at, data) => {
                let part = Change::part(*at, data, reach);
                if !part.is_empty() {
                    extend(bytes, at + part.len() as u64);
                    bytes[*at as usize..][..part.len()].copy_from_slice(part);
                }
            }
            Change::Zero(at, len) | Change::Discard(at, len) => {
                if matches!(self, Change::Zero(..)) {
                    extend(bytes, at + len);
                }
                let end = (at + len).min(bytes.len() as u64);
                if *at < end {
                    bytes[*at as usize..end as usize].fill(0);
                }
            }
            Change::Allocate(at, len) => extend(bytes, at + len),
            Change::SetLen(len) => bytes.resize(*len as usize, 0),
            Change::Flush => {}
        }
    }

    /// Whether half of it is something else than all or nothing.
    fn can_be_halved(&self) -> bool {
        match self {
            Change::Write(at, data) => (at + data.len() as u64 / 2) / 512 * 512 > *at,
            Change::Flush => true,
            _ => false,
        }
    }

    /// Returns whether after its failure the content of the header, or of the medium, is unknown.
    fn stops_the_session(&self) -> bool {
        match self {
            // Eight bytes are the hint on allocation, which nothing depends on.
            Change::Write(at, data) => *at < 512 && data.len() > 8,
            Change::Flush => true,
            _ => false,
        }
    }
}

/// The names and bytes of some files.
pub type Contents = Vec<(String, Vec<u8>)>;

#[derive(Debug, Default)]
struct State {
    strike: Option<Strike>,
    /// Whether each change so far could have been done by half.
    halves: Vec<bool>,
    /// Which of them write a header.
    headers: Vec<usize>,
    /// The change that has failed.
    struck: Option<String>,
    /// The files that must not change any more.
    stopped: Vec<String>,
    /// Changes of such files.
    late: Vec<String>,
}

/// Files in memory that fail together.
#[derive(Clone, Debug, Default)]
pub struct Medium {
    state: Arc<Mutex<State>>,
    files: Vec<Arc<FailingFile>>,
}

impl Medium {
    /// Files with these contents, of which one change fails.
    pub fn new(contents: &Contents, strike: Option<Strike>) -> Medium {
        let mut medium = Medium::default();
        medium.state.lock().unwrap().strike = strike;
        for (name, bytes) in contents {
            let file = MemoryFile::new(name, bytes.clone(), 1);
            medium.files.push(Arc::new(FailingFile {
                file,
                disk: Mutex::new(Disk {
                    durable: bytes.clone(),
                    pending: Vec::new(),
                }),
                state: Arc::clone(&medium.state),
            }));
        }
        medium
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn file(&self, name: &str) -> Arc<FailingFile> {
        let found = self.files.iter().find(|file| file.file.name() == name);
        Arc::clone(found.unwrap_or_else(|| panic!("'{name}' is not wanted")))
    }

    /// The file of that name, opened again: what no flush will cover any more is lost.
    pub fn reopened(&self, name: &str) -> Arc<FailingFile> {
        let file = self.file(name);
        let mut bytes = file.disk.lock().unwrap().durable.clone();
        for (change, reach) in &file.disk.lock().unwrap().pending {
            change.apply(&mut bytes, *reach);
        }
        file.now(file.file.set_len(bytes.len() as u64));
        file.now(
            file.file
                .write(0, Buf::from(bytes).into(), Durability::Cached),
        );
        self.state().stopped.retain(|stopped| stopped != name);
        file
    }

    /// Returns the contents that reads see.
    pub fn contents(&self) -> Contents {
        let of = |file: &Arc<FailingFile>| (file.file.name().to_string(), file.file.contents());
        self.files.iter().map(of).collect()
    }

    /// Returns the contents after a power failure that loses all data no flush covers.
    pub fn durable(&self) -> Contents {
        let of = |file: &Arc<FailingFile>| {
            let name = file.file.name().to_string();
            (name, file.disk.lock().unwrap().durable.clone())
        };
        self.files.iter().map(of).collect()
    }

    /// For each change so far, whether it could have been done by half.
    pub fn halves(&self) -> Vec<bool> {
        self.state().halves.clone()
    }

    /// The numbers of the changes that write a header.
    pub fn headers(&self) -> Vec<usize> {
        self.state().headers.clone()
    }

    /// The change that has failed.
    pub fn struck(&self) -> Option<String> {
        self.state().struck.clone()
    }

    /// Changes of files after the failed write of their header, or a failed flush.
    pub fn late(&self) -> Vec<String> {
        self.state().late.clone()
    }
}

impl Gate for Medium {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        Ok(self.reopened(request.name))
    }
}

/// The durable contents of a file, and the writes that no flush covers.
#[derive(Debug)]
struct Disk {
    durable: Vec<u8>,
    pending: Vec<(Change, Reach)>,
}

/// One of them.
#[derive(Debug)]
pub struct FailingFile {
    file: MemoryFile,
    disk: Mutex<Disk>,
    state: Arc<Mutex<State>>,
}

impl FailingFile {
    /// Counts a change; how much of it is done, and with which error it ends.
    fn next(&self, change: &Change) -> (Reach, Option<i32>) {
        let mut state = self.state.lock().unwrap();
        let name = self.file.name().to_string();
        if state.stopped.contains(&name) && !matches!(change, Change::Flush) {
            let text = format!("{name}: {}", change.describe());
            state.late.push(text);
        }
        let number = state.halves.len();
        state.halves.push(change.can_be_halved());
        if matches!(change, Change::Write(..)) && change.stops_the_session() {
            state.headers.push(number);
        }
        match state.strike.filter(|strike| strike.at == number) {
            None => (Reach::All, None),
            Some(strike) => {
                state.struck = Some(format!("{name}: {}", change.describe()));
                if change.stops_the_session() {
                    state.stopped.push(name);
                }
                (strike.reach, Some(strike.errno))
            }
        }
    }

    fn change(&self, change: Change) -> Pending<io::Result<()>> {
        let (reach, errno) = self.next(&change);
        let mut disk = self.disk.lock().unwrap();
        let Disk { durable, pending } = &mut *disk;
        if let Change::Flush = change {
            // Writes that a failed flush did not cover are lost: the next one succeeds without
            // them.
            let covered = match reach {
                Reach::All => pending.len(),
                Reach::Half => pending.len() / 2,
                Reach::Nothing => 0,
            };
            for (change, reach) in pending.drain(..).take(covered) {
                change.apply(durable, reach);
            }
        } else {
            let done = match &change {
                Change::Write(at, data) if !Change::part(*at, data, reach).is_empty() => {
                    let part = Buf::copy_of(Change::part(*at, data, reach));
                    self.file.write(*at, part.into(), Durability::Cached)
                }
                Change::Write(..) => Pending::ready(Ok(())),
                _ if reach == Reach::Nothing => Pending::ready(Ok(())),
                Change::Zero(at, len) => self.file.zero(*at, *len, Space::Release),
                Change::Discard(at, len) => self.file.discard(*at, *len),
                Change::Allocate(at, len) => self.file.allocate(*at, *len),
                Change::SetLen(len) => self.file.set_len(*len),
                Change::Flush => self.file.flush(),
            };
            self.now(done);
            pending.push((change, reach));
        }
        Pending::ready(match errno {
            None => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        })
    }

    fn now(&self, done: Pending<io::Result<()>>) {
        super::block_on(done).unwrap();
    }
}

impl BlockFile for FailingFile {
    cowslip_block::forward_to_file!(file: name, capabilities, len, read, extents, allocated_bytes);

    fn write(&self, offset: u64, data: IoVec, _: Durability) -> Pending<io::Result<()>> {
        let bytes = data.to_vec();
        self.change(Change::Write(offset, bytes))
    }
    fn zero(&self, offset: u64, len: u64, _: Space) -> Pending<io::Result<()>> {
        self.change(Change::Zero(offset, len))
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.change(Change::Discard(offset, len))
    }
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.change(Change::Allocate(offset, len))
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        self.change(Change::Flush)
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.change(Change::SetLen(len))
    }
}
