//! Hostile input, as one program: each program compiles the engine's futures anew. `bounds.rs` is one of its
//! own, since it counts the memory of its process.

mod damaged;
mod smoke;
