//! A progress bar. It is drawn on standard error, and only if that is a terminal, so that output
//! stays clean in pipes and logs.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The progress bar of one command; erased when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for `total` units of work.
    pub fn of(total: u64) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3} %  {elapsed}  {msg}")
        {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// Sets the label of the bar.
    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_string());
    }

    /// Hides the bar while `print` runs, since both share the terminal.
    pub fn suspend(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }

    /// Advances the bar by `units`.
    pub fn advance(&self, units: u64) {
        self.0.inc(units);
    }

    /// Moves the bar to a place, of work whose amount may have changed.
    pub fn stand_at(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
