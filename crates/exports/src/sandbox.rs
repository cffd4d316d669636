//! Rights that a server gives up once its files are open and clients can connect: all but those
//! that answering requests needs, and those of its transports ([`Rights`]). docs/security.md says
//! what that leaves to an attacker.
//!
//! Landlock takes away the file system, TCP, and signals to others; a seccomp filter takes away all
//! system calls but those in `ALLOWED`. What is not allowed fails with EPERM rather than ending the
//! server: a C library that tries something new must not cost the writes in flight. What only an
//! attack would call ends it (`FATAL`). The ring is confined where it is made (`cowslip-queue`):
//! seccomp does not see what it does.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cowslip_console::error::CommandError;
use landlock::{
    ABI, Access, AccessFs, AccessNet, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::socket_name::REMOVING;

/// Extent of the sandbox (`--sandbox`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// As much of the sandbox as the system has.
    #[default]
    Auto,
    /// All of it, or no service.
    On,
    /// None.
    Off,
}

impl Mode {
    /// The mode of this name.
    pub fn parse(name: &str) -> Option<Mode> {
        Some(match name {
            "auto" => Mode::Auto,
            "on" => Mode::On,
            "off" => Mode::Off,
            _ => return None,
        })
    }
}

/// Rights that a transport needs beyond those of answering requests.
#[derive(Clone, Debug, Default)]
pub struct Rights {
    /// Paths of files that it removes when it ends. Names in their directories may be removed.
    pub removed: Vec<PathBuf>,
    /// Directories in which it opens, makes and removes files and sockets.
    pub directories: Vec<PathBuf>,
    /// Directories in which it opens files for reading.
    pub read: Vec<PathBuf>,
    /// TCP ports to which it connects.
    pub ports: Vec<u16>,
    /// Numbers of system calls.
    pub calls: Vec<i64>,
}

impl Rights {
    /// Rights of a process that goes on opening files in some directories, and serving them: it
    /// makes sockets, and rings for threads.
    pub fn within(directories: Vec<PathBuf>) -> Rights {
        Rights {
            directories,
            calls: [OPENING, REMOVING].concat(),
            ..Rights::default()
        }
    }
}

#[cfg(feature = "rbd")]
impl Rights {
    /// Rights of a process with an image in Ceph: its threads, which were there before and which
    /// Landlock does not reach, connect again where a connection is lost. They open no files.
    pub fn of_ceph() -> Rights {
        Rights {
            calls: RECONNECTING.to_vec(),
            ..Rights::default()
        }
    }
}

#[cfg(feature = "remote")]
impl From<cowslip_remote::Reach> for Rights {
    /// Rights of a process that reads remote files: it connects again, looks names up, and uses a
    /// cache.
    fn from(reach: cowslip_remote::Reach) -> Rights {
        Rights {
            removed: Vec::new(),
            directories: reach.written,
            read: reach.read,
            ports: reach.ports,
            calls: [CONNECTING, REMOVING].concat(),
        }
    }
}

impl FromIterator<Rights> for Rights {
    /// All of them together.
    fn from_iter<I: IntoIterator<Item = Rights>>(all: I) -> Rights {
        all.into_iter().fold(Rights::default(), |mut sum, rights| {
            sum.removed.extend(rights.removed);
            sum.directories.extend(rights.directories);
            sum.read.extend(rights.read);
            sum.ports.extend(rights.ports);
            sum.calls.extend(rights.calls);
            sum
        })
    }
}

/// Restrictions in force.
#[derive(Debug)]
pub struct Report {
    landlock: Result<RulesetStatus, String>,
    seccomp: Result<(), String>,
    /// Threads that were there before, and that Landlock does not reach.
    other_threads: usize,
}

impl Report {
    /// Whether all of it is.
    pub fn is_whole(&self) -> bool {
        let confined = |status: &RulesetStatus| *status != RulesetStatus::NotEnforced;
        self.landlock.as_ref().is_ok_and(confined)
            && self.seccomp.is_ok()
            && self.other_threads == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sandbox: Landlock ")?;
        match &self.landlock {
            Ok(RulesetStatus::FullyEnforced) => f.write_str("on")?,
            Ok(RulesetStatus::PartiallyEnforced) => {
                f.write_str("on, as far as this kernel supports it")?
            }
            Ok(RulesetStatus::NotEnforced) => f.write_str("not supported by this kernel")?,
            Err(why) => write!(f, "failed ({why})")?,
        }
        if self.other_threads > 0 {
            write!(
                f,
                ", but does not cover {} other threads",
                self.other_threads
            )?;
        }
        match &self.seccomp {
            Ok(()) => f.write_str(", seccomp on"),
            Err(why) => write!(f, ", seccomp failed ({why})"),
        }
    }
}

/// Confines this process for good; `rights` are what its transports need.
pub fn enter(rights: &Rights) -> Report {
    // Landlock is a thread's, and its children's. What remains idle of opening the image goes
    // first.
    cowslip_queue::retire_idle_threads();
    let rights = with_stores(rights);
    let other_threads = other_threads();
    Report {
        landlock: confine_files(&rights).map_err(|error| error.to_string()),
        seccomp: confine_calls(&rights.calls).map_err(|error| error.to_string()),
        other_threads,
    }
}

/// Ends the threads that stores of objects have had so far, which begin again within the sandbox;
/// adds the directories of stores to `rights`.
#[cfg(feature = "remote")]
fn with_stores(rights: &Rights) -> Rights {
    cowslip_remote::retire(Duration::from_secs(5));
    let published = cowslip_publish::objects::open_directories();
    let mut rights = rights.clone();
    if !published.is_empty() {
        rights.calls.extend(OPENING);
    }
    rights.read.extend(published);
    rights
}

#[cfg(not(feature = "remote"))]
fn with_stores(rights: &Rights) -> Rights {
    rights.clone()
}

/// Threads of this process but for this one, after those that are ending have ended. Those of the
/// kernel, which rings have, are not counted: they do what the calling thread may.
fn other_threads() -> usize {
    let is_ours = |task: &std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| !name.starts_with("iou-"))
    };
    let count = || {
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
        tasks.flatten().filter(is_ours).count().saturating_sub(1)
    };
    for _ in 0..200 {
        if count() == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    count()
}

/// Confines as [`enter`] does, as far as the mode asks for; returns what is in force.
///
/// # Errors
/// The mode asks for more than there is.
pub fn enforce(mode: Mode, rights: &Rights) -> Result<Option<Report>, CommandError> {
    if mode == Mode::Off {
        return Ok(None);
    }
    let report = enter(rights);
    if mode == Mode::On && !report.is_whole() {
        return Err(CommandError::new(format!(
            "--sandbox=on demands the whole sandbox, and a part of it is not in force ({report}); \
             --sandbox=auto serves with what there is"
        )));
    }
    Ok(Some(report))
}

fn confine_files(rights: &Rights) -> Result<RulesetStatus, landlock::RulesetError> {
    // Best effort: rights that this kernel does not know are left out, and reported.
    let abi = ABI::V9;
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    // Removing a name needs the right to remove names in its directory.
    let directories = rights.removed.iter().map(|path| match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    });
    for directory in directories.flat_map(PathFd::new) {
        ruleset = ruleset.add_rule(PathBeneath::new(directory, AccessFs::RemoveFile))?;
    }
    let files = AccessFs::from_all(abi) & !(AccessFs::Execute | AccessFs::MakeSym);
    let files = files & !(AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeFifo);
    for directory in rights.directories.iter().flat_map(PathFd::new) {
        ruleset = ruleset.add_rule(PathBeneath::new(directory, files))?;
    }
    let reading = AccessFs::ReadFile | AccessFs::ReadDir;
    for directory in rights.read.iter().flat_map(PathFd::new) {
        ruleset = ruleset.add_rule(PathBeneath::new(directory, reading))?;
    }
    for &port in &rights.ports {
        ruleset = ruleset.add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
    }
    Ok(ruleset.restrict_self()?.ruleset)
}

fn confine_calls(calls: &[i64]) -> Result<(), seccompiler::Error> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = |rules, otherwise, then| -> Result<BpfProgram, seccompiler::Error> {
        Ok(SeccompFilter::new(rules, otherwise, then, arch)?.try_into()?)
    };
    let allow = SeccompAction::Allow;
    let is_fatal = |call: &&i64| !calls.contains(call);
    let fatal: Vec<i64> = FATAL.iter().filter(is_fatal).copied().collect();
    let plain = |calls: &[i64]| calls.iter().map(|&call| (call, Vec::new())).collect();
    // The one that allows least comes last: it takes away the call that installs filters, too.
    let filters = [
        filter(
            plain(&[libc::SYS_clone3]),
            allow.clone(),
            errno(libc::ENOSYS),
        )?,
        filter(plain(&fatal), allow.clone(), SeccompAction::KillProcess)?,
        filter(allowed(calls)?, errno(libc::EPERM), allow)?,
    ];
    for filter in &filters {
        seccompiler::apply_filter_all_threads(filter)?;
    }
    Ok(())
}

fn errno(number: i32) -> SeccompAction {
    SeccompAction::Errno(number.unsigned_abs())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn allowed(calls: &[i64]) -> Result<Rules, seccompiler::Error> {
    let calls = ALLOWED.iter().chain(calls);
    let mut rules: Rules = calls.map(|&call| (call, Vec::new())).collect();
    let when = |index, operator, value| {
        let length = SeccompCmpArgLen::Dword;
        SeccompCondition::new(index, length, operator, value)
            .and_then(|condition| SeccompRule::new(vec![condition]))
    };
    // Memory is never executable that was not when the program began.
    let executable = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let data_only = when(2, SeccompCmpOp::MaskedEq(executable), 0)?;
        rules.insert(call, vec![data_only]);
    }
    // Threads, no processes. `clone3` hides its flags from filters, so it says that it does not
    // exist, and the C library uses this.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(
        libc::SYS_clone,
        vec![when(0, SeccompCmpOp::MaskedEq(thread), thread)?],
    );
    let name = libc::PR_SET_NAME as u64;
    rules.insert(libc::SYS_prctl, vec![when(0, SeccompCmpOp::Eq, name)?]);
    let requests = IOCTLS
        .iter()
        .map(|&request| when(1, SeccompCmpOp::Eq, request));
    let requests: Result<Vec<_>, _> = requests.collect();
    rules.insert(libc::SYS_ioctl, requests?);
    Ok(rules)
}

/// Extents of a file, and those that btrfs is to write elsewhere; discards and the size of a block
/// device; non-blocking sockets: `<linux/fs.h>`, `<linux/fiemap.h>`, `<asm-generic/ioctls.h>`,
/// `<linux/btrfs.h>`.
const IOCTLS: &[u64] = &[0xc020_660b, 0x1277, 0x8008_1272, 0x5421, 0x4030_9410];

/// System calls that answering requests needs, whatever the transport: those of a transport are in
/// its [`Rights`]. Some have rules of their own in `allowed`.
const ALLOWED: &[i64] = &[
    // Files that are open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    // What `newfstatat` answers, as musl asks.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_syncfs,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    // Also locks of open files.
    libc::SYS_fcntl,
    libc::SYS_close,
    // Leaving the terminal, with `--fork`.
    libc::SYS_setsid,
    libc::SYS_dup,
    libc::SYS_dup3,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    // Connections that are open: those of clients, and those to servers of images.
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // Waiting.
    libc::SYS_io_uring_enter,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_ctl,
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Threads and signals of this process.
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_tgkill,
    // An abort of musl's.
    libc::SYS_tkill,
    libc::SYS_getpid,
    libc::SYS_geteuid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Time and randomness.
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
];

/// System calls of a process that goes on opening files and making sockets, where Landlock allows
/// that. A ring that it makes is confined by itself, like the first one.
const OPENING: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_statfs,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_getuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_accept4,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    libc::SYS_epoll_create1,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_register,
];

/// System calls of a process that reads remote files, where Landlock allows that: it connects,
/// looks names up in files and over the network, and makes and removes files of a cache.
#[cfg(feature = "remote")]
const CONNECTING: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    libc::SYS_faccessat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_link,
    libc::SYS_linkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_utimensat,
    libc::SYS_uname,
    libc::SYS_getuid,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_sendmmsg,
    libc::SYS_eventfd2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
    libc::SYS_epoll_create1,
];

/// System calls of Ceph's threads when they connect again.
#[cfg(feature = "rbd")]
const RECONNECTING: &[i64] = &[
    libc::SYS_socket,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_uname,
    libc::SYS_getuid,
    libc::SYS_prlimit64,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
    libc::SYS_epoll_create1,
];

/// System calls that nothing of ours, and no C library, makes here: other programs, other
/// processes' memory, the kernel, another ring.
const FATAL: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_open_by_handle_at,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_mount,
    libc::SYS_unshare,
    libc::SYS_setns,
];

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const CHILD: &str = "COWSLIP_TEST_SANDBOX";

    fn errno_of<T>(result: io::Result<T>) -> Option<i32> {
        result.err().and_then(|error| error.raw_os_error())
    }

    /// Runs this test alone in another process.
    fn in_a_child(test: &str, scratch: &Path) -> std::process::Output {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg(format!("sandbox::tests::{test}"))
            .env(CHILD, scratch)
            .output()
            .unwrap()
    }

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    /// The same test in a child, which is confined and says in the end that it has looked.
    fn looks_in_a_child(test: &str) {
        let outcome = in_a_child(test, scratch().path());
        let said = String::from_utf8_lossy(&outcome.stdout);
        assert!(outcome.status.success(), "{outcome:?}");
        assert!(said.contains("the child has looked"), "{said}");
    }

    /// Both halves; without the second, what the first refuses is seen.
    #[test]
    fn files_and_connections_are_out_of_reach() {
        let Some(directory) = std::env::var_os(CHILD) else {
            return looks_in_a_child("files_and_connections_are_out_of_reach");
        };
        let directory = Path::new(&directory);
        let [socket, other] = ["socket", "other"].map(|name| directory.join(name));
        std::fs::write(&other, "kept").unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let status = confine_files(&Rights {
            removed: vec![socket.clone()],
            ..Rights::default()
        });
        let refused = Some(libc::EACCES);
        match status {
            Ok(RulesetStatus::NotEnforced) | Err(_) => eprintln!("SKIPPED: no Landlock here"),
            Ok(_) => {
                assert_eq!(errno_of(std::fs::read("/etc/passwd")), refused);
                assert_eq!(errno_of(std::fs::write(&other, "lost")), refused);
                assert_eq!(errno_of(std::fs::read_dir(directory)), refused);
                let elsewhere = std::env::current_exe().unwrap();
                assert_eq!(errno_of(std::fs::remove_file(elsewhere)), refused);
            }
        }
        confine_calls(REMOVING).unwrap();
        let refused = Some(libc::EPERM);
        assert_eq!(errno_of(std::fs::read("/etc/passwd")), refused);
        assert_eq!(errno_of(std::fs::read(&other)), refused);
        assert_eq!(errno_of(std::fs::write(directory.join("new"), "")), refused);
        assert_eq!(
            errno_of(std::fs::rename(&other, directory.join("new"))),
            refused
        );
        assert_eq!(
            errno_of(TcpStream::connect(tcp.local_addr().unwrap())),
            refused
        );
        assert_eq!(errno_of(UdpSocket::bind("127.0.0.1:0")), refused);
        assert_eq!(errno_of(UnixStream::connect(&socket)), refused);
        drop(listener);
        // The means of serving still work: threads, memory, time, the socket's name.
        let sum = std::thread::spawn(|| {
            vec![1u8; 64 << 20]
                .iter()
                .map(|&b| u64::from(b))
                .sum::<u64>()
        });
        assert_eq!(sum.join().unwrap(), 64 << 20);
        std::thread::sleep(Duration::from_millis(1));
        std::fs::remove_file(&socket).unwrap();
        println!("the child has looked");
    }

    #[test]
    fn only_ports_that_are_named_are_connected_to() {
        let Some(_) = std::env::var_os(CHILD) else {
            return looks_in_a_child("only_ports_that_are_named_are_connected_to");
        };
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let [named, other] = [listen(), listen()].map(|it| (it.local_addr().unwrap(), it));
        let status = confine_files(&Rights {
            ports: vec![named.0.port()],
            ..Rights::default()
        });
        TcpStream::connect(named.0).unwrap();
        let connected = TcpStream::connect(other.0);
        match status {
            Ok(RulesetStatus::NotEnforced) | Err(_) => eprintln!("SKIPPED: no Landlock here"),
            // Landlock knows TCP from Linux 6.7 on.
            Ok(RulesetStatus::PartiallyEnforced) if connected.is_ok() => {
                eprintln!("SKIPPED: no ports in this Landlock")
            }
            Ok(_) => assert_eq!(errno_of(connected), Some(libc::EACCES)),
        }
        println!("the child has looked");
    }

    #[test]
    fn running_a_program_ends_the_server() {
        let Some(_) = std::env::var_os(CHILD) else {
            let scratch = scratch();
            let outcome = in_a_child("running_a_program_ends_the_server", scratch.path());
            assert_eq!(outcome.status.signal(), Some(libc::SIGSYS), "{outcome:?}");
            return;
        };
        confine_calls(REMOVING).unwrap();
        use std::os::unix::process::CommandExt;
        let error = Command::new("/bin/true").exec();
        panic!("still here: {error}");
    }

    #[test]
    fn there_are_no_new_processes_and_no_new_code() {
        let Some(_) = std::env::var_os(CHILD) else {
            return looks_in_a_child("there_are_no_new_processes_and_no_new_code");
        };
        confine_calls(REMOVING).unwrap();
        assert_eq!(
            errno_of(Command::new("/bin/true").spawn()),
            Some(libc::EPERM)
        );
        println!("the child has looked");
    }

    #[test]
    fn every_name_of_a_mode_is_known() {
        for (name, mode) in [("auto", Mode::Auto), ("on", Mode::On), ("off", Mode::Off)] {
            assert_eq!(Mode::parse(name), Some(mode));
        }
        assert_eq!(Mode::parse("yes"), None);
    }
}
