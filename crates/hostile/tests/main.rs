//! Hostile input, as one program: each program compiles the engine's futures anew. `bounds.rs` is
//! one of its own, since it counts the memory of its process.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod damaged;
mod smoke;
