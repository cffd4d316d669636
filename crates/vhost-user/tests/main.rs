//! A server against front ends: one of our own, which can do anything, and drivers of others.

mod front;
mod hostile;
mod inflight;
mod requests;
mod ring;
