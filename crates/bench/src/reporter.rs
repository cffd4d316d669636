//! Output of results while they are made, for all tables: rows as they come, or one document at the
//! end, and a page. An interrupted or killed run has written its results so far.

use std::path::Path;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::{DoneOnInterrupt, PrintedOnInterrupt};
use cowslip_console::output;
use cowslip_console::progress::Progress;
use cowslip_testbed::{Place, TextColumns};
use serde_json::{Value, json};

use crate::conditions;
use crate::document::Document;
use crate::page::file::PageFile;
use crate::pages;

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportStyle {
    /// Rows for people.
    Rows,
    /// One document for programs, at the end.
    Json,
    /// Together with earlier tables, by the caller that makes them all. After an interruption as
    /// their summary, or as one document of all.
    Together {
        /// Whether it is a document.
        json: bool,
    },
}

/// Where results go.
#[derive(Debug)]
pub struct Outlet {
    /// Format on standard output.
    pub style: ReportStyle,
    /// The page to write as well.
    pub page: Option<PageFile>,
    /// Results of tables before it, which are on the same page.
    pub earlier: Vec<Value>,
    /// The command line that would make this alone, if it is not this process's.
    pub command: Option<String>,
}

impl Outlet {
    /// Of a table that is made alone, by the options `--json` and `--html`.
    ///
    /// # Errors
    /// The page cannot be written.
    pub fn alone(json: bool, html: Option<&Path>) -> Result<Outlet, CommandError> {
        Ok(Outlet {
            style: if json {
                ReportStyle::Json
            } else {
                ReportStyle::Rows
            },
            page: html.map(PageFile::new).transpose()?,
            earlier: Vec::new(),
            command: None,
        })
    }
}

/// The results so far.
#[derive(Debug)]
struct Reporter {
    outlet: Outlet,
    printed: PrintedOnInterrupt,
    page_written: DoneOnInterrupt,
}

impl Reporter {
    /// Nothing is printed so far.
    fn new(outlet: Outlet) -> Reporter {
        let reporter = Reporter {
            outlet,
            printed: PrintedOnInterrupt::nothing(),
            page_written: DoneOnInterrupt::nothing(),
        };
        // Its first rows may be minutes away.
        if !reporter.outlet.earlier.is_empty() {
            let end = reporter.together(&reporter.outlet.earlier);
            reporter.printed.replace(|| {}, end);
        }
        reporter
    }

    /// More is measured: prints its rows, and keeps the report for a signal that comes now.
    fn add(&self, rows: &str, interrupted: Value, progress: &Progress) {
        let end = self.end(&interrupted);
        let print = || progress.suspend(|| output::print(rows));
        self.printed.replace(print, end);
        if let Some(page) = self.outlet.page.clone() {
            let documents = self.documents(interrupted);
            self.page_written.replace(move || {
                // No reader is left.
                drop(pages::page(&documents).map(|made| page.write_at_last(&made)));
            });
        }
    }

    /// All results, this one's last.
    fn documents(&self, document: Value) -> Vec<Value> {
        let earlier = self.outlet.earlier.iter().cloned();
        earlier.chain([document]).collect()
    }

    /// Returns these results together.
    fn together(&self, documents: &[Value]) -> String {
        match self.outlet.style {
            ReportStyle::Together { json: true } => output::json_text(&documents.into()) + "\n",
            _ => documents.iter().map(pages::summary).collect(),
        }
    }

    /// Returns the end of the output.
    fn end(&self, document: &Value) -> String {
        match self.outlet.style {
            ReportStyle::Json => output::json_text(document) + "\n",
            ReportStyle::Together { .. } => self.together(&self.documents(document.clone())),
            ReportStyle::Rows => {
                let document = Document(document);
                let notes = document.notes().map(str::to_string);
                let lines = notes.chain(document.shortfall_in_short());
                lines.map(|line| format!("\n{line}\n")).collect()
            }
        }
    }

    /// Prints what comes last and writes the page; the results. After a failure that is nothing if
    /// no cell is finished; one that an interruption has caused is left to that.
    ///
    /// # Errors
    /// The page cannot be written.
    fn finish(self, document: Value) -> Result<Value, CommandError> {
        if document["failure"].is_string() {
            self.printed.give_way();
            if document["cells-finished"] == 0 {
                return Ok(document);
            }
        }
        if !matches!(self.outlet.style, ReportStyle::Together { .. }) {
            let text = self.end(&document);
            self.printed.replace(|| output::print(&text), String::new());
        }
        if let Some(page) = &self.outlet.page {
            page.write(&pages::page(&self.documents(document.clone()))?)?;
        }
        Ok(document)
    }
}

/// The results of a table, whatever its rows are: for programs, and for pages that are made from
/// them.
pub struct Results {
    /// Arguments, the machine, and the places.
    pub conditions: Value,
    /// Rows in the order of measurement.
    pub rows: Vec<Value>,
    /// Notes below the table.
    pub notes: Vec<String>,
    /// Number of cells to measure, at all places.
    pub planned: usize,
    /// Number of measured cells.
    pub finished: usize,
    reporter: Reporter,
}

impl Results {
    /// Results without rows, of which this number of cells is planned.
    pub fn new(asked: Value, planned: usize, outlet: Outlet) -> Results {
        Results {
            conditions: conditions::of_table(asked, &outlet),
            rows: Vec::new(),
            notes: Vec::new(),
            planned,
            finished: 0,
            reporter: Reporter::new(outlet),
        }
    }

    /// Adds a place of files, with its conditions.
    pub fn add_place(&mut self, place: &Place) {
        let mut place_conditions = conditions::of_directory(&place.directory);
        place_conditions["filesystem"] = place.name.clone().into();
        conditions::add_place(&mut self.conditions, place_conditions);
    }

    /// A cell cannot be measured here, for the reason that this note has.
    pub fn leave_out(&mut self, note: String) {
        self.planned -= 1;
        self.notes.push(note);
    }

    /// Takes rows that are cells of their own, each as fields for people and for programs.
    pub fn add(
        &mut self,
        columns: &mut TextColumns,
        rows: Vec<(Vec<String>, Value)>,
        progress: &Progress,
    ) {
        let (fields, rows): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        self.finished += rows.len();
        self.rows.extend(rows);
        self.show(progress, || fields.iter().map(|f| columns.row(f)).collect());
    }

    /// Prints what is new, if rows are printed as they come, and keeps all for a signal that comes
    /// now.
    pub fn show(&self, progress: &Progress, new: impl FnOnce() -> String) {
        let is_printed = self.reporter.outlet.style == ReportStyle::Rows;
        let text = if is_printed { new() } else { String::new() };
        let mut interrupted = self.document(None);
        interrupted["interrupted"] = true.into();
        interrupted["out-of-time"] = false.into();
        self.reporter.add(&text, interrupted, progress);
    }

    /// The document of results that end here, by a failure if there was one.
    fn document(&self, failure: Option<String>) -> Value {
        json!({
            "conditions": self.conditions,
            "cells-planned": self.planned,
            "cells-finished": self.finished,
            "interrupted": false,
            "out-of-time": failure.is_none() && self.finished < self.planned,
            "failure": failure,
            "rows": self.rows,
            "notes": self.notes,
        })
    }

    /// Prints the end, with the failure if that was the outcome.
    ///
    /// # Errors
    /// The results cannot be written: an earlier error, if there was one.
    pub fn finish(self, outcome: Result<(), CommandError>) -> Result<Made, CommandError> {
        let document = self.document(outcome.as_ref().err().map(CommandError::to_string));
        match (self.reporter.finish(document), outcome) {
            (Ok(document), outcome) => Ok((document, outcome)),
            (Err(_), Err(error)) | (Err(error), Ok(())) => Err(error),
        }
    }
}

/// The results of a table and what went wrong after they were begun.
pub type Made = (Value, Result<(), CommandError>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_last_says_how_far_it_came() {
        let document = json!({
            "conditions": { "table": "flush" },
            "cells-planned": 3, "cells-finished": 1, "interrupted": false, "out-of-time": true, "failure": null,
            "rows": [], "notes": ["a note"],
        });
        let outlet = |style| Outlet {
            style,
            page: None,
            earlier: Vec::new(),
            command: None,
        };
        let end = |style| Reporter::new(outlet(style)).end(&document);
        assert_eq!(
            end(ReportStyle::Rows),
            "\na note\n\nOut of time: 1 of 3 cells are finished.\n"
        );
        assert_eq!(
            end(ReportStyle::Together { json: false }),
            "flush\n  Out of time: 1 of 3 cells are finished.\n"
        );
        let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(parsed(&end(ReportStyle::Json)), document);
        assert_eq!(
            parsed(&end(ReportStyle::Together { json: true })),
            json!([document])
        );
    }
}
