//! The command lines of `qemu-img`, parsed as getopt does and rewritten for a parser that differs
//! from it.
//!
//! The verbs' own parser (clap) defines the options, values and help. It differs in the errors that
//! scripts see, and in some valid lines: a value may begin with a dash, a name may be abbreviated,
//! and of several errors in a line the first one is reported, in the C library's words. So under
//! the name `qemu-img` a line is scanned here first, and passed on in an unambiguous form: options
//! by their full names, values separate, operands behind `--`.
//!
//! The tables are what qemu-img 10.0.2 accepts, which is not all that its `--help` lists, in the
//! order in which it lists them where a shortened name is ambiguous. Pure.

use clap::{Arg, Command};

use crate::cmd::deferred;
use crate::cmd::option_order::Validated;
use crate::error::CommandError;
use crate::getopt::{Found, Long, Mistake, Name, Scanner, Value};
use crate::output::{Program, print_error};

/// The options that qemu-img has for a verb; what they are is declared for the parser.
#[derive(Clone, Copy, Debug)]
struct Verb {
    name: &'static str,
    letters: &'static str,
    /// Names apart by blanks.
    longs: &'static str,
}

impl Verb {
    /// Its long options, as the parser declares them.
    fn longs(&self, parser: &Command) -> Vec<Long> {
        let declared = |name| match name {
            "help" => HELP,
            // Objects are defined as they are scanned.
            "object" => OBJECT,
            name => {
                let arg = parser.get_arguments().find(|arg| is_named(arg, name));
                let arg = arg.expect("a test compares the names with the parser's");
                Long {
                    name,
                    letter: arg.get_short(),
                    value: value_of(arg),
                }
            }
        };
        self.longs.split_whitespace().map(declared).collect()
    }
}

/// The value that an option has: one that may be left out is not qemu-img's.
fn value_of(arg: &Arg) -> Value {
    let count = arg.get_num_args().expect("its verb is built");
    match count.min_values() {
        0 => Value::None,
        _ => Value::Required,
    }
}

/// The line cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A mistake before the verb.
    Mistake(Mistake),
    /// No verb.
    NoVerb,
    /// A verb that does not exist.
    UnknownVerb(String),
    /// A mistake in what follows the verb of this name.
    MistakeOf(&'static str, Mistake),
    /// The value of an option is wrong.
    Value(CommandError),
}

impl Refusal {
    /// Complains of the line, and returns the exit code.
    pub fn report(&self, program: &Program) -> u8 {
        let name = &program.name;
        let (who, what) = match self {
            Refusal::Value(error) => return program.fail(error),
            Refusal::Mistake(mistake) => (name.clone(), mistake.to_string()),
            Refusal::NoVerb => (name.clone(), "Not enough arguments".to_string()),
            Refusal::UnknownVerb(verb) => (name.clone(), format!("Command not found: {verb}")),
            Refusal::MistakeOf(verb, mistake) => (format!("{name} {verb}"), mistake.to_string()),
        };
        print_error(&format!(
            "{who}: {what}\nTry '{who} --help' for more info\n"
        ));
        1
    }
}

const fn flag(name: &'static str, letter: char) -> Long {
    Long {
        name,
        letter: Some(letter),
        value: Value::None,
    }
}

const fn with_value(name: &'static str, letter: char) -> Long {
    Long {
        name,
        letter: Some(letter),
        value: Value::Required,
    }
}

const fn long_flag(name: &'static str) -> Long {
    Long {
        name,
        letter: None,
        value: Value::None,
    }
}

const fn long_with_value(name: &'static str) -> Long {
    Long {
        name,
        letter: None,
        value: Value::Required,
    }
}

const HELP: Long = flag("help", 'h');
const OBJECT: Long = long_with_value("object");

/// Letters of the options that stand before the verb, as getopt(3) takes them.
const STANDARD_LETTERS: &str = "hVT:";
const STANDARD: &[Long] = &[HELP, flag("version", 'V'), with_value("trace", 'T')];

/// Ours, which no name of QEMU's is short for; a verb that has not got one refuses it.
const OWN: &[Long] = &[
    Long {
        name: "progress",
        letter: Some('p'),
        value: Value::Attached,
    },
    OBJECT,
    long_with_value("backing-policy"),
    long_with_value("alloc-policy"),
    long_flag("json"),
    long_flag("limits"),
    long_flag("no-space-check"),
    long_flag("plan"),
    long_with_value("random"),
    long_with_value("rate-limit"),
    long_with_value("reflink"),
    long_flag("tell-flushes"),
    long_with_value("warm-up"),
];

const VERBS: &[Verb] = &[
    Verb {
        name: "amend",
        letters: "f:ho:pqt:",
        longs: "help quiet progress object format cache options image-opts force",
    },
    Verb {
        name: "bench",
        letters: "c:d:f:hi:no:qs:t:wS:U",
        longs: "help format image-opts cache count depth offset buffer-size step-size \
                aio native write pattern flush-interval no-drain force-share",
    },
    Verb {
        name: "bitmap",
        letters: "b:f:g:hF:",
        longs: "help object image-opts add remove clear enable disable merge granularity \
                source-file source-format",
    },
    Verb {
        name: "check",
        letters: "f:hqr:T:U",
        longs: "help quiet format cache repair output object image-opts force-share",
    },
    Verb {
        name: "commit",
        letters: "b:df:hpqr:t:",
        longs: "help quiet object format image-opts cache drop base progress rate",
    },
    Verb {
        name: "compare",
        letters: "f:hpqsF:T:U",
        longs: "help quiet object cache image-opts a-format left-format b-format \
                right-format force-share strict progress",
    },
    Verb {
        name: "convert",
        letters: "cf:hl:m:no:pqr:t:B:CF:O:S:T:UW",
        longs: "help quiet object image-opts source-image-opts source-format \
                source-cache snapshot sparse-size output-format options output-cache \
                backing backing-format force-share target-image-opts salvage \
                target-is-zero bitmaps skip-broken-bitmaps rate parallel oob-writes \
                copy-range-offloading",
    },
    Verb {
        name: "create",
        letters: "b:f:ho:quF:",
        longs: "help quiet object format backing backing-format backing-unsafe options",
    },
    Verb {
        name: "dd",
        letters: "f:hO:U",
        longs: "help object format output-format image-opts force-share",
    },
    Verb {
        name: "info",
        letters: "bf:hU",
        longs: "help format output backing-chain object image-opts force-share",
    },
    Verb {
        name: "map",
        letters: "f:hl:s:U",
        longs: "help format output object image-opts force-share start-offset max-length",
    },
    Verb {
        name: "measure",
        letters: "f:hl:o:O:U",
        longs: "help target-format format image-opts options snapshot object output size \
                force-share",
    },
    Verb {
        name: "rebase",
        letters: "b:cf:hpqt:uF:T:U",
        longs: "help quiet progress object image-opts force-share format cache compress \
                backing backing-format backing-cache backing-unsafe",
    },
    Verb {
        name: RESIZE,
        letters: "f:hq",
        longs: "help quiet object format image-opts preallocation shrink",
    },
    Verb {
        name: "snapshot",
        letters: "a:c:d:f:hlqU",
        longs: "help quiet object format image-opts force-share list apply create delete",
    },
];

/// Its second operand is a size, which may begin with a minus.
const RESIZE: &str = "resize";

/// The line, its program's name first, as `parser` reads it: the verbs are the parser's
/// subcommands. `validate` gets the verb, and each of its options when it is met.
///
/// # Errors
/// What is wrong with it.
pub fn unambiguous(
    args: &[String],
    parser: &Command,
    mut validate: impl FnMut(&str, Name, &str) -> Result<Validated, CommandError>,
) -> Result<Vec<String>, Refusal> {
    let (program, args) = args.split_first().expect("the program's name");
    let mut out = vec![program.clone()];
    let mut scanner = Scanner::new(args, STANDARD_LETTERS, STANDARD)
        .with_own(OWN)
        .up_to_an_operand();
    while let Some(found) = scanner.next_option().map_err(Refusal::Mistake)? {
        match found.name {
            Name::Letter('h') => return Ok(vec![program.clone(), "--help".to_string()]),
            Name::Letter('V') => return Ok(vec![program.clone(), "--version".to_string()]),
            _ => push(found, (parser, STANDARD), &mut out).map_err(Refusal::Mistake)?,
        }
    }
    let Some((name, rest)) = scanner.rest().split_first() else {
        return Err(Refusal::NoVerb);
    };
    let (Some(verb), Some(parser)) = (
        VERBS.iter().find(|verb| verb.name == *name),
        deferred::verb(parser, name),
    ) else {
        return Err(Refusal::UnknownVerb(name.clone()));
    };
    out.push(name.clone());
    let longs = verb.longs(&parser);
    let mut scanner = Scanner::new(rest, verb.letters, &longs).with_own(OWN);
    if verb.name == RESIZE {
        scanner = scanner.second_may_be_less();
    }
    let mistake = |mistake| Refusal::MistakeOf(verb.name, mistake);
    while let Some(found) = scanner.next_option().map_err(mistake)? {
        if found.name == Name::Letter('h') {
            return Ok([program.clone(), name.clone(), "--help".to_string()].to_vec());
        }
        let value = found.value.as_deref().unwrap_or_default();
        let validated = validate(verb.name, found.name, value).map_err(Refusal::Value)?;
        if validated == Validated::Passed {
            push(found, (&parser, &longs), &mut out).map_err(mistake)?;
        }
    }
    out.push("--".to_string());
    out.extend(scanner.operands().into_iter().map(str::to_string));
    Ok(out)
}

/// Appends an option, by a name that the parser has for it.
fn push(
    found: Found,
    (parser, longs): (&Command, &[Long]),
    out: &mut Vec<String>,
) -> Result<(), Mistake> {
    let name = found.name;
    let by_long = |long: &str| parser.get_arguments().find(|arg| is_named(arg, long));
    let arg = match name {
        Name::Long(long) => by_long(long),
        Name::Letter(letter) => {
            let same = longs.iter().filter(|long| long.letter == Some(letter));
            parser
                .get_arguments()
                .find(|arg| arg.get_short() == Some(letter))
                .or_else(|| same.map(|long| long.name).find_map(by_long))
        }
    };
    let (Some(arg), value) = (arg, found.value) else {
        return Err(match name {
            Name::Letter(letter) => Mistake::UnknownLetter(letter),
            Name::Long(long) => Mistake::UnknownLong(long.to_string()),
        });
    };
    let spelled = match (arg.get_long(), arg.get_short()) {
        (Some(long), _) => format!("--{long}"),
        (None, letter) => format!("-{}", letter.expect("an option has a name")),
    };
    out.push(match value {
        Some(value) => format!("{spelled}={value}"),
        None => spelled,
    });
    Ok(())
}

fn is_named(arg: &Arg, long: &str) -> bool {
    let others = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(long) || others.contains(&long)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    /// Returns the arguments of the parser, or the error.
    fn read(line: &str) -> String {
        let words = ["qemu-img"].into_iter().chain(line.split_whitespace());
        let words: Vec<String> = words
            .map(|word| if word == "''" { "" } else { word }.to_string())
            .collect();
        let pass = |_: &str, _, _: &str| Ok(Validated::Passed);
        let args: Vec<OsString> = words.iter().map(OsString::from).collect();
        match unambiguous(&words, &crate::QemuImgLine::declared(&args), pass) {
            Err(Refusal::Value(error)) => format!("<{error}>"),
            Ok(words) => words[1..].join(" "),
            Err(Refusal::Mistake(mistake)) => format!("<{mistake}>"),
            Err(Refusal::NoVerb) => "<no verb>".to_string(),
            Err(Refusal::UnknownVerb(name)) => format!("<no {name}>"),
            Err(Refusal::MistakeOf(verb, mistake)) => format!("<{verb}: {mistake}>"),
        }
    }

    #[test]
    fn lines_are_read_as_getopt_reads_them() {
        for (line, expected) in [
            ("info a", "info -- a"),
            ("info a -f raw", "info --format=raw -- a"),
            ("info -Ufraw a", "info --force-share --format=raw -- a"),
            ("info -f -U a", "info --format=-U -- a"),
            ("info -f -- a", "info --format=-- -- a"),
            ("info --form qcow2 -- -a", "info --format=qcow2 -- -a"),
            ("info -f '' a", "info --format= -- a"),
            (
                "map -s 1k -l =2 a",
                "map --start-offset=1k --max-length==2 -- a",
            ),
            (
                "convert --output-f raw a b",
                "convert --target-format=raw -- a b",
            ),
            (
                "convert -p --progress=json a b",
                "convert --progress --progress=json -- a b",
            ),
            ("compare --right raw a b", "compare --b-format=raw -- a b"),
            ("resize a -1M", "resize -- a -1M"),
            ("resize a -512 -q", "resize --quiet -- a -512"),
            ("resize -q a -q", "resize --quiet --quiet -- a"),
            ("resize -q", "resize --quiet --"),
            ("-T foo -- info a", "--trace=foo info -- a"),
            ("info -h --nosuch", "info --help"),
            ("check -p a", "check --progress -- a"),
            ("create --json x 1", "create --json -- x 1"),
        ] {
            assert_eq!(read(line), expected, "{line}");
        }
    }

    #[test]
    fn the_first_mistake_is_reported() {
        for (line, expected) in [
            ("", "<no verb>"),
            ("--", "<no verb>"),
            ("-T", "<option requires an argument -- 'T'>"),
            ("--foo info", "<unrecognized option '--foo'>"),
            ("foo", "<no foo>"),
            ("demo", "<no demo>"),
            ("info -f", "<info: option requires an argument -- 'f'>"),
            (
                "info --output",
                "<info: option '--output' requires an argument>",
            ),
            ("info -U=3 a", "<info: invalid option -- '='>"),
            (
                "info --force-share=3 a",
                "<info: option '--force-share' doesn't allow an argument>",
            ),
            ("info -p a", "<info: invalid option -- 'p'>"),
            ("info --plan a", "<info: unrecognized option '--plan'>"),
            ("info --js a", "<info: unrecognized option '--js'>"),
            ("info -x -h", "<info: invalid option -- 'x'>"),
            ("resize -1M a", "<resize: invalid option -- '1'>"),
            ("resize a 2M -1M", "<resize: invalid option -- '1'>"),
            ("info -1 a", "<info: invalid option -- '1'>"),
            (
                "info --o json a",
                "<info: option '--o' is ambiguous; possibilities: '--output' '--object'>",
            ),
        ] {
            assert_eq!(read(line), expected, "{line}");
        }
    }

    #[test]
    fn the_parser_has_all_that_qemu_img_has() {
        let line = crate::QemuImgLine::declared(&[]);
        let declared = line.get_subcommands().map(Command::get_name);
        let mut declared: Vec<&str> = declared.collect();
        declared.sort_unstable();
        let known: Vec<&str> = VERBS.iter().map(|verb| verb.name).collect();
        assert_eq!(declared, known);
        for verb in VERBS {
            let parser = deferred::verb(&line, verb.name).unwrap();
            let known = verb.longs(&parser);
            let letters = verb.letters.chars().filter(|letter| *letter != ':');
            let letters = letters.filter(|letter| *letter != 'h').map(Name::Letter);
            // An option with a letter is identified by it; objects are defined as they are parsed.
            let longs = known.iter();
            let longs = longs.filter(|long| long.letter.is_none() && long.name != "object");
            for name in letters.chain(longs.map(|long| Name::Long(long.name))) {
                let takes = match name {
                    Name::Letter(letter) => verb.letters.contains(&format!("{letter}:")),
                    Name::Long(long) => {
                        let found = known.iter().find(|known| known.name == long);
                        found.unwrap().value == Value::Required
                    }
                };
                let found = Found {
                    name,
                    value: takes.then(|| "1".to_string()),
                };
                let mut out = vec!["x".to_string()];
                push(found, (&parser, &known), &mut out).unwrap();
                let parsed = parser.clone().try_get_matches_from(out);
                let wrong = parsed.err().map(|error| error.to_string());
                assert_eq!(wrong, None, "{} {name:?}", verb.name);
            }
        }
    }
}
