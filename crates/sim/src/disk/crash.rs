//! Survival of effects when the power fails.
//!
//! Media assumptions, stated once: a sector (512 bytes, or the file's alignment if that is larger)
//! is written whole or not at all, and its neighbours are untouched; a change of space is torn at 4
//! KiB. Every effect that no flush covers, acknowledged or in flight, is applied, dropped or torn,
//! independently of all others. Since the last writer of a sector that is applied decides it, and
//! any set of them may be dropped, this includes every reordering of overlapping effects. What a
//! flush or a durable write covers survives, and nothing older is put over it.

use std::fmt;

use crate::rng::Rng;

use super::content::Content;
use super::effect::{Effect, SPACE_ATOM_BYTES};
use super::structure::Structure;
use super::terms::Losses;

/// Fate of one effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// On the medium.
    Applied,
    /// Lost.
    Dropped,
    /// Partly on the medium: `#` for atoms that are, `.` for those that are not.
    Torn(String),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Applied => f.write_str("survives"),
            Fate::Dropped => f.write_str("is lost"),
            Fate::Torn(atoms) if atoms.len() <= 64 => write!(f, "is torn {atoms}"),
            Fate::Torn(atoms) => {
                let applied = atoms.bytes().filter(|atom| *atom == b'#').count();
                write!(f, "is torn, {applied} of {} parts survive", atoms.len())
            }
        }
    }
}

/// How the fates of a crash hang together: the ways in which caches lose power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Effects that were not flushed are lost.
    DropAll,
    /// All issued effects survive.
    ApplyAll,
    /// Each effect survives with this chance in percent.
    Each(u64),
    /// Effects before some moment survive, later ones do not.
    Before,
    /// Effects after some moment survive, earlier ones do not.
    After,
    /// Survival hangs on the place: regions of this many bytes survive or not.
    Regions(u64),
    /// All but one effect survive.
    AllButOne,
    /// One effect survives.
    OnlyOne,
    /// This number of the latest effects survives, and nothing else does.
    Newest(usize),
    /// Writes of this structure survive, and nothing else does.
    Only(Structure),
    /// All but the writes of this structure survive.
    Without(Structure),
}

impl Style {
    fn draw(rng: &mut Rng) -> Style {
        match rng.below(12) {
            0 => Style::DropAll,
            1 => Style::ApplyAll,
            2 => Style::Each(10),
            3 => Style::Each(50),
            4 => Style::Each(90),
            5 => Style::Before,
            6 => Style::After,
            7 => Style::Regions(512),
            8 => Style::Regions(4096),
            9 => Style::Regions(65536),
            10 => Style::AllButOne,
            _ => Style::OnlyOne,
        }
    }

    fn draw_adverse(rng: &mut Rng) -> Style {
        match rng.below(10) {
            0 => Style::DropAll,
            1 => Style::ApplyAll,
            2 => Style::Each(50),
            3 => Style::After,
            4 | 5 => Style::AllButOne,
            6 => Style::OnlyOne,
            _ => Style::Newest(rng.between(1, 4) as usize),
        }
    }
}

/// The choices of one crash, for all files of a disk.
#[derive(Debug)]
pub struct Crash {
    style: Style,
    torn_percent: u64,
    /// The moment or the effect that the style singles out, in effects since the start.
    at: usize,
    seen: usize,
    /// All effects.
    effects: usize,
    salt: u64,
    rng: Rng,
}

impl Crash {
    /// The crash that this stream makes of `effects` effects that were not flushed.
    pub fn draw(mut rng: Rng, losses: Losses, effects: usize) -> Crash {
        let style = match losses {
            Losses::Any => Style::draw(&mut rng),
            Losses::Adverse => Style::draw_adverse(&mut rng),
            Losses::AllBut(structure) => Style::Only(structure),
            Losses::Of(structure) => Style::Without(structure),
        };
        Crash {
            style,
            torn_percent: match style {
                Style::Only(_) | Style::Without(_) => 0,
                _ => rng.pick(&[0, 0, 10, 50, 100]),
            },
            at: rng.index(effects.max(1)),
            seen: 0,
            effects,
            salt: rng.bits(),
            rng,
        }
    }

    /// A text for traces.
    pub fn describe(&self) -> String {
        format!(
            "{:?} at {} with {}% torn",
            self.style, self.at, self.torn_percent
        )
    }

    /// Whether an effect survives or not by what it changes.
    pub fn goes_by_structure(&self) -> bool {
        matches!(self.style, Style::Only(_) | Style::Without(_))
    }

    /// Decides the next effect, in the order in which they were applied, and changes the file.
    pub fn decide(
        &mut self,
        (effect, place): (&Effect, Option<Structure>),
        sector_bytes: u64,
        content: &mut Content,
    ) -> Fate {
        let index = self.seen;
        self.seen += 1;
        let torn = self.rng.chance(self.torn_percent);
        let survives = match self.style {
            Style::DropAll => false,
            Style::ApplyAll => true,
            Style::Each(percent) => self.rng.chance(percent),
            Style::Before => index < self.at,
            Style::After => index > self.at,
            Style::Regions(bytes) => return self.by_region(effect, bytes, sector_bytes, content),
            Style::AllButOne => index != self.at,
            Style::OnlyOne => index == self.at,
            Style::Newest(count) => index + count >= self.effects,
            Style::Only(structure) => place == Some(structure),
            Style::Without(structure) => place != Some(structure),
        };
        let extreme = matches!(self.style, Style::DropAll | Style::ApplyAll);
        if torn && !extreme {
            return self.tear(effect, sector_bytes, content);
        }
        if survives {
            effect.apply(content);
            Fate::Applied
        } else {
            Fate::Dropped
        }
    }

    fn by_region(
        &self,
        effect: &Effect,
        region_bytes: u64,
        sector_bytes: u64,
        content: &mut Content,
    ) -> Fate {
        let lives = |_: usize, atom: &Effect| {
            let region = atom.range().0 / region_bytes;
            Rng::new(self.salt ^ region).chance(50)
        };
        apply_some(&effect.atoms(sector_bytes), content, lives)
    }

    fn tear(&mut self, effect: &Effect, sector_bytes: u64, content: &mut Content) -> Fate {
        if let Effect::SetLen(len) = effect {
            return self.tear_length(*len, content);
        }
        let atoms = effect.atoms(sector_bytes);
        let cut = self.rng.index(atoms.len() + 1);
        let shape = self.rng.below(3);
        let rng = &mut self.rng;
        apply_some(&atoms, content, |index, _| match shape {
            0 => index < cut,
            1 => index >= cut,
            _ => rng.chance(50),
        })
    }

    /// A change of length gets part of the way.
    fn tear_length(&mut self, len: u64, content: &mut Content) -> Fate {
        let (low, high) = (content.len().min(len), content.len().max(len));
        let steps = high / SPACE_ATOM_BYTES - low / SPACE_ATOM_BYTES;
        if steps == 0 {
            return Fate::Dropped;
        }
        let at = low / SPACE_ATOM_BYTES + self.rng.between(1, steps);
        content.set_len(at * SPACE_ATOM_BYTES);
        Fate::Torn(format!("at {:#x}", at * SPACE_ATOM_BYTES))
    }
}

/// Applies the atoms that live.
fn apply_some(
    atoms: &[Effect],
    content: &mut Content,
    mut lives: impl FnMut(usize, &Effect) -> bool,
) -> Fate {
    let mut marks = String::with_capacity(atoms.len());
    for (index, atom) in atoms.iter().enumerate() {
        if lives(index, atom) {
            atom.apply(content);
            marks.push('#');
        } else {
            marks.push('.');
        }
    }
    match (marks.contains('#'), marks.contains('.')) {
        (true, true) => Fate::Torn(marks),
        (true, false) => Fate::Applied,
        _ => Fate::Dropped,
    }
}
