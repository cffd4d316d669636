//! The budget of an image's metadata in memory, in QEMU's options.

use cowslip_block::Result;
use cowslip_block::options;

/// `cache-size` and its parts, in bytes. QEMU has a cache of L2 tables and one of refcount blocks;
/// here there is one, whose budget is that of the L2 tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CacheSizes {
    total: Option<u64>,
    l2: Option<u64>,
    refcounts: Option<u64>,
    /// `l2-cache-entry-size`. Parts of tables are read as they are needed, whatever it is.
    l2_entry: Option<u64>,
}

impl CacheSizes {
    /// Takes an option; `false` if it is none of these.
    ///
    /// # Errors
    /// Its value is no size.
    pub fn take(&mut self, name: &str, value: &str) -> Result<bool> {
        let field = match name {
            "cache-size" => &mut self.total,
            "l2-cache-size" => &mut self.l2,
            "refcount-cache-size" => &mut self.refcounts,
            "l2-cache-entry-size" => &mut self.l2_entry,
            _ => return Ok(false),
        };
        *field = Some(options::size(name, value)?);
        Ok(true)
    }

    /// The budget, if one was given.
    pub fn budget(&self) -> Option<u64> {
        let rest = || Some(self.total?.saturating_sub(self.refcounts?));
        self.l2.or_else(rest).or(self.total)
    }

    /// # Errors
    /// The sizes contradict each other, or do not fit an image of these clusters. Texts are QEMU's.
    pub fn check(&self, cluster_bytes: u64) -> std::result::Result<(), String> {
        let exceeds =
            |part: Option<u64>| part.zip(self.total).is_some_and(|(part, all)| part > all);
        let whole_entry =
            |bytes: u64| bytes.is_power_of_two() && (512..=cluster_bytes).contains(&bytes);
        let text = if self.total.is_some() && self.l2.is_some() && self.refcounts.is_some() {
            "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time"
                .to_string()
        } else if exceeds(self.l2) {
            "l2-cache-size may not exceed cache-size".to_string()
        } else if exceeds(self.refcounts) {
            "refcount-cache-size may not exceed cache-size".to_string()
        } else if self.l2_entry.is_some_and(|bytes| !whole_entry(bytes)) {
            format!(
                "L2 cache entry size must be a power of two between 512 and the cluster size ({cluster_bytes})"
            )
        } else {
            return Ok(());
        };
        Err(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(list: &str) -> CacheSizes {
        let mut sizes = CacheSizes::default();
        for (name, value) in options::split(list).unwrap() {
            assert!(sizes.take(&name, &value).unwrap(), "{name}");
        }
        sizes
    }

    #[test]
    fn sizes_that_contradict_each_other_are_refused() {
        for (list, refused) in [
            ("cache-size=1M", None),
            ("cache-size=1M,l2-cache-size=1M", None),
            ("l2-cache-size=2M,refcount-cache-size=1M", None),
            (
                "cache-size=0,l2-cache-size=0,refcount-cache-size=0",
                Some("at the same time"),
            ),
            (
                "cache-size=1M,l2-cache-size=2M",
                Some("l2-cache-size may not exceed"),
            ),
            (
                "cache-size=1M,refcount-cache-size=2M",
                Some("refcount-cache-size may not exceed"),
            ),
            ("l2-cache-entry-size=512", None),
            ("l2-cache-entry-size=64k", None),
            (
                "l2-cache-entry-size=256",
                Some("between 512 and the cluster size (65536)"),
            ),
            ("l2-cache-entry-size=128k", Some("power of two")),
            ("l2-cache-entry-size=33k", Some("power of two")),
        ] {
            let refusal = sizes(list).check(65536).err();
            match refused {
                None => assert_eq!(refusal, None, "{list}"),
                Some(words) => assert!(
                    refusal
                        .as_ref()
                        .is_some_and(|refusal| refusal.contains(words)),
                    "{list}: {refusal:?}"
                ),
            }
        }
        assert_eq!(
            sizes("cache-size=3M,refcount-cache-size=1M").budget(),
            Some(2 << 20)
        );
        assert_eq!(
            sizes("cache-size=3M,l2-cache-size=1M").budget(),
            Some(1 << 20)
        );
        assert_eq!(sizes("cache-size=3M").budget(), Some(3 << 20));
        assert_eq!(sizes("refcount-cache-size=3M").budget(), None);
    }
}
