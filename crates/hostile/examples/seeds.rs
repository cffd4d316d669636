//! Writes the first inputs of the fuzzers' corpora into `fuzz/corpus`: small valid images, a few
//! command lines, and bytes that choose among the shapes of the other targets.

#![allow(clippy::unwrap_used)] // A tool of this repository.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::header::CompressionType;
use cowslip::{Buf, BufMut};
use cowslip_hostile::draw::Draw;
use cowslip_hostile::file::Watched;
use cowslip_hostile::session::{OneDataFile, block_on, open};

fn main() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let write = |target: &str, name: &str, bytes: &[u8]| {
        fs::create_dir_all(corpus.join(target)).unwrap();
        fs::write(corpus.join(target).join(name), bytes).unwrap();
    };
    for (name, shape) in shapes() {
        let image = image(&shape);
        write("image_bytes", name, &image);
        // The last choice of four: the bytes are an image.
        write("image_repair", name, &[&[3], &image[..]].concat());
        write(
            "tables",
            name,
            &[&[0], &image[..image.len().min(4096)]].concat(),
        );
    }
    let lines = "write -P 5 0 64k\nread -vP 5 0 512\ndiscard 0 1k\naio_write -z 4k 8k\naio_flush\nmap\n\
                 alloc 0 1M\ninfo\nwrite -c 0 512\ntruncate 2M\nwritev 0 512 1k\nhelp read\nlength\nclose\n";
    write("io_lines", "lines", &[&[0, 0], lines.as_bytes()].concat());
    for (name, kind, text) in QMP {
        write("qmp", name, &[&[kind], text.as_bytes()].concat());
    }
    for target in [
        "image_damage",
        "image_repair",
        "tables",
        "nbd_server",
        "nbd_client",
        "fuse_server",
        "vhost_rings",
        "vhost_messages",
        "io_lines",
        "qmp",
    ] {
        for first in 0..6u8 {
            let mut noise = Draw::from_seed(u64::from(first));
            let mut bytes = vec![first];
            bytes.extend((0..300).map(|_| noise.byte()));
            write(target, &format!("noise-{first}"), &bytes);
        }
    }
}

/// Bytes of clients of the control protocol, each behind the choice that takes them as they are.
const QMP: [(&str, u8, &str); 6] = [
    (
        "greeted",
        4,
        "{'execute':'qmp_capabilities','id':[1,{}]}{'execute':'query-version'}",
    ),
    (
        "jobs",
        0,
        "{'execute':'query-jobs','id':null}\r\n{\"execute\":\"job-pause\",\"arguments\":{\"id\":\"a\"}}",
    ),
    (
        "nodes",
        0,
        "{'execute':'blockdev-add','arguments':{'driver':'qcow2','node-name':'n','file':\
                  {'driver':'file','filename':'/x','locking':'off'},'backing':null}}",
    ),
    (
        "many",
        0,
        "{'execute':'transaction','arguments':{'actions':[{'type':'block-dirty-bitmap-add',\
                 'data':{'node':'n','name':'b','granularity':65536}},{'type':'abort','data':{}}]}}",
    ),
    (
        "broken",
        0,
        "@{'a':'\\ud83d\\ude00\\u12'}[1e5,-0.5,01]{[}]tru \u{7f}\"\\x\"\n{}]'",
    ),
    (
        "end",
        0,
        "{'execute':'getfd','arguments':{'fdname':'a'}}{'execute':'quit'}{'execute':'quit'}",
    ),
];

fn shapes() -> Vec<(&'static str, CreateOptions)> {
    let base = CreateOptions {
        cluster_size: 512,
        ..CreateOptions::new(64 << 10)
    };
    vec![
        ("plain", base.clone()),
        (
            "version-2",
            CreateOptions {
                version: Version::V2,
                ..base.clone()
            },
        ),
        (
            "narrow-counts-zstd",
            CreateOptions {
                refcount_bits: 1,
                compression_type: CompressionType::Zstd,
                ..base.clone()
            },
        ),
        (
            "wide-counts-backing",
            CreateOptions {
                refcount_bits: 64,
                backing_file: Some("base".to_string()),
                backing_format: Some("qcow2".to_string()),
                ..base.clone()
            },
        ),
        (
            "data-file",
            CreateOptions {
                data_file: Some("data".to_string()),
                ..base.clone()
            },
        ),
        (
            "extended",
            CreateOptions {
                cluster_size: 16384,
                extended_l2: true,
                ..base
            },
        ),
    ]
}

fn image(shape: &CreateOptions) -> Vec<u8> {
    let gate = OneDataFile::new();
    let data_file = shape.data_file.as_ref().map(|_| gate.file());
    let file = Arc::new(Watched::new(Vec::new()));
    block_on(create(file.clone(), data_file.clone(), shape)).unwrap();
    let image = open(&file, &gate, true, &mut Draw::from_seed(1)).unwrap();
    let unit = shape.cluster_size;
    let content = |len: u64| Buf::from(vec![7; len as usize]);
    block_on(image.write(0, content(1000), Default::default())).unwrap();
    if data_file.is_none() {
        block_on(image.write_compressed(unit * 2, content(unit))).unwrap();
    }
    block_on(image.write_zeroes(unit * 3, unit, Default::default())).unwrap();
    block_on(image.read(0, BufMut::zeroed(1000))).unwrap();
    block_on(image.close()).unwrap();
    file.contents()
}
