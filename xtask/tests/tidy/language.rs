//! The language of comments, messages and documents: plain English with the field's terms. Words
//! that turn files into people ("the file is told"), and doc comments without a subject ("What is
//! read"), are findings.
//!
//! Names in code are not read, only prose: comments, literals, and the documents.

use super::{Source, expect_none, has_word, pages, sources};

/// Words of the old dialect. They are looked for in lower case, as words of their own.
const BANNED: [&str; 9] = [
    "told", "tells of", "whoever", "anew", "heard", "judged", "judges", "so many", "somebody",
];
/// First words of doc comments that are clauses without a noun.
const BEGINNINGS: [&str; 3] = ["What", "Who", "Whoever"];
/// The files of this rule, which name the words.
const RULE: &str = "xtask/tests/tidy/";

/// A passage that may have a banned word.
struct Exception {
    /// The beginning of the paths of its files.
    path: &'static str,
    /// The whole passage: a literal without its quotes.
    passage: &'static str,
    why: &'static str,
}

const KEY: &str = "a key of results in JSON, which published documents have";
const EXCEPTIONS: &[Exception] = &[
    Exception {
        path: "crates/bench/src/",
        passage: "told",
        why: KEY,
    },
    Exception {
        path: "crates/bench/src/",
        passage: "filesystem-told",
        why: KEY,
    },
    Exception {
        path: "tests/bench.rs",
        passage: "told",
        why: KEY,
    },
    Exception {
        path: "tests/report.rs",
        passage: "told",
        why: KEY,
    },
    Exception {
        path: "tests/report.rs",
        passage: "filesystem-told",
        why: KEY,
    },
];

/// Folders that are not clean yet, and their number of findings, which may only go down.
const RATCHET: &[(&str, usize)] = &[];

/// Kind of a passage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Comment,
    DocComment,
    Literal,
    Paragraph,
}

/// A piece of prose: successive lines of comments of one kind, a literal, or a paragraph.
#[derive(Debug)]
struct Passage {
    kind: Kind,
    /// Its first line, from 1.
    line: usize,
    /// Its words, with one space between them.
    text: String,
}

impl Passage {
    fn new(kind: Kind, line: usize, text: &str) -> Passage {
        let words: Vec<&str> = text
            .split_whitespace()
            .filter(|word| *word != "\\")
            .collect();
        Passage {
            kind,
            line,
            text: words.join(" "),
        }
    }

    /// The banned words and the beginning that it has.
    fn findings(&self) -> Vec<&'static str> {
        let lower = self.text.to_lowercase();
        let words = BANNED.into_iter().filter(|word| has_word(&lower, word));
        let first = self.text.split(|c: char| !c.is_alphanumeric()).next();
        let is_doc = self.kind == Kind::DocComment;
        let begins = |beginning: &&str| is_doc && first == Some(*beginning);
        words.chain(BEGINNINGS.into_iter().filter(begins)).collect()
    }
}

/// Reads the comments and literals of Rust code.
struct Reader<'a> {
    rest: &'a str,
    line: usize,
    passages: Vec<Passage>,
    /// Marker and lines of the comment that the last line was part of.
    comment: Option<(&'a str, usize, String)>,
}

impl<'a> Reader<'a> {
    fn passages(code: &'a str) -> Vec<Passage> {
        let mut reader = Reader {
            rest: code,
            line: 1,
            passages: Vec::new(),
            comment: None,
        };
        while !reader.rest.is_empty() {
            reader.step();
        }
        reader.end_comment();
        reader.passages
    }

    /// Takes the next `len` bytes.
    fn take(&mut self, len: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        self.line += taken.matches('\n').count();
        taken
    }

    /// Takes up to the end of `end`, or everything.
    fn take_past(&mut self, end: &str) -> &'a str {
        let at = self.rest.find(end);
        self.take(at.map_or(self.rest.len(), |at| at + end.len()))
    }

    fn step(&mut self) {
        let Some(first) = self.rest.chars().next() else {
            return;
        };
        if self.rest.starts_with("//") {
            return self.line_comment();
        }
        if first.is_whitespace() {
            self.take(first.len_utf8());
            return;
        }
        self.end_comment();
        let line = self.line;
        if self.rest.starts_with("/*") {
            let text = self.take_past("*/");
            self.passages.push(Passage::new(Kind::Comment, line, text));
        } else if let Some(hashes) = raw_hashes(self.rest) {
            self.take_past("\"");
            let text = self.take_past(&format!("\"{hashes}"));
            let text = &text[..text.len().saturating_sub(1 + hashes.len())];
            self.passages.push(Passage::new(Kind::Literal, line, text));
        } else if first == '"' {
            self.literal();
        } else if first == '\'' {
            self.take(char_len(self.rest));
        } else {
            // Names are taken whole, so that the `r` that ends one begins no literal.
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            let len = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
            self.take(len.max(first.len_utf8()));
        }
    }

    /// A comment up to the end of its line. It continues the one of the line above.
    fn line_comment(&mut self) {
        let line = self.line;
        let text = self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
        let marker = ["///", "//!", "//"]
            .into_iter()
            .find(|marker| text.starts_with(marker))
            .expect("a comment begins with its marker");
        let text = &text[marker.len()..];
        match &mut self.comment {
            Some((of, first, lines)) if *of == marker && *first + lines.lines().count() == line => {
                lines.push_str(text);
                lines.push('\n');
            }
            _ => {
                self.end_comment();
                self.comment = Some((marker, line, format!("{text}\n")));
            }
        }
    }

    fn end_comment(&mut self) {
        if let Some((marker, line, text)) = self.comment.take() {
            let kind = match marker {
                "//" => Kind::Comment,
                _ => Kind::DocComment,
            };
            self.passages.push(Passage::new(kind, line, &text));
        }
    }

    fn literal(&mut self) {
        let line = self.line;
        let mut is_escaped = false;
        let end = self.rest[1..].find(|c| {
            let ends = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            ends
        });
        let text = self.take(end.map_or(self.rest.len(), |end| end + 2));
        let text = text.trim_matches('"').replace("\\n", " ");
        self.passages.push(Passage::new(Kind::Literal, line, &text));
    }
}

/// The hashes of a raw literal, if one begins here.
fn raw_hashes(code: &str) -> Option<&str> {
    let hashes = ["r", "br", "cr"]
        .into_iter()
        .find_map(|start| code.strip_prefix(start))?;
    let len = hashes.find(|c| c != '#')?;
    hashes[len..].starts_with('"').then(|| &hashes[..len])
}

/// Length of a character's literal, or of the quote that begins a lifetime.
fn char_len(code: &str) -> usize {
    let inner = &code[1..];
    if inner.starts_with('\\') {
        return inner[2..].find('\'').map_or(code.len(), |at| at + 4);
    }
    let mut chars = inner.chars();
    match (chars.next(), chars.next()) {
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 1,
    }
}

/// The paragraphs of a document.
fn paragraphs(text: &str) -> Vec<Passage> {
    let mut passages = Vec::new();
    let mut begun: Option<(usize, String)> = None;
    for (index, line) in text.lines().chain([""]).enumerate() {
        if line.trim().is_empty() {
            if let Some((first, text)) = begun.take() {
                passages.push(Passage::new(Kind::Paragraph, first, &text));
            }
            continue;
        }
        let (_, text) = begun.get_or_insert_with(|| (index + 1, String::new()));
        text.push_str(line);
        text.push('\n');
    }
    passages
}

/// A file's findings: the first lines of their passages, and the words.
fn findings(passages: &[Passage]) -> Vec<(usize, &'static str)> {
    let of = |passage: &Passage| {
        let line = passage.line;
        passage.findings().into_iter().map(move |word| (line, word))
    };
    passages.iter().flat_map(of).collect()
}

/// Removes the passages that are exceptions, and marks these as used.
fn without_exceptions(source: &Source, used: &mut [bool]) -> Vec<Passage> {
    let mut passages = Reader::passages(&source.text);
    passages.retain(|passage| {
        let exception = EXCEPTIONS.iter().position(|exception| {
            source.path.starts_with(exception.path) && passage.text == exception.passage
        });
        if let Some(index) = exception {
            used[index] = true;
        }
        exception.is_none()
    });
    passages
}

#[test]
fn prose_is_plain_english() {
    let mut found = Vec::new();
    let mut counts = vec![0; RATCHET.len()];
    let mut used = vec![false; EXCEPTIONS.len()];
    for source in sources() {
        if source.path.starts_with(RULE) {
            continue;
        }
        let list = findings(&without_exceptions(&source, &mut used));
        let folder = RATCHET
            .iter()
            .position(|(folder, _)| source.path.starts_with(folder));
        match folder {
            Some(index) => counts[index] += list.len(),
            None => {
                let named = |(line, word)| format!("{}:{line}: {word}", source.path);
                found.extend(list.into_iter().map(named));
            }
        }
    }
    for (path, text) in pages() {
        let list = findings(&paragraphs(&text));
        found.extend(
            list.iter()
                .map(|(line, word)| format!("{path}:{line}: {word}")),
        );
    }
    for ((folder, limit), count) in RATCHET.iter().zip(counts) {
        if count != *limit {
            found.push(format!(
                "{folder}: {count} findings, its limit says {limit}"
            ));
        }
    }
    for (exception, _) in EXCEPTIONS.iter().zip(used).filter(|(_, used)| !used) {
        let Exception { path, passage, why } = exception;
        found.push(format!("{path}: no passage '{passage}' ({why}): remove it"));
    }
    expect_none(
        "comments, messages and documents are plain English (a limit of a folder may only go down)",
        &found,
    );
}

#[test]
fn the_dialect_is_found_where_it_is() {
    let sample = r##"//! Whoever reads a file
//! is told of it.

/// What is read. No 'lifetime ends it.
fn told<'a>(told: &'a str) -> char {
    // One so
    // many.
    print("somebody \"told\" \
           anew");
    let _ = r#"it "judges""#;
    let url = "https://told.example";
    '"' // Heard.
}
/// Whole files; what was written, who has the key: nobody is named.
fn retold(judged: u8) -> &'static str {
    /* told */
    /// Who.
    "untold, foretold_by, what"
}
"##;
    let found = findings(&Reader::passages(sample));
    let expected = [
        (1, "told"),
        (1, "whoever"),
        (1, "Whoever"),
        (4, "What"),
        (6, "so many"),
        (8, "told"),
        (8, "anew"),
        (8, "somebody"),
        (10, "judges"),
        (11, "told"),
        (12, "heard"),
        (16, "told"),
        (17, "Who"),
    ];
    assert_eq!(found, expected);
    let page = "# Told\n\nFiles are read\nanew, so\nmany of them.\n\nWhat is read counts.\n";
    let expected = [(1, "told"), (3, "anew"), (3, "so many")];
    assert_eq!(findings(&paragraphs(page)), expected);
}

#[test]
fn exceptions_and_limits_have_reasons_and_folders() {
    let known = sources();
    let is_there = |path: &str| known.iter().any(|source| source.path.starts_with(path));
    for exception in EXCEPTIONS {
        assert!(!exception.why.is_empty() && is_there(exception.path));
        let passage = Passage::new(Kind::Literal, 1, exception.passage);
        assert!(!passage.findings().is_empty(), "{}", exception.passage);
    }
    for (folder, limit) in RATCHET {
        assert!(is_there(folder) && *limit > 0, "{folder} needs no limit");
    }
}
