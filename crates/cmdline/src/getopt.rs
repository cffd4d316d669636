//! Options of a command line, scanned as the C library's getopt does: letters may be clustered,
//! operands and options may be mixed, long names may be shortened, and the complaints are its.
//!
//! Options come one by one, because the caller acts on each before the next one is looked at: of
//! two mistakes the first is reported. Pure.

use std::fmt;

/// Whether an option takes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// No value.
    None,
    /// The rest of the argument, or the next argument.
    Required,
    /// The text behind `=`, or none.
    Attached,
}

/// A long option.
#[derive(Clone, Copy, Debug)]
pub struct Long {
    /// Its name without dashes.
    pub name: &'static str,
    /// Its letter, where it has one.
    pub letter: Option<char>,
    /// Whether it takes a value.
    pub value: Value,
}

/// The option that was found. An option with a letter is always identified by the letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// By its letter.
    Letter(char),
    /// By its long name.
    Long(&'static str),
}

/// An option and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The option, by its letter or its full name.
    pub name: Name,
    /// Its value, if it has one.
    pub value: Option<String>,
}

impl Found {
    /// The value of an option that takes one; empty for one that does not.
    pub fn value(self) -> String {
        self.value.unwrap_or_default()
    }
}

/// Error in a command line, in the C library's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A letter that is no option.
    UnknownLetter(char),
    /// A letter without its value.
    LetterWithoutValue(char),
    /// A long name that is no option, as it was typed.
    UnknownLong(String),
    /// A long option without its value.
    LongWithoutValue(&'static str),
    /// A value for a long option that takes none.
    LongWithValue(&'static str),
    /// A shortened name that begins several, and those.
    Ambiguous(String, Vec<&'static str>),
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mistake::UnknownLetter(letter) => write!(f, "invalid option -- '{letter}'"),
            Mistake::LetterWithoutValue(letter) => {
                write!(f, "option requires an argument -- '{letter}'")
            }
            Mistake::UnknownLong(typed) => write!(f, "unrecognized option '--{typed}'"),
            Mistake::LongWithoutValue(name) => write!(f, "option '--{name}' requires an argument"),
            Mistake::LongWithValue(name) => {
                write!(f, "option '--{name}' doesn't allow an argument")
            }
            Mistake::Ambiguous(typed, names) => {
                write!(f, "option '--{typed}' is ambiguous; possibilities:")?;
                names.iter().try_for_each(|name| write!(f, " '--{name}'"))
            }
        }
    }
}

/// The scan of one command line.
#[derive(Debug)]
pub struct Scanner<'a> {
    args: &'a [String],
    letters: &'static str,
    longs: &'a [Long],
    own: &'static [Long],
    stops_at_operand: bool,
    second_may_be_less: bool,
    next: usize,
    /// Rest of a cluster of letters.
    cluster: &'a str,
    operands: Vec<&'a str>,
}

impl<'a> Scanner<'a> {
    /// Scans `args`, the program's or command's name not among them. In `letters`, a colon follows
    /// each option that takes a value.
    pub fn new(args: &'a [String], letters: &'static str, longs: &'a [Long]) -> Scanner<'a> {
        Scanner {
            args,
            letters,
            longs,
            own: &[],
            stops_at_operand: false,
            second_may_be_less: false,
            next: 0,
            cluster: "",
            operands: Vec::new(),
        }
    }

    /// Takes these options too, where no other is meant; no shortened name means one of them.
    #[must_use]
    pub fn with_own(mut self, own: &'static [Long]) -> Scanner<'a> {
        self.own = own;
        self
    }

    /// Ends at the first operand: what follows is another's.
    #[must_use]
    pub fn up_to_an_operand(mut self) -> Scanner<'a> {
        self.stops_at_operand = true;
        self
    }

    /// The second operand may be a number that begins with a minus.
    #[must_use]
    pub fn second_may_be_less(mut self) -> Scanner<'a> {
        self.second_may_be_less = true;
        self
    }

    fn is_less(&self, arg: &str) -> bool {
        let digits = arg.strip_prefix('-').unwrap_or_default();
        self.second_may_be_less
            && self.operands.len() == 1
            && digits.starts_with(|first: char| first.is_ascii_digit())
    }

    /// Returns the arguments that have not been scanned.
    pub fn rest(&self) -> &'a [String] {
        &self.args[self.next..]
    }

    /// Returns the operands, once the scan has ended.
    pub fn operands(self) -> Vec<&'a str> {
        self.operands
    }

    /// The first operand among the arguments that were scanned so far.
    pub fn first_operand(&self) -> Option<&'a str> {
        self.operands.first().copied()
    }

    /// The next option, or the next mistake.
    ///
    /// # Errors
    /// The mistake; the scan may go on behind it.
    pub fn next_option(&mut self) -> Result<Option<Found>, Mistake> {
        loop {
            if let Some(letter) = self.cluster.chars().next() {
                self.cluster = &self.cluster[letter.len_utf8()..];
                return self.letter(letter).map(Some);
            }
            let Some(arg) = self.take() else {
                return Ok(None);
            };
            if arg == "--" && self.stops_at_operand {
                return Ok(None);
            } else if arg == "--" {
                self.operands
                    .extend(self.args[self.next..].iter().map(String::as_str));
                self.next = self.args.len();
            } else if let Some(long) = arg.strip_prefix("--")
                && !self.longs.is_empty()
            {
                return self.long(long).map(Some);
            } else if arg.len() > 1 && arg.starts_with('-') && !self.is_less(arg) {
                self.cluster = &arg[1..];
            } else if self.stops_at_operand {
                self.next -= 1;
                return Ok(None);
            } else {
                self.operands.push(arg);
            }
        }
    }

    fn take(&mut self) -> Option<&'a str> {
        let arg = self.args.get(self.next)?;
        self.next += 1;
        Some(arg)
    }

    fn letter(&mut self, letter: char) -> Result<Found, Mistake> {
        let takes = match self.letters.find(letter) {
            Some(at) if letter != ':' => self.letters[at + letter.len_utf8()..].starts_with(':'),
            None if self.own.iter().any(|own| own.letter == Some(letter)) => false,
            _ => return Err(Mistake::UnknownLetter(letter)),
        };
        let value = match takes {
            false => None,
            true if !self.cluster.is_empty() => Some(std::mem::take(&mut self.cluster)),
            true => Some(self.take().ok_or(Mistake::LetterWithoutValue(letter))?),
        };
        Ok(Found {
            name: Name::Letter(letter),
            value: value.map(str::to_string),
        })
    }

    fn long(&mut self, typed: &str) -> Result<Found, Mistake> {
        let (name, value) = match typed.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (typed, None),
        };
        let begun = self.longs.iter().filter(|long| long.name.starts_with(name));
        let begun: Vec<Long> = begun.copied().collect();
        let exact = begun.iter().find(|long| long.name == name);
        let own = self.own.iter().find(|own| own.name == name);
        let own = own.filter(|own| match own.value {
            Value::Attached => value.is_some() || exact.is_none(),
            Value::None | Value::Required => true,
        });
        let long = match (own.or(exact), &begun[..]) {
            (Some(long), _) | (None, [long]) => *long,
            (None, []) => return Err(Mistake::UnknownLong(typed.to_string())),
            (None, several) => {
                let names = several.iter().map(|long| long.name).collect();
                return Err(Mistake::Ambiguous(typed.to_string(), names));
            }
        };
        let value = match (long.value, value) {
            (Value::None, Some(_)) => return Err(Mistake::LongWithValue(long.name)),
            (Value::Required, None) => {
                let next = self.take().ok_or(Mistake::LongWithoutValue(long.name))?;
                Some(next.to_string())
            }
            (_, value) => value,
        };
        let name = long.letter.map_or(Name::Long(long.name), Name::Letter);
        Ok(Found { name, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGS: &[Long] = &[
        Long {
            name: "cmd",
            letter: Some('c'),
            value: Value::Required,
        },
        Long {
            name: "copy-on-read",
            letter: Some('C'),
            value: Value::None,
        },
        Long {
            name: "cache",
            letter: Some('t'),
            value: Value::Required,
        },
        Long {
            name: "object",
            letter: None,
            value: Value::Required,
        },
    ];

    /// Returns each option or mistake as a word, then the operands.
    fn scan(line: &str, longs: &'static [Long]) -> String {
        let args: Vec<String> = line.split(' ').map(str::to_string).collect();
        let mut scanner = Scanner::new(&args, "c:Ct:qP:", longs);
        let mut words = Vec::new();
        loop {
            match scanner.next_option() {
                Ok(None) => break,
                Ok(Some(found)) => {
                    let name = match found.name {
                        Name::Letter(letter) => letter.to_string(),
                        Name::Long(long) => long.to_string(),
                    };
                    words.push(match found.value {
                        Some(value) => format!("{name}={value}"),
                        None => name,
                    });
                }
                Err(mistake) => words.push(format!("<{mistake}>")),
            }
        }
        words.push(format!("| {}", scanner.operands().join(" ")));
        words.join(" ")
    }

    #[test]
    fn options_and_operands_mix() {
        for (line, expected) in [
            ("0 512 -P 3", "P=3 | 0 512"),
            ("-qP1 0", "q P=1 | 0"),
            ("-P -q 0", "P=-q | 0"),
            ("0 -- -q 1", "| 0 -q 1"),
            ("- 0", "| - 0"),
            ("-q -q", "q q | "),
        ] {
            assert_eq!(scan(line, &[]), expected, "{line}");
        }
    }

    #[test]
    fn mistakes_are_reported_in_the_c_librarys_words() {
        for (line, expected) in [
            ("-x 0", "<invalid option -- 'x'> | 0"),
            (
                "--foo",
                "<invalid option -- '-'> <invalid option -- 'f'> <invalid option -- 'o'> <invalid option -- 'o'> | ",
            ),
            ("0 -P", "<option requires an argument -- 'P'> | 0"),
            ("-:", "<invalid option -- ':'> | "),
        ] {
            assert_eq!(scan(line, &[]), expected, "{line}");
        }
    }

    #[test]
    fn long_options_may_be_shortened() {
        for (line, expected) in [
            ("--ca none f", "t=none | f"),
            ("--cache=none f", "t=none | f"),
            ("--obj a,b", "object=a,b | "),
            (
                "--c none",
                "<option '--c' is ambiguous; possibilities: '--cmd' '--copy-on-read' '--cache'> | none",
            ),
            ("--nosuch", "<unrecognized option '--nosuch'> | "),
            ("--object", "<option '--object' requires an argument> | "),
            (
                "--copy=1",
                "<option '--copy-on-read' doesn't allow an argument> | ",
            ),
        ] {
            assert_eq!(scan(line, LONGS), expected, "{line}");
        }
    }
}
