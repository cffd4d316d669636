//! [`NullFile`]: a file of a given length that stores nothing, as QEMU's `null-co` and `null-aio`.

use std::io;
use std::time::Duration;

use cowslip_block::file::{BlockFile, Capabilities, Durability, FileExtent, Space};
use cowslip_block::{IoVec, IoVecMut};
use cowslip_queue::{Pending, pending};

/// Length and latency of a file that stores nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullSpec {
    /// Length of the file.
    pub bytes: u64,
    /// Duration of each request.
    pub latency: Duration,
}

impl Default for NullSpec {
    fn default() -> NullSpec {
        NullSpec {
            bytes: 1 << 30,
            latency: Duration::ZERO,
        }
    }
}

/// A file that discards writes and reads as zeroes.
#[derive(Debug)]
pub struct NullFile {
    name: String,
    spec: NullSpec,
    capabilities: Capabilities,
}

impl NullFile {
    /// A file with a name for messages.
    pub fn new(name: &str, spec: NullSpec) -> NullFile {
        NullFile {
            name: name.to_string(),
            spec,
            capabilities: Capabilities {
                writable: true,
                zeroes_fast: true,
                punches_holes: true,
                ..Capabilities::NONE
            },
        }
    }

    /// Returns `value` when the latency of a request has passed. Runs on a queue.
    fn after<T: Send + 'static>(&self, value: T) -> Pending<T> {
        if self.spec.latency.is_zero() {
            return Pending::ready(value);
        }
        let (completer, done) = pending();
        let latency = self.spec.latency;
        cowslip_queue::spawn(async move {
            cowslip_queue::sleep(latency).await;
            completer.complete(value);
        });
        done
    }
}

impl BlockFile for NullFile {
    cowslip_block::file_from_fields!(name, capabilities);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.spec.bytes))
    }

    fn read(&self, _offset: u64, mut buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        buf.fill(0);
        self.after((Ok(()), buf))
    }

    fn write(&self, _: u64, _: IoVec, _: Durability) -> Pending<io::Result<()>> {
        self.after(Ok(()))
    }

    fn zero(&self, _: u64, _: u64, _: Space) -> Pending<io::Result<()>> {
        self.after(Ok(()))
    }

    fn discard(&self, _: u64, _: u64) -> Pending<io::Result<()>> {
        self.after(Ok(()))
    }

    fn extents(&self, start: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let hole = true;
        Pending::ready(Ok(vec![FileExtent { start, len, hole }]))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.after(Ok(()))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        Some(0)
    }
}
