//! stub
/// stub
#[derive(Debug)]
pub struct HostFile {}
