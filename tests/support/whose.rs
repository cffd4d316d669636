//! Programs of QEMU's names, ours and QEMU's own.

use std::path::Path;
use std::process::Command;

use super::cowslip;

/// Owner of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    Ours,
    Theirs,
}

impl Whose {
    pub const BOTH: [Whose; 2] = [Whose::Ours, Whose::Theirs];

    /// The program of this name.
    pub fn program(self, name: &str) -> Command {
        match self {
            Whose::Theirs => Command::new(name),
            Whose::Ours => {
                let mut command = cowslip();
                command.arg(name);
                command
            }
        }
    }

    /// The same in a directory.
    pub fn program_in(self, name: &str, dir: &Path) -> Command {
        let mut command = self.program(name);
        command.current_dir(dir);
        command
    }
}
