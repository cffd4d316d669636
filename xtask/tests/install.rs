//! `cargo xtask install`, into a directory, and `cargo xtask deb`: all that belongs to the command
//! and the libraries is there, and works from there.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use run::run;

mod run;

/// Where the workspace's programs and libraries are built.
fn target() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_xtask")).parent().unwrap()
}

/// The archive of the library for C, as cargo builds it for tests or by itself.
fn archive() -> Option<PathBuf> {
    let deps = std::fs::read_dir(target().join("deps")).unwrap().flatten();
    let archives = deps.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libcowslip_capi") && name.ends_with(".a")
    });
    archives.max_by_key(|path| path.metadata().unwrap().modified().unwrap())
}

/// A directory with what tests of the whole workspace have built; `None`, with a word about it,
/// where this package alone is tested.
fn built(scratch: &Path) -> Option<PathBuf> {
    let (command, archive) = (target().join("cowslip"), archive());
    let module = target().join("deps/lib_cowslip.so");
    let Some(archive) = archive.filter(|_| command.is_file() && module.is_file()) else {
        eprintln!("SKIPPED: not built: the command and the libraries (cargo test --workspace)");
        return None;
    };
    let built = scratch.join("built");
    std::fs::create_dir_all(&built).unwrap();
    symlink(command, built.join("cowslip")).unwrap();
    symlink(archive, built.join("libcowslip_capi.a")).unwrap();
    symlink(module, built.join("lib_cowslip.so")).unwrap();
    Some(built)
}

/// Whether programs are installed; says that the test skips, if not.
fn are_installed(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &&&str| {
        let mut places = std::env::split_paths(&path);
        places.any(|at| at.join(program).is_file())
    };
    match programs.iter().find(|program| !is_there(program)) {
        None => true,
        Some(missing) => {
            eprintln!("SKIPPED: not installed: {missing}");
            false
        }
    }
}

fn scratch(name: &str) -> PathBuf {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if scratch.exists() {
        std::fs::remove_dir_all(&scratch).unwrap();
    }
    std::fs::create_dir_all(&scratch).unwrap();
    scratch
}

fn install(built: &Path, destdir: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("install").arg("--built").arg(built);
    command.arg("--destdir").arg(destdir);
    run(command.args(["--prefix", "/opt/cowslip", "--libdir", "lib64"]));
}

#[test]
fn what_is_installed_is_complete_and_works_from_there() {
    let scratch = scratch("install");
    let Some(built) = built(&scratch) else { return };
    let destdir = scratch.join("root");
    install(&built, &destdir);
    // Once more, over what is there.
    install(&built, &destdir);
    let prefix = destdir.join("opt/cowslip");
    for (path, mode) in [
        ("bin/cowslip", 0o755),
        ("include/cowslip.h", 0o644),
        ("lib64/libcowslip.a", 0o644),
        ("lib64/libcowslip.so.0", 0o644),
        ("lib64/pkgconfig/cowslip.pc", 0o644),
        ("lib/systemd/system/cowslip-daemon.service", 0o644),
        ("share/man/man1/cowslip.1", 0o644),
        ("share/man/man1/cowslip-serve.1", 0o644),
        ("share/bash-completion/completions/cowslip", 0o644),
        ("share/zsh/site-functions/_cowslip", 0o644),
        ("share/fish/vendor_completions.d/cowslip.fish", 0o644),
        ("share/doc/cowslip/LICENSE-MIT", 0o644),
        ("share/doc/cowslip/LICENSE-APACHE", 0o644),
        ("share/doc/cowslip/THIRD-PARTY", 0o644),
    ] {
        let file = prefix
            .join(path)
            .metadata()
            .unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(file.permissions().mode() & 0o777, mode, "{path}");
        assert!(file.len() > 100, "{path} has {} bytes", file.len());
    }
    the_command_works(&prefix);
    the_library_works(&destdir, &prefix, &scratch);
    std::fs::remove_dir_all(scratch).unwrap();
}

fn the_command_works(prefix: &Path) {
    let bin = prefix.join("bin/cowslip");
    let said = run(Command::new(&bin).arg("--version"));
    assert!(said.starts_with("cowslip "), "{said}");
    for name in ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"] {
        let link = prefix.join("lib/cowslip/qemu").join(name);
        assert!(link.is_symlink(), "{}", link.display());
        let said = run(Command::new(&link).arg("--version"));
        assert!(said.contains(name), "{name}: {said}");
    }
    let completions = prefix.join("share/bash-completion/completions/cowslip");
    run(Command::new("bash").arg("-n").arg(completions));
}

/// A program is built with what pkg-config says, and runs.
fn the_library_works(destdir: &Path, prefix: &Path, scratch: &Path) {
    if !are_installed(&["cc", "pkg-config"]) {
        return;
    }
    let mut flags = Command::new("pkg-config");
    flags.args(["--cflags", "--libs", "cowslip"]);
    flags.env("PKG_CONFIG_PATH", prefix.join("lib64/pkgconfig"));
    flags.env("PKG_CONFIG_SYSROOT_DIR", destdir);
    let flags = run(&mut flags);
    let source = scratch.join("version.c");
    let code = "#include <cowslip.h>\n#include <stdio.h>\n\
                int main(void) { return puts(cowslip_version()) < 0; }\n";
    std::fs::write(&source, code).unwrap();
    let program = scratch.join("version");
    let mut cc = Command::new("cc");
    cc.arg(&source).arg("-o").arg(&program);
    run(cc.args(flags.split_whitespace()));
    let mut program = Command::new(program);
    program.env("LD_LIBRARY_PATH", prefix.join("lib64"));
    assert_eq!(run(&mut program).trim(), env!("CARGO_PKG_VERSION"));
}

/// Makes the packages; their files, by the names of packages.
fn packages(built: &Path, out: &Path) -> BTreeMap<String, PathBuf> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("deb").arg("--built").arg(built);
    // What lintian looks at is as it is for users.
    let compression = match std::env::var_os("COWSLIP_LINTIAN") {
        Some(_) => "gzip",
        None => "none",
    };
    command
        .args(["--compression", compression, "--out"])
        .arg(out);
    // A changelog has the time of the commit, wherever its reader is.
    let said = run(command.env("TZ", "Asia/Kathmandu"));
    let files = said.lines().map(PathBuf::from);
    files
        .map(|file| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            (name.split('_').next().unwrap().to_string(), file)
        })
        .collect()
}

/// Each crate that a package is linked with is named in the package, with the text of its licence.
fn licences_go_along(root: &Path) {
    let texts = [
        ("cowslip", "rustls"),
        ("libcowslip0", "io-uring"),
        ("libcowslip-dev", "slab"),
    ];
    for (package, linked) in [&texts[..], &[("python3-cowslip", "pyo3")]].concat() {
        let place = root.join("usr/share/doc").join(package);
        let copyright = std::fs::read_to_string(place.join("copyright")).unwrap();
        assert!(
            copyright.contains(&format!("vendor/{linked}-")),
            "{package}"
        );
        assert!(!copyright.contains("vendor/tempfile-"), "that is for tests");
        let texts = run(Command::new("gzip")
            .arg("-dc")
            .arg(place.join("THIRD-PARTY.gz")));
        let (list, texts) = texts
            .split_once("\n\n")
            .unwrap()
            .1
            .split_once("\n\n")
            .unwrap();
        for line in list.lines() {
            let (name, _) = line.split_once(": ").unwrap();
            let is_there = texts.lines().any(|line| {
                line.strip_suffix(':')
                    .is_some_and(|users| users.split(", ").any(|one| one == name))
            });
            assert!(is_there, "{package} has no licence of {name}");
        }
        let of_linked = |line: &str| line.starts_with(&format!("{linked} "));
        assert!(list.lines().any(of_linked), "{package}: {list}");
    }
    // It has links, which take no code of others along.
    assert!(
        !root
            .join("usr/share/doc/cowslip-qemu/THIRD-PARTY.gz")
            .exists()
    );
}

#[test]
fn packages_are_complete_and_the_same_each_time() {
    let scratch = scratch("deb");
    if !are_installed(&["dpkg-deb", "dpkg-shlibdeps", "strip"]) {
        return;
    }
    let Some(built) = built(&scratch) else { return };
    let made = packages(&built, &scratch.join("one"));
    let again = packages(&built, &scratch.join("two"));
    let names = [
        "cowslip",
        "cowslip-qemu",
        "libcowslip-dev",
        "libcowslip0",
        "python3-cowslip",
    ];
    assert!(made.keys().eq(names.iter()), "{made:?}");
    for name in names {
        let (one, two) = (&made[name], &again[name]);
        let is_same = std::fs::read(one).unwrap() == std::fs::read(two).unwrap();
        assert!(is_same, "{} and {} differ", one.display(), two.display());
    }
    let root = scratch.join("root");
    for file in made.values() {
        run(Command::new("dpkg-deb").arg("-x").arg(file).arg(&root));
    }
    the_command_works(&root.join("usr"));
    licences_go_along(&root);
    let depends = |name: &str| {
        let mut field = Command::new("dpkg-deb");
        run(field.arg("-f").arg(&made[name]).arg("Depends"))
    };
    assert!(depends("cowslip").contains("libc6 (>= "));
    assert!(depends("libcowslip-dev").contains("libcowslip0 (= "));
    let python = "import sys; sys.exit(sys.version_info < (3, 11))";
    let python = Command::new("python3").args(["-c", python]).status();
    if python.is_ok_and(|status| status.success()) {
        let import = "import cowslip; print(cowslip.__version__)";
        let mut python = Command::new("python3");
        python.args(["-c", import]);
        python.env("PYTHONPATH", root.join("usr/lib/python3/dist-packages"));
        assert_eq!(run(&mut python).trim(), env!("CARGO_PKG_VERSION"));
    }
    if std::env::var_os("COWSLIP_LINTIAN").is_some() && are_installed(&["lintian"]) {
        let mut lintian = Command::new("lintian");
        lintian
            .args(["--fail-on", "error,warning"])
            .args(made.values());
        run(&mut lintian);
    }
    std::fs::remove_dir_all(scratch).unwrap();
}
