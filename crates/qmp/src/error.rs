//! Errors as the protocol has them.

use std::fmt;

/// The class of an error, which programs tell apart. All but the first are for particular commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Everything else.
    GenericError,
    /// The command does not exist, or not at this time.
    CommandNotFound,
    /// The device has no job, or is not in use.
    DeviceNotActive,
    /// There is no device of this name.
    DeviceNotFound,
    /// KVM has not what is needed.
    KvmMissingCap,
}

impl ErrorClass {
    /// All classes.
    pub const ALL: [ErrorClass; 5] = [
        ErrorClass::GenericError,
        ErrorClass::CommandNotFound,
        ErrorClass::DeviceNotActive,
        ErrorClass::DeviceNotFound,
        ErrorClass::KvmMissingCap,
    ];

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            ErrorClass::GenericError => "GenericError",
            ErrorClass::CommandNotFound => "CommandNotFound",
            ErrorClass::DeviceNotActive => "DeviceNotActive",
            ErrorClass::DeviceNotFound => "DeviceNotFound",
            ErrorClass::KvmMissingCap => "KVMMissingCap",
        }
    }
}

/// The failure of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QmpError {
    /// Its class.
    pub class: ErrorClass,
    /// Text for people.
    pub desc: String,
}

impl QmpError {
    /// An error of a class.
    pub fn new(class: ErrorClass, desc: impl Into<String>) -> QmpError {
        QmpError {
            class,
            desc: desc.into(),
        }
    }

    /// An error of no particular class.
    pub fn generic(desc: impl Into<String>) -> QmpError {
        QmpError::new(ErrorClass::GenericError, desc)
    }

    /// The error for a command that does not exist.
    pub fn command_not_found(name: &str) -> QmpError {
        QmpError::new(
            ErrorClass::CommandNotFound,
            format!("The command {name} has not been found"),
        )
    }
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.desc)
    }
}

impl std::error::Error for QmpError {}
