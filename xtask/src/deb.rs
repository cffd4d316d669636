//! `cargo xtask deb`: Debian packages of the command, QEMU's names for it, the library for C, and
//! the module for Python, made of what `cargo xtask install` installs. The same files make the same
//! bytes: times are those of the last commit, or of `SOURCE_DATE_EPOCH`.
//!
//! Needs `dpkg-dev` and `binutils`. With `--source` it makes the source package instead
//! (`source.rs`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::install::{self, QEMU_LINKS, QEMU_NAMES, Tree};
use crate::{notices, run, source};

/// Options of `cargo xtask deb`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for the packages
    #[arg(long, default_value = "target/debian")]
    out: PathBuf,
    /// Profile to build
    #[arg(long, default_value = "release")]
    profile: String,
    /// Directory of what is built already: `cowslip`, `libcowslip_capi.a`, `lib_cowslip.so`
    #[arg(long, conflicts_with = "profile")]
    built: Option<PathBuf>,
    /// Compression of the packages, such as `none` for a quick look
    #[arg(long, default_value = "xz")]
    compression: String,
    /// Make the source package, with the crates of others in it
    #[arg(long, conflicts_with_all = ["profile", "built", "compression"])]
    source: bool,
}

/// A binary package.
pub struct Package {
    pub name: &'static str,
    pub section: &'static str,
    /// It has the same files on all machines.
    pub is_for_all: bool,
    pub depends: &'static [&'static str],
    /// The member of the workspace whose code is in it, with crates of others.
    built_from: Option<&'static str>,
    /// One line.
    pub title: &'static str,
    /// Paragraphs, without indentation.
    pub description: &'static str,
    /// Puts its files below `usr` of the stage.
    fill: fn(&Stage<'_>) -> Result<(), String>,
    /// Further members of the control archive: scripts, shared libraries, triggers.
    control: fn() -> Vec<(&'static str, String)>,
}

/// `=VERSION` stands for the version of these packages.
pub const PACKAGES: [Package; 5] = [
    Package {
        name: "cowslip",
        section: "otherosfs",
        is_for_all: false,
        depends: &[],
        built_from: Some("cowslip-cli"),
        title: "qcow2 storage engine that allocates well",
        description: "Makes, checks, copies, resizes, compacts and serves disk images for \
                      virtual machines: over NBD, vhost-user and FUSE, one at a time or many by \
                      a daemon with live snapshots and jobs.",
        fill: fill_command,
        control: command_control,
    },
    Package {
        name: "cowslip-qemu",
        section: "otherosfs",
        is_for_all: true,
        depends: &["cowslip (>= VERSION)"],
        built_from: None,
        title: "qcow2 storage engine that allocates well - names of QEMU",
        description: "Alternatives for qemu-img, qemu-io, qemu-nbd and qemu-storage-daemon, \
                      for scripts. Where QEMU's own programs are installed, they stay.",
        fill: |stage| install::links(&stage.usr()),
        control: qemu_control,
    },
    Package {
        name: "libcowslip0",
        section: "libs",
        is_for_all: false,
        depends: &[],
        built_from: Some("cowslip-capi"),
        title: "qcow2 storage engine that allocates well - library",
        description: "The engine behind a C interface, for virtual machine monitors and tools: \
                      blocking calls, queues with an eventfd, jobs with progress.",
        fill: fill_library,
        control: library_control,
    },
    Package {
        name: "libcowslip-dev",
        section: "libdevel",
        is_for_all: false,
        depends: &["libcowslip0 (= VERSION)"],
        built_from: Some("cowslip-capi"),
        title: "qcow2 storage engine that allocates well - development files",
        description: "The header, the archive and what pkg-config needs for programs in C, with \
                      examples.",
        fill: fill_development,
        control: Vec::new,
    },
    Package {
        name: "python3-cowslip",
        section: "python",
        is_for_all: false,
        depends: &["python3 (>= 3.11)"],
        built_from: Some("cowslip-python"),
        title: "qcow2 storage engine that allocates well - Python",
        description: "Images as objects of Python, with buffers in place, asyncio, jobs with \
                      progress.",
        fill: fill_python,
        control: python_control,
    },
];

/// All that packages are made of.
struct Stage<'a> {
    root: PathBuf,
    built: &'a Path,
    triplet: &'a str,
}

impl Stage<'_> {
    fn usr(&self) -> Tree {
        Tree(self.root.join("usr"))
    }

    fn libdir(&self) -> String {
        format!("lib/{}", self.triplet)
    }
}

/// Makes the packages.
pub fn run(args: &Args) -> Result<(), String> {
    if args.source {
        let out = run::root().join(&args.out);
        return source::make(&out, &Facts::find()?);
    }
    for program in ["dpkg-deb", "dpkg-shlibdeps", "strip", "gzip"] {
        if run::find_program(program).is_none() {
            return Err(format!("{program} is not installed (dpkg-dev, binutils)"));
        }
    }
    let built = match &args.built {
        Some(built) => built.clone(),
        None => install::build(&args.profile, &["cowslip-python"])?,
    };
    let facts = Facts::find()?;
    let out = run::root().join(&args.out);
    let stages = out.join("stages");
    remove(&stages)?;
    for package in &PACKAGES {
        let stage = Stage {
            root: stages.join(package.name),
            built: &built,
            triplet: &facts.triplet,
        };
        (package.fill)(&stage)?;
        documents(&stage, package, &facts)?;
        control(&stage, package, &facts)?;
        settle(&stage.root)?;
        let file = out.join(format!(
            "{}_{}_{}.deb",
            package.name,
            facts.version,
            facts.architecture_of(package)
        ));
        let mut pack = Command::new("dpkg-deb");
        pack.args(["--root-owner-group", "-Z", &args.compression, "--build"]);
        pack.arg(&stage.root).arg(&file);
        run::output(pack.env("SOURCE_DATE_EPOCH", &facts.epoch))?;
        println!("{}", file.display());
    }
    remove(&stages)
}

fn remove(directory: &Path) -> Result<(), String> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// Facts of this system and of these sources.
pub struct Facts {
    architecture: String,
    triplet: String,
    pub version: String,
    /// Seconds since 1970.
    pub epoch: String,
    /// The same, as changelogs have it.
    date: String,
    pub maintainer: String,
}

impl Facts {
    fn find() -> Result<Facts, String> {
        let one = |program: &str, words: &[&str]| {
            let mut command = Command::new(program);
            let line = run::output(command.args(words).current_dir(run::root()));
            line.map(|line| line.trim().to_string())
        };
        let epoch = run::epoch();
        let named =
            |name, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.into());
        Ok(Facts {
            architecture: one("dpkg-architecture", &["-qDEB_HOST_ARCH"])?,
            triplet: one("dpkg-architecture", &["-qDEB_HOST_MULTIARCH"])?,
            // Below the revisions of a distribution's own packages.
            version: format!("{}-0upstream1", env!("CARGO_PKG_VERSION")),
            date: one("date", &["-u", "-R", "-d", &format!("@{epoch}")])?,
            epoch,
            maintainer: format!(
                "{} <{}>",
                named("DEBFULLNAME", "Cowslip developers"),
                named("DEBEMAIL", "packages@cowslip.invalid")
            ),
        })
    }

    /// The file `changelog`.
    pub fn changelog(&self) -> String {
        format!(
            "cowslip ({}) unstable; urgency=medium\n\n  * Version {}.\n\n -- {}  {}\n",
            self.version,
            env!("CARGO_PKG_VERSION"),
            self.maintainer,
            self.date
        )
    }

    fn architecture_of(&self, package: &Package) -> &str {
        match package.is_for_all {
            true => "all",
            false => &self.architecture,
        }
    }
}

/// Strips a program or library, as `how` says.
pub fn strip(file: &Path, how: &str) -> Result<(), String> {
    run::output(
        Command::new("strip")
            .args([how, "--enable-deterministic-archives"])
            .arg(file),
    )
    .map(drop)
}

/// Compresses a file, without its name and time.
fn compress(file: &Path) -> Result<(), String> {
    run::output(Command::new("gzip").args(["-9", "-n", "-f"]).arg(file)).map(drop)
}

fn files(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error| format!("{}: {error}", directory.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        found.push(entry.map_err(failed)?.path());
    }
    found.sort();
    Ok(found)
}

fn fill_command(stage: &Stage<'_>) -> Result<(), String> {
    let usr = stage.usr();
    install::command(&usr, stage.built)?;
    strip(&usr.0.join("bin/cowslip"), "--strip-all")?;
    for page in files(&usr.0.join("share/man/man1"))? {
        compress(&page)?;
    }
    // Where Debian's zsh looks for completions of packages.
    let script = usr.0.join("share/zsh/site-functions/_cowslip");
    usr.copy(&script, "share/zsh/vendor-completions/_cowslip", 0o644)?;
    remove(&usr.0.join("share/zsh/site-functions"))?;
    let user = run::root().join("contrib/systemd/cowslip.sysusers");
    usr.copy(&user, "lib/sysusers.d/cowslip.conf", 0o644)?;
    Ok(())
}

fn command_control() -> Vec<(&'static str, String)> {
    let text = "if [ \"$1\" = configure ] && command -v systemd-sysusers > /dev/null; then\n    \
                systemd-sysusers cowslip.conf\nfi\n";
    vec![("postinst", script(text))]
}

fn qemu_control() -> Vec<(&'static str, String)> {
    let lines = |what: fn(&str) -> String| QEMU_NAMES.map(what).concat();
    let add = lines(|name| {
        format!(
            "    update-alternatives --install /usr/bin/{name} {name} /usr/{QEMU_LINKS}/{name} 30\n"
        )
    });
    let remove =
        lines(|name| format!("    update-alternatives --remove {name} /usr/{QEMU_LINKS}/{name}\n"));
    vec![
        (
            "postinst",
            script(&format!("if [ \"$1\" = configure ]; then\n{add}fi\n")),
        ),
        (
            "prerm",
            script(&format!("if [ \"$1\" = remove ]; then\n{remove}fi\n")),
        ),
    ]
}

fn fill_library(stage: &Stage<'_>) -> Result<(), String> {
    let shared = install::shared_library(&stage.usr(), stage.built, &stage.libdir())?;
    strip(&shared, "--strip-unneeded")
}

fn library_control() -> Vec<(&'static str, String)> {
    let version = env!("CARGO_PKG_VERSION");
    vec![
        (
            "shlibs",
            format!("libcowslip 0 libcowslip0 (>= {version})\n"),
        ),
        ("triggers", "activate-noawait ldconfig\n".to_string()),
    ]
}

fn fill_development(stage: &Stage<'_>) -> Result<(), String> {
    let usr = stage.usr();
    install::development(&usr, stage.built, ("/usr", &stage.libdir()))?;
    strip(
        &usr.0.join(stage.libdir()).join("libcowslip.a"),
        "--strip-debug",
    )?;
    for example in files(&run::root().join("crates/capi/examples"))? {
        let name = example.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("share/doc/libcowslip-dev/examples/{name}");
        usr.copy(&example, &path, 0o644)?;
    }
    Ok(())
}

fn fill_python(stage: &Stage<'_>) -> Result<(), String> {
    let usr = stage.usr();
    let place = "lib/python3/dist-packages/cowslip";
    for file in files(&run::root().join("crates/python/cowslip"))? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let ends = [".py", ".pyi", "py.typed"];
        if ends.iter().any(|end| name.ends_with(end)) {
            usr.copy(&file, &format!("{place}/{name}"), 0o644)?;
        }
    }
    let module = stage.built.join("lib_cowslip.so");
    let module = usr.copy(&module, &format!("{place}/_cowslip.abi3.so"), 0o644)?;
    strip(&module, "--strip-unneeded")
}

fn python_control() -> Vec<(&'static str, String)> {
    let compile = "if command -v py3compile > /dev/null 2>&1; then\n    \
                   py3compile -p python3-cowslip\nfi\n";
    let clean = "if command -v py3clean > /dev/null 2>&1; then\n    \
                 py3clean -p python3-cowslip\nfi\n";
    vec![("postinst", script(compile)), ("prerm", script(clean))]
}

fn script(text: &str) -> String {
    format!("#!/bin/sh\nset -e\n{text}")
}

/// The licences, those of others too, and the changelog, which every package has.
fn documents(stage: &Stage<'_>, package: &Package, facts: &Facts) -> Result<(), String> {
    let usr = stage.usr();
    let place = format!("share/doc/{}", package.name);
    let mut text = copyright()?;
    if let Some(member) = package.built_from {
        let targets = notices::packaged();
        let used = notices::crates(&targets, &[member], &[notices::Kind::Linked])?;
        let where_texts_are = format!("The text is in /usr/{place}/{}.gz.", notices::FILE);
        text += &notices::paragraphs(&used, &where_texts_are);
        let path = format!("{place}/{}", notices::FILE);
        let texts = notices::of(&[member], &targets)?;
        compress(&usr.write(&path, 0o644, texts.as_bytes())?)?;
    }
    usr.write(&format!("{place}/copyright"), 0o644, text.as_bytes())?;
    let path = format!("{place}/changelog.Debian");
    compress(&usr.write(&path, 0o644, facts.changelog().as_bytes())?)
}

/// The file `copyright`.
pub fn copyright() -> Result<String, String> {
    let mit = run::root().join("LICENSE-MIT");
    let mit = fs::read_to_string(&mit).map_err(|e| format!("{}: {e}", mit.display()))?;
    let notice = mit.lines().find(|line| line.starts_with("Copyright"));
    let notice = notice.unwrap_or("Copyright the Cowslip developers");
    let mit: String = mit
        .lines()
        .skip_while(|line| !line.starts_with("Permission"))
        .map(|line| match line.is_empty() {
            true => " .\n".to_string(),
            false => format!(" {line}\n"),
        })
        .collect();
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: cowslip\n\nFiles: *\nCopyright: {}\nLicense: MIT or Apache-2.0\n\n\
         License: MIT\n{mit}\nLicense: Apache-2.0\n On Debian systems the text of this licence \
         is in\n /usr/share/common-licenses/Apache-2.0.\n",
        notice
            .trim_start_matches("Copyright")
            .trim_start_matches(" (c)")
            .trim()
    ))
}

/// The control archive's members.
fn control(stage: &Stage<'_>, package: &Package, facts: &Facts) -> Result<(), String> {
    let tree = Tree(stage.root.clone());
    let mut depends = shared_libraries(&stage.root)?;
    for one in package.depends {
        depends.push(one.replace("VERSION", &facts.version));
    }
    let mut text = format!(
        "Package: {}\nSource: cowslip\nVersion: {}\nArchitecture: {}\nMaintainer: {}\n\
         Installed-Size: {}\n",
        package.name,
        facts.version,
        facts.architecture_of(package),
        facts.maintainer,
        size(&stage.root)?.div_ceil(1024)
    );
    if !depends.is_empty() {
        text += &format!("Depends: {}\n", depends.join(", "));
    }
    text += &format!("Section: {}\nPriority: optional\n", package.section);
    if package.name.starts_with("lib") {
        text += "Multi-Arch: same\n";
    }
    text += &format!(
        "Description: {}\n{}",
        package.title,
        wrapped(package.description)
    );
    tree.write("DEBIAN/control", 0o644, text.as_bytes())?;
    for (name, text) in (package.control)() {
        let mode = if text.starts_with("#!") { 0o755 } else { 0o644 };
        tree.write(&format!("DEBIAN/{name}"), mode, text.as_bytes())?;
    }
    let mut sums = Command::new("sh");
    sums.args([
        "-c",
        "find usr -type f | LC_ALL=C sort | xargs -r -d '\\n' md5sum",
    ]);
    let sums = run::output(sums.current_dir(&stage.root))?;
    tree.write("DEBIAN/md5sums", 0o644, sums.as_bytes())?;
    Ok(())
}

/// A description's lines: at most 78 columns, behind a space.
pub fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if line.len() + word.len() > 76 {
            lines += &format!("{line}\n");
            line.clear();
        }
        line += &format!(" {word}");
    }
    lines + &line + "\n"
}

/// Packages of the shared libraries that the programs in a stage need, with versions.
fn shared_libraries(root: &Path) -> Result<Vec<String>, String> {
    let mut objects = Vec::new();
    collect(root, &mut |path| {
        let starts = fs::read(path).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"));
        if starts {
            objects.push(path.to_path_buf());
        }
        Ok(())
    })?;
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    // It asks for a source package.
    let source = Tree(root.with_extension("source"));
    let paragraphs = b"Source: cowslip\n\nPackage: cowslip\nArchitecture: any\n";
    source.write("debian/control", 0o644, paragraphs)?;
    let mut command = Command::new("dpkg-shlibdeps");
    command.args(["-O", "--warnings=0"]).args(&objects);
    let found = run::output(command.current_dir(&source.0))?;
    remove(&source.0)?;
    let found = found
        .trim()
        .strip_prefix("shlibs:Depends=")
        .unwrap_or_default();
    Ok(found
        .split(", ")
        .filter(|one| !one.is_empty())
        .map(str::to_string)
        .collect())
}

/// Calls `each` for the regular files of a tree.
fn collect(
    directory: &Path,
    each: &mut dyn FnMut(&Path) -> Result<(), String>,
) -> Result<(), String> {
    for path in files(directory)? {
        match path.symlink_metadata() {
            Ok(known) if known.is_dir() => collect(&path, each)?,
            Ok(known) if known.is_file() => each(&path)?,
            _ => {}
        }
    }
    Ok(())
}

/// Bytes of the files of a tree.
fn size(root: &Path) -> Result<u64, String> {
    let mut bytes = 0;
    collect(root, &mut |path| {
        bytes += path
            .metadata()
            .map_err(|e| format!("{}: {e}", path.display()))?
            .len();
        Ok(())
    })?;
    Ok(bytes)
}

/// Gives directories the mode that packages have, whatever the mask of the user was.
fn settle(directory: &Path) -> Result<(), String> {
    let failed = |error| format!("{}: {error}", directory.display());
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    for path in files(directory)? {
        if path.symlink_metadata().is_ok_and(|known| known.is_dir()) {
            settle(&path)?;
        }
    }
    Ok(())
}
