//! The tests of the protocol from outside, as one program.

#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

mod descriptors;
mod documents;
mod drawn;
mod python;
mod qemu;
mod serving;
mod support;
mod words;
