//! Operations on an image that is not open: create, check, repair, inspect.

pub mod check;
pub mod create;
pub mod inspect;
pub mod layout;
pub mod repair;
pub mod stream;
