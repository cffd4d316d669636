//! Recognition of image formats that are not supported, so that their images are not taken for raw.
//!
//! A file of unspecified format is raw unless it begins like an image. A file that begins like an
//! image of VMware's or VirtualBox's is not supported, but it is not raw either: as a raw disk it
//! would show its headers to a guest, and the first write would damage it. Pure.
//!
//! Sources: "Virtual Disk Format 5.0" (VMware); "Virtual Hard Disk Image Format Specification" and
//! "MS-VHDX" (Microsoft); `docs/interop/qed_spec.rst`, `parallels.rst` and `qcow2.rst` of QEMU; for
//! the others, headers that their own programs write.

use crate::errno::EPERM;
use crate::error::Feature;
use crate::policy::Format;
use crate::{Error, Result};

/// Bytes at the beginning of a file from which its format is probed.
pub const PROBED_BYTES: u64 = 512;

/// The first bytes of a qcow2 image; its version, big endian, follows.
pub const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";
/// The first bytes of a LUKS volume; its version, big endian, follows.
pub const LUKS_MAGIC: [u8; 6] = *b"LUKS\xba\xbe";

/// Signatures of unsupported image formats: offset in bytes, signature, QEMU's name of the format.
const BEGINNINGS: &[(usize, &[u8], &str)] = &[
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (64, &[0x7f, 0x10, 0xda, 0xbe], "vdi"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"QED\0", "qed"),
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
    (0, b"Bochs Virtual HD Image", "bochs"),
];

/// A format that the caller has added: its name, and a test for its images.
#[derive(Clone, Copy, Debug)]
pub struct Signature {
    /// The name of the format.
    pub name: &'static str,
    /// Whether a file with this first sector, [`PROBED_BYTES`] long, is an image of the format.
    pub matches: fn(&[u8]) -> bool,
}

/// The added format, if any, whose images begin with this sector.
fn added(sector: &[u8], others: &[Signature]) -> Option<&'static str> {
    let found = others.iter().find(|other| (other.matches)(sector));
    found.map(|other| other.name)
}

/// The supported format of a file that begins with `bytes` (8 or more, unless the file is shorter);
/// raw if none matches.
pub fn supported(bytes: &[u8]) -> Format {
    match bytes.get(..8) {
        Some(start) if start[..4] == QCOW2_MAGIC && start[4..] >= [0, 0, 0, 2][..] => Format::Qcow2,
        Some(start) if start.starts_with(&LUKS_MAGIC) && start[6..] == [0, 1] => Format::Luks,
        _ => Format::Raw,
    }
}

/// QEMU's name of the format of a file that begins with `bytes`, if the format is recognised but
/// not supported.
pub fn name(bytes: &[u8]) -> Option<&'static str> {
    let begins_so = |(at, sign, _): &&(usize, &[u8], &str)| {
        bytes.get(*at..).is_some_and(|rest| rest.starts_with(sign))
    };
    match BEGINNINGS.iter().find(begins_so) {
        Some((_, _, name)) => Some(name),
        None => is_vmdk_descriptor(bytes).then_some("vmdk"),
    }
}

/// Whether a text is the descriptor of a VMDK image by QEMU's rule: `version=N` on a line, after
/// nothing but comments and lines of spaces.
fn is_vmdk_descriptor(text: &[u8]) -> bool {
    let mut rest = text;
    while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
        let (line, next) = (&rest[..end], &rest[end + 1..]);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match line {
            [b'#', ..] => {}
            [b' ', blank @ ..] if blank.iter().all(|&byte| byte == b' ') => {}
            _ => return matches!(line, b"version=1" | b"version=2" | b"version=3"),
        }
        rest = next;
    }
    false
}

/// Probes the format of the file of this name, which begins with `bytes`: [`PROBED_BYTES`] of them,
/// or all if the file is shorter. Added formats come after the built-in ones.
///
/// # Errors
/// [`Error::Unsupported`] names the format.
pub fn probe(bytes: &[u8], file: &str, others: &[Signature]) -> Result<Format> {
    // A shorter file is a disk of a whole sector; the rest of the sector reads as zeroes.
    let mut sector = [0; PROBED_BYTES as usize];
    let there = bytes.len().min(sector.len());
    sector[..there].copy_from_slice(&bytes[..there]);
    if let (Format::Raw, Some(name)) = (supported(&sector), added(&sector, others)) {
        return Ok(Format::Other(name));
    }
    match (supported(&sector), name(&sector)) {
        (Format::Raw, Some(name)) => Err(Error::Unsupported {
            file: file.to_string(),
            feature: Feature::Format(name.to_string()),
        }),
        (format, _) => Ok(format),
    }
}

/// Checks that a disk whose format was guessed to be raw still looks raw with this first sector.
///
/// # Errors
/// `Io` with EPERM, naming the format that the sector belongs to.
pub fn check_stays_raw(sector: &[u8], file: &str, others: &[Signature]) -> Result<()> {
    let foreign = name(sector).or_else(|| added(sector, others));
    let format = match (supported(sector), foreign) {
        (Format::Raw, None) => return Ok(()),
        (Format::Raw, Some(foreign)) => foreign,
        (ours, _) => ours.name(),
    };
    Err(Error::io(
        format!(
            "Writing a {format} header into '{file}', whose format was guessed to be raw; \
             name the format to allow it"
        ),
        std::io::Error::from_raw_os_error(EPERM),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_of_vmdk_images_are_recognised_as_by_qemu() {
        for text in [
            "version=1\n",
            "version=3\r\nCID=1",
            "# comment\n \nversion=2\n",
            "#a\r\n  \r\n#\0\0\nversion=1\n",
        ] {
            assert_eq!(name(text.as_bytes()), Some("vmdk"), "{text:?}");
        }
        for text in [
            "version=4\n",
            "version=1",
            "version=1 \n",
            " version=1\n",
            "\n\nversion=1\n",
            "# version=1\n",
            " \t\nversion=1\n",
            "",
        ] {
            assert_eq!(name(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn images_of_others_are_not_raw() {
        let mut vdi = b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec();
        vdi.resize(64, 0);
        assert_eq!(probe(&vdi, "a", &[]).unwrap(), Format::Raw);
        vdi.extend([0x7f, 0x10, 0xda, 0xbe]);
        assert_eq!(name(&vdi), Some("vdi"));
        let error = probe(&vdi, "a", &[]).unwrap_err();
        assert!(
            matches!(error, Error::Unsupported { ref feature, .. } if *feature == Feature::Format("vdi".to_string()))
        );
        for (bytes, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], Format::Qcow2),
            (b"LUKS\xba\xbe\0\x01", Format::Luks),
            (b"KDM", Format::Raw),
            (b"", Format::Raw),
        ] {
            assert_eq!(probe(bytes, "a", &[]).unwrap(), format);
        }
        // The file is shorter than the disk, which a guest may make longer.
        assert!(probe(b"QED", "a", &[]).is_err());
        // Bytes beyond the first sector are not examined.
        let mut far = vec![b'#'; PROBED_BYTES as usize];
        far.extend(b"\nversion=1\n");
        assert_eq!(probe(&far, "a", &[]).unwrap(), Format::Raw);
        assert_eq!(name(b"QFI\xfb\0\0\0\x01"), Some("qcow"));
        assert_eq!(name(b"QFI\xfb\0\0\0\x02"), None);
    }

    #[test]
    fn magic_and_version_identify_the_supported_formats() {
        assert_eq!(supported(b"QFI\xfb\0\0\0\x03"), Format::Qcow2);
        assert_eq!(supported(b"QFI\xfb\0\0\0\x01"), Format::Raw);
        assert_eq!(supported(b"QFI\xfb"), Format::Raw);
        assert_eq!(supported(b""), Format::Raw);
    }

    #[test]
    fn added_formats_are_found_behind_the_built_in_ones_and_guarded() {
        let toy = Signature {
            name: "toy",
            matches: |sector| sector.starts_with(b"TOY") || sector.starts_with(b"QFI"),
        };
        assert_eq!(probe(b"TOY", "a", &[toy]).unwrap(), Format::Other("toy"));
        assert_eq!(probe(b"TOY", "a", &[]).unwrap(), Format::Raw);
        assert_eq!(
            probe(b"QFI\xfb\0\0\0\x03", "a", &[toy]).unwrap(),
            Format::Qcow2
        );
        assert!(check_stays_raw(b"TOY", "a", &[]).is_ok());
        let refused = check_stays_raw(b"TOY", "a", &[toy]).unwrap_err();
        assert!(refused.to_string().contains("a toy header"), "{refused}");
    }
}
