//! `completions` and `manual`: what shells, `man` and the project's manual know of the command
//! lines, made from their declarations.

use std::path::{Path, PathBuf};

use clap::{Command, ValueEnum};
use clap_complete::Shell;

use crate::error::CommandError;
use crate::output::{self, Program};
use crate::{CowslipLine, QemuImgLine};

mod markdown;

/// A program whose command line is declared here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Declared {
    Cowslip,
    QemuImg,
}

impl Declared {
    fn command(self) -> Command {
        match self {
            Declared::Cowslip => CowslipLine::in_full(),
            Declared::QemuImg => QemuImgLine::in_full(),
        }
    }
}

/// Command line of `completions`.
#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// The program to complete
    #[arg(long, value_enum, default_value = "cowslip")]
    program: Declared,
    /// The shell; its completions are read from a file with this output
    shell: Shell,
}

/// Command line of `manual`.
#[derive(clap::Args)]
pub struct ManualArgs {
    /// Writes Markdown instead, for cowslip alone: the reference of the project's manual
    #[arg(long)]
    markdown: bool,
    /// Directory for the pages, one for each program and each verb, such as
    /// /usr/local/share/man/man1
    directory: PathBuf,
}

/// Prints completions; the exit code.
pub fn completions(args: &CompletionsArgs) -> u8 {
    let mut command = args.program.command();
    let name = command.get_name().to_string();
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut text);
    output::print(&String::from_utf8_lossy(&text));
    0
}

/// Writes manual pages; the exit code.
pub fn manual(args: &ManualArgs, program: &Program) -> u8 {
    let made = std::fs::create_dir_all(&args.directory);
    let written = made.and_then(|()| match args.markdown {
        true => markdown::write(CowslipLine::in_full(), &args.directory),
        false => write_pages(&args.directory),
    });
    program.exit_code(written.map_err(|error| {
        let words = cowslip::error::system_words(&error);
        let directory = args.directory.display();
        CommandError::new(format!(
            "Could not write manual pages into '{directory}': {words}"
        ))
    }))
}

fn write_pages(directory: &Path) -> std::io::Result<()> {
    for declared in Declared::value_variants() {
        clap_mangen::generate_to(declared.command(), directory)?;
    }
    Ok(())
}
