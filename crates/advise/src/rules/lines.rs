//! Command lines and numbers of answers, and from what on a gain counts.

/// A gain in speed below this is within what runs differ by.
pub const SPEED_GAIN: f64 = 1.3;
/// Space below this is not worth a copy.
pub const SPACE_BYTES: u64 = 64 << 20;

/// A file name for a shell.
pub fn quoted(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./+:@%,".contains(c);
    match !name.is_empty() && name.chars().all(is_plain) && !name.starts_with('-') {
        true => name.to_string(),
        false if name.starts_with('-') => quoted(&format!("./{name}")),
        false => format!("'{}'", name.replace('\'', "'\\''")),
    }
}

/// A number of bytes as command lines take it.
pub fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes >= 1024 && bytes.is_multiple_of(1024) => format!("{}k", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// A number of bytes for people.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match value < 10.0 && value.fract() > 0.05 {
        true => format!("{value:.1} {}", UNITS[unit]),
        false => format!("{value:.0} {}", UNITS[unit]),
    }
}

/// The name of a copy beside a file: `vm.new.qcow2`.
pub fn copy_name(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((stem, extension)) if !extension.contains('/') && !stem.is_empty() => {
            format!("{stem}.new.{extension}")
        }
        _ => format!("{name}.new"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_shell() {
        for (name, expected) in [
            ("vm.qcow2", "vm.qcow2"),
            ("my vm.qcow2", "'my vm.qcow2'"),
            ("it's", "'it'\\''s'"),
            ("-o", "./-o"),
            ("-a b", "'./-a b'"),
            ("", "''"),
            ("$(rm)", "'$(rm)'"),
        ] {
            assert_eq!(quoted(name), expected);
        }
    }

    #[test]
    fn copies_lie_beside_their_images() {
        for (name, expected) in [
            ("vm.qcow2", "vm.new.qcow2"),
            ("/a.b/vm", "/a.b/vm.new"),
            (".hidden", ".hidden.new"),
        ] {
            assert_eq!(copy_name(name), expected);
        }
    }

    #[test]
    fn sizes_are_short_and_exact() {
        assert_eq!(size(131_072), "128k");
        assert_eq!(size(1 << 20), "1M");
        assert_eq!(size(1000), "1000");
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(40 << 30), "40 GiB");
    }
}
