//! Mounting on a regular file, and unmounting: by the system's calls where this process may make
//! them, else by `fusermount3`, which may be installed for that.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cowslip_queue::{FuseDevice, Stream, blocking};
use rustix::mount::{MountFlags, UnmountFlags};

/// The type of the file system, as the table of mounts shows it.
pub const FILE_SYSTEM: &str = "fuse.cowslip";
/// The same, in the words of `fusermount3`, which adds the rest.
const SUBTYPE: &str = "cowslip";
/// The program that mounts for users, and its older name.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];
/// The variable that says on which descriptor it sends the connection.
const HELPER_VARIABLE: &str = "_FUSE_COMMFD";

/// ENOTCONN and ECONNABORTED: the server of a mount has ended.
const DEAD: [i32; 2] = [107, 103];

/// Options of a mount.
#[derive(Clone, Debug, Default)]
pub struct MountOptions {
    /// The name of the source in the table of mounts.
    pub source: OsString,
    /// Refuse writes.
    pub is_read_only: bool,
    /// Let other users than that of this process use the file, as its mode allows.
    pub allows_others: bool,
}

/// State of a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing is mounted there.
    Free,
    /// A file system is mounted there.
    Mounted,
    /// A FUSE file system is mounted there, whose server has ended.
    Dead,
}

/// Returns a path that does not depend on the working directory and has no symbolic links, without
/// a look at the file itself: nobody may answer for it.
///
/// # Errors
/// A directory of the path does not exist, or is not to be entered.
pub fn resolved(path: &Path) -> io::Result<PathBuf> {
    let is_link = std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_symlink());
    let name = match path.file_name() {
        Some(name) if !is_link => name,
        _ => return path.canonicalize(),
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    Ok(parent.canonicalize()?.join(name))
}

/// The state of a mount point, which is a [`resolved`] path. Waits for the server of a mount that
/// is there.
///
/// # Errors
/// The table of mounts cannot be read.
pub fn standing(path: &Path) -> io::Result<Standing> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let Some(kind) = mounted_at(&table, path) else {
        return Ok(Standing::Free);
    };
    let is_fuse = kind == b"fuse" || kind.starts_with(b"fuse.");
    if !is_fuse {
        return Ok(Standing::Mounted);
    }
    // Attributes may be remembered; opening asks the server.
    let is_dead = |error: &io::Error| error.raw_os_error().is_some_and(|it| DEAD.contains(&it));
    Ok(match std::fs::File::open(path) {
        Err(error) if is_dead(&error) => Standing::Dead,
        _ => Standing::Mounted,
    })
}

/// Whether the mount at a path, if there is one, was made by this crate.
///
/// # Errors
/// The table of mounts cannot be read.
pub fn is_own(path: &Path) -> io::Result<bool> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(mounted_at(&table, path) == Some(FILE_SYSTEM.as_bytes()))
}

/// The type of the file system that was mounted last at a path (proc(5), mountinfo).
fn mounted_at<'a>(table: &'a [u8], path: &Path) -> Option<&'a [u8]> {
    let line_of = |line: &'a [u8]| {
        let mut fields = line.split(|&byte| byte == b' ');
        let place = unescaped(fields.nth(4)?);
        let kind = fields.skip_while(|field| field != b"-").nth(1)?;
        (place == path.as_os_str().as_bytes()).then_some(kind)
    };
    let mut lines = table.rsplit(|&byte| byte == b'\n');
    lines.find_map(line_of)
}

/// A field without the octal numbers that stand for spaces and the like.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| byte == b'\\');
        let value = octal.and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        match value {
            Some(value) => {
                bytes.push(value);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    bytes
}

/// Mounts on a regular file, by its [`resolved`] path. Requests come on the device from then on;
/// programs that use the file wait for their answers.
///
/// # Errors
/// There is no device; the system's or the helper's refusal.
///
/// # Panics
/// Outside a queue.
pub async fn mount(path: &Path, options: &MountOptions) -> io::Result<FuseDevice> {
    match rustix::process::geteuid().is_root() {
        true => mount_directly(path, options),
        false => mount_by_helper(path, options).await,
    }
}

fn mount_directly(path: &Path, options: &MountOptions) -> io::Result<FuseDevice> {
    let device = FuseDevice::open()?;
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let mut data = format!(
        "fd={},rootmode=100000,user_id={},group_id={},default_permissions",
        device.as_fd().as_raw_fd(),
        user.as_raw(),
        group.as_raw(),
    );
    if options.allows_others {
        data.push_str(",allow_other");
    }
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, options.is_read_only);
    let data = CString::new(data).map_err(|_| io::ErrorKind::InvalidInput)?;
    rustix::mount::mount(&options.source, path, FILE_SYSTEM, flags, data.as_c_str())?;
    Ok(device)
}

async fn mount_by_helper(path: &Path, options: &MountOptions) -> io::Result<FuseDevice> {
    let (own, theirs) = UnixStream::pair()?;
    let helper = start_helper(theirs.into(), |command| {
        command.arg("-o").arg(words(options)).arg("--").arg(path);
        // The connection comes on what it takes for its standard input.
        command.env(HELPER_VARIABLE, "0").stderr(Stdio::piped());
    })?;
    own.set_nonblocking(true)?;
    let own = Stream::from_fd(own.into());
    let mut passed = Vec::new();
    let received = own.receive_with_descriptors(&mut [0], &mut passed).await;
    let ended = blocking(move || helper.wait_with_output()).await?;
    received?;
    match passed.pop() {
        Some(fd) if ended.status.success() => FuseDevice::from_fd(fd),
        _ => Err(io::Error::other(said(&ended.stderr))),
    }
}

/// Options in the words of the helper.
fn words(options: &MountOptions) -> OsString {
    let mut text = OsString::from("nosuid,nodev,noatime,default_permissions");
    if options.is_read_only {
        text.push(",ro");
    }
    if options.allows_others {
        text.push(",allow_other");
    }
    let mut name = Vec::new();
    for &byte in options.source.as_bytes() {
        if matches!(byte, b',' | b'\\') {
            name.push(b'\\');
        }
        name.push(byte);
    }
    text.push(",subtype=");
    text.push(SUBTYPE);
    text.push(",fsname=");
    text.push(OsString::from_vec(name));
    text
}

fn start_helper(input: OwnedFd, set: impl Fn(&mut Command)) -> io::Result<Child> {
    for name in HELPERS {
        let mut command = Command::new(name);
        command
            .stdin(Stdio::from(input.try_clone()?))
            .stdout(Stdio::null());
        set(&mut command);
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            started => return started,
        }
    }
    let text = format!("{} is not installed, which mounts for users", HELPERS[0]);
    Err(io::Error::new(io::ErrorKind::NotFound, text))
}

/// The last line that a helper has printed, without its name.
fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().last().unwrap_or_default();
    let words = line.split_once(": ").map_or(line, |(_, words)| words);
    match words.is_empty() {
        true => format!("{} failed", HELPERS[0]),
        false => words.to_string(),
    }
}

/// Manner of unmounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// Only if no program uses the file.
    IfUnused,
    /// The name at once; programs that use the file keep it for as long as it is served.
    Lazily,
}

/// Unmounts what was mounted last at a [`resolved`] path.
///
/// # Errors
/// `ResourceBusy` if the file is in use; the system's or the helper's refusal.
pub fn unmount(path: &Path, manner: Unmount) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        let mut flags = UnmountFlags::NOFOLLOW;
        flags.set(UnmountFlags::DETACH, manner == Unmount::Lazily);
        return Ok(rustix::mount::unmount(path, flags)?);
    }
    let null = std::fs::File::open("/dev/null")?;
    let helper = start_helper(null.into(), |command| {
        command.arg("-u");
        if manner == Unmount::Lazily {
            command.arg("-z");
        }
        command.arg("--").arg(path).stderr(Stdio::piped());
    })?;
    let ended = helper.wait_with_output()?;
    if ended.status.success() {
        return Ok(());
    }
    let said = said(&ended.stderr);
    let kind = match said.ends_with("Device or resource busy") {
        true => io::ErrorKind::ResourceBusy,
        false => io::ErrorKind::Other,
    };
    Err(io::Error::new(kind, said))
}

/// The name of a mount's source for a file of this name: kernels and tools expect no line breaks.
pub fn source_name(file: &OsStr) -> OsString {
    let is_plain = |byte: &u8| !byte.is_ascii_control();
    let bytes = file.as_bytes().iter().copied().filter(is_plain).collect();
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        30 22 0:5 / /a\\040b\\134c rw shared:1 master:2 - fuse.cowslip d.qcow2 rw,user_id=0\n\
        31 22 0:6 / /twice rw - tmpfs tmpfs rw\n\
        32 31 0:7 / /twice rw - fuse.sshfs x rw\n";

    #[test]
    fn the_table_of_mounts_has_the_last_mount_of_each_place() {
        let at = |path: &str| mounted_at(TABLE, Path::new(path));
        assert_eq!(at("/"), Some(&b"ext4"[..]));
        assert_eq!(at("/a b\\c"), Some(&b"fuse.cowslip"[..]));
        assert_eq!(at("/twice"), Some(&b"fuse.sshfs"[..]));
        assert_eq!(at("/twic"), None);
        assert_eq!(unescaped(b"\\04"), b"\\04");
        assert_eq!(unescaped(b"a\\999"), b"a\\999");
    }

    #[test]
    fn a_source_with_commas_is_one_option() {
        let options = MountOptions {
            source: "a,b\\c".into(),
            is_read_only: true,
            allows_others: false,
        };
        let expected = "nosuid,nodev,noatime,default_permissions,ro,subtype=cowslip,\
                        fsname=a\\,b\\\\c";
        assert_eq!(words(&options), expected);
        assert_eq!(source_name(OsStr::new("a\nb")), "ab");
    }

    #[test]
    fn helpers_are_quoted_without_their_name() {
        let line = b"fusermount3: mount failed: Operation not permitted\n";
        assert_eq!(said(line), "mount failed: Operation not permitted");
        assert_eq!(said(b""), "fusermount3 failed");
    }

    #[test]
    fn links_are_followed_and_the_file_need_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::fs::create_dir(dir.join("d")).unwrap();
        std::fs::write(dir.join("d/file"), "").unwrap();
        std::os::unix::fs::symlink("d/file", dir.join("link")).unwrap();
        assert_eq!(resolved(&dir.join("link")).unwrap(), dir.join("d/file"));
        let odd = dir.join("d/../d/new");
        assert_eq!(resolved(&odd).unwrap(), dir.join("d/new"));
        assert!(resolved(&dir.join("none/new")).is_err());
        assert_eq!(standing(&dir.join("d/file")).unwrap(), Standing::Free);
    }
}
