//! Ceph's libraries as safe types: a cluster, a pool and an image are each closed once, after all
//! that came out of them; a request owns its memory until librbd has let go of it.
//!
//! The functions are those of `rados/librados.h` and `rbd/librbd.h`, by their names there. Both
//! libraries may be called from any thread at once, and call back on threads of their own.
#![allow(unsafe_code)] // The border to C: each block says what of the libraries' promises it needs.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use cowslip_queue::{Buf, BufMut};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::closing::{self, Counted};

/// An object of the libraries, of which only they know more.
type Handle = *mut c_void;
/// Called at the end of a request, with its completion and its argument.
type Ended = unsafe extern "C" fn(Handle, *mut c_void);
/// Called for each range of a difference: its offset, length, whether it exists, the argument.
type Differs = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// A table of functions of the two libraries, all of which have to be there.
macro_rules! functions {
    ($($library:ident: $name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// Finds them.
            ///
            /// # Safety
            /// The libraries are Ceph's, or have the same functions of the same types.
            unsafe fn of(rados: &Library, rbd: &Library) -> Result<Functions, libloading::Error> {
                Ok(Functions {
                    $($name: {
                        let library = functions!(@of $library rados rbd);
                        // SAFETY: the caller's promise: the type is that of the header.
                        *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?
                    },)*
                })
            }
        }
    };
    (@of rados $rados:ident $rbd:ident) => { $rados };
    (@of rbd $rados:ident $rbd:ident) => { $rbd };
}

functions! {
    rados: rados_create(*mut Handle, *const c_char) -> c_int;
    rados: rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados: rados_conf_parse_env(Handle, *const c_char) -> c_int;
    rados: rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados: rados_connect(Handle) -> c_int;
    rados: rados_shutdown(Handle);
    rados: rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados: rados_ioctx_set_namespace(Handle, *const c_char);
    rados: rados_ioctx_destroy(Handle);
    rbd: rbd_create(Handle, *const c_char, u64, *mut c_int) -> c_int;
    rbd: rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: rbd_close(Handle) -> c_int;
    rbd: rbd_snap_set(Handle, *const c_char) -> c_int;
    rbd: rbd_stat(Handle, *mut Info, usize) -> c_int;
    rbd: rbd_get_stripe_count(Handle, *mut u64) -> c_int;
    rbd: rbd_get_overlap(Handle, *mut u64) -> c_int;
    rbd: rbd_resize(Handle, u64) -> c_int;
    rbd: rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, Differs, *mut c_void) -> c_int;
    rbd: rbd_aio_create_completion(*mut c_void, Ended, *mut Handle) -> c_int;
    rbd: rbd_aio_get_return_value(Handle) -> isize;
    rbd: rbd_aio_release(Handle);
    rbd: rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd: rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd: rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd: rbd_aio_flush(Handle, Handle) -> c_int;
}

/// Image, offset, length, completion, [`THICK`] or 0, hints.
type WriteZeroes = unsafe extern "C" fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int;

/// The flag of a write of zeroes that keeps space allocated.
const THICK: c_int = 1;

/// `rbd_image_info_t`.
#[repr(C)]
struct Info {
    size: u64,
    object_size: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

/// A negative number that Ceph has answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

impl Code {
    pub(crate) const NOT_FOUND: Code = Code(-libc::ENOENT);
    pub(crate) const NOT_PERMITTED: Code = Code(-libc::EPERM);
    pub(crate) const DENIED: Code = Code(-libc::EACCES);
    pub(crate) const INVALID: Code = Code(-libc::EINVAL);
    pub(crate) const EXISTS: Code = Code(-libc::EEXIST);
    pub(crate) const NO_THREAD: Code = Code(-libc::EAGAIN);
    pub(crate) const TIMED_OUT: Code = Code(-libc::ETIMEDOUT);

    fn of(answer: c_int) -> Result<(), Code> {
        match answer < 0 {
            true => Err(Code(answer)),
            false => Ok(()),
        }
    }
}

impl From<Code> for io::Error {
    fn from(code: Code) -> io::Error {
        io::Error::from_raw_os_error(-code.0)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = cowslip_block::error::system_words(&io::Error::from(*self));
        write!(f, "{}, {words}", self.0)
    }
}

/// Ceph's libraries, which stay loaded for good: their threads may run at any time.
pub struct Ceph {
    functions: Functions,
    /// Since Ceph 16.
    write_zeroes: Option<WriteZeroes>,
}

cowslip_block::debug_by_name!(Ceph);

/// The library of clusters, below that of images.
const RADOS: &str = "librados.so.2";
/// The library of images.
const RBD: &str = "librbd.so.1";

impl Ceph {
    /// Loads the libraries from a directory, or from where the system has them.
    ///
    /// # Errors
    /// Text of the reason.
    pub fn load(directory: Option<&Path>) -> Result<Arc<Ceph>, String> {
        let open = |name: &str| {
            let path = directory.map_or_else(|| name.into(), |directory| directory.join(name));
            // SAFETY: what runs at loading is Ceph's own, or of a directory that the user names.
            let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
            library.map_err(|error| error.to_string())
        };
        let (rados, rbd) = (open(RADOS)?, open(RBD)?);
        // SAFETY: libraries of these names have the functions of these headers.
        let functions =
            unsafe { Functions::of(&rados, &rbd) }.map_err(|error| error.to_string())?;
        // SAFETY: as above.
        let write_zeroes = unsafe { rbd.get::<WriteZeroes>(b"rbd_aio_write_zeroes\0") };
        let write_zeroes = write_zeroes.ok().map(|function| *function);
        // The functions are good for as long as the libraries stay: for good.
        std::mem::forget((rados, rbd));
        Ok(Arc::new(Ceph {
            functions,
            write_zeroes,
        }))
    }
}

/// Has no signal delivered to this thread, nor to those that it starts.
pub(crate) fn block_signals() {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises the set that it is given; the mask before is not asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), null_mut());
    }
}

/// Ends the process without what a process does at its end, which Ceph's threads might disturb.
pub(crate) fn end_process(code: u8) -> ! {
    // SAFETY: the call does not return, and needs nothing.
    unsafe { libc::_exit(code.into()) }
}

/// A cluster; connected, or about to be.
pub(crate) struct Cluster {
    ceph: Arc<Ceph>,
    handle: NonNull<c_void>,
}

// SAFETY: the libraries' handles may be used by any thread, by several at once.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// A cluster as this user, `client.admin` if none is said.
    pub(crate) fn new(ceph: &Arc<Ceph>, user: Option<&CStr>) -> Result<Cluster, Code> {
        let mut handle = null_mut();
        let user = user.map_or(null(), CStr::as_ptr);
        // SAFETY: a place for the handle, and a string or null.
        Code::of(unsafe { (ceph.functions.rados_create)(&raw mut handle, user) })?;
        Ok(Cluster {
            ceph: Arc::clone(ceph),
            handle: NonNull::new(handle).ok_or(Code::INVALID)?,
        })
    }

    /// Reads a file of settings; those at the usual places if none is named.
    pub(crate) fn read_file(&self, path: Option<&CStr>) -> Result<(), Code> {
        let path = path.map_or(null(), CStr::as_ptr);
        // SAFETY: the handle is open, and this a string or null.
        Code::of(unsafe { (self.ceph.functions.rados_conf_read_file)(self.handle.as_ptr(), path) })
    }

    /// Reads the settings in `CEPH_ARGS`.
    pub(crate) fn read_environment(&self) -> Result<(), Code> {
        let (functions, handle) = (&self.ceph.functions, self.handle.as_ptr());
        // SAFETY: the handle is open, and null stands for the usual variable.
        Code::of(unsafe { (functions.rados_conf_parse_env)(handle, null()) })
    }

    /// Changes a setting.
    pub(crate) fn set(&self, name: &CStr, value: &CStr) -> Result<(), Code> {
        let (name, value) = (name.as_ptr(), value.as_ptr());
        // SAFETY: the handle is open, and these are strings.
        Code::of(unsafe { (self.ceph.functions.rados_conf_set)(self.handle.as_ptr(), name, value) })
    }

    /// Connects; waits.
    pub(crate) fn connect(&self) -> Result<(), Code> {
        // SAFETY: the handle is open.
        Code::of(unsafe { (self.ceph.functions.rados_connect)(self.handle.as_ptr()) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and nothing that came out of it is left.
        unsafe { (self.ceph.functions.rados_shutdown)(self.handle.as_ptr()) };
    }
}

/// A pool of a connected cluster, or a namespace in it.
pub(crate) struct Pool {
    io: NonNull<c_void>,
    // Dropped last.
    cluster: Cluster,
}

// SAFETY: as of `Cluster`.
unsafe impl Send for Pool {}
// SAFETY: as of `Cluster`.
unsafe impl Sync for Pool {}

impl Pool {
    pub(crate) fn open(
        cluster: Cluster,
        name: &CStr,
        namespace: Option<&CStr>,
    ) -> Result<Pool, Code> {
        let (mut io, functions) = (null_mut(), &cluster.ceph.functions);
        let handle = cluster.handle.as_ptr();
        // SAFETY: the cluster is connected; a string, and a place for the handle.
        Code::of(unsafe { (functions.rados_ioctx_create)(handle, name.as_ptr(), &raw mut io) })?;
        let io = NonNull::new(io).ok_or(Code::INVALID)?;
        if let Some(namespace) = namespace {
            // SAFETY: the pool is open, and this is a string.
            unsafe { (functions.rados_ioctx_set_namespace)(io.as_ptr(), namespace.as_ptr()) };
        }
        Ok(Pool { io, cluster })
    }

    fn functions(&self) -> &Functions {
        &self.cluster.ceph.functions
    }

    /// Makes an image of no bytes, with the cluster's usual features and sizes; waits.
    pub(crate) fn create(&self, name: &CStr) -> Result<(), Code> {
        let mut order = 0;
        // SAFETY: the pool is open; a string, and a place for the size of objects.
        Code::of(unsafe {
            (self.functions().rbd_create)(self.io.as_ptr(), name.as_ptr(), 0, &raw mut order)
        })
    }

    /// Opens an image; waits. Of the pool, what is needed comes back with a failure.
    pub(crate) fn open_image(
        self,
        name: &CStr,
        writable: bool,
    ) -> Result<Image, (Code, Box<Pool>)> {
        let mut image = null_mut();
        let functions = self.functions();
        let open = match writable {
            true => functions.rbd_open,
            false => functions.rbd_open_read_only,
        };
        // SAFETY: the pool is open; strings or null, and a place for the handle.
        let answer = unsafe { open(self.io.as_ptr(), name.as_ptr(), &raw mut image, null()) };
        match (Code::of(answer), NonNull::new(image)) {
            (Ok(()), Some(image)) => Ok(Image { image, pool: self }),
            (Ok(()), None) => Err((Code::INVALID, Box::new(self))),
            (Err(code), _) => Err((code, Box::new(self))),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the pool is open, and no image of it.
        unsafe { (self.functions().rados_ioctx_destroy)(self.io.as_ptr()) };
    }
}

/// An image that is open, with its pool and its connection. To drop it may wait.
pub(crate) struct Image {
    image: NonNull<c_void>,
    // Dropped last.
    pool: Pool,
}

// SAFETY: as of `Cluster`.
unsafe impl Send for Image {}
// SAFETY: as of `Cluster`.
unsafe impl Sync for Image {}

impl Drop for Image {
    fn drop(&mut self) {
        // What was not flushed is lost with an error that nobody can do anything about any more.
        // SAFETY: the image is open, and no request is under way: each has its `OpenImage`.
        unsafe { (self.pool.functions().rbd_close)(self.image.as_ptr()) };
    }
}

/// The shape of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Its length.
    pub(crate) bytes: u64,
    /// Length of the objects that it is stored in.
    pub(crate) object_bytes: u64,
    /// Objects that are filled in turn.
    pub(crate) stripe_count: u64,
    /// Bytes at its beginning that another image shows where it has none itself.
    pub(crate) overlap_bytes: u64,
}

impl Image {
    fn functions(&self) -> &Functions {
        self.pool.functions()
    }

    /// Shows a snapshot from now on; waits.
    pub(crate) fn show_snapshot(&self, name: &CStr) -> Result<(), Code> {
        // SAFETY: the image is open, and this is a string.
        Code::of(unsafe { (self.functions().rbd_snap_set)(self.image.as_ptr(), name.as_ptr()) })
    }

    /// Its shape; may wait.
    pub(crate) fn shape(&self) -> Result<Shape, Code> {
        let (functions, image) = (self.functions(), self.image.as_ptr());
        let mut info = MaybeUninit::<Info>::zeroed();
        let (mut stripe_count, mut overlap_bytes) = (1, 0);
        // SAFETY: the image is open, and each place has the type, and the length, that is said.
        let info = unsafe {
            Code::of((functions.rbd_stat)(
                image,
                info.as_mut_ptr(),
                size_of::<Info>(),
            ))?;
            Code::of((functions.rbd_get_stripe_count)(
                image,
                &raw mut stripe_count,
            ))?;
            Code::of((functions.rbd_get_overlap)(image, &raw mut overlap_bytes))?;
            info.assume_init()
        };
        Ok(Shape {
            bytes: info.size,
            object_bytes: info.object_size.max(1),
            stripe_count: stripe_count.max(1),
            overlap_bytes,
        })
    }

    /// Changes its length; waits.
    pub(crate) fn resize(&self, bytes: u64) -> Result<(), Code> {
        // SAFETY: the image is open.
        Code::of(unsafe { (self.functions().rbd_resize)(self.image.as_ptr(), bytes) })
    }

    /// Calls `found` with offset and length of each part of a range that objects exist for, in
    /// order, until it says no more; waits.
    pub(crate) fn data(
        &self,
        offset: u64,
        len: u64,
        mut found: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<(), Code> {
        unsafe extern "C" fn differs(
            offset: u64,
            len: usize,
            exists: c_int,
            found: *mut c_void,
        ) -> c_int {
            // SAFETY: the argument of the call below, which has not returned.
            let found = unsafe { &mut *found.cast::<&mut dyn FnMut(u64, u64) -> bool>() };
            match exists == 0 || found(offset, len as u64) {
                true => 0,
                false => ENOUGH,
            }
        }
        /// Says to librbd that the rest is not wanted.
        const ENOUGH: c_int = -libc::ECANCELED;

        let argument = (&raw mut found).cast::<c_void>();
        // SAFETY: the image is open, null stands for its beginning, and the function gets its own
        // argument, during this call alone.
        let answer = unsafe {
            (self.functions().rbd_diff_iterate2)(
                self.image.as_ptr(),
                null(),
                offset,
                len,
                1,
                1,
                differs,
                argument,
            )
        };
        match answer {
            ENOUGH => Ok(()),
            answer => Code::of(answer),
        }
    }
}

/// An image for requests. It is closed on a thread of its own, after the last one.
pub(crate) struct OpenImage(Option<(Image, Counted)>);

/// The answer of a request: bytes that were read, or 0.
pub(crate) type Answer = Result<usize, Code>;

/// Memory of a request.
pub(crate) enum Memory {
    None,
    Read(BufMut),
    Write(Buf),
}

/// A request that librbd has.
struct Request {
    image: Arc<OpenImage>,
    memory: Memory,
    ended: Box<dyn FnOnce(Answer, Memory) + Send>,
}

impl Request {
    fn end(self, answer: Answer) {
        (self.ended)(answer, self.memory);
        // The image may be closed from here on, and this thread is Ceph's.
        drop(self.image);
    }
}

/// The operation of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Read,
    Write,
    /// Makes a range zero; whether its space stays allocated.
    Zero {
        keeps_space: bool,
    },
    Discard,
    Flush,
}

impl OpenImage {
    pub(crate) fn new(image: Image, counted: Counted) -> Arc<OpenImage> {
        Arc::new(OpenImage(Some((image, counted))))
    }

    /// Whether a range can be made zero in one request.
    pub(crate) fn writes_zeroes(&self) -> bool {
        self.image().pool.cluster.ceph.write_zeroes.is_some()
    }

    /// The image itself.
    pub(crate) fn image(&self) -> &Image {
        let (image, _) = self.0.as_ref().expect("it is taken when this is dropped");
        image
    }

    /// Begins a request for a range. `ended` is called once, on a thread of librbd's, or on this
    /// one if the request is refused.
    ///
    /// # Panics
    /// If the memory is not of the length of the range, or is none where there is to be one.
    pub(crate) fn start(
        self: &Arc<OpenImage>,
        operation: Operation,
        (offset, len): (u64, u64),
        memory: Memory,
        ended: Box<dyn FnOnce(Answer, Memory) + Send>,
    ) {
        let mut request = Box::new(Request {
            image: Arc::clone(self),
            memory,
            ended,
        });
        let (to, from): (*mut u8, *const u8) = match (&mut request.memory, operation) {
            (Memory::Read(buf), Operation::Read) if buf.len() as u64 == len => {
                (buf.as_mut_ptr(), null())
            }
            (Memory::Write(buf), Operation::Write) if buf.len() as u64 == len => {
                (null_mut(), buf.as_ptr())
            }
            (Memory::None, Operation::Read | Operation::Write) => {
                panic!("a read or write has memory")
            }
            (Memory::None, _) => (null_mut(), null()),
            _ => panic!("memory is of the length of its request"),
        };
        let functions = self.image().functions();
        let request = Box::into_raw(request);
        let mut completion = null_mut();
        // SAFETY: the function gets its own argument, once: it takes the request back.
        let made = unsafe {
            (functions.rbd_aio_create_completion)(
                request.cast(),
                ended_on_its_thread,
                &raw mut completion,
            )
        };
        let begun = Code::of(made).and_then(|()| {
            // SAFETY: the image is open, the completion made for this request, and the memory is
            // the request's, which lives until it has ended: nobody else writes it, and of memory
            // that is read into nobody else reads.
            let answer = unsafe { self.begin(operation, (offset, len), (to, from), completion) };
            if answer < 0 {
                // SAFETY: a request that is refused does not end, so its completion is not used.
                unsafe { (functions.rbd_aio_release)(completion) };
            }
            Code::of(answer)
        });
        if let Err(code) = begun {
            // SAFETY: the request was refused: nobody else has it.
            let request = unsafe { Box::from_raw(request) };
            request.end(Err(code));
        }
    }

    /// Calls the function of an operation.
    ///
    /// # Safety
    /// The memory is of the length of the range, and stays until the completion has ended, which is
    /// used for nothing else.
    unsafe fn begin(
        &self,
        operation: Operation,
        (offset, len): (u64, u64),
        (to, from): (*mut u8, *const u8),
        completion: Handle,
    ) -> c_int {
        let (functions, image) = (self.image().functions(), self.image().image.as_ptr());
        let bytes = len as usize;
        // SAFETY: the image is open, and the caller promises the rest.
        unsafe {
            match operation {
                Operation::Read => {
                    (functions.rbd_aio_read)(image, offset, bytes, to.cast(), completion)
                }
                Operation::Write => {
                    (functions.rbd_aio_write)(image, offset, bytes, from.cast(), completion)
                }
                Operation::Zero { keeps_space } => {
                    let Some(write_zeroes) = self.image().pool.cluster.ceph.write_zeroes else {
                        return -libc::EOPNOTSUPP;
                    };
                    let flags = if keeps_space { THICK } else { 0 };
                    write_zeroes(image, offset, bytes, completion, flags, 0)
                }
                Operation::Discard => (functions.rbd_aio_discard)(image, offset, len, completion),
                Operation::Flush => (functions.rbd_aio_flush)(image, completion),
            }
        }
    }
}

/// The end of a request, on a thread of librbd's.
unsafe extern "C" fn ended_on_its_thread(completion: Handle, request: *mut c_void) {
    // SAFETY: the argument is the request of this completion, which ends once.
    let request = unsafe { Box::from_raw(request.cast::<Request>()) };
    let functions = request.image.image().functions();
    // SAFETY: the completion has ended, and is not used any more after this.
    let answer = unsafe {
        let answer = (functions.rbd_aio_get_return_value)(completion);
        (functions.rbd_aio_release)(completion);
        answer
    };
    request.end(match usize::try_from(answer) {
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(Code(answer as c_int)),
    });
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        if let Some((image, counted)) = self.0.take() {
            closing::close(image, counted);
        }
    }
}
