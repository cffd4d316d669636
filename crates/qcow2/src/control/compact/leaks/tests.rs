//! Looks at counts, some of which have changed meanwhile.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.
#![allow(clippy::single_range_in_vec_init)] // A list of parts may have one.

use std::slice::from_ref;

use super::*;
use crate::check::Observer;

fn findings(job: &Job) -> Findings<'_> {
    Findings {
        job,
        geometry: Geometry::new(16, 4, false).unwrap(),
        reported_bytes: None,
        mismatches: Vec::new(),
        is_partial: false,
        beyond: None,
        other: None,
    }
}

fn mismatch(cluster: u64, refcount: u64, references: u64) -> Finding {
    Finding::Refcount {
        cluster,
        refcount,
        references,
    }
}

fn changes(noted: &[(u64, u64)]) -> Changes {
    let mut changes = Changes::default();
    for &(cluster, count) in noted {
        changes.note(HostCluster(cluster), count);
    }
    changes
}

fn outcome(found: &[Finding], noted: &[(u64, u64)], tables: &TablesRead) -> Looked {
    let job = Job::default();
    let mut findings = findings(&job);
    found.iter().for_each(|finding| findings.finding(finding));
    findings.outcome(tables, &changes(noted))
}

fn excess(start: u64, end: u64, by: u64) -> Excess {
    Excess {
        clusters: start..end,
        by,
    }
}

#[test]
fn clusters_whose_counts_have_changed_are_no_leaks() {
    let none = TablesRead::default();
    let found: Vec<Finding> = (10..20).map(|at| mismatch(at, 1, 0)).collect();
    let Looked::Sound(leaks) = outcome(&found, &[(10, 1), (14, 0), (15, 2)], &none) else {
        panic!("it is sound");
    };
    assert_eq!(leaks.excess, [excess(11, 14, 1), excess(16, 20, 1)]);
    assert_eq!((leaks.clusters, leaks.flags_behind), (7, false));
    let Looked::Sound(leaks) = outcome(&[mismatch(3, 9, 1), mismatch(4, 9, 0)], &[], &none) else {
        panic!("it is sound");
    };
    assert_eq!(leaks.excess, [excess(3, 4, 8), excess(4, 5, 9)]);
    assert_eq!((leaks.clusters, leaks.flags_behind), (1, true));
}

#[test]
fn a_count_that_is_too_low_forbids_a_compaction_unless_it_has_changed() {
    let none = TablesRead::default();
    let low = mismatch(7, 0, 1);
    assert_eq!(
        outcome(from_ref(&low), &[], &none),
        Looked::Unsound(low.clone())
    );
    assert_eq!(
        outcome(from_ref(&low), &[(7, 0)], &none),
        Looked::Sound(Leaks::default())
    );
    let beyond = Finding::BeyondEnd {
        offset: 7 << 16,
        len: 1 << 16,
    };
    let unsound = Looked::Unsound(beyond.clone());
    assert_eq!(outcome(from_ref(&beyond), &[(6, 1)], &none), unsound);
    assert_eq!(
        outcome(&[beyond], &[(7, 1)], &none),
        Looked::Sound(Leaks::default())
    );
    let reserved = Finding::L1Reserved { entry: 1 };
    assert_eq!(
        outcome(from_ref(&reserved), &[(7, 1)], &none),
        Looked::Unsound(reserved)
    );
}

#[test]
fn nothing_is_known_where_a_table_was_freed_meanwhile() {
    let tables = TablesRead::of(vec![3, 9], vec![20..22]);
    let found = [mismatch(5, 1, 0)];
    for freed in [3, 9, 20, 21] {
        assert_eq!(outcome(&found, &[(freed, 0)], &tables), Looked::Disturbed);
        // It is a table still: another one was made of it, or it has become a snapshot's.
        assert!(matches!(
            outcome(&found, &[(freed, 1)], &tables),
            Looked::Sound(_)
        ));
    }
    assert!(matches!(
        outcome(&found, &[(4, 0), (22, 0)], &tables),
        Looked::Sound(_)
    ));
}

#[test]
fn parts_of_a_run_that_have_not_changed() {
    let parts =
        |noted: &[(u64, u64)]| -> Vec<Range<u64>> { unchanged(5..9, &changes(noted)).collect() };
    assert_eq!(parts(&[]), [5..9]);
    assert_eq!(parts(&[(4, 1), (9, 1)]), [5..9]);
    assert_eq!(parts(&[(5, 1), (8, 0)]), [6..8]);
    assert_eq!(parts(&[(5, 1), (6, 0), (7, 3), (8, 0)]), []);
}
