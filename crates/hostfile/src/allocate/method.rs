//! Methods of allocating space, and the choice among them by the abilities of a file system. Pure.

use super::Plan;
use crate::{Error, Result};

/// Bytes of one write, if nobody says. Of twice as many each took five times as long on ext4 and
/// XFS (Linux 6.18, docs/allocation.md), and pieces of 4 and 8 KiB took two to four times as long.
const CHUNK_BYTES: usize = 1 << 20;

/// The means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The system call: the file system notes that the space is taken.
    Fallocate,
    /// libc's call of that name, whatever it makes of it.
    PosixFallocate(LibraryMakes),
    /// The file is mapped and filled with zeroes, which are written back.
    Mmap,
    /// Zeroes are written, one piece after the other.
    Write {
        /// Bytes of one write.
        chunk_bytes: usize,
    },
}

impl Method {
    /// Written pieces of the usual size.
    pub const WRITE: Method = Method::Write {
        chunk_bytes: CHUNK_BYTES,
    };

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Method::Fallocate => "fallocate",
            Method::PosixFallocate(_) => "posix_fallocate",
            Method::Mmap => "mmap",
            Method::Write { .. } => "write",
        }
    }
}

/// Behaviour of libc's `posix_fallocate` on a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryMakes {
    /// The kernel's call.
    KernelCall,
    /// A write of one byte a block.
    Writes,
    /// An error: there is no such call, and this libc does not write in its place.
    Nothing,
    /// The call could not be tried.
    Unknown,
}

/// Whether written zeroes have space of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroesTake {
    /// Space, as all data.
    Space,
    /// Less: the file system compresses them, or makes holes of them.
    Less,
}

/// Behaviour of a file system at each call, as a trial on a scratch file has shown it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// `fallocate` succeeds.
    pub fallocate: bool,
    /// Space that `fallocate` allocates is counted as the file's afterwards.
    pub fallocate_takes_space: bool,
    /// `fallocate` works beyond an end of file that stays.
    pub keeps_end: bool,
    /// Behaviour of `posix_fallocate`.
    pub library: LibraryMakes,
    /// Space that written zeroes take.
    pub zeroes: ZeroesTake,
}

/// A method, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The method.
    pub method: Method,
    /// The reason, in words.
    pub because: &'static str,
}

/// The method for a plan on a file system with these abilities: the system call where it takes
/// space, or else written zeroes in large pieces, which is faster than one byte a block.
///
/// # Errors
/// [`Error::Unsupported`] if the end of file is to stay and the file system cannot allocate beyond
/// it.
pub fn choose(abilities: &Abilities, plan: &Plan) -> Result<Chosen> {
    if plan.reaches_beyond_end() && !abilities.keeps_end {
        return Err(Error::Unsupported {
            file: plan.file.name().to_string(),
            feature: "allocating beyond an end of file that stays".into(),
        });
    }
    let chosen = chosen(abilities, plan.reaches_beyond_end());
    let writes = matches!(chosen.method, Method::Write { .. });
    Ok(match plan.hides_holes() && writes {
        true => Chosen {
            method: Method::PosixFallocate(abilities.library),
            because: "the file system does not list the file's holes, and libc's call looks for them by itself",
        },
        false => chosen,
    })
}

fn chosen(abilities: &Abilities, end_stays: bool) -> Chosen {
    let because = |method, because| Chosen { method, because };
    if abilities.fallocate && abilities.fallocate_takes_space {
        let why = "fallocate allocates space without writing";
        return because(Method::Fallocate, why);
    }
    if end_stays {
        let why = "nothing else allocates beyond an end of file that stays";
        return because(Method::Fallocate, why);
    }
    match (abilities.fallocate, abilities.zeroes) {
        (true, ZeroesTake::Less) => because(
            Method::Fallocate,
            "fallocate allocates no space here, and neither do written zeroes, which are compressed",
        ),
        (true, ZeroesTake::Space) => because(
            Method::WRITE,
            "fallocate succeeds but allocates no space; written zeroes do",
        ),
        (false, ZeroesTake::Space) => because(
            Method::WRITE,
            "fallocate is not supported; large writes are faster than those of libc, one byte per block",
        ),
        (false, ZeroesTake::Less) => because(
            Method::WRITE,
            "fallocate is not supported, and written zeroes are stored in less space than their length",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXT4: Abilities = Abilities {
        fallocate: true,
        fallocate_takes_space: true,
        keeps_end: true,
        library: LibraryMakes::KernelCall,
        zeroes: ZeroesTake::Space,
    };
    const EXT3: Abilities = Abilities {
        fallocate: false,
        fallocate_takes_space: false,
        keeps_end: false,
        library: LibraryMakes::Writes,
        ..EXT4
    };

    #[test]
    fn the_call_is_taken_where_it_takes_space() {
        assert_eq!(chosen(&EXT4, false).method, Method::Fallocate);
        let compressing = Abilities {
            zeroes: ZeroesTake::Less,
            ..EXT4
        };
        assert_eq!(chosen(&compressing, false).method, Method::Fallocate);
        assert_eq!(chosen(&EXT3, false).method, Method::WRITE);
    }

    #[test]
    fn a_call_that_only_says_yes_is_not_believed() {
        let pretends = Abilities {
            fallocate_takes_space: false,
            ..EXT4
        };
        assert_eq!(chosen(&pretends, false).method, Method::WRITE);
        assert_eq!(chosen(&pretends, true).method, Method::Fallocate);
        let nothing_helps = Abilities {
            zeroes: ZeroesTake::Less,
            ..pretends
        };
        let chosen = chosen(&nothing_helps, false);
        assert_eq!(chosen.method, Method::Fallocate);
        assert!(chosen.because.contains("neither"));
    }
}
