//! Whole numbers, as QEMU's programs read them by the C library. Pure.

/// Reads what C's `strtol` reads with base 0, and nothing behind it: decimal, `0x` hexadecimal, `0`
/// octal. `None` also where it would not fit.
pub fn integer(text: &str) -> Option<i64> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (radix, digits) = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(digits) => (16, digits),
        None if digits.len() > 1 && digits.starts_with('0') => (8, &digits[1..]),
        None => (10, digits),
    };
    if !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    let number = i64::from_str_radix(digits, radix).ok()?;
    Some(if negative { -number } else { number })
}
