//! The plan beside a naive one, on random files.

use std::collections::BTreeSet;

use super::super::survey::Runs;
use super::*;
use crate::random::Random;

const KINDS: [Kind; 10] = [
    Kind::Free,
    Kind::Uncounted,
    Kind::Data,
    Kind::Shared,
    Kind::Compressed,
    Kind::Table,
    Kind::Block,
    Kind::Bits,
    Kind::Structure,
    Kind::Fixed,
];

/// Clusters of 512 bytes with counts of 64 bits: a block counts 64 of them.
fn random_survey(random: &mut Random) -> Survey {
    let geometry = Geometry::new(9, 6, false).unwrap();
    let len = 1 + random.below(300);
    let kind = |random: &mut Random| match random.below(12) {
        0..4 => Kind::Free,
        4..9 => Kind::Data,
        _ => KINDS[random.below(7) as usize],
    };
    let mut kinds: Vec<Kind> = (0..len).map(|_| kind(random)).collect();
    kinds
        .iter_mut()
        .filter(|kind| **kind == Kind::Block)
        .for_each(|kind| *kind = Kind::Data);
    let mut blocks = Vec::new();
    for index in 0..len.div_ceil(64) {
        let place = match random.below(3) {
            0 => random.below(len),
            _ => (index * 64).min(len - 1),
        };
        if kinds[place as usize] != Kind::Block {
            kinds[place as usize] = Kind::Block;
            blocks.push((index, place));
        }
    }
    Survey {
        geometry,
        kinds,
        blocks,
        runs: Runs::default(),
        data_clusters: 0,
        reach: Vec::new(),
    }
}

/// Number of clusters that have to move for the file to end at `end`; `None` if it cannot.
fn naive(survey: &Survey, moves: &dyn Fn(Kind) -> bool, end: u64) -> Option<u64> {
    let needed = |at: u64| {
        let block = survey.blocks.iter().find(|block| block.1 == at);
        match block {
            Some((index, _)) => index * 64 < end,
            None => survey.kinds[at as usize].is_used(),
        }
    };
    let len = survey.kinds.len() as u64;
    let behind: Vec<u64> = (end..len).filter(|&at| needed(at)).collect();
    let room = survey.kinds[..end as usize]
        .iter()
        .filter(|kind| kind.is_room());
    let fits = behind.len() <= room.count();
    let all_move = behind.iter().all(|&at| moves(survey.kinds[at as usize]));
    (fits && all_move).then_some(behind.len() as u64)
}

/// The clusters of a run, one by one.
fn each(run: &Move) -> impl Iterator<Item = Move> {
    let run = *run;
    (0..run.clusters).map(move |at| Move {
        guest: run.guest.plus(at),
        from: run.from.plus(at),
        to: run.to.plus(at),
        clusters: 1,
    })
}

#[test]
fn the_file_ends_as_early_as_it_can() {
    let some = |kind| kind == Kind::Data;
    let most = |kind| !matches!(kind, Kind::Fixed | Kind::Compressed);
    let all: [&dyn Fn(Kind) -> bool; 2] = [&some, &most];
    for seed in 0..3000 {
        let random = &mut Random(seed);
        let survey = random_survey(random);
        let len = survey.kinds.len() as u64;
        let moves = all[random.below(2) as usize];
        let least = [0, random.below(len + 1)][random.below(2) as usize];
        let expected = (least..=len).find_map(|end| Some((end, naive(&survey, moves, end)?)));
        let found = outline(&survey, moves, least);
        assert_eq!(Some((found.end, found.moving)), expected, "seed {seed}");
    }
}

#[test]
fn every_cluster_behind_the_end_gets_a_place_of_its_own() {
    for seed in 0..1000 {
        let random = &mut Random(seed);
        let survey = random_survey(random);
        let outline = outline(&survey, |kind| kind == Kind::Data, 0);
        let data = (0..).map(HostCluster).zip(&survey.kinds);
        let behind = data.filter(|(at, kind)| at.0 >= outline.end && **kind == Kind::Data);
        let mut guests: Vec<u64> = (0..1000).collect();
        let mut draw = || GuestCluster(guests.remove(random.below(guests.len() as u64) as usize));
        let moving: Vec<_> = behind.map(|(at, _)| (draw(), at)).collect();
        let mut room = Room::before(survey.kinds.clone(), outline.end);
        let batch = 1 + seed % 7;
        let mut owners = Owners::of(outline.end..survey.kinds.len() as u64);
        for &(guest, from) in &moving {
            owners.note(guest, from);
        }
        let next = || owners.next_batch(&survey.geometry, &mut room, batch);
        let found: Vec<_> = std::iter::from_fn(next).collect();
        let (mut moved, mut places) = (BTreeSet::new(), BTreeSet::new());
        let mut lowest = u64::MAX;
        for batch_of in &found {
            let clusters: u64 = batch_of.iter().map(|run| run.clusters).sum();
            assert!(clusters <= batch, "seed {seed}");
            let highest = batch_of
                .iter()
                .map(|run| run.from.0 + run.clusters - 1)
                .max();
            assert!(
                highest.unwrap() < lowest,
                "the highest go first, seed {seed}"
            );
            lowest = batch_of.iter().map(|run| run.from.0).min().unwrap();
            for run in batch_of.iter().flat_map(each) {
                assert!(moved.insert((run.guest, run.from)));
                assert!(run.to.0 < outline.end && places.insert(run.to));
                assert!(survey.kinds[run.to.0 as usize].is_room());
            }
        }
        assert_eq!(moved, moving.into_iter().collect(), "seed {seed}");
    }
}

#[test]
fn neighbours_move_together() {
    let geometry = Geometry::new(16, 4, false).unwrap();
    let mut owners = Owners::of(50..80);
    for at in 0..20 {
        owners.note(GuestCluster(100 + at), HostCluster(50 + at));
    }
    // What lies elsewhere is not among them.
    owners.note(GuestCluster(3), HostCluster(49));
    owners.note(GuestCluster(4), HostCluster(80));
    let mut room = Room::before(vec![Kind::Free; 40], 40);
    let found = owners.next_batch(&geometry, &mut room, 1000).unwrap();
    assert_eq!(owners.next_batch(&geometry, &mut room, 1000), None);
    let lens: Vec<u64> = found.iter().map(|run| run.clusters).collect();
    // One MiB at most.
    assert_eq!(lens, [16, 4]);
}
