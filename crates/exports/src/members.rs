//! [`Members`]: arguments of an export, as a client of a daemon names them.

use cowslip_console::error::CommandError;
use cowslip_nbd::remote::Address;
use serde_json::{Map, Value};

/// Members of `block-export-add`, of the right types: the schema has checked them.
#[derive(Clone, Copy, Debug)]
pub struct Members<'a>(pub &'a Map<String, Value>);

impl<'a> Members<'a> {
    /// A text.
    pub fn text(self, name: &str) -> Option<&'a str> {
        self.0.get(name).and_then(Value::as_str)
    }

    /// A text that must be given.
    ///
    /// # Errors
    /// It is not.
    pub fn required(self, name: &str) -> Result<&'a str, CommandError> {
        self.text(name).ok_or_else(|| missing(name))
    }

    /// A number that is not negative.
    ///
    /// # Errors
    /// It is another one, or none.
    pub fn number(self, name: &str) -> Result<Option<u64>, CommandError> {
        let Some(value) = self.0.get(name) else {
            return Ok(None);
        };
        let number = value.as_u64().map(Some);
        number.ok_or_else(|| {
            CommandError::new(format!("Parameter '{name}' expects a non-negative value"))
        })
    }

    /// The address of a socket, flat or in the older way with `data`.
    ///
    /// # Errors
    /// It is not given, or of a type that there is not here.
    pub fn address(self, name: &str) -> Result<Address, CommandError> {
        let given = self.group(name).ok_or_else(|| missing(name))?;
        let inner = given.group("data").unwrap_or(given);
        match given.required("type")? {
            "unix" => Ok(Address::Unix(inner.required("path")?.into())),
            "inet" => Ok(Address::Tcp {
                host: inner.required("host")?.to_string(),
                port: match inner.0.get("port") {
                    Some(Value::Number(port)) => port.to_string(),
                    _ => inner.required("port")?.to_string(),
                },
            }),
            other => Err(CommandError::new(format!(
                "sockets of type '{other}' are not supported"
            ))),
        }
    }

    fn group(self, name: &str) -> Option<Members<'a>> {
        match self.0.get(name) {
            Some(Value::Object(group)) => Some(Members(group)),
            _ => None,
        }
    }
}

/// The refusal of a call without an argument.
fn missing(name: &str) -> CommandError {
    CommandError::new(format!("Parameter '{name}' is missing"))
}
