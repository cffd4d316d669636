//! [`Upload`]: a new object, uploaded while it comes into being.
//!
//! The object is cut into parts of one length, which are stored several at a time. The first part
//! stays in memory until the end and is stored last: a file's header is known then. Nobody can read
//! the object before all parts are there and the store has put them together; what is given up
//! leaves no object, and no parts where the store removes them when it is asked to.
//!
//! Then the object is looked at: its length and its ETag, and if that is wanted all of its bytes,
//! whose digests are compared. An object that differs is removed.
//!
//! An object that exists is not replaced. The name is looked at before the first part and before
//! the end, and S3 and Azure's store are asked to put the parts together only if there is none
//! (`guard.rs`). Google's takes no condition with parts, Azure's none with a signature by the
//! account's key: of two uploads that end at the same moment one may replace the other there.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cowslip_block::{Error, Job, Result};
use futures_util::future::select;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, MultipartId, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutOptions, PutPayload,
};
use sha2::{Digest, Sha256};

use crate::ending;
use crate::failure::reason;
use crate::runtime::run;
use crate::store::Location;

/// Shortest part in bytes: stores want 5 MiB.
pub const PART_BYTES_MIN: usize = 8 << 20;
/// Parts of an object: stores take 10000, and an estimate of its length may be too low.
const PARTS: u64 = 9000;
/// Memory for parts that are being stored, in bytes, unless two of them are longer.
const IN_FLIGHT_BYTES: usize = 64 << 20;
/// Parts that are read back at a time.
const READ_BACK: usize = 4;
/// The longest wait for parts under way before an upload is given up. Those that are stored later
/// would stay.
const ABANDON_WAIT: Duration = Duration::from_secs(5);

/// The length of the parts of an object of up to `bytes` bytes.
pub fn part_bytes_for(bytes: u64) -> usize {
    let least = bytes.div_ceil(PARTS).next_multiple_of(1 << 20);
    usize::try_from(least).map_or(usize::MAX, |least| least.max(PART_BYTES_MIN))
}

/// A store's requests for uploads in parts.
#[derive(Clone)]
pub struct Multipart(pub Arc<dyn MultipartStore>);

cowslip_block::debug_by_name!(Multipart);

/// An object that was uploaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// Length in bytes.
    pub bytes: u64,
    /// Its ETag, if the store has some.
    pub e_tag: Option<String>,
}

/// How an object that was uploaded is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verification {
    /// Its length and its ETag.
    Presence,
    /// All of its bytes are read, too.
    Bytes,
}

/// A part's length and digest.
struct Sent {
    bytes: u64,
    digest: [u8; 32],
}

impl Sent {
    fn of(part: &[u8]) -> Sent {
        Sent {
            bytes: part.len() as u64,
            digest: Sha256::digest(part).into(),
        }
    }
}

/// An object whose parts the store was asked to put together.
struct Ended {
    e_tag: Option<String>,
    sent: Vec<Sent>,
    /// The failure of the last request, which may have been done all the same: the object that is
    /// there is this one, or another program's.
    doubt: Option<Error>,
}

type PartUpload = Pin<Box<dyn Future<Output = Result<(usize, PartId)>> + Send>>;

/// An object that comes into being. It has to be finished or abandoned.
pub struct Upload {
    target: Target,
    multipart: Arc<dyn MultipartStore>,
    part_bytes: usize,
    in_flight: usize,
    /// The store's name for the upload, once there is a second part.
    id: Option<MultipartId>,
    /// The first part, when it is full.
    first: Option<Vec<u8>>,
    filling: Vec<u8>,
    /// All parts after the first one.
    sent: Vec<Sent>,
    stored: Vec<(usize, PartId)>,
    under_way: FuturesUnordered<PartUpload>,
}

/// The object's place.
#[derive(Clone)]
struct Target {
    store: Arc<dyn ObjectStore>,
    path: Path,
    /// For messages.
    name: String,
}

impl Target {
    fn failed(&self, verb: &str, why: impl fmt::Display) -> Error {
        let context = format!("Could not {verb} '{}'", self.name);
        Error::io(context, std::io::Error::other(why.to_string()))
    }

    /// Runs a request on the thread for them.
    async fn run<T: Send + 'static>(
        &self,
        verb: &str,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        let begun = run(ending::within(request)).map_err(|error| self.failed(verb, error))?;
        let ended = begun.await.ok_or_else(|| self.failed(verb, ending::WHY))?;
        ended.map_err(|error| match error {
            object_store::Error::AlreadyExists { .. }
            | object_store::Error::Precondition { .. } => self.exists(),
            error => self.failed(verb, reason(&error)),
        })
    }

    fn exists(&self) -> Error {
        Error::invalid(format!(
            "'{}' exists already, and images may depend on it: choose another name, or remove it first",
            self.name
        ))
    }

    async fn look(&self) -> Result<Option<ObjectMeta>> {
        let (store, path) = (Arc::clone(&self.store), self.path.clone());
        let found = async move {
            match store.head(&path).await {
                Ok(found) => Ok(Some(found)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.run("look at", found).await
    }

    async fn refuse_existing(&self) -> Result<()> {
        match self.look().await? {
            Some(_) => Err(self.exists()),
            None => Ok(()),
        }
    }

    /// The digest of a part of the object, if it has this ETag.
    async fn digest(&self, e_tag: Option<String>, range: Range<u64>) -> Result<[u8; 32]> {
        let (store, path) = (Arc::clone(&self.store), self.path.clone());
        let digest = async move {
            let options = GetOptions {
                if_match: e_tag.filter(|tag| !tag.starts_with("W/")),
                range: Some(GetRange::Bounded(range.clone())),
                ..GetOptions::default()
            };
            let mut stream = store.get_opts(&path, options).await?.into_stream();
            let mut left = range.end - range.start;
            let mut hash = Sha256::new();
            // A body that is longer than its range has another digest.
            while let Some(piece) = stream.try_next().await? {
                hash.update(&piece);
                left = match left.checked_sub(piece.len() as u64) {
                    Some(left) => left,
                    None => break,
                };
            }
            Ok(hash.finalize().into())
        };
        self.run("read back", digest).await
    }

    async fn verify(
        &self,
        ended: &Ended,
        (verification, job): (Verification, &Job),
    ) -> Result<Uploaded> {
        let bytes = ended.sent.iter().map(|part| part.bytes).sum();
        let found = self.look().await?;
        let found = found.ok_or_else(|| self.failed("verify", "it is not there"))?;
        if ended.e_tag.is_some() && found.e_tag.is_some() && ended.e_tag != found.e_tag {
            let why = "another program has replaced it meanwhile";
            return Err(self.failed("verify", why));
        }
        let compared = match verification {
            _ if found.size != bytes => Err(self.failed(
                "verify",
                format!("it has {} bytes, and {bytes} were stored", found.size),
            )),
            Verification::Presence if ended.doubt.is_none() => Ok(()),
            _ => self.read_back(&found, &ended.sent, job).await,
        };
        match compared {
            Ok(()) => Ok(Uploaded {
                bytes,
                e_tag: found.e_tag,
            }),
            // It may be another program's.
            Err(error) if ended.doubt.is_some() => Err(error),
            Err(Error::Cancelled) => self.remove(&found).await.and(Err(Error::Cancelled)),
            Err(error) => Err(match self.remove(&found).await {
                Ok(()) => Error::invalid(format!("{error}; it is removed")),
                Err(left) => Error::invalid(format!("{error}; besides, {left}")),
            }),
        }
    }

    /// Reads all parts and compares their digests.
    async fn read_back(&self, found: &ObjectMeta, parts: &[Sent], job: &Job) -> Result<()> {
        job.expect(found.size);
        let mut start = 0;
        let reads = parts.iter().map(|part| {
            let range = start..start + part.bytes;
            start = range.end;
            async move {
                job.begin(part.bytes).await?;
                let digest = self.digest(found.e_tag.clone(), range.clone()).await?;
                job.done(part.bytes);
                match digest == part.digest {
                    true => Ok(()),
                    false => Err(self.failed(
                        "verify",
                        format!(
                            "other bytes than those that were stored are read back from {} to {}",
                            range.start, range.end
                        ),
                    )),
                }
            }
        });
        let reads = futures_util::stream::iter(reads).buffer_unordered(READ_BACK);
        reads.try_collect().await
    }

    /// Removes the object, unless another program has put its own in the place of `ours` meanwhile.
    async fn remove(&self, ours: &ObjectMeta) -> Result<()> {
        let found = self.look().await?;
        if found.is_some_and(|found| found.e_tag != ours.e_tag) {
            let why = "another program has replaced it meanwhile";
            return Err(self.failed("remove", why));
        }
        let (store, path) = (Arc::clone(&self.store), self.path.clone());
        self.run("remove", async move { store.delete(&path).await })
            .await
    }
}

impl Upload {
    /// Begins with an object whose parts have this length.
    ///
    /// # Errors
    /// There is an object of this name; the store takes no parts; the store's.
    pub async fn begin(location: &Location, name: &str, part_bytes: usize) -> Result<Upload> {
        let Some(Multipart(multipart)) = location.multipart.clone() else {
            return Err(Error::invalid(format!(
                "'{name}' is on a server that takes no uploads: s3://, gs:// and az:// do"
            )));
        };
        let target = Target {
            store: Arc::clone(&location.store),
            path: location.path.clone(),
            name: name.to_string(),
        };
        target.refuse_existing().await?;
        Ok(Upload {
            target,
            multipart,
            part_bytes,
            in_flight: (IN_FLIGHT_BYTES / part_bytes).max(2),
            id: None,
            first: None,
            filling: Vec::new(),
            sent: Vec::new(),
            stored: Vec::new(),
            under_way: FuturesUnordered::new(),
        })
    }

    /// Takes the object's next bytes. Waits for the store when enough is under way.
    ///
    /// # Errors
    /// The store's. The upload has to be abandoned then.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = self.part_bytes - self.filling.len();
            let (now, later) = rest.split_at(room.min(rest.len()));
            self.filling.extend_from_slice(now);
            rest = later;
            if self.filling.len() == self.part_bytes {
                let part = std::mem::take(&mut self.filling);
                self.add(part).await?;
            }
        }
        Ok(())
    }

    /// Replaces the first bytes by `head`, stores what is left, and looks at the object as
    /// `verification` says, as a part of the job.
    ///
    /// # Errors
    /// There is an object of this name by now; the store's; the object differs from what was sent.
    /// There is none, then. [`Error::Cancelled`]: likewise.
    ///
    /// # Panics
    /// If `head` is longer than what was pushed, or than a part.
    pub async fn finish(
        mut self,
        head: &[u8],
        (verification, job): (Verification, &Job),
    ) -> Result<Uploaded> {
        let ended = match self.end(head).await {
            Ok(ended) => ended,
            Err(error) => {
                // The first failure is the one to know.
                drop(self.abandon().await);
                return Err(error);
            }
        };
        let verified = self.target.verify(&ended, (verification, job)).await;
        match (ended.doubt, verified) {
            (Some(doubt), Err(_)) => {
                drop(self.abandon().await);
                Err(doubt)
            }
            (_, verified) => verified,
        }
    }

    /// Gives the upload up: there is no object, and the store forgets the parts that it has.
    ///
    /// # Errors
    /// The store keeps them, and their space, until its own rules remove them.
    pub async fn abandon(mut self) -> Result<()> {
        let Some(id) = self.id.take() else {
            return Ok(());
        };
        let under_way = std::mem::take(&mut self.under_way);
        let ended = Box::pin(under_way.for_each(|_| std::future::ready(())));
        let timeout = Box::pin(cowslip_queue::sleep(ABANDON_WAIT));
        drop(select(ended, timeout).await);
        let (multipart, path) = (Arc::clone(&self.multipart), self.target.path.clone());
        let aborted = async move { multipart.abort_multipart(&path, &id).await };
        self.target.run("remove the parts of", aborted).await
    }

    /// Adds a full part, or the last one.
    async fn add(&mut self, part: Vec<u8>) -> Result<()> {
        if self.first.is_none() {
            self.first = Some(part);
            return Ok(());
        }
        self.sent.push(Sent::of(&part));
        self.store(self.sent.len(), part).await
    }

    /// Begins to store a part, when less is under way than may be.
    async fn store(&mut self, number: usize, part: Vec<u8>) -> Result<()> {
        let id = match self.id.clone() {
            Some(id) => id,
            None => {
                let (multipart, path) = (Arc::clone(&self.multipart), self.target.path.clone());
                let create = async move { multipart.create_multipart(&path).await };
                let id = self.target.run("begin the upload of", create).await?;
                self.id.insert(id).clone()
            }
        };
        while self.under_way.len() >= self.in_flight {
            self.wait_for_one().await?;
        }
        let (multipart, target) = (Arc::clone(&self.multipart), self.target.clone());
        self.under_way.push(Box::pin(async move {
            let path = target.path.clone();
            let payload = PutPayload::from(part);
            let put = async move { multipart.put_part(&path, &id, number, payload).await };
            let stored = target.run("store a part of", put).await?;
            Ok((number, stored))
        }));
        // Requests begin when they are polled.
        while let Some(Some(stored)) = self.under_way.next().now_or_never() {
            self.stored.push(stored?);
        }
        Ok(())
    }

    async fn wait_for_one(&mut self) -> Result<()> {
        if let Some(stored) = self.under_way.next().await {
            self.stored.push(stored?);
        }
        Ok(())
    }

    /// Stores what is left.
    async fn end(&mut self, head: &[u8]) -> Result<Ended> {
        let rest = std::mem::take(&mut self.filling);
        let Some(mut first) = self.first.take() else {
            return self.put_whole(head, rest).await;
        };
        if !rest.is_empty() {
            self.sent.push(Sent::of(&rest));
            self.store(self.sent.len(), rest).await?;
        }
        first[..head.len()].copy_from_slice(head);
        self.sent.insert(0, Sent::of(&first));
        self.store(0, first).await?;
        while !self.under_way.is_empty() {
            self.wait_for_one().await?;
        }
        self.target.refuse_existing().await?;
        let mut stored = std::mem::take(&mut self.stored);
        stored.sort_by_key(|(number, _)| *number);
        let parts: Vec<PartId> = stored.into_iter().map(|(_, part)| part).collect();
        assert_eq!(parts.len(), self.sent.len(), "every part is stored once");
        let (multipart, path) = (Arc::clone(&self.multipart), self.target.path.clone());
        let id = self.id.clone().unwrap_or_default();
        let complete = async move { multipart.complete_multipart(&path, &id, parts).await };
        let completed = self.target.run("complete", complete).await;
        let sent = std::mem::take(&mut self.sent);
        Ok(match completed {
            Ok(done) => Ended {
                e_tag: done.e_tag,
                sent,
                doubt: None,
            },
            // The answer may be lost of a request that was done.
            Err(error) => match self.target.look().await {
                Ok(Some(found)) => Ended {
                    e_tag: found.e_tag,
                    sent,
                    doubt: Some(error),
                },
                _ => return Err(error),
            },
        })
    }

    /// Stores an object of one part, which the store itself does not put in another's place.
    async fn put_whole(&mut self, head: &[u8], mut whole: Vec<u8>) -> Result<Ended> {
        whole[..head.len()].copy_from_slice(head);
        let sent = vec![Sent::of(&whole)];
        let (store, path) = (Arc::clone(&self.target.store), self.target.path.clone());
        let put = async move {
            let options = PutOptions::from(PutMode::Create);
            store
                .put_opts(&path, PutPayload::from(whole), options)
                .await
        };
        let done = self.target.run("write", put).await?;
        Ok(Ended {
            e_tag: done.e_tag,
            sent,
            doubt: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_all_sizes_have_few_enough_parts() {
        for bytes in [0, 1, 8 << 20, 70 << 30, 71 << 30, 1 << 40, 5 << 40] {
            let part = part_bytes_for(bytes) as u64;
            assert!(bytes.div_ceil(part) <= PARTS, "{bytes}");
            assert!(part.is_multiple_of(1 << 20), "{bytes}");
            assert!(part == PART_BYTES_MIN as u64 || bytes > 70 << 30, "{bytes}");
        }
    }
}
