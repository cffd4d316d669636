//! `cargo xtask install`: the command and the library with all that belongs to them, as packages
//! have it: programs, links of QEMU's names, manual pages, completions, the unit for systemd, the
//! header, pkg-config, licences.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{notices, run};

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
    /// Directory of what is built already: `cowslip`, `libcowslip_capi.a`
    #[arg(long, conflicts_with = "profile")]
    built: Option<PathBuf>,
}

/// Names of QEMU's programs that the command takes.
pub const QEMU_NAMES: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];
/// Where links of these names are, below the prefix: ahead in a `PATH` or for alternatives, not in
/// the way of QEMU's own.
pub const QEMU_LINKS: &str = "lib/cowslip/qemu";

/// The directory below `destdir` that has the prefix.
pub struct Tree(pub PathBuf);

impl Tree {
    /// Makes the directory and writes a file of this mode.
    pub fn write(&self, path: &str, mode: u32, bytes: &[u8]) -> Result<PathBuf, String> {
        let path = self.directory_of(path)?;
        fs::write(&path, bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(&path, permissions).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(path)
    }

    pub fn copy(&self, from: &Path, path: &str, mode: u32) -> Result<PathBuf, String> {
        let bytes = fs::read(from).map_err(|e| format!("{}: {e}", from.display()))?;
        self.write(path, mode, &bytes)
    }

    /// The path of a file, in a directory that exists.
    pub fn directory_of(&self, path: &str) -> Result<PathBuf, String> {
        let path = self.0.join(path);
        let directory = path.parent().ok_or("a file is in a directory")?;
        fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        Ok(path)
    }

    /// Makes a symbolic link, in place of one of an installation before.
    pub fn link(&self, target: &str, path: &str) -> Result<(), String> {
        let path = self.directory_of(path)?;
        drop(fs::remove_file(&path));
        symlink(target, &path).map_err(|e| format!("{}: {e}", path.display()))
    }
}

/// Builds and installs.
pub fn run(args: &Args) -> Result<(), String> {
    let built = match &args.built {
        Some(built) => built.clone(),
        None => build(&args.profile, &[])?,
    };
    let tree = Tree(args.destdir.join(args.prefix.trim_start_matches('/')));
    command(&tree, &built)?;
    links(&tree)?;
    shared_library(&tree, &built, &args.libdir)?;
    development(&tree, &built, (&args.prefix, &args.libdir))?;
    licences(&tree, &["cowslip-cli", "cowslip-capi"], &notices::host())
}

/// Builds the command, the library and `more` packages; returns the directory that they are in.
pub fn build(profile: &str, more: &[&str]) -> Result<PathBuf, String> {
    let mut command = run::cargo();
    command.args(["build", "--profile", profile]);
    command.args(["--package", "cowslip-cli", "--bin", "cowslip"]);
    run::run(&mut command)?;
    for package in [&["cowslip-capi"], more].concat() {
        let mut library = run::cargo();
        library.args(["build", "--profile", profile, "--package", package]);
        run::run(&mut library)?;
    }
    Ok(run::target().join(directory_of(profile)))
}

/// The directory of what is built with a profile, in that of the target.
pub fn directory_of(profile: &str) -> &str {
    match profile {
        "dev" => "debug",
        other => other,
    }
}

/// The command, and what is made by it.
pub fn command(tree: &Tree, built: &Path) -> Result<(), String> {
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

/// The licences, and those of the crates of others that members are linked with for a target.
pub fn licences(tree: &Tree, members: &[&str], target: &str) -> Result<(), String> {
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let path = format!("share/doc/cowslip/{name}");
        tree.copy(&run::root().join(name), &path, 0o644)?;
    }
    let path = format!("share/doc/cowslip/{}", notices::FILE);
    let text = notices::of(members, &[target.to_string()])?;
    tree.write(&path, 0o644, text.as_bytes()).map(drop)
}

/// Links of QEMU's names, in a directory of their own.
pub fn links(tree: &Tree) -> Result<(), String> {
    for name in QEMU_NAMES {
        tree.link("../../../bin/cowslip", &format!("{QEMU_LINKS}/{name}"))?;
    }
    Ok(())
}

/// The library for C, for programs that are linked with it.
pub fn shared_library(tree: &Tree, built: &Path, libdir: &str) -> Result<PathBuf, String> {
    let archive = built.join("libcowslip_capi.a");
    let shared = tree.directory_of(&format!("{libdir}/libcowslip.so.0"))?;
    let mut link = Command::new(run::root().join("crates/capi/link-shared.sh"));
    run::run(link.arg(&archive).arg(&shared))?;
    let permissions = fs::Permissions::from_mode(0o644);
    fs::set_permissions(&shared, permissions).map_err(|e| format!("{}: {e}", shared.display()))?;
    Ok(shared)
}

/// The library for C, for building programs; the prefix is where it will be found.
pub fn development(
    tree: &Tree,
    built: &Path,
    (prefix, libdir): (&str, &str),
) -> Result<(), String> {
    let sources = run::root().join("crates/capi");
    let archive = built.join("libcowslip_capi.a");
    tree.copy(&archive, &format!("{libdir}/libcowslip.a"), 0o644)?;
    tree.link("libcowslip.so.0", &format!("{libdir}/libcowslip.so"))?;
    let header = sources.join("include/cowslip.h");
    tree.copy(&header, "include/cowslip.h", 0o644)?;
    let template = sources.join("cowslip.pc.in");
    let template = fs::read_to_string(&template).map_err(|e| format!("cowslip.pc.in: {e}"))?;
    let text = template
        .replace("@prefix@", prefix)
        .replace("@libdir@", &format!("{prefix}/{libdir}"))
        .replace("@version@", env!("CARGO_PKG_VERSION"));
    tree.write(
        &format!("{libdir}/pkgconfig/cowslip.pc"),
        0o644,
        text.as_bytes(),
    )?;
    Ok(())
}
