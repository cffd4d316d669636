//! `cargo xtask static`: the command in one file that needs no library of the system, linked with
//! musl, tried out, and packed with QEMU's names, manual pages and licences. docs/static.md says
//! what it lacks. The same sources make the same archive: times are those of the last commit, or of
//! `SOURCE_DATE_EPOCH`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::archive::Put;
use crate::install::{self, Tree};
use crate::{archive, deb, run, tree};

/// Options of `cargo xtask static`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for the archive
    #[arg(long, default_value = "target/static")]
    out: PathBuf,
    #[command(flatten)]
    program: Program,
}

/// The program that is packed.
#[derive(clap::Args)]
pub struct Program {
    /// Profile to build
    #[arg(long, default_value = "release")]
    profile: String,
    /// Directory of the program, `cowslip`, if it is built already
    #[arg(long, conflicts_with = "profile")]
    built: Option<PathBuf>,
}

/// Builds, checks, tries out and packs.
pub fn run(args: &Args) -> Result<(), String> {
    require(&["strip", "gzip", "tar"])?;
    let out = run::root().join(&args.out);
    let built = args.program.make(&out)?;
    let name = format!(
        "cowslip-{}-{}-linux-static",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH
    );
    let stage = out.join("stage");
    tree::remove(&stage)?;
    fill(&Tree(stage.join(&name)), &built)?;
    archive::settle(&stage)?;
    let file = out.join(format!("{name}.tar"));
    archive::pack(&stage, Put::default(), &file)?;
    let file = archive::compress(&file)?;
    tree::remove(&stage)?;
    println!("{}", file.display());
    Ok(())
}

/// The target of static builds on this machine.
pub fn target() -> String {
    format!("{}-unknown-linux-musl", std::env::consts::ARCH)
}

/// Fails if one of these programs is missing; names all that are.
pub fn require(programs: &[&str]) -> Result<(), String> {
    let is_missing = |name: &&&str| run::find_program(name).is_none();
    let missing: Vec<&str> = programs.iter().filter(is_missing).copied().collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("not installed: {}", missing.join(", "))),
    }
}

impl Program {
    /// Builds the program, if need be, checks that it is static, and tries it out below
    /// `out`. Returns the directory that it is in.
    pub fn make(&self, out: &Path) -> Result<PathBuf, String> {
        require(&["readelf"])?;
        let built = match &self.built {
            Some(built) => std::path::absolute(built).map_err(|e| e.to_string())?,
            None => build(&self.profile)?,
        };
        let program = built.join("cowslip");
        is_static(&program)?;
        let scratch = out.join("scratch");
        tree::remove(&scratch)?;
        tree::make(&scratch)?;
        try_out(&program, &scratch)?;
        tree::remove(&scratch)?;
        Ok(built)
    }
}

/// Builds the command for musl; returns the directory that it is in.
fn build(profile: &str) -> Result<PathBuf, String> {
    let target = target();
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut root = Command::new(compiler);
    let root = run::output(root.args(["--print", "sysroot"]))?;
    let libraries = Path::new(root.trim()).join("lib/rustlib").join(&target);
    let mut missing = Vec::new();
    if !libraries.is_dir() {
        missing.push(format!("the target (rustup target add {target})"));
    }
    if run::find_program("musl-gcc").is_none() {
        missing.push("musl-gcc (Debian's package musl-tools)".to_string());
    }
    if !missing.is_empty() {
        return Err(format!("a static build needs {}", missing.join(" and ")));
    }
    let mut cargo = run::cargo();
    cargo.args(["build", "--locked", "--profile", profile]);
    cargo.args(["--target", &target]);
    run::run(cargo.args(["--package", "cowslip-cli", "--bin", "cowslip"]))?;
    Ok(run::target()
        .join(target)
        .join(install::directory_of(profile)))
}

/// Fails if the program asks for an interpreter or for libraries.
fn is_static(program: &Path) -> Result<(), String> {
    let mut readelf = Command::new("readelf");
    let readelf = readelf.args(["--wide", "--program-headers", "--dynamic"]);
    let said = run::output(readelf.arg(program))?;
    match wants(&said) {
        None => Ok(()),
        Some(line) => Err(format!("{} is not static: {line}", program.display())),
    }
}

/// The line in which readelf says what a program needs to be loaded.
fn wants(readelf: &str) -> Option<&str> {
    let lines = readelf.lines().map(str::trim);
    lines
        .clone()
        .find(|line| line.starts_with("INTERP") || line.contains("(NEEDED)"))
}

/// Runs the program as people do: makes an image, writes, copies, compares and checks it, and
/// serves it to a client.
fn try_out(program: &Path, scratch: &Path) -> Result<(), String> {
    let cowslip = |words: &[&str]| {
        let mut command = Command::new(program);
        // Nothing of the system's is asked for.
        command.env_clear().current_dir(scratch).args(words);
        command
    };
    let write = "write -P 0x5a 1M 64k";
    let read = "read -P 0x5a 1M 64k";
    for words in [
        &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"][..],
        &["io", "-c", write, "disk.qcow2"],
        &["convert", "-c", "-O", "qcow2", "disk.qcow2", "copy.qcow2"],
        &["compare", "disk.qcow2", "copy.qcow2"],
        &["check", "copy.qcow2"],
    ] {
        run::output(&mut cowslip(words))?;
    }
    let mut serve = cowslip(&["serve", "--socket", "socket", "disk.qcow2"]);
    serve.stdout(Stdio::null());
    let server = serve
        .spawn()
        .map_err(|e| format!("cannot run {}: {e}", run::describe(&serve)))?;
    let mut server = Server(server);
    server.await_socket(&scratch.join("socket"))?;
    let export = "nbd+unix:///?socket=socket";
    let said = run::output(&mut cowslip(&["io", "-r", "-f", "raw", "-c", read, export]))?;
    if !said.contains("read 65536/65536") || said.contains("failed") {
        return Err(format!("{read} of what was served: {said}"));
    }
    server.end()?;
    // Its sandbox lets it remove its socket by the calls that this C library makes.
    match scratch.join("socket").exists() {
        true => Err("the server has left its socket behind".into()),
        false => Ok(()),
    }
}

/// A server that is gone when its client is.
struct Server(Child);

impl Server {
    fn await_socket(&mut self, socket: &Path) -> Result<(), String> {
        let begun = Instant::now();
        while !socket.exists() {
            let ended = self.0.try_wait().map_err(|e| e.to_string())?;
            if let Some(status) = ended {
                return Err(format!("the server ended before its client came: {status}"));
            }
            if begun.elapsed() > Duration::from_secs(30) {
                return Err("the server has made no socket within 30 seconds".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Asks it to end; fails if it does so in another way than in order.
    fn end(mut self) -> Result<(), String> {
        kill_process(Pid::from_child(&self.0), Signal::TERM).map_err(|e| e.to_string())?;
        let status = self.0.wait().map_err(|e| e.to_string())?;
        match status.success() {
            true => Ok(()),
            false => Err(format!("the server ended by {status}")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended, or an error was met.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Puts the program, and all that belongs to it, into a tree.
pub fn fill(tree: &Tree, built: &Path) -> Result<(), String> {
    install::command(tree, built)?;
    install::links(tree)?;
    deb::strip(&tree.0.join("bin/cowslip"), "--strip-all")?;
    for name in ["README.md", "CHANGELOG.md"] {
        let path = format!("share/doc/cowslip/{name}");
        tree.copy(&run::root().join(name), &path, 0o644)?;
    }
    install::licences(tree, &["cowslip-cli"], &target())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_need_a_loader_or_libraries_are_not_static() {
        let position_independent = "Elf file type is DYN\n  LOAD 0x0\n  DYNAMIC 0x1\n\
                                    0x06ff (FLAGS) BIND_NOW\n 0x0005 (STRTAB) 0x1f0\n";
        assert_eq!(wants(position_independent), None);
        let loader = "  PHDR 0x40\n  INTERP 0x318 0x318\n";
        assert_eq!(wants(loader), Some("INTERP 0x318 0x318"));
        let library = " 0x0001 (NEEDED) Shared library: [libc.so]\n";
        assert_eq!(
            wants(library),
            Some("0x0001 (NEEDED) Shared library: [libc.so]")
        );
    }

    #[test]
    fn programs_of_this_system_are_found_to_be_dynamic() {
        let own = std::env::current_exe().unwrap();
        let found = is_static(&own);
        // Where these tests are themselves built for musl they are static.
        assert_eq!(found.is_ok(), cfg!(target_env = "musl"), "{found:?}");
    }
}
