//! The command line of the name `qemu-storage-daemon`, with its complaints.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;
use cowslip_cmdline::getopt::{Long, Name, Scanner, Value};
use cowslip_cmdline::trace::{Traced, trace};
use cowslip_console::error::CommandError;
use cowslip_console::output::{self, Program};
use cowslip_exports::{Daemonize, LogFormat, Verbosity};

use super::line::{Line, Step};

const LETTERS: &str = "hT:V";

const LONGS: &[Long] = &[
    long("blockdev", None, Value::Required),
    long("chardev", None, Value::Required),
    long("daemonize", None, Value::None),
    long("export", None, Value::Required),
    long("help", Some('h'), Value::None),
    long("monitor", None, Value::Required),
    long("nbd-server", None, Value::Required),
    long("object", None, Value::Required),
    long("pidfile", None, Value::Required),
    long("trace", Some('T'), Value::Required),
    long("version", Some('V'), Value::None),
];

/// Options of our own. No shortened name stands for them.
const OWN: &[Long] = &[
    long("control", None, Value::Required),
    long("log-format", None, Value::Required),
    long("metrics", None, Value::Required),
    long("monitor-group", None, Value::Required),
    long("sandbox", None, Value::Required),
    long("sandbox-dir", None, Value::Required),
    long("verbose", None, Value::None),
];

const fn long(name: &'static str, letter: Option<char>, value: Value) -> Long {
    Long {
        name,
        letter,
        value,
    }
}

/// Request of the command line.
enum Wish {
    Serve(Line),
    Help,
    Version,
    TraceEvents,
}

/// Runs qemu-storage-daemon with the arguments behind the program's name. Returns the exit code.
pub fn run_args(args: &[OsString], program: &Program) -> u8 {
    let wish = output::utf8_arguments(args).and_then(|args| wish(&args, program));
    match wish {
        Ok(Wish::Serve(line)) => super::run_line(line, program),
        Ok(Wish::Help) => {
            output::print(&help(&program.name));
            0
        }
        Ok(Wish::Version) => {
            let version = env!("CARGO_PKG_VERSION");
            output::print(&format!(
                "qemu-storage-daemon version 10.0.2 (cowslip {version})\n"
            ));
            0
        }
        Ok(Wish::TraceEvents) => 0,
        Err(error) => program.fail(&error),
    }
}

fn wish(args: &[String], program: &Program) -> Result<Wish, CommandError> {
    let mut scanner = Scanner::new(args, LETTERS, LONGS).with_own(OWN);
    let mut line = Line {
        steps: Vec::new(),
        pidfile: None,
        daemonize: Daemonize::No,
        verbosity: Verbosity::Errors,
        log_format: LogFormat::Lines,
        monitor_group: None,
        sandbox: (None, Vec::new()),
    };
    let next = |scanner: &mut Scanner<'_>| {
        let found = scanner.next_option();
        found.map_err(|mistake| CommandError::new(mistake.to_string()))
    };
    while let Some(option) = next(&mut scanner)? {
        line.note_operand(scanner.first_operand());
        let name = option.name;
        let value = option.value();
        let step = match name {
            Name::Letter('h') => return Ok(Wish::Help),
            Name::Letter('V') => return Ok(Wish::Version),
            Name::Letter('T') => match trace(&value, program) {
                Ok(Traced::Listed) => return Ok(Wish::TraceEvents),
                Ok(Traced::Noted) => continue,
                Err(why) => return Err(CommandError::new(why)),
            },
            Name::Long("daemonize") => {
                line.daemonize = Daemonize::Yes;
                continue;
            }
            Name::Long("verbose") => {
                line.verbosity = Verbosity::Everything;
                continue;
            }
            Name::Long("log-format") => {
                let found = LogFormat::from_str(&value, false);
                let refuse = |_| CommandError::new("--log-format has to be lines or json");
                line.log_format = found.map_err(refuse)?;
                continue;
            }
            Name::Long(own @ ("monitor-group" | "sandbox" | "sandbox-dir")) => {
                let taken = line.take_own(own, &value);
                taken.map_err(|why| CommandError::new(format!("--{own}: {why}")))?;
                continue;
            }
            Name::Long("pidfile") => {
                line.pidfile = Some(PathBuf::from(value));
                continue;
            }
            Name::Long("blockdev") => Step::Node(value),
            Name::Long("chardev") => Step::Chardev(value),
            Name::Long("control") => Step::Control(PathBuf::from(value)),
            Name::Long("export") => Step::Export(value),
            Name::Long("metrics") => Step::Metrics(value),
            Name::Long("monitor") => Step::Monitor(value),
            Name::Long("nbd-server") => Step::NbdServer(value),
            Name::Long("object") => Step::Object(value),
            other => unreachable!("{other:?} is in the table"),
        };
        line.steps.push(step);
    }
    line.note_operand(scanner.first_operand());
    Ok(Wish::Serve(line))
}

impl Line {
    /// Takes an option of ours that has the form of `cowslip daemon`.
    fn take_own(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "monitor-group" => self.monitor_group = Some(super::line::group(value)?),
            "sandbox" => self.sandbox.0 = Some(super::sandbox_mode(value)?),
            _ => self.sandbox.1.push(PathBuf::from(value)),
        }
        Ok(())
    }

    /// Notes the first operand, which is refused when its turn comes.
    fn note_operand(&mut self, operand: Option<&str>) {
        let is_noted = self.steps.iter().any(|it| matches!(it, Step::Operand(_)));
        if let (Some(operand), false) = (operand, is_noted) {
            self.steps.push(Step::Operand(operand.to_string()));
        }
    }
}

/// Text of `--help`. Lists of options may be JSON, too.
fn help(name: &str) -> String {
    format!(
        "\
Usage: {name} [OPTIONS]
Serve disks that are added, changed and removed over a control socket (QMP)

Options are followed in the order of the line:
  --object TYPE,id=ID,...      define secret, tls-creds-x509, tls-creds-psk, authz-simple,
                               authz-list or iothread
  --blockdev DRIVER,node-name=NAME,...
                               add a node: an image, or a file
  --nbd-server addr.type=unix,addr.path=PATH or addr.type=inet,addr.host=HOST,addr.port=PORT
               [,tls-creds=ID][,tls-authz=ID][,max-connections=N]
                               start the NBD server
  --export nbd,id=ID,node-name=NAME[,name=EXPORT][,writable=on|off]
  --export vhost-user-blk,id=ID,node-name=NAME,addr.type=unix,addr.path=PATH[,writable=on|off]
           [,logical-block-size=BYTES][,num-queues=N]
  --export fuse,id=ID,node-name=NAME,mountpoint=FILE[,writable=on|off][,allow-other=on|off|auto]
                               offer a node to clients
  --chardev socket,id=ID,path=PATH[,server=on,wait=off]
  --chardev stdio,id=ID        a way for --monitor
  --monitor CHARDEV[,mode=control]
                               serve clients of the control protocol

At any place:
  --daemonize                  go into the background once everything is there
  --pidfile PATH               write the process number into this file
  -h, --help                   show this text
  -V, --version                show the version
  -T, --trace PATTERN          accepted for compatibility; there are no trace points
  --control PATH               ours: the same as a socket chardev and a monitor
  --metrics ADDRESS            ours: figures for Prometheus at http://ADDRESS/metrics
  --log-format lines|json      ours: the form of reports
  --monitor-group GROUP        ours: its members may connect to sockets of monitors, too
  --sandbox off|auto|on        ours: confine the daemon before it opens images
  --sandbox-dir DIR            ours: a directory for images and sockets in spite of that
  --verbose                    ours: report events on standard error
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(words: &[&str]) -> Result<Vec<String>, String> {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let program = Program::called("qemu-storage-daemon".as_ref());
        match wish(&words, &program) {
            Ok(Wish::Serve(line)) => {
                let steps = line.steps.iter().map(|step| format!("{step:?}"));
                Ok(steps.collect())
            }
            Ok(_) => Err("no line to serve".to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn steps_keep_the_order_of_the_line() {
        let line = [
            "--export",
            "nbd,id=e,node-name=n",
            "--blockdev=null-co,node-name=n",
            "disk.img",
            "--daemonize",
            "--mon",
            "c",
        ];
        let expected = [
            "Export(\"nbd,id=e,node-name=n\")",
            "Node(\"null-co,node-name=n\")",
            "Operand(\"disk.img\")",
            "Monitor(\"c\")",
        ];
        assert_eq!(steps(&line).unwrap(), expected);
    }

    #[test]
    fn mistakes_are_reported_in_the_words_of_qemu() {
        for (line, expected) in [
            (&["--bad"][..], "unrecognized option '--bad'"),
            (&["-x"], "invalid option -- 'x'"),
            (&["--export"], "option '--export' requires an argument"),
            // A shortened name stands for none of ours.
            (&["--verb"], "unrecognized option '--verb'"),
        ] {
            assert_eq!(steps(line), Err(expected.to_string()));
        }
    }
}
