//! `publish -O qcow2`: the disk as one object, a plain qcow2 image, for readers that know no
//! chunks. It is made in the order of its file and uploaded meanwhile, without a file of the host.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cowslip::convert::Sources;
use cowslip::file::Sharing;
use cowslip::file::host::{Aio, FlushPolicy};
use cowslip::image::{Format, Image};
use cowslip::measure::{geometry, measure};
use cowslip::qcow2::create::CreateOptions;
use cowslip::qcow2::stream::{self, Sink, Stored, Streamed};
use cowslip::{Error, Job};
use cowslip_nodes::Destination;
use cowslip_nodes::stores::{Place, place_of_object};
use cowslip_queue::blocking;
use cowslip_remote::{
    PART_BYTES_MIN, StoreOptions, Upload, Uploaded, Verification, part_bytes_for,
};
use serde_json::json;

use super::super::{create, pull};
use super::Args;
use crate::error::CommandError;
use crate::interrupt::{CancelledOnInterrupt, RemovedOnInterrupt};
use crate::open::{self, ImageSpec, OpenSettings, block_on, chosen_snapshot, open_image, workers};
use crate::options;
use crate::output::Program;
use crate::size;

/// The image, in its place.
struct Done {
    made: Streamed,
    placed: Uploaded,
    disk_bytes: u64,
}

/// Runs `publish -O qcow2`.
///
/// # Errors
/// The image's, the store's; options that do not go together.
pub fn published(
    args: &Args,
    (image, name): (&str, &str),
    program: &Program,
) -> Result<(), CommandError> {
    let snapshot = chosen_snapshot(args.snapshot.as_deref(), program)?;
    let shown = args.outcome.job.unless(args.quiet);
    let job = shown.job()?;
    let spec = ImageSpec {
        image_opts: args.image_opts,
        ..ImageSpec::named(image, args.format.as_deref())
    };
    let settings = OpenSettings {
        snapshot,
        sharing: open::sharing(args.force_share, Sharing::Frozen),
        policy: args.trust.backing_policy,
        workers: workers(),
        ..open::settings()
    };
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        let done = copied(args, &image, name, &job).await;
        image.close().await?;
        Ok(done)
    })?;
    match outcome {
        Err(Failed {
            error: Error::Cancelled,
            left,
        }) => {
            let left = left.unwrap_or(format!("there is no '{name}', and nothing of it is left"));
            Err(interrupted.report(program, left))
        }
        Err(Failed { error, left }) => Err(match left {
            Some(left) => CommandError::new(format!("{error}; {left}")),
            None => error.into(),
        }),
        Ok(done) => {
            shown.end();
            report(args, name, &done);
            Ok(())
        }
    }
}

/// A publication that has failed, and what it leaves, if it leaves something.
struct Failed {
    error: Error,
    left: Option<String>,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, left: None }
    }
}

/// The options of the new image.
fn options_of(args: &Args, size: u64) -> cowslip::Result<(CreateOptions, Stored)> {
    let read = || -> Result<CreateOptions, CommandError> {
        let lists = args.options.iter().map(|list| options::split(list));
        let given = lists.collect::<Result<Vec<_>, _>>()?.concat();
        let request = create::Request {
            destination: Destination::Host(String::new()),
            format: Format::Qcow2,
            options: options::normalise(given, &create::options_of(Format::Qcow2))?,
            size: Some(size),
            flush: FlushPolicy::Honour,
        };
        create::qcow2_options(&request)
    };
    let made = read().map_err(|error| Error::invalid(error.to_string()))?;
    let stored = match args.compress {
        true => Stored::Compressed,
        false => Stored::Plain,
    };
    stream::validate(&made, stored)?;
    Ok((made, stored))
}

/// Makes the image and uploads it.
async fn copied(args: &Args, image: &Image, name: &str, job: &Job) -> Result<Done, Failed> {
    let (made, stored) = options_of(args, image.size())?;
    // Compressed clusters take less.
    let sources = Sources::new(std::slice::from_ref(image));
    let sizes = measure(&made, &geometry(&made)?, 0, Some(&sources)).await;
    let sizes = sizes.map_err(cowslip::convert::Failure::into_error)?;
    let mut target = Target::begin(args, name, part_bytes_for(sizes.required)).await?;
    let way = (&workers(), job);
    let streamed = stream::stream(image, (&made, stored), &mut target, way).await;
    let verification = match args.no_read_back {
        true => Verification::Presence,
        false => Verification::Bytes,
    };
    match streamed {
        Ok(made) => Ok(Done {
            placed: target.finish(&made.header, (verification, job)).await?,
            made,
            disk_bytes: image.size(),
        }),
        Err(error) => {
            let left = target.abandon().await.err().map(|why| {
                format!("besides, {why}: they take space until a rule of the store removes them")
            });
            Err(Failed { error, left })
        }
    }
}

/// The way to the store of an object with parts of this length, which take their time.
fn store_options(args: &Args, part_bytes: usize) -> StoreOptions {
    let usual = args.store.options();
    let parts = part_bytes.div_ceil(PART_BYTES_MIN) as u32;
    StoreOptions {
        timeout: usual
            .timeout
            .saturating_mul(parts)
            .min(Duration::from_secs(3600)),
        ..usual
    }
}

/// The new object, or a file of the host.
enum Target {
    Object(Box<Upload>),
    File(NewFile),
}

impl Target {
    async fn begin(args: &Args, name: &str, part_bytes: usize) -> cowslip::Result<Target> {
        let options = store_options(args, part_bytes);
        Ok(match place_of_object(name, &options)? {
            Place::Object(location) => {
                let upload = Upload::begin(&location, name, part_bytes).await?;
                Target::Object(Box::new(upload))
            }
            Place::File(path) => Target::File(NewFile::begin(path)?),
        })
    }

    async fn finish(self, header: &[u8], way: (Verification, &Job)) -> cowslip::Result<Uploaded> {
        match self {
            Target::Object(upload) => upload.finish(header, way).await,
            Target::File(file) => file.finish(header.to_vec()).await,
        }
    }

    async fn abandon(self) -> cowslip::Result<()> {
        match self {
            Target::Object(upload) => upload.abandon().await,
            // It goes with this value.
            Target::File(_) => Ok(()),
        }
    }
}

impl Sink for Target {
    fn push(
        &mut self,
        bytes: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = cowslip::Result<()>> + Send + '_>> {
        Box::pin(async move {
            match self {
                Target::Object(upload) => upload.push(&bytes).await,
                Target::File(file) => file.push(bytes).await,
            }
        })
    }
}

/// A file that gets its name when it is complete, and is removed with this value before.
struct NewFile {
    file: Arc<File>,
    bytes: u64,
    path: PathBuf,
    unfinished: RemovedOnInterrupt,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Once it has its name there is none to remove.
        drop(std::fs::remove_file(self.unfinished.path()));
    }
}

impl NewFile {
    fn begin(path: PathBuf) -> cowslip::Result<NewFile> {
        refuse_existing(&path)?;
        let mut unfinished = path.clone().into_os_string();
        let random = super::random().map_err(|error| Error::invalid(error.to_string()))?;
        let number = u128::from_be_bytes(random) as u32;
        // Not the process's number: in a container it is that of one that was killed.
        unfinished.push(format!(".unfinished-{number:08x}"));
        let unfinished = PathBuf::from(unfinished);
        let mut new = OpenOptions::new();
        // As new images are made: who may read it later is up to the directory's owner.
        let opened = new
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&unfinished);
        let file = opened.map_err(|error| match path.parent() {
            Some(parent) if error.kind() == ErrorKind::NotFound => Error::invalid(format!(
                "There is no directory '{}' for '{}': make it first, or choose another name",
                parent.display(),
                path.display()
            )),
            _ => failed("create", &unfinished, error),
        })?;
        Ok(NewFile {
            file: Arc::new(file),
            bytes: 0,
            path,
            unfinished: RemovedOnInterrupt::new(&unfinished),
        })
    }

    async fn push(&mut self, bytes: Vec<u8>) -> cowslip::Result<()> {
        let (file, at) = (Arc::clone(&self.file), self.bytes);
        self.bytes += bytes.len() as u64;
        let written = blocking(move || file.write_all_at(&bytes, at)).await;
        written.map_err(|error| failed("write", self.unfinished.path(), error))
    }

    async fn finish(self, header: Vec<u8>) -> cowslip::Result<Uploaded> {
        let file = Arc::clone(&self.file);
        let written = blocking(move || {
            file.write_all_at(&header, 0)?;
            file.sync_all()
        });
        let written = written.await;
        written.map_err(|error| failed("write", self.unfinished.path(), error))?;
        pull::name_it(self.unfinished.path(), &self.path)?;
        Ok(Uploaded {
            bytes: self.bytes,
            e_tag: None,
        })
    }
}

fn refuse_existing(path: &Path) -> cowslip::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed("look at", path, error)),
        Ok(_) => Err(Error::invalid(format!(
            "'{}' exists already, and images may depend on it: choose another name, or remove it first",
            path.display()
        ))),
    }
}

fn failed(verb: &str, path: &Path, error: std::io::Error) -> Error {
    Error::io(format!("Could not {verb} '{}'", path.display()), error)
}

fn report(args: &Args, name: &str, done: &Done) {
    let words = format!(
        "Published {name}: a qcow2 image of {}, with {} of data.\n",
        size::human(done.placed.bytes),
        size::human(done.made.data_bytes),
    );
    args.outcome.done.report(args.quiet, &words, || {
        json!({
            "filename": name,
            "format": "qcow2",
            "file-bytes": done.placed.bytes,
            "disk-bytes": done.disk_bytes,
            "data-bytes": done.made.data_bytes,
            "stored-bytes": done.made.stored_bytes,
            "e-tag": done.placed.e_tag,
        })
    });
}
