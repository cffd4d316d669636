//! Colours that the colour-blind can distinguish, on light and on dark ground.
//!
//! Whose a bar is shows in its hue (blue ours, orange a peer's, grey a yardstick, green another's
//! figures), which of theirs in its lightness: both survive every kind of colour blindness, and
//! lightness a black and white printer. Lines are dashed differently too.
//!
//! Elements have the class of their colour.

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

/// A colour on light ground, the same on dark ground, and how lines of it are dashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink {
    name: &'static str,
    light: u32,
    dark: u32,
    dashes: &'static str,
}

const fn ink(name: &'static str, light: u32, dark: u32, dashes: &'static str) -> Ink {
    Ink {
        name,
        light,
        dark,
        dashes,
    }
}

const SOLID: &str = "none";

const OURS: [Ink; 4] = [
    ink("ours0", 0x1463b5, 0x4f9fe8, SOLID),
    ink("ours1", 0x4c9be3, 0x9bcbf7, "7 3"),
    ink("ours2", 0x84bbec, 0x2c6fb3, "2 2"),
    ink("ours3", 0xc9e2f9, 0xcfe6fc, "9 3 2 3"),
];
const PEERS: [Ink; 3] = [
    ink("peer0", 0xc75000, 0xf0822f, SOLID),
    ink("peer1", 0xeb9b1e, 0xffc46b, "7 3"),
    ink("peer2", 0xf6cf8a, 0xa65a12, "2 2"),
];
const YARDSTICKS: [Ink; 5] = [
    ink("yard0", 0x646a71, 0xd5dae0, "7 3"),
    ink("yard1", 0x8d939a, 0xa3aab2, "2 2"),
    ink("yard2", 0xb1b7bd, 0x767d86, SOLID),
    ink("yard3", 0xd5d9dd, 0x565d66, "9 3 2 3"),
    ink("yard4", 0x7d5a8c, 0xc39bd3, "4 2 1 2"),
];
const SOURCES: [Ink; 3] = [
    ink("source0", 0x007a5d, 0x3fc29d, SOLID),
    ink("source1", 0x35a384, 0xa8e6d3, "7 3"),
    ink("source2", 0x8fd6c2, 0x1f7d63, "2 2"),
];
/// Text in charts.
pub const TEXT: Ink = ink("ink", 0x1b1f24, 0xe6edf3, SOLID);
/// Marks of spread.
pub const WHISKER: Ink = ink("whisker", 0x14171a, 0xf5f7fa, SOLID);

fn inks() -> impl Iterator<Item = Ink> {
    let of_series = OURS.iter().chain(&PEERS).chain(&YARDSTICKS).chain(&SOURCES);
    of_series.copied().chain([TEXT, WHISKER])
}

fn ink_of(key: Key) -> Ink {
    let inks: &[Ink] = match key.kind {
        Kind::Ours => &OURS,
        Kind::Peer => &PEERS,
        Kind::Yardstick => &YARDSTICKS,
        Kind::Source => &SOURCES,
    };
    inks[key.index % inks.len()]
}

/// The class of a key in a legend or a row.
pub fn class(key: Key) -> &'static str {
    ink_of(key).name
}

/// The part of the style sheet that is about these colours.
pub fn style() -> String {
    let variables = |colour: fn(&Ink) -> u32| {
        let all = inks().map(|ink| format!("--{}:#{:06x};", ink.name, colour(&ink)));
        all.collect::<String>()
    };
    let mut style = format!(":root{{{}}}\n", variables(|ink| ink.light));
    style += &format!(
        "@media screen and (prefers-color-scheme:dark){{:root{{{}}}}}\n",
        variables(|ink| ink.dark)
    );
    for Ink { name, dashes, .. } in inks() {
        style += &format!(".{name}{{--own:var(--{name});--dashes:{dashes}}}\n");
    }
    style
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_style_sheet_distinguishes_colours() {
        let mut light: Vec<u32> = inks().map(|ink| ink.light).collect();
        let count = light.len();
        light.sort_unstable();
        light.dedup();
        assert_eq!(light.len(), count);
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
        assert!(contrast(TEXT.light, 0xffffff) > 7.0);
        assert!(contrast(TEXT.dark, 0x11151a) > 7.0);
        for first in [OURS[0], PEERS[0], YARDSTICKS[0], SOURCES[0]] {
            assert!(contrast(first.light, 0xffffff) > 3.0, "{first:?}");
            assert!(contrast(first.light, WHISKER.light) > 2.5, "{first:?}");
            assert!(contrast(first.dark, 0x11151a) > 3.0, "{first:?}");
        }
    }

    /// Neighbours of one kind differ in lightness, which no colour blindness takes away.
    #[test]
    fn those_of_one_kind_differ_in_lightness() {
        for inks in [&OURS[..], &PEERS, &YARDSTICKS, &SOURCES] {
            for pair in inks.windows(2) {
                for colours in [(pair[0].light, pair[1].light), (pair[0].dark, pair[1].dark)] {
                    assert!(contrast(colours.0, colours.1) > 1.35, "{pair:?}");
                }
            }
        }
    }
}
