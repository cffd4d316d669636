//! Rings and the table of requests in flight, in a server that ends (the process, not the machine)
//! before every one of its stores to them.
//!
//! The sources are the crate's; `stores` alone is another one, by which the server ends. A guest
//! makes requests available and takes completions, a server takes, carries out and completes them,
//! in an order that is enumerated or drawn. When the server ends, another one goes on with the
//! table. `model.rs` has what must hold.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.
#![allow(
    dead_code,
    reason = "files of the crate, of which parts are tested here"
)]

#[path = "../../src/fields.rs"]
mod fields;
#[path = "../../src/inflight.rs"]
mod inflight;
#[path = "../../src/memory.rs"]
mod memory;
mod model;
#[path = "../../src/order.rs"]
mod order;
#[path = "../../src/ring.rs"]
mod ring;
mod stores;

use model::{Kind, Start, Step, World};

const STARTS: [Start; 2] = [Start::AtOnce, Start::Later];
const KINDS: [Kind; 2] = [Kind::Split, Kind::Packed];

/// Kinds of rings, with requests that the guest gets back as they complete, and in order.
fn rings() -> impl Iterator<Item = (Kind, bool)> {
    KINDS
        .into_iter()
        .flat_map(|kind| [(kind, false), (kind, true)])
}

/// All sequences of steps up to a length, of which each does something.
fn sequences(world: &mut World, len: usize) -> Vec<Vec<Step>> {
    let mut all = vec![Vec::new()];
    let mut last = all.clone();
    for _ in 0..len {
        let mut longer = Vec::new();
        for sequence in &last {
            world.reset();
            assert!(sequence.iter().all(|step| world.step(*step)));
            longer.extend(
                Step::ALL
                    .iter()
                    .filter(|step| world.can(**step))
                    .map(|step| {
                        let mut next: Vec<Step> = sequence.clone();
                        next.push(*step);
                        next
                    }),
            );
        }
        all.extend(longer.iter().cloned());
        last = longer;
    }
    all
}

/// Name of the run, for a failure.
struct Named(String);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Carries out a sequence with a server that ends before its store number `end`, and its successor
/// before its store number `again`, if it gets as far. Returns the number of ends.
fn run(world: &mut World, sequence: &[Step], ends: &[u64], starts: Start) -> usize {
    let _named = Named(format!(
        "{}: {sequence:?}, ends after {ends:?}, starts {starts:?}",
        world.name()
    ));
    world.reset();
    world.end_after(ends, starts);
    for step in sequence {
        // After an end it may have nothing to do.
        world.step(*step);
    }
    world.finish();
    world.ends()
}

#[test]
fn no_request_is_lost_or_completed_twice_wherever_the_server_ends() {
    let mut runs = 0;
    for (kind, is_in_order) in rings() {
        for size in [2, 4] {
            let mut world = World::new(kind, size, is_in_order);
            for sequence in sequences(&mut world, 7) {
                for starts in STARTS {
                    let ended = |end: &u64| run(&mut world, &sequence, &[*end], starts) > 0;
                    runs += (0..).take_while(ended).count();
                }
            }
        }
    }
    eprintln!("{runs} runs");
}

#[test]
fn a_successor_may_end_as_well_wherever_it_is() {
    let mut runs = 0;
    for (kind, is_in_order) in rings() {
        let size = 3 + u16::from(kind == Kind::Split);
        let mut world = World::new(kind, size, is_in_order);
        for sequence in sequences(&mut world, 4) {
            for starts in STARTS {
                let mut ends = |end, again| run(&mut world, &sequence, &[end, again], starts);
                for end in (0..)
                    .take_while(|end| ends(*end, u64::MAX) > 0)
                    .collect::<Vec<u64>>()
                {
                    // It has recovered by then, and begun on requests of its own.
                    runs += (0..30).take_while(|again| ends(end, *again) > 1).count();
                }
            }
        }
    }
    eprintln!("{runs} runs");
}

/// Runs of random length on larger rings, with an end after a number of stores. More are chosen by
/// `COWSLIP_ROUNDS`, one by `COWSLIP_SEED`.
#[test]
fn servers_may_end_any_number_of_times_on_rings_of_any_size() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse().expect("a number"))
    };
    let (seeds, first) = match number("COWSLIP_SEED") {
        Some(seed) => (1, seed),
        None => (number("COWSLIP_ROUNDS").unwrap_or(400), 0),
    };
    let mut ends = 0;
    for seed in first..first + seeds {
        let mut draw = model::Draw(seed);
        let kind = KINDS[draw.below(2) as usize];
        // A packed ring has any size.
        let size = match kind {
            Kind::Split => [2, 4, 8, 16, 64][draw.below(5) as usize],
            Kind::Packed => 2 + draw.below(40) as u16,
        };
        let mut world = World::new(kind, size, draw.below(2) == 1);
        let _named = Named(format!("COWSLIP_SEED={seed}: {}", world.name()));
        let mean = 1 + draw.below(200);
        let lives: Vec<u64> = (0..30).map(|_| draw.below(2 * mean)).collect();
        world.end_after(&lives, STARTS[draw.below(2) as usize]);
        for _ in 0..300 {
            world.step(Step::ALL[draw.below(Step::ALL.len() as u64) as usize]);
        }
        world.finish();
        ends += world.ends();
    }
    eprintln!("{ends} ends of servers");
}
