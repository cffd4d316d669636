//! Completions and manual pages know all verbs.

use std::collections::BTreeSet;

use crate::support::{cowslip, outcome, run, scratch};

/// The verbs of a program, as its help lists them.
fn verbs(program: &str) -> BTreeSet<String> {
    let help = run(cowslip().args([program, "--help"]));
    let (_, commands) = help.split_once("Commands:\n").expect("a list of verbs");
    let (commands, _) = commands.split_once("\n\n").expect("an end of it");
    let names = commands
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    names
        .filter(|name| *name != "help")
        .map(str::to_string)
        .collect()
}

#[test]
fn each_verb_has_a_manual_page() {
    let dir = scratch();
    run(cowslip().arg("manual").arg(dir.path()));
    for program in ["cowslip", "qemu-img"] {
        let verbs = verbs(program);
        assert!(
            verbs.contains("create") && verbs.contains("check"),
            "{verbs:?}"
        );
        let overview = std::fs::read_to_string(dir.path().join(format!("{program}.1"))).unwrap();
        for verb in verbs {
            let page = dir.path().join(format!("{program}-{verb}.1"));
            let page = std::fs::read_to_string(&page).unwrap_or_else(|e| panic!("{page:?}: {e}"));
            assert!(
                page.contains(".SH SYNOPSIS") && page.contains(".SH OPTIONS"),
                "{verb}"
            );
            let named = format!("{program}-{verb}(1)").replace('-', "\\-");
            assert!(overview.contains(&named), "{named}");
        }
    }
    let made = dir.path().join("share/man/man1");
    run(cowslip().arg("manual").arg(&made));
    assert!(made.join("cowslip.1").exists());
    let below_a_file = outcome(cowslip().arg("manual").arg(made.join("cowslip.1/x")));
    assert_eq!(below_a_file.status.code(), Some(1));
    let text = String::from_utf8_lossy(&below_a_file.stderr).into_owned();
    assert!(text.contains("cowslip.1/x': Not a directory"), "{text}");
}

#[test]
fn shells_complete_verbs_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        for program in ["cowslip", "qemu-img"] {
            let script = run(cowslip().args(["completions", "--program", program, shell]));
            for word in ["resize", "preallocation", program] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
    let script = run(cowslip().args(["completions", "bash"]));
    // As a shell reads it: from a file, since an argument has 128 KiB at most.
    let dir = scratch();
    let file = dir.path().join("completions");
    std::fs::write(&file, script).unwrap();
    let asked = "source \"$0\"; COMP_WORDS=(cowslip resi) COMP_CWORD=1; \
                 _cowslip cowslip resi cowslip; echo \"${COMPREPLY[@]}\"";
    let printed = run(std::process::Command::new("bash")
        .args(["-c", asked])
        .arg(&file));
    assert_eq!(printed, "resize\n");
}
