//! The name that this process was called by, for messages from code that belongs to no verb.

use std::sync::OnceLock;

static NAME: OnceLock<String> = OnceLock::new();

/// Stores the name. Only the first call has an effect: it has the name of the process itself.
pub(crate) fn is_called(name: &str) {
    NAME.get_or_init(|| name.to_string());
}

/// The name, if it has been stored.
pub(crate) fn name() -> Option<&'static str> {
    NAME.get().map(String::as_str)
}

/// Whether the process was called by the name of a QEMU program, whose output scripts parse.
pub fn is_called_as_qemu() -> bool {
    name().is_some_and(|name| name.starts_with("qemu-"))
}

/// Returns `qemus` under the name of a QEMU program, whose messages scripts compare, else `own`.
pub fn worded(qemus: impl Into<String>, own: impl Into<String>) -> String {
    match is_called_as_qemu() {
        true => qemus.into(),
        false => own.into(),
    }
}
