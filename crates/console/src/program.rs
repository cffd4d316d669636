//! The name that this process was called by, for what is said where no verb is known.

use std::sync::OnceLock;

static NAME: OnceLock<String> = OnceLock::new();

/// Keeps the name; the first one is the process's own.
pub(crate) fn is_called(name: &str) {
    NAME.get_or_init(|| name.to_string());
}

/// The name, if it is known.
pub(crate) fn name() -> Option<&'static str> {
    NAME.get().map(String::as_str)
}

/// Whether the process was called by a name of QEMU's, whose scripts read what it prints.
pub fn is_called_as_qemu() -> bool {
    name().is_some_and(|name| name.starts_with("qemu-"))
}
