//! Objects on web servers and in object stores.
//!
//! | URL | |
//! | --- | --- |
//! | `http://HOST[:PORT]/PATH`, `https://…` | any web server that serves ranges |
//! | `s3://BUCKET/NAME` | Amazon S3, and what speaks its protocol at `endpoint` |
//! | `gs://BUCKET/NAME` | Google Cloud Storage |
//! | `az://CONTAINER/NAME` | Azure Blob Storage |
//!
//! [`locate`] turns a URL with its options and the environment into a store and a path in it.
//!
//! May not know: any image format, the command line.

mod credentials;
mod environment;
mod guard;
mod options;
mod store;
mod url;

pub use environment::Environment;
pub use object_store;
pub use options::{Certificates, Login, Retries, StoreOptions};
pub use store::{Location, locate};
pub use url::{ObjectUrl, SCHEMES, Scheme};
