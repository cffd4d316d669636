//! `allocate`: space for a file of any kind, allocated as a job: what the file holds stays, its
//! holes get space.
//!
//! Interrupted or failed, it takes back what it has allocated; a file that it has made is removed.
//! What is chosen is said before it is done, with the reason, and what it has come to afterwards:
//! extents beside the fewest that there could be.

use std::path::{Path, PathBuf};
use std::time::Instant;

use cowslip::Error;
use cowslip::allocate::{Abilities, Chosen, End, LibraryMakes, Method, Outcome, Plan, ZeroesTake};
use cowslip::file::host::{Aio, probe_space, takes_length};
use cowslip::file::{AlignedFile, Claim, HolesBy, ReadSet};
use cowslip_extents::{Figures, other_than_file};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::job::JobArgs;
use crate::new_file::NewFile;
use crate::open::{block_on, local_name};
use crate::options;
use crate::output::{Program, counted, note, print_json};
use crate::size;

/// Bytes of one write, within reason.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 512..=64 << 20;

/// Command line of `allocate`.
#[derive(clap::Args)]
#[command(after_help = "\
auto tests each call on a temporary file in the same directory, and uses fallocate if that allocates space there, or \
else writes zeroes. Only holes are filled: existing data and space stay. If the command is interrupted or fails, the file \
is restored, except for data that other programs have appended and space that they may be using; if it is killed, \
starting it again resumes the work. Space that is missing at the end although all calls succeeded is an error, and the \
file is left as it is. Other programs must not write into the file's holes meanwhile: all methods but fallocate may \
overwrite such data with zeroes. See docs/allocation.md.")]
pub struct Args {
    /// Bytes to allocate, from the beginning of the file; with suffix b, k, M, G, T, P or E
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    size: String,
    /// Method: auto, fallocate, posix_fallocate (libc's), mmap (mapped and filled) or write
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    method: String,
    /// Bytes per write of --method=write; 1M if not given
    #[arg(long, value_name = "SIZE")]
    chunk: Option<String>,
    /// Keep the length of the file: space beyond its end is allocated for its growth
    #[arg(long)]
    keep_size: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Print what was done as JSON
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
    #[command(flatten)]
    job: JobArgs,
    /// The file; created if it does not exist
    #[arg(value_name = "FILE")]
    filename: String,
}

/// Request of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Auto,
    /// The effect of libc's call is found out.
    PosixFallocate,
    This(Method),
}

/// A request that is understood, and a file that may be tried.
struct Request<'a> {
    args: &'a Args,
    /// Path for the system.
    path: String,
    directory: PathBuf,
    size: u64,
    wanted: Wanted,
}

/// Allocates; the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(allocated(args, program))
}

fn allocated(args: &Args, program: &Program) -> Result<(), CommandError> {
    let request = Request::new(args)?;
    let job = args.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let start = Instant::now();
    let outcome = block_on(Aio::Auto, async { Ok(request.carry_out(&job).await) })?;
    match outcome {
        Err(Failure::Engine(Error::Cancelled)) => {
            let filename = &args.filename;
            let left = format!("the space allocated for '{filename}' was freed again");
            Err(interrupted.report(program, left))
        }
        Err(failure) => {
            let error = match failure {
                Failure::Engine(error) => error.into(),
                Failure::Command(error) => error,
            };
            if interrupted.has_come() {
                program.fail(&error);
                interrupted.end_by_signal();
            }
            Err(error)
        }
        Ok(done) => {
            args.job.end();
            // The space is there, even if the report fails.
            let figures = cowslip_extents::figures(&request.path);
            request.report(&done, figures, start.elapsed().as_secs_f64())
        }
    }
}

/// Why it was not done.
enum Failure {
    Engine(Error),
    Command(CommandError),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(error)
    }
}

/// Outcome, with the method.
struct Done {
    outcome: Outcome,
    /// `None` if there was nothing to do.
    chosen: Option<Chosen>,
    /// If something was tried.
    abilities: Option<Abilities>,
}

impl Request<'_> {
    fn new(args: &Args) -> Result<Request<'_>, CommandError> {
        let wanted = wanted(args)?;
        let size = options::bytes_within("size", &args.size, 1..=size::SIZE_MAX)?;
        let path = local_name(&args.filename)?;
        let directory = directory_of(&path)?;
        // Where no file can be made, the attempt itself will fail.
        if let Ok(false) = takes_length(&directory, size) {
            let why = match getrlimit(Resource::Fsize).current {
                Some(most) if most < size => format!(
                    "files of this process are limited to {most} bytes (RLIMIT_FSIZE, 'ulimit -f')"
                ),
                _ => format!("its file system does not support files of {size} bytes"),
            };
            return Err(CommandError::new(format!(
                "Could not allocate space for '{path}': {why}"
            )));
        }
        Ok(Request {
            args,
            path,
            directory,
            size,
            wanted,
        })
    }

    async fn carry_out(&self, job: &cowslip::Job) -> Result<Done, Failure> {
        let claim = Claim::CREATE_RAW;
        let (new, file) =
            NewFile::open(&self.path, &ReadSet::default(), claim).map_err(Failure::Command)?;
        let file = AlignedFile::new(file);
        let plan = self.plan(&file).await?;
        let (abilities, mut chosen) = match plan.is_done() {
            true => (None, None),
            false => self.choose(&plan)?,
        };
        let method = chosen.map_or(Method::Fallocate, |chosen| chosen.method);
        if let Some(chosen) = &chosen {
            self.announce(&plan, chosen);
        }
        let outcome = match plan.carry_out(method, job).await {
            // Nothing could be tried beforehand; nothing is done yet.
            Err(Error::Unsupported { .. })
                if abilities.is_none() && self.wanted == Wanted::Auto && !self.args.keep_size =>
            {
                let plan = self.plan(&file).await?;
                let writes = Chosen {
                    method: Method::WRITE,
                    because: "the file system does not support fallocate",
                };
                self.announce(&plan, &writes);
                chosen = Some(writes);
                job.forget();
                plan.carry_out(writes.method, job).await
            }
            outcome => outcome,
        };
        if outcome.is_ok() || self.is_others(&file).await {
            new.finished();
        }
        let outcome = outcome?;
        Ok(Done {
            outcome,
            chosen,
            abilities,
        })
    }

    /// Whether a file that was made for this has been written by another process since.
    async fn is_others(&self, file: &AlignedFile) -> bool {
        let ours = match self.args.keep_size {
            true => 0,
            false => self.size,
        };
        file.len().await.map_or(true, |len| len > ours)
    }

    async fn plan(&self, file: &AlignedFile) -> Result<Plan, Error> {
        let end = match self.args.keep_size {
            true => End::Stays,
            false => End::Moves,
        };
        Plan::new(file, self.size, end).await
    }

    fn choose(&self, plan: &Plan) -> Result<(Option<Abilities>, Option<Chosen>), Error> {
        let asked = |method| Chosen {
            method,
            because: "requested",
        };
        let abilities = match (self.wanted, probe_space(&self.directory)) {
            (Wanted::This(method), probed) => return Ok((probed.ok(), Some(asked(method)))),
            (_, Ok(abilities)) => abilities,
            (_, Err(error)) if !is_no_trial(&error) => return Err(error),
            (Wanted::PosixFallocate, Err(_)) => {
                let method = Method::PosixFallocate(LibraryMakes::Unknown);
                return Ok((None, Some(asked(method))));
            }
            (Wanted::Auto, Err(_)) => {
                let because =
                    "nothing can be tested in its directory, so the call is tested on the file";
                let method = Method::Fallocate;
                return Ok((None, Some(Chosen { method, because })));
            }
        };
        let chosen = match self.wanted {
            Wanted::PosixFallocate => asked(Method::PosixFallocate(abilities.library)),
            _ => cowslip::allocate::choose(&abilities, plan)?,
        };
        Ok((Some(abilities), Some(chosen)))
    }

    /// Says what is about to be done.
    fn announce(&self, plan: &Plan, chosen: &Chosen) {
        if self.args.quiet || self.args.json {
            return;
        }
        let makes = match chosen.method {
            Method::PosixFallocate(makes) => format!("; {}", words_of(makes)),
            _ => String::new(),
        };
        note(&format!(
            "Allocating {} for '{}' by {}: {}{makes}\n",
            size::human(plan.needed_bytes()),
            self.args.filename,
            named(chosen.method),
            chosen.because,
        ));
    }

    /// Says what it has come to; space that is not there is an error.
    fn report(
        &self,
        done: &Done,
        figures: Result<Figures, CommandError>,
        seconds: f64,
    ) -> Result<(), CommandError> {
        let notes = notes(done, &figures);
        let figures = figures.ok();
        if self.args.json {
            print_json(&self.json(done, figures.as_ref(), seconds, &notes));
        } else if !self.args.quiet {
            note(&self.text(done, figures.as_ref(), seconds));
            for text in &notes {
                note(&format!("Note: {text}\n"));
            }
        }
        let outcome = &done.outcome;
        match outcome.missing_bytes {
            0 => Ok(()),
            missing => Err(CommandError::new(format!(
                "'{}': {missing} of {} bytes are not allocated, although all calls succeeded; the file is left as it is",
                self.args.filename, outcome.size_bytes
            ))),
        }
    }

    fn text(&self, done: &Done, figures: Option<&Figures>, seconds: f64) -> String {
        let Outcome {
            already_bytes,
            filled_bytes,
            holes,
            ..
        } = done.outcome;
        let filled = match filled_bytes {
            0 => "everything was allocated already".to_string(),
            _ => format!(
                "{} allocated in {} in {seconds:.2} s, {} were allocated before",
                size::human(filled_bytes),
                counted(holes, "hole"),
                size::human(already_bytes)
            ),
        };
        let space = done.outcome.allocated_bytes;
        let space = space.map_or(String::new(), |bytes| {
            format!("; it occupies {} in all", size::human(bytes))
        });
        let extents = figures.map_or(String::new(), |figures| match figures.extents {
            Some(extents) => format!(
                "; {} (minimum {})",
                counted(extents, "extent"),
                figures.perfect
            ),
            None => format!("; {} does not list extents", figures.file_system),
        });
        format!("{}: {filled}{space}{extents}\n", self.args.filename)
    }

    fn json(
        &self,
        done: &Done,
        figures: Option<&Figures>,
        seconds: f64,
        notes: &[String],
    ) -> Value {
        let outcome = &done.outcome;
        let library = match done.chosen.map(|chosen| chosen.method) {
            Some(Method::PosixFallocate(makes)) => Some(words_of(makes)),
            _ => None,
        };
        json!({
            "filename": self.args.filename,
            "size": outcome.size_bytes,
            "file-system": figures.map(|figures| &figures.file_system),
            "method": done.chosen.map(|chosen| chosen.method.name()),
            "because": done.chosen.map(|chosen| chosen.because),
            "library": library,
            "allocated-before": outcome.already_bytes,
            "allocated": outcome.filled_bytes,
            "holes": outcome.holes,
            "missing": outcome.missing_bytes,
            "space": outcome.allocated_bytes,
            "verified-by": match outcome.by {
                HolesBy::Extents => "extents",
                HolesBy::Seeking => "blocks",
            },
            "extents": figures.and_then(|figures| figures.extents),
            "perfect": figures.map(|figures| figures.perfect),
            "unwritten": figures.map(|figures| figures.unwritten_bytes),
            "seconds": seconds,
            "notes": notes,
        })
    }
}

/// Whether a trial is not to be had: the user may not make files there, or there is less room than
/// it needs, which may be enough for the file.
fn is_no_trial(error: &Error) -> bool {
    let Error::Io { source, .. } = error else {
        return false;
    };
    let number = Errno::from_io_error(source);
    matches!(
        number,
        Some(
            Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::NOSPC | Errno::DQUOT
        )
    )
}

fn wanted(args: &Args) -> Result<Wanted, CommandError> {
    let chunk = args.chunk.as_deref();
    let chunk = chunk.map(|text| options::bytes_within("chunk", text, CHUNK_BYTES));
    let wanted = match args.method.as_str() {
        "auto" => Wanted::Auto,
        "fallocate" => Wanted::This(Method::Fallocate),
        "posix_fallocate" => Wanted::PosixFallocate,
        "mmap" => Wanted::This(Method::Mmap),
        "write" => Wanted::This(Method::WRITE),
        other => {
            return Err(CommandError::new(format!(
                "--method expects 'auto', 'fallocate', 'posix_fallocate', 'mmap' or 'write' not '{other}'"
            )));
        }
    };
    match (chunk.transpose()?, wanted) {
        (None, wanted) => Ok(wanted),
        (Some(bytes), Wanted::This(Method::Write { .. })) => Ok(Wanted::This(Method::Write {
            chunk_bytes: bytes as usize,
        })),
        (Some(_), _) => Err(CommandError::new("--chunk is for --method=write")),
    }
}

/// The directory that a file is in, or will be; refuses what is no regular file.
fn directory_of(path: &str) -> Result<PathBuf, CommandError> {
    let refused =
        |why: String| CommandError::new(format!("Could not allocate space for '{path}': {why}"));
    let failed = |error: std::io::Error| refused(cowslip::error::system_words(&error));
    let real = match std::fs::metadata(path) {
        Ok(found) => match other_than_file(&found) {
            None => std::fs::canonicalize(path).map_err(failed)?,
            Some("a block device") => {
                let why = "it is a block device, which has all of its space; blkdiscard --zeroout fills it with \
                           zeroes";
                return Err(refused(why.to_string()));
            }
            Some(other) => {
                let why = format!("it is {other}; only regular files have space to allocate");
                return Err(refused(why));
            }
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => PathBuf::from(path),
        Err(error) => return Err(failed(error)),
    };
    Ok(match real.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    })
}

fn named(method: Method) -> String {
    match method {
        Method::Write { chunk_bytes } => {
            format!("writes of {}", size::human(chunk_bytes as u64))
        }
        other => other.name().to_string(),
    }
}

fn words_of(makes: LibraryMakes) -> &'static str {
    match makes {
        LibraryMakes::KernelCall => "libc uses the kernel's fallocate here",
        LibraryMakes::Writes => {
            "libc writes one byte per block here, because fallocate is not supported"
        }
        LibraryMakes::Nothing => "libc does not support it here",
        LibraryMakes::Unknown => "the method that libc uses could not be determined",
    }
}

/// Returns notes on the space that was allocated, beside that it is there.
fn notes(done: &Done, figures: &Result<Figures, CommandError>) -> Vec<String> {
    let mut notes = Vec::new();
    let (system, encoded_bytes) = match figures {
        Ok(figures) => (figures.file_system.as_str(), figures.encoded_bytes),
        Err(error) => {
            notes.push(format!("its extents could not be listed: {error}"));
            ("its file system", 0)
        }
    };
    if system == "btrfs" {
        let text =
            "btrfs copies on write: overwriting data allocates new space, unless the file is nocow";
        notes.push(text.to_string());
    }
    let compresses = done.abilities.is_some_and(|a| a.zeroes == ZeroesTake::Less);
    if compresses || encoded_bytes > 0 {
        notes.push(
            "the file system compresses: data that is written later may be stored elsewhere than in this space"
                .to_string(),
        );
    }
    if done.outcome.by == HolesBy::Seeking {
        notes.push(format!(
            "{system} does not list extents: the space is known from the block count only"
        ));
    }
    notes
}
