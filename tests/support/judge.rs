//! Makes the output and the files of two programs comparable. Each filter has its reason.

use std::process::Output;

use serde_json::Value;

/// How much the images of both programs are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// They are copies of one image.
    Equal,
    /// Each has changed its own: where clusters lie is not the contract.
    Free,
}

/// All that a program has said, and how it ended, comparable.
pub fn comparable(output: &Output, layout: Layout) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let is_help = out.starts_with("Usage:") || out.contains("\nUsage:");
    let out = match is_help && output.status.success() {
        // Each program describes itself.
        true => "<help>\n".to_string(),
        false => normalized(&out, layout),
    };
    // qemu-img shows progress before it knows whether there will be any.
    let out = match output.status.success() {
        true => out,
        false => without_sign_of_progress(&out),
    };
    format!(
        "{out}--- errors\n{}--- {:?}",
        normalized(&errors, layout),
        output.status.code()
    )
}

fn normalized(text: &str, layout: Layout) -> String {
    let text = without_progress(text);
    let text = match layout {
        Layout::Equal => text,
        Layout::Free => without_places(&text),
    };
    let lines = text
        .split_inclusive('\n')
        .map(|line| timeless(line, layout));
    lines.collect()
}

/// Keeps only the last progress: how often it is reported depends on time.
fn without_progress(text: &str) -> String {
    const END: &str = "/100%)\r";
    let mut out = String::new();
    let mut last = None;
    let mut rest = text;
    while let Some(end) = rest.find(END) {
        let start = rest[..end].rfind("    (").expect("progress begins");
        out.push_str(&rest[..start]);
        last = Some(&rest[start + 5..end]);
        rest = &rest[end + END.len()..];
    }
    let sign = last.map(|percent| format!("<progress to {percent}>"));
    sign.unwrap_or_default() + &out + rest
}

fn without_sign_of_progress(text: &str) -> String {
    let begins = text
        .strip_prefix("<progress to ")
        .and_then(|rest| rest.split_once('>'));
    let rest = begins.map_or(text, |(_, rest)| rest);
    rest.trim_matches('\n').to_string()
}

/// A line without what depends on the clock or, if images differ in it, on their layout.
fn timeless(line: &str, layout: Layout) -> String {
    let before = |sign: &str| line.find(sign).map(|at| &line[..at]);
    if let Some(start) = before("Run completed in ") {
        return format!("{start}Run completed in <time>\n");
    }
    // The time of a request, in qemu-io's output.
    if let Some(start) = before(" ops; ") {
        return format!("{start} ops; <time>\n");
    }
    let trimmed = line.trim_start();
    for key in ["\"date-sec\":", "\"date-nsec\":"] {
        if trimmed.starts_with(key) {
            return format!("{key} <date>\n");
        }
    }
    // A file system that allocates late tells another size from one moment to the next.
    if let Some(key) = ["disk size: ", "\"actual-size\": "]
        .iter()
        .find(|key| trimmed.starts_with(**key))
    {
        return format!("{key}<bytes>\n");
    }
    if layout == Layout::Free {
        // How long files are, and how much space they take, is ours to choose.
        let lengths = ["    file length: ", "                \"virtual-size\": "];
        if lengths.iter().any(|key| line.starts_with(key)) {
            return String::new();
        }
        let keys = ["Image end offset: ", "\"image-end-offset\": "];
        if let Some(key) = keys.iter().find(|key| trimmed.starts_with(**key)) {
            return format!("{key}<bytes>\n");
        }
        // The clusters of an image, in the output of qemu-io's shell.
        if line.contains("allocated at offset") {
            return prompt_of(line);
        }
        let shares = ["\"fragmented-clusters\": ", "\"allocated-clusters\": "];
        if shares.iter().any(|key| trimmed.starts_with(key)) || line.contains("% fragmented, ") {
            return String::new();
        }
    }
    dateless(line)
}

/// The prompts of qemu-io's shell that a line begins with.
fn prompt_of(line: &str) -> String {
    const PROMPT: &str = "qemu-io> ";
    let end = line.rfind(PROMPT).map_or(0, |at| at + PROMPT.len());
    line[..end].to_string()
}

/// Dates of snapshots, which are made at different moments.
fn dateless(line: &str) -> String {
    const SHAPE: &[u8] = b"0000-00-00 00:00:00";
    let is_date = |bytes: &[u8]| {
        let mut both = bytes.iter().zip(SHAPE);
        both.all(|(byte, shape)| match shape {
            b'0' => byte.is_ascii_digit(),
            shape => byte == shape,
        })
    };
    let found = line.as_bytes().windows(SHAPE.len()).position(is_date);
    match found {
        Some(at) => format!("{}<date>{}", &line[..at], &line[at + SHAPE.len()..]),
        None => line.to_string(),
    }
}

/// Returns the output of `map` without offsets in the file; adjacent lines that differ in nothing
/// else are merged.
fn without_places(text: &str) -> String {
    const HEADER: &str = "Offset          Length          Mapped to       File\n";
    if let Some(rows) = text.strip_prefix(HEADER) {
        let mut runs: Vec<(u64, u64, String)> = Vec::new();
        for row in rows.lines() {
            let mut words = row.split_whitespace();
            let mut number = || {
                let word = words.next()?;
                u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()
            };
            let (Some(start), Some(length), Some(_)) = (number(), number(), number()) else {
                return text.to_string();
            };
            let file = words.next().unwrap_or_default().to_string();
            push(&mut runs, start, length, file);
        }
        let rows = runs
            .iter()
            .map(|(start, length, file)| format!("{start:#x} {length:#x} {file}\n"));
        return HEADER.to_string() + &rows.collect::<String>();
    }
    let Ok(Value::Array(extents)) = serde_json::from_str::<Value>(text) else {
        return text.to_string();
    };
    let mut runs: Vec<(u64, u64, String)> = Vec::new();
    for extent in &extents {
        let (Some(start), Some(length)) = (extent["start"].as_u64(), extent["length"].as_u64())
        else {
            return text.to_string();
        };
        let mut rest = extent.as_object().cloned().unwrap_or_default();
        for key in ["start", "length", "offset"] {
            rest.remove(key);
        }
        push(&mut runs, start, length, Value::Object(rest).to_string());
    }
    let rows = runs
        .iter()
        .map(|(start, length, rest)| format!("{start} {length} {rest}\n"));
    rows.collect()
}

fn push(runs: &mut Vec<(u64, u64, String)>, start: u64, length: u64, rest: String) {
    match runs.last_mut() {
        Some(last) if last.2 == rest && last.0 + last.1 == start => last.1 += length,
        _ => runs.push((start, length, rest)),
    }
}
