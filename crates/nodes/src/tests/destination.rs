//! A protocol that these tests alone add: images are made in its files, and copied into them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cowslip::convert::{Options as ConvertOptions, Plan, Sources, TargetContent};
use cowslip::file::host::FlushPolicy;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Capabilities, ReadAs, ReadSet, Storage};
use cowslip::qcow2::create::{CreateOptions, Preallocation, create, create_raw};
use cowslip::{Image, Job};
use cowslip_block::options::{OptionEntry, Options};
use cowslip_block::{BufMut, Error, Result};
use cowslip_queue::{Backend, Queue};

use super::settings_with;
use crate::driver::{Creation, FileSettings, Opening, Protocol, ProtocolNode};
use crate::{Access, Destination, ImageSpec, OpenSettings, Registry, drivers, open_image};

/// `shelf:NAME` is a file in memory, made when it is first a destination; `slot:NAME` is one that
/// exists and keeps its length.
#[derive(Default)]
struct Shelf(Mutex<BTreeMap<String, Arc<MemoryFile>>>);

static SHELF: Shelf = Shelf(Mutex::new(BTreeMap::new()));

impl Shelf {
    fn find(&self, name: &str) -> Option<Arc<MemoryFile>> {
        self.0.lock().unwrap().get(name).cloned()
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Arc<MemoryFile> {
        let file = Arc::new(MemoryFile::new(name, bytes, 1));
        let mut files = self.0.lock().unwrap();
        files.insert(name.to_string(), Arc::clone(&file));
        file
    }
}

impl Protocol for Shelf {
    fn names(&self) -> &'static [&'static str] {
        &["shelf", "slot"]
    }

    fn options(&self) -> &'static [OptionEntry] {
        &[]
    }

    fn node_of_name(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        let creation = match name.split_once(':') {
            Some(("shelf", _)) => Creation::New,
            Some(("slot", _)) => Creation::Existing,
            _ => return Ok(None),
        };
        let name = name.to_string();
        Ok(Some(Arc::new(OnShelf { name, creation })))
    }

    fn read(&self, _: &str, _: &mut Options) -> Result<Arc<dyn ProtocolNode>> {
        Err(Error::invalid("its nodes are named"))
    }
}

#[derive(Debug)]
struct OnShelf {
    name: String,
    creation: Creation,
}

fn opened(file: Option<Arc<dyn BlockFile>>) -> Opening<'static> {
    let file = file.ok_or_else(|| Error::invalid("nothing is there"));
    Box::pin(std::future::ready(file))
}

impl ProtocolNode for OnShelf {
    fn driver(&self) -> &'static str {
        match self.creation {
            Creation::New => "shelf",
            Creation::Existing | Creation::Unsupported => "slot",
        }
    }

    fn open<'a>(&'a self, _: FileSettings<'a>) -> Opening<'a> {
        let found = SHELF.find(&self.name);
        opened(found.map(|file| match self.creation {
            Creation::New => file as Arc<dyn BlockFile>,
            Creation::Existing | Creation::Unsupported => Arc::new(Slot::new(file)),
        }))
    }

    fn creation(&self) -> Creation {
        self.creation
    }

    fn storage(&self) -> Storage {
        Storage::named(&self.name)
    }

    fn create<'a>(&'a self, settings: FileSettings<'a>) -> Opening<'a> {
        assert!(settings.host.writable, "a destination is written");
        if self.creation == Creation::New && SHELF.find(&self.name).is_none() {
            SHELF.put(&self.name, Vec::new());
        }
        self.open(settings)
    }
}

/// A file of a length that stays, of which nothing says that it reads as zeroes.
#[derive(Debug)]
struct Slot {
    file: Arc<MemoryFile>,
    capabilities: Capabilities,
}

impl Slot {
    fn new(file: Arc<MemoryFile>) -> Slot {
        let capabilities = Capabilities {
            extends_with_zeroes: false,
            ..*file.capabilities()
        };
        Slot { file, capabilities }
    }
}

impl BlockFile for Slot {
    cowslip_block::file_from_fields!(capabilities);
    cowslip_block::forward_to_file!(file: name, len, read, write, zero, discard, allocate, extents, flush);
}

fn settings() -> OpenSettings {
    let mut registry = Registry::clone(&drivers::standard());
    registry.protocols.push(&SHELF);
    OpenSettings {
        access: Access::Write,
        ..settings_with(registry)
    }
}

/// The node that the name of a destination stands for, opened for a new image.
async fn made(name: &str, settings: &OpenSettings) -> Result<Arc<dyn BlockFile>> {
    match Destination::named(name, &settings.environment.registry)? {
        Destination::Node(node) => node.create(FlushPolicy::Honour, settings).await,
        Destination::Host(path) => panic!("{path} is no file of the host"),
    }
}

async fn image(name: &str, format: &str, settings: &OpenSettings) -> Result<Image> {
    open_image(&ImageSpec::named(name, Some(format)), settings).await
}

/// Copies a disk of 1 MiB, of which the second half is sevens, into an image, and reads it again.
async fn copied_into(target: &Image, unwritten: TargetContent, settings: &OpenSettings) -> Vec<u8> {
    let bytes = [vec![0; 512 << 10], vec![7; 512 << 10]].concat();
    SHELF.put("shelf:source", bytes.clone());
    let sources = [image("shelf:source", "raw", settings).await.unwrap()];
    let sources = Sources::new(&sources);
    let job = Job::default();
    let options = ConvertOptions {
        unwritten,
        ..ConvertOptions::default()
    };
    let plan = Plan::new(&sources, options, &job, &|_| {}).await.unwrap();
    plan.run(target, &job).await.unwrap();
    target.flush().await.unwrap();
    let read = target.read(0, BufMut::zeroed(1 << 20)).await.unwrap();
    assert!(read.to_vec() == bytes, "the copy is the source");
    bytes
}

#[test]
fn an_image_is_made_in_a_file_of_a_protocol() {
    let settings = settings();
    Queue::new(Backend::Auto).unwrap().block_on(async {
        let destination = Destination::named("shelf:new", &settings.environment.registry).unwrap();
        assert!(!destination.is_fixed());
        assert_eq!(
            (destination.name(), destination.path()),
            ("shelf:new", None)
        );
        let file = made("shelf:new", &settings).await.unwrap();
        let options = CreateOptions::new(1 << 20);
        create(file, None, &options).await.unwrap();
        let target = image("shelf:new", "qcow2", &settings).await.unwrap();
        assert!(target.is_zero_when_new());
        let bytes = copied_into(&target, TargetContent::Zeroes, &settings).await;
        target.close().await.unwrap();
        let stored = SHELF.find("shelf:new").unwrap().contents();
        assert_eq!(stored[..4], *b"QFI\xfb");
        assert!(stored.len() < bytes.len(), "zeroes take no space");
    });
}

#[test]
fn an_image_is_made_in_what_exists_and_keeps_its_length() {
    let settings = settings();
    Queue::new(Backend::Auto).unwrap().block_on(async {
        SHELF.put("slot:full", vec![1; 1 << 20]);
        let destination = Destination::named("slot:full", &settings.environment.registry).unwrap();
        assert!(destination.is_fixed());
        let make = async |bytes| {
            let file = made("slot:full", &settings).await.unwrap();
            create_raw(file, bytes, Preallocation::Off, &Job::default()).await
        };
        make(2 << 20).await.unwrap_err();
        make(1 << 20).await.unwrap();
        let target = image("slot:full", "raw", &settings).await.unwrap();
        assert!(!target.is_zero_when_new());
        let bytes = copied_into(&target, TargetContent::Unknown, &settings).await;
        target.close().await.unwrap();
        assert!(SHELF.find("slot:full").unwrap().contents() == bytes);
    });
}

#[test]
fn destinations_are_refused_by_name() {
    let settings = settings();
    let registry = &settings.environment.registry;
    let refused = |name| Destination::named(name, registry).unwrap_err().to_string();
    assert_eq!(
        refused("null-co://"),
        "Protocol driver 'null-co' does not support image creation"
    );
    assert_eq!(refused("shelve:a"), "Unknown protocol 'shelve'");
    Queue::new(Backend::Auto).unwrap().block_on(async {
        let why = made("slot:none", &settings).await.unwrap_err().to_string();
        let begin = "Protocol driver 'slot' does not support creating new images, ";
        assert!(why.starts_with(begin), "{why}");
        assert!(why.ends_with(" failed: nothing is there"), "{why}");
    });
}

#[test]
fn a_destination_that_is_read_is_refused_before_it_is_opened() {
    let settings = settings();
    let Ok(Destination::Node(node)) =
        Destination::named("shelf:read", &settings.environment.registry)
    else {
        panic!("it is a node");
    };
    let mut read = ReadSet::default();
    read.add_stored("other", Storage::named("shelf:other"), ReadAs::Source);
    node.check(&read).unwrap();
    read.add_stored("it", Storage::named("shelf:read"), ReadAs::Source);
    let why = node.check(&read).unwrap_err();
    assert!(matches!(why, Error::Overwrites(_)), "{why}");
}
