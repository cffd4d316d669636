//! One copy of the image for all answers that ask for one: two would undo each other, and leave
//! out what the first was made for.

use crate::answer::{Answer, ByCopy, Verdict};
use crate::facts::{Facts, Format};

use super::lines::{copy_name, human, quoted, size};

/// The cluster size of an image that is made without options.
const DEFAULT_CLUSTER_BYTES: u64 = 65_536;

/// The order in which options are named.
const ORDER: [&str; 5] = [
    "cluster_size",
    "extended_l2",
    "alloc_policy",
    "compression_type",
    "preallocation",
];

/// Bytes that a copy of the image takes.
pub fn bytes(facts: &Facts) -> u64 {
    let space = &facts.space;
    match facts.image.format {
        Format::Qcow2 => space.data_bytes.saturating_add(space.metadata_bytes),
        Format::Raw | Format::Other => space.host_bytes.saturating_sub(space.unwritten_bytes),
    }
}

/// Whether there is room for a copy beside the image.
pub fn fits(facts: &Facts) -> bool {
    bytes(facts) <= facts.host.free_bytes
}

/// Has the first answer that needs a copy make it, with what the others want of it.
pub fn join(facts: &Facts, answers: &mut [Answer]) {
    let is_change = |answer: &&mut Answer| answer.verdict == Verdict::Change;
    let mut changes: Vec<&mut Answer> = answers.iter_mut().filter(is_change).collect();
    if changes
        .iter()
        .any(|answer| answer.by_copy == ByCopy::Superseded)
    {
        for answer in changes {
            if matches!(answer.by_copy, ByCopy::Needed(_) | ByCopy::Instead(_)) {
                leave(answer, "it is only read once an overlay takes the writes");
            }
        }
        return;
    }
    let is_needed = |answer: &Answer| matches!(answer.by_copy, ByCopy::Needed(_));
    if !changes.iter().any(|answer| is_needed(answer)) {
        return;
    }
    if !fits(facts) {
        let why = format!(
            "a copy would serve it better, but takes {}, and {} are free",
            human(bytes(facts)),
            human(facts.host.free_bytes)
        );
        for answer in changes.into_iter().filter(|answer| is_needed(answer)) {
            leave(answer, &why);
        }
        return;
    }
    let form = match is_kept_compressed(facts, &changes) {
        true => " -c",
        false => "",
    };
    let mut options = layout(facts);
    for answer in &changes {
        if let ByCopy::Needed(some) | ByCopy::Instead(some) = &answer.by_copy {
            some.iter().for_each(|option| set(&mut options, option));
        }
    }
    let mut maker = None;
    for answer in changes
        .iter_mut()
        .filter(|answer| answer.by_copy != ByCopy::No)
    {
        answer.commands.clear();
        match maker {
            None if is_needed(answer) => {
                maker = Some(answer.subject);
                answer.commands = lines(facts, form, &options).to_vec();
                if facts.image.is_encrypted {
                    // A copy by this line would be a plain one.
                    answer.commands.clear();
                    answer.reason += "; the copy needs the image's key, and one of its own";
                }
                if facts.is_in_use {
                    answer.reason += "; make the copy when nothing uses the image";
                }
            }
            _ => {}
        }
    }
    let Some(maker) = maker else { return };
    let others = changes
        .into_iter()
        .filter(|answer| answer.by_copy != ByCopy::No);
    for answer in others.filter(|answer| answer.subject != maker) {
        answer.reason += &format!("; the copy for {maker} does that as well");
    }
}

/// Whether a copy keeps data compressed: most of it is, and that is not what is to change. Space
/// in advance goes with plain data alone.
fn is_kept_compressed(facts: &Facts, changes: &[&mut Answer]) -> bool {
    let is_to_change = changes
        .iter()
        .any(|answer| matches!(answer.subject, "compression" | "preallocation"));
    !is_to_change && facts.space.compressed_bytes > facts.space.data_bytes / 2
}

/// Leaves what was to be changed by a copy.
fn leave(answer: &mut Answer, why: &str) {
    answer.verdict = Verdict::Leave;
    answer.text = "as it is".to_string();
    answer.reason = why.to_string();
    answer.commands.clear();
    for figure in &mut answer.figures {
        figure.then = None;
    }
}

/// Options of an image, so that a copy is laid out as it is.
fn layout(facts: &Facts) -> Vec<(String, String)> {
    let image = &facts.image;
    let mut options = Vec::new();
    if image.format != Format::Qcow2 {
        return options;
    }
    if image.cluster_bytes != DEFAULT_CLUSTER_BYTES {
        set(
            &mut options,
            &format!("cluster_size={}", size(image.cluster_bytes)),
        );
    }
    if image.has_subclusters {
        set(&mut options, "extended_l2=on");
    }
    if image.is_sparse {
        set(&mut options, "alloc_policy=sparse");
    }
    if image.is_zstd {
        set(&mut options, "compression_type=zstd");
    }
    options
}

/// Sets `name=value` among options.
fn set(options: &mut Vec<(String, String)>, option: &str) {
    let (name, value) = option.split_once('=').unwrap_or((option, "on"));
    match options.iter_mut().find(|(known, _)| known == name) {
        Some((_, known)) => *known = value.to_string(),
        None => options.push((name.to_string(), value.to_string())),
    }
}

/// The commands that make an image afresh with these options, over the backing file that it has,
/// and put it in its place.
fn lines(facts: &Facts, form: &str, options: &[(String, String)]) -> [String; 2] {
    let image = &facts.image;
    let mut line = match image.format {
        Format::Qcow2 => format!("cowslip convert -p{form} -O qcow2"),
        Format::Raw | Format::Other => "cowslip convert -p -f raw -O raw".to_string(),
    };
    let mut options: Vec<_> = options.iter().collect();
    options.sort_by_key(|(name, _)| ORDER.iter().position(|known| known == name));
    let options = options
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    let options = options.collect::<Vec<_>>().join(",");
    if !options.is_empty() {
        line += &format!(" -o {options}");
    }
    if let Some((file, format)) = &image.backing {
        line += &format!(" -B {}", quoted(file));
        if let Some(format) = format {
            line += &format!(" -F {}", quoted(format));
        }
    }
    let (from, copy) = (quoted(&image.name), quoted(&copy_name(&image.name)));
    [format!("{line} {from} {copy}"), format!("mv {copy} {from}")]
}
