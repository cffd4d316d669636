//! Gathering messages so that one system call sends them all.
//!
//! Headers are short and many: those of a batch are laid into one buffer, and payload stands
//! between slices of it, uncopied. Headers in a row, such as replies to writes, become a single
//! slice.

use cowslip_queue::IoVec;

use crate::slab::Slab;

/// Messages that are sent together, in order.
#[derive(Default)]
pub(crate) struct Outbox {
    heads: Vec<u8>,
    /// Payloads, each with the length that `heads` had when it came.
    payloads: Vec<(usize, IoVec)>,
    memory: Slab,
}

impl Outbox {
    /// Adds bytes that are copied: headers and small payloads.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.heads.extend_from_slice(bytes);
    }

    /// Adds payload that is not copied.
    pub(crate) fn push_payload(&mut self, payload: IoVec) {
        if !payload.is_empty() {
            self.payloads.push((self.heads.len(), payload));
        }
    }

    /// The bytes to send; the outbox is empty afterwards.
    pub(crate) fn take(&mut self) -> IoVec {
        let mut heads = self.memory.take(self.heads.len());
        heads.copy_from_slice(&self.heads);
        let heads = heads.freeze();
        let mut message = IoVec::with_capacity(2 * self.payloads.len() + 1);
        let mut sent = 0;
        for (at, payload) in self.payloads.drain(..) {
            if at > sent {
                message.append(heads.slice(sent, at - sent).into());
                sent = at;
            }
            message.append(payload);
        }
        if self.heads.len() > sent {
            message.append(heads.slice(sent, self.heads.len() - sent).into());
        }
        self.heads.clear();
        message
    }
}

#[cfg(test)]
mod tests {
    use cowslip_queue::Buf;

    use super::*;

    fn sent(outbox: &mut Outbox) -> Vec<Vec<u8>> {
        outbox.take().to_bufs().map(|buf| buf.to_vec()).collect()
    }

    fn payload(bytes: &[u8]) -> IoVec {
        Buf::copy_of(bytes).into()
    }

    #[test]
    fn headers_in_a_row_are_one_buffer_and_payload_keeps_its_place() {
        let mut outbox = Outbox::default();
        outbox.push(b"a");
        outbox.push(b"b");
        outbox.push_payload(payload(b"1"));
        outbox.push_payload(payload(b"2"));
        outbox.push_payload(payload(b""));
        outbox.push(b"c");
        let expected: Vec<&[u8]> = vec![b"ab", b"1", b"2", b"c"];
        assert_eq!(sent(&mut outbox), expected);
        assert!(sent(&mut outbox).is_empty(), "it is empty afterwards");
        outbox.push_payload(payload(b"3"));
        assert_eq!(sent(&mut outbox), [b"3"]);
    }
}
