//! Advice: which clusters, policy, preallocation, cache and chain would serve an image, where it
//! lies, under its workload.
//!
//! *Pure*: [`Facts`] and a [`Workload`] come in, [`Advice`] goes out. Who wants advice collects the
//! facts; nothing is opened here. Each answer has figures from a model ([`model`]) whose
//! coefficients are in `data/figures.tsv`, each with its source; [`check`] holds the model against
//! `data/measured.tsv` and shows where it is wrong, and [`situations`] holds prepared answers
//! against `data/confirmed.tsv`. "Leave it" is an answer.
//!
//! | file | |
//! | --- | --- |
//! | `facts.rs`, `workload.rs` | the question |
//! | `figures.rs`, `model.rs`, `check.rs` | coefficients, predictions, and how well they fit |
//! | `situations.rs` and below | prepared situations, and what the bench says of them |
//! | `rules.rs` and below | one rule each: clusters, policy, space, order, chain, cache, … |
//! | `answer.rs`, `text.rs`, `json.rs` | the answer, in words and for programs |
//!
//! May not know: how images are opened, the command's verbs beyond their names.

mod answer;
pub mod check;
mod facts;
mod figures;
mod json;
pub mod model;
mod rules;
pub mod situations;
mod statistics;
mod text;
mod workload;

pub use answer::{Advice, Answer, ByCopy, Figure, Verdict};
pub use facts::{Engine, Facts, FileSystem, Format, Host, Image, Order, Space};
pub use json::{as_json, directory_json};
pub use rules::advise;
pub use statistics::{Statistics, StatisticsError};
pub use text::as_text;
pub use workload::{Distinct, Requests, Workload};

#[cfg(test)]
mod tests;
