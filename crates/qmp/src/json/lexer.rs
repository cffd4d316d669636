//! Tokens of a stream, a byte at a time.

/// A token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    OpenBrace,
    CloseBrace,
    OpenBracket,
    CloseBracket,
    Colon,
    Comma,
    /// The text between the quotes, with its escapes.
    String(Vec<u8>),
    Number(String),
    Keyword(String),
}

/// The effect of a byte.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A token goes on, or something is being skipped: white space, or what follows an error.
    More,
    /// It ends a token.
    Token(Token),
    /// A token ends before it. It has not been taken.
    TokenBefore(Token),
    /// It can neither begin nor continue a token: the text of that, for people.
    Stray(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Start,
    /// After a stray character.
    Recovery,
    /// After a value that was too large.
    Skipping,
    String {
        quote: u8,
        escaped: bool,
    },
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    ExponentMark,
    ExponentSign,
    Exponent,
    Keyword,
}

#[derive(Default)]
pub(super) struct Lexer {
    state: State,
    text: Vec<u8>,
}

/// Bytes that no text has: neither ASCII nor UTF-8.
fn is_marker(byte: u8) -> bool {
    byte >= 0xfe
}

fn is_control(byte: u8) -> bool {
    byte < 0x20
}

fn structural(byte: u8) -> Option<Token> {
    Some(match byte {
        b'{' => Token::OpenBrace,
        b'}' => Token::CloseBrace,
        b'[' => Token::OpenBracket,
        b']' => Token::CloseBracket,
        b':' => Token::Colon,
        b',' => Token::Comma,
        _ => return None,
    })
}

impl Lexer {
    /// Whether no token has begun.
    pub fn is_between(&self) -> bool {
        matches!(self.state, State::Start | State::Recovery | State::Skipping)
    }

    /// Skips everything up to a control character or a marker.
    pub fn skip(&mut self) {
        self.text = Vec::new();
        self.state = State::Skipping;
    }

    pub fn step(&mut self, byte: u8) -> Step {
        match self.state {
            State::Start => self.start(byte),
            State::Recovery => {
                let ends = (is_control(byte) && byte != b'\t')
                    || is_marker(byte)
                    || structural(byte).is_some();
                self.resume(ends, byte)
            }
            State::Skipping => self.resume(is_control(byte) || is_marker(byte), byte),
            State::String { quote, escaped } => self.string(byte, quote, escaped),
            _ => self.word(byte),
        }
    }

    fn resume(&mut self, ends: bool, byte: u8) -> Step {
        if !ends {
            return Step::More;
        }
        self.state = State::Start;
        self.start(byte)
    }

    fn start(&mut self, byte: u8) -> Step {
        if let Some(token) = structural(byte) {
            return Step::Token(token);
        }
        self.state = match byte {
            b' ' | b'\t' | b'\r' | b'\n' => return Step::More,
            b'"' | b'\'' => State::String {
                quote: byte,
                escaped: false,
            },
            b'-' => State::Minus,
            b'0' => State::Zero,
            b'1'..=b'9' => State::Digits,
            b'a'..=b'z' => State::Keyword,
            _ => return self.stray(byte),
        };
        self.text.push(byte);
        Step::More
    }

    fn string(&mut self, byte: u8, quote: u8, escaped: bool) -> Step {
        if is_control(byte) || is_marker(byte) {
            return self.stray(byte);
        }
        if byte == quote && !escaped {
            self.state = State::Start;
            let mut text = std::mem::take(&mut self.text);
            // The quote that it begins with.
            text.remove(0);
            return Step::Token(Token::String(text));
        }
        self.text.push(byte);
        let escaped = byte == b'\\' && !escaped;
        self.state = State::String { quote, escaped };
        Step::More
    }

    /// A number or a keyword.
    fn word(&mut self, byte: u8) -> Step {
        let digit = byte.is_ascii_digit();
        let mark = matches!(byte, b'e' | b'E');
        let next = match (self.state, byte) {
            (State::Minus, b'0') => Some(State::Zero),
            (State::Minus | State::Digits, _) if digit => Some(State::Digits),
            (State::Zero | State::Digits, b'.') => Some(State::Point),
            (State::Zero | State::Digits | State::Fraction, _) if mark => Some(State::ExponentMark),
            (State::Point | State::Fraction, _) if digit => Some(State::Fraction),
            (State::ExponentMark, b'+' | b'-') => Some(State::ExponentSign),
            (State::ExponentMark | State::ExponentSign | State::Exponent, _) if digit => {
                Some(State::Exponent)
            }
            (State::Keyword, b'a'..=b'z') => Some(State::Keyword),
            _ => None,
        };
        if let Some(next) = next {
            self.text.push(byte);
            self.state = next;
            return Step::More;
        }
        let whole = match self.state {
            // A zero does not lead.
            State::Zero => !digit,
            State::Digits | State::Fraction | State::Exponent | State::Keyword => true,
            _ => false,
        };
        if !whole {
            return self.stray(byte);
        }
        let is_keyword = self.state == State::Keyword;
        self.state = State::Start;
        let text = String::from_utf8(std::mem::take(&mut self.text));
        let text = text.expect("numbers and keywords are ASCII");
        Step::TokenBefore(match is_keyword {
            true => Token::Keyword(text),
            false => Token::Number(text),
        })
    }

    fn stray(&mut self, byte: u8) -> Step {
        /// More of a string helps nobody.
        const SHOWN_MAX: usize = 200;
        self.state = State::Recovery;
        let mut text = std::mem::take(&mut self.text);
        text.push(byte);
        let from = text.len().saturating_sub(SHOWN_MAX);
        Step::Stray(String::from_utf8_lossy(&text[from..]).into_owned())
    }
}
