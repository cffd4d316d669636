//! Choice of QEMU's programs that take part in a table.

use cowslip_console::error::CommandError;

use crate::peer_path;
use crate::run::run;
use crate::server::Kind;

/// Name that leaves all out.
const NONE: &str = "none";

/// A program of QEMU's that can take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// `qemu-img bench`: in process, as `bench FILE` is.
    QemuImg,
    /// An NBD server.
    StorageDaemon,
    /// The other.
    QemuNbd,
    /// The driver below its guests.
    System,
    /// libnbd's copying program.
    Nbdcopy,
}

impl Peer {
    /// The program's name.
    pub fn name(self) -> &'static str {
        match self {
            Peer::QemuImg => "qemu-img",
            Peer::StorageDaemon => Kind::StorageDaemon.name(),
            Peer::QemuNbd => Kind::QemuNbd.name(),
            Peer::System => "qemu-system-x86_64",
            Peer::Nbdcopy => "nbdcopy",
        }
    }

    /// How it serves.
    pub fn server(self) -> Option<Kind> {
        match self {
            Peer::StorageDaemon => Some(Kind::StorageDaemon),
            Peer::QemuNbd => Some(Kind::QemuNbd),
            Peer::QemuImg | Peer::System | Peer::Nbdcopy => None,
        }
    }

    fn is_installed(self) -> bool {
        run(peer_path::command(self.name()).arg("--version")).is_ok()
    }
}

/// Returns the programs of `known` that take part: the named ones (`none` stands for no program),
/// otherwise all that are installed, but of the two servers the first, which is the faster.
///
/// # Errors
/// A name is none of those that are known and installed.
pub fn chosen(known: &[Peer], names: Option<&[String]>) -> Result<Vec<Peer>, CommandError> {
    let installed = known.iter().copied().filter(|peer| peer.is_installed());
    choose(&installed.collect::<Vec<_>>(), names).map_err(CommandError::new)
}

fn choose(installed: &[Peer], names: Option<&[String]>) -> Result<Vec<Peer>, String> {
    let Some(names) = names else {
        let mut peers = installed.to_vec();
        let first = peers.iter().copied().find(|peer| peer.server().is_some());
        peers.retain(|peer| peer.server().is_none() || Some(*peer) == first);
        return Ok(peers);
    };
    if names == [NONE] {
        return Ok(Vec::new());
    }
    let mut peers = Vec::new();
    for name in names {
        let found = installed.iter().find(|peer| peer.name() == name);
        let Some(peer) = found else {
            let there: Vec<&str> = installed.iter().map(|peer| peer.name()).collect();
            return Err(match there.is_empty() {
                true => format!("--peers: '{name}' is not there; only {NONE} is"),
                false => format!(
                    "--peers: '{name}' is not among those that this table has and that are installed: {}; or {NONE}",
                    there.join(", ")
                ),
            });
        };
        if !peers.contains(peer) {
            peers.push(*peer);
        }
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_there_take_part_unless_some_are_named() {
        let servers = [Peer::StorageDaemon, Peer::QemuNbd];
        let names = |text: &str| text.split(',').map(str::to_string).collect::<Vec<_>>();
        assert_eq!(choose(&servers, None), Ok(vec![Peer::StorageDaemon]));
        assert_eq!(
            choose(&[Peer::QemuNbd, Peer::QemuImg], None),
            Ok(vec![Peer::QemuNbd, Peer::QemuImg])
        );
        let both = names("qemu-nbd,qemu-storage-daemon,qemu-nbd");
        assert_eq!(
            choose(&servers, Some(&both)),
            Ok(vec![Peer::QemuNbd, Peer::StorageDaemon])
        );
        assert_eq!(choose(&servers, Some(&names("none"))), Ok(Vec::new()));
        for wrong in ["qemu-img", "none,qemu-nbd", ""] {
            let refused = choose(&servers, Some(&names(wrong))).unwrap_err();
            assert!(
                refused.contains("installed: qemu-storage-daemon, qemu-nbd; or none"),
                "{refused}"
            );
        }
        assert!(choose(&[], Some(&names("qemu-img"))).is_err());
    }
}
