//! A read from front to back as the device performs it: runs, seeks, and the score. Pure.
//!
//! A *run* ends where the next bytes do not follow directly on the device. A *seek* is the end of a
//! run after which the device goes backwards, or forward over more than [`SKIP_BYTES`]; it reads
//! through a shorter gap. A disk takes about as long to read that many bytes as to seek, hence the
//! *score*:
//!
//! > seeks x 1 MiB / (seeks x 1 MiB + bytes read)
//!
//! This is the share of time that the read spends seeking: 0 is none, 0.5 is as much as reading.
//! One seek per GiB gives 0.001, one at each cluster of 64 KiB gives 0.94.

/// Bytes that a disk reads in the time of a seek: 8 ms at 130 MB/s.
pub const SKIP_BYTES: u64 = 1 << 20;

/// A part of the read that has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it is in the file.
    pub file: u64,
    /// Where it is on the device.
    pub physical: u64,
    /// Length in bytes.
    pub len: u64,
    /// The last bytes of this run that may belong to the next one: compressed data is stored in
    /// fewer bytes than its sectors have.
    pub slack: u64,
}

impl Piece {
    /// Where it ends on the device, at most.
    pub fn end(&self) -> u64 {
        self.physical.saturating_add(self.len)
    }

    fn is_continued_by(&self, next: &Piece) -> bool {
        let end = self.end();
        next.physical <= end && end - next.physical <= self.slack && next.physical >= self.physical
    }
}

/// Why a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The image's clusters are in another order than the guest's.
    OutOfOrder,
    /// Metadata alone lies between them in the image file.
    Metadata,
    /// Between them the file is a hole; the device leaves room for it, unless other clusters were
    /// there.
    Hole,
    /// Two extents that adjoin in the file, which the file system has put in several places.
    HostFragmented,
    /// The same, and there this other file follows, by its number.
    Interleaved(usize),
}

/// Ends of runs with one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Breaks {
    /// All of them.
    pub runs: u64,
    /// Breaks that are seeks.
    pub seeks: u64,
}

/// The read so far.
#[derive(Clone, Debug, Default)]
pub struct Sequential {
    last: Option<Piece>,
    /// Runs met.
    pub runs: u64,
    /// Seeks between them.
    pub seeks: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Why runs ended, in the order in which the reasons were met.
    pub reasons: Vec<(Reason, Breaks)>,
}

impl Sequential {
    /// Reads the next piece; `why` is asked about each end of a run.
    pub fn push(&mut self, piece: Piece, why: impl FnOnce(&Piece, &Piece) -> Reason) {
        self.bytes += piece.len;
        let last = self.last.replace(piece);
        let Some(last) = last else {
            self.runs = 1;
            return;
        };
        if last.is_continued_by(&piece) {
            return;
        }
        self.runs += 1;
        let is_seek = is_seek(&last, &piece);
        self.seeks += u64::from(is_seek);
        let reason = why(&last, &piece);
        let known = self.reasons.iter().position(|(known, _)| *known == reason);
        let at = known.unwrap_or_else(|| {
            self.reasons.push((reason, Breaks::default()));
            self.reasons.len() - 1
        });
        let breaks = &mut self.reasons[at].1;
        breaks.runs += 1;
        breaks.seeks += u64::from(is_seek);
    }

    /// The share of the time that goes into seeks.
    pub fn score(&self) -> f64 {
        let seeking = self.seeks as f64 * SKIP_BYTES as f64;
        match self.bytes {
            0 => 0.0,
            bytes => seeking / (seeking + bytes as f64),
        }
    }

    /// Runs for each gibibyte read.
    pub fn runs_per_gib(&self) -> f64 {
        match self.bytes {
            0 => 0.0,
            bytes => self.runs as f64 * (1u64 << 30) as f64 / bytes as f64,
        }
    }
}

fn is_seek(last: &Piece, next: &Piece) -> bool {
    // An overlap with the end, which is not known exactly, is no step back.
    let earliest_end = last.end() - last.slack.min(last.len);
    next.physical < earliest_end || next.physical > last.end().saturating_add(SKIP_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(file: u64, physical: u64, len: u64) -> Piece {
        Piece {
            file,
            physical,
            len,
            slack: 0,
        }
    }

    fn read(pieces: &[Piece]) -> Sequential {
        let mut read = Sequential::default();
        for &piece in pieces {
            read.push(piece, |last, next| {
                match last.file + last.len == next.file {
                    true => Reason::HostFragmented,
                    false => Reason::OutOfOrder,
                }
            });
        }
        read
    }

    #[test]
    fn what_adjoins_is_one_run_however_it_is_cut() {
        let pieces: Vec<Piece> = (0..100).map(|i| piece(i * 10, 1000 + i * 10, 10)).collect();
        let read = read(&pieces);
        assert_eq!((read.runs, read.seeks, read.bytes), (1, 0, 1000));
        assert_eq!(read.score(), 0.0);
    }

    #[test]
    fn a_step_back_is_a_seek_and_a_step_forward_beyond_the_limit() {
        let to = |physical| read(&[piece(0, 1 << 30, 4096), piece(4096, physical, 4096)]).seeks;
        let end = (1 << 30) + 4096;
        assert_eq!(to(end), 0);
        assert_eq!(to(end + 1), 0);
        assert_eq!(to(end + SKIP_BYTES), 0);
        assert_eq!(to(end + SKIP_BYTES + 1), 1);
        assert_eq!(to(end - 1), 1);
        assert_eq!(to(0), 1);
    }

    #[test]
    fn the_score_is_the_share_of_seeking() {
        // A seek a mebibyte: as much seeking as reading, but for the first, which is none.
        let pieces: Vec<Piece> = (0..1000)
            .map(|i| piece(i << 20, (2000 - i) << 20, 1 << 20))
            .collect();
        let read = read(&pieces);
        assert_eq!((read.runs, read.seeks), (1000, 999));
        assert!((read.score() - 999.0 / 1999.0).abs() < 1e-12);
        assert!((read.runs_per_gib() - 1024.0).abs() < 1e-9);
        let broken = Breaks {
            runs: 999,
            seeks: 999,
        };
        assert_eq!(read.reasons, [(Reason::HostFragmented, broken)]);
    }

    #[test]
    fn what_is_stored_in_fewer_bytes_is_followed_before_its_end() {
        let loose = Piece {
            slack: 511,
            ..piece(0, 10_000, 1024)
        };
        let runs = |next| {
            let read = read(&[loose, piece(1024, next, 512)]);
            (read.runs, read.seeks)
        };
        assert_eq!(runs(11_024), (1, 0));
        assert_eq!(runs(10_513), (1, 0));
        assert_eq!(runs(10_512), (2, 1));
        assert_eq!(runs(11_025), (2, 0));
    }
}
