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
    /// The internal snapshot that is shown in the place of its disk.
    #[serde(default)]
    pub snapshot: Option<String>,
    pub offset: u64,
    pub is_read_only: bool,
    /// Options of the transports, in their order.
    pub transports: Vec<serde_json::Value>,
    /// The devices that clients of each see, by options. A server from before these were compared
    /// has none.
    #[serde(default)]
    pub shown: Vec<serde_json::Value>,
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
        if self.snapshot != other.snapshot {
            return Some(
                "of the two, one shows a snapshot, or another one (--snapshot)".to_string(),
            );
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
        let mut shown = self.shown.iter().zip(&other.shown);
        if let Some(why) = shown.find_map(|(ours, theirs)| difference(ours, theirs)) {
            return Some(why);
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

/// The difference that guests would notice: an option that both servers know has another value.
fn difference(ours: &serde_json::Value, theirs: &serde_json::Value) -> Option<String> {
    let (ours, theirs) = (ours.as_object()?, theirs.as_object()?);
    let differs = |name: &&String| theirs.get(*name).is_some_and(|value| value != &ours[*name]);
    let name = ours.keys().find(differs)?;
    Some(format!(
        "guests would see another device: --{name} is {}, and the running server's is {}",
        theirs[name], ours[name]
    ))
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
            snapshot: None,
            offset: 0,
            is_read_only: false,
            transports: vec![serde_json::json!({"nbd": "/a"})],
            shown: vec![serde_json::json!({"serial": "a", "queues": 8})],
        };
        assert_eq!(ours.refusal(&ours.clone()), None);
        let refused = |change: fn(&mut Terms)| {
            let mut other = ours.clone();
            change(&mut other);
            ours.refusal(&other).expect("a refusal")
        };
        assert!(refused(|it| it.image = ImageName::File(1, 3)).contains("another image"));
        assert!(refused(|it| it.image = ImageName::Name(String::new())).contains("another"));
        assert!(refused(|it| it.snapshot = Some(String::new())).contains("--snapshot"));
        assert!(refused(|it| it.offset = 512).contains("from byte 512"));
        assert!(refused(|it| it.is_read_only = true).contains("--read-only"));
        assert!(refused(|it| it.transports.clear()).contains("/a"));
        let shows = |value| move |it: &mut Terms| it.shown = vec![value];
        let mut other = ours.clone();
        shows(serde_json::json!({"serial": "b", "queues": 8}))(&mut other);
        let words = "guests would see another device: --serial is \"b\", and the running server's \
                     is \"a\"";
        assert_eq!(ours.refusal(&other).as_deref(), Some(words));
        // Servers of other versions compare more, or less.
        shows(serde_json::json!({"serial": "a", "color": "red"}))(&mut other);
        assert_eq!(ours.refusal(&other), None);
        let mut older = serde_json::to_value(&ours).unwrap();
        older.as_object_mut().unwrap().remove("shown");
        let older: Terms = serde_json::from_value(older).unwrap();
        assert_eq!((ours.refusal(&older), older.refusal(&ours)), (None, None));
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
