//! A session that only reads writes nothing to the file, and flushes nothing, when it is closed.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::crash::{Op, Recorder};
use crate::support::failing::{Medium, Reach, Strike};
use crate::support::slow::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, FileRequest, Gate};
use cowslip::image::{Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Image};

/// A failure of the `at`th operation, half of which is done.
fn strike(at: usize, errno: i32) -> Strike {
    Strike {
        at,
        reach: Reach::Half,
        errno,
    }
}

/// The bytes of a file: a new image, or a raw disk.
fn bytes(format: Format) -> Vec<u8> {
    if format == Format::Raw {
        return vec![0; 1 << 20];
    }
    let file = Recorder::new(Vec::new());
    block_on(create(file.clone(), None, &CreateOptions::new(1 << 20))).unwrap();
    file.contents()
}

/// Returns the operations of a session on the file.
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
            image.write(0, data, Durability::Cached).await.unwrap();
        });
        let last_write = ops.iter().rposition(|op| matches!(op, Op::Write(..)));
        let last_flush = ops.iter().rposition(|op| matches!(op, Op::Flush));
        assert!(
            last_write.is_some() && last_flush > last_write,
            "{format:?}"
        );
    }
}

/// A process that died may have left unflushed data.
#[test]
fn a_flush_that_is_asked_for_is_one() {
    for format in [Format::Raw, Format::Qcow2] {
        let ops = ops_of(format, async |image| image.flush().await.unwrap());
        assert!(matches!(ops[..], [Op::Flush]), "{format:?}: {ops:?}");
    }
}

/// Of a file that is no whole sectors long the disk has the rest of the last one, too; the file
/// keeps its length until that is written.
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
        image.write(1010, data, Durability::Cached).await.unwrap();
        image.close().await.unwrap();
    });
    let after = file.contents();
    assert_eq!(after.len(), 1020);
    assert!(after[1000..1010] == [0; 10] && after[1010..] == [8; 10]);
}

/// The data file of an image.
struct DataFile(Arc<MemoryFile>);

impl Gate for DataFile {
    fn open(&self, _: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        Ok(Arc::clone(&self.0) as _)
    }
}

/// A process that died has left whole blocks at the end of a raw data file. They may stay; under an
/// autoclear bit that is not known they have to, until a session clears it and writes.
#[test]
fn padding_stays_under_an_unknown_autoclear_bit_until_something_is_written() {
    const SIZE: u64 = 1536;
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    let data = Arc::new(MemoryFile::new("data", Vec::new(), 4096));
    let options = CreateOptions {
        data_file: Some("data".to_string()),
        data_file_raw: true,
        ..CreateOptions::new(SIZE)
    };
    block_on(create(file.clone(), Some(data.clone()), &options)).unwrap();
    let unknown = Buf::copy_of(&[0x80]);
    block_on(file.write(88, unknown.into(), Durability::Cached)).unwrap();
    block_on(data.set_len(4096)).unwrap();
    let session = |writes: bool| {
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        block_on(async {
            let gate = DataFile(data.clone());
            let image = Image::open(file.clone(), options, &gate).await.unwrap();
            if writes {
                let byte = Buf::copy_of(&[7; 512]);
                image.write(0, byte, Durability::Cached).await.unwrap();
            }
            image.close().await.unwrap();
        });
        (file.contents()[88], data.contents().len() as u64)
    };
    assert_eq!(session(false), (0x80, 4096));
    assert_eq!(session(true), (0, SIZE));
}

/// A process that is killed leaves what it has handed to the system, and nothing else.
#[test]
fn what_was_written_back_outlives_the_process() {
    let killed_after = |writes_back: bool| {
        let file = Recorder::new(bytes(Format::Qcow2));
        let options = || OpenOptions {
            format: Some(Format::Qcow2),
            writable: true,
            ..OpenOptions::default()
        };
        block_on(async {
            let image = Image::open(Arc::clone(&file) as _, options(), &NoFiles).await;
            let image = image.unwrap();
            for (at, byte) in [(0, 7), (300 << 10, 8)] {
                let data = Buf::copy_of(&[byte; 512]);
                image.write(at, data, Durability::Cached).await.unwrap();
            }
            if writes_back {
                image.write_back().await.unwrap();
                let ops = file.ops().len();
                // Nothing is left to be written, so nothing is.
                image.write_back().await.unwrap();
                let data = Buf::copy_of(&[9; 512]);
                image.write(0, data, Durability::Cached).await.unwrap();
                image.write_back().await.unwrap();
                assert_eq!(file.ops().len(), ops + 1, "one write of data");
            }
            std::mem::forget(image);
            let left = Recorder::new(file.contents());
            let image = Image::open(left as _, options(), &NoFiles).await.unwrap();
            let mut found = Vec::new();
            for at in [0, 300 << 10] {
                let read = image.read(at, BufMut::zeroed(512)).await.unwrap();
                found.push(read[511]);
            }
            found
        })
    };
    assert_eq!(killed_after(false), [0, 0]);
    assert_eq!(killed_after(true), [9, 8]);
}

/// The next session would know nothing of what this one has lost, and its flushes would succeed.
#[test]
fn an_image_whose_flush_has_failed_is_not_reopened() {
    for format in [Format::Raw, Format::Qcow2] {
        let options = OpenOptions {
            format: Some(format),
            writable: true,
            ..OpenOptions::default()
        };
        let contents = [("image".to_string(), bytes(format))].into_iter().collect();
        let mut lost = 0;
        for at in 0..20 {
            let medium = Medium::new(&contents, Some(strike(at, 5)));
            block_on(async {
                let file = medium.file("image");
                let image = Image::open(file, options.clone(), &NoFiles).await.unwrap();
                let data = Buf::copy_of(&[7; 4096]);
                let written = image.write(0, data, Durability::Cached).await;
                let flushed = image.flush().await;
                if written.is_err()
                    || flushed.is_ok()
                    || medium.struck() != Some("image: Flush".into())
                {
                    return;
                }
                let file = medium.file("image");
                let reopened = image.reopen(file, options.clone(), &NoFiles).await;
                assert!(reopened.is_err(), "{format:?} {at}");
                assert!(image.flush().await.is_err(), "{format:?} {at}");
                let read = image.read(0, BufMut::zeroed(4096)).await;
                assert!(read.unwrap()[..] == [7; 4096], "{format:?} {at}");
                lost += 1;
            });
        }
        assert!(lost > 0, "{format:?}");
    }
}

/// The system shows the new header then, and the medium may have the old one.
#[test]
fn an_image_whose_emptying_has_failed_is_not_reopened() {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        ..OpenOptions::default()
    };
    let bytes = bytes(Format::Qcow2);
    let contents = [("image".to_string(), bytes)].into_iter().collect();
    let mut lost = 0;
    for at in 0..60 {
        let medium = Medium::new(&contents, Some(strike(at, 28)));
        block_on(async {
            let file = medium.file("image");
            let image = Image::open(file, options.clone(), &NoFiles).await.unwrap();
            let data = Buf::copy_of(&[7; 4096]);
            let written = image.write(0, data, Durability::Cached).await;
            if written.is_err() || image.flush().await.is_err() {
                return;
            }
            let emptied = image.empty().await;
            if emptied.is_ok() || medium.struck() != Some("image: Flush".into()) {
                return;
            }
            let file = medium.file("image");
            let reopened = image.reopen(file, options.clone(), &NoFiles).await;
            assert!(reopened.is_err(), "{at}");
            lost += 1;
        });
    }
    assert!(lost > 0);
}
