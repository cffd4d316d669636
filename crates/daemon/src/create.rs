//! `blockdev-create`: a job that makes a file, or an image in the file of a node.

use std::path::Path;
use std::rc::Rc;

use cowslip::file::host::{CreateMode, FlushPolicy, HostOptions, open_host_file};
use cowslip::file::{Claim, ReadAs, ReadSet, Sharing};
use cowslip::qcow2::create::{CreateOptions, Preallocation, Version, create_as_job, create_raw};
use cowslip::qcow2::header::CompressionType;
use cowslip_cmdline::new_file::NewFile;
use cowslip_nodes::{Access, Destination};
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::given::Given;
use super::host::Daemon;
use super::job::{Job, JobOptions};
use super::nodes::Node;
use super::words::{failed, missing};

impl Daemon {
    /// `blockdev-create`.
    ///
    /// # Errors
    /// The job's ID is in use.
    pub fn blockdev_create(self: &Rc<Self>, given: &Given) -> Result<Value, QmpError> {
        let options = given.group("options").ok_or_else(|| missing("options"))?;
        let of_job = JobOptions::of(given, None)?;
        self.start_job(("create", of_job), |daemon, job| async move {
            let made = match options.required("driver")? {
                "file" => daemon.make_file(&options, &job).await,
                "qcow2" => daemon.make_qcow2(&options, &job).await,
                other => Err(QmpError::generic(format!(
                    "Driver '{other}' does not support blockdev-create here"
                ))),
            };
            made?;
            daemon.finalize(&job).await
        })?;
        Ok(json!({}))
    }

    async fn make_file(&self, given: &Given, job: &Job) -> Result<(), QmpError> {
        let size = given.number("size")?.ok_or_else(|| missing("size"))?;
        let preallocation = preallocation(given)?;
        let mut read = ReadSet::default();
        for node in self.nodes.all() {
            node.image().add_to(&mut read, ReadAs::Image);
        }
        let destination = Destination::Host(given.required("filename")?.to_string());
        let claim = Claim::raw(true, Sharing::Frozen);
        let made = NewFile::create(&destination, &read, claim, FlushPolicy::Honour).await;
        let (new, file) = made.map_err(failed)?;
        let made = create_raw(file.clone(), size, preallocation, &job.work).await;
        drop(file.claim(Claim::NONE));
        made.map_err(failed)?;
        new.finished();
        Ok(())
    }

    async fn make_qcow2(&self, given: &Given, job: &Job) -> Result<(), QmpError> {
        let node = self.nodes.referred(given.required("file")?)?;
        node.may_change()?;
        if node.is_used() || !self.nodes.parents(&node).is_empty() {
            return Err(QmpError::generic(format!("Node {} is in use", node.name)));
        }
        let options = options_of(given)?;
        // It stays while the image is made.
        self.nodes.enter(&node, false).await?;
        let made = format(&node, &options, job).await;
        let _turn = self.turn.take().await;
        self.nodes.leave(&node, false).await?;
        made?;
        // Its file has another length.
        let held = self.nodes.hold(&self.nodes.with_above(&node)).await;
        self.nodes.open_held(&node, Access::Read, &held).await
    }
}

/// Makes an image in the file of a node.
async fn format(node: &Node, options: &CreateOptions, job: &Job) -> Result<(), QmpError> {
    let host = HostOptions {
        writable: true,
        create: CreateMode::OpenExisting,
        ..HostOptions::default()
    };
    let file = open_host_file(Path::new(&node.filename()), &host).map_err(failed)?;
    let made = create_as_job(file.clone(), None, options, &job.work).await;
    drop(file.claim(Claim::NONE));
    made.map_err(failed)
}

fn preallocation(given: &Given) -> Result<Preallocation, QmpError> {
    match given.text("preallocation") {
        None | Some("off") => Ok(Preallocation::Off),
        Some("metadata") => Ok(Preallocation::Metadata),
        Some("falloc") => Ok(Preallocation::Falloc),
        Some("full") => Ok(Preallocation::Full),
        Some(other) => Err(QmpError::generic(format!(
            "Parameter 'preallocation' does not accept value '{other}'"
        ))),
    }
}

fn options_of(given: &Given) -> Result<CreateOptions, QmpError> {
    let size = given.number("size")?.ok_or_else(|| missing("size"))?;
    let defaults = CreateOptions::new(size);
    let text = |name: &str| given.text(name).map(str::to_string);
    Ok(CreateOptions {
        version: match given.text("version") {
            Some("v2") => Version::V2,
            _ => Version::V3,
        },
        cluster_size: given
            .number("cluster-size")?
            .unwrap_or(defaults.cluster_size),
        extended_l2: given.switch("extended-l2")?.unwrap_or(false),
        refcount_bits: given
            .number("refcount-bits")?
            .unwrap_or(defaults.refcount_bits),
        lazy_refcounts: given.switch("lazy-refcounts")?.unwrap_or(false),
        compression_type: match given.text("compression-type") {
            Some("zstd") => CompressionType::Zstd,
            _ => CompressionType::Deflate,
        },
        backing_file: text("backing-file"),
        backing_format: text("backing-fmt"),
        preallocation: preallocation(given)?,
        ..defaults
    })
}
