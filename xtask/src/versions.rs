//! `cargo xtask versions OLD`: this version's command and an older one in turn, on a loop-mounted
//! file system: the time and the CPU time of what users wait for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_testbed::{Spread, TextColumns, populate};

use crate::run;
use crate::scratch_place::PlaceArgs;

/// Options of `cargo xtask versions`.
#[derive(clap::Args)]
pub struct Args {
    /// The older command
    #[arg(value_name = "OLD")]
    old: PathBuf,
    /// The newer one; a release build of this tree if it is not given
    #[arg(long, value_name = "NEW")]
    new: Option<PathBuf>,
    /// Runs of each command in each row
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only rows whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    #[command(flatten)]
    place: PlaceArgs,
}

const DISK_BYTES: u64 = 512 << 20;
/// Requests of a run; of NBD, which takes longer, a third.
const REQUESTS: u32 = 200_000;
/// Starts of the command in a run.
const STARTS: usize = 50;
/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);

/// A row.
struct Row {
    name: &'static str,
    /// Command lines before each run, not measured: options of `create`.
    create: Option<&'static str>,
    work: Work,
}

/// Work that is measured.
enum Work {
    /// A command line, this often.
    Lines(&'static str, usize),
    /// Requests in process: the end of the line of `bench`.
    Bench(&'static str),
    /// Requests of fio to an export: its name for them.
    Served(&'static str),
}

const BENCH: &str = "bench -n -t none -i io_uring -d 32 -s 4096 -S 1056768 -f qcow2";

const ROWS: &[Row] = &[
    row("start", None, Work::Lines("info full.qcow2", STARTS)),
    row("first writes, 64K", Some(""), Work::Bench("-w new.qcow2")),
    row(
        "first writes, 64K, subclusters",
        Some("-o extended_l2=on"),
        Work::Bench("-w new.qcow2"),
    ),
    row("overwrites", None, Work::Bench("-w full.qcow2")),
    row("reads", None, Work::Bench("full.qcow2")),
    row("NBD, reads", None, Work::Served("randread")),
    row("NBD, overwrites", None, Work::Served("randwrite")),
    row(
        "convert to qcow2",
        None,
        Work::Lines("convert -O qcow2 full.qcow2 out.img", 1),
    ),
    row(
        "convert to raw",
        None,
        Work::Lines("convert -O raw full.qcow2 out.img", 1),
    ),
    row("check", None, Work::Lines("check -q full.qcow2", 20)),
];

const fn row(name: &'static str, create: Option<&'static str>, work: Work) -> Row {
    Row { name, create, work }
}

/// Time and CPU time, in seconds.
#[derive(Clone, Copy)]
struct Sample {
    elapsed: f64,
    cpu: f64,
}

/// Makes the file system, and prints the table.
pub fn run(args: &Args) -> Result<(), String> {
    let new = match &args.new {
        Some(new) => new.clone(),
        None => {
            run::run(run::cargo().args(["build", "--release", "--bin", "cowslip"]))?;
            run::target().join("release/cowslip")
        }
    };
    let absolute = |path: &Path| {
        let found = fs::canonicalize(path);
        found.map_err(|e| format!("cannot find {}: {e}", path.display()))
    };
    let programs = [absolute(&args.old)?, absolute(&new)?];
    args.place
        .measure(("versions", run::target()), |directory| {
            table(args, &programs, directory)
        })
}

fn table(args: &Args, programs: &[PathBuf; 2], directory: &Path) -> Result<(), String> {
    let raw = directory.join("full.raw");
    populate(&raw, DISK_BYTES)?;
    execute(
        &programs[0],
        "convert -O qcow2 full.raw full.qcow2",
        directory,
    )?;
    fs::remove_file(&raw).map_err(|e| format!("cannot remove {}: {e}", raw.display()))?;
    let chosen = |row: &&Row| {
        args.only
            .as_ref()
            .is_none_or(|only| row.name.contains(only))
    };
    let mut columns = TextColumns::default()
        .names("", ROWS.iter().map(|row| row.name))
        .numbers([("old, s", 7), ("new, s", 7), ("speed", 6)])
        .numbers([("old, CPU s", 7), ("new, CPU s", 7), ("CPU", 6)]);
    for row in ROWS.iter().filter(chosen) {
        let mut samples = [Vec::new(), Vec::new()];
        for round in 0..args.rounds {
            for at in [round % 2, 1 - round % 2] {
                samples[at].push(row.measure(&programs[at], directory)?);
            }
        }
        let median = |at: usize, of: fn(&Sample) -> f64| {
            let spread = Spread::of(samples[at].iter().map(of).collect());
            spread.map_or(f64::NAN, |spread| spread.median)
        };
        let elapsed = [0, 1].map(|at| median(at, |sample| sample.elapsed));
        let cpu = [0, 1].map(|at| median(at, |sample| sample.cpu));
        let mut fields = vec![row.name.to_string()];
        fields.extend(elapsed.map(|seconds| format!("{seconds:.3}")));
        fields.push(format!("{:.2}", elapsed[0] / elapsed[1]));
        fields.extend(cpu.map(|seconds| format!("{seconds:.2}")));
        fields.push(format!("{:.2}", cpu[1] / cpu[0]));
        print!("{}", columns.row(&fields));
    }
    Ok(())
}

impl Row {
    fn measure(&self, program: &Path, directory: &Path) -> Result<Sample, String> {
        for name in ["new.qcow2", "out.img"] {
            let path = directory.join(name);
            if path.exists() {
                fs::remove_file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            }
        }
        if let Some(options) = self.create {
            let line = format!("create -q -f qcow2 {options} new.qcow2 {DISK_BYTES}");
            execute(program, &line, directory)?;
        }
        match self.work {
            Work::Lines(line, times) => lines(program, (line, times), directory),
            Work::Bench(end) => {
                let line = format!("{BENCH} -c {REQUESTS} {end}");
                lines(program, (&line, 1), directory)
            }
            Work::Served(requests) => served(program, requests, directory),
        }
    }
}

/// A command line, run this often.
fn lines(program: &Path, (line, times): (&str, usize), directory: &Path) -> Result<Sample, String> {
    let (begun, before) = (Instant::now(), cpu_of("self", CHILDREN)?);
    for _ in 0..times {
        execute(program, line, directory)?;
    }
    Ok(Sample {
        elapsed: begun.elapsed().as_secs_f64(),
        cpu: cpu_of("self", CHILDREN)? - before,
    })
}

/// Requests of fio to a server, and the CPU time of the server.
fn served(program: &Path, requests: &str, directory: &Path) -> Result<Sample, String> {
    let socket = directory.join("nbd.sock");
    let mut serve = Command::new(program);
    serve.current_dir(directory).args(["serve", "full.qcow2"]);
    serve.args(["--cache", "none", "--aio", "io_uring", "--socket"]);
    let serve = serve.arg(&socket).stdout(Stdio::null()).spawn();
    let mut server = Server(serve.map_err(|e| format!("cannot run {}: {e}", program.display()))?);
    let begun = Instant::now();
    while !socket.exists() {
        if begun.elapsed() > PATIENCE {
            return Err(format!("{} does not listen", program.display()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let id = server.0.id().to_string();
    let before = cpu_of(&id, OWN)?;
    let mut fio = Command::new("fio");
    fio.args(["--name=nbd", "--ioengine=nbd", "--bs=4k", "--iodepth=32"]);
    fio.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
    fio.arg(format!("--rw={requests}"));
    fio.arg(format!("--number_ios={}", REQUESTS / 3));
    let begun = Instant::now();
    run::output(&mut fio)?;
    let elapsed = begun.elapsed().as_secs_f64();
    let cpu = cpu_of(&id, OWN)? - before;
    server.end(&socket)?;
    Ok(Sample { elapsed, cpu })
}

/// A server, which ends with its owner.
struct Server(Child);

impl Server {
    fn end(&mut self, socket: &Path) -> Result<(), String> {
        let pid = rustix::process::Pid::from_child(&self.0);
        let ended = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        ended.map_err(|e| format!("cannot end the server: {e}"))?;
        let status = self.0.wait().map_err(|e| format!("the server: {e}"))?;
        drop(fs::remove_file(socket)); // Where it does not do so itself.
        match status.success() {
            true => Ok(()),
            false => Err(format!("the server ended: {status}")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Runs a line of the command's, in words without spaces.
fn execute(program: &Path, line: &str, directory: &Path) -> Result<(), String> {
    let mut command = Command::new(program);
    command.current_dir(directory).args(line.split_whitespace());
    run::output(&mut command).map(drop)
}

/// Numbers of the fields of `/proc/PID/stat` with CPU times (proc_pid_stat(5)): a process's own,
/// and those of its children that have ended.
const OWN: [usize; 2] = [14, 15];
const CHILDREN: [usize; 2] = [16, 17];
/// Ticks of these times in a second, on every architecture of Linux (USER_HZ).
const TICKS: f64 = 100.0;

fn cpu_of(process: &str, fields: [usize; 2]) -> Result<f64, String> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    // The name, the second field, is in brackets and may have spaces.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut ticks = 0.0;
    for field in fields {
        let word = rest.split_whitespace().nth(field - 3);
        let word = word.and_then(|word| word.parse::<f64>().ok());
        ticks += word.ok_or_else(|| format!("{path}: no field {field}"))?;
    }
    Ok(ticks / TICKS)
}
