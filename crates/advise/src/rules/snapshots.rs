//! Internal snapshots: what they hold, and what they make of writes.

use crate::answer::{Answer, Verdict};
use crate::facts::Facts;
use crate::model::{self, Layout};
use crate::workload::Workload;

use super::lines::{SPACE_BYTES, human, quoted};

const SUBJECT: &str = "snapshots";
const SOURCE: &str = "docs/performance.md#check";
/// From this number on they are a habit.
const MANY: u64 = 8;

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    let count = facts.image.snapshots;
    if count == 0 {
        return None;
    }
    let held = facts.space.other_bytes();
    let live = facts.space.used_bytes;
    let takes_space = held > SPACE_BYTES && held > live / 2;
    let writes = workload.share_of(&workload.writes);
    let on = facts.host.file_system();
    let rate = |is_backed| {
        let layout = Layout {
            cluster_bytes: facts.image.cluster_bytes,
            unit_bytes: facts.image.cluster_bytes,
            is_backed,
            is_sparse: facts.image.is_sparse,
        };
        let share = workload.unit_share(facts.image.cluster_bytes);
        model::first_writes(&layout, share, on)
    };
    if count < MANY || !(takes_space || writes >= 0.2) {
        let why = match takes_space {
            true => format!("they hold {} that is not the disk's any more", human(held)),
            false => "they share all clusters that were not written since".to_string(),
        };
        let text = format!("{count} internal snapshots");
        let answer = Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why);
        return Some(answer.figure("first writes a second, after one", rate(true), None));
    }
    let why = format!(
        "{} are the snapshots' alone or free, and the first write to each cluster after one copies \
         {} KiB, whatever the subclusters",
        human(held),
        facts.image.cluster_bytes / 1024
    );
    let text = format!("fewer than {count} internal snapshots: delete those that nobody needs");
    let name = quoted(&facts.image.name);
    Some(
        Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why)
            .figure("first writes a second", rate(true), Some(rate(false)))
            .figure("bytes that come back, at most", held as f64, Some(0.0))
            .command(format!("cowslip snapshot -l {name}"))
            .command(format!("cowslip snapshot -d TAG {name}")),
    )
}
