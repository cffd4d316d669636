//! Parts of verbs that write images: [`ChangeArgs`], their options.

use crate::job::JobArgs;
use crate::open::Trust;
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
