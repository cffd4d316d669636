//! The subject of a certificate as text, as QEMU's `authz` objects compare it: `C=DE,O=Example\,
//! Inc.,CN=client`, in the order of the certificate, escaped after RFC 4514. Pure; any bytes may
//! come, though in a server only the certificates of its own authority do.

/// Attributes with short names, by their identifier's DER bytes (RFC 4514 section 3; `EMAIL` is
/// GnuTLS's).
const ATTRIBUTES: &[(&[u8], &str)] = &[
    (&[0x55, 4, 3], "CN"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 9], "STREET"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25],
        "DC",
    ),
    (
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1],
        "UID",
    ),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1], "EMAIL"),
];

const INTEGER: u8 = 0x02;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const VERSION: u8 = 0xa0;

/// The subject of a certificate in DER; `None` if it is no certificate, or has an attribute that is
/// no text or has no short name: such a subject matches nothing.
pub(super) fn subject(certificate: &[u8]) -> Option<String> {
    let mut outer = Der(certificate);
    let mut certificate = Der(outer.take(SEQUENCE)?);
    let mut fields = Der(certificate.take(SEQUENCE)?);
    if fields.0.first() == Some(&VERSION) {
        fields.take(VERSION)?;
    }
    let before_subject = [INTEGER, SEQUENCE, SEQUENCE, SEQUENCE];
    for field in before_subject {
        fields.take(field)?;
    }
    let mut names = Der(fields.take(SEQUENCE)?);
    let mut text = String::new();
    while !names.0.is_empty() {
        let mut separator = ',';
        let mut attributes = Der(names.take(SET)?);
        while !attributes.0.is_empty() {
            if !text.is_empty() {
                text.push(separator);
            }
            separator = '+';
            attribute(Der(attributes.take(SEQUENCE)?), &mut text)?;
        }
    }
    Some(text)
}

fn attribute(mut attribute: Der<'_>, text: &mut String) -> Option<()> {
    let identifier = attribute.take(OBJECT_IDENTIFIER)?;
    let known = ATTRIBUTES.iter().find(|(known, _)| *known == identifier);
    text.push_str(known?.1);
    text.push('=');
    let kind = *attribute.0.first()?;
    if ![UTF8_STRING, PRINTABLE_STRING, IA5_STRING].contains(&kind) {
        return None;
    }
    let value = std::str::from_utf8(attribute.take(kind)?).ok()?;
    let last = value.chars().count().checked_sub(1);
    for (at, letter) in value.chars().enumerate() {
        let at_an_end =
            (letter == ' ' && (at == 0 || Some(at) == last)) || (letter == '#' && at == 0);
        if at_an_end || matches!(letter, ',' | '+' | '"' | '\\' | '<' | '>' | ';') {
            text.push('\\');
        }
        text.push(letter);
    }
    Some(())
}

/// Values one after the other, each with its tag and its length.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The content of the next value, if it has this tag.
    fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        let (&found, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (len, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            // Certificates are shorter than 64 KiB, so two bytes suffice.
            0x81 | 0x82 => {
                let (digits, rest) = rest.split_at_checked(usize::from(first & 3))?;
                let len = digits
                    .iter()
                    .fold(0, |len, &digit| len << 8 | usize::from(digit));
                (len, rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(len)?;
        self.0 = rest;
        (found == tag).then_some(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(tag: u8, content: &[u8]) -> Vec<u8> {
        let len = content.len();
        let head = match len {
            0..=0x7f => vec![tag, len as u8],
            _ => vec![tag, 0x82, (len >> 8) as u8, len as u8],
        };
        [head, content.to_vec()].concat()
    }

    fn attribute(identifier: &[u8], kind: u8, text: &[u8]) -> Vec<u8> {
        let identifier = value(OBJECT_IDENTIFIER, identifier);
        value(SEQUENCE, &[identifier, value(kind, text)].concat())
    }

    fn certificate(names: &[Vec<Vec<u8>>]) -> Vec<u8> {
        let names: Vec<Vec<u8>> = names.iter().map(|set| value(SET, &set.concat())).collect();
        let fields = [
            value(VERSION, &value(INTEGER, &[2])),
            value(INTEGER, &[1]),
            value(SEQUENCE, &[]),
            value(SEQUENCE, b"the issuer"),
            value(SEQUENCE, &[]),
            value(SEQUENCE, &names.concat()),
        ];
        value(SEQUENCE, &value(SEQUENCE, &fields.concat()))
    }

    fn common_name(text: &str) -> Vec<u8> {
        attribute(&[0x55, 4, 3], UTF8_STRING, text.as_bytes())
    }

    #[test]
    fn a_subject_is_printed_in_its_order_and_escaped() {
        let country = attribute(&[0x55, 4, 6], PRINTABLE_STRING, b"DE");
        let unit = attribute(&[0x55, 4, 11], UTF8_STRING, b"A+B");
        let both = certificate(&[vec![country, unit], vec![common_name("x, y")]]);
        assert_eq!(subject(&both).as_deref(), Some("C=DE+OU=A\\+B,CN=x\\, y"));
        for (name, expected) in [
            (" a b ", "CN=\\ a b\\ "),
            ("#a#", "CN=\\#a#"),
            ("a\\\"<>;", "CN=a\\\\\\\"\\<\\>\\;"),
            ("ü", "CN=ü"),
            ("", "CN="),
        ] {
            let expected = Some(expected.to_string());
            assert_eq!(subject(&certificate(&[vec![common_name(name)]])), expected);
        }
        let long = "x".repeat(300);
        let expected = Some(format!("CN={long}"));
        assert_eq!(subject(&certificate(&[vec![common_name(&long)]])), expected);
    }

    #[test]
    fn what_has_no_name_here_has_no_subject() {
        let strange = attribute(&[0x55, 4, 99], UTF8_STRING, b"x");
        let number = attribute(&[0x55, 4, 3], INTEGER, b"x");
        let bytes = attribute(&[0x55, 4, 3], UTF8_STRING, b"\xff");
        for odd in [strange, number, bytes] {
            assert_eq!(subject(&certificate(&[vec![odd]])), None);
        }
    }

    #[test]
    fn damaged_certificates_have_no_subject_or_another() {
        let whole = certificate(&[vec![common_name("a client")]]);
        for len in 0..whole.len() {
            assert_eq!(subject(&whole[..len]), None, "{len} bytes of it");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << bit;
                // Whatever it is, it comes to an end.
                std::hint::black_box(subject(&damaged));
            }
        }
    }
}
