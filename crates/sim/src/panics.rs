//! Panics of the engine are findings: their text and place are kept for the report instead of being
//! printed at once.

use std::cell::RefCell;
use std::sync::Once;

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Installs the hook, once.
pub fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::env::var_os("COWSLIP_SIM_BACKTRACE").is_some() {
                before(info);
            }
            LAST.with(|last| *last.borrow_mut() = info.to_string());
        }));
    });
}

/// The text and place of the last panic of this thread.
pub fn last() -> String {
    LAST.with(|last| last.borrow().clone())
}
