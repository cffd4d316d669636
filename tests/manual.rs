//! The manual: its pages are written, its links lead somewhere, and what its readers are to type
//! works as it is printed there.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use cowslip_manual::{Manual, Snippet, broken, snippets};

use crate::report::browser::{self, Browser, Look};
use crate::support::{cowslip, outcome, peers_are_installed, program, run, scratch};

/// Written between the outputs of commands.
const MARK: &str = "\u{1}";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn load(reference: &Path) -> Manual {
    std::fs::create_dir_all(reference).unwrap();
    run(cowslip().args(["manual", "--markdown"]).arg(reference));
    Manual::load(root(), reference).unwrap()
}

#[test]
fn its_links_lead_to_pages_and_anchors_that_are_there() {
    let dir = scratch();
    let manual = load(&dir.path().join("reference"));
    let pages = dir.path().join("pages");
    manual.write(&pages).unwrap();
    let broken = broken(&pages).unwrap();
    assert!(broken.is_empty(), "{broken:#?}");
    let written = std::fs::read_dir(&pages).unwrap().count();
    assert_eq!(written, manual.sources().count() + 1);
    for verb in ["create", "serve", "bench"] {
        let page = pages.join(format!("reference-cowslip-{verb}.html"));
        let page = std::fs::read_to_string(&page).unwrap();
        assert!(page.contains(&format!(">cowslip {verb}")), "{verb}");
    }
    look_at(&pages);
}

/// Pages as a browser shows them: nothing is wider than the window, in either scheme.
fn look_at(pages: &Path) {
    if !peers_are_installed(&[browser::PROGRAM]) {
        return;
    }
    let mut browser = Browser::start();
    for (name, width, scheme) in [
        ("performance.html", 1280, "light"),
        ("comparison.html", 1280, "dark"),
        ("reference-cowslip-bench.html", 400, "dark"),
        ("docs-testing.html", 400, "light"),
    ] {
        let media = "screen";
        browser.look(Look {
            media,
            scheme,
            width,
        });
        browser.open(&pages.join(name));
        let wider = browser.evaluate("document.documentElement.scrollWidth - innerWidth");
        assert!(wider.as_i64().unwrap() <= 0, "{name}: {wider} too wide");
        let ground = browser.evaluate("getComputedStyle(document.body).backgroundColor");
        let is_dark = ground == "rgb(17, 21, 26)";
        assert_eq!(is_dark, scheme == "dark", "{name}: {ground}");
        if let Some(directory) = std::env::var_os("COWSLIP_MANUAL_SHOTS") {
            let file = Path::new(&directory).join(format!("{name}.png.base64"));
            std::fs::write(file, browser.screenshot()).unwrap();
        }
    }
    let drawn = "document.querySelectorAll('.bar').length";
    browser.open(&pages.join("performance.html"));
    assert!(browser.evaluate(drawn).as_i64().unwrap() > 20);
    let failed = browser.events.iter().find(|event| {
        event["method"] == "Log.entryAdded" || event["method"] == "Network.loadingFailed"
    });
    assert!(failed.is_none(), "{failed:?}");
}

#[test]
fn what_it_says_to_type_works() {
    let dir = scratch();
    let manual = load(&dir.path().join("reference"));
    let mut pages = 0;
    for (path, markdown) in manual.sources() {
        let blocks = snippets(path, markdown);
        let blocks: Vec<Snippet> = blocks.into_iter().filter(is_run).collect();
        if !blocks.is_empty() {
            let name = path.replace('/', "-");
            run_page(&dir.path().join(name), &blocks);
            pages += 1;
        }
    }
    assert!(pages >= 7, "{pages} pages have blocks that are run");
}

fn is_run(block: &Snippet) -> bool {
    let is_run = block.words.iter().any(|word| word == "run");
    let shells = ["sh", "console"];
    let place = format!("{}:{}", block.page, block.line);
    assert!(
        !is_run || shells.contains(&block.language.as_str()),
        "{place}"
    );
    is_run
}

/// A command of a page and the lines that it prints, if the page shows them.
struct Step {
    place: String,
    command: String,
    printed: Option<Vec<String>>,
}

fn steps(block: &Snippet) -> Vec<Step> {
    let place = |line: usize| format!("{}:{}", block.page, block.line + line);
    if block.language == "sh" {
        return vec![Step {
            place: place(0),
            command: block.text.clone(),
            printed: None,
        }];
    }
    let mut steps: Vec<Step> = Vec::new();
    for (index, line) in block.text.lines().enumerate() {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step {
                place: place(index),
                command: command.to_string(),
                printed: Some(Vec::new()),
            });
            continue;
        }
        let step = steps.last_mut().and_then(|step| step.printed.as_mut());
        step.expect("a command comes first").push(line.to_string());
    }
    steps
}

/// Runs the blocks of a page in one shell, in a directory of their own, and compares what it
/// prints. Its verbs are those of the command under test.
fn run_page(directory: &Path, blocks: &[Snippet]) {
    let programs = directory.join("programs");
    let work = directory.join("work");
    std::fs::create_dir_all(&programs).unwrap();
    std::fs::create_dir_all(&work).unwrap();
    std::os::unix::fs::symlink(program(), programs.join("cowslip")).unwrap();
    let steps: Vec<Step> = blocks.iter().flat_map(steps).collect();
    let mut script = String::from("set -eu -o pipefail\nexec 2>&1\n");
    for step in &steps {
        writeln!(script, "{}\nprintf '{MARK}'", step.command).unwrap();
    }
    let path = std::env::var("PATH").unwrap();
    let output = outcome(
        Command::new("bash")
            .args(["-c", &script])
            .env("PATH", format!("{}:{path}", programs.display()))
            .current_dir(&work),
    );
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut parts = printed.split(MARK);
    for step in &steps {
        let part = parts.next().unwrap_or_default();
        // The marks of the commands that have ended are as many as the commands.
        let has_ended = parts.clone().next().is_some();
        assert!(has_ended, "{}: {}\n{part}", step.place, step.command);
        if let Some(expected) = &step.printed {
            let lines: Vec<&str> = part.lines().collect();
            let is_right = lines.len() == expected.len()
                && lines
                    .iter()
                    .zip(expected)
                    .all(|(line, pattern)| fits(line, pattern));
            assert!(is_right, "{}: {}\n{part}", step.place, step.command);
        }
    }
    assert!(output.status.success(), "{}", output.status);
}

/// Whether a line is as the page has it, where `...` stands for anything.
fn fits(line: &str, pattern: &str) -> bool {
    let mut parts = pattern.split("...");
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else {
        return false;
    };
    let mut last = None;
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
        last = Some(part);
    }
    rest.is_empty() || last == Some("")
}

#[test]
fn lines_fit_patterns() {
    assert!(fits("abc", "abc") && !fits("abcd", "abc") && !fits("xabc", "abc"));
    assert!(fits("found by: FIEMAP", "found by: ...") && fits("anything", "..."));
    assert!(fits("a 1 b 2 c", "...1...2...") && !fits("a 2 b 1 c", "...1...2..."));
}
