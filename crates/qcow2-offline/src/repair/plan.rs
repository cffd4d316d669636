//! The plan of a repair: the knowledge of the image, the steps, and the observer of both.

use cowslip_boxed::boxed;
use std::ops::Range;
use std::sync::Arc;

use super::refcounts::Refcounts;
use super::step::Step;
use super::survey::{Survey, out_of_memory};
use crate::check::counts::{Memory, OutOfMemory};
use crate::check::{CheckOptions, CheckResult, Finding};
use crate::file::{AlignedFile, BlockFile};
use crate::header::{FIRST_READ_BYTES, Header, autoclear};
use crate::{Error, Result};

/// Which flaws are repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Unused space is freed, and COPIED corrected where that is safe. If structures contradict
    /// each other nothing is done: space that looks free may be the target of a broken entry.
    Leaks,
    /// Leaks and corruptions (`-r all`).
    All,
}

/// How a repair is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairOptions {
    /// Which flaws are repaired.
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

/// An event of a repair.
#[derive(Debug)]
pub enum Event<'a> {
    /// The plan has this step.
    Planned(&'a Step),
    /// The step is written; durable it is at the end of its stage.
    Done(&'a Step),
    /// A check of the repaired image found this.
    Remains(&'a Finding),
    /// Progress of the current pass through the image's metadata.
    Progress {
        /// Bytes that are read.
        done_bytes: u64,
        /// Bytes that will be.
        total_bytes: u64,
    },
}

/// Receives the events of a repair while it runs. A broken image may need millions of steps.
pub trait Observer: Send + Sync {
    /// Called for each event.
    fn event(&mut self, event: Event<'_>);
}

/// For repairs without an observer.
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

/// Totals of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Summary {
    /// Steps that only free space.
    pub leaks: u64,
    /// Other steps that repair something.
    pub corruptions: u64,
    /// All refcounts are rebuilt.
    pub rebuilds_refcounts: bool,
    /// Steps, all of them.
    pub steps: u64,
}

impl Summary {
    pub(super) fn add(&mut self, step: &Step) {
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
    /// Totals of the steps that were done.
    pub done: Summary,
    /// A check of the image afterwards.
    pub check: CheckResult,
}

/// The knowledge of the image, and the steps planned for it.
pub(super) struct Plan<'a> {
    pub(super) file: AlignedFile,
    /// The header as it is.
    pub(super) header: Header,
    /// The header as it will be.
    pub(super) new_header: Header,
    pub(super) options: RepairOptions,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) survey: Survey,
    pub(super) refcounts: Refcounts,
    pub(super) summary: Summary,
    /// Steps that are no counts or flags, and how many.
    pub(super) steps: Vec<Step>,
    /// There is no memory for all of them.
    pub(super) too_many_steps: bool,
    pub(super) structural: u64,
    /// Totals of the steps done so far.
    pub(super) finished: Summary,
    /// COPIED of some entry is to be changed.
    pub(super) copied_wrong: bool,
    /// Clusters whose refcount is 0 now, and whose space is still to be released.
    pub(super) freed: Vec<Range<u64>>,
}

impl<'a> Plan<'a> {
    #[boxed]
    pub(super) async fn make(
        file: &Arc<dyn BlockFile>,
        options: &RepairOptions,
        observer: &'a mut dyn Observer,
    ) -> Result<Plan<'a>> {
        let file = AlignedFile::new(file.clone());
        let header = read_header(&file).await?;
        let file_bytes = file.len().await?;
        let memory = Memory::new(options.memory_bytes_max);
        let survey = Survey::new(&header, file_bytes, memory, file.name())?;
        let mut plan = Plan {
            refcounts: Refcounts::default(),
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
        plan.refuse_overreach().await?;
        plan.survey_l1_tables().await?;
        plan.survey_refcount_table().await?;
        plan.find_lost_tables().await?;
        plan.survey_bitmap_data()?;
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

    /// Reports a step, and counts it.
    pub(super) fn step(&mut self, step: &Step) {
        self.summary.add(step);
        let flag_or_count = matches!(
            step,
            Step::Refcount { .. }
                | Step::CountsBeyondEnd { .. }
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

    pub(super) fn done(&mut self, step: &Step) {
        self.finished.add(step);
        self.observer.event(Event::Done(step));
    }

    /// Sets autoclear bits and marks in the new header.
    pub(super) fn mark(&mut self) {
        if self.summary.steps > 0 {
            self.new_header.autoclear_features &= autoclear::KNOWN;
        }
        let (dirty, corrupt) = (self.header.is_dirty(), self.header.is_corrupt());
        if dirty || corrupt {
            self.step(&Step::Marks { dirty, corrupt });
        }
    }

    /// Leaves what the scope does not cover.
    pub(super) fn restrict(&mut self) -> Result<()> {
        if self.options.scope == Scope::All {
            return Ok(());
        }
        if self.refcounts.rebuild {
            return Err(self.needs_all("the refcount structure must be rebuilt"));
        }
        Ok(())
    }

    pub(super) fn needs_all(&self, what: &str) -> Error {
        Error::Unsupported {
            file: self.file.name().to_string(),
            feature: format!("repairing leaks alone where {what} (check -r all repairs it),")
                .into(),
        }
    }

    pub(super) fn charge(&mut self, bytes: u64) -> Result<()> {
        let charged = self.survey.memory.charge(bytes);
        charged.map_err(|OutOfMemory| out_of_memory(self.file.name()))
    }
}

/// The header of an image that may be damaged.
pub(super) async fn read_header(file: &AlignedFile) -> Result<Header> {
    let prefix = file.read_new(0, FIRST_READ_BYTES).await?;
    let wanted = Header::wanted_bytes(&prefix, u64::MAX);
    let bytes = file.read_new(0, wanted).await?;
    Header::parse_damaged(&bytes, file.name())
}
