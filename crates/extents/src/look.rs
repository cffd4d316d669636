//! A file among those that were named: its walk, its reports, its picture.

use cowslip::file::host::Aio;
use cowslip_console::error::CommandError;
use cowslip_console::queue::block_on;
use cowslip_queue::fiemap::{self, Flags, Record};

use crate::draw::{self, PIECES_MAX, Picture, Piece, Pieces, State};
use crate::guest::{ImageFile, PieceSink};
use crate::host::{AlignedFile, Steadiness};
use crate::interleave::{Neighbours, is_placed};
use crate::join::{Around, HostMap, Joined, What};
use crate::print::{List, Out};
use crate::report::{FileReport, ImageReport};
use crate::sequential::{self, Reason, Sequential};
use crate::summary::Summary;
use crate::svg::{self, Caption, Ink};

/// Records that are kept in memory, of all files together: 512 MiB.
pub const RECORDS_MAX: usize = 1 << 24;

/// A file, and what has been found of it.
pub struct Subject {
    /// The file.
    pub host: AlignedFile,
    /// The image in it.
    pub image: Option<ImageFile>,
    /// The number of the file that the image's data is in; `None` too if that could not be opened.
    pub data: Option<usize>,
    /// Its records, where they are needed again.
    records: Option<Vec<Record>>,
    summary: Summary,
    steadiness: Steadiness,
}

impl Subject {
    /// Returns a subject without records yet.
    pub fn new(host: AlignedFile, image: Option<ImageFile>, data: Option<usize>) -> Subject {
        let on = &host.on;
        let summary = Summary::new(host.size, on.block_bytes, on.limits);
        Subject {
            host,
            image,
            data,
            records: None,
            summary,
            steadiness: Steadiness::Steady,
        }
    }

    /// The records that were kept.
    pub fn records(&self) -> &[Record] {
        self.records.as_deref().unwrap_or_default()
    }

    /// The sums.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Walks the file and keeps its records, for which there is so much room.
    ///
    /// # Errors
    /// The system's, or there is no more room.
    pub fn collect(&mut self, sync: fiemap::Sync, room: &mut usize) -> Result<(), CommandError> {
        let mut records = Vec::new();
        let (name, summary) = (&self.host.name, &mut self.summary);
        self.steadiness = self.host.walk(sync, &mut |record| {
            *room = room.checked_sub(1).ok_or_else(|| {
                CommandError::new(format!(
                    "'{name}': more than {RECORDS_MAX} extents in all; without a picture a raw file alone may \
                     have any number"
                ))
            })?;
            summary.push(&record);
            records.push(record);
            Ok(())
        })?;
        summary.finish();
        self.records = Some(records);
        Ok(())
    }
}

impl Subject {
    /// Walks the file and keeps nothing but the sums.
    ///
    /// # Errors
    /// The system's.
    pub fn sum_up(&mut self, sync: fiemap::Sync) -> Result<Summary, CommandError> {
        let summary = &mut self.summary;
        self.steadiness = self.host.walk(sync, &mut |record| {
            summary.push(&record);
            Ok(())
        })?;
        summary.finish();
        Ok(summary.clone())
    }
}

/// The files on the device of this one, if there are others.
pub fn neighbours(subjects: &[Subject], number: usize) -> Option<Neighbours> {
    let device = &subjects[number].host.device;
    let on = subjects.iter().enumerate();
    let on = on.filter(|(_, other)| other.host.device == *device && other.host.has_places());
    let lists = on.filter_map(|(number, other)| Some((number, other.records.as_deref()?)));
    let lists: Vec<(usize, &[Record])> = lists.collect();
    (lists.len() > 1).then(|| Neighbours::of(lists))
}

/// A file and its surroundings.
#[derive(Clone, Copy)]
pub struct Beside<'a> {
    /// Its number.
    pub number: usize,
    /// The names of all.
    pub names: &'a [String],
    /// The files on its device, if there are others.
    pub neighbours: Option<&'a Neighbours>,
    /// A picture is wanted.
    pub is_pictured: bool,
    /// Treatment of delayed data.
    pub sync: fiemap::Sync,
}

impl Beside<'_> {
    /// Reports on the file, and on the image in it; what a picture would show, if one is wanted.
    ///
    /// # Errors
    /// The system's, or the image's tables cannot be right.
    pub fn report(
        &self,
        subjects: &mut [Subject],
        out: &mut Out,
    ) -> Result<Option<Scene>, CommandError> {
        let mut read = Sequential::default();
        out.file_head(&self.file_report(&subjects[self.number], &read));
        let mut list = out.records();
        self.read(&mut subjects[self.number], &mut read, list.as_mut())?;
        if let Some(list) = list {
            list.end();
        }
        let subject = &subjects[self.number];
        out.file_sums(&self.file_report(subject, &read));
        match (&subject.image, subject.data) {
            (Some(image), Some(data)) => self.image(image, (subject, &subjects[data]), out, data),
            _ => Ok(self
                .is_pictured
                .then(|| Scene::of_file(subject, self.number, &read))),
        }
    }

    fn file_report<'r>(&'r self, subject: &'r Subject, read: &'r Sequential) -> FileReport<'r> {
        FileReport {
            host: &subject.host,
            summary: &subject.summary,
            read,
            names: self.names,
            changed: subject.steadiness == Steadiness::Changed,
        }
    }

    /// Reads the records, those that were kept or else those of a walk.
    fn read(
        &self,
        subject: &mut Subject,
        read: &mut Sequential,
        mut list: Option<&mut List>,
    ) -> Result<(), CommandError> {
        let mut each = |record: &Record| {
            if let Some(list) = &mut list {
                list.record(record);
            }
            if is_placed(record) {
                read.push(piece_of(record), |last, next| self.reason(last, next));
            }
        };
        if let Some(records) = &subject.records {
            records.iter().for_each(each);
            return Ok(());
        }
        let summary = &mut subject.summary;
        subject.steadiness = subject.host.walk(self.sync, &mut |record| {
            summary.push(&record);
            each(&record);
            Ok(())
        })?;
        summary.finish();
        Ok(())
    }

    /// Why a run of the file ends.
    fn reason(&self, last: &sequential::Piece, next: &sequential::Piece) -> Reason {
        let hole = next.file - (last.file + last.len);
        if hole > 0 && next.physical.checked_sub(last.end()) == Some(hole) {
            return Reason::Hole;
        }
        let other = self
            .neighbours
            .and_then(|n| n.other_at(last.end(), self.number));
        other.map_or(Reason::HostFragmented, Reason::Interleaved)
    }

    /// Reports on the image in a file, whose guest data is in the file of the number `data`.
    fn image(
        &self,
        image: &ImageFile,
        (subject, data): (&Subject, &Subject),
        out: &Out,
        number: usize,
    ) -> Result<Option<Scene>, CommandError> {
        let own = HostMap(subject.records.as_deref().unwrap_or_default());
        let is_own = number == self.number;
        let mut collector = Collector {
            list: out.pieces(),
            pieces: self.is_pictured.then(Pieces::default),
            metadata: Sequential::default(),
            is_own,
        };
        let areas = block_on(Aio::Auto, image.areas())?;
        let around = Around {
            host: HostMap(data.records.as_deref().unwrap_or_default()),
            areas: if is_own { &areas } else { &[] },
            neighbours: self
                .neighbours
                .filter(|_| data.host.device == subject.host.device),
            number,
        };
        let join = image.join(around, (&areas, own), &mut collector);
        let join = block_on(Aio::Auto, join)?;
        if let Some(list) = collector.list {
            list.end();
        }
        let report = ImageReport {
            header: &image.header,
            data_file: image.data_file.as_deref(),
            areas: &areas,
            metadata_pieces: collector.metadata.runs,
            join: &join,
            has_places: data.host.has_places(),
            names: self.names,
        };
        out.image(&report);
        let scene = collector.pieces.map(|pieces| Scene {
            pieces,
            caption: caption(subject, &join.read, "guest"),
            bytes: image.header.size,
            number,
        });
        Ok(scene)
    }
}

/// A record as a part of the file's sequential read.
pub fn piece_of(record: &Record) -> sequential::Piece {
    sequential::Piece {
        file: record.logical,
        physical: record.physical,
        len: record.len,
        slack: match record.flags.has(Flags::ENCODED) {
            true => record.len,
            false => 0,
        },
    }
}

/// Collects an image's pieces: for the list, for the picture, and for the count of metadata's.
struct Collector {
    list: Option<List>,
    pieces: Option<Pieces>,
    metadata: Sequential,
    /// Guest data and metadata are in one file.
    is_own: bool,
}

impl PieceSink for Collector {
    fn piece(&mut self, joined: &Joined) {
        if let Some(list) = &mut self.list {
            list.piece(joined);
        }
        let is_metadata = matches!(joined.what, What::Metadata(_));
        if let (true, Some(physical), Some(file)) = (is_metadata, joined.physical, joined.file) {
            let piece = sequential::Piece {
                file,
                physical,
                len: joined.file_len,
                slack: 0,
            };
            self.metadata.push(piece, |_, _| Reason::HostFragmented);
        }
        // With an external data file the picture's device is that file's.
        if let Some(pieces) = &mut self.pieces
            && (self.is_own || !is_metadata)
            && let Some(drawn) = drawn(joined)
        {
            pieces.push(drawn);
        }
    }
}

/// A piece of an image in the picture; what has no space is not drawn.
fn drawn(joined: &Joined) -> Option<Piece> {
    joined.file?;
    let state = match joined.what {
        What::Metadata(_) => State::Metadata,
        What::Zero | What::Below => State::Unwritten,
        What::Data | What::Compressed => state(joined.flags),
    };
    let is_lost = joined.physical.is_none() && joined.flags == Flags::default();
    (!is_lost).then_some(Piece {
        above: joined.guest,
        above_len: joined.guest_len,
        physical: joined.physical,
        len: joined.file_len,
        state,
    })
}

fn state(flags: Flags) -> State {
    let nowhere = Flags::UNKNOWN.with(Flags::DELAYED).with(Flags::INLINE);
    if flags.has(nowhere) {
        State::Unplaced
    } else if flags.has(Flags::UNWRITTEN) {
        State::Unwritten
    } else {
        State::Data
    }
}

/// Input of a picture.
pub struct Scene {
    pieces: Pieces,
    caption: Caption,
    /// Bytes of the upper half.
    bytes: u64,
    /// The number of the file in the lower half.
    number: usize,
}

fn caption(subject: &Subject, read: &Sequential, order: &'static str) -> Caption {
    Caption {
        name: subject.host.name.clone(),
        order,
        figures: format!(
            "sequential read: {} in {} contiguous runs, {} seeks, score {:.4}; {} extents (minimum {})",
            cowslip_console::size::human(read.bytes),
            read.runs,
            read.seeks,
            read.score(),
            subject.summary.records,
            subject.summary.perfect()
        ),
        is_image: order == "guest",
    }
}

impl Scene {
    /// Returns the scene of a file that is no image.
    fn of_file(subject: &Subject, number: usize, read: &Sequential) -> Scene {
        let mut pieces = Pieces::default();
        let mut end = subject.host.size;
        for record in subject.records.iter().flatten() {
            end = end.max(record.logical + record.len);
            pieces.push(Piece {
                above: Some(record.logical),
                above_len: record.len,
                physical: is_placed(record).then_some(record.physical),
                len: record.len,
                state: state(record.flags),
            });
        }
        Scene {
            pieces,
            caption: caption(subject, read, "file"),
            bytes: end,
            number,
        }
    }

    fn picture(&self, cells: usize, beside: Option<&Neighbours>) -> Result<Picture, CommandError> {
        match self.pieces.overflowed {
            false => {
                let beside = beside.map(|known| (known, self.number));
                Ok(draw::picture(&self.pieces, self.bytes, cells, beside))
            }
            true => Err(CommandError::new(format!(
                "'{}' has more than {PIECES_MAX} pieces, too many to draw (--draw=never)",
                self.caption.name
            ))),
        }
    }

    /// Draws the picture as SVG.
    ///
    /// # Errors
    /// There is too much to draw.
    pub fn svg(&self, beside: Option<&Neighbours>) -> Result<String, CommandError> {
        let picture = self.picture(svg::CELLS, beside)?;
        Ok(svg::svg(&picture, &self.caption))
    }

    /// Draws the picture for a terminal.
    ///
    /// # Errors
    /// There is too much to draw.
    pub fn terminal(&self, ink: Ink, beside: Option<&Neighbours>) -> Result<String, CommandError> {
        let picture = self.picture(svg::TERMINAL_CELLS, beside)?;
        Ok(svg::terminal(&picture, &self.caption, ink))
    }
}
