//! Cowslip and other qcow2 engines in Rust, in one process, with the same requests.
//!
//! ```text
//! cargo run --release -- --dir=/mnt/scratch [--cached] [--rounds=5] [--only=TEXT]
//! ```
//!
//! In each round each engine has its turn at each row, and the engine that begins changes from
//! round to round; what is printed are medians. All images are made by Cowslip with the format's
//! usual options; after first writes they are checked and read back once. `cargo xtask beside`
//! makes a file system for it.

mod engines;
mod images;
mod runs;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use engines::{Cowslip, CowslipBlocking, Imago, ImagoBlocking, ImgQcow2, Qcow2Rs, Qcow2RsBlocking};
use images::Flaws;
use runs::{Requests, Row, Taken, on_one_thread, on_threads};

/// The disk whose blocks are all allocated: for opening, reads and overwrites.
const FULL_BYTES: u64 = 512 << 20;
/// The disk of first writes.
const EMPTY_BYTES: u64 = 8 << 30;
/// Most requests of a run; first writes of whole clusters have to fit the file system.
const MOST: u64 = 100_000;
const MOST_FIRST_WRITES: u64 = 6_000;
/// Time in which requests of a run begin.
const TIME: Duration = Duration::from_millis(400);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Cowslip,
    Imago,
    Qcow2Rs,
    ImgQcow2,
}

use Contestant::{Cowslip as Ours, Imago as OfImago, ImgQcow2 as OfImg, Qcow2Rs as OfQcow2Rs};

const CONTESTANTS: [(Contestant, &str); 4] = [
    (Ours, "Cowslip"),
    (OfImago, "imago"),
    (OfQcow2Rs, "qcow2-rs"),
    (OfImg, "rust-img-qcow2"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Face {
    Blocking,
    BlockingThreads,
    Futures,
    FuturesThreads,
}

const FACES: [(Face, &str); 4] = [
    (Face::Blocking, "blocking"),
    (Face::BlockingThreads, "blocking, 8 threads"),
    (Face::Futures, "tokio, 32 in flight"),
    (Face::FuturesThreads, "tokio on 8 threads, 4 each"),
];

const ROWS: [(Row, &str); 6] = [
    (Row::Open, "open, read 4 KiB, close"),
    (Row::Read, "random read"),
    (Row::FirstWrite, "first write"),
    (Row::Overwrite, "overwrite"),
    (Row::OverwriteFlush, "overwrite and flush"),
    (Row::FirstWriteFlush, "first write and flush"),
];

/// A run, if the engine has this face.
fn run(
    (contestant, face): (Contestant, Face),
    on: (&Path, bool),
    requests: &Requests,
) -> Option<Taken> {
    let taken = match (contestant, face) {
        (Ours, Face::Blocking) => on_one_thread::<CowslipBlocking>(on, requests, 1),
        (Ours, Face::BlockingThreads) => on_threads::<CowslipBlocking>(on, requests, (8, 1)),
        (Ours, Face::Futures) => on_one_thread::<Cowslip>(on, requests, 32),
        (Ours, Face::FuturesThreads) => on_threads::<Cowslip>(on, requests, (8, 4)),
        (OfImago, Face::Blocking) => on_one_thread::<ImagoBlocking>(on, requests, 1),
        (OfImago, Face::BlockingThreads) => on_threads::<ImagoBlocking>(on, requests, (8, 1)),
        (OfImago, Face::Futures) => on_one_thread::<Imago>(on, requests, 32),
        (OfImago, Face::FuturesThreads) => on_threads::<Imago>(on, requests, (8, 4)),
        (OfQcow2Rs, Face::Blocking) => on_one_thread::<Qcow2RsBlocking>(on, requests, 1),
        (OfQcow2Rs, Face::Futures) => on_one_thread::<Qcow2Rs>(on, requests, 32),
        (OfImg, Face::Blocking) if !on.1 => on_one_thread::<ImgQcow2>(on, requests, 1),
        (OfImg, Face::BlockingThreads) if !on.1 => on_threads::<ImgQcow2>(on, requests, (8, 1)),
        (OfQcow2Rs | OfImg, _) => return None,
    };
    Some(taken)
}

struct Options {
    dir: PathBuf,
    direct: bool,
    rounds: usize,
    only: String,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        dir: PathBuf::new(),
        direct: true,
        rounds: 5,
        only: String::new(),
    };
    for word in std::env::args().skip(1) {
        match word.split_once('=').unwrap_or((&word, "")) {
            ("--dir", value) => options.dir = value.into(),
            ("--cached", "") => options.direct = false,
            ("--rounds", value) => options.rounds = value.parse().map_err(|e| format!("{e}"))?,
            ("--only", value) => options.only = value.to_string(),
            _ => return Err(format!("'{word}' is no option")),
        }
    }
    match options.dir.is_dir() && options.rounds > 0 {
        true => Ok(options),
        false => Err("--dir needs a directory, and there is at least one round".to_string()),
    }
}

/// A line of the table, with the runs of each contestant.
struct Line {
    row: Row,
    face: Face,
    name: String,
    taken: [Vec<Taken>; 4],
    flaws: [Flaws; 4],
}

fn lines(options: &Options) -> Vec<Line> {
    let mut lines = Vec::new();
    for (row, row_name) in ROWS {
        for (face, face_name) in FACES {
            let is_odd = row == Row::Open && !matches!(face, Face::Blocking | Face::Futures);
            let in_turn = row == Row::Open && face == Face::Futures;
            let face_name = if in_turn { "tokio" } else { face_name };
            let name = format!("{row_name} | {face_name}");
            if !is_odd && name.contains(&options.only) {
                lines.push(Line {
                    row,
                    face,
                    name,
                    taken: Default::default(),
                    flaws: Default::default(),
                });
            }
        }
    }
    lines
}

fn measure(line: &mut Line, index: usize, options: &Options, round: usize) {
    let contestant = CONTESTANTS[index].0;
    let full = options.dir.join("full.qcow2");
    let empty = options.dir.join("empty.qcow2");
    let (path, bytes, most) = match line.row.is_first_write() {
        true => (&empty, EMPTY_BYTES, MOST_FIRST_WRITES),
        false => (&full, FULL_BYTES, MOST),
    };
    if line.row.is_first_write() {
        images::make(&empty, EMPTY_BYTES);
    }
    let requests = Requests::new(line.row, bytes, (round as u64 * MOST, most), TIME);
    let on = (path.as_path(), options.direct);
    let Some(taken) = run((contestant, line.face), on, &requests) else {
        return;
    };
    line.taken[index].push(taken);
    if line.row.is_first_write() && round == 0 {
        line.flaws[index] = images::verify(&empty, &requests);
    }
}

fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

fn print(lines: &[Line], title: &str, figure: impl Fn(&Taken) -> f64, digits: usize) {
    println!("\n{title}\n");
    let names = CONTESTANTS.map(|(_, name)| name).join(" | ");
    println!("| | | {names} |\n| --- | --- | ---: | ---: | ---: | ---: |");
    for line in lines {
        let cells = line.taken.iter().map(|taken| {
            let cell = median(taken.iter().map(&figure).collect());
            cell.map_or("-".to_string(), |number| format!("{number:.digits$}"))
        });
        println!(
            "| {} | {} |",
            line.name,
            cells.collect::<Vec<_>>().join(" | ")
        );
    }
}

fn main() -> Result<(), String> {
    let options = options()?;
    let mut lines = lines(&options);
    images::make_full(&options.dir.join("full.qcow2"), FULL_BYTES);
    for round in 0..options.rounds {
        for line in &mut lines {
            for turn in 0..CONTESTANTS.len() {
                let index = (round + turn) % CONTESTANTS.len();
                measure(line, index, &options, round);
            }
            eprint!(".");
        }
        eprintln!();
    }
    let how = if options.direct {
        "past the page cache"
    } else {
        "through the page cache"
    };
    let title = format!(
        "Requests a second, {how}, medians of {} runs:",
        options.rounds
    );
    print(
        &lines,
        &title,
        |taken| taken.requests as f64 / taken.seconds,
        0,
    );
    let title = "CPU time of a request in microseconds:";
    print(
        &lines,
        title,
        |taken| taken.cpu_seconds * 1e6 / taken.requests as f64,
        1,
    );
    println!("\nImages after first writes:\n");
    for line in &lines {
        for (index, (_, name)) in CONTESTANTS.iter().enumerate() {
            let Flaws { leaks, corruptions } = line.flaws[index];
            if leaks + corruptions > 0 {
                println!(
                    "- {} by {name}: {corruptions} corruptions, {leaks} leaks",
                    line.name
                );
            }
        }
    }
    for name in ["full.qcow2", "empty.qcow2"] {
        let path = options.dir.join(name);
        if path.exists() {
            fs::remove_file(path).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}
