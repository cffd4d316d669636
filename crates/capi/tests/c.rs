//! The library as C sees it: the header against the code, the shared library with its versions, and
//! the examples, built and run.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_capi::*;

const HEADER: &str = include_str!("../include/cowslip.h");
const MAP: &str = include_str!("../cowslip.map");

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a program that must succeed; its standard output.
fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    let status = output.status;
    assert!(status.success(), "{command:?}: {status}\n{printed}{errors}");
    printed
}

/// Whether a program or a file is there; if not, says that the test skips.
fn is_there(what: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).map(|directory| directory.join(what));
    let is_there = Path::new(what).exists() || places.any(|place| place.is_file());
    if !is_there {
        eprintln!("SKIPPED: not installed: {what}");
    }
    is_there
}

fn compiler() -> Command {
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g"]);
    cc.arg("-I").arg(here().join("include"));
    cc
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Names of functions that the header declares.
fn declared() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in HEADER.lines().filter(|line| !line.starts_with("typedef")) {
        let line = line.trim_start_matches("const ");
        let begins = [
            "int ",
            "void ",
            "char *",
            "uint64_t ",
            "size_t ",
            "cowslip_progress ",
        ];
        let Some(rest) = begins.iter().find_map(|begin| line.strip_prefix(begin)) else {
            continue;
        };
        if let Some((name, _)) = rest.split_once('(') {
            names.insert(name.to_string());
        }
    }
    names
}

#[test]
fn the_version_script_has_what_the_header_declares() {
    let mapped = MAP.lines().filter_map(|line| line.trim().strip_suffix(';'));
    let mapped: BTreeSet<String> = mapped
        .filter(|name| name.starts_with("cowslip_"))
        .map(str::to_string)
        .collect();
    assert!(mapped.len() > 40);
    assert_eq!(mapped, declared());
}

/// Adds assertions on the size of a type and the places of its fields.
macro_rules! assert_layout {
    ($code:ident, $type:ident: $($field:ident),+) => {
        let name = stringify!($type);
        writeln!($code, "_Static_assert(sizeof({name}) == {}, \"\");", size_of::<$type>()).unwrap();
        $(
            let field = stringify!($field);
            let place = offset_of!($type, $field);
            writeln!($code, "_Static_assert(offsetof({name}, {field}) == {place}, \"\");").unwrap();
        )+
    };
}

#[test]
fn the_header_has_the_layouts_of_the_code() {
    if !is_there("cc") {
        return;
    }
    let mut code = String::from("#include <cowslip.h>\n");
    assert_layout!(code, cowslip_progress: done_bytes, total_bytes);
    assert_layout!(code, cowslip_naming: name, writable, by_image);
    assert_layout!(code, cowslip_open_options:
        size, flags, backing, reserved, format, passphrase, open_file, user);
    assert_layout!(code, cowslip_create_options:
        size, flags, disk_size, cluster_size, format, backing_file, backing_format);
    assert_layout!(code, cowslip_extent: start, length, host_offset, flags, depth);
    assert_layout!(code, cowslip_request:
        operation, flags, offset, length, iov, iov_count, cookie);
    assert_layout!(code, cowslip_completion: cookie, result, reserved);
    assert_layout!(code, cowslip_check_result:
        corruptions, leaks, errors, allocated_clusters, total_clusters);
    for (name, value) in constants::ALL {
        writeln!(code, "_Static_assert(COWSLIP_{name} == {value}, \"\");").unwrap();
    }
    let defined = HEADER
        .lines()
        .filter_map(|line| line.strip_prefix("#define COWSLIP_"));
    let valued = defined.filter(|rest| rest.contains(' '));
    assert_eq!(valued.count(), constants::ALL.len());
    let iovec = size_of::<cowslip_iovec>();
    writeln!(
        code,
        "_Static_assert(sizeof(struct iovec) == {iovec}, \"\");"
    )
    .unwrap();
    let dir = scratch();
    let file = dir.path().join("layout.c");
    std::fs::write(&file, code).unwrap();
    run(compiler().arg("-fsyntax-only").arg(&file));
    if is_there("c++") {
        let file = dir.path().join("a.cpp");
        std::fs::write(
            &file,
            "#include <cowslip.h>\nint main() { return cowslip_version() == 0; }",
        )
        .unwrap();
        let include = here().join("include");
        run(Command::new("c++")
            .arg("-fsyntax-only")
            .arg("-I")
            .arg(include)
            .arg(&file));
    }
}

/// The newest archive of the library, built for these tests.
fn archive() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let deps = deps.parent().unwrap();
    let entries = std::fs::read_dir(deps).unwrap().flatten();
    let archives = entries.filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("libcowslip_capi") && name.ends_with(".a")
    });
    let newest = archives.max_by_key(|entry| entry.metadata().unwrap().modified().unwrap());
    newest.expect("the archive is built with the tests").path()
}

/// Makes the shared library in a directory, as packages do.
fn shared_library(directory: &Path) {
    let library = directory.join("libcowslip.so.0");
    run(Command::new(here().join("link-shared.sh"))
        .arg(archive())
        .arg(&library));
    std::os::unix::fs::symlink("libcowslip.so.0", directory.join("libcowslip.so")).unwrap();
}

/// Builds a program with the library in a directory.
fn program(directory: &Path, source: &str, extra: &[&str]) -> PathBuf {
    let stem = Path::new(source).file_stem().unwrap();
    let program = directory.join(stem);
    let mut cc = compiler();
    cc.args(extra)
        .arg(here().join(source))
        .arg("-L")
        .arg(directory);
    cc.arg(format!("-Wl,-rpath,{}", directory.display()));
    run(cc.args(["-lcowslip", "-lpthread", "-o"]).arg(&program));
    program
}

/// Runs a program in the directory, within another one if the environment has it
/// (`COWSLIP_C_WITHIN="valgrind --error-exitcode=99 -q"`), which sees a kernel without io_uring.
fn within(program: &Path, words: &[&str], directory: &Path) -> String {
    let within = std::env::var("COWSLIP_C_WITHIN").unwrap_or_default();
    let mut line: Vec<&str> = within.split_whitespace().collect();
    line.push(program.to_str().unwrap());
    line.extend(words);
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).current_dir(directory);
    if !within.is_empty() {
        let shim = directory.join("without_ring.so");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(&shim);
        run(cc.arg(here().join("tests/without_ring.c")).arg("-ldl"));
        command.env("LD_PRELOAD", shim);
    }
    run(&mut command)
}

#[test]
fn programs_in_c_work() {
    if !is_there("cc") {
        return;
    }
    let dir = scratch();
    let at = dir.path();
    shared_library(at);
    let symbols = run(Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(at.join("libcowslip.so.0")));
    let exported = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2));
    let exported: BTreeSet<String> = exported
        .filter_map(|name| name.strip_suffix("@@COWSLIP_0").map(str::to_string))
        .collect();
    assert_eq!(exported, declared());
    let alone = symbols.lines().filter(|line| !line.contains("COWSLIP_0"));
    assert_eq!(alone.count(), 0, "{symbols}");

    // With `COWSLIP_C_SANITIZE=1` C's side is built with AddressSanitizer.
    let sanitizers: &[&str] = match std::env::var_os("COWSLIP_C_SANITIZE") {
        Some(_) => &["-fsanitize=address,undefined", "-fno-sanitize-recover"],
        None => &[],
    };
    within(&program(at, "tests/misuse.c", sanitizers), &[], at);
    // Under ThreadSanitizer, and for longer: `cargo xtask tsan`.
    within(&program(at, "tests/threads.c", sanitizers), &["2"], at);
    within(
        &program(at, "examples/toy_vmm.c", sanitizers),
        &["top.qcow2"],
        at,
    );
    let convert = program(at, "examples/convert.c", sanitizers);
    within(&convert, &["top.qcow2", "copy.qcow2"], at);
    if is_there("qemu-img") {
        run(Command::new("qemu-img")
            .args(["compare", "top.qcow2", "copy.qcow2"])
            .current_dir(at));
        run(Command::new("qemu-img")
            .args(["check", "copy.qcow2"])
            .current_dir(at));
    }
    nbdkit(at);
}

/// The plugin, under nbdkit, with a client of QEMU's.
fn nbdkit(at: &Path) {
    let needed = ["nbdkit", "qemu-io", "/usr/include/nbdkit-plugin.h"];
    if !needed.iter().all(|what| is_there(what)) {
        return;
    }
    let plugin = at.join("cowslip.so");
    let mut cc = compiler();
    cc.args(["-shared", "-fPIC"])
        .arg(here().join("examples/nbdkit_plugin.c"));
    cc.arg("-L")
        .arg(at)
        .arg(format!("-Wl,-rpath,{}", at.display()));
    run(cc.args(["-lcowslip", "-o"]).arg(&plugin));
    let session = "qemu-io -f raw -c 'read -P 1 0 4k' -c 'write -P 0x77 1M 128k' -c flush \
                   -c 'write -z 1M 64k' -c 'read -P 0 1M 64k' -c 'read -P 0x77 1088k 64k' \
                   \"$uri\" && qemu-img map --output=json \"$uri\"";
    let printed = run(Command::new("nbdkit")
        .args(["-U", "-"])
        .arg(&plugin)
        .args(["file=copy.qcow2", "--run", session])
        .current_dir(at));
    assert!(!printed.contains("failed"), "{printed}");
    assert!(printed.contains("\"start\": 1114112"), "{printed}");
    run(Command::new("qemu-img")
        .args(["check", "copy.qcow2"])
        .current_dir(at));
}
