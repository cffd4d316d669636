//! The memory that a command may cost before it is refused or executed, counted by the allocator.
//! docs/qmp.md states the bound.
//!
//! One test, because the allocator counts for the whole process.

#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use cowslip_qmp::Schema;
use cowslip_qmp::json::{Limits, Reader};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;

/// The most that the text of a command may take as values.
const BOUND: usize = 16 * MIB;

/// Reads a text, in pieces as they come, and returns the most memory that it took, and whether a
/// value came of it.
fn read(text: &str) -> (usize, bool) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let mut reader = Reader::new(Limits::default());
    let mut accepted = false;
    for piece in text.as_bytes().chunks(4096) {
        let mut rest = piece;
        while let Some(outcome) = reader.next(&mut rest) {
            accepted |= outcome.is_ok();
        }
    }
    (MEMORY.peak_usage() - before, accepted)
}

/// A list of as many elements as the limits allow.
fn list(element: &str, tokens: usize) -> String {
    let limits = Limits::default();
    let room = limits.bytes / (element.len() + 1);
    let count = room.min(limits.tokens / (tokens + 1)) - 2;
    format!("[{}0]", format!("{element},").repeat(count))
}

#[test]
fn the_worst_commands_cost_a_bounded_amount_of_memory() {
    let mut most = 0;
    let objects = (1000 - 2) * 5;
    let nested = "{\"\":".repeat(1000 - 2) + "0" + &"}".repeat(1000 - 2);
    for (name, text) in [
        ("numbers", list("1", 1)),
        ("empty objects", list("{}", 2)),
        ("empty lists", list("[]", 2)),
        ("short strings", list("\"a\"", 1)),
        ("lists of one", list("[1]", 3)),
        ("objects of one member", list("{\"\":1}", 5)),
        (
            "objects of five members",
            list("{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1}", 21),
        ),
        ("objects within each other", list(&nested, objects)),
        ("a long string", format!("\"{}\"", "x".repeat(MIB - 10))),
        (
            "a long string of escapes",
            format!("\"{}\"", "\\u0000".repeat(MIB / 6 - 10)),
        ),
    ] {
        let (bytes, accepted) = read(&text);
        assert!(accepted, "{name} are within the limits");
        assert!(bytes <= BOUND, "{name}: {bytes} bytes");
        most = most.max(bytes);
    }
    let endless = format!("\"{}", "x".repeat(8 * MIB));
    for text in ["[".repeat(8 * MIB), endless, "@".repeat(8 * MIB)] {
        let (bytes, accepted) = read(&text);
        assert!(!accepted && bytes <= BOUND, "{bytes} bytes");
    }
    assert!(
        most > BOUND / 4,
        "the bound is far above what was needed: {most} bytes"
    );
    eprintln!("{most} bytes at most");
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let _schema = Schema::of_daemon();
    let schema = MEMORY.current_usage() - before;
    assert!(schema < MIB, "the schema takes {schema} bytes");
}
