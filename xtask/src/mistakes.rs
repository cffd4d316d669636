//! `cargo xtask mistakes`: mistakes that are kept as patches, so that the engine has no hook for them.
//!
//! A patch in `crates/sim/mistakes` says in its first lines what goes wrong, and changes the engine
//! where `planted::is(Mistake::NAME)` holds, NAME being the file's. All of them are applied to a copy
//! of the sources, which is built once, with their names among the mistakes that `cowslip-sim --planted`
//! knows. Patches that are in each other's way go into copies one after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{run, tree};

/// Where the patches are, from the root.
const PLACE: &str = "crates/sim/mistakes";
/// The end of the list of mistakes in the engine's `planted.rs`.
const LIST_END: &str = "\n}\n\n/// Whether this mistake is planted: never.";

/// Those that take more runs than the gate has time for.
const SLOW: &[&str] = &[
    "BarrierOfTheDataOnly",
    "BelowMarksBitmaps",
    "CipherOnHalfOfReads",
    "ClearNotStored",
    "DataFileNotCut",
    "DeviceEndRoundedUp",
    "EncryptedHolesAreZeroes",
    "EncryptedSpaceIsFresh",
    "FailedBesideLeavesItsBytes",
    "FirstSliceDecides",
    "FlagsUnflushed",
    "FreedMetadataIsZeroes",
    "KeysNotProtected",
    "KeysSwapped",
    "LastBitsNotWritten",
    "LastPieceDecides",
    "LastPieceNotRead",
    "LastPromiseDecides",
    "LastStepDecides",
    "LostBitmapStoredAsSound",
    "LuksNumberedByGuest",
    "MergeIntoForgotten",
    "NewBlocksAtOnce",
    "NewL1Unflushed",
    "SettledTooLate",
    "ShrinkCutsBlocks",
    "SliceUnderWayIsDurable",
    "TablesOnUsedSpaceUnordered",
    "UnflagCountsUnflushed",
    "UnflagTableUnflushed",
    "UnwrittenSlicesLeft",
    "WritethroughForgotten",
];

/// Options of `cargo xtask mistakes`.
#[derive(clap::Args)]
pub struct Args {
    /// These mistakes alone
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Runs in which each has to be noticed
    #[arg(long, default_value_t = 2000, value_name = "RUNS")]
    budget: u64,
    /// Mistakes that are tried at a time
    #[arg(long, default_value_t = 2, value_name = "J")]
    jobs: usize,
    /// Builds as the gate does, not as a release is built
    #[arg(long)]
    dev: bool,
    /// Arguments of the simulator, such as `--seconds 60`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// A mistake as it is kept.
struct Patch {
    name: String,
    path: PathBuf,
    does: String,
}

/// Tries each until it is noticed; fails if one is not.
pub fn run(args: &Args) -> Result<(), String> {
    let mut left = patches(&args.only)?;
    let mut failures = Vec::new();
    while !left.is_empty() {
        let (program, applied, others) = planted_copy(left, args.dev)?;
        let mut suite = suite(&program, &names(&applied), (args.budget, args.jobs));
        failures.extend(run::run(suite.args(&args.arguments)).err());
        left = others;
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("\n")),
    }
}

/// The gate's part: the simulator must notice the mistakes that take it few runs, of those in the
/// engine and of those here.
pub fn gate() -> Result<(), String> {
    let (program, applied, _) = planted_copy(patches(&[])?, true)?;
    let quick: Vec<Patch> = applied
        .into_iter()
        .filter(|patch| !SLOW.contains(&&patch.name[..]))
        .collect();
    run::run(&mut suite(&program, "quick", (400, 2)))?;
    run::run(&mut suite(&program, &names(&quick), (400, 2)))
}

/// Applies as many as go together to a new copy, and builds it: the simulator, those, and the others.
fn planted_copy(left: Vec<Patch>, dev: bool) -> Result<(PathBuf, Vec<Patch>, Vec<Patch>), String> {
    let copy = run::root().join("target/mistakes/tree");
    tree::copy(&copy)?;
    let (applied, others): (Vec<Patch>, Vec<Patch>) =
        left.into_iter().partition(|patch| apply(&copy, patch));
    if applied.is_empty() {
        return Err(format!("these do not apply: {}", names(&others)));
    }
    list(&copy, &applied)?;
    Ok((build(&copy, dev)?, applied, others))
}

fn names(patches: &[Patch]) -> String {
    let names: Vec<&str> = patches.iter().map(|patch| &patch.name[..]).collect();
    names.join(",")
}

fn suite(program: &Path, names: &str, (budget, jobs): (u64, usize)) -> Command {
    let mut suite = Command::new(program);
    suite.args(["--planted", names]);
    suite.args(["--budget", &budget.to_string()]);
    suite.args(["--jobs", &jobs.to_string()]);
    suite
}

fn patches(only: &[String]) -> Result<Vec<Patch>, String> {
    let place = run::root().join(PLACE);
    let failed = |e: std::io::Error| format!("cannot read {}: {e}", place.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(&place).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path
            .file_stem()
            .map(|name| name.to_string_lossy().into_owned());
        let (Some(name), true) = (name, path.extension().is_some_and(|e| e == "patch")) else {
            continue;
        };
        if only.is_empty() || only.contains(&name) {
            let text = fs::read_to_string(&path).map_err(failed)?;
            let does = text.lines().take_while(|line| !line.is_empty());
            let does = does.collect::<Vec<_>>().join(" ");
            found.push(Patch { name, path, does });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    match only
        .iter()
        .find(|name| found.iter().all(|patch| patch.name != **name))
    {
        Some(name) => Err(format!("no such mistake: {name}")),
        None => Ok(found),
    }
}

/// Whether it applies, with less context than usual: others may have changed the lines around.
fn apply(copy: &Path, patch: &Patch) -> bool {
    let mut git = Command::new("git");
    git.current_dir(copy);
    // The copy is no part of the repository that it lies in.
    git.env(
        "GIT_CEILING_DIRECTORIES",
        copy.parent().expect("it lies in target"),
    );
    git.args(["apply", "-C1"]).arg(&patch.path);
    let status = git.stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Makes the names known to the engine.
fn list(copy: &Path, applied: &[Patch]) -> Result<(), String> {
    let path = copy.join("crates/engine/src/planted.rs");
    let failed = |e: std::io::Error| format!("cannot change {}: {e}", path.display());
    let text = fs::read_to_string(&path).map_err(failed)?;
    let end = text
        .find(LIST_END)
        .ok_or("the list of mistakes has another end")?;
    let named = |patch: &Patch| format!("\n    /// {}\n    {},", patch.does, patch.name);
    let names: String = applied.iter().map(named).collect();
    let text = [&text[..end], &names, &text[end..]].concat();
    fs::write(&path, text).map_err(failed)
}

/// Builds the simulator beside everything else that is built; where it is then.
fn build(copy: &Path, dev: bool) -> Result<PathBuf, String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| run::root().join("target"));
    let target = run::root().join(target);
    let mut build = run::cargo();
    build.current_dir(copy).env("CARGO_TARGET_DIR", &target);
    build.args(["build", "--bin", "cowslip-sim", "--quiet", "--workspace"]);
    build.args(["--features", "cowslip-sim/planted"]);
    if !dev {
        build.arg("--release");
    }
    run::run(&mut build)?;
    let profile = if dev { "debug" } else { "release" };
    let built = target.join(profile).join("cowslip-sim");
    // Under another name, since the simulator as it is has this one.
    let kept = target.join(format!("mistakes/{profile}-cowslip-sim"));
    tree::make(&target.join("mistakes"))?;
    fs::copy(&built, &kept).map_err(|e| format!("cannot copy {}: {e}", built.display()))?;
    Ok(kept)
}
