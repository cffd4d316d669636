//! `cargo xtask static` and `cargo xtask oci`: what the recipe of the image names is there; what is
//! not static is refused; and, with a static program, what they make runs where nothing else is.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use run::run;
use serde_json::Value;

mod run;

// The recipe as it is read where the image is made; of its parts, some are looked at here.
#[allow(dead_code)]
#[path = "../src/recipe.rs"]
mod recipe;

const RECIPE: &str = include_str!("../../contrib/oci/Containerfile");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The command as it is built for tests; `None`, with a word about it, where this package alone is
/// tested.
fn built() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_xtask")).parent().unwrap();
    if target.join("cowslip").is_file() {
        return Some(target.to_path_buf());
    }
    eprintln!("SKIPPED: not built: the command (cargo test --workspace)");
    None
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn xtask(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(words);
    command
}

/// A daemon that goes with its test.
struct Daemon(Child);

impl Daemon {
    fn start(command: &mut Command, socket: &Path) -> Daemon {
        let mut daemon = Daemon(command.stdout(Stdio::null()).spawn().unwrap());
        for _ in 0..1500 {
            if socket.exists() {
                return daemon;
            }
            if let Some(status) = daemon.0.try_wait().unwrap() {
                panic!("{command:?}: {status}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{command:?}: no socket");
    }

    fn await_end(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has ended, or the test has failed.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn the_recipe_starts_a_daemon_in_directories_that_the_image_has() {
    let recipe = recipe::parse(RECIPE).unwrap();
    let sources = recipe.layers.iter().map(|layer| layer.from.as_str());
    // Which `cargo xtask oci` makes.
    assert_eq!(sources.collect::<Vec<_>>(), ["root", "state", "sockets"]);
    assert_eq!(recipe.entrypoint, ["/usr/bin/cowslip"]);
    let socket = Path::new(recipe.command.last().unwrap());
    let volume = socket.parent().unwrap().to_str().unwrap();
    assert!(recipe.volumes.iter().any(|one| one == volume), "{volume}");
    assert!(recipe.volumes.contains(&recipe.directory));
    let Some(built) = built() else { return };
    let scratch = scratch();
    let here = scratch.path().join("socket");
    let given = recipe
        .command
        .iter()
        .map(|word| match Path::new(word) == socket {
            true => here.as_os_str(),
            false => word.as_ref(),
        });
    let mut command = Command::new(built.join("cowslip"));
    let daemon = Daemon::start(command.args(given), &here);
    run(Command::new(built.join("cowslip"))
        .arg("ctl")
        .arg(&here)
        .arg("quit"));
    daemon.await_end();
}

#[test]
fn recipes_of_unknown_words_are_refused() {
    for line in [
        "FROM debian",
        "RUN true",
        "COPY root/ /usr",
        "COPY root /",
        "COPY --chown=1:2 root/ /",
        "COPY --chown=root root/ /",
        "ENV A=$B",
        "LABEL title=\"open",
        "ENTRYPOINT cowslip daemon",
        "USER",
    ] {
        let error = recipe::parse(&format!("# A comment.\nFROM scratch\n{line}\n"));
        let error = error.expect_err(line);
        assert_eq!(
            error,
            format!("line 3 of the recipe is not understood: {line}")
        );
    }
}

#[test]
fn programs_that_need_libraries_are_refused() {
    let Some(built) = built() else { return };
    for verb in ["static", "oci"] {
        let mut command = xtask(&[verb, "--built"]);
        let scratch = scratch();
        command.arg(&built).arg("--out").arg(scratch.path());
        // Certificates come first; this file will do for none.
        if verb == "oci" {
            command.arg("--certificates").arg(root().join("README.md"));
        }
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        if cfg!(target_env = "gnu") {
            assert!(!output.status.success());
            assert!(said.contains("cowslip is not static: INTERP"), "{said}");
            let made = std::fs::read_dir(scratch.path()).unwrap().count();
            assert_eq!(made, 0, "something was packed");
        }
    }
}

/// The static program: that in the directory `COWSLIP_STATIC`, or one that is built without much
/// optimisation.
fn program() -> Vec<String> {
    match std::env::var("COWSLIP_STATIC") {
        Ok(directory) => vec!["--built".into(), directory],
        Err(_) => vec!["--profile".into(), "dev".into()],
    }
}

/// Runs a verb into a directory; the file that it has made.
fn make(verb: &str, out: &Path) -> PathBuf {
    let mut command = xtask(&[verb]);
    let said = run(command.args(program()).arg("--out").arg(out));
    PathBuf::from(said.lines().last().unwrap())
}

fn is_same(one: &Path, two: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(two).unwrap()
}

#[test]
#[ignore = "builds the command for musl, if COWSLIP_STATIC names no directory with one"]
fn the_archive_is_complete_and_the_same_each_time() {
    let scratch = scratch();
    let one = make("static", &scratch.path().join("one"));
    let two = make("static", &scratch.path().join("two"));
    assert!(is_same(&one, &two), "{} differs", one.display());
    run(Command::new("tar")
        .arg("-C")
        .arg(scratch.path())
        .arg("-xzf")
        .arg(&one));
    let name = one.file_name().unwrap().to_str().unwrap();
    let tree = scratch.path().join(name.strip_suffix(".tar.gz").unwrap());
    let said = run(Command::new(tree.join("lib/cowslip/qemu/qemu-img")).arg("--version"));
    assert!(said.contains("qemu-img"), "{said}");
    for path in [
        "share/man/man1/cowslip-serve.1",
        "share/bash-completion/completions/cowslip",
        "share/doc/cowslip/LICENSE-MIT",
        "share/doc/cowslip/LICENSE-APACHE",
    ] {
        assert!(tree.join(path).is_file(), "{path}");
    }
    let notices = std::fs::read_to_string(tree.join("share/doc/cowslip/THIRD-PARTY")).unwrap();
    // A crate, a library in C that a crate has inside, and one that all of it is linked with.
    let words = [
        "\nrustls 0.",
        "Facebook",
        "Permission is hereby granted",
        "musl.libc.org",
    ];
    for words in words {
        assert!(notices.contains(words), "{words}");
    }
    assert!(!notices.contains("\ntempfile "), "that is for tests");
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// The file of a part of an image, whose sum is its name.
fn blob(layout: &Path, part: &Value) -> PathBuf {
    let sum = part["digest"].as_str().unwrap();
    let sum = sum.strip_prefix("sha256:").unwrap();
    let file = layout.join("blobs/sha256").join(sum);
    let said = run(Command::new("sha256sum").arg(&file));
    assert!(said.starts_with(sum), "{said}");
    assert_eq!(part["size"], file.metadata().unwrap().len());
    file
}

#[test]
#[ignore = "builds the command for musl, if COWSLIP_STATIC names no directory with one"]
fn the_image_is_sound_and_its_daemon_runs_where_nothing_else_is() {
    let scratch = scratch();
    let one = make("oci", &scratch.path().join("one"));
    let two = make("oci", &scratch.path().join("two"));
    assert!(is_same(&one, &two), "{} differs", one.display());
    let layout = scratch.path().join("layout");
    std::fs::create_dir(&layout).unwrap();
    run(Command::new("tar")
        .arg("-C")
        .arg(&layout)
        .arg("-xf")
        .arg(&one));
    let index = json(&layout.join("index.json"));
    let manifest = json(&blob(&layout, &index["manifests"][0]));
    let config = json(&blob(&layout, &manifest["config"]));
    let layers = manifest["layers"].as_array().unwrap();
    let sums = config["rootfs"]["diff_ids"].as_array().unwrap();
    assert_eq!(layers.len(), sums.len());
    let container = scratch.path().join("container");
    std::fs::create_dir(&container).unwrap();
    for (layer, sum) in layers.iter().zip(sums) {
        let file = blob(&layout, layer);
        let sum_of_tar = format!("gzip -dc '{}' | sha256sum", file.display());
        let said = run(Command::new("sh").arg("-c").arg(sum_of_tar));
        let sum = sum.as_str().unwrap().strip_prefix("sha256:").unwrap();
        assert!(said.starts_with(sum), "{said}");
        run(Command::new("tar")
            .arg("-C")
            .arg(&container)
            .arg("-xpzf")
            .arg(file));
    }
    inspect(&one, &layout, &config);
    confined(&container, &config["config"]);
}

/// The tools of others read it, where they are installed.
fn inspect(archive: &Path, layout: &Path, config: &Value) {
    if Command::new("skopeo").arg("--version").output().is_err() {
        eprintln!("SKIPPED: not installed: skopeo");
    } else {
        let image = format!("oci-archive:{}", archive.display());
        let words = ["inspect", "--config", &image];
        let said: Value = serde_json::from_str(&run(Command::new("skopeo").args(words))).unwrap();
        assert_eq!(said["config"]["Entrypoint"], config["config"]["Entrypoint"]);
        assert_eq!(said["rootfs"], config["rootfs"]);
    }
    if Command::new("umoci").arg("--version").output().is_err() {
        eprintln!("SKIPPED: not installed: umoci");
    } else {
        let image = format!("{}:{}", layout.display(), env!("CARGO_PKG_VERSION"));
        let bundle = layout.with_extension("bundle");
        let mut unpack = Command::new("umoci");
        run(unpack
            .args(["unpack", "--rootless", "--image", &image])
            .arg(&bundle));
        assert!(bundle.join("rootfs/usr/bin/cowslip").is_file());
        let run_by = json(&bundle.join("config.json"));
        assert_eq!(run_by["process"]["args"][1], config["config"]["Cmd"][0]);
    }
}

/// Runs the program as a container does, but for namespaces: in the image's root, as its user, with
/// its environment.
fn confined(container: &Path, config: &Value) {
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        eprintln!("SKIPPED: no root, which may change the root directory");
        return;
    }
    let entry = |words: &[&str]| {
        let mut command = Command::new("/usr/sbin/chroot");
        let user = config["User"].as_str().unwrap();
        command.arg(format!("--userspec={user}")).arg(container);
        command.env_clear();
        for pair in config["Env"].as_array().unwrap() {
            let (name, value) = pair.as_str().unwrap().split_once('=').unwrap();
            command.env(name, value);
        }
        command.args(
            config["Entrypoint"]
                .as_array()
                .unwrap()
                .iter()
                .map(|one| one.as_str().unwrap()),
        );
        command.args(words);
        command
    };
    let image = "/var/lib/cowslip/disk.qcow2";
    let copy = "/var/lib/cowslip/copy.qcow2";
    run(&mut entry(&["create", "-q", "-f", "qcow2", image, "64M"]));
    run(&mut entry(&["io", "-c", "write -P 0x5a 1M 64k", image]));
    run(&mut entry(&[
        "qemu-img", "convert", "-c", "-O", "qcow2", image, copy,
    ]));
    run(&mut entry(&["compare", image, copy]));
    let command: Vec<&str> = config["Cmd"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one.as_str().unwrap())
        .collect();
    let control = *command.last().unwrap();
    let socket = container.join(control.trim_start_matches('/'));
    let daemon = Daemon::start(&mut entry(&command), &socket);
    let ctl = |words: &[&str]| run(&mut entry(&[&["ctl", control][..], words].concat()));
    let file = format!("file.filename={image}");
    ctl(&[
        "blockdev-add",
        "driver=qcow2",
        "node-name=vm",
        "file.driver=file",
        &file,
    ]);
    ctl(&[
        "nbd-server-start",
        "addr.type=unix",
        "addr.data.path=/run/cowslip/nbd.sock",
    ]);
    ctl(&[
        "block-export-add",
        "type=nbd",
        "id=e",
        "node-name=vm",
        "writable=on",
    ]);
    let export = "nbd+unix:///vm?socket=/run/cowslip/nbd.sock";
    let said = run(&mut entry(&[
        "io",
        "-f",
        "raw",
        "-c",
        "read -P 0x5a 1M 64k",
        export,
    ]));
    assert!(said.contains("read 65536/65536"), "{said}");
    ctl(&["quit"]);
    daemon.await_end();
}
