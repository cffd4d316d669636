//! Base64, for the headers of passwords.

/// Base64 with padding (RFC 4648, section 4), for the header of a password.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let [a, b, c] = [0, 1, 2].map(|i| u32::from(*group.get(i).unwrap_or(&0)));
        let bits = a << 16 | b << 8 | c;
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(match place <= group.len() {
                true => digit as char,
                false => '=',
            });
        }
    }
    text
}
