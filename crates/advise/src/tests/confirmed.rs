//! Answers beside what the bench says of them.

use std::collections::BTreeSet;
use std::path::Path;

use crate::situations::{as_json, as_table, as_text, compare};

use super::*;

#[test]
fn the_bench_confirms_the_advice_in_at_least_twelve_situations() {
    let all = compare();
    let confirmed = all.iter().filter(|it| it.is_confirmed());
    let titles: BTreeSet<&str> = confirmed.map(|it| it.title).collect();
    assert!(titles.len() >= 12, "{titles:?}");
    for it in &all {
        assert!(it.is_confirmed(), "{} on {}", it.title, it.measured.on);
        assert!(it.measured.command.contains("bench"), "{}", it.title);
    }
}

/// Both verdicts, and the file systems, of each.
#[test]
fn situations_have_either_answer() {
    let all = compare();
    let of = |verdict| all.iter().filter(|it| it.verdict == verdict).count();
    assert!(of(Verdict::Change) >= 12 && of(Verdict::Leave) >= 6);
    for on in ["ext4", "xfs", "btrfs", "ext2"] {
        assert!(all.iter().any(|it| it.measured.on == on), "{on}");
    }
}

#[test]
fn a_model_that_the_bench_contradicts_is_shown_as_such() {
    let all = compare();
    let wrong: Vec<_> = all.iter().filter(|it| it.is_wrong()).collect();
    let known = [
        "direct writers at full speed",
        "writers through the page cache",
        "512 MiB in 126 025 runs, read in order",
    ];
    let titles: Vec<&str> = wrong.iter().map(|it| it.title).collect();
    assert_eq!(titles, known);
    let text = as_text(&all);
    assert_eq!(
        text.matches("<- confirmed; model wrong").count(),
        known.len()
    );
    let json = as_json(&all);
    let rows = json.as_array().unwrap();
    assert_eq!(
        rows.iter().filter(|it| it["wrong"] == true).count(),
        known.len()
    );

    // Advice that the bench contradicts, too.
    let mut it = compare().remove(0);
    (it.measured.advised, it.measured.other) = (it.measured.other, it.measured.advised);
    assert!(!it.is_confirmed() && it.is_wrong());
    assert!(as_text(&[it]).contains("<- contradicted"));
}

#[test]
fn the_document_has_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/advise.md");
    let document = std::fs::read_to_string(path).unwrap();
    let table = as_table(&compare());
    assert!(document.contains(&table), "docs/advise.md needs\n{table}");
}
