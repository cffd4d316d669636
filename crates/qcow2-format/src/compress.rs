//! The codecs of compressed clusters (qcow2.rst, "Compressed Clusters Descriptor"): pure functions.
//!
//! Promises: decompression yields exactly one cluster or an error, ignores bytes after the
//! compressed data (the entry states its length in sectors only), and never needs memory that the
//! input asks for. Compression yields what QEMU reads, or nothing if that saves no space.
//!
//! | type | stream |
//! | --- | --- |
//! | deflate | raw deflate without a zlib header; QEMU's reader has a window of 12 bits |
//! | zstd | frames of the zstd format; QEMU writes one |
//!
//! Leaves out: where the bytes are and who counts them (`entry.rs`, `alloc.rs`).

use std::fmt;

#[cfg(feature = "deflate")]
use zlib_rs::{Deflate, DeflateFlush, Inflate, InflateFlush, Status};

use crate::header::CompressionType;

/// Why a compressed cluster cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecompressError {
    /// The bytes are no stream of their type, or one of more than a cluster.
    Garbled,
    /// The stream ends before the cluster is full.
    Short,
    /// The library was built without the codec.
    Off,
}

impl fmt::Display for DecompressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DecompressError::Garbled => "the compressed data is garbled or more than a cluster",
            DecompressError::Short => "the compressed data is less than a cluster",
            DecompressError::Off => "the library was built without its codec",
        })
    }
}

impl std::error::Error for DecompressError {}

/// A codec that the library was built without, by the name of its feature, in words for errors.
pub fn missing_codec(kind: CompressionType) -> Option<&'static str> {
    match kind {
        CompressionType::Deflate if cfg!(not(feature = "deflate")) => {
            Some("deflate compression without the library's feature 'deflate'")
        }
        CompressionType::Zstd if cfg!(not(feature = "zstd")) => {
            Some("zstd compression without the library's feature 'zstd'")
        }
        CompressionType::Deflate | CompressionType::Zstd => None,
    }
}

/// log2 of the window that QEMU's reader of deflate streams has; a wider one would be unreadable.
#[cfg(feature = "deflate")]
const DEFLATE_WINDOW_BITS: u8 = 12;
/// log2 of the widest window that the format of deflate knows, which other writers use.
#[cfg(feature = "deflate")]
const INFLATE_WINDOW_BITS: u8 = 15;
/// The level that QEMU compresses with: zlib's default.
#[cfg(feature = "deflate")]
const DEFLATE_LEVEL: i32 = 6;
/// The level that QEMU compresses with: the libraries' default.
#[cfg(feature = "zstd")]
const ZSTD_LEVEL: i32 = 3;

/// Fills `cluster` from the stream at the start of `input`.
///
/// # Errors
/// If the stream is garbled, or does not hold exactly a cluster. The contents of `cluster` are
/// unspecified then.
pub fn decompress(
    kind: CompressionType,
    input: &[u8],
    cluster: &mut [u8],
) -> Result<(), DecompressError> {
    match kind {
        #[cfg(feature = "deflate")]
        CompressionType::Deflate => inflate(input, cluster),
        #[cfg(feature = "zstd")]
        CompressionType::Zstd => decompress_zstd(input, cluster),
        #[allow(unreachable_patterns)] // With all codecs there is no other.
        _ => {
            let _unused = (input, cluster);
            Err(DecompressError::Off)
        }
    }
}

/// The compressed form of a cluster, or `None` if it is not smaller than the cluster.
pub fn compress(kind: CompressionType, cluster: &[u8]) -> Option<Vec<u8>> {
    Compressor::new(kind).compress(cluster)
}

/// Compresses clusters, one after the other: what it takes to begin, up to a megabyte of tables, is
/// done once.
pub struct Compressor(Codec);

enum Codec {
    #[cfg(feature = "deflate")]
    Deflate(Deflate),
    /// `None` if there is no memory for it.
    #[cfg(feature = "zstd")]
    Zstd(Option<zstd::bulk::Compressor<'static>>),
    /// The library was built without it: nothing is made smaller.
    #[allow(dead_code)] // With all codecs there is none.
    Off,
}

impl Compressor {
    /// A compressor of this kind.
    pub fn new(kind: CompressionType) -> Compressor {
        Compressor(match kind {
            #[cfg(feature = "deflate")]
            CompressionType::Deflate => Codec::Deflate(deflate_stream()),
            #[cfg(feature = "zstd")]
            CompressionType::Zstd => Codec::Zstd(zstd::bulk::Compressor::new(ZSTD_LEVEL).ok()),
            #[allow(unreachable_patterns)] // With all codecs there is no other.
            _ => Codec::Off,
        })
    }

    /// The compressed form of a cluster, or `None` if it is not smaller than the cluster.
    pub fn compress(&mut self, cluster: &[u8]) -> Option<Vec<u8>> {
        let mut output = vec![0; cluster.len().checked_sub(1)?];
        let len = self.0.compress(cluster, &mut output)?;
        output.truncate(len);
        Some(output)
    }
}

impl Codec {
    /// Returns the length of the output, if the cluster fits in there.
    fn compress(&mut self, cluster: &[u8], output: &mut [u8]) -> Option<usize> {
        match self {
            #[cfg(feature = "deflate")]
            Codec::Deflate(stream) => deflate(stream, cluster, output),
            #[cfg(feature = "zstd")]
            Codec::Zstd(zstd) => zstd.as_mut()?.compress_to_buffer(cluster, output).ok(),
            Codec::Off => {
                let _unused = (cluster, output);
                None
            }
        }
    }
}

#[cfg(feature = "deflate")]
fn inflate(input: &[u8], cluster: &mut [u8]) -> Result<(), DecompressError> {
    let mut stream = Inflate::new(false, INFLATE_WINDOW_BITS);
    let status = stream
        .decompress(input, cluster, InflateFlush::Finish)
        .map_err(|_| DecompressError::Garbled)?;
    let full = stream.total_out() == cluster.len() as u64;
    match status {
        Status::StreamEnd if full => Ok(()),
        Status::StreamEnd => Err(DecompressError::Short),
        // QEMU accepts a stream that has filled the cluster and would go on; so do we, since the
        // end-of-block symbol is all that is missing in images that other writers have cut short.
        Status::Ok | Status::BufError if full => Ok(()),
        Status::Ok | Status::BufError => Err(DecompressError::Short),
    }
}

/// Decodes whole frames straight into the cluster: unlike streaming, this needs no window of the
/// size that a hostile frame header asks for.
#[cfg(feature = "zstd")]
fn decompress_zstd(input: &[u8], cluster: &mut [u8]) -> Result<(), DecompressError> {
    let (mut input, mut rest) = (input, cluster);
    let mut decoder = zstd::bulk::Decompressor::new().map_err(|_| DecompressError::Garbled)?;
    while !rest.is_empty() {
        if input.is_empty() {
            return Err(DecompressError::Short);
        }
        let frame_bytes = zstd::zstd_safe::find_frame_compressed_size(input)
            .map_err(|_| DecompressError::Garbled)?;
        let (frame, after) = input
            .split_at_checked(frame_bytes)
            .ok_or(DecompressError::Garbled)?;
        let len = decoder
            .decompress_to_buffer(frame, rest)
            .map_err(|_| DecompressError::Garbled)?;
        // Every round consumes a frame, which is never empty, so the loop ends with the input.
        input = after;
        rest = &mut rest[len..];
    }
    Ok(())
}

#[cfg(feature = "deflate")]
fn deflate_stream() -> Deflate {
    Deflate::new(DEFLATE_LEVEL, false, DEFLATE_WINDOW_BITS)
}

#[cfg(feature = "deflate")]
fn deflate(stream: &mut Deflate, cluster: &[u8], output: &mut [u8]) -> Option<usize> {
    let status = stream.compress(cluster, output, DeflateFlush::Finish);
    if !matches!(status, Ok(Status::StreamEnd)) {
        // zlib-rs 0.6.8 panics later on where a stream that has not ended is reset.
        *stream = deflate_stream();
        return None;
    }
    let len = stream.total_out();
    stream.reset();
    Some(usize::try_from(len).expect("the output fits the buffer that it is in"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const KINDS: [CompressionType; 2] = [CompressionType::Deflate, CompressionType::Zstd];

    /// Bytes that compress to about half: the high bits are noise of a small generator.
    fn text(len: usize, seed: u64) -> Vec<u8> {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..len).map(|_| (random.next() >> 60) as u8).collect()
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut random = Random(88_172_645_463_325_252);
        (0..len).map(|_| (random.next() >> 32) as u8).collect()
    }

    #[test]
    fn one_compressor_does_as_many_as_it_is_given() {
        for kind in KINDS {
            let mut one = Compressor::new(kind);
            for round in 0..40 {
                let cluster = match round % 3 {
                    0 => noise(4096),
                    _ => text(4096, round),
                };
                assert_eq!(one.compress(&cluster), compress(kind, &cluster), "{round}");
            }
        }
    }

    #[test]
    fn every_cluster_size_survives_with_garbage_behind_it() {
        for kind in KINDS {
            for bits in 9..=21 {
                let cluster = text(1 << bits, bits);
                let mut packed = compress(kind, &cluster).unwrap();
                assert!(packed.len() < cluster.len());
                packed.extend(noise(600));
                let mut unpacked = vec![0xaa; cluster.len()];
                decompress(kind, &packed, &mut unpacked).unwrap();
                assert!(unpacked == cluster, "{kind:?} {bits}");
            }
        }
    }

    #[test]
    fn what_does_not_shrink_stays_as_it_is() {
        for kind in KINDS {
            assert_eq!(compress(kind, &noise(4096)), None);
            assert_eq!(compress(kind, &[]), None);
        }
    }

    #[test]
    fn a_cut_stream_is_refused_or_complete() {
        for kind in KINDS {
            let cluster = text(4096, 3);
            let packed = compress(kind, &cluster).unwrap();
            let mut unpacked = vec![0; cluster.len()];
            for len in 0..packed.len() {
                if decompress(kind, &packed[..len], &mut unpacked).is_ok() {
                    assert!(unpacked == cluster, "{kind:?} cut to {len}");
                    assert!(len + 3 > packed.len(), "only the end mark may be missing");
                }
            }
            assert!(decompress(kind, &packed[..packed.len() / 2], &mut unpacked).is_err());
        }
    }

    #[test]
    fn a_stream_of_another_size_is_refused() {
        for kind in KINDS {
            let packed = compress(kind, &text(4096, 3)).unwrap();
            let result = decompress(kind, &packed, &mut [0; 8192]);
            assert_eq!(result, Err(DecompressError::Short), "{kind:?}");
        }
        // A deflate stream that goes on is cut, as QEMU does; a zstd frame cannot be.
        let packed = compress(CompressionType::Zstd, &text(4096, 3)).unwrap();
        let result = decompress(CompressionType::Zstd, &packed, &mut [0; 2048]);
        assert_eq!(result, Err(DecompressError::Garbled));
    }

    #[test]
    fn frames_in_a_row_are_one_cluster() {
        let cluster = text(4096, 9);
        let mut packed = compress(CompressionType::Zstd, &cluster[..1000]).unwrap();
        packed.extend(compress(CompressionType::Zstd, &cluster[1000..]).unwrap());
        let mut unpacked = vec![0; 4096];
        decompress(CompressionType::Zstd, &packed, &mut unpacked).unwrap();
        assert!(unpacked == cluster);
    }

    #[test]
    fn garbled_streams_never_panic() {
        let mut unpacked = vec![0; 4096];
        for kind in KINDS {
            let packed = compress(kind, &text(4096, 5)).unwrap();
            let mut refused = 0;
            for (at, byte) in noise(packed.len()).into_iter().enumerate() {
                let mut garbled = packed.clone();
                garbled[at] ^= byte | 1;
                // Either outcome is right: a change of literals makes another valid stream.
                refused += u32::from(decompress(kind, &garbled, &mut unpacked).is_err());
            }
            assert!(refused > 0, "{kind:?}");
            assert!(decompress(kind, &[0xff; 600], &mut unpacked).is_err());
        }
    }

    /// A frame header that claims a window of 2 GiB costs nothing: no window is allocated.
    #[test]
    fn a_huge_window_is_no_reason_to_allocate() {
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd];
        frame.push(0x00); // no content size, no checksum, a window descriptor follows
        frame.push(21 << 3); // window of 2^31 bytes
        // One last block, run-length: 512 times the byte 7.
        frame.extend([0x03, 0x10, 0x00, 7]);
        let mut unpacked = vec![0; 512];
        decompress(CompressionType::Zstd, &frame, &mut unpacked).unwrap();
        assert_eq!(unpacked, [7; 512]);
    }
}
