//! [`Archive`]: where a file is in a tar archive (POSIX.1-2001, and GNU's numbers in binary),
//! from its headers alone.

/// Length of a header, and unit of all lengths, in bytes.
pub(crate) const RECORD: u64 = 512;
/// Longest extended header that is read, in bytes.
const EXTENDED_MAX: u64 = 64 << 10;

/// The step after a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The next header.
    Next,
    /// An extended header of this length, to be handed to [`Archive::extend`].
    Extended(u64),
    /// Nothing.
    End,
}

/// A file of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    offset: u64,
    bytes: u64,
}

/// An archive whose headers are read one after the other.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    at: u64,
    files: Vec<Entry>,
    /// Name and length from an extended header, for the next entry.
    name: Option<String>,
    bytes: Option<u64>,
}

/// Whether some bytes begin with a header whose checksum fits.
pub(crate) fn is_header(record: &[u8]) -> bool {
    let Some(header) = record.get(..RECORD as usize) else {
        return false;
    };
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    // The sum is made with blanks in its own place.
    let own: u64 = header[148..156].iter().map(|byte| u64::from(*byte)).sum();
    header[0] != 0 && number(&header[148..156]) == Some(sum - own + 8 * u64::from(b' '))
}

/// A number in octal digits, or in binary after a first byte of 0x80.
fn number(field: &[u8]) -> Option<u64> {
    if let Some((0x80, digits)) = field.split_first() {
        let (high, low) = digits.split_at(digits.len().saturating_sub(8));
        let is_small = high.iter().all(|byte| *byte == 0);
        return is_small.then(|| low.iter().fold(0, |all, byte| all << 8 | u64::from(*byte)));
    }
    let text = std::str::from_utf8(field).ok()?;
    u64::from_str_radix(text.trim_matches(['\0', ' ']), 8).ok()
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&field[..end.unwrap_or(field.len())]).into_owned()
}

impl Archive {
    /// Where the next header is.
    pub(crate) fn next_at(&self) -> u64 {
        self.at
    }

    /// Takes the header that is there.
    ///
    /// # Errors
    /// In words: it is none.
    pub(crate) fn add(&mut self, record: &[u8]) -> Result<Step, String> {
        if record.iter().all(|byte| *byte == 0) {
            return Ok(Step::End);
        }
        let damaged = || format!("the archive is damaged at offset {}", self.at);
        if !is_header(record) {
            return Err(damaged());
        }
        let len = number(&record[124..136]).ok_or_else(damaged)?;
        let kind = record[156];
        let is_extension = matches!(kind, b'x' | b'g' | b'L' | b'K');
        let bytes = match is_extension {
            true => len,
            false => self.bytes.take().unwrap_or(len),
        };
        let data = self.at + RECORD;
        let end = bytes.checked_next_multiple_of(RECORD);
        let next = end
            .and_then(|end| data.checked_add(end))
            .ok_or_else(damaged)?;
        self.at = next;
        match kind {
            b'x' if bytes <= EXTENDED_MAX => return Ok(Step::Extended(bytes)),
            b'x' => return Err(format!("the archive has a header of {bytes} bytes")),
            b'0' | 0 => {
                let own = match (text(&record[345..500]), text(&record[..100])) {
                    (prefix, name) if prefix.is_empty() => name,
                    (prefix, name) => format!("{prefix}/{name}"),
                };
                let name = self.name.take().unwrap_or(own);
                let offset = data;
                self.files.push(Entry {
                    name,
                    offset,
                    bytes,
                });
            }
            // Sparse files are not stored as they are.
            b'S' => return Err("the archive has a sparse file".to_string()),
            _ if is_extension => {}
            _ => self.name = None,
        }
        Ok(Step::Next)
    }

    /// Takes the text of an extended header: lines of a length, a name and a value.
    pub(crate) fn extend(&mut self, text: &[u8]) {
        for line in String::from_utf8_lossy(text).lines() {
            let pair = line
                .split_once(' ')
                .and_then(|(_, rest)| rest.split_once('='));
            match pair {
                Some(("path", name)) => self.name = Some(name.to_string()),
                Some(("size", bytes)) => self.bytes = bytes.parse().ok(),
                _ => {}
            }
        }
    }

    /// Offset and length of the disk: the only file below `disk/`, or the only one at all.
    ///
    /// # Errors
    /// In words: there is none, or more than one.
    pub(crate) fn disk(&self) -> Result<(u64, u64), String> {
        let is_disk = |entry: &&Entry| {
            let name = entry.name.trim_start_matches("./").trim_start_matches('/');
            name.starts_with("disk/")
        };
        let disks: Vec<&Entry> = self.files.iter().filter(is_disk).collect();
        match (&disks[..], &self.files[..]) {
            ([only], _) => Ok((only.offset, only.bytes)),
            ([], [only]) => Ok((only.offset, only.bytes)),
            _ => Err(format!(
                "the layer is an archive of {} files, of which {} are in the folder 'disk'; a disk is a single one",
                self.files.len(),
                disks.len()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with its checksum.
    pub(crate) fn header(name: &str, kind: u8, bytes: u64) -> Vec<u8> {
        let mut header = vec![0; RECORD as usize];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{bytes:011o}").as_bytes());
        header[156] = kind;
        header[257..262].copy_from_slice(b"ustar");
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        header
    }

    #[test]
    fn the_only_disk_of_an_archive_is_found() {
        let mut archive = Archive::default();
        assert_eq!(archive.add(&header("disk/", b'5', 0)), Ok(Step::Next));
        assert_eq!(
            archive.add(&header("disk/a.img", b'0', 1000)),
            Ok(Step::Next)
        );
        assert_eq!(archive.next_at(), 512 * 4);
        assert_eq!(archive.add(&header("etc/x", b'0', 3)), Ok(Step::Next));
        assert_eq!(archive.add(&[0; 512]), Ok(Step::End));
        assert_eq!(archive.disk(), Ok((1024, 1000)));
        // A length that has no room in octal digits, and a name that is long.
        let mut archive = Archive::default();
        assert_eq!(archive.add(&header("x", b'x', 40)), Ok(Step::Extended(40)));
        archive.extend(b"20 path=./disk/long\n19 size=10000000000\n");
        assert_eq!(archive.add(&header("short", b'0', 0)), Ok(Step::Next));
        assert_eq!(archive.disk(), Ok((1536, 10_000_000_000)));
        assert_eq!(archive.add(&header("disk/b", b'0', 5)), Ok(Step::Next));
        assert!(archive.disk().unwrap_err().contains("2 are in the folder"));
    }

    #[test]
    fn damaged_headers_are_errors() {
        let whole = header("disk/a", b'0', 100);
        for at in 0..512 {
            let mut wrong = whole.clone();
            wrong[at] = wrong[at].wrapping_add(1);
            assert!(!is_header(&wrong) || (148..156).contains(&at), "{at}");
            drop(Archive::default().add(&wrong));
        }
        assert!(Archive::default().add(&whole[..100]).is_err());
        let mut huge = header("a", b'0', 0);
        huge[124..136].fill(0xff);
        assert!(Archive::default().add(&huge).is_err());
        assert_eq!(
            number(&[0x80, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2]),
            Some((1 << 56) + 2)
        );
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 2]), Some(2));
    }
}
