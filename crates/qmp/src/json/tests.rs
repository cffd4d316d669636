//! Tests of the reader. The expected texts are those of qemu-storage-daemon 10.0.2.

#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use super::*;

fn read(mut input: &[u8], limits: Limits) -> Vec<String> {
    let mut reader = Reader::new(limits);
    let mut outcomes = Vec::new();
    while let Some(outcome) = reader.next(&mut input) {
        outcomes.push(match outcome {
            Ok(value) => to_text(&value),
            Err(error) => format!("! {error}"),
        });
    }
    assert!(input.is_empty());
    outcomes
}

/// Reads whole and byte by byte, which has to give the same.
#[track_caller]
fn check(input: &[u8], expected: &[&str]) {
    assert_eq!(read(input, Limits::default()), expected);
    let mut reader = Reader::new(Limits::default());
    let mut outcomes = 0;
    for byte in input {
        let mut one = std::slice::from_ref(byte);
        while reader.next(&mut one).is_some() {
            outcomes += 1;
        }
    }
    assert_eq!(outcomes, expected.len(), "byte by byte");
}

#[test]
fn values_follow_one_another_with_or_without_space() {
    check(
        b"{\"a\":1}{\"b\":[1,2,{}]}  [] \n 'it\\'s \"x\"' true null -0 12 1.50 ",
        &[
            "{\"a\": 1}",
            "{\"b\": [1, 2, {}]}",
            "[]",
            "\"it's \\\"x\\\"\"",
            "true",
            "null",
            "0",
            "12",
            "1.5",
        ],
    );
    check(b"{\"a\"\n:\r\n\t1\n,\"b\":2", &[]);
}

#[test]
fn numbers_are_whole_where_64_bits_hold_them() {
    check(
        b"[18446744073709551615, -9223372036854775808, 99999999999999999999, 1e3]",
        &["[18446744073709551615, -9223372036854775808, 1e+20, 1000.0]"],
    );
    check(
        b"[1e400]",
        &["! JSON parse error, number '1e400' is out of range"],
    );
}

#[test]
fn strings_are_escaped_and_ascii_in_the_layout() {
    check(
        b"\"\\u00e9\\ud83d\\ude00\\u0001\\u007f\\/\\b\\f\\n\\r\\t\\\"\\\\A\xe2\x82\xac\"",
        &["\"\\u00E9\\uD83D\\uDE00\\u0001\\u007F/\\b\\f\\n\\r\\t\\\"\\\\A\\u20AC\""],
    );
}

#[test]
fn values_of_sound_tokens_are_read_to_their_end() {
    for (input, error) in [
        ("}", "expecting value"),
        ("]", "expecting value"),
        ("{\"a\"\n:::\n}\n", "expecting value"),
        ("{\"a\" 1}", "missing : in object pair"),
        ("{\"a\",}", "missing : in object pair"),
        ("{\"a\":1,\"a\":2}", "duplicate key"),
        ("[1,]", "expecting value"),
        ("[,]", "expecting value"),
        ("{,}", "expecting value"),
        ("{\"a\":}", "expecting value"),
        ("{\"a\":1,}", "expecting value"),
        ("{1:2}", "key is not a string in object"),
        ("{{}:2}", "key is not a string in object"),
        ("{\"a\":1 \"b\":2}", "expected separator in dict"),
        ("[1 2]", "expected separator in list"),
        ("[1}", "expected separator in list"),
        ("{\"a\":1]", "expected separator in dict"),
        ("{\"a\":tru}", "invalid keyword 'tru'"),
        ("{[}]", "expecting value"),
        ("[{]}", "expecting value"),
        ("\"\\uD800\"", "\\uD800 is not a valid Unicode character"),
        (
            "\"\\ud800\\u0041\"",
            "\\ud800 is not a valid Unicode character",
        ),
        ("'\\u12x4'", "\\u12x4 is not a valid Unicode character"),
        ("\"\\x\"", "invalid escape sequence in string"),
    ] {
        check(input.as_bytes(), &[&format!("! JSON parse error, {error}")]);
        let good = [input.as_bytes(), b"{}"].concat();
        check(&good, &[&format!("! JSON parse error, {error}"), "{}"]);
    }
    check(
        b"\"\xc3(\"",
        &["! JSON parse error, invalid UTF-8 sequence in string"],
    );
}

#[test]
fn stray_characters_are_named_and_the_rest_is_skipped() {
    let stray = |text: &str| format!("! JSON parse error, stray '{text}'");
    check(b"@@@ abc {}", &[&stray("@"), "{}"]);
    check(b"@abc\x01{}", &[&stray("@"), &stray("\u{1}"), "{}"]);
    check(b"[1, 2, \xff{}", &[&stray("\u{fffd}"), "{}"]);
    check(
        b"\"abc\ndef\"}",
        &[&stray("\"abc\n"), "! JSON parse error, expecting value"],
    );
    check(
        b"{\"id\":%d}",
        &[&stray("%"), "! JSON parse error, expecting value"],
    );
    check(
        b"[01]",
        &[&stray("01"), "! JSON parse error, expecting value"],
    );
    check(b"-\n- 1\n{}", &[&stray("-\n"), "{}"]);
    check(b"1.\n", &[&stray("1.\n")]);
    check(b"1e\n", &[&stray("1e\n")]);
    check(b".5\n", &[&stray(".")]);
    check(
        b"a.b\n",
        &["! JSON parse error, invalid keyword 'a'", &stray(".")],
    );
    check(
        b"aB\n",
        &["! JSON parse error, invalid keyword 'a'", &stray("B")],
    );
    check(
        b"abc-d\n",
        &["! JSON parse error, invalid keyword 'abc'", &stray("-d")],
    );
    check(b"'abc@\x05", &[&stray("'abc@\u{5}")]);
    let long = [&b"\""[..], &[b'x'; 1000], b"\n"].concat();
    check(&long, &[&stray(&format!("{}\n", "x".repeat(199)))]);
}

#[test]
fn values_beyond_a_limit_are_refused_and_skipped_to_the_next_line() {
    let limits = Limits {
        bytes: 20,
        tokens: 8,
        depth: 3,
    };
    let refused = |which: &str| format!("! JSON {which} limit exceeded");
    let cases = [
        (&b"[[[[]]]]\n{}"[..], "nesting depth"),
        (b"[1,2,3,4,5]]\n{}", "token count"),
        (b"\"01234567890123456789\"]\n{}", "token size"),
        (b"[                    ]\n{}", "token size"),
    ];
    for (input, which) in cases {
        assert_eq!(read(input, limits), [refused(which), "{}".to_string()]);
    }
    let spaces = [&[b' '; 100][..], b"[[[]]] [[[]]] 12345678901234567890 {}"].concat();
    let expected = ["[[[]]]", "[[[]]]", "12345678901234567890", "{}"];
    assert_eq!(read(&spaces, limits), expected);
}

#[test]
fn deep_values_are_read_written_and_dropped() {
    let text = format!("{}{}", "[".repeat(1024), "]".repeat(1024));
    check(text.as_bytes(), &[&text]);
}

#[test]
fn a_text_of_one_value_is_parsed() {
    assert_eq!(parse(" 12").unwrap(), Value::from(12));
    assert_eq!(parse("{} \n").unwrap(), Value::Object(Map::new()));
    for text in ["", "{} {}", "1 2", "{", "{}x", "\"a"] {
        assert!(parse(text).is_err(), "{text}");
    }
}
