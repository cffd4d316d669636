//! The gate. Formatting, lints, tidy rules and doc links are tests of this package
//! (`xtask/tests/gate.rs`), so that plain `cargo test` checks them too; what this adds is the
//! peers, and the order: documentation's examples first, so that the output ends in the runner's
//! summary. Where OpenSSL's library is there, all of it is built with the feature that needs it
//! (`libssl.rs`).

use std::time::Instant;

use crate::{libssl, mistakes, peers, run};

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Neither installs peers nor looks for them
    #[arg(long)]
    no_peers: bool,
    /// Passed on to the test runner, such as a part of a test's name
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    filter: Vec<String>,
}

/// Runs everything; fails if any part did.
pub fn run(args: &Args) -> Result<(), String> {
    let find = || !args.no_peers && peers::ensure().is_empty();
    let mut failures = Vec::new();
    let mut tests = run::cargo();
    let complete = if run::find_program("cargo-nextest").is_none() {
        let complete = find();
        tests.args(["test", "--workspace", "--no-fail-fast"]);
        complete
    } else {
        let complete = match args.filter.is_empty() {
            true => before_tests(find, &mut failures),
            false => find(),
        };
        tests.args(["nextest", "run", "--workspace", "--no-fail-fast"]);
        // Tests of commands wait for processes and disks a fifth of their time.
        let threads = std::thread::available_parallelism().map_or(2, |count| count.get() + 1);
        tests.arg(format!("--test-threads={threads}"));
        complete
    };
    tests.args(libssl::features());
    require_peers(&mut tests, complete);
    failures.extend(run::run(tests.args(&args.filter)).err());
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("\n"))
    }
}

/// Plants mistakes and runs the documentation's examples, of which the runner knows nothing.
/// `find`, which waits for the network, runs beside them; returns its result.
fn before_tests(find: impl FnOnce() -> bool + Send, failures: &mut Vec<String>) -> bool {
    let complete = std::thread::scope(|scope| {
        let found = scope.spawn(find);
        // They are planted in a copy of the engine, which is built beside it.
        failures.extend(timed("planted mistakes", mistakes::gate).err());
        found.join().expect("finding peers does not panic")
    });
    let mut examples = run::cargo();
    examples.args(["test", "--workspace", "--doc", "--quiet"]);
    examples.args(libssl::features());
    // The same sources once more: their examples name the real crates.
    for again in ["", "-block", "-hostfile", "-luks", "-queue"] {
        examples.args(["--exclude", &format!("cowslip{again}-on-shuttle")]);
    }
    failures.extend(timed("examples", || run::run(&mut examples)).err());
    // Said before the tests: the last line stays the runner's.
    for message in failures {
        eprintln!("xtask: {message}");
    }
    complete
}

/// Says how long a part of the gate took, which is to end within 20 minutes.
fn timed<T>(part: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = work();
    println!("xtask: {part}: {} s", start.elapsed().as_secs());
    done
}

/// With all peers there, a test that cannot find its peer has failed, not skipped.
fn require_peers(command: &mut std::process::Command, complete: bool) {
    if complete {
        command.env("COWSLIP_REQUIRE_PEERS", "1");
    }
}
