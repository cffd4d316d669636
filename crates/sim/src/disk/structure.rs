//! Map of the structures of a file, as far as the order of its writes goes: the kinds of structure
//! that barriers stand between.

use std::ops::Range;

use super::content::Content;

/// A kind of structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Structure {
    /// The header of an image, with its extensions.
    Header,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    Counts,
    /// The active L1 table.
    L1,
    /// An active L2 table.
    Table,
    /// The snapshot table, the bitmap directory, or keys.
    Directory,
    /// Anything else in an image: guest data, tables of snapshots, and what nothing refers to yet.
    Other,
    /// Anything in a file that is no image.
    Raw,
}

impl Structure {
    const ALL: [Structure; 8] = [
        Structure::Header,
        Structure::RefcountTable,
        Structure::Counts,
        Structure::L1,
        Structure::Table,
        Structure::Directory,
        Structure::Other,
        Structure::Raw,
    ];
}

/// A set of kinds of structure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Structures(u8);

impl Structures {
    /// None.
    pub const NONE: Structures = Structures(0);

    /// Returns the set of these structures.
    pub fn of(structures: &[Structure]) -> Structures {
        let mut set = Structures::NONE;
        structures.iter().for_each(|structure| set.add(*structure));
        set
    }

    /// Adds one.
    pub fn add(&mut self, structure: Structure) {
        self.0 |= 1 << structure as u8;
    }

    /// Adds those of another set.
    pub fn add_all(&mut self, other: Structures) {
        self.0 |= other.0;
    }

    /// Whether it has this one.
    pub fn has(self, structure: Structure) -> bool {
        self.0 & (1 << structure as u8) != 0
    }

    /// Whether the header or the refcount table is among them.
    pub fn has_root(self) -> bool {
        self.has(Structure::Header) || self.has(Structure::RefcountTable)
    }

    /// All of them.
    pub fn iter(self) -> impl Iterator<Item = Structure> {
        let all = Structure::ALL.into_iter();
        all.filter(move |structure| self.has(*structure))
    }
}

/// The structures of one file, by their places.
#[derive(Clone, Debug, Default)]
pub struct Map {
    /// In order.
    places: Vec<(Range<u64>, Structure)>,
    is_image: bool,
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Tables longer than this are not looked through.
const TABLE_BYTES_MAX: u64 = 4 << 20;
const BITMAPS: u64 = 0x2385_2875;
const CRYPTO_HEADER: u64 = 0x0537_be77;

impl Map {
    /// The structures that the header of a file leads to.
    pub fn of(content: &Content) -> Map {
        let field = |offset, bytes| content.number(offset, bytes);
        let bits = field(20, 4);
        if field(0, 4) != 0x5146_49fb || !(9..=21).contains(&bits) {
            return Map::default();
        }
        let cluster = 1u64 << bits;
        let (l1, table) = (field(40, 8), field(48, 8));
        let l1_bytes = (field(36, 4) * 8).min(TABLE_BYTES_MAX);
        let table_bytes = (field(56, 4) << bits).min(TABLE_BYTES_MAX);
        let mut places = vec![
            (0..cluster, Structure::Header),
            (l1..l1 + l1_bytes, Structure::L1),
            (table..table + table_bytes, Structure::RefcountTable),
        ];
        let mut reached = |table: Range<u64>, mask: u64, structure| {
            let bytes = content.bytes(table.start, (table.end - table.start) as usize);
            let entries = bytes.chunks_exact(8).map(|entry| {
                let entry = entry.try_into().expect("it has eight bytes");
                u64::from_be_bytes(entry) & mask
            });
            let there = entries.filter(|at| *at != 0);
            places.extend(there.map(|at| (at..at + cluster, structure)));
        };
        reached(l1..l1 + l1_bytes, OFFSET, Structure::Table);
        reached(table..table + table_bytes, !0x1ff, Structure::Counts);
        if field(60, 4) > 0 {
            let at = field(64, 8);
            places.push((at..at + cluster, Structure::Directory));
        }
        places.extend(directories(content).map(|place| (place, Structure::Directory)));
        places.sort_by_key(|(range, _)| range.start);
        Map {
            places,
            is_image: true,
        }
    }

    /// Returns the structure that begins at, or holds, this place.
    pub fn at(&self, place: u64) -> Structure {
        let behind = self
            .places
            .partition_point(|(range, _)| range.start <= place);
        let before = behind.checked_sub(1).map(|index| &self.places[index]);
        match before {
            _ if !self.is_image => Structure::Raw,
            Some((range, structure)) if range.contains(&place) => *structure,
            _ => Structure::Other,
        }
    }
}

/// The bitmap directory and the keys, as the extensions of the header say.
fn directories(content: &Content) -> impl Iterator<Item = Range<u64>> + use<> {
    let field = |offset, bytes| content.number(offset, bytes);
    let mut found = Vec::new();
    let mut at = if field(4, 4) >= 3 { field(100, 4) } else { 72 };
    for _ in 0..16 {
        let (kind, len) = (field(at, 4), field(at + 4, 4));
        let data = at + 8;
        match kind {
            0 => break,
            BITMAPS => found.push((field(data + 16, 8), field(data + 8, 8))),
            CRYPTO_HEADER => found.push((field(data, 8), field(data + 8, 8))),
            _ => {}
        }
        at = data + len.next_multiple_of(8);
    }
    found
        .into_iter()
        .map(|(at, len)| at..at.saturating_add(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_found_where_the_header_says() {
        let mut content = Content::default();
        content.write(0, &0x5146_49fbu32.to_be_bytes());
        content.write(4, &3u32.to_be_bytes());
        content.write(20, &9u32.to_be_bytes());
        content.write(36, &2u32.to_be_bytes());
        content.write(40, &512u64.to_be_bytes());
        content.write(48, &1024u64.to_be_bytes());
        content.write(56, &1u32.to_be_bytes());
        content.write(100, &104u32.to_be_bytes());
        content.write(520, &(2048u64 | 1 << 63).to_be_bytes());
        content.write(1024, &1536u64.to_be_bytes());
        let map = Map::of(&content);
        let places = [
            (0, Structure::Header),
            (511, Structure::Header),
            (512, Structure::L1),
            (527, Structure::L1),
            (528, Structure::Other),
            (1024, Structure::RefcountTable),
            (1536, Structure::Counts),
            (2559, Structure::Table),
            (2560, Structure::Other),
        ];
        for (place, structure) in places {
            assert_eq!(map.at(place), structure, "{place}");
        }
        assert_eq!(Map::of(&Content::of(&[7; 100])).at(0), Structure::Raw);
    }

    #[test]
    fn a_set_has_what_was_added() {
        let mut set = Structures::of(&[Structure::L1, Structure::Other]);
        assert!(!set.has_root() && set.has(Structure::L1));
        set.add_all(Structures::of(&[Structure::Header]));
        let all: Vec<Structure> = set.iter().collect();
        assert_eq!(all, [Structure::Header, Structure::L1, Structure::Other]);
        assert!(set.has_root());
    }
}
