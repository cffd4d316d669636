//! `-T` of qemu-io and qemu-nbd. There are no trace events, which is what QEMU says of those that
//! it does not have.

use cowslip_console::output::Program;

/// Result of a request to trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traced {
    /// Events were asked for, which do not exist.
    Noted,
    /// The list of all was asked for: it is empty, and the program ends.
    Listed,
}

/// Takes the value of one `-T`.
///
/// # Errors
/// A parameter that it has not, or that is not supported.
pub fn trace(value: &str, program: &Program) -> Result<Traced, String> {
    for part in value.split(',').filter(|part| !part.is_empty()) {
        let pattern = match part.split_once('=') {
            None => part,
            Some(("enable", pattern)) => pattern,
            Some((name @ ("file" | "events"), _)) => {
                return Err(format!("Tracing (-T {name}=) is not supported"));
            }
            Some((name, _)) => return Err(format!("Invalid parameter '{name}'")),
        };
        if ["help", "?"].contains(&pattern) {
            return Ok(Traced::Listed);
        }
        let name = pattern.strip_prefix('-').unwrap_or(pattern);
        program.complain(format_args!("warning: trace event '{name}' does not exist"));
    }
    Ok(Traced::Noted)
}
