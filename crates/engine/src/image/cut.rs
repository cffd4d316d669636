//! Requests to a disk that has limits (`OpenOptions::limits`): their parts, one after the other.
//! The first that fails ends the request; what came before it is done.

use cowslip_queue::{Buf, IoVec, IoVecMut};

use super::{Durability, Image, ZeroOptions};
use crate::limits::ZeroPart;
use crate::{Error, Result};
use cowslip_qcow2::OnAllocated;

impl Image {
    /// Returns whether the limits cut a read or a write.
    pub(super) fn is_cut(&self, offset: u64, len: usize) -> bool {
        self.limits.cut_transfer(&(offset..offset + len as u64))
    }

    pub(super) async fn read_in_parts(&self, offset: u64, mut buf: IoVecMut) -> Result<IoVecMut> {
        let range = offset..offset + buf.len() as u64;
        let mut read = IoVecMut::default();
        for part in self.limits.transfers(range) {
            let mut rest = buf;
            let this = rest.split_to((part.end - part.start) as usize);
            read.append(self.read_part(part.start, this).await?);
            buf = rest;
        }
        Ok(read)
    }

    pub(super) async fn write_in_parts(
        &self,
        offset: u64,
        data: IoVec,
        (durability, admitted): (Durability, &OnAllocated<'_>),
    ) -> Result<()> {
        let range = offset..offset + data.len() as u64;
        for part in self.limits.transfers(range.clone()) {
            let (start, len) = (part.start - offset, part.end - part.start);
            let this = data.slice(start as usize, len as usize);
            // The request has its space when its last part has.
            let on_allocated: &OnAllocated<'_> = match part.end == range.end {
                true => admitted,
                false => &|| (),
            };
            self.write_part(part.start, this, (durability, on_allocated))
                .await?;
        }
        Ok(())
    }

    pub(super) async fn zero_in_parts(
        &self,
        offset: u64,
        len: u64,
        options: ZeroOptions,
    ) -> Result<()> {
        for part in self.limits.zeroes(offset..offset + len) {
            match part {
                ZeroPart::Zeroes(part) => {
                    let len = part.end - part.start;
                    self.zero_part(part.start, len, options).await?;
                }
                ZeroPart::Written(_) if options.fast_only => {
                    return Err(Error::Unsupported {
                        file: self.name().to_string(),
                        feature: "zeroing what the disk's limits make be written".into(),
                    });
                }
                ZeroPart::Written(part) => {
                    let zeroes = Buf::zeroed((part.end - part.start) as usize).into();
                    let durability = options.durability;
                    let on_allocated: &OnAllocated<'_> = &|| ();
                    self.write_part(part.start, zeroes, (durability, on_allocated))
                        .await?;
                }
            }
        }
        Ok(())
    }

    pub(super) async fn discard_in_parts(&self, offset: u64, len: u64) -> Result<()> {
        for part in self.limits.discards(offset..offset + len) {
            self.discard_part(part.start, part.end - part.start).await?;
        }
        Ok(())
    }
}
