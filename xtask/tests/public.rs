//! The names that the library `cowslip` shows: what its documentation lists, with all features.
//!
//! They are read from the sources, as rustdoc would: public items and re-exports of public modules,
//! those of other crates of the workspace too, without what is hidden (`#[doc(hidden)]`). A name
//! that is shown in two places counts once. The page `all.html` of `cargo doc -p cowslip --no-deps
//! --all-features` has the same names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Names that the library may show. Another one needs a reason: what a program needs it for.
const NAMES_MAX: usize = 120;

/// Words that begin an item, behind `pub`.
const KINDS: [&str; 7] = ["struct", "enum", "trait", "fn", "type", "const", "static"];

#[test]
fn the_library_shows_few_names() {
    let shown = shown();
    let list: Vec<&str> = shown.iter().map(String::as_str).collect();
    assert!(
        shown.len() <= NAMES_MAX,
        "cowslip shows {} names, {NAMES_MAX} at most:\n{}",
        shown.len(),
        list.join("\n")
    );
    // The way to find them works: these are in a file, in a folder, inline, and of another crate.
    for name in [
        "cowslip::image::Image",
        "cowslip_qcow2_offline::create::create",
        "cowslip::image::options::OpenOptions",
        "cowslip_block::disk::Extent",
        "cowslip_hostfile::host::open_host_file",
        "cowslip_luks::passphrase::Passphrase",
    ] {
        assert!(shown.contains(name), "{name} is not found");
    }
    for hidden in ["cowslip_qcow2::state::Qcow2", "cowslip_block::run::Run"] {
        assert!(!shown.contains(hidden), "{hidden} is hidden");
    }
}

/// Prints the names: `cargo test -p xtask --test public -- --ignored --nocapture`.
#[test]
#[ignore = "prints a list"]
fn names() {
    let shown = shown();
    for name in &shown {
        println!("{name}");
    }
    println!("{} names", shown.len());
}

fn shown() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    Module::of_crate("cowslip").show(&mut found);
    found
}

/// A module: its path, its source, and the folder with the files of the modules in it.
struct Module {
    path: String,
    text: String,
    folder: PathBuf,
}

/// A public item, module or re-export, or an import: its attributes, and its first line, or all of
/// what may be an import or a module.
struct Declaration {
    attributes: String,
    text: String,
}

impl Declaration {
    fn is_hidden(&self) -> bool {
        let absent = ["doc(hidden)", "cfg(not(feature", "cfg(test)"];
        absent.iter().any(|part| self.attributes.contains(part))
    }

    /// The name of an item of this kind, or of a module.
    fn name_of(&self, kind: &str) -> Option<&str> {
        let words = self.text.strip_prefix("pub ")?;
        let words = words.strip_prefix("async ").unwrap_or(words);
        let words = words
            .strip_prefix("const fn")
            .map_or(words, |_| &words[6..]);
        let name = words.strip_prefix(kind)?.strip_prefix(' ')?;
        let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
        Some(&name[..end.unwrap_or(name.len())])
    }

    fn item(&self) -> Option<&str> {
        KINDS.iter().find_map(|kind| self.name_of(kind))
    }

    /// Each path that it imports.
    fn uses(&self) -> Vec<String> {
        let text = self.text.strip_prefix("pub ").unwrap_or(&self.text);
        let Some(tree) = text.strip_prefix("use ") else {
            return Vec::new();
        };
        let mut paths = Vec::new();
        expand("", tree.trim_end_matches(';'), &mut paths);
        paths
    }
}

/// The paths of a tree of imports.
fn expand(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((head, list)) = tree.split_once('{') else {
        paths.push(format!("{prefix}{tree}"));
        return;
    };
    let prefix = format!("{prefix}{}", head.trim());
    let list = list
        .trim_end()
        .strip_suffix('}')
        .expect("a list has an end");
    let (mut depth, mut start) = (0, 0);
    for (at, letter) in list.char_indices().chain([(list.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !list[start..at].trim().is_empty() {
                    expand(&prefix, &list[start..at], paths);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

impl Module {
    /// The root of a crate of the workspace, by the name that sources use.
    fn of_crate(name: &str) -> Module {
        let folder = match name {
            "cowslip" => "engine".to_string(),
            other => other.replace("cowslip_", "").replace('_', "-"),
        };
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
        let folder = crates.join(folder).join("src");
        Module {
            path: name.to_string(),
            text: fs::read_to_string(folder.join("lib.rs")).expect("a crate has a root"),
            folder,
        }
    }

    /// Public items of the module, and imports; rustfmt puts it at the line's start.
    fn declarations(&self) -> Vec<Declaration> {
        let (mut found, mut attributes) = (Vec::new(), String::new());
        let mut lines = self.text.lines();
        while let Some(line) = lines.next() {
            if line.starts_with("#[") {
                attributes += line;
            } else if line.starts_with("pub ") || line.starts_with("use ") {
                let is_import = line.starts_with("pub use ") || line.starts_with("use ");
                let is_module = line.starts_with("pub mod ");
                let mut text = line.to_string();
                let mut last = line;
                while is_import && !last.ends_with(';') || is_module && !ends_module(last) {
                    last = lines.next().expect("a declaration has an end");
                    text += "\n";
                    text += last;
                }
                let attributes = std::mem::take(&mut attributes);
                found.push(Declaration { attributes, text });
            } else if !line.starts_with("///") && !line.starts_with("//") {
                attributes.clear();
            }
        }
        found
    }

    /// A module in this one, in a file of its own or inline.
    fn child(&self, name: &str) -> Option<Module> {
        let path = format!("{}::{name}", self.path);
        let inline = format!("pub mod {name} {{");
        let inline = self.declarations().into_iter().find(|declared| {
            declared.text.starts_with(&inline) && !declared.attributes.contains("cfg(not(")
        });
        if let Some(declared) = inline {
            let lines = declared.text.lines().skip(1);
            let lines = lines.map(|line| line.strip_prefix("    ").unwrap_or(line));
            let text = lines.collect::<Vec<_>>().join("\n");
            let folder = self.folder.clone();
            return Some(Module { path, text, folder });
        }
        let folder = self.folder.join(name);
        let files = [
            self.folder.join(format!("{name}.rs")),
            folder.join("mod.rs"),
        ];
        let text = files
            .iter()
            .find_map(|file| fs::read_to_string(file).ok())?;
        Some(Module { path, text, folder })
    }

    /// The target of a path of an import in this module: the module that has it, and its name.
    fn follow(&self, path: &str) -> (Module, String) {
        let mut names: Vec<&str> = path.split("::").map(str::trim).collect();
        let last = names.pop().expect("a path has a name");
        let mut module = None;
        for name in names {
            module = Some(match (module, name) {
                (None, "crate") => Module::of_crate(self.path.split("::").next().unwrap_or("")),
                (None, "self") => self.copy(),
                (None, name) if name.starts_with("cowslip") => Module::of_crate(name),
                (None, name) => self.child(name).unwrap_or_else(|| panic!("{path}: {name}")),
                (Some(within), name) => Module::enter(&within, name),
            });
        }
        let name = last.split(" as ").next().unwrap_or(last);
        (module.unwrap_or_else(|| self.copy()), name.to_string())
    }

    /// A module by its name in another one: its child, or one that it imports.
    fn enter(within: &Module, name: &str) -> Module {
        within.child(name).unwrap_or_else(|| {
            let (module, name) = within.exported(name).expect("a path leads somewhere");
            Module::enter(&module, &name)
        })
    }

    fn copy(&self) -> Module {
        Module {
            path: self.path.clone(),
            text: self.text.clone(),
            folder: self.folder.clone(),
        }
    }

    /// The target of an import or re-export of this module by its name.
    fn exported(&self, name: &str) -> Option<(Module, String)> {
        let declared = self.declarations();
        let mut paths = declared.iter().flat_map(Declaration::uses);
        let path = paths.find(|path| path.rsplit("::").next().map(str::trim) == Some(name))?;
        Some(self.follow(&path))
    }

    /// Adds the names that the module shows.
    fn show(&self, found: &mut BTreeSet<String>) {
        for declared in self.declarations() {
            if declared.is_hidden() || declared.text.starts_with("use ") {
                continue;
            }
            if let Some(name) = declared.name_of("mod") {
                let module = self.child(name);
                let module = module.unwrap_or_else(|| panic!("{}::{name}", self.path));
                module.show(found);
            } else if let Some(name) = declared.item() {
                found.insert(format!("{}::{name}", self.path));
            }
            for path in declared.uses() {
                assert!(!path.ends_with('*'), "{}: {path} shows all", self.path);
                let (module, name) = self.follow(&path);
                module.show_one(&name, found);
            }
        }
    }

    /// Adds what a name of this module means, unless it is hidden there.
    fn show_one(&self, name: &str, found: &mut BTreeSet<String>) {
        let declared = self.declarations();
        if let Some(item) = declared.iter().find(|item| item.item() == Some(name)) {
            if !item.is_hidden() {
                found.insert(format!("{}::{name}", self.path));
            }
        } else if let Some(module) = self.child(name) {
            module.show(found);
        } else if let Some((module, name)) = self.exported(name) {
            module.show_one(&name, found);
        } else {
            // Of a crate that is not in the workspace, or made by a macro.
            found.insert(format!("{}::{name}", self.path));
        }
    }
}

/// Whether the line ends a declaration of a module: one in a file, or the last line of one inline.
fn ends_module(line: &str) -> bool {
    line == "}" || line.starts_with("pub mod ") && line.ends_with(';')
}
