//! [`forward_to_disk`](crate::forward_to_disk): the methods of a disk over another one that are the
//! other one's.

/// Implements methods of [`Disk`](crate::disk::Disk) by those of a field:
/// `forward_to_disk!(inner: name, size, flush);` within the implementation.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_to_disk {
    ($($field:tt).+: $($method:ident),+) => {
        $crate::forward_to_disk!(@each [$($field).+] $($method)+);
    };
    (@each $field:tt $($method:ident)+) => {
        $($crate::forward_to_disk!(@one $field $method);)+
    };
    (@one [$($field:tt)+] name) => {
        fn name(&self) -> &str {
            self.$($field)+.name()
        }
    };
    (@one [$($field:tt)+] size) => {
        fn size(&self) -> u64 {
            self.$($field)+.size()
        }
    };
    (@one [$($field:tt)+] features) => {
        fn features(&self) -> $crate::disk::Features {
            self.$($field)+.features()
        }
    };
    (@one [$($field:tt)+] read) => {
        fn read(
            &self,
            offset: u64,
            buf: $crate::IoVecMut,
        ) -> $crate::disk::DiskFuture<'_, $crate::IoVecMut> {
            self.$($field)+.read(offset, buf)
        }
    };
    (@one [$($field:tt)+] write) => {
        fn write(
            &self,
            offset: u64,
            data: $crate::IoVec,
            durability: $crate::file::Durability,
        ) -> $crate::disk::DiskFuture<'_, ()> {
            self.$($field)+.write(offset, data, durability)
        }
    };
    (@one [$($field:tt)+] zero) => {
        fn zero(
            &self,
            offset: u64,
            len: u64,
            options: $crate::disk::ZeroOptions,
        ) -> $crate::disk::DiskFuture<'_, ()> {
            self.$($field)+.zero(offset, len, options)
        }
    };
    (@one [$($field:tt)+] discard) => {
        fn discard(&self, offset: u64, len: u64) -> $crate::disk::DiskFuture<'_, ()> {
            self.$($field)+.discard(offset, len)
        }
    };
    (@one [$($field:tt)+] flush) => {
        fn flush(&self) -> $crate::disk::DiskFuture<'_, ()> {
            self.$($field)+.flush()
        }
    };
    (@one [$($field:tt)+] write_back) => {
        fn write_back(&self) -> $crate::disk::DiskFuture<'_, ()> {
            self.$($field)+.write_back()
        }
    };
    (@one [$($field:tt)+] extents) => {
        fn extents(
            &self,
            offset: u64,
            len: u64,
            max: usize,
        ) -> $crate::disk::DiskFuture<'_, Vec<$crate::disk::Extent>> {
            self.$($field)+.extents(offset, len, max)
        }
    };
}
