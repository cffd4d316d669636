//! `qemu-nbd --list`: what another server offers.

use std::fmt::Write as _;

use cowslip::error::system_words;
use cowslip_console::error::CommandError;
use cowslip_console::output;
use cowslip_nbd::protocol::TransmissionFlags;
use cowslip_nbd::remote::{Address, refused};
use cowslip_nbd::tls::ClientTls;
use cowslip_nbd::{Client, ExportDescription};
use cowslip_queue::{Backend, Queue};

/// Flags in the order of their bits, with qemu-nbd's names.
const FLAGS: &[(TransmissionFlags, &str)] = &[
    (TransmissionFlags::READ_ONLY, "readonly"),
    (TransmissionFlags::SEND_FLUSH, "flush"),
    (TransmissionFlags::SEND_FUA, "fua"),
    (TransmissionFlags::ROTATIONAL, "rotational"),
    (TransmissionFlags::SEND_TRIM, "trim"),
    (TransmissionFlags::SEND_WRITE_ZEROES, "zeroes"),
    (TransmissionFlags::SEND_DF, "df"),
    (TransmissionFlags::CAN_MULTI_CONN, "multi"),
    (TransmissionFlags::SEND_RESIZE, "resize"),
    (TransmissionFlags::SEND_CACHE, "cache"),
    (TransmissionFlags::SEND_FAST_ZERO, "fast-zero"),
    (
        TransmissionFlags::BLOCK_STATUS_PAYLOAD,
        "block-status-payload",
    ),
];

/// Prints the exports of the server at `address`, which is asked over TLS if that is given.
///
/// # Errors
/// It does not answer, or not as it should.
pub fn list(address: &Address, tls: Option<&ClientTls>) -> Result<(), CommandError> {
    let queue =
        Queue::new(Backend::Auto).map_err(|error| CommandError::new(system_words(&error)))?;
    let exports = queue.block_on(async {
        let stream = address.connect().await?;
        let listed = Client::list(stream, tls).await;
        listed.map_err(|error| CommandError::from(refused(&error, "3 (list)")))
    })?;
    output::print(&text(&exports));
    Ok(())
}

fn text(exports: &[ExportDescription]) -> String {
    let mut text = format!("exports available: {}\n", exports.len());
    for export in exports {
        describe(export, &mut text).expect("a string takes all");
    }
    text
}

fn describe(export: &ExportDescription, text: &mut String) -> std::fmt::Result {
    writeln!(text, " export: '{}'", export.name)?;
    if !export.description.is_empty() {
        writeln!(text, "  description: {}", export.description)?;
    }
    writeln!(text, "  size:  {}", export.size)?;
    write!(text, "  flags: {:#x} (", export.flags.0)?;
    for (flag, name) in FLAGS {
        if export.flags.contains(*flag) {
            write!(text, " {name}")?;
        }
    }
    writeln!(text, " )")?;
    if let Some(sizes) = &export.block_sizes {
        writeln!(text, "  min block: {}", sizes.minimum)?;
        writeln!(text, "  opt block: {}", sizes.preferred)?;
        writeln!(text, "  max block: {}", sizes.maximum)?;
    }
    let bits = if export.extended_headers { 64 } else { 32 };
    writeln!(text, "  transaction size: {bits}-bit")?;
    if !export.contexts.is_empty() {
        writeln!(text, "  available meta contexts: {}", export.contexts.len())?;
        for context in &export.contexts {
            writeln!(text, "   {context}")?;
        }
    }
    Ok(())
}
