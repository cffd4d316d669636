//! The commands that move data: reads, writes, zeroes and discards, at once or started (`aio_`).
//!
//! A command line is parsed into a request first ([`Reading`], [`Writing`]), with all its errors;
//! the request is then carried out in one place, whether or not the shell waits for it.

use std::rc::Rc;
use std::time::Instant;

use cowslip::errno::{EINVAL, EIO, ENOTSUP};
use cowslip::image::{Durability, Extent, Space, ZeroOptions};
use cowslip::{Buf, BufMut, Disk, Error, Image};
use cowslip_cmdline::getopt::{Name, Scanner};
use cowslip_queue::pending;

use super::parse;
use super::report::{self, Report, Style};
use super::shell::{Complaint, Outcome, Shell};
use crate::out::Out;

/// Byte that buffers are filled with by default.
const DEFAULT_PATTERN: u8 = 0xcd;

/// The part of what was read that must consist of one byte.
#[derive(Clone, Copy, Debug)]
struct Expected {
    byte: u8,
    start: u64,
    length: u64,
}

/// Treatment of the bytes that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Show {
    Nothing,
    Dump,
}

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Disk,
    /// A machine's state, kept behind the disk.
    VmState,
}

/// A command that reads, with its options.
#[derive(Debug)]
struct Reading {
    offset: u64,
    length: u64,
    expected: Option<Expected>,
    show: Show,
    style: Style,
    target: Target,
    /// Name of the request in failures.
    called: &'static str,
}

/// Source of the data of a write.
#[derive(Debug)]
enum Content {
    Data(Bytes),
    /// A whole number of sectors, compressed.
    Compressed(Bytes),
    Zeroes(ZeroOptions),
    VmState(Bytes),
}

/// Bytes to write. What is only filled is filled when the request has proved possible, since it may
/// be gigabytes.
#[derive(Debug)]
enum Bytes {
    Filled(u8),
    Given(Buf),
}

impl Bytes {
    fn buf(&self, length: u64) -> Buf {
        match self {
            Bytes::Given(data) => data.clone(),
            Bytes::Filled(pattern) => {
                let mut buf = BufMut::zeroed(buffer_length(length));
                buf.fill(*pattern);
                buf.freeze()
            }
        }
    }
}

/// A command that writes, with its options.
#[derive(Debug)]
struct Writing {
    offset: u64,
    length: u64,
    content: Content,
    fua: bool,
    style: Style,
    /// Name of the request in failures.
    called: &'static str,
}

/// The style of reports that the options ask for.
#[derive(Clone, Copy, Debug, Default)]
struct Chosen {
    quiet: bool,
    machine: bool,
}

impl Chosen {
    fn style(self) -> Style {
        match (self.quiet, self.machine) {
            (true, _) => Style::Quiet,
            (false, true) => Style::Machine,
            (false, false) => Style::Plain,
        }
    }
}

/// Options of a write as they stand on the line.
#[derive(Debug, Default)]
struct WriteLine {
    vm_state: bool,
    compressed: bool,
    fua: bool,
    no_fallback: bool,
    unmap: bool,
    zeroes: bool,
    registered: bool,
    pattern: Option<u8>,
    source: Option<String>,
    chosen: Chosen,
}

impl WriteLine {
    /// Takes an option that several commands have. Returns whether it was one.
    fn take(&mut self, name: Name, value: String) -> Result<(), Complaint> {
        match name {
            Name::Letter('b') => self.vm_state = true,
            Name::Letter('c') => self.compressed = true,
            Name::Letter('C') => self.chosen.machine = true,
            Name::Letter('f') => self.fua = true,
            Name::Letter('n') => self.no_fallback = true,
            Name::Letter('q') => self.chosen.quiet = true,
            Name::Letter('r') => self.registered = true,
            Name::Letter('u') => self.unmap = true,
            Name::Letter('z') => self.zeroes = true,
            Name::Letter('s') => self.source = Some(value),
            Name::Letter('P') => {
                self.pattern = Some(parse::pattern(&value).map_err(Complaint::Said)?);
            }
            // -p had a meaning once.
            _ => {}
        }
        Ok(())
    }

    /// Checks for options that contradict each other.
    fn check(&self) -> Outcome {
        let sources = [self.zeroes, self.pattern.is_some(), self.source.is_some()];
        let complaint = if self.vm_state && self.zeroes {
            "-b and -z cannot be specified at the same time"
        } else if self.fua && (self.vm_state || self.compressed) {
            "-f and -b or -c cannot be specified at the same time"
        } else if self.no_fallback && !self.zeroes {
            "-n requires -z to be specified"
        } else if self.unmap && !self.zeroes {
            "-u requires -z to be specified"
        } else if sources.iter().filter(|given| **given).count() > 1 {
            "Only one of -z, -P, and -s can be specified at the same time"
        } else {
            return Ok(());
        };
        Err(Complaint::Said(complaint.to_string()))
    }

    fn zero_options(&self) -> ZeroOptions {
        ZeroOptions {
            space: Space::of_unmap(self.unmap),
            durability: Durability::of_fua(self.fua),
            fast_only: self.no_fallback,
        }
    }

    /// The bytes to write.
    fn data(&self, length: u64) -> Result<Bytes, Complaint> {
        match &self.source {
            Some(name) => repeated_file(name, buffer_length(length)).map(Bytes::Given),
            None => Ok(Bytes::Filled(self.pattern.unwrap_or(DEFAULT_PATTERN))),
        }
    }
}

/// The length of a request that was checked against the limit, as a length in memory.
fn buffer_length(length: u64) -> usize {
    usize::try_from(length).expect("requests are limited to 31 bits")
}

/// The content of a file, over and over.
fn repeated_file(name: &str, length: usize) -> Result<Buf, Complaint> {
    let bytes = std::fs::read(name).map_err(|error| {
        Complaint::Error(format!("{name}: {}", cowslip::error::system_words(&error)))
    })?;
    if bytes.is_empty() || length == 0 {
        return Err(Complaint::Error(format!("{name}: file is empty")));
    }
    let mut buf = BufMut::zeroed(length);
    for part in buf.chunks_mut(bytes.len()) {
        part.copy_from_slice(&bytes[..part.len()]);
    }
    Ok(buf.freeze())
}

fn said(text: &str) -> Complaint {
    Complaint::Said(text.to_string())
}

/// The single length of a request, within the limit.
fn length_within_limit(text: &str, but: &str) -> Result<u64, Complaint> {
    let length = parse::size(text).map_err(Complaint::Said)?;
    if length > parse::REQUEST_BYTES_MAX {
        return Err(Complaint::Said(format!(
            "length cannot exceed {}{but}, given {text}",
            parse::REQUEST_BYTES_MAX
        )));
    }
    Ok(length)
}

fn read_line(args: &[String]) -> Result<Reading, Complaint> {
    let mut scanner = Scanner::new(args, "bCl:pP:qrs:v", &[]);
    let mut chosen = Chosen::default();
    let (mut pattern, mut start, mut part) = (None, None, None);
    let (mut show, mut target) = (Show::Nothing, Target::Disk);
    while let Some(option) = scanner.next_option()? {
        match option.name {
            Name::Letter('b') => target = Target::VmState,
            Name::Letter('C') => chosen.machine = true,
            Name::Letter('q') => chosen.quiet = true,
            Name::Letter('v') => show = Show::Dump,
            Name::Letter('P') => {
                pattern = Some(parse::pattern(&option.value()).map_err(Complaint::Said)?);
            }
            Name::Letter('s') => {
                start = Some(parse::size(&option.value()).map_err(Complaint::Said)?);
            }
            Name::Letter('l') => {
                part = Some(parse::size(&option.value()).map_err(Complaint::Said)?);
            }
            // -p had a meaning once; -r registers a buffer, which changes nothing here.
            _ => {}
        }
    }
    let [offset, length] = scanner.operands()[..] else {
        return Err(Complaint::Usage(None));
    };
    let offset = parse::size(offset).map_err(Complaint::Said)?;
    let length = length_within_limit(length, "")?;
    if pattern.is_none() && (start.is_some() || part.is_some()) {
        return Err(Complaint::Usage(None));
    }
    let start = start.unwrap_or(0);
    let part = part.unwrap_or(length.saturating_sub(start));
    if start > length || part > length - start {
        return Err(said("pattern verification range exceeds end of read data"));
    }
    if target == Target::VmState {
        parse::whole_sectors(offset, length).map_err(Complaint::Said)?;
    }
    Ok(Reading {
        offset,
        length,
        expected: pattern.map(|byte| Expected {
            byte,
            start,
            length: part,
        }),
        show,
        style: chosen.style(),
        target,
        called: "read",
    })
}

/// A line of `readv` and `aio_read`. `None` if it asks for an invalid request, for statistics.
fn vectored_read_line(
    args: &[String],
    letters: &'static str,
) -> Result<Option<Reading>, Complaint> {
    let mut scanner = Scanner::new(args, letters, &[]);
    let mut chosen = Chosen::default();
    let (mut pattern, mut show) = (None, Show::Nothing);
    while let Some(option) = scanner.next_option()? {
        match option.name {
            Name::Letter('i') => return Ok(None),
            Name::Letter('C') => chosen.machine = true,
            Name::Letter('q') => chosen.quiet = true,
            Name::Letter('v') => show = Show::Dump,
            Name::Letter('P') => {
                pattern = Some(parse::pattern(&option.value()).map_err(Complaint::Said)?);
            }
            _ => {}
        }
    }
    let (offset, length) = offset_and_lengths(&scanner.operands())?;
    Ok(Some(Reading {
        offset,
        length,
        expected: pattern.map(|byte| Expected {
            byte,
            start: 0,
            length,
        }),
        show,
        style: chosen.style(),
        target: Target::Disk,
        called: "readv",
    }))
}

fn write_line(args: &[String]) -> Result<Writing, Complaint> {
    let mut scanner = Scanner::new(args, "bcCfnpP:qrs:uz", &[]);
    let mut line = WriteLine::default();
    while let Some(option) = scanner.next_option()? {
        line.take(option.name, option.value())?;
    }
    let [offset, length] = scanner.operands()[..] else {
        return Err(Complaint::Usage(None));
    };
    line.check()?;
    let offset = parse::size(offset).map_err(Complaint::Said)?;
    let length = match line.no_fallback {
        true => parse::size(length).map_err(Complaint::Said)?,
        false => length_within_limit(length, " without -n")?,
    };
    if line.vm_state || line.compressed {
        parse::whole_sectors(offset, length).map_err(Complaint::Said)?;
    }
    if line.zeroes && line.registered {
        return Err(said("cannot combine zero write with registered I/O buffer"));
    }
    let content = match (line.zeroes, line.vm_state, line.compressed) {
        (true, ..) => Content::Zeroes(line.zero_options()),
        (_, true, _) => Content::VmState(line.data(length)?),
        (.., true) => Content::Compressed(line.data(length)?),
        _ => Content::Data(line.data(length)?),
    };
    Ok(Writing {
        offset,
        length,
        content,
        fua: line.fua,
        style: line.chosen.style(),
        called: "write",
    })
}

/// `OFFSET LENGTH [LENGTH…]`: the offset and the sum of the lengths.
fn offset_and_lengths(operands: &[&str]) -> Result<(u64, u64), Complaint> {
    let [offset, lengths @ ..] = operands else {
        return Err(Complaint::Usage(None));
    };
    if lengths.is_empty() {
        return Err(Complaint::Usage(None));
    }
    let offset = parse::size(offset).map_err(Complaint::Said)?;
    let length = parse::total_length(lengths).map_err(Complaint::Said)?;
    Ok((offset, length))
}

fn writev_line(args: &[String]) -> Result<Writing, Complaint> {
    let mut scanner = Scanner::new(args, "CfP:qr", &[]);
    let mut line = WriteLine::default();
    while let Some(option) = scanner.next_option()? {
        line.take(option.name, option.value())?;
    }
    let (offset, length) = offset_and_lengths(&scanner.operands())?;
    Ok(Writing {
        offset,
        length,
        content: Content::Data(line.data(length)?),
        fua: line.fua,
        style: line.chosen.style(),
        called: "writev",
    })
}

/// A line of `aio_write`. `None` if it asks for an invalid request, for statistics.
fn aio_write_line(args: &[String]) -> Result<Option<Writing>, Complaint> {
    let mut scanner = Scanner::new(args, "CfiP:qruz", &[]);
    let mut line = WriteLine::default();
    while let Some(option) = scanner.next_option()? {
        if option.name == Name::Letter('i') {
            return Ok(None);
        }
        line.take(option.name, option.value())?;
    }
    let operands = scanner.operands();
    let [offset, lengths @ ..] = &operands[..] else {
        return Err(Complaint::Usage(None));
    };
    if lengths.is_empty() {
        return Err(Complaint::Usage(None));
    }
    let complaint = if line.zeroes && lengths.len() != 1 {
        "-z supports only a single length parameter"
    } else if line.unmap && !line.zeroes {
        "-u requires -z to be specified"
    } else if line.zeroes && line.registered {
        "cannot combine zero write with registered I/O buffer"
    } else {
        ""
    };
    if !complaint.is_empty() {
        return Err(said(complaint));
    }
    let offset = parse::size(offset).map_err(Complaint::Said)?;
    let (length, content) = if line.zeroes {
        let length = parse::size(lengths[0]).map_err(Complaint::Said)?;
        (length, Content::Zeroes(line.zero_options()))
    } else {
        let length = parse::total_length(lengths).map_err(Complaint::Said)?;
        (length, Content::Data(line.data(length)?))
    };
    Ok(Some(Writing {
        offset,
        length,
        content,
        fua: line.fua,
        style: line.chosen.style(),
        called: "aio_write",
    }))
}

/// A command that discards, with its options.
#[derive(Debug)]
struct Discarding {
    offset: u64,
    length: u64,
    style: Style,
    /// Name of the request in failures.
    called: &'static str,
    /// Verb of its report.
    done: &'static str,
}

/// The options, offset and length of `discard` and `aio_discard`.
fn discard_operands(args: &[String]) -> Result<(Chosen, [&str; 2]), Complaint> {
    let mut scanner = Scanner::new(args, "Cq", &[]);
    let mut chosen = Chosen::default();
    while let Some(option) = scanner.next_option()? {
        match option.name {
            Name::Letter('C') => chosen.machine = true,
            _ => chosen.quiet = true,
        }
    }
    match scanner.operands()[..] {
        [offset, length] => Ok((chosen, [offset, length])),
        _ => Err(Complaint::Usage(None)),
    }
}

fn discard_line(args: &[String]) -> Result<Discarding, Complaint> {
    let (chosen, [offset, length]) = discard_operands(args)?;
    Ok(Discarding {
        offset: parse::size(offset).map_err(Complaint::Said)?,
        length: length_within_limit(length, "")?,
        style: chosen.style(),
        called: "discard",
        done: "discard",
    })
}

fn aio_discard_line(args: &[String]) -> Result<Discarding, Complaint> {
    let (chosen, [offset, length]) = discard_operands(args)?;
    Ok(Discarding {
        offset: parse::size(offset).map_err(Complaint::Said)?,
        length: parse::size(length).map_err(Complaint::Said)?,
        style: chosen.style(),
        called: "aio_discard",
        // QEMU's report has a second space there.
        done: "discarded ",
    })
}

/// The failure of a request that was refused before the engine saw it.
fn refused(errno: i32) -> Error {
    Error::io("Request", std::io::Error::from_raw_os_error(errno))
}

/// Whether a request lies on the disk. QEMU answers one that does not with an I/O error.
fn check_range(image: &Image, offset: u64, length: u64) -> Result<(), Error> {
    match offset.checked_add(length) {
        Some(end) if end <= image.size() => Ok(()),
        _ => Err(refused(EIO)),
    }
}

async fn read_image(image: &Image, reading: &Reading) -> Result<BufMut, Error> {
    if reading.target == Target::VmState {
        let buf = BufMut::zeroed(buffer_length(reading.length));
        return image.read_vm_state(reading.offset, buf).await;
    }
    check_range(image, reading.offset, reading.length)?;
    let buf = BufMut::zeroed(buffer_length(reading.length));
    if buf.is_empty() {
        return Ok(buf);
    }
    let read = Disk::read(image, reading.offset, buf.into()).await?;
    Ok(read.into())
}

async fn write_image(image: &Image, writing: &Writing) -> Result<(), Error> {
    let offset = writing.offset;
    if !matches!(writing.content, Content::VmState(_)) {
        check_range(image, offset, writing.length)?;
        if writing.length == 0 {
            return Ok(());
        }
    }
    match &writing.content {
        Content::VmState(bytes) => {
            let data = bytes.buf(writing.length);
            image.write_vm_state(offset, data).await
        }
        Content::Zeroes(options) => image.write_zeroes(offset, writing.length, *options).await,
        Content::Compressed(bytes) => write_compressed(image, offset, bytes, writing.length).await,
        Content::Data(bytes) => {
            let durability = Durability::of_fua(writing.fua);
            Disk::write(image, offset, bytes.buf(writing.length).into(), durability).await
        }
    }
}

/// Writes whole clusters, the disk's last one as far as it goes, each compressed.
async fn write_compressed(
    image: &Image,
    offset: u64,
    bytes: &Bytes,
    length: u64,
) -> Result<(), Error> {
    let header = image
        .layers()
        .first()
        .and_then(|layer| layer.header.clone());
    let Some(header) = header.filter(|header| !header.has_data_file()) else {
        return Err(refused(ENOTSUP));
    };
    let cluster_bytes = 1u64 << header.cluster_bits;
    let end = offset + length;
    let whole = end.is_multiple_of(cluster_bytes) || end == image.size();
    if !offset.is_multiple_of(cluster_bytes) || !whole {
        return Err(refused(EINVAL));
    }
    let data = bytes.buf(length);
    let mut at = 0;
    while at < data.len() {
        let length = buffer_length(cluster_bytes).min(data.len() - at);
        let cluster = data.slice(at, length);
        let cluster_start = offset + at as u64;
        check_not_stored(image, cluster_start, length as u64).await?;
        image.write_compressed(cluster_start, cluster).await?;
        at += length;
    }
    Ok(())
}

/// Refuses to compress into a cluster that is stored plainly, as QEMU does, although the engine
/// can: scripts count on the failure.
async fn check_not_stored(image: &Image, offset: u64, length: u64) -> Result<(), Error> {
    let extents = image.extents(offset, length, usize::MAX).await?;
    let stored =
        |extent: &Extent| extent.depth == 0 && extent.host_offset.is_some() && !extent.compressed;
    match extents.iter().any(stored) {
        true => Err(refused(EIO)),
        false => Ok(()),
    }
}

/// Carries a read out and prints its result.
async fn do_read(image: &Image, out: &Out, reading: &Reading) -> Outcome {
    let started = Instant::now();
    let bytes = read_image(image, reading).await.map_err(|error| {
        Complaint::Said(format!(
            "{} failed: {}",
            reading.called,
            report::cause(&error)
        ))
    })?;
    let elapsed = started.elapsed();
    let mut outcome = Ok(());
    if let Some(expected) = reading.expected {
        let start = buffer_length(expected.start);
        let part = &bytes[start..start + buffer_length(expected.length)];
        if part.iter().any(|&byte| byte != expected.byte) {
            out.print(&report::mismatch(
                reading.offset + expected.start,
                expected.length,
            ));
            outcome = Err(Complaint::Printed);
        }
    }
    if reading.style == Style::Quiet {
        return outcome;
    }
    if reading.show == Show::Dump {
        out.print(&report::dump(&bytes, reading.offset));
    }
    let report = Report {
        done: "read",
        offset: reading.offset,
        length: reading.length,
        elapsed,
    };
    out.print(&report.text(reading.style));
    outcome
}

/// Carries a write out and prints its result.
async fn do_write(image: &Image, out: &Out, writing: &Writing) -> Outcome {
    let started = Instant::now();
    let result = write_image(image, writing).await;
    let elapsed = started.elapsed();
    result.map_err(|error| {
        Complaint::Said(format!(
            "{} failed: {}",
            writing.called,
            report::cause(&error)
        ))
    })?;
    let report = Report {
        done: "wrote",
        offset: writing.offset,
        length: writing.length,
        elapsed,
    };
    out.print(&report.text(writing.style));
    Ok(())
}

/// Carries a discard out and prints its result.
async fn do_discard(image: &Image, out: &Out, discarding: &Discarding) -> Outcome {
    let (offset, length) = (discarding.offset, discarding.length);
    let started = Instant::now();
    let result = match check_range(image, offset, length) {
        Ok(()) if length > 0 => image.discard(offset, length).await,
        checked => checked,
    };
    let elapsed = started.elapsed();
    result.map_err(|error| {
        Complaint::Said(format!(
            "{} failed: {}",
            discarding.called,
            report::cause(&error)
        ))
    })?;
    let report = Report {
        done: discarding.done,
        offset,
        length,
        elapsed,
    };
    out.print(&report.text(discarding.style));
    Ok(())
}

impl Shell {
    pub(super) async fn read(&self, args: &[String]) -> Outcome {
        do_read(&*self.image()?, &self.out, &read_line(args)?).await
    }

    pub(super) async fn readv(&self, args: &[String]) -> Outcome {
        let reading = vectored_read_line(args, "CP:qrv")?.expect("readv has no -i");
        do_read(&*self.image()?, &self.out, &reading).await
    }

    pub(super) async fn write(&self, args: &[String]) -> Outcome {
        do_write(&*self.image()?, &self.out, &write_line(args)?).await
    }

    pub(super) async fn writev(&self, args: &[String]) -> Outcome {
        do_write(&*self.image()?, &self.out, &writev_line(args)?).await
    }

    pub(super) fn aio_read(&mut self, args: &[String]) -> Outcome {
        let Some(reading) = vectored_read_line(args, "CiP:qrv")? else {
            self.out.print("injecting invalid read request\n");
            return Ok(());
        };
        self.start(async move |image: &Image, out: &Out| do_read(image, out, &reading).await)
    }

    pub(super) fn aio_write(&mut self, args: &[String]) -> Outcome {
        let Some(writing) = aio_write_line(args)? else {
            self.out.print("injecting invalid write request\n");
            return Ok(());
        };
        self.start(async move |image: &Image, out: &Out| do_write(image, out, &writing).await)
    }

    pub(super) fn aio_discard(&mut self, args: &[String]) -> Outcome {
        let discarding = aio_discard_line(args)?;
        self.start(async move |image: &Image, out: &Out| do_discard(image, out, &discarding).await)
    }

    /// Starts a request in the background. Its failure is printed, and fails no command.
    fn start(&mut self, request: impl AsyncFnOnce(&Image, &Out) -> Outcome + 'static) -> Outcome {
        let (image, out) = (self.image()?, self.out.clone());
        let (completer, done) = pending();
        self.started.push(done);
        cowslip_queue::spawn(async move {
            let image: Rc<Image> = image;
            if let Err(Complaint::Said(text)) = request(&image, &out).await {
                out.print(&format!("{text}\n"));
            }
            completer.complete(());
        });
        Ok(())
    }

    pub(super) async fn aio_flush(&mut self) -> Outcome {
        self.await_started().await;
        Ok(())
    }

    pub(super) async fn flush(&self) -> Outcome {
        let result = self.image()?.flush().await;
        result.map_err(|error| Complaint::Said(format!("flush failed: {}", report::cause(&error))))
    }

    pub(super) async fn discard(&self, args: &[String]) -> Outcome {
        do_discard(&*self.image()?, &self.out, &discard_line(args)?).await
    }
}
