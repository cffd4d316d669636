//! Fresh images in memory: what they contain, and against `qemu-img create` byte by byte.

use std::process::Command;

use futures_util::FutureExt;

use super::*;
use crate::file::memory::MemoryFile;

fn make(options: &CreateOptions) -> (Vec<u8>, Option<Vec<u8>>) {
    make_aligned(options, 1)
}

fn make_aligned(options: &CreateOptions, alignment: u32) -> (Vec<u8>, Option<Vec<u8>>) {
    let file = Arc::new(MemoryFile::new("a", vec![], alignment));
    let data = options
        .data_file
        .as_ref()
        .map(|name| Arc::new(MemoryFile::new(name, vec![], 1)));
    let data_file = data.clone().map(|data| data as Arc<dyn BlockFile>);
    create(file.clone(), data_file, options)
        .now_or_never()
        .expect("memory files complete at once")
        .unwrap();
    (file.contents(), data.map(|data| data.contents()))
}

/// Every combination that matters, of a size that the cluster size fits.
fn matrix() -> Vec<CreateOptions> {
    let mut out = Vec::new();
    for bits in [9, 14, 16] {
        for sizes in [0u64, 1 << 20, (6 << 20) + 512, 3 << 30] {
            for preallocation in [
                Preallocation::Off,
                Preallocation::Metadata,
                Preallocation::Falloc,
            ] {
                for (refcount_bits, extended_l2) in
                    [(16, false), (16, true), (1, false), (64, false), (64, true)]
                {
                    let mut options = CreateOptions::new(sizes);
                    options.cluster_size = 1 << bits;
                    options.preallocation = preallocation;
                    options.refcount_bits = refcount_bits;
                    options.extended_l2 = extended_l2;
                    let allocates = preallocation != Preallocation::Off;
                    let too_small = extended_l2 && bits < 14;
                    let too_large = allocates && sizes > 1 << 30;
                    if !too_small && !too_large {
                        out.push(options);
                    }
                }
            }
        }
    }
    out
}

#[test]
fn a_fresh_image_parses_and_its_header_says_what_was_asked() {
    for mut options in matrix().into_iter().filter(|o| o.size <= 1 << 20) {
        options.lazy_refcounts = true;
        let (bytes, _) = make(&options);
        let header = Header::parse(&bytes, bytes.len() as u64, "a").unwrap();
        assert_eq!(header.size, options.size);
        assert_eq!(header.is_extended_l2(), options.extended_l2);
        assert_eq!(
            header.geometry().refcount_bits() as u64,
            options.refcount_bits
        );
        assert!(header.has_lazy_refcounts() && !header.is_dirty());
    }
}

#[test]
fn the_file_is_the_same_whatever_its_alignment() {
    for bits in [9, 16] {
        let mut options = CreateOptions::new(64 << 20);
        options.cluster_size = 1 << bits;
        let (plain, _) = make(&options);
        let (aligned, _) = make_aligned(&options, 4096);
        assert_eq!(plain, aligned, "clusters of {} bytes", 1 << bits);
    }
}

/// A file whose writes fail once there are more than it allows.
#[derive(Debug)]
struct Failing {
    inner: MemoryFile,
    writes_left: std::sync::atomic::AtomicU64,
}

impl BlockFile for Failing {
    cowslip_block::forward_to_file!(inner: name, capabilities, len, read, zero, discard, allocate, extents, flush, set_len);

    fn write(
        &self,
        offset: u64,
        data: cowslip_queue::IoVec,
        durability: crate::file::Durability,
    ) -> cowslip_queue::Pending<std::io::Result<()>> {
        use std::sync::atomic::Ordering::Relaxed;
        let left = self.writes_left.load(Relaxed);
        if left == 0 {
            let full = std::io::Error::from_raw_os_error(28);
            return cowslip_queue::Pending::ready(Err(full));
        }
        self.writes_left.store(left - 1, Relaxed);
        self.inner.write(offset, data, durability)
    }
}

#[test]
fn a_file_whose_creation_was_cut_short_is_no_image() {
    let mut options = CreateOptions::new(1 << 20);
    options.preallocation = Preallocation::Metadata;
    for writes in 0..20 {
        let file = Arc::new(Failing {
            inner: MemoryFile::new("a", vec![], 1),
            writes_left: writes.into(),
        });
        let made = create(file.clone(), None, &options).now_or_never().unwrap();
        let bytes = file.inner.contents();
        let parsed = Header::parse(&bytes, bytes.len() as u64, "a");
        assert_eq!(made.is_ok(), parsed.is_ok(), "after {writes} writes");
        if made.is_ok() {
            assert!(writes > 3);
            return;
        }
    }
    panic!("creating a small image takes a few writes only");
}

fn qemu_img() -> Option<&'static str> {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        eprintln!("SKIPPED: qemu-img is not installed, fresh images are not compared with its");
    }
    found.then_some("qemu-img")
}

fn option_list(options: &CreateOptions) -> String {
    let switch = |on: bool| if on { "on" } else { "off" };
    let mut list = format!(
        "cluster_size={},extended_l2={},refcount_bits={},lazy_refcounts={},compat={},\
         compression_type={},preallocation={}",
        options.cluster_size,
        switch(options.extended_l2),
        options.refcount_bits,
        switch(options.lazy_refcounts),
        match options.version {
            Version::V2 => "v2",
            Version::V3 => "v3",
        },
        options.compression_type.name(),
        match options.preallocation {
            Preallocation::Off => "off",
            Preallocation::Metadata => "metadata",
            Preallocation::Falloc => "falloc",
            Preallocation::Full => "full",
        },
    );
    if let Some(name) = &options.data_file {
        list += &format!(
            ",data_file={name},data_file_raw={}",
            switch(options.data_file_raw)
        );
    }
    list
}

/// Makes the image here and with qemu-img, and compares the files.
fn compare_with_qemu(options: &CreateOptions) {
    let Some(qemu_img) = qemu_img() else { return };
    let dir = std::env::temp_dir().join(format!(
        "cowslip-create-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    std::fs::create_dir_all(&dir).unwrap();
    let mut command = Command::new(qemu_img);
    command
        .current_dir(&dir)
        .args(["create", "-q", "-f", "qcow2", "-u"]);
    command.args(["-o", &option_list(options)]);
    if let Some(backing) = &options.backing_file {
        command.args(["-b", backing]);
    }
    if let Some(format) = &options.backing_format {
        command.args(["-F", format]);
    }
    let made = command
        .args(["a", &options.size.to_string()])
        .output()
        .unwrap();
    assert!(made.status.success(), "{options:?}: {made:?}");
    let theirs = std::fs::read(dir.join("a")).unwrap();
    let (ours, our_data) = make(options);
    let their_data = our_data
        .as_ref()
        .map(|_| std::fs::read(dir.join("d")).unwrap());
    std::fs::remove_dir_all(&dir).unwrap();
    assert_eq!(ours.len(), theirs.len(), "length with {options:?}");
    let layout = Layout::plan(options.validate().unwrap(), options).unwrap();
    let cluster = options.cluster_size as usize;
    for (index, (ours, theirs)) in ours.chunks(cluster).zip(theirs.chunks(cluster)).enumerate() {
        // A refcount table that was replaced during creation is still in QEMU's free clusters.
        if ours != theirs && layout.is_used(index as u64) {
            let at = ours.iter().zip(theirs).position(|(a, b)| a != b);
            panic!("cluster {index} differs at byte {at:x?}; {options:?}");
        }
    }
    if let (Some(ours), Some(theirs)) = (our_data, their_data) {
        // QEMU rounds the length up to clusters when it preallocates; here it is the disk's.
        assert_eq!(
            ours.len() as u64,
            options.size,
            "data file with {options:?}"
        );
        assert!(ours.len() <= theirs.len() && theirs.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn fresh_images_are_qemus_to_the_byte() {
    for options in matrix() {
        compare_with_qemu(&options);
    }
}

#[test]
fn fresh_images_with_other_files_are_qemus_to_the_byte() {
    for preallocation in [
        Preallocation::Off,
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ] {
        for size in [1 << 20, (6 << 20) + 512] {
            let mut backed = CreateOptions::new(size);
            backed.extended_l2 = true;
            backed.preallocation = preallocation;
            backed.backing_file = Some("base".into());
            backed.backing_format = Some("qcow2".into());
            compare_with_qemu(&backed);
            let mut external = CreateOptions::new(size);
            external.preallocation = preallocation;
            external.data_file = Some("d".into());
            compare_with_qemu(&external);
            external.data_file_raw = true;
            external.compression_type = CompressionType::Zstd;
            compare_with_qemu(&external);
        }
    }
    let mut old = CreateOptions::new(1 << 20);
    old.version = Version::V2;
    compare_with_qemu(&old);
    old.backing_file = Some("a,b".into());
    old.backing_format = Some("raw".into());
    compare_with_qemu(&old);
}

#[test]
fn large_disks_are_qemus_to_the_byte() {
    for (bits, size) in [
        (9, 40 << 30),
        (12, 1 << 40),
        (16, 16 << 40),
        (21, (2 << 60) - 512),
    ] {
        for refcount_bits in [1, 16, 64] {
            let mut options = CreateOptions::new(size);
            options.cluster_size = 1 << bits;
            options.refcount_bits = refcount_bits;
            compare_with_qemu(&options);
        }
    }
}

#[test]
fn options_that_do_not_go_together_are_refused_and_nothing_is_written() {
    type Change = fn(&mut CreateOptions);
    let cases: &[(Change, &str)] = &[
        (|o| o.cluster_size = 3, "Cluster size must be"),
        (|o| o.cluster_size = 4 << 20, "Cluster size must be"),
        (|o| o.refcount_bits = 0, "Refcount width"),
        (|o| o.refcount_bits = 128, "Refcount width"),
        (|o| o.size = 1 << 62, "too large for file format"),
        (|o| o.size = u64::MAX, "cannot be negative"),
        (|o| o.data_file_raw = true, "requires data-file"),
        (
            |o| o.backing_format = Some("raw".into()),
            "without backing file",
        ),
        (|o| o.backing_file = Some("n".repeat(1024)), "do not fit"),
        (
            |o| {
                o.version = Version::V2;
                o.refcount_bits = 8;
            },
            "Different refcount widths than 16 bits require compatibility level 1.1 or above",
        ),
        (
            |o| {
                o.extended_l2 = true;
                o.cluster_size = 8192;
            },
            "at least 16384 bytes",
        ),
        (
            |o| {
                o.backing_file = Some("b".into());
                o.preallocation = Preallocation::Metadata;
            },
            "only be used at the same time if extended_l2 is on",
        ),
    ];
    for (change, words) in cases {
        let mut options = CreateOptions::new(1 << 20);
        change(&mut options);
        let file = Arc::new(MemoryFile::new("a", vec![], 1));
        let made = create(file.clone(), None, &options).now_or_never().unwrap();
        let text = made.unwrap_err().to_string();
        assert!(text.contains(words), "{text} lacks {words:?}");
        assert!(file.contents().is_empty());
    }
}
