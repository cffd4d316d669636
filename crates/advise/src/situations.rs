//! Prepared situations: the advice in each, the factor that the model expects of it, and the factor
//! by which the bench has found the advised way better than the other one.
//!
//! The measurements are in `data/confirmed.tsv`, each with its command line.

use serde_json::{Value, json};

use crate::answer::Verdict;
use crate::check::WRONG_AT;
use crate::facts::Facts;
use crate::figures::{Confirmed, confirmed};
use crate::rules::advise;
use crate::workload::Workload;

pub(crate) mod facts;
mod prepared;

/// A change is confirmed from this factor on: the advised way over the other one.
pub const BETTER_AT: f64 = 1.1;
/// "Leave it" is confirmed unless the other way is better by more than a change has to be.
const NO_WORSE_THAN: f64 = 1.0 / 1.3;
/// Factors beyond this are taken for the same: a call that takes no time is as good as another one.
const BEYOND: f64 = 100.0;

/// An image in its place under a workload, and the subject that is asked about.
pub struct Situation {
    /// Its title, as in `data/confirmed.tsv`.
    pub title: &'static str,
    /// The image and its place.
    pub facts: Facts,
    /// The workload's name.
    pub workload: &'static str,
    /// The subject of the answer.
    pub subject: &'static str,
    /// The expected factor; `None`: as much as the answer promises.
    pub expected: Option<f64>,
}

/// A situation with its advice, beside its measurement.
pub struct Shown {
    /// The title.
    pub title: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// The advice in one sentence.
    pub advice: String,
    /// The factor by which the model expects the advised way to be better.
    pub model: f64,
    /// The measurement.
    pub measured: Confirmed,
}

impl Shown {
    /// The factor by which the advised way was better.
    pub fn bench(&self) -> f64 {
        self.measured.factor()
    }

    /// The bench bears the advice out.
    pub fn is_confirmed(&self) -> bool {
        match self.verdict {
            Verdict::Change => self.bench() >= BETTER_AT,
            Verdict::Leave => self.bench() >= NO_WORSE_THAN,
        }
    }

    /// The model's factor differs from the bench's by more than [`WRONG_AT`].
    pub fn is_wrong(&self) -> bool {
        let ratio = self.model.min(BEYOND) / self.bench().min(BEYOND);
        !(1.0 / WRONG_AT..=WRONG_AT).contains(&ratio)
    }

    /// The verdict of the bench on advice and model.
    pub fn verdict_of_bench(&self) -> &'static str {
        match (self.is_confirmed(), self.is_wrong()) {
            (false, _) => "contradicted",
            (true, true) => "confirmed; model wrong",
            (true, false) => "confirmed",
        }
    }
}

/// All situations beside their measurements, in the order of these.
///
/// # Panics
/// A measurement is of no situation, or of one without such an answer, which a test of this crate
/// would have found.
pub fn compare() -> Vec<Shown> {
    confirmed().map(shown).collect()
}

fn shown(measured: Confirmed) -> Shown {
    let (title, on) = (measured.situation, measured.on);
    let situation =
        prepared::of(title, on).unwrap_or_else(|| panic!("no situation '{title}' on {on}"));
    let workload = Workload::named(situation.workload).expect("it has a workload that exists");
    let advice = advise(&situation.facts, &workload);
    let answer = advice
        .on(situation.subject)
        .unwrap_or_else(|| panic!("no answer in '{title}' on {on}"));
    let promised = || {
        let figure = answer.figures.first()?;
        let (now, then) = (figure.now, figure.then?);
        Some(measured.better.factor(then, now))
    };
    let model = situation.expected.or_else(promised);
    Shown {
        title,
        verdict: answer.verdict,
        advice: answer.text.clone(),
        model: model.unwrap_or(1.0),
        measured,
    }
}

/// A factor as tables have it.
fn factor(value: f64) -> String {
    match value {
        value if value > BEYOND => "> 100".to_string(),
        value if value >= 10.0 => format!("{value:.0}"),
        value if value >= 2.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// The situations in words.
pub fn as_text(all: &[Shown]) -> String {
    let mut text =
        "\nsituations: how much better the advised way is than the other one\n".to_string();
    for it in all {
        text += &format!(
            "  {:5} {:58} measured {:>10}  model {:>10}  {}{}\n",
            it.measured.on,
            it.title,
            factor(it.bench()),
            factor(it.model),
            it.verdict.name(),
            match it.verdict_of_bench() {
                "confirmed" => String::new(),
                other => format!("  <- {other}"),
            }
        );
    }
    let count = all.iter().filter(|it| it.is_confirmed()).count();
    text + &format!("\n{} of {} answers are confirmed\n", count, all.len())
}

/// The situations for programs.
pub fn as_json(all: &[Shown]) -> Value {
    let rows = all.iter().map(|it| {
        json!({
            "situation": it.title,
            "file-system": it.measured.on,
            "verdict": it.verdict.name(),
            "advice": it.advice,
            "model": it.model,
            "bench": it.bench(),
            "advised": it.measured.advised,
            "other": it.measured.other,
            "unit": it.measured.unit,
            "confirmed": it.is_confirmed(),
            "wrong": it.is_wrong(),
            "command": it.measured.command,
        })
    });
    rows.collect()
}

/// The situations as the table of docs/advise.md.
pub fn as_table(all: &[Shown]) -> String {
    let mut text = "| situation | on | advice | model | bench | | measured | by |\n\
                    | --- | --- | --- | ---: | ---: | --- | --- | --- |\n"
        .to_string();
    for it in all {
        let measured = &it.measured;
        text += &format!(
            "| {} | {} | {}: {} | {} | {} | {} | {} {}, {} {}, {} | `{}` |\n",
            it.title,
            measured.on,
            it.verdict.name(),
            it.advice,
            factor(it.model),
            factor(it.bench()),
            it.verdict_of_bench(),
            measured.advised_way,
            measured.advised,
            measured.other_way,
            measured.other,
            measured.unit,
            measured.command,
        );
    }
    text
}
