//! The methods that are measured, by name.

/// How a file is made as long as wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The system call.
    Fallocate,
    /// libc's.
    PosixFallocate,
    /// Mapped and filled.
    Mmap,
    /// Written in pieces of this many bytes.
    Write(u64),
    /// No space at all: the reference for the other methods.
    Ftruncate,
}

impl Method {
    /// All of them, with these sizes of pieces.
    pub fn all(chunks: &[u64]) -> Vec<Method> {
        let calls = [Method::Fallocate, Method::PosixFallocate, Method::Mmap];
        let writes = chunks.iter().map(|chunk| Method::Write(*chunk));
        let calls = calls.into_iter().chain(writes);
        calls.chain([Method::Ftruncate]).collect()
    }

    /// Returns the name for the table.
    pub fn name(self) -> String {
        match self {
            Method::Fallocate => "fallocate".to_string(),
            Method::PosixFallocate => "posix_fallocate".to_string(),
            Method::Mmap => "mmap".to_string(),
            Method::Write(bytes) if bytes.is_multiple_of(1 << 20) => {
                format!("write {}M", bytes >> 20)
            }
            Method::Write(bytes) if bytes.is_multiple_of(1 << 10) => {
                format!("write {}K", bytes >> 10)
            }
            Method::Write(bytes) => format!("write {bytes}"),
            Method::Ftruncate => "ftruncate".to_string(),
        }
    }
}
