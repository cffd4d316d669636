//! The transport FUSE: the disk as one regular file.
//!
//! A server in its sandbox may not change what is mounted, so another process unmounts the file
//! when the server is asked to end ([`unmounter`]).

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use clap::{Args, Command};
use cowslip::error::system_words;
use cowslip::job::Job;
use cowslip::qcow2::create::Preallocation;
use cowslip::{Disk, Error};
use cowslip_console::error::CommandError;
use cowslip_fuse::{
    Grow, Growth, MountOptions, Options, Server, ServerEvent, Standing, Unmount, mount,
};
use rustix::fs::{Mode, OFlags};

use super::kind::{Line, OfLine, TransportKind};
use super::log::{Log, Severity};
use super::members::Members;
use super::sandbox::Rights;
use super::socket_name;
use super::transport::{Endpoint, LocalFuture, Names, Served, Transport};

mod place;
pub mod unmounter;

use place::Place;
use unmounter::{Ended, Unmounter};

pub use place::wait_for_close;

/// A choice of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Options of an image that is shown as a file.
#[derive(clap::Args)]
pub struct FuseArgs {
    /// Let writes beyond the end of the file, and truncate(2), grow the disk
    #[arg(long)]
    growable: bool,
    /// Let other users use the file, as its mode allows
    #[arg(long)]
    allow_other: bool,
    /// Take the file's requests by way of io_uring, where the kernel offers that (its parameter
    /// fuse.enable_uring)
    #[arg(long, value_enum, default_value = "on", value_name = "MODE")]
    fuse_uring: Switch,
}

/// The same with the name of the file; those of an export in a daemon are beside them, in [`Kind`].
#[derive(clap::Args)]
struct FileArgs {
    /// Show the disk as this file (FUSE); NBD is served too if --socket or --listen is given
    #[arg(long, value_name = "FILE")]
    fuse: Option<PathBuf>,
    #[command(flatten)]
    options: FuseArgs,
}

impl FuseArgs {
    /// The transport for a file.
    pub fn transport(&self, file: PathBuf, threads: usize) -> Fuse {
        Fuse {
            file,
            is_growable: self.growable,
            allows_others: self.allow_other,
            uses_ring: self.fuse_uring == Switch::On,
            threads,
        }
    }
}

/// FUSE among the transports.
pub struct Kind;

impl TransportKind for Kind {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn declare(&self, command: Command) -> Command {
        FileArgs::augment_args(command)
    }

    fn of_line(&self, line: Line<'_>) -> Result<OfLine, CommandError> {
        let FileArgs { fuse, options } = line.options()?;
        let threads = line.threads.unwrap_or(1);
        let of_file = |file| Box::new(options.transport(file, threads)) as Box<dyn Transport>;
        Ok(OfLine {
            transport: fuse.map(of_file),
            lets_grow: options.growable,
            ..OfLine::default()
        })
    }

    fn of_export(&self, given: Members<'_>) -> Option<Result<Box<dyn Transport>, CommandError>> {
        Some(given.required("mountpoint").map(|file| {
            Box::new(Fuse {
                file: file.into(),
                is_growable: false,
                allows_others: matches!(given.text("allow-other"), Some("on" | "auto")),
                uses_ring: true,
                threads: 1,
            }) as _
        }))
    }

    fn needs_outside_of_sandbox(&self) -> Option<&'static str> {
        Some("a program that mounts")
    }
}

/// Options of the file.
#[derive(Clone, Debug)]
pub struct Fuse {
    /// Path of the file.
    file: PathBuf,
    /// Whether writes beyond the end, and truncate(2), grow the disk.
    is_growable: bool,
    /// Whether other users may use the file.
    allows_others: bool,
    /// Whether its requests come by way of the kernel's ring, where there is one for that.
    uses_ring: bool,
    /// Threads that serve it.
    threads: usize,
}

impl Fuse {
    /// Whether clients may change the size of the disk.
    pub fn is_growable(&self) -> bool {
        self.is_growable
    }

    fn refused(&self, why: impl std::fmt::Display) -> CommandError {
        CommandError::new(format!("Could not mount '{}': {why}", self.file.display()))
    }

    fn failed(&self, error: &std::io::Error) -> CommandError {
        self.refused(system_words(error))
    }
}

impl Transport for Fuse {
    fn path(&self) -> Option<PathBuf> {
        Some(self.file.clone())
    }

    fn has_predecessor(&self, log: &Log) -> Result<bool, CommandError> {
        let path = mount::resolved(&self.file).map_err(|error| self.failed(&error))?;
        match mount::standing(&path).map_err(|error| self.failed(&error))? {
            Standing::Free => Ok(place::is_locked(&path)),
            Standing::Mounted => Err(self.refused("a file system is mounted there already")),
            Standing::Dead => {
                let unmounted = mount::unmount(&path, Unmount::Lazily);
                unmounted.map_err(|error| {
                    let why = system_words(&error);
                    self.refused(format!(
                        "its server has ended, and it could not be unmounted: {why}"
                    ))
                })?;
                log.write(format_args!(
                    "'{}' was still mounted after its server had ended; it has been unmounted",
                    self.file.display()
                ));
                Ok(true)
            }
        }
    }

    fn listen<'a>(
        &'a self,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        Box::pin(async move {
            let path = mount::resolved(&self.file).map_err(|error| self.failed(&error))?;
            let options = Options {
                grow: self.is_growable.then(|| grow(served)),
                // Before the mount, which may be on the image's file itself.
                host: image_file(&served.filename),
                allows_others: self.allows_others,
                threads: self.threads,
                uses_ring: self.uses_ring,
                poll: served.poll,
            };
            let place = Place::take(&path).await;
            let place = place.map_err(|why| self.refused(why))?;
            let source = mount::source_name(served.filename.as_ref());
            let mount_options = MountOptions {
                source,
                is_read_only: !served.disk.features().writable,
                allows_others: self.allows_others,
            };
            let unmounter = Unmounter::start(&path);
            let unmounter = unmounter.map_err(|error| self.failed(&error))?;
            let device = cowslip_fuse::mount(&path, &mount_options).await;
            let device = device.map_err(|error| self.failed(&error))?;
            let mount = Mount(Rc::new(unmounter));
            let server = Server::new(Arc::clone(&served.disk), device, options);
            let mut server = server.map_err(|error| self.failed(&error))?;
            let log = served.log.clone();
            server.observe(move |event| log.report(severity(event), || described(event)));
            Ok(Box::new(Mounted {
                server,
                mount,
                place,
                disk: Arc::clone(&served.disk),
                is_alone: served.is_alone,
                log: served.log.clone(),
            }) as Box<dyn Endpoint>)
        })
    }
}

/// The way to grow the disk of an image that is served, which informs the other transports.
fn grow(served: &Served) -> Grow {
    let image = Arc::clone(&served.image);
    let (offset, resized) = (served.offset, served.resized.clone());
    Arc::new(move |growth: Growth| {
        let (image, resized) = (Arc::clone(&image), resized.clone());
        Box::pin(async move {
            let size = growth.size.checked_add(offset);
            let size = size.and_then(|size| size.checked_next_multiple_of(512));
            let size = size.ok_or_else(|| Error::invalid("a size beyond all limits"))?;
            let preallocation = match growth.is_allocated {
                true => Preallocation::Falloc,
                false => Preallocation::Off,
            };
            let job = Job::default();
            let grown = image.resize_as_job(size, preallocation, &job).await;
            if grown.is_ok() {
                // An event of ours can always be signalled.
                drop(resized.signal());
            }
            grown
        })
    })
}

/// The image's file, to ask how much space it takes; `None` for images that are no files.
fn image_file(name: &str) -> Option<Arc<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::open(name, flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    kind.is_file().then(|| Arc::new(file))
}

/// A mount, which ends with this at the latest: who fails to serve it, or panics, leaves no file
/// that gives errors.
struct Mount(Rc<Unmounter>);

impl Drop for Mount {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// A file that is mounted.
struct Mounted {
    // In this order they are dropped: nobody waits for an answer, nothing is mounted, no file.
    server: Server,
    mount: Mount,
    place: Place,
    disk: Arc<dyn Disk>,
    is_alone: bool,
    log: Log,
}

impl Endpoint for Mounted {
    fn rights(&self) -> Rights {
        Rights {
            removed: self.place.removed().into_iter().collect(),
            // Threads start the rings that were made for them; the name is removed.
            calls: [&[libc::SYS_io_uring_register], socket_name::REMOVING].concat(),
            ..Rights::default()
        }
    }

    fn stopper(&self) -> Box<dyn Fn()> {
        let handle = self.server.handle();
        let (unmounter, log) = (Rc::clone(&self.mount.0), self.log.clone());
        let path = self.place.path().to_path_buf();
        Box::new(move || {
            let (unmounter, handle) = (Rc::clone(&unmounter), handle.clone());
            let (log, path) = (log.clone(), path.clone());
            cowslip_queue::spawn(async move {
                // Programs are served until the name is gone.
                match unmounter.unmount().await {
                    Ok(Ended::Unused) => {}
                    Ok(Ended::InUse) => log.write(format_args!(
                        "'{}' was in use: it is unmounted, and programs that have it open get \
                         errors from now on",
                        path.display()
                    )),
                    Err(why) => log.write(format_args!(
                        "'{}' could not be unmounted: {why}",
                        path.display()
                    )),
                }
                handle.stop();
            });
        })
    }

    fn serve(self: Box<Self>) -> LocalFuture<'static, Names> {
        Box::pin(async move {
            self.mount.0.note_service();
            if let Err(error) = self.server.serve().await {
                let why = system_words(&error);
                self.log
                    .write(format_args!("a thread could not be started: {why}"));
            }
            drop(self.mount);
            if self.is_alone {
                return Some(Box::new(self.place) as _);
            }
            // Others go on with the image: it is not closed yet.
            if self.disk.features().writable
                && let Err(error) = self.disk.flush().await
            {
                self.log
                    .write(format_args!("the image could not be flushed: {error}"));
            }
            None
        })
    }
}

fn severity(event: &ServerEvent) -> Severity {
    match event {
        ServerEvent::RequestFailed { .. } => Severity::Usual,
        ServerEvent::AnswerRefused { .. } | ServerEvent::ConnectionFailed { .. } => {
            Severity::Failure
        }
    }
}

fn described(event: &ServerEvent) -> String {
    match event {
        ServerEvent::RequestFailed { request, error } => format!("{request} failed: {error}"),
        ServerEvent::AnswerRefused { request, error } => {
            format!("the kernel refused the answer to {request}: {error}")
        }
        ServerEvent::ConnectionFailed { reason } => {
            format!("the connection to the kernel failed: {reason}")
        }
    }
}
