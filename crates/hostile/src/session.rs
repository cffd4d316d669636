//! The operations on an image, however damaged: it is inspected, checked, read, mapped, written.
//! The tested promises: no panic, termination (invariant S1), and no guest byte in a header, L1
//! table, refcount table, refcount block or L2 table (invariant S3).

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate, Role};
use cowslip::image::{
    BackingChoice, DiscardPolicy, Durability, Format, OpenOptions, Space, ZeroOptions,
};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::check::{CheckOptions, CheckResult, Finding, Observer, check_with_header};
use cowslip::qcow2::header::Header;
use cowslip::qcow2::inspect::{inspect, read_start};
use cowslip::qcow2::layout;
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, BufMut, Error, Image, Job};

use crate::draw::Draw;
use crate::file::Watched;
use crate::layout::{Layout, MARK};

/// Memory that a check may use here.
pub const CHECK_BYTES_MAX: u64 = 64 << 20;

/// Tables that a layout may read here.
const LAYOUT_BYTES_MAX: u64 = 64 << 20;

/// Polls until the end. Files in memory complete at once, so whatever waits longer waits for
/// nothing.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..10_000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    panic!("a request waits for nothing");
}

/// A gate behind which there is one data file, and nothing else.
#[derive(Debug)]
pub struct OneDataFile(Arc<Watched>);

impl OneDataFile {
    /// An empty one.
    pub fn new() -> OneDataFile {
        OneDataFile(Arc::new(Watched::new(Vec::new())))
    }

    /// The file.
    pub fn file(&self) -> Arc<dyn BlockFile> {
        self.0.clone()
    }
}

impl Default for OneDataFile {
    fn default() -> OneDataFile {
        OneDataFile::new()
    }
}

impl Gate for OneDataFile {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        match request.role {
            Role::Data => Ok(self.file()),
            Role::Backing => Err(Error::Invalid(format!("no {}", request.name))),
        }
    }
}

/// Counts findings, keeps none.
struct Ignore;

impl Observer for Ignore {
    fn finding(&mut self, finding: &Finding) {
        // The words too must not panic.
        std::hint::black_box(finding.to_string());
    }
}

/// Opens an image without its backing file.
pub fn open(
    file: &Arc<Watched>,
    gate: &OneDataFile,
    writable: bool,
    draw: &mut Draw,
) -> cowslip::Result<Image> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable,
        discard: draw.pick(&[DiscardPolicy::Unmap, DiscardPolicy::Ignore]),
        backing: BackingChoice::None,
        cache_bytes: 8 * 4096,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, gate))
}

/// The data that guests write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Anything but the mark.
    Random,
    /// The mark, which must never be found in metadata.
    Mark,
}

/// One writing operation.
pub fn exercise(image: &Image, content: Content, draw: &mut Draw) -> cowslip::Result<()> {
    let size = image.size();
    if size == 0 {
        return Ok(());
    }
    let mut start = draw.below(size.min(2 << 20));
    if draw.one_in(8) {
        start = size - 1 - start;
    }
    let limit = if draw.one_in(3) { 20_000 } else { 3000 };
    let len = 1 + draw.below((size - start).min(limit));
    match draw.below(10) {
        0..=4 => {
            let bytes: Vec<u8> = match content {
                Content::Mark => vec![MARK; len as usize],
                Content::Random => {
                    let seed = draw.number();
                    let mut noise = Draw::from_seed(seed);
                    (0..len).map(|_| noise.byte() & 0x7f).collect()
                }
            };
            let fua = draw.one_in(4);
            block_on(image.write(start, Buf::from(bytes), Durability::of_fua(fua)))
        }
        5 => {
            let options = ZeroOptions {
                space: Space::of_unmap(draw.one_in(2)),
                ..ZeroOptions::default()
            };
            block_on(image.write_zeroes(start, len, options))
        }
        6 => block_on(image.discard(start, len)),
        7 => block_on(image.flush()),
        _ => {
            let header = image.layers()[0].header.clone();
            let unit = header.map_or(512, |header| 1 << header.cluster_bits);
            let start = start / unit * unit;
            let len = unit.min(size - start);
            let fill = if content == Content::Mark { MARK } else { 7 };
            block_on(image.write_compressed(start, Buf::from(vec![fill; len as usize])))
        }
    }
}

/// Reads, maps and describes; every failure is fine that is an error.
pub fn look(file: &Arc<Watched>, draw: &mut Draw) {
    let described = block_on(inspect(&(file.clone() as Arc<dyn BlockFile>)));
    std::hint::black_box(described.map_err(|e| e.to_string()).is_ok());
    if let Ok(result) = run_check(file) {
        std::hint::black_box(result.is_clean());
    }
    walk_layout(file);
    let Ok(image) = open(file, &OneDataFile::new(), false, draw) else {
        return;
    };
    let size = image.size();
    for _ in 0..6 {
        let start = draw.pick(&[0, size / 2, size.saturating_sub(100_000)]);
        let len = (size - start).min(200_000);
        std::hint::black_box(block_on(image.read(start, BufMut::zeroed(len as usize))).is_ok());
        let len = (size - start).min(draw.pick(&[1 << 20, 1 << 34]));
        if let Ok(extents) = block_on(image.extents(start, len, 1000)) {
            let mut at = start;
            for extent in extents {
                assert!(
                    extent.start == at && extent.len > 0,
                    "{extent:?} after {at}"
                );
                at += extent.len;
            }
        }
    }
    look_at_bitmaps(&image);
    block_on(image.close()).unwrap();
}

/// Walks the layout, as reports do. If the walk completes, the parts cover the disk.
fn walk_layout(file: &Arc<Watched>) {
    struct Parts(u64);

    impl layout::Observer for Parts {
        fn part(&mut self, part: layout::Part) -> cowslip::Result<()> {
            assert!(
                part.start == self.0 && part.len > 0,
                "{part:?} after {}",
                self.0
            );
            self.0 += part.len;
            Ok(())
        }
    }

    let Ok(header) = header(file) else { return };
    // Each L1 entry costs a table, even if all are the same one.
    if u64::from(header.l1_size) << header.cluster_bits > LAYOUT_BYTES_MAX {
        return;
    }
    let shared = file.clone() as Arc<dyn BlockFile>;
    let Ok(layout) = block_on(layout::Layout::read(&shared, &header)) else {
        return;
    };
    let mut parts = Parts(0);
    if block_on(layout.parts(&mut parts)).is_ok() {
        assert_eq!(parts.0, header.size, "the parts do not cover the disk");
    }
    if let Ok(areas) = block_on(layout.areas()) {
        let ends = areas.iter().map(|area| area.offset.checked_add(area.len));
        assert!(ends.into_iter().all(|end| end.is_some()));
    }
}

/// The header of an image, encrypted or not.
///
/// # Errors
/// As the engine's.
pub fn header(file: &Arc<Watched>) -> cowslip::Result<Header> {
    let start = block_on(read_start(file.as_ref()))?;
    let len = file.contents().len() as u64;
    Header::parse(&start, len, file.name())
}

/// Checks an image.
///
/// # Errors
/// As the engine's check; also where there is no header to begin with.
pub fn run_check(file: &Arc<Watched>) -> cowslip::Result<CheckResult> {
    run_check_into(file, &mut Ignore)
}

/// The same; findings are reported to an observer.
///
/// # Errors
/// As [`run_check`].
pub fn run_check_into(
    file: &Arc<Watched>,
    observer: &mut dyn Observer,
) -> cowslip::Result<CheckResult> {
    let start = block_on(read_start(file.as_ref()))?;
    let header = Header::parse(&start, u64::MAX, file.name())?;
    let options = CheckOptions {
        memory_bytes_max: CHECK_BYTES_MAX,
    };
    let file = file.clone() as Arc<dyn BlockFile>;
    block_on(check_with_header(&file, &header, &options, observer))
}

/// Writes, resizes, closes and opens again; what is metadata before must be metadata after.
pub fn change(file: &Arc<Watched>, draw: &mut Draw) {
    let before = file.contents();
    let gate = OneDataFile::new();
    let was_dirty = Header::parse(&before, u64::MAX, "").is_ok_and(|header| header.is_dirty());
    let opened = open(file, &gate, true, draw);
    // Opening repairs a dirty image; the fuzzing of repairs checks the changes that it may make.
    let before = match was_dirty {
        true => file.contents(),
        false => before,
    };
    let Ok(image) = opened else {
        assert!(
            file.contents() == before,
            "a refused open has changed the file"
        );
        return;
    };
    let layout = Layout::of(&before);
    for _ in 0..8 {
        // Every failure is fine that is an error.
        std::hint::black_box(exercise(&image, Content::Mark, draw).is_ok());
    }
    layout.assert_intact(&before, &file.contents());
    std::hint::black_box(block_on(image.close()).is_ok());
    layout.assert_intact(&before, &file.contents());
    resize(file, &gate, draw);
    // A check before each change and after all of them takes most of the time.
    if draw.one_in(4) {
        bitmaps(file, &gate, draw);
        snapshots(file, &gate, draw);
    }
}

/// Reads the disk as it was, and makes, applies and deletes snapshots; what was sound stays sound.
fn snapshots(file: &Arc<Watched>, gate: &OneDataFile, draw: &mut Draw) {
    let sound = |file| run_check(file).is_ok_and(|found| found.corruptions == 0);
    let was_sound = sound(file);
    let Ok(image) = open(file, gate, true, draw) else {
        return;
    };
    let job = Job::default();
    for _ in 0..4 {
        let list = block_on(image.snapshots()).unwrap_or_default();
        let ids = list.iter().map(|snapshot| snapshot.id.clone());
        let mut ids: Vec<String> = ids.take(8).collect();
        ids.push("1".to_string());
        let which = draw.below(ids.len() as u64) as usize;
        let choice = SnapshotChoice::IdOrName(ids.swap_remove(which));
        read_at(file, gate, &choice);
        let outcome = match draw.below(4) {
            0 => block_on(image.apply_snapshot(&choice, &job)),
            1 => block_on(image.delete_snapshot(&choice, &job)),
            _ => block_on(image.create_snapshot(&NewSnapshot::default(), &job)).map(|_| ()),
        };
        std::hint::black_box(outcome.is_ok());
        std::hint::black_box(exercise(&image, Content::Random, draw).is_ok());
    }
    std::hint::black_box(block_on(image.close()).is_ok());
    assert!(
        !was_sound || sound(file),
        "snapshots have damaged a sound image"
    );
}

/// Changes persistent bitmaps beside writes; what was sound stays sound.
fn bitmaps(file: &Arc<Watched>, gate: &OneDataFile, draw: &mut Draw) {
    let sound = |file| run_check(file).is_ok_and(|found| found.corruptions == 0);
    let was_sound = sound(file);
    let Ok(image) = open(file, gate, true, draw) else {
        return;
    };
    for _ in 0..4 {
        let list = block_on(image.bitmaps()).unwrap_or_default();
        let mut names: Vec<String> = list.into_iter().take(8).map(|bitmap| bitmap.name).collect();
        names.push("new".to_string());
        let name = names[draw.below(names.len() as u64) as usize].clone();
        let change = match draw.below(6) {
            0 => BitmapChange::Remove,
            1 => BitmapChange::Clear,
            2 => BitmapChange::Enable,
            3 => BitmapChange::Disable,
            4 => BitmapChange::Merge(names.swap_remove(0)),
            _ => BitmapChange::Add {
                granularity: draw.pick(&[None, Some(512), Some(1 << 31)]),
            },
        };
        std::hint::black_box(block_on(image.change_bitmap(&name, &change)).is_ok());
        std::hint::black_box(exercise(&image, Content::Random, draw).is_ok());
    }
    std::hint::black_box(block_on(image.close()).is_ok());
    assert!(
        !was_sound || sound(file),
        "bitmaps have damaged a sound image"
    );
}

/// Reads the bitmaps of a file that does not change.
fn look_at_bitmaps(image: &Image) {
    for bitmap in block_on(image.bitmaps()).unwrap_or_default().iter().take(4) {
        if let Ok(bits) = block_on(image.dirty_bits(&bitmap.name)) {
            let ends = bits.dirty_ranges().take(1000).map(|range| range.end);
            assert!(
                ends.max().unwrap_or(0) <= image.size(),
                "it ends with the disk"
            );
        }
    }
}

fn read_at(file: &Arc<Watched>, gate: &OneDataFile, choice: &SnapshotChoice) {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        backing: BackingChoice::None,
        snapshot: Some(choice.clone()),
        ..OpenOptions::default()
    };
    if let Ok(image) = block_on(Image::open(file.clone(), options, gate)) {
        let len = image.size().min(100_000);
        std::hint::black_box(block_on(image.read(0, BufMut::zeroed(len as usize))).is_ok());
    }
}

fn resize(file: &Arc<Watched>, gate: &OneDataFile, draw: &mut Draw) {
    let Ok(image) = open(file, gate, true, draw) else {
        return;
    };
    let size = image.size();
    let target = draw.pick(&[
        size.saturating_add(1 << 20),
        size / 2,
        size.saturating_add(512),
        1 << 40,
    ]);
    std::hint::black_box(block_on(image.resize(target)).is_ok());
    std::hint::black_box(exercise(&image, Content::Random, draw).is_ok());
    std::hint::black_box(block_on(image.close()).is_ok());
}

/// Opens a chain, whose backing files are read from a list, and reads through it.
pub fn read_chain(top: Vec<u8>, below: Vec<Vec<u8>>) {
    let gate = Backings(std::sync::Mutex::new(below));
    let file = Arc::new(Watched::new(top));
    let opened = block_on(Image::open(file, OpenOptions::default(), &gate));
    if let Ok(image) = opened {
        let len = image.size().min(100_000);
        std::hint::black_box(block_on(image.read(0, BufMut::zeroed(len as usize))).is_ok());
        std::hint::black_box(block_on(image.extents(0, len, 100)).is_ok());
    }
}

struct Backings(std::sync::Mutex<Vec<Vec<u8>>>);

impl Gate for Backings {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        let mut files = self.0.lock().unwrap();
        let bytes = files.pop().ok_or(Error::Invalid("no more".to_string()))?;
        Ok(Arc::new(MemoryFile::new(request.name, bytes, 1)))
    }
}
