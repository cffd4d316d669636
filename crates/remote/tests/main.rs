//! Tests of remote files against a web server with faults.
#![allow(clippy::unwrap_used)] // A panic is the report of a test.

mod caching;
mod faults;
mod measure;
mod model;
mod moto;
mod nginx;
mod prefetch;
mod reading;
mod registry;
mod support;
mod tls;
mod uploads;
