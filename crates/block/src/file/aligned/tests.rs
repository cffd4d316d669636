//! Writes of one host block whose order the test decides; devices with units of their own; blocks
//! before the data of an encrypted volume.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use cowslip_queue::SharedMemory;

use super::super::Pending;
use super::super::memory::MemoryFile;
use cowslip_queue::{Completer, pending};

use super::*;
use crate::sync::lock;

const BLOCK: u64 = 4096;

/// A write that is held back: offset, data, and the completer of its waiter.
type Held = (u64, IoVec, Completer<io::Result<()>>);

/// A file whose writes are carried out when the test says so.
struct Slow {
    file: MemoryFile,
    held: Mutex<Vec<Held>>,
}

crate::debug_by_name!(Slow);

impl Slow {
    fn new() -> Arc<Slow> {
        let bytes = vec![0; 2 * BLOCK as usize];
        Arc::new(Slow {
            file: MemoryFile::new("slow", bytes, BLOCK as u32),
            held: Mutex::default(),
        })
    }

    fn held(&self) -> usize {
        lock(&self.held).len()
    }

    /// Carries out the oldest write.
    fn go_on(&self) {
        let (offset, data, completer) = lock(&self.held).remove(0);
        let mut written = pin!(self.file.write(offset, data, Durability::Cached));
        let Poll::Ready(outcome) = poll(written.as_mut()) else {
            panic!("memory is written at once");
        };
        completer.complete(outcome);
    }
}

impl BlockFile for Slow {
    crate::forward_to_file!(file: capabilities, len, read, discard, allocate, extents, flush, set_len);

    fn name(&self) -> &str {
        "slow"
    }
    fn write(&self, offset: u64, data: IoVec, _: Durability) -> Pending<io::Result<()>> {
        let (completer, written) = pending();
        lock(&self.held).push((offset, data, completer));
        written
    }
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn bytes(fill: u8, len: usize) -> Vec<Buf> {
    vec![Buf::from(vec![fill; len])]
}

/// The dropped write has read its block before the neighbour was written, and writes it late.
#[test]
fn a_dropped_write_keeps_its_block_until_it_has_ended() {
    for dropped_len in [512, BLOCK as usize] {
        let slow = Slow::new();
        let file = AlignedFile::new(slow.clone());
        let mut dropped = Box::pin(file.write(0, bytes(1, dropped_len), Durability::Cached));
        assert!(poll(dropped.as_mut()).is_pending());
        assert_eq!(slow.held(), 1);
        drop(dropped);
        let mut neighbour = pin!(file.write(512, bytes(2, 512), Durability::Durable));
        assert!(poll(neighbour.as_mut()).is_pending());
        assert_eq!(slow.held(), 1, "it waits for the end of the first");
        let mut elsewhere = pin!(file.write(BLOCK, bytes(3, 512), Durability::Cached));
        assert!(poll(elsewhere.as_mut()).is_pending());
        assert_eq!(slow.held(), 2, "others do not");
        slow.go_on();
        assert!(poll(neighbour.as_mut()).is_pending());
        assert_eq!(slow.held(), 2, "its turn has come");
        slow.go_on();
        slow.go_on();
        assert!(matches!(poll(neighbour.as_mut()), Poll::Ready(Ok(()))));
        assert!(matches!(poll(elsewhere.as_mut()), Poll::Ready(Ok(()))));
        let now = slow.file.contents();
        assert_eq!([now[0], now[511], now[512], now[1023]], [1, 1, 2, 2]);
        assert_eq!(now[BLOCK as usize], 3);
        assert!(lock(&file.turns).is_empty());
    }
}

#[test]
fn waiters_that_are_dropped_are_passed_over() {
    let slow = Slow::new();
    let file = AlignedFile::new(slow.clone());
    let mut dropped = Box::pin(file.write(0, bytes(1, 512), Durability::Cached));
    assert!(poll(dropped.as_mut()).is_pending());
    drop(dropped);
    let mut waiting = Box::pin(file.write(512, bytes(2, 512), Durability::Cached));
    let mut last = pin!(file.write(1024, bytes(3, 512), Durability::Cached));
    assert!(poll(waiting.as_mut()).is_pending());
    assert!(poll(last.as_mut()).is_pending());
    drop(waiting);
    slow.go_on();
    assert!(poll(last.as_mut()).is_pending());
    slow.go_on();
    assert!(matches!(poll(last.as_mut()), Poll::Ready(Ok(()))));
    let now = slow.file.contents();
    assert_eq!([now[0], now[512], now[1024]], [1, 0, 3]);
}

#[test]
fn a_dropped_write_whose_driver_goes_away_has_ended() {
    let slow = Slow::new();
    let file = AlignedFile::new(slow.clone());
    let mut dropped = Box::pin(file.write(0, bytes(1, 512), Durability::Cached));
    assert!(poll(dropped.as_mut()).is_pending());
    drop(dropped);
    let mut next = pin!(file.write(512, bytes(2, 512), Durability::Cached));
    assert!(poll(next.as_mut()).is_pending());
    let held = std::mem::take(&mut *lock(&slow.held));
    drop(held);
    assert!(poll(next.as_mut()).is_pending());
    slow.go_on();
    assert!(matches!(poll(next.as_mut()), Poll::Ready(Ok(()))));
}

/// A device whose calls for space take whole blocks only, which they zero.
#[derive(Debug)]
struct Device {
    memory: MemoryFile,
    capabilities: Capabilities,
    has_zero: bool,
    /// How many segments each read and write had.
    segments: Mutex<Vec<usize>>,
}

impl Device {
    fn new(alignment_bytes: u32, space_alignment_bytes: u32, has_zero: bool) -> Arc<Device> {
        let memory = MemoryFile::new("device", vec![7; 4 * BLOCK as usize], alignment_bytes);
        Arc::new(Device {
            capabilities: Capabilities {
                space_alignment_bytes,
                ..memory.capabilities().clone()
            },
            memory,
            has_zero,
            segments: Mutex::default(),
        })
    }

    fn takes(&self, offset: u64, len: u64) -> io::Result<()> {
        let unit = u64::from(self.capabilities.space_alignment_bytes);
        assert!(len > 0 && offset.is_multiple_of(unit) && len.is_multiple_of(unit));
        match self.has_zero {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl BlockFile for Device {
    crate::forward_to_file!(memory: len, allocate, extents, flush, set_len);

    fn name(&self) -> &str {
        "device"
    }
    crate::file_from_fields!(capabilities);
    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        assert!(buf.fits(self.memory_alignment()));
        lock(&self.segments).push(buf.segment_count());
        self.memory.read(offset, buf)
    }
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        assert!(data.fits(self.memory_alignment()));
        lock(&self.segments).push(data.segment_count());
        self.memory.write(offset, data, how)
    }
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        match self.takes(offset, len) {
            Ok(()) => self.memory.zero(offset, len, space),
            refused => Pending::ready(refused),
        }
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        match self.takes(offset, len) {
            Ok(()) => self.memory.discard(offset, len),
            refused => Pending::ready(refused),
        }
    }
}

fn finish<T>(future: impl Future<Output = T>) -> T {
    match poll(pin!(future)) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("memory makes nobody wait"),
    }
}

/// Addresses and lengths of segments in shared memory.
type Places<'a> = &'a [(usize, usize)];

/// Writes and reads a list of such segments; how many the device was given each time.
fn segments_given(
    file: &AlignedFile,
    device: &Device,
    offset: u64,
    places: Places<'_>,
) -> Vec<usize> {
    let memory = SharedMemory::new(8 * BLOCK as usize);
    let len: usize = places.iter().map(|place| place.1).sum();
    let bytes: Vec<u8> = (0..len).map(|at| (at / 100 + 1) as u8).collect();
    let list: IoVec = places
        .iter()
        .map(|&(at, len)| IoVec::shared(&memory, at..at + len))
        .collect();
    let mut from = 0;
    for &(at, len) in places {
        memory.write(at, &bytes[from..from + len]);
        from += len;
    }
    lock(&device.segments).clear();
    finish(file.write(offset, list, Durability::Cached)).unwrap();
    let target: IoVecMut = places
        .iter()
        .map(|&(at, len)| IoVecMut::shared(&memory, at..at + len))
        .collect();
    memory.write(0, &vec![0xEE; memory.len()]);
    let target = finish(file.read(offset, target)).unwrap();
    assert_eq!(target.to_vec(), bytes);
    let mut from = 0;
    for &(at, len) in places {
        let mut part = vec![0; len];
        memory.read(at, &mut part);
        assert_eq!(part, bytes[from..from + len], "in its own memory");
        from += len;
    }
    lock(&device.segments).clone()
}

#[test]
fn lists_that_direct_io_takes_are_not_copied_and_others_once() {
    let device = Device::new(512, 512, true);
    let file = AlignedFile::new(device.clone());
    let given = |offset, places| segments_given(&file, &device, offset, places);
    let fit: Places<'_> = &[(4096, 512), (1024, 1536), (8192, 512)];
    assert_eq!(given(512, fit), [3, 3]);
    let odd_address: Places<'_> = &[(4096, 512), (1025, 512)];
    let odd_length: Places<'_> = &[(4096, 500), (1024, 524)];
    for places in [odd_address, odd_length] {
        assert_eq!(given(512, places), [1, 1]);
    }
    // The ends of a finer write are read first.
    assert_eq!(given(700, odd_length), [1, 1, 1, 1]);
    let device = Device::new(1, 1, true);
    let file = AlignedFile::new(device.clone());
    assert_eq!(segments_given(&file, &device, 3, odd_length), [2, 2]);
}

#[test]
fn a_cipher_sees_no_memory_of_others() {
    #[derive(Debug)]
    struct Plus;
    impl Cipher for Plus {
        fn encrypt(&self, _: u64, bytes: &mut [u8]) {
            bytes
                .iter_mut()
                .for_each(|byte| *byte = byte.wrapping_add(1));
        }
        fn decrypt(&self, _: u64, bytes: &mut [u8]) {
            bytes
                .iter_mut()
                .for_each(|byte| *byte = byte.wrapping_sub(1));
        }
    }
    let device = Device::new(512, 512, true);
    let file = AlignedFile::new(device.clone()).encrypted(Arc::new(Plus), Numbering::Place(0));
    for places in [&[(4096, 512), (1024, 512)][..], &[(0, 1024)]] {
        assert_eq!(segments_given(&file, &device, 512, places), [1, 1]);
        assert_eq!(device.memory.contents()[512], 2, "the first byte is 1");
    }
}

/// Ranges around the limits of blocks and sectors.
fn odd_ranges() -> impl Iterator<Item = Range<u64>> {
    let ends = [0, 1, 100, 511, 512, 513, 4000, 4096, 4097, 5000, 8191, 8192];
    let pairs = ends
        .into_iter()
        .flat_map(move |start| ends.map(|end| start..end));
    pairs.filter(|range| !range.is_empty())
}

#[test]
fn zeroes_reach_every_byte_of_a_range_whatever_the_unit_of_the_call() {
    for (alignment, space) in [
        (1, 1),
        (1, 512),
        (1, 4096),
        (512, 4096),
        (4096, 4096),
        (4096, 512),
    ] {
        for has_zero in [true, false] {
            for range in odd_ranges() {
                let device = Device::new(alignment, space, has_zero);
                let file = AlignedFile::new(device.clone());
                let len = range.end - range.start;
                finish(file.zero(range.start, len, Space::Release)).unwrap();
                for (at, byte) in (0..).zip(device.memory.contents()) {
                    assert_eq!(
                        byte == 0,
                        range.contains(&at),
                        "{alignment} {space} {range:?} {at}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_discard_takes_the_whole_blocks_of_a_range_and_says_which() {
    for (alignment, space) in [(1, 1), (1, 512), (1, 4096), (512, 4096), (4096, 4096)] {
        for range in odd_ranges() {
            let device = Device::new(alignment, space, true);
            let file = AlignedFile::new(device.clone());
            let len = range.end - range.start;
            let taken = finish(file.discard(range.start, len)).unwrap();
            let unit = u64::from(space);
            let whole = range.start.next_multiple_of(unit)..range.end / unit * unit;
            match whole.is_empty() {
                true => assert!(taken.is_empty()),
                false => assert_eq!(taken, whole),
            }
            for (at, byte) in (0..).zip(device.memory.contents()) {
                assert_eq!(
                    byte == 0,
                    taken.contains(&at),
                    "{alignment} {space} {range:?} {at}"
                );
            }
        }
    }
}

/// A cipher of which each sector's number shows in each of its bytes.
#[derive(Debug)]
struct Mask;

impl Cipher for Mask {
    fn encrypt(&self, first_sector: u64, bytes: &mut [u8]) {
        let sectors = bytes.chunks_exact_mut(SECTOR_BYTES as usize);
        for (index, sector) in sectors.enumerate() {
            // Offsets are counted modulo 2^64 bytes.
            let number = first_sector.wrapping_add(index as u64) % (1 << 55);
            let mask = 1 + (number % 251) as u8;
            sector.iter_mut().for_each(|byte| *byte ^= mask);
        }
    }

    fn decrypt(&self, first_sector: u64, bytes: &mut [u8]) {
        self.encrypt(first_sector, bytes);
    }
}

/// The first block of the device begins 3 sectors before the data.
#[test]
fn the_block_before_the_data_of_a_volume_is_written_back_as_it_was() {
    let base = BLOCK - 5 * SECTOR_BYTES;
    let header: Vec<u8> = (0..4 * BLOCK).map(|at| (at % 251) as u8).collect();
    let written = |alignment: u32| {
        let memory = Arc::new(MemoryFile::new("volume", header.clone(), alignment));
        let file =
            AlignedFile::new(memory.clone()).encrypted(Arc::new(Mask), Numbering::Place(base));
        for (at, len) in [(0, 512), (100, 50), (1000, 6000), (2560, 512)] {
            finish(file.write(base + at, bytes(3, len), Durability::Cached)).unwrap();
            let read = finish(file.read_new(base + at, len as u64)).unwrap();
            assert!(read.iter().all(|&byte| byte == 3), "{alignment} {at}");
        }
        memory.contents()
    };
    // Sectors alone never reach before the data.
    let as_sectors = written(512);
    assert_eq!(as_sectors[..base as usize], header[..base as usize]);
    assert!(written(4096) == as_sectors);
}
