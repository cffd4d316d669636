//! Repairs a qcow2 image: a plan first, then its run.
//!
//! Promises. Guest data that can be reached is kept, and data that a broken entry still points to is
//! found again where nobody else has its space. A crash at any point of the run leaves the image no
//! worse: each stage is durable before the next begins, and no stage makes an entry refer to space
//! that is not counted. Nothing is written where nothing is wrong. Leaves out: what guest data means,
//! the external data file (which is not looked at), and images whose header says nothing usable.
//!
//! 1. [`survey`]: all tables are read once; each broken entry is decided ([`super::entry::mend`]),
//!    and the references are counted as they will be.
//! 2. [`refcounts`], [`copied`]: what differs from those counts on disk.
//! 3. [`run`]: the stages.
//!
//! | stage | what is written | a crash after it leaves |
//! | --- | --- | --- |
//! | 0 | the dirty mark (version 3), so that the next read-write open goes on; features that a repair breaks are cleared | the image as it was |
//! | A | broken entries, each set right or given up | leaks; entries that were unusable are gone |
//! | B | counts that are too low; or all counts anew, elsewhere, then the header switches | counts at least as high as the references |
//! | C | copies of what shares its space, tables that move; then the entries and the header that refer to them | the old or the new place of each, both counted |
//! | D | COPIED cleared where a count is not 1 | |
//! | E | counts that are too high; then holes where nothing is any more, unless entries were broken | entries without COPIED whose count is 1: written by copying, which is safe |
//! | F | COPIED set where a count is 1 | |
//! | G | a check; if it finds no corruption, the dirty and corrupt marks are cleared | |
//!
//! Counts rise before COPIED is cleared: cleared first, a write in between would free a cluster that
//! somebody else still uses. They fall after all else.

use std::ops::Range;
use std::sync::Arc;

use super::check::counts::{Memory, OutOfMemory};
use super::check::{self, CheckOptions, CheckResult, Finding};
use super::header::{FIRST_READ_BYTES, Header, autoclear};
use crate::file::{BlockFile, HostFile};
use crate::{Error, Result};

mod copied;
mod refcounts;
mod roots;
mod run;
mod step;
mod survey;
mod tables;

pub use step::{Change, SnapshotFate, Step};

/// What is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Space that nobody uses is freed, and COPIED where that is safe. If structures contradict
    /// each other nothing is done: what looks free may be what a broken entry points to.
    Leaks,
    /// Everything.
    All,
}

/// How a repair is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairOptions {
    /// What is repaired.
    pub scope: Scope,
    /// Bytes of memory for what grows with the image and its damage, as
    /// [`CheckOptions::memory_bytes_max`].
    pub memory_bytes_max: u64,
}

impl RepairOptions {
    /// A repair of this scope with a check's memory.
    pub fn new(scope: Scope) -> RepairOptions {
        RepairOptions {
            scope,
            memory_bytes_max: CheckOptions::default().memory_bytes_max,
        }
    }
}

/// What happens in a repair.
#[derive(Debug)]
pub enum Event<'a> {
    /// The plan has this step.
    Planned(&'a Step),
    /// The step is written; durable it is at the end of its stage.
    Done(&'a Step),
    /// A check of the repaired image found this.
    Remains(&'a Finding),
    /// So many bytes of metadata are read of so many, in the present walk through the image.
    Progress {
        /// Bytes that are read.
        done_bytes: u64,
        /// Bytes that will be.
        total_bytes: u64,
    },
}

/// Who is told what a repair does while it runs. A broken image may have millions of steps.
pub trait Observer: Send + Sync {
    /// Something happened.
    fn event(&mut self, event: Event<'_>);
}

/// For repairs that nobody watches.
impl Observer for () {
    fn event(&mut self, _: Event<'_>) {}
}

/// Keeps the planned steps: for images that are known to be small.
impl Observer for Vec<Step> {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Planned(step) = event {
            self.push(step.clone());
        }
    }
}

/// What a plan comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Summary {
    /// Steps that give back space and do nothing else.
    pub leaks: u64,
    /// Other steps that repair something.
    pub corruptions: u64,
    /// All refcounts are to be written anew.
    pub rebuilds_refcounts: bool,
    /// Steps, all of them.
    pub steps: u64,
}

impl Summary {
    fn add(&mut self, step: &Step) {
        self.steps += 1;
        self.rebuilds_refcounts |= matches!(step, Step::RebuildRefcounts { .. });
        if step.frees_leak() {
            self.leaks += 1;
        } else if step.counts() {
            self.corruptions += 1;
        }
    }

    /// Nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.steps == 0
    }
}

/// The outcome of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What was done.
    pub done: Summary,
    /// A check of the image afterwards.
    pub check: CheckResult,
}

/// What a repair would do; changes nothing.
///
/// # Errors
/// If the file cannot be read, its header says nothing usable, or it takes more memory than allowed.
pub async fn plan(
    file: &Arc<dyn BlockFile>,
    options: &RepairOptions,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let mut plan = Plan::make(file, options, observer).await?;
    plan.restrict()?;
    Ok(plan.summary)
}

/// Repairs the image in `file`, which nobody else may have open, and checks it.
///
/// # Errors
/// As [`plan`], or a failure of a write, after which the image is no worse and the repair may be
/// tried again.
pub async fn repair(
    file: &Arc<dyn BlockFile>,
    options: &RepairOptions,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let plan = Plan::make(file, options, observer).await?;
    run::run(plan).await
}

/// What is known of the image and to be done about it.
struct Plan<'a> {
    file: HostFile,
    /// The header as it is.
    header: Header,
    /// The header as it will be.
    new_header: Header,
    options: RepairOptions,
    observer: &'a mut dyn Observer,
    survey: survey::Survey,
    refcounts: refcounts::Refcounts,
    summary: Summary,
    /// Steps that are no counts or flags, and how many.
    steps: Vec<Step>,
    /// There is no memory for all of them.
    too_many_steps: bool,
    structural: u64,
    /// What is done so far.
    finished: Summary,
    /// COPIED of some entry is to be changed.
    copied_wrong: bool,
    /// Clusters that are counted no more, whose space is still to be given back.
    freed: Vec<Range<u64>>,
}

impl<'a> Plan<'a> {
    async fn make(
        file: &Arc<dyn BlockFile>,
        options: &RepairOptions,
        observer: &'a mut dyn Observer,
    ) -> Result<Plan<'a>> {
        let file = HostFile::new(file.clone());
        let header = read_header(&file).await?;
        let file_bytes = file.len().await?;
        let memory = Memory::new(options.memory_bytes_max);
        let survey = survey::Survey::new(&header, file_bytes, memory, file.name())?;
        let mut plan = Plan {
            refcounts: refcounts::Refcounts::default(),
            new_header: header.clone(),
            header,
            file,
            options: options.clone(),
            observer,
            survey,
            summary: Summary::default(),
            steps: Vec::new(),
            too_many_steps: false,
            structural: 0,
            finished: Summary::default(),
            copied_wrong: false,
            freed: Vec::new(),
        };
        plan.survey_roots().await?;
        plan.survey_l1_tables().await?;
        plan.survey_refcount_table().await?;
        plan.find_lost_tables().await?;
        plan.survey_l2_tables().await?;
        plan.find_lost_clusters().await?;
        plan.place().await?;
        plan.compare_refcounts().await?;
        plan.compare_copied().await?;
        plan.mark();
        if plan.too_many_steps {
            return Err(out_of_memory(plan.file.name()));
        }
        Ok(plan)
    }

    /// Tells a step, and counts it.
    fn step(&mut self, step: &Step) {
        self.summary.add(step);
        let flag_or_count = matches!(
            step,
            Step::Refcount { .. }
                | Step::CopiedL2 { .. }
                | Step::CopiedData { .. }
                | Step::Marks { .. }
        );
        if !flag_or_count {
            self.structural += 1;
            match self.survey.memory.charge(step.memory_bytes()) {
                Ok(()) => self.steps.push(step.clone()),
                Err(OutOfMemory) => self.too_many_steps = true,
            }
        }
        self.observer.event(Event::Planned(step));
    }

    fn done(&mut self, step: &Step) {
        self.finished.add(step);
        self.observer.event(Event::Done(step));
    }

    /// What autoclear bits and marks become.
    fn mark(&mut self) {
        if self.summary.steps > 0 {
            self.new_header.autoclear_features &= autoclear::KNOWN;
        }
        let (dirty, corrupt) = (self.header.is_dirty(), self.header.is_corrupt());
        if dirty || corrupt {
            self.step(&Step::Marks { dirty, corrupt });
        }
    }

    /// Leaves what the scope does not cover.
    fn restrict(&mut self) -> Result<()> {
        if self.options.scope == Scope::All {
            return Ok(());
        }
        if self.refcounts.rebuild {
            return Err(self.needs_all("the refcount structure must be rebuilt"));
        }
        Ok(())
    }

    fn needs_all(&self, what: &str) -> Error {
        Error::Unsupported {
            file: self.file.name().to_string(),
            feature: format!("repairing leaks alone where {what} (check -r all repairs it),"),
        }
    }

    fn charge(&mut self, bytes: u64) -> Result<()> {
        let charged = self.survey.memory.charge(bytes);
        charged.map_err(|OutOfMemory| out_of_memory(self.file.name()))
    }
}

fn out_of_memory(name: &str) -> Error {
    Error::Unsupported {
        file: name.to_string(),
        feature: "repairing an image whose references or damage take more memory than is allowed"
            .into(),
    }
}

/// The header of an image that may be damaged.
async fn read_header(file: &HostFile) -> Result<Header> {
    let prefix = file.read_new(0, FIRST_READ_BYTES).await?;
    let wanted = Header::wanted_bytes(&prefix, u64::MAX);
    let bytes = file.read_new(0, wanted).await?;
    Header::parse_damaged(&bytes, file.name())
}

/// Checks what is in the file now.
async fn verify(
    file: &HostFile,
    options: &RepairOptions,
    observer: &mut dyn Observer,
) -> Result<(Header, CheckResult)> {
    struct Forward<'a>(&'a mut dyn Observer);
    impl check::Observer for Forward<'_> {
        fn finding(&mut self, finding: &Finding) {
            self.0.event(Event::Remains(finding));
        }
        fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
            self.0.event(Event::Progress {
                done_bytes,
                total_bytes,
            });
        }
    }
    let header = read_header(file).await?;
    let check_options = CheckOptions {
        memory_bytes_max: options.memory_bytes_max,
    };
    let mut observer = Forward(observer);
    let result = check::check(file.block_file(), &header, &check_options, &mut observer).await?;
    Ok((header, result))
}
