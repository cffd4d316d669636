//! Metadata contexts of an NBD export of a daemon: what has changed, and how deep data lies.
//!
//! | context | what it shows |
//! | --- | --- |
//! | `qemu:dirty-bitmap:NAME` | a bitmap of the node or of one below it, in memory or of its image |
//! | `qemu:allocation-depth` | the image of the chain that holds the data, now |

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cowslip::disk::DiskFuture;
use cowslip::qcow2::bitmap::{DirtyBits, DirtyRun};
use cowslip::{Disk, Image, Result};
use cowslip_exports::nbd::depth;
use cowslip_graph::{DirtyMap, LiveDisk, Marks};
use cowslip_nbd::export::{MetadataContext, StatusExtent, joined};
use cowslip_nbd::protocol::{ALLOCATION_DEPTH, AllocationFlags, DIRTY_BITMAP_NAMESPACE};
use cowslip_qmp::QmpError;
use serde_json::Value;

use super::bitmap::{Bitmap, Bits, InUse};
use super::export::ImageOf;
use super::given::Given;
use super::host::Daemon;
use super::nodes::Node;
use super::shown::Shown;

/// The state of what has changed.
const DIRTY: AllocationFlags = AllocationFlags(1);

/// A bitmap in memory.
pub struct OfMap {
    name: String,
    map: Arc<DirtyMap>,
}

/// A bitmap of an image.
struct OfImage {
    name: String,
    bitmap: String,
    image: Arc<Shown>,
    /// The bits of an image that is not written, and that image.
    read: Mutex<Option<(Weak<Image>, Arc<DirtyBits>)>>,
}

fn state(len: u64, is_dirty: bool) -> StatusExtent {
    StatusExtent {
        len,
        flags: AllocationFlags::empty().with_if(DIRTY, is_dirty),
    }
}

impl OfMap {
    /// A context of this name, without its namespace.
    pub fn new(name: &str, map: Arc<DirtyMap>) -> OfMap {
        OfMap {
            name: format!("{DIRTY_BITMAP_NAMESPACE}{name}"),
            map,
        }
    }
}

impl MetadataContext for OfMap {
    fn name(&self) -> &str {
        &self.name
    }

    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>> {
        let runs = self.map.runs(offset..offset + len, max).into_iter();
        let runs = runs.map(|(run, is_dirty)| state(run.end - run.start, is_dirty));
        Box::pin(std::future::ready(Ok(runs.collect())))
    }
}

impl OfImage {
    async fn bits(&self, image: &Arc<Image>) -> Result<Arc<DirtyBits>> {
        let lock = || self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, bits)) = &*lock()
            && std::ptr::eq(of.as_ptr(), Arc::as_ptr(image))
        {
            return Ok(Arc::clone(bits));
        }
        let bits = Arc::new(image.dirty_bits(&self.bitmap).await?);
        *lock() = Some((Arc::downgrade(image), Arc::clone(&bits)));
        Ok(bits)
    }
}

impl MetadataContext for OfImage {
    fn name(&self) -> &str {
        &self.name
    }

    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let (range, image) = (offset..offset + len, self.image.get());
            let runs = match image.is_writable() {
                true => image.dirty_runs(&self.bitmap, range, max).await?,
                false => self.bits(&image).await?.runs(&range, max),
            };
            let states = runs.iter().map(|run: &DirtyRun| state(run.len, run.dirty));
            Ok(joined(states))
        })
    }
}

/// `qemu:allocation-depth` of an export.
struct OfChain {
    disk: Arc<LiveDisk>,
    image: Arc<ImageOf>,
}

impl MetadataContext for OfChain {
    fn name(&self) -> &str {
        ALLOCATION_DEPTH
    }

    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let extents = self.disk.extents(offset, len, max).await?;
            let layers = self.image.get().layers().len() as u32;
            Ok(joined(extents.iter().map(|extent| StatusExtent {
                len: extent.len,
                flags: depth(extent, layers),
            })))
        })
    }
}

/// The contexts that an export shows besides its allocation, and the bitmaps that they use.
pub type Contexts = (Vec<Arc<dyn MetadataContext>>, Vec<InUse>);

impl Daemon {
    /// The contexts that an export is to show: how deep data lies, and bitmaps.
    ///
    /// # Errors
    /// There is none of such a name; it is in use, or was not saved properly, or changes while
    /// clients only read.
    pub async fn contexts(
        &self,
        given: &Given,
        (node, is_writable): (&Rc<Node>, bool),
        (disk, image): (&Arc<LiveDisk>, &Arc<ImageOf>),
    ) -> std::result::Result<Contexts, QmpError> {
        let (mut contexts, mut in_use): Contexts = Default::default();
        if given.switch("allocation-depth")?.unwrap_or(false) {
            contexts.push(Arc::new(OfChain {
                disk: Arc::clone(disk),
                image: Arc::clone(image),
            }));
        }
        let named = given.0.get("bitmaps").and_then(Value::as_array);
        for named in named.into_iter().flatten() {
            let bitmap = match named {
                Value::String(name) => in_chain(node, name).await?,
                _ => {
                    let (of, name) = self.named_bitmap(node, named)?;
                    of.bitmap(&name).await?
                }
            };
            bitmap.refuse_unreadable()?;
            let changes =
                !bitmap.node.is_read_only() && self.nodes.parents(&bitmap.node).is_empty();
            if !is_writable && changes && bitmap.is_enabled() {
                return Err(QmpError::generic(format!(
                    "Enabled bitmap '{}' incompatible with readonly export",
                    bitmap.name
                )));
            }
            let context: Arc<dyn MetadataContext> = match &bitmap.bits {
                Bits::Memory(map) => Arc::new(OfMap::new(&bitmap.name, Arc::clone(map))),
                Bits::Kept(_) => Arc::new(OfImage {
                    name: format!("{DIRTY_BITMAP_NAMESPACE}{}", bitmap.name),
                    bitmap: bitmap.name.clone(),
                    image: Arc::clone(&bitmap.node.shown),
                    read: Mutex::default(),
                }),
            };
            contexts.push(context);
            in_use.push(bitmap.use_it());
        }
        Ok((contexts, in_use))
    }
}

/// The bitmap of this name of the uppermost node of a chain that has one.
async fn in_chain(node: &Rc<Node>, name: &str) -> std::result::Result<Bitmap, QmpError> {
    for node in node.chain() {
        if let Some(bitmap) = node.find_bitmap(name).await? {
            return Ok(bitmap);
        }
    }
    Err(QmpError::generic(format!("Bitmap '{name}' is not found")))
}
