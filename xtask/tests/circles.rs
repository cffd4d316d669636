//! Circles of imports: files of a crate that need each other, so that none can be read alone.
//!
//! A file needs another where its code, tests aside, names something of it: by a `use`, or by a
//! path that begins with `crate`, `self`, `super` or a child module. What a module re-exports
//! counts as the file's that has it. Methods are not followed, since a name alone does not say
//! whose they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that a circle may have.
const FILES_MAX: usize = 4;

#[test]
fn files_that_need_each_other_are_few() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace");
    let mut findings = Vec::new();
    let crates = fs::read_dir(root.join("crates")).expect("there are crates");
    let crates = crates.map(|entry| entry.expect("a directory can be listed").path());
    for directory in crates.chain([root.to_path_buf(), root.join("xtask")]) {
        if !directory.join("src/lib.rs").exists() && !directory.join("src/main.rs").exists() {
            continue;
        }
        let name = directory.strip_prefix(root).unwrap_or(&directory);
        let name = name.to_string_lossy();
        let circles = Crate::read(&directory.join("src")).circles();
        for circle in circles.iter().filter(|circle| circle.len() > FILES_MAX) {
            findings.push(format!("{name}: {} files: {circle:?}", circle.len()));
        }
    }
    assert!(
        findings.is_empty(),
        "files that need each other:\n{}",
        findings.join("\n")
    );
}

/// A path of names: of a module, or of something in one.
type Names = Vec<String>;

/// The modules of a crate, and what they name.
struct Crate {
    /// Each module's file.
    modules: BTreeMap<Names, String>,
    /// The code of each file, without comments, strings and tests.
    code: BTreeMap<String, String>,
    /// The re-exports of each module: the name there, and the whole path; none of other crates.
    exports: BTreeMap<(Names, String), Option<Names>>,
}

impl Crate {
    fn read(src: &Path) -> Crate {
        let mut found = Crate {
            modules: BTreeMap::new(),
            code: BTreeMap::new(),
            exports: BTreeMap::new(),
        };
        let mut files = Vec::new();
        collect(src, &mut files);
        for path in files {
            let file = path.strip_prefix(src).expect("it was found there");
            let file = file.to_string_lossy().into_owned();
            let mut module: Names = file
                .trim_end_matches(".rs")
                .split('/')
                .map(str::to_string)
                .collect();
            let is_test = module.iter().any(|part| part == "tests");
            if is_test || file == "main.rs" && src.join("lib.rs").exists() {
                continue;
            }
            if ["lib", "main", "mod"]
                .iter()
                .any(|name| module.last().is_some_and(|m| m == name))
            {
                module.pop();
            }
            let text = fs::read_to_string(&path).expect("a source file can be read");
            found
                .code
                .insert(file.clone(), without_tests(&without_text(&text)));
            found.modules.insert(module, file);
        }
        for (module, file) in &found.modules {
            for (is_public, tree) in uses(&found.code[file]).0 {
                for (path, name) in expand(&tree) {
                    let path = found.absolute(&path, module);
                    if is_public || path.is_none() {
                        found.exports.insert((module.clone(), name), path);
                    }
                }
            }
        }
        found
    }

    /// A path from the crate's root, if it is one of this crate.
    fn absolute(&self, path: &[String], module: &[String]) -> Option<Names> {
        let first = path.first()?;
        match &first[..] {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([module, &path[1..]].concat()),
            "super" => {
                let up = path.iter().take_while(|name| *name == "super").count();
                let above = &module[..module.len().checked_sub(up)?];
                Some([above, &path[up..]].concat())
            }
            _ => {
                let child = [module, std::slice::from_ref(first)].concat();
                let is_module = self.modules.contains_key(&child);
                is_module.then(|| [module, path].concat())
            }
        }
    }

    /// The file that has what a path from the root names.
    fn file_of(&self, path: &[String], depth: usize) -> Option<&String> {
        let split = (0..=path.len()).rev();
        let mut split = split.filter(|at| self.modules.contains_key(&path[..*at]));
        let (module, rest) = path.split_at(split.next()?);
        let export = rest
            .first()
            .and_then(|name| self.exports.get(&(module.to_vec(), name.clone())));
        match export {
            Some(None) => None,
            Some(Some(whole)) if depth < 8 => {
                self.file_of(&[whole, &rest[1..]].concat(), depth + 1)
            }
            _ => self.modules.get(module),
        }
    }

    /// The files that each file needs.
    fn needs(&self) -> BTreeMap<&String, BTreeSet<&String>> {
        let mut needs = BTreeMap::new();
        for (module, file) in &self.modules {
            let (uses, rest) = uses(&self.code[file]);
            let imports = uses.iter().filter(|(is_public, _)| !is_public);
            let imports = imports.flat_map(|(_, tree)| expand(tree));
            let paths = imports.map(|(path, _)| path).chain(paths(&rest));
            let absolute = paths.filter_map(|path| self.absolute(&path, module));
            let files: Vec<Names> = absolute.collect();
            let files = files.iter().filter_map(|path| self.file_of(path, 0));
            needs.insert(file, files.filter(|other| *other != file).collect());
        }
        needs
    }

    /// Files that need each other, directly or by others: at least two.
    fn circles(&self) -> Vec<Vec<String>> {
        let needs = self.needs();
        let reached: BTreeMap<&String, BTreeSet<&String>> = needs
            .keys()
            .map(|file| {
                let mut reached = BTreeSet::new();
                let mut next: Vec<&String> = needs[*file].iter().copied().collect();
                while let Some(other) = next.pop() {
                    if reached.insert(other) {
                        next.extend(&needs[other]);
                    }
                }
                (*file, reached)
            })
            .collect();
        let mut circles = BTreeSet::new();
        for (file, others) in &reached {
            let back = others
                .iter()
                .filter(|other| reached[**other].contains(*file));
            let circle: BTreeSet<String> = back.map(|file| (*file).clone()).collect();
            if circle.len() > 1 {
                circles.insert(circle.into_iter().collect::<Vec<_>>());
            }
        }
        circles.into_iter().collect()
    }
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).expect("a directory can be listed");
    for path in entries.map(|entry| entry.expect("a directory can be listed").path()) {
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The code without comments, and with empty strings.
fn without_text(text: &str) -> String {
    let mut code = String::new();
    for line in text.lines() {
        let mut rest = line;
        loop {
            let at = rest.find(['"', '/']).unwrap_or(rest.len());
            code.push_str(&rest[..at]);
            rest = &rest[at..];
            if rest.is_empty() || rest.starts_with("//") {
                break;
            }
            let is_string = rest.starts_with('"') && !code.ends_with('\'');
            let end = is_string.then(|| string_end(rest)).flatten().unwrap_or(1);
            rest = &rest[end..];
        }
        code.push('\n');
    }
    code
}

/// Where a string that begins here ends, if on this line.
fn string_end(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'"' if !is_escaped => return Some(at + 1),
            _ => is_escaped = byte == b'\\' && !is_escaped,
        }
    }
    None
}

/// The code without items that only tests have.
fn without_tests(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(start) = rest.find("#[cfg(test)]") {
        kept.push_str(&rest[..start]);
        rest = &rest[start..];
        let mut depth = 0;
        let end = rest.char_indices().find(|(_, c)| {
            depth += i32::from(*c == '{') - i32::from(*c == '}');
            depth == 0 && matches!(c, ';' | '}')
        });
        rest = end.map_or("", |(at, c)| &rest[at + c.len_utf8()..]);
    }
    kept + rest
}

/// The `use` declarations of code: whether each is a re-export, and its tree. And the code without
/// them.
fn uses(code: &str) -> (Vec<(bool, String)>, String) {
    let (mut found, mut others) = (Vec::new(), String::new());
    let mut rest = code;
    while let Some(at) = rest.find("use ") {
        let line = rest[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let before = rest[line..at].trim();
        let is_use = before.is_empty()
            || before.starts_with("pub") && !before.contains(['(', ' '])
            || before.starts_with("pub(") && before.ends_with(')');
        let end = rest[at..].find(';').map_or(rest.len(), |end| at + end);
        if is_use {
            others.push_str(&rest[..line]);
            found.push((!before.is_empty(), rest[at + 4..end].to_string()));
            rest = &rest[end..];
        } else {
            others.push_str(&rest[..at + 4]);
            rest = &rest[at + 4..];
        }
    }
    (found, others + rest)
}

/// The paths of a tree of names, and the name that each has afterwards.
fn expand(tree: &str) -> Vec<(Names, String)> {
    let tree = tree.trim();
    let names = |text: &str| -> Names {
        let names = text.split("::").map(str::trim);
        names
            .filter(|name| !name.is_empty())
            .map(str::to_string)
            .collect()
    };
    let Some((before, inner)) = tree.split_once('{') else {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let path = names(path);
        let name = match alias.trim() {
            "" => path.last().cloned().unwrap_or_default(),
            alias => alias.to_string(),
        };
        return vec![(path, name)];
    };
    let before = names(before);
    let inner = inner.trim().strip_suffix('}').unwrap_or(inner);
    let mut found = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            for (path, name) in expand(&inner[start..at]) {
                let is_self = path == ["self"];
                let own = before.last().cloned().unwrap_or_default();
                let (path, name) = if is_self {
                    (Vec::new(), own)
                } else {
                    (path, name)
                };
                if is_self || !path.is_empty() {
                    found.push(([&before[..], &path[..]].concat(), name));
                }
            }
            start = at + 1;
        }
    }
    found
}

/// Paths of two names or more in code.
fn paths(code: &str) -> Vec<Names> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    // From where something may be named is no need of it.
    let pieces = code.split("pub(in ").enumerate();
    let pieces = pieces.map(|(index, piece)| match index {
        0 => piece,
        _ => piece.split_once(')').map_or("", |(_, rest)| rest),
    });
    pieces
        .flat_map(|piece| piece.split(|c| !is_part(c)))
        .filter(|word| word.contains("::") && !word.starts_with(':'))
        .map(|word| word.split("::").filter(|name| !name.is_empty()))
        .map(|names| names.map(str::to_string).collect())
        .collect()
}

#[test]
fn code_is_read_as_it_is_meant() {
    let code = without_tests(&without_text(
        "use a::{self, b::{C, d as e}}; // use x::Y;\npub use super::F;\n#[cfg(test)]\nmod t {\n use z;\n}\nlet g = \"use h;\"; crate::i::J\n",
    ));
    let (uses, rest) = uses(&code);
    let trees: Vec<_> = uses.iter().flat_map(|(_, tree)| expand(tree)).collect();
    let shown: Vec<String> = trees
        .iter()
        .map(|(path, name)| format!("{} as {name}", path.join("::")))
        .collect();
    assert_eq!(
        shown,
        ["a as a", "a::b::C as C", "a::b::d as e", "super::F as F"]
    );
    assert!(uses[1].0 && !uses[0].0);
    assert_eq!(paths(&rest), [["crate", "i", "J"]]);
}
