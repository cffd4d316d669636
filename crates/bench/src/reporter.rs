//! Output of results while they are made, for all tables: rows as they come, or one document at the
//! end, and a page. An interrupted or killed run has written its results so far.

use std::path::Path;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::{DoneOnInterrupt, PrintedOnInterrupt};
use cowslip_console::output;
use cowslip_console::progress::Progress;
use cowslip_testbed::{Place, TextColumns};
use serde_json::Value;

use crate::conditions;
use crate::document::Document;
use crate::page::file::PageFile;
use crate::pages;
use crate::report::{Cells, End, document};

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
pub struct Reporter {
    outlet: Outlet,
    printed: PrintedOnInterrupt,
    page_written: DoneOnInterrupt,
}

impl Reporter {
    /// Nothing is printed so far.
    pub fn new(outlet: Outlet) -> Reporter {
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

    /// Whether rows are printed as they come.
    pub fn wants_rows(&self) -> bool {
        self.outlet.style == ReportStyle::Rows
    }

    /// More is measured: prints its rows, and keeps the report for a signal that comes now.
    pub fn add(&self, rows: &str, interrupted: Value, progress: &Progress) {
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
    pub fn finish(self, document: Value) -> Result<Value, CommandError> {
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

/// Results whose rows need nothing of each other: those of the tables of files.
pub struct Results {
    conditions: Value,
    rows: Vec<Value>,
    notes: Vec<String>,
    planned: usize,
    columns: TextColumns,
    reporter: Reporter,
}

impl Results {
    /// Results without rows, of which this number is planned.
    pub fn new(
        conditions: &Value,
        planned: usize,
        outlet: Outlet,
        columns: TextColumns,
    ) -> Results {
        Results {
            conditions: conditions::of_table(conditions.clone(), &outlet),
            rows: Vec::new(),
            notes: Vec::new(),
            planned,
            columns,
            reporter: Reporter::new(outlet),
        }
    }

    /// Adds the conditions of a place.
    pub fn add_place(&mut self, place: &Place) {
        let mut place_conditions = conditions::of_directory(&place.directory);
        place_conditions["filesystem"] = place.name.clone().into();
        conditions::add_place(&mut self.conditions, place_conditions);
    }

    /// Adds a note below the table.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// A row cannot be measured here, for the reason that this note has.
    pub fn leave_out(&mut self, note: String) {
        self.planned -= 1;
        self.note(note);
    }

    /// Takes rows that are measured, each as fields for people and for programs, and prints them.
    pub fn add(&mut self, rows: Vec<(Vec<String>, Value)>, progress: &Progress) {
        let mut text = String::new();
        for (fields, row) in rows {
            if self.reporter.wants_rows() {
                text += &self.columns.row(&fields);
            }
            self.rows.push(row);
        }
        let interrupted = self.document(End::Interrupted);
        self.reporter.add(&text, interrupted, progress);
    }

    fn cells(&self) -> Cells {
        Cells {
            planned: self.planned,
            finished: self.rows.len(),
        }
    }

    fn document(&self, end: End<'_>) -> Value {
        let rows = self.rows.clone();
        document(&self.conditions, self.cells(), end, rows, &self.notes)
    }

    /// Prints the end, with the failure if that was the outcome.
    ///
    /// # Errors
    /// The results cannot be written, and no earlier error occurred.
    pub fn finish(self, outcome: Result<(), CommandError>) -> Result<Made, CommandError> {
        let failure = outcome.as_ref().err().map(CommandError::to_string);
        let document = self.document(End::of(failure.as_deref(), self.cells()));
        made(self.reporter.finish(document), outcome)
    }
}

/// The results of a table and what went wrong after they were begun.
pub type Made = (Value, Result<(), CommandError>);

/// Combines the document and the outcome of a measurement.
///
/// # Errors
/// The document could not be written, and no earlier error occurred.
pub fn made(
    document: Result<Value, CommandError>,
    outcome: Result<(), CommandError>,
) -> Result<Made, CommandError> {
    match (document, outcome) {
        (Ok(document), outcome) => Ok((document, outcome)),
        (Err(_), Err(error)) | (Err(error), Ok(())) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
