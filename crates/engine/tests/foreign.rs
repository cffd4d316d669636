//! Encrypted images that qemu-img 10.0.2 made and qemu-io wrote, as they are kept here: who numbers
//! sectors from the wrong start, on both ways, reads all that it has written itself, and nothing of
//! these.
//!
//! Each file has the sectors of an image that are not zeroes: the number of sectors in all, then
//! each with its number before it (32 bits, little-endian). The password of all is `hunter2`.
//!
//! | file | made with | written with `write -P` |
//! | --- | --- | --- |
//! | `luks-in-qcow2` | `-f qcow2 -o encrypt.format=luks,encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc, encrypt.ivgen-alg=essiv,encrypt.hash-alg=sha1,cluster_size=4k`, 256 KiB | 0x11 0 512, 0x22 5000 9000, 0x33 200k 1k |
//! | `aes-in-qcow2` | `-f qcow2 -o encrypt.format=aes,cluster_size=512`, 64 KiB | 0x11 1024 512, 0x22 40000 3000 |
//! | `luks` | `-f luks -o cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=plain64,hash-alg=sha1`, 16 KiB | 0x11 512 512, 0x22 8k 1k |

use std::sync::Arc;

use cowslip::Image;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{Durability, Format, OpenOptions};
use cowslip::luks::Passphrase;
use cowslip_queue::{Buf, BufMut};

use crate::support::block_on;

/// The image that these sectors make.
fn unpacked(kept: &[u8]) -> Vec<u8> {
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap()) as usize;
    let mut image = vec![0; number(&kept[..4]) * 512];
    for sector in kept[4..].chunks_exact(4 + 512) {
        image[number(&sector[..4]) * 512..][..512].copy_from_slice(&sector[4..]);
    }
    image
}

fn open(file: &Arc<MemoryFile>, format: Format) -> Image {
    let options = OpenOptions {
        format: Some(format),
        writable: true,
        passphrase: Some(Passphrase::new(b"hunter2".to_vec())),
        ..OpenOptions::default()
    };
    block_on(Image::open(Arc::clone(file) as _, options, &NoFiles)).unwrap()
}

fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

/// Reads the disk, changes a part of it that is not aligned, and reads it again. Unwritten
/// ranges read as zeroes, but in a LUKS volume they may decrypt to anything.
fn judge(kept: &[u8], format: Format, (size, written): (usize, &[(u8, usize, usize)])) {
    let mut disk = vec![0; size];
    for (byte, start, len) in written {
        disk[*start..start + len].fill(*byte);
    }
    let is_that = |found: Vec<u8>, disk: &[u8]| match format {
        Format::Luks => {
            let mut ranges = written.iter().map(|(_, start, len)| *start..start + len);
            ranges.all(|range| found[range.clone()] == disk[range])
        }
        _ => found == disk,
    };
    let file = Arc::new(MemoryFile::new("foreign", unpacked(kept), 1));
    let image = open(&file, format);
    assert!(is_that(read(&image), &disk), "other bytes than QEMU wrote");
    let (start, len) = (written[1].1 + 100, 700);
    let data = Buf::from(vec![0x44; len]);
    block_on(image.write(start as u64, data, Durability::Cached)).unwrap();
    block_on(image.close()).unwrap();
    disk[start..start + len].fill(0x44);
    assert!(
        is_that(read(&open(&file, format)), &disk),
        "beside a change"
    );
}

#[test]
fn qcow2_images_that_qemu_encrypted_under_luks_are_read() {
    let kept = include_bytes!("foreign/luks-in-qcow2.sectors");
    let written = [
        (0x11, 0, 512),
        (0x22, 5000, 9000),
        (0x33, 200 << 10, 1 << 10),
    ];
    judge(kept, Format::Qcow2, (256 << 10, &written));
}

#[test]
fn qcow2_images_that_qemu_encrypted_in_its_old_way_are_read() {
    let kept = include_bytes!("foreign/aes-in-qcow2.sectors");
    let written = [(0x11, 1024, 512), (0x22, 40_000, 3000)];
    judge(kept, Format::Qcow2, (64 << 10, &written));
}

#[test]
fn luks_volumes_that_qemu_made_are_read() {
    let kept = include_bytes!("foreign/luks.sectors");
    let written = [(0x11, 512, 512), (0x22, 8 << 10, 1 << 10)];
    judge(kept, Format::Luks, (16 << 10, &written));
}
