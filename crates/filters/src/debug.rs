//! [`DebugFile`]: a file with injected errors and breakpoints, as QEMU's `blkdebug`.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cowslip_block::file::{
    BlockFile, Capabilities, Durability, Event, FileExtent, Observer, Space,
};
use cowslip_block::limits::{Limits, ZeroPart};
use cowslip_block::{Buf, Error, IoVec, IoVecMut, Result};
use cowslip_queue::{Pending, pending};

use crate::breakpoints::Breakpoints;
use crate::rules::{IoType, Rule, RuleSet, RuleText};

/// A configuration has a few lines. A longer file has been named by mistake.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Rules and limits of a [`DebugFile`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DebugSpec {
    /// Path of a configuration file with rules.
    pub config: Option<String>,
    /// Rules in addition to those of the configuration file.
    pub rules: Vec<RuleText>,
    /// Limits of requests, as the user gave them.
    pub limits: Limits,
}

impl DebugSpec {
    /// All rules, those of the configuration file first.
    ///
    /// # Errors
    /// The file cannot be read, or a rule is invalid.
    pub fn all_rules(&self) -> Result<Vec<Rule>> {
        let mut texts = match &self.config {
            Some(name) => RuleText::all_of_file(&config_text(name)?)?,
            None => Vec::new(),
        };
        texts.extend(self.rules.iter().cloned());
        texts.iter().map(RuleText::rule).collect()
    }

    /// The limits of the file, whose own alignment is `own_align`.
    ///
    /// # Errors
    /// A limit is invalid; the message is QEMU's.
    pub fn limits_over(&self, own_align: u32) -> Result<Limits> {
        let said = &self.limits;
        let align = said.align.max(u64::from(own_align)).max(1);
        let zeroes_unit = said.zeroes_unit.max(align);
        let discard_unit = said.discard_unit.max(align);
        // Names, values, and what they have to be multiples of.
        for (name, bytes, unit) in [
            ("align", said.align, 1),
            ("max-transfer", said.transfer_max, align),
            ("opt-write-zero", said.zeroes_unit, align),
            ("max-write-zero", said.zeroes_max, zeroes_unit),
            ("opt-discard", said.discard_unit, align),
            ("max-discard", said.discard_max, discard_unit),
        ] {
            let is_valid = name != "align" || bytes.is_power_of_two();
            let is_met = is_valid && bytes < i32::MAX as u64 && bytes.is_multiple_of(unit);
            if bytes != 0 && !is_met {
                return Err(Error::Invalid(format!(
                    "Cannot meet constraints with {name} {bytes}"
                )));
            }
        }
        Ok(Limits { align, ..*said })
    }
}

fn config_text(name: &str) -> Result<String> {
    let failed = |why: &str| Error::Invalid(format!("Could not read blkdebug config file: {why}"));
    let read = || {
        let file = std::fs::File::open(name)?;
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(file, CONFIG_BYTES_MAX + 1), &mut bytes)?;
        Ok(bytes)
    };
    let bytes =
        read().map_err(|error: io::Error| failed(&cowslip_block::error::system_words(&error)))?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(failed("it is larger than 1 MiB"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A file that fails or suspends requests by rules. A request beyond the limits is split, the parts
/// run one after the other, and the rules apply to each part.
#[derive(Debug)]
pub struct DebugFile {
    node: Node,
    capabilities: Capabilities,
}

/// The state that requests share.
#[derive(Clone, Debug)]
struct Node {
    inner: Arc<dyn BlockFile>,
    limits: Limits,
    watch: Arc<Watch>,
}

#[derive(Debug)]
struct Watch {
    rules: Mutex<RuleSet>,
    breakpoints: Breakpoints,
}

impl Watch {
    fn rules(&self) -> MutexGuard<'_, RuleSet> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Watch {
    fn reached(&self, event: Event) -> Option<Pending<()>> {
        self.rules().reached(event);
        self.breakpoints.reached(event)
    }

    fn passed(&self, event: Event) {
        self.rules().reached(event);
    }
}

impl Node {
    fn check(&self, io: IoType, bytes: Range<u64>) -> io::Result<()> {
        match self.watch.rules().verdict(io, bytes) {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }

    /// Sends a request, unless a rule makes it fail.
    fn unless<T: Send + 'static>(
        &self,
        (io, bytes): (IoType, Range<u64>),
        request: impl FnOnce(&dyn BlockFile) -> Pending<io::Result<T>>,
    ) -> Pending<io::Result<T>> {
        match self.check(io, bytes) {
            Ok(()) => request(&*self.inner),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    /// Runs several requests as one.
    fn run<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        requests: impl FnOnce(Node) -> F,
    ) -> Pending<T> {
        let (completer, done) = pending();
        let requests = requests(self.clone());
        cowslip_queue::spawn_anywhere(async move { completer.complete(requests.await) });
        done
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        match self.check(IoType::Read, offset..offset + buf.len() as u64) {
            Ok(()) => self.inner.read(offset, buf),
            Err(error) => Pending::ready((Err(error), buf)),
        }
    }

    async fn read_parts(self, offset: u64, mut buf: IoVecMut) -> (io::Result<()>, IoVecMut) {
        let range = offset..offset + buf.len() as u64;
        let mut read = IoVecMut::default();
        let mut outcome = Ok(());
        for part in self.limits.transfers(range) {
            let mut this = buf;
            buf = this.split_off((part.end - part.start) as usize);
            if outcome.is_ok() {
                (outcome, this) = self.read(part.start, this).await;
            }
            read.append(this);
        }
        (outcome, read)
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        let len = data.len() as u64;
        self.unless((IoType::Write, offset..offset + len), |file| {
            file.write(offset, data, durability)
        })
    }

    async fn write_parts(
        self,
        range: Range<u64>,
        data: IoVec,
        durability: Durability,
    ) -> io::Result<()> {
        for part in self.limits.transfers(range.clone()) {
            let (at, len) = (part.start - range.start, part.end - part.start);
            let this = data.slice(at as usize, len as usize);
            self.write(part.start, this, durability).await?;
        }
        Ok(())
    }

    async fn zero_parts(self, range: Range<u64>, space: Space) -> io::Result<()> {
        for part in self.limits.zeroes(range) {
            match part {
                ZeroPart::Zeroes(part) => self.zero(part, space).await?,
                ZeroPart::Written(part) => {
                    let zeroes = Buf::zeroed((part.end - part.start) as usize);
                    self.write(part.start, zeroes.into(), Durability::Cached)
                        .await?;
                }
            }
        }
        Ok(())
    }

    fn zero(&self, range: Range<u64>, space: Space) -> Pending<io::Result<()>> {
        self.unless((IoType::WriteZeroes, range.clone()), |file| {
            file.zero(range.start, range.end - range.start, space)
        })
    }

    fn discard(&self, range: Range<u64>) -> Pending<io::Result<()>> {
        self.unless((IoType::Discard, range.clone()), |file| {
            file.discard(range.start, range.end - range.start)
        })
    }

    async fn discard_parts(self, range: Range<u64>) -> io::Result<()> {
        for part in self.limits.discards(range) {
            self.discard(part).await?;
        }
        Ok(())
    }
}

impl DebugFile {
    /// Wraps a file.
    ///
    /// # Errors
    /// A rule or a limit is invalid, or the configuration file cannot be read.
    pub fn new(
        inner: Arc<dyn BlockFile>,
        spec: &DebugSpec,
        breakpoints: Breakpoints,
    ) -> Result<DebugFile> {
        let rules = spec.all_rules()?;
        let limits = spec.limits_over(inner.capabilities().alignment_bytes)?;
        let limits = limits.over(inner.limits());
        // No overflow: limits are less than 2 GiB.
        let alignment = limits.align as u32;
        let capabilities = Capabilities {
            alignment_bytes: alignment,
            space_alignment_bytes: alignment.max(inner.capabilities().space_alignment_bytes),
            ..inner.capabilities().clone()
        };
        breakpoints.attach();
        let watch = Arc::new(Watch {
            rules: Mutex::new(RuleSet::new(rules)),
            breakpoints,
        });
        Ok(DebugFile {
            node: Node {
                inner,
                limits,
                watch,
            },
            capabilities,
        })
    }

    fn cuts(&self, range: &Range<u64>) -> bool {
        self.node.limits.cut_transfer(range)
    }
}

impl BlockFile for DebugFile {
    cowslip_block::forward_to_file!(node.inner: name, id, content_id, storage, len, memory_alignment, allocate, set_len, allocated_bytes, free_bytes, close, claim, claim_after, claim_handed_over, claimed);
    cowslip_block::file_from_fields!(capabilities);

    fn limits(&self) -> Limits {
        self.node.limits
    }

    fn observer(&self) -> Option<Arc<dyn Observer>> {
        Some(Arc::clone(&self.node.watch) as Arc<dyn Observer>)
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        match self.cuts(&(offset..offset + buf.len() as u64)) {
            false => self.node.read(offset, buf),
            true => self.node.run(|node| node.read_parts(offset, buf)),
        }
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        let len = data.len() as u64;
        let range = offset..offset + len;
        match self.cuts(&range) {
            false => self.node.write(offset, data, durability),
            true => self
                .node
                .run(|node| node.write_parts(range, data, durability)),
        }
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        let range = offset..offset + len;
        match self.node.limits.are_any() {
            false => self.node.zero(range, space),
            true => self.node.run(|node| node.zero_parts(range, space)),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let range = offset..offset + len;
        match self.node.limits.are_any() {
            false => self.node.discard(range),
            true => self.node.run(|node| node.discard_parts(range)),
        }
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.node
            .unless((IoType::BlockStatus, offset..offset + len), |file| {
                file.extents(offset, len)
            })
    }

    fn own_space(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.node
            .unless((IoType::BlockStatus, offset..offset + len), |file| {
                file.own_space(offset, len)
            })
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.node.unless((IoType::Flush, 0..0), |file| file.flush())
    }
}
