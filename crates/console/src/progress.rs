//! A bar for people who wait. On standard error, and only if that is a terminal: output stays clean
//! in pipes and logs.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The bar of one command; gone when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for so many units of work.
    pub fn of(total: u64) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3} %  {elapsed}  {msg}")
        {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// Says what is being done.
    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_string());
    }

    /// Prints while the bar is away: on a terminal both are in the same place.
    pub fn suspend(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }

    /// So many units more are done.
    pub fn advance(&self, units: u64) {
        self.0.inc(units);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
