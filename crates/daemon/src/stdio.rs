//! [`Stdio`]: standard input and output as a client of the control protocol.
//!
//! The server speaks over sockets; two threads copy between one and the streams.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use cowslip_queue::Stream;

/// Longest wait for a reader of standard output that does not read, when the daemon ends.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that are copied at a time.
const COPIED_MAX: usize = 4096;

/// The threads that copy.
pub struct Stdio {
    written: Receiver<()>,
}

impl Stdio {
    /// A connection to the streams. The end of the input is the client's leave.
    ///
    /// # Errors
    /// The system's.
    pub fn connect() -> io::Result<(Stream, Stdio)> {
        let (server, client) = UnixStream::pair()?;
        let input = client.try_clone()?;
        std::thread::spawn(move || {
            // A failure of the input is its end.
            drop(copy(&mut io::stdin().lock(), &mut &input));
            drop(input.shutdown(Shutdown::Write));
        });
        let (report, written) = channel();
        std::thread::spawn(move || {
            drop(copy(&mut &client, &mut io::stdout()));
            // A daemon that has ended for another reason does not wait.
            let _ended = report.send(());
        });
        Ok((Stream::from_fd(server.into()), Stdio { written }))
    }

    /// Waits until all is written that the server has sent. It has ended the connection.
    pub fn finish(self) {
        // A reader that does not read is not waited for.
        let _late = self.written.recv_timeout(PATIENCE);
    }
}

/// Copies what is there at once, without waiting for more.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; COPIED_MAX];
    loop {
        let count = match from.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        to.write_all(&bytes[..count])?;
        to.flush()?;
    }
}
