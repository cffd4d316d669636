//! Thread tests that run longer than in the gate: models, stress, ThreadSanitizer, Miri.

use std::process::Command;

use crate::run;

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

/// The same, and the tests of the queue, under ThreadSanitizer. The standard library is built with
/// it too: without that, what it synchronises looks like a race.
pub fn tsan(args: &Threads) -> Result<(), String> {
    let instrumented = || {
        let mut command = nightly();
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        command.args(["test", "-Zbuild-std", "--target", &target]);
        command.env("RUSTFLAGS", "-Zsanitizer=thread");
        command.env("CARGO_TARGET_DIR", run::root().join("target/tsan"));
        command
    };
    let mut queue = instrumented();
    run::run(queue.args(["--package", "cowslip-queue", "--test", "executor"]))?;
    let mut image = instrumented();
    image.args(["--package", "cowslip", "--test", "threads"]);
    args.apply(&mut image);
    run::run(&mut image)
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
