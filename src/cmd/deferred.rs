//! Options of verbs, which are declared only where their verb is the one of the line.
//!
//! A line names one verb of many; to declare the options of all of them took most of the time of a
//! start. What describes all verbs (completions, manual pages) takes the declaration [`in_full`].

use std::ffi::OsString;

use clap::builder::Resettable;
use clap::{ArgMatches, Args, Command, FromArgMatches, Id, Subcommand};

/// Verbs that open no image by its name, so that neither objects nor options about images at URLs
/// are for them.
pub const WITHOUT_IMAGES: [&str; 9] = [
    "ctl",
    "top",
    "umount",
    "allocate",
    "extents",
    "grow",
    "demo",
    "completions",
    "manual",
];

/// The command line of a verb, whose options are declared when the verb is met.
pub struct Deferred<T>(pub T);

impl<T: Args> Args for Deferred<T> {
    fn augment_args(verb: Command) -> Command {
        verb.defer(declare::<T>)
    }

    /// Declares the options at once, for [`in_full`]; no line is parsed to update an earlier one.
    fn augment_args_for_update(verb: Command) -> Command {
        T::augment_args(verb)
    }

    fn group_id() -> Option<Id> {
        T::group_id()
    }
}

impl<T: FromArgMatches> FromArgMatches for Deferred<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        T::from_arg_matches(matches).map(Deferred)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, clap::Error> {
        T::from_arg_matches_mut(matches).map(Deferred)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

/// Declares the options of a verb, to which the options of all verbs have been added.
fn declare<T: Args>(verb: Command) -> Command {
    let opens_images = !WITHOUT_IMAGES.contains(&verb.get_name());
    // The declaration of the options has a description of its own, which is not the verb's.
    let about = Resettable::from(verb.get_about().cloned());
    let long_about = Resettable::from(verb.get_long_about().cloned());
    let verb = T::augment_args(verb).about(about).long_about(long_about);
    verb.mut_args(|arg| match arg.is_global_set() && !opens_images {
        true => arg.hide(true),
        false => arg,
    })
}

/// Adds the verbs `V` to the declaration for a line: the one that its first word names, which is
/// all that such a line can come to, or every one where that word names none.
pub fn with_verbs<V: Subcommand>(line: Command, args: &[OsString]) -> Command {
    let verbs = V::augment_subcommands(Command::default());
    match args.get(1).and_then(|word| verbs.find_subcommand(word)) {
        Some(verb) => line.subcommand(verb.clone()),
        None => line.subcommands(verbs.get_subcommands().cloned()),
    }
}

/// Adds the verbs `V` with their options to a line, in the order in which they are declared.
pub fn in_full<V: Subcommand>(line: Command) -> Command {
    let verbs = V::augment_subcommands_for_update(Command::default());
    line.subcommands(verbs.get_subcommands().cloned())
}

/// A verb of a line with its options.
pub fn verb(line: &Command, name: &str) -> Option<Command> {
    let mut verb = line.find_subcommand(name)?.clone();
    verb.build();
    Some(verb)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CowslipLine, QemuImgLine};

    /// Number of options and operands that are the verb's own.
    fn own(verb: &Command) -> usize {
        let all = verb.get_arguments();
        all.filter(|arg| !arg.is_global_set()).count()
    }

    #[test]
    fn a_start_declares_the_options_of_its_verb_alone() {
        let plain = ["x", "info", "--backing-chain", "a"].map(OsString::from);
        // The verb is not the first word: all are there, but not their options.
        let behind = ["x", "--object=a", "info", "--backing-chain", "a"].map(OsString::from);
        for declared in [CowslipLine::declared, QemuImgLine::declared] {
            for (line, is_one) in [(&plain[..], true), (&behind[..], false)] {
                let mut declared = declared(line);
                let parsed = declared.try_get_matches_from_mut(line);
                assert!(parsed.is_ok(), "{parsed:?}");
                let verbs = declared.get_subcommands();
                let verbs: Vec<&Command> = verbs.filter(|verb| verb.get_name() != "help").collect();
                assert_eq!(verbs.len() == 1, is_one);
                for verb in verbs {
                    let declares = own(verb) > 0 || verb.has_subcommands();
                    assert_eq!(declares, verb.get_name() == "info", "{}", verb.get_name());
                }
            }
        }
    }

    #[test]
    fn verbs_are_the_same_whether_deferred_or_in_full() {
        let none = &[][..];
        for (mut deferred, mut full) in [
            (CowslipLine::declared(none), CowslipLine::in_full()),
            (QemuImgLine::declared(none), QemuImgLine::in_full()),
        ] {
            let verbs = full.get_subcommands();
            let verbs = verbs.map(|verb| (verb.get_name().to_string(), verb.get_about().cloned()));
            let verbs: Vec<_> = verbs.collect();
            assert!(verbs.len() > 14, "{}", verbs.len());
            deferred.build();
            full.build();
            for (name, about) in verbs {
                let deferred = deferred.find_subcommand_mut(&name).unwrap();
                let full = full.find_subcommand_mut(&name).unwrap();
                assert_eq!(deferred.get_about(), about.as_ref());
                let helps = [deferred, full].map(|verb| verb.render_long_help().to_string());
                assert_eq!(helps[0], helps[1]);
            }
        }
    }
}
