//! Renewals that take long.

use std::ops::Range;
use std::sync::Arc;

use super::*;
use crate::objects::{Existing, ObjectFuture, ObjectInfo, Objects};

/// A store that writes slowly, and has all objects.
#[derive(Debug)]
struct Slow(Duration);

impl Objects for Slow {
    fn put(&self, _: &str, _: Vec<u8>, _: Existing) -> ObjectFuture<'_, ()> {
        Box::pin(async {
            std::thread::sleep(self.0);
            Ok(())
        })
    }

    fn get(&self, _: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        Box::pin(async move { Ok(vec![0; (range.end - range.start) as usize]) })
    }

    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo> {
        let info = ObjectInfo {
            key: key.to_string(),
            bytes: 0,
            written_ms: 0,
        };
        Box::pin(async { Ok(info) })
    }

    fn list(&self, _: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn delete(&self, _: &str) -> ObjectFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

#[test]
fn a_renewal_that_took_too_long_is_none() {
    for (millis, is_renewed) in [(0, true), (1500, false)] {
        let store = Store::new(Arc::new(Slow(Duration::from_millis(millis))), "slow");
        let lease = Lease {
            cowslip_lease: FORMAT,
            name: "one".to_string(),
            session: String::new(),
            parents: Vec::new(),
            index: None,
        };
        // A second is left.
        let ago = STANDSTILL_MAX - Duration::from_secs(1);
        let mut held = Held {
            key: "lease".to_string(),
            lease,
            renewed: Moment(SystemTime::now() - ago, Instant::now()),
            renewed_after: Duration::ZERO,
        };
        let renewed = cowslip_queue::block_here(held.renew(&store));
        assert_eq!(renewed.is_ok(), is_renewed);
        assert_eq!(held.check().is_ok(), is_renewed);
    }
}
