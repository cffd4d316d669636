//! Descriptions that callers fill in: how to open, what to make. Each begins with its size: a
//! caller built against an older header has a shorter one, whose missing end is zero.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use cowslip::Error;
use cowslip::file::host::BackingPolicy;
use cowslip::image::DiscardPolicy;
use cowslip::luks::Passphrase;
use cowslip::qcow2::create::Preallocation;
use cowslip_embed::{Naming, NewImage, OpenRequest, Opener};
use cowslip_nodes::CacheMode;

use crate::constants::{
    CREATE_EXTENDED_L2, CREATE_PREALLOCATE, CREATE_REPLACE, OPEN_DIRECT, OPEN_DISCARD,
    OPEN_FORCE_SHARE, OPEN_UNSAFE, OPEN_WRITABLE, OPEN_WRITETHROUGH,
};
use crate::{constants, pointer};

/// A description that begins with its size.
///
/// # Safety
/// It is plain data with the size, a `u32`, first, and all zeroes is a valid value.
unsafe trait Sized32: Copy {
    const NAME: &'static str;
}

/// Reads a description, as much of it as the caller has.
///
/// # Safety
/// `pointer` is null, or valid for reads of as many bytes as its first four say.
unsafe fn read<T: Sized32>(pointer: *const T) -> Result<T, Error> {
    let mut whole = MaybeUninit::<T>::zeroed();
    if !pointer.is_null() {
        // SAFETY: the size comes first, and may be read.
        let bytes = unsafe { pointer.cast::<u32>().read() } as usize;
        let wrong = |words: &str| Err(Error::Invalid(format!("{}: {words}", T::NAME)));
        if bytes < size_of::<u32>() {
            return wrong("its size is not set");
        }
        if bytes > size_of::<T>() {
            // SAFETY: the bytes behind what is known may be read, too.
            let beyond =
                (size_of::<T>()..bytes).map(|at| unsafe { pointer.cast::<u8>().add(at).read() });
            if beyond.into_iter().any(|byte| byte != 0) {
                return wrong("it has fields of a later version");
            }
        }
        let known = bytes.min(size_of::<T>());
        // SAFETY: both are valid for that number of bytes, and do not overlap.
        unsafe {
            whole
                .as_mut_ptr()
                .cast::<u8>()
                .copy_from(pointer.cast(), known)
        };
    }
    // SAFETY: all zeroes is a value, and what the caller has written is one.
    Ok(unsafe { whole.assume_init() })
}

/// A file to open, as its callback sees it.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_naming {
    /// Its name, during the call.
    pub name: *const c_char,
    /// Not 0 if it is to be written.
    pub writable: c_int,
    /// Not 0 if the name stands in an image.
    pub by_image: c_int,
}

/// Opens a file: a descriptor that the library closes, or a negative errno.
type OpenFile = unsafe extern "C" fn(user: *mut c_void, naming: *const cowslip_naming) -> c_int;

/// How an image is opened; see the header.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_open_options {
    /// Bytes of this description.
    pub size: u32,
    /// `COWSLIP_OPEN_…`.
    pub flags: u32,
    /// `COWSLIP_BACKING_…`.
    pub backing: u32,
    /// Zero.
    pub reserved: u32,
    /// Name of the format, or null.
    pub format: *const c_char,
    /// Passphrase, or null.
    pub passphrase: *const c_char,
    /// Opens files, or null.
    pub open_file: Option<OpenFile>,
    /// First argument of `open_file`.
    pub user: *mut c_void,
}

// SAFETY: the size is first, and zeroes are null pointers and no flags.
unsafe impl Sized32 for cowslip_open_options {
    const NAME: &'static str = "cowslip_open_options";
}

/// A callback of C, and its first argument.
struct Callback {
    open_file: OpenFile,
    user: *mut c_void,
}

// SAFETY: the header demands that it may be called from any thread.
unsafe impl Send for Callback {}
// SAFETY: as above; calls may overlap.
unsafe impl Sync for Callback {}

impl Opener for Callback {
    fn open(&self, naming: &Naming<'_>) -> std::io::Result<OwnedFd> {
        let name = std::ffi::CString::new(naming.name)?;
        let naming = cowslip_naming {
            name: name.as_ptr(),
            writable: c_int::from(naming.writable),
            by_image: c_int::from(naming.by_image),
        };
        // SAFETY: the header demands that it may be called with what came with it.
        let outcome = unsafe { (self.open_file)(self.user, &raw const naming) };
        if outcome < 0 {
            return Err(std::io::Error::from_raw_os_error(-outcome));
        }
        // SAFETY: the header demands that it gives an open descriptor away.
        Ok(unsafe { OwnedFd::from_raw_fd(outcome) })
    }
}

/// How to open, by the caller's description; null has all defaults.
///
/// # Errors
/// Flags that there are not, or that do not go together; a text that is not UTF-8.
///
/// # Safety
/// `options` is null or a description as the header has it.
pub unsafe fn open_request(options: *const cowslip_open_options) -> Result<OpenRequest, Error> {
    // SAFETY: the caller's promise.
    let options = unsafe { read_open(options) }?;
    let known = (OPEN_FORCE_SHARE << 1) - 1;
    if options.flags & !known != 0 || options.reserved != 0 {
        return Err(Error::Invalid("unknown flags".to_string()));
    }
    let has = |flag: u32| options.flags & flag != 0;
    let cache = match (has(OPEN_DIRECT), has(OPEN_WRITETHROUGH), has(OPEN_UNSAFE)) {
        (false, false, false) => CacheMode::Writeback,
        (true, false, false) => CacheMode::None,
        (false, true, false) => CacheMode::Writethrough,
        (true, true, false) => CacheMode::DirectSync,
        (false, false, true) => CacheMode::Unsafe,
        _ => {
            return Err(Error::Invalid(
                "UNSAFE goes with no other cache flag".to_string(),
            ));
        }
    };
    let policy = match options.backing {
        constants::BACKING_ANY => BackingPolicy::Any,
        constants::BACKING_SAME_DIRECTORY => BackingPolicy::SameDirectory,
        constants::BACKING_NONE => BackingPolicy::None,
        other => return Err(Error::Invalid(format!("no backing policy {other}"))),
    };
    // SAFETY: the caller's promise.
    let format = unsafe { pointer::optional_text(options.format, "format") }?;
    // SAFETY: the caller's promise.
    let passphrase = unsafe { pointer::optional_text(options.passphrase, "passphrase") }?;
    let user = options.user;
    let opener = options.open_file.map(|open_file| {
        let callback: Arc<dyn Opener> = Arc::new(Callback { open_file, user });
        callback
    });
    Ok(OpenRequest {
        format: format.map(str::to_string),
        writable: has(OPEN_WRITABLE),
        cache,
        discard: match has(OPEN_DISCARD) {
            true => DiscardPolicy::Unmap,
            false => DiscardPolicy::default(),
        },
        force_share: has(OPEN_FORCE_SHARE),
        policy,
        passphrase: passphrase.map(|text| Passphrase::new(text.as_bytes().to_vec())),
        opener,
    })
}

/// # Safety
/// As of [`open_request`].
unsafe fn read_open(options: *const cowslip_open_options) -> Result<cowslip_open_options, Error> {
    // SAFETY: the caller's promise.
    unsafe { read(options) }
}

/// Description of a new image; see the header.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_create_options {
    /// Bytes of this description.
    pub size: u32,
    /// `COWSLIP_CREATE_…`.
    pub flags: u32,
    /// Bytes of the disk; 0 with a backing file is that one's.
    pub disk_size: u64,
    /// Bytes of a cluster; 0 is the default.
    pub cluster_size: u64,
    /// `qcow2` or `raw`; null is qcow2.
    pub format: *const c_char,
    /// Name of the backing file, or null.
    pub backing_file: *const c_char,
    /// Its format; needed with a backing file.
    pub backing_format: *const c_char,
}

// SAFETY: the size is first, and zeroes are null pointers and no flags.
unsafe impl Sized32 for cowslip_create_options {
    const NAME: &'static str = "cowslip_create_options";
}

/// The image that the caller's description is of.
///
/// # Errors
/// As of [`open_request`]; a backing file without its format.
///
/// # Safety
/// `options` is null or a description as the header has it.
pub unsafe fn new_image(options: *const cowslip_create_options) -> Result<NewImage, Error> {
    // SAFETY: the caller's promise.
    let options = unsafe { read(options) }?;
    let known = CREATE_EXTENDED_L2 | CREATE_REPLACE | CREATE_PREALLOCATE;
    if options.flags & !known != 0 {
        return Err(Error::Invalid("unknown flags".to_string()));
    }
    let text = |pointer, name| {
        // SAFETY: the caller's promise.
        let text = unsafe { pointer::optional_text(pointer, name) };
        text.map(|text| text.map(str::to_string))
    };
    let mut image = NewImage::qcow2(options.disk_size);
    if let Some(format) = text(options.format, "format")? {
        image.format = format;
    }
    image.options.backing_file = text(options.backing_file, "backing_file")?;
    image.options.backing_format = text(options.backing_format, "backing_format")?;
    if image.options.backing_file.is_some() != image.options.backing_format.is_some() {
        let words = "a backing file and its format are named together";
        return Err(Error::Invalid(words.to_string()));
    }
    if options.cluster_size != 0 {
        image.options.cluster_size = options.cluster_size;
    }
    image.options.extended_l2 = options.flags & CREATE_EXTENDED_L2 != 0;
    image.exclusive = options.flags & CREATE_REPLACE == 0;
    if options.flags & CREATE_PREALLOCATE != 0 {
        image.options.preallocation = Preallocation::Falloc;
    }
    Ok(image)
}
