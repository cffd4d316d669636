//! Hostile input, as one program: each program compiles the engine's futures again. `bounds.rs` is
//! a program of its own, since it counts the memory of its process.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod damaged;
mod smoke;
