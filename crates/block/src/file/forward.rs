//! [`forward_to_file`](crate::forward_to_file): the methods of a file over another one that are the
//! other one's.

/// Implements methods of [`BlockFile`](crate::file::BlockFile) by those of a field:
/// `forward_to_file!(inner: name, read, flush);` within the implementation.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_to_file {
    ($($field:tt).+: $($method:ident),+) => {
        $crate::forward_to_file!(@each [$($field).+] $($method)+);
    };
    (@each $field:tt $($method:ident)+) => {
        $($crate::forward_to_file!(@one $field $method);)+
    };
    (@one [$($field:tt)+] name) => {
        fn name(&self) -> &str {
            self.$($field)+.name()
        }
    };
    (@one [$($field:tt)+] capabilities) => {
        fn capabilities(&self) -> &$crate::file::Capabilities {
            self.$($field)+.capabilities()
        }
    };
    (@one [$($field:tt)+] id) => {
        fn id(&self) -> Option<$crate::file::FileId> {
            self.$($field)+.id()
        }
    };
    (@one [$($field:tt)+] content_id) => {
        fn content_id(&self) -> Option<$crate::file::ContentId> {
            self.$($field)+.content_id()
        }
    };
    (@one [$($field:tt)+] storage) => {
        fn storage(&self) -> $crate::file::Storage {
            self.$($field)+.storage()
        }
    };
    (@one [$($field:tt)+] observer) => {
        fn observer(&self) -> Option<::std::sync::Arc<dyn $crate::file::Observer>> {
            self.$($field)+.observer()
        }
    };
    (@one [$($field:tt)+] len) => {
        fn len(&self) -> $crate::file::Reply<u64> {
            self.$($field)+.len()
        }
    };
    (@one [$($field:tt)+] memory_alignment) => {
        fn memory_alignment(&self) -> $crate::file::MemoryAlignment {
            self.$($field)+.memory_alignment()
        }
    };
    (@one [$($field:tt)+] read) => {
        fn read(&self, offset: u64, target: $crate::IoVecMut) -> $crate::file::ReadReply {
            self.$($field)+.read(offset, target)
        }
    };
    (@one [$($field:tt)+] write) => {
        fn write(
            &self,
            offset: u64,
            data: $crate::IoVec,
            durability: $crate::file::Durability,
        ) -> $crate::file::Reply<()> {
            self.$($field)+.write(offset, data, durability)
        }
    };
    (@one [$($field:tt)+] zero) => {
        fn zero(&self, offset: u64, len: u64, space: $crate::file::Space) -> $crate::file::Reply<()> {
            self.$($field)+.zero(offset, len, space)
        }
    };
    (@one [$($field:tt)+] discard) => {
        fn discard(&self, offset: u64, len: u64) -> $crate::file::Reply<()> {
            self.$($field)+.discard(offset, len)
        }
    };
    (@one [$($field:tt)+] allocate) => {
        fn allocate(&self, offset: u64, len: u64) -> $crate::file::Reply<()> {
            self.$($field)+.allocate(offset, len)
        }
    };
    (@one [$($field:tt)+] extents) => {
        fn extents(
            &self,
            offset: u64,
            len: u64,
        ) -> $crate::file::Reply<Vec<$crate::file::FileExtent>> {
            self.$($field)+.extents(offset, len)
        }
    };
    (@one [$($field:tt)+] own_space) => {
        fn own_space(
            &self,
            offset: u64,
            len: u64,
        ) -> $crate::file::Reply<Vec<$crate::file::FileExtent>> {
            self.$($field)+.own_space(offset, len)
        }
    };
    (@one [$($field:tt)+] flush) => {
        fn flush(&self) -> $crate::file::Reply<()> {
            self.$($field)+.flush()
        }
    };
    (@one [$($field:tt)+] set_len) => {
        fn set_len(&self, len: u64) -> $crate::file::Reply<()> {
            self.$($field)+.set_len(len)
        }
    };
    (@one [$($field:tt)+] allocated_bytes) => {
        fn allocated_bytes(&self) -> Option<u64> {
            self.$($field)+.allocated_bytes()
        }
    };
    (@one [$($field:tt)+] free_bytes) => {
        fn free_bytes(&self) -> Option<u64> {
            self.$($field)+.free_bytes()
        }
    };
    (@one [$($field:tt)+] close) => {
        fn close(&self) -> $crate::file::Reply<()> {
            self.$($field)+.close()
        }
    };
    (@one [$($field:tt)+] claim) => {
        fn claim(&self, wanted: $crate::file::Claim) -> $crate::Result<$crate::file::Protection> {
            self.$($field)+.claim(wanted)
        }
    };
    (@one [$($field:tt)+] claim_after) => {
        fn claim_after(
            &self,
            wanted: $crate::file::Claim,
            predecessor: &dyn $crate::file::BlockFile,
        ) -> $crate::Result<$crate::file::Protection> {
            self.$($field)+.claim_after(wanted, predecessor)
        }
    };
    (@one [$($field:tt)+] claim_handed_over) => {
        fn claim_handed_over(
            &self,
            wanted: $crate::file::Claim,
        ) -> $crate::Result<$crate::file::Protection> {
            self.$($field)+.claim_handed_over(wanted)
        }
    };
    (@one [$($field:tt)+] claimed) => {
        fn claimed(&self) -> $crate::file::Claim {
            self.$($field)+.claimed()
        }
    };
}
