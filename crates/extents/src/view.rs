//! The report on several files: each is opened once, walked, reported and drawn; then their
//! interleaving is shown.

use cowslip_console::error::CommandError;
use cowslip_console::output::Program;
use cowslip_queue::fiemap;

use crate::guest::ImageFile;
use crate::host::{AlignedFile, Method};
use crate::interleave::Interleaving;
use crate::look::{self, Beside, RECORDS_MAX, Subject};
use crate::print::{Out, Show};

/// A file that was named, and the image in it, if it is a qcow2 image that is to be looked into.
pub type Opened = (AlignedFile, Option<ImageFile>);

/// Keeps a picture.
pub type Keep<'a> = &'a dyn Fn(&str) -> Result<(), CommandError>;

/// How files are looked at.
pub struct Viewer<'a> {
    /// Selection of what is shown.
    pub show: Show,
    /// How extents of data files are found out.
    pub by: Option<Method>,
    /// Whether data is written back first.
    pub sync: fiemap::Sync,
    /// Opens a file by its name.
    pub open: &'a dyn Fn(&str) -> Result<Opened, CommandError>,
    /// Keeps the picture of the first file, if one is wanted.
    pub picture: Option<Keep<'a>>,
}

impl Viewer<'_> {
    /// Reports on these files.
    ///
    /// # Errors
    /// A walk fails, or the picture cannot be written. A file that cannot be opened is reported
    /// under the name of `program`, and the other files are processed.
    pub fn view(&self, files: &[String], program: &Program) -> Result<(), CommandError> {
        let (mut subjects, complaints) = self.open_all(files, program);
        let is_pictured =
            |number: usize| self.show.drawn || (number == 0 && self.picture.is_some());
        let keep_all = subjects.len() > 1;
        let mut room = RECORDS_MAX;
        for (number, subject) in subjects.iter_mut().enumerate() {
            if keep_all || subject.image.is_some() || is_pictured(number) {
                subject.collect(self.sync, &mut room)?;
            }
        }
        let names: Vec<String> = subjects.iter().map(|s| s.host.name.clone()).collect();
        let mut out = Out::new(self.show);
        for number in 0..subjects.len() {
            let neighbours = look::neighbours(&subjects, number);
            let beside = Beside {
                number,
                names: &names,
                neighbours: neighbours.as_ref(),
                is_pictured: is_pictured(number),
                sync: self.sync,
            };
            let scene = beside.report(&mut subjects, &mut out)?;
            if let (0, Some(keep), Some(scene)) = (number, self.picture, &scene) {
                keep(&scene.svg(neighbours.as_ref())?)?;
            }
            if let (true, Some(scene)) = (self.show.drawn, &scene) {
                out.text(&scene.terminal(self.show.ink, neighbours.as_ref())?);
            }
            out.end_file(number + 1 == subjects.len());
        }
        if !subjects.is_empty() {
            out.end(&interleavings(&subjects));
        }
        match complaints {
            0 => Ok(()),
            _ => Err(CommandError::already_reported()),
        }
    }

    /// Opens all files, and the data files of images behind them, each once. Complains of those
    /// that cannot be opened, and counts them.
    fn open_all(&self, files: &[String], program: &Program) -> (Vec<Subject>, usize) {
        let mut subjects: Vec<Subject> = Vec::new();
        let mut complaints = 0;
        let given = files.iter().map(|name| (name.clone(), None));
        let mut wanted: Vec<(String, Option<usize>)> = given.collect();
        let mut next = 0;
        while let Some((name, data_of)) = wanted.get(next).cloned() {
            next += 1;
            let opened = match data_of {
                None => (self.open)(&name),
                Some(_) => AlignedFile::open(&name, self.by).map(|host| (host, None)),
            };
            let (host, image) = match opened {
                Ok(opened) => opened,
                Err(error) => {
                    program.complain(error);
                    complaints += 1;
                    continue;
                }
            };
            let known = subjects.iter().position(|s| s.host.id == host.id);
            let number = known.unwrap_or(subjects.len());
            if let Some(image) = data_of {
                subjects[image].data = Some(number);
            }
            if known.is_none() {
                let data_file = image.as_ref().map(|image| image.data_file.clone());
                let data = match &data_file {
                    Some(None) => Some(number),
                    Some(Some(_)) | None => None,
                };
                if let Some(Some(name)) = data_file {
                    wanted.push((name, Some(number)));
                }
                subjects.push(Subject::new(host, image, data));
            }
        }
        (subjects, complaints)
    }
}

/// Returns, for each device with several of the files, its name, and how each lies between the
/// others.
fn interleavings(subjects: &[Subject]) -> Vec<(String, Vec<(&str, Interleaving)>)> {
    let mut devices: Vec<&str> = Vec::new();
    let mut found = Vec::new();
    for (number, subject) in subjects.iter().enumerate() {
        let device = subject.host.device.as_str();
        if devices.contains(&device) {
            continue;
        }
        devices.push(device);
        let Some(neighbours) = look::neighbours(subjects, number) else {
            continue;
        };
        let on = subjects
            .iter()
            .enumerate()
            .filter(|(_, other)| other.host.device == device && other.host.has_places());
        let files =
            on.map(|(number, other)| (other.host.name.as_str(), neighbours.of_file(number)));
        let source = subject.host.on.source.as_deref();
        found.push((source.unwrap_or(device).to_string(), files.collect()));
    }
    found
}
