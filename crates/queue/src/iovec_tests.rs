//! Lists of random shapes against plain vectors of bytes.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A generator of numbers, for shapes.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// A list of up to six segments, and its bytes.
fn list_to_write(numbers: &mut Numbers) -> (IoVec, Vec<u8>) {
    let (mut list, mut bytes) = (IoVec::default(), Vec::new());
    for _ in 0..numbers.below(7) {
        let (skip, len) = (numbers.below(20), numbers.below(40));
        let zero = numbers.below(2) == 0;
        let part: Vec<u8> = (0..len)
            .map(|_| if zero { 0 } else { numbers.below(256) as u8 })
            .collect();
        let padded = [vec![0xEE; skip], part.clone(), vec![0xEE; 3]].concat();
        list.append(match numbers.below(3) {
            0 => Buf::copy_of(&padded).slice(skip, len).into(),
            1 => Buf::from_owner(padded).slice(skip, len).into(),
            _ => {
                let memory = SharedMemory::new(padded.len());
                memory.write(0, &padded);
                IoVec::shared(&memory, skip..skip + len)
            }
        });
        bytes.extend(part);
    }
    (list, bytes)
}

/// Memory of which a list has a range.
type Parts = Vec<(Arc<SharedMemory>, Range<usize>)>;

/// A list of up to six segments to be filled, and the shared memory that it has parts of.
fn list_to_read(numbers: &mut Numbers) -> (IoVecMut, Parts) {
    let (mut list, mut all) = (IoVecMut::default(), Vec::new());
    for _ in 0..numbers.below(7) {
        let (skip, len) = (numbers.below(20), numbers.below(40));
        if numbers.below(2) == 0 {
            let mut buf = BufMut::zeroed(skip + len + 3).split_off(skip);
            buf.truncate(len);
            list.append(buf.into());
        } else {
            let memory = SharedMemory::new(skip + len + 3);
            memory.write(0, &vec![0xEE; skip + len + 3]);
            list.append(IoVecMut::shared(&memory, skip..skip + len));
            all.push((memory, skip..skip + len));
        }
    }
    list.fill(0);
    (list, all)
}

#[test]
fn lists_that_are_read_are_what_a_vector_is() {
    let mut numbers = Numbers(1);
    for round in 0..ROUNDS {
        let (mut list, mut bytes) = list_to_write(&mut numbers);
        assert_eq!(
            (list.len(), list.is_empty()),
            (bytes.len(), bytes.is_empty())
        );
        for _ in 0..4 {
            let at = numbers.below(bytes.len() + 1);
            let len = numbers.below(bytes.len() - at + 1);
            match numbers.below(5) {
                0 => assert_eq!(list.slice(at, len).to_vec(), bytes[at..at + len], "{round}"),
                1 => {
                    let head = list.split_to(at);
                    let rest = std::mem::replace(&mut list, head);
                    assert_eq!((list.len(), rest.len()), (at, bytes.len() - at));
                    let joined = list.segment_count() + rest.segment_count();
                    list.append(rest);
                    assert!(list.segment_count() <= joined);
                }
                2 => {
                    let (next, added) = list_to_write(&mut numbers);
                    list.append(next);
                    bytes.extend(added);
                }
                3 => {
                    let mut part = vec![0xEE; len];
                    list.copy_to_slice(at, &mut part);
                    assert_eq!(part, bytes[at..at + len]);
                }
                _ => {
                    list = list.slice(at, len);
                    bytes = bytes[at..at + len].to_vec();
                }
            }
            assert_eq!(list.to_vec(), bytes, "{round}");
            assert_eq!(list.to_buf()[..], bytes);
            assert_eq!(list.to_buf_mut()[..], bytes);
            let parts: Vec<u8> = list.to_bufs().flat_map(|buf| buf.to_vec()).collect();
            assert_eq!(parts, bytes);
            assert_eq!(list.clone().to_vec(), bytes);
            assert_eq!(list.is_zero(), bytes.iter().all(|&byte| byte == 0));
        }
    }
}

#[test]
fn lists_that_are_written_are_what_a_vector_is_and_nothing_beside_them_changes() {
    let mut numbers = Numbers(2);
    for round in 0..ROUNDS {
        let (mut list, memory) = list_to_read(&mut numbers);
        let mut bytes = vec![0; list.len()];
        for _ in 0..6 {
            let at = numbers.below(bytes.len() + 1);
            let len = numbers.below(bytes.len() - at + 1);
            match numbers.below(4) {
                0 => {
                    let part: Vec<u8> = (0..len).map(|_| numbers.below(256) as u8).collect();
                    list.copy_from_slice(at, &part);
                    bytes[at..at + len].copy_from_slice(&part);
                }
                1 => {
                    list.fill_range(at..at + len, 9);
                    bytes[at..at + len].fill(9);
                }
                2 => {
                    let head = list.split_to(at);
                    let rest = std::mem::replace(&mut list, head);
                    list.append(rest);
                }
                _ => {
                    let count = list.segment_count();
                    let (mut buf, bounce) = list.bounce();
                    assert_eq!(buf.len(), bytes.len());
                    let part: Vec<u8> = (0..bytes.len()).map(|_| numbers.below(9) as u8).collect();
                    buf.copy_from_slice(&part);
                    list = bounce.end(buf);
                    bytes = part;
                    assert_eq!(list.segment_count(), count);
                }
            }
            assert_eq!(list.to_vec(), bytes, "{round}");
        }
        for (memory, range) in memory {
            let mut whole = vec![0; memory.len()];
            memory.read(0, &mut whole);
            assert!(whole[..range.start].iter().all(|&byte| byte == 0xEE));
            assert!(whole[range.end..].iter().all(|&byte| byte == 0xEE));
        }
        let cut = numbers.below(bytes.len() + 1);
        list.truncate(cut);
        bytes.truncate(cut);
        assert_eq!(list.freeze().to_vec(), bytes, "{round}");
    }
}

/// Fewer under Miri, which takes a thousand times as long.
const ROUNDS: usize = if cfg!(miri) { 20 } else { 3000 };

#[test]
fn a_buffer_comes_back_from_a_list_with_its_memory() {
    let mut buf = BufMut::zeroed(100);
    let start = buf.as_ptr();
    let tail = buf.split_off(60);
    let mut list = IoVecMut::from(buf);
    list.append(tail.into());
    assert_eq!(list.segment_count(), 1);
    let mut middle = list.split_off(10);
    list.append(middle.split_to(0));
    list.append(middle);
    let mut buf = BufMut::from(list);
    assert_eq!((buf.as_ptr(), buf.len()), (start, 100));
    assert!(buf.try_reclaim(), "no other part of it is left");
    let buf = buf.freeze();
    assert_eq!(
        IoVec::from(buf.slice(7, 9)).to_buf().as_ptr(),
        buf[7..].as_ptr()
    );
}

#[test]
fn strangers_stay_segments_of_their_own() {
    let memory = SharedMemory::new(64);
    let mut list = IoVec::shared(&memory, 0..8);
    list.append(IoVec::shared(&memory, 8..20));
    assert_eq!(list.segment_count(), 1, "neighbours in one memory");
    list.append(IoVec::shared(&memory, 24..30));
    list.append(Buf::zeroed(4).into());
    list.append(Buf::zeroed(4).into());
    assert_eq!(list.segment_count(), 4);
}

/// An owner that records its end.
struct Guest {
    memory: Arc<SharedMemory>,
    gone: Arc<AtomicBool>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

#[test]
fn an_owner_lives_until_the_last_part_of_its_memory_is_gone() {
    let gone = Arc::new(AtomicBool::new(false));
    let guest = Guest {
        memory: SharedMemory::new(16),
        gone: Arc::clone(&gone),
    };
    guest.memory.write(4, b"bytes");
    let start = guest.memory.at(&(4..9));
    // SAFETY: shared memory, which its owner keeps.
    let list = unsafe { IoVec::foreign(start, 5, Arc::new(guest)) };
    let part = list.slice(1, 3);
    let copy = list.clone();
    drop(list);
    drop(copy);
    assert!(!gone.load(Ordering::SeqCst));
    assert_eq!(part.to_vec(), b"yte");
    drop(part);
    assert!(gone.load(Ordering::SeqCst));
}

#[test]
fn segments_that_direct_io_refuses_are_found() {
    let alignment = MemoryAlignment {
        start_bytes: 512,
        len_bytes: 1024,
    };
    let memory = SharedMemory::new(8192);
    let fits = |ranges: &[Range<usize>]| {
        let parts = ranges
            .iter()
            .map(|range| IoVec::shared(&memory, range.clone()));
        parts.collect::<IoVec>().fits(alignment)
    };
    assert!(fits(&[512..1536, 2048..4096]));
    assert!(!fits(&[512..1536, 2049..4097]), "an address");
    assert!(!fits(&[512..1024, 2048..3584]), "a length");
    assert!(IoVec::shared(&memory, 1..2).fits(MemoryAlignment::NONE));
}

#[test]
#[should_panic(expected = "slice beyond the list")]
fn a_slice_beyond_the_list_is_refused() {
    IoVec::from(Buf::zeroed(4)).slice(2, 3);
}

#[test]
#[should_panic(expected = "3 bytes at 2 of a list of 4")]
fn bytes_beyond_the_list_are_not_written() {
    IoVecMut::from(BufMut::zeroed(4)).copy_from_slice(2, &[0; 3]);
}
