//! Command lines of qemu-io: which image it opens and how. What its shell's commands do is asked by
//! `io_differential.rs`; here they are few, and come in any number.

use std::path::Path;
use std::process::{Command, Output};

use super::cast::Cast;
use super::known::{Known, Line};
use super::lines::Takes::{Aio, Cache, Format, Made, Nothing, Of};
use super::lines::{Choice, Lines, OBJECT};
use super::{LINES, expect_equal, quoted, run_many, run_some};
use crate::support::golden;
use crate::support::judge::{Layout, comparable};
use crate::support::twins::{Verdict, compare_files, twins};
use crate::support::{peers_are_installed, scratch_beside};

/// Cases of an ordinary test run: some seconds.
const CASES: u64 = 48;

const DISCARDS: &[&str] = &["unmap", "ignore", "on", "off", "foo", ""];

pub const TRACES: &[&str] = &["foo", "enable=foo", "-foo", "x=y", "help", ""];

const OPTIONS: &[Choice] = &[
    (&["-c", "--cmd"], Made(Lines::io_command), 1),
    (&["-c", "--cmd"], Made(Lines::io_command), 2),
    (&["-c", "--cmd"], Made(Lines::io_command), 2),
    (&["-f", "--format"], Format, 3),
    (&["-r", "--read-only"], Nothing, 5),
    (&["-s", "--snapshot"], Nothing, 10),
    (&["-n", "--nocache"], Nothing, 12),
    (&["-C", "--copy-on-read"], Nothing, 10),
    (&["-m", "--misalign"], Nothing, 12),
    (&["-k", "--native-aio"], Nothing, 25),
    (&["-t", "--cache"], Cache, 8),
    (&["-i", "--aio"], Aio, 12),
    (&["-d", "--discard"], Of(DISCARDS), 6),
    (&["-U", "--force-share"], Nothing, 10),
    (&["-T", "--trace"], Of(TRACES), 40),
    (&["-v"], Nothing, 60),
    (&["-o"], Of(&["driver=qcow2"]), 60),
    (&["-h", "--help"], Nothing, 80),
    (&["-V", "--version"], Nothing, 80),
    OBJECT,
];

/// Lines of the shell. None of which the outcome depends on time (`aio_read`), or is ours to choose
/// (discards of less than a sector, compressed writes over what is stored).
const COMMANDS: &[&str] = &[
    "read 0 4k",
    "read -P 0 0 512",
    "read -P 7 100k 1000",
    "read -v 1000 20",
    "read 3M 512",
    "read 0 -1",
    "read",
    "readv 0 512 1k",
    "write 0 4k",
    "write -P 7 0 64k",
    "write -P 9 100k 1000",
    "write -P 3 999k 1k",
    "write -z 64k 64k",
    "write -z -u 0 128k",
    "write -n 0 64k",
    "write -f -P 4 4k 4k",
    "writev -P 6 1k 512 512",
    "aio_flush",
    "discard 0 64k",
    "flush",
    "length",
    "map",
    "alloc 0 128k",
    "info",
    "truncate 2M",
    "truncate 100k",
    "sleep 1",
    "close",
    "quit",
    "q",
    "open base.qcow2",
    "open -r img.qcow2",
    "open -s -o driver=qcow2 img.qcow2",
    "open -o driver=raw a.raw",
    "open nosuch",
    "open",
    "reopen -r",
    "reopen -w",
    "reopen -c none",
    "reopen -o cache.no-flush=on",
    "foo",
    "",
    " ",
    "# read 0 1",
    "help nosuch",
    "read -x 0 1",
];

/// Options that describe an image besides its name.
const IMAGE_OPTIONS: &[&str] = &[
    "",
    "",
    "",
    ",read-only=on",
    ",read-only=off",
    ",cache.direct=on",
    ",cache.no-flush=on",
    ",cache.direct=x",
    ",discard=unmap",
    ",discard=foo",
    ",detect-zeroes=on",
    ",detect-zeroes=unmap",
    ",detect-zeroes=foo",
    ",detect-zeroes=unmap,discard=unmap",
    ",lazy-refcounts=on",
    ",l2-cache-size=64k",
    ",cache-size=1k,l2-cache-size=2k",
    ",backing=",
    ",backing.driver=raw",
    ",backing.driver=qcow2,backing.file.filename=base.qcow2",
    ",backing.file.filename=a.raw",
    ",overlap-check=all",
    ",pass-discard-other=on",
    ",discard-no-unref=on",
    ",force-share=on",
    ",force-share=x",
    ",file.locking=off",
    ",file.locking=foo",
    ",file.driver=file",
    ",file.aio=threads",
    ",file.cache.direct=off",
    ",encrypt.format=luks",
    ",encrypt.format=aes,encrypt.key-secret=s0",
    ",encrypt.key-secret=s0",
    ",node-name=n",
    ",auto-read-only=on",
    ",foo=1",
    ",offset=512",
    ",offset=4k,size=64k",
    ",size=x",
    ",copy-on-read=on",
    ",read-only",
    ",",
];

impl Lines {
    /// A line of the shell.
    pub fn io_command(&mut self) -> String {
        (*self.rng.pick(COMMANDS)).to_string()
    }

    /// A list of options that names an image.
    pub fn image_options(&mut self) -> String {
        let (format, name) = self.format_and_name();
        let more = *self.rng.pick(IMAGE_OPTIONS);
        format!("driver={format},file.filename={name}{more}")
    }

    /// A command line of qemu-io.
    fn qemu_io(&mut self) -> Vec<String> {
        let mut parts = self.options(OPTIONS);
        let mut operands = match self.rng.below(16) {
            0 => Vec::new(),
            1..=4 => {
                parts.push(vec!["--image-opts".to_string()]);
                vec![self.image_options()]
            }
            5 => vec![self.image_options()],
            _ => vec![self.image()],
        };
        if self.rng.once_in(40) {
            operands.push(self.image());
        }
        self.joined(parts, operands)
    }
}

/// Differences that are meant, of all programs that are no qemu-img.
pub const KNOWN: &[Known] = &[
    (
        |line| line.both_say(" 10.0.2 (") && line.both_end_with(0),
        "each program tells its own version",
    ),
    (
        |line| {
            line.ours
                .contains("Temporary snapshots (-s) are supported of image files")
        },
        "what -s is not done of is refused by name",
    ),
    (
        |line| {
            line.ours
                .contains("A temporary snapshot (-s) cannot be reopened")
        },
        "qemu-io looks for the file that it has removed, or begins another",
    ),
    (
        |line| {
            line.ours
                .contains("force-share=on can only be used with read-only images")
        },
        "-U goes with nothing that is written: neither with -s, nor with reopen -w",
    ),
    (
        |line| {
            let mistakes = [
                "force-share=on can only be used with read-only images",
                "-U conflicts with image options",
                "Can't use copy-on-read on read-only device",
                "aio=native was specified",
            ];
            let tells =
                |mistake: &&str| line.theirs.contains(*mistake) || line.ours.contains(*mistake);
            line.both_fail() && mistakes.iter().any(tells)
        },
        "of two mistakes that contradict an image either is reported",
    ),
    (
        |line| {
            line.theirs.contains("    bitmaps:\n")
                && line.words.iter().any(|word| word.contains("info"))
        },
        "`info` of the shell lists no bitmaps",
    ),
    (
        |line| {
            let has = |letter: &str, long: &str| {
                let is_it = |word: &String| word == letter || word.starts_with(long);
                line.words.iter().any(is_it)
            };
            has("-s", "--sn") && has("-r", "--re")
        },
        "-s of what is only read makes no temporary image",
    ),
    (
        |line| line.theirs.contains("short-form boolean option"),
        "QEMU's warnings of options without a value",
    ),
    (
        |line| line.says("qcow2_writev_start_req", "") && line.both_end_with(0),
        "there are no trace events",
    ),
];

fn qemu_io() -> Command {
    Command::new("qemu-io")
}

/// Returns the output of a program, without its name and version.
fn normalized(output: &Output, layout: Layout) -> String {
    let text = comparable(output, layout);
    let parts = text.find("Usage: qemu-io").zip(text.find("--- errors"));
    match parts {
        Some((start, end)) if start < end => {
            format!("{}<usage>\n{}", &text[..start], &text[end..])
        }
        _ => text,
    }
}

/// Whether a line may write over the tables of an image: what checkers say of what is left of it is
/// no contract.
fn overwrites_an_image(words: &[String]) -> bool {
    let has = |part: &str| words.iter().any(|word| word.contains(part));
    has("raw") && has(".qcow2")
}

fn check_case(seed: u64, cast: &Cast, directory: &Path) -> Verdict {
    let (theirs, ours) = twins(
        &cast.directory,
        directory,
        [qemu_io, || golden::our("qemu-io")],
    );
    let mut generator = Lines::new(seed);
    let mut layout = Layout::Equal;
    let mut lines = String::new();
    for _ in 0..LINES {
        let words = generator.qemu_io();
        lines += &format!("  qemu-io {}\n", quoted(&words));
        let (expected, got) = (theirs.run(&words), ours.run(&words));
        // A line may write before it asks what is allocated.
        let asks = |word: &String| ["map", "alloc"].iter().any(|verb| word.contains(verb));
        let asked = words.iter().any(asks);
        let compared_as = if asked { Layout::Free } else { layout };
        let line = Line {
            words: &words,
            theirs: &normalized(&expected, compared_as),
            ours: &normalized(&got, compared_as),
            layout,
        };
        let compared = match line.theirs == line.ours {
            false if line.may_differ().or(line.first_fit(KNOWN)).is_some() => return Ok(()),
            false => Err(format!(
                "qemu-io says:\n{}\nours:\n{}\n",
                line.theirs, line.ours
            )),
            true => compare_files(&theirs, &ours, &mut layout),
        };
        if compared.is_err() && line.theirs == line.ours && overwrites_an_image(&words) {
            return Ok(());
        }
        compared.map_err(|why| format!("seed {seed}:\n{}{lines}{why}", cast.log))?;
    }
    Ok(())
}

/// Lines that once did something else than qemu-io's, run one after the other on the same files.
const MENDED: &str = r#"
-T x=y -c length a.raw
--b=any a.raw
-f foo ''
-f raw ''
-T foo -t foo a.raw
-i native a.raw nosuch
-i native nosuch
-i native -c length a.raw
-f qcow2 --image-opts a b
-c length odd.raw
-C -r nosuch
-C -r -c length a.raw
-C -s -c read_0_4k over.qcow2
-c reopen_-r a.raw
--image-opts -c length driver=raw,file.filename=a.raw,lazy-refcounts=on
--image-opts -c length driver=raw,file.filename=a.raw,file.foo=1
--image-opts -c length driver=raw,file.filename=a.raw,file.aio=foo
--image-opts -c length driver=raw,file.filename=a.raw,file.aio=native
--image-opts -c length driver=raw,file.filename=a.raw,file.aio=threads,file.cache.direct=off
--image-opts -c length driver=raw,file.filename=a.raw,file.read-only=on
--image-opts -c length driver=raw,file.filename=a.raw,file.locking=foo
--image-opts -c length driver=raw,file.filename=a.raw,backing.driver=raw
--image-opts -c length driver=raw,file.filename=a.raw,detect-zeroes=foo
--image-opts -c length driver=qcow2,file.filename=img.qcow2,foo=1
--image-opts -c length driver=qcow2,file.filename=img.qcow2,size=x
--image-opts -c length driver=qcow2,file.filename=nosuch,foo=1
--image-opts -c length driver=qcow2,file.filename=a.raw,foo=1
--image-opts -c length driver=qcow2,file.filename=img.qcow2,overlap-check=foo
--image-opts -c length driver=qcow2,file.filename=img.qcow2,pass-discard-other=x
--image-opts -c length driver=qcow2,file.filename=img.qcow2,node-name=1
--image-opts -c length driver=qcow2,file.filename=img.qcow2,backing=
--image-opts -c length driver=qcow2,file.filename=base.qcow2,backing.driver=raw
--image-opts -r -c read_-v_0_16 driver=qcow2,file.filename=over.qcow2,backing.file.filename=base.qcow2
--image-opts -c length driver=qcow2,file.filename=v2.qcow2,discard-no-unref=on
--image-opts -c length driver=qcow2,file.filename=img.qcow2,encrypt.key-secret=s0
--image-opts -c length driver=qcow2,file.filename=img.qcow2,encrypt.format=aes,encrypt.key-secret=s0
--image-opts -c length driver=qcow2,file.filename=img.qcow2,encrypt.format=luks
--image-opts -r -c write_0_4k driver=qcow2,file.filename=img.qcow2,read-only=off
--image-opts -C -c length driver=qcow2,file.filename=img.qcow2,read-only=on
"#;

#[test]
fn lines_of_qemu_io_that_once_differed_differ_no_more() {
    let Some(directory) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let cast = Cast::make(directory.path().join("cast"), 0);
    let twins = twins(
        &cast.directory,
        directory.path(),
        [qemu_io, || golden::our("qemu-io")],
    );
    // An underscore is a blank in a word.
    let words = |line| {
        let words = golden::words(line).into_iter();
        words.map(|word| word.replace('_', " ")).collect()
    };
    expect_equal(MENDED, twins, words, normalized);
}

#[test]
fn lines_of_qemu_io_do_what_qemu_ios_do() {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        run_some(check_case, CASES);
    }
}

/// Differences beyond the seeds of an ordinary run: `cargo test --test command cli_differential --
/// --ignored`.
#[test]
#[ignore = "takes minutes"]
fn many_lines_of_qemu_io_do_what_qemu_ios_do() {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        run_many(check_case, 4000);
    }
}
