//! The order on random files: each move beside a naive file, its end beside what was wanted.

use std::collections::BTreeSet;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::super::survey::Runs;
use super::*;
use crate::geometry::Geometry;
use crate::job::Job;
use crate::random::Random;

/// Does something to its end; the number of its steps, too.
fn in_steps<T>(work: impl Future<Output = T>) -> (T, usize) {
    let mut work = pin!(work);
    let mut context = Context::from_waker(Waker::noop());
    let mut steps = 1;
    loop {
        match work.as_mut().poll(&mut context) {
            Poll::Ready(done) => return (done, steps),
            Poll::Pending => steps += 1,
        }
    }
}

fn paced<T>(work: impl AsyncFnOnce(&mut Pace<'_>) -> Result<T>) -> T {
    let job = Job::default();
    in_steps(work(&mut Pace::of(&job))).0.unwrap()
}

fn shuffle<T>(random: &mut Random, all: &mut [T]) {
    for at in (1..all.len()).rev() {
        all.swap(at, random.below(at as u64 + 1) as usize);
    }
}

/// A file: by its clusters, what they hold, and which cluster of the disk.
#[derive(Clone)]
struct Naive {
    kinds: Vec<Kind>,
    guests: Vec<Option<u64>>,
    /// Free clusters that have space on the host.
    spared: BTreeSet<u64>,
    /// The most that these and what was filled beside them have been.
    peak: usize,
    /// Places that were filled when they had no space.
    allocated: Vec<u64>,
}

impl Naive {
    fn new(kinds: Vec<Kind>, guests: Vec<Option<u64>>) -> Naive {
        Naive {
            kinds,
            guests,
            spared: BTreeSet::new(),
            peak: 0,
            allocated: Vec::new(),
        }
    }

    fn survey(&self) -> Survey {
        Survey {
            geometry: Geometry::new(12, 4, false).unwrap(),
            kinds: self.kinds.clone(),
            blocks: Vec::new(),
            runs: Runs::default(),
            data_clusters: 0,
            reach: Vec::new(),
        }
    }

    fn places(&self) -> Places {
        let pairs = (0..).zip(&self.guests);
        let pairs = pairs.filter_map(|(at, guest)| guest.map(|guest| (guest, at)));
        let mut pairs: Vec<(u64, u64)> = pairs.collect();
        // The tables come in any order, the entries of each in theirs.
        pairs.sort_unstable_by_key(|&(guest, _)| ((guest / 7).reverse_bits(), guest));
        let mut places = Places::of_tables_with(7, 100);
        for (guest, at) in pairs {
            places.note(GuestCluster(guest), HostCluster(at));
        }
        places
    }

    fn order(&self, added: u64) -> Order {
        paced(async |pace| Order::of(&self.survey(), self.places(), added, pace).await)
    }

    /// The runs, and as few as there can be.
    fn runs(&self) -> (u64, u64) {
        let pairs = (0..).zip(&self.guests);
        let pairs = pairs.filter_map(|(at, guest)| guest.map(|guest| (guest, at)));
        let mut pairs: Vec<(u64, u64)> = pairs.collect();
        pairs.sort_unstable();
        let (mut runs, mut perfect) = (0, 0);
        let mut next = None;
        for (guest, at) in pairs {
            runs += u64::from(next != Some((guest, at)));
            perfect += u64::from(next.map(|(guest, _)| guest) != Some(guest));
            next = Some((guest + 1, at + 1));
        }
        (runs, perfect)
    }

    /// Free clusters before the last of the disk.
    fn holes(&self) -> usize {
        let end = self.guests.iter().rposition(Option::is_some);
        let before = self.kinds.iter().take(end.unwrap_or(0));
        before.filter(|kind| **kind == Kind::Free).count()
    }

    /// Moves the clusters of a step: to places that were free before it.
    fn apply(&mut self, step: &Step) {
        for place in &step.released {
            assert!(self.spared.remove(&place.0), "it has space");
        }
        let space_before = self.spared.len();
        let mut without = step.destinations();
        without.retain(|to| !self.spared.remove(&to.0));
        self.allocated.extend(without.iter().map(|to| to.0));
        self.peak = self.peak.max(space_before + without.len());
        let before = self.clone();
        let own = step.moves.iter().flat_map(|run| {
            (0..run.clusters).map(|n| {
                let (guest, from, to) = (run.guest.plus(n), run.from.plus(n), run.to.plus(n));
                (Some(guest.0), Kind::Data, from.0 as usize, to.0 as usize)
            })
        });
        let shared = step.shared.iter();
        let shared = shared.map(|(from, to)| (None, Kind::Shared, from.0 as usize, to.0 as usize));
        for (guest, kind, from, to) in own.chain(shared) {
            assert_eq!(before.kinds[to], Kind::Free, "nothing is overwritten");
            assert_eq!(self.kinds[to], Kind::Free, "two go to one place");
            assert_eq!(before.kinds[from], kind);
            assert!(guest.is_none() || before.guests[from] == guest);
            self.kinds[to] = kind;
            self.guests[to] = before.guests[from];
            self.kinds[from] = Kind::Free;
            self.guests[from] = None;
        }
        for place in &step.spared {
            let at = place.0 as usize;
            assert!(self.kinds[at] == Kind::Free && before.kinds[at] != Kind::Free);
            assert!(self.spared.insert(place.0));
        }
    }

    /// Does all windows; how many clusters have moved.
    fn arrange(&mut self, order: &mut Order, most: u64) -> u64 {
        let mut moved = 0;
        while let Some(window) = next_window(order, most) {
            self.apply(&window.evicted);
            self.apply(&window.placed);
            assert!(window.evicted.clusters() <= most && window.placed.clusters() <= most);
            moved += window.evicted.clusters() + window.placed.clusters();
            assert_eq!(order.runs(), self.runs());
        }
        let left: BTreeSet<u64> = order.spared().iter().map(|place| place.0).collect();
        assert_eq!(left, self.spared);
        moved
    }

    fn grow(&mut self, clusters: u64) {
        let len = self.kinds.len() + clusters as usize;
        self.kinds.resize(len, Kind::Free);
        self.guests.resize(len, None);
    }
}

fn next_window(order: &mut Order, most: u64) -> Option<Window> {
    paced(async |pace| order.next_window(most, pace).await)
}

fn forecast(order: Order, kinds: &[Kind], most: u64) -> Forecast {
    paced(async |pace| order.forecast(kinds, most, pace).await)
}

/// The header, then clusters of the disk in some order, with others between them.
fn random_file(random: &mut Random) -> Naive {
    let len = 1 + random.below(400);
    // In parts, of which some are missing.
    let gap = [2, 10, 1000][random.below(3) as usize];
    let mut guests: Vec<u64> = (0..len).filter(|_| random.below(gap) != 0).collect();
    match random.below(3) {
        0 => shuffle(random, &mut guests),
        1 => {
            for _ in 0..1 + random.below(10) {
                let (one, other) = (random.below(len), random.below(len));
                let last = guests.len().saturating_sub(1);
                if !guests.is_empty() {
                    guests.swap((one as usize).min(last), (other as usize).min(last));
                }
            }
        }
        _ => {}
    }
    let others = [1, 4, 40, 1000][random.below(4) as usize];
    let free = [2, 20, 1000][random.below(3) as usize];
    let shared = [2, 1000][random.below(2) as usize];
    let mut file = Naive::new(vec![Kind::Fixed], vec![None]);
    for guest in guests {
        while random.below(others + 1) == 0 {
            let kinds = [
                Kind::Table,
                Kind::Block,
                Kind::Structure,
                Kind::Shared,
                Kind::Bits,
            ];
            file.kinds.push(kinds[random.below(5) as usize]);
            file.guests.push(None);
        }
        while random.below(free) == 0 {
            file.kinds.push(Kind::Free);
            file.guests.push(None);
        }
        file.kinds.push(match random.below(shared) {
            0 => Kind::Shared,
            _ => Kind::Data,
        });
        file.guests.push(Some(guest));
    }
    file
}

#[test]
fn clusters_go_home_over_nothing_and_no_run_is_forgotten() {
    let (mut arranged, mut cleared) = (0, 0);
    for seed in 0..3000 {
        let random = &mut Random(seed);
        let mut file = random_file(random);
        let most = 1 + random.below(40);
        let mut order = file.order(0);
        assert_eq!(order.runs(), file.runs());
        let added = order.layout.slack() + most;
        let before = file.clone();
        file.grow(added);
        let spared = most + random.below(2) * random.below(100);
        order = file.order(0).sparing(spared);
        match order.todo() {
            Todo::Nothing => assert!(next_window(&mut order, most).is_none(), "{seed}"),
            Todo::Clear(front) => {
                cleared += 1;
                let step = paced(async |pace| order.next_of_front(front, most, pace).await);
                if let Some(step) = step {
                    file.apply(&step);
                    let stays = |at: &usize| file.guests[*at].is_some();
                    let left = (0..front.end as usize).filter(stays).count();
                    assert!(left == 0 || step.clusters() == most, "{seed}");
                }
            }
            Todo::Arrange => {
                arranged += 1;
                let is_begun = |&k: &usize| !order.layout.continues(&order.homes, k);
                let expected = (0..order.layout.len()).filter(is_begun).count() as u64;
                assert!(order.homes.is_sorted());
                let end = order.end();
                let moved = file.arrange(&mut order, most);
                assert!(file.peak as u64 <= spared, "{seed}: {}", file.peak);
                let (runs, perfect) = file.runs();
                let is_close = is_close(runs, perfect);
                assert!(is_close || runs == expected, "{seed}: {runs}, {expected}");
                assert!(file.guests[end as usize..].iter().all(Option::is_none) || is_close);
                assert!(file.holes() as u64 <= order.layout.slack(), "{seed}");
                let planned = before.order(added).sparing(spared);
                let forecast = forecast(planned, &before.kinds, most);
                assert_eq!((forecast.runs, forecast.moved), (runs, moved), "{seed}");
                assert_eq!(forecast.kinds, file.kinds, "{seed}");
                // There is nothing left to do.
                assert_eq!(file.order(0).todo(), Todo::Nothing, "{seed}");
            }
        }
    }
    assert!(arranged > 300 && cleared > 300, "{arranged}, {cleared}");
}

/// Moves the clusters of a step, all of them the disk's alone, but one in 64: those that are where
/// the step has them, to places that are free. Notes the others, and returns how many they are.
fn hinder(step: &Step, order: &mut Order, file: &mut Naive, random: &mut Random) -> u64 {
    let own = step.moves.iter().flat_map(|run| {
        (0..run.clusters).map(|n| (run.guest.plus(n), run.from.plus(n), run.to.plus(n)))
    });
    let before = file.clone();
    let mut stay = 0;
    for (guest, from, to) in own {
        let (at, place) = (from.0 as usize, to.0 as usize);
        let is_there = before.guests[at] == Some(guest.0);
        let goes = is_there && before.kinds[place] == Kind::Free && random.below(64) != 0;
        if goes {
            file.kinds.swap(at, place);
            file.guests.swap(at, place);
        } else {
            order.stays(from, to);
            stay += 1;
        }
    }
    stay
}

#[test]
fn a_cluster_that_stays_is_in_the_way_of_few_others() {
    let random = &mut Random(11);
    let mut guests: Vec<u64> = (0..4096).collect();
    shuffle(random, &mut guests);
    let guests = guests.iter().copied().map(Some).collect();
    let mut file = Naive::new(vec![Kind::Data; 4096], guests);
    file.grow(256 + 64);
    let mut order = file.order(0).sparing(256);
    let (mut stayed, mut planned) = (0, 0);
    while let Some(window) = next_window(&mut order, 256) {
        for step in [&window.evicted, &window.placed] {
            stayed += hinder(step, &mut order, &mut file, random);
            planned += step.clusters();
        }
        assert!(order.runs().0.abs_diff(file.runs().0) <= 2 * stayed);
        let holes = order.spared();
        let are_free = |place: &HostCluster| file.kinds[place.0 as usize] == Kind::Free;
        assert!(holes.iter().all(are_free), "what is spared is free");
    }
    // One of 64 stays of its own, and each may keep another.
    assert!(
        stayed > planned / 128 && stayed < planned / 16,
        "{stayed} of {planned}"
    );
    // The next round does nearly all of the rest.
    let (runs, _) = file.runs();
    assert!(runs < 1024, "{runs}");
    let mut order = file.order(0).sparing(256);
    assert_eq!(order.todo(), Todo::Arrange);
    let mut file = Naive {
        spared: BTreeSet::new(),
        ..file
    };
    file.arrange(&mut order, 256);
    assert_eq!(file.runs(), (1, 1));
}

#[test]
fn a_shuffled_disk_moves_twice_at_most_and_is_perfect() {
    let random = &mut Random(7);
    let mut guests: Vec<u64> = (0..4096).collect();
    shuffle(random, &mut guests);
    for most in [64, 256, 1024] {
        let guests = guests.iter().copied().map(Some).collect();
        let mut file = Naive::new(vec![Kind::Data; 4096], guests);
        file.grow(most + 64);
        let mut order = file.order(0).sparing(most);
        let moved = file.arrange(&mut order, most);
        assert_eq!(file.runs(), (1, 1));
        assert!(moved <= 2 * 4096, "{moved}");
        assert!(file.peak as u64 <= most);
        // What has space has it where it has always been.
        let first = file.allocated.iter().min();
        assert!(first >= Some(&4096), "{first:?}");
    }
}

#[test]
fn few_clusters_move_where_few_are_out_of_order() {
    // The guest has discarded one in the middle and compaction has filled its place by the last.
    let mut guests: Vec<Option<u64>> = (0..10_000).map(Some).collect();
    guests[500] = Some(10_000);
    // Two that are exchanged, and a hole.
    guests.swap(4000, 7000);
    let mut file = Naive::new(vec![Kind::Data; 10_000], guests);
    file.guests[9000] = None;
    file.kinds[9000] = Kind::Free;
    file.grow(1000);
    assert_eq!(file.runs(), (8, 3));
    let mut order = file.order(0);
    let moved = file.arrange(&mut order, 100);
    assert!(moved <= 6, "{moved}");
    let (runs, perfect) = file.runs();
    assert!(is_close(runs, perfect), "{runs}, {perfect}");
}

#[test]
fn what_is_near_enough_stays_and_tables_in_the_way_go_before() {
    let kind = |at| match at % 10 {
        0 => Kind::Table,
        _ => Kind::Data,
    };
    // A table in each ten clusters.
    let kinds: Vec<Kind> = (0..100).map(kind).collect();
    let mut next = 0..;
    let guests = kinds.iter().map(|kind| match kind {
        Kind::Data => next.next(),
        _ => None,
    });
    let guests = guests.collect();
    let file = Naive::new(kinds, guests);
    let order = file.order(20);
    assert_eq!(order.runs(), (10, 1));
    let front = Front {
        end: 10,
        clusters: 9,
    };
    assert_eq!(order.todo(), Todo::Clear(front));
    let forecast = forecast(order, &file.kinds, 20);
    assert_eq!(forecast.runs, 1);
    assert_eq!(forecast.others.len(), 9);
    assert_eq!(forecast.end, 100);
    // One that cannot move costs an extent, whatever is done.
    let mut fixed = file.clone();
    for kind in fixed.kinds.iter_mut().filter(|kind| **kind == Kind::Table) {
        *kind = Kind::Structure;
    }
    assert_eq!(fixed.order(20).todo(), Todo::Nothing);
    // Six instead of five parts: near enough.
    let guests = (0..60).map(|at| Some(at + at / 12 * 5)).collect();
    let mut close = Naive::new(vec![Kind::Data; 60], guests);
    close.guests[54..].rotate_left(3);
    let (runs, perfect) = close.runs();
    assert_eq!((runs, perfect), (7, 5));
    assert_eq!(close.order(20).todo(), Todo::Arrange);
    close.guests[54..].rotate_left(3);
    close.guests[0..12].rotate_left(6);
    assert_eq!(close.runs(), (6, 5));
    assert_eq!(close.order(20).todo(), Todo::Nothing);
    let empty = Naive::new(Vec::new(), Vec::new());
    assert_eq!(empty.order(3).todo(), Todo::Nothing);
}

#[test]
fn a_long_plan_lets_others_go_on_and_ends_when_it_is_cancelled() {
    const CLUSTERS: u64 = 50_000;
    let mut guests: Vec<u64> = (0..CLUSTERS).collect();
    shuffle(&mut Random(3), &mut guests);
    let guests = guests.into_iter().map(Some).collect();
    let mut file = Naive::new(vec![Kind::Data; CLUSTERS as usize], guests);
    file.grow(CLUSTERS / 32);
    let job = Job::default();
    let survey = file.survey();
    let plan = async |job: &Job| {
        let pace = &mut Pace::of(job);
        let order = Order::of(&survey, file.places(), 0, pace).await?;
        order.forecast(&file.kinds, 1000, pace).await
    };
    let (planned, steps) = in_steps(plan(&job));
    assert_eq!(planned.unwrap().runs, 1);
    // It looks at each cluster ten times, and moves it once or twice.
    assert!(steps > 15 * CLUSTERS as usize / 8192, "{steps}");
    job.cancel();
    let (cancelled, steps) = in_steps(plan(&job));
    assert!(
        matches!(cancelled, Err(crate::Error::Cancelled)),
        "{cancelled:?}"
    );
    assert_eq!(steps, 2);
}

/// A disk in order of which some clusters in the middle were discarded.
fn in_order_but(discarded: usize) -> Naive {
    let mut file = Naive::new(vec![Kind::Data; 800], (0..800).map(Some).collect());
    for at in 300..300 + discarded {
        (file.kinds[at], file.guests[at]) = (Kind::Free, None);
    }
    file
}

#[test]
fn holes_of_a_disk_in_order_are_filled_if_they_are_many() {
    for (discarded, todo) in [
        (20, Todo::Nothing),
        (80, Todo::Nothing),
        (120, Todo::Arrange),
    ] {
        let file = in_order_but(discarded);
        assert_eq!(file.runs(), (2, 2));
        assert_eq!(file.order(0).todo(), todo, "{discarded}");
    }
}
