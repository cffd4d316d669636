//! The reference as Markdown: a page for each verb, made from the declarations.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, ArgAction, Command};

/// Writes a page for the program and one for each verb into a directory.
pub fn write(mut command: Command, directory: &Path) -> std::io::Result<()> {
    command.build();
    let name = command.get_name().to_string();
    std::fs::write(directory.join(format!("{name}.md")), overview(&mut command))?;
    for verb in verbs(&command) {
        let file = format!("{name}-{}.md", verb.get_name());
        let mut verb = verb.clone();
        std::fs::write(directory.join(file), page(&mut verb, 1))?;
    }
    Ok(())
}

fn verbs(command: &Command) -> impl Iterator<Item = &Command> {
    let verbs = command.get_subcommands();
    verbs.filter(|verb| verb.get_name() != "help" && !verb.is_hide_set())
}

/// The program's page: its verbs, and the options that all have.
fn overview(command: &mut Command) -> String {
    let name = command.get_name().to_string();
    let mut text = format!("# {name}\n\n{}.\n\n", about(command));
    text.push_str("| verb | |\n| --- | --- |\n");
    for verb in verbs(command) {
        let verb_name = verb.get_name();
        let about = cell(&about(verb));
        let _ok = writeln!(text, "| [`{verb_name}`]({name}-{verb_name}.md) | {about} |");
    }
    text.push_str("\n## Options of every verb\n\n");
    options(&mut text, command, true);
    text
}

/// The page of a verb, or the section of one of its own verbs.
fn page(command: &mut Command, level: usize) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let mut text = format!("{} {name}\n\n", "#".repeat(level));
    let long = command.get_long_about().or(command.get_about());
    if let Some(long) = long {
        let _ok = write!(text, "{}\n\n", prose(&long.to_string()));
    }
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ok = write!(text, "```text\n{usage}\n```\n\n");
    options(&mut text, command, false);
    let after = command.get_after_long_help().or(command.get_after_help());
    if let Some(after) = after {
        let _ok = write!(text, "```text\n{after}\n```\n\n");
    }
    let inner: Vec<Command> = verbs(command).cloned().collect();
    for mut verb in inner {
        text.push_str(&page(&mut verb, level + 1));
    }
    text
}

/// A table of arguments and options; those of every verb are on the program's page alone.
fn options(text: &mut String, command: &Command, are_global: bool) {
    let shown = command.get_arguments().filter(|argument| {
        let is_common = argument.is_global_set() || is_help(argument);
        !argument.is_hide_set() && is_common == are_global
    });
    let rows: Vec<String> = shown.map(row).collect();
    if rows.is_empty() {
        return;
    }
    text.push_str("| argument | |\n| --- | --- |\n");
    text.push_str(&rows.concat());
    text.push('\n');
}

fn is_help(argument: &Arg) -> bool {
    matches!(
        argument.get_action(),
        ArgAction::Help | ArgAction::HelpLong | ArgAction::HelpShort | ArgAction::Version
    )
}

fn row(argument: &Arg) -> String {
    let mut names = Vec::new();
    if let Some(short) = argument.get_short() {
        names.push(format!("-{short}"));
    }
    if let Some(long) = argument.get_long() {
        names.push(format!("--{long}"));
    }
    let takes_value = argument.get_action().takes_values();
    let value_names = argument.get_value_names().unwrap_or_default();
    let values: Vec<String> = match takes_value {
        true => value_names.iter().map(|name| format!("<{name}>")).collect(),
        false => Vec::new(),
    };
    let names = [names.join(", "), values.join(" ")].join(" ");
    let help = argument.get_long_help().or(argument.get_help());
    let mut help = help.map(ToString::to_string).unwrap_or_default();
    let choices = argument.get_possible_values();
    let choices: Vec<&str> = choices
        .iter()
        .filter(|choice| !choice.is_hide_set())
        .map(|choice| choice.get_name())
        .collect();
    if takes_value && !choices.is_empty() {
        let _ok = write!(help, " [{}]", choices.join(", "));
    }
    let defaults = argument.get_default_values();
    let defaults: Vec<_> = defaults
        .iter()
        .map(|value| value.to_string_lossy())
        .collect();
    if takes_value && !defaults.is_empty() && !argument.is_hide_default_value_set() {
        let _ok = write!(help, " [default: {}]", defaults.join(", "));
    }
    format!("| `{}` | {} |\n", cell(names.trim()), cell(&prose(&help)))
}

fn about(command: &Command) -> String {
    let about = command.get_about().map(ToString::to_string);
    about.unwrap_or_default()
}

/// Words of a declaration as Markdown: characters that would be markup are literal.
fn prose(text: &str) -> String {
    let mut markdown = String::with_capacity(text.len());
    for c in text.chars() {
        if "\\`*_<>[]#".contains(c) {
            markdown.push('\\');
        }
        markdown.push(c);
    }
    markdown
}

/// A text within a row.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
