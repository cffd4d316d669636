//! The rules of the house that no compiler checks: who may know what, where `unsafe` and flushes
//! may be, how files open, and that ARCHITECTURE.md names what exists.
//!
//! The rules read text, line by line, without comments. They are meant to catch slips, not malice:
//! a rule that is in the way of better code is changed here, with the reason.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "tidy/language.rs"]
mod language;

/// A source file of the workspace.
struct Source {
    /// Its path, relative to the root, with slashes.
    path: String,
    text: String,
}

impl Source {
    /// Lines outside of items for tests alone, without comments, numbered from 1.
    fn code(&self) -> impl Iterator<Item = (usize, String)> {
        let mut lines = Vec::new();
        let mut all = self.text.lines().enumerate();
        while let Some((index, line)) = all.next() {
            match line.strip_suffix("#[cfg(test)]") {
                Some(indent) if indent.trim().is_empty() => skip_item(&mut all, indent),
                _ => lines.push((index + 1, without_comment(line))),
            }
        }
        lines.into_iter()
    }

    /// Whether the file consists of tests.
    fn is_test(&self) -> bool {
        self.path.contains("/tests/")
            || self.path.starts_with("tests/")
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("_tests.rs")
    }
}

/// Passes an item whose lines begin at this indent, to the line that ends it.
fn skip_item<'a>(lines: &mut impl Iterator<Item = (usize, &'a str)>, indent: &str) {
    for (_, line) in lines {
        let ends = line.strip_prefix(indent).is_some_and(|line| {
            let is_first = !line.starts_with([' ', '#', '}', ')']);
            let is_whole = line.ends_with(';') || line.ends_with('}') || line.ends_with(',');
            is_first && is_whole || line.starts_with('}')
        });
        if ends {
            return;
        }
    }
}

fn without_comment(line: &str) -> String {
    match line.find("//") {
        Some(start) if !line[..start].ends_with(':') => line[..start].to_string(),
        _ => line.to_string(),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace")
        .to_path_buf()
}

fn sources() -> Vec<Source> {
    let mut sources = Vec::new();
    for directory in [
        "src", "tests", "crates", "xtask", "bench", "examples", "fuzz",
    ] {
        collect(&root().join(directory), &mut sources);
    }
    assert!(
        sources.len() > 10,
        "the sources are not where they are looked for"
    );
    sources
}

fn collect(directory: &Path, sources: &mut Vec<Source>) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries {
        let path = entry.expect("a directory can be listed").path();
        if path.is_dir() {
            if !path.ends_with("target") {
                collect(&path, sources);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            let relative = path.strip_prefix(root()).expect("it is below the root");
            sources.push(Source {
                path: relative.to_string_lossy().replace('\\', "/"),
                text: fs::read_to_string(&path).expect("a source is UTF-8"),
            });
        }
    }
}

/// Fails with all findings at once.
fn expect_none(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}

/// Whether `word` stands in `line` as a word of its own, or, if it ends in `::`, as the start of a
/// path.
fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && (word.ends_with("::") || !after.is_some_and(is_part))
    })
}

/// Uses of any of `words` in the code of the files that `applies` chooses.
fn uses(applies: impl Fn(&Source) -> bool, words: &[&str]) -> Vec<String> {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|s| applies(s)) {
        for (number, line) in source.code() {
            for word in words.iter().filter(|w| has_word(&line, w)) {
                findings.push(format!("{}:{number}: {word}", source.path));
            }
        }
    }
    findings
}

#[test]
fn every_file_says_what_it_is_for() {
    // A library's first comment is its guide. Lines of examples do not count.
    let mut findings = Vec::new();
    for source in sources() {
        let mut is_example = false;
        let head = source.text.lines().take_while(|l| l.starts_with("//!"));
        let is_said = |line: &&str| {
            is_example ^= line.starts_with("//! ```");
            !is_example
        };
        let head = head.filter(is_said).count();
        if head == 0 {
            findings.push(format!("{}: does not open with //!", source.path));
        } else if head > 40 && !source.path.ends_with("/lib.rs") {
            findings.push(format!("{}: opens with {head} lines", source.path));
        }
    }
    expect_none(
        "a file opens with a short //! comment on what it is for",
        &findings,
    );
}

#[test]
fn lines_of_prose_end_at_column_100() {
    let mut findings = Vec::new();
    for source in sources() {
        for (index, line) in source.text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("//");
            let comment = comment.map(|text| text.trim_start_matches(['/', '!', ' ']));
            // Rows of tables cannot be wrapped, nor can addresses.
            let is_prose = comment.is_some_and(|text| !text.starts_with('|') && text.contains(' '));
            if is_prose && line.chars().count() > 100 {
                findings.push(format!("{}:{}", source.path, index + 1));
            }
        }
    }
    for (path, text) in pages() {
        let mut is_fenced = false;
        for (index, line) in text.lines().enumerate() {
            is_fenced ^= line.trim_start().starts_with("```");
            let is_row = line.trim_start().starts_with('|');
            let is_prose = !is_fenced && !is_row && line.contains(' ');
            if is_prose && line.chars().count() > 100 {
                findings.push(format!("{path}:{}", index + 1));
            }
        }
    }
    expect_none("prose is wrapped at column 100", &findings);
}

/// The documents: their paths and texts.
fn pages() -> Vec<(String, String)> {
    let mut pages = Vec::new();
    for directory in [root(), root().join("docs"), root().join("manual")] {
        for entry in fs::read_dir(&directory).expect("a directory can be listed") {
            let path = entry.expect("a directory can be listed").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).expect("a document is text");
                pages.push((path.display().to_string(), text));
            }
        }
    }
    pages
}

#[test]
fn files_fit_a_head() {
    let long = sources()
        .iter()
        .filter(|source| !source.is_test())
        .map(|source| (source.path.clone(), source.code().count()))
        .filter(|(_, lines)| *lines > 900)
        .map(|(path, lines)| format!("{path}: {lines} lines"))
        .collect::<Vec<_>>();
    expect_none("a file of over about 800 lines wants splitting", &long);
}

/// Crates of images and of their files.
const OF_IMAGES: [&str; 7] = [
    "engine",
    "qcow2",
    "qcow2-offline",
    "qcow2-format",
    "luks",
    "hostfile",
    "block",
];

#[test]
fn the_engine_knows_no_server_command_line_thread_or_clock() {
    let findings = uses(
        |s| {
            let mut crates = OF_IMAGES.iter();
            crates.any(|name| s.path.starts_with(&format!("crates/{name}/src/"))) && !s.is_test()
        },
        &[
            "cowslip_nbd",
            "clap",
            "indicatif",
            "println",
            "eprintln",
            "UnixStream",
            "TcpStream",
            "Instant",
            "SystemTime",
            "thread::spawn",
        ],
    );
    expect_none("the engine decides from its inputs alone", &findings);
}

#[test]
fn the_engine_has_no_hook_for_mistakes() {
    let findings = uses(
        |s| {
            let mut crates = OF_IMAGES.iter().chain(&["graph"]);
            crates.any(|name| s.path.starts_with(&format!("crates/{name}/")))
        },
        &["planted", "Mistake"],
    );
    expect_none("mistakes are patches in crates/sim/mistakes", &findings);
    for name in ["engine", "qcow2", "qcow2-offline", "qcow2-format"] {
        let manifest = root().join(format!("crates/{name}/Cargo.toml"));
        let manifest = fs::read_to_string(manifest).expect("it exists");
        assert!(!manifest.contains("planted"), "{name} has a feature");
    }
}

#[test]
fn the_nbd_crate_knows_no_image_format() {
    let words = ["cowslip::", "clap", "qcow2", "println", "eprintln"];
    let findings = uses(
        |s| s.path.starts_with("crates/nbd/src/") && !s.is_test(),
        &words,
    );
    expect_none("NBD serves disks and knows no engine", &findings);
    let manifest = fs::read_to_string(root().join("crates/nbd/Cargo.toml")).expect("it exists");
    assert!(
        !manifest
            .lines()
            .any(|l| l.starts_with("cowslip.") || l.starts_with("cowslip =")),
        "crates/nbd depends on the engine"
    );
}

#[test]
fn the_queue_knows_nobody() {
    let findings = uses(
        |s| s.path.starts_with("crates/queue/src/") && !s.is_test(),
        &["cowslip::", "cowslip_nbd", "clap", "println"],
    );
    expect_none("the queue is at the bottom", &findings);
}

#[test]
fn the_console_knows_no_image() {
    let words = [
        "cowslip_nbd",
        "cowslip_bench",
        "cowslip_extents",
        "Image",
        "BlockFile",
        "qcow2",
        "println",
        "eprintln",
    ];
    let findings = uses(
        |s| s.path.starts_with("crates/console/src/") && !s.is_test(),
        &words,
    );
    expect_none("what commands share is below images", &findings);
}

#[test]
fn the_viewer_of_extents_knows_no_server() {
    let findings = uses(
        |s| s.path.starts_with("crates/extents/src/") && !s.is_test(),
        &[
            "cowslip_nbd",
            "cowslip_bench",
            "clap",
            "println",
            "eprintln",
        ],
    );
    expect_none("files are opened by who wants a report", &findings);
}

#[test]
fn what_is_below_the_engine_knows_no_format_above_it() {
    for (name, words) in [
        (
            "block",
            &["cowslip_luks", "cowslip_hostfile", "rustix", "std::fs"][..],
        ),
        (
            "luks",
            &["cowslip_hostfile", "qcow2", "rustix", "std::fs"][..],
        ),
        ("hostfile", &["cowslip_luks", "qcow2"][..]),
    ] {
        let start = format!("crates/{name}/src/");
        let in_crate = |s: &Source| s.path.starts_with(&start) && !s.is_test();
        // Formats are recognised by their first bytes, and named.
        let names = ["crates/block/src/foreign.rs", "crates/block/src/policy.rs"];
        let is_bound = |s: &Source| in_crate(s) && !names.contains(&&s.path[..]);
        expect_none(
            "a crate knows what is below it alone",
            &uses(is_bound, words),
        );
    }
}

#[test]
fn filters_know_no_image_and_nodes_no_command() {
    let in_crate = |name: &'static str| {
        move |s: &Source| s.path.starts_with(&format!("crates/{name}/src/")) && !s.is_test()
    };
    let words = ["cowslip::", "cowslip_nbd", "cowslip_hostfile", "Image"];
    expect_none(
        "a filter is a file over a file, whatever is in it",
        &uses(in_crate("filters"), &words),
    );
    let words = ["cowslip_console", "clap", "println", "eprintln"];
    let both = |s: &Source| in_crate("filters")(s) || in_crate("nodes")(s);
    expect_none(
        "the registry opens by name for programs of any kind",
        &uses(both, &words),
    );
}

/// The crates of the picture in ARCHITECTURE.md, the lowest line first.
const LINES: &[&[&str]] = &[
    &["queue", "boxed"],
    &["block"],
    &[
        "filters",
        "front",
        "fuse",
        "graph",
        "nbd",
        "qmp",
        "luks",
        "hostfile",
        "trace",
        "rbd",
        "remote",
        "publish",
        "vhost-user",
    ],
    &["qcow2-format"],
    &["qcow2-offline"],
    &["qcow2"],
    &["engine"],
    &["nodes"],
    &["console", "embed"],
    &["cmdline", "load", "python"],
    &["advise", "clients", "exports", "extents", "shell"],
    &["bench", "daemon"],
];

#[test]
fn crates_depend_on_those_in_lines_below_alone() {
    let line_of = |name: &str| {
        let name = if name == "cowslip" { "engine" } else { name };
        let name = name.strip_prefix("cowslip-").unwrap_or(name);
        LINES.iter().position(|crates| crates.contains(&name))
    };
    let mut findings = Vec::new();
    for (height, names) in LINES.iter().enumerate() {
        for name in *names {
            let manifest = root().join(format!("crates/{name}/Cargo.toml"));
            let text = fs::read_to_string(&manifest).expect("the crate has a manifest");
            let needs = text.split("[dependencies]").nth(1).unwrap_or_default();
            let needs = needs.split("\n[").next().unwrap_or_default();
            for line in needs.lines().filter(|line| line.starts_with("cowslip")) {
                let needed = line.split(['.', ' ']).next().unwrap_or_default();
                // What measurements need is no part of the picture.
                let is_below = needed == "cowslip-testbed"
                    || line_of(needed).is_some_and(|needed| needed < height);
                if !is_below {
                    findings.push(format!("{name}: {needed}"));
                }
            }
        }
    }
    expect_none("a crate depends on crates below it", &findings);
}

#[test]
fn unsafe_is_in_the_queue_only() {
    // `unsafe` alone is also a mode of the cache. The benches in `bench/` are not shipped. Pointers
    // of C cannot be taken without it, nor buffers of Python, nor a library of C called, nor a
    // function placed before `main`: each of its uses there has its reason.
    let mut findings = Vec::new();
    for source in sources() {
        let may = [
            "crates/queue/",
            "crates/capi/",
            "crates/console/src/standard.rs",
            "crates/python/src/memory.rs",
            "crates/rbd/src/ffi.rs",
            "bench/",
        ];
        if may.iter().any(|start| source.path.starts_with(start)) || source.path == TIDY {
            continue;
        }
        for (number, line) in source.code() {
            let keyword = has_word(&line, "unsafe")
                && ["{", "fn ", "impl", "extern"]
                    .iter()
                    .any(|next| line.contains(&format!("unsafe {next}")));
            if keyword || has_word(&line, "unsafe_code") {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    expect_none(
        "unsafe code lives in crates/queue, and at the borders to C, Python and Ceph",
        &findings,
    );
}

const TIDY: &str = "xtask/tests/tidy.rs";

/// Whether the file is of a crate that writes into qcow2 images.
fn writes_qcow2(source: &Source) -> bool {
    let crates = ["crates/qcow2/src/", "crates/qcow2-offline/src/"];
    crates.iter().any(|start| source.path.starts_with(start)) && !source.is_test()
}

#[test]
fn only_write_back_flushes_the_files_of_a_qcow2_image() {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|s| writes_qcow2(s)) {
        if FLUSHERS.iter().any(|(path, _)| *path == source.path) {
            continue;
        }
        for (number, line) in source.code() {
            if line.contains(".flush()") {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    expect_none("durability's order is in writeback.rs", &findings);
}

/// The files that may flush, and why.
const FLUSHERS: &[(&str, &str)] = &[
    (
        "crates/qcow2/src/commit/writeback.rs",
        "the only writer of metadata",
    ),
    (
        "crates/qcow2-offline/src/create/write.rs",
        "a new image, which nobody has open",
    ),
    (
        "crates/qcow2-offline/src/repair/run.rs",
        "a repair, before anybody has the image open",
    ),
];

#[test]
fn roots_are_written_in_one_place() {
    let findings = uses(
        |s| {
            let path = s.path.strip_prefix("crates/").unwrap_or_default();
            writes_qcow2(s) && !WRITERS.iter().any(|(writer, _)| path == *writer)
        },
        &["Durability::"],
    );
    expect_none(
        "who writes a root does it by `write_root`, which latches; others say why they do not",
        &findings,
    );
}

/// The files of these crates that may write by themselves, and why other writes may follow one that
/// has failed there.
const WRITERS: &[(&str, &str)] = &[
    (
        "qcow2/src/control/compact/data.rs",
        "the guest's data, at its new place",
    ),
    (
        "qcow2/src/control/compact/still.rs",
        "a copy that nothing refers to yet",
    ),
    (
        "qcow2/src/control/compact/roots.rs",
        "a copy that nothing refers to yet; the root itself goes by `write_root`",
    ),
    (
        "qcow2/src/control/unfinished.rs",
        "a name that nothing depends on; the bit goes by `write_root`",
    ),
    (
        "qcow2/src/commit/writeback.rs",
        "`write_all`; cycles, which write again what they could not; the hint",
    ),
    (
        "qcow2/src/space/refcount.rs",
        "counts stay dirty until written",
    ),
    (
        "qcow2/src/path/write.rs",
        "guest data: whether writes are durable",
    ),
    ("qcow2/src/path/admit.rs", "guest data"),
    ("qcow2/src/path/cow.rs", "guest data"),
    ("qcow2/src/path/direct.rs", "guest data"),
    ("qcow2/src/path/gather.rs", "guest data"),
    ("qcow2/src/path/compressed_write.rs", "guest data"),
    (
        "qcow2/src/path/unshare.rs",
        "a copy of a table that nothing refers to yet",
    ),
    (
        "qcow2/src/control/resize.rs",
        "tables that nothing refers to yet",
    ),
    (
        "qcow2/src/control/empty.rs",
        "a table that nothing refers to any more",
    ),
    (
        "qcow2/src/control/bitmap/store.rs",
        "bits that nothing refers to yet",
    ),
    (
        "qcow2/src/control/amend/width.rs",
        "counts that nothing refers to yet",
    ),
    (
        "qcow2/src/control/snapshot/steps.rs",
        "structures that nothing refers to yet",
    ),
    (
        "qcow2/src/control/snapshot/flags.rs",
        "COPIED, read from the file again before it is set back",
    ),
    (
        "qcow2-offline/src/create/write.rs",
        "a new image, whose header goes last",
    ),
    (
        "qcow2-offline/src/repair/run.rs",
        "a repair, which ends with the first failure",
    ),
];

#[test]
fn masks_of_table_entries_are_in_one_place() {
    let masks = ["1 << 63", "1 << 62", "ffff_fe00", "fffffe00"];
    let mut findings = Vec::new();
    for source in sources() {
        let crates = ["engine", "qcow2", "qcow2-offline", "qcow2-format"];
        let crates = crates.map(|name| format!("crates/{name}/src/"));
        let is_engine = crates.iter().any(|start| source.path.starts_with(start));
        if !is_engine
            || source.is_test()
            || source.path.starts_with("crates/qcow2-format/src/entry")
        {
            continue;
        }
        for (number, line) in source.code() {
            if masks.iter().any(|mask| line.contains(mask)) {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    expect_none("bits of table entries are known to entry.rs", &findings);
}

#[test]
fn the_deciding_modules_do_no_io() {
    let is_pure = |s: &Source| s.path.starts_with("crates/qcow2-format/src/");
    let words = [
        "BlockFile",
        "AlignedFile",
        "Mutex",
        "RwLock",
        "async",
        "await",
        "Pending",
    ];
    expect_none("these modules decide and do no I/O", &uses(is_pure, &words));
}

#[test]
fn the_engine_locks_through_one_module() {
    let mut findings = Vec::new();
    let crates = OF_IMAGES.map(|name| format!("crates/{name}/src/"));
    let bound = |s: &&Source| crates.iter().any(|start| s.path.starts_with(start)) && !s.is_test();
    for source in sources().iter().filter(bound) {
        for (number, line) in source.code() {
            if line.contains("std::sync") && has_word(&line, "Mutex") {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    expect_none(
        "mutexes come from crate::sync, where the models put others",
        &findings,
    );
}

#[test]
fn every_file_of_tests_is_built() {
    let mut findings = Vec::new();
    let sources = sources();
    for main in sources.iter().filter(|s| s.path.ends_with("tests/main.rs")) {
        let directory = main.path.trim_end_matches("main.rs");
        let package = root().join(directory.trim_end_matches("tests/"));
        let manifest =
            fs::read_to_string(package.join("Cargo.toml")).expect("a crate has a manifest");
        for source in &sources {
            let Some(file) = source.path.strip_prefix(directory) else {
                continue;
            };
            let name = file.trim_end_matches(".rs");
            let is_module = main.code().any(|(_, line)| line == format!("mod {name};"));
            let is_program = manifest.contains(&format!("\"tests/{file}\""));
            if !file.contains('/') && !is_module && !is_program {
                findings.push(source.path.clone());
            }
        }
    }
    expect_none("main.rs or Cargo.toml names each file of tests", &findings);
}

/// `rust-version` is that of before; the compiler of these tests may be newer, and silent.
#[test]
fn guards_of_arms_hold_no_patterns_before_rust_1_95() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the manifest is there");
    assert!(
        manifest.contains("rust-version = \"1.90\""),
        "this rule is for 1.90"
    );
    let mut findings = Vec::new();
    for source in &sources() {
        for (number, line) in source.code() {
            if line.contains(concat!("if", " let ")) && line.contains("=>") {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    expect_none("`if let` in the guard of an arm needs Rust 1.95", &findings);
}

#[test]
fn unfinished_work_names_its_issue() {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|s| s.path != TIDY) {
        for (index, line) in source.text.lines().enumerate() {
            let marked = ["TODO", "FIXME", "XXX"].iter().any(|m| has_word(line, m));
            if marked && !line.contains('#') {
                findings.push(format!("{}:{}: {}", source.path, index + 1, line.trim()));
            }
        }
    }
    expect_none("unfinished work names its issue", &findings);
}

#[test]
fn every_dependency_has_a_reason() {
    let mut manifests = vec![root().join("Cargo.toml"), root().join("xtask/Cargo.toml")];
    for entry in fs::read_dir(root().join("crates")).expect("there are crates") {
        manifests.push(
            entry
                .expect("a directory can be listed")
                .path()
                .join("Cargo.toml"),
        );
    }
    let mut findings = Vec::new();
    for manifest in manifests {
        let text = fs::read_to_string(&manifest).expect("a crate has a manifest");
        for (number, line) in unexplained_dependencies(&text) {
            findings.push(format!("{}:{number}: {line}", manifest.display()));
        }
    }
    expect_none("a dependency has a line of reason above it", &findings);
}

/// Returns the lines of `[dependencies]` and similar sections that no comment covers. One comment
/// covers the run of lines below it; our own crates need none.
fn unexplained_dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_dependencies = false;
    let mut explained = false;
    for (index, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            in_dependencies = line.contains("dependencies") && !line.contains("workspace.");
            explained = false;
        } else if line.starts_with('#') {
            explained = true;
        } else if line.trim().is_empty() {
            explained = false;
        } else if in_dependencies
            && !explained
            && !line.starts_with("cowslip")
            && line.contains('=')
        {
            found.push((index + 1, line.to_string()));
        }
    }
    found
}

#[test]
fn architecture_names_files_that_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md exists");
    let known = sources();
    let mut findings = Vec::new();
    let mut names = 0;
    for name in text.split(|c: char| !(c.is_alphanumeric() || "._-/".contains(c))) {
        if !name.ends_with(".rs") {
            continue;
        }
        names += 1;
        let exists = known
            .iter()
            .any(|s| s.path == name || s.path.ends_with(&format!("/{name}")));
        if !exists {
            findings.push(name.to_string());
        }
    }
    assert!(names > 5, "ARCHITECTURE.md has no map of the modules");
    expect_none("ARCHITECTURE.md names files that do not exist", &findings);
}

#[test]
fn the_rules_themselves_find_what_they_should() {
    assert!(has_word("use clap::Parser;", "clap"));
    assert!(!has_word("let clapped = 1;", "clap"));
    assert_eq!(without_comment("a(); // unsafe"), "a(); ");
    assert_eq!(without_comment("\"http://x\""), "\"http://x\"");
    let manifest = "[dependencies]\n# why\na = \"1\"\nb = \"1\"\n\nc = \"1\"\ncowslip.workspace = true\n[features]\nd = []\n";
    assert_eq!(
        unexplained_dependencies(manifest),
        [(6, "c = \"1\"".to_string())]
    );
}
