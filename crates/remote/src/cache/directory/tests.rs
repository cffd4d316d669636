//! Processes that end at any moment, damage, and others that use the same files.

use super::*;

const BLOCK_BITS: u32 = 16;

fn scratch() -> (tempfile::TempDir, CacheDirectory) {
    let dir = tempfile::tempdir().unwrap();
    let directory = CacheDirectory::open(dir.path(), 1 << 30).unwrap();
    (dir, directory)
}

fn url() -> ObjectUrl {
    ObjectUrl::of_name("https://host/golden.raw")
        .unwrap()
        .unwrap()
}

fn version() -> Version {
    Version {
        e_tag: Some("\"one\"".to_string()),
        last_modified: None,
        bytes: 1 << 20,
    }
}

fn key() -> String {
    CacheDirectory::key(&url(), &version(), BLOCK_BITS)
}

fn enter(directory: &CacheDirectory) -> (Index<File>, File) {
    directory.files_of(&url(), &version(), BLOCK_BITS).unwrap()
}

/// Makes an object with its first block.
fn fill(directory: &CacheDirectory) {
    let (index, data) = enter(directory);
    index.store(&data, 0, &[7; 1 << BLOCK_BITS]).unwrap();
}

fn names(directory: &CacheDirectory) -> Vec<String> {
    let entries = std::fs::read_dir(directory.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// States that a removal, or a host, may leave that ends in the middle of it.
fn leavings(directory: &CacheDirectory) -> [Box<dyn Fn() + '_>; 4] {
    let (index, data) = (directory.index_path(&key()), directory.data_path(&key()));
    let empty = {
        let index = index.clone();
        move || drop(File::create(&index).unwrap())
    };
    let (empty_too, index_too) = (empty.clone(), index.clone());
    [
        Box::new(move || std::fs::remove_file(&index).unwrap()),
        Box::new(empty),
        Box::new(move || {
            empty_too();
            std::fs::remove_file(&data).unwrap();
        }),
        Box::new(move || Medium::write_at(&open(&index_too), &[0xff; 100], 0).unwrap()),
    ]
}

fn open(path: &Path) -> File {
    writable().open(path).unwrap()
}

#[test]
fn what_the_dead_have_left_is_counted_and_removed() {
    let (_dir, directory) = scratch();
    for (number, leave) in leavings(&directory).iter().enumerate() {
        fill(&directory);
        leave();
        let taken = directory.taken_bytes().unwrap();
        assert_eq!(taken >= 1 << BLOCK_BITS, number != 2, "state {number}");
        assert_eq!(directory.prune(u64::MAX).unwrap(), (Vec::new(), 0));
        assert_eq!(names(&directory), [""; 0], "state {number}");
    }
    let unfinished = |name: &str| directory.path().join(format!("{}.{name}.new", key()));
    let old = File::create(unfinished("0123")).unwrap();
    old.set_modified(SystemTime::now() - 2 * UNFINISHED_KEPT)
        .unwrap();
    File::create(unfinished("4567")).unwrap();
    File::create(directory.path().join("not ours.new")).unwrap();
    directory.prune(u64::MAX).unwrap();
    let left = [format!("{}.4567.new", key()), "not ours.new".to_string()];
    assert_eq!(names(&directory), left);
}

#[test]
fn what_the_dead_have_left_is_used_again() {
    let (_dir, directory) = scratch();
    for (number, leave) in leavings(&directory).iter().enumerate() {
        fill(&directory);
        leave();
        let (index, data) = enter(&directory);
        assert_eq!(index.entry(0).unwrap(), Entry::Absent, "state {number}");
        index.store(&data, 3, &[9; 1 << BLOCK_BITS]).unwrap();
        drop((index, data));
        let (index, _) = enter(&directory);
        assert!(matches!(index.entry(3).unwrap(), Entry::Present(_)));
    }
}

#[test]
fn what_is_in_use_stays_whatever_its_index_says() {
    let (_dir, directory) = scratch();
    fill(&directory);
    let held = enter(&directory);
    let path = directory.index_path(&key());
    let number = || std::fs::metadata(&path).unwrap().ino();
    let before = number();
    Medium::write_at(&open(&path), &[0xff; 100], 0).unwrap();
    let head = Head {
        boot: this_boot(),
        ..held.0.head.clone()
    };
    let entered = directory.enter(open(&path), &head, &key()).unwrap();
    assert!(entered.is_none(), "one index for some, another for others");
    assert_eq!(number(), before);
    let (_, taken) = directory.prune(0).unwrap();
    assert!(taken >= 1 << BLOCK_BITS);
    assert_eq!(names(&directory).len(), 2);
    drop(held);
    let (index, _) = enter(&directory);
    assert_eq!(index.entry(0).unwrap(), Entry::Absent);
}

#[test]
fn an_index_is_made_in_no_file_of_others() {
    let (_dir, directory) = scratch();
    let others = directory.path().join("others");
    std::fs::write(&others, "theirs").unwrap();
    // By equal numbers of processes, as containers have them.
    for number in 0..1000 {
        let name = format!("{}.{}-{number}.new", key(), std::process::id());
        std::fs::hard_link(&others, directory.path().join(name)).unwrap();
    }
    fill(&directory);
    assert_eq!(std::fs::read(&others).unwrap(), b"theirs");
}

/// Comparing all blocks may take long, and who opens the object meanwhile needs it alone only to
/// begin a boot.
#[test]
fn comparing_begins_the_boot_for_those_that_come_meanwhile() {
    let (_dir, directory) = scratch();
    fill(&directory);
    let path = directory.index_path(&key());
    let index = Index::open(open(&path)).unwrap().unwrap();
    index.begin_boot(&[1; 16]).unwrap();
    let verified = directory.verify().unwrap();
    assert_eq!(verified[0].blocks, 0, "it was not durable");
    assert_eq!(index.boot().unwrap(), this_boot());
    lock::share(index.medium.as_fd(), USE_AT, 1).unwrap();
    let head = Head {
        boot: this_boot(),
        ..index.head.clone()
    };
    assert!(
        directory
            .enter(open(&path), &head, &key())
            .unwrap()
            .is_some()
    );
}
