//! The cells of the table.

/// What is below the image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Nothing.
    None,
    /// A raw file, fully written.
    Raw,
    /// A qcow2 image, its first half written.
    Qcow2,
}

/// Whether the image has extended L2 entries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Subclusters {
    /// It has.
    On,
    /// It has not.
    Off,
}

/// Whose `create` makes the image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Creator {
    /// QEMU's.
    QemuImg,
    /// Ours.
    Cowslip,
}

/// A kind of image.
pub struct Cell {
    /// What is below it.
    pub backing: Backing,
    /// Extended L2 entries.
    pub subclusters: Subclusters,
    /// Who creates it.
    pub creator: Creator,
}

impl Cell {
    /// Its name in tables and filters.
    pub fn name(&self) -> String {
        let backing = match self.backing {
            Backing::None => "no backing",
            Backing::Raw => "raw backing",
            Backing::Qcow2 => "qcow2 backing",
        };
        let subclusters = match self.subclusters {
            Subclusters::On => "subclusters",
            Subclusters::Off => "clusters",
        };
        let creator = match self.creator {
            Creator::QemuImg => "",
            Creator::Cowslip => ", own create",
        };
        format!("{backing}, {subclusters}{creator}")
    }

    /// The same with so many requests in flight.
    pub fn name_at(&self, depth: u64) -> String {
        format!("{}, depth {depth}", self.name())
    }
}

/// All cells, in the order of the table.
pub fn all(with_qcow2_backing: bool) -> Vec<Cell> {
    let mut backings = vec![Backing::None, Backing::Raw];
    if with_qcow2_backing {
        backings.push(Backing::Qcow2);
    }
    let mut cells = Vec::new();
    for backing in backings {
        for subclusters in [Subclusters::Off, Subclusters::On] {
            cells.push(Cell {
                backing,
                subclusters,
                creator: Creator::QemuImg,
            });
        }
    }
    cells.push(Cell {
        backing: Backing::Raw,
        subclusters: Subclusters::On,
        creator: Creator::Cowslip,
    });
    cells
}
