//! Filters between the user and an image in a list of options: `copy-on-read` and `compress`. The
//! engine does their work; what is left of the list describes the image.

use super::graph::{NODES_MAX, Pairs};
use crate::error::CommandError;

/// What stands above an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Above {
    /// What is read from the layers below is kept.
    pub copy_on_read: Option<Copies>,
    /// Writes store whole clusters, compressed.
    pub compress: bool,
}

/// How much of the layers below is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copies {
    /// All.
    All,
    /// What the layers down to the node of this name hold (`bottom=`).
    DownTo(String),
}

/// Whether a driver stands above an image.
pub fn is_above(driver: &str) -> bool {
    matches!(driver, "copy-on-read" | "compress")
}

/// Takes these filters out of a list.
///
/// # Errors
/// An option that they do not have; nothing is below them.
pub fn take(mut list: Pairs) -> Result<(Pairs, Above), CommandError> {
    let mut above = Above::default();
    for _ in 0..NODES_MAX {
        let driver = list.iter().rfind(|(name, _)| name == "driver");
        let driver = driver.map(|(_, driver)| driver.clone());
        let Some(driver) = driver.filter(|driver| is_above(driver)) else {
            return Ok((list, above));
        };
        list = below(list, &driver, &mut above)?;
    }
    Err(CommandError::new(format!(
        "more than {NODES_MAX} nodes in a line are not supported"
    )))
}

/// The list of the node below one of them. What every node has is said of the image, unless that
/// says it itself.
fn below(list: Pairs, driver: &str, above: &mut Above) -> Result<Pairs, CommandError> {
    let (mut ours, mut theirs) = (Pairs::new(), Pairs::new());
    let mut bottom = Copies::All;
    for (name, value) in list {
        match (name.as_str(), name.strip_prefix("file.")) {
            ("driver" | "node-name" | "auto-read-only", _) => {}
            ("bottom", _) if driver == "copy-on-read" => bottom = Copies::DownTo(value),
            ("file" | "filename", _) => theirs.push(("filename".to_string(), value)),
            (_, Some(own)) => theirs.push((own.to_string(), value)),
            (
                "read-only" | "force-share" | "discard" | "detect-zeroes" | "cache.direct"
                | "cache.no-flush",
                None,
            ) => ours.push((name, value)),
            _ => {
                return Err(CommandError::new(format!(
                    "Block format '{driver}' does not support the option '{name}'"
                )));
            }
        }
    }
    if theirs.is_empty() {
        let text = "A block device must be specified for \"file\"";
        return Err(CommandError::new(text));
    }
    match driver {
        "compress" => above.compress = true,
        _ => above.copy_on_read = Some(bottom),
    }
    if !theirs.iter().any(|(name, _)| name == "driver") {
        // Nothing is probed below a filter: without a driver it is a file's bytes.
        theirs.push(("driver".to_string(), "file".to_string()));
    }
    ours.extend(theirs);
    Ok(ours)
}

/// How many layers below the image a node is.
///
/// # Errors
/// There is none of this name.
pub fn depth(bottom: &str, list: &Pairs) -> Result<u32, CommandError> {
    let named = list.iter().find_map(|(name, value)| {
        let layers = name.strip_suffix("node-name").filter(|_| value == bottom)?;
        let depth = layers.len() / "backing.".len();
        (layers == "backing.".repeat(depth)).then_some(depth as u32)
    });
    named.ok_or_else(|| CommandError::new(format!("Bottom node '{bottom}' not found")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;

    fn taken(list: &str) -> Result<(Pairs, Above), String> {
        take(options::split(list).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_below_is_left_as_a_list_of_its_own() {
        let (list, above) = taken("driver=qcow2,file.filename=a").unwrap();
        assert_eq!(above, Above::default());
        assert_eq!(
            list,
            options::split("driver=qcow2,file.filename=a").unwrap()
        );
        let given = "driver=compress,read-only=on,file.driver=copy-on-read,file.bottom=b,\
                     file.file.driver=qcow2,file.file.backing.node-name=b,filename=a";
        let (list, above) = taken(given).unwrap();
        let expected = "read-only=on,driver=qcow2,backing.node-name=b,filename=a";
        assert_eq!(list, options::split(expected).unwrap());
        assert!(above.compress);
        assert_eq!(above.copy_on_read, Some(Copies::DownTo("b".to_string())));
        assert_eq!(depth("b", &list).unwrap(), 1);
        assert!(depth("c", &list).is_err());
        let (list, _) = taken("driver=copy-on-read,file.filename=a").unwrap();
        assert_eq!(list, options::split("filename=a,driver=file").unwrap());
    }

    #[test]
    fn what_they_do_not_have_is_refused_by_name() {
        for (list, expected) in [
            (
                "driver=compress,bottom=a,file=b",
                "'compress' does not support the option 'bottom'",
            ),
            (
                "driver=copy-on-read,foo=1,file.driver=qcow2",
                "does not support the option 'foo'",
            ),
            ("driver=copy-on-read", "must be specified for \"file\""),
        ] {
            let error = taken(list).unwrap_err();
            assert!(error.contains(expected), "{list}: {error}");
        }
    }
}
