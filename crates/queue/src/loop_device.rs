//! The file behind a loop device, as the kernel knows it.
#![allow(unsafe_code)] // One system call that rustix lacks.

use std::os::fd::{AsFd, AsRawFd};

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;
/// The major number of loop devices.
const LOOP_MAJOR: u32 = 7;

/// The file behind a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The device number of the file system that has the file.
    pub device: u64,
    /// The file's inode number.
    pub inode: u64,
    /// The device number that the file is itself a node of; 0 for a regular file.
    pub rdevice: u64,
    /// First byte of the file that the device shows.
    pub offset: u64,
    /// Bytes that it shows at most; 0 is all.
    pub size_limit: u64,
}

/// The file behind a loop device; `None` for a device of another kind, or one without a file.
pub fn behind(device: impl AsFd, rdev: u64) -> Option<Behind> {
    if libc::major(rdev) != LOOP_MAJOR {
        return None;
    }
    let mut status = Status {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: the call writes one structure, laid out as the kernel's, to the address given:
    // `status`.
    let answer = unsafe { libc::ioctl(fd, LOOP_GET_STATUS64, &raw mut status) };
    (answer == 0).then_some(Behind {
        device: status.device,
        inode: status.inode,
        rdevice: status.rdevice,
        offset: status.offset,
        size_limit: status.size_limit,
    })
}

const _: () = assert!(
    size_of::<Status>() == 232,
    "the kernel's structure has 232 bytes"
);
