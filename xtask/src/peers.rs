//! The programs that tests and benches compare with: which there are, which are missing, and how
//! they are installed on Debian and its relatives.
//!
//! Installing is a convenience for containers: it happens only for root, only where `apt-get`
//! exists, without removing a package for it, and a failure is reported but does not fail the gate.
//! Programs missing in the end are named, and the tests that need them say that they skip.

use crate::{apt, kernel, libssl, run};

/// A program and the Debian packages that may hold it, in the order of trying.
struct Peer {
    program: &'static str,
    packages: &'static [&'static str],
}

const PEERS: &[Peer] = &[
    Peer {
        program: "qemu-img",
        packages: &["qemu-utils"],
    },
    Peer {
        program: "qemu-io",
        packages: &["qemu-utils"],
    },
    Peer {
        program: "qemu-nbd",
        packages: &["qemu-utils"],
    },
    // Which package holds the daemon has changed between releases.
    Peer {
        program: "qemu-storage-daemon",
        packages: &["qemu-utils", "qemu-system-common"],
    },
    Peer {
        program: "nbdinfo",
        packages: &["libnbd-bin"],
    },
    Peer {
        program: "nbdcopy",
        packages: &["libnbd-bin"],
    },
    Peer {
        program: "nbdkit",
        packages: &["nbdkit"],
    },
    Peer {
        program: "strace",
        packages: &["strace"],
    },
    Peer {
        program: "fio",
        packages: &["fio"],
    },
    Peer {
        program: "mkfs.ext4",
        packages: &["e2fsprogs"],
    },
    Peer {
        program: "mkfs.xfs",
        packages: &["xfsprogs"],
    },
    Peer {
        program: "mkfs.btrfs",
        packages: &["btrfs-progs"],
    },
    Peer {
        program: "fuse2fs",
        packages: &["fuse2fs"],
    },
    Peer {
        program: "fusermount3",
        packages: &["fuse3"],
    },
    Peer {
        program: "filefrag",
        packages: &["e2fsprogs"],
    },
    // A real engine for pages: Chromium's, without the parts that draw on a desktop.
    Peer {
        program: "chromium-headless-shell",
        packages: &["chromium-headless-shell", "chromium-shell"],
    },
    // Guests of other machines are not known yet.
    #[cfg(target_arch = "x86_64")]
    Peer {
        program: "qemu-system-x86_64",
        packages: &["qemu-system-x86"],
    },
];

/// The names of the peers that are not installed, among them the packages of the guests' kernel and
/// of OpenSSL's library.
pub fn missing() -> Vec<&'static str> {
    let programs = PEERS
        .iter()
        .filter(|peer| run::find_program(peer.program).is_none());
    let mut missing: Vec<_> = programs.map(|peer| peer.program).collect();
    if cfg!(target_arch = "x86_64") && !kernel::is_there() {
        missing.push(kernel::PACKAGE);
    }
    if !libssl::is_there() {
        missing.push(libssl::PACKAGE);
    }
    missing
}

/// Installs what is missing, where that is possible, and returns what is missing still.
pub fn ensure() -> Vec<&'static str> {
    if missing().is_empty() {
        return Vec::new();
    }
    let may_install = rustix::process::geteuid().is_root()
        && run::find_program("apt-get").is_some()
        && std::env::var_os("COWSLIP_NO_INSTALL").is_none();
    if may_install {
        install();
    }
    let missing = missing();
    if !missing.is_empty() {
        eprintln!(
            "\n*** MISSING PEERS: {} ***\n*** The tests that compare with them will be SKIPPED. \
             On Debian: apt-get install {} ***\n",
            missing.join(" "),
            packages_of(&missing).join(" ")
        );
    }
    missing
}

fn packages_of(programs: &[&str]) -> Vec<&'static str> {
    let mut packages = Vec::new();
    for peer in PEERS.iter().filter(|p| programs.contains(&p.program)) {
        if !packages.contains(&peer.packages[0]) {
            packages.push(peer.packages[0]);
        }
    }
    for package in [kernel::PACKAGE, libssl::PACKAGE] {
        packages.extend(programs.contains(&package).then_some(package));
    }
    // It says where the library is.
    packages.extend(
        programs
            .contains(&libssl::PACKAGE)
            .then_some(libssl::FINDER),
    );
    packages
}

fn install() {
    println!("xtask: installing peers: {}", missing().join(" "));
    if let Err(message) = apt::update() {
        eprintln!("xtask: {message}");
    }
    // Package by package: one that the release lacks must not keep the others away.
    let attempts = PEERS.iter().map(|p| p.packages.len()).max().unwrap_or(0);
    for attempt in 0..attempts {
        let mut tried: Vec<&str> = Vec::new();
        for peer in PEERS {
            let Some(package) = peer.packages.get(attempt).copied() else {
                continue;
            };
            if tried.contains(&package) || run::find_program(peer.program).is_some() {
                continue;
            }
            tried.push(package);
            if let Err(message) = apt::install(package) {
                eprintln!("xtask: {message}");
            }
        }
    }
    if missing().contains(&kernel::PACKAGE)
        && let Err(message) = kernel::unpack()
    {
        eprintln!("xtask: {message}");
    }
    if !libssl::is_there() {
        for package in [libssl::FINDER, libssl::PACKAGE] {
            if let Err(message) = apt::install(package) {
                eprintln!("xtask: {message}");
            }
        }
    }
}
