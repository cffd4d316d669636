//! A file that is being written, or was: its state, and the next action on it.

use std::fs::File;
use std::time::{Duration, Instant};

use cowslip::growth::{Ahead, AtClose, CutPoint, Refill, Rule, at_close};
use rustix::fs::fstat;

use super::report::Event;
use super::target::{self, Allocated, Handle, Id, Refused, Trimmed, Use};

/// The first wait for a file that is still open when it is to be truncated: the notification of a
/// close comes shortly before the close has completed.
const WAIT_FIRST: Duration = Duration::from_millis(10);
const WAIT_MAX: Duration = Duration::from_secs(5);
/// The largest blocks of file systems, as a rule: what a step has allocated ends with one.
const BLOCK_MAX_BYTES: u64 = 64 << 10;
/// An end that moves by more than that without space is no growth. By less it may have moved into
/// space that the file system itself has ahead, as XFS has of buffered writes; such a file is given
/// steps, so that what lies behind its end is given back: of a file that was preallocated once XFS
/// gives back nothing by itself.
const LEAP_BYTES: u64 = 16 << 20;
/// Pause after the file system was full.
const FULL_WAIT: Duration = Duration::from_secs(5);

/// A file that is watched, with the space that was allocated behind its end.
#[derive(Debug)]
pub struct Entry {
    /// Identity of the file.
    pub id: Id,
    handle: Option<Handle>,
    /// Open only while another process may have it open, too: programs that are open for writing
    /// cannot be run.
    file: Option<File>,
    ahead: Ahead,
    size: u64,
    /// Space that it takes, in bytes, with the space ahead.
    space: u64,
    /// Number of closes in a row, with growth between them.
    closes: u8,
    has_grown_since_close: bool,
    steps: u64,
    /// Whether space was allocated since it was last cut.
    owes: bool,
    /// Whether space was allocated at some time.
    was_given: bool,
    is_kept: bool,
    is_refused: bool,
    changed_at: Instant,
    trim_at: Option<Instant>,
    tries: u32,
    /// Time before which nothing is allocated.
    full_until: Option<Instant>,
}

impl Entry {
    /// A file of this length with this space, of which nothing else is known.
    pub fn new(id: Id, (size, space): (u64, u64), rule: Rule, now: Instant) -> Entry {
        Entry {
            id,
            handle: None,
            file: None,
            ahead: Ahead::new(rule, size),
            size,
            space,
            closes: 0,
            has_grown_since_close: true,
            steps: 0,
            owes: false,
            was_given: false,
            is_kept: false,
            is_refused: false,
            changed_at: now,
            trim_at: None,
            tries: 0,
            full_until: None,
        }
    }

    /// Bytes behind its end that are due.
    pub fn held_bytes(&self) -> u64 {
        match self.owes {
            true => self.ahead.held_bytes(self.size),
            false => 0,
        }
    }

    /// Whether space was allocated that may lie behind its end.
    pub fn owes(&self) -> bool {
        self.owes
    }

    /// Whether space was allocated for it at some time.
    pub fn was_given(&self) -> bool {
        self.was_given
    }

    /// Records that space was allocated for it before it was forgotten.
    pub fn recalled(&mut self) {
        self.was_given = true;
    }

    /// Whether it takes a descriptor.
    pub fn is_held(&self) -> bool {
        self.handle.is_some()
    }

    /// Allocations so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether it has no name any more, in any directory.
    pub fn is_deleted(&self) -> bool {
        let stat = self.handle.as_ref().map(Handle::stat);
        stat.is_none_or(|stat| stat.map_or(true, |stat| stat.st_nlink == 0))
    }

    /// When something is to be done, or when it can be forgotten.
    pub fn deadline(&self, idle: Duration) -> Option<Instant> {
        let forgotten = (!self.owes).then_some(self.changed_at + idle);
        self.trim_at.or(forgotten)
    }

    /// Whether nothing has happened to it for the time `idle`, and nothing is due.
    pub fn is_forgotten(&self, idle: Duration, now: Instant) -> bool {
        !self.owes && self.changed_at + idle <= now
    }

    /// Its length now, and its space; by how much it has grown that was written: an end that was
    /// only moved is no growth.
    pub fn take_size(&mut self, (size, space): (u64, u64), now: Instant) -> u64 {
        let mut grown = size.saturating_sub(self.size);
        let spaced = space.saturating_sub(self.space);
        // Space ahead was counted when it was allocated.
        let ahead_end = self.size + self.held_bytes();
        let needs_space = size.saturating_sub(ahead_end.next_multiple_of(BLOCK_MAX_BYTES));
        if spaced < needs_space && needs_space > LEAP_BYTES {
            grown = grown.min(spaced);
        }
        self.space = space;
        if size < self.size {
            // A truncation by another program has freed the space behind the end, too.
            self.ahead.trimmed(size, CutPoint::Shorter);
            self.closes = 0;
            self.is_kept = false;
        }
        if size != self.size {
            self.changed_at = now;
        }
        self.has_grown_since_close |= grown > 0;
        self.size = size;
        grown
    }

    /// Whether space is wanted for it at all.
    pub fn wants_space(&self, is_closed: bool, now: Instant) -> bool {
        let is_open = !is_closed || at_close(Some(self.closes)) == AtClose::Keep;
        let has_room = self.full_until.is_none_or(|until| until <= now);
        is_open && has_room && !self.is_refused
    }

    /// Allocates the next step if it is due, for a file that has grown by so much since it was
    /// looked at.
    pub fn allocate(
        &mut self,
        grown: u64,
        free_bytes: Option<u64>,
        find: impl FnOnce() -> Result<Handle, Refused>,
        now: Instant,
    ) -> Option<Event> {
        // As much again will have come when it is looked at next, and then as much until there is
        // an answer.
        let due = |entry: &Entry, grown: u64| {
            let needed = grown.saturating_mul(2);
            let ahead = &entry.ahead;
            ahead.next(entry.size, needed, Refill::WhenHalfUsed, free_bytes)
        };
        due(self, grown)?;
        if let Err(refused) = self.open(find) {
            return self.refused(refused);
        }
        // It may be longer by now, or shorter.
        let found = fstat(self.file.as_ref()?).ok()?;
        let more = self.take_size((target::size(&found), target::space(&found)), now);
        let range = due(self, grown + more)?;
        let file = self.file.as_ref()?;
        let allocated = target::allocate(file, &range);
        self.space = fstat(file).map_or(self.space, |stat| target::space(&stat));
        match allocated {
            Allocated::All => {
                self.owes = true;
                self.was_given = true;
                self.steps += 1;
                self.ahead.granted(&range);
                Some(Event::Allocated {
                    start: range.start,
                    bytes: range.end - range.start,
                    size: self.size,
                })
            }
            Allocated::Full => {
                // Some file systems leave a part of it there.
                self.owes = true;
                self.was_given = true;
                self.full_until = Some(now + FULL_WAIT);
                None
            }
            Allocated::Never(why) => self.refused(Refused::For(why)),
        }
    }

    fn open(&mut self, find: impl FnOnce() -> Result<Handle, Refused>) -> Result<(), Refused> {
        let handle = match self.handle.take() {
            Some(handle) => handle,
            None => find()?,
        };
        let opened = match self.file.take() {
            Some(file) => Ok((file, Use::InUse)),
            None => handle.open(),
        };
        if handle.stat().map(|stat| target::id(&stat)) != Ok(self.id) {
            return Err(Refused::Gone);
        }
        self.handle = Some(handle);
        let (file, used) = opened?;
        // No process is going to write, but for those that come back each time.
        if used == Use::InUse || at_close(Some(self.closes)) == AtClose::Keep {
            self.file = Some(file);
        }
        Ok(())
    }

    fn refused(&mut self, refused: Refused) -> Option<Event> {
        match refused {
            Refused::Gone | Refused::NotRegular | Refused::Busy => None,
            Refused::For(why) => {
                self.is_refused = true;
                Some(Event::LeftAlone { why })
            }
        }
    }

    /// Takes on what the file system has ahead of a file of which it gives back nothing by itself:
    /// see [`LEAP_BYTES`].
    fn owes_what_the_system_added(&mut self, find: impl FnOnce() -> Result<Handle, Refused>) {
        let end = self.size.next_multiple_of(BLOCK_MAX_BYTES);
        let has_more = self.was_given && self.has_grown_since_close && self.space > end;
        if has_more && !self.owes && !self.is_refused {
            self.owes = self.open(find).is_ok();
        }
    }

    /// Handles a close by a process that could write.
    pub fn closed(
        &mut self,
        idle: Duration,
        find: impl FnOnce() -> Result<Handle, Refused>,
        now: Instant,
    ) -> Option<Event> {
        let mut event = None;
        self.owes_what_the_system_added(find);
        if std::mem::take(&mut self.has_grown_since_close) {
            match at_close(Some(self.closes)) {
                AtClose::Trim(closes) => self.closes = closes,
                AtClose::Keep => {
                    if self.owes && !std::mem::replace(&mut self.is_kept, true) {
                        event = Some(Event::Kept {
                            bytes: self.held_bytes(),
                            size: self.size,
                        });
                    }
                }
            }
        }
        self.tries = 0;
        if self.is_kept {
            self.file = None;
            self.trim_at = Some(now + idle);
        } else if self.owes {
            self.trim_at = Some(now);
        } else {
            self.let_go();
        }
        event
    }

    /// The file has no watched name any more, so no further events will come.
    pub fn orphaned(&mut self, now: Instant) {
        self.is_kept = false;
        self.wait(now);
    }

    fn let_go(&mut self) {
        self.file = None;
        self.handle = None;
        self.trim_at = None;
    }

    /// Whether it is time to give back what lies behind its end.
    pub fn is_due(&self, now: Instant) -> bool {
        self.trim_at.is_some_and(|at| at <= now)
    }

    /// Gives it back, if nobody has the file open.
    pub fn give_back(&mut self, now: Instant) -> Option<Event> {
        let held = self.held_bytes();
        let left = |why: String| Event::Left { bytes: held, why };
        let Some(handle) = &self.handle else {
            self.let_go();
            return None;
        };
        let opened = match self.file.take() {
            Some(file) => Ok(file),
            None => handle.open().map(|(file, _)| file),
        };
        let outcome = opened.map(|file| (target::trim(&file), file));
        match outcome {
            Ok((
                Ok(Trimmed::Done {
                    size,
                    given_back,
                    left: kept,
                }),
                _,
            )) => {
                self.ahead.trimmed(size, CutPoint::AtEnd);
                self.size = size;
                self.space = self.space.saturating_sub(given_back);
                self.owes = false;
                if kept > 0 {
                    self.is_refused = true;
                    self.let_go();
                    return Some(Event::Left {
                        bytes: kept,
                        why: target::KEPT_BY_SYSTEM.to_string(),
                    });
                }
                // The program that it was kept for has stopped coming.
                if std::mem::take(&mut self.is_kept) {
                    self.closes = 0;
                }
                self.let_go();
                Some(Event::GivenBack {
                    bytes: given_back,
                    size,
                    steps: self.steps,
                })
            }
            Ok((Ok(Trimmed::InUse), file)) => {
                self.file = Some(file);
                self.wait(now);
                None
            }
            Ok((Ok(Trimmed::Late), _)) => {
                self.owes = false;
                self.let_go();
                Some(Event::Left {
                    bytes: 0,
                    why: target::CUT_LATE.to_string(),
                })
            }
            Err(Refused::Busy) => {
                self.wait(now);
                None
            }
            Ok((Err(error), _)) => {
                self.owes = false;
                self.let_go();
                Some(left(cowslip::error::system_words(&error)))
            }
            Err(refused) => {
                self.owes = false;
                self.let_go();
                match refused {
                    Refused::For(why) => Some(left(why)),
                    _ => None,
                }
            }
        }
    }

    fn wait(&mut self, now: Instant) {
        self.tries = (self.tries + 1).min(16);
        self.trim_at = Some(now + (WAIT_FIRST * (1 << self.tries)).min(WAIT_MAX));
    }
}
