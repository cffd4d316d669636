//! A rate over time as one line of blocks.

/// Blocks of a line at most.
const BLOCKS_MAX: usize = 60;
/// Blocks from nothing to the most.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A rate over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Sparkline {
    /// Blocks, one for each piece of time, in eighths of the most.
    pub blocks: String,
    /// The least rate of a piece, a second.
    pub least: f64,
    /// The most.
    pub most: f64,
    /// Length of the first piece; the others are a step shorter or longer at most.
    pub piece_seconds: f64,
}

impl Sparkline {
    /// Draws counts of steps, as [`rates`] has them. `None` if there are less than two pieces,
    /// which show nothing.
    pub fn of(counts: &[u64], step_seconds: f64, seconds: f64) -> Option<Sparkline> {
        let sums = rates(counts, step_seconds, seconds, BLOCKS_MAX)?;
        let rates: Vec<f64> = sums.iter().map(|(count, time)| count / time).collect();
        let most = rates.iter().copied().fold(0.0, f64::max);
        let block = |rate: &f64| match most > 0.0 {
            true => BLOCKS[(rate / most * (BLOCKS.len() - 1) as f64).round() as usize],
            false => BLOCKS[0],
        };
        Some(Sparkline {
            blocks: rates.iter().map(block).collect(),
            least: rates.iter().copied().fold(f64::INFINITY, f64::min),
            most,
            piece_seconds: sums[0].1,
        })
    }
}

/// Merges counts of steps of `step_seconds` into at most `pieces_max` pieces, and returns their
/// counts and lengths in seconds. The last step is usually shorter: all steps took `seconds`
/// together. Returns `None` if there are less than two pieces.
pub fn rates(
    counts: &[u64],
    step_seconds: f64,
    seconds: f64,
    pieces_max: usize,
) -> Option<Vec<(f64, f64)>> {
    let mut steps: Vec<(f64, f64)> = counts.iter().map(|c| (*c as f64, step_seconds)).collect();
    let last = seconds - step_seconds * steps.len().checked_sub(1)? as f64;
    steps.last_mut()?.1 = last.clamp(0.0, step_seconds);
    // The rest of a step says little about a rate.
    if let [.., before, last] = &mut steps[..]
        && last.1 * 2.0 < step_seconds
    {
        *before = (before.0 + last.0, before.1 + last.1);
        steps.pop();
    }
    let pieces = steps.len().min(pieces_max);
    let sum = |piece: usize| {
        let part = steps.len() * piece / pieces..steps.len() * (piece + 1) / pieces;
        let parts = steps[part].iter();
        parts.fold((0.0, 0.0), |sum, step| (sum.0 + step.0, sum.1 + step.1))
    };
    (pieces >= 2).then(|| (0..pieces).map(sum).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_stands_out_and_the_scale_begins_at_nothing() {
        let line = Sparkline::of(&[700, 100, 0, 350], 0.1, 0.4).unwrap();
        assert_eq!(line.blocks, "█▂▁▅");
        assert!((line.most - 7000.0).abs() < 1e-6 && line.least.abs() < 1e-6);
        assert!((line.piece_seconds - 0.1).abs() < 1e-9);
    }

    #[test]
    fn the_last_step_is_as_long_as_it_was() {
        // Six tenths of a step with six tenths of the requests are the same rate.
        let line = Sparkline::of(&[100, 100, 60], 0.1, 0.26).unwrap();
        assert_eq!(line.blocks, "███");
        // Less than half goes with the one before.
        let line = Sparkline::of(&[100, 100, 9], 0.1, 0.209).unwrap();
        assert_eq!(line.blocks, "██");
        assert!((line.most - 1000.0).abs() < 1e-6, "{line:?}");
    }

    #[test]
    fn long_series_are_binned_and_nothing_is_lost() {
        for steps in [59, 60, 61, 119, 120, 1000] {
            let mut counts = vec![10; steps];
            counts[0] = 80;
            let line = Sparkline::of(&counts, 0.1, steps as f64 * 0.1).unwrap();
            assert_eq!(line.blocks.chars().count(), steps.min(60), "{steps}");
            assert!(line.blocks.starts_with('█'), "{line:?}");
            let in_first = steps / steps.min(60);
            let most = (80 + 10 * (in_first - 1)) as f64 / (in_first as f64 * 0.1);
            assert!((line.most - most).abs() < 1e-6, "{steps} {line:?}");
            assert!((line.least - 100.0).abs() < 1e-6, "{steps} {line:?}");
        }
    }

    #[test]
    fn what_is_no_series_is_not_drawn() {
        assert_eq!(Sparkline::of(&[], 0.1, 0.0), None);
        assert_eq!(Sparkline::of(&[5], 0.1, 0.05), None);
        assert_eq!(Sparkline::of(&[5, 1], 0.1, 0.11), None);
        assert_eq!(Sparkline::of(&[0, 0], 0.1, 0.2).unwrap().blocks, "▁▁");
    }
}
