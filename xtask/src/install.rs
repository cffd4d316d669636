//! `cargo xtask install`: the command and the library with all that belongs to them, as packages
//! have it: programs, manual pages, completions, the unit for systemd, the header, pkg-config.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

/// Options of `cargo xtask install`.
#[derive(clap::Args)]
pub struct Args {
    /// Root of the installed system, such as a package's directory
    #[arg(long, default_value = "/")]
    destdir: PathBuf,
    /// Where the files will be found
    #[arg(long, default_value = "/usr/local")]
    prefix: String,
    /// Directory of libraries, below the prefix
    #[arg(long, default_value = "lib")]
    libdir: String,
    /// Profile to build
    #[arg(long, default_value = "release")]
    profile: String,
}

/// The directory below `destdir` that has the prefix.
struct Tree(PathBuf);

impl Tree {
    /// Makes the directory and writes a file of this mode.
    fn write(&self, path: &str, mode: u32, bytes: &[u8]) -> Result<PathBuf, String> {
        let path = self.directory_of(path)?;
        fs::write(&path, bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(&path, permissions).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(path)
    }

    fn copy(&self, from: &Path, path: &str, mode: u32) -> Result<PathBuf, String> {
        let bytes = fs::read(from).map_err(|e| format!("{}: {e}", from.display()))?;
        self.write(path, mode, &bytes)
    }

    /// The path of a file, in a directory that exists.
    fn directory_of(&self, path: &str) -> Result<PathBuf, String> {
        let path = self.0.join(path);
        let directory = path.parent().ok_or("a file is in a directory")?;
        fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        Ok(path)
    }
}

/// Builds and installs.
pub fn run(args: &Args) -> Result<(), String> {
    let mut build = run::cargo();
    build.args(["build", "--profile", &args.profile]);
    build.args(["--package", "cowslip-cli", "--bin", "cowslip"]);
    run::run(&mut build)?;
    let mut build = run::cargo();
    build.args([
        "build",
        "--profile",
        &args.profile,
        "--package",
        "cowslip-capi",
    ]);
    run::run(&mut build)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let built = match args.profile.as_str() {
        "dev" => "debug",
        other => other,
    };
    let built = run::root().join(target).join(built);
    let tree = Tree(args.destdir.join(args.prefix.trim_start_matches('/')));
    command(&tree, &built)?;
    library(&tree, &built, args)
}

/// The command, and what is made by it.
fn command(tree: &Tree, built: &Path) -> Result<(), String> {
    let program = tree.copy(&built.join("cowslip"), "bin/cowslip", 0o755)?;
    let pages = tree.directory_of("share/man/man1/cowslip.1")?;
    let pages = pages.parent().ok_or("a page is in a directory")?;
    run::run(Command::new(&program).arg("manual").arg(pages))?;
    let completions = "share/bash-completion/completions/cowslip";
    for (shell, path) in [
        ("bash", completions),
        ("zsh", "share/zsh/site-functions/_cowslip"),
        ("fish", "share/fish/vendor_completions.d/cowslip.fish"),
    ] {
        let script = run::output(Command::new(&program).args(["completions", shell]))?;
        tree.write(path, 0o644, script.as_bytes())?;
    }
    let unit = "contrib/systemd/cowslip-daemon.service";
    let unit = run::root().join(unit);
    tree.copy(&unit, "lib/systemd/system/cowslip-daemon.service", 0o644)?;
    Ok(())
}

/// The library for C.
fn library(tree: &Tree, built: &Path, args: &Args) -> Result<(), String> {
    let sources = run::root().join("crates/capi");
    let archive = built.join("libcowslip_capi.a");
    let libdir = &args.libdir;
    tree.copy(&archive, &format!("{libdir}/libcowslip.a"), 0o644)?;
    let shared = tree.directory_of(&format!("{libdir}/libcowslip.so.0"))?;
    let mut link = Command::new(sources.join("link-shared.sh"));
    run::run(link.arg(&archive).arg(&shared))?;
    let name = tree.directory_of(&format!("{libdir}/libcowslip.so"))?;
    // From an installation before.
    drop(fs::remove_file(&name));
    symlink("libcowslip.so.0", &name).map_err(|e| format!("{}: {e}", name.display()))?;
    let header = sources.join("include/cowslip.h");
    tree.copy(&header, "include/cowslip.h", 0o644)?;
    let template = sources.join("cowslip.pc.in");
    let template = fs::read_to_string(&template).map_err(|e| format!("cowslip.pc.in: {e}"))?;
    let text = template
        .replace("@prefix@", &args.prefix)
        .replace("@libdir@", &format!("{}/{libdir}", args.prefix))
        .replace("@version@", env!("CARGO_PKG_VERSION"));
    tree.write(
        &format!("{libdir}/pkgconfig/cowslip.pc"),
        0o644,
        text.as_bytes(),
    )?;
    Ok(())
}
