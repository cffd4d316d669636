//! Writers side by side on simulated space. Pure, and the same for one seed.
//!
//! Writers take turns: each makes some writes in a row, of a mean number that is one constant of
//! the model. Direct writes are given space when they are made. Buffered ones wait until a file has
//! so much unwritten data, the other constant, and are given space for all of it, with what the
//! kernel adds.

use cowslip::growth::{Ahead, AtClose, CutPoint, Refill, Rule, at_close};
use cowslip_testbed::Random;

use super::space::Space;

/// Parameters that are fitted.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Constants {
    /// Writes that a file gets in a row before another has its turn, on average.
    pub writes_in_a_row: f64,
    /// Unwritten data of a buffered file when it is written back.
    pub writeback_bytes: u64,
}

/// Policy of allocation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Allocation {
    /// The writer, by a rule of the library, writing directly.
    Direct(Rule),
    /// ext4, for direct writes: a window around each write that grows with the file.
    Ext4,
    /// The file system, delayed until data is written back, with nothing ahead.
    Delayed,
    /// XFS, delayed and with its dynamic speculative preallocation.
    Xfs,
}

/// When files are closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Writers that close at the end.
    Stream,
    /// Writers that close after every write, as an NFS server does.
    Reopen,
    /// Writers that close at the end; half way files are cut to nothing and begin again.
    Restart,
    /// Writers that close at the ends of small files: files of 1 to 64 MiB one after the other,
    /// until all is written.
    Small,
}

/// Input of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// Writers at a time.
    pub writers: usize,
    /// Bytes of each writer.
    pub bytes: u64,
    /// A write.
    pub write_bytes: u64,
    /// The volume.
    pub volume_bytes: u64,
    /// Its groups.
    pub group_bytes: u64,
    /// The longest extent.
    pub extent_bytes: u64,
    /// Policy of allocation.
    pub allocation: Allocation,
    /// When they are closed.
    pub pattern: Pattern,
}

/// Result of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Lengths and extents of the files, in order of size.
    pub files: Vec<(u64, u64)>,
    /// The most that was allocated and not used at a time.
    pub peak_unused_bytes: u64,
    /// A writer found no space while there was unused space.
    pub short_of_space: u64,
}

/// Unused space from which on a turn is several writes.
const COARSE_FROM: u64 = 64 << 20;
const COARSE_BYTES: u64 = 4 << 20;

/// A file.
struct File {
    size: u64,
    /// Space is there up to here.
    allocated: u64,
    /// Where it is to be cut.
    goal: u64,
    ahead: Ahead,
    closes: u8,
    /// Start and length of its pieces, those that adjoin joined.
    pieces: Vec<(u64, u64)>,
    /// Where the next piece would go on.
    end: u64,
    has_restarted: bool,
}

impl File {
    fn new(goal: u64, rule: Rule) -> File {
        File {
            size: 0,
            allocated: 0,
            goal,
            ahead: Ahead::new(rule, 0),
            closes: 0,
            pieces: Vec::new(),
            end: 0,
            has_restarted: false,
        }
    }

    fn grow(&mut self, space: &mut Space, to: u64) -> bool {
        while self.allocated < to {
            let Some(piece) = space.take(self.end, to - self.allocated) else {
                return false;
            };
            let len = piece.end - piece.start;
            match self.pieces.last_mut() {
                Some((start, last)) if *start + *last == piece.start => *last += len,
                _ => self.pieces.push((piece.start, len)),
            }
            self.end = piece.end;
            self.allocated += len;
        }
        true
    }

    /// Gives back what lies behind `size`.
    fn trim(&mut self, space: &mut Space, size: u64) {
        while self.allocated > size {
            let Some((start, len)) = self.pieces.pop() else {
                break;
            };
            let excess = (self.allocated - size).min(len);
            space.give(start + len - excess..start + len);
            self.allocated -= excess;
            if len > excess {
                self.pieces.push((start, len - excess));
            }
        }
        self.end = self.pieces.last().map_or(0, |(start, len)| start + len);
    }

    fn extents(&self, extent_bytes: u64) -> u64 {
        let of = |(_, len): &(u64, u64)| len.div_ceil(extent_bytes);
        self.pieces.iter().map(of).sum()
    }

    fn unused(&self) -> u64 {
        self.allocated.saturating_sub(self.size)
    }
}

/// `xfs_iomap_prealloc_size` of Linux 6.18: what contiguous extents before have, doubled; from half
/// the longest extent on the offset; throttled in the last 5 % of free space; a power of two.
fn xfs_ahead(file: &File, free_bytes: u64, volume_bytes: u64) -> u64 {
    const LEAST: u64 = 64 << 10;
    const LONGEST: u64 = 8 << 30;
    if file.size < LEAST {
        return 0;
    }
    let Some((_, last)) = file.pieces.last() else {
        return LEAST;
    };
    let mut ahead = last.saturating_mul(2);
    if ahead > LONGEST {
        ahead = file.size;
    }
    let percent = free_bytes.saturating_mul(100) / volume_bytes.max(1);
    let shift = match percent {
        5.. => 0,
        // Twice for the first percent, once for each more.
        percent => 2 + (4 - percent),
    };
    ahead = ahead.min(LONGEST) >> shift;
    ahead = 1 << ahead.checked_ilog2().unwrap_or(0);
    while ahead > 1 && ahead >= free_bytes {
        ahead >>= 4;
    }
    ahead.max(LEAST)
}

/// `ext4_mb_normalize_request` of Linux 6.18: up to which offset a write to this one is given
/// space. Powers of two up to 1 MiB, then aligned windows of 2, 4 and 8 MiB.
fn ext4_window(end: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    let window = match end {
        0..=MIB => return end.next_power_of_two().max(16 << 10),
        _ if end <= 4 * MIB => 2 * MIB,
        _ if end <= 8 * MIB => 4 * MIB,
        _ => 8 * MIB,
    };
    end.next_multiple_of(window)
}

struct Run<'a> {
    scene: &'a Scene,
    constants: &'a Constants,
    space: Space,
    random: Random,
    outcome: Outcome,
    unused: u64,
}

impl Run<'_> {
    fn rule(&self) -> Rule {
        match self.scene.allocation {
            Allocation::Direct(rule) => rule,
            Allocation::Ext4 | Allocation::Delayed | Allocation::Xfs => Rule::None,
        }
    }

    fn new_file(&mut self, left: u64) -> File {
        let goal = match self.scene.pattern {
            Pattern::Small => {
                // Log-uniform, whole writes.
                let bytes = (1_u64 << 20) as f64 * 64_f64.powf(self.random.share());
                (bytes as u64)
                    .next_multiple_of(self.scene.write_bytes)
                    .min(left)
            }
            _ => left,
        };
        File::new(goal, self.rule())
    }

    /// The file gets a write longer.
    fn write(&mut self, file: &mut File) {
        let before = file.unused();
        // In large steps the order of single writes does not matter.
        let at_once = match file.unused() {
            COARSE_FROM.. => COARSE_BYTES,
            _ => self.scene.write_bytes,
        };
        let to = (file.size + at_once).min(file.goal);
        match self.scene.allocation {
            Allocation::Direct(_) => {
                let free = self.space.free_bytes().saturating_sub(self.unused);
                let needed = to - file.size;
                if let Some(step) =
                    file.ahead
                        .next(file.size, needed, Refill::WhenUsedUp, Some(free))
                    && file.grow(&mut self.space, step.end)
                {
                    file.ahead.granted(&step);
                }
                if !file.grow(&mut self.space, to) {
                    self.outcome.short_of_space += u64::from(self.unused > 0);
                }
                file.size = to;
            }
            Allocation::Ext4 => {
                file.size = to;
                file.grow(&mut self.space, ext4_window(to));
            }
            allocation => {
                file.size = to;
                let dirty = to.saturating_sub(file.allocated);
                // Files do not come to their turn together.
                let turn = self.constants.writeback_bytes as f64 * (0.5 + self.random.share());
                if dirty as f64 >= turn || (to == file.goal && dirty > 0) {
                    let free = self.space.free_bytes();
                    let more = match allocation {
                        Allocation::Xfs => xfs_ahead(file, free, self.scene.volume_bytes),
                        _ => 0,
                    };
                    file.grow(&mut self.space, to + more);
                }
            }
        }
        self.unused = self.unused + file.unused() - before;
        let peak = &mut self.outcome.peak_unused_bytes;
        *peak = (*peak).max(self.unused);
    }

    fn cut(&mut self, file: &mut File, size: u64) {
        self.unused -= file.unused();
        file.trim(&mut self.space, size);
        let cut = match size < file.size {
            true => CutPoint::Shorter,
            false => CutPoint::AtEnd,
        };
        file.size = size;
        file.ahead.trimmed(size, cut);
        self.unused += file.unused();
    }

    /// Advances the file after a write. Returns whether it is done.
    fn after_write(&mut self, file: &mut File) -> bool {
        if file.size >= file.goal {
            let size = file.size;
            self.cut(file, size);
            return true;
        }
        match self.scene.pattern {
            Pattern::Restart if !file.has_restarted && file.size * 2 >= file.goal => {
                file.has_restarted = true;
                self.cut(file, 0);
            }
            // Its windows are found again, as real files show.
            Pattern::Reopen if self.scene.allocation == Allocation::Ext4 => {}
            Pattern::Reopen if file.unused() > 0 => {
                if let AtClose::Trim(closes) = at_close(Some(file.closes)) {
                    file.closes = closes;
                    let size = file.size;
                    self.cut(file, size);
                }
            }
            _ => {}
        }
        false
    }

    fn done(&mut self, file: &File) {
        let extents = file.extents(self.scene.extent_bytes);
        self.outcome.files.push((file.size, extents));
    }
}

/// Plays a scene.
pub fn simulate(scene: &Scene, constants: &Constants, seed: u64) -> Outcome {
    let mut run = Run {
        scene,
        constants,
        space: Space::new(scene.volume_bytes, scene.group_bytes),
        random: Random::new(seed),
        outcome: Outcome::default(),
        unused: 0,
    };
    // Bytes that each writer has yet to begin, and its file.
    let mut writers: Vec<(u64, File)> = Vec::new();
    for _ in 0..scene.writers {
        let file = run.new_file(scene.bytes);
        writers.push((scene.bytes - file.goal, file));
    }
    let goes_on = 1.0 - 1.0 / constants.writes_in_a_row.max(1.0);
    let mut turn = 0;
    while !writers.is_empty() {
        if turn >= writers.len() || run.random.share() >= goes_on {
            turn = run.random.below(writers.len() as u64) as usize;
        }
        let (left, file) = &mut writers[turn];
        run.write(file);
        if !run.after_write(file) {
            continue;
        }
        run.done(file);
        if *left == 0 {
            writers.swap_remove(turn);
            continue;
        }
        let next = run.new_file(*left);
        *left -= next.goal;
        *file = next;
    }
    run.outcome.files.sort_unstable();
    run.outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSTANTS: Constants = Constants {
        writes_in_a_row: 1.5,
        writeback_bytes: 8 << 20,
    };

    fn scene(writers: usize, allocation: Allocation, pattern: Pattern) -> Scene {
        Scene {
            writers,
            bytes: 64 << 20,
            write_bytes: 64 << 10,
            volume_bytes: 64 << 30,
            group_bytes: 16 << 30,
            extent_bytes: 8 << 30,
            allocation,
            pattern,
        }
    }

    fn extents(outcome: &Outcome) -> u64 {
        outcome.files.iter().map(|(_, extents)| extents).sum()
    }

    #[test]
    fn one_writer_has_one_extent_whoever_decides() {
        for allocation in [
            Allocation::Direct(Rule::None),
            Allocation::Direct(Rule::DYNAMIC),
            Allocation::Delayed,
            Allocation::Xfs,
        ] {
            for pattern in [Pattern::Stream, Pattern::Reopen, Pattern::Restart] {
                let outcome = simulate(&scene(1, allocation, pattern), &CONSTANTS, 1);
                assert_eq!(outcome.files, [(64 << 20, 1)], "{allocation:?} {pattern:?}");
            }
        }
    }

    #[test]
    fn many_writers_interleave_less_with_space_ahead() {
        let of = |allocation, pattern| simulate(&scene(16, allocation, pattern), &CONSTANTS, 7);
        for pattern in [Pattern::Stream, Pattern::Reopen, Pattern::Small] {
            let none = of(Allocation::Direct(Rule::None), pattern);
            let fixed = of(Allocation::Direct(Rule::Fixed(1 << 20)), pattern);
            let dynamic = of(Allocation::Direct(Rule::DYNAMIC), pattern);
            assert!(extents(&fixed) * 2 < extents(&none), "{pattern:?}");
            assert!(extents(&dynamic) < extents(&fixed) * 2, "{pattern:?}");
            assert_eq!(none.peak_unused_bytes, 0);
            assert!(dynamic.peak_unused_bytes > 0 && dynamic.short_of_space == 0);
            let written: u64 = dynamic.files.iter().map(|(size, _)| size).sum();
            assert_eq!(written, 16 * (64 << 20));
        }
        // 1 024 writes each: nearly as many extents, less those that follow their own.
        let none = of(Allocation::Direct(Rule::None), Pattern::Stream);
        let mean = extents(&none) as f64 / 16.0;
        assert!((550.0..750.0).contains(&mean), "{mean}");
    }

    #[test]
    fn the_same_seed_is_the_same_run() {
        let scene = scene(16, Allocation::Xfs, Pattern::Small);
        let [a, b, c] = [3, 3, 4].map(|seed| simulate(&scene, &CONSTANTS, seed).files);
        assert_eq!(a, b);
        assert_ne!(a, c);
    }

    #[test]
    fn xfs_allocates_what_there_is_again_and_less_on_a_full_volume() {
        let mut file = File::new(1 << 40, Rule::None);
        (file.size, file.pieces) = (1 << 30, vec![(0, 3 << 20)]);
        let volume = 100 << 30;
        assert_eq!(xfs_ahead(&file, volume, volume), 4 << 20);
        assert_eq!(xfs_ahead(&file, volume / 1000 * 45, volume), 1 << 20);
        assert_eq!(xfs_ahead(&file, volume / 1000 * 5, volume), 64 << 10);
        file.pieces = vec![(0, 5 << 30)];
        assert_eq!(xfs_ahead(&file, volume, volume), 1 << 30);
        file.size = 32 << 10;
        assert_eq!(xfs_ahead(&file, volume, volume), 0);
    }

    #[test]
    fn ext4_gives_a_direct_file_windows() {
        // Extents of real files of 8, 32 and 128 MiB beside others: 8, 11 and 23.
        for (mebibytes, extents) in [(8, 8), (32, 11), (128, 23)] {
            let scene = Scene {
                bytes: mebibytes << 20,
                ..scene(16, Allocation::Ext4, Pattern::Stream)
            };
            let mut constants = CONSTANTS;
            constants.writes_in_a_row = 1.0;
            let outcome = simulate(&scene, &constants, 1);
            let most = outcome.files.iter().map(|(_, extents)| *extents).max();
            assert_eq!(most, Some(extents), "{mebibytes}");
        }
    }

    #[test]
    fn a_volume_that_is_nearly_full_is_written_to_its_end() {
        let full = Scene {
            volume_bytes: 1100 << 20,
            group_bytes: 1100 << 20,
            ..scene(16, Allocation::Direct(Rule::DYNAMIC), Pattern::Stream)
        };
        let outcome = simulate(&full, &CONSTANTS, 5);
        assert_eq!(outcome.short_of_space, 0);
        assert_eq!(outcome.files.len(), 16);
    }
}
