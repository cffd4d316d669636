//! The kernel's ring as it is set up, of either width: commands of devices take submissions of 128
//! bytes, all else has room in 64.
#![allow(unsafe_code)] // The one push, whose caller says why what an entry points to lives.

use std::io;

use io_uring::register::Restriction;
use io_uring::squeue::{Entry, Entry128, EntryMarker};
use io_uring::{CompletionQueue, IoUring, Parameters, Probe, Submitter, opcode};

use crate::fixed::{self, Fixed};

/// Submissions that fit before a turn needs a second system call.
const SUBMISSIONS: u32 = 256;
/// Completions that fit before the kernel has to keep them aside.
const COMPLETIONS: u32 = 4096;

/// Operations that a ring takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Those of files and sockets.
    Narrow,
    /// Commands of devices too.
    Wide,
}

/// A submission entry.
pub(crate) enum Submission {
    Narrow(Entry),
    /// Goes to a wide ring only.
    Wide(Entry128),
}

impl Submission {
    pub(crate) fn user_data(self, tag: u64) -> Submission {
        match self {
            Submission::Narrow(entry) => Submission::Narrow(entry.user_data(tag)),
            Submission::Wide(entry) => Submission::Wide(entry.user_data(tag)),
        }
    }
}

/// A ring.
pub(crate) struct Ring {
    kind: Kind,
    /// Memory of buffers that it knows.
    fixed: Fixed,
}

#[allow(clippy::large_enum_variant)] // One per queue, and both are of a size.
enum Kind {
    Narrow(IoUring),
    Wide(IoUring<Entry128>),
}

impl Ring {
    /// Makes a ring that does not work yet, on any thread.
    pub(crate) fn prepare(width: Width) -> io::Result<Ring> {
        let kind = match width {
            Width::Narrow => Kind::Narrow(build()?),
            Width::Wide => Kind::Wide(build()?),
        };
        let mut ring = Ring {
            kind,
            fixed: Fixed::default(),
        };
        ring.check_operations()?;
        // Its restrictions forbid that.
        ring.fixed = fixed::register(&ring.submitter());
        ring.restrict()?;
        Ok(ring)
    }

    pub(crate) fn fixed(&self) -> Fixed {
        self.fixed
    }

    pub(crate) fn width(&self) -> Width {
        match &self.kind {
            Kind::Narrow(_) => Width::Narrow,
            Kind::Wide(_) => Width::Wide,
        }
    }

    pub(crate) fn submitter(&self) -> Submitter<'_> {
        match &self.kind {
            Kind::Narrow(ring) => ring.submitter(),
            Kind::Wide(ring) => ring.submitter(),
        }
    }

    pub(crate) fn params(&self) -> &Parameters {
        match &self.kind {
            Kind::Narrow(ring) => ring.params(),
            Kind::Wide(ring) => ring.params(),
        }
    }

    pub(crate) fn completion(&mut self) -> CompletionQueue<'_> {
        match &mut self.kind {
            Kind::Narrow(ring) => ring.completion(),
            Kind::Wide(ring) => ring.completion(),
        }
    }

    /// Entries that are prepared, and whether the kernel has work to finish.
    pub(crate) fn prepared(&mut self) -> (usize, bool) {
        match &mut self.kind {
            Kind::Narrow(ring) => {
                let submission = ring.submission();
                (submission.len(), submission.taskrun())
            }
            Kind::Wide(ring) => {
                let submission = ring.submission();
                (submission.len(), submission.taskrun())
            }
        }
    }

    /// Prepares an entry; returns whether there was room.
    ///
    /// # Safety
    /// What the entry points to stays where it is until the operation has completed.
    pub(crate) unsafe fn push(&mut self, submission: &Submission) -> bool {
        match (&mut self.kind, submission) {
            (Kind::Narrow(ring), Submission::Narrow(entry)) => {
                // SAFETY: the caller's promise.
                unsafe { ring.submission().push(entry) }.is_ok()
            }
            (Kind::Wide(ring), Submission::Narrow(entry)) => {
                let entry = Entry128::from(entry.clone());
                // SAFETY: as above.
                unsafe { ring.submission().push(&entry) }.is_ok()
            }
            (Kind::Wide(ring), Submission::Wide(entry)) => {
                // SAFETY: as above.
                unsafe { ring.submission().push(entry) }.is_ok()
            }
            (Kind::Narrow(_), Submission::Wide(_)) => {
                panic!("commands of devices go to rings that take them")
            }
        }
    }

    /// Whether the kernel knows all that is used here.
    fn check_operations(&self) -> io::Result<()> {
        let mut probe = Probe::new();
        self.submitter().register_probe(&mut probe)?;
        let complete = operations(self.width()).all(|code| probe.is_supported(code));
        if complete && self.params().is_feature_ext_arg() && self.params().is_feature_nodrop() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the kernel's io_uring is too old",
        ))
    }

    /// Makes the kernel refuse all other operations: a system call filter does not see the ring's
    /// operations, and no ring of ours opens files or makes connections.
    fn restrict(&self) -> io::Result<()> {
        let mut allowed: Vec<Restriction> =
            operations(self.width()).map(Restriction::sqe_op).collect();
        self.submitter().register_restrictions(&mut allowed)
    }
}

/// Modes that save interrupts and locks, best first; a kernel that lacks one refuses the setup.
fn build<S: EntryMarker>() -> io::Result<IoUring<S>>
where
    io_uring::Builder<S>: Clone,
{
    let mut best = IoUring::<S>::builder();
    best.setup_cqsize(COMPLETIONS)
        .setup_submit_all()
        .setup_r_disabled();
    let mut good = best.clone();
    good.setup_coop_taskrun().setup_taskrun_flag();
    let plain = best.clone();
    best.setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    let mut refusal = None;
    for mode in [best, good, plain] {
        match mode.build(SUBMISSIONS) {
            Ok(ring) => return Ok(ring),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.expect("there are modes to try"))
}

/// All that is used on a ring.
fn operations(width: Width) -> impl Iterator<Item = u8> {
    const ALWAYS: [u8; 12] = [
        opcode::Nop::CODE,
        opcode::Read::CODE,
        opcode::Readv::CODE,
        opcode::ReadFixed::CODE,
        opcode::Write::CODE,
        opcode::Writev::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::PollAdd::CODE,
        opcode::Recv::CODE,
        opcode::AsyncCancel::CODE,
    ];
    let more = (width == Width::Wide).then_some(opcode::UringCmd80::CODE);
    ALWAYS.into_iter().chain(more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::types::Fd;

    #[test]
    fn a_ring_opens_no_files() {
        for width in [Width::Narrow, Width::Wide] {
            let Ok(mut ring) = Ring::prepare(width) else {
                return eprintln!("SKIPPED: no io_uring here");
            };
            ring.submitter().register_enable_rings().unwrap();
            let directory = Fd(libc::AT_FDCWD);
            let open = opcode::OpenAt::new(directory, c"/etc/passwd".as_ptr()).build();
            for (entry, expected) in [(open, -libc::EACCES), (opcode::Nop::new().build(), 0)] {
                let entry = Submission::Narrow(entry);
                // SAFETY: the name that the first points to is a constant, the second points to
                // nothing.
                assert!(unsafe { ring.push(&entry) });
                ring.submitter().submit_and_wait(1).unwrap();
                assert_eq!(ring.completion().next().unwrap().result(), expected);
            }
        }
    }
}
