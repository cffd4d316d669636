//! Parts of verbs that write images: [`ChangeArgs`], their options, and [`what_is_left`], the end
//! of a cancelled one.

use crate::job::JobArgs;
use crate::open::{self, Trust};
use crate::output::DoneArgs;

/// Options of verbs that change an image and say in the end what they have done.
#[derive(clap::Args)]
pub struct ChangeArgs {
    /// Print nothing
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub trust: Trust,
    #[command(flatten)]
    pub done: DoneArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

/// Describes the leftovers of a cancelled job that was to make the file `target`; `begun` says
/// whether it had come so far as to open that for writing.
pub fn what_is_left(target: &str, begun: bool) -> &'static str {
    let destination = open::destination(target).ok();
    let path = destination
        .as_ref()
        .and_then(|destination| destination.path());
    let metadata = path.map(|path| path.metadata().ok());
    match (metadata, begun) {
        (Some(None), false) => "was not created",
        (_, false) => "is unchanged",
        (Some(None), true) => "was removed",
        (Some(Some(left)), true) if left.is_file() && left.len() == 0 => "was emptied",
        (_, true) => "contains an incomplete copy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let name = path.to_str().unwrap();
        assert_eq!(what_is_left(name, false), "was not created");
        assert_eq!(what_is_left(name, true), "was removed");
        std::fs::write(&path, "").unwrap();
        assert_eq!(what_is_left(name, true), "was emptied");
        std::fs::write(&path, "data").unwrap();
        assert_eq!(what_is_left(name, true), "contains an incomplete copy");
        assert_eq!(what_is_left(name, false), "is unchanged");
        assert_eq!(
            what_is_left("/dev/null", true),
            "contains an incomplete copy"
        );
        let export = "nbd://localhost/x";
        assert_eq!(what_is_left(export, true), "contains an incomplete copy");
    }
}
