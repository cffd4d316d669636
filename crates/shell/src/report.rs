//! Output of the qemu-io shell on requests, extents and images. Pure: values to text.

use std::fmt::Write as _;
use std::time::Duration;

use cowslip::Error;
use cowslip::qcow2::header::Header;
use cowslip_console::output::is_called_as_qemu;

/// The shape of the lines after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Two lines for people.
    Plain,
    /// One line for programs (`-C`).
    Machine,
    /// Nothing (`-q`).
    Quiet,
}

/// A finished request: its range, and the time that it took.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Verb of the request: "read", "wrote", "discard".
    pub done: &'static str,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes asked for; a request is done in full or fails.
    pub length: u64,
    /// How long it took.
    pub elapsed: Duration,
}

impl Report {
    /// The lines in which the request is reported.
    pub fn text(&self, style: Style) -> String {
        // A clock too coarse to see the request must not divide by zero.
        let seconds = self.elapsed.as_secs_f64().max(1e-9);
        let bytes_per_second = self.length as f64 / seconds;
        let ops_per_second = 1.0 / seconds;
        match style {
            Style::Quiet => String::new(),
            Style::Machine => format!(
                "{},1,{},{bytes_per_second:.3},{ops_per_second:.3}\n",
                self.length,
                clock(self.elapsed)
            ),
            Style::Plain => format!(
                "{} {}/{} bytes at offset {}\n{}, 1 ops; {} ({}/sec and {ops_per_second:.4} ops/sec)\n",
                self.done,
                self.length,
                self.length,
                self.offset,
                size(self.length as f64),
                short_time(self.elapsed),
                size(bytes_per_second),
            ),
        }
    }
}

/// Why a request failed, in the system's words. If the image is damaged, they are followed under
/// our own name by the place of the damage; under QEMU's, scripts compare the line.
pub fn cause(error: &Error) -> String {
    let words = error.system_words();
    match error {
        Error::Corrupt { detail, .. } if !is_called_as_qemu() => {
            let is_hinted_at = detail.contains("check -r all");
            let hint = match is_hinted_at {
                true => "",
                false => " (check shows all damage, check -r all repairs it)",
            };
            format!("{words}: {error}{hint}")
        }
        _ => words,
    }
}

/// A number of bytes with a unit and up to three decimals.
pub fn size(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024.0 {
        return match bytes.fract() == 0.0 {
            true => format!("{bytes} bytes"),
            false => format!("{bytes:.6} bytes"),
        };
    }
    let mut scaled = bytes / 1024.0;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    let number = format!("{scaled:.3}");
    let number = number.strip_suffix(".000").unwrap_or(&number);
    format!("{number} {}", UNITS[unit])
}

/// Hours, minutes, seconds.
fn clock(elapsed: Duration) -> String {
    let whole = elapsed.as_secs();
    let seconds = (whole % 60) as f64 + f64::from(elapsed.subsec_micros()) / 1e6;
    format!("{}:{:02}:{seconds:05.2}", whole / 3600, whole / 60 % 60)
}

/// Seconds, or the clock from a minute on.
fn short_time(elapsed: Duration) -> String {
    match elapsed.as_secs() {
        0..60 => format!("{:05.2} sec", elapsed.as_secs_f64()),
        _ => clock(elapsed),
    }
}

/// A dump of `bytes`, which start at `offset` on the disk, 16 to a line.
pub fn dump(bytes: &[u8], offset: u64) -> String {
    let mut text = String::with_capacity(bytes.len() / 16 * 76 + 76);
    for (line, row) in (0u64..).zip(bytes.chunks(16)) {
        // Formatting into a string cannot fail.
        write!(text, "{:08x}:  ", offset + line * 16).expect("a string takes all");
        for byte in row {
            write!(text, "{byte:02x} ").expect("a string takes all");
        }
        text.push(' ');
        text.extend(row.iter().map(|&byte| match byte {
            byte if byte.is_ascii_alphanumeric() => char::from(byte),
            _ => '.',
        }));
        text.push('\n');
    }
    text
}

/// The complaint of `-P`.
pub fn mismatch(offset: u64, length: u64) -> String {
    format!("Pattern verification failed at offset {offset}, {length} bytes\n")
}

/// The line of `alloc`.
pub fn allocated_line(allocated: u64, length: u64, offset: u64) -> String {
    format!(
        "{allocated}/{length} bytes allocated at offset {}\n",
        size(offset as f64)
    )
}

/// Whether the image itself holds a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// In the image, be it as zeroes.
    Here,
    /// In the backing file, or nowhere.
    Elsewhere,
}

/// A line of `map`.
pub fn map_line(start: u64, length: u64, held: Held) -> String {
    let words = match held {
        Held::Here => "    allocated",
        Held::Elsewhere => "not allocated",
    };
    format!(
        "{} ({length:#x}) bytes {words} at offset {} ({start:#x})\n",
        size(length as f64),
        size(start as f64)
    )
}

/// The text of `info` of a raw image.
pub fn raw_info() -> String {
    info_head("raw", 0, 0)
}

/// The text of `info` of a qcow2 image.
pub fn qcow2_info(header: &Header) -> String {
    let begin = header.geometry().vm_state_offset(header.size);
    let mut text = info_head("qcow2", 1 << header.cluster_bits, begin);
    text.push_str("Format specific information:\n");
    let mut line = |name: &str, value: &dyn std::fmt::Display| {
        writeln!(text, "    {name}: {value}").expect("a string takes all");
    };
    let is_v3 = header.version >= 3;
    line("compat", &if is_v3 { "1.1" } else { "0.10" });
    line("compression type", &header.compression_type.name());
    if is_v3 {
        line("lazy refcounts", &header.has_lazy_refcounts());
    }
    line("refcount bits", &(1u32 << header.refcount_order));
    if header.has_data_file() {
        if let Some(name) = header.data_file_name() {
            line("data file", &name);
        }
        line("data file raw", &header.is_data_file_raw());
    }
    if is_v3 {
        line("corrupt", &header.is_corrupt());
        line("extended l2", &header.is_extended_l2());
    }
    text
}

fn info_head(format: &str, cluster_bytes: u64, vm_state_offset: u64) -> String {
    format!(
        "format name: {format}\ncluster size: {}\nvm state offset: {}\n",
        size(cluster_bytes as f64),
        size(vm_state_offset as f64)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    // The expectations were taken from qemu-io 10.0.2.

    #[test]
    fn sizes_have_units_and_at_most_three_decimals() {
        for (bytes, expected) in [
            (0.0, "0 bytes"),
            (1.0, "1 bytes"),
            (512.0, "512 bytes"),
            (333.261_682, "333.261682 bytes"),
            (53.8445, "53.844500 bytes"),
            (1024.0, "1 KiB"),
            (1543.0, "1.507 KiB"),
            (1536.0, "1.500 KiB"),
            (1_000_448.0, "977 KiB"),
            (3_211_264.0, "3.062 MiB"),
            (107_374_182_400.0, "100 GiB"),
            (2_147_483_136.0, "2 GiB"),
            (8.0 * (1u64 << 60) as f64, "8 EiB"),
            (9000.0 * (1u64 << 60) as f64, "9000 EiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
    }

    #[test]
    fn requests_are_reported_in_two_lines_or_in_one_for_machines() {
        let report = Report {
            done: "wrote",
            offset: 512,
            length: 65536,
            elapsed: Duration::from_millis(250),
        };
        assert_eq!(
            report.text(Style::Plain),
            "wrote 65536/65536 bytes at offset 512\n\
             64 KiB, 1 ops; 00.25 sec (256 KiB/sec and 4.0000 ops/sec)\n"
        );
        assert_eq!(
            report.text(Style::Machine),
            "65536,1,0:00:00.25,262144.000,4.000\n"
        );
        assert_eq!(report.text(Style::Quiet), "");
        let long = Report {
            elapsed: Duration::from_millis(1_217_120),
            length: 512,
            ..report
        };
        assert_eq!(
            long.text(Style::Plain),
            "wrote 512/512 bytes at offset 512\n\
             512 bytes, 1 ops; 0:20:17.12 (0.420665 bytes/sec and 0.0008 ops/sec)\n"
        );
    }

    #[test]
    fn dumps_show_letters_and_digits_only() {
        assert_eq!(
            dump(b"abc09Z~ !\0\xff@[`{|", 1000),
            "000003e8:  61 62 63 30 39 5a 7e 20 21 00 ff 40 5b 60 7b 7c  abc09Z..........\n"
        );
        assert_eq!(
            dump(&[0x61; 18], 0x10),
            "00000010:  61 61 61 61 61 61 61 61 61 61 61 61 61 61 61 61  aaaaaaaaaaaaaaaa\n\
             00000020:  61 61  aa\n"
        );
        assert_eq!(dump(&[], 0), "");
    }

    #[test]
    fn extents_are_printed_in_both_notations() {
        assert_eq!(
            map_line(65536, 983_040, Held::Elsewhere),
            "960 KiB (0xf0000) bytes not allocated at offset 64 KiB (0x10000)\n"
        );
        assert_eq!(
            map_line(0, 65536, Held::Here),
            "64 KiB (0x10000) bytes     allocated at offset 0 bytes (0x0)\n"
        );
        assert_eq!(
            allocated_line(0, 0, 2 << 20),
            "0/0 bytes allocated at offset 2 MiB\n"
        );
        assert_eq!(
            mismatch(10, 502),
            "Pattern verification failed at offset 10, 502 bytes\n"
        );
    }
}
