//! A format that this test alone adds: a module, and a line in the registry.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip::commit::{Afterwards, Commit};
use cowslip::disk::{DiskFuture, Features, ZeroOptions};
use cowslip::file::AlignedFile;
use cowslip::formats::{self, FormatDriver, Opened};
use cowslip::image::Format;
use cowslip::image::OpenOptions;
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::run::{HostOffset, Run, Source};
use cowslip::{Buf, Error, Image, Job};

use super::*;
use crate::Access;
use crate::driver::ImageFormat;
use crate::options::ImageOptions;

/// `shifted`: a disk behind a sector that says what it is, and how many bytes the disk has.
struct Shifted;

static DRIVER: FormatDriver = FormatDriver {
    format: Format::Other("shifted"),
    matches: |sector| sector.starts_with(MAGIC),
    open: |opening| Box::pin(open(opening)),
};

const MAGIC: &[u8] = b"SHIFTED\n";

impl ImageFormat for Shifted {
    fn format(&self) -> Format {
        DRIVER.format
    }

    fn driver(&self) -> Option<&'static FormatDriver> {
        Some(&DRIVER)
    }

    fn options(&self) -> &'static [OptionEntry] {
        const OPTIONS: &[OptionEntry] = &[option("shade", Kind::Text, "", "Without effect")];
        OPTIONS
    }

    fn take(&self, _: &mut ImageOptions, name: &str, _: &str) -> Result<bool> {
        Ok(name == "shade")
    }
}

#[derive(Debug)]
struct Disk {
    file: AlignedFile,
    size: AtomicU64,
}

async fn open(opening: formats::OpenRequest<'_>) -> Result<Opened> {
    let file = opening.file;
    let header = file.read(0, BufMut::zeroed(16)).await?;
    let size = u64::from_be_bytes(header[8..].try_into().expect("eight bytes"));
    if size
        .checked_add(512)
        .is_none_or(|end| end > opening.file_len)
    {
        return Err(Error::Corrupt {
            file: file.name().to_string(),
            structure: "header",
            offset: 8,
            detail: "the disk ends beyond the file".to_string(),
        });
    }
    let size = size.into();
    Ok(Opened::by(Box::new(Disk { file, size }), &DRIVER))
}

impl formats::FormatImage for Disk {
    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>> {
        let source = Source::Data(HostOffset(range.start + 512));
        Box::pin(std::future::ready(Ok(vec![Run { range, source }])))
    }

    fn file(&self) -> &AlignedFile {
        &self.file
    }

    fn features(&self) -> Features {
        Features {
            writable: true,
            preferred_block_bytes: 512,
        }
    }

    fn write(&self, offset: u64, data: IoVec) -> DiskFuture<'_, ()> {
        Box::pin(self.file.write(offset + 512, data, Durability::Cached))
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        Box::pin(self.file.zero(offset + 512, len, options.space))
    }

    fn resize(&self, size: u64) -> DiskFuture<'_, ()> {
        Box::pin(async move {
            // At no moment does the header name more than there is.
            let grows = size > self.size();
            if grows {
                self.file.set_len(512 + size).await?;
            }
            let header = Buf::copy_of(&size.to_be_bytes());
            self.file.write(8, header, Durability::Durable).await?;
            self.size.store(size, Ordering::Release);
            match grows {
                true => Ok(()),
                false => self.file.set_len(512 + size).await,
            }
        })
    }
}

/// A disk of three sectors, filled with their numbers from 1 on.
fn image(dir: &tempfile::TempDir) -> String {
    let mut bytes = vec![0; 4 * 512];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&(3 * 512_u64).to_be_bytes());
    for sector in 1..4 {
        bytes[sector * 512..][..512].fill(sector as u8);
    }
    let path = dir.path().join("a.shifted");
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_string()
}

fn registry(has_it: bool) -> Registry {
    let mut registry = Registry::clone(&drivers::standard());
    if has_it {
        registry.formats.push(&Shifted);
    }
    registry
}

#[test]
fn a_format_is_a_driver_and_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let name = image(&dir);
    let spec = |format: Option<&str>| ImageSpec::named(&name, format);
    let read = |spec| sectors_of(spec, registry(true), &[0, 1, 2]).unwrap();
    assert_eq!(read(spec(Some("shifted"))), [1, 2, 3]);
    assert_eq!(read(spec(None)), [1, 2, 3], "it is recognised");
    assert_eq!(read(spec(Some("raw"))), [MAGIC[0], 1, 2]);
    let list = |options: &str| ImageSpec {
        filename: format!("driver=shifted,{options}file.filename={name}"),
        format: None,
        image_opts: true,
    };
    assert_eq!(read(list("shade=blue,")), [1, 2, 3]);
    let refused = sectors_of(list("tint=blue,"), registry(true), &[]).unwrap_err();
    let text = "Block format 'shifted' does not support the option 'tint'";
    assert!(refused.to_string().ends_with(text), "{refused}");
    let unknown = sectors_of(spec(Some("shifted")), registry(false), &[]).unwrap_err();
    let text = "Unknown driver 'shifted'";
    assert!(unknown.to_string().ends_with(text), "{unknown}");
}

#[test]
fn the_size_of_its_disk_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let name = image(&dir);
    let settings = settings_with(registry(true));
    let queue = Queue::new(Backend::Auto).unwrap();
    let size = queue.block_on(async {
        let spec = ImageSpec::named(&name, None);
        let source = spec.resolve_by(&settings.environment.registry)?;
        let (file, format) = crate::open_alone(&source, &settings).await?;
        assert_eq!(format, Format::Other("shifted"));
        crate::disk_bytes(&file, format, &source.gate(&settings)).await
    });
    assert_eq!(size.unwrap(), 3 * 512);
}

/// The image of a spec, opened for writing.
async fn writable(name: &str) -> Result<Image> {
    let settings = OpenSettings {
        access: Access::Write,
        ..settings_with(registry(true))
    };
    open_image(&ImageSpec::named(name, None), &settings).await
}

fn on_queue<T>(work: impl Future<Output = T>) -> T {
    Queue::new(Backend::Auto).unwrap().block_on(work)
}

#[test]
fn its_disk_is_written_and_resized() {
    let dir = tempfile::tempdir().unwrap();
    let name = image(&dir);
    on_queue(async {
        let image = writable(&name).await.unwrap();
        assert_eq!(image.preferred_block_bytes(), 512);
        let data = Buf::copy_of(&[7; 100]);
        image.write(500, data, Durability::Cached).await.unwrap();
        let zeroes = ZeroOptions::default();
        image.write_zeroes(1030, 6, zeroes).await.unwrap();
        image.resize(4 * 512).await.unwrap();
        let data = Buf::copy_of(&[9; 512]);
        image
            .write(3 * 512, data, Durability::Durable)
            .await
            .unwrap();
        let beyond = image.write(4 * 512, Buf::zeroed(1), Durability::Cached);
        assert!(beyond.await.is_err(), "behind the end");
        image.close().await.unwrap();
    });
    let mut expected = std::fs::read(image(&tempfile::tempdir_in(&dir).unwrap())).unwrap();
    expected[8..16].copy_from_slice(&(4 * 512_u64).to_be_bytes());
    expected[512 + 500..512 + 600].fill(7);
    expected[512 + 1030..512 + 1036].fill(0);
    expected.extend([9; 512]);
    assert_eq!(std::fs::read(&name).unwrap(), expected);
    on_queue(async {
        let image = writable(&name).await.unwrap();
        image.resize(512).await.unwrap();
        image.close().await.unwrap();
    });
    assert_eq!(std::fs::read(&name).unwrap().len(), 2 * 512);
    let read = |spec| sectors_of(spec, registry(true), &[0]).unwrap();
    assert_eq!(read(ImageSpec::named(&name, None)), [1]);
}

#[test]
fn a_qcow2_image_over_it_is_committed_into_it() {
    let dir = tempfile::tempdir().unwrap();
    let (name, top) = (image(&dir), dir.path().join("top.qcow2"));
    let settings = OpenSettings {
        access: Access::Write,
        ..settings_with(registry(true))
    };
    let registry = &settings.environment.registry;
    on_queue(async {
        let options = CreateOptions {
            backing_file: Some(name.clone()),
            backing_format: Some("shifted".to_string()),
            ..CreateOptions::new(4 * 512)
        };
        create(new_file(&top), None, &options).await.unwrap();
        let spec = ImageSpec::named(top.to_str().unwrap(), None);
        let gate = spec.resolve_by(registry).unwrap().gate(&settings);
        let image = open_image(&spec, &settings).await.unwrap();
        let data = Buf::copy_of(&[8; 512]);
        image.write(512, data, Durability::Cached).await.unwrap();
        let commit = Commit {
            depth: 1,
            afterwards: Afterwards::Empty,
            base: OpenOptions {
                formats: registry.engine_formats(),
                ..OpenOptions::default()
            },
        };
        image.commit(&commit, &gate, &Job::default()).await.unwrap();
        image.close().await.unwrap();
    });
    let read = sectors_of(
        ImageSpec::named(&name, None),
        registry.as_ref().clone(),
        &[0, 1, 2, 3],
    );
    assert_eq!(read.unwrap(), [1, 8, 3, 0]);
}
