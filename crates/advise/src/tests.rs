//! The situations in which advice is asked for, the seeds' questions among them: each gets the
//! answer that the measurements confirm, and for the reason that they give.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use crate::figures::{Measured, coefficient, figure, measured, names};
use crate::situations::facts::{GIB, facts, overlay, raw, scattered};
use crate::{
    Advice, Answer, Engine, Facts, FileSystem, Format, Order, Space, Statistics, StatisticsError,
    Verdict, Workload, advise, as_json, as_text, check,
};

mod confirmed;
mod contradictions;
mod situations;
mod workloads;

fn under(workload: &str) -> Workload {
    Workload::named(workload).unwrap()
}

/// The measurement with these words, and no other.
fn measurement(question: &str, on: &str, words: &str) -> Measured {
    let has = |all: &str, word: &str| all.split(' ').any(|it| it == word);
    let mut found = measured().filter(|it| {
        let fits = words.split(' ').all(|word| has(it.circumstances, word));
        it.question == question && it.on == on && fits
    });
    let first = found.next().unwrap();
    assert_eq!(found.next(), None, "{question} {on} {words}");
    first
}

fn value(question: &str, on: &str, words: &str) -> f64 {
    measurement(question, on, words).value
}

fn changed<'a>(advice: &'a Advice, subject: &str) -> &'a Answer {
    let answer = advice.on(subject).unwrap();
    assert_eq!(answer.verdict, Verdict::Change, "{answer:?}");
    answer
}

fn left<'a>(advice: &'a Advice, subject: &str) -> &'a Answer {
    let answer = advice.on(subject).unwrap();
    assert_eq!(answer.verdict, Verdict::Leave, "{answer:?}");
    answer
}

/// The factor that an answer promises.
fn promised(answer: &Answer) -> f64 {
    let figure = &answer.figures[0];
    figure.then.unwrap() / figure.now
}

#[test]
fn every_coefficient_is_a_number_with_a_source() {
    let names = names();
    assert!(names.len() > 20);
    for name in names {
        for on in [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs] {
            let coefficient = coefficient(name, on);
            assert!(coefficient.value > 0.0, "{name}");
            assert!(coefficient.source.len() > 7, "{name}");
        }
    }
    assert_eq!(
        figure("empty", FileSystem::Other),
        figure("empty", FileSystem::Ext4)
    );
}

#[test]
fn the_model_fits_its_measurements_and_shows_where_it_does_not() {
    let all = check::compare();
    assert_eq!(
        all.len(),
        measured().count(),
        "each measurement has a prediction"
    );
    assert!(check::typical(&all) < 1.3, "{}", check::typical(&all));
    let wrong: Vec<_> = all.iter().filter(|it| it.is_wrong()).collect();
    // Known: first writes to clusters that are very small or very large.
    assert!(!wrong.is_empty() && wrong.len() < all.len() / 10);
    let text = check::as_text(&all);
    assert_eq!(text.matches("<- wrong").count(), wrong.len());
    let json = check::as_json(&all);
    assert_eq!(json["wrong"], wrong.len());
    assert_eq!(json["measurements"].as_array().unwrap().len(), all.len());
}

#[test]
fn a_wrong_model_is_shown_as_such() {
    let sound = check::compare().remove(0);
    assert!(!sound.is_wrong());
    for factor in [0.5, 2.0, f64::NAN, f64::INFINITY, 0.0] {
        let wrong = check::Compared {
            predicted: sound.measured * factor,
            ..sound.clone()
        };
        assert!(wrong.is_wrong(), "{factor}");
        assert!(check::as_text(&[wrong]).contains("<- wrong"));
    }
}

#[test]
fn results_of_a_bench_are_held_beside_the_model() {
    let row = |cell: &str, contestant: &str, iops: f64| {
        serde_json::json!({
            "filesystem": "ext4", "cell": cell, "contestant": contestant, "median-iops": iops,
        })
    };
    let results = serde_json::json!({
        "conditions": { "table": "subclusters", "disk-bytes": 1 << 30, "requests": 2000 },
        "rows": [
            row("64K, backed", "raw sparse", 20_000.0),
            row("64K, backed", "raw allocated", 10_000.0),
            row("64K, backed", "cowslip", 6_400.0),
            row("64K/2K, backed, depth 8", "raw sparse", 10_000.0),
            row("64K/2K, backed, depth 8", "cowslip", 40_000.0),
            row("64K/2K, backed, one thread", "cowslip", 40_000.0),
            row("64K, trimmed", "raw sparse", 10_000.0),
            row("64K, trimmed", "cowslip", 10_000.0),
            row("4K, empty", "cowslip", 10_000.0),
        ],
    });
    let all = check::of_bench(&results, "mine.json");
    assert_eq!(
        all.len(),
        2,
        "cells without raw files, and other states, are left out"
    );
    assert_eq!((all[0].measured, all[0].is_wrong()), (0.32, false));
    // Four times the raw file is not what the model expects.
    assert_eq!((all[1].measured, all[1].is_wrong()), (4.0, true));
    for junk in [
        serde_json::json!(null),
        serde_json::json!({ "rows": [1, {}, []] }),
    ] {
        assert!(check::of_bench(&junk, "x").is_empty());
    }
}

/// Texts and JSON of all combinations: nothing panics, nothing is not a number, and lines fit.
#[test]
fn whatever_the_facts_the_answer_can_be_shown() {
    let mut count = 0;
    for on in ["ext4", "xfs", "btrfs", "ext2", "tmpfs", ""] {
        for workload in Workload::names() {
            for mut facts in [facts(on), overlay(on), raw(on, 0), raw(on, 40 * GIB)] {
                for twist in 0..6 {
                    match twist {
                        1 => facts.space = Space::default(),
                        2 => facts.order = Order::default(),
                        3 => facts.image.disk_bytes = 0,
                        4 => facts.image.snapshots = u64::MAX,
                        5 => facts.image.disk_bytes = u64::MAX,
                        _ => {}
                    }
                    let advice = advise(&facts, &under(workload));
                    let text = as_text(&facts, &under(workload), &advice);
                    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
                    let json = as_json(&facts, &under(workload), &advice).to_string();
                    assert!(!json.contains("null,\"then\""), "{json}");
                    count += 1;
                }
            }
        }
    }
    assert!(count > 1000);
}
