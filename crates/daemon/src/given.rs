//! [`Given`]: arguments of a command, of the right types: the schema has checked them.

use cowslip_qmp::QmpError;
use serde_json::{Map, Value};

use super::words::missing;

/// Arguments by name.
#[derive(Clone, Debug, Default)]
pub struct Given(pub Map<String, Value>);

impl Given {
    /// A text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    /// A text that must be given.
    ///
    /// # Errors
    /// It is not.
    pub fn required(&self, name: &str) -> Result<&str, QmpError> {
        self.text(name).ok_or_else(|| missing(name))
    }

    /// A switch.
    ///
    /// # Errors
    /// It is something else.
    pub fn switch(&self, name: &str) -> Result<Option<bool>, QmpError> {
        match self.0.get(name) {
            None => Ok(None),
            Some(Value::Bool(is_on)) => Ok(Some(*is_on)),
            Some(_) => Err(wrong(name, "boolean")),
        }
    }

    /// A number that is not negative.
    ///
    /// # Errors
    /// It is another one, or none.
    pub fn number(&self, name: &str) -> Result<Option<u64>, QmpError> {
        match self.0.get(name) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number)),
                None => {
                    let text = format!("Parameter '{name}' expects a non-negative value");
                    Err(QmpError::generic(text))
                }
            },
        }
    }

    /// A group of arguments.
    pub fn group(&self, name: &str) -> Option<Given> {
        match self.0.get(name) {
            Some(Value::Object(group)) => Some(Given(group.clone())),
            _ => None,
        }
    }
}

fn wrong(name: &str, expected: &str) -> QmpError {
    let text = format!("Invalid parameter type for '{name}', expected: {expected}");
    QmpError::generic(text)
}
