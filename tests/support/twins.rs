//! Equal files for two programs, and whether they are equal afterwards.

use std::collections::BTreeSet;
use std::fs::{File, FileTimes};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use super::judge::{Layout, comparable};
use super::{cowslip, golden, outcome};

/// A description of the difference, if there is one.
pub type Verdict = Result<(), String>;

/// The files of one program.
pub struct Twin {
    pub directory: PathBuf,
    pub program: fn() -> Command,
}

impl Twin {
    /// Runs the program there; one that does not end is ended.
    pub fn run(&self, words: &[String]) -> Output {
        let program = (self.program)();
        let mut command = Command::new("timeout");
        command.arg("10").arg(program.get_program());
        command.args(program.get_args()).args(words);
        outcome(command.current_dir(&self.directory).stdin(Stdio::null()))
    }

    fn names(&self) -> BTreeSet<String> {
        let files = std::fs::read_dir(&self.directory).unwrap();
        let files = files.filter(|file| file.as_ref().unwrap().path().is_file());
        files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// Whether the file has been written since [`cast::age`].
    fn has_changed(&self, name: &str) -> bool {
        let modified = std::fs::metadata(self.directory.join(name))
            .unwrap()
            .modified();
        modified.unwrap().elapsed().unwrap().as_secs() < 1_000_000
    }

    fn starts_with(&self, name: &str, magic: &[u8]) -> bool {
        std::fs::read(self.directory.join(name))
            .unwrap()
            .starts_with(magic)
    }
}

/// Copies of the files in a directory for two programs, in directories below another one.
pub fn twins(files: &Path, below: &Path, [theirs, ours]: [fn() -> Command; 2]) -> (Twin, Twin) {
    let twin = |name: &str, program| {
        let directory = below.join(name);
        copy_all(files, &directory);
        Twin { directory, program }
    };
    (twin("theirs", theirs), twin("ours", ours))
}

/// The program of the peer.
pub fn qemu_img() -> Command {
    Command::new("qemu-img")
}

/// A copy of all files. They are old, so that a change shows.
pub fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let to = to.join(file.file_name());
        if file.path().is_dir() {
            std::fs::create_dir(&to).unwrap();
        } else {
            copy_sparse(&file.path(), &to);
        }
    }
    age(to);
}

/// Copies a file with its holes, because reports contain the space of files.
fn copy_sparse(from: &Path, to: &Path) {
    const PIECE: usize = 4096;
    let content = std::fs::read(from).unwrap();
    let file = File::create(to).unwrap();
    for (at, piece) in content.chunks(PIECE).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, (at * PIECE) as u64).unwrap();
        }
    }
    file.set_len(content.len() as u64).unwrap();
}

/// Gives all files a time long ago.
pub fn age(directory: &Path) {
    let old = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1));
    for file in std::fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        if path.is_file() {
            let file = File::options().read(true).open(&path).unwrap();
            file.set_times(old).unwrap();
        }
    }
}

/// The files that one of the programs has written are the same to a guest, and sound.
pub fn compare_files(theirs: &Twin, ours: &Twin, layout: &mut Layout) -> Verdict {
    let (expected, got) = (theirs.names(), ours.names());
    if expected != got {
        return Err(format!("files: {got:?}\nexpected: {expected:?}\n"));
    }
    for name in &expected {
        if theirs.has_changed(name) || ours.has_changed(name) {
            *layout = Layout::Free;
            // The content of a data file is compared through its image.
            let name = match name.as_str() {
                "data.bin" => "data.qcow2",
                name => name,
            };
            compare_file(theirs, ours, name).map_err(|why| format!("{name}: {why}"))?;
        }
    }
    age(&theirs.directory);
    age(&ours.directory);
    Ok(())
}

/// Compares the disks of both images. Each is copied in the directory of its program, from which
/// QEMU looks for a data file.
pub fn compare_disks(theirs: &Twin, ours: &Twin, name: &str, format: &str) -> Verdict {
    let copies = [theirs, ours].map(|twin| twin.directory.with_extension("shown"));
    let copy = |twin: &Twin, to: &Path| {
        let words = ["convert", "-U", "-f", format, "-O", "raw", name];
        let mut convert = qemu_img();
        outcome(convert.args(words).arg(to).current_dir(&twin.directory))
    };
    let copied = [copy(theirs, &copies[0]), copy(ours, &copies[1])];
    if copied.iter().any(|copied| !copied.status.success()) {
        return Err(copied.iter().map(golden::said).collect());
    }
    let compare = ["compare", "-f", "raw", "-F", "raw"];
    let compared = outcome(qemu_img().args(compare).args(&copies));
    for copy in &copies {
        std::fs::remove_file(copy).unwrap();
    }
    match compared.status.success() {
        true => Ok(()),
        false => Err(golden::said(&compared)),
    }
}

fn compare_file(theirs: &Twin, ours: &Twin, name: &str) -> Verdict {
    const MAGIC: &[u8] = b"QFI\xfb";
    let formats = [theirs, ours].map(|twin| twin.starts_with(name, MAGIC));
    if formats[0] != formats[1] {
        return Err(format!("is qcow2 or not: {formats:?}\n"));
    }
    // Keys and salts are random.
    let is_volume = |twin: &Twin| twin.starts_with(name, b"LUKS\xba\xbe");
    if is_volume(theirs) && is_volume(ours) {
        return Ok(());
    }
    // Clusters of a data file that is not raw and that no entry refers to are not compared; the
    // others are compared through the image.
    if name.ends_with(".bin") {
        return Ok(());
    }
    if !formats[0] {
        let bytes = [theirs, ours].map(|twin| std::fs::read(twin.directory.join(name)).unwrap());
        return match bytes[0] == bytes[1] {
            true => Ok(()),
            false => Err("the bytes differ\n".to_string()),
        };
    }
    let compared = compare_disks(theirs, ours, name, "qcow2");
    // A data file is named from the directory of the program.
    let check = |mut program: Command, twin: &Twin| {
        let words = ["check", "-U", "-f", "qcow2", name];
        outcome(program.args(words).current_dir(&twin.directory))
    };
    let before = check(qemu_img(), theirs);
    // An image that is broken, or has lost its backing file, stays so; encrypted images are
    // compared by the tests that have the key.
    let bytes = std::fs::read(ours.directory.join(name)).unwrap();
    let is_encrypted = bytes.get(32..36).is_some_and(|method| method != [0; 4]);
    let is_broken = !before.status.success() || is_encrypted;
    if compared.is_err() && !is_broken {
        return compared;
    }
    for program in [qemu_img(), cowslip()] {
        let checked = check(program, ours);
        if checked.status.code() != before.status.code() && !checked.status.success() {
            return Err(golden::said(&checked));
        }
    }
    let info = |twin: &Twin| {
        let words = ["info", "-U", "-f", "qcow2", "--output=json", name];
        let info = outcome(qemu_img().args(words).current_dir(&twin.directory));
        let directory = twin.directory.display().to_string();
        let info = comparable(&info, Layout::Free).replace(&directory, "DIR");
        let is_random = |line: &&str| {
            let key = line.trim_start();
            key.starts_with("\"uuid\":")
                || key.starts_with("\"iters\":")
                || key.starts_with("\"master-key-iters\":")
        };
        let lines = info.lines().filter(|line| !is_random(line));
        lines.collect::<Vec<_>>().join("\n")
    };
    let (expected, got) = (info(theirs), info(ours));
    match expected == got {
        true => Ok(()),
        false => Err(format!("info: {got}\nexpected: {expected}\n")),
    }
}
