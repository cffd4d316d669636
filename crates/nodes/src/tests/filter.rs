//! A filter that these tests alone add: a file over other files.

use std::io;
use std::sync::Arc;

use cowslip::file::{BlockFile, ContentId, Durability};
use cowslip_block::Result;
use cowslip_block::file::unsupported;
use cowslip_block::options::{Kind, OptionEntry, Options, option};
use cowslip_block::{Error, IoVec, IoVecMut};
use cowslip_queue::{Pending, pending};

use super::{Ramp, sectors_of};
use crate::driver::{FileSettings, Filter, FilterNode, Opening};
use crate::{ImageSpec, Registry, drivers};

/// `mask`: bytes of the file below, each combined with a number by XOR.
struct Mask;

impl Filter for Mask {
    fn name(&self) -> &'static str {
        "mask"
    }

    fn options(&self) -> &'static [OptionEntry] {
        const OPTIONS: &[OptionEntry] = &[option("with", Kind::Number, "0", "The number")];
        OPTIONS
    }

    fn child(&self) -> &'static str {
        "file"
    }

    fn read(&self, options: &mut Options) -> Result<Option<Arc<dyn FilterNode>>> {
        let with = options.take("with").map_or(Ok(0), |text| text.parse());
        let with = with.map_err(|_| Error::invalid("with is invalid"))?;
        let node = Arc::new(MaskNode(with)) as Arc<dyn FilterNode>;
        Ok((with != 0).then_some(node))
    }
}

#[derive(Debug)]
struct MaskNode(u8);

impl FilterNode for MaskNode {
    fn open<'a>(&'a self, below: Arc<dyn BlockFile>, _: FileSettings<'a>) -> Opening<'a> {
        let file = MaskFile {
            below,
            with: self.0,
        };
        Box::pin(std::future::ready(Ok(Arc::new(file) as Arc<dyn BlockFile>)))
    }
}

#[derive(Debug)]
struct MaskFile {
    below: Arc<dyn BlockFile>,
    with: u8,
}

impl BlockFile for MaskFile {
    cowslip_block::forward_to_file!(
        below: name, capabilities, storage, len, zero, discard, allocate, extents, flush, set_len
    );

    fn content_id(&self) -> Option<ContentId> {
        // Other bytes than those of the file below.
        None
    }

    fn read(&self, offset: u64, target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let (completer, done) = pending();
        let (reading, with) = (self.below.read(offset, target), self.with);
        cowslip_queue::spawn(async move {
            let (outcome, mut list) = reading.await;
            let masked: Vec<u8> = list.to_vec().iter().map(|byte| byte ^ with).collect();
            list.copy_from_slice(0, &masked);
            completer.complete((outcome, list));
        });
        done
    }

    fn write(&self, _: u64, _: IoVec, _: Durability) -> Pending<io::Result<()>> {
        unsupported()
    }
}

fn sectors(list: &str, has_it: bool) -> Result<Vec<u8>> {
    let mut registry = Registry::clone(&drivers::standard());
    registry.protocols.push(&Ramp);
    if has_it {
        registry.filters.push(&Mask);
    }
    let spec = ImageSpec {
        filename: list.to_string(),
        format: None,
        image_opts: true,
    };
    sectors_of(spec, registry, &[0, 1, 7])
}

#[test]
fn a_filter_is_a_driver_and_a_line() {
    let read = |list: &str| sectors(list, true).unwrap();
    let over = |with: &str| format!("driver=raw,file.driver=mask,file.file.driver=ramp{with}");
    assert_eq!(read(&over("")), [0, 1, 7]);
    assert_eq!(read(&over(",file.with=8")), [8, 9, 15]);
    let bare = "driver=mask,with=1,file.driver=ramp,file.step=2";
    assert_eq!(read(bare), [1, 3, 15]);
    let twice = "driver=raw,file.driver=mask,file.with=8,file.file.driver=mask,file.file.with=1,\
                 file.file.file.driver=ramp";
    assert_eq!(read(twice), [9, 8, 14]);
    let part = "driver=raw,offset=512,file.driver=mask,file.with=8,file.file.driver=ramp";
    assert_eq!(read(part), [9, 10, 0]);
}

#[test]
fn its_options_are_refused_as_those_of_others() {
    let list = "driver=mask,with=many,file.driver=ramp";
    let why = sectors(list, true).unwrap_err().to_string();
    assert!(why.ends_with("with is invalid"), "{why}");
    let why = sectors("driver=mask,file.driver=ramp", false).unwrap_err();
    let why = why.to_string();
    assert!(why.ends_with("Unknown driver 'mask'"), "{why}");
}
