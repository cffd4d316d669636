//! Tests of the declarations, of checks and of the answer to `query-qmp-schema`.

#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use super::*;

#[test]
fn the_daemons_schema_is_sound() {
    if let Err(error) = Schema::read(FILES) {
        panic!("{error}");
    }
}
