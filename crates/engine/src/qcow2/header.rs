//! stub to be replaced
/// Header.
#[derive(Debug, Clone)]
pub struct Header {}
