//! A stream of JSON values: they follow one another with or without white space, in pieces of any
//! length.
//!
//! The language is QEMU's: JSON, and strings in single quotes. So are the words of the errors, and
//! the place where reading goes on after one:
//!
//! - A *stray* character cannot begin or continue a token. All that was read of the value is
//!   dropped, and what follows up to a structural character, a control character or one of the
//!   bytes `FE` and `FF`, which no text contains: a client that sends one knows where it stands.
//! - A value of sound tokens that is no JSON is read up to where its brackets are balanced.
//!
//! A value has at most [`Limits`]. After one that exceeds them, reading goes on at the next control
//! character; QEMU goes on at once, and reports every closing bracket.

use std::fmt;

use serde_json::{Map, Number, Value};

mod lexer;
mod text;

use lexer::{Lexer, Step, Token};
pub use text::{to_line, to_text};

/// Limits of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Length of its text, in bytes.
    pub bytes: usize,
    /// Number of its tokens, which bounds the memory that it takes: about a hundred bytes each.
    pub tokens: usize,
    /// Objects and arrays within each other.
    pub depth: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            // A transaction over a thousand disks has a tenth of that.
            bytes: 1 << 20,
            tokens: 1 << 17,
            // QEMU's. A chain of hundreds of images is one value, as deep as the chain.
            depth: 1024,
        }
    }
}

/// An error in the text, in QEMU's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntaxError(String);

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SyntaxError {}

impl SyntaxError {
    fn parse(text: impl fmt::Display) -> SyntaxError {
        SyntaxError(format!("JSON parse error, {text}"))
    }
}

/// A value, or an error after which the stream goes on.
pub type Outcome = Result<Value, SyntaxError>;

/// The position within an object or array that is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// A first member, or the end.
    FirstOrEnd,
    /// A member.
    Next,
    /// The colon after a name.
    Colon,
    /// The value of a name.
    Member,
    /// A comma, or the end.
    CommaOrEnd,
}

/// An object or array that is being read.
enum Frame {
    Object {
        members: Map<String, Value>,
        name: String,
        expect: Expect,
    },
    Array {
        elements: Vec<Value>,
        expect: Expect,
    },
}

/// Reads values from a stream of bytes.
pub struct Reader {
    limits: Limits,
    lexer: Lexer,
    frames: Vec<Frame>,
    /// The first error of the value, which is reported where its brackets are balanced.
    failed: Option<SyntaxError>,
    braces: i32,
    brackets: i32,
    tokens: usize,
    bytes: usize,
}

impl Reader {
    /// A reader at the beginning of a stream.
    pub fn new(limits: Limits) -> Reader {
        Reader {
            limits,
            lexer: Lexer::default(),
            frames: Vec::new(),
            failed: None,
            braces: 0,
            brackets: 0,
            tokens: 0,
            bytes: 0,
        }
    }

    /// Reads on, and takes from the front of `input` all bytes that it has read. `None` if it has
    /// read all, and no value has ended.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Outcome> {
        while let Some((&byte, rest)) = input.split_first() {
            let step = self.lexer.step(byte);
            if !matches!(step, Step::TokenBefore(_)) {
                *input = rest;
                self.bytes += 1;
            }
            let outcome = match step {
                Step::Token(token) | Step::TokenBefore(token) => self.token(token),
                Step::Stray(text) => {
                    self.forget();
                    Some(Err(SyntaxError::parse(format_args!("stray '{text}'"))))
                }
                Step::More => None,
            };
            if self.is_between() {
                // White space, and what is skipped.
                self.bytes = 0;
            }
            let outcome = outcome.or_else(|| self.beyond_limits().map(Err));
            if outcome.is_some() {
                return outcome;
            }
        }
        None
    }

    /// Whether no value has begun.
    pub fn is_between(&self) -> bool {
        self.tokens == 0 && self.lexer.is_between()
    }

    fn beyond_limits(&mut self) -> Option<SyntaxError> {
        let depth = usize::try_from(self.braces + self.brackets).unwrap_or(0);
        let which = if self.bytes > self.limits.bytes {
            "token size"
        } else if self.tokens > self.limits.tokens {
            "token count"
        } else if depth > self.limits.depth {
            "nesting depth"
        } else {
            return None;
        };
        self.forget();
        self.lexer.skip();
        Some(SyntaxError(format!("JSON {which} limit exceeded")))
    }

    /// Drops all that was read of the value.
    fn forget(&mut self) {
        self.frames.clear();
        self.failed = None;
        (self.braces, self.brackets) = (0, 0);
        (self.tokens, self.bytes) = (0, 0);
    }

    fn token(&mut self, token: Token) -> Option<Outcome> {
        self.tokens += 1;
        match token {
            Token::OpenBrace => self.braces += 1,
            Token::CloseBrace => self.braces -= 1,
            Token::OpenBracket => self.brackets += 1,
            Token::CloseBracket => self.brackets -= 1,
            _ => {}
        }
        let mut whole = None;
        if self.failed.is_none() {
            match self.take(token) {
                Ok(value) => whole = value,
                Err(error) => {
                    self.failed = Some(error);
                    self.frames.clear();
                }
            }
        }
        let balanced = self.braces == 0 && self.brackets == 0;
        if !balanced && self.braces >= 0 && self.brackets >= 0 {
            return None;
        }
        let outcome = match (self.failed.take(), whole) {
            (Some(error), _) => Err(error),
            (None, Some(value)) => Ok(value),
            // Brackets that are balanced in number close one another, or were refused.
            (None, None) => unreachable!("a value ends where its brackets are balanced"),
        };
        self.forget();
        Some(outcome)
    }

    /// Takes the next token of a value; returns the value if it is whole.
    fn take(&mut self, token: Token) -> Result<Option<Value>, SyntaxError> {
        let token = match self.frames.last_mut() {
            None => token,
            Some(Frame::Object { expect, .. }) => match (*expect, token) {
                (Expect::FirstOrEnd | Expect::CommaOrEnd, Token::CloseBrace) => {
                    return self.close();
                }
                (Expect::CommaOrEnd, Token::Comma) => {
                    *expect = Expect::Next;
                    return Ok(None);
                }
                (Expect::CommaOrEnd, _) => {
                    return Err(SyntaxError::parse("expected separator in dict"));
                }
                (Expect::Colon, Token::Colon) => {
                    *expect = Expect::Member;
                    return Ok(None);
                }
                (Expect::Colon, _) => {
                    return Err(SyntaxError::parse("missing : in object pair"));
                }
                (_, token) => token,
            },
            Some(Frame::Array { expect, .. }) => match (*expect, token) {
                (Expect::FirstOrEnd | Expect::CommaOrEnd, Token::CloseBracket) => {
                    return self.close();
                }
                (Expect::CommaOrEnd, Token::Comma) => {
                    *expect = Expect::Next;
                    return Ok(None);
                }
                (Expect::CommaOrEnd, _) => {
                    return Err(SyntaxError::parse("expected separator in list"));
                }
                (_, token) => token,
            },
        };
        self.begin(token)
    }

    /// Takes a token that has to begin a value.
    fn begin(&mut self, token: Token) -> Result<Option<Value>, SyntaxError> {
        let value = match token {
            Token::OpenBrace => {
                self.frames.push(Frame::Object {
                    members: Map::new(),
                    name: String::new(),
                    expect: Expect::FirstOrEnd,
                });
                return Ok(None);
            }
            Token::OpenBracket => {
                self.frames.push(Frame::Array {
                    elements: Vec::new(),
                    expect: Expect::FirstOrEnd,
                });
                return Ok(None);
            }
            Token::String(raw) => Value::String(text::unescape(&raw)?),
            Token::Number(text) => Value::Number(number(&text)?),
            Token::Keyword(word) => match word.as_str() {
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                "null" => Value::Null,
                word => {
                    return Err(SyntaxError::parse(format_args!("invalid keyword '{word}'")));
                }
            },
            Token::CloseBrace | Token::CloseBracket | Token::Colon | Token::Comma => {
                return Err(SyntaxError::parse("expecting value"));
            }
        };
        self.add(value)
    }

    /// Ends the innermost object or array.
    fn close(&mut self) -> Result<Option<Value>, SyntaxError> {
        let frame = self.frames.pop();
        let value = match frame.expect("an object or array ends that has begun") {
            Frame::Object { members, .. } => Value::Object(members),
            Frame::Array { elements, .. } => Value::Array(elements),
        };
        self.add(value)
    }

    /// Adds a value to the innermost object or array; returns it if there is none.
    fn add(&mut self, value: Value) -> Result<Option<Value>, SyntaxError> {
        match self.frames.last_mut() {
            None => return Ok(Some(value)),
            Some(Frame::Array { elements, expect }) => {
                elements.push(value);
                *expect = Expect::CommaOrEnd;
            }
            Some(Frame::Object {
                members,
                name,
                expect,
            }) => match (*expect, value) {
                (Expect::Member, value) => {
                    if members.insert(std::mem::take(name), value).is_some() {
                        return Err(SyntaxError::parse("duplicate key"));
                    }
                    *expect = Expect::CommaOrEnd;
                }
                (_, Value::String(text)) => {
                    *name = text;
                    *expect = Expect::Colon;
                }
                _ => return Err(SyntaxError::parse("key is not a string in object")),
            },
        }
        Ok(None)
    }
}

/// A number of JSON: whole where it fits in 64 bits, as QEMU has them.
fn number(text: &str) -> Result<Number, SyntaxError> {
    if let Ok(whole) = text.parse::<i64>() {
        return Ok(whole.into());
    }
    if let Ok(whole) = text.parse::<u64>() {
        return Ok(whole.into());
    }
    let parsed = text.parse::<f64>().ok().and_then(Number::from_f64);
    parsed.ok_or_else(|| SyntaxError::parse(format_args!("number '{text}' is out of range")))
}

/// Reads a text that has a single value.
///
/// # Errors
/// It is none, or more than one, or exceeds the limits.
pub fn parse(text: &str) -> Result<Value, SyntaxError> {
    let mut reader = Reader::new(Limits::default());
    let mut input = text.as_bytes();
    let first = reader.next(&mut input);
    // Numbers and keywords end where something follows.
    let first = first.or_else(|| reader.next(&mut &b"\n"[..]));
    let value = first.unwrap_or_else(|| Err(SyntaxError::parse("premature EOI")))?;
    match reader.next(&mut input) {
        None if reader.is_between() => Ok(value),
        Some(Err(error)) => Err(error),
        _ => Err(SyntaxError::parse("expecting one value")),
    }
}

#[cfg(test)]
mod tests;
