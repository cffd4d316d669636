//! Messages and help texts under the name `cowslip`: plain words, which name no program, function
//! or option that this one does not have. Under QEMU's names the words are QEMU's.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use crate::support::server::Server;
use crate::support::{cowslip, outcome, scratch, succeeds};

/// Runs a line in a directory.
fn line(dir: &Path, words: &str) -> Output {
    outcome(cowslip().current_dir(dir).args(words.split_whitespace()))
}

/// Standard error of a line that fails with exit code 1.
fn complaint(dir: &Path, words: &str) -> String {
    let output = line(dir, words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{words}: {text}");
    text
}

/// A directory with a qcow2 image of 1 MiB, `a.qcow2`.
fn with_image() -> crate::support::Scratch {
    let dir = scratch();
    let create = line(dir.path(), "create -q -f qcow2 a.qcow2 1M");
    assert!(create.status.success(), "{create:?}");
    dir
}

#[test]
fn without_a_verb_the_usage_lists_the_verbs() {
    let dir = scratch();
    let text = complaint(dir.path(), "");
    assert!(text.starts_with("Usage: cowslip"), "{text}");
    assert!(
        text.contains("\n  create ") && text.contains("\n  serve "),
        "{text}"
    );
    assert!(
        text.ends_with("Try 'cowslip --help' for more info\n"),
        "{text}"
    );
    assert!(!text.contains("--object"), "{text}");
}

#[test]
fn messages_name_the_program_that_was_called() {
    let dir = with_image();
    let text = complaint(dir.path(), "create");
    let expected =
        "cowslip: Expecting image file name\nTry 'cowslip create --help' for more info\n";
    assert_eq!(text, expected);
    let text = complaint(dir.path(), "create x 1M 2M");
    assert!(text.contains("Try 'cowslip create --help'"), "{text}");
    let text = complaint(dir.path(), "amend -o backing_file=b a.qcow2");
    assert!(
        text.contains("You can use 'cowslip rebase' instead"),
        "{text}"
    );
    let help = line(dir.path(), "io --help");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(help.starts_with("Usage: cowslip io [OPTIONS]"), "{help}");
    assert!(help.contains("See 'cowslip io -c help'"), "{help}");
}

/// Identifiers of QEMU's code, of the C library and of other languages' libraries.
const IDENTIFIERS: [&str; 6] = [
    "blk_new_open",
    "SUN_LEN",
    "ai_socktype",
    "qom-type",
    "type 'container'",
    "Block node",
];

#[test]
fn messages_are_free_of_identifiers() {
    let dir = with_image();
    let long = "x".repeat(200);
    for (words, expected) in [
        (
            "serve /nosuch".to_string(),
            "cowslip: Could not open '/nosuch': No such file",
        ),
        (
            "info /nosuch".to_string(),
            "cowslip: Could not open '/nosuch': No such file",
        ),
        (
            format!("serve -k {long} a.qcow2"),
            "a socket has at most 107 bytes, this one has 200",
        ),
        (
            format!("info nbd+unix:///x?socket={long}"),
            "a socket has at most 107 bytes, this one has 200",
        ),
        (
            "serve -l localhost:http7 a.qcow2".to_string(),
            "'http7' is not a port",
        ),
        (
            "serve -l host a.qcow2".to_string(),
            "'host' is not an address (HOST:PORT)",
        ),
        (
            "serve --sandbox=yes a.qcow2".to_string(),
            "is not a sandbox mode (auto, on or off)",
        ),
        (
            "--object foo,id=a info a.qcow2".to_string(),
            "'foo' is not a type of objects",
        ),
        (
            "--object id=a info a.qcow2".to_string(),
            "An object begins with its type: secret,",
        ),
        (
            "--object tls-creds-x509,id=a info a.qcow2".to_string(),
            "TLS credentials need 'dir'",
        ),
        (
            "--object secret,id=a,data=b --object secret,id=a,data=c info a.qcow2".to_string(),
            "There are two objects with the ID 'a'",
        ),
    ] {
        let text = complaint(dir.path(), &words);
        assert!(text.contains(expected), "{words}: {text}");
        for identifier in IDENTIFIERS {
            assert!(!text.contains(identifier), "{words}: {text}");
        }
    }
}

#[test]
fn help_texts_are_plain_and_complete() {
    let dir = scratch();
    let overview = line(dir.path(), "--help");
    let overview = String::from_utf8_lossy(&overview.stdout).into_owned();
    let (_, verbs) = overview.split_once("Commands:\n").unwrap();
    let (verbs, _) = verbs.split_once("\n\n").unwrap();
    for verb in verbs
        .lines()
        .filter_map(|line| line.split_whitespace().next())
    {
        let help = line(dir.path(), &format!("{verb} --help"));
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        for text in [&help, &overview] {
            let dialect = text
                .lines()
                .find(|line| line.trim_start().starts_with("Tell "));
            assert_eq!(dialect, None, "{verb}");
        }
        if verb == "serve" {
            assert!(help.contains("such as qcow2, raw or luks"), "{help}");
        }
    }
}

#[test]
fn a_name_that_is_not_utf8_is_named() {
    let dir = scratch();
    let name = OsStr::from_bytes(b"a\xff");
    // A file of the name that is left when the byte is replaced.
    fs::write(dir.path().join("a\u{fffd}"), [0; 512]).unwrap();
    for program in [
        "info",
        "serve",
        "io",
        "qemu-nbd",
        "qemu-io",
        "qemu-img info",
    ] {
        let mut command = cowslip();
        command.current_dir(dir.path()).args(program.split(' '));
        let output = outcome(command.arg(name));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{program}: {text}");
        assert!(
            text.contains("'a\u{fffd}' is not valid UTF-8"),
            "{program}: {text}"
        );
    }
}

#[test]
fn a_bitmap_is_not_merged_from_the_image_itself_under_another_name() {
    let dir = with_image();
    succeeds(dir.path(), "bitmap --add a.qcow2 b");
    fs::hard_link(dir.path().join("a.qcow2"), dir.path().join("hard")).unwrap();
    let text = complaint(dir.path(), "bitmap --merge b -b hard -F qcow2 a.qcow2 b");
    assert!(
        text.contains("'hard' is the image 'a.qcow2' itself: leave out -b"),
        "{text}"
    );
}

#[test]
fn a_relative_backing_file_of_an_export_is_refused() {
    let dir = with_image();
    let raw = dir.path().join("r.raw");
    File::create(&raw).unwrap().set_len(4 << 20).unwrap();
    let socket = dir.path().join("socket");
    let mut command = cowslip();
    command
        .args(["serve", "-f", "raw", "-k"])
        .arg(&socket)
        .arg(&raw);
    let server = Server::start(&mut command, &socket);
    let create = format!("create -f qcow2 -b a.qcow2 -F qcow2 {}", server.uri());
    let text = complaint(dir.path(), &create);
    assert!(
        text.contains("The backing file 'a.qcow2' has a relative name"),
        "{text}"
    );
    assert!(text.contains("give an absolute path"), "{text}");
}

/// As `resize`: qemu-img's `amend` shrinks without being asked twice.
#[test]
fn amend_shrinks_a_disk_only_if_that_is_allowed() {
    let dir = with_image();
    let before = fs::read(dir.path().join("a.qcow2")).unwrap();
    let text = complaint(dir.path(), "amend -o size=512k,compat=0.10 a.qcow2");
    assert!(text.contains("Use the --shrink option"), "{text}");
    assert!(fs::read(dir.path().join("a.qcow2")).unwrap() == before);
    for words in [
        "amend -o size=2M a.qcow2",
        "amend --shrink -o size=512k a.qcow2",
        "qemu-img amend -o size=256k a.qcow2",
    ] {
        let output = line(dir.path(), words);
        assert!(output.status.success(), "{words}: {output:?}");
    }
    let info = line(dir.path(), "info a.qcow2");
    assert!(
        String::from_utf8_lossy(&info.stdout).contains("(262144 bytes)"),
        "{info:?}"
    );
}

/// Of a table full of damage the text lists the first steps of each kind, JSON all of them.
#[test]
fn a_long_plan_is_summarised_for_people() {
    let dir = scratch();
    let create = "create -q -f qcow2 -o cluster_size=4k a.qcow2 1M";
    assert!(line(dir.path(), create).status.success());
    let path = dir.path().join("a.qcow2");
    let write = outcome(cowslip().args(["io", "-c", "write 0 160k"]).arg(&path));
    assert!(write.status.success(), "{write:?}");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let table = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    let beyond = 1 << 63 | 1 << 40;
    for index in 0..40 {
        file.write_all_at(&u64::to_be_bytes(beyond + index * 4096), table + index * 8)
            .unwrap();
    }
    let plan = line(dir.path(), "check --plan a.qcow2");
    let text = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert_eq!(plan.status.code(), Some(2), "{plan:?}");
    let listed = text
        .lines()
        .filter(|line| line.starts_with("Change an L2 entry"));
    assert_eq!(listed.count(), 10, "{text}");
    let rest = "And 30 more changes of L2 entries that may lose data; --json lists all\n";
    assert!(text.contains(rest), "{text}");
    let rest = "And 30 more changes of refcounts; --json lists all\n";
    assert!(text.contains(rest), "{text}");
    let plan = line(dir.path(), "check --plan --json a.qcow2");
    let steps: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    let steps = steps.as_array().unwrap();
    let of_entries = |step: &&serde_json::Value| step["possible-data-loss"].is_string();
    assert_eq!(steps.iter().filter(of_entries).count(), 40);
    assert_eq!(steps.len(), 80);
}

#[test]
fn create_offers_a_copy_by_a_verb_that_has_it() {
    let dir = with_image();
    let output = line(dir.path(), "create --reflink a.qcow2 b.qcow2");
    if output.status.success() {
        eprintln!("SKIPPED: the file system has reflinks");
        return;
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("cowslip clone --copy a.qcow2 b.qcow2"),
        "{text}"
    );
    let text = complaint(dir.path(), "clone a.qcow2 b.qcow2");
    assert!(
        text.ends_with("--copy copies the data instead.\n"),
        "{text}"
    );
}
