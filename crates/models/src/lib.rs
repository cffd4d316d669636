//! The parts of Cowslip where threads meet, unchanged, but built against loom's primitives: loom
//! runs a small program in every order of its steps, and lets each read see every value that the
//! memory model allows. The programs are in `tests/`; the whole engine is run on threads by the
//! crate in `shuttle/`, in some orders only.

// The sources included below name the queue by its crate.
extern crate self as cowslip_queue;

#[path = "../../queue/src/mailbox.rs"]
pub mod mailbox;
#[path = "../../queue/src/pending.rs"]
pub mod pending;
pub mod primitives;
pub mod qcow2;
#[path = "../../block/src/run.rs"]
pub mod run;
#[path = "../../block/src/sync.rs"]
pub mod sync;

pub use pending::{Completer, Pending, pending};
// Those of the qcow2 engine name each other by the root of their crate.
pub use qcow2::{geometry, plan};
