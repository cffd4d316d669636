//! Headers there and back, and headers that no volume has.

use super::super::Passphrase;
use super::super::slot::{self, NewVolume, VolumeOptions};
use super::*;
use crate::job::Job;
use crate::random::Random;

const FILE_BYTES: u64 = 16 << 20;

fn options() -> VolumeOptions {
    VolumeOptions {
        spec: Spec {
            key_size: KeySize::Aes256,
            mode: CipherMode::Xts,
            iv: IvGenerator::Plain64,
        },
        hash: Hash::Sha256,
        passphrase: Passphrase::new(b"a".to_vec()),
        slot_iterations: 3,
        digest_iterations: 2,
    }
}

fn volume(options: &VolumeOptions) -> NewVolume {
    let mut random = Random(7);
    let mut entropy = |bytes: &mut [u8]| {
        bytes
            .iter_mut()
            .for_each(|byte| *byte = random.next() as u8);
        Ok(())
    };
    NewVolume::make(options, &mut entropy).unwrap()
}

fn parse(bytes: &[u8]) -> Result<Header> {
    Header::parse(bytes, &(0..FILE_BYTES), "x")
}

#[test]
fn headers_are_written_and_read_again() {
    for (mode, iv, key_size) in [
        (CipherMode::Xts, IvGenerator::Plain64, KeySize::Aes128),
        (CipherMode::Xts, IvGenerator::Plain, KeySize::Aes192),
        (CipherMode::Cbc, IvGenerator::Plain64, KeySize::Aes256),
        (
            CipherMode::Cbc,
            IvGenerator::Essiv(Hash::Sha256),
            KeySize::Aes192,
        ),
    ] {
        for (_, hash) in Hash::ALL {
            let spec = Spec { key_size, mode, iv };
            let volume = volume(&VolumeOptions {
                spec,
                hash,
                ..options()
            });
            let [(_, bytes), (key_offset, material)] = volume.pieces();
            let header = parse(&bytes).unwrap();
            assert_eq!(header, *volume.header());
            assert_eq!(key_offset, KEY_OFFSET);
            assert_eq!(header.payload_offset % 4096, 0);
            let open = |passphrase: &[u8]| {
                let passphrase = Passphrase::new(passphrase.to_vec());
                slot::open(
                    &header,
                    &header.slots[0],
                    (&passphrase, &material),
                    &Job::default(),
                )
                .unwrap()
            };
            assert!(open(b"b").is_none());
            assert_eq!(open(b"a").unwrap().len(), spec.key_bytes());
        }
    }
}

/// Offset, bytes that are put there, and the message.
type Case = (usize, Vec<u8>, &'static str);

fn text(text: &[u8]) -> Vec<u8> {
    text.to_vec()
}

fn number(number: u32) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

fn assert_refused(cases: &[Case]) {
    let [(_, good), _] = volume(&options()).pieces();
    for (place, bytes, said) in cases {
        let mut bad = good.clone();
        bad[*place..place + bytes.len()].copy_from_slice(bytes);
        let error = parse(&bad).unwrap_err().to_string();
        assert!(error.contains(said), "{place}: {error}");
    }
}

#[test]
fn what_no_volume_has_is_refused_with_its_place() {
    assert_refused(&[
        (0, text(b"LUKZ"), "offset 0x0: Volume is not in LUKS format"),
        (at::CIPHER, vec![b'a'; 32], "0x8: a text is not terminated"),
        (at::CIPHER, vec![b'a', 7, 0], "0x8: a text is not"),
        (
            at::MODE,
            text(b"cbc-essiv:sha1\0"),
            "0x6c: a key of 64 bytes",
        ),
        (at::HASH, vec![0], "0x48: a hash without a name"),
        (
            at::PAYLOAD,
            number(9),
            "slot 0 (0x1000 to 0x3f800) overlaps",
        ),
        (at::KEY_BYTES, number(u32::MAX), "0x6c: a key of 4294967295"),
        (at::KEY_BYTES, number(0), "0x6c: a key of 0 bytes"),
        (
            at::DIGEST_ITERATIONS,
            number(0),
            "0xa4: the iteration count",
        ),
        (at::UUID, vec![b'-'; 40], "0xa8: a text is not terminated"),
    ]);
    let [(_, good), _] = volume(&options()).pieces();
    assert!(parse(&good[..HEADER_BYTES - 1]).is_err());
    let short = Header::parse(&good, &(0..1 << 20), "x");
    assert!(short.is_err(), "slots beyond the end");
}

#[test]
fn what_is_not_supported_is_named() {
    assert_refused(&[
        (7, vec![2], "LUKS version 2 is not supported"),
        (at::CIPHER, text(b"serpent\0"), "'serpent-xts-plain64'"),
        (
            at::MODE,
            text(b"xts-essiv:sha256\0"),
            "'aes-xts-essiv:sha256'",
        ),
        (at::MODE, text(b"cbc-essiv:md5\0"), "the hash 'md5'"),
        (at::MODE, text(b"ecb\0"), "cipher 'aes-ecb'"),
        (at::HASH, text(b"whirlpool\0"), "the hash 'whirlpool'"),
        (at::PAYLOAD, number(0), "detached LUKS header"),
        (
            at::DIGEST_ITERATIONS,
            number(u32::MAX),
            "4294967295 iterations",
        ),
    ]);
}

#[test]
fn key_slots_are_where_they_may_be_and_cost_what_they_may() {
    let slot = |index: usize| at::SLOTS + index * SLOT_BYTES;
    assert_refused(&[
        (slot(0), number(1), "0xd0: key slot 0 is neither"),
        (
            slot(0) + at::ITERATIONS,
            number(0),
            "0xd4: the iteration count",
        ),
        (slot(0) + at::ITERATIONS, number(u32::MAX), "4294967295 it"),
        (
            slot(7) + at::STRIPES,
            number(u32::MAX),
            "slot 7 has 4294967295",
        ),
        (slot(3) + at::STRIPES, number(0), "slot 3 has 0 stripes"),
        (
            slot(2) + at::KEY_OFFSET,
            number(8),
            "slot 2 (0x1000 to 0x3f800)",
        ),
        (
            slot(0) + at::KEY_OFFSET,
            number(1),
            "slot 0 (0x200 to 0x3ea00)",
        ),
        (slot(7) + at::KEY_OFFSET, number(u32::MAX), "key slot 7"),
    ]);
}

#[test]
fn no_bytes_make_it_panic() {
    let [(_, good), _] = volume(&options()).pieces();
    let mut random = Random(3);
    for _ in 0..20_000 {
        let mut bad = good.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(HEADER_BYTES as u64) as usize;
            bad[at] = random.next() as u8;
        }
        if let Ok(header) = parse(&bad) {
            assert_eq!(parse(&header.encode()).unwrap(), header);
        }
    }
}
