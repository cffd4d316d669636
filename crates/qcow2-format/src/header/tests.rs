//! The header against known bytes, against mutations, and against itself.

use super::*;
use crate::random::Random;

/// The smallest header of each version that points to tables in a file of 4 clusters of 64 KiB.
fn sample(version: u32) -> Header {
    Header {
        version,
        backing_file_offset: 0,
        backing_file: None,
        cluster_bits: 16,
        size: 1 << 20,
        crypt_method: CryptMethod::None,
        l1_size: 1,
        l1_table_offset: 3 << 16,
        refcount_table_offset: 1 << 16,
        refcount_table_clusters: 1,
        nb_snapshots: 0,
        snapshots_offset: 0,
        incompatible_features: 0,
        compatible_features: 0,
        autoclear_features: 0,
        refcount_order: 4,
        header_length: if version == 2 {
            HEADER_BYTES_V2
        } else {
            HEADER_BYTES
        },
        compression_type: CompressionType::Deflate,
        unknown_fields: if version == 2 { vec![] } else { vec![0; 7] },
        extensions: Extensions::for_new_image(version, 1 << 16),
    }
}

const FILE_LEN: u64 = (3 << 16) + 8;

fn parse(bytes: &[u8]) -> Result<Header> {
    Header::parse(bytes, FILE_LEN, "a.qcow2")
}

fn full() -> Header {
    let mut header = sample(3);
    header.backing_file = Some("base.raw".into());
    header.compatible_features = compatible::LAZY_REFCOUNTS | 1 << 40;
    header.autoclear_features = autoclear::BITMAPS | 1 << 63;
    header.incompatible_features = incompatible::COMPRESSION_TYPE | incompatible::DIRTY;
    header.compression_type = CompressionType::Zstd;
    header.header_length = 128;
    header.unknown_fields = (0..23).collect();
    header.extensions.backing_format = Some("raw".into());
    header.extensions.bitmaps = Some(BitmapsExtension {
        nb_bitmaps: 1,
        reserved: 0,
        bitmap_directory_size: 32,
        bitmap_directory_offset: 5 << 16,
    });
    for (kind, data) in [(0x1234_5678, &b"kept"[..]), (7, &[]), (1, &[9; 17])] {
        header.extensions.unknown.push(UnknownExtension {
            kind,
            data: data.to_vec(),
        });
    }
    header
}

#[test]
fn a_parsed_header_is_written_back_as_it_was() {
    for mut header in [sample(2), sample(3), full()] {
        let bytes = header.encode().unwrap();
        let mut parsed = parse(&bytes).unwrap();
        assert_eq!(parsed, header);
        assert_eq!(parsed.encode().unwrap(), bytes);
        assert_eq!(
            parsed.fixed_part(),
            bytes[..header.header_length as usize],
            "the fields alone"
        );
    }
}

#[test]
fn fields_and_extensions_are_where_the_specification_puts_them() {
    let mut header = sample(3);
    header.backing_file = Some("b.raw".into());
    header.extensions.backing_format = Some("raw".into());
    let bytes = header.encode().unwrap();
    assert_eq!(bytes.len(), 0x215, "as long as QEMU's");
    assert_eq!(
        &bytes[..20],
        b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\x02\x10\0\0\0\x05"
    );
    assert_eq!(
        &bytes[0x68..0x80],
        b"\0\0\0\0\0\0\0\0\xe2\x79\x2a\xca\0\0\0\x03raw\0\0\0\0\0"
    );
    assert_eq!(
        &bytes[0x80..0x92],
        b"\x68\x03\xf8\x57\0\0\x01\x80\0\0dirty bit"[..18].as_ref()
    );
    assert_eq!(&bytes[0x210..], b"b.raw");
}

/// Patches bytes of a good header and expects a refusal that contains `words`.
fn refuses(mut header: Header, patches: &[(usize, &[u8])], words: &str) {
    let mut bytes = header.encode().unwrap();
    for (at, patch) in patches {
        bytes[*at..at + patch.len()].copy_from_slice(patch);
    }
    match parse(&bytes) {
        Err(error) => assert!(error.to_string().contains(words), "{error} lacks {words:?}"),
        Ok(_) => panic!("a header was accepted that should fail with {words:?}"),
    }
}

#[test]
fn what_the_specification_forbids_is_refused() {
    type Patches<'a> = &'a [(usize, &'a [u8])];
    let cases: &[(Patches<'_>, &str)] = &[
        (&[(0, b"QFJ")], "not in qcow2 format"),
        (&[(7, &[1])], "version 1 is not supported"),
        (&[(7, &[4])], "version 4 is not supported"),
        (&[(23, &[8])], "cluster size: 2^8"),
        (&[(23, &[22])], "cluster size: 2^22"),
        (&[(35, &[3])], "encryption method 3"),
        (&[(35, &[2])], "Missing CRYPTO header"),
        (&[(79, &[0x20])], "Unknown incompatible feature: 20"),
        (
            &[(72, &[0x80])],
            "Unknown incompatible feature: 8000000000000000",
        ),
        (
            &[(72, &[0x40])],
            "Unknown incompatible feature: 4000000000000000",
        ),
        (&[(103, &[96])], "header too short"),
        (&[(103, &[108])], "multiple of 8"),
        (&[(101, &[2])], "exceeds cluster size"),
        (&[(99, &[7])], "may not exceed 64 bits"),
        (&[(79, &[0x10]), (23, &[13])], "at least 16384"),
        (&[(79, &[8])], "bit must not be set"),
        (&[(104, &[1])], "bit must be set"),
        (&[(79, &[8]), (104, &[2])], "compression type 2"),
        (&[(95, &[2])], "data-file-raw requires"),
        (&[(95, &[1])], "without a bitmaps extension"),
        (&[(36, &[1])], "Active L1 table too large"),
        (&[(39, &[0])], "L1 table is too small"),
        (&[(24, &[0x80])], "too big"),
        (&[(24, &[0x7f])], "too big"),
        (&[(24, &[0x10])], "too big"),
        (&[(25, &[0x10])], "too small"),
        (&[(47, &[1])], "Active L1 table offset invalid"),
        (&[(40, &[0xff])], "Active L1 table offset invalid"),
        (&[(45, &[0])], "it is the header's"),
        (&[(44, &[1])], "beyond the end of the file"),
        (&[(59, &[0])], "does not contain a reference count table"),
        (&[(59, &[129])], "Reference count table too large"),
        (&[(55, &[1])], "Reference count table offset invalid"),
        (&[(61, &[1, 0, 1])], "Snapshot table too large"),
        (&[(71, &[1])], "Snapshot table offset invalid"),
        (&[(13, &[2])], "Invalid backing file offset"),
        (&[(15, &[8])], "Invalid backing file offset"),
        (&[(14, &[2]), (18, &[4])], "Backing file name too long"),
        (&[(116, &[1])], "does not fit"),
    ];
    for (patches, words) in cases {
        refuses(sample(3), patches, words);
    }
}

#[test]
fn the_old_encryption_has_no_header_of_its_own() {
    let mut header = sample(2);
    header.crypt_method = CryptMethod::Aes;
    let parsed = parse(&header.encode().unwrap()).unwrap();
    assert_eq!(parsed.crypt_method, CryptMethod::Aes);
    header.extensions.crypto_header = Some(CryptoHeader {
        offset: 0x5_0000,
        length: 4096,
    });
    refuses(header, &[], "without LUKS");
}

#[test]
fn unknown_features_are_named_by_the_image() {
    let mut header = sample(3);
    let mut entry = vec![0u8, 17];
    entry.extend_from_slice(b"time travel\x1b[31m");
    entry.resize(48, 0);
    header.extensions.feature_names = Some(FeatureNames::from_bytes(entry));
    let both: &[(usize, &[u8])] = &[(77, &[2]), (72, &[0x40])];
    let words = "feature(s) time travel[31m, Unknown incompatible feature: 4000000000000000 is not";
    refuses(header.clone(), both, words);
    // A last entry that is cut short names a bit all the same.
    header.extensions.feature_names = Some(FeatureNames::from_bytes(b"\0\x11short".to_vec()));
    refuses(header, &[(77, &[2])], "feature(s) short is not");
}

/// A table of names: kind, bit, name.
fn names(entries: &[(u8, u8, &[u8])]) -> Option<FeatureNames> {
    let entry = |&(kind, bit, name): &(u8, u8, &[u8])| {
        let mut entry = [&[kind, bit], name].concat();
        entry.resize(48, 0);
        entry
    };
    let table = entries.iter().flat_map(entry).collect();
    Some(FeatureNames::from_bytes(table))
}

/// All cases were compared with qemu-img.
#[test]
fn names_of_features_have_the_order_of_the_images_table() {
    let bits: &[(usize, &[u8])] = &[(72, &[0xe0])];
    let mut header = sample(3);
    let entries: [(u8, u8, &[u8]); 5] = [
        (1, 61, b"compatible"),
        (0, 63, b"c"),
        (0, 62, b"b"),
        (0, 62, b"again"),
        (2, 61, b"autoclear"),
    ];
    header.extensions.feature_names = names(&entries);
    let words = "feature(s) c, b, Unknown incompatible feature: 2000000000000000 is not";
    refuses(header.clone(), bits, words);
    header.extensions.feature_names = names(&[(0, 62, b"b"), (0, 60, b""), (0, 61, b"a")]);
    let words = "feature(s) b, Unknown incompatible feature: a000000000000000 is not";
    refuses(header.clone(), bits, words);
    // An extension behind it that is not sound.
    header.extensions.feature_names = names(&[(0, 61, b"a"), (0, 62, b"b"), (0, 63, b"c")]);
    header.extensions.unknown.push(UnknownExtension {
        kind: 7,
        data: vec![],
    });
    let at = header.encode().unwrap().len() - 12;
    refuses(
        header,
        &[bits[0], (at, &[1, 0, 0, 0])],
        "feature(s) a, b, c is not",
    );
}

#[test]
fn the_mark_of_an_unfinished_copy_is_named_where_the_image_has_no_room_for_its_name() {
    let mut header = sample(3);
    header.cluster_bits = 12;
    header.extensions = Extensions::for_new_image(3, 1 << 12);
    let words = "feature(s) unfinished copy, to be made again is not";
    refuses(header, &[(72, &[0x80])], words);
}

#[test]
fn of_two_extensions_of_a_kind_the_last_counts() {
    let mut twice = sample(3);
    twice.extensions.backing_format = Some("first".into());
    for data in [b"other", b"third"] {
        twice.extensions.unknown.push(UnknownExtension {
            kind: super::extensions::BACKING_FORMAT,
            data: data.to_vec(),
        });
    }
    let bytes = twice.encode().unwrap();
    let parsed = Header::parse(&bytes, FILE_LEN, "m").unwrap();
    assert_eq!(parsed.extensions.backing_format.as_deref(), Some("third"));
    assert_eq!(parsed.extensions.unknown, sample(3).extensions.unknown);
}

#[test]
fn extensions_that_do_not_fit_are_refused() {
    let mut long = sample(3);
    long.extensions.backing_format = Some("sixteen letters!".into());
    refuses(long, &[], "too long");
    let mut unfit = sample(3);
    unfit.cluster_bits = 9;
    assert!(unfit.encode().is_ok(), "a 512-byte cluster holds the table");
    unfit.backing_file = Some("n".repeat(9));
    assert!(unfit.encode().is_err());
}

#[test]
fn no_mutation_of_a_header_causes_a_panic() {
    let mut numbers = Random(0x2545_f491_4f6c_dd1d);
    let mut random = move || numbers.next();
    let samples: Vec<Vec<u8>> = [sample(2), sample(3), full()]
        .into_iter()
        .map(|mut header| header.encode().unwrap())
        .collect();
    let mut accepted = 0;
    for _ in 0..60_000 {
        let mut bytes = samples[(random() % 3) as usize].clone();
        for _ in 0..=random() % 4 {
            let span = if random() % 2 == 0 { 128 } else { bytes.len() };
            let at = random() as usize % span.min(bytes.len());
            bytes[at] = match random() % 4 {
                0 => 0xff,
                1 => 0,
                2 => bytes[at] ^ 1 << (random() % 8),
                _ => random() as u8,
            };
        }
        if random() % 8 == 0 {
            bytes.truncate(random() as usize % bytes.len());
        }
        let file_len = if random() % 2 == 0 {
            FILE_LEN
        } else {
            random()
        };
        let prefix = &bytes[..(24 + random() as usize % 1000).min(bytes.len())];
        let wanted = Header::wanted_bytes(prefix, file_len);
        assert!(wanted <= 2 << 20);
        let whole = Header::parse(&bytes, file_len, "m");
        let seen = &bytes[..(wanted as usize).min(bytes.len())];
        let seen = Header::parse(seen, file_len, "m");
        let text = |parsed: Result<Header>| parsed.map_err(|error| error.to_string());
        if file_len >= bytes.len() as u64 {
            assert_eq!(text(seen), text(whole), "{prefix:02x?}");
        }
        if let Ok(mut header) = Header::parse(&bytes, file_len, "m") {
            accepted += 1;
            let again = header.encode().expect("what was read fits");
            let parsed = Header::parse(&again, file_len, "m").unwrap();
            assert_eq!(parsed, header);
        }
    }
    assert!(accepted > 1000, "{accepted} mutations were accepted");
}
