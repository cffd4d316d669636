//! Reads a table's JSON again: pages and summaries are made from it, so that a page can be made
//! long after the run, from several files, and shows the figures that programs get. Files may come
//! from anywhere: missing values are left out.

use std::fmt::Write;

use cowslip_testbed::Spread;
use serde_json::Value;

use crate::page::Kind;
use crate::report::RATIO_TITLES;

/// The document of one table.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a>(pub &'a Value);

/// A row of it.
#[derive(Clone, Copy, Debug)]
pub struct DocumentRow<'a>(pub &'a Value);

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

impl<'a> Document<'a> {
    /// The table's name; empty if the document is none of a table.
    pub fn table(self) -> &'a str {
        text(&self.0["conditions"], "table")
    }

    /// Returns the conditions under which it was made.
    pub fn conditions(self) -> &'a Value {
        &self.0["conditions"]
    }

    /// Title of the rate that runs are compared by.
    pub fn rate(self) -> &'a str {
        self.conditions()["rate"].as_str().unwrap_or("IOPS")
    }

    /// Returns the rows in the order of measurement.
    pub fn rows(self) -> impl Iterator<Item = DocumentRow<'a>> + Clone {
        self.0["rows"]
            .as_array()
            .into_iter()
            .flatten()
            .map(DocumentRow)
    }

    /// Returns the notes below the table.
    pub fn notes(self) -> impl Iterator<Item = &'a str> {
        let notes = self.0["notes"].as_array().into_iter().flatten();
        notes.filter_map(Value::as_str)
    }

    /// The file systems, each once.
    pub fn filesystems(self) -> Vec<&'a str> {
        distinct(self.rows().map(DocumentRow::filesystem))
    }

    /// How far it came, if not to its end, and why.
    pub fn shortfall(self) -> Option<String> {
        let short = self.shortfall_in_short()?;
        Some(match self.0["failure"].as_str() {
            Some(words) => format!("{short} {}", words.trim()),
            None => short,
        })
    }

    /// How far it came, if not to its end.
    pub fn shortfall_in_short(self) -> Option<String> {
        let count = |name: &str| self.0[name].as_u64().unwrap_or(0);
        let ended = match (
            &self.0["failure"],
            &self.0["interrupted"],
            &self.0["out-of-time"],
        ) {
            (Value::String(_), ..) => "Stopped by a failure",
            (_, Value::Bool(true), _) => "Interrupted",
            (_, _, Value::Bool(true)) => "Out of time",
            _ => return None,
        };
        let (finished, planned) = (count("cells-finished"), count("cells-planned"));
        Some(format!(
            "{ended}: {finished} of {planned} cells are finished."
        ))
    }

    /// How many times as fast as others Cowslip is, in lines of plain text.
    pub fn ratios_in_lines(self) -> String {
        let mut out = String::new();
        let ours = || self.rows().filter(|row| row.kind() == Kind::Ours);
        for filesystem in self.filesystems() {
            let here = || ours().filter(|row| row.filesystem() == filesystem);
            for (name, title) in RATIO_TITLES {
                let ratios: Vec<(f64, String)> = here()
                    .filter_map(|row| {
                        let of = format!("{}, {}", row.cell(), row.contestant());
                        Some((row.0[name].as_f64()?, of))
                    })
                    .collect();
                let Some(spread) = Spread::of(ratios.iter().map(|(ratio, _)| *ratio).collect())
                else {
                    continue;
                };
                let least = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0));
                let least = least.map_or("", |(_, of)| of.as_str());
                writeln!(
                    out,
                    "  {filesystem:<12} {title:<12} median {:6.2}, {:.2} to {:.2} in {} rows; least: {least}",
                    spread.median,
                    spread.least,
                    spread.greatest,
                    ratios.len(),
                )
                .expect("a string takes all");
            }
        }
        out
    }
}

/// Returns each name once, in the order of their first place.
pub fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for name in names {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}

impl<'a> DocumentRow<'a> {
    /// A word of it; empty if it has none of this name.
    pub fn text(self, name: &str) -> &'a str {
        text(self.0, name)
    }

    /// The file system.
    pub fn filesystem(self) -> &'a str {
        text(self.0, "filesystem")
    }

    /// The cell.
    pub fn cell(self) -> &'a str {
        text(self.0, "cell")
    }

    /// Returns the contestant's name.
    pub fn contestant(self) -> &'a str {
        text(self.0, "contestant")
    }

    /// Returns the command line of its first run.
    pub fn command(self) -> Option<&'a str> {
        self.0["command"].as_str()
    }

    /// Returns the contestant's kind.
    pub fn kind(self) -> Kind {
        kind_of(self.contestant())
    }

    /// Below half of both its neighbours, twice.
    pub fn is_outlier(self) -> bool {
        self.0["outlier"] == true
    }

    /// Its runs.
    pub fn runs(self) -> impl Iterator<Item = &'a Value> + Clone {
        self.0["runs"].as_array().into_iter().flatten()
    }

    /// A figure of its runs.
    pub fn spread(self, figure: &str) -> Option<Spread> {
        Spread::of(self.runs().filter_map(|run| run[figure].as_f64()).collect())
    }

    /// Names of the figures that runs have, in their order.
    pub fn figures(self) -> Vec<&'a str> {
        let runs = self.runs().filter_map(Value::as_object);
        let names = runs.flat_map(|run| run.iter().filter(|(_, value)| value.is_number()));
        let is_ratio = |name: &&str| RATIO_TITLES.iter().any(|(ratio, _)| ratio == name);
        let names = names.map(|(name, _)| name.as_str());
        distinct(names.filter(|name| *name != "iops" && !is_ratio(name)))
    }

    /// The run that is nearest to the median.
    pub fn median_run(self) -> Option<&'a Value> {
        let median = self.spread("iops")?.median;
        let distance = |run: &&Value| (run["iops"].as_f64().unwrap_or(f64::MAX) - median).abs();
        self.runs()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
    }

    /// The request counts by time step of the run that is nearest to the median, beside which
    /// stands what they allocated, and its duration in seconds.
    pub fn series(self) -> Option<(&'a Value, f64)> {
        // A guest reports two parts; the first one has the first writes.
        let told = &self.median_run()?["told"];
        let mut parts = [told, &told["first"]].into_iter();
        let part = parts.find(|part| part["series"].is_array())?;
        Some((part, part["seconds"].as_f64()?))
    }
}

/// Returns a list of counts; `None` if it is none.
pub fn numbers(list: &Value) -> Option<Vec<u64>> {
    list.as_array()?.iter().map(Value::as_u64).collect()
}

/// Returns the kind of a contestant of this name.
pub fn kind_of(contestant: &str) -> Kind {
    match contestant.split(' ').next() {
        Some("cowslip") => Kind::Ours,
        Some("raw") => Kind::Yardstick,
        _ => Kind::Peer,
    }
}
