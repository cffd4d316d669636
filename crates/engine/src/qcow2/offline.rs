//! What is done to an image that nobody has open: create, check, repair, inspect.

pub mod check;
pub mod create;
pub mod inspect;
pub mod layout;
pub mod repair;
