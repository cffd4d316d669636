//! The command line of a daemon: the same commands as clients send.

use std::path::PathBuf;
use std::rc::Rc;

use cowslip_nodes::json;
use serde_json::{Map, Value};

use super::Args;
use super::given::Given;
use super::host::Daemon;
use super::words::complaint;
use crate::error::CommandError;
use crate::options;

/// A list of options, or JSON, as arguments of a command. A word without a value is that of
/// `implied`.
fn arguments(text: &str, implied: Option<&str>) -> Result<Given, CommandError> {
    if text.starts_with('{') {
        return match serde_json::from_str(text) {
            Ok(Value::Object(members)) => Ok(Given(members)),
            Ok(_) => Err(CommandError::new("Invalid JSON object given")),
            Err(error) => Err(CommandError::new(format!("JSON parse error, {error}"))),
        };
    }
    let first = text.split(',').next().unwrap_or_default();
    let text = match implied {
        Some(name) if !first.contains('=') => format!("{name}={text}"),
        _ => text.to_string(),
    };
    let pairs = options::split(&text)?;
    // The text is one that this program has written.
    let nested: Value = serde_json::from_str(&json::text(&pairs)).unwrap_or_default();
    match nested {
        Value::Object(members) => Ok(Given(members)),
        _ => Ok(Given(Map::new())),
    }
}

/// The sockets on which clients are listened for: those that `--monitor` names.
///
/// # Errors
/// A monitor without a socket; one of a kind that is not supported.
pub fn sockets(chardevs: &[String], monitors: &[String]) -> Result<Vec<PathBuf>, CommandError> {
    let chardevs: Result<Vec<Given>, CommandError> = chardevs
        .iter()
        .map(|text| arguments(text, Some("backend")))
        .collect();
    let chardevs = chardevs?;
    let mut paths = Vec::new();
    for monitor in monitors {
        let monitor = arguments(monitor, Some("chardev"))?;
        let id = monitor
            .required("chardev")
            .map_err(|error| complaint(&error))?;
        if monitor.text("mode").is_some_and(|mode| mode != "control") {
            let text = "--monitor: only mode=control is supported";
            return Err(CommandError::new(text));
        }
        let found = chardevs
            .iter()
            .find(|chardev| chardev.text("id") == Some(id));
        let Some(chardev) = found else {
            return Err(CommandError::new(format!("Chardev '{id}' not found")));
        };
        let is_server = matches!(chardev.text("server"), Some("on" | "yes" | "true" | "y"));
        match (chardev.text("backend"), chardev.text("path"), is_server) {
            (Some("socket"), Some(path), true) => paths.push(PathBuf::from(path)),
            _ => {
                return Err(CommandError::new(format!(
                    "--chardev: '{id}' has to be socket,id={id},path=PATH,server=on,wait=off"
                )));
            }
        }
    }
    Ok(paths)
}

/// Does what the command line asks for: nodes first, then the NBD server, then exports.
///
/// # Errors
/// The first that cannot be done.
pub async fn execute(daemon: &Rc<Daemon>, args: &Args) -> Result<(), CommandError> {
    let nodes = args
        .blockdev
        .iter()
        .map(|text| ("blockdev-add", text, Some("driver")));
    let server = args
        .nbd_server
        .iter()
        .map(|text| ("nbd-server-start", text, None));
    let exports = args
        .export
        .iter()
        .map(|text| ("block-export-add", text, Some("type")));
    for (command, text, implied) in nodes.chain(server).chain(exports) {
        let given = arguments(text, implied)?;
        let done = daemon.change(command, &given).await;
        done.map_err(|error| complaint(&error))?;
    }
    Ok(())
}
