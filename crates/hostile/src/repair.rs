//! Fuzz target: repairs of arbitrary bytes, and of valid images with malicious or random changes.
//!
//! Promises that are tested: no panic, an end, bounded memory; a plan and a refusal write nothing;
//! `-r leaks` adds no corruption; after `-r all` the check is clean, a second repair has nothing to
//! do, and what is written then leaves the image sound.

use std::sync::Arc;

use cowslip::Result;
use cowslip::file::BlockFile;
use cowslip::qcow2::check::Finding;
use cowslip::qcow2::repair::{self, Event, Observer, Outcome, RepairOptions, Scope, Summary};

use crate::damage::damage;
use crate::draw::Draw;
use crate::file::Watched;
use crate::layout::be32;
use crate::session::{self, CHECK_BYTES_MAX, Content, OneDataFile, block_on, run_check};
use crate::{image_bytes, samples};

/// Longer L1 tables find nothing more, and each of many walks takes a fuzzer seconds.
const L1_ENTRIES_MAX: u32 = 1 << 17;

/// Formats each event of a repair, which must not panic, and checks that progress stays within its
/// total.
struct Listener;

impl Observer for Listener {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Planned(step) | Event::Done(step) => {
                let (what, why) = (step.what(), step.why());
                assert!(!what.is_empty() && !why.is_empty(), "{step:?}");
                std::hint::black_box((step.place(), step.may_lose()));
            }
            Event::Remains(finding) => {
                std::hint::black_box(finding.to_string());
            }
            Event::Progress {
                done_bytes,
                total_bytes,
            } => assert!(done_bytes <= total_bytes, "{done_bytes} of {total_bytes}"),
        }
    }
}

fn options(scope: Scope) -> RepairOptions {
    RepairOptions {
        scope,
        memory_bytes_max: CHECK_BYTES_MAX,
    }
}

/// Returns the summary of a repair's plan.
///
/// # Errors
/// As the engine's.
pub fn plan(file: &Arc<Watched>, scope: Scope) -> Result<Summary> {
    let file = file.clone() as Arc<dyn BlockFile>;
    block_on(repair::plan(&file, &options(scope), &mut Listener))
}

/// Repairs.
///
/// # Errors
/// As the engine's.
pub fn repair(file: &Arc<Watched>, scope: Scope) -> Result<Outcome> {
    let file = file.clone() as Arc<dyn BlockFile>;
    block_on(repair::repair(&file, &options(scope), &mut Listener))
}

/// The target's body: the first byte says whether the others are an image or choices.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    if draw.one_in(4) {
        let bytes = draw.rest();
        let bytes = &bytes[..bytes.len().min(image_bytes::BYTES_MAX)];
        check_repair(bytes, &mut Draw::from_seed(bytes.len() as u64));
        return;
    }
    let sample = &samples::all()[draw.below(samples::COUNT as u64) as usize];
    let mut bytes = damage(sample, &mut draw);
    while !draw.is_empty() && draw.one_in(4) {
        bytes = damage(&bytes, &mut draw);
    }
    check_repair(&bytes, &mut draw);
}

/// Plans, repairs leaks, and repairs all, each from the same bytes.
pub fn check_repair(bytes: &[u8], draw: &mut Draw) {
    if be32(bytes, 36) > L1_ENTRIES_MAX {
        return;
    }
    let file = Arc::new(Watched::new(bytes.to_vec()));
    let planned = [Scope::Leaks, Scope::All].map(|scope| plan(&file, scope));
    assert!(file.contents() == bytes, "a plan has written");
    check_repair_leaks(bytes);
    let outcome = match (repair(&file, Scope::All), &planned[1]) {
        (Ok(outcome), Ok(planned)) => {
            assert_eq!(outcome.done, *planned, "what was done is what was planned");
            outcome
        }
        (Ok(outcome), Err(error)) => panic!("repaired, but not planned: {error}: {outcome:?}"),
        (Err(error), Err(_)) => {
            assert!(file.contents() == bytes, "refused, and written: {error}");
            return;
        }
        // The file may not grow, or the check at the end meets its limits.
        (Err(error), Ok(_)) => {
            std::hint::black_box(error.to_string());
            return;
        }
    };
    if !outcome.check.is_clean() {
        // A cluster that is shared more often than refcounts of this width can express needs wider
        // ones.
        let mut findings: Vec<Finding> = Vec::new();
        session::run_check_into(&file, &mut findings).expect("a repaired image can be checked");
        let overflows = |finding: &Finding| matches!(finding, Finding::Overflow { .. });
        let account = || account(bytes, &outcome);
        assert!(findings.iter().all(overflows), "{}", account());
        return;
    }
    let checked = run_check(&file).expect("a repaired image can be checked");
    assert_eq!(checked, outcome.check);
    let repaired = file.contents();
    let again = repair(&file, Scope::All).expect("a repaired image can be repaired");
    assert!(again.done.is_empty(), "repaired twice: {again:?}");
    assert!(
        file.contents() == repaired,
        "a repair with nothing to do has written"
    );
    use_repaired(&file, draw);
}

/// Returns the steps of a repair, and the remaining flaws, to help investigate a finding.
fn account(bytes: &[u8], outcome: &impl std::fmt::Debug) -> String {
    struct Lines(Vec<String>);
    impl Observer for Lines {
        fn event(&mut self, event: Event<'_>) {
            match event {
                Event::Planned(step) => self.0.push(format!("planned {step:x?}")),
                Event::Remains(finding) => self.0.push(format!("remains {finding}")),
                Event::Done(_) | Event::Progress { .. } => {}
            }
        }
    }
    let mut lines = Lines(vec![format!("{outcome:?}")]);
    let file = Arc::new(Watched::new(bytes.to_vec())) as Arc<dyn BlockFile>;
    let again = block_on(repair::repair(&file, &options(Scope::All), &mut lines));
    lines
        .0
        .push(format!("{:?}", again.map(|outcome| outcome.done)));
    lines.0.truncate(60);
    lines.0.join("\n")
}

/// Leaks alone: no more corruptions than before, and no more leaks.
fn check_repair_leaks(bytes: &[u8]) {
    let file = Arc::new(Watched::new(bytes.to_vec()));
    let before = run_check(&file);
    let Ok(outcome) = repair(&file, Scope::Leaks) else {
        return;
    };
    if let Ok(before) = before {
        let after = outcome.check;
        assert!(
            after.corruptions <= before.corruptions && after.leaks <= before.leaks,
            "{before:?} became {after:?}"
        );
    }
    let once = file.contents();
    if let Ok(again) = repair(&file, Scope::Leaks) {
        assert_eq!(again.done, Summary::default(), "leaks are repaired twice");
        assert!(file.contents() == once, "leaks are repaired twice");
    }
}

/// A repaired image is one like others: what is written to it leaves it sound.
fn use_repaired(file: &Arc<Watched>, draw: &mut Draw) {
    let Ok(image) = session::open(file, &OneDataFile::new(), true, draw) else {
        return;
    };
    for _ in 0..4 {
        // Any failure is fine, as long as it is an error: entries that cannot be read
        // remain.
        std::hint::black_box(session::exercise(&image, Content::Random, draw).is_ok());
    }
    block_on(image.close()).expect("a repaired image can be closed");
    let mut findings: Vec<Finding> = Vec::new();
    session::run_check_into(file, &mut findings).expect("a repaired image can be checked");
    findings.retain(|finding| match finding {
        // Refcounts behind the end of the file do not matter until the file has grown over them.
        Finding::Refcount {
            refcount,
            references,
            ..
        } => refcount < references,
        // A cluster that compressed and other data share is one entry's when the compressed data
        // was written elsewhere. That one lacks COPIED, so it is written by copying.
        Finding::CopiedData { refcount, .. } => *refcount != 1,
        _ => true,
    });
    assert!(findings.is_empty(), "used after its repair: {findings:?}");
}
