//! Places that a record of a run covers: where a byte of the guest is, and what leads there.

use crate::anatomy::trail;
use crate::disk::SimDisk;
use crate::names::{DATA, TOP};
use crate::trace::About;

/// Returns the places that a record must cover when the guest byte at `guest` is wrong.
pub fn of(disk: &SimDisk, guest: u64) -> Vec<About> {
    let mut places = vec![About::Guest(guest..guest + 1)];
    if let Some(content) = disk.content(TOP) {
        let trail = trail(&content, guest).into_iter();
        places.extend(trail.map(|(_, range)| About::Host(TOP.to_string(), range)));
    }
    if disk.content(DATA).is_some() {
        places.push(About::Host(DATA.to_string(), guest..guest + 1));
    }
    places
}
