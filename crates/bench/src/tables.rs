//! The tables' common part: their options, their places, and who measures what.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use clap::{Parser, Subcommand};
use cowslip_console::error::CommandError;
use cowslip_console::options::bytes_within;
use cowslip_console::output::{self, Program};
use cowslip_console::progress::Progress;
use cowslip_console::queue::parse_aio;
use cowslip_testbed::{Place, Recipe};
use serde_json::json;

use crate::cell::{Cell, Contestant, RawFile};
use crate::conditions;
use crate::deadline::{Shares, is_over};
use crate::description::{Description, Source};
use crate::machine::{Machine, MachineOptions};
use crate::peers;
use crate::places::{PlaceOptions, make_loop};
use crate::report::Row;
use crate::reporter::{Made, Outlet, Results};
use crate::scale::Scale;
use crate::sheet::Sheet;
use crate::stage::{self, Stage};
use crate::{
    check, compact, convert, discard, flush, fragmentation, guest, metadata, preallocation, served,
    steady, subclusters, threads, transports,
};

/// Allocation policies, and how new clusters come to read as zeroes.
const POLICIES: &[&str] = &["auto", "contiguous", "sparse"];
const ZERO_METHODS: &[&str] = &["auto", "fresh", "zero-range", "write"];
/// Requests in flight, if it is not said.
const DEPTHS: [u64; 2] = [32, 1];
/// Runs of each contestant, if it is not said.
const REPETITIONS: usize = 5;

/// Note where `--aio` asks for interfaces that only QEMU has.
const NO_LIBAIO: &str = "native: QEMU runs libaio; Cowslip has no driver for it and runs io_uring, as its column \
                         of raw files does.";

/// The tables.
#[derive(Subcommand)]
pub enum Table {
    /// Random first writes: cluster sizes with and without subclusters, empty and on a raw file
    Subclusters(Options),
    /// The same with a flush after every 1, 8 and 32 writes
    Flush(Options),
    /// Random first writes to images and raw files of each kind of preallocation
    Preallocation(Options),
    /// Space and speed when half of the written data is discarded in pieces of 64 KiB, and after
    /// the recorded requests of a file system of 1 GiB with fstrim
    Discard(Options),
    /// Images filled by random writes: extents, and reads in order and at random
    Fragmentation(Options),
    /// Reads and overwrites of allocated data
    Steady(Options),
    /// Random requests over 8 TiB, with 64 and 128 MiB of memory for tables and without a limit
    Metadata(Options),
    /// Random first writes over NBD by one client (fio), to our server and to QEMU's
    Served(Options),
    /// Reads, overwrites and first writes over vhost-user, to our server and to
    /// qemu-storage-daemon, by one front end; and how long a guest waits while our server is killed
    /// and started again, or replaced
    VhostUser(Options),
    /// Reads and overwrites of a disk that is shown as a file, by our server and by
    /// qemu-storage-daemon, with one client (fio)
    Fuse(Options),
    /// Reads and overwrites on 1, 2 and 4 threads over a file that keeps nothing
    Threads(Options),
    /// `check` beside qemu-img's, on images in and out of the page cache
    Check(Options),
    /// `compact` in place beside qemu-img's conversion to a copy: input, output, additional space
    Compact(Options),
    /// `convert` beside qemu-img's and nbdcopy
    Convert(Options),
    /// Random first writes and overwrites in a Linux guest: our NBD export beside QEMU's own driver
    Guest(GuestOptions),
}

/// Options of the table of guests.
#[derive(clap::Args)]
pub struct GuestOptions {
    #[command(flatten)]
    table: Options,
    #[command(flatten)]
    machine: MachineOptions,
}

/// Options of all tables.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    places: PlaceOptions,
    /// Size of the disks, for convert of the data, for check of the largest disk; if not given 4G,
    /// for discard 8G, for metadata and check 8T, for fragmentation, guest, vhost-user, fuse,
    /// threads, compact and convert 1G
    #[arg(long, value_name = "SIZE")]
    size: Option<String>,
    /// Requests of a run; an eighth of it at depth 1; 8000 if not given, for guest 2000, for
    /// metadata 100000, for vhost-user and fuse 200000, for threads 2000000
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// Runs of each contestant in each cell; 5 if not given, for guest 3 with KVM and 1 without
    #[arg(long, value_name = "N")]
    repetitions: Option<usize>,
    /// Requests in flight, each a cell: 32,1 if not given; tables with a depth of their own refuse
    /// it
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    depths: Option<Vec<u64>>,
    /// Allocation policies, each a column: auto, contiguous, sparse; auto,sparse if not given, for
    /// guest and tables of servers auto
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    policies: Vec<String>,
    /// How new clusters of Cowslip are zeroed, each a column: auto, fresh, zero-range, write; for
    /// subclusters and preallocation auto, zero-range and write if not given
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    zero_methods: Option<Vec<String>>,
    /// I/O engines, each a row of places: threads, native, io_uring; by default the fastest one
    /// that is available
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    aio: Vec<String>,
    /// Writers of the raw files that images are compared with: cowslip, qemu-img
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "cowslip")]
    yardsticks: Vec<String>,
    /// Only the cells whose name contains this text
    #[arg(long, value_name = "TEXT")]
    cells: Option<String>,
    /// One run of each cell with few requests on a small disk, for a first impression; without
    /// --size, --requests and --repetitions
    #[arg(long, conflicts_with_all = ["size", "requests", "repetitions"])]
    quick: bool,
    /// own, or seed: disks and requests as in the mails that asked first (subclusters,
    /// preallocation)
    #[arg(long, value_name = "WHOSE", default_value = "own")]
    #[arg(conflicts_with = "quick")]
    conditions: String,
    /// Count system calls too, in one more run of each under strace
    #[arg(long)]
    system_calls: bool,
    /// Keep the last image of each contestant
    #[arg(long)]
    keep: bool,
    /// Print the results as JSON, at the end
    #[arg(long)]
    json: bool,
    /// Write the results as a page too: tables, charts, the machine and its disks, in one file.
    /// After an interruption it contains the finished cells
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Draw requests over time below the rows; for preallocation on a terminal without being asked
    #[arg(long, conflicts_with = "json")]
    series: bool,
    /// QEMU's programs that take part, of those that are installed; none leaves them out. All if
    /// not given, but of two servers the faster. For discard and served qemu-storage-daemon and
    /// qemu-nbd, for vhost-user and fuse the first of these, for guest qemu-system-x86_64, for the
    /// others qemu-img
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    peers: Option<Vec<String>>,
    /// Print the names of the cells, and measure nothing
    #[arg(long, conflicts_with = "json")]
    list: bool,
}

impl Options {
    /// How files are driven, one after the other.
    fn aios(&self) -> Result<Vec<Option<&str>>, CommandError> {
        if let Some(aio) = self.aio.iter().find(|aio| parse_aio(aio).is_none()) {
            return Err(CommandError::new(format!(
                "--aio expects threads, native and io_uring, not '{aio}'"
            )));
        }
        Ok(match self.aio.is_empty() {
            true => vec![None],
            false => self.aio.iter().map(|aio| Some(aio.as_str())).collect(),
        })
    }
}

/// The sizes and columns that the options of a table ask for.
fn scale_of(asked: &Table) -> Result<Scale, CommandError> {
    let (options, table) = (asked.options(), asked.description());
    let source = asked.source(&options.conditions)?;
    let disk_bytes = match (&options.size, source) {
        (Some(size), _) => bytes_within("size", size, 1 << 20..=1 << 43)?,
        (None, Some(source)) => source.disk_bytes,
        (None, None) if options.quick => table.quick_disk_bytes,
        (None, None) => table.disk_bytes,
    };
    let (requests, repetitions) = match options.quick {
        true => (table.requests / 4, 1),
        false => {
            let usual = source.map_or(table.requests, |source| source.requests);
            let repetitions = options.repetitions.unwrap_or(REPETITIONS);
            (options.requests.unwrap_or(usual), repetitions)
        }
    };
    table.refuse_unused(options)?;
    let depths = options.depths.clone();
    let depths = depths.unwrap_or_else(|| DEPTHS.to_vec());
    if requests == 0 || repetitions == 0 || depths.contains(&0) {
        let text = "--requests, --repetitions and --depths expect numbers above 0";
        return Err(CommandError::new(text));
    }
    let policies = match options.policies.is_empty() {
        true => Ok(table.policies.to_vec()),
        false => named("policies", POLICIES, &options.policies),
    };
    let yardsticks = options.yardsticks.iter().map(|name| yardstick(name));
    let zero_methods = match &options.zero_methods {
        Some(names) => named("zero-methods", ZERO_METHODS, names)?,
        None => table.zero_methods.to_vec(),
    };
    Ok(Scale {
        disk_bytes,
        requests,
        depths,
        repetitions,
        policies: policies?,
        peers: peers::chosen(table.peers, options.peers.as_deref())?,
        // The columns of the policies are that one.
        zero_methods: zero_methods.into_iter().filter(|m| *m != "auto").collect(),
        yardsticks: yardsticks.collect::<Result<_, _>>()?,
        system_calls: options.system_calls,
        keep: options.keep,
        machine: None,
        deadline: None,
    })
}

impl Description {
    /// Refuses options that would change nothing.
    fn refuse_unused(&self, options: &Options) -> Result<(), CommandError> {
        let unused = [
            ("depths", !self.has_depths && options.depths.is_some()),
            ("requests", !self.has_requests && options.requests.is_some()),
        ];
        match unused.iter().find(|(_, is_unused)| *is_unused) {
            None => Ok(()),
            Some((option, _)) => Err(CommandError::new(format!(
                "--{option}: '{}' has numbers of its own, which it does not change",
                self.name
            ))),
        }
    }
}

/// Names that an option lists, each of which there is.
fn named(
    option: &str,
    known: &[&'static str],
    names: &[String],
) -> Result<Vec<&'static str>, CommandError> {
    let found = names.iter().map(|name| {
        let found = known.iter().copied().find(|known| known == name);
        found.ok_or_else(|| {
            let [others @ .., last] = known else {
                unreachable!("there are several");
            };
            let others = others.join(", ");
            let text = format!("--{option} expects {others} and {last}, not '{name}'");
            CommandError::new(text)
        })
    });
    found.collect()
}

/// Returns the driver of a raw file, by name.
fn yardstick(name: &str) -> Result<fn(RawFile) -> Contestant, CommandError> {
    match name {
        "cowslip" => Ok(Contestant::Raw),
        "qemu-img" => Ok(Contestant::QemuRaw),
        _ => Err(CommandError::new(format!(
            "--yardsticks expects cowslip and qemu-img, not '{name}'"
        ))),
    }
}

impl Table {
    fn parts(&self) -> (&Options, &'static Description) {
        match self {
            Table::Subclusters(options) => (options, &subclusters::TABLE),
            Table::Flush(options) => (options, &flush::TABLE),
            Table::Preallocation(options) => (options, &preallocation::TABLE),
            Table::Discard(options) => (options, &discard::TABLE),
            Table::Fragmentation(options) => (options, &fragmentation::TABLE),
            Table::Steady(options) => (options, &steady::TABLE),
            Table::Metadata(options) => (options, &metadata::TABLE),
            Table::Served(options) => (options, &served::TABLE),
            Table::VhostUser(options) => (options, &transports::VHOST_USER),
            Table::Fuse(options) => (options, &transports::FUSE),
            Table::Threads(options) => (options, &threads::TABLE),
            Table::Check(options) => (options, &check::TABLE),
            Table::Compact(options) => (options, &compact::TABLE),
            Table::Convert(options) => (options, &convert::TABLE),
            Table::Guest(options) => (&options.table, &guest::TABLE),
        }
    }

    fn options(&self) -> &Options {
        self.parts().0
    }

    fn description(&self) -> &'static Description {
        self.parts().1
    }

    /// The conditions of the source, if they are asked for.
    fn source(&self, conditions: &str) -> Result<Option<Source>, CommandError> {
        let table = self.description();
        match (conditions, table.source) {
            ("own", _) => Ok(None),
            ("seed", Some(source)) => Ok(Some(source)),
            ("seed", None) => Err(CommandError::new(format!(
                "--conditions=seed: '{}' has no source but this command",
                table.name
            ))),
            _ => Err(CommandError::new(format!(
                "--conditions expects own or seed, not '{conditions}'"
            ))),
        }
    }

    /// Its cells whose name contains the text of `--cells`, without peers that do not take part.
    ///
    /// # Errors
    /// There is none.
    fn cells(&self, scale: &Scale) -> Result<Vec<Cell>, CommandError> {
        let part = self.options().cells.as_deref().unwrap_or_default();
        let mut cells = (self.description().cells)(scale);
        cells.retain(|cell| cell.name().contains(part));
        for cell in &mut cells {
            let takes_part = |peer| scale.peers.contains(&peer);
            cell.contestants.retain(|c| c.peer().is_none_or(takes_part));
        }
        match cells.is_empty() {
            true => Err(CommandError::new(
                "No cell has a name with the text of --cells",
            )),
            false => Ok(cells),
        }
    }

    /// Whether requests over time are drawn below the rows.
    fn draws_series(&self) -> bool {
        self.options().series
            || (self.description().is_about_series && std::io::stdout().is_terminal())
    }
}

/// A table that is asked for, with all that its options say.
pub struct Plan {
    table: Table,
    scale: Scale,
    places: PlaceOptions,
    recipes: Vec<Recipe>,
    cells: Vec<Cell>,
}

/// The words of a table.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Words {
    #[command(subcommand)]
    table: Table,
}

impl Plan {
    /// Makes the plan of a table of the command line.
    ///
    /// # Errors
    /// Its options contradict each other, or what is here.
    pub fn new(table: Table) -> Result<Plan, CommandError> {
        let options = table.options();
        let scale = scale_of(&table)?;
        let places = options.places.clone();
        let recipes = places.recipes()?;
        options.aios()?;
        if !recipes.is_empty() && options.keep {
            let text =
                "--keep keeps nothing on file systems that vanish with the command; use --dir";
            return Err(CommandError::new(text));
        }
        table.source(&options.conditions)?;
        let cells = table.cells(&scale)?;
        Ok(Plan {
            table,
            scale,
            places,
            recipes,
            cells,
        })
    }

    /// Makes the plan of the table that these words ask for; its directories have these names in
    /// rows.
    ///
    /// # Errors
    /// As [`Plan::new`], or there are no such options.
    pub fn of_words(words: &[String], names: &[String]) -> Result<Plan, CommandError> {
        let parsed = Words::try_parse_from(words);
        let table = parsed.map_err(|e| CommandError::new(e.to_string()))?.table;
        let mut plan = Plan::new(table)?;
        plan.places.names = names.to_vec();
        Ok(plan)
    }

    /// Space that a file system needs for it.
    pub fn filesystem_bytes(&self) -> u64 {
        let table = self.table.description();
        table.filesystem_bytes(self.scale.disk_bytes)
    }

    /// Adds the facts that are known before the measurement.
    fn describe(
        table: &Table,
        scale: &mut Scale,
        results: &mut Results,
        program: &Program,
    ) -> Result<(), CommandError> {
        let options = table.options();
        let source = table.source(&options.conditions)?;
        let notes = source.map(|source| source.words).into_iter();
        let notes = notes.chain(table.description().note);
        let is_native = options.aio.iter().any(|aio| aio == "native");
        let notes = notes.chain(is_native.then_some(NO_LIBAIO));
        results.notes.extend(notes.map(str::to_string));
        if let Table::Guest(options) = table {
            let machine = Machine::new(&options.machine, program)?;
            results.conditions["guest"] = machine.conditions();
            results.notes.push(machine.note());
            if options.table.repetitions.is_none() && !options.table.quick {
                scale.repetitions = machine.repetitions();
                results.conditions["repetitions"] = json!(scale.repetitions);
            }
            scale.machine = Some(Rc::new(machine));
        }
        Ok(())
    }

    /// Runs the measurement. No cell is begun after the deadline, if there is one; each place has
    /// its share of the time until then.
    ///
    /// # Errors
    /// Nothing could be measured at all. Later errors are reported with the results.
    pub fn make(
        self,
        outlet: Outlet,
        deadline: Option<Instant>,
        program: &Program,
    ) -> Result<Made, CommandError> {
        let filesystem_bytes = self.filesystem_bytes();
        let Plan {
            table,
            mut scale,
            places,
            recipes,
            cells,
        } = self;
        let aios = table.options().aios()?;
        let names = places.names();
        let names = names.iter();
        let names = names.flat_map(|place| aios.iter().map(|aio| stage::name_of(place, *aio)));
        let names: Vec<String> = names.collect();
        let rate = table.description().rate;
        let asked = json!({
            "table": table.description().name,
            "rate": rate.title,
            "disk-bytes": scale.disk_bytes,
            "requests": scale.requests,
            "repetitions": scale.repetitions,
        });
        let mut results = Results::new(asked, names.len() * cells.len(), outlet);
        Plan::describe(&table, &mut scale, &mut results, program)?;
        let mut sheet = Sheet::new(results, table.draws_series(), ((&names, &cells), rate));
        let mut shares = Shares::new(deadline, names.len() as u32);
        let make = |recipe: &Recipe, dir: &Path| make_loop(recipe, dir, filesystem_bytes);
        let outcome = places.each(&recipes, make).try_for_each(|held| {
            let mut held = held?;
            if table.options().keep {
                held.place = held.place.keep();
            }
            for aio in &aios {
                scale.deadline = shares.next(1);
                measure_at(&table, (&held.place, *aio), (&scale, &cells), &mut sheet)?;
            }
            Ok(())
        });
        if sheet.rows().iter().any(|row| row.is_outlier) {
            program.warn("cells that are marked are below half of both their neighbours");
        }
        sheet.finish(outcome)
    }
}

/// Makes a table, or lists its cells; the exit code.
///
/// # Errors
/// A place cannot be had, a run fails, an image is not sound, or the page cannot be written.
pub fn run(table: Table, program: &Program) -> Result<u8, CommandError> {
    let plan = Plan::new(table)?;
    let options = plan.table.options();
    if options.list {
        for cell in &plan.cells {
            output::print(&format!("{}\n", cell.name()));
        }
        return Ok(0);
    }
    let outlet = Outlet::alone(options.json, options.html.as_deref())?;
    plan.places.enter()?;
    let (_, outcome) = plan.make(outlet, None, program)?;
    outcome.map(|()| 0)
}

fn measure_at(
    table: &Table,
    (place, aio): (&Place, Option<&str>),
    (scale, cells): (&Scale, &[Cell]),
    sheet: &mut Sheet,
) -> Result<(), CommandError> {
    let contestants = cells.iter().map(|cell| cell.contestants.len());
    let runs = contestants.sum::<usize>() * scale.repetitions;
    let progress = Progress::of(runs as u64);
    let stage = Stage::new(place, scale, &progress, aio)?;
    conditions::add_place(&mut sheet.results().conditions, stage.conditions());
    let first = sheet.rows().len();
    for cell in cells {
        if is_over(scale.deadline) {
            break;
        }
        let rows = stage.measure(cell, table.description().measure)?;
        sheet.add(rows, &progress);
    }
    if let Table::Subclusters(_) = table
        && !is_over(scale.deadline)
    {
        let rows = &sheet.rows()[first..];
        let again = subclusters::measure_outliers_again(&stage, cells, rows)?;
        let replace = |rows: &mut [Row]| subclusters::replace(cells, again, rows);
        sheet.change(first, replace, &progress);
        if let Some(note) = subclusters::by_unit(cells, &sheet.rows()[first..]) {
            sheet.results().notes.push(note);
        }
    }
    Ok(())
}

/// The names of the cells that a table of this name has by default; `None` if there is none.
#[cfg(test)]
pub fn cell_names(table: &str) -> Option<Vec<String>> {
    let parsed = Words::try_parse_from([table]).ok()?;
    let plan = Plan::new(parsed.table).ok()?;
    Some(plan.cells.iter().map(Cell::name).collect())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn each_table_has_a_section_of_pages() {
        let words = super::Words::command();
        for table in words.get_subcommands() {
            let title = crate::section::title_of(table.get_name());
            assert!(title.is_some(), "{}", table.get_name());
        }
    }
}
