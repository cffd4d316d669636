//! A scratch directory, our command under QEMU's names, and what every run of it must keep to.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::program;
use crate::support::whose::Whose;

/// No command on a small image may take longer.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Address space of our commands: 1.5 GiB.
const MEMORY_KIB: u64 = 1_572_864;
/// A clear set of errors is no longer than this.
const ERROR_LINES_MAX: usize = 4;

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// 0 for a server that was up.
    pub code: i32,
    pub stderr: String,
    pub stdout: String,
}

pub struct Bench {
    pub dir: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
            symlink(program(), bin.join(name)).unwrap();
        }
        Bench { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a command that must succeed, ours.
    pub fn must(&self, words: &[&str]) {
        let outcome = self.run(Whose::Ours, words);
        assert_eq!(outcome.code, 0, "{words:?}: {outcome:?}");
    }

    /// Runs a command, ours within limits. Ours neither panics, nor dies, nor hangs, and its
    /// failure is reported in a few lines that name one of `self`'s files.
    pub fn run(&self, whose: Whose, words: &[&str]) -> Outcome {
        let program = match whose {
            Whose::Ours => self.path("bin").join(words[0]),
            Whose::Theirs => PathBuf::from(words[0]),
        };
        let socket = self.path("socket");
        let serves = words[0] == "qemu-nbd";
        let limit = match whose {
            Whose::Ours => format!("ulimit -v {MEMORY_KIB}; exec \"$@\""),
            Whose::Theirs => "exec \"$@\"".to_string(),
        };
        let mut command = Command::new("sh");
        command.args(["-c", &limit, "sh"]).arg(program);
        if serves {
            command.arg("-k").arg(&socket);
        }
        command.args(&words[1..]);
        command.current_dir(self.dir.path());
        let ready = serves.then_some(socket.as_path());
        let outcome = self.wait(command, ready, words);
        if whose == Whose::Ours {
            outcome.assert_clear(words);
        }
        outcome
    }

    /// Waits for the end of a command, or until it serves on its socket.
    fn wait(&self, mut command: Command, ready: Option<&Path>, words: &[&str]) -> Outcome {
        let [out, err] = ["stdout", "stderr"].map(|name| self.path(name));
        let file = |path: &Path| std::fs::File::create(path).unwrap();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(file(&out))
            .stderr(file(&err))
            .spawn()
            .unwrap();
        let began = Instant::now();
        let mut greeting = Greeting::default();
        let code = loop {
            if let Some(status) = child.try_wait().unwrap() {
                assert_eq!(status.signal(), None, "{words:?} was killed");
                break status.code().unwrap();
            }
            let is_up = ready.is_some_and(|socket| greeting.has_come(socket));
            let late = began.elapsed() > TIME_MAX;
            if is_up || late {
                child.kill().unwrap();
                child.wait().unwrap();
                assert!(!late, "{words:?} hangs");
                break 0;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let [stdout, stderr] =
            [&out, &err].map(|path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into());
        for path in [Some(out.as_path()), Some(&err), ready]
            .into_iter()
            .flatten()
        {
            if path.exists() {
                std::fs::remove_file(path).unwrap();
            }
        }
        Outcome {
            code,
            stderr,
            stdout,
        }
    }

    /// All regular files of the directory and their bytes; large ones by their first MiB.
    pub fn files(&self) -> BTreeMap<PathBuf, (u64, Vec<u8>)> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.is_file())
            .map(|path| {
                let file = std::fs::File::open(&path).unwrap();
                let len = file.metadata().unwrap().len();
                let mut bytes = Vec::new();
                file.take(1 << 20).read_to_end(&mut bytes).unwrap();
                (path, (len, bytes))
            })
            .collect()
    }

    /// Runs ours, which must fail and change nothing, and returns what it said.
    pub fn refused(&self, words: &[&str]) -> String {
        let before = self.files();
        let outcome = self.run(Whose::Ours, words);
        assert_ne!(outcome.code, 0, "{words:?}: {outcome:?}");
        assert!(before == self.files(), "{words:?} has changed a file");
        outcome.stderr + &outcome.stdout
    }
}

/// The first bytes of a server. Its socket alone says little: it is there before the image is open.
#[derive(Default)]
struct Greeting(Option<UnixStream>);

impl Greeting {
    fn has_come(&mut self, socket: &Path) -> bool {
        if self.0.is_none() {
            self.0 = UnixStream::connect(socket).ok();
        }
        let Some(stream) = &mut self.0 else {
            return false;
        };
        stream.set_nonblocking(true).unwrap();
        stream.read(&mut [0; 8]).is_ok_and(|len| len > 0)
    }
}

impl Outcome {
    fn assert_clear(&self, words: &[&str]) {
        assert!(
            self.code != 101 && !self.stderr.contains("panicked"),
            "{words:?}: {self:?}"
        );
        // `check` prints findings, as many as there are.
        if self.code == 0 || words[1] == "check" {
            return;
        }
        // The io shell reports failed requests on standard output.
        let text = format!("{}{}", self.stderr, self.stdout);
        let lines = self.stderr.lines().count();
        assert!(
            (1..=ERROR_LINES_MAX).contains(&lines) || words[0] == "qemu-io",
            "{words:?}: {self:?}"
        );
        assert!(!text.trim().is_empty(), "{words:?} fails without a word");
    }
}
