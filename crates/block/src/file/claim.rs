//! Claims on files: the permissions that a program holds and those that it shares, as in QEMU.
//!
//! Pure. The claim that each use of a file needs is decided here; publishing it to other processes
//! is the driver's task (for host files: locks on single bytes, `hostfile/src/lock.rs`). The table
//! of claims with their reasons is in `docs/locking.md`.

use std::fmt;

/// A permission of QEMU's block layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Consistent reads: writes of others are seen whole and in order.
    ConsistentRead,
    /// Writing bytes.
    Write,
    /// Writing the bytes that are there already.
    WriteUnchanged,
    /// Changing the length of the file.
    Resize,
}

impl Permission {
    /// All permissions, in the order of their bits.
    pub const ALL: [Permission; 4] = [
        Permission::ConsistentRead,
        Permission::Write,
        Permission::WriteUnchanged,
        Permission::Resize,
    ];

    /// The number of its bit, and of its byte among those that are locked.
    pub const fn index(self) -> u32 {
        match self {
            Permission::ConsistentRead => 0,
            Permission::Write => 1,
            Permission::WriteUnchanged => 2,
            Permission::Resize => 3,
        }
    }

    /// Its name in QEMU's messages.
    pub const fn name(self) -> &'static str {
        match self {
            Permission::ConsistentRead => "consistent read",
            Permission::Write => "write",
            Permission::WriteUnchanged => "write unchanged",
            Permission::Resize => "resize",
        }
    }

    /// The act that it permits, as a verb phrase for messages: "write to it".
    const fn deed(self) -> &'static str {
        match self {
            Permission::ConsistentRead => "read it",
            Permission::Write => "write to it",
            Permission::WriteUnchanged => "rewrite it",
            Permission::Resize => "change its length",
        }
    }
}

/// A set of permissions.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Permissions(u8);

impl Permissions {
    /// No permission.
    pub const NONE: Permissions = Permissions(0);
    /// Every permission.
    pub const ALL: Permissions = Permissions(0b1111);

    /// The set with `permission`.
    #[must_use]
    pub const fn with(self, permission: Permission) -> Permissions {
        Permissions(self.0 | 1 << permission.index())
    }

    /// The set without `permission`.
    #[must_use]
    pub const fn without(self, permission: Permission) -> Permissions {
        Permissions(self.0 & !(1 << permission.index()))
    }

    /// Whether `permission` is in the set.
    pub const fn contains(self, permission: Permission) -> bool {
        self.0 & 1 << permission.index() != 0
    }

    /// Those that are not in the set.
    #[must_use]
    pub const fn others(self) -> Permissions {
        Permissions(Permissions::ALL.0 & !self.0)
    }

    /// The permissions that are in either set.
    #[must_use]
    pub const fn union(self, other: Permissions) -> Permissions {
        Permissions(self.0 | other.0)
    }

    /// The set of these bits, one for each permission by its index; others are ignored.
    pub const fn from_bits(bits: u8) -> Permissions {
        Permissions(bits & Permissions::ALL.0)
    }

    /// The set as bits, one for each permission by its index.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The permissions that are in both sets.
    #[must_use]
    pub const fn intersection(self, other: Permissions) -> Permissions {
        Permissions(self.0 & other.0)
    }

    /// The members, in the order of their bits.
    pub fn iter(self) -> impl Iterator<Item = Permission> {
        let members = Permission::ALL.into_iter();
        members.filter(move |permission| self.contains(*permission))
    }
}

impl fmt::Debug for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// The permissions that the user of a file holds, and those that it shares with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Permissions that the user of the file holds.
    pub held: Permissions,
    /// Permissions shared with others.
    pub shared: Permissions,
}

/// Sharing mode of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Sharing {
    /// Shares what the format permits: reading only for a qcow2 image, everything for a raw one, as
    /// QEMU's tools do.
    #[default]
    AsFormat,
    /// `AsFormat`, but with the length of a raw image fixed: for servers, which have announced its
    /// size to their clients.
    FixedLength,
    /// Shares neither writing nor resizing of any file of the image, whatever its format: for
    /// copies, which must be consistent, and their targets. QEMU's `convert` opens its sources this
    /// way.
    Frozen,
    /// Shares everything, so reads may be inconsistent (QEMU: `force-share`, `-U`). Read-only use.
    Forced,
}

const READ: Permissions = Permissions::NONE.with(Permission::ConsistentRead);
const CHANGE: Permissions = READ.with(Permission::Write).with(Permission::Resize);
const ALL_BUT_RESIZE: Permissions = Permissions::ALL.without(Permission::Resize);
const ALL_BUT_CHANGE: Permissions = ALL_BUT_RESIZE.without(Permission::Write);

impl Claim {
    /// Holds nothing and shares everything.
    pub const NONE: Claim = Claim {
        held: Permissions::NONE,
        shared: Permissions::ALL,
    };

    /// Reads the file and shares everything.
    pub const FORCED: Claim = Claim {
        held: READ,
        shared: Permissions::ALL,
    };

    /// Reads only the metadata of a qcow2 image.
    pub const DESCRIBE: Claim = Claim {
        held: Permissions::NONE,
        shared: ALL_BUT_CHANGE,
    };

    /// The file of a qcow2 image. Its metadata is cached in memory, so no other process may change
    /// it.
    pub const fn qcow2(writable: bool) -> Claim {
        Claim {
            held: if writable { CHANGE } else { READ },
            shared: ALL_BUT_CHANGE,
        }
    }

    /// The external data file of a qcow2 image. Others may write to it at their own risk.
    pub const fn data_file(writable: bool) -> Claim {
        Claim {
            held: if writable { CHANGE } else { READ },
            shared: ALL_BUT_RESIZE,
        }
    }

    /// The claim of a raw image, in this sharing mode.
    pub const fn raw(writable: bool, sharing: Sharing) -> Claim {
        Claim {
            held: match (writable, sharing) {
                (true, Sharing::Frozen) => CHANGE,
                (true, _) => READ.with(Permission::Write),
                (false, _) => READ,
            },
            shared: match sharing {
                Sharing::FixedLength => ALL_BUT_RESIZE,
                Sharing::Frozen => ALL_BUT_CHANGE,
                Sharing::AsFormat | Sharing::Forced => Permissions::ALL,
            },
        }
    }

    /// An image between the base and the top of a commit: its contents change with the base, so no
    /// other process may rely on them.
    pub const BETWEEN: Claim = Claim {
        held: READ,
        shared: ALL_BUT_CHANGE.without(Permission::ConsistentRead),
    };

    /// A raw image under creation.
    pub const CREATE_RAW: Claim = Claim {
        held: Permissions::NONE
            .with(Permission::Write)
            .with(Permission::Resize),
        shared: ALL_BUT_RESIZE,
    };

    /// The claim that holds what either holds, and shares what both share.
    #[must_use]
    pub const fn joined(self, other: Claim) -> Claim {
        Claim {
            held: self.held.union(other.held),
            shared: self.shared.intersection(other.shared),
        }
    }
}

/// Whether a claim is published to other processes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Protection {
    /// The claim is published, or locking is off, or no other process can reach the file.
    Claimed,
    /// The file system has no locks and the file is unprotected; with the system's reason.
    Unprotected(String),
}

/// The side of a conflict between two claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This process holds a permission that the other does not share.
    Held,
    /// The other process holds a permission that this one does not share.
    Shared,
}

/// A conflict between two claims on one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The file, as the user named it.
    pub file: String,
    /// Purpose of the file, with a colon at its end; empty for an image itself.
    pub context: String,
    /// The permission in conflict.
    pub permission: Permission,
    /// The side that holds it.
    pub side: Side,
    /// The programs that hold the file, if known: "qemu-nbd (pid 17)".
    pub holders: Vec<String>,
}

impl fmt::Display for Conflict {
    /// Writes QEMU's two lines, then the holders.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = match self.side {
            Side::Held => "",
            Side::Shared => "shared ",
        };
        write!(
            f,
            "{}Failed to get {shared}\"{}\" lock\nIs another process using the image [{}]?",
            self.context,
            self.permission.name(),
            self.file
        )?;
        if self.holders.is_empty() {
            return Ok(());
        }
        write!(f, "\nIt is used by {}, which ", self.holders.join(", "))?;
        match self.side {
            Side::Held => write!(f, "holds an exclusive {} lock", self.permission.name()),
            Side::Shared => write!(f, "may {}", self.permission.deed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether two claims are compatible.
    fn go_together(one: Claim, two: Claim) -> bool {
        let denied = |one: Claim, two: Claim| one.held.intersection(two.shared.others());
        denied(one, two) == Permissions::NONE && denied(two, one) == Permissions::NONE
    }

    #[test]
    fn nobody_shares_a_qcow2_image_that_is_written() {
        let writer = Claim::qcow2(true);
        let claims = [
            (Claim::qcow2(true), false),
            (Claim::qcow2(false), false),
            (Claim::DESCRIBE, false),
            (Claim::CREATE_RAW, false),
            (Claim::raw(true, Sharing::AsFormat), false),
            (Claim::raw(false, Sharing::AsFormat), true),
            (Claim::raw(false, Sharing::FixedLength), false),
            (Claim::FORCED, true),
            (Claim::NONE, true),
        ];
        for (claim, expected) in claims {
            assert_eq!(go_together(writer, claim), expected, "{claim:?}");
        }
    }

    #[test]
    fn readers_share_with_readers_and_raw_writers_with_all_that_leave_the_length() {
        assert!(go_together(Claim::qcow2(false), Claim::qcow2(false)));
        assert!(!go_together(Claim::qcow2(false), Claim::CREATE_RAW));
        let raw = Claim::raw(true, Sharing::AsFormat);
        assert!(go_together(raw, raw));
        assert!(go_together(raw, Claim::CREATE_RAW));
        assert!(!go_together(
            Claim::raw(true, Sharing::FixedLength),
            Claim::CREATE_RAW
        ));
        assert!(!go_together(raw, Claim::qcow2(false)));
        assert!(go_together(raw, Claim::data_file(true)));
        assert!(!go_together(Claim::data_file(true), Claim::data_file(true)));
    }

    #[test]
    fn sets_are_sets() {
        let set = Permissions::NONE
            .with(Permission::Write)
            .with(Permission::Resize);
        assert_eq!(set.without(Permission::Write).iter().count(), 1);
        assert_eq!(format!("{set:?}"), "{Write, Resize}");
        assert_eq!(set.union(set.others()), Permissions::ALL);
        let joined = Claim::qcow2(false).joined(Claim::CREATE_RAW);
        assert_eq!(joined, Claim::qcow2(true));
    }

    #[test]
    fn a_conflict_is_reported_in_qemus_words_and_names_the_holders() {
        let mut conflict = Conflict {
            file: "a.qcow2".to_string(),
            context: String::new(),
            permission: Permission::Write,
            side: Side::Shared,
            holders: Vec::new(),
        };
        let qemu =
            "Failed to get shared \"write\" lock\nIs another process using the image [a.qcow2]?";
        assert_eq!(conflict.to_string(), qemu);
        conflict.holders = vec!["qemu-nbd (pid 17)".to_string(), "x (pid 3)".to_string()];
        let more = "\nIt is used by qemu-nbd (pid 17), x (pid 3), which may write to it";
        assert_eq!(conflict.to_string(), format!("{qemu}{more}"));
        conflict.side = Side::Held;
        let text = conflict.to_string();
        assert!(
            text.ends_with("x (pid 3), which holds an exclusive write lock"),
            "{text}"
        );
    }
}
