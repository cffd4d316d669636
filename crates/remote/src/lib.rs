//! Objects on web servers and in object stores, as files that are read; and new ones, uploaded.
//!
//! | URL | |
//! | --- | --- |
//! | `http://HOST[:PORT]/PATH`, `https://…` | any web server that serves ranges |
//! | `s3://BUCKET/NAME` | Amazon S3, and what speaks its protocol at `endpoint` |
//! | `gs://BUCKET/NAME` | Google Cloud Storage |
//! | `az://CONTAINER/NAME` | Azure Blob Storage |
//! | `oci://HOST/REPOSITORY:TAG` | a registry of containers |
//!
//! [`locate`] turns a URL with its options and the environment into a store and a path in it.
//! [`open`] opens an object as a [`cowslip_block::file::BlockFile`]:
//!
//! - Its version is fixed then ([`Version`]); an object that changes afterwards is an error.
//! - It is read in blocks. Those that are wanted together are fetched together (`blocks.rs`), and
//!   those that follow in a sequence ahead of it (`ahead.rs`).
//! - A request that fails is repeated for as long as [`Patience`] says, unless the process was
//!   asked to end ([`end_soon`]).
//! - Blocks stay in memory, or in a directory for all processes of the host ([`CacheDirectory`]).
//!
//! [`Upload`] stores a new object in parts, and looks at it then.
//!
//! May not know: any image format, the command line.

mod ahead;
mod blocks;
mod cache;
mod credentials;
mod defaults;
mod ending;
mod environment;
mod failure;
mod file;
mod guard;
mod memory;
mod name;
mod notice;
mod object;
mod options;
mod prefetch;
mod reach;
mod registry;
mod runtime;
mod store;
mod trace;
mod upload;
mod url;
mod version;

pub use cache::{CacheDirectory, Cached, Verified};
pub use defaults::{CACHE_BYTES, Defaulted, Defaults};
pub use ending::end_soon;
pub use environment::Environment;
pub use failure::reason;
pub use file::{RemoteFile, open};
pub use name::{OPTIONS, RemoteName, Secrets};
pub use notice::{Notice, Notify};
pub use object::{OnFailure, Patience};
pub use object_store;
pub use options::{Certificates, Login, Retries, StoreOptions};
pub use prefetch::{hold, release};
pub use reach::{Reach, Registered, reach};
pub use runtime::{retire, run, run_until_the_end};
pub use store::{Location, locate};
pub use upload::{Multipart, PART_BYTES_MIN, Upload, Uploaded, Verification, part_bytes_for};
pub use url::{ObjectUrl, SCHEMES, Scheme};
pub use version::Version;
