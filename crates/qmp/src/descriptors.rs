//! Descriptors that clients pass with commands: kept by name for a connection (`getfd`), or in sets
//! for everybody (`add-fd`), which files are opened from as `/dev/fdset/ID`.
//!
//! A set stays until it is removed. QEMU closes sets that nothing uses when its last client leaves,
//! so that a client that connects for each command has to pass them again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use serde_json::{Map, Value, json};

use crate::error::QmpError;

/// Most descriptors that a connection keeps by name.
const NAMED_MAX: usize = 256;

/// Most descriptors in all sets together.
const IN_SETS_MAX: usize = 4096;

/// The name of sets as files.
const SET_PREFIX: &str = "/dev/fdset/";

#[derive(Debug)]
struct SetMember {
    fd: OwnedFd,
    opaque: Option<String>,
}

impl SetMember {
    fn number(&self) -> i64 {
        self.fd.as_raw_fd().into()
    }
}

type Sets = BTreeMap<i64, Vec<SetMember>>;

/// Sets of descriptors, by their IDs.
#[derive(Debug, Default)]
pub struct FdSets {
    sets: Mutex<Sets>,
}

impl FdSets {
    fn lock(&self) -> MutexGuard<'_, Sets> {
        // Nothing that holds the lock panics.
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of a descriptor of the set that a file name `/dev/fdset/ID` names; `None` for any
    /// other name. It has the access that is asked for: reading, writing, or both.
    ///
    /// # Errors
    /// There is no such set, nothing in it has that access, or the system refuses a copy.
    pub fn open(&self, path: &Path, access: OFlags) -> Result<Option<OwnedFd>, QmpError> {
        let Some(text) = path.to_str().filter(|text| text.starts_with(SET_PREFIX)) else {
            return Ok(None);
        };
        let refuse = |text: String| QmpError::generic(text);
        let id = text[SET_PREFIX.len()..].parse();
        let id: i64 = id.map_err(|_| refuse(format!("Could not parse fdset {text}")))?;
        let sets = self.lock();
        let set = sets.get(&id);
        let set = set.ok_or_else(|| refuse(format!("Failed to find fdset {text}")))?;
        let access = access & OFlags::ACCMODE;
        for member in set {
            let flags = rustix::fs::fcntl_getfl(&member.fd);
            if flags.is_ok_and(|flags| flags & OFlags::ACCMODE == access) {
                let copy = member.fd.try_clone();
                return copy.map(Some).map_err(|error| {
                    refuse(format!(
                        "Failed to copy a file descriptor of {text}: {error}"
                    ))
                });
            }
        }
        let flags = access.bits();
        let text = "Failed to find file descriptor with matching flags";
        Err(refuse(format!("{text}={flags:#x}")))
    }

    fn add(&self, fd: OwnedFd, id: Option<i64>, opaque: Option<String>) -> Result<Value, QmpError> {
        let mut sets = self.lock();
        if sets.values().map(Vec::len).sum::<usize>() >= IN_SETS_MAX {
            let text = format!("There are {IN_SETS_MAX} file descriptors in sets already");
            return Err(QmpError::generic(text));
        }
        let id = match id {
            Some(id) if id < 0 => {
                let text = "Parameter 'fdset-id' expects a non-negative value";
                return Err(QmpError::generic(text));
            }
            Some(id) => id,
            None => (0..)
                .find(|id| !sets.contains_key(id))
                .expect("a number that none of the sets has"),
        };
        let member = SetMember { fd, opaque };
        let number = member.number();
        sets.entry(id).or_default().push(member);
        Ok(json!({"fdset-id": id, "fd": number}))
    }

    fn remove(&self, id: i64, fd: Option<i64>) -> Result<Value, QmpError> {
        let mut sets = self.lock();
        let before = sets.get(&id).map_or(0, Vec::len);
        if let Some(set) = sets.get_mut(&id) {
            set.retain(|member| fd.is_some_and(|fd| member.number() != fd));
        }
        let after = sets.get(&id).map_or(0, Vec::len);
        if after == 0 {
            sets.remove(&id);
        }
        if before > after {
            return Ok(json!({}));
        }
        let which = match fd {
            Some(fd) => format!("fdset-id:{id}, fd:{fd}"),
            None => format!("fdset-id:{id}"),
        };
        Err(not_found(&which))
    }

    fn describe(&self) -> Value {
        let sets = self.lock();
        let sets = sets.iter().map(|(id, members)| {
            let members = members.iter().map(|member| {
                let mut described = Map::new();
                described.insert("fd".into(), member.number().into());
                if let Some(opaque) = &member.opaque {
                    described.insert("opaque".into(), opaque.clone().into());
                }
                Value::Object(described)
            });
            json!({"fdset-id": id, "fds": members.collect::<Vec<_>>()})
        });
        sets.collect()
    }
}

fn not_found(name: &str) -> QmpError {
    QmpError::generic(format!("File descriptor named '{name}' not found"))
}

/// Descriptors of one connection: those that have come, and those that are kept by name.
#[derive(Default)]
pub(crate) struct Passed {
    arrived: RefCell<Vec<OwnedFd>>,
    named: RefCell<BTreeMap<String, OwnedFd>>,
}

impl Passed {
    /// Notes descriptors that came with some bytes. Those that came before and that no command took
    /// are closed: their command did not want them.
    pub fn arrive(&self, descriptors: Vec<OwnedFd>) {
        if !descriptors.is_empty() {
            self.arrived.replace(descriptors);
        }
    }

    fn take_arrived(&self) -> Result<OwnedFd, QmpError> {
        let mut arrived = self.arrived.borrow_mut();
        if arrived.is_empty() {
            let text = "No file descriptor supplied via SCM_RIGHTS";
            return Err(QmpError::generic(text));
        }
        Ok(arrived.remove(0))
    }
}

/// Descriptors that a command can use.
pub struct Descriptors<'a> {
    pub(crate) passed: &'a Passed,
    pub(crate) sets: &'a FdSets,
}

impl Descriptors<'_> {
    /// Takes the descriptor that this connection keeps by a name.
    ///
    /// # Errors
    /// There is none.
    pub fn take(&self, name: &str) -> Result<OwnedFd, QmpError> {
        let taken = self.passed.named.borrow_mut().remove(name);
        taken.ok_or_else(|| not_found(name))
    }

    /// The sets of all connections.
    pub fn sets(&self) -> &FdSets {
        self.sets
    }

    /// Executes a command on descriptors; `None` if it is none of those.
    pub(crate) fn execute(
        &self,
        name: &str,
        arguments: &Map<String, Value>,
    ) -> Option<Result<Value, QmpError>> {
        let text = |name: &str| arguments.get(name).and_then(Value::as_str);
        let number = |name: &str| arguments.get(name).and_then(Value::as_i64);
        Some(match name {
            "getfd" => self.keep(text("fdname")?),
            "closefd" => self.take(text("fdname")?).map(|_closed| json!({})),
            "add-fd" => self.passed.take_arrived().and_then(|fd| {
                let opaque = text("opaque").map(str::to_string);
                self.sets.add(fd, number("fdset-id"), opaque)
            }),
            "remove-fd" => self.sets.remove(number("fdset-id")?, number("fd")),
            "query-fdsets" => Ok(self.sets.describe()),
            _ => return None,
        })
    }

    fn keep(&self, name: &str) -> Result<Value, QmpError> {
        let fd = self.passed.take_arrived()?;
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            let text = "Parameter 'fdname' expects a name not starting with a digit";
            return Err(QmpError::generic(text));
        }
        let mut named = self.passed.named.borrow_mut();
        if named.len() >= NAMED_MAX && !named.contains_key(name) {
            let text = format!("This connection keeps {NAMED_MAX} file descriptors already");
            return Err(QmpError::generic(text));
        }
        // One that had the name is closed.
        named.insert(name.to_string(), fd);
        Ok(json!({}))
    }
}
