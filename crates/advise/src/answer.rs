//! [`Advice`]: answers with figures, reasons and commands.

/// Outcome of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Change it.
    Change,
    /// Leave it.
    Leave,
}

impl Verdict {
    /// The word in output.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Change => "change",
            Verdict::Leave => "leave it",
        }
    }
}

/// An expected figure, as it is and as it would be.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Its name and unit: `first writes a second`.
    pub name: &'static str,
    /// Now.
    pub now: f64,
    /// Then; `None` where nothing is to change.
    pub then: Option<f64>,
}

/// Relation of an answer to a copy of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByCopy {
    /// Nothing.
    No,
    /// It is a copy with these options, `name=value`: all answers that need one make the same.
    Needed(Vec<String>),
    /// Its commands need none; a copy that is made all the same does it, with these options.
    Instead(Vec<String>),
    /// After it the image is only read, so that no copy of it pays.
    Superseded,
}

/// The answer of a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The subject: `clusters`, `policy` …
    pub subject: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// The advice in one sentence.
    pub text: String,
    /// The reason.
    pub reason: String,
    /// Expected figures.
    pub figures: Vec<Figure>,
    /// Command lines that lead there, in their order.
    pub commands: Vec<String>,
    /// Its relation to a copy of the image.
    pub by_copy: ByCopy,
    /// The document whose measurements say so.
    pub source: &'static str,
}

impl Answer {
    /// An answer without figures and commands.
    pub fn new(
        (subject, source): (&'static str, &'static str),
        verdict: Verdict,
        text: impl Into<String>,
        reason: impl Into<String>,
    ) -> Answer {
        Answer {
            subject,
            verdict,
            text: text.into(),
            reason: reason.into(),
            figures: Vec::new(),
            commands: Vec::new(),
            by_copy: ByCopy::No,
            source,
        }
    }

    /// With an expected figure.
    #[must_use]
    pub fn figure(mut self, name: &'static str, now: f64, then: Option<f64>) -> Answer {
        self.figures.push(Figure { name, now, then });
        self
    }

    /// By a copy of the image with these options, `name=value`.
    #[must_use]
    pub fn by_copy(mut self, options: &[&str]) -> Answer {
        let options = options.iter().map(|option| option.to_string());
        self.by_copy = ByCopy::Needed(options.collect());
        self
    }

    /// By its commands, or by a copy that is made for something else, with these options.
    #[must_use]
    pub fn or_by_copy(mut self, options: &[&str]) -> Answer {
        let options = options.iter().map(|option| option.to_string());
        self.by_copy = ByCopy::Instead(options.collect());
        self
    }

    /// With a command line.
    #[must_use]
    pub fn command(mut self, line: impl Into<String>) -> Answer {
        self.commands.push(line.into());
        self
    }
}

/// The advice for an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// All answers: changes first, those that gain most before others.
    pub answers: Vec<Answer>,
}

impl Advice {
    /// The verdict on the whole.
    pub fn verdict(&self) -> Verdict {
        match self.changes().next() {
            Some(_) => Verdict::Change,
            None => Verdict::Leave,
        }
    }

    /// Answers that change something.
    pub fn changes(&self) -> impl Iterator<Item = &Answer> {
        let answers = self.answers.iter();
        answers.filter(|answer| answer.verdict == Verdict::Change)
    }

    /// The answer on a subject.
    pub fn on(&self, subject: &str) -> Option<&Answer> {
        self.answers.iter().find(|answer| answer.subject == subject)
    }
}
