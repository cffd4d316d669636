//! Planned handover: a server that is started with `--handover` beside a running one takes over its
//! sockets, connections and image, so that a new program can be put in place under a running guest.
//! docs/vhost-user.md says what the two say to each other, and what happens when one of them ends.

mod predecessor;
mod successor;
mod wire;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use cowslip::file::{Claim, FileId, Permissions};
use serde::{Deserialize, Serialize};

pub use predecessor::{Desk, Door};
pub use successor::Taken;

use super::transport::Transport;

/// Version of the messages. Another one is refused.
const VERSION: u32 = 1;

/// The path of the socket on which a server waits for its successor: beside that of its last
/// transport that has one.
pub fn door_path(transports: &[&dyn Transport]) -> Option<PathBuf> {
    let mut sockets = transports.iter().rev().filter_map(|it| it.door());
    let socket = sockets.next()?;
    let mut path = OsString::from(socket);
    path.push(".handover");
    Some(PathBuf::from(path))
}

/// Terms that both servers must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Terms {
    /// Device and inode of the image's file, if it is one of the host; else its name.
    pub image: ImageName,
    pub offset: u64,
    pub is_read_only: bool,
    /// Options of the transports, in their order.
    pub transports: Vec<serde_json::Value>,
}

/// The identity of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageName {
    File(u64, u64),
    Name(String),
}

impl ImageName {
    /// The identity of the image of this name, to be asked before the sandbox closes.
    pub fn of(filename: &str) -> ImageName {
        use std::os::unix::fs::MetadataExt;
        match Path::new(filename).metadata() {
            Ok(file) => ImageName::File(file.dev(), file.ino()),
            Err(_) => ImageName::Name(filename.to_string()),
        }
    }
}

impl Terms {
    /// Why a successor with other terms is refused, if there is a reason.
    fn refusal(&self, other: &Terms) -> Option<String> {
        if self.image != other.image {
            return Some("it serves another image".to_string());
        }
        if self.offset != other.offset {
            let (ours, theirs) = (self.offset, other.offset);
            return Some(format!(
                "it serves the image from byte {theirs} on, not from {ours}"
            ));
        }
        if self.is_read_only != other.is_read_only {
            return Some("of the two, one refuses writes (--read-only)".to_string());
        }
        if self.transports != other.transports {
            let list = |all: &[serde_json::Value]| {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                all.join(" ")
            };
            return Some(format!(
                "it serves {}, and the running server {}",
                list(&other.transports),
                list(&self.transports)
            ));
        }
        None
    }
}

/// State of a server at rest, for its successor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct State {
    /// Claims on the image's files: device, inode, permissions that are held and shared.
    claims: Vec<(u64, u64, u8, u8)>,
    /// Size and format of the image.
    size: u64,
    format: String,
    /// State of each transport, with the number of its descriptors.
    parts: Vec<(serde_json::Value, usize)>,
}

impl State {
    fn claims_of(claims: &[(FileId, Claim)]) -> Vec<(u64, u64, u8, u8)> {
        let claims = claims.iter().map(|(FileId(device, inode), claim)| {
            let Claim { held, shared } = claim;
            (*device, *inode, held.bits(), shared.bits())
        });
        claims.collect()
    }

    fn claims(&self) -> Vec<(FileId, Claim)> {
        let claims = self.claims.iter().map(|&(device, inode, held, shared)| {
            let (held, shared) = (Permissions::from_bits(held), Permissions::from_bits(shared));
            (FileId(device, inode), Claim { held, shared })
        });
        claims.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_terms_are_refused_with_their_reason() {
        let ours = Terms {
            image: ImageName::File(1, 2),
            offset: 0,
            is_read_only: false,
            transports: vec![serde_json::json!({"nbd": "/a"})],
        };
        assert_eq!(ours.refusal(&ours.clone()), None);
        let refused = |change: fn(&mut Terms)| {
            let mut other = ours.clone();
            change(&mut other);
            ours.refusal(&other).expect("a refusal")
        };
        assert!(refused(|it| it.image = ImageName::File(1, 3)).contains("another image"));
        assert!(refused(|it| it.image = ImageName::Name(String::new())).contains("another"));
        assert!(refused(|it| it.offset = 512).contains("from byte 512"));
        assert!(refused(|it| it.is_read_only = true).contains("--read-only"));
        assert!(refused(|it| it.transports.clear()).contains("/a"));
    }

    #[test]
    fn claims_arrive_as_they_were_sent() {
        let claims = vec![
            (FileId(1, 2), Claim::qcow2(true)),
            (FileId(3, 4), Claim::NONE),
        ];
        let state = State {
            claims: State::claims_of(&claims),
            size: 0,
            format: String::new(),
            parts: Vec::new(),
        };
        assert_eq!(state.claims(), claims);
    }
}
