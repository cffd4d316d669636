//! The results for people: one line a method, as soon as all methods of a place in one state are
//! done.

use std::fmt::Write;

use cowslip_testbed::Spread;

use super::method::Method;
use super::results::{Row, calls};

/// Note below the table.
pub const NOTE: &str = "Times are medians, least and most in brackets. 'call' ends when the last call returns, 'durable' when fsync \
     after it does. CPU is the calling thread's. 'perfect' is the fewest extents that the file system can express.";

/// Widths: of places, states, methods.
pub struct Table {
    place: usize,
    method: usize,
    is_titled: bool,
}

const STATE: usize = 8;

impl Table {
    /// Returns a table for these places and methods.
    pub fn new(places: &[String], methods: &[Method]) -> Table {
        let longest = |names: &mut dyn Iterator<Item = usize>| names.max().unwrap_or(0);
        Table {
            place: longest(&mut places.iter().map(|name| name.chars().count())).max(2),
            method: longest(&mut methods.iter().map(|method| method.name().len())).max(6),
            is_titled: false,
        }
    }

    /// Returns these rows, with the titles above the first.
    pub fn rows(&mut self, rows: &[Row]) -> String {
        let mut text = String::new();
        if !self.is_titled && !rows.is_empty() {
            self.is_titled = true;
            text += &self.line(
                ["fs", "state", "method"],
                [
                    "call s",
                    "durable s",
                    "CPU s",
                    "extents",
                    "perfect",
                    "system calls",
                ],
            );
        }
        for row in rows {
            let names = [row.place.as_str(), row.state.name(), row.method.as_str()];
            let seconds = |spread: Option<Spread>| spread.map_or(String::new(), seconds);
            let Some(last) = row.measured().last() else {
                let why = row.failure().unwrap_or_default();
                text += &self.line(names, ["-", "-", "-", "-", "-", why]);
                continue;
            };
            let calls = match row.failure() {
                Some(why) => format!("{}; a run failed: {why}", calls(&last.calls, last.faults)),
                None => calls(&last.calls, last.faults),
            };
            text += &self.line(
                names,
                [
                    &seconds(row.spread(|run| Some(run.call_seconds))),
                    &seconds(row.spread(|run| Some(run.durable_seconds))),
                    &seconds(row.spread(|run| Some(run.cpu_seconds))),
                    &counts(row.spread(|run| run.extents.map(|count| count as f64))),
                    &last.perfect.to_string(),
                    &calls,
                ],
            );
        }
        text
    }

    fn line(&self, names: [&str; 3], fields: [&str; 6]) -> String {
        let [place, state, method] = names;
        let mut line = String::new();
        let written = write!(
            line,
            "{place:<0$}  {state:<STATE$}  {method:<1$}  {2:>22}  {3:>22}  {4:>22}  {5:>12}  {6:>7}  {7}",
            self.place,
            self.method,
            fields[0],
            fields[1],
            fields[2],
            fields[3],
            fields[4],
            fields[5]
        );
        written.expect("a string takes all");
        line.trim_end().to_string() + "\n"
    }
}

/// "0.123 (0.120-0.130)", with as many decimals as the figure is worth.
fn seconds(spread: Spread) -> String {
    let decimals = match spread.median {
        median if median >= 0.1 => 2,
        median if median >= 0.001 => 4,
        _ => 6,
    };
    let Spread {
        median,
        least,
        greatest,
    } = spread;
    if least == greatest {
        return format!("{median:.decimals$}");
    }
    format!("{median:.decimals$} ({least:.decimals$}-{greatest:.decimals$})")
}

fn counts(spread: Option<Spread>) -> String {
    match spread {
        None => "unknown".to_string(),
        Some(spread) if spread.least == spread.greatest => format!("{:.0}", spread.median),
        Some(spread) => format!(
            "{:.0} ({:.0}-{:.0})",
            spread.median, spread.least, spread.greatest
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocate::results::{Measured, Run, State, SystemCalls};

    #[test]
    fn rows_say_what_was_called_and_what_failed() {
        let methods = Method::all(&[4096]);
        let mut table = Table::new(&["ext4:extents=off".to_string()], &methods);
        let mut row = Row::new("ext4:extents=off", State::Fresh, Method::PosixFallocate);
        for seconds in [2.0, 1.0, 4.0] {
            row.runs.push(Run::Measured(Measured {
                call_seconds: seconds,
                durable_seconds: 2.0 * seconds,
                cpu_seconds: 0.000_02,
                faults: Some(3),
                calls: SystemCalls {
                    fallocate: 1,
                    writes: Some(262_144),
                    ..SystemCalls::default()
                },
                extents: Some(9),
                perfect: 8,
                allocated_bytes: 1 << 30,
            }));
        }
        let mut failed = Row::new("ext4:extents=off", State::Aged, Method::Fallocate);
        failed
            .runs
            .push(Run::Failed("Operation not supported".to_string()));
        let text = table.rows(&[row, failed]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("2.00 (1.00-4.00)  "), "{text}");
        assert!(lines[1].contains("4.00 (2.00-8.00)"), "{text}");
        assert!(
            lines[1].ends_with("9        8  1 fallocate, 262144 writes"),
            "{text}"
        );
        assert!(lines[2].ends_with("Operation not supported"), "{text}");
        let at = |line: &str, word: &str| line.find(word).unwrap();
        assert_eq!(at(lines[0], "system calls"), at(lines[1], "1 fallocate"));
        assert_eq!(at(lines[0], "system calls"), at(lines[2], "Operation"));
    }
}
