//! Coefficients and measurements from the data files beside this crate's sources.

use crate::facts::FileSystem;

const FIGURES: &str = include_str!("../data/figures.tsv");
const MEASURED: &str = include_str!("../data/measured.tsv");
const CONFIRMED: &str = include_str!("../data/confirmed.tsv");

/// A coefficient of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficient {
    /// Its value.
    pub value: f64,
    /// The measurement that it is from.
    pub source: &'static str,
}

fn lines(text: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split('\t').collect())
}

/// The coefficient of this name on this file system.
///
/// # Panics
/// There is none, which a test of this crate would have found.
pub fn coefficient(name: &str, on: FileSystem) -> Coefficient {
    let column = match on {
        FileSystem::Ext4 | FileSystem::Other => 1,
        FileSystem::Xfs => 2,
        FileSystem::Btrfs => 3,
    };
    let line = lines(FIGURES).find(|line| line.first() == Some(&name));
    let line = line.unwrap_or_else(|| panic!("no coefficient '{name}'"));
    Coefficient {
        value: line[column]
            .parse()
            .unwrap_or_else(|_| panic!("'{name}' is no number")),
        source: line[4],
    }
}

/// The value of a coefficient.
pub fn figure(name: &str, on: FileSystem) -> f64 {
    coefficient(name, on).value
}

/// The names of all coefficients.
#[cfg(test)]
pub fn names() -> Vec<&'static str> {
    lines(FIGURES).map(|line| line[0]).collect()
}

/// A measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The question: `first-writes` …
    pub question: &'static str,
    /// The file system.
    pub on: &'static str,
    /// Circumstances: `cluster=65536 …`
    pub circumstances: &'static str,
    /// The value.
    pub value: f64,
    /// The document.
    pub source: &'static str,
}

impl Measured {
    /// A number among the circumstances; 0 if it is not among them.
    pub fn number(&self, name: &str) -> f64 {
        let text = self.word(name).unwrap_or_default();
        text.parse().unwrap_or_default()
    }

    /// A word among the circumstances.
    pub fn word(&self, name: &str) -> Option<&'static str> {
        let pairs = self.circumstances.split(' ');
        let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// All measurements.
pub fn measured() -> impl Iterator<Item = Measured> {
    lines(MEASURED).map(|line| Measured {
        question: line[0],
        on: line[1],
        circumstances: line[2],
        value: line[3].parse().expect("a measurement is a number"),
        source: line[4],
    })
}

/// The better side of a measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// More of it.
    More,
    /// Less of it.
    Less,
}

impl Better {
    /// The factor by which `this` is better than `other`.
    pub fn factor(self, this: f64, other: f64) -> f64 {
        match self {
            Better::More => this / other,
            Better::Less => other / this,
        }
    }
}

/// A measurement of the advised way in a situation beside the other way.
#[derive(Clone, Debug, PartialEq)]
pub struct Confirmed {
    /// The situation's title.
    pub situation: &'static str,
    /// The file system.
    pub on: &'static str,
    /// The better side of the quantity.
    pub better: Better,
    /// Its unit.
    pub unit: &'static str,
    /// The value with the advised way.
    pub advised: f64,
    /// The advised way, as it was measured.
    pub advised_way: &'static str,
    /// The value with the other way.
    pub other: f64,
    /// The other way, as it was measured.
    pub other_way: &'static str,
    /// The command line that measures both.
    pub command: &'static str,
}

impl Confirmed {
    /// The factor by which the advised way was better.
    pub fn factor(&self) -> f64 {
        self.better.factor(self.advised, self.other)
    }
}

/// All measurements of situations.
pub fn confirmed() -> impl Iterator<Item = Confirmed> {
    let number = |text: &str| text.parse().expect("a measurement is a number");
    lines(CONFIRMED).map(move |line| Confirmed {
        situation: line[0],
        on: line[1],
        better: match line[2] {
            "more" => Better::More,
            _ => Better::Less,
        },
        unit: line[3],
        advised: number(line[4]),
        advised_way: line[5],
        other: number(line[6]),
        other_way: line[7],
        command: line[8],
    })
}
