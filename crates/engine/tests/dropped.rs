//! Requests whose futures are dropped while their I/O is under way.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::support::block_on;
use crate::support::slow::{HELD, NoFiles, SlowFile};
use cowslip::image::{Durability, Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, Error, Image};

fn write(image: &Image, byte: u8, fua: bool) -> impl Future<Output = cowslip::Result<()>> {
    image.write(0, Buf::copy_of(&[byte; 4096]), Durability::of_fua(fua))
}

fn open(file: &Arc<SlowFile>, format: Format) -> Image {
    let options = OpenOptions {
        writable: true,
        format: Some(format),
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

/// Whether a flush succeeds after a write into durable space was begun and dropped.
fn flushes_after(file: &Arc<SlowFile>, format: Format, fua: bool) -> cowslip::Result<()> {
    let image = open(file, format);
    block_on(write(&image, 0xaa, false)).unwrap();
    block_on(image.flush()).unwrap();
    {
        let mut dropped = pin!(write(&image, HELD, fua));
        let mut context = Context::from_waker(Waker::noop());
        assert!(dropped.as_mut().poll(&mut context).is_pending());
        assert_eq!(file.waiting(), 1);
    }
    file.let_go();
    block_on(image.flush())
}

#[test]
fn a_durable_write_that_nobody_waits_for_may_have_found_a_loss() {
    for format in [Format::Raw, Format::Qcow2] {
        for fua in [false, true] {
            let file = SlowFile::new(vec![0; 1 << 20]);
            if format == Format::Qcow2 {
                let options = CreateOptions::new(1 << 20);
                block_on(create(file.clone(), None, &options)).unwrap();
            }
            let flushed = flushes_after(&file, format, fua);
            match fua {
                false => flushed.unwrap(),
                true => assert!(matches!(flushed, Err(Error::Latched(_))), "{flushed:?}"),
            }
        }
    }
}
