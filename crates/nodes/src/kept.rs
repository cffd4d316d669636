//! [`KeptFiles`]: the open files of an image, for opening it again without opening them: a process
//! that has confined itself cannot open files any more.

use std::sync::{Arc, Mutex, PoisonError};

use cowslip::Result;
use cowslip::file::{BlockFile, FileRequest, OpenedFile};
use cowslip::image::Format;

/// The part that a file has in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The file of the image itself.
    Top,
    /// A data file that the caller has named.
    DataFile,
    /// A file that an image names: the image, and the name in it.
    Named(String, String),
}

#[derive(Clone, Debug)]
struct Kept {
    place: Place,
    file: Arc<dyn BlockFile>,
    /// Its format, where the opening had found it out.
    format: Option<Format>,
}

/// Files by their parts in one image. Clones are the same files.
#[derive(Clone, Debug, Default)]
pub struct KeptFiles {
    files: Arc<Mutex<Vec<Kept>>>,
}

impl KeptFiles {
    fn find(&self, place: &Place) -> Option<OpenedFile> {
        // Nothing that holds the lock panics.
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let found = files.iter().find(|kept| kept.place == *place)?;
        Some(OpenedFile {
            file: Arc::clone(&found.file),
            format: found.format,
        })
    }

    fn keep(&self, place: Place, opened: &OpenedFile) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.push(Kept {
            place,
            file: Arc::clone(&opened.file),
            format: opened.format,
        });
    }

    async fn or_open(
        &self,
        place: Place,
        opening: impl Future<Output = Result<OpenedFile>>,
    ) -> Result<OpenedFile> {
        if let Some(kept) = self.find(&place) {
            return Ok(kept);
        }
        let opened = opening.await?;
        self.keep(place, &opened);
        Ok(opened)
    }

    /// The file that an image names: the one that was kept, or the one that is opened now.
    pub(crate) async fn or_name(
        &self,
        request: &FileRequest<'_>,
        opening: impl Future<Output = Result<OpenedFile>>,
    ) -> Result<OpenedFile> {
        let place = Place::Named(request.named_by.to_string(), request.name.to_string());
        self.or_open(place, opening).await
    }
}

/// The file of a part of an image: the one that was kept, or the one that is opened now.
pub(crate) async fn or_open(
    kept: Option<&KeptFiles>,
    place: Place,
    opening: impl Future<Output = Result<Arc<dyn BlockFile>>>,
) -> Result<Arc<dyn BlockFile>> {
    match kept {
        Some(kept) => {
            let opening = async { opening.await.map(OpenedFile::from) };
            Ok(kept.or_open(place, opening).await?.file)
        }
        None => opening.await,
    }
}
