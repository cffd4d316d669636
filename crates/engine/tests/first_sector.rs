//! A raw disk whose format was guessed stays one: no request, no number of requests in any order
//! and overlap, and no commit makes its first sector look like that of an image of another format.
//!
//! Each header is split into up to three requests of all kinds, and each of these sets of requests
//! is carried out in every order that the file's operations can have, with one request dropped or
//! none.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::support::block_on;
use crate::support::headers::HEADERS;
use crate::support::slow::NoFiles;
use cowslip::commit::{Afterwards, Commit};
use cowslip::errno::EPERM;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Capabilities, Durability, FileRequest, Gate, Space};
use cowslip::image::{DiscardPolicy, Format, OpenOptions, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image, IoVec, IoVecMut, Job};
use cowslip_queue::{Pending, pending};

/// Fills the disk before: no header has such bytes.
const FILL: u8 = 0xee;
const DISK_BYTES: usize = 8192;
/// Bytes of a header that is tried in every way.
const SHORT: usize = 10;

/// An operation of the file that waits to be carried out.
type Held = Box<dyn FnOnce(&MemoryFile) + Send>;

/// A file in memory that carries out its operations when the test says so.
struct Stepped {
    memory: MemoryFile,
    capabilities: Capabilities,
    held: Mutex<Vec<Held>>,
}

cowslip_block::debug_by_name!(Stepped);

impl Stepped {
    /// A file whose reads and writes, and whose calls for space, have these units.
    fn new(alignment_bytes: u32, space_alignment_bytes: u32) -> Arc<Stepped> {
        let memory = MemoryFile::new("guessed", vec![FILL; DISK_BYTES], alignment_bytes);
        Arc::new(Stepped {
            capabilities: Capabilities {
                space_alignment_bytes,
                ..memory.capabilities().clone()
            },
            memory,
            held: Mutex::default(),
        })
    }

    fn hold<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&MemoryFile) -> Pending<T> + Send + 'static,
    ) -> Pending<T> {
        let (completer, done) = pending();
        let carry_out = move |memory: &MemoryFile| {
            completer.complete(block_on(operation(memory)));
        };
        self.held.lock().unwrap().push(Box::new(carry_out));
        done
    }

    fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    fn carry_out(&self, index: usize) {
        let held = self.held.lock().unwrap().remove(index);
        held(&self.memory);
    }

    fn check_space(&self, offset: u64, len: u64) {
        let unit = u64::from(self.capabilities.space_alignment_bytes);
        assert!(offset.is_multiple_of(unit) && len.is_multiple_of(unit));
    }
}

impl BlockFile for Stepped {
    cowslip_block::forward_to_file!(memory: name, len, allocate, extents, flush, set_len);
    cowslip_block::file_from_fields!(capabilities);
    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        self.hold(move |memory| memory.read(offset, buf))
    }
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        self.hold(move |memory| memory.write(offset, data, how))
    }
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        self.check_space(offset, len);
        self.hold(move |memory| memory.zero(offset, len, space))
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.check_space(offset, len);
        self.hold(move |memory| memory.discard(offset, len))
    }
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    DurableWrite,
    Zeroes,
    ZeroesWithoutSpace,
    Discard,
}

/// A request that asks for these bytes at a place.
#[derive(Clone, Debug)]
struct Request {
    kind: Kind,
    at: u64,
    bytes: Vec<u8>,
}

impl Request {
    async fn send(&self, image: &Image) -> cowslip::Result<()> {
        let len = self.bytes.len() as u64;
        let zeroes = |may_unmap| ZeroOptions {
            space: Space::of_unmap(may_unmap),
            ..ZeroOptions::default()
        };
        match self.kind {
            Kind::Write | Kind::DurableWrite => {
                let fua = self.kind == Kind::DurableWrite;
                let data = Buf::copy_of(&self.bytes);
                image.write(self.at, data, Durability::of_fua(fua)).await
            }
            Kind::Zeroes => image.write_zeroes(self.at, len, zeroes(false)).await,
            Kind::ZeroesWithoutSpace => image.write_zeroes(self.at, len, zeroes(true)).await,
            Kind::Discard => image.discard(self.at, len).await,
        }
    }
}

/// Returns all ways to split `len` bytes into one, two or three parts.
fn splits(len: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![0, len]];
    all.extend((1..len).map(|cut| vec![0, cut, len]));
    for first in 1..len {
        all.extend((first + 1..len).map(|second| vec![0, first, second, len]));
    }
    all
}

/// The kinds of request that can leave these bytes of a header of some length.
fn kinds(bytes: &[u8], header_len: usize) -> &'static [Kind] {
    match bytes.iter().all(|&byte| byte == 0) {
        // Long headers have splits enough.
        false if header_len > SHORT => &[Kind::Write],
        false => &[Kind::Write, Kind::DurableWrite],
        true => &[
            Kind::Write,
            Kind::Zeroes,
            Kind::ZeroesWithoutSpace,
            Kind::Discard,
        ],
    }
}

/// All sets of up to three requests that would leave `header` at a place.
fn attempts((at, header): (usize, &[u8])) -> Vec<Vec<Request>> {
    let mut all = Vec::new();
    for cuts in splits(header.len()) {
        let mut sets: Vec<Vec<Request>> = vec![Vec::new()];
        for cut in cuts.windows(2) {
            let bytes = &header[cut[0]..cut[1]];
            let requests = kinds(bytes, header.len()).iter().map(|&kind| Request {
                kind,
                at: (at + cut[0]) as u64,
                bytes: bytes.to_vec(),
            });
            let longer = requests.flat_map(|request| {
                sets.iter().map(move |set| {
                    let mut set = set.clone();
                    set.push(request.clone());
                    set
                })
            });
            sets = longer.collect();
        }
        all.extend(sets);
    }
    all
}

/// Choices in the order in which they come up: the number of options, and the one chosen.
#[derive(Default)]
struct Choices {
    made: Vec<(usize, usize)>,
    next: usize,
}

impl Choices {
    fn choose(&mut self, count: usize) -> usize {
        if self.next == self.made.len() {
            self.made.push((count, 0));
        }
        let (expected, choice) = self.made[self.next];
        assert_eq!(expected, count, "a run repeats the choices that are given");
        self.next += 1;
        choice
    }

    /// Goes on to the next run that is not made yet.
    fn advance(&mut self) -> bool {
        self.next = 0;
        while let Some((count, choice)) = self.made.pop() {
            if choice + 1 < count {
                self.made.push((count, choice + 1));
                return true;
            }
        }
        false
    }
}

type Running<'a> = Option<Pin<Box<dyn Future<Output = cowslip::Result<()>> + 'a>>>;

fn open(file: &Arc<Stepped>) -> Image {
    let options = OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    };
    let mut opening = Box::pin(Image::open(file.clone(), options, &NoFiles));
    loop {
        match opening
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(image) => return image.unwrap(),
            Poll::Pending => file.carry_out(0),
        }
    }
}

/// The outcome of requests that were sent together.
struct Outcome {
    refused: usize,
    given_up: bool,
}

/// Sends the requests together, and makes the choices: which operation of the file comes next, or
/// which request is dropped. `look` sees the file after each of them.
fn run(
    (file, requests): (&Arc<Stepped>, &[Request]),
    choices: &mut Choices,
    look: impl Fn(&[u8]),
) -> Outcome {
    let image = open(file);
    let mut running: Vec<Running<'_>> = Vec::new();
    for request in requests {
        running.push(Some(Box::pin(request.send(&image))));
    }
    let mut outcome = Outcome {
        refused: 0,
        given_up: false,
    };
    let mut context = Context::from_waker(Waker::noop());
    loop {
        // Each may let the next go on.
        for _ in 0..=requests.len() {
            for slot in &mut running {
                let Some(request) = slot else { continue };
                if let Poll::Ready(answer) = request.as_mut().poll(&mut context) {
                    *slot = None;
                    match answer {
                        Ok(()) => {}
                        Err(error) if is_refusal(&error) => outcome.refused += 1,
                        // A durable write that was dropped may have lost something.
                        Err(Error::Latched(_)) if outcome.given_up => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
        let left: Vec<usize> = (0..running.len())
            .filter(|&index| running[index].is_some())
            .collect();
        let may_give_up = if outcome.given_up { 0 } else { left.len() };
        let held = file.held();
        if held == 0 {
            assert!(left.is_empty(), "nobody waits for nothing");
            return outcome;
        }
        let choice = choices.choose(held + may_give_up);
        match choice.checked_sub(held) {
            None => file.carry_out(choice),
            Some(index) => {
                running[left[index]] = None;
                outcome.given_up = true;
            }
        }
        look(&file.memory.contents());
    }
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(EPERM))
}

#[test]
fn no_order_of_requests_makes_a_guessed_disk_an_image() {
    // The unit of reads and writes, and that of calls for space.
    for units in [(1, 1), (1, 512), (512, 512), (4096, 4096)] {
        for &(at, header) in HEADERS {
            // A case that few bytes cover need not be repeated with many in each unit.
            if header.len() > SHORT && units != (1, 1) {
                continue;
            }
            for requests in attempts((at, header)) {
                let mut choices = Choices::default();
                loop {
                    let file = Stepped::new(units.0, units.1);
                    let outcome = run((&file, &requests), &mut choices, |now| {
                        assert_ne!(
                            &now[at..at + header.len()],
                            header,
                            "{units:?} {requests:?}"
                        );
                    });
                    let is_harmless = requests.iter().any(|r| r.kind == Kind::Discard);
                    assert!(
                        outcome.refused == 1 || outcome.given_up || is_harmless,
                        "{units:?} {requests:?}"
                    );
                    if !choices.advance() {
                        break;
                    }
                }
            }
        }
    }
}

/// Only a write of a header is refused.
#[test]
fn requests_that_make_no_header_are_carried_out() {
    for units in [(1, 1), (1, 512), (4096, 4096)] {
        for &(at, header) in HEADERS {
            let mut other = header.to_vec();
            other[0] = b'!';
            for requests in attempts((at, &other)) {
                let file = Stepped::new(units.0, units.1);
                let outcome = run((&file, &requests), &mut Choices::default(), |_| ());
                assert_eq!(outcome.refused, 0, "{requests:?}");
                let discards = requests.iter().any(|r| r.kind == Kind::Discard);
                let now = file.memory.contents();
                let is_there = now[at..at + other.len()] == other[..];
                assert!(is_there || discards, "{units:?} {requests:?}");
                assert!(now[at + other.len()..].iter().all(|&byte| byte == FILL));
            }
        }
    }
}

/// A discard of the whole sector leaves zeroes, one of a part of it the part that was there.
#[test]
fn the_first_sector_is_discarded_as_a_whole_or_not_at_all() {
    for (range, zeroes) in [
        (0..512, 0..512),
        (0..511, 0..0),
        (0..600, 0..600),
        (3..4, 0..0),
        (3..512, 0..0),
        (3..700, 512..700),
        (512..700, 512..700),
    ] {
        let file = Stepped::new(1, 1);
        let request = Request {
            kind: Kind::Discard,
            at: range.start,
            bytes: vec![0; (range.end - range.start) as usize],
        };
        run((&file, &[request]), &mut Choices::default(), |_| ());
        for (at, byte) in (0..).zip(file.memory.contents()) {
            assert_eq!(byte == 0, zeroes.contains(&at), "{range:?} {at}");
        }
    }
}

#[test]
fn a_disk_is_not_cut_so_that_it_becomes_an_image() {
    let mut bytes = vec![0; 4096];
    bytes[..4].copy_from_slice(b"QED\x01");
    let file = Arc::new(MemoryFile::new("a", bytes, 1));
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    let cut = block_on(image.resize(3));
    assert!(cut.as_ref().is_err_and(is_refusal), "{cut:?}");
    assert_eq!(file.contents().len(), 4096);
    block_on(image.resize(512)).unwrap();
}

/// Finds a base of this name.
struct Base(Arc<MemoryFile>);

impl Gate for Base {
    fn open(&self, _: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        Ok(self.0.clone())
    }
}

#[test]
fn a_commit_does_not_make_a_guessed_base_an_image() {
    for format in [None, Some("raw".to_string())] {
        for zeroes in [false, true] {
            let mut below = vec![0; 1 << 20];
            // With the zero that the image has, it would be another format's header.
            below[..4].copy_from_slice(b"QED\x01");
            let base = Base(Arc::new(MemoryFile::new("base", below.clone(), 1)));
            let file = Arc::new(MemoryFile::new("a.qcow2", Vec::new(), 1));
            let options = CreateOptions {
                backing_file: Some("base".to_string()),
                backing_format: format.clone(),
                ..CreateOptions::new(1 << 20)
            };
            block_on(create(file.clone(), None, &options)).unwrap();
            let options = OpenOptions {
                format: Some(Format::Qcow2),
                writable: true,
                ..OpenOptions::default()
            };
            let image = block_on(Image::open(file, options, &base)).unwrap();
            let change = async {
                match zeroes {
                    true => image.write_zeroes(3, 1, ZeroOptions::default()).await,
                    false => {
                        let data = Buf::copy_of(b"QFI\xfb\0\0\0\x03");
                        image.write(0, data, Durability::Cached).await
                    }
                }
            };
            block_on(change).unwrap();
            let commit = Commit {
                depth: 1,
                afterwards: Afterwards::Empty,
                base: OpenOptions::default(),
            };
            let committed = block_on(image.commit(&commit, &base, &Job::default()));
            let read = block_on(image.read(0, BufMut::zeroed(512))).unwrap();
            let now = base.0.contents();
            match format {
                None => {
                    assert!(committed.as_ref().is_err_and(is_refusal), "{committed:?}");
                    assert_eq!(now[..512], below[..512]);
                    assert_ne!(read[..512], below[..512], "the image keeps what it has");
                }
                Some(_) => {
                    committed.unwrap();
                    assert_ne!(now[..512], below[..512]);
                }
            }
        }
    }
}
