//! Words of the qemu-io shell: the line's words, sizes, pattern bytes, numbers. Pure.
//!
//! Its quoting rule is that there is none: words end at a blank, and at nothing else.

use cowslip_cmdline::strtol::integer;
use cowslip_console::size::{self, SizeError};

/// The longest request: what fits 31 bits in whole sectors.
pub const REQUEST_BYTES_MAX: u64 = 2_147_483_136;

/// The unit of requests that are older than byte granularity.
pub const SECTOR_BYTES: u64 = 512;

/// The words of a line.
pub fn words(line: &str) -> Vec<String> {
    line.split(' ')
        .filter(|word| !word.is_empty())
        .map(str::to_string)
        .collect()
}

/// Reads an offset or a length.
///
/// # Errors
/// The complaint.
pub fn size(text: &str) -> Result<u64, String> {
    size_shown_as(text, text)
}

/// Parses a size, as [`size()`] does; the complaint shows `shown` for it.
///
/// # Errors
/// The complaint.
pub fn size_shown_as(text: &str, shown: &str) -> Result<u64, String> {
    let why = match size::parse(text) {
        Ok(bytes) if bytes <= size::SIZE_MAX => return Ok(bytes),
        Ok(_) | Err(SizeError::TooLarge) => "argument too large",
        Err(SizeError::Malformed) => "non-numeric argument, or extraneous/unrecognized suffix",
    };
    Err(format!("Parsing error: {why} -- {shown}"))
}

/// Reads the byte of `-P`.
///
/// # Errors
/// The complaint.
pub fn pattern(text: &str) -> Result<u8, String> {
    integer(text)
        .and_then(|number| u8::try_from(number).ok())
        .ok_or_else(|| format!("{text} is not a valid pattern byte"))
}

/// The lengths of a vectored request, added up.
///
/// # Errors
/// The complaint.
pub fn total_length(lengths: &[&str]) -> Result<u64, String> {
    let mut total: u64 = 0;
    for text in lengths {
        let length = size(text)?;
        if length > REQUEST_BYTES_MAX {
            return Err(format!(
                "Argument '{text}' exceeds maximum size {REQUEST_BYTES_MAX}"
            ));
        }
        total += length;
        if total > REQUEST_BYTES_MAX {
            return Err(format!(
                "The total number of bytes exceed the maximum size {REQUEST_BYTES_MAX}"
            ));
        }
    }
    Ok(total)
}

/// A request of whole sectors, where the verb asks for that.
///
/// # Errors
/// The complaint.
pub fn whole_sectors(offset: u64, length: u64) -> Result<(), String> {
    for (number, name) in [(offset, "offset"), (length, "count")] {
        if !number.is_multiple_of(SECTOR_BYTES) {
            return Err(format!(
                "{number} is not a sector-aligned value for '{name}'"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // The expectations were taken from qemu-io 10.0.2.

    #[test]
    fn words_end_at_blanks_only() {
        assert_eq!(
            words("  write  -P 3   0 64k "),
            ["write", "-P", "3", "0", "64k"]
        );
        assert_eq!(words("write \" 0\" 512"), ["write", "\"", "0\"", "512"]);
        assert_eq!(words("write\t0"), ["write\t0"]);
        assert!(words("   ").is_empty());
    }

    #[test]
    fn sizes_are_read_as_qemu_io_reads_them() {
        for (text, expected) in [
            ("0", 0),
            ("010", 10),
            ("0x10", 16),
            ("0X10", 16),
            ("0x1b", 27),
            ("0x1E", 30),
            ("+5", 5),
            ("\t5", 5),
            ("1b", 1),
            ("1B", 1),
            ("1.", 1),
            ("1.0", 1),
            ("0.0b", 0),
            ("0k", 0),
            ("1.k", 1024),
            (".5k", 512),
            ("1.5k", 1536),
            ("0.1k", 102),
            ("0.0009k", 1),
            ("0.0004k", 0),
            ("0.99999999999999999999k", 1024),
            ("1m", 1 << 20),
            ("1p", 1 << 50),
            ("1e", 1 << 60),
            ("1.e", 1 << 60),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(size(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn text_that_is_no_size_is_distinguished_from_sizes_that_are_too_large() {
        for text in [
            "x", "64kb", "1.5", "1.5b", "0.5b", "1.5x", "1.x", ".", "k", "1kk", "0x", "0xk", "0xg",
            "0x10k", "0x1.8k", "0x1.0", "0x1p3", "0e1", "1e3", "1e1k", "1.0e0k", "1_000", "inf",
            "nan", "-", "+", "+-1", "-x", "-1k", "-1x", "-0.0", "-1.5k", "0b1",
        ] {
            let expected = format!(
                "Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {text}"
            );
            assert_eq!(size(text), Err(expected), "{text}");
        }
        for text in [
            "8E",
            "9E",
            "16E",
            "1023.9999E",
            "16777216.5E",
            "9223372036854775808",
            "18446744073709551616",
            "0xffffffffffffffff",
            "0x10000000000000000",
            "9007199254740993.5k",
            "-0",
            "-1",
            "-5",
        ] {
            let expected = format!("Parsing error: argument too large -- {text}");
            assert_eq!(size(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn patterns_are_c_integers_of_one_byte() {
        for (text, expected) in [
            ("0", 0),
            ("010", 8),
            ("0xFF", 255),
            ("+5", 5),
            ("00000005", 5),
        ] {
            assert_eq!(pattern(text), Ok(expected), "{text}");
        }
        for text in [
            "256",
            "-1",
            "0x",
            "x",
            "1k",
            "08",
            "2147483648",
            "99999999999999999999",
            "q",
            "+",
            "",
        ] {
            let expected = format!("{text} is not a valid pattern byte");
            assert_eq!(pattern(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn lengths_of_vectors_have_two_limits() {
        assert_eq!(total_length(&["512", "1k", "7"]), Ok(1543));
        assert_eq!(
            total_length(&["512", "2G"]),
            Err("Argument '2G' exceeds maximum size 2147483136".to_string())
        );
        assert_eq!(
            total_length(&["1G", "1G", "x"]),
            Err("The total number of bytes exceed the maximum size 2147483136".to_string())
        );
    }

    #[test]
    fn sector_complaints_name_the_first_culprit() {
        assert_eq!(whole_sectors(512, 1024), Ok(()));
        assert_eq!(
            whole_sectors(7, 13),
            Err("7 is not a sector-aligned value for 'offset'".to_string())
        );
        assert_eq!(
            whole_sectors(0, 10),
            Err("10 is not a sector-aligned value for 'count'".to_string())
        );
    }
}
