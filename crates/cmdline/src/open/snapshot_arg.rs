//! The internal snapshot that is read in the place of the disk: `-l` of qemu-img and qemu-nbd,
//! `snapshot.id=` and `snapshot.name=` of an image specification.

use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_console::output::Program;
use cowslip_nodes::options::{with_id, with_name};

/// The snapshot that `-l` names: `snapshot.id=ID,snapshot.name=NAME` (either alone, too), or an ID,
/// else a name.
///
/// # Errors
/// The name of the option that there is not.
pub fn parse_choice(given: &str) -> Result<SnapshotChoice, String> {
    if !given.starts_with("snapshot.") {
        return Ok(SnapshotChoice::IdOrName(given.to_string()));
    }
    let mut choice = None;
    for (name, value) in options::split(given).map_err(|error| error.to_string())? {
        choice = Some(match name.as_str() {
            "snapshot.id" => with_id(choice, &value),
            "snapshot.name" => with_name(choice, &value),
            _ => return Err(format!("Invalid parameter '{name}'")),
        });
    }
    Ok(choice.unwrap_or_else(|| SnapshotChoice::IdOrName(given.to_string())))
}

/// Returns the snapshot that `-l` of a verb names, if it is given.
///
/// # Errors
/// `Failed in parsing snapshot param 'x'`; what is wrong with it has been said.
pub fn chosen_snapshot(
    given: Option<&str>,
    program: &Program,
) -> Result<Option<SnapshotChoice>, CommandError> {
    let Some(given) = given else { return Ok(None) };
    parse_choice(given).map(Some).map_err(|why| {
        program.complain(why);
        CommandError::new(format!("Failed in parsing snapshot param '{given}'"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_named_by_id_by_name_by_both_or_by_either() {
        let text = str::to_string;
        let cases = [
            ("one", SnapshotChoice::IdOrName(text("one"))),
            ("snapshot.id=1", SnapshotChoice::Id(text("1"))),
            ("snapshot.name=a,,b", SnapshotChoice::Name(text("a,b"))),
            (
                "snapshot.name=a,snapshot.id=1",
                SnapshotChoice::IdAndName {
                    id: text("1"),
                    name: text("a"),
                },
            ),
        ];
        for (given, meant) in cases {
            assert_eq!(parse_choice(given), Ok(meant), "{given}");
        }
        let unknown = parse_choice("snapshot.id=1,size=2").unwrap_err();
        assert_eq!(unknown, "Invalid parameter 'size'");
    }
}
