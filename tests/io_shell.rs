//! The output of `cowslip io` under the name `qemu-io`: golden texts taken from qemu-io 10.0.2, and
//! many lines compared with the installed one.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::io::{PipeReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::golden::{our_io, timeless};
use crate::support::{cowslip, outcome, run, scratch, scratch_beside, succeeds};

/// An image of 1 MiB whose first 64 KiB are 0xcd.
fn make_image(directory: &Path) {
    succeeds(directory, "create -q -f qcow2 a.qcow2 1M");
    run(our_io()
        .current_dir(directory)
        .args(["-f", "qcow2", "-c", "write -q 0 64k", "a.qcow2"]));
}

/// Standard output, standard error, exit status.
fn streams(output: &Output) -> (String, String, Option<i32>) {
    (
        timeless(&output.stdout),
        String::from_utf8_lossy(&output.stderr).into_owned(),
        output.status.code(),
    )
}

/// Runs lines with `-c` on a fresh image.
fn run_lines(lines: &[&str]) -> (String, String, Option<i32>) {
    let directory = scratch();
    make_image(directory.path());
    let mut command = our_io();
    command
        .current_dir(directory.path())
        .args(["-f", "qcow2", "a.qcow2"]);
    for line in lines {
        command.args(["-c", line]);
    }
    streams(&outcome(command.stdin(Stdio::null())))
}

/// Starts a program with both streams in one pipe.
fn in_one_pipe(command: &mut Command, input: &str) -> String {
    let (mut reader, writer): (PipeReader, _) = std::io::pipe().unwrap();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(writer.try_clone().unwrap())
        .stderr(writer)
        .spawn()
        .unwrap();
    // The command holds the other ends of the pipe.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    let mut text = Vec::new();
    reader.read_to_end(&mut text).unwrap();
    child.wait().unwrap();
    timeless(&text)
}

#[test]
fn requests_are_reported_as_qemu_io_reports_them() {
    let (out, err, code) = run_lines(&[
        "write -P 0x61 1000 600",
        "read -v 1000 20",
        "read -P 0x61 1000 600",
        "read -P 1 -s 10 1000 600",
        "readv 0 512 1k 7",
        "write -q 0 512",
        "write -C 0 512",
        "discard 64k 64k",
        "write -z -u 128k 64k",
        "aio_write 0 1k 1k",
        "aio_flush",
        "alloc 0 1M",
        "map",
        "length",
    ]);
    assert_eq!(
        out,
        "wrote 600/600 bytes at offset 1000
600 bytes, 1 ops;
000003e8:  61 61 61 61 61 61 61 61 61 61 61 61 61 61 61 61  aaaaaaaaaaaaaaaa
000003f8:  61 61 61 61  aaaa
read 20/20 bytes at offset 1000
20 bytes, 1 ops;
read 600/600 bytes at offset 1000
600 bytes, 1 ops;
Pattern verification failed at offset 1010, 590 bytes
read 600/600 bytes at offset 1000
600 bytes, 1 ops;
read 1543/1543 bytes at offset 0
1.507 KiB, 1 ops;
512,1,...
discard 65536/65536 bytes at offset 65536
64 KiB, 1 ops;
wrote 65536/65536 bytes at offset 131072
64 KiB, 1 ops;
wrote 2048/2048 bytes at offset 0
2 KiB, 1 ops;
131072/1048576 bytes allocated at offset 0 bytes
64 KiB (0x10000) bytes     allocated at offset 0 bytes (0x0)
64 KiB (0x10000) bytes not allocated at offset 64 KiB (0x10000)
64 KiB (0x10000) bytes     allocated at offset 128 KiB (0x20000)
832 KiB (0xd0000) bytes not allocated at offset 192 KiB (0x30000)
1 MiB
"
    );
    assert_eq!(err, "");
    assert_eq!(code, Some(1), "a pattern did not match");
}

#[test]
fn what_cannot_be_done_is_told_on_the_stream_of_qemu_io() {
    let (out, err, code) = run_lines(&[
        "foo",
        "read 1M 1",
        "write x 1",
        "write 0",
        "write -x 0 512",
        "write 0 3G",
        "truncate 7",
        "open b",
        "close",
        "length",
    ]);
    assert_eq!(
        out,
        "read failed: Input/output error
Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- x
write [-bcCfnqruz] [-P pattern | -s source_file] off len -- writes a number of bytes at a specified offset
length cannot exceed 2147483136 without -n, given 3G
"
    );
    assert_eq!(
        err,
        "command \"foo\" not found
bad argument count 1 to write, expected at least 2 arguments
write: invalid option -- 'x'
qemu-io: The new size must be a multiple of 512
qemu-io: file open already, try 'help close'
no file open, try 'help open'
"
    );
    assert_eq!(code, Some(1));
}

#[test]
fn started_requests_fail_no_command() {
    let (out, _, code) = run_lines(&["aio_write 1M 512", "aio_read -P 1 0 512", "aio_flush"]);
    assert!(
        out.contains("aio_write failed: Input/output error\n"),
        "{out}"
    );
    assert!(out.contains("Pattern verification failed at offset 0, 512 bytes\n"));
    assert_eq!(code, Some(0));
}

/// `aio_discard`, which qemu-io 10.0.2 does not have yet; the texts are those of 10.0.13.
#[test]
fn started_discards_are_reported_as_a_newer_qemu_io_reports_them() {
    let (out, err, code) = run_lines(&[
        "aio_discard 0 32k",
        "aio_flush",
        "aio_discard -q 32k 32k",
        "aio_discard -C 0 512",
        "aio_flush",
        "aio_discard 512k 1M",
        "aio_flush",
    ]);
    assert_eq!(
        out,
        "discarded  32768/32768 bytes at offset 0
32 KiB, 1 ops;
512,1,...
aio_discard failed: Input/output error
"
    );
    assert_eq!((&*err, code), ("", Some(0)));
    let (out, err, code) = run_lines(&[
        "aio_discard 0",
        "aio_discard 0 1 2",
        "aio_discard x 1",
        "help aio_discard",
    ]);
    assert_eq!(
        out,
        "aio_discard [-Cq] off len -- asynchronously discards a number of bytes
Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- x
aio_discard [-Cq] off len -- asynchronously discards a number of bytes

 asynchronously discards a range of bytes from the given offset

 Example:
 'aio_discard 512 1k' - discards 1 kilobyte from 512 bytes into the file

 Discards a segment of the currently open file.
 -C, -- report statistics in a machine parsable format
 -q, -- quiet mode, do not show I/O statistics
 The discard is performed asynchronously and the aio_flush command must be
 used to ensure all outstanding aio requests have been completed.
 Note that due to its asynchronous nature, this command will be
 considered successful once the request is submitted, independently
 of potential I/O errors.

"
    );
    assert_eq!(
        err,
        "bad argument count 1 to aio_discard, expected at least 2 arguments\n"
    );
    assert_eq!(code, Some(1));
}

#[test]
fn an_image_opened_for_reading_is_not_written() {
    let directory = scratch();
    make_image(directory.path());
    let before = std::fs::read(directory.path().join("a.qcow2")).unwrap();
    let output = outcome(our_io().current_dir(directory.path()).args([
        "-r",
        "-c",
        "write 0 1",
        "-c",
        "discard 0 1",
        "-c",
        "truncate 2M",
        "-c",
        "read -q 0 1",
        "a.qcow2",
    ]));
    let read_only = "qemu-io: Block node is read-only\n";
    assert_eq!(
        streams(&output),
        (String::new(), read_only.repeat(3), Some(1))
    );
    assert_eq!(
        std::fs::read(directory.path().join("a.qcow2")).unwrap(),
        before
    );
}

#[test]
fn the_prompt_comes_before_each_line_and_at_the_end() {
    let directory = scratch();
    make_image(directory.path());
    let mut command = our_io();
    command.current_dir(directory.path()).arg("a.qcow2");
    assert_eq!(
        in_one_pipe(&mut command, "length\n\nfoo\nread 0 4\n"),
        "qemu-io> 1 MiB\nqemu-io> qemu-io> command \"foo\" not found\n\
         qemu-io> read 4/4 bytes at offset 0\n4 bytes, 1 ops;\nqemu-io> "
    );
    assert_eq!(in_one_pipe(&mut command, "quit\nlength\n"), "qemu-io> ");
}

#[test]
fn with_commands_on_the_line_output_waits_in_its_buffer_as_qemu_ios_does() {
    let directory = scratch();
    make_image(directory.path());
    let mut command = our_io();
    command
        .current_dir(directory.path())
        .args(["-c", "length", "-c", "foo", "-c", "length", "a.qcow2"]);
    assert_eq!(
        in_one_pipe(&mut command, ""),
        "command \"foo\" not found\n1 MiB\n1 MiB\n"
    );
}

#[test]
fn a_raised_signal_ends_the_process_behind_the_output_so_far() {
    use std::os::unix::process::ExitStatusExt;
    let directory = scratch();
    make_image(directory.path());
    let output = outcome(our_io().current_dir(directory.path()).args([
        "-c",
        "length",
        "-c",
        "sigraise 9",
        "-c",
        "length",
        "a.qcow2",
    ]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1 MiB\n");
    assert_eq!(output.status.signal(), Some(9));
}

#[test]
fn a_bad_command_line_opens_nothing() {
    for (args, expected) in [
        (
            &["--nosuch"][..],
            "qemu-io: unrecognized option '--nosuch'\n",
        ),
        (&["-t", "foo", "x"], "qemu-io: Invalid cache option: foo\n"),
        (
            &["-d", "foo", "x"],
            "qemu-io: Invalid discard option: foo\n",
        ),
        (&["-i", "foo", "x"], "qemu-io: Invalid aio option: foo\n"),
        (
            &["-U", "x"],
            "qemu-io: can't open device x: force-share=on can only be used with read-only images\n",
        ),
        (
            &["nosuch"],
            "qemu-io: can't open device nosuch: Could not open 'nosuch': No such file or directory\n",
        ),
        (
            &["-f", "foo", "x"],
            "qemu-io: can't open device x: Unknown driver 'foo'\n",
        ),
        (
            &["--image-opts", "driver=qcow2,file.filename=nosuch"],
            "qemu-io: can't open: Could not open 'nosuch': No such file or directory\n",
        ),
        (
            &["-s", "null-co://"],
            "qemu-io: can't open device null-co://: Temporary snapshots (-s) are supported of image files, without \
             filters, servers and options of the image's own\n",
        ),
    ] {
        let directory = scratch();
        let output = outcome(
            our_io()
                .current_dir(directory.path())
                .args(args)
                .stdin(Stdio::null()),
        );
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
    }
}

/// Lines whose whole effect is text; each runs alone on a twin of one image.
const LINES: &str = include_str!("io_shell_lines.txt");

#[test]
fn single_lines_say_what_qemu_io_says() {
    let Some(directory) = scratch_beside(&["qemu-io"]) else {
        return;
    };
    make_image(directory.path());
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("pattern"), "abc").unwrap();
    std::fs::write(at("empty"), "").unwrap();
    let mut differing = Vec::new();
    for line in LINES.lines() {
        let mut said = Vec::new();
        for program in [Command::new("qemu-io"), our_io()] {
            std::fs::copy(at("a.qcow2"), at("twin.qcow2")).unwrap();
            let mut program = program;
            program
                .current_dir(directory.path())
                .args(["-f", "qcow2", "-c", line, "-c", "length", "twin.qcow2"])
                .stdin(Stdio::null());
            said.push(streams(&outcome(&mut program)));
        }
        if !said[0].0.contains("aio_discard") {
            // A command of newer ones, in the list of all.
            let lines = said[1].0.split_inclusive('\n');
            let known = lines.filter(|line| !line.starts_with("aio_discard "));
            said[1].0 = known.collect();
        }
        if said[0] != said[1] {
            differing.push(format!(
                "{line}\n  qemu-io: {:?}\n  ours: {:?}",
                said[0], said[1]
            ));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn what_is_written_above_a_temporary_snapshot_is_gone_with_it() {
    let (directory, temporary) = (scratch(), scratch());
    let dir = directory.path();
    for format in ["qcow2", "raw"] {
        run(cowslip()
            .current_dir(dir)
            .args(["create", "-q", "-f", format, "image", "1M"]));
        run(our_io()
            .current_dir(dir)
            .args(["-f", format, "-c", "write -P 1 0 64k", "image"]));
        let before = std::fs::read(dir.join("image")).unwrap();
        let write = "write -P 2 4k 8k";
        let reads = [
            "read -P 1 0 4k",
            "read -P 2 4k 8k",
            "read -P 1 12k 52k",
            "read -P 0 64k 960k",
        ];
        let commands = [write]
            .into_iter()
            .chain(reads)
            .flat_map(|command| ["-c", command]);
        let io = our_io()
            .current_dir(dir)
            .env("TMPDIR", temporary.path())
            .args(["-s", "-f", format])
            .args(commands)
            .arg("image")
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&io.stdout);
        assert!(
            io.status.success() && !printed.contains("failed"),
            "{format}: {io:?}"
        );
        assert_eq!(
            std::fs::read(dir.join("image")).unwrap(),
            before,
            "{format}"
        );
        assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
        std::fs::remove_file(dir.join("image")).unwrap();
    }
    let refused = outcome(
        our_io()
            .current_dir(dir)
            .env("TMPDIR", dir.join("nowhere"))
            .args(["-s", "-f", "raw", "-c", "read 0 512", "/dev/null"]),
    );
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}
