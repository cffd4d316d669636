//! The results for people: one line a method, as soon as all methods of a place in one state are
//! done.

use cowslip_testbed::{Side, Spread, TextColumns};

use super::method::Method;
use super::results::{Measured, Row, State, calls};

/// Note below the table.
pub const NOTE: &str = "Times are medians, least and most in brackets. 'call' ends when the last call returns, 'durable' when fsync \
     after it does. CPU is the calling thread's. 'perfect' is the fewest extents that the file system can express.";

/// The columns for these places and methods.
pub fn columns(places: &[String], methods: &[Method]) -> TextColumns {
    let spread = 22;
    let mut columns = TextColumns::default()
        .names("fs", places)
        .names("state", [State::AsItIs.name()])
        .names("method", methods.iter().map(|method| method.name()))
        .numbers(["call s", "durable s", "CPU s"].map(|title| (title, spread)))
        .numbers([("extents", 12), ("perfect", 7)]);
    columns.push("system calls", 0, Side::Left);
    columns
}

/// The fields of a row.
pub fn fields(row: &Row) -> Vec<String> {
    let names = [&row.place, row.state.name(), &row.method].map(str::to_string);
    let seconds = |figure: fn(&Measured) -> f64| {
        let spread = row.spread(|run| Some(figure(run)));
        spread.map_or(String::new(), seconds)
    };
    let figures = match row.measured().last() {
        None => {
            let why = row.failure().unwrap_or_default();
            ["-", "-", "-", "-", "-", why].map(str::to_string)
        }
        Some(last) => [
            seconds(|run| run.call_seconds),
            seconds(|run| run.durable_seconds),
            seconds(|run| run.cpu_seconds),
            counts(row.spread(|run| run.extents.map(|count| count as f64))),
            last.perfect.to_string(),
            match row.failure() {
                Some(why) => format!("{}; a run failed: {why}", calls(&last.calls, last.faults)),
                None => calls(&last.calls, last.faults),
            },
        ],
    };
    names.into_iter().chain(figures).collect()
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
    use crate::allocate::results::{Run, SystemCalls};

    #[test]
    fn rows_say_what_was_called_and_what_failed() {
        let methods = Method::all(&[4096]);
        let mut table = columns(&["ext4:extents=off".to_string()], &methods);
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
        let text = [row, failed].map(|row| table.row(&fields(&row))).concat();
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
