//! A disk as a file of tokio: `AsyncRead`, `AsyncWrite` and `AsyncSeek`.
//!
//! These traits lend their buffers for the time of one poll, and a request of the kernel lasts
//! longer: so bytes are copied, as those of tokio's own files are. Where that matters, await the
//! futures of the disk.

use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use cowslip::image::Durability;
use cowslip::{Buf, BufMut, Disk};
use tokio::io::{AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};

/// Most bytes of one request.
const REQUEST_BYTES: usize = 1 << 20;

type Running<T> = Pin<Box<dyn Future<Output = cowslip::Result<T>> + Send>>;

/// A request under way.
enum Request {
    None,
    Read(Running<BufMut>),
    Write(Running<()>),
    Flush(Running<()>),
}

/// A disk as a file with a position. Its end is that of the disk, which writes do not move.
pub struct TokioDisk {
    disk: Arc<dyn Disk>,
    position: u64,
    request: Request,
    /// Bytes that were read and not asked for since.
    rest: Option<Buf>,
}

impl TokioDisk {
    /// A file whose position is 0.
    pub fn new(disk: Arc<dyn Disk>) -> TokioDisk {
        TokioDisk {
            disk,
            position: 0,
            request: Request::None,
            rest: None,
        }
    }

    fn room(&self, len: usize) -> usize {
        let left = self.disk.size().saturating_sub(self.position);
        usize::try_from(left)
            .unwrap_or(len)
            .min(len)
            .min(REQUEST_BYTES)
    }

    /// Waits for the request under way, whose caller may have gone.
    fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = match &mut self.request {
            Request::None => return Poll::Ready(Ok(())),
            Request::Read(running) => ready!(running.as_mut().poll(cx)).map(|buf| {
                self.rest = Some(buf.freeze());
            }),
            Request::Write(running) | Request::Flush(running) => ready!(running.as_mut().poll(cx)),
        };
        self.request = Request::None;
        Poll::Ready(ended.map_err(io::Error::from))
    }
}

impl AsyncRead for TokioDisk {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.poll_request(cx))?;
            if let Some(rest) = self.rest.take() {
                let len = rest.len().min(target.remaining());
                target.put_slice(&rest[..len]);
                self.position += len as u64;
                if len < rest.len() {
                    self.rest = Some(rest.slice(len, rest.len() - len));
                }
                return Poll::Ready(Ok(()));
            }
            let (len, offset) = (self.room(target.remaining()), self.position);
            if len == 0 {
                return Poll::Ready(Ok(()));
            }
            let disk = Arc::clone(&self.disk);
            self.request = Request::Read(Box::pin(async move {
                let target = BufMut::zeroed(len).into();
                disk.read(offset, target).await.map(BufMut::from)
            }));
        }
    }
}

/// As of tokio's own files, a write returns when its bytes are copied; the next request or a flush
/// waits for it, and has its error.
impl AsyncWrite for TokioDisk {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_request(cx))?;
        // A write begins where the caller has read to.
        self.rest = None;
        let (len, offset) = (self.room(data.len()), self.position);
        if len > 0 {
            let (disk, data) = (Arc::clone(&self.disk), Buf::copy_of(&data[..len]));
            let write = async move { disk.write(offset, data.into(), Durability::Cached).await };
            self.request = Request::Write(Box::pin(write));
            self.position += len as u64;
        }
        Poll::Ready(Ok(len))
    }

    /// Makes durable what was written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !matches!(self.request, Request::Flush(_)) {
            ready!(self.poll_request(cx))?;
            let disk = Arc::clone(&self.disk);
            self.request = Request::Flush(Box::pin(async move { disk.flush().await }));
        }
        self.poll_request(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}

impl AsyncSeek for TokioDisk {
    fn start_seek(mut self: Pin<&mut Self>, to: SeekFrom) -> io::Result<()> {
        if !matches!(self.request, Request::None) {
            return Err(io::Error::other("a request is under way"));
        }
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.disk.size().checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        self.rest = None;
        Ok(())
    }

    fn poll_complete(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        ready!(self.poll_request(cx))?;
        Poll::Ready(Ok(self.position))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Failing a test is a panic.
mod tests {
    use super::*;
    use crate::testing::{Ask, Model, SIZE, Scratch};
    use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};

    async fn machine(mut file: TokioDisk) -> Vec<u8> {
        let mut model = Model::new(5, 1);
        for _ in 0..300 {
            match model.next() {
                Ask::Read(offset, len) => {
                    file.seek(SeekFrom::Start(offset)).await.unwrap();
                    let mut bytes = vec![0; len];
                    file.read_exact(&mut bytes).await.unwrap();
                    model.check(offset, &bytes);
                }
                Ask::Write(offset, bytes) => {
                    file.seek(SeekFrom::Start(offset)).await.unwrap();
                    file.write_all(&bytes).await.unwrap();
                }
                Ask::Zero(offset, len) => {
                    file.seek(SeekFrom::Start(offset)).await.unwrap();
                    file.write_all(&vec![0; len as usize]).await.unwrap();
                }
                Ask::Flush => file.flush().await.unwrap(),
            }
        }
        assert_eq!(file.seek(SeekFrom::End(-3)).await.unwrap(), SIZE - 3);
        let mut tail = Vec::new();
        file.read_to_end(&mut tail).await.unwrap();
        model.check(SIZE - 3, &tail);
        assert_eq!(file.write(&[1]).await.unwrap(), 0);
        file.shutdown().await.unwrap();
        model.bytes
    }

    #[test]
    fn a_file_of_tokio_reads_and_writes_the_image() {
        let scratch = Scratch::new();
        let file = TokioDisk::new(Arc::clone(&scratch.image) as _);
        let runtime = { tokio::runtime::Builder::new_multi_thread() }
            .worker_threads(1)
            .build()
            .unwrap();
        let model = runtime.block_on(async { tokio::spawn(machine(file)).await.unwrap() });
        drop(runtime);
        scratch.end(&model);
    }
}
