//! [`Namings`]: how the images of a chain were named, shared by all that have a part of the chain.

use std::sync::Arc;

use crate::file::{ChosenBy, FileRequest, Role};

/// How a backing file was named.
#[derive(Clone, Debug)]
pub struct Naming {
    /// The name of the image that it is the backing file of.
    pub named_by: String,
    /// Its name there, or in the caller's override.
    pub name: String,
    /// Where the name comes from.
    pub chosen_by: ChosenBy,
}

impl Naming {
    /// Asks for the file.
    pub fn request(&self, writable: bool) -> FileRequest<'_> {
        FileRequest {
            named_by: &self.named_by,
            name: &self.name,
            role: Role::Backing,
            writable,
            chosen_by: self.chosen_by,
        }
    }
}

/// How images that lie below each other were named, the uppermost first. Its parts are shared: an
/// image of each layer of a long chain takes no more than one of the uppermost.
#[derive(Clone, Debug, Default)]
pub struct Namings(Option<Arc<Link>>);

#[derive(Debug)]
struct Link {
    naming: Naming,
    rest: Namings,
}

impl Namings {
    /// The same below another one.
    #[must_use]
    pub fn below(self, naming: Naming) -> Namings {
        Namings(Some(Arc::new(Link { naming, rest: self })))
    }

    /// Those from this depth on; none if there are no more.
    #[must_use]
    pub fn from(&self, depth: usize) -> Namings {
        let mut found = self;
        for _ in 0..depth {
            match &found.0 {
                None => break,
                Some(link) => found = &link.rest,
            }
        }
        found.clone()
    }

    /// The one at this depth; 0 is the uppermost.
    pub fn get(&self, depth: usize) -> Option<Naming> {
        let found = self.from(depth);
        found.0.as_ref().map(|link| link.naming.clone())
    }
}

impl Drop for Namings {
    fn drop(&mut self) {
        // One link after the other: a long chain would take as many calls.
        let mut next = self.0.take();
        while let Some(link) = next {
            next = Arc::into_inner(link).and_then(|mut link| link.rest.0.take());
        }
    }
}

impl FromIterator<Naming> for Namings {
    fn from_iter<I: IntoIterator<Item = Naming>>(namings: I) -> Namings {
        let namings: Vec<Naming> = namings.into_iter().collect();
        let all = namings.into_iter().rev();
        all.fold(Namings::default(), Namings::below)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_shared_and_long_lists_end() {
        let naming = |number: usize| Naming {
            named_by: "above".to_string(),
            name: number.to_string(),
            chosen_by: ChosenBy::Caller,
        };
        let all: Namings = (0..100_000).map(naming).collect();
        let name = |namings: &Namings, depth| namings.get(depth).map(|naming| naming.name);
        assert_eq!(name(&all, 70_000).as_deref(), Some("70000"));
        assert_eq!(name(&all, 100_000), None);
        let part = all.from(99_998);
        let longer = part.clone().below(naming(7));
        drop(all);
        let names = [0, 1, 2, 3].map(|depth| name(&longer, depth));
        assert_eq!(
            names.map(Option::unwrap_or_default),
            ["7", "99998", "99999", ""]
        );
        assert!(Arc::ptr_eq(
            part.0.as_ref().unwrap(),
            longer.0.as_ref().unwrap().rest.0.as_ref().unwrap()
        ));
    }
}
