//! The only process of a guest, besides those that it starts: this program, as process 1.
//!
//! It loads the modules that it finds, and then takes orders from the second serial port, one a
//! line: the words of a command line of this program, or of one that begins with the path of
//! another, whose standard output goes back by the same port. Complaints go to the console. After
//! each order, and once before the first, a line says how the last one ended. An empty order, or
//! none for a long time, turns the machine off.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cowslip_console::output::Program;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, finit_module, reboot};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

/// The verb.
pub const VERB: &str = "guest-init";
/// Line of the guest when it is ready for an order, before the exit code of the last one.
pub const READY: &str = "cowslip guest: ready ";
/// The guest's disk.
pub const DISK: &str = "/dev/vda";
/// Where in the archive its modules are.
pub const MODULES: &str = "modules";

/// Where orders come from.
const PORT: &str = "/dev/ttyS1";
/// The host sends orders at once; if none comes it is gone.
const PATIENCE_SECONDS: i64 = 300;
/// A disk is there soon after its driver.
const DISK_WITHIN: Duration = Duration::from_secs(20);
/// The kernel shall decompress the module (`MODULE_INIT_COMPRESSED_FILE`).
const COMPRESSED: i32 = 4;

/// Command line of the guest's process 1.
#[derive(clap::Args)]
pub struct Args {}

/// Serves the host until it wants no more; then there is no machine.
pub fn run(_: &Args, program: &Program) -> u8 {
    if std::process::id() != 1 {
        program.complain(format_args!(
            "{VERB} is for process 1 of a guest of 'bench'"
        ));
        return 1;
    }
    if let Err(error) = serve() {
        program.complain(error);
    }
    // If it returns, this process ends, and the kernel does not survive that.
    match reboot(RebootCommand::PowerOff) {
        Ok(()) => 0,
        Err(_) => 1,
    }
}

fn serve() -> Result<(), String> {
    let words = |what: &str, e: io::Error| format!("Could not {what}: {e}");
    for (kind, place) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        match mount(kind, place, kind, MountFlags::empty(), None) {
            // The kernel may have mounted it.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(e) => return Err(words(&format!("mount {kind}"), e.into())),
        }
    }
    load_modules()?;
    wait_for_disk()?;
    let mut port = open_port().map_err(|e| words(&format!("open {PORT}"), e))?;
    let reader = port.try_clone();
    let mut orders = BufReader::new(reader.map_err(|e| words("read orders", e))?);
    let mut last = 0;
    loop {
        writeln!(port, "{READY}{last}").map_err(|e| words("answer", e))?;
        let order = next_order(&port, &mut orders).map_err(|e| words("read orders", e))?;
        if order.is_empty() {
            return Ok(());
        }
        let is_tool = order[0].starts_with('/');
        let mut command = Command::new(if is_tool { &order[0] } else { "/proc/self/exe" });
        let output = port.try_clone().map_err(|e| words("answer", e))?;
        command.args(&order[usize::from(is_tool)..]);
        command.stdin(Stdio::null()).stdout(output);
        let status = command.status().map_err(|e| words("run a program", e))?;
        last = status.code().unwrap_or(-1);
    }
}

/// Loads modules. Some need others, and the needs differ between kernels: those that miss something
/// are tried again after the others, as long as that helps.
fn load_modules() -> Result<(), String> {
    let failed = |path: &Path, e: io::Error| format!("Could not load '{}': {e}", path.display());
    let directory = Path::new("/").join(MODULES);
    let entries = fs::read_dir(&directory).map_err(|e| failed(&directory, e))?;
    let mut modules: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    while !modules.is_empty() {
        let mut left = Vec::new();
        for module in &modules {
            match load(module) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => left.push(module.clone()),
                Err(e) => return Err(failed(module, e)),
            }
        }
        if left.len() == modules.len() {
            let missing = io::Error::other("It needs another module");
            return Err(failed(&left[0], missing));
        }
        modules = left;
    }
    Ok(())
}

fn load(module: &Path) -> io::Result<()> {
    let file = File::open(module)?;
    let flags = match module.extension().is_some_and(|suffix| suffix == "ko") {
        true => 0,
        false => COMPRESSED,
    };
    match finit_module(&file, c"", flags) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn wait_for_disk() -> Result<(), String> {
    let start = Instant::now();
    while !Path::new(DISK).exists() {
        if start.elapsed() > DISK_WITHIN {
            return Err(format!("There is no {DISK}"));
        }
        sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The port, without a terminal's habits: no echo, no change of what passes.
fn open_port() -> io::Result<File> {
    let port = File::options().read(true).write(true).open(PORT)?;
    let mut habits = tcgetattr(&port)?;
    habits.make_raw();
    tcsetattr(&port, OptionalActions::Now, &habits)?;
    Ok(port)
}

/// The words of the next line; none if nobody sends one.
fn next_order(port: &File, orders: &mut impl BufRead) -> io::Result<Vec<String>> {
    let patience = Timespec {
        tv_sec: PATIENCE_SECONDS,
        tv_nsec: 0,
    };
    let mut ready = [PollFd::new(port, PollFlags::IN)];
    if poll(&mut ready, Some(&patience))? == 0 {
        return Ok(Vec::new());
    }
    let mut line = String::new();
    orders.read_line(&mut line)?;
    Ok(line.split_whitespace().map(str::to_string).collect())
}
