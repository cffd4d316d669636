//! Lists of options, `name=value,name=value`, as QEMU's programs read them.
//!
//! A comma inside a value is doubled; `name` alone switches on, `noname` off. Here lists are only
//! split, typed by a table and printed again; drivers and verbs give options their meaning.

use crate::error::{Error, Result};
use crate::size::{self, SizeError};

/// Options as they are given: names and values, in order.
pub type Pairs = Vec<(String, String)>;

/// Type of an option's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `on`, `off`, `yes`, `no`, `true`, `false`, `y`, `n`.
    Switch,
    /// A number of bytes, with suffix.
    Size,
    /// A whole number.
    Number,
    /// Any text.
    Text,
}

impl Kind {
    /// The word for it in a list of options.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Switch => "bool (on/off)",
            Kind::Size => "size",
            Kind::Number => "num",
            Kind::Text => "str",
        }
    }
}

/// An option that a format knows.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The name of the option.
    pub name: &'static str,
    /// Type of its values.
    pub kind: Kind,
    /// Its purpose, in a few words.
    pub help: &'static str,
}

/// A row in the option table of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionEntry {
    /// Its name. One that ends in a dot stands for all names that begin so.
    pub name: &'static str,
    /// Type of its values.
    pub kind: Kind,
    /// The value that it has where none is given; empty if there is none.
    pub default: &'static str,
    /// Its purpose, in a few words.
    pub help: &'static str,
}

impl OptionEntry {
    /// Whether an option of this name is meant.
    pub fn is(&self, name: &str) -> bool {
        match self.name.ends_with('.') {
            true => name.starts_with(self.name),
            false => name == self.name,
        }
    }
}

/// An option of a table: its name, type, default and purpose.
pub const fn option(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> OptionEntry {
    OptionEntry {
        name,
        kind,
        default,
        help,
    }
}

/// An option that is accepted and has no effect.
pub const fn ignored(name: &'static str, kind: Kind, default: &'static str) -> OptionEntry {
    option(name, kind, default, "Without effect")
}

/// The options of one node, which its driver takes out as it reads them. The last of several values
/// of one name counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options(Pairs);

impl Options {
    /// Options in the order in which they were given.
    pub fn new(pairs: Pairs) -> Options {
        Options(pairs)
    }

    /// Adds one, behind the others.
    pub fn put(&mut self, name: &str, value: String) {
        self.0.push((name.to_string(), value));
    }

    /// Takes those that are in a table.
    pub fn take_known(&mut self, table: &[OptionEntry]) -> Options {
        let is_known = |name: &str| table.iter().any(|option| option.is(name));
        Options(self.0.extract_if(.., |(name, _)| is_known(name)).collect())
    }

    /// Reads the options of a table. Those that the reader does not take stay.
    ///
    /// # Errors
    /// The reader's.
    pub fn read<T>(
        &mut self,
        table: &[OptionEntry],
        reader: impl FnOnce(&mut Options) -> Result<T>,
    ) -> Result<T> {
        let mut known = self.take_known(table);
        let read = reader(&mut known)?;
        self.0.extend(known.0);
        Ok(read)
    }

    /// The names, in the order in which they were given.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// The options that are left.
    pub fn into_pairs(self) -> Pairs {
        self.0
    }

    /// A value, which stays.
    pub fn get(&self, name: &str) -> Option<&str> {
        value(&self.0, name)
    }

    /// Takes the value of an option; the last of several counts.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let taken = self.0.extract_if(.., |(given, _)| given == name).last();
        taken.map(|(_, value)| value)
    }

    /// Takes a number of bytes.
    ///
    /// # Errors
    /// It is no size.
    pub fn take_size(&mut self, name: &str) -> Result<Option<u64>> {
        let value = self.take(name);
        value.map(|value| size(name, &value)).transpose()
    }

    /// Takes a switch.
    ///
    /// # Errors
    /// It is neither on nor off.
    pub fn take_switch(&mut self, name: &str) -> Result<Option<bool>> {
        let value = self.take(name);
        value.map(|value| switch(name, &value)).transpose()
    }

    /// Takes all options whose names begin so, without that beginning.
    pub fn take_group(&mut self, beginning: &str) -> Pairs {
        let group = self
            .0
            .extract_if(.., |(name, _)| name.starts_with(beginning));
        group
            .map(|(name, value)| (name[beginning.len()..].to_string(), value))
            .collect()
    }
}

/// Splits a list into names and values. The last of several values of one name wins.
///
/// # Errors
/// The list or an item is empty, or begins with a comma; or a single comma ends the list.
pub fn split(list: &str) -> Result<Vec<(String, String)>> {
    let ends_open = (list.len() - list.trim_end_matches(',').len()) % 2 == 1;
    let mut rest = list;
    let mut begins_so = list.is_empty();
    while !rest.is_empty() {
        let (item, after) = take_item(rest);
        begins_so |= item.is_empty() || item.starts_with(',');
        rest = after;
    }
    if begins_so || ends_open {
        return Err(Error::Invalid(format!("Invalid option list: {list}")));
    }
    Ok(pairs(list))
}

/// Splits a list, whatever it begins and ends with.
pub fn pairs(list: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        let (item, after) = take_item(rest);
        rest = after;
        out.push(match item.split_once('=') {
            Some((name, value)) => (name.to_string(), value.to_string()),
            None => match item.strip_prefix("no") {
                Some(name) if !name.is_empty() && name != "cow" => {
                    (name.to_string(), "off".to_string())
                }
                _ => (item, "on".to_string()),
            },
        });
    }
    out
}

/// The text up to the next single comma, with doubled commas made single, and what follows it.
fn take_item(list: &str) -> (String, &str) {
    let mut item = String::new();
    let mut rest = list;
    while let Some(at) = rest.find(',') {
        item.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix(',') {
            Some(after) => {
                item.push(',');
                rest = after;
            }
            None => return (item, rest),
        }
    }
    item.push_str(rest);
    (item, "")
}

/// Whether the list asks for the list of options.
pub fn asks_for_help(list: &str) -> bool {
    pairs(list)
        .iter()
        .any(|(name, value)| value == "on" && (name == "help" || name == "?"))
}

/// A value with its commas doubled, as lists have it.
pub fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// Reads a switch.
///
/// # Errors
/// It is neither on nor off.
pub fn switch(name: &str, value: &str) -> Result<bool> {
    match value {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(Error::Invalid(format!(
            "Parameter '{name}' expects 'on' or 'off'"
        ))),
    }
}

/// Reads a size.
///
/// # Errors
/// It is no size.
pub fn size(name: &str, value: &str) -> Result<u64> {
    size::parse(value).map_err(|error| match error {
        SizeError::Malformed => Error::Invalid(format!(
            "Parameter '{name}' expects a non-negative number below 2^64\n\
             Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
             and exabytes, respectively."
        )),
        SizeError::TooLarge => Error::Invalid(format!(
            "Value '{value}' is out of range for parameter '{name}'"
        )),
    })
}

/// Checks names and values against what is known, and writes sizes as plain numbers.
///
/// # Errors
/// An unknown name, or a value of the wrong kind.
pub fn normalise(given: Vec<(String, String)>, known: &[Known]) -> Result<Vec<(String, String)>> {
    let mut out = Vec::with_capacity(given.len());
    for (name, value) in given {
        let Some(option) = known.iter().find(|option| option.name == name) else {
            return Err(Error::Invalid(format!("Invalid parameter '{name}'")));
        };
        let value = match option.kind {
            Kind::Text => value,
            Kind::Switch => switch(&name, &value).map(|_| value)?,
            Kind::Size => size(&name, &value)?.to_string(),
            Kind::Number => match value.parse::<i128>() {
                Ok(_) => value,
                Err(_) => {
                    let message = format!("Parameter '{name}' expects a number");
                    return Err(Error::Invalid(message));
                }
            },
        };
        out.push((name, value));
    }
    Ok(out)
}

/// As [`normalise`], for an image that exists: what only creation knows is refused as that.
///
/// # Errors
/// As `normalise`.
pub fn normalise_for_amend(
    given: Vec<(String, String)>,
    known: &[Known],
    of_create: &[Known],
) -> Result<Vec<(String, String)>> {
    let is_in = |table: &[Known], name: &str| table.iter().any(|option| option.name == name);
    let wrong = given
        .iter()
        .find(|(name, _)| !is_in(known, name) && is_in(of_create, name));
    match wrong {
        Some((name, _)) => {
            let text = format!("Invalid parameter '{name}'");
            // Where new images have what existing ones have not.
            let all = [known, of_create].concat();
            Err(Error::Invalid(match normalise(given.clone(), &all) {
                Ok(_) => text + "\nThis option is only supported for image creation",
                Err(_) => text,
            }))
        }
        None => normalise(given, known),
    }
}

/// The last value of a name.
pub fn value<'a>(options: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let found = options.iter().rev().find(|(given, _)| given == name);
    found.map(|(_, value)| value.as_str())
}

/// The table of known options, sorted by name.
pub fn help_text(known: &[Known]) -> String {
    let mut sorted: Vec<&Known> = known.iter().collect();
    sorted.sort_by_key(|option| option.name);
    let lines = sorted.iter().map(|option| {
        let left = format!("  {}=<{}>", option.name, option.kind.name());
        format!("{left:<24} - {}\n", option.help)
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_split_at_single_commas() {
        let split = |list| {
            let pairs = split(list)?;
            let texts: Vec<String> = pairs.iter().map(|(n, v)| format!("{n}={v}")).collect();
            Ok::<_, Error>(texts.join(" "))
        };
        assert_eq!(split("a=1,b=x,,y,c").unwrap(), "a=1 b=x,y c=on");
        assert_eq!(split("nolazy,nocow").unwrap(), "lazy=off nocow=on");
        assert_eq!(split("a=,b==").unwrap(), "a= b==");
        assert_eq!(split("a=x,,").unwrap(), "a=x,");
        for bad in ["", ",", "a=1,", ",a=1", "a=1,,,"] {
            let message = split(bad).unwrap_err().to_string();
            assert_eq!(message, format!("Invalid option list: {bad}"));
        }
        assert!(asks_for_help("a=1,help") && asks_for_help("?") && !asks_for_help("helper"));
    }
}
