//! `x-cowslip-compact`: the job that compacts an image's file while the disk is in use.
//!
//! Its steps, and what a crash leaves after each, are the engine's (docs/compaction.md). Cancelled,
//! it gives back what it has emptied by then.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cowslip::image::Format;
use cowslip::qcow2::compact::{BUDGET_BYTES, CompactOptions};
use cowslip_cmdline::compaction;
use cowslip_graph::Quiet;
use cowslip_qmp::QmpError;
use serde_json::Value;

use super::given::Given;
use super::host::Daemon;
use super::job::{Job, JobOptions};
use super::nodes::Node;
use super::reserved::Reserved;
use super::words::failed;

/// The kind of the job, which is the name of its command.
const KIND: &str = "x-cowslip-compact";
/// Time for which clients have to leave the disk alone before a job in the background goes on.
const IDLE: Duration = Duration::from_millis(500);
/// Bytes that such a job moves in a second.
const BACKGROUND_SPEED: u64 = 20 << 20;

fn wanted(given: &Given) -> Result<CompactOptions, QmpError> {
    let in_background = given.switch("background")?.unwrap_or(false);
    let defragment = given.switch("defragment")?.unwrap_or(false);
    let keeps_extents = in_background && !defragment;
    Ok(CompactOptions {
        budget_bytes: given.number("budget")?.unwrap_or(BUDGET_BYTES),
        target_bytes: given.number("target-size")?,
        zeroes: given.switch("zeroes")?.unwrap_or(false),
        dedupe_backing: given.switch("dedupe-backing")?.unwrap_or(false),
        // What a guest fills in the background would only have to be allocated once more.
        subclusters: !given.switch("keep-subclusters")?.unwrap_or(in_background),
        defragment,
        // A guest that is idle now and then would have its data written again and again.
        whole_extents: !given.switch("keep-extents")?.unwrap_or(keeps_extents),
    })
}

impl Daemon {
    /// `x-cowslip-compact`.
    ///
    /// # Errors
    /// No such node, one of a format without free space, one that cannot be written, or that
    /// another job is about.
    pub async fn compact(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let node = self.device(given)?;
        let format = node.image().own_layer().format;
        if format != Format::Qcow2 {
            return Err(QmpError::generic(format!(
                "Node '{}' has format '{}', which cannot be compacted",
                node.name,
                format.name()
            )));
        }
        let wanted = wanted(given)?;
        let options = self.job_options(given, &node)?;
        // What is below may not change while the image is compared with it.
        let about = match wanted.dedupe_backing {
            true => node.chain(),
            false => vec![Rc::clone(&node)],
        };
        about.iter().try_for_each(|node| node.may_change())?;
        self.nodes.enter(&node, true).await?;
        let entered = Rc::clone(&node);
        let reserved = Reserved::new(about, KIND)?;
        let started = self.start_job((KIND, options), |daemon, job| async move {
            let compacted = daemon.compact_node((&node, &job), &wanted).await;
            let _turn = daemon.turn.take().await;
            drop(reserved);
            let left = daemon.nodes.leave(&node, true).await;
            compacted.and(left)
        });
        self.or_leave(started, &entered).await
    }

    /// Options of the job: in the background it waits while clients use the disk, or one above it.
    fn job_options(&self, given: &Given, node: &Rc<Node>) -> Result<JobOptions, QmpError> {
        let options = JobOptions::of(given, Some(&node.name))?;
        if !given.switch("background")?.unwrap_or(false) {
            return Ok(options);
        }
        let nodes = self.nodes.with_above(node).into_iter();
        let span = given.number("idle-ms")?.map_or(IDLE, Duration::from_millis);
        let quiet = Quiet::new(nodes.map(|node| Arc::clone(&node.live)).collect(), span);
        Ok(options.behind(quiet, BACKGROUND_SPEED))
    }

    async fn compact_node(
        &self,
        (node, job): (&Node, &Job),
        wanted: &CompactOptions,
    ) -> Result<(), QmpError> {
        let image = node.image();
        if wanted.target_bytes.is_some() {
            let plan = image.compaction_plan(wanted, &job.work).await;
            compaction::reaches(&plan.map_err(failed)?, wanted).map_err(failed)?;
        }
        let done = image.compact(wanted, &job.work).await.map_err(failed)?;
        let mut figures = compaction::figures(&done);
        figures["id"] = job.id.as_str().into();
        figures["node-name"] = node.name.as_str().into();
        self.emit("X_COWSLIP_COMPACTED", figures);
        self.finalize(job).await
    }
}
