//! Pages of `bench`, made by real runs and opened in a real browser.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{cowslip, outcome, run, scratch, scratch_beside};
use browser::{Browser, Look, PROGRAM};
use serde_json::{Value, json};

pub mod browser;

/// A page may be attached to a mail.
const PAGE_BYTES_MAX: u64 = 2 << 20;
const PRINTED_BYTES_MAX: u64 = 500 << 10;

fn page_of(line: &str, dir: &Path, name: &str) -> PathBuf {
    let page = dir.join(name);
    run(cowslip()
        .arg("bench")
        .args(line.split_whitespace())
        .arg("--html")
        .arg(&page)
        .arg("--dir")
        .arg(dir));
    page
}

fn read(page: &Path) -> String {
    std::fs::read_to_string(page).unwrap()
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

const TINY: &str = "steady --size=16M --requests=64 --repetitions=2 --depths=32 --cells=64K,";

#[test]
fn a_table_is_a_page_too_and_its_json_is_the_same_page_later() {
    let dir = scratch();
    let page = dir.path().join("page.html");
    let summary = run(cowslip()
        .arg("bench")
        .args(TINY.split(' '))
        .arg("--json")
        .arg("--html")
        .arg(&page)
        .arg("--dir")
        .arg(dir.path()));
    assert_eq!(entries(dir.path()), ["page.html"]);
    let results = dir.path().join("results.json");
    std::fs::write(&results, &summary).unwrap();
    let again = dir.path().join("again.html");
    run(cowslip()
        .args(["bench", "report"])
        .arg(&results)
        .arg("--html")
        .arg(&again));
    let html = read(&page);
    assert_eq!(html, read(&again));
    let summary: Value = serde_json::from_str(&summary).unwrap();
    let conditions = &summary["conditions"];
    for part in [
        &conditions["date"],
        &conditions["machine"]["kernel"],
        &conditions["versions"]["cowslip"],
        &conditions["places"][0]["stack"]["filesystem-type"],
    ] {
        let part = part.as_str().unwrap_or_else(|| panic!("{conditions}"));
        assert!(html.contains(part), "{part}");
    }
    assert!(
        conditions["command"]
            .as_str()
            .unwrap()
            .contains("bench steady --size=16M")
    );
    // Each row is there, and a bar for each row.
    let rows = summary["rows"].as_array().unwrap();
    for row in rows {
        assert!(html.contains(row["cell"].as_str().unwrap()));
        let command = row["command"].as_str().unwrap();
        assert!(command.contains(" bench -t "), "{command}");
    }
    assert_eq!(html.matches("<div class=\"bar ").count(), rows.len());
    // Standard input is a file as well, and several files are one page.
    let both = dir.path().join("both.html");
    let input = std::fs::File::open(&results).unwrap();
    let mut report = cowslip();
    report
        .args(["bench", "report", "-"])
        .arg(&results)
        .stdin(input);
    run(report.arg("--html").arg(&both));
    assert_eq!(read(&both).matches("<section ").count(), 4);
}

#[test]
fn a_page_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let dir = scratch();
    let file = dir.path().join("file");
    std::fs::write(&file, "not JSON").unwrap();
    let file = file.to_str().unwrap();
    let nowhere = dir.path().join("nowhere/page.html");
    for (line, words) in [
        (
            format!("flush --html {}", nowhere.display()),
            "No such file or directory",
        ),
        (
            format!("flush --html {}", dir.path().display()),
            "not a regular file",
        ),
        ("all --html /dev/full".to_string(), "not a regular file"),
        ("all --minutes 0".to_string(), "--minutes expects"),
        ("all --tables flush,x".to_string(), "--tables expects"),
        ("report --html p".to_string(), "required"),
        (
            format!("report {file} --html {file}.html"),
            "it is not JSON",
        ),
        (
            format!("report /nonexistent --html {file}.html"),
            "No such file",
        ),
        (
            "report /dev/null --html /nonexistent/p".to_string(),
            "/nonexistent/p",
        ),
    ] {
        let mut command = cowslip();
        command
            .arg("bench")
            .args(line.split(' '))
            .arg("--dir")
            .arg(dir.path());
        if line.starts_with("report") {
            command = cowslip();
            command.arg("bench").args(line.split(' '));
        }
        let refused = outcome(&mut command);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{line}: {text}");
        assert!(text.contains(words), "{line}: {text}");
        assert!(refused.stdout.is_empty(), "{line}");
    }
    assert_eq!(entries(dir.path()), ["file"]);
}

#[test]
fn an_interrupted_table_leaves_a_page_of_what_is_finished() {
    use std::io::{BufRead, BufReader};
    let dir = scratch();
    let page = dir.path().join("page.html");
    let mut table = cowslip()
        .args(
            "bench steady --size=16M --requests=64 --repetitions=20 --depths=1 --peers=none"
                .split(' '),
        )
        .arg("--html")
        .arg(&page)
        .arg("--dir")
        .arg(dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(table.stdout.take().unwrap()).lines();
    // The titles and the rows of two cells: what is known of the first is to be written by then.
    for _ in 0..5 {
        lines.next().unwrap().unwrap();
    }
    assert!(!page.exists());
    run(Command::new("kill").args(["-INT", &table.id().to_string()]));
    assert!(lines.last().unwrap().unwrap().starts_with("Interrupted: "));
    assert_eq!(table.wait().unwrap().signal(), Some(2));
    let html = read(&page);
    assert!(html.contains("Interrupted: ") && html.ends_with("</html>\n"));
    assert!(html.contains("64K, filled, depth 1, reads"));
    assert!(
        !entries(dir.path())
            .iter()
            .any(|name| name.ends_with("tmp") || name.ends_with("last"))
    );
}

/// Without time for a table's cells it is a section that says so.
#[test]
fn all_tables_are_one_page_and_end_in_their_time() {
    let dir = scratch();
    let page = dir.path().join("page.html");
    let summary = run(cowslip()
        .args("bench all --quick --minutes=0.0001 --html".split(' '))
        .arg(&page)
        .arg("--dir")
        .arg(dir.path()));
    let tables = [
        "allocate",
        "writers",
        "preallocation",
        "steady",
        "flush",
        "discard",
        "metadata",
        "fragmentation",
        "compact",
        "subclusters",
    ];
    let html = read(&page);
    for table in tables {
        assert!(
            summary.contains(&format!("{table}\n  Out of time: ")),
            "{summary}"
        );
        assert!(html.contains(&format!("({table})</a>")), "{table}");
    }
    assert!(summary.contains(&page.display().to_string()) && summary.contains("cowslip 0."));
    assert_eq!(entries(dir.path()), ["page.html"]);
}

const HOSTILE: &str =
    "</td><script>fetch('http://example.com')</script>\u{202e}\u{1} & \"quotes\" ";

fn large_row(
    filesystem: &str,
    cell: &str,
    contestant: &str,
    (step, number): (usize, usize),
) -> Value {
    let run = |factor: f64| {
        let iops = 200_000.0 / (1 + step % 10) as f64 / (1 + number) as f64;
        let series: Vec<usize> = (0..30).map(|tenth| 900 - 20 * tenth + 7 * step).collect();
        json!({
            "iops": iops * factor, "CPU us": 21.5, "p50 us": 1234.0, "p99 us": 98765.0, "p99.9 us": 123_456.0,
            "RSS MiB": 118.0, "MiB": 1081.0, "extents": 123_456.0, "flushes": 12.0,
            "told": {
                "seconds": 3.0,
                "series": series,
                "series-allocated": {
                    "cluster": vec![300; 10], "subcluster": vec![100; 20], "nothing": vec![500; 30],
                },
            },
        })
    };
    json!({
        "filesystem": filesystem, "cell": cell, "contestant": contestant, "outlier": number == 4 && step == 5,
        "times-qemu-img": 12.34, "times-raw-first-touch": 1.5, "times-raw-written": 0.97,
        "runs": [run(1.0), run(0.8), run(1.3)],
    })
}

/// Results of the largest size, with unlikely names.
fn large_and_hostile(dir: &Path) -> PathBuf {
    let endless = "endless-name-without-any-blank-".repeat(12);
    let contestants = "cowslip,cowslip sparse,cowslip zero-range,cowslip write,qemu-img,raw sparse,raw allocated,\
                       raw written,raw clone";
    let sizes = "4K,8K,16K,32K,64K,128K,256K,512K,1M,2M,16K/512,32K/1K,64K/2K,128K/4K,256K/8K,512K/16K,1M/32K,2M/64K";
    let mut rows = Vec::new();
    for state in [
        "empty, depth 32",
        "backed, depth 32",
        "empty, depth 1",
        "backed, depth 1",
    ] {
        for (step, size) in sizes.split(',').enumerate() {
            let cell = format!("{size}, {state}");
            for (number, contestant) in contestants.split(',').enumerate() {
                rows.push(large_row("xfs:log=64M", &cell, contestant, (step, number)));
            }
        }
    }
    for cell in [HOSTILE, &endless] {
        rows.push(json!({
            "filesystem": HOSTILE, "cell": cell, "contestant": endless, "command": HOSTILE,
            "runs": [{ "iops": 1e12, HOSTILE: 0.001 }],
        }));
    }
    let document = json!({
        "conditions": {
            "table": "subclusters", "command": endless, "date": HOSTILE,
            "machine": { "processor": endless, "kernel": HOSTILE },
            "versions": { "cowslip": HOSTILE, "qemu-img": endless },
            "warnings": [endless, HOSTILE],
            "places": [{
                "filesystem": endless,
                "stack": {
                    "directory": endless, "mount-options": HOSTILE, "used-percent": 99.0,
                    "devices": [{ "name": endless, "kind": HOSTILE, "detail": endless, "depth": 70 }],
                },
                "filesystem-told": { "command": HOSTILE, "output": endless },
            }],
        },
        "interrupted": true,
        "rows": rows,
        "notes": [HOSTILE, format!("a table\n{endless}\n{HOSTILE}\n")],
    });
    let results = dir.join("large.json");
    std::fs::write(&results, document.to_string()).unwrap();
    let page = dir.join("large.html");
    let mut report = cowslip();
    report.args(["bench", "report"]).arg(&results);
    run(report.arg("--html").arg(&page));
    page
}

/// Finds overflows: elements beyond their containers, except those that scroll; texts of a chart
/// that are cut off or that overlap.
const CHECK: &str = r#"(() => {
  const found = [];
  const name = e => `${e.tagName}.${e.getAttribute('class')} "${e.textContent.slice(0, 40)}"`;
  const scrolls = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} wide in ${width}`);
  for (const e of document.body.querySelectorAll('*')) {
    const around = e.parentElement;
    if (around.closest('svg,table') || scrolls(around)) continue;
    const box = e.getBoundingClientRect();
    if (box.width === 0) continue;
    const outer = around.getBoundingClientRect();
    if (box.right > outer.right + 1 || box.left < outer.left - 1)
      found.push(`${name(e)} ${box.left}-${box.right} in ${name(around)} ${outer.left}-${outer.right}`);
  }
  for (const chart of document.querySelectorAll('.bars .group,.curves')) {
    const edge = chart.getBoundingClientRect();
    const texts = chart.querySelectorAll('.title,.name,.value,.top,.from,.right');
    const boxes = [...texts].map(t => [t.textContent.trim(), t.getBoundingClientRect()]);
    boxes.forEach(([text, a], i) => {
      if (a.left < edge.left - 1 || a.right > edge.right + 1 || a.bottom > edge.bottom + 1)
        found.push(`"${text}" is cut off`);
      for (const [other, b] of boxes.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
          found.push(`"${text}" lies on "${other}"`);
    });
  }
  return found.slice(0, 20);
})()"#;

fn keep(path: &Path, base64: &str) {
    let mut decode = Command::new("base64")
        .arg("-d")
        .stdin(Stdio::piped())
        .stdout(std::fs::File::create(path).unwrap())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut decode.stdin.take().unwrap(), base64.as_bytes()).unwrap();
    assert!(decode.wait().unwrap().success());
}

fn examine(browser: &mut Browser, page: &Path) {
    let name = page.file_stem().unwrap().to_string_lossy().into_owned();
    let kept = std::env::var_os("COWSLIP_SCREENSHOTS").map(PathBuf::from);
    assert!(
        std::fs::metadata(page).unwrap().len() < PAGE_BYTES_MAX,
        "{name}"
    );
    browser.look(Look {
        media: "screen",
        scheme: "light",
        width: 1400,
    });
    browser.open(page);
    // The width of A4 on its side, within its margins.
    for (media, scheme, width) in [
        ("screen", "light", 360),
        ("screen", "light", 800),
        ("screen", "light", 1400),
        ("screen", "dark", 1400),
        ("print", "dark", 1032),
    ] {
        browser.look(Look {
            media,
            scheme,
            width,
        });
        let found = browser.evaluate(CHECK);
        assert_eq!(found, json!([]), "{name}: {media} {scheme} {width}");
        let ground = browser.evaluate("getComputedStyle(document.body).backgroundColor");
        let is_dark = (media, scheme) == ("screen", "dark");
        assert_eq!(ground != "rgb(255, 255, 255)", is_dark, "{ground}");
        // A bar has its colour on both grounds.
        let colour = "getComputedStyle(document.querySelector('.fill')).backgroundColor";
        let own = match is_dark {
            true => "rgb(79, 159, 232)",
            false => "rgb(20, 99, 181)",
        };
        assert_eq!(browser.evaluate(colour), own);
        if let Some(directory) = &kept {
            let file = format!("{name}-{media}-{scheme}-{width}.png");
            keep(&directory.join(file), &browser.screenshot());
        }
    }
    // Of a small page: on paper the large one takes seconds, and the check above has seen it as it
    // is printed.
    if std::fs::metadata(page).unwrap().len() < PRINTED_BYTES_MAX {
        let pdf = browser.pdf();
        // "%PDF-"
        assert!(pdf.starts_with("JVBERi0"), "{}", &pdf[..20]);
        if let Some(directory) = &kept {
            keep(&directory.join(format!("{name}.pdf")), &pdf);
        }
    }
    let scripts =
        browser.evaluate("document.querySelectorAll('script,link,img,iframe,object').length");
    assert_eq!(scripts, 0);
    for event in browser.events.drain(..) {
        let method = event["method"].as_str().unwrap_or_default();
        let reports = [
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
        ];
        assert!(!reports.contains(&method), "{name}: {event}");
        if method == "Network.requestWillBeSent" {
            let url = event["params"]["request"]["url"].as_str().unwrap();
            assert!(
                url.starts_with("file://") && url.ends_with(".html"),
                "{name}: {url}"
            );
        }
    }
}

#[test]
fn pages_are_shown_as_they_should_in_a_browser() {
    let Some(dir) = scratch_beside(&[PROGRAM]) else {
        return;
    };
    let mut pages = vec![
        page_of(TINY, dir.path(), "tiny.html"),
        page_of(
            "preallocation --size=32M --requests=2000 --repetitions=1 --depths=4 --policies=auto --zero-methods=auto",
            dir.path(),
            "series.html",
        ),
        large_and_hostile(dir.path()),
    ];
    // Pages of longer runs, for those who have them.
    let more = std::env::var_os("COWSLIP_PAGES").unwrap_or_default();
    pages.extend(std::env::split_paths(&more).filter(|page| page.is_file()));
    let mut browser = Browser::start();
    for page in &pages {
        examine(&mut browser, page);
    }
}
