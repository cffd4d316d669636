//! Tests: requests there and back, limits, files that fail, and traces that lie.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::sync::Arc;

use cowslip_block::disk::{Disk, MemoryDisk, ZeroOptions};
use cowslip_block::file::memory::MemoryFile;
use cowslip_block::file::{BlockFile, Durability, Space};
use cowslip_block::random::Random;
use cowslip_queue::{Buf, BufMut};
use futures_util::FutureExt;

use crate::format::{Before, CHUNK_BYTES, ChunkHead, HEADER_BYTES};
use crate::{Header, Kind, Limits, Reader, Recorder, RecordingDisk, Request, TraceError, Writer};

fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("memory answers at once")
}

fn drawn(random: &mut Random, before: &Request) -> Request {
    let kind = Kind::ALL[random.below(6) as usize];
    let len = match random.below(3) {
        0 => before.len,
        1 => 4096,
        _ => random.below(1 << 30),
    };
    let offset = match random.below(4) {
        0 => before.offset + before.len,
        1 => random.below(1 << 20) * 4096,
        2 => random.below(10),
        _ => (i64::MAX as u64) - len - random.below(4096),
    };
    let request = match kind {
        Kind::Flush => Request::new(kind, 0, 0),
        _ => Request::new(kind, offset.min(i64::MAX as u64 - len), len),
    };
    let bits = random.below(40);
    Request {
        at_us: before.at_us + random.below(1 << bits),
        is_durable: random.below(2) == 0,
        may_unmap: random.below(2) == 0,
        ..request
    }
}

/// A trace in memory, as [`Writer`] would make it with full control of the times.
fn trace_of(chunks: &[Vec<Request>]) -> Vec<u8> {
    let header = Header {
        disk_bytes: 1 << 40,
        block_bytes: 65_536,
        began_us: 7,
    };
    let mut bytes = header.encode().to_vec();
    for chunk in chunks {
        let base_us = chunk.first().map_or(0, |first| first.at_us);
        let (mut before, mut payload) = (Before::first(base_us), Vec::new());
        for request in chunk {
            assert!(before.encode(request, &mut payload));
        }
        let head = ChunkHead {
            payload_bytes: payload.len() as u32,
            count: chunk.len() as u32,
            dropped: 3,
            base_us,
        };
        bytes.extend(head.encode());
        bytes.extend(payload);
    }
    bytes
}

fn drawn_chunks(random: &mut Random, chunks: usize, requests: usize) -> Vec<Vec<Request>> {
    let mut before = Request::new(Kind::Read, 0, 0);
    let mut all = Vec::new();
    for _ in 0..chunks {
        let mut chunk = Vec::new();
        for _ in 0..requests {
            before = drawn(random, &before);
            chunk.push(before);
        }
        all.push(chunk);
    }
    all
}

#[test]
fn requests_come_back_as_they_were() {
    let mut random = Random(11);
    for _ in 0..50 {
        let chunks = drawn_chunks(&mut random, 3, 200);
        let bytes = trace_of(&chunks);
        let mut reader = Reader::new(&bytes[..]).unwrap();
        assert_eq!(reader.header().disk_bytes, 1 << 40);
        assert_eq!(reader.header().block_bytes, 65_536);
        assert_eq!(reader.header().began_us, 7);
        let read: Result<Vec<Request>, TraceError> = reader.by_ref().collect();
        assert_eq!(read.unwrap(), chunks.concat());
        assert_eq!((reader.dropped(), reader.is_cut()), (9, false));
    }
}

#[test]
fn requests_at_random_take_seven_bytes_and_those_in_a_row_two_or_three() {
    let mut random = Random(5);
    let mut bytes = Vec::new();
    let mut before = Before::first(0);
    for at in 0..1000 {
        let offset = random.below(1 << 18) * 4096;
        let mut request = Request::new(Kind::Write, offset, 4096);
        request.at_us = at * 20;
        assert!(before.encode(&request, &mut bytes));
    }
    assert!(bytes.len() <= 7100, "{}", bytes.len());
    let (mut bytes, mut before) = (Vec::new(), Before::first(0));
    for at in 0..1000 {
        let mut request = Request::new(Kind::Read, at * 65_536, 65_536);
        request.at_us = at * 100;
        assert!(before.encode(&request, &mut bytes));
    }
    assert!(bytes.len() <= 2010, "{}", bytes.len());
}

#[test]
fn a_request_beyond_all_limits_is_not_expressed() {
    let mut bytes = Vec::new();
    for (offset, len) in [(u64::MAX, 1), (1 << 63, 0), (i64::MAX as u64, 1)] {
        let request = Request::new(Kind::Write, offset, len);
        assert!(!Before::default().encode(&request, &mut bytes));
    }
    assert!(bytes.is_empty());
    let last = Request::new(Kind::Write, i64::MAX as u64, 0);
    assert!(Before::default().encode(&last, &mut bytes));
}

fn write(disk: &dyn Disk, offset: u64) {
    let data = Buf::copy_of(&[1; 512]);
    now(disk.write(offset, data.into(), Durability::Cached)).unwrap();
}

#[test]
fn a_disk_that_is_recorded_does_as_it_would_and_leaves_a_trace() {
    let inner = Arc::new(MemoryDisk::new("disk", 1 << 20));
    let recorder = Arc::new(Recorder::new(Limits::default()));
    let file = Arc::new(MemoryFile::new("trace", vec![9; 5000], 1));
    let writer = Writer::begin(file.clone(), recorder.clone(), inner.as_ref());
    let mut writer = now(writer).unwrap();
    let disk = RecordingDisk::new(inner.clone(), recorder);
    write(&disk, 4096);
    let data = Buf::copy_of(&[2; 100]);
    now(disk.write(10_000, data.into(), Durability::Durable)).unwrap();
    let read = now(disk.read(4096, BufMut::zeroed(512).into())).unwrap();
    assert_eq!(read.to_vec(), [1; 512]);
    now(writer.write_out()).unwrap();
    let options = ZeroOptions {
        space: Space::Release,
        durability: Durability::Durable,
        fast_only: false,
    };
    now(disk.zero(4096, 512, options)).unwrap();
    now(disk.discard(0, 8192)).unwrap();
    now(disk.flush()).unwrap();
    // Refused requests came, too.
    let is_refused = now(disk.read(1 << 20, BufMut::zeroed(1).into())).is_err();
    assert!(is_refused);
    assert_eq!(disk.size(), inner.size());
    assert_eq!(disk.features(), inner.features());
    now(disk.extents(0, 100, 1)).unwrap();
    now(disk.write_back()).unwrap();
    let bytes = now(writer.finish()).unwrap();
    assert_eq!(file.contents().len() as u64, bytes);
    let contents = file.contents();
    let mut reader = Reader::new(&contents[..]).unwrap();
    assert_eq!(reader.header().disk_bytes, 1 << 20);
    let mut requests: Vec<Request> = reader.by_ref().map(Result::unwrap).collect();
    assert!(requests.is_sorted_by_key(|request| request.at_us));
    requests.iter_mut().for_each(|request| request.at_us = 0);
    let durable = |request| Request {
        is_durable: true,
        ..request
    };
    let expected = [
        Request::new(Kind::Write, 4096, 512),
        durable(Request::new(Kind::Write, 10_000, 100)),
        Request::new(Kind::Read, 4096, 512),
        Request {
            may_unmap: true,
            ..durable(Request::new(Kind::Zero, 4096, 512))
        },
        Request::new(Kind::Discard, 0, 8192),
        Request::new(Kind::Flush, 0, 0),
        Request::new(Kind::Read, 1 << 20, 1),
    ];
    assert_eq!(requests, expected);
    assert_eq!((reader.dropped(), reader.is_cut()), (0, false));
}

/// Reads a trace: the number of its requests, and of those that were dropped.
fn counted(bytes: &[u8]) -> (u64, u64) {
    let mut reader = Reader::new(bytes).unwrap();
    let count = reader.by_ref().map(Result::unwrap).count() as u64;
    assert!(!reader.is_cut());
    (count, reader.dropped())
}

#[test]
fn requests_without_room_are_dropped_and_counted() {
    let disk = Arc::new(MemoryDisk::new("disk", 1 << 30));
    let limits = Limits {
        memory_bytes: 1000,
        file_bytes: 4000,
    };
    let recorder = Arc::new(Recorder::new(limits));
    let file = Arc::new(MemoryFile::new("trace", Vec::new(), 1));
    let writer = Writer::begin(file.clone(), recorder.clone(), disk.as_ref());
    let mut writer = now(writer).unwrap();
    let recorded = RecordingDisk::new(disk, recorder);
    let mut random = Random(3);
    let mut at = 0;
    for round in 0..20 {
        for _ in 0..400 {
            write(&recorded, random.below(1 << 20) * 512);
            at += 1;
        }
        now(writer.write_out()).unwrap();
        if round == 1 {
            let (count, dropped) = counted(&file.contents());
            // The second chunk knows of the first drops, and nobody yet of those behind it.
            assert!(count > 200 && count < 400, "{count}");
            assert!(dropped > 200 && dropped < 400, "{dropped}");
        }
    }
    let bytes = now(writer.finish()).unwrap();
    assert!(bytes > 2500 && bytes <= 4000, "{bytes}");
    let (count, dropped) = counted(&file.contents());
    assert_eq!(count + dropped, at);
    assert!(count > 300, "{count}");
}

#[test]
fn several_threads_note_each_request_once_and_in_the_order_of_time() {
    let disk = Arc::new(MemoryDisk::new("disk", 1 << 20));
    let recorder = Arc::new(Recorder::new(Limits::default()));
    let file = Arc::new(MemoryFile::new("trace", Vec::new(), 1));
    let writer = Writer::begin(file.clone(), recorder.clone(), disk.as_ref());
    let mut writer = now(writer).unwrap();
    let recorded = RecordingDisk::new(disk, recorder);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let recorded = &recorded;
            scope.spawn(move || (0..5000).for_each(|at| write(recorded, thread * 8192 + at % 8)));
        }
        for _ in 0..100 {
            now(writer.write_out()).unwrap();
        }
    });
    now(writer.finish()).unwrap();
    let contents = file.contents();
    let requests: Vec<Request> = Reader::new(&contents[..])
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(requests.len(), 20_000);
    assert!(requests.is_sorted_by_key(|request| request.at_us));
}

#[test]
fn a_file_that_fails_ends_the_recording_and_nothing_else() {
    let disk = Arc::new(MemoryDisk::new("disk", 1 << 20));
    let recorder = Arc::new(Recorder::new(Limits {
        file_bytes: u64::MAX,
        ..Limits::default()
    }));
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("trace", Vec::new(), 1));
    let mut writer = now(Writer::begin(file, recorder.clone(), disk.as_ref())).unwrap();
    let recorded = RecordingDisk::new(disk.clone(), recorder);
    write(&recorded, 0);
    // Files in memory have no space there.
    writer.move_to((16 << 30) + 1);
    let error = now(writer.write_out()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(28));
    for _ in 0..10 {
        write(&recorded, 0);
    }
    now(writer.write_out()).unwrap();
    assert!(now(writer.finish()).is_err());
    assert_eq!(writer.dropped(), 11);
}

#[test]
fn a_trace_that_ends_anywhere_is_read_up_to_there() {
    let mut random = Random(23);
    let chunks = drawn_chunks(&mut random, 3, 20);
    let bytes = trace_of(&chunks);
    let all = chunks.concat();
    for len in 0..bytes.len() {
        let reader = Reader::new(&bytes[..len]);
        if len < HEADER_BYTES {
            let why = reader.unwrap_err().to_string();
            let expected = match len {
                0..8 => "it is no trace: it does not begin with 'cowtrace'",
                _ => "damaged at byte 0: the header is cut",
            };
            assert_eq!(why, expected);
            continue;
        }
        let mut reader = reader.unwrap();
        let read: Vec<Request> = reader.by_ref().map(Result::unwrap).collect();
        assert_eq!(read.len() % 20, 0);
        assert_eq!(read, all[..read.len()]);
        let ends = [0, 20, 40].map(|count| trace_of(&chunks[..count / 20]).len());
        assert_eq!(reader.is_cut(), !ends.contains(&len), "{len}");
    }
}

/// A trace with one chunk of these requests, and these numbers in its beginning.
fn lying(head: impl FnOnce(&mut ChunkHead), payload: &[u8]) -> Vec<u8> {
    let mut bytes = trace_of(&[]);
    let mut chunk = ChunkHead {
        payload_bytes: payload.len() as u32,
        count: 1,
        ..ChunkHead::default()
    };
    head(&mut chunk);
    bytes.extend(chunk.encode());
    bytes.extend(payload);
    bytes
}

fn why(bytes: &[u8]) -> String {
    let error = match Reader::new(bytes) {
        Ok(reader) => reader.last().unwrap().unwrap_err(),
        Err(error) => error,
    };
    error.to_string()
}

#[test]
fn each_lie_of_a_trace_is_named_with_its_place() {
    let flush = [5, 0];
    let ten = [0xff; 10];
    let at_48 = |why: &str| format!("damaged at byte 48: {why}");
    let mut version = trace_of(&[]);
    version[8] = 2;
    assert_eq!(why(&version), "version 2 of traces is not supported");
    for len in [47_u32, 4097] {
        let mut header = trace_of(&[]);
        header[12..16].copy_from_slice(&len.to_le_bytes());
        let expected = "damaged at byte 0: the length of the header is out of range";
        assert_eq!(why(&header), expected);
    }
    let mut magic = lying(|_| (), &flush);
    magic[HEADER_BYTES] = b'x';
    assert_eq!(why(&magic), at_48("a chunk does not begin with 'chnk'"));
    let mut reserved = lying(|_| (), &flush);
    reserved[HEADER_BYTES + 12] = 1;
    assert_eq!(
        why(&reserved),
        at_48("a reserved field of a chunk is not 0")
    );
    let long = lying(|head| head.payload_bytes = (1 << 20) + 1, &flush);
    assert_eq!(why(&long), at_48("a chunk is longer than 1 MiB"));
    let many = lying(|head| head.count = 3, &flush);
    assert_eq!(
        why(&many),
        at_48("a chunk says that it has more requests than bytes")
    );
    let few = lying(|head| head.count = 2, &flush);
    assert_eq!(why(&few), at_48("a chunk has fewer requests than it says"));
    let more = [
        lying(|_| (), &[5, 0, 5, 0]),
        lying(|_| (), &flush)[48..].to_vec(),
    ]
    .concat();
    assert_eq!(why(&more), at_48("a chunk has more requests than it says"));
    let first = lying(|head| head.base_us = 5, &flush);
    let back = [first, lying(|_| (), &flush)[48..].to_vec()].concat();
    let at = HEADER_BYTES + CHUNK_BYTES + 2;
    let expected =
        format!("damaged at byte {at}: a chunk begins before the one before it has ended");
    assert_eq!(why(&back), expected);
    let lies: [(&[u8], &str); 6] = [
        (&[6, 0], "a request is of no known kind"),
        (&[0x85, 0], "a reserved bit of a request is set"),
        (&[1, 0], "a chunk ends inside a request"),
        (&[&[5][..], &ten].concat(), "a number has more than 64 bits"),
        // Before the disk: an offset of -1.
        (
            &[1, 0, 1, 1],
            "a request begins before the disk or beyond all limits",
        ),
        // 2^63 - 1 bytes long, at 1.
        (
            &[&[1, 0, 2][..], &[0xff; 8], &[0x7f]].concat(),
            "a request is beyond all limits",
        ),
    ];
    for (payload, expected) in lies {
        assert_eq!(why(&lying(|_| (), payload)), at_48(expected));
    }
}

/// Whatever a file holds, reading it ends, and yields only ranges that are valid and in order.
#[test]
fn damaged_traces_are_refused_or_read_as_something_valid() {
    let mut random = Random(77);
    let chunks = drawn_chunks(&mut random, 3, 30);
    let sound = trace_of(&chunks);
    let mut refused = 0;
    for _ in 0..20_000 {
        let mut bytes = sound.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = match random.below(3) {
                0 => random.next() as u8,
                1 => bytes[at] ^ (1 << random.below(8)),
                _ => [0, 0xff, 0x80, 0x7f][random.below(4) as usize],
            };
        }
        if random.below(4) == 0 {
            bytes.truncate(random.below(bytes.len() as u64) as usize);
        }
        let Ok(reader) = Reader::new(&bytes[..]) else {
            refused += 1;
            continue;
        };
        let mut last_us = 0;
        for request in reader {
            let Ok(request) = request else {
                refused += 1;
                break;
            };
            assert!(request.at_us >= last_us);
            last_us = request.at_us;
            let end = request.offset.checked_add(request.len).unwrap();
            assert!(end <= i64::MAX as u64);
        }
    }
    assert!(refused > 5_000, "{refused}");
}

#[test]
fn a_source_that_fails_is_an_error_of_the_system() {
    struct Failing(usize);
    impl std::io::Read for Failing {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::from_raw_os_error(5));
            }
            let bytes = trace_of(&[]);
            buf[0] = bytes[bytes.len() - self.0];
            self.0 -= 1;
            Ok(1)
        }
    }
    assert!(matches!(Reader::new(Failing(3)), Err(TraceError::Io(_))));
    let mut reader = Reader::new(Failing(HEADER_BYTES)).unwrap();
    assert!(matches!(reader.next(), Some(Err(TraceError::Io(_)))));
    assert!(reader.next().is_none(), "it ends at the first error");
}
