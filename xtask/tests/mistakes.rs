//! The mistakes that are kept as patches apply to the engine as it is. `cargo xtask mistakes` plants
//! them; this is quick, and says which one a change of the engine has left behind.

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn every_patch_applies_to_the_engine() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace");
    let mut count = 0;
    let mut stale = Vec::new();
    for entry in fs::read_dir(root.join("crates/sim/mistakes")).expect("there are mistakes") {
        let path = entry.expect("a directory can be listed").path();
        let name = path
            .file_stem()
            .expect("a file")
            .to_string_lossy()
            .into_owned();
        let text = fs::read_to_string(&path).expect("a patch is text");
        let planted = format!("planted::is(Mistake::{name})");
        let in_full = format!("Mistake::{name}");
        assert!(
            text.contains(&planted) || text.contains(&in_full),
            "{name}: not planted"
        );
        let does = text.lines().next().expect("it says what it does");
        assert!(does.ends_with('.') && does.len() <= 100, "{name}: {does}");
        let checked = Command::new("git")
            .current_dir(root)
            .args(["apply", "--check", "-C1"])
            .arg(&path)
            .output()
            .expect("git can be run");
        count += 1;
        if !checked.status.success() {
            stale.push(format!(
                "{name}: {}",
                String::from_utf8_lossy(&checked.stderr)
            ));
        }
    }
    assert!(count > 30, "{count} mistakes");
    assert!(
        stale.is_empty(),
        "they no longer apply:\n{}",
        stale.join("\n")
    );
}
