//! Internal snapshots.

use std::ffi::{CString, c_char, c_int};

use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip::{Image, Job, Result};
use cowslip_embed::block_on;

use crate::error::{cowslip_error, guarded};
use crate::image::cowslip_image;
use crate::job::{cowslip_job, job_of};
use crate::pointer::{self, texts};

/// A list of snapshots; C knows its address alone.
#[allow(non_camel_case_types)] // Its name in C.
#[derive(Debug)]
pub struct cowslip_snapshots {
    /// IDs and names.
    entries: Vec<(CString, CString)>,
}

/// Takes a snapshot.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_snapshot_create(
    image: *const cowslip_image,
    name: *const c_char,
    job: *const cowslip_job,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let image = unsafe { pointer::needed(image, "image") }?;
        // SAFETY: the caller's promise.
        let name = unsafe { pointer::text(name, "name") }?;
        // SAFETY: the caller's promise.
        let job = unsafe { job_of(job) };
        let new = cowslip_embed::new_snapshot(name);
        block_on(image.image.create_snapshot(&new, &job)).map(drop)
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Does something with the snapshot of an ID or a name.
///
/// # Safety
/// Pointers are null or as the header has them.
unsafe fn with_snapshot(
    image: *const cowslip_image,
    id_or_name: *const c_char,
    job: *const cowslip_job,
    error: *mut *mut cowslip_error,
    change: impl AsyncFnOnce(&Image, &SnapshotChoice, &Job) -> Result<()>,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let image = unsafe { pointer::needed(image, "image") }?;
        // SAFETY: the caller's promise.
        let choice = unsafe { pointer::text(id_or_name, "id_or_name") }?;
        // SAFETY: the caller's promise.
        let job = unsafe { job_of(job) };
        let choice = SnapshotChoice::IdOrName(choice.to_string());
        block_on(change(&image.image, &choice, &job))
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Takes the disk back to a snapshot.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_snapshot_apply(
    image: *const cowslip_image,
    id_or_name: *const c_char,
    job: *const cowslip_job,
    error: *mut *mut cowslip_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { with_snapshot(image, id_or_name, job, error, Image::apply_snapshot) }
}

/// Deletes a snapshot.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_snapshot_delete(
    image: *const cowslip_image,
    id_or_name: *const c_char,
    job: *const cowslip_job,
    error: *mut *mut cowslip_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { with_snapshot(image, id_or_name, job, error, Image::delete_snapshot) }
}

/// Lists the snapshots.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_snapshot_list(
    image: *const cowslip_image,
    list: *mut *mut cowslip_snapshots,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let image = unsafe { pointer::needed(image, "image") }?;
        let snapshots = block_on(image.image.snapshots())?;
        let text = |text: String| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let entries = snapshots.into_iter();
        let entries = entries.map(|snapshot| (text(snapshot.id), text(snapshot.name)));
        let entries = entries.collect();
        // SAFETY: the caller's promise.
        unsafe { pointer::give_handle(list, cowslip_snapshots { entries }, "list") }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Number of snapshots in a list; 0 for null.
///
/// # Safety
/// `list` is null or a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_snapshots_count(list: *const cowslip_snapshots) -> usize {
    // SAFETY: the caller's promise.
    unsafe { pointer::reference(list) }.map_or(0, |list| list.entries.len())
}

texts! {
    /// ID of a snapshot until the list is freed; null if there is no such entry.
    cowslip_snapshot_id: cowslip_snapshots, entries, 0;
    /// Name of a snapshot until the list is freed; null if there is no such entry.
    cowslip_snapshot_name: cowslip_snapshots, entries, 1;
}

/// Frees a list.
///
/// # Safety
/// `list` is null or a list that was not freed; it is freed now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_snapshots_free(list: *mut cowslip_snapshots) {
    // SAFETY: the caller's promise.
    unsafe { pointer::free(list) };
}
