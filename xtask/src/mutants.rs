//! `cargo xtask mutants`: cargo-mutants over the files where a slip costs bytes, in two stages.
//!
//! First each mutant meets the unit tests of its own module, which takes seconds. What survives
//! meets the simulator, through `crates/sim/tests/budget.rs`. What survives both is listed at the
//! end, and explained in docs/mutants.md. All happens in `target/mutants`: a copy of the sources
//! that are changed in place, so that builds are incremental, and what cargo-mutants has found. A
//! run that was stopped goes on from there with `--resume`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::{run, tree};

/// The modules of `crates/qcow2/src`, and pure ones, that are mutated, and whose unit tests each
/// meets.
const MODULES: [(&str, &[&str]); 13] = [
    ("mapping/inflight", &["mapping::inflight"]),
    ("space/alloc", &["space::alloc"]),
    ("space/refcount", &["space::refcount"]),
    ("plan", &["plan"]),
    ("commit/writeback", &["commit::writeback"]),
    ("commit/writeback/grow", &["commit::writeback"]),
    ("space/ahead", &["space::ahead", "commit::writeback"]),
    ("count_growth", &["count_growth", "commit::writeback"]),
    ("space/room", &["space::room", "commit::writeback"]),
    ("space/punch", &["space::punch", "commit::writeback"]),
    ("space/raised", &["space::raised", "commit::writeback"]),
    (
        "space/quarantine",
        &["space::quarantine", "commit::writeback"],
    ),
    ("space/state", &["commit::writeback"]),
];

/// The modules of these that are in `crates/qcow2-format/src`.
const PURE: [&str; 2] = ["plan", "count_growth"];

/// Options of `cargo xtask mutants`.
#[derive(clap::Args)]
pub struct Args {
    /// This module alone, by its path: plan, mapping/inflight, commit/writeback and so on
    #[arg(long, value_name = "MODULE")]
    file: Option<String>,
    /// Only mutants whose description matches this regular expression
    #[arg(long, value_name = "REGEX")]
    re: Option<String>,
    /// Seeds that the simulator has for each mutant that the unit tests let pass
    #[arg(long, default_value_t = 600, value_name = "N")]
    seeds: u64,
    /// Seconds that the unit tests may take before a mutant counts as hanging
    #[arg(long, default_value_t = 60, value_name = "N")]
    unit_timeout: u64,
    /// Seconds that the simulator may take before a mutant counts as hanging
    #[arg(long, default_value_t = 600, value_name = "N")]
    sim_timeout: u64,
    /// Leaves out what an earlier run has caught
    #[arg(long)]
    resume: bool,
}

/// Runs both stages over the modules; prints what survives.
pub fn run(args: &Args) -> Result<(), String> {
    let chosen: Vec<_> = MODULES
        .into_iter()
        .filter(|(name, _)| args.file.as_deref().is_none_or(|file| file == *name))
        .collect();
    if chosen.is_empty() {
        let names = MODULES.map(|(name, _)| name).join(", ");
        return Err(format!("no such module; there are {names}"));
    }
    require_cargo_mutants()?;
    let place = Place::prepare(args.resume)?;
    let mut survivors = Vec::new();
    for (module, tested_by) in chosen {
        println!("xtask: {module} against its unit tests");
        let mut unit = place.mutants(module, args, args.unit_timeout);
        if args.resume {
            unit.arg("--iterate");
        }
        if PURE.contains(&module) {
            // What a pure module decides is done, and tested, in the crate above it.
            let packages = ["cowslip-qcow2-format", "cowslip-qcow2"];
            unit.args(packages.map(|name| format!("--test-package={name}")));
        }
        // An argument of cargo: so that only these test programs are built.
        unit.args(["--cargo-arg=--lib", "--", "--"]);
        unit.args(tested_by.iter().map(|name| format!("{name}::")));
        judge(&mut unit)?;
        println!("xtask: {module} against the simulator");
        let mut sim = place.mutants(module, args, args.sim_timeout);
        sim.args(["--iterate", "--test-package", "cowslip-sim"]);
        sim.args(["--cargo-arg=--test=simulator", "--", "--", "--ignored"]);
        sim.arg("budget::");
        sim.env("COWSLIP_SIM_SEEDS", args.seeds.to_string());
        judge(&mut sim)?;
        survivors.extend(place.missed(module)?);
    }
    println!("xtask: {} mutants survive both stages", survivors.len());
    for mutant in survivors {
        println!("{mutant}");
    }
    Ok(())
}

/// Where mutants are made.
struct Place {
    tree: PathBuf,
    found: PathBuf,
    target: PathBuf,
}

impl Place {
    /// Copies what git knows of, as it is now. The targets of an earlier run are used again.
    fn prepare(resume: bool) -> Result<Place, String> {
        let base = run::root().join("target/mutants");
        let place = Place {
            tree: base.join("tree"),
            found: base.join("found"),
            target: base.join("target"),
        };
        tree::copy(&place.tree)?;
        if !resume {
            tree::remove(&place.found)?;
        }
        // cargo-mutants makes no more than the last directory of its output.
        tree::make(&place.found)?;
        Ok(place)
    }

    fn mutants(&self, module: &str, args: &Args, seconds: u64) -> Command {
        let mut command = run::cargo();
        command.current_dir(&self.tree);
        let part = if PURE.contains(&module) {
            "qcow2-format"
        } else {
            "qcow2"
        };
        command.args(["mutants", "--in-place", "--package"]);
        command.arg(format!("cowslip-{part}"));
        command.arg("--file");
        command.arg(format!("crates/{part}/src/{module}.rs"));
        command.arg("--output").arg(self.found.join(module));
        // The gate checks that the tests pass without a mutant.
        command.args(["--baseline", "skip", "--no-shuffle"]);
        command.args(["--timeout", &seconds.to_string()]);
        if let Some(re) = &args.re {
            command.args(["--re", re]);
        }
        command.env("CARGO_TARGET_DIR", &self.target);
        command.env("CARGO_PROFILE_DEV_DEBUG", "0");
        command.env("CARGO_INCREMENTAL", "1");
        command
    }

    fn missed(&self, module: &str) -> Result<Vec<String>, String> {
        let path = self.found.join(module).join("mutants.out/missed.txt");
        let text = fs::read_to_string(&path)
            .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        Ok(text.lines().map(str::to_string).collect())
    }
}

/// Survivors (2) and mutants that hang (3) are results; anything else means that it did not run.
fn judge(command: &mut Command) -> Result<(), String> {
    let status = command
        .status()
        .map_err(|e| format!("cannot run {}: {e}", run::describe(command)))?;
    match status.code() {
        Some(0 | 2 | 3) => Ok(()),
        _ => Err(format!("{}: {status}", run::describe(command))),
    }
}

fn require_cargo_mutants() -> Result<(), String> {
    let cargo_home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let beside = cargo_home.is_some_and(|home| home.join("bin/cargo-mutants").is_file());
    if beside || run::find_program("cargo-mutants").is_some() {
        return Ok(());
    }
    Err("cargo-mutants is not installed: cargo install --locked cargo-mutants".to_string())
}
