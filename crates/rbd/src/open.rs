//! Opening an image: on a thread of its own, for a bounded time, with words for what Ceph says.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cowslip_block::error::{Opening, system_words};
use cowslip_block::{Error, Result};
use cowslip_queue::pending;

use crate::closing::Counted;
use crate::ffi::{self, Ceph, Cluster, Code, Image, OpenImage, Pool, Shape};
use crate::file::RbdFile;
use crate::name::RbdName;
use crate::under_way;

/// Names the directory of the libraries, where the system's are not meant.
pub const LIBRARIES: &str = "COWSLIP_RBD_LIBRARIES";

/// Time to open an image, where none is said.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time between two looks whether the program was asked to end.
const LOOK: Duration = Duration::from_millis(100);

/// Use of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only.
    Read,
    /// Reads and writes.
    Write,
    /// Reads and writes; the image is made if there is none.
    Create,
}

/// Settings with which an image is opened.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// The name that users know it by.
    pub shown: &'a str,
    /// Use of it.
    pub access: Access,
    /// Whether librbd may keep data in memory, until a flush.
    pub cached: bool,
    /// The user's key, if a secret has it.
    pub key: Option<String>,
    /// Time that requests wait for the cluster, if its name does not say it.
    pub wait_timeout: Option<Duration>,
}

/// The libraries, from where `COWSLIP_RBD_LIBRARIES` says or the system has them; loaded once.
///
/// # Errors
/// Text of the reason, and the remedy.
fn libraries() -> std::result::Result<Arc<Ceph>, String> {
    static LOADED: Mutex<Option<Arc<Ceph>>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ceph) = &*loaded {
        return Ok(Arc::clone(ceph));
    }
    if cfg!(target_feature = "crt-static") {
        return Err("this program is linked statically, and loads no libraries".to_string());
    }
    let directory = std::env::var_os(LIBRARIES);
    let ceph = Ceph::load(directory.as_deref().map(Path::new))
        .map_err(|why| format!("Ceph's library cannot be loaded: {why}; install librbd1"))?;
    *loaded = Some(Arc::clone(&ceph));
    Ok(ceph)
}

/// Opens an image with the libraries of the system.
///
/// # Errors
/// The libraries are not there; the cluster, pool, image or snapshot cannot be reached or found.
pub async fn open(name: &RbdName, settings: Settings<'_>) -> Result<Arc<RbdFile>> {
    open_by(None, name, settings).await
}

/// Opens an image with these libraries, or those of the system.
///
/// # Errors
/// As [`open()`].
pub async fn open_by(
    ceph: Option<Arc<Ceph>>,
    name: &RbdName,
    settings: Settings<'_>,
) -> Result<Arc<RbdFile>> {
    if settings.access != Access::Read
        && let Some(snapshot) = &name.snapshot
    {
        return Err(failed(
            settings.shown,
            format!("the snapshot '{snapshot}' cannot be written"),
        ));
    }
    let way = Way {
        name: name.clone(),
        access: settings.access,
        cached: settings.cached,
        key: settings.key,
        wait: name.wait_timeout.or(settings.wait_timeout),
    };
    let limit = way.limit();
    let (to, opened) = pending();
    let begun = within(
        limit,
        move || way.open(ceph),
        move |opened| to.complete(opened),
    );
    begun.map_err(|error| {
        let words = system_words(&error);
        failed(settings.shown, format!("Could not start a thread: {words}"))
    })?;
    let Some(opened) = opened.await else {
        let (pool, image) = name.place();
        if under_way::is_ending() {
            let text = format!(
                "Ceph has not opened image '{image}' of pool '{pool}' before the program was asked \
                 to end"
            );
            return Err(failed(settings.shown, text));
        }
        let seconds = limit.as_secs();
        let text = format!(
            "Ceph has not opened image '{image}' of pool '{pool}' within {seconds} seconds: are its \
             monitors and OSDs up, and reachable from here?"
        );
        return Err(failed(settings.shown, text));
    };
    let (image, shape) = opened.map_err(|why| failed(settings.shown, why))?;
    let writable = settings.access != Access::Read;
    let file = RbdFile::new((settings.shown, name.storage()), image, shape, writable);
    Ok(Arc::new(file))
}

fn failed(shown: &str, why: String) -> Error {
    Error::Opening {
        what: Opening::Named(shown.to_string()),
        why,
        cause: None,
    }
}

/// Does a job on a thread of its own, and ends with what it makes, or `None` after a time. What
/// comes later is dropped there.
fn within<T: Send + 'static>(
    limit: Duration,
    job: impl FnOnce() -> T + Send + 'static,
    ended: impl FnOnce(Option<T>) + Send + 'static,
) -> std::io::Result<()> {
    let (to, from) = mpsc::sync_channel(1);
    let thread = |name: &str| thread::Builder::new().name(name.to_string());
    // Ceph's threads are started here: signals are for others.
    thread("cowslip-rbd-open").spawn(move || {
        ffi::block_signals();
        drop(to.send(job()));
    })?;
    thread("cowslip-rbd-wait").spawn(move || {
        ffi::block_signals();
        ended(receive(&from, limit));
    })?;
    Ok(())
}

/// The message that comes within a time; when the program was asked to end, within a shorter one.
fn receive<T>(from: &Receiver<T>, limit: Duration) -> Option<T> {
    let (begun, mut ending) = (Instant::now(), None);
    loop {
        match from.recv_timeout(LOOK.min(limit)) {
            Ok(made) => return Some(made),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if under_way::is_ending() {
            ending.get_or_insert_with(Instant::now);
        }
        let is_over = begun.elapsed() >= limit;
        if is_over || ending.is_some_and(|since| since.elapsed() >= under_way::GRACE) {
            return None;
        }
    }
}

/// Everything that an image is opened by.
struct Way {
    name: RbdName,
    access: Access,
    cached: bool,
    key: Option<String>,
    wait: Option<Duration>,
}

/// A text for C; names have no zero bytes.
fn text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

impl Way {
    fn limit(&self) -> Duration {
        self.wait.unwrap_or(PATIENCE)
    }

    fn open(self, ceph: Option<Arc<Ceph>>) -> std::result::Result<(Arc<OpenImage>, Shape), String> {
        // Until the end, also if nobody waits for it any more.
        let counted = Counted::new();
        let (pool, image) = self.name.place();
        let ceph = match ceph {
            Some(ceph) => ceph,
            None => libraries().map_err(|why| {
                format!("{why}, or map it as a block device: rbd device map {pool}/{image}")
            })?,
        };
        let cluster = self.connect(&ceph)?;
        let namespace = text(&self.name.namespace);
        let namespace = (!self.name.namespace.is_empty()).then_some(namespace.as_c_str());
        let opened = Pool::open(cluster, &text(&self.name.pool), namespace);
        let opened = opened.map_err(|code| match code {
            Code::NOT_FOUND => format!("Ceph has no pool '{}' ({code})", self.name.pool),
            Code::NOT_PERMITTED | Code::DENIED => self.denied(&format!("pool '{pool}'"), code),
            code => format!("Ceph does not open pool '{pool}' ({code})"),
        })?;
        let image = self.image(opened)?;
        if let Some(snapshot) = &self.name.snapshot {
            let shown = image.show_snapshot(&text(snapshot));
            shown.map_err(|code| {
                let (pool, image) = self.name.place();
                match code {
                    Code::NOT_FOUND => format!(
                        "image '{image}' in pool '{pool}' of Ceph has no snapshot '{snapshot}' ({code})"
                    ),
                    code => format!(
                        "Ceph does not show snapshot '{snapshot}' of image '{image}' in pool '{pool}' ({code})"
                    ),
                }
            })?;
        }
        let shape = image.shape();
        let shape = shape.map_err(|code| {
            let (pool, image) = self.name.place();
            format!("Ceph does not say the size of image '{image}' in pool '{pool}' ({code})")
        })?;
        Ok((OpenImage::new(image, counted), shape))
    }

    fn image(&self, pool: Pool) -> std::result::Result<Image, String> {
        let name = text(&self.name.image);
        let writable = self.access != Access::Read;
        let opened = pool.open_image(&name, writable).or_else(|(code, pool)| {
            if (code, self.access) != (Code::NOT_FOUND, Access::Create) {
                return Err((code, pool));
            }
            match pool.create(&name) {
                // Another may have made it meanwhile.
                Ok(()) | Err(Code::EXISTS) => pool.open_image(&name, true),
                Err(code) => Err((code, pool)),
            }
        });
        opened.map_err(|(code, _)| {
            let (pool, image) = self.name.place();
            match code {
                Code::NOT_FOUND => format!("Ceph has no image '{image}' in pool '{pool}' ({code})"),
                Code::NOT_PERMITTED | Code::DENIED => {
                    self.denied(&format!("image '{image}' in pool '{pool}'"), code)
                }
                code => format!("Ceph does not open image '{image}' in pool '{pool}' ({code})"),
            }
        })
    }

    fn denied(&self, what: &str, code: Code) -> String {
        let user = self.user();
        format!(
            "Ceph does not let client.{user} have {what} ({code}): ceph auth get client.{user} lists its rights"
        )
    }

    fn user(&self) -> &str {
        self.name.user.as_deref().unwrap_or("admin")
    }

    fn connect(&self, ceph: &Arc<Ceph>) -> std::result::Result<Cluster, String> {
        let user = self.name.user.as_deref().map(text);
        let cluster = Cluster::new(ceph, user.as_deref());
        let cluster = cluster.map_err(|code| format!("Ceph's library does not start ({code})"))?;
        match &self.name.conf {
            Some(path) => cluster
                .read_file(Some(&text(path)))
                .map_err(|code| format!("Could not read Ceph's settings in '{path}' ({code})"))?,
            // There may be none: then the name says all.
            None => drop(cluster.read_file(None)),
        }
        let environment = cluster.read_environment();
        environment.map_err(|code| format!("Ceph does not take CEPH_ARGS ({code})"))?;
        self.configure(&cluster)?;
        cluster.connect().map_err(|code| self.unconnected(code))?;
        Ok(cluster)
    }

    fn configure(&self, cluster: &Cluster) -> std::result::Result<(), String> {
        let set = |name: &CStr, value: &CStr| {
            let shown = name.to_string_lossy().into_owned();
            let set = cluster.set(name, value);
            set.map_err(|code| format!("Ceph does not take the setting '{shown}' ({code})"))
        };
        let own = |name: &CStr, seconds: u64| set(name, &text(&seconds.to_string()));
        own(c"client_mount_timeout", self.limit().as_secs())?;
        if let Some(wait) = self.wait {
            own(c"rados_mon_op_timeout", wait.as_secs())?;
            own(c"rados_osd_op_timeout", wait.as_secs())?;
        }
        set(c"rbd_cache", if self.cached { c"true" } else { c"false" })?;
        if let Some(key) = &self.key {
            set(c"key", &text(key))?;
        }
        for (name, value) in &self.name.settings {
            set(&text(name), &text(value))?;
        }
        Ok(())
    }

    fn unconnected(&self, code: Code) -> String {
        let user = self.user();
        match code {
            Code::TIMED_OUT => format!(
                "no monitor of Ceph has answered within {} seconds ({code}): is 'mon_host' in \
                 ceph.conf, or 'server', an address that is reached from here?",
                self.limit().as_secs()
            ),
            Code::NOT_PERMITTED | Code::DENIED => format!(
                "Ceph refuses client.{user} ({code}): is its key in /etc/ceph/ceph.client.{user}.keyring, \
                 or where 'keyring' or 'key-secret' says?"
            ),
            Code::NOT_FOUND | Code::INVALID => format!(
                "Ceph cannot be connected to ({code}): neither /etc/ceph/ceph.conf nor 'conf' nor \
                 'server' names its monitors, or there is no keyring of client.{user}"
            ),
            code => format!("Ceph cannot be connected to ({code})"),
        }
    }
}
