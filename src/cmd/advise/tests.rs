//! Every command line of the advice is one by the command's own declarations, and has its file
//! names as they are.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::process::Command;

use cowslip_advise::{Engine, Facts, Format, Host, Image, Order, Space, Workload, advise};

use crate::CowslipLine;

const GIB: u64 = 1 << 30;

/// A name that a shell would take apart.
const NAME: &str = "it's a vm.qcow2";

fn facts(format: Format, on: &str) -> Facts {
    Facts {
        image: Image {
            name: NAME.to_string(),
            format,
            disk_bytes: 1 << 43,
            cluster_bytes: 65_536,
            is_sparse: true,
            depth: 1,
            ..Image::default()
        },
        space: Space {
            host_bytes: 40 * GIB,
            data_bytes: 20 * GIB,
            used_bytes: 20 * GIB,
            scattered_permille: 300,
            between_bytes: 900 * GIB,
            ..Space::default()
        },
        order: Order {
            bytes: 20 * GIB,
            runs: Some(5_000_000),
            extents: 5_000_000,
            perfect: 20,
        },
        host: Host {
            kind: on.to_string(),
            block_bytes: 4096,
            free_bytes: 100 * GIB,
            total_bytes: 1000 * GIB,
            has_reflink: false,
            has_fallocate: on != "ext2",
            is_rotational: true,
        },
        cache_bytes: 1 << 20,
        engine: Engine::Cowslip,
        siblings: 0,
        is_in_use: false,
    }
}

/// Images that call for each subject's commands.
fn situations() -> Vec<Facts> {
    let mut all = Vec::new();
    for on in ["xfs", "ext4", "ext2"] {
        let mut raw = facts(Format::Raw, on);
        raw.image.disk_bytes = 40 * GIB;
        raw.space.host_bytes = GIB;
        let plain = facts(Format::Qcow2, on);
        let mut whole = plain.clone();
        whole.image.is_sparse = false;
        whole.image.cluster_bytes = 2 << 20;
        whole.order.runs = Some(1);
        let mut overlay = whole.clone();
        overlay.image.cluster_bytes = 65_536;
        overlay.image.depth = 900;
        overlay.image.backing = Some(("the base.raw".to_string(), Some("raw".to_string())));
        overlay.image.lowest = overlay.image.backing.clone();
        let mut fresh = overlay.clone();
        fresh.space = Space::default();
        let mut compressed = whole.clone();
        compressed.space.compressed_bytes = 20 * GIB;
        let mut snapshots = whole.clone();
        snapshots.image.snapshots = 30;
        snapshots.space.host_bytes = 90 * GIB;
        let mut filled = whole.clone();
        filled.image.disk_bytes = 30 * GIB;
        filled.space = Space::default();
        let all_of_it = [
            raw, plain, whole, overlay, fresh, compressed, snapshots, filled,
        ];
        all.extend(all_of_it);
    }
    all
}

fn words(line: &str) -> Vec<String> {
    let script = format!("printf '%s\\n' {line}");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_string).collect()
}

#[test]
fn every_command_line_of_the_advice_is_one_of_the_command() {
    let mut verbs = BTreeSet::new();
    let workloads: Vec<Workload> = Workload::names().filter_map(Workload::named).collect();
    for facts in situations() {
        for workload in &workloads {
            let advice = advise(&facts, workload);
            let changes = advice.changes().flat_map(|answer| &answer.commands);
            for line in changes.filter(|line| line.starts_with("cowslip ")) {
                let words = words(line);
                let args: Vec<OsString> = words.iter().map(OsString::from).collect();
                let parsed = CowslipLine::declared(&args).try_get_matches_from(&args);
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
                let has_name = words.iter().any(|word| word == NAME || word == ".");
                assert!(has_name || line.contains("-b 'it'"), "{line}: {words:?}");
                verbs.insert(words[1].clone());
            }
        }
    }
    let all = [
        "allocate", "amend", "compact", "convert", "create", "grow", "rebase", "serve", "snapshot",
    ];
    assert_eq!(verbs.iter().map(String::as_str).collect::<Vec<_>>(), all);
}
