//! What a session that only reads leaves of a file when it is closed: nothing written, and nothing flushed.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::crash::{Op, Recorder};
use crate::support::slow::NoFiles;
use cowslip::image::{Format, OpenOptions, WriteOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Image};

/// The bytes of a file: a new image, or a raw disk.
fn bytes(format: Format) -> Vec<u8> {
    if format == Format::Raw {
        return vec![0; 1 << 20];
    }
    let file = Recorder::new(Vec::new());
    block_on(create(file.clone(), None, &CreateOptions::new(1 << 20))).unwrap();
    file.contents()
}

/// What a session has done to the file.
fn ops_of(format: Format, session: impl AsyncFn(&Image)) -> Vec<Op> {
    let file = Recorder::new(bytes(format));
    let options = OpenOptions {
        format: Some(format),
        writable: true,
        ..OpenOptions::default()
    };
    block_on(async {
        let image = Image::open(Arc::clone(&file) as _, options, &NoFiles).await;
        let image = image.unwrap();
        session(&image).await;
        image.close().await.unwrap();
    });
    file.ops()
}

#[test]
fn a_session_that_reads_changes_and_flushes_nothing() {
    for format in [Format::Raw, Format::Qcow2] {
        let ops = ops_of(format, async |image| {
            image.read(0, BufMut::zeroed(4096)).await.unwrap();
        });
        assert!(ops.is_empty(), "{format:?}: {ops:?}");
    }
}

#[test]
fn a_session_that_writes_ends_with_a_flush() {
    for format in [Format::Raw, Format::Qcow2] {
        let ops = ops_of(format, async |image| {
            let data = Buf::copy_of(&[7; 512]);
            image.write(0, data, WriteOptions::default()).await.unwrap();
        });
        let last_write = ops.iter().rposition(|op| matches!(op, Op::Write(..)));
        let last_flush = ops.iter().rposition(|op| matches!(op, Op::Flush));
        assert!(
            last_write.is_some() && last_flush > last_write,
            "{format:?}"
        );
    }
}

/// A process that died may have left what nobody has flushed.
#[test]
fn a_flush_that_is_asked_for_is_one() {
    for format in [Format::Raw, Format::Qcow2] {
        let ops = ops_of(format, async |image| image.flush().await.unwrap());
        assert!(matches!(ops[..], [Op::Flush]), "{format:?}: {ops:?}");
    }
}

/// Of a file that is no whole sectors long the disk has the rest of the last one, too; the file keeps its length until that
/// is written.
#[test]
fn a_raw_disk_has_whole_sectors() {
    let file = Recorder::new(vec![7; 1000]);
    let options = OpenOptions {
        format: Some(Format::Raw),
        writable: true,
        ..OpenOptions::default()
    };
    block_on(async {
        let image = Image::open(Arc::clone(&file) as _, options.clone(), &NoFiles).await;
        let image = image.unwrap();
        assert_eq!(image.size(), 1024);
        let read = image.read(0, BufMut::zeroed(1024)).await.unwrap();
        assert!(read[..1000] == [7; 1000] && read[1000..] == [0; 24]);
        image.close().await.unwrap();
        assert_eq!(file.contents().len(), 1000);
        let image = Image::open(Arc::clone(&file) as _, options, &NoFiles).await;
        let image = image.unwrap();
        let data = Buf::copy_of(&[8; 10]);
        image
            .write(1010, data, WriteOptions::default())
            .await
            .unwrap();
        image.close().await.unwrap();
    });
    let after = file.contents();
    assert_eq!(after.len(), 1020);
    assert!(after[1000..1010] == [0; 10] && after[1010..] == [8; 10]);
}
