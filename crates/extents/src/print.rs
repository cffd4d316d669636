//! The report's way to standard output, for people or as JSON; long lists go as they come.

use std::io::IsTerminal;

use cowslip_console::output::{OutputFormat, print};
use cowslip_queue::fiemap::Record;
use serde_json::{Map, Value};

use crate::interleave::{Interleaving, is_placed};
use crate::join::Joined;
use crate::json as as_json;
use crate::report::{FileReport, ImageReport};
use crate::svg::Ink;
use crate::text::{self, Bars};

/// Lists are written in pieces of about this length.
const PIECE_BYTES: usize = 1 << 16;
/// How deep a file's members stand in JSON.
const DEPTH: usize = 3;

/// Whether pictures are drawn in the output; `None` is only on a terminal.
pub type When = Option<bool>;

/// How much is shown, and with what.
#[derive(Clone, Copy, Debug)]
pub struct Show {
    format: OutputFormat,
    map: bool,
    /// Pictures in the output.
    pub drawn: bool,
    /// Colours of the pictures.
    pub ink: Ink,
    bars: Bars,
}

impl Show {
    /// Returns the choice of the command line, the terminal and the environment.
    pub fn of(format: OutputFormat, map: bool, draw: When) -> Show {
        let is_terminal = std::io::stdout().is_terminal();
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
            .iter()
            .find_map(|name| set(name));
        let is_unicode = locale.is_some_and(|locale| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        let is_able = is_terminal && is_unicode && set("TERM").is_some_and(|term| term != "dumb");
        Show {
            format,
            map,
            drawn: draw.unwrap_or(is_terminal) && format == OutputFormat::Human,
            ink: match is_able && set("NO_COLOR").is_none() {
                true => Ink::Colours,
                false => Ink::Plain,
            },
            bars: match is_able {
                true => Bars::Blocks,
                false => Bars::Plain,
            },
        }
    }
}

/// Standard output.
pub struct Out {
    show: Show,
    files: usize,
}

/// A list on its way out.
pub struct List {
    format: OutputFormat,
    text: String,
    count: u64,
}

impl Out {
    /// Returns an output with nothing written yet.
    pub fn new(show: Show) -> Out {
        Out { show, files: 0 }
    }

    fn members(&self, members: &Map<String, Value>) {
        print(&format!(",\n{}", as_json::members(members, DEPTH)));
    }

    /// Prints the facts about a file that precede its list.
    pub fn file_head(&mut self, report: &FileReport<'_>) {
        match self.show.format {
            OutputFormat::Human => print(&text::head(report)),
            OutputFormat::Json => {
                if self.files == 0 {
                    print("{\n    \"files\": [\n");
                }
                let members = as_json::members(&as_json::head(report), DEPTH);
                print(&format!("        {{\n{members}"));
            }
        }
        self.files += 1;
    }

    /// A list of records, if lists are wanted.
    pub fn records(&self) -> Option<List> {
        self.list("map", text::map_head)
    }

    /// A list of an image's pieces, if lists are wanted.
    pub fn pieces(&self) -> Option<List> {
        self.list("guest-map", text::guest_map_head)
    }

    fn list(&self, name: &str, head: fn() -> String) -> Option<List> {
        self.show.map.then(|| List {
            format: self.show.format,
            text: match self.show.format {
                OutputFormat::Human => head(),
                OutputFormat::Json => format!(",\n            \"{name}\": ["),
            },
            count: 0,
        })
    }

    /// Prints the sums of a file's records.
    pub fn file_sums(&self, report: &FileReport<'_>) {
        match self.show.format {
            OutputFormat::Human => print(&text::sums(report, self.show.bars)),
            OutputFormat::Json => self.members(&as_json::sums(report)),
        }
    }

    /// The image in the file.
    pub fn image(&self, report: &ImageReport<'_>) {
        match self.show.format {
            OutputFormat::Human => print(&text::image(report)),
            OutputFormat::Json => {
                let mut members = Map::new();
                members.insert("image".to_string(), as_json::image(report));
                self.members(&members);
            }
        }
    }

    /// Text, for people only.
    pub fn text(&self, text: &str) {
        if self.show.format == OutputFormat::Human {
            print(text);
        }
    }

    /// All is said of a file.
    pub fn end_file(&self, is_last: bool) {
        match (self.show.format, is_last) {
            (OutputFormat::Human, _) => print("\n"),
            (OutputFormat::Json, false) => print("\n        },\n"),
            (OutputFormat::Json, true) => print("\n        }\n"),
        }
    }

    /// All is said but how files lie between each other.
    pub fn end(&self, devices: &[(String, Vec<(&str, Interleaving)>)]) {
        match self.show.format {
            OutputFormat::Human => {
                for (device, files) in devices {
                    print(&(text::interleaving(device, files) + "\n"));
                }
                print(&text::definitions());
            }
            OutputFormat::Json => {
                let devices = devices
                    .iter()
                    .map(|(device, files)| as_json::interleaving(device, files));
                let mut members = Map::new();
                members.insert("interleaving".to_string(), devices.collect());
                members.insert("definitions".to_string(), as_json::definitions());
                print(&format!("    ],\n{}\n}}\n", as_json::members(&members, 1)));
            }
        }
    }
}

impl List {
    fn push(&mut self, human: impl FnOnce(&mut String), json: impl FnOnce(&mut String)) {
        match self.format {
            OutputFormat::Human => human(&mut self.text),
            OutputFormat::Json => {
                self.text
                    .push_str(if self.count > 0 { ",\n" } else { "\n" });
                json(&mut self.text);
            }
        }
        self.count += 1;
        if self.text.len() > PIECE_BYTES {
            print(&self.text);
            self.text.clear();
        }
    }

    /// The next record.
    pub fn record(&mut self, record: &Record) {
        let physical = is_placed(record).then_some(record.physical);
        self.push(
            |out| text::map_line(record, physical, out),
            |out| as_json::map_line(record, physical, out),
        );
    }

    /// The next piece of an image.
    pub fn piece(&mut self, piece: &Joined) {
        self.push(
            |out| text::guest_map_line(piece, out),
            |out| as_json::guest_map_line(piece, out),
        );
    }

    /// Ends the list.
    pub fn end(mut self) {
        if self.format == OutputFormat::Json {
            self.text += "\n            ]";
        }
        print(&self.text);
    }
}
