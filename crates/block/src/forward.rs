//! [`forward_to_disk`](crate::forward_to_disk) and [`forward_to_file`](crate::forward_to_file): the
//! methods of a disk or a file over another one that are the other one's;
//! [`file_from_fields`](crate::file_from_fields): the methods of a file that its fields answer; and
//! [`debug_by_name`](crate::debug_by_name).

/// The parts that both have: a method for each name, a method by its signature, and the methods
/// that are alike but for their reply.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_methods {
    ($table:ident $field:tt $($method:ident)+) => {
        $($crate::$table!(@one $field $method);)+
    };
    (@method [$($field:tt)+] $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        fn $name(&self $(, $arg: $type)*) -> $result {
            self.$($field)+.$name($($arg),*)
        }
    };
    (@alike $field:tt name $reply:tt) => {
        $crate::forward_methods!(@method $field name() -> &str);
    };
    (@alike $field:tt write [$($reply:tt)+]) => {
        $crate::forward_methods!(
            @method $field write(
                offset: u64,
                data: $crate::IoVec,
                durability: $crate::file::Durability
            ) -> $($reply)+
        );
    };
    (@alike $field:tt discard [$($reply:tt)+]) => {
        $crate::forward_methods!(@method $field discard(offset: u64, len: u64) -> $($reply)+);
    };
    (@alike $field:tt $method:ident [$($reply:tt)+]) => {
        $crate::forward_methods!(@method $field $method() -> $($reply)+);
    };
}

/// Implements methods of [`Disk`](crate::disk::Disk) by those of a field:
/// `forward_to_disk!(inner: name, size, flush);` within the implementation.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_to_disk {
    ($($field:tt).+: $($method:ident),+) => {
        $crate::forward_methods!(forward_to_disk [$($field).+] $($method)+);
    };
    (@one $field:tt size) => {
        $crate::forward_methods!(@method $field size() -> u64);
    };
    (@one $field:tt features) => {
        $crate::forward_methods!(@method $field features() -> $crate::disk::Features);
    };
    (@one $field:tt read) => {
        $crate::forward_methods!(
            @method $field read(
                offset: u64,
                buf: $crate::IoVecMut
            ) -> $crate::disk::DiskFuture<'_, $crate::IoVecMut>
        );
    };
    (@one $field:tt zero) => {
        $crate::forward_methods!(
            @method $field zero(
                offset: u64,
                len: u64,
                options: $crate::disk::ZeroOptions
            ) -> $crate::disk::DiskFuture<'_, ()>
        );
    };
    (@one $field:tt extents) => {
        $crate::forward_methods!(
            @method $field extents(
                offset: u64,
                len: u64,
                max: usize
            ) -> $crate::disk::DiskFuture<'_, Vec<$crate::disk::Extent>>
        );
    };
    (@one $field:tt $alike:ident) => {
        $crate::forward_methods!(@alike $field $alike [$crate::disk::DiskFuture<'_, ()>]);
    };
}

/// Implements methods of [`BlockFile`](crate::file::BlockFile) by those of a field:
/// `forward_to_file!(inner: name, read, flush);` within the implementation.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_to_file {
    ($($field:tt).+: $($method:ident),+) => {
        $crate::forward_methods!(forward_to_file [$($field).+] $($method)+);
    };
    (@one $field:tt capabilities) => {
        $crate::forward_methods!(@method $field capabilities() -> &$crate::file::Capabilities);
    };
    (@one $field:tt id) => {
        $crate::forward_methods!(@method $field id() -> Option<$crate::file::FileId>);
    };
    (@one $field:tt content_id) => {
        $crate::forward_methods!(@method $field content_id() -> Option<$crate::file::ContentId>);
    };
    (@one $field:tt storage) => {
        $crate::forward_methods!(@method $field storage() -> $crate::file::Storage);
    };
    (@one $field:tt observer) => {
        $crate::forward_methods!(
            @method $field observer() -> Option<::std::sync::Arc<dyn $crate::file::Observer>>
        );
    };
    (@one $field:tt len) => {
        $crate::forward_methods!(@method $field len() -> $crate::file::Reply<u64>);
    };
    (@one $field:tt memory_alignment) => {
        $crate::forward_methods!(
            @method $field memory_alignment() -> $crate::file::MemoryAlignment
        );
    };
    (@one $field:tt read) => {
        $crate::forward_methods!(
            @method $field read(offset: u64, target: $crate::IoVecMut) -> $crate::file::ReadReply
        );
    };
    (@one $field:tt zero) => {
        $crate::forward_methods!(
            @method $field zero(
                offset: u64,
                len: u64,
                space: $crate::file::Space
            ) -> $crate::file::Reply<()>
        );
    };
    (@one $field:tt allocate) => {
        $crate::forward_methods!(
            @method $field allocate(offset: u64, len: u64) -> $crate::file::Reply<()>
        );
    };
    (@one $field:tt extents) => {
        $crate::forward_to_file!(@runs $field extents);
    };
    (@one $field:tt own_space) => {
        $crate::forward_to_file!(@runs $field own_space);
    };
    (@runs $field:tt $method:ident) => {
        $crate::forward_methods!(
            @method $field $method(
                offset: u64,
                len: u64
            ) -> $crate::file::Reply<Vec<$crate::file::FileExtent>>
        );
    };
    (@one $field:tt set_len) => {
        $crate::forward_methods!(@method $field set_len(len: u64) -> $crate::file::Reply<()>);
    };
    (@one $field:tt allocated_bytes) => {
        $crate::forward_methods!(@method $field allocated_bytes() -> Option<u64>);
    };
    (@one $field:tt free_bytes) => {
        $crate::forward_methods!(@method $field free_bytes() -> Option<u64>);
    };
    (@one $field:tt claim) => {
        $crate::forward_to_file!(@claim $field claim());
    };
    (@one $field:tt claim_handed_over) => {
        $crate::forward_to_file!(@claim $field claim_handed_over());
    };
    (@one $field:tt claim_after) => {
        $crate::forward_to_file!(
            @claim $field claim_after(predecessor: &dyn $crate::file::BlockFile)
        );
    };
    (@claim $field:tt $method:ident($($arg:ident: $type:ty)?)) => {
        $crate::forward_methods!(
            @method $field $method(
                wanted: $crate::file::Claim
                $(, $arg: $type)?
            ) -> $crate::Result<$crate::file::Protection>
        );
    };
    (@one $field:tt claimed) => {
        $crate::forward_methods!(@method $field claimed() -> $crate::file::Claim);
    };
    (@one $field:tt $alike:ident) => {
        $crate::forward_methods!(@alike $field $alike [$crate::file::Reply<()>]);
    };
}

/// Implements methods of [`BlockFile`](crate::file::BlockFile) by fields of the file:
/// `file_from_fields!(name, capabilities, id);` within the implementation.
#[doc(hidden)]
#[macro_export]
macro_rules! file_from_fields {
    ($($method:ident),+) => {
        $($crate::file_from_fields!(@one $method);)+
    };
    (@one name) => {
        fn name(&self) -> &str {
            &self.name
        }
    };
    (@one capabilities) => {
        fn capabilities(&self) -> &$crate::file::Capabilities {
            &self.capabilities
        }
    };
    (@one id) => {
        fn id(&self) -> Option<$crate::file::FileId> {
            Some(self.id)
        }
    };
    (@one content_id) => {
        fn content_id(&self) -> Option<$crate::file::ContentId> {
            Some($crate::file::ContentId::whole(self.id))
        }
    };
    (@one storage) => {
        fn storage(&self) -> $crate::file::Storage {
            self.storage.clone()
        }
    };
}

/// Implements `Debug` by the type's name alone, or by that and the field `name`:
/// `debug_by_name!(HoldingDisk);`, `debug_by_name!(NbdFile, name);`.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_by_name {
    ($type:ident) => {
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(stringify!($type))
            }
        }
    };
    ($type:ident, name) => {
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let mut debug = f.debug_struct(stringify!($type));
                debug.field("name", &self.name).finish_non_exhaustive()
            }
        }
    };
}
