//! Options that change nothing here, or that nothing has: QEMU tells what is wrong with them once
//! it has opened what they are said of, and by then something else may have been wrong.

use cowslip::image::Format;

use crate::error::CommandError;
use crate::options;

/// Options of the qcow2 driver in QEMU, beside those whose names begin as one of
/// [`OF_QCOW2_BEGIN`].
const OF_QCOW2: &[&str] = &[
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
    "discard-no-unref",
    "cache-size",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-clean-interval",
];

const OF_QCOW2_BEGIN: &[&str] = &["overlap-check", "encrypt."];

/// Switches that tune what works otherwise here.
const SWITCHES: &[&str] = &[
    "auto-read-only",
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
];

/// The same of QEMU's driver for files.
const SWITCHES_OF_FILE: &[&str] = &["auto-read-only", "drop-cache", "x-check-cache-dropped"];

/// What is to be told when the file is open, and when the image is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Doubts {
    of_file: Option<String>,
    of_image: Option<String>,
    /// The options that some format has, or none.
    names: Vec<String>,
}

impl Doubts {
    /// Hears of an option of the image.
    pub fn hear(&mut self, name: &str) {
        let is_of_a_format = is_of_qcow2(name) || ["offset", "size", "key-secret"].contains(&name);
        if is_of_a_format {
            self.names.push(name.to_string());
        }
    }

    /// Takes an option that changes nothing here, or does not exist; `false` if it is none of
    /// these.
    ///
    /// # Errors
    /// What QEMU tells at once.
    pub fn take(&mut self, name: &str, value: &str) -> Result<bool, CommandError> {
        if let Some(own) = name.strip_prefix("file.") {
            return self.take_of_file(own, value);
        }
        let is_nested = name.contains('.') && !name.starts_with("overlap-check.");
        if let Some(own) = name.strip_prefix("backing.") {
            let own = own.strip_prefix("file.").unwrap_or(own);
            return Ok(without_effect_below(own));
        }
        if is_nested {
            return Ok(false);
        }
        let said = match name {
            _ if SWITCHES.contains(&name) => wrong_switch(name, value),
            "node-name" => {
                (!is_well_formed(value)).then(|| format!("Invalid node-name: '{value}'"))
            }
            "overlap-check" | "overlap-check.template" => wrong_template(value),
            "cache-clean-interval" => None,
            _ if name.starts_with("overlap-check.") => None,
            _ => {
                self.names.push(name.to_string());
                None
            }
        };
        self.of_image = self.of_image.take().or(said);
        Ok(true)
    }

    fn take_of_file(&mut self, own: &str, value: &str) -> Result<bool, CommandError> {
        match own {
            _ if SWITCHES_OF_FILE.contains(&own) => Ok(options::switch(own, value).map(|_| true)?),
            // Its discards are those of the image, which are passed on.
            "discard" => Ok(value == "unmap"),
            "node-name" | "driver" | "aio-max-batch" => Ok(true),
            _ if own.contains('.') || ["pr-manager", "detect-zeroes"].contains(&own) => Ok(false),
            _ => {
                let text = format!("Block protocol 'file' doesn't support the option '{own}'");
                self.of_file.get_or_insert(text);
                Ok(true)
            }
        }
    }

    /// What is wrong with what was said of the file, which is open.
    ///
    /// # Errors
    /// That.
    pub fn of_file(&self) -> Result<(), String> {
        self.of_file.clone().map_or(Ok(()), Err)
    }

    /// What is wrong with what was said of the image, which is open and has this format.
    ///
    /// # Errors
    /// That.
    pub fn of_image(&self, format: Format) -> Result<(), String> {
        let has = |name: &String| match format {
            Format::Qcow2 => is_of_qcow2(name),
            Format::Raw => ["offset", "size"].contains(&name.as_str()),
            Format::Luks => name == "key-secret",
        };
        if let Some(text) = &self.of_image {
            return Err(text.clone());
        }
        match self.names.iter().find(|name| !has(name)) {
            None => Ok(()),
            Some(name) => Err(format!(
                "Block format '{}' does not support the option '{name}'",
                format.name()
            )),
        }
    }
}

fn is_of_qcow2(name: &str) -> bool {
    OF_QCOW2.contains(&name) || OF_QCOW2_BEGIN.iter().any(|begin| name.starts_with(begin))
}

fn without_effect_below(own: &str) -> bool {
    SWITCHES.contains(&own)
        || matches!(own, "node-name" | "driver" | "cache-clean-interval")
        || own.starts_with("overlap-check")
        || own.ends_with("cache-size")
}

fn wrong_switch(name: &str, value: &str) -> Option<String> {
    options::switch(name, value)
        .err()
        .map(|why| why.to_string())
}

/// As QEMU has identifiers, and nodes have 31 signs at most.
fn is_well_formed(name: &str) -> bool {
    let signs = |sign: char| sign.is_ascii_alphanumeric() || "-._".contains(sign);
    let starts = name.starts_with(|sign: char| sign.is_ascii_alphabetic());
    starts && name.len() < 32 && name.chars().all(signs)
}

fn wrong_template(value: &str) -> Option<String> {
    let is_one = ["none", "constant", "cached", "all"].contains(&value);
    (!is_one).then(|| {
        format!(
            "Unsupported value '{value}' for qcow2 option 'overlap-check'. Allowed are any of the following: none, \
             constant, cached, all"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubts(list: &[(&str, &str)]) -> Doubts {
        let mut doubts = Doubts::default();
        for (name, value) in list {
            doubts.hear(name);
            assert!(doubts.take(name, value).unwrap(), "{name}");
        }
        doubts
    }

    #[test]
    fn what_a_format_has_not_is_told_of_it() {
        let lazy = doubts(&[("lazy-refcounts", "on")]);
        assert_eq!(lazy.of_image(Format::Qcow2), Ok(()));
        let why = lazy.of_image(Format::Raw).unwrap_err();
        assert!(why.ends_with("'raw' does not support the option 'lazy-refcounts'"));
        let foo = doubts(&[("foo", "1")]);
        assert!(foo.of_image(Format::Qcow2).unwrap_err().ends_with("'foo'"));
        assert_eq!(foo.of_file(), Ok(()));
        let of_file = doubts(&[("file.foo", "1")]);
        assert!(of_file.of_file().unwrap_err().ends_with("'foo'"));
        assert_eq!(of_file.of_image(Format::Raw), Ok(()));
    }

    #[test]
    fn values_are_judged() {
        for (name, value, said) in [
            ("pass-discard-other", "x", "expects 'on' or 'off'"),
            ("overlap-check", "x", "Unsupported value 'x'"),
            ("node-name", "1", "Invalid node-name: '1'"),
        ] {
            let why = doubts(&[(name, value)]).of_image(Format::Qcow2);
            assert!(why.unwrap_err().contains(said), "{name}");
        }
        let mut doubts = Doubts::default();
        assert!(doubts.take("file.drop-cache", "x").is_err());
        assert!(!doubts.take("file.pr-manager", "x").unwrap());
        assert!(!doubts.take("data-file.foo", "x").unwrap());
    }
}
