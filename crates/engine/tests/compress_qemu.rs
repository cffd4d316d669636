//! Compressed clusters against QEMU: what it writes is read here, what is written here it reads.
//!
//! Skips loudly where qemu-img and qemu-io are not installed.

use std::path::Path;
use std::process::Command;

use cowslip::qcow2::compress::{compress, decompress};
use cowslip::qcow2::header::CompressionType;

/// Runs a peer and returns what it printed; `None`, with a word on stderr, if it is not installed.
fn peer(program: &str, args: &[&str]) -> Option<String> {
    let output = match Command::new(program).args(args).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED: {program} cannot be run: {error}");
            return None;
        }
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && !text.contains("error"),
        "{program} {args:?}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(text)
}

fn be64(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).unwrap();
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// An image with one compressed cluster: the bytes of the image, and where that cluster is.
fn image_with_one(path: &Path, kind: &str, cluster_bits: u32) -> Option<(Vec<u8>, u64, u64)> {
    let name = path.to_str().unwrap();
    let size = (1u64 << cluster_bits).to_string();
    let options = format!("cluster_size={size},compression_type={kind}");
    peer(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", &options, name, &size],
    )?;
    let write = format!("write -c -P 0x5a 0 {size}");
    peer("qemu-io", &["-f", "qcow2", "-c", &write, name])?;
    let bytes = std::fs::read(path).unwrap();
    let l1 = be64(&bytes, 40);
    let l2 = be64(&bytes, l1) & 0x00ff_ffff_ffff_fe00;
    Some((bytes.clone(), l2, be64(&bytes, l2)))
}

#[test]
fn both_ways_in_every_cluster_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.qcow2");
    for (kind, name) in [
        (CompressionType::Deflate, "zlib"),
        (CompressionType::Zstd, "zstd"),
    ] {
        for cluster_bits in 9..=21 {
            let Some((mut image, l2, entry)) = image_with_one(&path, name, cluster_bits) else {
                return;
            };
            let cluster_bytes = 1usize << cluster_bits;
            let offset_bits = 62 - (cluster_bits - 8);
            let start = (entry & ((1 << offset_bits) - 1)) as usize;
            let mut cluster = vec![0; cluster_bytes];
            decompress(kind, &image[start..], &mut cluster).unwrap();
            assert!(
                cluster.iter().all(|&byte| byte == 0x5a),
                "{name} {cluster_bits}"
            );

            // Ours in its place: longer than a window, so that a too wide one would be noticed.
            let mut ours: Vec<u8> = (0..cluster_bytes)
                .map(|at| {
                    (at as u64)
                        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                        .to_be_bytes()[0]
                        & 0x1f
                })
                .collect();
            let (head, tail) = ours.split_at_mut(cluster_bytes / 2);
            tail.copy_from_slice(head);
            let packed = compress(kind, &ours).unwrap();
            image.resize(start.next_multiple_of(cluster_bytes), 0);
            image.truncate(start);
            image.extend(&packed);
            image.resize(image.len().next_multiple_of(cluster_bytes), 0);
            let sectors = ((start + packed.len() - 1) / 512 - start / 512) as u64;
            let entry = 1 << 62 | sectors << offset_bits | start as u64;
            image[l2 as usize..l2 as usize + 8].copy_from_slice(&entry.to_be_bytes());
            std::fs::write(&path, &image).unwrap();
            let raw = dir.path().join("raw");
            let (from, to) = (path.to_str().unwrap(), raw.to_str().unwrap());
            peer(
                "qemu-img",
                &["convert", "-f", "qcow2", "-O", "raw", from, to],
            )
            .unwrap();
            assert!(
                std::fs::read(&raw).unwrap() == ours,
                "{name} {cluster_bits}"
            );
        }
    }
}
