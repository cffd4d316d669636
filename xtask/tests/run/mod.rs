//! Programs that tests run, and that have to succeed.

use std::process::Command;

/// Runs a program. Returns its output.
pub fn run(command: &mut Command) -> String {
    let output = command.output().expect("the program can be run");
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("it writes text")
}
