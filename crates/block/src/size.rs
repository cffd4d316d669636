//! Sizes as people write them: `64k`, `1.5G`, `0x1000`; and as QEMU prints them: `1.5 MiB`.

/// The largest size of a disk.
pub const SIZE_MAX: u64 = i64::MAX as u64;

/// Why a size could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// It is no number, or has an unknown suffix.
    Malformed,
    /// It is beyond 64 bits.
    TooLarge,
}

/// Reads a number with an optional binary suffix (b, k, M, G, T, P, E, any case); without one,
/// `unit` applies. Fractions are allowed with a suffix, as is hexadecimal without one.
pub fn parse_with_unit(text: &str, unit: u64) -> Result<u64, SizeError> {
    if let Some(hex) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        if hex.is_empty() || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(SizeError::Malformed);
        }
        let number = u64::from_str_radix(hex, 16).map_err(|_| SizeError::TooLarge)?;
        return number.checked_mul(unit).ok_or(SizeError::TooLarge);
    }
    let text = text.trim_start();
    if let Some(positive) = text.strip_prefix('-') {
        // A negative whole number wraps round to one that is too large; no other form is read.
        let is_whole = !positive.is_empty() && positive.bytes().all(|b| b.is_ascii_digit());
        return Err(match is_whole {
            true => SizeError::TooLarge,
            false => SizeError::Malformed,
        });
    }
    let text = text.strip_prefix('+').unwrap_or(text);
    let (digits, unit) = match text.chars().last().and_then(suffix_unit) {
        Some(unit) => (&text[..text.len() - 1], unit),
        None => (text, unit),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let is_number = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if digits.is_empty() || digits == "." || !is_number(whole) || !is_number(fraction) {
        return Err(SizeError::Malformed);
    }
    if unit == 1 && fraction.bytes().any(|b| b != b'0') {
        return Err(SizeError::Malformed);
    }
    let whole = if whole.is_empty() { "0" } else { whole };
    let whole: u64 = whole.parse().map_err(|_| SizeError::TooLarge)?;
    let bytes = whole.checked_mul(unit).ok_or(SizeError::TooLarge)?;
    bytes
        .checked_add(fraction_bytes(fraction, unit))
        .ok_or(SizeError::TooLarge)
}

/// As [`parse_with_unit`], in bytes.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    parse_with_unit(text, 1)
}

fn suffix_unit(suffix: char) -> Option<u64> {
    let power = match suffix.to_ascii_lowercase() {
        'b' => 0,
        'k' => 10,
        'm' => 20,
        'g' => 30,
        't' => 40,
        'p' => 50,
        'e' => 60,
        _ => return None,
    };
    Some(1 << power)
}

/// `0.FRACTION` of a unit, to the nearest byte. Digits beyond the 18th move nothing.
fn fraction_bytes(fraction: &str, unit: u64) -> u64 {
    let digits = &fraction[..fraction.len().min(18)];
    let Ok(number) = digits.parse::<u128>() else {
        return 0;
    };
    let scale = 10u128.pow(digits.len() as u32);
    let bytes = (number * u128::from(unit) + scale / 2) / scale;
    u64::try_from(bytes).expect("a fraction of a unit is at most the unit")
}

/// A size as QEMU prints it: three significant digits and a binary unit.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    // The unit changes where the rounded number would be 1000 or more, not at 1024.
    let (_, exponent) = frexp(bytes as f64 / (1000.0 / 1024.0));
    let unit = (exponent - 1).max(0) / 10;
    let divisor = 2f64.powi(unit * 10);
    format!(
        "{} {}",
        three_digits(bytes as f64 / divisor),
        UNITS[unit as usize]
    )
}

/// The exponent `e` with `0.5 <= |x| / 2^e < 1`.
fn frexp(x: f64) -> (f64, i32) {
    if x == 0.0 {
        return (0.0, 0);
    }
    let mut exponent = x.abs().log2().floor() as i32 + 1;
    let mut fraction = x / 2f64.powi(exponent);
    if fraction >= 1.0 {
        fraction /= 2.0;
        exponent += 1;
    }
    if fraction < 0.5 {
        fraction *= 2.0;
        exponent -= 1;
    }
    (fraction, exponent)
}

/// C's `%0.3g` for numbers below 1024.
fn three_digits(x: f64) -> String {
    let decimals = match x {
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        x if x >= 0.9995 || x == 0.0 => 2,
        _ => 3,
    };
    let text = format!("{x:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let cases = [
            ("0", Ok(0)),
            ("512", Ok(512)),
            ("512b", Ok(512)),
            ("64k", Ok(65536)),
            ("64K", Ok(65536)),
            ("1.5G", Ok(3 << 29)),
            ("0x1000", Ok(4096)),
            ("7E", Ok(7 << 60)),
            ("16E", Err(SizeError::TooLarge)),
            ("18446744073709551616", Err(SizeError::TooLarge)),
            ("1X", Err(SizeError::Malformed)),
            ("", Err(SizeError::Malformed)),
            ("k", Err(SizeError::Malformed)),
            ("1.5", Err(SizeError::Malformed)),
            ("-1", Err(SizeError::TooLarge)),
            ("-x", Err(SizeError::Malformed)),
            ("1.0", Ok(1)),
            (".5M", Ok(512 << 10)),
            (" +1M", Ok(1 << 20)),
            (".", Err(SizeError::Malformed)),
            ("0x10k", Err(SizeError::Malformed)),
            ("1 k", Err(SizeError::Malformed)),
            ("1é", Err(SizeError::Malformed)),
            ("0.0000000000000000000001k", Ok(0)),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text), expected, "{text:?}");
        }
        assert_eq!(parse_with_unit("4", 1 << 20), Ok(4 << 20));
    }

    #[test]
    fn sizes_are_printed_as_qemu_prints_them() {
        let cases = [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (1 << 20, "1 MiB"),
            (200_704, "196 KiB"),
            (1_073_741_824_000, "0.977 TiB"),
            (i64::MAX as u64, "8 EiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(human(bytes), expected, "{bytes}");
        }
    }
}
