//! A histogram of durations: a few kilobytes however many there are.

use std::time::Duration;

/// Buckets in each doubling: the error of a percentile is below 1/32.
const BUCKETS_IN_DOUBLING: usize = 32;
const BITS_IN_DOUBLING: u32 = BUCKETS_IN_DOUBLING.ilog2();

/// How often which durations occurred.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    /// Takes one in.
    pub fn add(&mut self, duration: Duration) {
        let bucket = bucket_of(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
    }

    /// Takes in all of another one.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts
            .resize(self.counts.len().max(other.counts.len()), 0);
        for (sum, more) in self.counts.iter_mut().zip(&other.counts) {
            *sum += more;
        }
        self.total += other.total;
    }

    /// The duration that this many of a million requests do not exceed; 0 if there were none.
    pub fn percentile(&self, of_a_million: u64) -> Duration {
        let rank = (u128::from(self.total) * u128::from(of_a_million)).div_ceil(1_000_000);
        let rank = u64::try_from(rank).unwrap_or(u64::MAX).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(greatest_in(bucket));
            }
        }
        Duration::ZERO
    }
}

/// Numbers below [`BUCKETS_IN_DOUBLING`] have a bucket each; above, the highest bits decide.
fn bucket_of(nanoseconds: u64) -> usize {
    let doubling = nanoseconds.max(1).ilog2().saturating_sub(BITS_IN_DOUBLING);
    let top = usize::try_from(nanoseconds >> doubling).expect("a few bits are left");
    top + doubling as usize * BUCKETS_IN_DOUBLING
}

fn greatest_in(bucket: usize) -> u64 {
    let doubling = (bucket / BUCKETS_IN_DOUBLING).saturating_sub(1);
    let top = (bucket - doubling * BUCKETS_IN_DOUBLING) as u128;
    let next = (top + 1) << doubling;
    u64::try_from(next - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another_and_are_narrow() {
        let small = 0..5000u64;
        let large = (13..64).flat_map(|shift| {
            let power = 1u64 << shift;
            [power - 1, power, power + power / 3]
        });
        let mut last = 0;
        for number in small.chain(large).chain([u64::MAX]) {
            let bucket = bucket_of(number);
            assert!(bucket >= last, "{number}");
            last = bucket;
            let greatest = greatest_in(bucket);
            assert!(greatest >= number, "{number} {greatest}");
            assert!(greatest - number <= number / 31, "{number} {greatest}");
            assert_eq!(bucket_of(greatest), bucket);
        }
    }

    #[test]
    fn percentiles_are_of_all_that_was_added() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile(500_000), Duration::ZERO);
        for nanoseconds in 1..=30 {
            histogram.add(Duration::from_nanos(nanoseconds));
        }
        assert_eq!(histogram.percentile(500_000), Duration::from_nanos(15));
        assert_eq!(histogram.percentile(999_000), Duration::from_nanos(30));
        let mut longer = Histogram::default();
        longer.add(Duration::from_micros(1));
        longer.merge(&histogram);
        assert_eq!(longer.percentile(500_000), Duration::from_nanos(16));
        assert!(longer.percentile(1_000_000) >= Duration::from_micros(1));
        assert_eq!(histogram.percentile(1), Duration::from_nanos(1));
    }
}
