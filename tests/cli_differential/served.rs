//! Command lines of qemu-nbd. A server is used by the same clients as QEMU's: they list exports and
//! block status, read and write. Then it ends, or is ended, and has left the same disk.

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use super::cast::Cast;
use super::known::{Known, Line};
use super::lines::Takes::{Aio, Bitmap, Cache, Format, LoadedSnapshot, Nothing, Of};
use super::lines::{Choice, Lines, OBJECT};
use super::programs::{self, TRACES};
use super::{quoted, run_many, run_some};
use crate::support::judge::{Layout, comparable};
use crate::support::rng::Rng;
use crate::support::twins::{Twin, Verdict, compare_files, twins};
use crate::support::{cowslip, outcome, peers_are_installed, run};

/// Cases of an ordinary test run: some seconds.
const CASES: u64 = 24;

/// Lines of a case.
const LINES: u64 = 3;

/// How long a server may take to begin, and to end.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long one that serves the clients that there are may go on without any.
const IDLE: Duration = Duration::from_secs(2);

const PEERS: &[&str] = &["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"];

const OPTIONS: &[Choice] = &[
    (&["-f", "--format"], Format, 2),
    (&["-r", "--read-only"], Nothing, 4),
    (&["-t", "--persistent"], Nothing, 2),
    (&["-s", "--snapshot"], Nothing, 12),
    (&["-l", "--load-snapshot"], LoadedSnapshot, 12),
    (&["-n", "--nocache"], Nothing, 15),
    (&["--cache"], Cache, 8),
    (&["--aio"], Aio, 15),
    (
        &["--discard"],
        Of(&["unmap", "unmap", "ignore", "on", "off", "foo"]),
        5,
    ),
    (
        &["--detect-zeroes"],
        Of(&["on", "off", "unmap", "foo", ""]),
        10,
    ),
    (&["-x", "--export-name"], Of(NAMES), 4),
    (
        &["-D", "--description"],
        Of(&["text", "two words", "", "ä\n", "'"]),
        6,
    ),
    (&["-B", "--bitmap"], Bitmap, 10),
    (&["-A", "--allocation-depth"], Nothing, 6),
    (&["-o", "--offset"], Of(OFFSETS), 10),
    (&["-e", "--shared"], Of(&["0", "1", "2", "5", "-1", "x"]), 6),
    (&["-v", "--verbose"], Nothing, 15),
    (&["--fork"], Nothing, 12),
    (&["--handshake-limit"], Of(&["0", "5", "x", "-1"]), 25),
    (&["--tls-creds"], Of(&["x", "s0", ""]), 50),
    (&["--tls-authz"], Of(&["x", "s0"]), 50),
    (&["--tls-hostname"], Of(&["h"]), 60),
    (&["-p", "--port"], Of(&["10809", "x", "0", "99999", ""]), 50),
    (&["-b", "--bind"], Of(&["127.0.0.1", "nosuch.invalid"]), 50),
    (&["-k", "--socket"], Of(&["rel", "", "/nosuch/dir/s"]), 60),
    (&["--pid-file"], Of(&["/nosuch/p", "pid"]), 25),
    (&["-T", "--trace"], Of(TRACES), 50),
    (&["-L", "--list"], Nothing, 60),
    (&["-P", "--partition"], Of(&["1", "x"]), 80),
    (&["-h", "--help"], Nothing, 100),
    (&["-V", "--version"], Nothing, 100),
    OBJECT,
];

const NAMES: &[&str] = &[
    "n", "a b", "", "ä", "a/b", "%41", "?x=y", "a,b", "'", "x y z",
];

/// Whole sectors: for a disk that begins within one, qemu-nbd never finishes reporting the status.
const OFFSETS: &[&str] = &[
    "0", "512", "65536", "0x10000", "524288", "1048576", "99999999", "-1", "1k", "x",
];

impl Lines {
    /// A command line of qemu-nbd that makes nothing but a socket at this path.
    fn qemu_nbd(&mut self, socket: &str, pid_file: &str) -> Vec<String> {
        let mut parts = self.options(OPTIONS);
        // One in the background is found by its file.
        if parts.iter().any(|words| words[0].starts_with("--f")) {
            parts.push(vec![format!("--pid-file={pid_file}")]);
        }
        let mut operands = match self.rng.below(16) {
            0 => Vec::new(),
            1..=4 => {
                parts.push(vec!["--image-opts".to_string()]);
                vec![self.image_options()]
            }
            _ => vec![self.image()],
        };
        if self.rng.once_in(40) {
            operands.push(self.image());
        }
        let mut words = self.joined(parts, operands);
        // Without it the port of all would be served.
        words.splice(0..0, ["-k".to_string(), socket.to_string()]);
        words
    }
}

/// Differences that are meant.
const KNOWN: &[Known] = &[
    (
        |line| {
            let tells = |word: &String| word == "-v" || word.starts_with("--v");
            line.words.iter().any(tells)
        },
        "our servers tell more, if they tell",
    ),
    (
        |line| {
            let moves = |word: &String| word.starts_with("-o") || word.starts_with("--of");
            let takes = |word: &String| word == "-s" || word.starts_with("--sn");
            line.words.iter().any(moves) && line.words.iter().any(takes)
        },
        "qemu-nbd tells that a temporary image holds nothing, and nothing of those below, if the disk begins elsewhere",
    ),
    (
        |line| line.theirs.contains("Failed to bind socket to") && line.both_fail(),
        "the socket is made when the image is open",
    ),
    (
        |line| line.theirs.contains("probing guessed raw") && line.theirs.ends_with("--- Some(1)"),
        "a qemu-nbd in the background that has warned of something is taken for one that has failed",
    ),
];

fn qemu_nbd() -> Command {
    Command::new("qemu-nbd")
}

fn ours() -> Command {
    let mut command = cowslip();
    command.arg("qemu-nbd");
    command
}

/// A server that has been started, in whichever process.
struct Server {
    child: Child,
    /// Files with its output so far.
    said: [PathBuf; 2],
    /// In the background: its process.
    detached: Option<u32>,
}

impl Server {
    fn start(twin: &Twin, words: &[String], notes: &Path) -> Server {
        let said = ["out", "errors"].map(|name| notes.join(name));
        let [out, errors] = said.each_ref().map(|path| File::create(path).unwrap());
        let child = (twin.program)()
            .current_dir(&twin.directory)
            .args(words)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(errors)
            .spawn()
            .unwrap();
        Server {
            child,
            said,
            detached: None,
        }
    }

    /// Waits until it serves or has ended: the status of the process that was started, if that has.
    /// QEMU's has a socket before it knows whether it will serve.
    fn wait_for_begin(
        &mut self,
        (socket, pid_file): (&Path, &Path),
        words: &[String],
    ) -> Option<ExitStatus> {
        let forks = words.iter().any(|word| word.starts_with("--fork"));
        let begun = Instant::now();
        let mut greeted = false;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // QEMU's may say that it has failed, and serve.
                if greeted || greets(socket) {
                    let pid = std::fs::read_to_string(pid_file).unwrap_or_default();
                    self.detached = pid.trim().parse().ok();
                }
                return Some(status);
            }
            greeted = greeted || greets(socket);
            // The one that is started waits for one in the background, if it was asked for that.
            if greeted && !(forks && begun.elapsed() < IDLE) {
                return None;
            }
            assert!(begun.elapsed() < PATIENCE, "neither serves nor ends");
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    fn process(&self) -> u32 {
        self.detached.unwrap_or(self.child.id())
    }

    fn has_ended(&mut self) -> bool {
        match self.detached {
            None => self.child.try_wait().unwrap().is_some(),
            Some(pid) => {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
                stat.map_or(true, |stat| stat.contains(") Z "))
            }
        }
    }

    fn ends_within(&mut self, time: Duration) -> bool {
        let begun = Instant::now();
        while !self.has_ended() {
            if begun.elapsed() > time {
                return false;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        true
    }

    /// Ends it in order, if it has not ended: how it came to that.
    fn stop(&mut self, idle: Duration) -> &'static str {
        if self.ends_within(idle) {
            return "ended by itself";
        }
        run(Command::new("kill").arg(self.process().to_string()));
        match self.ends_within(PATIENCE) {
            true => "ended when asked to",
            false => "did not end",
        }
    }

    fn output(&mut self, status: ExitStatus) -> Output {
        let [stdout, stderr] = self
            .said
            .each_ref()
            .map(|path| std::fs::read(path).unwrap());
        Output {
            status,
            stdout,
            stderr,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = self.detached
            && !self.has_ended()
        {
            drop(Command::new("kill").args(["-9", &pid.to_string()]).status());
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Whether a server begins to speak.
fn greets(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else {
        return false;
    };
    let patience = Duration::from_millis(100);
    stream.set_read_timeout(Some(patience)).unwrap();
    stream.read_exact(&mut [0; 8]).is_ok()
}

/// Runs clients, and collects their output.
struct Clients<'a> {
    socket: &'a Path,
    words: &'a [String],
    layout: Layout,
    rng: Rng,
}

impl Clients<'_> {
    /// The value of an option, the last one given.
    fn value(&self, letter: &str, long: &str) -> Option<String> {
        let mut found = None;
        for (at, word) in self.words.iter().enumerate() {
            let attached = word
                .strip_prefix(&format!("{long}="))
                .or(word.strip_prefix(letter).filter(|rest| !rest.is_empty()));
            if let Some(value) = attached {
                found = Some(value.to_string());
            } else if word == letter || word == long {
                found = self.words.get(at + 1).cloned();
            }
        }
        found
    }

    fn has(&self, letter: &str, long: &str) -> bool {
        let is_it = |word: &String| word == letter || word == long;
        self.words.iter().any(is_it)
    }

    fn uri(&self) -> String {
        let name = self.value("-x", "--export-name").unwrap_or_default();
        let escaped: String = name.bytes().map(|byte| format!("%{byte:02X}")).collect();
        format!("nbd+unix:///{escaped}?socket={}", self.socket.display())
    }

    /// Returns the output of a client; one that does not end is killed.
    fn answer(&self, program: &str, words: &[&str]) -> String {
        let mut command = Command::new("timeout");
        command.args(["10", program]).args(words);
        comparable(&outcome(&mut command), self.layout) + "\n"
    }

    /// All that they see; the last one to leave may end the server.
    fn visit(&mut self) -> String {
        let listed = self.answer("qemu-nbd", &["-L", "-k", &self.socket.to_string_lossy()]);
        // Each server prefers another size of requests, and ours takes any.
        let is_size = |line: &&str| {
            ["  opt block", "  min block"]
                .iter()
                .any(|size| line.starts_with(size))
        };
        let mut seen: String = listed
            .split_inclusive('\n')
            .filter(|line| !is_size(line))
            .collect();
        let uri = self.uri();
        if self.has("-t", "--persistent") {
            let answer = self.answer("nbdinfo", &["--json", "--no-content", &uri]);
            seen.extend(answer.split_inclusive('\n').filter(|line| {
                !line.contains("block_size_preferred") && !line.contains("block_size_minimum")
            }));
            let bitmap = self.value("-B", "--bitmap").unwrap_or_default();
            let mut contexts = vec![
                "qemu:allocation-depth".to_string(),
                format!("qemu:dirty-bitmap:{bitmap}"),
            ];
            if self.layout == Layout::Equal {
                contexts.push("base:allocation".to_string());
            }
            for context in contexts {
                seen += &self.answer("nbdinfo", &[&format!("--map={context}"), &uri]);
            }
        }
        seen + &self.requests(&uri)
    }

    fn requests(&mut self, uri: &str) -> String {
        const REQUESTS: &[&str] = &[
            "read 0 4k",
            "read -v 1000 20",
            "read -P 0 64k 64k",
            "write -P 7 0 64k",
            "write -P 9 100k 1000",
            "write -z 64k 64k",
            "write -z -u 0 128k",
            "write -z -n 0 64k",
            "write -f -P 4 4k 4k",
            "discard 0 64k",
            "flush",
            "length",
            "read 900k 64k",
            "write -P 3 900k 1000",
            "write 900M 1k",
        ];
        let mut words = vec!["-f", "raw"];
        if self.rng.once_in(5) {
            words.push("-r");
        }
        for _ in 0..1 + self.rng.below(4) {
            words.extend(["-c", *self.rng.pick(REQUESTS)]);
        }
        words.push(uri);
        self.answer("qemu-io", &words)
    }
}

/// Runs one of the servers with its clients: all that was said, and how it ended.
fn serve(twin: &Twin, words: &[String], (layout, rng): (Layout, &Rng), notes: &Path) -> String {
    let socket = twin.directory.join("s");
    let pid_file = twin.directory.join("pid");
    let mut server = Server::start(twin, words, notes);
    let status = server.wait_for_begin((&socket, &pid_file), words);
    let serves = status.is_none() || server.detached.is_some();
    let mut seen = String::new();
    if serves {
        let mut clients = Clients {
            socket: &socket,
            words,
            layout,
            rng: rng.clone(),
        };
        seen = clients.visit();
        let idle = match clients.has("-t", "--persistent") {
            true => Duration::from_millis(20),
            false => IDLE,
        };
        seen += server.stop(idle);
    }
    let status = status.unwrap_or_else(|| server.child.wait().unwrap());
    // QEMU's leaves its socket where it could not serve.
    let left = [serves && socket.exists(), pid_file.exists()];
    for path in [&socket, &pid_file] {
        drop(std::fs::remove_file(path));
    }
    let mut output = server.output(status);
    // An incomplete sandbox is reported.
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines = errors.split_inclusive('\n');
    let kept: String = lines
        .filter(|line| !line.starts_with("qemu-nbd: sandbox: "))
        .collect();
    output.stderr = kept.into_bytes();
    let printed = comparable(&output, layout);
    let directory = twin.directory.display().to_string();
    format!("{seen}\nsocket, pid file: {left:?}\n{printed}").replace(&directory, "DIR")
}

fn check_case(seed: u64, cast: &Cast, directory: &Path) -> Verdict {
    let (theirs, ours) = twins(&cast.directory, directory, [qemu_nbd, ours]);
    let mut generator = Lines::new(seed);
    let mut layout = Layout::Equal;
    let mut log = String::new();
    for _ in 0..LINES {
        let words = generator.qemu_nbd("DIR/s", "DIR/pid");
        let rng = Rng::new(generator.rng.next());
        log += &format!("  qemu-nbd {}\n", quoted(&words));
        let [expected, got] = [&theirs, &ours].map(|twin| {
            let directory = twin.directory.display().to_string();
            let words: Vec<String> = words
                .iter()
                .map(|word| word.replace("DIR", &directory))
                .collect();
            serve(twin, &words, (layout, &rng), directory_of_notes(twin))
        });
        let line = Line {
            words: &words,
            theirs: &expected,
            ours: &got,
            layout,
        };
        let compared = match line.theirs == line.ours {
            false if is_meant(&line) => return Ok(()),
            false => Err(format!(
                "qemu-nbd says:\n{}\nours:\n{}\n",
                line.theirs, line.ours
            )),
            true => compare_files(&theirs, &ours, &mut layout),
        };
        compared.map_err(|why| format!("seed {seed}:\n{}{log}{why}", cast.log))?;
    }
    Ok(())
}

fn is_meant(line: &Line<'_>) -> bool {
    let reasons = [KNOWN, programs::KNOWN];
    let mut found = reasons.iter().filter_map(|reasons| line.first_fit(reasons));
    found.next().or(line.may_differ()).is_some()
}

/// Where it is kept what a program says: not among its files.
fn directory_of_notes(twin: &Twin) -> &Path {
    twin.directory.parent().unwrap()
}

#[test]
fn lines_of_qemu_nbd_do_what_qemu_nbds_do() {
    if peers_are_installed(PEERS) {
        run_some(check_case, CASES);
    }
}

/// Differences beyond the seeds of an ordinary run: `cargo test --test command cli_differential --
/// --ignored`.
#[test]
#[ignore = "takes minutes"]
fn many_lines_of_qemu_nbd_do_what_qemu_nbds_do() {
    if peers_are_installed(PEERS) {
        run_many(check_case, 2000);
    }
}
