//! A protocol that these tests alone add: an image opens over it by name. In `filter.rs` a filter
//! over files, in `format.rs` a format, in `destination.rs` a protocol that stores new images.

use std::io;
use std::path::Path;
use std::sync::Arc;

use cowslip::file::host::{CreateMode, HostOptions, open_host_file};
use cowslip::file::{BlockFile, Capabilities, Durability, FileExtent};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip_block::file::unsupported;
use cowslip_block::options::{Kind, OptionEntry, Options, option};
use cowslip_block::{BufMut, IoVec, IoVecMut, Result};
use cowslip_queue::{Backend, Pending, Queue};

use crate::driver::{FileSettings, Opening, Protocol, ProtocolNode};
use crate::{Environment, ImageSpec, OpenSettings, Registry, drivers, open_image};

mod destination;
mod filter;
mod format;

/// `ramp`: bytes that are computed from their offsets.
struct Ramp;

impl Protocol for Ramp {
    fn names(&self) -> &'static [&'static str] {
        &["ramp"]
    }

    fn options(&self) -> &'static [OptionEntry] {
        const OPTIONS: &[OptionEntry] = &[
            option("size", Kind::Size, "1M", "Length"),
            option(
                "step",
                Kind::Number,
                "1",
                "Difference of neighbouring sectors",
            ),
        ];
        OPTIONS
    }

    fn read(&self, _: &str, options: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        let size = options.take_size("size")?.unwrap_or(1 << 20);
        let step = options.take("step").map_or(Ok(1), |step| step.parse());
        let step = step.map_err(|_| cowslip_block::Error::invalid("step is invalid"))?;
        Ok(Arc::new(Node { size, step }))
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    size: u64,
    step: u8,
}

impl ProtocolNode for Node {
    fn driver(&self) -> &'static str {
        "ramp"
    }

    fn open<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        let file = RampFile {
            name: settings.name.to_string(),
            node: *self,
            capabilities: Capabilities::NONE,
        };
        Box::pin(std::future::ready(Ok(Arc::new(file) as Arc<dyn BlockFile>)))
    }
}

#[derive(Debug)]
struct RampFile {
    name: String,
    node: Node,
    capabilities: Capabilities,
}

impl RampFile {
    fn byte(&self, offset: u64) -> u8 {
        match offset < self.node.size {
            true => ((offset / 512) as u8).wrapping_mul(self.node.step),
            false => 0,
        }
    }
}

impl BlockFile for RampFile {
    cowslip_block::file_from_fields!(name, capabilities);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.node.size))
    }

    fn read(&self, offset: u64, mut target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let end = offset + target.len() as u64;
        let bytes: Vec<u8> = (offset..end).map(|at| self.byte(at)).collect();
        target.copy_from_slice(0, &bytes);
        Pending::ready((Ok(()), target))
    }

    fn write(&self, _: u64, _: IoVec, _: Durability) -> Pending<io::Result<()>> {
        unsupported()
    }

    fn extents(&self, start: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let hole = false;
        Pending::ready(Ok(vec![FileExtent { start, len, hole }]))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }
}

fn settings_with(registry: Registry) -> OpenSettings {
    OpenSettings::new(Environment {
        registry: Arc::new(registry),
        ..Environment::default()
    })
}

/// The first byte of each of some sectors of the disk of an image by these drivers.
fn sectors_of(spec: ImageSpec, registry: Registry, sectors: &[u64]) -> Result<Vec<u8>> {
    let settings = settings_with(registry);
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(async {
        let image = open_image(&spec, &settings).await?;
        let mut bytes = Vec::new();
        for sector in sectors {
            let read = image.read(sector * 512, BufMut::zeroed(512)).await?;
            bytes.push(read[0]);
        }
        image.close().await?;
        Ok(bytes)
    })
}

/// The same of a list of options, with the protocol `ramp`.
fn sectors(list: &str, sectors: &[u64]) -> Result<Vec<u8>> {
    let mut registry = Registry::clone(&drivers::standard());
    registry.protocols.push(&Ramp);
    let spec = ImageSpec {
        filename: list.to_string(),
        format: None,
        image_opts: true,
    };
    sectors_of(spec, registry, sectors)
}

/// A new file of the host, for an image.
fn new_file(path: &Path) -> Arc<dyn BlockFile> {
    let options = HostOptions {
        writable: true,
        create: CreateMode::Truncate,
        ..HostOptions::default()
    };
    open_host_file(path, &options).unwrap()
}

#[test]
fn a_protocol_is_a_driver_and_a_line() {
    let read = |list| sectors(list, &[0, 1, 7]).unwrap();
    assert_eq!(read("driver=ramp,size=64k"), [0, 1, 7]);
    assert_eq!(read("driver=raw,file.driver=ramp,file.step=3"), [0, 3, 21]);
    let part = "driver=raw,offset=1k,file.driver=ramp,file.size=64k";
    assert_eq!(read(part), [2, 3, 9]);
    let below = "driver=raw,file.driver=blkdebug,file.align=4k,file.image.driver=ramp";
    assert_eq!(read(below), [0, 1, 7]);
}

#[test]
fn a_qcow2_image_names_it_as_its_backing_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("top.qcow2");
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(async {
        let options = CreateOptions::new(1 << 20);
        create(new_file(&path), None, &options).await.unwrap();
    });
    let backing = r#"json:{"driver":"raw","file":{"driver":"ramp","step":"2"}}"#;
    let list = format!(
        "driver=qcow2,file.filename={},backing={}",
        path.display(),
        backing.replace(',', ",,")
    );
    assert_eq!(sectors(&list, &[0, 1, 9]).unwrap(), [0, 2, 18]);
}

#[test]
fn its_options_are_refused_as_those_of_others() {
    for (list, said) in [
        (
            "driver=raw,file.driver=ramp,file.foo=1",
            "Block protocol 'ramp' doesn't support the option 'foo'",
        ),
        (
            "driver=ramp,size=x",
            "Parameter 'size' expects a non-negative",
        ),
        ("driver=ramp,step=x", "step is invalid"),
    ] {
        let why = sectors(list, &[]).unwrap_err().to_string();
        let begin = format!("Could not open '{list}': {said}");
        assert!(why.starts_with(&begin), "{why}");
    }
}
