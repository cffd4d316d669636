//! `serve --handover`: servers that are replaced under a front end that is at work.

use std::os::unix::fs::PermissionsExt;
use std::process::ExitStatus;

use super::*;

mod images;

/// A front end at work, with its server.
struct Rig {
    dir: tempfile::TempDir,
    image: PathBuf,
    disk: Disk,
    socket: PathBuf,
    memory: OwnedFd,
    features: u64,
    table: Option<(OwnedFd, Vec<u8>)>,
    load: Load,
    front: Option<Front>,
    queue: Option<FrontQueue>,
    served: Served,
    last: Instant,
    gap: Duration,
}

/// The disk as servers are asked for it: the image's name, and options.
#[derive(Clone)]
struct Disk {
    name: String,
    options: Vec<String>,
}

impl Disk {
    fn of_file(image: &Path) -> Disk {
        Disk {
            name: image.display().to_string(),
            options: ["-f", "qcow2"].map(str::to_string).to_vec(),
        }
    }

    fn serve(&self, socket: &Path, options: &[&str]) -> Served {
        let options = [&words(&self.options)[..], options].concat();
        Served::start_named(&self.name, socket, &options)
    }
}

const DEPTH: usize = 32;
const FEATURES: u64 = VERSION_1 | EVENT_IDX | FLUSH;

impl Rig {
    fn start(features: u64) -> Rig {
        Rig::with(features, |_| Vec::new())
    }

    fn with(features: u64, options: impl FnOnce(&Path) -> Vec<String>) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path());
        let options = options(dir.path());
        let disk = Disk::of_file(&image);
        Rig::of(features, (dir, image), (disk, &words(&options)))
    }

    /// A rig of a disk in a directory, which is in this image.
    fn of(
        features: u64,
        (dir, image): (tempfile::TempDir, PathBuf),
        (disk, options): (Disk, &[&str]),
    ) -> Rig {
        let socket = dir.path().join("socket");
        let mut rig = Rig {
            served: disk.serve(&socket, options),
            dir,
            image,
            disk,
            socket,
            memory: memory_file(front::MEMORY_BYTES).unwrap(),
            features,
            table: None,
            load: Load::new(),
            front: None,
            queue: None,
            last: Instant::now(),
            gap: Duration::ZERO,
        };
        rig.connect();
        rig
    }

    /// Connects to a server that has been started, with all that is in flight.
    fn connect(&mut self) {
        self.front = None;
        self.served.wait();
        let memory = self.memory.try_clone().unwrap();
        let mut front = Front::connect_with(&self.socket, self.features, memory).unwrap();
        match &self.table {
            Some((table, description)) => front.set_inflight(table, description).unwrap(),
            None => self.table = Some(front.get_inflight(1, 128).unwrap()),
        }
        self.queue = Some(match self.queue.take() {
            Some(mut queue) => {
                front.start_queue(&mut queue, 0).unwrap();
                queue
            }
            None => front.queue(0, 128).unwrap(),
        });
        self.front = Some(front);
    }

    /// Keeps requests in flight, and returns after a time, or when a condition is met.
    fn work(&mut self, limit: Duration, mut until: impl FnMut() -> bool) {
        let end = Instant::now() + limit;
        self.last = Instant::now();
        while Instant::now() < end && !until() {
            let queue = self.queue.as_mut().unwrap();
            self.load.submit(queue, DEPTH);
            while let Some(done) = queue.try_complete().unwrap() {
                self.load.complete(queue, done);
                self.gap = self.gap.max(self.last.elapsed());
                self.last = Instant::now();
            }
            std::thread::yield_now();
        }
        self.gap = self.gap.max(self.last.elapsed());
    }

    fn successor(&self) -> Served {
        self.disk.serve(&self.socket, &["--handover"])
    }

    /// Goes on until a server ends.
    fn until_it_ends(&mut self, served: &mut Served) -> Option<ExitStatus> {
        let mut status = None;
        self.work(Duration::from_secs(20), || {
            status = served.child.try_wait().unwrap();
            status.is_some()
        });
        status
    }

    /// Hands over to a new server under load. Returns the longest time without a completion.
    fn hand_over(&mut self) -> Duration {
        self.gap = Duration::ZERO;
        let next = self.successor();
        let mut before = std::mem::replace(&mut self.served, next);
        let status = self.until_it_ends(&mut before);
        expect_handed_over(&mut before, status);
        self.work(Duration::from_millis(5), || false);
        self.gap
    }

    /// Completes all, compares every byte, ends the server and checks the image.
    fn finish(self) {
        let image = self.image.clone();
        let _dir = self.finish_unchecked();
        check(&image);
    }

    /// The same without a check. Returns the directory.
    fn finish_unchecked(mut self) -> tempfile::TempDir {
        let queue = self.queue.as_mut().unwrap();
        self.load.drain(queue);
        self.load.read_all(queue);
        self.front = None;
        let door = self.socket.with_file_name("socket.handover");
        assert!(door.exists(), "the last server waits for a successor");
        self.served.end();
        assert!(
            !door.exists() && !self.socket.exists(),
            "the names are removed"
        );
        self.dir
    }
}

fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

fn said(served: &mut Served) -> String {
    let mut text = String::new();
    let stderr = served.child.stderr.take();
    stderr.unwrap().read_to_string(&mut text).unwrap();
    text
}

fn expect_handed_over(served: &mut Served, status: Option<ExitStatus>) {
    let status = status.expect("the server has handed over");
    let text = said(served);
    if std::env::var_os("COWSLIP_TEST_HANDOVERS").is_some() {
        eprint!("{text}");
    }
    assert!(status.success() && text.contains("handed over"), "{text}");
}

/// Handovers of a test. A soak has more: `COWSLIP_TEST_HANDOVERS`.
fn handovers(default: u64) -> u64 {
    let asked = std::env::var("COWSLIP_TEST_HANDOVERS").ok();
    asked.map_or(default, |text| text.parse().expect("a number"))
}

fn handed_over_under_load(features: u64) {
    let mut rig = Rig::start(features);
    rig.work(Duration::from_millis(100), || false);
    let mut gaps: Vec<Duration> = (0..handovers(25)).map(|_| rig.hand_over()).collect();
    gaps.sort_unstable();
    let (median, worst) = (gaps[gaps.len() / 2], gaps.last().unwrap());
    let completed = rig.load.completed;
    eprintln!("{completed} requests; longest gap: median {median:?}, worst {worst:?}");
    assert!(completed > 1000, "{completed}");
    rig.finish();
}

#[test]
fn servers_are_replaced_under_load() {
    handed_over_under_load(FEATURES);
}

#[test]
fn servers_are_replaced_under_load_on_packed_rings() {
    handed_over_under_load(FEATURES | PACKED);
}

#[test]
fn a_successor_that_is_killed_leaves_the_guest_to_its_predecessor() {
    let mut rig = Rig::start(FEATURES);
    let (mut back, mut taken) = (0, 0);
    for _ in 0..handovers(25) {
        let mut next = rig.successor();
        let delay = Duration::from_micros(rig.load.random(60_000) as u64);
        rig.work(delay, || false);
        next.kill();
        // It is known a moment later which of the two was to serve.
        rig.work(Duration::from_millis(20), || false);
        match rig.served.child.try_wait().unwrap() {
            None => {
                back += 1;
                let before = rig.load.completed;
                let queue = rig.queue.as_mut().unwrap();
                rig.load.submit(queue, DEPTH);
                rig.load.drain(queue);
                assert!(rig.load.completed > before);
            }
            status => {
                taken += 1;
                expect_handed_over(&mut rig.served, status);
                rig.served = Served::start(&rig.image, &rig.socket, &[]);
                rig.connect();
            }
        }
    }
    eprintln!("{back} times the old server went on, {taken} times the new one was killed later");
    assert!(back > 0);
    rig.finish();
}

#[test]
fn a_predecessor_that_is_killed_leaves_the_guest_to_its_successor() {
    let mut rig = Rig::start(FEATURES);
    let (mut seamless, mut restarted) = (0, 0);
    for _ in 0..handovers(25) {
        let mut next = rig.successor();
        let delay = Duration::from_micros(rig.load.random(60_000) as u64);
        rig.work(delay, || false);
        rig.served.kill();
        rig.work(Duration::from_millis(1), || false);
        // The connection has ended with the old server, unless the new one has it already.
        let is_over = next.child.try_wait().unwrap().is_some();
        let before = rig.load.completed;
        rig.work(Duration::from_millis(100), || false);
        if !is_over && rig.load.completed > before + DEPTH as u64 {
            seamless += 1;
            rig.served = next;
            continue;
        }
        restarted += 1;
        if next.child.try_wait().unwrap().is_some() {
            next = Served::start(&rig.image, &rig.socket, &[]);
        }
        rig.served = next;
        rig.connect();
    }
    eprintln!("{seamless} times the connection went on, {restarted} times it was a new one");
    rig.finish();
}

/// A successor with these options is refused, with these words; the server goes on.
fn refused(rig: &mut Rig, image: &Path, options: &[&str], words: &str) {
    let mut next = Served::start(image, &rig.socket, options);
    let status = rig.until_it_ends(&mut next);
    let text = said(&mut next);
    let status = status.expect("it ends");
    assert!(
        !status.success() && text.contains(words),
        "{status}: {text}"
    );
    assert!(rig.served.child.try_wait().unwrap().is_none(), "it goes on");
    let queue = rig.queue.as_mut().unwrap();
    rig.load.drain(queue);
}

#[test]
fn a_successor_that_does_not_fit_is_refused() {
    let mut rig = Rig::start(FEATURES);
    let path = rig.image.clone();
    let other = tempfile::tempdir().unwrap();
    let other = image(other.path());
    refused(&mut rig, &other, &["--handover"], "another image");
    refused(
        &mut rig,
        &path,
        &["--handover", "--read-only"],
        "--read-only",
    );
    refused(
        &mut rig,
        &path,
        &["--handover", "--offset", "512"],
        "from byte 512",
    );
    // What the guest has seen of the device.
    let shown = [
        (&["--block-size", "4096"][..], "--block-size is 4096"),
        (&["--serial", "other"], "--serial is \"other\""),
        (&["--queues", "3"], "--queues is 3"),
        (&["--in-order"], "--in-order is true"),
    ];
    for (options, words) in shown {
        let options = [&["--handover"], options].concat();
        refused(&mut rig, &path, &options, words);
    }
    // Known only once the server is at rest: it opens the image again.
    refused(&mut rig, &path, &["--handover", "-f", "raw"], "format");
    let door = rig.socket.with_file_name("socket.handover");
    assert_eq!(door.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let mut stream = std::os::unix::net::UnixStream::connect(&door).unwrap();
    let hello = br#"{"hello":{"version":7}}"#;
    let mut message = (hello.len() as u32).to_le_bytes().to_vec();
    message.extend([0; 4]);
    message.extend(hello);
    std::io::Write::write_all(&mut stream, &message).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("version of the handover is 7"), "{answer}");
    rig.hand_over();
    rig.finish();
}

#[test]
fn two_successors_take_over_one_after_the_other() {
    let mut rig = Rig::start(FEATURES);
    let (one, two) = (rig.successor(), rig.successor());
    let mut before = std::mem::replace(&mut rig.served, one);
    let status = rig.until_it_ends(&mut before);
    expect_handed_over(&mut before, status);
    // Which of the two is left is not known before.
    rig.work(Duration::from_secs(1), || false);
    let last = Served::start(&rig.image, &rig.socket, &["--handover"]);
    let all = [std::mem::replace(&mut rig.served, last), two];
    rig.work(Duration::from_secs(1), || false);
    for mut served in all {
        let status = served.child.try_wait().unwrap();
        expect_handed_over(&mut served, status);
    }
    rig.finish();
}

#[test]
fn no_server_is_no_handover() {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (image(dir.path()), dir.path().join("socket"));
    let mut served = Served::start(&image, &socket, &["--handover"]);
    let status = served.child.wait().unwrap();
    let text = said(&mut served);
    assert!(
        !status.success() && text.contains("Could not take over"),
        "{text}"
    );
}

#[test]
fn the_whole_sandbox_nbd_and_the_process_number_go_with_it() {
    let options = |dir: &Path| {
        let path = |name| dir.join(name).display().to_string();
        let fixed = ["--sandbox", "on", "--threads", "2", "--socket"].map(str::to_string);
        let files = [path("nbd"), "--pid-file".to_string(), path("pid")];
        [&fixed[..], &files].concat()
    };
    let mut rig = Rig::with(FEATURES, options);
    let options = options(rig.socket.parent().unwrap());
    let [nbd, pid] = ["nbd", "pid"].map(|name| rig.socket.with_file_name(name));
    for _ in 0..3 {
        let next = [&words(&options)[..], &["--handover"]].concat();
        let next = Served::start(&rig.image, &rig.socket, &next);
        let mut before = std::mem::replace(&mut rig.served, next);
        let status = rig.until_it_ends(&mut before);
        expect_handed_over(&mut before, status);
        rig.work(Duration::from_millis(30), || false);
        let number = std::fs::read_to_string(&pid).unwrap();
        assert_eq!(number, format!("{}\n", rig.served.child.id()));
        let uri = format!("nbd+unix:///?socket={}", nbd.display());
        let words = ["io", "-f", "raw", "-r", "-c", "read 0 4k", &uri];
        // One on each thread.
        for _ in 0..2 {
            let io = cowslip().args(words).output().unwrap();
            assert!(io.status.success(), "{io:?}");
        }
    }
    rig.finish();
    assert!(!nbd.exists());
}
