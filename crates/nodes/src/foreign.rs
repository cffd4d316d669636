//! Formats and protocols of QEMU that are not supported, with substitutes.

use cowslip_block::{Error, Result};

/// Image formats, by QEMU's names.
const FORMATS: &[&str] = &[
    "bochs",
    "cloop",
    "dmg",
    "parallels",
    "qcow",
    "qed",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "vvfat",
];

/// Protocols, by QEMU's names, and the way to what is behind them.
const PROTOCOLS: &[(&[&str], &str)] = &[
    (
        // With the feature `remote`, drivers have the first ones.
        &[
            "http", "https", "s3", "gs", "az", "oci", "ftp", "ftps", "tftp",
        ],
        "let nbdkit serve it: nbdkit -r curl URL, then nbd://localhost",
    ),
    (
        &["ssh", "sftp"],
        "let nbdkit serve it: nbdkit ssh host=HOST PATH, then nbd://localhost",
    ),
    (
        // With the feature `rbd`, a driver has it.
        &["rbd"],
        "map it as a block device: rbd device map POOL/IMAGE",
    ),
    (
        &["iscsi", "iser"],
        "log in to the target with iscsiadm, and name its block device",
    ),
    (
        &["gluster", "gluster+tcp", "gluster+unix", "gluster+rdma"],
        "mount the volume: mount -t glusterfs HOST:VOLUME DIRECTORY",
    ),
    (
        &["nfs"],
        "mount the share: mount -t nfs HOST:PATH DIRECTORY",
    ),
    (&["nvme"], "name the block device, such as /dev/nvme0n1"),
    (
        &["fat", "vvfat"],
        "make a file system: mkfs.fat and mcopy write one into a raw image",
    ),
];

/// Whether this is a format of QEMU that is not supported.
pub fn is_format(name: &str) -> bool {
    FORMATS.contains(&name)
}

/// The refusal of an image in this format.
pub fn format_refused(name: &str) -> Option<String> {
    is_format(name).then(|| {
        format!(
            "Format '{name}' is not supported; QEMU's own qemu-img converts it: qemu-img convert -f {name} -O qcow2"
        )
    })
}

/// The refusal of a new image in this format.
pub fn new_format_refused(name: &str) -> Option<String> {
    is_format(name).then(|| {
        format!(
            "Format '{name}' is not supported; make it qcow2, which QEMU's own qemu-img converts: qemu-img convert -O {name}"
        )
    })
}

/// The substitute for this protocol.
pub fn instead_of_protocol(name: &str) -> Option<&'static str> {
    let found = PROTOCOLS.iter().find(|(names, _)| names.contains(&name));
    found.map(|(_, instead)| *instead)
}

/// The refusal of a file behind a protocol that is not supported.
pub fn protocol_refused(name: &str) -> String {
    match instead_of_protocol(name) {
        Some(instead) => format!("Protocol '{name}' is not supported; {instead}"),
        None => format!("Unknown protocol '{name}'"),
    }
}

/// The substitute for a filter that is not supported.
pub fn instead_of_filter(driver: &str) -> Option<&'static str> {
    Some(match driver {
        "throttle" => "limits belong to the program that reads and writes the image",
        "blkverify" => "compare the images afterwards: qemu-img compare",
        "quorum" => "mirror the files below it: dm-raid, or a file system with copies",
        "blklogwrites" => "log writes below it: dm-log-writes",
        "blkreplay" | "replication" => {
            "they serve the replay of a virtual machine, which is not run here"
        }
        "preallocate" => "images grow ahead of need by themselves (alloc-policy=contiguous)",
        _ => return None,
    })
}

/// The name of a file without `file:`. A name that begins like a protocol's gets `./` before it.
///
/// # Errors
/// It is behind a protocol that is not supported.
pub fn local_name(name: &str) -> Result<String> {
    match (protocol(name), name.strip_prefix("file:")) {
        (None, _) => Ok(name.to_string()),
        (Some(_), Some(local)) if protocol(local).is_some() => Ok(format!("./{local}")),
        (Some(_), Some(local)) => Ok(local.to_string()),
        (Some(other), None) => Err(Error::invalid(protocol_refused(other))),
    }
}

/// The part of a name before a colon, if no slash comes first.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/']).filter(|&end| end > 0)?;
    name[end..].starts_with(':').then_some(&name[..end])
}

/// The refusal of a driver that is not supported.
pub fn driver_refused(name: &str) -> String {
    match (format_refused(name), instead_of_protocol(name)) {
        (Some(refused), _) => refused,
        (None, Some(_)) => protocol_refused(name),
        (None, None) => format!("Unknown driver '{name}'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_has_is_named_with_what_to_use_instead() {
        assert!(driver_refused("vmdk").contains("qemu-img convert -f vmdk -O qcow2"));
        assert!(driver_refused("ssh").contains("nbdkit ssh"));
        assert_eq!(driver_refused("foo"), "Unknown driver 'foo'");
        assert_eq!(protocol_refused("foo"), "Unknown protocol 'foo'");
        assert!(protocol_refused("rbd").contains("rbd device map"));
        assert_eq!(format_refused("raw"), None);
    }
}
