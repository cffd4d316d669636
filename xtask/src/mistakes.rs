//! `cargo xtask mistakes`: mistakes that are planted in a copy of the engine, which itself has no
//! hook for them.
//!
//! A patch in `crates/sim/mistakes` says in its first line what goes wrong, in a second line
//! `Slow.` if that takes the simulator more runs than the gate has time for, or `Test NAME.` if
//! this test of `crates/qcow2` has to notice it rather than the simulator; `Test PACKAGE PROGRAM
//! NAME.` is a test of another crate. It changes the engine where `planted::is(Mistake::NAME)`
//! holds, NAME being the file's. As many as go together are applied to a copy of the sources, which
//! gets the module `planted` that they name, and is built once. Patches that are in each other's
//! way go into copies one after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{libssl, run, tree};

/// Where the patches are, from the root.
const PLACE: &str = "crates/sim/mistakes";
/// The sources that patches change, from the root. The first has the module `planted`, which the
/// others re-export.
const SOURCES: [&str; 9] = [
    "crates/block/src",
    "crates/luks/src",
    "crates/hostfile/src",
    "crates/qcow2-format/src",
    "crates/qcow2-offline/src",
    "crates/qcow2/src",
    "crates/engine/src",
    "crates/graph/src",
    "crates/vhost-user/src",
];
/// A program that builds some of them again, from the root.
const AGAIN: &str = "crates/vhost-user/tests/crashes/main.rs";
/// Where the simulator, and the models, look for what the engine can make, from the root.
const KNOWN: &str = "crates/sim/src/planted/engine.rs";
/// The content of that file in a copy.
const KNOWN_IN_COPY: &str = "//! The mistakes that this engine can make.

pub use cowslip::planted::{KNOWN, plant};
";
/// How a patch says, in its second line, which test has to notice it.
const TEST: &str = "Test ";
/// How a patch asks whether its mistake is planted.
const HOOK: &str = "planted::is(Mistake::";
/// The import that a file with hooks needs. At its end, where it does not shift any patch.
const IMPORT: &str = "\nuse crate::planted::{self, Mistake};\n";

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
    /// The gate tries it, too.
    is_quick: bool,
    /// The test that has to notice it; else the simulator has to.
    test: Option<String>,
}

/// A copy of the sources in which mistakes can be planted.
struct Planted {
    copy: PathBuf,
    applied: Vec<Patch>,
    /// Those that are in the way of others.
    left: Vec<Patch>,
}

/// Tries each until it is noticed; fails if one is not.
pub fn run(args: &Args) -> Result<(), String> {
    let mut left = patches(&args.only)?;
    let mut threads_tried = false;
    let mut failures = Vec::new();
    while !left.is_empty() {
        let planted = Planted::new(left)?;
        let simulated = planted.applied.iter().filter(|patch| patch.test.is_none());
        let simulated = names(simulated);
        if !simulated.is_empty() {
            let program = planted.build(args.dev)?;
            let mut suite = suite(&program, &simulated, (args.budget, args.jobs));
            failures.extend(run::run(suite.args(&args.arguments)).err());
        }
        for patch in &planted.applied {
            failures.extend(planted.try_test(patch).err());
        }
        if args.only.is_empty() && !threads_tried {
            failures.extend(planted.try_threads().err());
            threads_tried = true;
        }
        left = planted.left;
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("\n")),
    }
}

/// The gate's part: the simulator must notice the mistakes that take it few runs, and threads in
/// seeded orders those that are for them.
pub fn gate() -> Result<(), String> {
    let planted = Planted::new(patches(&[])?)?;
    if let Some(left) = planted.left.iter().find(|patch| patch.is_quick) {
        return Err(format!("{} is in the way of another patch", left.name));
    }
    let program = planted.build(true)?;
    let noticed = run::run(&mut suite(&program, "quick", (420, 2)));
    noticed.and(planted.try_threads())
}

impl Planted {
    /// Applies as many as go together to a new copy; the quick ones first.
    fn new(mut patches: Vec<Patch>) -> Result<Planted, String> {
        let copy = run::root().join("target/mistakes/tree");
        tree::copy(&copy)?;
        patches.sort_by_key(|patch| !patch.is_quick);
        let (applied, left): (Vec<Patch>, Vec<Patch>) =
            patches.into_iter().partition(|patch| apply(&copy, patch));
        if applied.is_empty() {
            return Err(format!("these do not apply: {}", names(&left)));
        }
        for (index, sources) in SOURCES.iter().enumerate() {
            let sources = copy.join(sources);
            import(&sources)?;
            let declares = match index {
                0 => "\npub mod planted;\n",
                _ => "\npub use cowslip_block::planted;\n",
            };
            let root = sources.join("lib.rs");
            write(&root, &(read(&root)? + declares))?;
        }
        let again = copy.join(AGAIN);
        write(&again, &(read(&again)? + "\nuse cowslip_block::planted;\n"))?;
        write(&copy.join(SOURCES[0]).join("planted.rs"), &module(&applied))?;
        write(&copy.join(KNOWN), KNOWN_IN_COPY)?;
        Ok(Planted {
            copy,
            applied,
            left,
        })
    }

    fn cargo(&self, command: &str) -> (Command, PathBuf) {
        let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let target = target.unwrap_or_else(|| run::root().join("target"));
        let target = run::root().join(target);
        let mut cargo = run::cargo();
        cargo
            .current_dir(&self.copy)
            .env("CARGO_TARGET_DIR", &target);
        cargo.args([command, "--quiet"]);
        (cargo, target)
    }

    /// Builds the simulator beside everything else that is built; where it is then.
    fn build(&self, dev: bool) -> Result<PathBuf, String> {
        let (mut build, target) = self.cargo("build");
        build.args(["--bin", "cowslip-sim", "--workspace"]);
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

    /// The test that is to notice a mistake, if there is one, passes without it and fails
    /// with it.
    fn try_test(&self, patch: &Patch) -> Result<(), String> {
        let Some(test) = &patch.test else {
            return Ok(());
        };
        for (planted, wanted) in [
            ("", "1 passed; 0 failed"),
            (&patch.name, "0 passed; 1 failed"),
        ] {
            let (mut cargo, _) = self.cargo("test");
            let words: Vec<&str> = test.split(' ').collect();
            match words[..] {
                [package, program, name] => {
                    cargo.args(["--package", package, "--test", program]);
                    cargo.args(["--", "--exact", name]);
                }
                _ => {
                    cargo.args(["--package", "cowslip-qcow2", "--lib"]);
                    cargo.args(["--", "--exact", test]);
                }
            }
            if !planted.is_empty() {
                cargo.env("COWSLIP_PLANTED", planted);
            }
            let output = cargo
                .output()
                .map_err(|e| format!("cannot run cargo: {e}"))?;
            let said = String::from_utf8_lossy(&output.stdout);
            if !said.contains(wanted) {
                let errors = String::from_utf8_lossy(&output.stderr);
                return Err(format!(
                    "{}: {test}: not {wanted}:\n{said}{errors}",
                    patch.name
                ));
            }
        }
        println!("{} is noticed by {test}", patch.name);
        Ok(())
    }

    /// Runs what plants mistakes in the engine on shuttle's threads. With the features of the whole
    /// workspace, the crates of others are those that the tests need too.
    fn try_threads(&self) -> Result<(), String> {
        let (mut test, _) = self.cargo("test");
        test.args(["--workspace", "--test", "planted"]);
        test.args(libssl::features());
        run::run(test.args(["--", "--ignored", "--nocapture"]))
    }
}

fn names<'a>(patches: impl IntoIterator<Item = &'a Patch>) -> String {
    let names: Vec<&str> = patches.into_iter().map(|patch| &patch.name[..]).collect();
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
            let text = read(&path)?;
            let mut head = text.lines().take_while(|line| !line.is_empty());
            let does = head.next().unwrap_or_default().to_string();
            let how = head.next();
            let test = how.and_then(|how| how.strip_prefix(TEST)?.strip_suffix('.'));
            found.push(Patch {
                name,
                path,
                does,
                is_quick: how.is_none(),
                test: test.map(str::to_string),
            });
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

/// Gives the files of a directory that have hooks what those name.
fn import(directory: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("cannot read {}: {e}", directory.display());
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            import(&path)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = read(&path)?;
            if text.contains(HOOK) {
                write(&path, &(text + IMPORT))?;
            }
        }
    }
    Ok(())
}

/// The engine's module that knows the mistakes.
fn module(applied: &[Patch]) -> String {
    let mut module = String::from(MODULE);
    module.push_str("/// A mistake.\n#[derive(Clone, Copy, Debug, PartialEq, Eq)]\n");
    module.push_str("pub enum Mistake {\n");
    for Patch { name, does, .. } in applied {
        module.push_str(&format!("    /// {does}\n    {name},\n"));
    }
    module.push_str("}\n\n/// The mistakes by themselves.\nconst ALL: &[Mistake] = &[\n");
    for Patch { name, .. } in applied {
        module.push_str(&format!("    Mistake::{name},\n"));
    }
    module.push_str(
        "];\n\n/// What each is called, what goes wrong, and whether few seeds notice it.\n",
    );
    module.push_str("pub const KNOWN: &[(&str, &str, bool)] = &[\n");
    for patch in applied {
        let Patch { name, does, .. } = patch;
        module.push_str(&format!("    ({name:?}, {does:?}, {}),\n", patch.is_quick));
    }
    module.push_str("];\n");
    module
}

const MODULE: &str = "//! Mistakes that this copy of the engine can make, one at a time.

use std::cell::Cell;

thread_local! {
    static PLANTED: Cell<Option<Mistake>> = Cell::new(named_for_a_test());
}

/// The mistake that the environment names, for a test of the engine.
fn named_for_a_test() -> Option<Mistake> {
    let name = std::env::var(\"COWSLIP_PLANTED\").ok()?;
    let number = KNOWN.iter().position(|(known, ..)| *known == name);
    Some(ALL[number.expect(\"a mistake that is known\")])
}

/// Plants the mistake of this name, or none, for the images that this thread drives.
pub fn plant(name: Option<&str>) {
    let number = |name| KNOWN.iter().position(|(known, ..)| *known == name);
    PLANTED.set(name.map(|name| ALL[number(name).expect(\"a mistake that is known\")]));
}

/// Whether this mistake is planted.
pub fn is(mistake: Mistake) -> bool {
    PLANTED.get() == Some(mistake)
}

";

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
}
