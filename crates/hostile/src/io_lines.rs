//! Fuzz target: lines of the qemu-io shell, taken apart and run on an image in memory.

use std::sync::Arc;

use cowslip::Image;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{BackingChoice, DiscardPolicy, OpenOptions};

use crate::draw::Draw;
use crate::session::OneDataFile;
use crate::{pipe, samples};

const LINES_MAX: usize = 20;
const LINE_BYTES_MAX: usize = 200;

/// Words that commands are made of.
const WORDS: [&str; 40] = [
    "read",
    "write",
    "aio_read",
    "aio_write",
    "readv",
    "writev",
    "discard",
    "flush",
    "aio_flush",
    "map",
    "alloc",
    "length",
    "info",
    "truncate",
    "help",
    "-P",
    "-z",
    "-u",
    "-f",
    "-q",
    "-C",
    "-v",
    "-c",
    "-s",
    "-l",
    "-p",
    "-i",
    "0",
    "512",
    "1k",
    "64k",
    "1M",
    "0x1ff",
    "1023",
    "-1",
    "8E",
    "1.5k",
    "300032",
    "close",
    "-b",
];

/// The target's body: its first byte chooses between text and words from a list.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    let sample = samples::all()[draw.pick(&[0, 1, 3])].clone();
    let text = match draw.below(2) {
        0 => String::from_utf8_lossy(draw.rest()).into_owned(),
        _ => words(&mut draw),
    };
    let lines: Vec<&str> = text
        .split('\n')
        .filter(|line| line.len() <= LINE_BYTES_MAX)
        .take(LINES_MAX)
        .collect();
    pipe::queue().block_on(async {
        let file = Arc::new(MemoryFile::new("sample", sample, 1));
        let options = OpenOptions {
            writable: true,
            discard: DiscardPolicy::Unmap,
            backing: BackingChoice::None,
            ..OpenOptions::default()
        };
        let image = Image::open(file, options, &OneDataFile::new()).await;
        std::hint::black_box(cowslip_shell::run_lines(image.unwrap(), &lines).await);
    });
}

fn words(draw: &mut Draw) -> String {
    let mut text = String::new();
    while !draw.is_empty() {
        match draw.below(6) {
            0 => text.push('\n'),
            1 => text.push_str(&draw.below(1 << 21).to_string()),
            _ => text.push_str(draw.pick(&WORDS)),
        }
        text.push(' ');
    }
    text
}
