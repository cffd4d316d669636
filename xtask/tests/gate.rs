//! Formatting, lints and documentation as tests, so that `cargo test` is the whole gate.
//!
//! Each runs cargo itself, in the target directory of the run that it is part of, so that what was
//! built is not built again.

use std::path::Path;
use std::process::Command;

#[path = "../src/libssl.rs"]
mod libssl;

/// Runs cargo at the workspace's root and shows its output if it fails.
fn cargo(arguments: &[&str], environment: &[(&str, &str)]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace");
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(program)
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(root)
        .output()
        .expect("cargo can be run");
    assert!(
        output.status.success(),
        "cargo {}: {}\n{}\n{}",
        arguments.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn formatting_is_rustfmts() {
    cargo(&["fmt", "--all", "--check"], &[]);
}

/// Words that leave out the crates that are the sources of others, compiled for a checker of
/// threads: lints and documentation would look at each of those files twice.
const WITHOUT_COPIES: [&str; 3] = ["--workspace", "--exclude", "cowslip*-on-shuttle"];

#[test]
fn clippy_finds_nothing() {
    let words = ["clippy", "--all-targets", "--quiet"];
    let denied = ["--", "-D", "warnings"];
    cargo(
        &[&words[..], &WITHOUT_COPIES, libssl::features(), &denied].concat(),
        &[],
    );
}

/// The default build of one crate has a file that the other build does not have.
#[test]
fn clippy_finds_nothing_without_openssl() {
    if libssl::is_there() {
        let words = ["clippy", "-p", "cowslip-nbd", "--quiet"];
        cargo(&[&words[..], &["--", "-D", "warnings"]].concat(), &[]);
    }
}

#[test]
fn documentation_has_no_broken_links() {
    // The command and the engine have one name; documentation of both would collide. Private items
    // are for readers of the source, and public ones may point them there.
    let words = ["doc", "--no-deps", "--lib", "--quiet"];
    let private = ["--document-private-items"];
    cargo(
        &[&words[..], &WITHOUT_COPIES, libssl::features(), &private].concat(),
        &[(
            "RUSTDOCFLAGS",
            "-D warnings -A rustdoc::private_intra_doc_links",
        )],
    );
}
