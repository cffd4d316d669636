//! The middle and the ends of repeated measurements.

/// The middle and the ends of some figures.
#[derive(Clone, Copy)]
pub struct Spread {
    /// The middle.
    pub median: f64,
    /// One end.
    pub least: f64,
    /// The other.
    pub greatest: f64,
}

impl Spread {
    /// Of the figures of some runs, if there are any.
    pub fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            *values.get(middle)?
        } else {
            (values.get(middle.checked_sub(1)?)? + values.get(middle)?) / 2.0
        };
        Some(Spread {
            median,
            least: *values.first()?,
            greatest: *values.last()?,
        })
    }
}
