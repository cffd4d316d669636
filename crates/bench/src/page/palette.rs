//! Colours that the colour-blind can distinguish, on light and on dark ground; `page.css` has them.
//!
//! Whose a bar is shows in its hue (blue ours, orange a peer's, grey a yardstick, green another's
//! figures), which of theirs in its lightness: both survive every kind of colour blindness, and
//! lightness a black and white printer. Lines are dashed differently too.

/// Owner of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Cowslip's.
    Ours,
    /// Another program, measured here.
    Peer,
    /// The limit set by the file system: raw files.
    Yardstick,
    /// Published by others, about another machine.
    Source,
}

/// Colour key of a series: a kind of contestant, and its number among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Owner of the series.
    pub kind: Kind,
    /// Number, from 0.
    pub index: usize,
}

impl Kind {
    /// Its name in the style sheet, and the number of its colours.
    fn colours(self) -> (&'static str, usize) {
        match self {
            Kind::Ours => ("ours", 4),
            Kind::Peer => ("peer", 3),
            Kind::Yardstick => ("yard", 5),
            Kind::Source => ("source", 3),
        }
    }
}

/// The class of what has the colour of a key.
pub fn class(key: Key) -> String {
    let (name, count) = key.kind.colours();
    format!("{name}{}", key.index % count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STYLE: &str = include_str!("page.css");
    const KINDS: [Kind; 4] = [Kind::Ours, Kind::Peer, Kind::Yardstick, Kind::Source];

    /// The colour of a name on light and on dark ground.
    fn ink(name: &str) -> [u32; 2] {
        let name = format!("--{name}:#");
        let written = STYLE.match_indices(&name);
        let colours = written.map(|(at, found)| {
            let digits = &STYLE[at + found.len()..][..6];
            u32::from_str_radix(digits, 16).unwrap()
        });
        let colours: Vec<u32> = colours.collect();
        colours.try_into().expect("it is there for both grounds")
    }

    fn of(kind: Kind) -> Vec<[u32; 2]> {
        let keys = (0..kind.colours().1).map(|index| Key { kind, index });
        keys.map(|key| ink(&class(key))).collect()
    }

    /// The relative luminance of WCAG 2.
    fn luminance(colour: u32) -> f64 {
        let part = |shift: u32| {
            let value = f64::from(colour >> shift & 0xff) / 255.0;
            match value <= 0.04045 {
                true => value / 12.92,
                false => ((value + 0.055) / 1.055).powf(2.4),
            }
        };
        0.2126 * part(16) + 0.7152 * part(8) + 0.0722 * part(0)
    }

    fn contrast(a: u32, b: u32) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_is_read_and_first_colours_are_seen_on_both_grounds() {
        for (index, ground) in [0xffffff, 0x11151a].into_iter().enumerate() {
            assert!(contrast(ink("ink")[index], ground) > 7.0);
            for kind in KINDS {
                assert!(contrast(of(kind)[0][index], ground) > 3.0, "{kind:?}");
            }
        }
        for kind in KINDS {
            assert!(
                contrast(of(kind)[0][0], ink("whisker")[0]) > 2.5,
                "{kind:?}"
            );
        }
    }

    /// Neighbours of one kind differ in lightness, which no colour blindness takes away.
    #[test]
    fn those_of_one_kind_differ_in_lightness() {
        for kind in KINDS {
            for pair in of(kind).windows(2) {
                for index in 0..2 {
                    assert!(contrast(pair[0][index], pair[1][index]) > 1.35, "{pair:?}");
                }
            }
        }
    }

    #[test]
    fn each_key_has_a_class_in_the_style_sheet() {
        for kind in KINDS {
            for index in 0..20 {
                let rule = format!(".{}{{--own:", class(Key { kind, index }));
                assert!(STYLE.contains(&rule), "{rule}");
            }
        }
    }
}
