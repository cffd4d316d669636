//! [`Environment`]: the variables that say where credentials, regions and proxies are.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Environment variables: those of the process, or others in tests.
#[derive(Clone, Default)]
pub struct Environment {
    variables: BTreeMap<String, String>,
}

// Values are secrets, too.
impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.variables.keys()).finish()
    }
}

impl Environment {
    /// The variables of the process, but for those that are no text.
    pub fn of_process() -> Environment {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        std::env::vars_os().filter_map(text).collect()
    }

    /// The value of a variable, if it is not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.variables.get(name).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// The variables whose names begin so.
    pub(crate) fn group(&self, beginning: &str) -> impl Iterator<Item = (&str, &str)> {
        let all = self.variables.iter();
        let group =
            all.filter(move |(name, value)| name.starts_with(beginning) && !value.is_empty());
        group.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// A file of the user's: the value of a variable, or a place in the home directory.
    pub(crate) fn file(&self, variable: &str, in_home: &str) -> Option<PathBuf> {
        match self.get(variable) {
            Some(path) => Some(PathBuf::from(path)),
            None => Some(PathBuf::from(self.get("HOME")?).join(in_home)),
        }
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> Environment {
        let variables = variables.into_iter().collect();
        Environment { variables }
    }
}
