//! [`Shown`]: the image of a node, which is another one when the node is opened again.

use std::sync::{Arc, Mutex, PoisonError};

use cowslip::Image;

/// The image that a node has at the moment; for other threads, too.
#[derive(Debug)]
pub struct Shown(Mutex<Arc<Image>>);

impl Shown {
    /// An image.
    pub fn new(image: Arc<Image>) -> Arc<Shown> {
        Arc::new(Shown(Mutex::new(image)))
    }

    /// The image, now.
    pub fn get(&self) -> Arc<Image> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Another image from now on.
    pub fn put(&self, image: Arc<Image>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = image;
    }
}
