//! Rebase, commit and compare through the library: what is refused, cancelled, and left as it was.

use std::sync::{Arc, Mutex, OnceLock};

use cowslip::commit::{Afterwards, Commit};
use cowslip::compare::{Strictness, Verdict, compare};
use cowslip::convert::Form;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{BackingChoice, OpenOptions, ZeroOptions};
use cowslip::job::{Attendant, Moment};
use cowslip::qcow2::amend::BackingFile;
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image, Job, Result};

use crate::support::block_on;

const SIZE: u64 = 16 << 20;

/// Files in memory by their names.
#[derive(Clone, Default)]
struct Files {
    files: Vec<(String, Arc<MemoryFile>)>,
    /// Names that were asked for to be written.
    written: Arc<Mutex<Vec<String>>>,
}

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        if request.writable {
            self.written.lock().unwrap().push(request.name.to_string());
        }
        Ok(self.get(request.name))
    }
}

impl Files {
    fn get(&self, name: &str) -> Arc<MemoryFile> {
        let found = self.files.iter().find(|(known, _)| known == name);
        Arc::clone(&found.unwrap().1)
    }

    fn make(&mut self, name: &str, backing: Option<&str>) {
        self.make_with(name, backing, false);
    }

    fn make_with(&mut self, name: &str, backing: Option<&str>, extended_l2: bool) {
        let file = Arc::new(MemoryFile::new(name, Vec::new(), 1));
        let options = CreateOptions {
            backing_file: backing.map(str::to_string),
            backing_format: backing.map(|_| "qcow2".to_string()),
            extended_l2,
            ..CreateOptions::new(SIZE)
        };
        block_on(create(file.clone(), None, &options)).unwrap();
        self.files.push((name.to_string(), file));
    }

    fn open(&self, name: &str, writable: bool) -> Image {
        let options = OpenOptions {
            writable,
            ..OpenOptions::default()
        };
        block_on(Image::open(self.get(name), options, self)).unwrap()
    }

    fn write(&self, name: &str, at: u64, bytes: &[u8]) {
        let image = self.open(name, true);
        let write = image.write(at, Buf::copy_of(bytes), Default::default());
        block_on(write).unwrap();
        block_on(image.close()).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        let image = self.open(name, false);
        block_on(image.read(0, BufMut::zeroed(SIZE as usize)))
            .unwrap()
            .to_vec()
    }

    /// `base`, `mid` on it and `top` on that, with data in each, and `other`.
    fn chain() -> Files {
        let mut files = Files::default();
        files.make("base", None);
        files.make("mid", Some("base"));
        files.make("top", Some("mid"));
        files.make("other", None);
        files.write("base", 0, &[1; 200_000]);
        files.write("mid", 100_000, &[2; 200_000]);
        files.write("top", 1 << 20, &[3; 12 << 20]);
        files.write("other", 50_000, &[4; 10_000]);
        files
    }
}

/// Cancels its job when it asks for a piece of this number.
struct Cancels {
    left: Mutex<usize>,
    job: Arc<OnceLock<Job>>,
}

impl Attendant for Cancels {
    fn pace(&self, _: u64) -> Option<Moment> {
        let mut left = self.left.lock().unwrap();
        match left.checked_sub(1) {
            Some(less) => *left = less,
            None => self.job.get().unwrap().cancel(),
        }
        None
    }
}

fn cancelled_after(pieces: usize) -> Job {
    let slot = Arc::new(OnceLock::new());
    let job = Job::attended(Cancels {
        left: Mutex::new(pieces),
        job: Arc::clone(&slot),
    });
    slot.set(job.clone()).unwrap();
    job
}

fn into(depth: usize, afterwards: Afterwards) -> Commit {
    Commit {
        depth,
        afterwards,
        base: OpenOptions::default(),
    }
}

#[test]
fn a_cancelled_commit_leaves_the_image_as_it_was() {
    for pieces in 0..4 {
        let files = Files::chain();
        let (before, disk) = (files.get("top").contents(), files.read("top"));
        let image = files.open("top", true);
        let commit = into(1, Afterwards::Empty);
        let outcome = block_on(image.commit(&commit, &files, &cancelled_after(pieces)));
        assert!(matches!(outcome, Err(Error::Cancelled)), "{outcome:?}");
        block_on(image.close()).unwrap();
        assert!(files.get("top").contents() == before, "after {pieces}");
        assert!(files.read("top") == disk, "after {pieces}");
    }
}

#[test]
fn a_cancelled_rebase_leaves_the_disk_and_the_header() {
    let files = Files::chain();
    let disk = files.read("top");
    let (image, new) = (files.open("top", true), files.open("other", false));
    let backing = BackingFile::File {
        name: "other".to_string(),
        format: "qcow2".to_string(),
    };
    let outcome = block_on(image.rebase(Some(&new), backing, Form::Plain, &cancelled_after(0)));
    assert!(matches!(outcome, Err(Error::Cancelled)), "{outcome:?}");
    block_on(image.close()).unwrap();
    assert_eq!(files.open("top", false).layers()[1].name, "mid");
    assert!(files.read("top") == disk);
}

#[test]
fn an_emptied_image_is_as_short_as_a_new_one() {
    let mut files = Files::chain();
    let disk = files.read("top");
    let image = files.open("top", true);
    block_on(image.commit(&into(1, Afterwards::Empty), &files, &Job::default())).unwrap();
    assert_eq!(*files.written.lock().unwrap(), ["mid"]);
    // Its data is freed, so it must not be read there any more, nor committed again.
    let found = block_on(image.read(0, BufMut::zeroed(SIZE as usize))).unwrap();
    assert!(found[..] == disk[..]);
    let again = block_on(image.commit(&into(1, Afterwards::Empty), &files, &Job::default()));
    assert!(matches!(again, Err(Error::Latched(_))), "{again:?}");
    block_on(image.close()).unwrap();
    assert!(files.read("top") == disk && files.read("mid") == disk);
    files.make("new", Some("mid"));
    let len = |name: &str| files.get(name).contents().len() as u64;
    assert!(len("top") <= len("new").next_multiple_of(65536));
    // Nothing is its own any more.
    let image = files.open("top", false);
    let extents = block_on(image.extents(0, SIZE, 1000)).unwrap();
    assert!(extents.iter().all(|extent| extent.depth > 0), "{extents:?}");
}

#[test]
fn what_cannot_be_committed_is_refused() {
    let files = Files::chain();
    let refused = |name: &str, writable: bool, commit: Commit| {
        let image = files.open(name, writable);
        let outcome = block_on(image.commit(&commit, &files, &Job::default()));
        block_on(image.close()).unwrap();
        outcome.unwrap_err().to_string()
    };
    let text = refused("base", true, into(1, Afterwards::Empty));
    assert_eq!(text, "Image does not have a backing file");
    assert!(refused("top", true, into(3, Afterwards::Kept)).contains("backing file"));
    assert!(refused("top", true, into(0, Afterwards::Kept)).contains("backing file"));
    assert!(refused("top", true, into(2, Afterwards::Empty)).contains("can be emptied"));
    assert!(refused("top", false, into(1, Afterwards::Empty)).contains("read-only"));
    assert!(files.written.lock().unwrap().is_empty());
}

#[test]
fn what_is_committed_further_down_is_what_those_above_decide() {
    let files = Files::chain();
    let (disk, mid) = (files.read("top"), files.get("mid").contents());
    let image = files.open("top", true);
    block_on(image.commit(&into(2, Afterwards::Kept), &files, &Job::default())).unwrap();
    block_on(image.close()).unwrap();
    assert!(files.read("base") == disk && files.read("top") == disk);
    assert!(files.get("mid").contents() == mid);
}

#[test]
fn a_comparison_looks_at_what_the_tables_leave_open() {
    let files = Files::chain();
    let compared = |names: [&str; 2]| {
        let images = names.map(|name| files.open(name, false));
        let images = [&images[0], &images[1]];
        block_on(compare(images, Strictness::Content, &Job::default())).unwrap()
    };
    let same = compared(["top", "top"]);
    assert_eq!(same.verdict, Verdict::Identical);
    let differs = compared(["base", "other"]);
    assert_eq!(differs.verdict, Verdict::ContentDiffers(0));
    assert!(differs.looked_at_bytes <= 1 << 20, "{differs:?}");
    // Two images alone that hold the same.
    files.write("other", 0, &vec![0; SIZE as usize]);
    files.write("other", 0, &[1; 200_000]);
    let same = compared(["base", "other"]);
    assert_eq!(same.verdict, Verdict::Identical);
    assert_eq!(same.looked_at_bytes, SIZE);
    let job = Job::default();
    job.cancel();
    let images = ["base", "other"].map(|name| files.open(name, false));
    let images = [&images[0], &images[1]];
    assert!(block_on(compare(images, Strictness::Content, &job)).is_err());
}

#[test]
fn a_backing_file_that_the_caller_chose_is_committed_into() {
    let files = Files::chain();
    let options = OpenOptions {
        writable: true,
        backing: BackingChoice::Override {
            name: "other".to_string(),
            format: None,
        },
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(files.get("top"), options, &files)).unwrap();
    block_on(image.commit(&into(1, Afterwards::Kept), &files, &Job::default())).unwrap();
    block_on(image.close()).unwrap();
    assert_eq!(*files.written.lock().unwrap(), ["other"]);
    assert_eq!(files.read("other")[1 << 20], 3);
}

#[test]
fn parts_that_are_zeroed_stay_zeroes_whatever_comes_to_lie_below() {
    const CLUSTER: u64 = 64 << 10;
    for extended_l2 in [false, true] {
        let mut files = Files::default();
        files.make("base", None);
        files.make_with("top", Some("base"), extended_l2);
        files.write("base", CLUSTER, &[1; 512]);
        // Where all of it reads as zeroes, beside data below, over a border between clusters, and
        // at the disk's end.
        let parts = [
            (1024, 512),
            (CLUSTER + 1024, 512),
            (3 * CLUSTER - 512, 1024),
            (SIZE - 512, 512),
        ];
        let image = files.open("top", true);
        for (at, len) in parts {
            block_on(image.write_zeroes(at, len, ZeroOptions::default())).unwrap();
        }
        for (i, (at, len)) in parts.into_iter().enumerate() {
            for extent in block_on(image.extents(at, len, 64)).unwrap() {
                let takes_space = i == 1;
                assert_eq!(extent.depth, 0, "{extent:?}");
                assert_eq!(extent.data, takes_space, "{extent:?}");
            }
        }
        block_on(image.close()).unwrap();
        files.write("base", 0, &[2; SIZE as usize]);
        let disk = files.read("top");
        for (at, len) in parts {
            let part = &disk[at as usize..(at + len) as usize];
            assert!(part.iter().all(|&byte| byte == 0), "at {at}");
        }
    }
}
