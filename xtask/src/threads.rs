//! Thread tests that run longer than in the gate: models, stress, ThreadSanitizer, Miri.

use std::path::PathBuf;
use std::process::Command;

use crate::{libssl, notices, run, tree};

/// Options of `cargo xtask models`.
#[derive(clap::Args)]
pub struct Models {
    /// Seeds of the whole engine on threads, for each of its tests
    #[arg(long, default_value_t = 5000)]
    seeds: u64,
    /// The first seed; a failure names its own
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs all of Loom's models, then a given number of seeds of the whole engine.
pub fn models(args: &Models) -> Result<(), String> {
    run::run(run::cargo().args(["test", "--release", "--package", "cowslip-models"]))?;
    let mut engine = run::cargo();
    engine.args(["test", "--release", "--package", "cowslip-on-shuttle"]);
    engine.args(["--", "--nocapture"]);
    engine.env("COWSLIP_SHUTTLE_SEEDS", args.seeds.to_string());
    engine.env("COWSLIP_SHUTTLE_SEED", args.seed.to_string());
    run::run(&mut engine)
}

/// Options of `cargo xtask threads`.
#[derive(clap::Args)]
pub struct Threads {
    /// How long each driver is run
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The first seed; each is printed before it is run
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Threads {
    fn apply(&self, command: &mut Command) {
        // One driver after the other, and of the test file only what takes seeds.
        command.args(["--", "--nocapture", "--test-threads", "1", "one_image"]);
        command.env("COWSLIP_THREADS_SECONDS", self.seconds.to_string());
        command.env("COWSLIP_THREADS_SEED", self.seed.to_string());
    }
}

/// Several queue threads on one image, with real rings and without.
pub fn threads(args: &Threads) -> Result<(), String> {
    let mut command = run::cargo();
    command.args(["test", "--release", "--package", "cowslip"]);
    command.args(["--test", "threads"]);
    args.apply(&mut command);
    run::run(&mut command)
}

/// Options of `cargo xtask tsan`.
#[derive(clap::Args)]
pub struct Tsan {
    #[command(flatten)]
    threads: Threads,
    /// The library for C alone, which the compiler for C has to know the sanitizer for
    #[arg(long)]
    only_c: bool,
}

/// The same, the tests of the queue, and programs in C with the library, under ThreadSanitizer. The
/// standard library is built with it too: without that, what it synchronises looks like a race.
pub fn tsan(args: &Tsan) -> Result<(), String> {
    if !args.only_c {
        let mut queue = instrumented("test");
        run::run(queue.args(["--package", "cowslip-queue", "--test", "executor"]))?;
        let mut image = instrumented("test");
        image.args(["--package", "cowslip", "--test", "threads"]);
        args.threads.apply(&mut image);
        run::run(&mut image)?;
    }
    tsan_of_c(args.threads.seconds)
}

/// Where what is built with ThreadSanitizer is.
fn tsan_target() -> PathBuf {
    run::target().join("tsan")
}

fn instrumented(verb: &str) -> Command {
    let mut command = nightly();
    command.args([verb, "-Zbuild-std", "--target", &notices::host()]);
    command.env("RUSTFLAGS", "-Zsanitizer=thread");
    // Libraries in C that crates have inside.
    command.env("CFLAGS", "-fsanitize=thread -g");
    command.env("CARGO_TARGET_DIR", tsan_target());
    command
}

/// Programs in C, each with its argument, and the rounds of the last one for each second.
const PROGRAMS: [(&str, &str); 3] = [
    ("tests/misuse.c", ""),
    ("examples/toy_vmm.c", "top.qcow2"),
    ("tests/threads.c", "ROUNDS"),
];
const ROUNDS_PER_SECOND: u64 = 1;

/// The sanitizer's runtime of the nightly toolchain: that of the compiler for C may be older, and
/// lack what newer code calls.
fn tsan_runtime() -> Result<PathBuf, String> {
    let mut rustc = Command::new("rustup");
    rustc.args(["run", "nightly", "rustc", "--print", "target-libdir"]);
    rustc.env_remove("RUSTUP_TOOLCHAIN");
    let libraries = PathBuf::from(run::output(&mut rustc)?.trim());
    Ok(libraries.join("librustc-nightly_rt.tsan.a"))
}

/// The library for C and the programs of its tests; a race, or a lock that is taken in two orders,
/// ends them.
fn tsan_of_c(seconds: u64) -> Result<(), String> {
    let mut library = instrumented("build");
    run::run(library.args(["--package", "cowslip-capi"]))?;
    let built = tsan_target().join(notices::host()).join("debug");
    let runtime = tsan_runtime()?;
    let sources = run::root().join("crates/capi");
    let scratch = tsan_target().join("c");
    tree::remove(&scratch)?;
    tree::make(&scratch)?;
    let rounds = (seconds * ROUNDS_PER_SECOND).clamp(2, 1000).to_string();
    for (source, argument) in PROGRAMS {
        let source = sources.join(source);
        let program = scratch.join(source.file_stem().unwrap_or_default());
        let object = program.with_extension("o");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-g", "-fsanitize=thread", "-I"]);
        cc.arg(sources.join("include")).arg("-c").arg(&source);
        run::run(cc.arg("-o").arg(&object))?;
        let mut cc = Command::new("cc");
        cc.arg(&object).arg(built.join("libcowslip_capi.a"));
        cc.arg("-Wl,--whole-archive").arg(&runtime);
        cc.arg("-Wl,--no-whole-archive");
        // As link-shared.sh has them.
        cc.args(["-Wl,--gc-sections", "-Wl,--as-needed"]);
        if libssl::is_there() {
            cc.args(["-lssl", "-lcrypto"]);
        }
        cc.args(["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"]);
        run::run(cc.arg("-o").arg(&program))?;
        let argument = argument.replace("ROUNDS", &rounds);
        let mut under = Command::new(&program);
        under.args(Some(argument).filter(|one| !one.is_empty()));
        under.current_dir(&scratch);
        under.env("TSAN_OPTIONS", "halt_on_error=1 second_deadlock_stack=1");
        run::run(&mut under)?;
    }
    tree::remove(&scratch)
}

/// The tests of buffers and completions under Miri, which knows every access that is not allowed.
pub fn miri() -> Result<(), String> {
    let mut command = nightly();
    command.args(["miri", "test", "--package", "cowslip-queue", "--lib", "--"]);
    command.args(["pending::", "buf::", "iovec::", "shared::", "scatter::"]);
    command.env("CARGO_TARGET_DIR", run::root().join("target/miri"));
    run::run(&mut command)
}

/// Cargo of the nightly toolchain, which needs the components `rust-src` and `miri`.
fn nightly() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]);
    command.current_dir(run::root());
    // The cargo that runs us has set its own toolchain for its children.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    command
}
