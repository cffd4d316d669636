//! `publish --track`: a bitmap in the image notes what changes from a publication on, and the next
//! one reads only that.
//!
//! The bitmap begins before the disk is read, and the version's record has its name, which is
//! random. So it has all that has changed since that version, in every copy of the image that has
//! it, whatever was written between its beginning and the publication. It is looked for by that
//! name alone: one that began at another moment has another name.
//!
//! 1. The image is opened for writing. The version to start from is the newest whose bitmap it has.
//!    A new bitmap is added, older ones that are not needed go, and the image is closed: the
//!    bitmaps are in the file.
//! 2. It is opened again, as other programs may not write it now; both bitmaps must be sound still.
//! 3. It is published. If that fails the new bitmap is removed; one that stays by a kill is of no
//!    version, and goes with the older ones later.

use cowslip::image::{BackingChoice, Image};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip_publish::catalog;
use cowslip_publish::digest::hex;
use cowslip_publish::location::{Location, Version};
use cowslip_publish::publish::{Changed, Parent};
use cowslip_publish::record::VersionRecord;
use cowslip_publish::store::Store;

use super::{Args, parent_of};
use crate::bitmaps::PUBLISHED;
use crate::error::CommandError;
use crate::open::{self, Access, ImageSpec, OpenSettings, open_image};

/// Such bitmaps that stay in an image beside a new one: it may be published to several stores.
const KEPT: usize = 3;
/// Versions of the name that are looked at, from the newest on.
const VERSIONS: usize = 16;

/// The changes of an image since a version, and the bitmap that notes what comes.
pub struct Tracked {
    /// The new bitmap.
    pub bitmap: String,
    /// The version to start from, and its bitmap.
    pub since: Option<VersionRecord>,
}

/// Whether a bitmap has everything since it began.
fn is_sound(bitmap: &BitmapInfo) -> bool {
    bitmap.auto && !bitmap.in_use
}

fn find<'a>(bitmaps: &'a [BitmapInfo], name: &str) -> Option<&'a BitmapInfo> {
    bitmaps.iter().find(|bitmap| bitmap.name == name)
}

/// The versions to start from: those that were named, then those of the name, the newest first.
async fn candidates(
    store: &Store,
    location: &Location,
    named: &[VersionRecord],
) -> Result<Vec<VersionRecord>, CommandError> {
    let mut candidates = named.to_vec();
    let versions = catalog::versions_of(store, &location.name).await?;
    for number in versions.into_iter().rev().take(VERSIONS) {
        // One that was withdrawn meanwhile is not there.
        candidates.extend(store.version(&location.name, number).await?);
    }
    // Another name is none that was given here.
    let is_ours = |name: &String| name.starts_with(PUBLISHED);
    candidates.retain(|record| record.bitmap.as_ref().is_some_and(is_ours));
    Ok(candidates)
}

async fn open_for_writing(args: &Args, spec: &ImageSpec) -> Result<Image, CommandError> {
    let settings = OpenSettings {
        access: Access::Write,
        // Bitmaps are the image's own.
        backing: BackingChoice::None,
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    open_image(spec, &settings).await
}

async fn change(image: &Image, bitmap: &str, change: BitmapChange) -> Result<(), CommandError> {
    let changed = image.change_bitmap(bitmap, &change).await;
    changed.map_err(|error| match error {
        cowslip::Error::Unsupported { .. } => CommandError::new(format!(
            "--track: '{}' can keep no bitmap of what changes: qcow2 images of version 3 can",
            image.layers()[0].name
        )),
        error => CommandError::new(format!("--track: bitmap '{bitmap}': {error}")),
    })
}

impl Tracked {
    /// Begins to note what changes in the image.
    ///
    /// # Errors
    /// It can have no bitmaps, or is in use; the store's.
    pub async fn begin(
        args: &Args,
        (spec, random): (&ImageSpec, &[u8; 16]),
        (store, location): (&Store, &Location),
        named: &[VersionRecord],
    ) -> Result<Tracked, CommandError> {
        let candidates = candidates(store, location, named).await?;
        let bitmap = format!("{PUBLISHED}{}", hex(random));
        let image = open_for_writing(args, spec).await?;
        let since = Tracked::add(&image, &bitmap, &candidates).await;
        let closed = image.close().await;
        let since = since?;
        closed?;
        Ok(Tracked { bitmap, since })
    }

    /// Adds the bitmap, and removes others that are not needed. Returns the version to start from.
    async fn add(
        image: &Image,
        new: &str,
        candidates: &[VersionRecord],
    ) -> Result<Option<VersionRecord>, CommandError> {
        let bitmaps = image.bitmaps().await?;
        let has = |record: &&VersionRecord| {
            let name = record.bitmap.as_deref().unwrap_or_default();
            find(&bitmaps, name).is_some_and(is_sound)
        };
        let since = candidates.iter().find(has).cloned();
        let needed = since.as_ref().and_then(|record| record.bitmap.as_deref());
        let ours = bitmaps
            .iter()
            .rev()
            .filter(|bitmap| bitmap.name.starts_with(PUBLISHED) && Some(&*bitmap.name) != needed);
        let mut kept = usize::from(needed.is_some());
        for bitmap in ours {
            match is_sound(bitmap) && kept < KEPT {
                true => kept += 1,
                false => change(image, &bitmap.name, BitmapChange::Remove).await?,
            }
        }
        let add = BitmapChange::Add { granularity: None };
        change(image, new, add).await?;
        Ok(since)
    }

    /// Changes since the version to start from, if they can be known: a backing file may have
    /// changed, too, and no bitmap has that.
    ///
    /// # Errors
    /// One of the bitmaps is not as it was; the store's.
    pub async fn changed(
        &self,
        image: &Image,
        store: &Store,
    ) -> Result<Option<(Changed, Parent)>, CommandError> {
        let bitmaps = image.bitmaps().await?;
        if !find(&bitmaps, &self.bitmap).is_some_and(is_sound) {
            return Err(CommandError::new(
                "--track: another program has written the image, and the bitmap that was added is not sound any more; run it again",
            ));
        }
        let Some(since) = self.since.as_ref().filter(|_| image.layers().len() == 1) else {
            return Ok(None);
        };
        let name = since.bitmap.as_deref().unwrap_or_default();
        if !find(&bitmaps, name).is_some_and(is_sound) {
            return Ok(None);
        }
        let bits = image.dirty_bits(name).await?;
        let parent = parent_of(store, since)?;
        let changed = Changed {
            since: parent.index,
            ranges: bits.dirty_ranges().collect(),
        };
        Ok(Some((changed, parent)))
    }

    /// Removes the bitmap of a publication that there is none of. One that stays does no harm.
    pub async fn give_up(&self, args: &Args, spec: &ImageSpec) {
        if let Ok(image) = open_for_writing(args, spec).await {
            let removed = image.change_bitmap(&self.bitmap, &BitmapChange::Remove);
            drop(removed.await);
            drop(image.close().await);
        }
    }

    /// In words, what was read.
    pub fn words(&self, location: &Location, is_known: bool) -> String {
        match &self.since {
            Some(since) if is_known => {
                let since = Location {
                    name: since.name.clone(),
                    ..location.at(Version::Number(since.version))
                };
                format!("Read was what has changed since {since}.\n")
            }
            _ => "All of the disk was read. What changes from now on is noted in the image.\n"
                .to_string(),
        }
    }
}
