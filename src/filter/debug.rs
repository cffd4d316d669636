//! [`DebugFile`]: a file whose requests fail or stop as rules have it, QEMU's `blkdebug`.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cowslip::file::{
    BlockFile, Capabilities, Claim, Durability, Event, FileExtent, FileId, Observer, Protection,
    Space,
};
use cowslip::{Buf, BufMut};
use cowslip_queue::Pending;

use super::breakpoints::Breakpoints;
use super::rules::{ConfigError, IoType, Rule, RuleSet, RuleText};

/// A configuration is some lines; more than this is another file by mistake.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A limit of requests: its option and its value in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// `max-transfer` and its like.
    pub name: &'static str,
    /// The value.
    pub bytes: u64,
}

/// What a file that debugs is asked to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DebugSpec {
    /// A file with rules.
    pub config: Option<String>,
    /// Rules beside those.
    pub rules: Vec<RuleText>,
    /// What requests are multiples of, if it is said.
    pub align: Option<u64>,
    /// Other limits. They are checked and have no effect: requests here are never split by them.
    pub limits: Vec<Limit>,
}

impl DebugSpec {
    /// All rules.
    ///
    /// # Errors
    /// The file cannot be read, or a rule makes no sense.
    pub fn all_rules(&self) -> Result<Vec<Rule>, ConfigError> {
        let mut texts = match &self.config {
            Some(name) => RuleText::all_of_file(&config_text(name)?)?,
            None => Vec::new(),
        };
        texts.extend(self.rules.iter().cloned());
        texts.iter().map(RuleText::rule).collect()
    }

    /// The alignment, on a file with one of its own.
    ///
    /// # Errors
    /// A limit that cannot be met.
    pub fn alignment(&self, own: u32) -> Result<u32, ConfigError> {
        let unmet = |name: &str, bytes: u64| {
            ConfigError(format!("Cannot meet constraints with {name} {bytes}"))
        };
        let in_range = |bytes: u64| bytes < i32::MAX as u64;
        let align = match self.align {
            None | Some(0) => own,
            Some(align) if in_range(align) && align.is_power_of_two() => own.max(align as u32),
            Some(align) => return Err(unmet("align", align)),
        };
        for Limit { name, bytes } in &self.limits {
            if !in_range(*bytes) || !bytes.is_multiple_of(u64::from(align)) {
                return Err(unmet(name, *bytes));
            }
        }
        Ok(align)
    }
}

fn config_text(name: &str) -> Result<String, ConfigError> {
    let failed = |why: &str| ConfigError(format!("Could not read blkdebug config file: {why}"));
    let read = || {
        let file = std::fs::File::open(name)?;
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(file, CONFIG_BYTES_MAX + 1), &mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error: io::Error| failed(&cowslip::error::system_words(&error)))?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(failed("it is larger than 1 MiB"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A file whose requests fail or stop as rules have it.
#[derive(Debug)]
pub struct DebugFile {
    inner: Arc<dyn BlockFile>,
    capabilities: Capabilities,
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

impl DebugFile {
    /// Wraps a file.
    ///
    /// # Errors
    /// What is asked for makes no sense, or cannot be read.
    pub fn new(
        inner: Arc<dyn BlockFile>,
        spec: &DebugSpec,
        breakpoints: Breakpoints,
    ) -> Result<DebugFile, ConfigError> {
        let rules = spec.all_rules()?;
        let capabilities = Capabilities {
            alignment_bytes: spec.alignment(inner.capabilities().alignment_bytes)?,
            ..inner.capabilities().clone()
        };
        breakpoints.attach();
        Ok(DebugFile {
            inner,
            capabilities,
            watch: Arc::new(Watch {
                rules: Mutex::new(RuleSet::new(rules)),
                breakpoints,
            }),
        })
    }

    fn check(&self, io: IoType, bytes: Range<u64>) -> io::Result<()> {
        match self.watch.rules().verdict(io, bytes) {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }

    /// A request, unless a rule has it fail.
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
}

impl BlockFile for DebugFile {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn id(&self) -> Option<FileId> {
        self.inner.id()
    }

    fn observer(&self) -> Option<Arc<dyn Observer>> {
        Some(Arc::clone(&self.watch) as Arc<dyn Observer>)
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        self.inner.len()
    }

    fn read(&self, offset: u64, buf: BufMut) -> Pending<(io::Result<()>, BufMut)> {
        match self.check(IoType::Read, offset..offset + buf.len() as u64) {
            Ok(()) => self.inner.read(offset, buf),
            Err(error) => Pending::ready((Err(error), buf)),
        }
    }

    fn write(
        &self,
        offset: u64,
        data: Vec<Buf>,
        durability: Durability,
    ) -> Pending<io::Result<()>> {
        let len: u64 = data.iter().map(|buf| buf.len() as u64).sum();
        self.unless((IoType::Write, offset..offset + len), |file| {
            file.write(offset, data, durability)
        })
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        self.unless((IoType::WriteZeroes, offset..offset + len), |file| {
            file.zero(offset, len, space)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.unless((IoType::Discard, offset..offset + len), |file| {
            file.discard(offset, len)
        })
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.inner.allocate(offset, len)
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.unless((IoType::BlockStatus, offset..offset + len), |file| {
            file.extents(offset, len)
        })
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.unless((IoType::Flush, 0..0), |file| file.flush())
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.inner.set_len(len)
    }

    fn allocated_bytes(&self) -> Option<u64> {
        self.inner.allocated_bytes()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }

    fn close(&self) -> Pending<io::Result<()>> {
        self.inner.close()
    }

    fn claim(&self, wanted: Claim) -> cowslip::Result<Protection> {
        self.inner.claim(wanted)
    }

    fn claim_after(
        &self,
        wanted: Claim,
        predecessor: &dyn BlockFile,
    ) -> cowslip::Result<Protection> {
        self.inner.claim_after(wanted, predecessor)
    }

    fn claimed(&self) -> Claim {
        self.inner.claimed()
    }
}
