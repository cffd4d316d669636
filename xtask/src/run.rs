//! Running programs: with their output passed through, or taken.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace")
        .to_path_buf()
}

/// The cargo that runs us, at the workspace's root.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// The directory of what cargo builds.
pub fn target() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The time that packages of these sources have, in seconds since 1970: `SOURCE_DATE_EPOCH`, or
/// that of the last commit. Sources without their history have none of their own, and get 0.
pub fn epoch() -> String {
    let mut commit = Command::new("git");
    commit.args(["log", "-1", "--format=%ct"]);
    std::env::var("SOURCE_DATE_EPOCH")
        .or_else(|_| output(commit.current_dir(root())))
        .map_or_else(|_| "0".into(), |epoch| epoch.trim().to_string())
}

/// The command line, for messages.
pub fn describe(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Runs it with our standard streams.
pub fn run(command: &mut Command) -> Result<(), String> {
    let status = command
        .status()
        .map_err(|e| format!("cannot run {}: {e}", describe(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{}: {status}", describe(command)))
    }
}

/// Runs it and takes its standard output; its standard error becomes part of the error.
pub fn output(command: &mut Command) -> Result<String, String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("cannot run {}: {e}", describe(command)))?;
    if !output.status.success() {
        return Err(format!(
            "{}: {}\n{}{}",
            describe(command),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where a program is, if it is installed. The system's own directories count although an ordinary
/// user's path may lack them.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
}
