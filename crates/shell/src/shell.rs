//! The shell: takes lines, finds commands, checks what they need, runs them, remembers failures.
//!
//! The commands are in the files beside: `requests.rs` (reads, writes, discards, now or started),
//! `questions.rs` (facts about the image), `opening.rs`.

use std::io::BufRead;
use std::rc::Rc;
use std::time::Duration;

use cowslip::Image;
use cowslip_cmdline::getopt::Mistake;
use cowslip_cmdline::open;
use cowslip_cmdline::strtol::integer;
use cowslip_console::output::worded;
use cowslip_queue::Pending;

use super::opening::{ImageRequest, Opened};
use super::out::Out;
use super::parse;
use super::table::{self, Command, Needs, Verb};

/// Why a command failed, and which part of it is still to be printed.
#[derive(Debug)]
pub enum Complaint {
    /// A line on standard output.
    Said(String),
    /// A line on standard error.
    Error(String),
    /// A line on standard error, behind the program's name.
    ByName(String),
    /// The arguments make no sense: the mistake, if it has a message, and the usage line.
    Usage(Option<Mistake>),
    /// All messages have been printed.
    Printed,
}

impl From<Mistake> for Complaint {
    fn from(mistake: Mistake) -> Complaint {
        Complaint::Usage(Some(mistake))
    }
}

/// How a command ended.
pub type Outcome = Result<(), Complaint>;

/// Where lines come from.
#[derive(Debug)]
pub enum Script {
    /// The command line: `-c`.
    Given(Vec<String>),
    /// Standard input, with a prompt.
    Prompted,
}

/// Action after a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    GoOn,
    Quit,
}

/// The shell: its open image, requests under way, and whether a command has failed.
pub struct Shell {
    pub(super) out: Out,
    opened: Option<Opened>,
    /// Requests that were started and not awaited.
    pub(super) started: Vec<Pending<()>>,
    failed: bool,
    /// `open` is given lists of options, not names.
    pub(super) image_options: bool,
}

impl Shell {
    /// A shell without an image.
    pub fn new(out: Out) -> Shell {
        Shell {
            out,
            opened: None,
            started: Vec::new(),
            failed: false,
            image_options: false,
        }
    }

    /// A shell in which `open` takes a list of options (true), or a file name (false).
    pub fn with_image_options(self, image_options: bool) -> Shell {
        Shell {
            image_options,
            ..self
        }
    }

    /// Runs the script. Returns whether every command succeeded.
    pub async fn run(mut self, script: Script) -> bool {
        match script {
            Script::Given(lines) => {
                for line in lines {
                    if self.line(&line).await == Flow::Quit {
                        break;
                    }
                }
            }
            Script::Prompted => self.converse().await,
        }
        self.close().await;
        self.out.flush();
        !self.failed
    }

    async fn converse(&mut self) {
        loop {
            self.out.print(&worded("qemu-io> ", "cowslip io> "));
            self.out.flush();
            // On another thread, so that started requests go on meanwhile.
            let Some(line) = cowslip_queue::blocking(next_line).await else {
                break;
            };
            if self.line(&line).await == Flow::Quit {
                break;
            }
        }
    }

    async fn line(&mut self, line: &str) -> Flow {
        let words = parse::words(line);
        let Some((called, args)) = words.split_first() else {
            return Flow::GoOn;
        };
        let Some(command) = table::find(called) else {
            self.out
                .complain(&format!("command \"{called}\" not found\n"));
            self.failed = true;
            return Flow::GoOn;
        };
        let outcome = match self.may_run(command, called, args.len()) {
            Ok(()) => self.command(command, args).await,
            Err(complaint) => Err(complaint),
        };
        if let Err(complaint) = outcome {
            self.failed = true;
            self.complain(command, called, complaint);
        }
        match command.verb {
            Verb::Quit => Flow::Quit,
            _ => Flow::GoOn,
        }
    }

    fn may_run(&self, command: &Command, called: &str, count: usize) -> Outcome {
        if command.needs != Needs::Nothing && self.opened.is_none() {
            return Err(no_file());
        }
        command
            .check_count(called, count)
            .map_err(Complaint::Error)?;
        let read_only = self.opened.as_ref().is_some_and(|opened| !opened.writable);
        if command.needs == Needs::WritableImage && read_only {
            return Err(Complaint::ByName(open::read_only()));
        }
        Ok(())
    }

    fn complain(&self, command: &Command, called: &str, complaint: Complaint) {
        match complaint {
            Complaint::Said(text) => self.out.print(&format!("{text}\n")),
            Complaint::Error(text) => self.out.complain(&format!("{text}\n")),
            Complaint::ByName(text) => self.out.complain_by_name(&text),
            Complaint::Usage(mistake) => {
                if let Some(mistake) = mistake {
                    self.out.complain(&format!("{called}: {mistake}\n"));
                }
                self.out.print(&command.usage());
            }
            Complaint::Printed => {}
        }
    }

    async fn command(&mut self, command: &Command, args: &[String]) -> Outcome {
        match command.verb {
            Verb::Abort => std::process::abort(),
            Verb::AioDiscard => self.aio_discard(args),
            Verb::AioFlush => self.aio_flush().await,
            Verb::AioRead => self.aio_read(args),
            Verb::AioWrite => self.aio_write(args),
            Verb::Alloc => self.alloc(args).await,
            Verb::Break => self.set_break(args),
            Verb::Close => {
                self.close().await;
                Ok(())
            }
            Verb::Discard => self.discard(args).await,
            Verb::Flush => self.flush().await,
            Verb::Help => self.help(args),
            Verb::Info => self.info(),
            Verb::Length => self.length(),
            Verb::Map => self.map().await,
            Verb::Open => self.open_command(args).await,
            Verb::Quit => Ok(()),
            Verb::Read => self.read(args).await,
            Verb::Readv => self.readv(args).await,
            Verb::RemoveBreak => self.remove_break(args),
            Verb::Reopen => self.reopen_command(args).await,
            Verb::Resume => self.resume(args),
            Verb::Sigraise => self.sigraise(args),
            Verb::Sleep => self.sleep(args).await,
            Verb::Truncate => self.truncate(args).await,
            Verb::WaitBreak => self.wait_break(args).await,
            Verb::Write => self.write(args).await,
            Verb::Writev => self.writev(args).await,
            Verb::Zone(what) => zone(what, args),
        }
    }

    fn help(&self, args: &[String]) -> Outcome {
        match args.first() {
            None => {
                self.out.print(&table::help());
                Ok(())
            }
            Some(name) => match table::help_of(name) {
                Ok(text) => {
                    self.out.print(&text);
                    Ok(())
                }
                Err(text) => {
                    self.out.print(&text);
                    Err(Complaint::Printed)
                }
            },
        }
    }

    async fn sleep(&self, args: &[String]) -> Outcome {
        let milliseconds = integer(&args[0])
            .and_then(|number| u64::try_from(number).ok())
            .ok_or_else(|| Complaint::Said(format!("{} is not a valid number", args[0])))?;
        cowslip_queue::sleep(Duration::from_millis(milliseconds)).await;
        Ok(())
    }

    fn sigraise(&self, args: &[String]) -> Outcome {
        const HIGHEST: u64 = 64;
        let number = parse::size(&args[0]).map_err(Complaint::Said)?;
        if number > HIGHEST {
            return Err(Complaint::Said(format!(
                "signal argument '{}' is too large to be a valid signal",
                args[0]
            )));
        }
        self.out.flush();
        let signal = i32::try_from(number)
            .ok()
            .and_then(rustix::process::Signal::from_named_raw);
        match signal {
            // Signal 0 asks whether the process exists. It does.
            None if number == 0 => Ok(()),
            None => Err(Complaint::ByName(format!(
                "Signal {number} is not one of the named ones"
            ))),
            Some(signal) => rustix::process::kill_process(rustix::process::getpid(), signal)
                .map_err(|error| Complaint::ByName(cowslip::error::system_words(&error.into()))),
        }
    }

    /// The open image, as the commands that need one find it.
    pub(super) fn opened(&self) -> Result<&Opened, Complaint> {
        self.opened.as_ref().ok_or_else(no_file)
    }

    /// The open image, to keep while requests run.
    pub(super) fn image(&self) -> Result<Rc<Image>, Complaint> {
        Ok(Rc::clone(&self.opened()?.image))
    }

    /// Opens an image, where none is open.
    pub async fn open(&mut self, request: ImageRequest) -> Outcome {
        if self.opened.is_some() {
            return Err(Complaint::ByName(
                "file open already, try 'help close'".to_string(),
            ));
        }
        let opened = Opened::open(request.stopping_at(self.out.breakpoints())).await;
        self.set_opened(opened.map_err(Complaint::ByName)?);
        Ok(())
    }

    pub(super) fn set_opened(&mut self, opened: Opened) {
        for warning in &opened.warnings {
            self.out.complain(warning);
        }
        self.opened = Some(opened);
    }

    pub(super) fn take_opened(&mut self) -> Option<Opened> {
        self.opened.take()
    }

    /// Takes over an open image.
    pub(super) fn adopt(&mut self, image: Image) {
        self.opened = Some(Opened::adopted(image));
    }

    /// Opens the image given on the program's command line.
    pub async fn open_first(&mut self, request: ImageRequest) -> bool {
        match self.open(request).await {
            Ok(()) => true,
            Err(Complaint::ByName(text)) => {
                self.out.complain_by_name(&text);
                false
            }
            Err(_) => false,
        }
    }

    /// Closes the image, if one is open, when what was started has ended.
    pub(super) async fn close(&mut self) {
        self.out.breakpoints().clear();
        self.await_started().await;
        if let Some(opened) = self.opened.take()
            && let Err(error) = opened.image.close().await
        {
            self.failed = true;
            self.report_not_closed(&error);
        }
    }

    /// Prints QEMU's message for metadata that could not be written at the close. If the image has
    /// been latched, the user has seen the error already.
    fn report_not_closed(&self, error: &cowslip::Error) {
        if matches!(error, cowslip::Error::Latched(_)) {
            return;
        }
        let words = error.system_words();
        for cache in ["L2 table", "refcount block"] {
            let text = format!("Failed to flush the {cache} cache: {words}");
            self.out.complain_by_name(&text);
        }
    }

    /// Waits for the requests that were started.
    pub(super) async fn await_started(&mut self) {
        for pending in std::mem::take(&mut self.started) {
            pending.await;
        }
    }
}

/// Whether a line may do something to others than the open image, or wait, or needs much memory.
pub(super) fn reaches_out(line: &str) -> bool {
    const BYTES_MAX: u64 = 8 << 20;
    let words = parse::words(line);
    let verb = words.first().and_then(|called| table::find(called));
    let reaches = |verb| {
        use Verb::{Abort, Open, Reopen, Sigraise, Sleep};
        matches!(verb, Abort | Open | Reopen | Sigraise | Sleep)
    };
    verb.is_some_and(|command| reaches(command.verb))
        || words
            .iter()
            .filter_map(|word| parse::size(word).ok())
            .any(|size| (BYTES_MAX..=parse::REQUEST_BYTES_MAX).contains(&size))
}

fn no_file() -> Complaint {
    Complaint::Error("no file open, try 'help open'".to_string())
}

pub(super) fn unsupported(what: &str) -> Outcome {
    Err(Complaint::Said(format!("{what}: Operation not supported")))
}

fn zone(what: &str, args: &[String]) -> Outcome {
    for arg in &args[..2] {
        parse::size(arg).map_err(Complaint::Said)?;
    }
    unsupported(&format!("zone {what} failed"))
}

/// The next line of standard input; `None` at its end.
fn next_line() -> Option<String> {
    let mut line = Vec::new();
    // A failure to read standard input ends the conversation as its end does.
    let count = std::io::stdin().lock().read_until(b'\n', &mut line).ok()?;
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    (count > 0).then(|| String::from_utf8_lossy(&line).into_owned())
}
