//! Options that verbs have in common.

use crate::job::JobArgs;
use crate::open::Trust;
use crate::output::{DoneArgs, OutputArgs};

/// Options of verbs that do a job and say in the end what they have done.
#[derive(clap::Args)]
pub struct OutcomeArgs {
    #[command(flatten)]
    pub done: DoneArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

/// Options of verbs that report what an image is like.
#[derive(clap::Args)]
pub struct ReportArgs {
    #[command(flatten)]
    pub trust: Trust,
    #[command(flatten)]
    pub output: OutputArgs,
}

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
