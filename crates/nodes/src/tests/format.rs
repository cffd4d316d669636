//! A format that this test alone adds: a module, and a line in the registry.

use std::ops::Range;

use cowslip::disk::DiskFuture;
use cowslip::file::AlignedFile;
use cowslip::formats::{self, FormatDriver, Opened};
use cowslip::image::Format;
use cowslip::run::{HostOffset, Run, Source};

use super::*;
use crate::driver::ImageFormat;
use crate::options::ImageOptions;

/// `shifted`: a disk behind a sector that says what it is.
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
    size: u64,
}

async fn open(opening: formats::OpenRequest<'_>) -> Result<Opened> {
    let disk = Disk {
        file: opening.file,
        size: opening.file_len - 512,
    };
    Ok(Opened::by(Box::new(disk), &DRIVER))
}

impl formats::FormatImage for Disk {
    fn size(&self) -> u64 {
        self.size
    }

    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>> {
        let source = Source::Data(HostOffset(range.start + 512));
        Box::pin(std::future::ready(Ok(vec![Run { range, source }])))
    }

    fn file(&self) -> &AlignedFile {
        &self.file
    }
}

/// A disk of three sectors, filled with their numbers from 1 on.
fn image(dir: &tempfile::TempDir) -> String {
    let mut bytes = vec![0; 4 * 512];
    bytes[..8].copy_from_slice(MAGIC);
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
