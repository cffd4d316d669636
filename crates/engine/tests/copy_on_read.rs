//! Copy-on-read, and writes that store whole clusters compressed: concurrently with other writes,
//! for a part of a chain, in both versions.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{CopyOnRead, DiscardPolicy, Durability, OpenOptions, ZeroOptions};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::{Buf, BufMut, Image, Result};

use crate::support::slow::{FAILING, SlowFile};
use crate::support::{block_on, our_check};

const CLUSTER: u64 = 4096;
const SIZE: u64 = 64 * CLUSTER;

/// A file and its name.
type Named = (String, Arc<SlowFile>);

/// Images by their names.
#[derive(Clone, Default)]
struct Files(Arc<Mutex<Vec<Named>>>);

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Ok(self.get(request.name))
    }
}

impl Files {
    fn get(&self, name: &str) -> Arc<SlowFile> {
        let files = self.0.lock().unwrap();
        let found = files.iter().find(|(known, _)| known == name);
        Arc::clone(&found.unwrap().1)
    }

    fn make(&self, name: &str, backing: Option<&str>, change: impl FnOnce(&mut CreateOptions)) {
        let file = SlowFile::new(Vec::new());
        let mut options = CreateOptions {
            cluster_size: CLUSTER,
            backing_file: backing.map(str::to_string),
            backing_format: backing.map(|_| "qcow2".to_string()),
            ..CreateOptions::new(SIZE)
        };
        change(&mut options);
        block_on(create(file.clone(), None, &options)).unwrap();
        self.0.lock().unwrap().push((name.to_string(), file));
    }

    fn open_with(&self, name: &str, options: OpenOptions) -> Image {
        let options = OpenOptions {
            writable: true,
            ..options
        };
        block_on(Image::open(self.get(name), options, self)).unwrap()
    }

    fn open(&self, name: &str, copy_on_read: CopyOnRead) -> Image {
        let options = OpenOptions {
            copy_on_read,
            ..OpenOptions::default()
        };
        self.open_with(name, options)
    }

    fn fill(&self, name: &str, writes: &[(u64, u64, u8)]) {
        let image = self.open(name, CopyOnRead::Off);
        for &(at, len, byte) in writes {
            write(&image, at, len, byte);
        }
        block_on(image.close()).unwrap();
    }

    /// A base with data in clusters 0 to 7, and an empty image on it.
    fn pair(change: impl FnOnce(&mut CreateOptions)) -> Files {
        let files = Files::default();
        files.make("base", None, |_| {});
        files.fill("base", &[(0, 8 * CLUSTER, 0x11)]);
        files.make("top", Some("base"), change);
        files
    }

    fn check(&self, name: &str) {
        let mut findings = Vec::new();
        our_check(self.get(name).memory.contents(), &mut findings).unwrap();
        assert_eq!(findings, [], "{name}");
    }
}

fn write(image: &Image, at: u64, len: u64, byte: u8) {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    block_on(image.write(at, data, Durability::Cached)).unwrap();
}

fn read(image: &Image, at: u64, len: u64) -> Vec<u8> {
    let buf = BufMut::zeroed(len as usize);
    block_on(image.read(at, buf)).unwrap().to_vec()
}

/// Returns the extents of the image itself: the first cluster of each, and its state.
fn held(image: &Image) -> Vec<(u64, &'static str)> {
    let extents = block_on(image.extents(0, SIZE, usize::MAX)).unwrap();
    let mut held: Vec<(u64, &'static str)> = Vec::new();
    for extent in extents {
        let state = match (extent.depth, extent.present) {
            (0, true) if extent.compressed => "compressed",
            (0, true) if extent.zero => "zero",
            (0, true) => "data",
            _ => "",
        };
        if held.last().map(|(_, last)| *last) != Some(state) {
            held.push((extent.start / CLUSTER, state));
        }
    }
    held
}

#[test]
fn a_read_is_kept_in_whole_clusters_and_zeroes_take_no_space() {
    let files = Files::pair(|_| {});
    let image = files.open("top", CopyOnRead::All);
    assert_eq!(
        read(&image, 7 * CLUSTER + 512, CLUSTER).len(),
        CLUSTER as usize
    );
    assert_eq!(held(&image), [(0, ""), (7, "data"), (8, "zero"), (9, "")]);
    assert_eq!(read(&image, 3 * CLUSTER, 0), [0; 0]);
    assert_eq!(held(&image).len(), 4, "nothing read, nothing kept");
    block_on(image.close()).unwrap();
    files.check("top");
}

#[test]
fn an_image_without_a_backing_file_learns_that_it_is_zero() {
    let files = Files::default();
    files.make("alone", None, |options| options.size = 1024);
    let image = files.open("alone", CopyOnRead::All);
    assert_eq!(read(&image, 0, 1024), [0; 1024]);
    let extent = block_on(image.extents(0, 1024, 1)).unwrap()[0];
    assert!(extent.present && extent.zero);
    block_on(image.close()).unwrap();
    files.check("alone");
}

#[test]
fn version_2_gets_zeroes_written_over_a_backing_file_only() {
    let v2 = |options: &mut CreateOptions| options.version = Version::V2;
    let files = Files::pair(v2);
    let image = files.open("top", CopyOnRead::All);
    read(&image, 7 * CLUSTER, 2 * CLUSTER);
    assert_eq!(held(&image), [(0, ""), (7, "data"), (9, "")]);
    block_on(image.close()).unwrap();
    files.check("top");
    files.make("alone", None, v2);
    let image = files.open("alone", CopyOnRead::All);
    read(&image, 0, CLUSTER);
    assert_eq!(held(&image), [(0, "")]);
}

#[test]
fn only_the_layers_that_are_wanted_are_copied() {
    let files = Files::default();
    files.make("base", None, |_| {});
    files.fill("base", &[(0, 4 * CLUSTER, 0x11)]);
    files.make("mid", Some("base"), |_| {});
    files.fill("mid", &[(2 * CLUSTER, CLUSTER, 0x22)]);
    files.make("top", Some("mid"), |_| {});
    let image = files.open("top", CopyOnRead::DownTo(1));
    let all = read(&image, 0, 8 * CLUSTER);
    assert_eq!(held(&image), [(0, ""), (2, "data"), (3, "")]);
    assert_eq!(all[3 * CLUSTER as usize], 0x11);
    block_on(image.close()).unwrap();
    let image = files.open("top", CopyOnRead::DownTo(2));
    assert_eq!(read(&image, 0, 8 * CLUSTER), all);
    assert_eq!(held(&image), [(0, "data"), (4, "")]);
}

#[test]
fn subclusters_are_kept_one_by_one() {
    let files = Files::pair(|options| {
        options.cluster_size = 64 << 10;
        options.extended_l2 = true;
    });
    files.fill("top", &[(8 << 10, 2 << 10, 0x22)]);
    let image = files.open("top", CopyOnRead::All);
    assert_eq!(read(&image, (7 << 10) + 512, 512), [0x11; 512]);
    let extents = block_on(image.extents(0, 64 << 10, usize::MAX)).unwrap();
    let own = extents
        .iter()
        .filter(|extent| extent.depth == 0 && extent.present);
    let own: Vec<_> = own.map(|extent| (extent.start, extent.len)).collect();
    assert_eq!(own.first().unwrap().0, 6 << 10);
    assert_eq!(own.iter().map(|(_, len)| len).sum::<u64>(), 4 << 10);
    block_on(image.close()).unwrap();
    files.check("top");
}

#[test]
fn a_copy_does_not_go_over_what_was_written_meanwhile() {
    let files = Files::pair(|_| {});
    let image = files.open("top", CopyOnRead::All);
    // The tables of the base are in memory from then on: what waits is its data.
    read(&image, 7 * CLUSTER, 512);
    let base = files.get("base");
    base.hold_reads(true);
    let mut reading = pin!(image.read(0, BufMut::zeroed(4 * CLUSTER as usize)));
    let mut context = Context::from_waker(Waker::noop());
    assert!(reading.as_mut().poll(&mut context).is_pending());
    assert_eq!(base.waiting_reads(), 1, "it has fetched nothing yet");
    base.hold_reads(false);
    // Whole clusters need nothing from below; a part of one, and zeroes, as well.
    write(&image, CLUSTER, CLUSTER, 0x22);
    write(&image, 2 * CLUSTER + 512, 512, 0x33);
    let zeroes = image.write_zeroes(3 * CLUSTER, CLUSTER, ZeroOptions::default());
    block_on(zeroes).unwrap();
    base.let_reads_go();
    block_on(reading).unwrap();
    assert_eq!(read(&image, CLUSTER, CLUSTER), [0x22; CLUSTER as usize]);
    assert_eq!(read(&image, 2 * CLUSTER + 512, 512), [0x33; 512]);
    assert_eq!(read(&image, 2 * CLUSTER, 512), [0x11; 512]);
    assert_eq!(read(&image, 3 * CLUSTER, CLUSTER), [0; CLUSTER as usize]);
    let expected = [(0, "data"), (3, "zero"), (4, ""), (7, "data"), (8, "")];
    assert_eq!(held(&image), expected);
    block_on(image.close()).unwrap();
    files.check("top");
}

#[test]
fn bitmaps_do_not_follow_a_copy_and_a_failed_one_fails_the_read() {
    let files = Files::pair(|_| {});
    let image = files.open("top", CopyOnRead::All);
    let granularity = Some(CLUSTER);
    let add = BitmapChange::Add { granularity };
    block_on(image.change_bitmap("b", &add)).unwrap();
    read(&image, 0, 2 * CLUSTER);
    write(&image, CLUSTER, 512, 0x22);
    let bits = block_on(image.dirty_bits("b")).unwrap();
    let dirty = bits.dirty_ranges().map(|range| (range.start, range.end));
    assert_eq!(dirty.collect::<Vec<_>>(), [(CLUSTER, 2 * CLUSTER)]);
    block_on(image.close()).unwrap();

    // The first byte of cluster 4 has its copy fail.
    let base = files.open("base", CopyOnRead::Off);
    let bytes = [[0x11; 512], [FAILING; 512]].concat();
    let data = Buf::copy_of(&bytes);
    block_on(base.write(4 * CLUSTER - 512, data, Durability::Cached)).unwrap();
    block_on(base.close()).unwrap();
    let image = files.open("top", CopyOnRead::All);
    let buf = BufMut::zeroed(CLUSTER as usize);
    block_on(image.read(4 * CLUSTER, buf)).unwrap_err();
    assert_eq!(read(&image, 5 * CLUSTER, 512), [0x11; 512]);
}

#[test]
fn an_image_that_is_only_read_keeps_nothing() {
    let files = Files::pair(|_| {});
    let options = OpenOptions {
        copy_on_read: CopyOnRead::All,
        ..OpenOptions::default()
    };
    let refused = block_on(Image::open(files.get("top"), options, &files)).unwrap_err();
    assert!(refused.to_string().contains("copy-on-read"), "{refused}");
}

fn compressing() -> OpenOptions {
    OpenOptions {
        compress: true,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    }
}

#[test]
fn parts_of_clusters_are_stored_with_the_rest_of_them() {
    let files = Files::pair(|_| {});
    let image = files.open_with("top", compressing());
    write(&image, CLUSTER + 512, 2 * CLUSTER, 0x22);
    let whole = read(&image, 0, 5 * CLUSTER);
    let at = |at: u64| whole[at as usize];
    assert_eq!((at(CLUSTER), at(CLUSTER + 512)), (0x11, 0x22));
    assert_eq!((at(3 * CLUSTER + 511), at(3 * CLUSTER + 512)), (0x22, 0x11));
    assert_eq!(held(&image), [(0, ""), (1, "compressed"), (4, "")]);
    // Over what is compressed already, and zeroes in part and as a whole.
    write(&image, CLUSTER, 512, 0x33);
    let zeroes = image.write_zeroes(2 * CLUSTER + 512, 2 * CLUSTER, ZeroOptions::default());
    block_on(zeroes).unwrap();
    assert_eq!(
        read(&image, CLUSTER, 1024),
        [[0x33; 512], [0x22; 512]].concat()
    );
    assert_eq!(
        read(&image, 2 * CLUSTER, 1024),
        [[0x22; 512], [0; 512]].concat()
    );
    assert_eq!(
        read(&image, 4 * CLUSTER, 1024),
        [[0; 512], [0x11; 512]].concat()
    );
    let expected = [
        (0, ""),
        (1, "compressed"),
        (3, "zero"),
        (4, "compressed"),
        (5, ""),
    ];
    assert_eq!(held(&image), expected);
    block_on(image.discard(CLUSTER, CLUSTER)).unwrap();
    block_on(image.close()).unwrap();
    files.check("top");
}

#[test]
fn writes_to_one_compressed_cluster_lose_nothing_of_each_other() {
    let files = Files::default();
    files.make("image", None, |options| options.cluster_size = 64 << 10);
    let image = files.open_with("image", compressing());
    write(&image, 0, 64 << 10, 0xff);
    let file = files.get("image");
    file.hold_reads(true);
    let writes = (0..32_u8).map(|n| {
        let data = Buf::copy_of(&[n + 1; 2048]);
        image.write(u64::from(n) * 2048, data, Durability::Cached)
    });
    let mut writes: VecDeque<Pin<Box<_>>> = writes.map(Box::pin).collect();
    let mut context = Context::from_waker(Waker::noop());
    // Each reads the cluster and stores it again, and waits in between.
    while !writes.is_empty() {
        writes.retain_mut(|one| match one.as_mut().poll(&mut context) {
            Poll::Ready(written) => {
                written.unwrap();
                false
            }
            Poll::Pending => true,
        });
        assert!(file.waiting_reads() <= 1, "the others wait for it");
        file.let_reads_go();
    }
    file.hold_reads(false);
    for n in 0..32_u8 {
        assert_eq!(read(&image, u64::from(n) * 2048, 2048), [n + 1; 2048]);
    }
    block_on(image.close()).unwrap();
    files.check("image");
}

#[test]
fn what_cannot_be_compressed_is_refused_when_it_is_opened() {
    let files = Files::default();
    let options = OpenOptions {
        writable: true,
        format: Some(cowslip::image::Format::Raw),
        ..compressing()
    };
    let raw = Arc::new(MemoryFile::new("raw", vec![0; 4096], 1));
    let refused = block_on(Image::open(raw, options, &files)).unwrap_err();
    let words = "Compression is not supported for underlying format: raw";
    assert_eq!(refused.to_string(), words);
}
