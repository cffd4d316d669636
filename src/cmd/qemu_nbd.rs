//! The command line of the name `qemu-nbd`, with its complaints.
//!
//! Left out, and refused in plain words: the kernel's NBD devices.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use cowslip::image::{DetectZeroes, DiscardPolicy};
use cowslip_exports::nbd::{self, DEFAULT_PORT, list};
use cowslip_exports::{Daemonize, Nbd, Service, Verbosity, sandbox};
use cowslip_nbd::remote::{Address, ClientSide, TlsName};
use cowslip_nbd::server::Lifetime;
use cowslip_nbd::tls::{ClientTls, ServerTls};
use cowslip_nodes::driver::Objects;

use crate::error::CommandError;
use crate::getopt::{Long, Mistake, Name, Scanner, Value};
use crate::open::discard_policy;
use crate::open::{self, Access, CacheMode, ImageSpec};
use crate::output::{self, Program};
use crate::trace::{Traced, trace};
use cowslip_cmdline::strtol::integer;

/// The longest string that the protocol carries.
const STRING_BYTES_MAX: usize = cowslip_nbd::protocol::STRING_BYTES_MAX;

const LETTERS: &str = "hVb:o:p:rsnc:dvk:e:f:tl:x:T:D:AB:L";

const LONGS: &[Long] = &[
    long("help", 'h', Value::None),
    long("version", 'V', Value::None),
    long("bind", 'b', Value::Required),
    long("port", 'p', Value::Required),
    long("socket", 'k', Value::Required),
    long("offset", 'o', Value::Required),
    long("read-only", 'r', Value::None),
    long("allocation-depth", 'A', Value::None),
    long("bitmap", 'B', Value::Required),
    long("connect", 'c', Value::Required),
    long("disconnect", 'd', Value::None),
    long("list", 'L', Value::None),
    long("snapshot", 's', Value::None),
    long("load-snapshot", 'l', Value::Required),
    long("nocache", 'n', Value::None),
    only_long("cache", Value::Required),
    only_long("aio", Value::Required),
    only_long("discard", Value::Required),
    only_long("detect-zeroes", Value::Required),
    long("shared", 'e', Value::Required),
    long("format", 'f', Value::Required),
    long("persistent", 't', Value::None),
    long("verbose", 'v', Value::None),
    only_long("object", Value::Required),
    long("export-name", 'x', Value::Required),
    long("description", 'D', Value::Required),
    only_long("tls-creds", Value::Required),
    only_long("tls-hostname", Value::Required),
    only_long("tls-authz", Value::Required),
    only_long("image-opts", Value::None),
    long("trace", 'T', Value::Required),
    only_long("fork", Value::None),
    only_long("pid-file", Value::Required),
    only_long("selinux-label", Value::Required),
    only_long("handshake-limit", Value::Required),
];

/// Options of our own, which restrict the server. No shortened name stands for them.
const OWN: &[Long] = &[
    only_long("backing-policy", Value::Required),
    only_long("sandbox", Value::Required),
];

const fn long(name: &'static str, letter: char, value: Value) -> Long {
    Long {
        name,
        letter: Some(letter),
        value,
    }
}

const fn only_long(name: &'static str, value: Value) -> Long {
    Long {
        name,
        letter: None,
        value,
    }
}

/// Request of the command line.
enum Wish {
    Serve(Box<(Service, Nbd)>),
    List(Address, Option<ClientTls>),
    Help,
    Version,
    TraceEvents,
}

/// Why the command line cannot be followed.
enum Refusal {
    Mistake(Mistake),
    /// None or several files, where one is needed.
    Count,
    Complaint(String),
    /// Two lines: what, and of what.
    Complaints([String; 2]),
}

impl From<Mistake> for Refusal {
    fn from(mistake: Mistake) -> Refusal {
        Refusal::Mistake(mistake)
    }
}

fn complaint<T>(text: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Complaint(text.into()))
}

/// Runs qemu-nbd with the arguments behind the program's name. Returns the exit code.
pub fn run_args(args: &[OsString], program: &Program) -> u8 {
    let args = match output::utf8_arguments(args) {
        Ok(args) => args,
        Err(error) => return program.fail(&error),
    };
    match wish(&args, program) {
        Ok(Wish::Serve(wanted)) => {
            let (service, nbd) = *wanted;
            service.start(&[&nbd], program)
        }
        Ok(Wish::List(address, tls)) => program.exit_code(list::list(&address, tls.as_ref())),
        Ok(Wish::Help) => {
            output::print(&help(&program.name));
            0
        }
        Ok(Wish::Version) => {
            let version = env!("CARGO_PKG_VERSION");
            output::print(&format!("qemu-nbd 10.0.2 (cowslip {version})\n"));
            0
        }
        Ok(Wish::TraceEvents) => 0,
        Err(Refusal::Mistake(mistake)) => {
            program.complain(mistake);
            program.complain(format_args!(
                "Try `{} --help' for more information.",
                program.name
            ));
            1
        }
        Err(Refusal::Count) => program.fail(&CommandError::new(format!(
            "Invalid number of arguments\nTry `{} --help' for more information.",
            program.name
        ))),
        Err(Refusal::Complaint(text)) => {
            program.complain(text);
            1
        }
        Err(Refusal::Complaints(lines)) => {
            lines.iter().for_each(|line| program.complain(line));
            1
        }
    }
}

/// The command line as it is read, before the image is known.
struct Line {
    service: Service,
    nbd: Nbd,
    format: Option<String>,
    image_options: bool,
    host: Option<String>,
    port: Option<String>,
    socket: Option<String>,
    cache_given: bool,
    discard_given: bool,
    aio_given: bool,
    lists: bool,
    /// A device of the kernel's is to be connected, or disconnected.
    kernel: Option<Kernel>,
    /// Options that are about an image were given.
    of_image: bool,
    tls: TlsWords,
}

/// Request for the kernel's NBD devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Connect,
    Disconnect,
}

impl Kernel {
    /// Why it is not done here, and who does it.
    fn refusal(self) -> &'static str {
        match self {
            Kernel::Connect => {
                "The kernel's NBD devices (-c) are not supported: serve on a socket (-t -k SOCKET) and connect the \
                 device with 'nbd-client -unix SOCKET DEVICE'"
            }
            Kernel::Disconnect => {
                "The kernel's NBD devices (-d) are not supported: use 'nbd-client -d DEVICE'"
            }
        }
    }
}

/// Options of TLS, before the objects are known.
#[derive(Default)]
struct TlsWords {
    credentials: Option<String>,
    hostname: Option<String>,
    authorization: Option<String>,
}

fn wish(args: &[String], program: &Program) -> Result<Wish, Refusal> {
    let mut scanner = Scanner::new(args, LETTERS, LONGS).with_own(OWN);
    let mut line = Line {
        service: Service::of(ImageSpec::named("", None)),
        nbd: Nbd::default(),
        format: None,
        image_options: false,
        host: None,
        port: None,
        socket: None,
        cache_given: false,
        discard_given: false,
        aio_given: false,
        lists: false,
        kernel: None,
        of_image: false,
        tls: TlsWords::default(),
    };
    while let Some(option) = scanner.next_option()? {
        let name = option.name;
        match name {
            Name::Letter('h') => return Ok(Wish::Help),
            Name::Letter('V') => return Ok(Wish::Version),
            Name::Letter('T') => match trace(&option.value(), program) {
                Ok(Traced::Listed) => return Ok(Wish::TraceEvents),
                Ok(Traced::Noted) => {}
                Err(why) => return complaint(why),
            },
            _ => line.take(name, option.value())?,
        }
    }
    line.finish(&scanner.operands())
}

/// A number as the C library reads it: also hexadecimal and octal.
fn number(text: &str) -> Option<i64> {
    integer(text)
}

impl Line {
    fn take(&mut self, name: Name, value: String) -> Result<(), Refusal> {
        self.of_image |= matches!(
            name,
            Name::Letter('x' | 'f' | 'l' | 'A' | 'B' | 'D' | 'n')
                | Name::Long("aio" | "discard" | "cache")
        );
        let (service, nbd) = (&mut self.service, &mut self.nbd);
        match name {
            Name::Letter('b') => self.host = Some(value),
            Name::Letter('p') => self.port = Some(value),
            Name::Letter('k') if value.starts_with('/') => self.socket = Some(value),
            Name::Letter('k') => return complaint("socket path must be absolute"),
            Name::Letter('f') => self.format = Some(value),
            Name::Long("image-opts") => self.image_options = true,
            Name::Letter('L') => self.lists = true,
            Name::Letter('A') => nbd.has_depth_context = true,
            Name::Letter('B') => nbd.bitmaps.push(value),
            Name::Long("tls-creds") => self.tls.credentials = Some(value),
            Name::Long("tls-hostname") => self.tls.hostname = Some(value),
            Name::Long("tls-authz") => self.tls.authorization = Some(value),
            Name::Letter('r') => service.settings.access = Access::Read,
            Name::Letter('s') => service.settings.temporary = true,
            Name::Letter('t') => nbd.lifetime = Lifetime::UntilStopped,
            Name::Letter('v') => service.verbosity = Verbosity::Everything,
            Name::Long("fork") => service.daemonize = Daemonize::Yes,
            Name::Long("sandbox") => match sandbox::Mode::parse(&value) {
                Some(mode) => service.sandbox = mode,
                None => return complaint(format!("Invalid sandbox mode '{value}'")),
            },
            Name::Long("pid-file") => service.pid_file = Some(PathBuf::from(value)),
            Name::Letter('x') => nbd.export_name = limited("export name", value)?,
            Name::Letter('D') => nbd.description = limited("export description", value)?,
            // An offset beyond the image, also a negative one, is refused when the image is open.
            Name::Letter('o') => match number(&value) {
                Some(offset) => service.offset = offset as u64,
                None => return complaint(format!("Invalid offset '{value}'")),
            },
            Name::Letter('e') => match number(&value).map(i32::try_from) {
                Some(Ok(0)) => nbd.clients_max = None,
                Some(Ok(clients)) if clients > 0 => {
                    nbd.clients_max = usize::try_from(clients).ok();
                }
                _ => return complaint(format!("Invalid shared device number '{value}'")),
            },
            Name::Long("handshake-limit") => match number(&value).map(u32::try_from) {
                // QEMU's 0 is no limit; ten years are as good.
                Some(Ok(0)) => nbd.handshake_timeout = Duration::from_secs(10 * 365 * 86400),
                Some(Ok(seconds)) => {
                    nbd.handshake_timeout = Duration::from_secs(seconds.into());
                }
                _ => return complaint(format!("Invalid handshake limit '{value}'")),
            },
            Name::Letter('c') => self.kernel = Some(Kernel::Connect),
            Name::Letter('d') => self.kernel = Some(Kernel::Disconnect),
            _ => return self.take_image_option(name, value),
        }
        Ok(())
    }

    fn take_image_option(&mut self, name: Name, value: String) -> Result<(), Refusal> {
        let settings = &mut self.service.settings;
        match name {
            Name::Letter('n') | Name::Long("cache") if self.cache_given => {
                return complaint("-n and --cache can only be specified once");
            }
            Name::Letter('n') => {
                self.cache_given = true;
                settings.cache = CacheMode::None;
            }
            Name::Long("cache") => {
                self.cache_given = true;
                settings.cache = CacheMode::parse(&value)
                    .ok_or_else(|| Refusal::Complaint(format!("Invalid cache mode `{value}'")))?;
            }
            Name::Long("aio") if self.aio_given => {
                return complaint("--aio can only be specified once");
            }
            Name::Long("discard") if self.discard_given => {
                return complaint("--discard can only be specified once");
            }
            Name::Long("aio") => {
                settings.aio = open::parse_aio(&value)
                    .ok_or_else(|| Refusal::Complaint(format!("Invalid aio mode '{value}'")))?;
                settings.aio_is_native = value == "native";
                self.aio_given = true;
            }
            Name::Long("backing-policy") => {
                settings.policy = open::parse_policy(&value).map_err(Refusal::Complaint)?;
            }
            Name::Long("discard") => {
                self.discard_given = true;
                settings.discard = discard_policy(&value)
                    .ok_or_else(|| Refusal::Complaint(format!("Invalid discard mode `{value}'")))?;
            }
            Name::Long("detect-zeroes") => {
                settings.detect_zeroes = DetectZeroes::from_name(&value).ok_or_else(|| {
                    let text = "Failed to parse detect_zeroes mode: invalid parameter value";
                    Refusal::Complaint(format!("{text}: {value}"))
                })?;
                // The discards that were asked for so far.
                let unmaps = settings.discard == DiscardPolicy::Unmap;
                if settings.detect_zeroes == DetectZeroes::Unmap && !unmaps {
                    let text = "setting detect-zeroes to unmap is not allowed without setting discard \
                                operation to unmap";
                    return complaint(text);
                }
            }
            Name::Letter('l') => {
                let choice = open::parse_choice(&value).map_err(|why| {
                    let of = format!("Failed in parsing snapshot param `{value}'");
                    Refusal::Complaints([why, of])
                })?;
                settings.snapshot = Some(choice);
                settings.access = Access::Read;
            }
            Name::Long("object") => open::object::define(&value)
                .map_err(|error| Refusal::Complaint(error.to_string()))?,
            _ => return refuse(name),
        }
        Ok(())
    }

    fn finish(mut self, operands: &[&str]) -> Result<Wish, Refusal> {
        self.nbd.address = match self.socket {
            Some(path) => Address::Unix(PathBuf::from(path)),
            None => Address::Tcp {
                host: self.host.unwrap_or_else(|| "0.0.0.0".to_string()),
                port: self.port.unwrap_or_else(|| DEFAULT_PORT.to_string()),
            },
        };
        if self.lists {
            if !operands.is_empty() {
                return complaint("List mode is incompatible with a file name");
            }
            if self.of_image || self.kernel.is_some() || self.service.offset > 0 {
                return complaint("List mode is incompatible with per-device settings");
            }
            if self.service.daemonize == Daemonize::Yes {
                return complaint("List mode is incompatible with forking");
            }
            self.tls.validate(self.lists)?;
            let tls = self.tls.for_listing(&self.nbd.address)?;
            return Ok(Wish::List(self.nbd.address, tls));
        }
        let [file] = operands else {
            return Err(Refusal::Count);
        };
        self.tls.validate(self.lists)?;
        self.nbd.tls = self.tls.for_serving()?;
        if let Some(kernel) = self.kernel {
            return complaint(kernel.refusal());
        }
        if self.image_options && self.format.is_some() {
            return complaint("--image-opts and -f are mutually exclusive");
        }
        self.service.spec = ImageSpec {
            image_opts: self.image_options,
            ..ImageSpec::named(file, self.format.as_deref())
        };
        Ok(Wish::Serve(Box::new((self.service, self.nbd))))
    }
}

impl TlsWords {
    fn validate(&self, lists: bool) -> Result<(), Refusal> {
        if self.credentials.is_none() {
            for (name, given) in [
                ("--tls-hostname", &self.hostname),
                ("--tls-authz", &self.authorization),
            ] {
                if given.is_some() {
                    return complaint(format!("{name} is not permitted without --tls-creds"));
                }
            }
        }
        match (lists, &self.hostname, &self.authorization) {
            (false, Some(_), _) => complaint("TLS hostname is only supported with export list"),
            (true, _, Some(_)) => complaint("TLS authorization is incompatible with export list"),
            _ => Ok(()),
        }
    }

    fn for_listing(self, address: &Address) -> Result<Option<ClientTls>, Refusal> {
        let Some(id) = self.credentials else {
            return Ok(None);
        };
        let known = open::object::client_credentials(&id);
        known.map_err(|why| Refusal::Complaint(format!("Failed to get TLS creds: {why}")))?;
        let name = TlsName {
            credentials: ClientSide::Object(id),
            hostname: self.hostname,
        };
        let tls = open::object::Defined.tls_to(address, &name);
        tls.map(Some)
            .map_err(|why| Refusal::Complaint(why.to_string()))
    }

    fn for_serving(self) -> Result<Option<ServerTls>, Refusal> {
        let tls = nbd::tls(self.credentials.as_deref(), self.authorization.as_deref());
        tls.map_err(|why| Refusal::Complaint(format!("Failed to get TLS creds: {why}")))
    }
}

/// Options that name what is not done here.
fn refuse(name: Name) -> Result<(), Refusal> {
    complaint(match name {
        Name::Long("selinux-label") => "SELinux labels are not supported (--selinux-label)",
        other => unreachable!("{other:?} is taken before"),
    })
}

fn limited(what: &str, value: String) -> Result<String, Refusal> {
    match value.len() > STRING_BYTES_MAX {
        true => complaint(format!("{what} '{value}' too long")),
        false => Ok(value),
    }
}

fn help(name: &str) -> String {
    format!(
        "Usage: {name} [OPTIONS] FILE
  or:  {name} -L [OPTIONS]
QEMU Disk Network Block Device Utility

  -h, --help                display this help and exit
  -V, --version             output version information and exit

Connection properties:
  -p, --port=PORT           port to listen on (default `10809')
  -b, --bind=IFACE          interface to bind to (default `0.0.0.0')
  -k, --socket=PATH         path to the unix socket
  -e, --shared=NUM          device can be shared by NUM clients (default '1')
  -t, --persistent          don't exit on the last connection
  -v, --verbose             display extra debugging information
  -x, --export-name=NAME    expose export by name (default is empty string)
  -D, --description=TEXT    export a human-readable description
      --handshake-limit=N   limit client's handshake to N seconds (default 10)
      --tls-creds=ID        use the object ID (--object tls-creds-x509 or
                            tls-creds-psk) for TLS, and serve nobody without
      --tls-authz=ID        serve those clients only that the object ID allows
                            (--object authz-simple or authz-list)
      --tls-hostname=NAME   with --list, the host that the server's certificate
                            has to be for

Exposing part of the image:
  -o, --offset=OFFSET       offset into the image
  -A, --allocation-depth    expose the allocation depth
  -B, --bitmap=NAME         expose a persistent dirty bitmap

General purpose options:
  -L, --list                list exports available from another NBD server
      --fork                fork off the server process and exit the parent
                            once the server is running
      --pid-file=PATH       store the server's process ID in the given file
      --sandbox=MODE        give up what serving does not need: auto (default),
                            on or off

Block device options:
  -f, --format=FORMAT       set image format (raw, qcow2)
  -r, --read-only           export read-only
  -n, --nocache             disable host cache
      --cache=MODE          set cache mode used to access the disk image, the
                            valid options are: 'none', 'writeback' (default),
                            'writethrough', 'directsync' and 'unsafe'
      --aio=MODE            set AIO mode (native, io_uring or threads)
      --discard=MODE        set discard mode (ignore, unmap)
      --detect-zeroes=MODE  set detect-zeroes mode (off, on, unmap)
      --image-opts          treat FILE as a full set of image options
      --backing-policy=POLICY
                            which backing files and data files images may name:
                            'any' (default), 'same-directory' or 'none'
"
    )
}
