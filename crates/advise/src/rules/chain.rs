//! The depth of the chain.

use crate::answer::{Answer, Verdict};
use crate::facts::{Engine, Facts, FileSystem};
use crate::figures::figure;
use crate::model;
use crate::workload::Workload;

use super::lines::{SPACE_BYTES, human, quoted};

const SUBJECT: &str = "chain";
const SOURCE: &str = "docs/performance.md#the-daemon";
/// A chain that is longer takes a second and tens of megabytes to open in QEMU.
const LONG: u64 = 200;

/// The rule.
pub fn rule(facts: &Facts, workload: &Workload) -> Option<Answer> {
    let depth = facts.image.depth;
    if depth < 3 {
        return None;
    }
    let on = FileSystem::Ext4;
    let memory = (model::chain_mib(depth) * 1048576.0) as u64;
    let open = figure("layer-open-ms", on) * depth as f64;
    let held = facts.space.between_bytes;
    let reads = workload.share_of(&workload.reads);
    let qemu = (model::qemu_read_us(depth), model::qemu_read_us(2));
    let slows_qemu = facts.engine == Engine::Qemu && qemu.0 / qemu.1 >= 1.3 && reads >= 0.1;
    let takes_space = held > SPACE_BYTES
        && held > facts.space.host_bytes.saturating_mul(2)
        && facts.host.free_bytes < facts.host.total_bytes / 5;
    if !slows_qemu && !takes_space && depth <= LONG {
        let why = match facts.engine {
            Engine::Cowslip => format!(
                "reads cost the same at any depth: one index says which layer holds what. {depth} \
                 layers take {} of memory and {open:.0} ms to open",
                human(memory)
            ),
            Engine::Qemu => format!(
                "a read takes {:.0} us instead of {:.0}, or reads are few",
                qemu.0, qemu.1
            ),
        };
        let text = format!("{depth} images");
        return Some(Answer::new((SUBJECT, SOURCE), Verdict::Leave, text, why));
    }
    let why = match (slows_qemu, takes_space) {
        (true, _) => "QEMU asks each layer in turn".to_string(),
        (false, true) => format!(
            "the images between hold {}, much of it written again above, and space is short",
            human(held)
        ),
        (false, false) => format!(
            "each layer takes memory ({} in all), a descriptor and time to open ({open:.0} ms)",
            human(memory)
        ),
    };
    let text = format!("one image over the lowest instead of {depth}");
    let answer = Answer::new((SUBJECT, SOURCE), Verdict::Change, text, why);
    let answer = match slows_qemu {
        true => answer.figure("microseconds a read", qemu.0, Some(qemu.1)),
        false => answer.figure("images of the chain", depth as f64, Some(2.0)),
    };
    // It writes what lies between into the image; those between stay as they are, for others.
    let (lowest, format) = facts.image.lowest.as_ref()?;
    let mut line = format!("cowslip rebase -p -b {}", quoted(lowest));
    if let Some(format) = format {
        line += &format!(" -F {}", quoted(format));
    }
    Some(answer.command(format!("{line} {}", quoted(&facts.image.name))))
}
