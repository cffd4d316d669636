//! Image formats that are recognised so that nobody takes them for raw, and not supported.
//!
//! A file whose format nobody has named is raw if it begins like no image. One that begins like an image of VMware's or
//! VirtualBox's is none of ours, but it is not raw either: as a raw disk it would show its headers to a guest, and be
//! damaged by the first write. Pure.
//!
//! Sources: "Virtual Disk Format 5.0" (VMware); "Virtual Hard Disk Image Format Specification" and "MS-VHDX" (Microsoft);
//! `docs/interop/qed_spec.rst`, `parallels.rst` and `qcow2.rst` of QEMU; the headers of the others as their makers write them.

use crate::image::Format;
use crate::qcow2::header;
use crate::{Error, Result};

/// Bytes from the beginning of a file that tell its format.
pub const PROBED_BYTES: u64 = 512;

/// How images of formats that are not supported begin: where, with what, and what QEMU calls the format.
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

/// What QEMU calls the format of a file that begins with `bytes`, if it is one that is recognised and not supported.
pub fn name(bytes: &[u8]) -> Option<&'static str> {
    let begins_so = |(at, sign, _): &&(usize, &[u8], &str)| {
        bytes.get(*at..).is_some_and(|rest| rest.starts_with(sign))
    };
    BEGINNINGS.iter().find(begins_so).map(|(_, _, name)| *name)
}

/// The format of the file of this name, which begins with `bytes`: [`PROBED_BYTES`] of them where it has so many.
///
/// # Errors
/// [`Error::Unsupported`] names the format, as `image format NAME`.
pub fn probe(bytes: &[u8], file: &str) -> Result<Format> {
    match (header::probe(bytes), name(bytes)) {
        (Format::Raw, Some(name)) => Err(Error::Unsupported {
            file: file.to_string(),
            feature: format!("image format {name}"),
        }),
        (format, _) => Ok(format),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_others_are_not_raw() {
        let mut vdi = b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec();
        vdi.resize(64, 0);
        assert_eq!(probe(&vdi, "a").unwrap(), Format::Raw);
        vdi.extend([0x7f, 0x10, 0xda, 0xbe]);
        assert_eq!(name(&vdi), Some("vdi"));
        let error = probe(&vdi, "a").unwrap_err();
        assert!(
            matches!(error, Error::Unsupported { ref feature, .. } if feature == "image format vdi")
        );
        for (bytes, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], Format::Qcow2),
            (b"LUKS\xba\xbe\0\x01", Format::Luks),
            (b"KDM", Format::Raw),
            (b"", Format::Raw),
        ] {
            assert_eq!(probe(bytes, "a").unwrap(), format);
        }
        assert_eq!(name(b"QFI\xfb\0\0\0\x01"), Some("qcow"));
        assert_eq!(name(b"QFI\xfb\0\0\0\x02"), None);
    }
}
