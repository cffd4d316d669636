//! Where cells are measured: fresh files for each run, the same command line for each engine, order
//! alternated, what is left behind checked.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_console::error::{CommandError, failed};
use cowslip_console::interrupt::{RemovedOnInterrupt, TreeRemovedOnInterrupt};
use cowslip_console::progress::Progress;
use cowslip_testbed::Place;
use rustix::fs::FallocateFlags;

use crate::cell::{
    Backing, Before, Cell, CellLoad, Contestant, Direction, RawFile, Shape, scattering_step,
};
use crate::conditions::{self, line_of};
use crate::host_usage::{HostUsage, device_flushes};
use crate::machine::Machine;
use crate::peer_path;
use crate::report::{Column, Measurement, Row, column};
use crate::run::{Run, own_path, run, system_calls};
use crate::scale::Scale;
use crate::server::{Export, Kind, PageCache, Server, Transport};

/// Written by every load: zeroes might be treated apart.
pub const PATTERN: &str = "--pattern=165";

/// The raw file that is written throughout.
const WRITTEN: &str = "written.raw";
/// Requests of walks in order, with few in flight.
const IN_ORDER_REQUEST_BYTES: u64 = 1 << 20;
/// The most that one discard asks for: qemu-io takes less than 2 GiB.
const TRIM_BYTES: u64 = 1 << 30;

/// CPU time of a request, user and system.
pub const CPU: Column = column("CPU us", 1);
/// System calls of a request.
const CALLS: Column = column("calls", 2);
/// The usual time of a request.
pub const P50: Column = column("p50 us", 0);
/// The time that one request in a hundred takes longer than.
pub const P99: Column = column("p99 us", 0);
const P999: Column = column("p99.9 us", 0);
/// The most memory that the process had at a time.
pub const RSS: Column = column("RSS MiB", 0);
/// Time from the request to end to the server's end: the work that the flush left.
pub const CLOSE: Column = column("close ms", 0);
/// Space of the file afterwards.
pub const SPACE: Column = column("MiB", 0);
/// Mapping records of the file afterwards.
pub const EXTENTS: Column = column("extents", 0);
const SECONDS: Column = column("ms", 1);
/// CPU time of a whole program, user and system.
const CPU_MS: Column = column("CPU ms", 1);
/// Flushes that the device completed meanwhile, by anyone.
const FLUSHES: Column = column("flushes", 0);

/// Turn of a contestant.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Contestant.
    pub contestant: Contestant,
    /// The number of the repetition, from 0.
    pub repetition: usize,
}

/// How one run is made.
pub type Measure = fn(&Stage<'_>, &Cell, Turn) -> Result<Measurement, CommandError>;

/// A place, with the state that all its cells share.
pub struct Stage<'a> {
    place: &'a Place,
    scale: &'a Scale,
    progress: &'a Progress,
    cowslip: PathBuf,
    /// `--cache` of every run.
    cache: &'static str,
    /// `--aio` of every run.
    aio: String,
    /// The place, for the table.
    name: String,
    has_qemu_img: bool,
    /// The directory, and the file in it that lives as long.
    _removed: [RemovedOnInterrupt; 2],
    /// Files that serve several runs.
    shared: RefCell<Option<TreeRemovedOnInterrupt>>,
}

impl<'a> Stage<'a> {
    /// Finds out what this place and machine can do.
    ///
    /// # Errors
    /// Nothing can be written there.
    pub fn new(
        place: &'a Place,
        scale: &'a Scale,
        progress: &'a Progress,
        aio: Option<&str>,
    ) -> Result<Stage<'a>, CommandError> {
        let direct = cowslip_testbed::supports_direct_io(&place.directory);
        let direct = direct.map_err(|e| failed("write to", &place.directory, &e))?;
        let usual_aio = match cowslip_queue::file::ring_available() {
            Ok(()) => "io_uring",
            Err(_) => "threads",
        };
        Ok(Stage {
            place,
            scale,
            progress,
            cowslip: own_path()?,
            cache: if direct { "none" } else { "writeback" },
            aio: aio.unwrap_or(usual_aio).to_string(),
            name: name_of(&place.name, aio),
            has_qemu_img: qemu_img_is_installed(),
            _removed: [
                RemovedOnInterrupt::new(&place.directory),
                RemovedOnInterrupt::new(&place.directory.join(WRITTEN)),
            ],
            shared: RefCell::default(),
        })
    }

    /// Returns the conditions that all runs here share.
    pub fn conditions(&self) -> serde_json::Value {
        let mut conditions = serde_json::json!({
            "filesystem": self.name,
            "cache": self.cache,
            "aio": self.aio,
            "aio-of-cowslip": own_aio(&self.aio),
        });
        let under = conditions::of_directory(&self.place.directory);
        if let (Some(conditions), serde_json::Value::Object(under)) =
            (conditions.as_object_mut(), under)
        {
            conditions.extend(under);
        }
        conditions
    }

    /// Returns the path of this program.
    pub fn cowslip(&self) -> &Path {
        &self.cowslip
    }

    /// `--cache` of every run.
    pub fn cache(&self) -> &'static str {
        self.cache
    }

    /// `--aio` of every run.
    pub fn aio(&self) -> &str {
        &self.aio
    }

    /// Where guests run.
    ///
    /// # Errors
    /// The table is none of guests.
    pub fn machine(&self) -> Result<&Machine, CommandError> {
        let machine = self.scale.machine.as_deref();
        machine.ok_or_else(|| CommandError::new("There is no machine for guests"))
    }

    /// Requests of a run at this depth.
    pub fn requests_at(&self, depth: u64, request_bytes: u64) -> u64 {
        self.scale.requests_at(depth, request_bytes)
    }

    /// Returns the distance of requests without another order, in bytes.
    pub fn step_bytes(&self, request_bytes: u64) -> u64 {
        scattering_step(self.scale.disk_bytes, request_bytes)
    }

    /// The directory of the files of this name, which several runs share, filled by `make` if it is
    /// not there. There is one at a time.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn shared_files(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> Result<(), CommandError>,
    ) -> Result<PathBuf, CommandError> {
        let shared = self.file("shared");
        let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let directory = shared.join(name);
        if directory.exists() {
            return Ok(directory);
        }
        self.say(&format!("making {}", directory.display()));
        if shared.exists() {
            fs::remove_dir_all(&shared).map_err(|e| failed("remove", &shared, &e))?;
        }
        *self.shared.borrow_mut() = Some(TreeRemovedOnInterrupt::new(&shared));
        fs::create_dir_all(&directory).map_err(|e| failed("make", &directory, &e))?;
        make(&directory)?;
        Ok(directory)
    }

    /// The program of a contestant.
    pub fn program(&self, contestant: Contestant) -> Command {
        match contestant.is_cowslip() || matches!(contestant, Contestant::Raw(_)) {
            true => Command::new(&self.cowslip),
            false => peer_path::command("qemu-img"),
        }
    }

    /// Prints the progress.
    pub fn say(&self, what: &str) {
        self.progress.say(what);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.place.directory.join(name)
    }

    /// A raw file that is written throughout: backing file, and yardstick of overwrites. What it
    /// holds is of no importance, so both may be one.
    pub fn written(&self) -> PathBuf {
        self.file(WRITTEN)
    }

    /// Measures all contestants of a cell that are here, the order rotated with each repetition.
    ///
    /// # Errors
    /// A run fails, or leaves an image that is not sound.
    pub fn measure(&self, cell: &Cell, measure: Measure) -> Result<Vec<Row>, CommandError> {
        let contestants = cell.contestants.iter().copied();
        let present = contestants.filter(|c| self.can_run(cell, *c));
        let mut rows: Vec<Row> = present
            .map(|contestant| Row::new(&self.name, &cell.name(), contestant))
            .collect();
        for (repetition, index) in rotated(rows.len(), self.scale.repetitions) {
            let row = &mut rows[index];
            self.progress
                .say(&format!("{} {}", row.cell, row.contestant.name()));
            let turn = Turn {
                contestant: row.contestant,
                repetition,
            };
            row.runs.push(measure(self, cell, turn)?);
            self.progress.advance(1);
        }
        Ok(rows)
    }

    /// Size of the disks in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.scale.disk_bytes
    }

    /// Where files go.
    pub fn directory(&self) -> &Path {
        &self.place.directory
    }

    fn can_run(&self, cell: &Cell, contestant: Contestant) -> bool {
        match contestant {
            Contestant::QemuImg
            | Contestant::QemuImgCached(_)
            | Contestant::QemuImgAnyOrder
            | Contestant::Nbdcopy
            | Contestant::QemuDriver
            // Its image is qemu-img's.
            | Contestant::QemuServer(_)
            | Contestant::QemuRaw(_) => self.has_qemu_img,
            Contestant::Raw(RawFile::Clone) => self.can_clone(),
            Contestant::Raw(RawFile::Hinted(bytes)) => self.can_hint(bytes),
            Contestant::Raw(_)
            | Contestant::CowslipCached(_)
            | Contestant::CowslipInOrder
            | Contestant::CowslipThreads(_)
            | Contestant::CowslipProcesses(_) => true,
            Contestant::Cowslip(_)
            | Contestant::CowslipZeroing(_)
            | Contestant::CowslipVhostUser => match cell.shape.before {
                Before::Preallocated(_) => self.can_create(&cell.shape),
                Before::Fresh | Before::Filled | Before::Trimmed | Before::Laid(_) => true,
            },
        }
    }

    /// Whether our `create` knows these options.
    fn can_create(&self, shape: &Shape) -> bool {
        let path = self.file("probe.qcow2");
        let mut create = Command::new(&self.cowslip);
        create.args(["create", "-q", "-f", "qcow2", "-o", &shape.options()]);
        let outcome = run(create.arg(&path).arg("1M"));
        // An image that was refused was not made.
        drop(fs::remove_file(&path));
        outcome.is_ok()
    }

    fn can_hint(&self, bytes: u64) -> bool {
        let path = self.file("probe.raw");
        let created = run(&mut self.create_hinted(&path, bytes));
        // Where there are no hints, create makes the file all the same.
        let taken = created.ok().and_then(|_| {
            let file = fs::File::open(&path).ok()?;
            cowslip_queue::attributes::extent_hint_bytes(&file).ok()
        });
        drop(fs::remove_file(&path));
        taken.is_some_and(|taken| u64::from(taken) == bytes)
    }

    fn create_hinted(&self, path: &Path, hint_bytes: u64) -> Command {
        let mut create = Command::new(&self.cowslip);
        let hint = format!("extent_size_hint={hint_bytes}");
        create.args(["create", "-q", "-f", "raw", "-o", &hint]);
        create.arg(path).arg(self.scale.disk_bytes.to_string());
        create
    }

    fn can_clone(&self) -> bool {
        let (source, target) = (self.file("clone-source"), self.file("clone-target"));
        let outcome = fs::write(&source, [1; 4096]).and_then(|()| reflink(&source, &target));
        for file in [source, target] {
            // An image that was not made needs no removing.
            drop(fs::remove_file(file));
        }
        outcome.is_ok()
    }

    fn count_system_calls(&self, cell: &Cell, contestant: Contestant) -> Result<u64, CommandError> {
        let file = RemovedOnInterrupt::new(&self.prepare(cell, contestant)?);
        let command = self.command(cell, contestant, file.path());
        let calls = system_calls(&command, &self.place.directory)?;
        self.dispose(contestant, file.path())?;
        Ok(calls)
    }

    /// Makes the file that is measured, and lets what that has caused come to rest.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn prepare(&self, cell: &Cell, contestant: Contestant) -> Result<PathBuf, CommandError> {
        let path = match contestant {
            Contestant::Cowslip(policy) => {
                let mut options = cell.shape.options();
                if policy != "auto" {
                    options += &format!(",alloc_policy={policy}");
                }
                self.create(Command::new(&self.cowslip), &cell.shape, &options)?
            }
            Contestant::CowslipZeroing(_) | Contestant::CowslipVhostUser => {
                let create = Command::new(&self.cowslip);
                self.create(create, &cell.shape, &cell.shape.options())?
            }
            // Theirs are laid out by the table that has them.
            Contestant::CowslipCached(_)
            | Contestant::CowslipInOrder
            | Contestant::CowslipThreads(_)
            | Contestant::CowslipProcesses(_)
            | Contestant::QemuImgAnyOrder
            | Contestant::Nbdcopy
            | Contestant::QemuImgCached(_) => self.file("image.qcow2"),
            Contestant::QemuImg | Contestant::QemuServer(_) | Contestant::QemuDriver => self
                .create(
                    peer_path::command("qemu-img"),
                    &cell.shape,
                    &cell.shape.options(),
                )?,
            Contestant::Raw(state) | Contestant::QemuRaw(state) => self.prepare_raw(state)?,
        };
        let filled = match cell.shape.before {
            Before::Filled => !contestant.is_raw_written(),
            // A raw file that was trimmed is a sparse one.
            Before::Trimmed => !contestant.is_raw(),
            Before::Fresh | Before::Preallocated(_) | Before::Laid(_) => false,
        };
        if filled {
            run(&mut self.in_order(contestant, &path, Direction::Write))?;
        }
        if filled && cell.shape.before == Before::Trimmed {
            run(&mut self.trim(contestant, &path))?;
        }
        let file = File::open(&path).map_err(|e| failed("open", &path, &e))?;
        rustix::fs::syncfs(&file).map_err(|e| failed("sync", &path, &e.into()))?;
        Ok(path)
    }

    fn create(
        &self,
        mut command: Command,
        shape: &Shape,
        options: &str,
    ) -> Result<PathBuf, CommandError> {
        let path = self.file("image.qcow2");
        command.args(["create", "-q", "-f", "qcow2", "-o", options]);
        if shape.backing == Backing::Raw {
            self.make_written()?;
            command.args(["-F", "raw", "-b"]).arg(self.written());
        }
        command.arg(&path).arg(self.scale.disk_bytes.to_string());
        run(&mut command)?;
        Ok(path)
    }

    fn make_written(&self) -> Result<(), CommandError> {
        let path = self.written();
        if path.exists() {
            return Ok(());
        }
        self.progress.say("writing a raw file throughout");
        cowslip_testbed::populate(&path, self.scale.disk_bytes).map_err(CommandError::new)
    }

    fn prepare_raw(&self, state: RawFile) -> Result<PathBuf, CommandError> {
        if state == RawFile::Written {
            self.make_written()?;
            return Ok(self.written());
        }
        let path = self.file("image.raw");
        if state == RawFile::Clone {
            self.make_written()?;
            reflink(&self.written(), &path).map_err(|e| failed("clone to", &path, &e))?;
            return Ok(path);
        }
        if let RawFile::Hinted(bytes) = state {
            run(&mut self.create_hinted(&path, bytes))?;
            return Ok(path);
        }
        let file = File::create(&path).map_err(|e| failed("create", &path, &e))?;
        let made = match state {
            RawFile::Allocated => {
                let none = FallocateFlags::empty();
                rustix::fs::fallocate(&file, none, 0, self.scale.disk_bytes).map_err(Into::into)
            }
            _ => file.set_len(self.scale.disk_bytes),
        };
        made.map_err(|e| failed("extend", &path, &e))?;
        Ok(path)
    }

    /// `bench` of a qcow2 image with further options of its driver; the load is still to be added.
    pub fn bench_with_options(
        &self,
        contestant: Contestant,
        image: &Path,
        options: &str,
    ) -> Command {
        let mut command = self.program(contestant);
        let name = image.display().to_string().replace(',', ",,");
        let image = format!("driver=qcow2,file.driver=file,file.filename={name},{options}");
        command.args(["bench", "-t", self.cache, "-i", &self.aio]);
        command.args(["--image-opts", &image]);
        command
    }

    /// `bench` of this file by the contestant's engine; what it is to do is still to be said.
    fn bench(&self, contestant: Contestant, file: &Path) -> Command {
        use Contestant::{QemuRaw, Raw};
        let mut command = self.program(contestant);
        command.args(["bench", "-t", self.cache, "-i", &self.aio]);
        match contestant {
            Contestant::CowslipZeroing(method) => {
                let file = file.display().to_string().replace(',', ",,");
                let image = format!("driver=qcow2,file.filename={file},zero-method={method}");
                command.args(["--image-opts", &image]);
            }
            Raw(_) | QemuRaw(_) => drop(command.args(["-f", "raw"]).arg(file)),
            _ => drop(command.args(["-f", "qcow2"]).arg(file)),
        }
        command
    }

    /// Reads or writes a disk throughout, in order.
    pub fn in_order(&self, contestant: Contestant, file: &Path, direction: Direction) -> Command {
        let request_bytes = self.scale.disk_bytes.min(IN_ORDER_REQUEST_BYTES);
        let requests = self.scale.disk_bytes / request_bytes;
        let mut command = self.bench(contestant, file);
        if direction == Direction::Write {
            command.args(["-w", PATTERN]);
        }
        command.args(["-d", "4", "-c", &requests.to_string()]);
        command.args(["-s", &request_bytes.to_string()]);
        command
    }

    /// Discards a disk throughout, and gives its space back, by the contestant's engine.
    fn trim(&self, contestant: Contestant, file: &Path) -> Command {
        let mut command = if contestant.is_cowslip() {
            let mut own = Command::new(&self.cowslip);
            own.arg("io");
            own
        } else {
            peer_path::command("qemu-io")
        };
        command.args(["-f", "qcow2", "-t", self.cache, "-d", "unmap"]);
        let mut start = 0;
        while start < self.scale.disk_bytes {
            let len = TRIM_BYTES.min(self.scale.disk_bytes - start);
            command.args(["-c", &format!("discard -q {start} {len}")]);
            start += len;
        }
        command.arg(file);
        command
    }

    /// The same words for each engine but those that ask ours for its figures.
    pub fn command(&self, cell: &Cell, contestant: Contestant, file: &Path) -> Command {
        let mut command = self.bench(contestant, file);
        command.args(self.load_words(&cell.load));
        if contestant.is_cowslip() || matches!(contestant, Contestant::Raw(_)) {
            command.arg("--json");
        }
        command
    }

    /// A load, as `bench` takes it.
    pub fn load_words(&self, load: &CellLoad) -> Vec<String> {
        let mut words = Vec::new();
        if load.direction == Direction::Write {
            words.extend(["-w", PATTERN].map(str::to_string));
        }
        let step = self.step_bytes(load.request_bytes);
        for (name, value) in [
            ("-c", load.requests),
            ("-d", load.depth),
            ("-s", load.request_bytes),
            ("-S", step),
            ("--flush-interval", load.flush_interval),
        ] {
            words.extend([name.to_string(), value.to_string()]);
        }
        words
    }

    /// Checks the image: a figure counts only if the image survived. QEMU's check is used where it
    /// is installed.
    ///
    /// # Errors
    /// The image is not sound.
    pub fn check(&self, contestant: Contestant, image: &Path) -> Result<(), CommandError> {
        if let Contestant::Raw(_) | Contestant::QemuRaw(_) = contestant {
            return Ok(());
        }
        match self.has_qemu_img {
            true => check_by(&peer_path::of("qemu-img"), image),
            false => self.check_ourselves(image),
        }
    }

    /// Ends the use of a file whose engine has ended: checks it. Returns the space that it took.
    ///
    /// # Errors
    /// The image is not sound; the file system's.
    pub fn finish(&self, contestant: Contestant, file: &Path) -> Result<HostUsage, CommandError> {
        self.check(contestant, file)?;
        let usage = HostUsage::of(file)?;
        self.dispose(contestant, file)?;
        Ok(usage)
    }

    /// Serves an image by the server of this contestant, ours if it has none.
    ///
    /// # Errors
    /// The server does not start.
    pub fn serve(
        &self,
        contestant: Contestant,
        image: &Path,
        transport: Transport,
    ) -> Result<Server, CommandError> {
        let kind = match contestant {
            Contestant::QemuServer(kind) => kind,
            _ => Kind::Cowslip,
        };
        let export = Export {
            kind,
            transport,
            image: image.to_path_buf(),
            page_cache: PageCache::probe(self.directory())?,
        };
        Server::start(export, self.directory())
    }

    /// An image of this shape, filled in order by ours, that all contestants use one after the
    /// other: copies lie at other places of the device, which may be faster or slower.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn filled_image(&self, shape: &Shape) -> Result<PathBuf, CommandError> {
        let directory = self.shared_files(&shape.name(), |directory| {
            let cell = Cell::new(*shape, CellLoad::writes(1, 1, 4096), Vec::new());
            let made = self.prepare(&cell, Contestant::Cowslip("auto"))?;
            let path = directory.join("image.qcow2");
            fs::rename(&made, &path).map_err(|e| failed("rename", &made, &e))
        })?;
        Ok(directory.join("image.qcow2"))
    }

    /// Checks as [`Stage::check`], but by our `check`.
    ///
    /// # Errors
    /// The image is not sound.
    pub fn check_ourselves(&self, image: &Path) -> Result<(), CommandError> {
        check_by(&self.cowslip, image)
    }

    /// Ends the use of a file: removes it, or keeps it if it was asked for.
    ///
    /// # Errors
    /// The file system's.
    pub fn dispose(&self, contestant: Contestant, file: &Path) -> Result<(), CommandError> {
        let is_shared = contestant.is_raw_written();
        match (is_shared, self.scale.keep) {
            (true, _) => Ok(()),
            (false, true) => {
                let kept = self.file(&format!("{}.kept", contestant.name().replace(' ', "-")));
                fs::rename(file, &kept).map_err(|e| failed("keep", &kept, &e))
            }
            (false, false) => fs::remove_file(file).map_err(|e| failed("remove", file, &e)),
        }
    }
}

/// Runs `bench` as a process.
///
/// # Errors
/// The process fails, leaves an image that is not sound, or has not flushed as often as requested.
pub fn bench_process(
    stage: &Stage<'_>,
    cell: &Cell,
    turn: Turn,
) -> Result<Measurement, CommandError> {
    let contestant = turn.contestant;
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, contestant)?);
    let flushes_before = device_flushes(file.path());
    let mut command = stage.command(cell, contestant, file.path());
    let run = run(&mut command)?;
    let flushes_after = device_flushes(file.path());
    let usage = stage.finish(contestant, file.path())?;
    let requests = cell.load.requests as f64;
    // QEMU prints no figures; without them the output is two lines of text.
    let output: serde_json::Value = serde_json::from_str(&run.output).unwrap_or_default();
    let due = cell.load.requests.checked_div(cell.load.flush_interval);
    if !output.is_null() && output["flushes"] != due.unwrap_or(0) {
        let text = format!("{} flushes where {due:?} were due", output["flushes"]);
        return Err(CommandError::new(text));
    }
    let latency = |name| output["latency-us"][name].as_f64();
    let iops = requests / run.seconds;
    let line = Some(line_of(&command));
    let mut measurement = Measurement::new(iops, serde_json::Value::Null, line);
    measurement.add(CPU, Some(run.cpu_seconds * 1e6 / requests));
    if stage.scale.system_calls && turn.repetition == 0 {
        let calls = stage.count_system_calls(cell, contestant)?;
        measurement.add(CALLS, Some(calls as f64 / requests));
    }
    measurement.add(P50, latency("p50"));
    measurement.add(P99, latency("p99"));
    measurement.add(P999, latency("p99.9"));
    measurement.add(RSS, Some(mebibytes(run.peak_rss_bytes)));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    let flushes = flushes_before.zip(flushes_after);
    let flushes = flushes.map(|(before, after)| (after - before) as f64);
    measurement.add(FLUSHES, flushes);
    measurement.output = output;
    Ok(measurement)
}

/// A run of a whole program that did this much work.
pub fn by_program(work: f64, run: &Run, command: &Command) -> Measurement {
    let line = Some(line_of(command));
    let mut measurement = Measurement::new(work / run.seconds, serde_json::Value::Null, line);
    measurement.add(SECONDS, Some(run.seconds * 1e3));
    measurement.add(CPU_MS, Some(run.cpu_seconds * 1e3));
    measurement.add(RSS, Some(mebibytes(run.peak_rss_bytes)));
    measurement
}

fn check_by(checker: &Path, image: &Path) -> Result<(), CommandError> {
    let mut command = Command::new(checker);
    command.args(["check", "-q", "-f", "qcow2"]).arg(image);
    run(&mut command).map(drop)
}

/// Converts to the unit of tables.
pub fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn reflink(source: &Path, target: &Path) -> std::io::Result<()> {
    let source = File::open(source)?;
    let target = File::create(target)?;
    Ok(rustix::fs::ioctl_ficlone(&target, &source)?)
}

/// A place that is driven so, for the table.
pub fn name_of(place: &str, aio: Option<&str>) -> String {
    match aio {
        None => place.to_string(),
        Some(aio) => format!("{place}, {aio}"),
    }
}

/// Returns our engine's interface for a name of `--aio`.
pub fn own_aio(name: &str) -> &'static str {
    match name {
        "threads" => "threads",
        // There is no driver for libaio.
        _ => "io_uring",
    }
}

fn qemu_img_is_installed() -> bool {
    let mut command = peer_path::command("qemu-img");
    run(command.arg("--version")).is_ok()
}

/// Each contestant in each repetition, as pairs of a repetition and an index: none always follows
/// the same one, or always begins.
fn rotated(contestants: usize, repetitions: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..repetitions).flat_map(move |repetition| {
        (0..contestants).map(move |turn| (repetition, (turn + repetition) % contestants))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_rotates() {
        let order: Vec<_> = rotated(2, 3).collect();
        assert_eq!(order, [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]);
        let begin = rotated(3, 3).step_by(3);
        assert_eq!(begin.map(|(_, index)| index).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(rotated(0, 3).count(), 0);
    }
}
