//! First bytes of images of all formats, which a guest could write to a disk whose format is
//! guessed.

/// How images begin: where, and with what.
pub const HEADERS: &[(usize, &[u8])] = &[
    (0, b"QFI\xfb\0\0\0\x02"),
    (0, b"QFI\xfb\0\0\0\x03"),
    (0, b"QFI\xfb\0\0\0\x01"),
    (0, b"LUKS\xba\xbe\0\x01"),
    (0, b"QED\0"),
    (0, b"KDMV"),
    (0, b"COWD"),
    (0, b"version=1\n"),
    (0, b"version=3\r\n"),
    (0, b"# Disk DescriptorFile"),
    (64, b"\x7f\x10\xda\xbe"),
    (0, b"vhdxfile"),
    (0, b"conectix"),
    (0, b"WithoutFreeSpace"),
    (0, b"WithouFreSpacExt"),
    (0, b"#!/bin/sh\n#V2.0 Format\n"),
    (0, b"Bochs Virtual HD Image"),
];
