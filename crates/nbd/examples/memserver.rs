//! Serves a sparse disk in memory on a Unix socket until it is killed: what the NBD server costs
//! when the disk costs nothing.
//!
//! ```text
//! cargo run --release -p cowslip-nbd --example memserver -- /tmp/mem.sock 1G [uring|threads]
//! fio --name=w --ioengine=nbd --uri='nbd+unix:///?socket=/tmp/mem.sock' --rw=randwrite \
//!     --bs=4k --iodepth=32
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use cowslip_block::disk::MemoryDisk;
use cowslip_nbd::{Server, ServerOptions};
use cowslip_queue::{Backend, Listener, Queue};

fn size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix('M') {
        Some(digits) => (digits, 1 << 20),
        None => (text.strip_suffix('G')?, 1 << 30),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let backend = match arguments.get(2).map(String::as_str) {
        Some("uring") => Backend::Uring,
        Some("threads") => Backend::Threads,
        _ => Backend::Auto,
    };
    let (Some(path), Some(size)) = (
        arguments.first(),
        arguments.get(1).and_then(|text| size(text)),
    ) else {
        eprintln!("usage: memserver SOCKET SIZE[M|G] [uring|threads]");
        return ExitCode::FAILURE;
    };
    let served = Queue::new(backend).and_then(|queue| {
        let listener = Listener::unix(Path::new(path))?;
        let mut server = Server::new(ServerOptions::default());
        server.add_export("", Arc::new(MemoryDisk::new("memory", size)));
        queue.block_on(server.serve(vec![listener]));
        Ok(())
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("memserver: {path}: {error}");
            ExitCode::FAILURE
        }
    }
}
