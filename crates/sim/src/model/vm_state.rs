//! The VM state behind a disk: a model of its own, whose offsets are counted from where the area
//! begins.
//!
//! A change of the disk's size that moves where it begins leaves zeroes. One that makes the disk
//! smaller and does not end may leave anything: what the disk had there, before that is given up.

use super::{ANY, Content, Granules, Model, NEVER, Outcome, Version, WriteId, ZERO};

/// The area, and by what it moves.
#[derive(Clone, Debug)]
pub(super) struct Area {
    model: Box<Model>,
    /// Guest bytes that an L1 entry maps.
    table_bytes: u64,
    /// Whether each new size empties it: the data file is raw, and as long as the disk.
    always_lost: bool,
}

impl Model {
    /// The same disk with an empty area, of which these granules are used.
    pub fn with_vm_state(
        mut self,
        windows: &[Granules],
        (table_bytes, always_lost): (u64, bool),
    ) -> Model {
        let model = Model::new(self.grain.clone(), windows, |_| ZERO).with_size(u64::MAX / 2);
        self.area = Some(Area {
            model: Box::new(model),
            table_bytes,
            always_lost,
        });
        self
    }

    /// Calls `ask` with the model of the area, if there is one; both models have one clock.
    pub fn vm_state<T>(&mut self, ask: impl FnOnce(&mut Model) -> T) -> Option<T> {
        let mut area = self.area.take()?;
        area.model.now = self.now;
        let answer = ask(&mut area.model);
        self.now = area.model.now;
        self.area = Some(area);
        Some(answer)
    }

    /// The ranges of it that are used.
    pub fn vm_state_windows(&self) -> Vec<Granules> {
        self.area.iter().flat_map(|a| a.model.windows()).collect()
    }

    /// Returns the contents that reads of it may see.
    pub fn possible_vm_state(&self) -> Content {
        let area = self.area.as_ref();
        area.map_or(Content::new(), |area| area.model.possible())
    }

    /// The same area with other content, which is durable.
    pub(super) fn vm_state_holding(&mut self, content: &Content) {
        self.vm_state(|state| *state = state.holding((content, &Content::new()), u64::MAX / 2));
    }

    /// Whether another size of the disk empties the area.
    fn loses_vm_state(&self, old: u64, new: u64) -> bool {
        let begin = |area: &Area, size: u64| size.div_ceil(area.table_bytes);
        let area = self.area.as_ref();
        area.is_some_and(|area| area.always_lost || begin(area, old) != begin(area, new))
    }

    pub(super) fn vm_state_begins_to_move(&mut self, request: u32, size: u64) {
        if !self.loses_vm_state(self.size, size) {
            return;
        }
        self.vm_state(|state| {
            for window in state.windows() {
                state.begin_write(request, ZERO, &window);
            }
        });
    }

    pub(super) fn vm_state_has_moved(&mut self, request: u32, size: u64, outcome: Outcome) {
        if !self.loses_vm_state(self.size, size) {
            return;
        }
        self.vm_state(|state| {
            for window in state.windows() {
                state.end_write(request, &window, outcome);
            }
        });
        if size < self.size && outcome == Outcome::Perhaps {
            self.vm_state(Model::forget_all);
        }
    }

    /// Takes a shrink of the disk before a crash, after which it is unknown whether its end has
    /// been given up.
    pub(super) fn vm_state_may_have_moved(&mut self, size: u64) {
        if size < self.size && self.loses_vm_state(self.size, size) {
            self.vm_state(Model::forget_all);
        }
    }

    /// Forgets the VM state: it may hold anything.
    pub fn forget_vm_state(&mut self) {
        self.vm_state(Model::forget_all);
    }

    fn forget_all(&mut self) {
        let now = self.tick();
        for versions in self.windows.iter_mut().flat_map(|w| &mut w.granules) {
            versions.push(Version {
                request: 0,
                write: ANY,
                issued: now,
                ended: now,
                refuted: NEVER,
                hides: false,
                durable: false,
            });
        }
    }
}

/// The write, of those that it may be, by which what was found is explained.
pub fn explained(found: super::Found, may_be: impl Fn(WriteId) -> bool) -> Option<WriteId> {
    match found {
        super::Found::Own(write) if may_be(write) => Some(write),
        _ => may_be(ANY).then_some(ANY),
    }
}
