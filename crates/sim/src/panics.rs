//! Panics of the engine are findings: their text and place are kept for the report instead of being
//! printed at once.

use std::cell::{Cell, RefCell};
use std::panic::AssertUnwindSafe;
use std::sync::Once;

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
    static KEPT: Cell<bool> = const { Cell::new(false) };
}

/// Installs the hook, once. It leaves panics outside of [`catch`] to the one before it.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !KEPT.get() || std::env::var_os("COWSLIP_SIM_BACKTRACE").is_some() {
                before(info);
            }
            LAST.with(|last| *last.borrow_mut() = info.to_string());
        }));
    });
}

/// Runs something; if it panics, the text and the place.
///
/// # Errors
/// The panic.
pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    install();
    KEPT.set(true);
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(work));
    KEPT.set(false);
    outcome.map_err(|_| LAST.with(|last| last.borrow().clone()))
}
