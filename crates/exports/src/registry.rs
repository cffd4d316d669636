//! The transports, one line each, and their options on a command line.

use clap::{ArgMatches, Command, FromArgMatches};
use cowslip_console::error::CommandError;

use super::kind::{Line, OfLine, TransportKind};
use super::transport::Transport;
use super::{fuse, nbd, vhost_user};

/// All transports, in the order in which they listen.
static TRANSPORTS: &[&dyn TransportKind] = &[&nbd::Kind, &vhost_user::Kind, &fuse::Kind];

/// Options of all transports on a command line.
pub struct TransportArgs(ArgMatches);

/// Options that all transports have.
#[derive(clap::Args)]
struct SharedArgs {
    /// Threads that its queues, the connections of NBD, or the requests of --fuse are spread over;
    /// if not given, one for each processor, and one for NBD and for --fuse
    // In the help it follows the options of queues, to which it applies first.
    #[arg(long, value_name = "N", display_order = THREADS_ORDER)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
}

/// Place of `--threads` in the help: that of `--queues`, behind which it is by its name.
const THREADS_ORDER: usize = 11;

impl clap::Args for TransportArgs {
    fn augment_args(command: Command) -> Command {
        let all = TRANSPORTS.iter();
        SharedArgs::augment_args(all.fold(command, |command, kind| kind.declare(command)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        TransportArgs::augment_args(command)
    }
}

impl FromArgMatches for TransportArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<TransportArgs, clap::Error> {
        Ok(TransportArgs(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.clone_from(matches);
        Ok(())
    }
}

impl TransportArgs {
    /// The transports that the command line asks for, or the one that serves without being asked
    /// for; and whether clients may change the size of the disk.
    ///
    /// # Errors
    /// Values that are not understood.
    pub fn transports(&self) -> Result<(Vec<Box<dyn Transport>>, bool), CommandError> {
        let mut line = Line::new(&self.0);
        line.threads = line.options::<SharedArgs>()?.threads.map(usize::from);
        let all: Result<Vec<OfLine>, CommandError> =
            TRANSPORTS.iter().map(|kind| kind.of_line(line)).collect();
        let all = all?;
        let is_asked = |of_line: &OfLine| of_line.transport.is_some() && !of_line.is_fallback;
        let (any, lets_grow) = (
            all.iter().any(is_asked),
            all.iter().any(|of_line| of_line.lets_grow),
        );
        let chosen = all.into_iter().filter(|it| !(any && it.is_fallback));
        Ok((chosen.filter_map(|it| it.transport).collect(), lets_grow))
    }
}

/// The transport with this type of exports.
pub fn transport_kind(name: &str) -> Option<&'static dyn TransportKind> {
    TRANSPORTS.iter().find(|kind| kind.name() == name).copied()
}
