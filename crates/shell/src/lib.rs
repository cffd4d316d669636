//! `cowslip io`, also under the name `qemu-io`: a shell that reads, writes and examines one image.
//!
//! Command lines, output and errors are those of qemu-io 10.0.2, down to its C library's
//! complaints. Left out: zones. They are refused in plain words.

use std::ffi::OsString;

use cowslip_cmdline::getopt::{Long, Mistake, Name, Scanner, Value};
use cowslip_cmdline::open::object;
use cowslip_cmdline::trace::{Traced, trace};
use cowslip_console::output::{self, Program, worded};
use cowslip_queue::{Backend, Queue};

mod breaks;
mod opening;
mod out;
mod parse;
mod questions;
mod report;
mod requests;
mod shell;
mod table;

use opening::ImageRequest;
use out::Out;
use shell::{Script, Shell};

/// Read, write and examine an image, in the manner of qemu-io
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// qemu-io's options, and the image
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Runs `cowslip io`.
pub fn run(args: Args, program: &Program) -> u8 {
    run_args(&args.args, program)
}

const LETTERS: &str = "hVc:d:f:rsnCmki:t:T:U";

const LONGS: &[Long] = &[
    long("help", 'h', Value::None),
    long("version", 'V', Value::None),
    long("cmd", 'c', Value::Required),
    long("format", 'f', Value::Required),
    long("read-only", 'r', Value::None),
    long("snapshot", 's', Value::None),
    long("nocache", 'n', Value::None),
    long("copy-on-read", 'C', Value::None),
    long("misalign", 'm', Value::None),
    long("native-aio", 'k', Value::None),
    long("aio", 'i', Value::Required),
    long("discard", 'd', Value::Required),
    long("cache", 't', Value::Required),
    long("trace", 'T', Value::Required),
    long("force-share", 'U', Value::None),
    Long {
        name: "object",
        letter: None,
        value: Value::Required,
    },
    Long {
        name: "image-opts",
        letter: None,
        value: Value::None,
    },
];

/// Options of our own. No shortened name stands for them.
const OWN: &[Long] = &[Long {
    name: "backing-policy",
    letter: None,
    value: Value::Required,
}];

const fn long(name: &'static str, letter: char, value: Value) -> Long {
    Long {
        name,
        letter: Some(letter),
        value,
    }
}

/// Request of the command line.
struct Line {
    request: ImageRequest,
    /// `--image-opts`.
    image_options: bool,
    commands: Vec<String>,
}

/// Why there is nothing to run.
enum Ended {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// The list of trace events, of which there are none.
    TraceEvents,
    /// A mistake of the command line's form, which earns the usage text.
    Mistake(Option<Mistake>),
    /// A mistake of its content.
    Complaint(String),
}

impl From<Mistake> for Ended {
    fn from(mistake: Mistake) -> Ended {
        Ended::Mistake(Some(mistake))
    }
}

fn parse_line(args: &[String], program: &Program) -> Result<Line, Ended> {
    let mut scanner = Scanner::new(args, LETTERS, LONGS).with_own(OWN);
    let mut request = ImageRequest::default();
    let mut commands = Vec::new();
    let mut image_options = false;
    while let Some(option) = scanner.next_option()? {
        let name = option.name;
        let value = option.value();
        match name {
            Name::Letter('h') => return Err(Ended::Help),
            Name::Letter('V') => return Err(Ended::Version),
            Name::Letter('c') => commands.push(value),
            Name::Letter('T') => match trace(&value, program).map_err(Ended::Complaint)? {
                Traced::Noted => {}
                Traced::Listed => return Err(Ended::TraceEvents),
            },
            Name::Letter('f') => request.format = Some(value),
            Name::Long("image-opts") => image_options = true,
            Name::Long("object") => {
                object::define(&value).map_err(|error| Ended::Complaint(error.to_string()))?
            }
            _ => request.take(name, &value).map_err(Ended::Complaint)?,
        }
    }
    let operands = scanner.operands();
    if operands.len() > 1 {
        return Err(Ended::Mistake(None));
    }
    if image_options && request.format.is_some() {
        return Err(Ended::Complaint(
            "--image-opts and -f are mutually exclusive".to_string(),
        ));
    }
    match (&operands[..], image_options) {
        ([], _) => {}
        ([file], false) => request.filename = Some(file.to_string()),
        ([options], true) => request.options = Some(options.to_string()),
        _ => return Err(Ended::Mistake(None)),
    }
    Ok(Line {
        request,
        image_options,
        commands,
    })
}

/// Runs the shell with the arguments behind the program's name. Returns the exit code.
pub fn run_args(args: &[OsString], program: &Program) -> u8 {
    let args = match output::utf8_arguments(args) {
        Ok(args) => args,
        Err(error) => return program.fail(&error),
    };
    match parse_line(&args, program) {
        Ok(line) => run_line(line, program),
        Err(Ended::Help) => {
            output::print(&usage(&program.name));
            0
        }
        Err(Ended::TraceEvents) => 0,
        Err(Ended::Version) => {
            output::print(&format!(
                "qemu-io version 10.0.2 (cowslip {})\n",
                env!("CARGO_PKG_VERSION")
            ));
            0
        }
        Err(Ended::Mistake(mistake)) => {
            if let Some(mistake) = mistake {
                program.complain(mistake);
            }
            output::print(&usage(&program.name));
            1
        }
        Err(Ended::Complaint(text)) => {
            program.complain(text);
            1
        }
    }
}

fn run_line(line: Line, program: &Program) -> u8 {
    // The image has to be closed whatever becomes of the text, and the other commands are run.
    output::outlasts_its_output();
    let queue = match Queue::new(Backend::Auto) {
        Ok(queue) => queue,
        Err(error) => {
            program.complain(cowslip::error::system_words(&error));
            return 1;
        }
    };
    let script = match line.commands.is_empty() {
        true => Script::Prompted,
        false => Script::Given(line.commands),
    };
    let mut shell = Shell::new(Out::new(program)).with_image_options(line.image_options);
    let succeeded = queue.block_on(async {
        if line.request.names_an_image() && !shell.open_first(line.request).await {
            return false;
        }
        shell.run(script).await
    });
    u8::from(!succeeded)
}

/// Runs lines of the shell on an open image, silently. Commands that reach beyond it (other files,
/// signals, the end of the process, waiting) are only taken apart. Returns whether all succeeded.
/// For fuzzing; runs on a queue.
pub async fn run_lines(image: cowslip::Image, lines: &[&str]) -> bool {
    let mut shell = Shell::new(Out::nowhere());
    shell.adopt(image);
    let harmless = lines.iter().filter(|line| !shell::reaches_out(line));
    let lines = harmless.map(|line| line.to_string()).collect();
    shell.run(Script::Given(lines)).await
}

fn usage(name: &str) -> String {
    let name = worded(name, format!("{name} io"));
    let about = worded(
        "QEMU Disk exerciser",
        "Read, write and examine an image, in the manner of qemu-io",
    );
    format!(
        "Usage: {name} [OPTIONS]... [-c STRING]... [file]
{about}

  --object OBJECTDEF   define an object such as 'secret' for
                       passwords and/or encryption keys
  --image-opts         treat file as option string
  -c, --cmd STRING     execute command with its arguments
                       from the given string
  -f, --format FMT     specifies the block driver to use
  -r, --read-only      export read-only
  -s, --snapshot       use snapshot file
  -n, --nocache        disable host cache, short for -t none
  -C, --copy-on-read   enable copy-on-read
  -m, --misalign       misalign allocations for O_DIRECT
  -k, --native-aio     use kernel AIO implementation
                       (Linux only, prefer use of -i)
  -i, --aio=MODE       use AIO mode (threads, native or io_uring)
  -t, --cache=MODE     use the given cache mode for the image
  -d, --discard=MODE   use the given discard mode for the image
  -T, --trace [[enable=]<pattern>][,events=<file>][,file=<file>]
                       specify tracing options
                       see qemu-img(1) man page for full description
  -U, --force-share    force shared permissions
      --backing-policy=POLICY
                       which backing files and data files images may name:
                       any, same-directory or none
  -h, --help           display this help and exit
  -V, --version        output version information and exit

See '{name} -c help' for information on available commands.
"
    )
}
