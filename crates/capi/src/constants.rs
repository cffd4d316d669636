//! The constants of the header, under its names without their prefix.

/// Defines constants, and the list of all.
macro_rules! constants {
    ($($name:ident = $value:literal;)+) => {
        $(
            #[doc = concat!("`COWSLIP_", stringify!($name), "` of the header.")]
            pub const $name: u32 = $value;
        )+
        /// Names and values of all.
        pub const ALL: &[(&str, u32)] = &[$((stringify!($name), $name)),+];
    };
}

constants! {
    ERROR_IO = 1;
    ERROR_CORRUPT = 2;
    ERROR_UNSUPPORTED = 3;
    ERROR_OPENING = 4;
    ERROR_INVALID = 5;
    ERROR_READ_ONLY = 6;
    ERROR_LATCHED = 7;
    ERROR_FORBIDDEN = 8;
    ERROR_KEY = 9;
    ERROR_LOCKED = 10;
    ERROR_OVERWRITES = 11;
    ERROR_CANCELLED = 12;
    ERROR_PANIC = 100;
    OPEN_WRITABLE = 1;
    OPEN_DIRECT = 2;
    OPEN_UNSAFE = 4;
    OPEN_WRITETHROUGH = 8;
    OPEN_DISCARD = 16;
    OPEN_FORCE_SHARE = 32;
    BACKING_ANY = 0;
    BACKING_SAME_DIRECTORY = 1;
    BACKING_NONE = 2;
    CREATE_EXTENDED_L2 = 1;
    CREATE_REPLACE = 2;
    CREATE_PREALLOCATE = 4;
    EXTENT_DATA = 1;
    EXTENT_ZERO = 2;
    EXTENT_PRESENT = 4;
    EXTENT_COMPRESSED = 8;
    EXTENT_MAPPED = 16;
    READ = 1;
    WRITE = 2;
    FLUSH = 3;
    DISCARD = 4;
    ZERO = 5;
    FUA = 1;
    MAY_UNMAP = 2;
    CONVERT_COMPRESSED = 1;
    CONVERT_TARGET_IS_ZERO = 2;
}
