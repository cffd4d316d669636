//! A server against front ends: one of our own, which can do anything, and drivers of others.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod hostile;
mod inflight;
mod log;
mod requests;
mod running;
