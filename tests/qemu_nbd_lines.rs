//! Command lines of qemu-nbd that end by themselves: refused, or answered. Both programs say the
//! same and end alike.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::support::golden::{lines, said, words};
use crate::support::{cowslip, outcome, run, scratch_beside};

/// There is an image `a.qcow2` of 4 MiB, and a file `r.raw` of zeroes.
const LINES: &str = "

a b
nosuch
-r nosuch
nosuch -r
-- nosuch
-P 1 a.qcow2
--partition=1 a.qcow2
-Z
-x
-D
-o
-o -1 a.qcow2
-o 1x a.qcow2
-o '' a.qcow2
-o 0x a.qcow2
-o 5M a.qcow2
-o 99999999999999999999 a.qcow2
-o 8388608 a.qcow2
-o 0x800000 a.qcow2
-o 040000000 a.qcow2
-o +8388608 a.qcow2
-e -1 a.qcow2
-e 0x a.qcow2
-e '' a.qcow2
-e 2147483648 a.qcow2
-e 0x10 nosuch
-e -0 nosuch
-p x a.qcow2
-p -1 a.qcow2
-b nosuch.invalid a.qcow2
-k rel a.qcow2
-k '' a.qcow2
-k /nosuch/dir/s a.qcow2
-k S -p 10 a.qcow2
-k S -b x a.qcow2
--cache=foo a.qcow2
--cache= a.qcow2
--cache
-n --cache=none a.qcow2
--cache=none -n a.qcow2
--cache=none --cache=none a.qcow2
--aio=foo a.qcow2
--aio=native a.qcow2
--aio=native --aio=threads a.qcow2
--aio=native --cache=writeback a.qcow2
--discard=foo a.qcow2
--discard=unmap --discard=unmap a.qcow2
--discard= a.qcow2
--detect-zeroes=foo a.qcow2
--detect-zeroes=unmap a.qcow2
--detect-zeroes=unmap --discard=ignore a.qcow2
--detect-zeroes=on --detect-zeroes=off a.qcow2 b
-c
-d
-d a b
-L a.qcow2
-L -c /dev/nosuch
-L -d
-L -d -k /nosuch
-L -x n
-L -o 1
-L -o 0 -k /nosuch
-L -D text
-L -A
-L -B b
-L -l s
-L -n
-L -f raw
-L --aio=threads
-L --discard=unmap
-L --cache=none
-L -r -t -v -e 2 -k /nosuch
-L --detect-zeroes=on --image-opts -k /nosuch
-L --pid-file=p --handshake-limit=3 -k /nosuch
-L --fork
-L --fork x
-L --fork -x n
-L -x n file
-L -k S
-L -k /nosuch
-L -b nosuch.invalid
-L --tls-authz=x
-l x a.qcow2
-l snapshot.id=1 a.qcow2
-l snapshot.foo=1 a.qcow2
-l s -s a.qcow2
-f foo a.qcow2
-f qcow2 r.raw
-f '' a.qcow2
--image-opts -f raw a.qcow2
--image-opts driver=qcow2,file.filename=nosuch
--object
--object foo,id=x a.qcow2
--tls-creds=x a.qcow2
--tls-hostname=h a.qcow2
--tls-authz=x a.qcow2
--handshake-limit=x a.qcow2
--handshake-limit=-5 a.qcow2
--handshake-limit=4294967296 a.qcow2
--pid-file
--pid-file=/nosuch/p -k /nosuch/S a.qcow2
--fork nosuch
--fork -k /nosuch/s a.qcow2
--fork -f foo a.qcow2
-v nosuch
-T foo nosuch
-T foo -T -bar nosuch
-T enable=foo nosuch
-T '' nosuch
-T x=y nosuch
-T a -Z
--trace foo nosuch
-V --foo=1 extra
--foo
-Z
--offse=1 nosuch
--sha=x nosuch
--des=1 nosuch
--dis nosuch
--b=x nosuch
--s=x nosuch
--t nosuch
--tls nosuch
-D '' nosuch
-A nosuch
--allocation-depth=1 nosuch
-r=1 nosuch
--read-only=1 nosuch
-B
--bitmap
--bitmap=b nosuch
--shared=x nosuch
--persistent nosuch
--nocache=1 x
--snapshot nosuch
";

/// Options that are refused, and the programs that have them.
const REFUSED: &[(&str, &str)] = &[
    (
        "-c /dev/nosuch a.qcow2",
        "The kernel's NBD devices (-c) are not supported: serve on a socket (-t -k SOCKET) and connect the device with \
         'nbd-client -unix SOCKET DEVICE'",
    ),
    (
        "-d /dev/nosuch",
        "The kernel's NBD devices (-d) are not supported: use 'nbd-client -d DEVICE'",
    ),
    (
        "--selinux-label=x a.qcow2",
        "SELinux labels are not supported (--selinux-label)",
    ),
    ("-T file=x a.qcow2", "Tracing (-T file=) is not supported"),
    (
        "-T events=x a.qcow2",
        "Tracing (-T events=) is not supported",
    ),
];

fn in_directory(mut command: Command, directory: &Path, line: &str) -> String {
    command.current_dir(directory).args(words(line));
    said(&outcome(&mut command))
}

fn ours() -> Command {
    let mut command = cowslip();
    command.arg0("qemu-nbd");
    command
}

#[test]
fn both_say_the_same() {
    let Some(dir) = scratch_beside(&["qemu-nbd", "qemu-img"]) else {
        return;
    };
    std::fs::write(dir.path().join("r.raw"), vec![0; 1 << 20]).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "a.qcow2", "4M"];
    run(Command::new("qemu-img")
        .current_dir(dir.path())
        .args(create));
    for line in lines(LINES) {
        let [theirs, mut ours] = [Command::new("qemu-nbd"), ours()]
            .map(|command| in_directory(command, dir.path(), line));
        if line.starts_with("-V") {
            // The version of ours stands behind the version that it follows, and licences are
            // others.
            assert!(ours.starts_with("qemu-nbd 10.0.2 (cowslip"), "{ours}");
            ours.clone_from(&theirs);
        }
        assert_eq!(ours, theirs, "qemu-nbd {line}");
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 2, "qemu-nbd {line} leaves a file");
    }
    for (line, words) in REFUSED {
        let printed = in_directory(ours(), dir.path(), line);
        assert_eq!(printed, format!("qemu-nbd: {words}\n[exit status: 1]\n"));
    }
    let none = in_directory(ours(), dir.path(), "-T help");
    assert_eq!(none, "[exit status: 0]\n", "there are no events");
}
