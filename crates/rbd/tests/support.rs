//! Libraries in a scratch directory, and futures on this thread.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip_block::Result;
use cowslip_queue::block_here;
use cowslip_rbd::{Access, Ceph, RbdFile, RbdName, Settings, open_by};
use cowslip_testbed::Random;
use cowslip_testbed::ceph::FakeCeph;

/// A cluster of the tests.
pub struct Cluster {
    pub fake: FakeCeph,
    pub ceph: Arc<Ceph>,
    _scratch: tempfile::TempDir,
}

/// A cluster; `None` where there is no C compiler, which is said.
pub fn cluster() -> Option<Cluster> {
    cluster_with(&[])
}

/// A cluster of libraries that are compiled with these definitions.
pub fn cluster_with(defined: &[&str]) -> Option<Cluster> {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(fake) = FakeCeph::make_with(scratch.path(), defined).unwrap() else {
        eprintln!("SKIPPED: not installed: cc");
        return None;
    };
    let ceph = Ceph::load(Some(scratch.path())).unwrap();
    Some(Cluster {
        fake,
        ceph,
        _scratch: scratch,
    })
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The libraries need their directory until the images are closed.
        cowslip_rbd::end(101);
    }
}

/// Settings for an image.
pub fn settings(access: Access) -> Settings<'static> {
    Settings {
        shown: "the image",
        access,
        cached: true,
        key: None,
        wait_timeout: None,
    }
}

impl Cluster {
    /// Opens an image by its file name.
    pub fn open(&self, name: &str, access: Access) -> Result<Arc<RbdFile>> {
        let name = RbdName::of_file_name(name).unwrap().unwrap();
        wait(open_by(
            Some(Arc::clone(&self.ceph)),
            &name,
            settings(access),
        ))
    }

    /// The words for an image that cannot be opened.
    pub fn refusal(&self, name: &str, access: Access) -> String {
        self.open(name, access).unwrap_err().to_string()
    }

    /// Makes an image of random bytes in the pool `rbd`.
    pub fn random(&self, name: &str, bytes: usize) -> Vec<u8> {
        let contents = random(bytes);
        std::fs::write(self.fake.image(&format!("rbd/{name}")), &contents).unwrap();
        contents
    }

    /// Makes an image of zeroes without data in the pool `rbd`.
    pub fn empty(&self, name: &str, bytes: u64) {
        let file = std::fs::File::create(self.fake.image(&format!("rbd/{name}"))).unwrap();
        file.set_len(bytes).unwrap();
    }

    /// The bytes of an image in the pool `rbd`.
    pub fn contents(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.fake.image(&format!("rbd/{name}"))).unwrap()
    }

    /// The calls that begin so.
    pub fn calls(&self, beginning: &str) -> Vec<String> {
        let mut calls = self.fake.calls().unwrap();
        calls.retain(|call| call.starts_with(beginning));
        calls
    }

    /// Waits until a call was made.
    pub fn wait_for(&self, call: &str) {
        let begun = Instant::now();
        while self.calls(call).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(10), "no {call}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub fn random(bytes: usize) -> Vec<u8> {
    let mut random = Random::new(7);
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

/// Runs a future on this thread.
pub fn wait<T>(future: impl Future<Output = T>) -> T {
    block_here(future)
}
