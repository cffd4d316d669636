//! Advice in words.

use std::fmt::Write;

use crate::answer::{Advice, Answer, Verdict};
use crate::facts::{Facts, Format};
use crate::workload::Workload;

/// Width of the text.
const WIDTH: usize = 80;

/// The advice for an image.
pub fn as_text(facts: &Facts, workload: &Workload, advice: &Advice) -> String {
    let mut text = format!("{}\nworkload: {}\n", described(facts), workload.name);
    if workload.unknown > 0 {
        let line = format!(
            "{} further requests of the trace are not looked at\n",
            workload.unknown
        );
        text += &line;
    }
    if advice.verdict() == Verdict::Leave {
        text += "\nLeave it.\n";
    }
    let mut number = 0;
    for answer in advice.changes() {
        number += 1;
        text += &change(number, answer);
    }
    let left: Vec<&Answer> = advice
        .answers
        .iter()
        .filter(|answer| answer.verdict == Verdict::Leave)
        .collect();
    if !left.is_empty() {
        text += match number {
            0 => "\nWhy:\n",
            _ => "\nLeave as they are:\n",
        };
    }
    for answer in left {
        let figures = answer.figures.iter();
        let figures: Vec<String> = figures
            .map(|figure| format!(" ({} {})", rounded(figure.now), figure.name))
            .collect();
        let line = format!(
            "{}: {}{}: {}",
            answer.subject,
            answer.text,
            figures.concat(),
            answer.reason
        );
        text += &wrapped(&line, "  ", "    ");
    }
    text
}

fn described(facts: &Facts) -> String {
    let image = &facts.image;
    let format = match image.format {
        Format::Qcow2 => "qcow2",
        Format::Raw => "raw",
        Format::Other => "another format",
    };
    let mut text = format!("{}: {format}, {}", image.name, bytes(image.disk_bytes));
    if image.format == Format::Qcow2 {
        let _infallible = write!(text, ", {} clusters", bytes(image.cluster_bytes));
        if image.has_subclusters {
            let _infallible = write!(text, " with subclusters of {}", bytes(image.unit_bytes()));
        }
        if image.depth > 1 {
            let _infallible = write!(text, ", {} images", image.depth);
        }
    }
    let _infallible = write!(text, ", on {}", facts.host.kind);
    text
}

fn change(number: usize, answer: &Answer) -> String {
    let head = format!("{number}. {}: {}", answer.subject, answer.text);
    let mut text = format!("\n{}", wrapped(&head, "", "   "));
    for figure in &answer.figures {
        let Some(then) = figure.then else { continue };
        let times = match figure.now > 0.0 && then > 0.0 {
            true => format!(" ({:.1} times)", (then / figure.now).max(figure.now / then)),
            false => String::new(),
        };
        text += &format!(
            "   {}: {} -> {}{times}\n",
            figure.name,
            rounded(figure.now),
            rounded(then)
        );
    }
    text += &wrapped(&format!("why: {}", answer.reason), "   ", "   ");
    text += &format!("   measured: {}\n", answer.source);
    for line in &answer.commands {
        text += &format!("     {line}\n");
    }
    text
}

/// A number for people: two or three digits of it count.
fn rounded(value: f64) -> String {
    match value.abs() {
        0.0..0.1 => format!("{value:.3}"),
        0.1..10.0 => format!("{value:.2}"),
        10.0..1000.0 => format!("{value:.0}"),
        _ => {
            let unit = 10_f64.powf(value.abs().log10().floor() - 2.0);
            let digits = format!("{:.0}", (value / unit).round() * unit);
            grouped(&digits)
        }
    }
}

/// Digits in groups of three.
fn grouped(digits: &str) -> String {
    let len = digits.len();
    let letters = digits.chars().enumerate();
    letters.fold(String::new(), |mut text, (at, letter)| {
        if at > 0 && (len - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(letter);
        text
    })
}

fn bytes(bytes: u64) -> String {
    crate::rules::human(bytes)
}

/// Lines of words, each with an indent.
fn wrapped(words: &str, first: &str, further: &str) -> String {
    let mut text = String::new();
    let mut line = first.to_string();
    let mut is_empty = true;
    for word in words.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            text += &line;
            text.push('\n');
            line = further.to_string();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    text += &line;
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_as_many_digits_as_count() {
        for (value, expected) in [
            (0.0, "0.000"),
            (0.0031, "0.003"),
            (1.234, "1.23"),
            (46.6, "47"),
            (4567.0, "4 570"),
            (43_290.0, "43 300"),
            (1_234_567.0, "1 230 000"),
        ] {
            assert_eq!(rounded(value), expected);
        }
    }

    #[test]
    fn lines_are_wrapped_at_words() {
        let text = wrapped(&"word ".repeat(40), "", "  ");
        assert!(text.lines().all(|line| line.len() <= WIDTH));
        assert_eq!(text.split_whitespace().count(), 40);
        assert!(
            text.lines()
                .nth(1)
                .unwrap_or_default()
                .starts_with("  word")
        );
    }
}
