//! `publish`: an image's disk goes to an object store or a directory, in chunks; what is there is
//! listed, withdrawn and pruned. docs/published-images.md describes the form.

use std::time::Duration;

use clap::ArgAction;
use cowslip::file::Sharing;
use cowslip::file::host::Aio;
use cowslip::image::Image;
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip::{Error, Job};
use cowslip_nodes::drivers::published::PREFIX;
use cowslip_nodes::stores::{directory_of, open_store};
use cowslip_publish::catalog;
use cowslip_publish::cut::ChunkSizes;
use cowslip_publish::location::{Location, Version};
use cowslip_publish::pack::PACK_BYTES;
use cowslip_publish::prune::{PruneOptions, Pruned, prune};
use cowslip_publish::publish::{Changed, Parent, Published, Request, publish};
use cowslip_publish::record::VersionRecord;
use cowslip_publish::store::Store;
use cowslip_remote::StoreOptions;
use serde_json::{Value, json};

use super::change::OutcomeArgs;
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::open::{
    self, ImageSpec, OpenSettings, Trust, block_on, chosen_snapshot, open_image, sharing, workers,
};
use crate::options;
use crate::output::{Program, print, print_json, usage_error};
use crate::size;
use crate::time::local_date_and_time;

mod plain;
pub mod track;

use track::Tracked;

/// The shortest grace time: publications give up after half of it without a sign of life.
const GRACE_HOURS_MIN: u64 = 1;
/// The time after which a publication renews its lease.
const RENEWED_AFTER: Duration = Duration::from_secs(60);

/// Options of the way to an object store.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct StoreArgs {
    /// URL of the server of s3://, gs:// or az://, if not the provider's
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// Region of the bucket
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
}

impl StoreArgs {
    /// The store of a name.
    ///
    /// # Errors
    /// There is no such store.
    pub fn open(&self, root: &str) -> Result<Store, CommandError> {
        Ok(open_store(root, &self.options())?)
    }

    /// The store of a name, which is there: of a misspelt directory, nothing else would be said.
    ///
    /// # Errors
    /// There is no such store.
    pub fn open_existing(&self, root: &str) -> Result<Store, CommandError> {
        match directory_of(root) {
            Some(directory) if !directory.is_dir() => Err(CommandError::new(format!(
                "There is no directory '{}'; is the name of the store right?",
                directory.display()
            ))),
            _ => self.open(root),
        }
    }

    /// The same as options.
    pub fn options(&self) -> StoreOptions {
        StoreOptions {
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            ..StoreOptions::default()
        }
    }
}

/// Command line of `publish`.
#[derive(clap::Args)]
#[command(after_help = "\
STORE is a directory, file:///DIRECTORY, s3://BUCKET[/PATH], gs://… or az://…; NAME has letters, digits, '.', '-' and \
'_'. Each publication of a name is a version with a number. A version is used in place as 'published:STORE/NAME@DIGEST', \
which always stands for the same bytes, and copied by 'cowslip pull'. An interrupted publication continues when the same \
command is run again. -O qcow2 IMAGE STORE/NAME.qcow2 uploads a plain image. More: docs/published-images.md.")]
pub struct Args {
    /// Format of the image
    #[arg(short = 'f', long, value_name = "FMT")]
    format: Option<String>,
    /// IMAGE is a complete image specification
    #[arg(long)]
    image_opts: bool,
    /// Internal snapshot of the image to publish
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Open the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Store only chunks that this version does not have either; may be repeated. The newest
    /// version of the name is always looked at
    #[arg(long, value_name = "NAME[@VERSION]")]
    parent: Vec<String>,
    /// Read only what this bitmap of the image says has changed since the version that --parent
    /// names was published
    #[arg(long, value_name = "BITMAP", requires = "parent")]
    #[arg(conflicts_with = "snapshot")]
    bitmap: Option<String>,
    /// Take the bitmap although no record says that it began with that version
    #[arg(long, requires = "bitmap")]
    trust_bitmap: bool,
    /// Note in the image what changes from now on, and read only what has changed since the newest
    /// version that was published so from it
    #[arg(long, conflicts_with_all = ["snapshot", "bitmap", "force_share", "target_format"])]
    track: bool,
    /// Usual length of a chunk before compression: a power of two from 16k to 1M; 32k, or as the
    /// parent has it
    #[arg(long, value_name = "SIZE")]
    chunk_size: Option<String>,
    /// Level of zstd
    #[arg(long, value_name = "LEVEL", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(i32).range(1..=19))]
    level: i32,
    /// Do not read back what was stored; its presence and length are checked
    #[arg(long)]
    no_read_back: bool,
    /// Upload one plain image instead, which every program reads: FMT is qcow2, NAME the object
    #[arg(
        short = 'O',
        long = "target-format",
        value_name = "FMT",
        conflicts_with_all = ["parent", "bitmap", "chunk_size", "list", "prune", "withdraw"]
    )]
    target_format: Option<String>,
    /// With -O: options of the image, as for `create`
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    #[arg(action = ArgAction::Append, allow_hyphen_values = true)]
    #[arg(requires = "target_format")]
    options: Vec<String>,
    /// With -O: compress the image's clusters
    #[arg(short = 'c', long, requires = "target_format")]
    compress: bool,
    /// List the versions that a store has
    #[arg(long, conflicts_with_all = ["prune", "withdraw"])]
    list: bool,
    /// Remove what no version of a store needs any more
    #[arg(long, conflicts_with = "withdraw")]
    prune: bool,
    /// Take a version's name away; --prune removes its bytes later
    #[arg(long)]
    withdraw: bool,
    /// With --prune: hours for which everything stays after it was stored, and after the last sign
    /// of life of a publication
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u64).range(GRACE_HOURS_MIN..=87_600))]
    grace: u64,
    /// With --prune: remove nothing
    #[arg(short = 'n', long, requires = "prune")]
    dry_run: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    outcome: OutcomeArgs,
    /// The image and its new name: IMAGE STORE/NAME; with --list or --prune STORE, with --withdraw
    /// STORE/NAME@VERSION
    #[arg(value_name = "NAME", required = true, num_args = 1..=2)]
    names: Vec<String>,
}

/// Runs `publish`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(match &args.names[..] {
        [root] if args.list => list(args, root),
        [root] if args.prune => pruned(args, root, program),
        [name] if args.withdraw => withdrawn(args, name),
        [image, name] if !(args.list || args.prune || args.withdraw) => {
            match args.target_format.as_deref() {
                None => published(args, (image, name), program),
                Some("qcow2") => plain::published(args, (image, name), program),
                Some(other) => {
                    let text = format!("publish -O takes qcow2, not '{other}'");
                    Err(CommandError::new(text))
                }
            }
        }
        names => {
            let wanted = match args.list || args.prune || args.withdraw {
                true => "expects one name",
                false => "expects an image and its new name",
            };
            let text = format!("publish {wanted}, not {} names", names.len());
            Err(usage_error(&text, "publish", program))
        }
    })
}

/// A number that no other publication has.
fn random() -> Result<[u8; 16], CommandError> {
    let mut random = [0; 16];
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(16) => Ok(random),
        _ => Err(CommandError::new("The system has no random numbers")),
    }
}

/// The name under which a version is used in place.
fn pinned(root: &str, record: &VersionRecord) -> String {
    format!("{PREFIX}{root}/{}@{}", record.name, record.index)
}

fn published(
    args: &Args,
    (image, name): (&str, &str),
    program: &Program,
) -> Result<(), CommandError> {
    let location = Location::parse(name)?;
    if location.version != Version::Newest {
        let text = format!("'{name}' has a version, and a publication gets the next one");
        return Err(CommandError::new(text));
    }
    let sizes = args.chunk_size.as_deref().map(|text| {
        let bytes = options::size("chunk-size", text)?;
        Ok::<_, CommandError>(ChunkSizes::around(bytes)?)
    });
    let sizes = sizes.transpose()?;
    let snapshot = chosen_snapshot(args.snapshot.as_deref(), program)?;
    let shown = args.outcome.job.unless(args.quiet);
    let job = shown.job()?;
    let store = args.store.open(&location.root)?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let spec = ImageSpec {
        image_opts: args.image_opts,
        ..ImageSpec::named(image, args.format.as_deref())
    };
    let settings = OpenSettings {
        snapshot,
        sharing: sharing(args.force_share, Sharing::Frozen),
        policy: args.trust.backing_policy,
        workers: workers(),
        ..open::settings()
    };
    let outcome = block_on(Aio::Auto, async {
        let way = (&store, &location, &job);
        made(args, (&spec, &settings), sizes, way).await
    })?;
    match outcome {
        Err(Error::Cancelled) => {
            let left = format!(
                "what was stored has no name; run publish again to continue, or leave it to '--prune {}'",
                location.root
            );
            Err(interrupted.report(program, left))
        }
        Err(error) => Err(error.into()),
        Ok((beside, done)) => {
            shown.end();
            report(args, &location, (&beside, &done));
            Ok(())
        }
    }
}

/// Publishes the image. Returns it with words about what may not have been meant.
async fn made(
    args: &Args,
    (spec, settings): (&ImageSpec, &OpenSettings),
    sizes: Option<ChunkSizes>,
    (store, location, job): (&Store, &Location, &Job),
) -> Result<cowslip::Result<(String, Published)>, CommandError> {
    let random = random()?;
    let named = named_parents(args, location, store).await?;
    let tracked = match args.track {
        true => {
            let begun = Tracked::begin(args, (spec, &random), (store, location), &named);
            Some(begun.await?)
        }
        false => None,
    };
    let settled = async {
        let image = open_image(spec, settings).await?;
        let known = known(args, &image, store, (&named, tracked.as_ref())).await?;
        let request = Request {
            name: location.name.clone(),
            parents: known.parents,
            changed: known.changed,
            tracked_by: tracked.as_ref().map(|tracked| tracked.bitmap.clone()),
            sizes,
            level: args.level,
            pack_bytes: PACK_BYTES,
            reads_back: !args.no_read_back,
            random,
            renewed_after: RENEWED_AFTER,
        };
        let published = publish(&image, store, &request, &workers(), job).await;
        let closed = image.close().await;
        let published = published.and_then(|done| closed.map(|()| done));
        Ok::<_, CommandError>(published.map(|done| (done, request.changed.is_some())))
    };
    let settled = settled.await;
    if let (Some(tracked), Err(_) | Ok(Err(_))) = (&tracked, &settled) {
        tracked.give_up(args, spec).await;
    }
    Ok(match settled? {
        Ok((done, is_known)) => {
            let words = tracked.map(|tracked| tracked.words(location, is_known));
            let words = words.unwrap_or_default() + &beside(store, location, &done).await;
            Ok((words, done))
        }
        Err(error) => Err(error),
    })
}

/// A publication beside those before it, in words, if it may not be the one that was meant.
async fn beside(store: &Store, location: &Location, done: &Published) -> String {
    let record = &done.record;
    // Words only: a failure to find them is none of the publication.
    let is_same = record.parents.contains(&record.index);
    if is_same && let Ok(same) = catalog::of_digest(store, &record.name, &record.index).await {
        let before = same.iter().rev().find(|number| **number != record.version);
        let before = before.map(|number| location.at(Version::Number(*number)));
        return before.map_or_else(String::new, |before| {
            format!("It is the same disk as {before}: nothing has changed since.\n")
        });
    }
    let names = match record.version {
        1 => catalog::versions(store).await.unwrap_or_default(),
        _ => return String::new(),
    };
    match names.len() {
        1 => format!("It is the first disk in '{}'.\n", location.root),
        _ => String::new(),
    }
}

/// The versions that --parent names.
async fn named_parents(
    args: &Args,
    location: &Location,
    store: &Store,
) -> Result<Vec<VersionRecord>, CommandError> {
    let mut named = Vec::new();
    for name in &args.parent {
        let parent = Location::parse(&format!("{}/{name}", location.root))?;
        named.push(catalog::find(store, &parent).await?);
    }
    Ok(named)
}

/// A version to build upon.
fn parent_of(store: &Store, record: &VersionRecord) -> Result<Parent, CommandError> {
    Ok(Parent {
        name: record.name.clone(),
        version: record.version,
        index: catalog::index_of(store, record)?,
    })
}

/// Knowledge of a disk before it is read.
struct Known {
    parents: Vec<Parent>,
    changed: Option<Changed>,
}

/// The parents, and the changes since one of them, if a bitmap has them.
async fn known(
    args: &Args,
    image: &Image,
    store: &Store,
    (named, tracked): (&[VersionRecord], Option<&Tracked>),
) -> Result<Known, CommandError> {
    let parents = named.iter().map(|record| parent_of(store, record));
    let mut parents = parents.collect::<Result<Vec<_>, _>>()?;
    let changed = match tracked {
        None => changed(args, image, (named, &parents)).await?,
        Some(tracked) => match tracked.changed(image, store).await? {
            None => None,
            Some((changed, parent)) => {
                parents.retain(|named| named.index != parent.index);
                parents.push(parent);
                Some(changed)
            }
        },
    };
    Ok(Known { parents, changed })
}

/// Changes since the parent, if a bitmap was named that has them.
async fn changed(
    args: &Args,
    image: &Image,
    (named, parents): (&[VersionRecord], &[Parent]),
) -> Result<Option<Changed>, CommandError> {
    let Some(name) = args.bitmap.as_deref() else {
        return Ok(None);
    };
    let ([named], [parent]) = (named, parents) else {
        let text = "--bitmap goes with one --parent: the version since which it notes changes";
        return Err(CommandError::new(text));
    };
    let bits = image.dirty_bits(name).await?;
    let follows = |bitmap: &BitmapInfo| bitmap.name == name && bitmap.auto;
    if !image.bitmaps().await?.iter().any(follows) {
        return Err(CommandError::new(format!(
            "Bitmap '{name}' is disabled, so it may have missed changes"
        )));
    }
    if !args.trust_bitmap {
        refuse_unknown(name, image, named)?;
    }
    Ok(Some(Changed {
        since: parent.index,
        ranges: bits.dirty_ranges().collect(),
    }))
}

/// Refuses a bitmap that may not have all changes since a version.
fn refuse_unknown(name: &str, image: &Image, parent: &VersionRecord) -> Result<(), CommandError> {
    let version = format!("{}@{}", parent.name, parent.version);
    let why = match &parent.bitmap {
        Some(bitmap) if bitmap != name => {
            format!("with '{version}' began bitmap '{bitmap}', and '{name}' is another one")
        }
        None => format!(
            "no record says that bitmap '{name}' began with '{version}': bitmaps that begin with a version are made by --track"
        ),
        Some(_) if image.layers().len() > 1 => {
            "the image has a backing file, and changes of that are in no bitmap".to_string()
        }
        Some(_) => return Ok(()),
    };
    Err(CommandError::new(format!(
        "{why}. If it has all changes all the same, add --trust-bitmap"
    )))
}

fn report(args: &Args, location: &Location, (beside, done): (&str, &Published)) {
    let record = &done.record;
    let words = format!(
        "Published {}: {} of data, {} stored, {} new.\n{beside}{}\n",
        location.at(Version::Number(record.version)),
        size::human(record.data_bytes),
        size::human(record.stored_bytes),
        size::human(record.new_bytes),
        pinned(&location.root, record),
    );
    args.outcome.done.report(args.quiet, &words, || {
        let mut value = described(&location.root, record);
        value["kept-bytes"] = done.kept_bytes.into();
        value["objects"] = done.objects.into();
        value
    });
}

/// A version as JSON.
fn described(root: &str, record: &VersionRecord) -> Value {
    json!({
        "filename": pinned(root, record),
        "name": record.name,
        "version": record.version,
        "index": record.index,
        "disk-bytes": record.disk_bytes,
        "data-bytes": record.data_bytes,
        "stored-bytes": record.stored_bytes,
        "new-bytes": record.new_bytes,
        "index-bytes": record.index_bytes,
        "chunks": record.chunks,
        "published": record.published,
        "bitmap": record.bitmap,
        "parents": record.parents,
    })
}

fn list(args: &Args, root: &str) -> Result<(), CommandError> {
    let store = args.store.open(root)?;
    let records = block_on(Aio::Auto, async {
        let mut records = Vec::new();
        for (name, numbers) in catalog::versions(&store).await? {
            for number in numbers {
                // One that was withdrawn meanwhile is not there.
                records.extend(store.version(&name, number).await?);
            }
        }
        Ok(records)
    })?;
    let is_json = args.outcome.done.is_json();
    if is_json {
        let values = records.iter().map(|record| described(root, record));
        print_json(&Value::Array(values.collect()));
    } else if !args.quiet {
        if records.is_empty() {
            print(&format!("'{root}' holds no published disks.\n"));
        }
        for record in &records {
            print(&format!(
                "{}@{}  disk {}, stored {}, new {}, published {}\n    {}\n",
                record.name,
                record.version,
                size::human(record.disk_bytes),
                size::human(record.stored_bytes),
                size::human(record.new_bytes),
                local_date_and_time(record.published),
                pinned(root, record),
            ));
        }
    }
    Ok(())
}

fn withdrawn(args: &Args, name: &str) -> Result<(), CommandError> {
    let location = Location::parse(name)?;
    if location.version == Version::Newest {
        let text = format!("'{name}' has no version; withdraw '{name}@NUMBER'");
        return Err(CommandError::new(text));
    }
    let store = args.store.open(&location.root)?;
    let (record, same) = block_on(Aio::Auto, async {
        let record = catalog::withdraw(&store, &location).await?;
        store.settle().await?;
        let same = catalog::of_digest(&store, &record.name, &record.index).await;
        Ok((record, same))
    })?;
    let pinned = pinned(&location.root, &record);
    let left = match same.as_ref().map(|same| same.last()) {
        Ok(Some(same)) => format!(
            "{}@{same} is the same disk: images on '{pinned}' keep what they need.\n",
            record.name
        ),
        Ok(None) => format!(
            "No other version of {} is this disk: a pruning takes its bytes when the grace time is over, and images on \
             '{pinned}' are lost then.\n",
            record.name
        ),
        Err(_) => String::new(),
    };
    let words = format!("Withdrawn {}@{}.\n{left}", record.name, record.version);
    args.outcome.done.report(args.quiet, &words, || {
        let mut value = described(&location.root, &record);
        value["same-versions"] = same.unwrap_or_default().into();
        value
    });
    Ok(())
}

fn pruned(args: &Args, root: &str, program: &Program) -> Result<(), CommandError> {
    let shown = args.outcome.job.unless(args.quiet);
    let job = shown.job()?;
    let store = args.store.open_existing(root)?;
    let prune_options = PruneOptions {
        grace: Duration::from_secs(args.grace * 60 * 60),
        dry_run: args.dry_run,
        random: random()?,
    };
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        // Nothing is written where there is nothing, which may be a name that is misspelt.
        match catalog::is_empty(&store).await? {
            true => Ok(Ok(Pruned::default())),
            false => Ok(prune(&store, &prune_options, &job).await),
        }
    })?;
    let done = match outcome {
        Err(Error::Cancelled) => {
            let left = "a part of what nothing needs is removed; run it again to remove the rest";
            return Err(interrupted.report(program, left));
        }
        done => done?,
    };
    shown.end();
    let verb = if args.dry_run {
        "Would remove"
    } else {
        "Removed"
    };
    if done.objects + done.kept_objects == 0 && !args.outcome.done.is_json() && !args.quiet {
        print(&format!("'{root}' holds no published disks.\n"));
        return Ok(());
    }
    let words = format!(
        "{verb} {} objects, {}; {} stay, {}, of which {} only for the grace time or a publication.\n",
        done.objects,
        size::human(done.bytes),
        done.kept_objects,
        size::human(done.kept_bytes),
        done.spared_objects,
    );
    args.outcome.done.report(args.quiet, &words, || {
        json!({
            "removed-objects": done.objects,
            "removed-bytes": done.bytes,
            "removed-leases": done.leases,
            "kept-objects": done.kept_objects,
            "kept-bytes": done.kept_bytes,
            "spared-objects": done.spared_objects,
            "dry-run": args.dry_run,
        })
    });
    Ok(())
}
