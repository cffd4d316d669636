//! The contents that a disk may have after a crash, narrowed by those that are found.

use crate::model::{self, Grain, Granules, Model, Violation, WriteId};

/// Settles which of the possible contents a part of a snapshot has, from now on.
///
/// # Errors
/// Describes content that it has and may not have.
pub(crate) fn adopt_snapshot(
    grain: &Grain,
    (granules, contents): (Granules, &mut [Vec<WriteId>]),
    bytes: &[u8],
) -> Result<(), String> {
    let base = grain.start(granules.start);
    for (granule, possible) in granules.zip(contents) {
        let at = grain.start(granule);
        let part = (at - base) as usize..(grain.start(granule + 1) - base) as usize;
        let found = model::recognise(granule, &bytes[part]);
        match model::explained(found, |write| possible.contains(&write)) {
            Some(write) => *possible = vec![write],
            None => return Err(format!("{found:?} at {at:#x}; possible: {possible:?}")),
        }
    }
    Ok(())
}

/// Drops what cannot be.
///
/// # Errors
/// If nothing is left: why the first of them cannot be.
pub(crate) fn keep_possible(
    disks: &mut Vec<Model>,
    mut check: impl FnMut(&mut Model) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let mut first = None;
    disks.retain_mut(|disk| match check(disk) {
        Ok(()) => true,
        Err(violation) => {
            first.get_or_insert(violation);
            false
        }
    });
    match first {
        Some(violation) if disks.is_empty() => Err(violation),
        _ => Ok(()),
    }
}
