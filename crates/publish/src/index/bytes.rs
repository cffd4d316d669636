//! Bytes of an index: a reader that knows where it is, and tables by columns.

use cowslip_block::{Error, Result};

/// Memory that a table may take for each byte that it takes compressed: zstd stores a block of
/// 128 KiB of equal bytes in four.
const EXPANSION_MAX: usize = 32 << 10;

/// A table of 32-bit numbers, a column after another, little-endian.
pub struct Columns {
    rows: usize,
    bytes: Vec<u8>,
}

impl Columns {
    pub fn new(rows: usize, columns: usize) -> Columns {
        Columns {
            rows,
            bytes: vec![0; rows * columns * 4],
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn place(&self, column: usize, row: usize) -> usize {
        (column * self.rows + row) * 4
    }

    pub fn put(&mut self, column: usize, row: usize, number: u32) {
        let at = self.place(column, row);
        self.bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }

    pub fn get(&self, column: usize, row: usize) -> u32 {
        let at = self.place(column, row);
        let bytes = self.bytes[at..at + 4].try_into();
        u32::from_le_bytes(bytes.expect("four bytes"))
    }
}

/// Reads bytes in order.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    name: &'a str,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], name: &'a str) -> Reader<'a> {
        Reader { bytes, at: 0, name }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn corrupt(&self, structure: &'static str, detail: impl Into<String>) -> Error {
        self.corrupt_at(structure, self.at, detail)
    }

    pub fn corrupt_at(
        &self,
        structure: &'static str,
        offset: usize,
        detail: impl Into<String>,
    ) -> Error {
        Error::Corrupt {
            file: self.name.to_string(),
            structure,
            offset: offset as u64,
            detail: detail.into(),
        }
    }

    pub fn unsupported(&self, feature: String) -> Error {
        Error::Unsupported {
            file: self.name.to_string(),
            feature: feature.into(),
        }
    }

    pub fn take(&mut self, structure: &'static str, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let Some(taken) = taken else {
            return Err(self.corrupt(structure, "it is cut off"));
        };
        self.at += len;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self, structure: &'static str) -> Result<[u8; N]> {
        let taken = self.take(structure, N)?;
        Ok(taken.try_into().expect("as many were taken"))
    }

    pub fn u32(&mut self, structure: &'static str) -> Result<u32> {
        self.array(structure).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, structure: &'static str) -> Result<u64> {
        self.array(structure).map(u64::from_le_bytes)
    }

    /// A length that is at most `max`.
    pub fn len_within(&mut self, structure: &'static str, max: u64) -> Result<usize> {
        let len = self.u64(structure)?;
        match usize::try_from(len) {
            Ok(len) if len as u64 <= max => Ok(len),
            _ => Err(self.corrupt(structure, format!("a length of {len} is beyond the end"))),
        }
    }

    /// A compressed table.
    pub fn table(
        &mut self,
        structure: &'static str,
        stored: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Columns> {
        let at = self.at;
        let stored = self.take(structure, stored)?;
        let bytes = rows * columns * 4;
        if bytes > stored.len().saturating_mul(EXPANSION_MAX) {
            return Err(self.corrupt_at(structure, at, "it is too short for its rows"));
        }
        let unpacked = zstd::bulk::decompress(stored, bytes);
        match unpacked {
            Ok(unpacked) if unpacked.len() == bytes => Ok(Columns {
                rows,
                bytes: unpacked,
            }),
            Ok(_) => Err(self.corrupt_at(structure, at, "it has other rows than announced")),
            Err(error) => Err(self.corrupt_at(structure, at, error.to_string())),
        }
    }
}
