//! Differences that are meant, each with its reason.

use crate::support::judge::Layout;

/// A line, and what came of it.
pub struct Line<'a> {
    pub words: &'a [String],
    pub theirs: &'a str,
    pub ours: &'a str,
    /// How much the images were alike before it.
    pub layout: Layout,
}

impl Line<'_> {
    /// Why the reports may differ: the first reason that fits.
    pub fn may_differ(&self) -> Option<&'static str> {
        self.first_fit(KNOWN)
    }

    /// The same of these reasons.
    pub fn first_fit(&self, reasons: &[Known]) -> Option<&'static str> {
        let fits = reasons.iter().find(|(fits, _)| fits(self));
        fits.map(|(_, why)| *why)
    }

    /// Why the files may differ, though the reports are the same.
    pub fn may_leave_others(&self) -> Option<&'static str> {
        let makes_a_file = ["create", "convert", "dd"].iter().any(|verb| self.is(verb));
        let compresses = self
            .words
            .iter()
            .any(|word| word == "-c" || word.starts_with("--c"));
        if makes_a_file && !self.both_end_with(0) {
            return Some("a target that could not be made is removed, or was not touched");
        }
        if self.is("bench") && !self.both_end_with(0) {
            return Some("writes beside the one that has failed");
        }
        if self.is("rebase") && compresses {
            return Some(
                "qemu-img 10.0.2 may damage the disk; ours is checked by a test of its own",
            );
        }
        None
    }

    pub fn both_say(&self, text: &str) -> bool {
        self.theirs.contains(text) && self.ours.contains(text)
    }

    fn is(&self, verb: &str) -> bool {
        self.words.first().is_some_and(|first| first == verb)
    }

    pub fn says(&self, theirs: &str, ours: &str) -> bool {
        self.theirs.contains(theirs) && self.ours.contains(ours)
    }

    pub fn both_end_with(&self, code: u8) -> bool {
        let end = format!("--- Some({code})");
        self.theirs.ends_with(&end) && self.ours.ends_with(&end)
    }

    /// Whether neither has done anything.
    pub fn both_fail(&self) -> bool {
        let fails = |text: &str| !text.ends_with("--- Some(0)");
        fails(self.theirs) && fails(self.ours)
    }

    /// Whether both say the same but for a text that begins so.
    fn same_around(&self, from: &str, to: fn(char) -> bool) -> bool {
        let Some(at) = self.theirs.find(from) else {
            return false;
        };
        let rest = &self.theirs[at + from.len()..];
        let after = rest.trim_start_matches(to);
        self.ours.starts_with(&self.theirs[..at]) && self.ours.ends_with(after)
    }
}

/// When a line may differ, and why.
pub type Known = (fn(&Line<'_>) -> bool, &'static str);

const KNOWN: &[Known] = &[
    (
        |line| line.same_around("#block", |sign| sign.is_ascii_digit()),
        "QEMU gives what it opens a number, where we tell the file's name",
    ),
    (
        |line| line.both_say("Could not parse the JSON options: "),
        "errors in JSON come from another parser",
    ),
    (
        |line| line.ours.contains("It is used by ") && line.both_say("Is another process using"),
        "we tell which process it is",
    ),
    (
        |line| line.is("snapshot") && line.both_say("probing guessed raw"),
        "qemu-img warns twice where it tries twice",
    ),
    (
        |line| line.both_say("error while writing at byte ") && line.both_end_with(1),
        "a piece is reported by its start, and the pieces differ",
    ),
    (
        |line| line.is("check") && line.theirs.contains("Could not open backing file: "),
        "a check does not need the backing file",
    ),
    (
        |line| {
            let changes = |word: &String| {
                let name = word.trim_start_matches('-');
                name.len() < word.len() && name.starts_with(['a', 'c', 'd'])
            };
            line.is("snapshot")
                && !line.words.iter().any(changes)
                && line.theirs.contains("Could not open backing file: ")
        },
        "a list of snapshots does not need the backing file",
    ),
    (
        |line| line.theirs.contains("short-form boolean option") && line.both_fail(),
        "QEMU's warnings of what it takes for options of no value",
    ),
    (
        |line| line.is("resize") && line.words.iter().any(|word| word == "--"),
        "qemu-img takes no file name behind --",
    ),
    (
        |line| line.theirs.contains("qcow2 header too short") && line.both_fail(),
        "we tell how long a header has to be",
    ),
    (
        |line| line.ours.contains("Cannot amend the backing file") && line.both_end_with(1),
        "of two options that cannot be amended either is reported",
    ),
    (
        |line| line.both_say("Amend options for "),
        "qemu-img ends a progress that has not begun",
    ),
    (
        |line| line.is("map") && line.both_end_with(0) && line.layout == Layout::Free,
        "what is allocated, once each program has written, is ours to choose",
    ),
    (
        |line| line.is("check") && line.says("Leaked cluster", "No errors were found"),
        "qemu-img leaks clusters of bitmaps where a change is refused",
    ),
    (
        |line| line.is("resize") && line.theirs.contains("resize: invalid option -- '"),
        "a minus begins a size wherever a size may be",
    ),
    (
        |line| line.both_say("Cannot downgrade an image with ") && line.both_fail(),
        "we tell which features version 2 has not got",
    ),
    (
        |line| line.is("rebase") && line.ours.contains("the backing chain would be a loop"),
        "qemu-img makes a chain that can never be opened again",
    ),
    (
        |line| line.says("Could not create", "Unsupported preallocation mode") && line.both_fail(),
        "what can be said without the file is said first",
    ),
    (
        |line| line.ours.contains("Failed to get \"write\" lock") && !line.theirs.contains("lock"),
        "no image is overwritten while it is read, -U or not",
    ),
    (
        |line| line.says("does not support O_DIRECT", "O_DIRECT on this file system"),
        "a directory, asked for its alignment",
    ),
    (
        |line| line.theirs.ends_with("--- Some(124)") && line.ours.ends_with("--- Some(0)"),
        "an amendment of qemu-img's that does not end",
    ),
    (
        |line| {
            line.is("convert") && line.ours.contains("Failed to load snapshot") && line.both_fail()
        },
        "of several sources each is opened with what is read of it",
    ),
    (
        |line| {
            line.says(
                "Failed to grow the L1 table",
                "New image size must be positive",
            )
        },
        "a size below nothing",
    ),
    (
        |line| line.ours.contains("Unknown protocol 'json'") && line.both_fail(),
        "a backing file has a file's name",
    ),
    (
        |line| line.both_say("does not accept value ") && line.both_fail(),
        "of two options with a wrong value either is reported",
    ),
    (
        |line| line.theirs.ends_with("--- None"),
        "an assertion of qemu-img's",
    ),
    (
        |line| {
            line.words
                .iter()
                .any(|word| word.contains("help") && word.contains(",,"))
        },
        "a comma in a value is none between options",
    ),
    (
        |line| line.ours.contains(" is corrupt: ") && line.both_end_with(1),
        "we tell which file of a chain is damaged, and where",
    ),
];
