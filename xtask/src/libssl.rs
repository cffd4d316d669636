//! OpenSSL's library, which TLS with keys shared beforehand needs, and the feature of the command
//! that uses it.
//!
//! Where the library is there, the gate builds and tests the command with it; where it is not, the
//! gate is that of the default build, and says so. A file of `tests` takes this one in, too, so it
//! uses nothing of its siblings.

use std::process::{Command, Stdio};

/// Debian's package of the library and its headers.
#[allow(dead_code)] // The gate's tests install nothing.
pub const PACKAGE: &str = "libssl-dev";
/// Debian's package of what finds it.
#[allow(dead_code)]
pub const FINDER: &str = "pkgconf";

/// Whether programs can be linked with it.
pub fn is_there() -> bool {
    let mut finder = Command::new("pkg-config");
    finder.args(["--exists", "openssl"]);
    let status = finder
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// The words that have cargo build the command with it, if that is possible. All of a run have to
/// have the same, or they build in each other's way.
pub fn features() -> &'static [&'static str] {
    match is_there() {
        true => &["--features", "cowslip-cli/psk"],
        false => &[],
    }
}
