//! Exports of NBD servers as files, and the names that they have.
//!
//! | written | |
//! | --- | --- |
//! | `nbd://HOST[:PORT]/EXPORT`, `nbd+tcp://…` | over TCP |
//! | `nbd+unix:///EXPORT?socket=PATH` | over a Unix socket |
//! | `nbds://…`, `nbds+unix://…`, each with `tls-certificates=DIR` | the same over TLS, as libnbd names it |
//! | `nbds://[USER@]…`, `nbds+unix://[USER@]…`, each with `tls-psk-file=FILE` | the same with a key shared beforehand |
//! | `nbd:HOST:PORT[:exportname=EXPORT]`, `nbd:unix:PATH[:exportname=EXPORT]` | QEMU's older form |
//! | `driver=nbd,server.type=…`, `driver=nbd,host=…`, `driver=nbd,path=…` | as options; over TLS with `tls-creds=ID` |
//!
//! Sources: `doc/uri.md` of the NetworkBlockDevice project; nbd_connect_uri(3); qemu(1), "nbd".

mod address;
mod file;
mod link;
mod name;
mod options;
mod requests;
#[cfg(test)]
mod tests;
mod unflushed;
mod uri;
mod worker;

pub use address::{Address, refused};
pub use file::open;
pub use name::{ClientSide, ExportName, TlsName, Waits};
pub use options::OPTIONS;
