//! The succession of a disk's checkpoints: which of them know all that has changed since.
//!
//! What has changed since a checkpoint is in its bitmap and those behind it, so all of these have
//! to be sound, and the last one has to note what changes. Where that is not so, for one and all
//! before it, it never will be again: a later bitmap cannot have what was missed.

use std::ops::Range;

/// State of a checkpoint's bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Whether it was saved in order: its marks mean something.
    pub is_sound: bool,
    /// Whether it notes what changes.
    pub is_recording: bool,
}

/// The place of the oldest checkpoint since which all changes are known; their number if there is
/// none. The oldest comes first.
pub fn complete_from(links: &[Link]) -> usize {
    match links.last() {
        Some(last) if last.is_sound && last.is_recording => {
            let unsound = links.iter().rposition(|link| !link.is_sound);
            unsound.map_or(0, |place| place + 1)
        }
        _ => links.len(),
    }
}

/// The checkpoints that are removed if one of them is: that one alone, or those before it as well,
/// which would seem complete without it. They are removed in this order, each of them with those
/// before it gone.
pub fn removed_with(links: &[Link], place: usize) -> Range<usize> {
    let link = links[place];
    let is_last = place + 1 == links.len();
    match link.is_sound && (link.is_recording || !is_last) {
        true => place..place + 1,
        false => 0..place + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OVER: Link = Link {
        is_sound: true,
        is_recording: false,
    };
    const GOES_ON: Link = Link {
        is_sound: true,
        is_recording: true,
    };
    const LOST: Link = Link {
        is_sound: false,
        is_recording: true,
    };

    #[test]
    fn a_gap_is_one_for_all_before_it() {
        for (links, from) in [
            (&[][..], 0),
            (&[GOES_ON], 0),
            (&[OVER, OVER, GOES_ON], 0),
            (&[OVER, OVER], 2),
            (&[OVER, LOST], 2),
            (&[OVER, LOST, OVER, GOES_ON], 2),
            (&[LOST, GOES_ON, LOST], 3),
        ] {
            assert_eq!(complete_from(links), from, "{links:?}");
        }
    }

    /// The truth about each checkpoint is kept beside it: whether some change since then is in no
    /// bitmap. Whatever is removed, created and lost, a checkpoint that seems complete is.
    #[test]
    fn nothing_seems_complete_that_is_not() {
        // A number for each step: create, remove the first, second or third, or crash.
        for steps in 0..5_usize.pow(7) {
            let mut all: Vec<(Link, bool)> = Vec::new();
            for step in (0..7).map(|at| steps / 5_usize.pow(at) % 5) {
                let links: Vec<Link> = all.iter().map(|(link, _)| *link).collect();
                match step {
                    0 => {
                        all.drain(..complete_from(&links));
                        if let Some((last, _)) = all.last_mut() {
                            last.is_recording = false;
                        }
                        all.push((GOES_ON, false));
                    }
                    1..=3 if step <= all.len() => {
                        let gone = removed_with(&links, step - 1);
                        let joins = gone.len() == 1 && links[gone.start].is_sound;
                        if let Some(before) = gone.start.checked_sub(1) {
                            let recording = links[gone.start].is_recording;
                            match joins && links[before].is_sound {
                                true => all[before].0.is_recording |= recording,
                                // What it had noted is in no bitmap now.
                                false => all[..gone.start].iter_mut().for_each(|it| it.1 = true),
                            }
                        }
                        all.drain(gone);
                    }
                    4 => {
                        if let Some((last, _)) = all.last_mut() {
                            last.is_sound = false;
                            all.iter_mut().for_each(|it| it.1 = true);
                        }
                    }
                    _ => {}
                }
                let links: Vec<Link> = all.iter().map(|(link, _)| *link).collect();
                // From now on something changes, which one that records notes.
                if links.last().is_none_or(|last| !last.is_recording) {
                    all.iter_mut().for_each(|it| it.1 = true);
                }
                for (_, is_incomplete) in &all[complete_from(&links)..] {
                    assert!(!is_incomplete, "{steps}: {links:?}");
                }
            }
        }
    }
}
