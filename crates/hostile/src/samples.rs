//! Valid images of all kinds, small, with some of everything in them.

use std::sync::{Arc, OnceLock};

use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::header::CompressionType;

use cowslip::Image;

use crate::draw::Draw;
use crate::file::Watched;
use crate::session::{Content, OneDataFile, block_on, exercise, open};

/// How many there are.
pub const COUNT: usize = 10;

/// All of them; made once.
pub fn all() -> &'static [Vec<u8>] {
    static SAMPLES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    SAMPLES.get_or_init(|| {
        let shapes = shapes();
        let samples = shapes.iter().zip(0..);
        samples.map(|(shape, seed)| sample(shape, seed)).collect()
    })
}

fn shapes() -> [CreateOptions; COUNT] {
    let base = CreateOptions::new(1 << 20);
    let of = |cluster_size| CreateOptions {
        cluster_size,
        ..base.clone()
    };
    [
        of(512),
        CreateOptions {
            refcount_bits: 64,
            size: 300_032,
            ..of(512)
        },
        CreateOptions {
            version: Version::V2,
            ..of(4096)
        },
        CreateOptions {
            refcount_bits: 1,
            ..of(4096)
        },
        CreateOptions {
            extended_l2: true,
            ..of(16384)
        },
        CreateOptions {
            extended_l2: true,
            refcount_bits: 8,
            compression_type: CompressionType::Zstd,
            ..of(16384)
        },
        of(65536),
        CreateOptions {
            compression_type: CompressionType::Zstd,
            ..of(65536)
        },
        CreateOptions {
            data_file: Some("data".to_string()),
            ..of(512)
        },
        CreateOptions {
            data_file: Some("data".to_string()),
            extended_l2: true,
            ..of(16384)
        },
    ]
}

fn sample(shape: &CreateOptions, seed: u64) -> Vec<u8> {
    let mut draw = Draw::from_seed(seed);
    let file = Arc::new(Watched::new(Vec::new()));
    let gate = OneDataFile::new();
    let data_file = shape.data_file.as_ref().map(|_| gate.file());
    let compresses = data_file.is_none();
    block_on(create(file.clone(), data_file, shape)).unwrap();
    for session in 0..2 {
        let image = open(&file, &gate, true, &mut draw).unwrap();
        for _ in 0..12 {
            let outcome = exercise(&image, Content::Random, &mut draw);
            assert!(outcome.is_ok() || !compresses, "{outcome:?}");
        }
        if session == 0 && shape.version == Version::V3 {
            add_bitmaps(&image);
        }
        block_on(image.close()).unwrap();
    }
    file.contents()
}

/// Two bitmaps, one of which follows the writes of the next session.
fn add_bitmaps(image: &Image) {
    for (name, granularity) in [("fine", 512), ("coarse", 65536)] {
        let granularity = Some(granularity);
        let change = BitmapChange::Add { granularity };
        block_on(image.change_bitmap(name, &change)).unwrap();
    }
    block_on(image.change_bitmap("coarse", &BitmapChange::Disable)).unwrap();
}
