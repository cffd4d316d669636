//! `break`, `wait_break`, `resume`, `remove_break`: requests that stop in the filter `blkdebug`.

use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use cowslip::file::Event;

use super::shell::{Complaint, Outcome, Shell, unsupported};

/// How long a request may take to a stop: whatever comes at all has come by then.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl Shell {
    /// Whether requests can stop: a filter of the image stops them.
    fn can_stop(&self, what: &str) -> Outcome {
        self.opened()?;
        match self.out.breakpoints().is_attached() {
            true => Ok(()),
            false => unsupported(what),
        }
    }

    pub(super) fn set_break(&self, args: &[String]) -> Outcome {
        let what = "Could not set breakpoint";
        self.can_stop(what)?;
        let event = Event::from_name(&args[0]).ok_or_else(|| none(what))?;
        self.out.breakpoints().set(event, &args[1]);
        Ok(())
    }

    pub(super) fn remove_break(&self, args: &[String]) -> Outcome {
        let what = format!("Could not remove breakpoint {}", args[0]);
        self.can_stop(&what)?;
        let removed = self.out.breakpoints().remove(&args[0]);
        removed.map_err(|_| none(&what))
    }

    pub(super) fn resume(&self, args: &[String]) -> Outcome {
        let what = "Could not resume request";
        self.can_stop(what)?;
        let resumed = self.out.breakpoints().resume(&args[0]);
        resumed.map_err(|_| none(what))
    }

    /// Waits until a request has stopped, but not for ever, as QEMU does: a script that errs is to
    /// end.
    pub(super) async fn wait_break(&mut self, args: &[String]) -> Outcome {
        let what = "Could not wait for a request";
        self.can_stop(what)?;
        let mut stopped = self.out.breakpoints().stopped(&args[0]);
        let mut too_long = pin!(cowslip_queue::sleep(LONGEST_WAIT));
        std::future::poll_fn(|context| {
            if Pin::new(&mut stopped).poll(context).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let waited = too_long.as_mut().poll(context);
            waited.map(|()| {
                // Nobody will resume what stops there later on, and the next flush would wait for
                // it.
                let _unset = self.out.breakpoints().remove(&args[0]);
                Err(none(what))
            })
        })
        .await
    }
}

fn none(what: &str) -> Complaint {
    Complaint::Said(format!("{what}: No such file or directory"))
}
