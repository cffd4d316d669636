//! [`Writer`]: a recorder's requests on their way into a file.

use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use cowslip_block::Disk;
use cowslip_block::file::{BlockFile, Durability};
use cowslip_queue::Buf;

use crate::format::{CHUNK_BYTES, ChunkHead, Header};
use crate::record::{Chunk, Recorder};

/// Writes a trace. Errors end the recording, and nothing else.
#[derive(Debug)]
pub struct Writer {
    file: Arc<dyn BlockFile>,
    recorder: Arc<Recorder>,
    /// The end of what is written.
    end: u64,
    is_finished: bool,
}

impl Writer {
    /// Begins the trace of a disk in a file, which is cut to nothing first.
    ///
    /// # Errors
    /// The system's; a limit that has no room for a trace.
    pub async fn begin(
        file: Arc<dyn BlockFile>,
        recorder: Arc<Recorder>,
        disk: &dyn Disk,
    ) -> io::Result<Writer> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let began = since.map_or(0, |since| since.as_micros());
        let header = Header {
            disk_bytes: disk.size(),
            block_bytes: disk.features().preferred_block_bytes,
            began_us: u64::try_from(began).unwrap_or(u64::MAX),
        };
        file.set_len(0).await?;
        let mut writer = Writer {
            file,
            recorder,
            end: 0,
            is_finished: false,
        };
        writer.append(&header.encode()).await?;
        Ok(writer)
    }

    /// Writes what was noted meanwhile; nothing once it has finished.
    ///
    /// # Errors
    /// The system's: then the recording has ended, and what could not be written is dropped.
    pub async fn write_out(&mut self) -> io::Result<()> {
        if self.is_finished {
            return Ok(());
        }
        let (chunks, _) = self.recorder.take();
        let mut chunks = chunks.into_iter();
        let limit = self.recorder.limits().file_bytes;
        while let Some(chunk) = chunks.next() {
            // The last chunk of a trace, which has no request, always finds room.
            let needed = (2 * CHUNK_BYTES + chunk.payload.len()) as u64;
            let written = match self.end.saturating_add(needed) <= limit {
                true => self.append_chunk(&chunk).await,
                false => Err(io::ErrorKind::StorageFull.into()),
            };
            let Err(error) = written else { continue };
            let lost = std::iter::once(chunk).chain(chunks);
            let lost = lost.map(|it| it.head.dropped + u64::from(it.head.count));
            self.recorder.stop(lost.sum());
            return match error.kind() == io::ErrorKind::StorageFull
                && error.raw_os_error().is_none()
            {
                true => Ok(()),
                false => Err(error),
            };
        }
        Ok(())
    }

    /// Ends the trace: writes what is left, and how many requests were dropped behind it. Returns
    /// the length of the file in bytes.
    ///
    /// # Errors
    /// The system's.
    pub async fn finish(&mut self) -> io::Result<u64> {
        self.write_out().await?;
        self.recorder.stop(0);
        // Requests may have come in between.
        self.is_finished = true;
        let (chunks, dropped) = self.recorder.take();
        let lost = chunks
            .iter()
            .map(|it| it.head.dropped + u64::from(it.head.count));
        let dropped = dropped + lost.sum::<u64>();
        if dropped > 0 {
            let head = ChunkHead {
                dropped,
                ..ChunkHead::default()
            };
            self.append(&head.encode()).await?;
        }
        Ok(self.end)
    }

    /// Goes on at another place.
    #[cfg(test)]
    pub(crate) fn move_to(&mut self, end: u64) {
        self.end = end;
    }

    /// Requests that were dropped and that no chunk counts.
    #[cfg(test)]
    pub(crate) fn dropped(&self) -> u64 {
        self.recorder.take().1
    }

    async fn append_chunk(&mut self, chunk: &Chunk) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(CHUNK_BYTES + chunk.payload.len());
        bytes.extend_from_slice(&chunk.head.encode());
        bytes.extend_from_slice(&chunk.payload);
        self.append(&bytes).await
    }

    async fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let data = Buf::copy_of(bytes);
        let written = self.file.write(self.end, data.into(), Durability::Cached);
        if let Err(error) = written.await {
            // A part may be there, which would look like damage. If it stays, there is no more.
            drop(self.file.set_len(self.end).await);
            return Err(error);
        }
        self.end += bytes.len() as u64;
        Ok(())
    }
}
