//! A file of the host: what it is on, how its file system lists its extents, and the walk over
//! them.
//!
//! FIEMAP comes first. Where a file system has none, FIBMAP asks for one block after the other
//! (root only), and where there is none of that either SEEK_HOLE and SEEK_DATA find at least what
//! is a hole. A walk ends however the file changes meanwhile: each step goes on in the file, up to
//! its length at the beginning and a bounded amount of space beyond.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use cowslip_console::error::CommandError;
use cowslip_queue::fibmap;
use cowslip_queue::fiemap::{self, Flags, Record};
use rustix::fs::{AtFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::perfect::{ExtMapping, Kind, Limits};

/// Space beyond the end of the file that is followed, over what the file had when the walk began.
const BEYOND_SLACK_BYTES: u64 = 1 << 30;
/// `FS_EXTENT_FL` of linux/fs.h: the file is mapped by extents.
const EXTENT_FLAG: u32 = 0x8_0000;

/// How extents are found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `FS_IOC_FIEMAP`.
    Fiemap,
    /// `FIBMAP`, block by block.
    Fibmap,
    /// `SEEK_HOLE` and `SEEK_DATA`: no places.
    Seek,
}

impl Method {
    /// The method of this name.
    pub fn parse(name: &str) -> Option<Method> {
        Some(match name {
            "fiemap" => Method::Fiemap,
            "fibmap" => Method::Fibmap,
            "seek" => Method::Seek,
            _ => return None,
        })
    }

    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Method::Fiemap => "FIEMAP",
            Method::Fibmap => "FIBMAP",
            Method::Seek => "SEEK_HOLE/SEEK_DATA",
        }
    }

    /// Returns the method's shortcoming, for people.
    pub fn shortcoming(self) -> Option<&'static str> {
        match self {
            Method::Fiemap => None,
            Method::Fibmap => Some("this way unwritten and delayed space is shown as holes"),
            Method::Seek => Some("holes alone are known this way, places are not"),
        }
    }
}

/// File system of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// `xfs`, `ext4` …
    pub kind: String,
    /// The device or what it is mounted from, if that is known.
    pub source: Option<String>,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Where block by block mapping matters: that it is so.
    pub indirect: bool,
    /// The longest extents.
    pub limits: Limits,
}

impl FileSystem {
    /// Whether what it calls a place is one in an address space of its own, not on a device.
    pub fn has_own_addresses(&self) -> bool {
        self.kind == "btrfs"
    }
}

/// A file whose extents are wanted.
#[derive(Debug)]
pub struct AlignedFile {
    /// Its name, as it was given.
    pub name: String,
    /// File system of the file.
    pub on: FileSystem,
    /// How its extents are found out.
    pub method: Method,
    /// Length in bytes.
    pub size: u64,
    /// Bytes of space.
    pub allocated: u64,
    /// Name of the device, the same for all its files.
    pub device: String,
    /// Device and inode.
    pub id: (u64, u64),
    file: File,
    before: Metadata,
}

/// How a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steadiness {
    /// The file is as it was before.
    Steady,
    /// The file was changed during the walk, so the reported extents may never have existed
    /// together.
    Changed,
}

impl AlignedFile {
    /// Opens a regular file, for reading only.
    ///
    /// # Errors
    /// `Could not open 'x': why`: it is no regular file, or the system refuses.
    pub fn open(name: &str, wanted: Option<Method>) -> Result<AlignedFile, CommandError> {
        let refused = |why: String| CommandError::new(format!("Could not open '{name}': {why}"));
        let failed = |error: io::Error| refused(cowslip::error::system_words(&error));
        // Opening a FIFO would wait for a writer.
        let found = std::fs::metadata(Path::new(name)).map_err(failed)?;
        if let Some(other) = other_than_file(&found) {
            return Err(refused(format!(
                "it is {other}; only regular files have extents"
            )));
        }
        let file = File::open(name).map_err(failed)?;
        let before = file.metadata().map_err(failed)?;
        let (on, device) = file_system(&file, &before);
        let method = match wanted {
            Some(method) => method,
            None => best_method(&file).map_err(failed)?,
        };
        Ok(AlignedFile {
            name: name.to_string(),
            on,
            method,
            size: before.len(),
            allocated: before.blocks() * 512,
            device,
            id: (before.dev(), before.ino()),
            file,
            before,
        })
    }

    /// Whether records have places on a device.
    pub fn has_places(&self) -> bool {
        self.method != Method::Seek
    }

    /// Calls `each` with all records, in the order of the file.
    ///
    /// # Errors
    /// `Could not map 'x': why`, or what `each` says.
    pub fn walk(
        &self,
        sync: fiemap::Sync,
        each: &mut dyn FnMut(Record) -> Result<(), CommandError>,
    ) -> Result<Steadiness, CommandError> {
        let failed = |error: io::Error| {
            let words = match (self.method, error.raw_os_error()) {
                (Method::Fibmap, Some(libc::EPERM)) => "FIBMAP is for root only".to_string(),
                (Method::Fibmap, Some(libc::ERANGE)) => {
                    "FIBMAP has no numbers for blocks beyond 2^31".to_string()
                }
                _ => cowslip::error::system_words(&error),
            };
            let method = self.method.name();
            CommandError::new(format!(
                "Could not map '{}' by {method}: {words}",
                self.name
            ))
        };
        let mut outcome = Ok(());
        let mut each = |record: Record| {
            outcome = each(record);
            outcome.is_ok()
        };
        match self.method {
            Method::Fiemap => self.by_fiemap(sync, &mut each),
            Method::Fibmap => self.by_fibmap(sync, &mut each),
            Method::Seek => self.by_seek(&mut each),
        }
        .map_err(failed)?;
        outcome?;
        let after = self.file.metadata().map_err(failed)?;
        let times = |of: &Metadata| (of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec());
        Ok(
            match times(&self.before) == times(&after) && after.len() == self.size {
                true => Steadiness::Steady,
                false => Steadiness::Changed,
            },
        )
    }

    fn by_fiemap(
        &self,
        sync: fiemap::Sync,
        each: &mut dyn FnMut(Record) -> bool,
    ) -> io::Result<()> {
        // A file that grows as fast as it is looked at would keep us for ever.
        let beyond_max = self.allocated.saturating_add(BEYOND_SLACK_BYTES);
        let mut beyond = 0_u64;
        for record in fiemap::records(&self.file, sync) {
            let record = record?;
            let end = record.logical + record.len;
            beyond += end.saturating_sub(self.size.max(record.logical));
            if !each(record) || beyond > beyond_max {
                break;
            }
        }
        Ok(())
    }

    /// Data from `at` on; nothing where seeking is not known, so that all is looked at.
    fn next_data(&self, at: u64) -> io::Result<Option<std::ops::Range<u64>>> {
        if at >= self.size {
            return Ok(None);
        }
        let start = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL) => return Ok(Some(at..self.size)),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&self.file, SeekFrom::Hole(start))?;
        let (start, end) = (start.min(self.size), end.min(self.size));
        // Cut off meanwhile, or a hole by now.
        Ok((start >= at && end > start).then_some(start..end))
    }

    fn by_seek(&self, each: &mut dyn FnMut(Record) -> bool) -> io::Result<()> {
        let mut at = 0;
        while let Some(data) = self.next_data(at)? {
            at = data.end;
            let record = Record {
                logical: data.start,
                physical: 0,
                len: data.end - data.start,
                flags: Flags::UNKNOWN,
            };
            if !each(record) {
                break;
            }
        }
        Ok(())
    }

    fn by_fibmap(
        &self,
        sync: fiemap::Sync,
        each: &mut dyn FnMut(Record) -> bool,
    ) -> io::Result<()> {
        if sync == fiemap::Sync::First {
            self.file.sync_all()?;
        }
        let block_bytes = self.on.block_bytes;
        let mut run = Run { open: None, each };
        let mut at = 0;
        while let Some(data) = self.next_data(at)? {
            for index in data.start / block_bytes..data.end.div_ceil(block_bytes) {
                let block = fibmap::block(&self.file, index)?;
                if !run.push(index * block_bytes, block * block_bytes, block_bytes) {
                    return Ok(());
                }
            }
            at = data.end.next_multiple_of(block_bytes);
        }
        run.end();
        Ok(())
    }
}

/// Blocks that go on from each other, on their way to becoming a record.
struct Run<'a> {
    open: Option<Record>,
    each: &'a mut dyn FnMut(Record) -> bool,
}

impl Run<'_> {
    /// The next block; whether to go on.
    fn push(&mut self, logical: u64, physical: u64, len: u64) -> bool {
        if physical == 0 {
            return self.end();
        }
        if let Some(open) = &mut self.open
            && open.logical + open.len == logical
            && open.physical + open.len == physical
        {
            open.len += len;
            return true;
        }
        let on = self.end();
        self.open = Some(Record {
            logical,
            physical,
            len,
            flags: Flags::MERGED,
        });
        on
    }

    fn end(&mut self) -> bool {
        self.open.take().is_none_or(|record| (self.each)(record))
    }
}

/// Names the kind of a file that is no regular file.
pub fn other_than_file(found: &Metadata) -> Option<&'static str> {
    let kind = found.file_type();
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a directory")
    } else if kind.is_block_device() {
        Some("a block device")
    } else if kind.is_char_device() {
        Some("a character device")
    } else if kind.is_fifo() {
        Some("a FIFO")
    } else {
        Some("a socket")
    }
}

/// Whether an error says that the file system does not have this.
fn is_lacking(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL)
    )
}

fn best_method(file: &File) -> io::Result<Method> {
    match fiemap::records(file, fiemap::Sync::No).next() {
        None | Some(Ok(_)) => return Ok(Method::Fiemap),
        Some(Err(error)) if is_lacking(&error) => {}
        Some(Err(error)) => return Err(error),
    }
    match fibmap::block(file, 0) {
        Ok(_) => Ok(Method::Fibmap),
        Err(error) if is_lacking(&error) || error.raw_os_error() == Some(libc::EPERM) => {
            Ok(Method::Seek)
        }
        Err(error) => Err(error),
    }
}

/// A line of `/proc/self/mountinfo`, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    kind: String,
    source: String,
}

/// The mount of this number (proc_pid_mountinfo(5)).
fn mount_in(text: &str, id: u64) -> Option<Mount> {
    let line = text.lines().find(|line| {
        let first = line.split(' ').next();
        first.and_then(|number| number.parse().ok()) == Some(id)
    })?;
    let (_, rest) = line.split_once(" - ")?;
    let mut words = rest.split(' ');
    let kind = words.next()?.to_string();
    let source = words.next()?.to_string();
    Some(Mount { kind, source })
}

fn mount_of(file: &File) -> Option<Mount> {
    let flags = StatxFlags::MNT_ID;
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, flags).ok()?;
    let text = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    mount_in(&text, found.stx_mnt_id)
}

/// The file system, and the name of its device, for which `st_dev` will not do on btrfs: there it
/// is a subvolume's.
fn file_system(file: &File, found: &Metadata) -> (FileSystem, String) {
    let mount = mount_of(file);
    let kind = mount.as_ref().map_or("unknown", |mount| &mount.kind);
    let block_bytes = fibmap::block_bytes(file).ok().filter(|&bytes| bytes > 0);
    let block_bytes = block_bytes.unwrap_or_else(|| found.blksize().max(1));
    let limiting = match kind {
        "xfs" => Kind::Xfs {
            group_bytes: fibmap::xfs_group_bytes(file.as_fd()).ok(),
        },
        "ext2" | "ext3" | "ext4" => Kind::Ext(ext_mapping(file, kind)),
        "btrfs" => Kind::Btrfs,
        _ => Kind::Other,
    };
    let device = match &mount {
        Some(mount) if mount.kind == "btrfs" => mount.source.clone(),
        _ => format!("{:x}", found.dev()),
    };
    let on = FileSystem {
        kind: kind.to_string(),
        source: mount.as_ref().map(|mount| mount.source.clone()),
        block_bytes,
        indirect: matches!(limiting, Kind::Ext(mapping) if mapping != ExtMapping::Extents),
        limits: Limits::of(limiting, block_bytes),
    };
    (on, device)
}

fn ext_mapping(file: &File, kind: &str) -> ExtMapping {
    match rustix::fs::ioctl_getflags(file) {
        Ok(flags) if flags.bits() & EXTENT_FLAG == 0 && kind == "ext4" => {
            ExtMapping::IndirectAcrossGroups
        }
        Ok(flags) if flags.bits() & EXTENT_FLAG == 0 => ExtMapping::Indirect,
        _ => ExtMapping::Extents,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_number() {
        let text = "22 1 0:20 / /proc rw,nosuid - proc proc rw\n\
                    36 35 98:0 /sub /mnt/a\\040b rw,noatime master:1 shared:2 - ext3 /dev/root rw\n";
        let mount = mount_in(text, 36).unwrap();
        assert_eq!(
            (mount.kind.as_str(), mount.source.as_str()),
            ("ext3", "/dev/root")
        );
        assert_eq!(mount_in(text, 2), None);
        assert_eq!(mount_in("nonsense", 2), None);
    }

    #[test]
    fn blocks_become_records_where_they_adjoin_in_file_and_device() {
        let mut records = Vec::new();
        let mut each = |record: Record| {
            records.push((record.logical, record.physical, record.len));
            true
        };
        let mut run = Run {
            open: None,
            each: &mut each,
        };
        for (index, block) in [5, 6, 0, 7, 8, 20, 21, 0, 0, 9].into_iter().enumerate() {
            assert!(run.push(index as u64, block, 1));
        }
        run.end();
        assert_eq!(records, [(0, 5, 2), (3, 7, 2), (5, 20, 2), (9, 9, 1)]);
    }

    #[test]
    fn what_is_no_file_is_refused_by_its_kind() {
        let refused = |name| AlignedFile::open(name, None).unwrap_err().to_string();
        let text = refused("/proc/self");
        assert_eq!(
            text,
            "Could not open '/proc/self': it is a directory; only regular files have extents"
        );
        assert!(refused("/dev/null").contains("a character device"));
        assert!(refused("/nonexistent/x").contains("No such file"));
    }
}
