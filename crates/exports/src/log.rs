//! [`Log`]: events of a server on standard error, as lines or as JSON.
//!
//! As JSON a line is an object: `time` (UTC, RFC 3339), `level` (`info`, `warning` or `error`),
//! `message`, and `data` where an event has some.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use cowslip_console::output::{Program, is_called_as_qemu, print_error};
use cowslip_console::time::date_and_time;
use serde_json::{Map, Value};

/// Events that a server reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Verbosity {
    /// Errors that end the server.
    #[default]
    Errors,
    /// All events.
    Everything,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// An event that is part of serving.
    Usual,
    /// A client was lost, or could not be served.
    Failure,
}

/// The form of reports (`--log-format`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// A line of text.
    #[default]
    Lines,
    /// An object a line.
    Json,
}

/// Reports events on standard error.
#[derive(Clone)]
pub struct Log {
    program: Program,
    verbosity: Verbosity,
    format: LogFormat,
}

impl Log {
    /// A log of this program.
    pub fn new(program: &Program, verbosity: Verbosity) -> Log {
        Log {
            program: program.clone(),
            verbosity,
            format: LogFormat::Lines,
        }
    }

    /// The same in another form.
    #[must_use]
    pub fn in_format(self, format: LogFormat) -> Log {
        Log { format, ..self }
    }

    /// Whether events of this kind are reported. Under the name qemu-nbd usual ones are not, since
    /// scripts compare its output.
    pub fn reports(&self, severity: Severity) -> bool {
        self.verbosity == Verbosity::Everything
            && (severity == Severity::Failure || !is_called_as_qemu())
    }

    /// Writes a line about an event, if events of this kind are reported.
    pub fn report(&self, severity: Severity, line: impl FnOnce() -> String) {
        if self.reports(severity) {
            let level = match severity {
                Severity::Usual => "info",
                Severity::Failure => "warning",
            };
            self.put(level, line(), None);
        }
    }

    /// Writes an event by its name with its data, if usual events are reported.
    pub fn event(&self, name: &str, data: &Value) {
        if self.reports(Severity::Usual) {
            self.write_data(name, data);
        }
    }

    /// Writes a line, whatever the verbosity.
    pub fn write(&self, line: impl fmt::Display) {
        self.put("info", line.to_string(), None);
    }

    /// Writes data by their name, whatever the verbosity.
    pub fn write_data(&self, name: &str, data: &Value) {
        self.put("info", name.to_string(), Some(data));
    }

    /// Writes what the sandbox takes away: if usual events are reported, or not all of it is in
    /// force.
    pub fn sandbox(&self, report: &str, is_whole: bool) {
        match is_whole {
            true => self.report(Severity::Usual, || report.to_string()),
            false => self.put("warning", report.to_string(), None),
        }
    }

    /// Writes why the server ends.
    pub fn fail(&self, why: impl fmt::Display) {
        self.put("error", why.to_string(), None);
    }

    fn put(&self, level: &str, message: String, data: Option<&Value>) {
        match (self.format, data) {
            (LogFormat::Lines, None) => self.program.complain(message),
            (LogFormat::Lines, Some(data)) => {
                self.program.complain(format_args!("{message} {data}"));
            }
            (LogFormat::Json, _) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                let now = now.unwrap_or_default();
                let time = (now.as_secs(), now.subsec_micros());
                print_error(&format!("{}\n", object(time, (level, message), data)));
            }
        }
    }
}

/// The object of a report at a moment: seconds since 1970, and microseconds.
fn object(
    (seconds, micros): (u64, u32),
    (level, message): (&str, String),
    data: Option<&Value>,
) -> Value {
    let date = date_and_time(seconds).replace(' ', "T");
    let mut object = Map::new();
    object.insert("time".into(), format!("{date}.{micros:06}Z").into());
    object.insert("level".into(), level.into());
    object.insert("message".into(), message.into());
    if let Some(data) = data {
        object.insert("data".into(), data.clone());
    }
    object.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_is_one_line_whatever_is_in_it() {
        let time = (1_795_295_925, 7);
        let line = object(time, ("info", "a\n\"b\"".into()), None).to_string();
        assert_eq!(
            line,
            r#"{"time":"2026-11-21T21:18:45.000007Z","level":"info","message":"a\n\"b\""}"#
        );
        let data = json!({"id": "x"});
        let line = object(time, ("info", "JOB".into()), Some(&data)).to_string();
        assert!(
            line.ends_with(r#""message":"JOB","data":{"id":"x"}}"#),
            "{line}"
        );
    }
}
