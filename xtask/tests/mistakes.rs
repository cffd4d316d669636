//! The mistakes that are kept as patches apply to the engine as it is. `cargo xtask mistakes`
//! plants them; this is quick, and says which one a change of the engine has left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Patch {
    name: String,
    path: PathBuf,
    text: String,
}

impl Patch {
    /// The gate does not try it.
    fn is_slow(&self) -> bool {
        self.text.lines().nth(1).is_some_and(|how| !how.is_empty())
    }

    /// Applies it in a directory.
    fn apply(&self, directory: &Path, how: &[&str]) -> Output {
        let mut git = Command::new("git");
        git.current_dir(directory).arg("apply").args(how);
        let outside = directory.parent().expect("it lies in a directory");
        git.env("GIT_CEILING_DIRECTORIES", outside).arg(&self.path);
        git.output().expect("git can be run")
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace")
}

fn patches() -> Vec<Patch> {
    let mut patches = Vec::new();
    for entry in fs::read_dir(root().join("crates/sim/mistakes")).expect("there are mistakes") {
        let path = entry.expect("a directory can be listed").path();
        let name = path.file_stem().expect("a file");
        patches.push(Patch {
            name: name.to_string_lossy().into_owned(),
            text: fs::read_to_string(&path).expect("a patch is text"),
            path,
        });
    }
    assert!(patches.len() > 200, "{} mistakes", patches.len());
    patches
}

fn expect_none(what: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{what}:\n{}", findings.join("\n"));
}

/// Whether `crates/qcow2` has a test of this path in its sources, or another crate a test of this
/// name in this program.
fn is_test(path: &str) -> bool {
    let words: Vec<&str> = path.split(' ').collect();
    if let [package, program, name] = words[..] {
        let crate_name = package.strip_prefix("cowslip-").expect("a package of ours");
        let file = format!("crates/{crate_name}/tests/{program}/main.rs");
        let text = fs::read_to_string(root().join(file));
        return text.is_ok_and(|text| text.contains(&format!("#[test]\nfn {name}()")));
    }
    let (module, name) = path.rsplit_once("::").expect("it is in a module");
    let file = format!("crates/qcow2/src/{}.rs", module.replace("::", "/"));
    let text = fs::read_to_string(root().join(file));
    text.is_ok_and(|text| text.contains(&format!("#[test]\nfn {name}()")))
}

#[test]
fn every_patch_says_what_goes_wrong_and_when() {
    for Patch { name, text, .. } in patches() {
        let head: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
        let (does, rest) = head.split_first().expect("it says what it does");
        assert!(does.ends_with('.') && does.len() <= 100, "{name}: {does}");
        match rest {
            [] | ["Slow."] => {}
            [how] => {
                let test = how
                    .strip_prefix("Test ")
                    .and_then(|how| how.strip_suffix('.'));
                let test = test.unwrap_or_else(|| panic!("{name}: {how}"));
                assert!(is_test(test), "{name}: {test}");
            }
            _ => panic!("{name}: {rest:?}"),
        }
        let planted = format!("planted::is(Mistake::{name})");
        assert!(text.contains(&planted), "{name}: not planted");
    }
}

#[test]
fn every_patch_applies_to_the_engine() {
    let mut stale = Vec::new();
    for patch in patches() {
        // With all of its context: with less, it may apply at a place that it is not meant for.
        let checked = patch.apply(root(), &["--check"]);
        if !checked.status.success() {
            let why = String::from_utf8_lossy(&checked.stderr).into_owned();
            stale.push(format!("{}: {why}", patch.name));
        }
    }
    expect_none("they no longer apply", &stale);
}

#[test]
fn those_that_the_gate_needs_go_together() {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mistakes");
    if copy.exists() {
        fs::remove_dir_all(&copy).expect("it is ours");
    }
    for name in [
        "block",
        "luks",
        "hostfile",
        "qcow2-format",
        "qcow2-offline",
        "qcow2",
        "engine",
        "graph",
        "vhost-user",
    ] {
        let sources = format!("crates/{name}/src");
        copy_all(&root().join(&sources), &copy.join(&sources));
    }
    let mut patches = patches();
    patches.sort_by_key(|patch| (patch.is_slow(), patch.name.clone()));
    let threads = root().join("crates/models/shuttle/tests/planted.rs");
    let threads = fs::read_to_string(threads).expect("shuttle plants some");
    let mut in_the_way = BTreeSet::new();
    let mut on_threads = 0;
    for patch in patches {
        let is_on_threads = threads.contains(&format!("{:?}", patch.name));
        on_threads += usize::from(is_on_threads);
        // With the context that `cargo xtask mistakes` asks for.
        let applied = patch.apply(&copy, &["-C1"]).status.success();
        if !applied && (!patch.is_slow() || is_on_threads) {
            in_the_way.insert(patch.name);
        }
    }
    assert!(on_threads > 5, "shuttle plants {on_threads}");
    let in_the_way: Vec<String> = in_the_way.into_iter().collect();
    expect_none("others are in their way", &in_the_way);
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory can be made");
    for entry in fs::read_dir(from).expect("a directory can be listed") {
        let path = entry.expect("a directory can be listed").path();
        let target = to.join(path.file_name().expect("it has a name"));
        match path.is_dir() {
            true => copy_all(&path, &target),
            false => drop(fs::copy(&path, &target).expect("a file can be copied")),
        }
    }
}
