//! `info`: what an image says of itself, in QEMU's words and JSON.
//!
//! Opens only the named file (and with `--backing-chain` the chain), never a data file.

use cowslip::file::host::{Aio, resolve_name};
use cowslip::image::AllocPolicy;
use cowslip::qcow2::header::{CryptMethod, Header};
use cowslip::qcow2::inspect::{Inspection, SnapshotInfo};
use serde_json::{Value, json};

use super::change::ReportArgs;
use super::create::format_name;
use crate::encryption::described;
use crate::error::CommandError;
use crate::layer::{ImageFileInfo, InspectOptions, Protocol, chain};
use crate::open::{OneImage, block_on};
use crate::output::{OutputFormat, Program, print, print_json};
use crate::size;
use crate::time;

/// Buffers of one request that the kernel takes (`UIO_MAXIOV`).
const IOV_MAX: u64 = 1024;
/// Unit of a cipher.
const SECTOR_BYTES: u64 = 512;
/// Where our buffers begin.
const PAGE_BYTES: u64 = 4096;

/// Command line of `info`.
#[derive(clap::Args)]
pub struct Args {
    /// Include all backing files
    #[arg(short = 'b', long)]
    backing_chain: bool,
    /// Open the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Include the alignments and limits of requests to the image and to its file
    #[arg(long)]
    limits: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    image: OneImage,
}

/// Runs `info`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(describe(&args, program))
}

fn describe(args: &Args, program: &Program) -> Result<(), CommandError> {
    let format = args.report.output.format("info", program)?;
    let json = format == OutputFormat::Json;
    let spec = args.image.spec("info", program)?;
    let source = spec.resolve()?;
    let inspect_options = InspectOptions::of_image(&source, args.force_share, &args.report.trust);
    let layers = block_on(Aio::Auto, async {
        let layer = ImageFileInfo::inspect_source(&source, &inspect_options).await;
        let layer = layer.map_err(|why| CommandError::opening(&source.given, why.to_string()))?;
        match args.backing_chain {
            true => chain(layer, &inspect_options).await,
            false => Ok(vec![layer]),
        }
    })?;
    let detail = Detail {
        // Facts that qemu-img does not print are not printed under its name either.
        ours: !program.name.starts_with("qemu-"),
        limits: args.limits,
    };
    let described = |layer: &ImageFileInfo| as_json(layer, detail);
    match (json, args.backing_chain) {
        (true, true) => print_json(&Value::Array(layers.iter().map(described).collect())),
        (true, false) => print_json(&described(&layers[0])),
        (false, _) => {
            let texts: Vec<String> = layers.iter().map(|layer| as_text(layer, detail)).collect();
            print(&texts.join("\n"));
        }
    }
    Ok(())
}

/// How much is said beside what qemu-img says.
#[derive(Clone, Copy)]
struct Detail {
    /// Facts about the file of the host.
    ours: bool,
    /// Alignments and limits (`--limits`).
    limits: bool,
}

fn with_bytes(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", size::human(bytes))
}

fn disk_size_text(layer: &ImageFileInfo) -> String {
    layer
        .disk_size
        .map_or_else(|| "unavailable".to_string(), size::human)
}

fn as_text(layer: &ImageFileInfo, detail: Detail) -> String {
    let mut lines = vec![
        format!("image: {}", layer.shown_name()),
        format!("file format: {}", shown_format(layer)),
        format!("virtual size: {}", with_bytes(layer.virtual_size())),
        format!("disk size: {}", disk_size_text(layer)),
    ];
    if let Some(inspection) = &layer.inspection {
        qcow2_text(layer, inspection, detail, &mut lines);
    } else if let Some(keys) = &layer.keys {
        lines.push("encrypted: yes".to_string());
        lines.push("Format specific information:".to_string());
        specific_text(&described(keys, None), 1, &mut lines);
    }
    if layer.inspection.is_none() && detail.limits {
        limits_text(&image_limits(layer), 0, &mut lines);
    }
    if !layer.is_bare() {
        child_text(layer, detail, &mut lines);
    }
    lines.push(String::new());
    lines.join("\n")
}

/// The format, or the protocol where no format stands over it.
fn shown_format(layer: &ImageFileInfo) -> &'static str {
    match layer.protocol {
        Protocol::Bare(driver) => driver,
        Protocol::File | Protocol::Named(_) => format_name(layer.format),
    }
}

/// Describes the file, which is a child node of the image.
fn child_text(layer: &ImageFileInfo, detail: Detail, lines: &mut Vec<String>) {
    let protocol = child_format(layer);
    lines.push("Child node '/file':".to_string());
    lines.push(format!("    filename: {}", layer.filename));
    lines.push(format!("    protocol type: {protocol}"));
    lines.push(format!("    file length: {}", with_bytes(layer.file_len)));
    lines.push(format!("    disk size: {}", disk_size_text(layer)));
    if detail.limits {
        limits_text(&file_limits(), 1, lines);
    }
    let mut specific = Vec::new();
    if let Some(bytes) = layer.extent_hint_bytes {
        // It cannot be changed any more: the file has space.
        specific.push(format!("extent size hint: {bytes}"));
    }
    if detail.ours {
        specific.push(format!("zero methods: {}", layer.zero_methods.join(", ")));
    }
    if !specific.is_empty() {
        lines.push("    Format specific information:".to_string());
        lines.extend(specific.iter().map(|line| format!("        {line}")));
    }
}

/// The name of the protocol below an image's format, as QEMU shows it.
fn child_format(layer: &ImageFileInfo) -> &'static str {
    match layer.protocol {
        Protocol::File => "file",
        Protocol::Named(driver) | Protocol::Bare(driver) => driver,
    }
}

fn qcow2_text(
    layer: &ImageFileInfo,
    inspection: &Inspection,
    detail: Detail,
    lines: &mut Vec<String>,
) {
    let header = &inspection.header;
    if header.crypt_method != CryptMethod::None {
        lines.push("encrypted: yes".to_string());
    }
    lines.push(format!(
        "cluster_size: {}",
        header.geometry().cluster_bytes()
    ));
    if header.is_dirty() {
        lines.push("cleanly shut down: no".to_string());
    }
    if let Some(name) = &header.backing_file {
        let resolved = resolve_name(&layer.filename, name);
        lines.push(match resolved == *name {
            true => format!("backing file: {name}"),
            false => format!("backing file: {name} (actual path: {resolved})"),
        });
        if let Some(format) = header.backing_format() {
            lines.push(format!("backing file format: {format}"));
        }
    }
    if detail.limits {
        limits_text(&image_limits(layer), 0, lines);
    }
    if !inspection.snapshots.is_empty() {
        lines.push("Snapshot list:".to_string());
        lines.extend(snapshot_lines(&inspection.snapshots));
    }
    lines.push("Format specific information:".to_string());
    specific_text(&specific(layer, inspection), 1, lines);
}

fn limits_text(limits: &Value, level: usize, lines: &mut Vec<String>) {
    lines.push(format!("{}Block limits:", " ".repeat(level * 4)));
    specific_text(limits, level + 1, lines);
}

/// The alignment of requests to a file of the host, in QEMU's terms (`BlockLimitsInfo`). Unaligned
/// requests go through aligned buffers, as in QEMU, so none are refused. A limit that is missing
/// here does not exist.
fn file_limits() -> Value {
    json!({
        "request-alignment": 1,
        "max-iov": IOV_MAX,
        "min-mem-alignment": 1,
        "opt-mem-alignment": PAGE_BYTES,
    })
}

/// Limits of requests to an image, as QEMU shows them: also the units of discards and of zeroes
/// that move no bytes.
fn image_limits(layer: &ImageFileInfo) -> Value {
    let mut limits = file_limits();
    let is_encrypted = |header: &Header| header.crypt_method != CryptMethod::None;
    if layer.keys.is_some() || layer.header().is_some_and(is_encrypted) {
        limits["request-alignment"] = SECTOR_BYTES.into();
    }
    if let Some(header) = layer.header() {
        let geometry = header.geometry();
        limits["discard-alignment"] = geometry.cluster_bytes().into();
        limits["write-zeroes-alignment"] = geometry.subcluster_bytes().into();
    }
    limits
}

/// The table of internal snapshots.
pub fn snapshot_lines(snapshots: &[SnapshotInfo]) -> Vec<String> {
    let line = |[id, tag, size, date, clock, icount]: [&str; 6]| {
        format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}")
    };
    let mut lines = vec![line(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"])];
    for snapshot in snapshots {
        let seconds = snapshot.vm_clock_nsec / 1_000_000_000;
        let clock = format!(
            "{:04}:{:02}:{:02}.{:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60,
            snapshot.vm_clock_nsec / 1_000_000 % 1000
        );
        lines.push(line([
            &snapshot.id,
            &snapshot.name,
            &size::human(snapshot.vm_state_size),
            &time::local_date_and_time(u64::from(snapshot.date_sec)),
            &clock,
            &snapshot.icount.map_or(String::new(), |n| n.to_string()),
        ]));
    }
    lines
}

/// Returns the fields that only qcow2 images have, in QEMU's order.
fn specific(layer: &ImageFileInfo, inspection: &Inspection) -> Value {
    let header = &inspection.header;
    let mut out = serde_json::Map::new();
    let mut put = |name: &str, value: Value| {
        out.insert(name.to_string(), value);
    };
    let is_v3 = header.version >= 3;
    put("compat", if is_v3 { "1.1" } else { "0.10" }.into());
    put("compression-type", header.compression_type.name().into());
    if is_v3 {
        put("lazy-refcounts", header.has_lazy_refcounts().into());
    }
    if !inspection.bitmaps.is_empty() {
        let bitmaps = inspection.bitmaps.iter().map(|bitmap| {
            let flags = [(bitmap.in_use, "in-use"), (bitmap.auto, "auto")];
            let flags = flags.iter().filter(|(set, _)| *set).map(|(_, name)| *name);
            json!({
                "flags": flags.collect::<Vec<_>>(),
                "name": bitmap.name,
                "granularity": bitmap.granularity,
            })
        });
        put("bitmaps", bitmaps.collect());
    }
    put("refcount-bits", header.geometry().refcount_bits().into());
    match (header.crypt_method, &layer.keys) {
        (CryptMethod::Aes, _) => put("encrypt", json!({ "format": "aes" })),
        (_, Some(keys)) => put("encrypt", described(keys, Some("luks"))),
        (CryptMethod::None | CryptMethod::Luks, None) => {}
    }
    data_file(header, &mut put);
    if is_v3 {
        put("corrupt", header.is_corrupt().into());
        put("extended-l2", header.is_extended_l2().into());
    }
    if let Some(hint) = header.extensions.allocation {
        let policy = match hint.policy {
            AllocPolicy::Auto => "auto",
            AllocPolicy::Contiguous => "contiguous",
            AllocPolicy::Sparse => "sparse",
        };
        put("alloc-policy", policy.into());
    }
    Value::Object(out)
}

fn data_file(header: &Header, put: &mut impl FnMut(&str, Value)) {
    if let Some(name) = header.data_file_name() {
        put("data-file", name.into());
    }
    if header.has_data_file() {
        put("data-file-raw", header.is_data_file_raw().into());
    }
}

/// A report's members as indented text: blanks for hyphens, indices for list items. The depth is
/// fixed by [`specific`], so this recursion is bounded.
fn specific_text(value: &Value, level: usize, lines: &mut Vec<String>) {
    let members: Vec<(String, &Value)> = match value {
        Value::Object(members) => {
            let members = members.iter();
            members
                .map(|(name, value)| (name.replace('-', " "), value))
                .collect()
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.map(|(at, item)| (format!("[{at}]"), item)).collect()
        }
        _ => Vec::new(),
    };
    for (name, value) in members {
        let indent = " ".repeat(level * 4);
        match value {
            Value::Object(_) | Value::Array(_) => {
                lines.push(format!("{indent}{name}:"));
                specific_text(value, level + 1, lines);
            }
            Value::String(text) => lines.push(format!("{indent}{name}: {text}")),
            plain => lines.push(format!("{indent}{name}: {plain}")),
        }
    }
}

fn as_json(layer: &ImageFileInfo, detail: Detail) -> Value {
    let mut out = serde_json::Map::new();
    let mut put = |name: &str, value: Value| {
        out.insert(name.to_string(), value);
    };
    let children = match layer.protocol {
        Protocol::Bare(_) => json!([]),
        Protocol::File | Protocol::Named(_) => {
            json!([{ "name": "file", "info": child_json(layer, detail) }])
        }
    };
    put("children", children);
    let header = layer.header();
    let backing = header.and_then(|header| header.backing_file.as_ref());
    if let Some(inspection) = &layer.inspection {
        if !inspection.snapshots.is_empty() {
            put(
                "snapshots",
                inspection.snapshots.iter().map(snapshot_json).collect(),
            );
        }
        if let (Some(_), Some(format)) = (backing, inspection.header.backing_format()) {
            put("backing-filename-format", format.into());
        }
    }
    put("virtual-size", layer.virtual_size().into());
    put("filename", layer.shown_name().into());
    if let Some(header) = header {
        put("cluster-size", header.geometry().cluster_bytes().into());
    }
    put("format", shown_format(layer).into());
    if let Some(bytes) = layer.disk_size {
        put("actual-size", bytes.into());
    }
    if let Some(inspection) = &layer.inspection {
        let data = specific(layer, inspection);
        put("format-specific", json!({ "type": "qcow2", "data": data }));
    } else if let Some(keys) = &layer.keys {
        let data = described(keys, None);
        put("format-specific", json!({ "type": "luks", "data": data }));
    }
    if let Some(name) = backing {
        let resolved = resolve_name(&layer.filename, name);
        put("full-backing-filename", resolved.into());
        put("backing-filename", name.as_str().into());
    }
    let is_encrypted = |header: &Header| header.crypt_method != CryptMethod::None;
    if layer.keys.is_some() || header.is_some_and(is_encrypted) {
        put("encrypted", true.into());
    }
    if !layer.is_bare() {
        put("dirty-flag", header.is_some_and(Header::is_dirty).into());
    }
    if detail.limits {
        put("limits", image_limits(layer));
    }
    Value::Object(out)
}

fn child_json(layer: &ImageFileInfo, detail: Detail) -> Value {
    let mut out = json!({
        "children": [],
        "virtual-size": layer.file_len,
        "filename": layer.filename,
        "format": child_format(layer),
    });
    if let Some(bytes) = layer.disk_size {
        out["actual-size"] = bytes.into();
    }
    let mut data = json!({});
    if let Some(bytes) = layer.extent_hint_bytes {
        data["extent-size-hint"] = bytes.into();
    }
    if detail.ours {
        data["zero-methods"] = layer.zero_methods.clone().into();
    }
    if layer.protocol == Protocol::File {
        out["format-specific"] = json!({ "type": "file", "data": data });
        out["dirty-flag"] = false.into();
    }
    if detail.limits {
        out["limits"] = file_limits();
    }
    out
}

/// A snapshot in the JSON of `info`.
pub fn snapshot_json(snapshot: &SnapshotInfo) -> Value {
    let mut out = serde_json::Map::new();
    if let Some(icount) = snapshot.icount {
        out.insert("icount".to_string(), icount.into());
    }
    let rest = [
        (
            "vm-clock-nsec",
            (snapshot.vm_clock_nsec % 1_000_000_000).into(),
        ),
        ("name", Value::from(snapshot.name.as_str())),
        ("date-sec", snapshot.date_sec.into()),
        ("date-nsec", snapshot.date_nsec.into()),
        (
            "vm-clock-sec",
            (snapshot.vm_clock_nsec / 1_000_000_000).into(),
        ),
        ("id", snapshot.id.as_str().into()),
        ("vm-state-size", snapshot.vm_state_size.into()),
    ];
    out.extend(
        rest.into_iter()
            .map(|(name, value)| (name.to_string(), value)),
    );
    Value::Object(out)
}
