//! Rare answers of the kernel, given by hand: short transfers, interruptions, failures.

use super::*;
use crate::buf::{Buf, BufMut};

fn scratch() -> Arc<File> {
    let file = tempfile::tempfile().unwrap();
    File::new(file.into(), Route::Pool, MemoryAlignment::NONE)
}

fn write_of(bytes: &[&[u8]]) -> (Write, Pending<io::Result<()>>) {
    let (completer, result) = pending();
    let data = bytes.iter().map(|bytes| Buf::copy_of(bytes)).collect();
    let data = Scatter::new(data);
    let write = Write {
        file: scratch(),
        offset: 100,
        data,
        persistence: Persistence::Cached,
        completer,
    };
    (write, result)
}

fn read_of(file: &Arc<File>, len: usize) -> (Read, Pending<(io::Result<()>, IoVecMut)>) {
    let (completer, result) = pending();
    let mut target = BufMut::zeroed(len);
    target.fill(0xAA);
    let read = Read {
        file: Arc::clone(file),
        offset: 0,
        target: Scatter::new(target.into()),
        completer,
    };
    (read, result)
}

fn answer<T>(result: Pending<T>) -> T {
    let queue = crate::Queue::new(crate::Backend::Threads).unwrap();
    queue.block_on(result)
}

fn again<T>(next: Next<T>) -> T {
    match next {
        Next::Again(operation) => operation,
        Next::Done => panic!("it is not done"),
        Next::Block(_) => panic!("it does not block"),
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

#[test]
fn a_short_write_goes_on_where_it_stopped() {
    let (write, result) = write_of(&[b"abc", b"defg"]);
    let write = again(write.advance(Ok(5)));
    assert_eq!(write.offset(), 105);
    let rest: Vec<usize> = write.data().rest().map(|slice| slice.iov_len).collect();
    assert_eq!(rest, [2], "of the second buffer");
    let write = again(write.advance(Err(errno(libc::EINTR))));
    assert_eq!(write.offset(), 105, "an interruption writes nothing");
    assert!(matches!(write.advance(Ok(2)), Next::Done));
    answer(result).unwrap();
}

#[test]
fn a_write_that_cannot_go_on_fails() {
    let (write, result) = write_of(&[b"abc"]);
    assert!(matches!(write.advance(Ok(0)), Next::Done));
    assert_eq!(answer(result).unwrap_err().kind(), io::ErrorKind::WriteZero);
    let (write, result) = write_of(&[b"abc"]);
    let write = again(write.advance(Ok(1)));
    assert!(matches!(
        write.advance(Err(errno(libc::ENOSPC))),
        Next::Done
    ));
    assert_eq!(
        answer(result).unwrap_err().raw_os_error(),
        Some(libc::ENOSPC)
    );
}

#[test]
fn what_the_ring_cannot_do_at_once_is_left_to_threads() {
    let (write, _result) = write_of(&[b"abc"]);
    let next = write.advance(Err(errno(libc::EAGAIN)));
    assert!(matches!(next, Next::Block(_)));
}

#[test]
fn a_short_read_goes_on_before_the_end_and_stops_at_it() {
    let file = scratch();
    rustix::fs::ftruncate(&file.fd, 10).unwrap();
    let (read, result) = read_of(&file, 20);
    // 4 bytes of 20, but the file has 10: there is more to read.
    let read = again(read.advance(Ok(4)));
    assert_eq!(read.offset(), 4);
    assert!(matches!(read.advance(Ok(6)), Next::Done), "the end");
    let (result, buf) = answer(result);
    result.unwrap();
    let bytes = buf.to_vec();
    assert_eq!(bytes[..10], [0xAA; 10], "left as the kernel left it");
    assert_eq!(bytes[10..], [0; 10], "zeroes beyond the end");
}

#[test]
fn a_failed_read_gives_the_buffer_back() {
    let (read, result) = read_of(&scratch(), 20);
    assert!(matches!(read.advance(Err(errno(libc::EIO))), Next::Done));
    let (result, buf) = answer(result);
    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(buf.len(), 20);
}

/// Counts who holds a file when it is woken.
struct Holders {
    file: Arc<File>,
    counted: std::sync::atomic::AtomicUsize,
}

impl std::task::Wake for Holders {
    fn wake(self: Arc<Self>) {
        let now = Arc::strong_count(&self.file);
        self.counted.store(now, std::sync::atomic::Ordering::SeqCst);
    }
}

/// Runs an operation that has a waiter. Returns how many others held its file when the waiter was
/// woken.
fn holders_at_wake<T>(file: Arc<File>, mut result: Pending<T>, run: impl FnOnce()) -> usize {
    let holders = Arc::new(Holders {
        file,
        counted: std::sync::atomic::AtomicUsize::new(0),
    });
    let waker = std::task::Waker::from(Arc::clone(&holders));
    let mut context = std::task::Context::from_waker(&waker);
    let first = std::pin::Pin::new(&mut result).poll(&mut context);
    assert!(first.is_pending(), "it has not run");
    run();
    let counted = holders.counted.load(std::sync::atomic::Ordering::SeqCst);
    assert!(counted > 0, "the waiter was not woken");
    counted - 1
}

/// Else a lock on the file would outlive its last user for a moment.
#[test]
fn a_waiter_finds_no_other_holder_of_the_file() {
    let file = scratch();
    let (read, result) = read_of(&file, 10);
    assert_eq!(holders_at_wake(file, result, || read.run()), 0, "read");
    let (mut write, result) = write_of(&[b"abc"]);
    let file = scratch();
    write.file = Arc::clone(&file);
    assert_eq!(holders_at_wake(file, result, || write.run()), 0, "write");
    let file = scratch();
    let (completer, result) = pending();
    let call = Call {
        file: Arc::clone(&file),
        what: What::SyncData,
        completer,
    };
    assert_eq!(holders_at_wake(file, result, || call.run()), 0, "sync");
}

/// A ring that is being taken down refers to the open file still, as a copy of the descriptor does.
#[test]
fn locks_end_with_the_last_operation_whoever_refers_to_the_open_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, "").unwrap();
    let [own, other] = [(); 2].map(|()| std::fs::File::open(&path).unwrap());
    let _still = own.try_clone().unwrap();
    let file = File::new(own.into(), Route::Pool, MemoryAlignment::NONE);
    lock::share(file.as_fd(), 100, 2).unwrap();
    let (read, result) = read_of(&file, 1);
    drop(file);
    let is_locked = || lock::is_locked_by_others(other.as_fd(), 100, 2).unwrap();
    assert!(is_locked(), "an operation is still to be done");
    read.run();
    assert!(!is_locked());
    answer(result).0.unwrap();
}

/// Direct I/O cannot read on from the middle of a block: the file ended there when it was read.
#[test]
fn a_read_that_ends_within_a_block_does_not_go_on_in_a_file_that_has_grown() {
    let held = tempfile::tempfile().unwrap();
    held.set_len(64 << 10).unwrap();
    let block = MemoryAlignment {
        start_bytes: 4096,
        len_bytes: 4096,
    };
    let file = File::new(held.into(), Route::Pool, block);
    let (read, result) = read_of(&file, 4096);
    assert!(matches!(read.advance(Ok(2560)), Next::Done));
    let (outcome, list) = answer(result);
    outcome.unwrap();
    assert_eq!(list.to_vec()[2560..], [0; 1536]);
}

/// Where `lseek` may call data a hole that is in the page cache alone, there are no holes.
#[test]
fn holes_are_believed_of_known_file_systems_alone() {
    let known = tempfile::tempfile().unwrap();
    known.set_len(1 << 20).unwrap();
    let runs = find_runs(&known.into(), 0, 1 << 20).unwrap();
    assert!(runs.iter().any(|run| run.hole), "{runs:?}");
    let mut options = std::fs::OpenOptions::new();
    let unknown = options.read(true).write(true).open("/proc/self/comm");
    let runs = find_runs(&unknown.unwrap().into(), 0, 4096).unwrap();
    let whole = Run {
        start: 0,
        end: 4096,
        hole: false,
    };
    assert_eq!(runs, [whole]);
}
