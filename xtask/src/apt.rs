//! Debian's packages, installed for root. None is removed for it: where the release's own package
//! does not go with what is installed, as with a newer QEMU from its backports, that of the
//! backports is tried.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::run;

/// Signs Debian's archives; where it is on all that are Debian's.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Brings the lists of packages up to date.
///
/// # Errors
/// No archive is to be reached.
pub fn update() -> Result<(), String> {
    run(&["update", "-qq"])
}

/// Installs a package, from the backports if need be.
///
/// # Errors
/// It is not to be had, or another package would have to go for it.
pub fn install(package: &str) -> Result<(), String> {
    const WORDS: [&str; 5] = [
        "install",
        "-y",
        "-qq",
        "--no-install-recommends",
        "--no-remove",
    ];
    let usual = run(&[&WORDS[..], &[package]].concat());
    usual.or_else(|message| {
        println!("xtask: trying {package} from the release's backports");
        let Backports { release, options } = backports().map_err(|e| format!("{message}\n{e}"))?;
        let options: Vec<&str> = options.iter().flat_map(|o| ["-o", o.as_str()]).collect();
        run(&[&options[..], &WORDS, &["-t", &release, package]].concat())
    })
}

fn run(arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new("apt-get");
    command
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    run::run(&mut command)
}

/// A release of backports, and the options with which apt-get sees it beside the machine's own
/// archives.
struct Backports {
    release: String,
    options: Vec<String>,
}

/// Lists of packages with the backports among them, in the target directory: the machine's own stay
/// as they are.
fn backports() -> Result<Backports, String> {
    const FORMAT: &str = "$(ORIGIN) $(REPO_URI) $(CODENAME) $(COMPONENT)";
    let targets = ["indextargets", "--format", FORMAT, "Created-By: Packages"];
    let targets = run::output(Command::new("apt-get").args(targets))?;
    let (release, sources) = sources(&targets).ok_or("apt-get knows no release of Debian's")?;
    let directory = directory();
    let failed = |e: std::io::Error| format!("{}: {e}", directory.display());
    for part in ["lists/partial", "archives/partial"] {
        fs::create_dir_all(directory.join(part)).map_err(failed)?;
    }
    fs::write(directory.join("sources.list"), sources).map_err(failed)?;
    let at = |name: &str| directory.join(name).display().to_string();
    let options = vec![
        format!("Dir::Etc::sourcelist={}", at("sources.list")),
        "Dir::Etc::sourceparts=/dev/null".to_string(),
        format!("Dir::State::lists={}", at("lists")),
        format!("Dir::Cache::archives={}", at("archives")),
        // The user that apt-get becomes may not come here.
        "APT::Sandbox::User=root".to_string(),
    ];
    let words: Vec<&str> = options.iter().flat_map(|o| ["-o", o.as_str()]).collect();
    run(&[&words[..], &["update", "-qq"]].concat())?;
    Ok(Backports { release, options })
}

fn directory() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    run::root().join(target).join("apt")
}

/// The release's backports, and a list of sources with them, after lines `ORIGIN URI RELEASE
/// COMPONENT`.
fn sources(targets: &str) -> Option<(String, String)> {
    let debian = targets.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["Debian", uri, release, component] => Some((uri, release, component)),
            _ => None,
        }
    });
    let debian: Vec<_> = debian.collect();
    let base = debian
        .iter()
        .find(|(_, release, _)| !release.contains('-'))?;
    let release = format!("{}-backports", base.1);
    let line = |uri: &str, release: &str, component: &str| {
        format!("deb [signed-by={KEYRING}] {uri} {release} {component}\n")
    };
    let own = debian
        .iter()
        .filter(|(_, known, _)| *known != release)
        .map(|(uri, release, component)| line(uri, release, component));
    let sources = own.chain([line(base.0, &release, base.2)]).collect();
    Some((release, sources))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backports_stand_beside_the_sources_that_there_are() {
        let targets = "Other mirror:/other stable main\n\
                       Debian mirror:/debian/ bookworm main\n\
                       Debian mirror:/debian/ bookworm-updates main\n";
        let (release, sources) = sources(targets).unwrap();
        assert_eq!(release, "bookworm-backports");
        let lines: Vec<&str> = sources
            .lines()
            .map(|line| line.split_once("] ").unwrap().1)
            .collect();
        assert_eq!(
            lines,
            [
                "mirror:/debian/ bookworm main",
                "mirror:/debian/ bookworm-updates main",
                "mirror:/debian/ bookworm-backports main",
            ]
        );
        assert_eq!(super::sources("Other mirror:/other stable main\n"), None);
    }
}
