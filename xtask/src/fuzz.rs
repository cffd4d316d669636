//! `cargo xtask fuzz`: libFuzzer over the targets of `crates/hostile`, one after another.
//!
//! Needs a nightly compiler, for the coverage that guides the fuzzer, and cargo-fuzz, which it
//! installs. What the fuzzer finds interesting goes to `fuzz/found/TARGET`, not into the
//! repository; a crash is in `fuzz/artifacts/TARGET` and becomes a regression by a copy to
//! `fuzz/regressions/TARGET/NAME`.

use std::process::Command;

use crate::run;

/// The targets, as in `cowslip_hostile::TARGETS`, and the longest input that is worth trying.
const TARGETS: [(&str, u32); 12] = [
    ("image_bytes", 131_072),
    ("image_damage", 600),
    // A byte, and an image or choices.
    ("image_repair", 65_537),
    ("tables", 4096),
    ("nbd_server", 4096),
    ("nbd_client", 4096),
    ("fuse_server", 4096),
    ("vhost_rings", 2000),
    ("vhost_messages", 2000),
    ("io_lines", 1000),
    ("qmp", 2000),
    ("published", 4096),
];

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub struct Args {
    /// This target alone: image_bytes, image_damage, image_repair, tables, nbd_server, nbd_client,
    /// fuse_server, vhost_rings, vhost_messages, io_lines, qmp or published
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// How long each target is fuzzed
    #[arg(long, default_value_t = 60, value_name = "N")]
    seconds: u64,
    /// Build with this sanitizer, address or none; it costs half of the executions
    #[arg(long, default_value = "none", value_name = "NAME")]
    sanitizer: String,
    /// Instead: makes the corpus of the repository as small as it can be with what was found
    #[arg(long)]
    minimise: bool,
}

/// Fuzzes; fails at the first finding.
pub fn run(args: &Args) -> Result<(), String> {
    let chosen: Vec<_> = TARGETS
        .into_iter()
        .filter(|(name, _)| args.target.as_deref().is_none_or(|target| target == *name))
        .collect();
    if chosen.is_empty() {
        let names = TARGETS.map(|(name, _)| name).join(", ");
        return Err(format!("no such target; there are {names}"));
    }
    require_nightly()?;
    require_cargo_fuzz()?;
    for (name, len_max) in chosen {
        if args.minimise {
            minimise(name, &args.sanitizer)?;
        } else {
            fuzz((name, len_max), args)?;
        }
    }
    Ok(())
}

/// Without a sanitizer unless that is asked for: the targets are safe code but for the queue's
/// sockets and the C library that decompresses zstd, which no option here instruments.
fn cargo_fuzz(verb: &str, target: &str, sanitizer: &str) -> Command {
    let mut command = Command::new("cargo");
    // This process's own toolchain is what its variables name.
    command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    command.current_dir(run::root().join("fuzz"));
    command.args(["+nightly", "fuzz", verb, "--sanitizer", sanitizer, target]);
    command
}

fn fuzz((target, len_max): (&str, u32), args: &Args) -> Result<(), String> {
    let seconds = args.seconds;
    println!("xtask: fuzzing {target} for {seconds} s");
    let found = format!("found/{target}");
    let directory = run::root().join("fuzz").join(&found);
    std::fs::create_dir_all(&directory).map_err(|e| format!("cannot make {found}: {e}"))?;
    let mut command = cargo_fuzz("run", target, &args.sanitizer);
    command.args([&found, &format!("corpus/{target}")]);
    command.args([
        "--",
        "-timeout=60",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]);
    command.arg(format!("-max_len={len_max}"));
    command.arg(format!("-max_total_time={seconds}"));
    run::run(&mut command)
}

/// Adds what was found, and leaves what it takes to reach the same code.
fn minimise(target: &str, sanitizer: &str) -> Result<(), String> {
    let fuzz = run::root().join("fuzz");
    let corpus = fuzz.join("corpus").join(target);
    if let Ok(found) = std::fs::read_dir(fuzz.join("found").join(target)) {
        for input in found.filter_map(Result::ok) {
            let copied = std::fs::copy(input.path(), corpus.join(input.file_name()));
            copied.map_err(|e| format!("cannot copy {}: {e}", input.path().display()))?;
        }
    }
    run::run(&mut cargo_fuzz("cmin", target, sanitizer))
}

fn require_nightly() -> Result<(), String> {
    let mut version = Command::new("cargo");
    version
        .env_remove("RUSTUP_TOOLCHAIN")
        .args(["+nightly", "--version"]);
    run::output(&mut version).map(drop).map_err(|_| {
        "fuzzing needs a nightly compiler, and there is none: rustup toolchain install nightly. \
         The corpus runs without: cargo test -p cowslip-hostile"
            .to_string()
    })
}

fn require_cargo_fuzz() -> Result<(), String> {
    let cargo_home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let beside = cargo_home.is_some_and(|home| home.join("bin/cargo-fuzz").is_file());
    if beside || run::find_program("cargo-fuzz").is_some() {
        return Ok(());
    }
    println!("xtask: installing cargo-fuzz");
    run::run(run::cargo().args(["install", "--locked", "cargo-fuzz"]))
}
