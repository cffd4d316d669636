//! The output of `grow`: a line for each file when its space is settled, or everything as lines of
//! JSON.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::json;

use crate::output;
use crate::size::human;

/// The amount and format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportStyle {
    /// Lines of text for people.
    Lines,
    /// A line of JSON for each event.
    Json,
    /// Errors only.
    Nothing,
}

/// Events of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// Space was allocated behind its end.
    #[serde(rename_all = "kebab-case")]
    Allocated {
        /// Offset of the space.
        start: u64,
        /// Bytes that were allocated.
        bytes: u64,
        /// The file's length then.
        size: u64,
    },
    /// Space that was left behind its end is free again.
    #[serde(rename_all = "kebab-case")]
    GivenBack {
        /// Bytes that were given back.
        bytes: u64,
        /// The file's length.
        size: u64,
        /// Steps since it was first seen.
        steps: u64,
    },
    /// The file is opened and closed all the time: its space stays for now.
    #[serde(rename_all = "kebab-case")]
    Kept {
        /// Bytes that stay allocated behind its end.
        bytes: u64,
        /// The file's length.
        size: u64,
    },
    /// The file gets no space.
    #[serde(rename_all = "kebab-case")]
    LeftAlone {
        /// Reason, in words.
        why: String,
    },
    /// Space behind its end could not be given back.
    #[serde(rename_all = "kebab-case")]
    Left {
        /// Bytes that stay allocated behind its end.
        bytes: u64,
        /// Reason, in words.
        why: String,
    },
}

/// Totals of a run, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Summary {
    /// Files that were given space.
    pub files: u64,
    /// Number of allocations.
    pub steps: u64,
    /// Bytes allocated behind ends of files.
    pub allocated: u64,
    /// Bytes freed.
    pub given_back: u64,
    /// Bytes that are still allocated behind ends.
    pub left: u64,
    /// The most that lay behind all ends at a time.
    pub held_max: u64,
}

/// Reports events on standard output, and sums them up.
#[derive(Debug)]
pub struct Reporter {
    style: ReportStyle,
    /// Totals of the events so far, in bytes and numbers.
    pub summary: Summary,
}

impl Reporter {
    /// A reporter with totals of zero.
    pub fn new(style: ReportStyle) -> Reporter {
        Reporter {
            style,
            summary: Summary::default(),
        }
    }

    /// Reports that from now on no event is missed.
    pub fn begin(&self, paths: &[PathBuf]) {
        let paths = paths.iter().map(|path| path.display().to_string());
        let paths: Vec<String> = paths.collect();
        match self.style {
            ReportStyle::Json => output::print(&format!("{}\n", json!({ "watching": paths }))),
            ReportStyle::Lines => output::print(&format!("watching {}\n", paths.join(", "))),
            ReportStyle::Nothing => return,
        }
        output::flush();
    }

    /// Reports an event of the file of this name.
    pub fn event(&mut self, name: &str, event: &Event) {
        match event {
            Event::Allocated { bytes, .. } => {
                self.summary.steps += 1;
                self.summary.allocated += bytes;
            }
            Event::GivenBack { bytes, .. } => self.summary.given_back += bytes,
            Event::Left { bytes, .. } => self.summary.left += bytes,
            Event::Kept { .. } | Event::LeftAlone { .. } => {}
        }
        match self.style {
            ReportStyle::Json => {
                let mut line = json!({ "file": name });
                if let (Some(line), Ok(event)) = (line.as_object_mut(), serde_json::to_value(event))
                    && let Some(event) = event.as_object()
                {
                    line.extend(event.clone());
                }
                output::print(&format!("{line}\n"));
                output::flush();
            }
            ReportStyle::Lines => {
                if let Some(line) = line(event) {
                    output::print(&format!("{name}: {line}\n"));
                    output::flush();
                }
            }
            ReportStyle::Nothing => {}
        }
        if let (Event::Left { .. }, ReportStyle::Json | ReportStyle::Nothing) = (event, self.style)
            && let Some(line) = line(event)
        {
            output::warn(&format!("{name}: {line}"));
        }
    }

    /// Reports the totals, at the end of the run.
    pub fn end(&self) {
        let Summary {
            files,
            steps,
            allocated,
            given_back,
            left,
            held_max,
        } = self.summary;
        match self.style {
            ReportStyle::Json => {
                output::print(&format!("{}\n", json!({ "summary": self.summary })))
            }
            ReportStyle::Lines => output::print(&format!(
                "{files} files, {steps} steps, {} allocated ahead, {} at most at a time, {} freed, {} left\n",
                human(allocated),
                human(held_max),
                human(given_back),
                human(left)
            )),
            ReportStyle::Nothing => {}
        }
    }
}

fn line(event: &Event) -> Option<String> {
    Some(match event {
        Event::Allocated { .. } => return None,
        Event::GivenBack { bytes, size, steps } => format!(
            "{} long, {steps} steps, {} freed",
            human(*size),
            human(*bytes)
        ),
        Event::Kept { bytes, size } => format!(
            "{} long, opened and closed all the time: {} stay allocated beyond its end for now",
            human(*size),
            human(*bytes)
        ),
        Event::LeftAlone { why } => format!("skipped: {why}"),
        Event::Left { bytes, why } => {
            format!("{} stay allocated beyond its end: {why}", human(*bytes))
        }
    })
}
