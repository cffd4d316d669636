//! The image that `check` and `map` are asked about: its name, its format, and how it is opened,
//! always read-only.

use std::path::Path;
use std::sync::Arc;

use cowslip::Image;
use cowslip::file::BlockFile;
use cowslip::file::host::{HostGate, HostOptions, PageCache, open_host_file};
use cowslip::image::{Format, OpenOptions};
use cowslip_queue::{Backend, Queue};

use crate::error::CommandError;
use crate::options;
use crate::output::Program;

/// An image, named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub path: String,
    /// Its format; probed if unknown.
    pub format: Option<Format>,
}

impl Source {
    /// Reads the command line's words for an image.
    ///
    /// # Errors
    /// Not one file name, contradictory or unknown options, an unknown format.
    pub fn parse(
        words: &SourceWords<'_>,
        verb: &str,
        program: &Program,
    ) -> Result<Source, CommandError> {
        let [filename] = words.filenames else {
            let text = "Expecting one image file name";
            return Err(usage_error(text, verb, program));
        };
        if !words.image_opts {
            let format = words.format.map(|name| known_format(filename, name));
            return Ok(Source {
                path: filename.clone(),
                format: format.transpose()?,
            });
        }
        if words.format.is_some() {
            return Err(CommandError::new(
                "--image-opts and --format are mutually exclusive",
            ));
        }
        Source::of_image_opts(filename)
    }

    fn of_image_opts(list: &str) -> Result<Source, CommandError> {
        let mut path = None;
        let mut format = None;
        for (name, value) in options::split(list)? {
            match name.as_str() {
                "driver" if value == "file" => format = Some(Format::Raw),
                "driver" => format = Some(known_format(list, &value)?),
                "file.filename" | "filename" => path = Some(value),
                "file.driver" if value == "file" => {}
                _ => {
                    return Err(CommandError::new(format!(
                        "Could not open '{list}': the option '{name}={value}' is not supported"
                    )));
                }
            }
        }
        let path = path.ok_or_else(|| {
            CommandError::new(format!(
                "Could not open '{list}': A block device must be specified for \"file\""
            ))
        })?;
        Ok(Source { path, format })
    }

    /// Opens the file alone.
    ///
    /// # Errors
    /// The system's.
    pub fn open_file(&self, options: &HostOptions) -> Result<Arc<dyn BlockFile>, CommandError> {
        open_host_file(Path::new(&self.path), options)
            .map_err(|error| CommandError::opening(&self.path, &error))
    }

    /// Opens the image with the files that it names.
    ///
    /// # Errors
    /// What makes it impossible.
    pub async fn open_image(&self) -> Result<Image, CommandError> {
        let options = HostOptions::default();
        let file = self.open_file(&options)?;
        let open_options = OpenOptions {
            format: self.format,
            ..OpenOptions::default()
        };
        Image::open(file, open_options, &HostGate { options })
            .await
            .map_err(|error| CommandError::opening(&self.path, &error))
    }
}

/// What a command line says of an image.
#[derive(Clone, Copy, Debug)]
pub struct SourceWords<'a> {
    /// The arguments that are no options.
    pub filenames: &'a [String],
    /// The format's name.
    pub format: Option<&'a str>,
    /// The file name is a list of options.
    pub image_opts: bool,
}

fn known_format(filename: &str, name: &str) -> Result<Format, CommandError> {
    Format::from_name(name).ok_or_else(|| {
        CommandError::new(format!(
            "Could not open '{filename}': Unknown driver '{name}'"
        ))
    })
}

/// A mistake on the command line, with a word on where to read more.
pub fn usage_error(text: &str, verb: &str, program: &Program) -> CommandError {
    CommandError::new(format!(
        "{text}\nTry '{} {verb} --help' for more info",
        program.name
    ))
}

/// How a report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// For people.
    Human,
    /// For programs.
    Json,
}

impl OutputFormat {
    /// Reads `--output`.
    ///
    /// # Errors
    /// It is neither of the two.
    pub fn parse(text: &str, verb: &str, program: &Program) -> Result<OutputFormat, CommandError> {
        match text {
            "human" => Ok(OutputFormat::Human),
            "json" => Ok(OutputFormat::Json),
            other => {
                let text = format!("--output expects 'human' or 'json' not '{other}'");
                Err(usage_error(&text, verb, program))
            }
        }
    }
}

/// The way past the page cache, or through it, of a cache mode's name.
pub fn page_cache(mode: &str) -> Option<PageCache> {
    match mode {
        "none" | "off" | "directsync" => Some(PageCache::Bypass),
        "writeback" | "writethrough" | "unsafe" => Some(PageCache::Use),
        _ => None,
    }
}

/// Runs a verb's work on a queue of its own.
///
/// # Errors
/// The work's, or the system gives no queue.
pub fn block_on<T>(work: impl Future<Output = Result<T, CommandError>>) -> Result<T, CommandError> {
    let queue = Queue::new(Backend::Auto)
        .map_err(|error| CommandError::new(format!("Could not set up I/O: {error}")))?;
    queue.block_on(work)
}
