//! Blocking calls against a model of the disk: of several threads, by slices, lists and cursors.

use std::io::{IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use cowslip::blocking::{BlockingDisk, wait};
use cowslip::disk::{Disk, MemoryDisk};
use cowslip::file::host::{HostGate, HostOptions, open_host_file};
use cowslip::image::{Durability, OpenOptions, ZeroOptions};
use cowslip::{Error, IoVec, IoVecMut, SharedMemory};
use cowslip_block::random::Random;

use crate::requests::{SIZE, open};

/// Requests of one thread in its part of the disk.
fn work(disk: &BlockingDisk<cowslip::Image>, start: u64, len: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut model = vec![0; len as usize];
    let memory = SharedMemory::new(len as usize);
    for _ in 0..300 {
        let at = random.below(len);
        let bytes = 1 + random.below((len - at).min(40_000));
        let range = at as usize..(at + bytes) as usize;
        let cut = random.below(bytes + 1) as usize;
        let new: Vec<u8> = range.clone().map(|_| random.below(256) as u8).collect();
        match random.below(8) {
            0..2 => {
                let mut read = vec![0xEE; bytes as usize];
                let (head, tail) = read.split_at_mut(cut);
                let mut slices = [IoSliceMut::new(head), IoSliceMut::new(tail)];
                disk.read_vectored_at(&mut slices, start + at).unwrap();
                assert_eq!(read, model[range]);
                continue;
            }
            2..4 => {
                let slices = [IoSlice::new(&new[..cut]), IoSlice::new(&new[cut..])];
                disk.write_vectored_at(&slices, start + at).unwrap();
            }
            4 => {
                let target = IoVecMut::shared(&memory, range.clone());
                let list = disk.read_list_at(target, start + at).unwrap();
                assert_eq!(list.to_vec(), model[range]);
                continue;
            }
            5 => {
                memory.write(range.start, &new);
                let list = IoVec::shared(&memory, range.clone());
                let how = Durability::of_fua(random.below(4) == 0);
                disk.write_list_at(list, start + at, how).unwrap();
            }
            6 => {
                disk.zero(start + at, bytes, ZeroOptions::default())
                    .unwrap();
                model[range].fill(0);
                continue;
            }
            _ => {
                disk.flush().unwrap();
                continue;
            }
        }
        model[range].copy_from_slice(&new);
    }
    model
}

#[test]
fn calls_of_several_threads_do_what_the_model_does() {
    let dir = tempfile::tempdir().unwrap();
    let disk = BlockingDisk::from(open(&dir.path().join("disk")));
    let part = SIZE / 4;
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let run = |index| {
            let disk = disk.clone();
            scope.spawn(move || work(&disk, index * part, part, index + 1))
        };
        let threads: Vec<_> = (0..4).map(run).collect();
        threads.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let mut all = Vec::new();
    disk.cursor().read_to_end(&mut all).unwrap();
    assert!(all == models.concat());
    assert!(
        disk.extents(0, SIZE, 1000)
            .unwrap()
            .iter()
            .any(|extent| extent.data)
    );
    wait(disk.disk().close()).unwrap();
}

#[test]
fn space_is_allocated_and_tables_are_handed_to_the_system() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let disk = BlockingDisk::from(open(&path));
    disk.allocate(1 << 20, 1 << 20).unwrap();
    disk.write_at(&[7; 4096], 1 << 20).unwrap();
    let mapped = disk.extents(1 << 20, 4096, 1).unwrap()[0]
        .host_offset
        .unwrap();
    disk.write_back().unwrap();
    // Without a flush or a close, as after a kill: a copy of the file has table and data.
    let copy = dir.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    let host = HostOptions::default();
    let file = open_host_file(&copy, &host).unwrap();
    let options = OpenOptions::default();
    let killed = wait(cowslip::Image::open(file, options, &HostGate::default())).unwrap();
    let killed = BlockingDisk::new(killed);
    let mut read = [0; 4096];
    killed.read_at(&mut read, 1 << 20).unwrap();
    assert_eq!(read, [7; 4096]);
    let extent = killed.extents((1 << 20) + 4096, 4096, 1).unwrap()[0];
    assert_eq!(extent.host_offset, Some(mapped + 4096));
    wait(disk.disk().close()).unwrap();
}

#[test]
fn a_cursor_is_a_file_that_ends_with_the_disk() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1000));
    let disk = BlockingDisk::from(disk);
    disk.write_at(&[1; 1000], 0).unwrap();
    let mut cursor = disk.cursor();
    assert_eq!(cursor.seek(SeekFrom::End(-4)).unwrap(), 996);
    assert_eq!(cursor.write(&[2; 9]).unwrap(), 4);
    assert_eq!(cursor.write(&[2]).unwrap(), 0);
    let full = cursor.write_all(&[2]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::WriteZero);
    assert_eq!(cursor.seek(SeekFrom::Current(-6)).unwrap(), 994);
    let mut rest = Vec::new();
    cursor.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, [1, 1, 2, 2, 2, 2]);
    assert!(cursor.seek(SeekFrom::Current(-1001)).is_err());
    assert_eq!(cursor.seek(SeekFrom::Start(5000)).unwrap(), 5000);
    assert_eq!(cursor.read(&mut [0; 3]).unwrap(), 0);
    cursor.flush().unwrap();
    let error = disk.read_at(&mut [0; 2], 999).unwrap_err();
    assert_eq!(error.errno(), 5);
    let error = std::io::Error::from(error);
    assert!(error.get_ref().is_some_and(|inner| inner.is::<Error>()));
    assert_eq!(
        std::io::Error::from(Error::ReadOnly("x".into())).kind(),
        std::io::ErrorKind::PermissionDenied
    );
}
