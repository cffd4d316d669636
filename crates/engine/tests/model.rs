//! Random requests against a model of the disk, one at a time, on files in memory: what the guest
//! reads, after reopening too. Concurrency, crashes and faults are the simulator's.

use std::process::Command;
use std::sync::Arc;

use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{
    BackingChoice, DiscardPolicy, Durability, Format, OpenOptions, Space, ZeroOptions,
};
use cowslip::qcow2::create::{self, CreateOptions};
use cowslip::{Buf, BufMut, Error, Image};
use cowslip_block::random::Random;

use crate::support::block_on;

fn options() -> OpenOptions {
    OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        backing: BackingChoice::None,
        cache_bytes: 4 * 4096,
        ..OpenOptions::default()
    }
}

#[allow(clippy::too_many_lines)] // One arm a verb, beside its model.
fn run(create_options: &str, size: u64, alignment: u32, seed: u64) {
    let directory = std::env::temp_dir().join(format!(
        "cowslip-model-{}-{seed}-{alignment}",
        std::process::id()
    ));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("a.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", create_options])
        .arg(&path)
        .arg(size.to_string())
        .status();
    if made.is_err() {
        println!("SKIPPED: qemu-img is not installed");
        return;
    }
    let mut bytes = std::fs::read(&path).unwrap();
    let mut random = Random(seed);
    let mut model = vec![0u8; size as usize];
    for _ in 0..3 {
        let file = Arc::new(MemoryFile::new("a.qcow2", bytes, alignment));
        let image = block_on(Image::open(file.clone(), options(), &NoFiles)).unwrap();
        for step in 0..150u64 {
            let start = random.below(size);
            let mut len = 1 + random.below((size - start).min(300_000));
            if random.below(2) == 0 {
                len = len.min(5000);
            }
            let range = start as usize..(start + len) as usize;
            if std::env::var_os("COWSLIP_TRACE").is_some() {
                println!("{step}: {start}+{len} {}", Random(random.0).below(9));
            }
            match random.below(9) {
                0..=3 => {
                    let data: Vec<u8> = (0..len).map(|i| (i * 7 + step) as u8 | 1).collect();
                    model[range].copy_from_slice(&data);
                    let fua = random.below(4) == 0;
                    block_on(image.write(start, Buf::from(data), Durability::of_fua(fua))).unwrap();
                }
                4 => {
                    model[range].fill(0);
                    let may_unmap = random.below(2) == 0;
                    let zero = ZeroOptions {
                        space: Space::of_unmap(may_unmap),
                        ..ZeroOptions::default()
                    };
                    block_on(image.write_zeroes(start, len, zero)).unwrap();
                }
                5 => {
                    block_on(image.discard(start, len)).unwrap();
                    let buf = block_on(image.read(start, BufMut::zeroed(len as usize))).unwrap();
                    for (new, old) in buf.iter().zip(&mut model[range]) {
                        assert!(*new == 0 || new == old);
                        *old = *new;
                    }
                }
                6 => block_on(image.flush()).unwrap(),
                _ => {
                    let buf = block_on(image.read(start, BufMut::zeroed(len as usize))).unwrap();
                    let wrong = (0..buf.len()).find(|&i| buf[i] != model[start as usize + i]);
                    assert_eq!(
                        wrong.map(|i| (start + i as u64, buf[i], model[start as usize + i])),
                        None,
                        "{create_options} seed {seed} step {step}: {start}+{len}"
                    );
                }
            }
        }
        block_on(image.close()).unwrap();
        bytes = file.contents();
        std::fs::write(&path, &bytes).unwrap();
        let check = Command::new("qemu-img")
            .arg("check")
            .arg(&path)
            .output()
            .unwrap();
        assert!(
            check.status.success(),
            "{create_options} seed {seed}: {}",
            String::from_utf8_lossy(&check.stdout)
        );
        let raw = directory.join("a.raw");
        let converted = Command::new("qemu-img")
            .args(["convert", "-O", "raw"])
            .arg(&path)
            .arg(&raw)
            .status();
        assert!(converted.unwrap().success());
        assert!(
            std::fs::read(&raw).unwrap() == model,
            "{create_options} seed {seed}: QEMU reads other bytes"
        );
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn images_hold_what_was_written_and_qemu_reads_the_same() {
    let shapes = [
        ("cluster_size=65536", 4 << 20),
        ("cluster_size=65536,extended_l2=on", 4 << 20),
        (
            "cluster_size=16384,extended_l2=on,refcount_bits=1",
            2_000_384,
        ),
        ("cluster_size=512", 1_500_160),
        ("cluster_size=512,refcount_bits=64", 1 << 20),
        ("cluster_size=4096,compat=0.10", 1 << 20),
        ("cluster_size=2M", 9 << 20),
    ];
    for (index, (shape, size)) in shapes.iter().enumerate() {
        for alignment in [1, 512, 4096] {
            run(shape, *size, alignment, index as u64 + 1);
        }
    }
}

/// The guard of the metadata lock is not `Send`. So a future that is cannot hold it across a wait,
/// and the compiler proves that the lock is never held across I/O.
#[test]
fn the_futures_of_an_image_are_send() {
    fn is_send<T: Send>(_: T) {}
    let bytes = vec![0; 4096];
    let file = Arc::new(MemoryFile::new("a.raw", bytes, 1));
    let image = block_on(Image::open(file.clone(), options(), &NoFiles)).unwrap();
    is_send(Image::open(file, options(), &NoFiles));
    is_send(image.read(0, BufMut::zeroed(1)));
    is_send(image.write(0, Buf::zeroed(1), Durability::Cached));
    is_send(image.write_compressed(0, Buf::zeroed(1)));
    is_send(image.write_zeroes(0, 1, ZeroOptions::default()));
    is_send(image.discard(0, 1));
    is_send(image.flush());
    is_send(image.extents(0, 1, 1));
    is_send(image.resize(512));
    is_send(image.maintain());
    is_send(image.close());
}

/// Invariant S3: guest data mapped to metadata is not written, and the image says so from then on.
#[test]
fn a_write_onto_metadata_marks_the_image_corrupt() {
    let bytes = block_on(async {
        let file = Arc::new(MemoryFile::new("a.qcow2", Vec::new(), 1));
        let create = CreateOptions::new(1 << 20);
        create::create(file.clone(), None, &create).await.unwrap();
        let image = Image::open(file.clone(), options(), &NoFiles)
            .await
            .unwrap();
        image
            .write(0, Buf::zeroed(4096), Durability::Cached)
            .await
            .unwrap();
        image.close().await.unwrap();
        file.contents()
    });
    // The first L2 entry, which the fifth cluster holds, comes to point at the refcount table.
    let mut damaged = bytes.clone();
    let (l2, refcount_table) = (4 << 16, 1u64 << 16);
    damaged[l2..l2 + 8].copy_from_slice(&(refcount_table | 1 << 63).to_be_bytes());
    let file = Arc::new(MemoryFile::new("a.qcow2", damaged.clone(), 1));
    let image = block_on(Image::open(file.clone(), options(), &NoFiles)).unwrap();
    let refused = block_on(image.write(0, Buf::copy_of(b"x"), Durability::Cached));
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    const INCOMPATIBLE_LOW_BYTE: usize = 79;
    damaged[INCOMPATIBLE_LOW_BYTE] |= 2;
    assert!(file.contents() == damaged, "only the corrupt bit changes");
}

/// Direct I/O writes whole blocks; a raw disk whose size is no multiple of them keeps it.
#[test]
fn a_raw_disk_of_an_odd_size_keeps_it() {
    let file = Arc::new(MemoryFile::new("a.raw", vec![7; 5120], 4096));
    let raw = OpenOptions {
        format: Some(Format::Raw),
        ..options()
    };
    let image = block_on(Image::open(file.clone(), raw, &NoFiles)).unwrap();
    block_on(image.write(5000, Buf::copy_of(b"end"), Durability::Cached)).unwrap();
    block_on(image.close()).unwrap();
    let mut expected = vec![7; 5120];
    expected[5000..5003].copy_from_slice(b"end");
    assert!(file.contents() == expected);
}
