//! [`Patience`]: how long a queue waits when it has nothing to do.

use std::time::Duration;

/// How long a turn may wait for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    None,
    AtMost(Duration),
    Forever,
}
