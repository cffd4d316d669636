//! Programs that are asked to end by a signal while their servers fail or do not answer: they end
//! within seconds, and say why.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.
#![cfg(feature = "remote")]

use std::io::Read;
use std::ops::Deref;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use cowslip_testbed::web::WebFault;
use rustix::process::Signal;

use crate::support::golden_image::Golden;
use crate::support::running::Running;
use crate::support::server::Server;
use crate::support::{eventually, run};

/// Requests that are under way have two seconds; the rest is for busy machines. Without a signal
/// each of these would go on for a minute or three.
const SOON: Duration = Duration::from_secs(20);
const WHY: &str = "given up, since the program was asked to end";

/// A web server with a golden image, which can be made to answer 503 for ever.
struct Failing(Golden);

impl Deref for Failing {
    type Target = Golden;

    fn deref(&self) -> &Golden {
        &self.0
    }
}

impl Failing {
    fn new() -> Failing {
        Failing(Golden::new(
            "/images/golden.qcow2",
            "-c write__-P__1__0__4M",
        ))
    }

    fn fail_for_ever(&self) {
        let busy = "<Error><Code>SlowDown</Code></Error>";
        self.server
            .judge(move |_| WebFault::Status(503, busy.into()));
        self.server.forget();
    }

    fn command(&self, line: &str) -> Command {
        let mut command = self.0.command(line);
        command
            .env("AWS_ENDPOINT_URL", self.server.url(""))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_ACCESS_KEY_ID", "id")
            .env("AWS_SECRET_ACCESS_KEY", "key")
            .env("HOME", self.path());
        command
    }

    /// Runs a line until the server has been asked more than once, and sends a signal then.
    fn interrupted(&self, line: &str, signal: Signal) -> Output {
        let mut command = self.command(line);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let running = Running::start(command.stderr(Stdio::piped()));
        eventually("the server is asked again", || {
            self.server.requests().len() > 1
        });
        ended_soon(running, signal)
    }
}

/// Sends a signal, and takes what the program says until its end, which comes soon.
fn ended_soon(mut running: Running, signal: Signal) -> Output {
    let begun = Instant::now();
    running.signal(signal);
    while running.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < SOON, "does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    let status = running.wait().unwrap();
    let mut stderr = Vec::new();
    if let Some(stream) = running.stderr.as_mut() {
        stream.read_to_end(&mut stderr).unwrap();
    }
    Output {
        status,
        stdout: Vec::new(),
        stderr,
    }
}

fn assert_says(output: &Output, words: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains(words), "{text}");
}

#[test]
fn verbs_that_read_a_failing_server_end_soon() {
    let golden = Failing::new();
    golden.fail_for_ever();
    for signal in [Signal::TERM, Signal::INT] {
        // Opening: nothing is made yet, so the signal ends the program as it is.
        let output = golden.interrupted("convert -O raw URL new.raw", signal);
        assert!(!output.status.success());
        assert!(!golden.path().join("new.raw").exists());
    }
}

#[test]
fn a_conversion_whose_server_begins_to_fail_ends_soon() {
    let golden = Failing::new();
    let mut requests = 0;
    golden.server.judge(move |_| {
        requests += 1;
        match requests {
            // The header and tables come; data does not.
            0..=2 => WebFault::Nothing,
            _ => WebFault::Status(503, String::new()),
        }
    });
    let mut command = golden.command("convert -O raw URL new.raw");
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let running = Running::start(&mut command);
    eventually("the server has failed", || {
        golden.server.requests().len() > 4
    });
    let output = ended_soon(running, Signal::TERM);
    assert!(!output.status.success());
    assert!(
        !golden.path().join("new.raw").exists(),
        "no half image stays"
    );
}

#[test]
fn publishing_to_a_failing_store_and_pulling_from_it_end_soon() {
    let golden = Failing::new();
    golden.fail_for_ever();
    for line in [
        "publish golden.qcow2 s3://images/golden",
        "publish -O qcow2 golden.qcow2 s3://images/plain.qcow2",
        "pull s3://images/golden new.qcow2",
    ] {
        golden.server.forget();
        let output = golden.interrupted(line, Signal::TERM);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{line}: {text}");
    }
}

#[test]
fn a_server_whose_image_does_not_come_ends_soon_and_says_why() {
    let golden = Failing::new();
    golden.fail_for_ever();
    let output = golden.interrupted("serve -k socket -r URL", Signal::TERM);
    assert_says(&output, WHY);
    assert_says(&output, "503");
    golden.server.forget();
    let node = "driver=qcow2,node-name=a,file.driver=http,file.url=URL,read-only=on";
    let output = golden.interrupted(
        &format!("daemon --control control --blockdev {node}"),
        Signal::INT,
    );
    assert_says(&output, WHY);
}

#[test]
fn a_server_whose_guest_waits_for_a_failing_store_ends_soon() {
    let golden = Failing::new();
    run(&mut golden.command("create -q -f qcow2 -b URL -F qcow2 vm.qcow2"));
    let socket = golden.path().join("socket");
    let mut serve = golden.command("serve -k socket --sandbox=off vm.qcow2");
    let server = Server::start(&mut serve, &socket);
    let uri = server.uri();
    run(&mut golden.command(&format!("io -f raw -c write__-P__7__0__64k {uri}")));
    golden.fail_for_ever();
    let mut reading = golden.command(&format!("io -r -f raw -c read__1M__64k {uri}"));
    let mut reading = Running::start(reading.stderr(Stdio::null()).stdout(Stdio::null()));
    eventually("the guest waits", || golden.server.requests().len() > 1);
    let begun = Instant::now();
    server.stop();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    reading.wait().unwrap();
    // The overlay was closed in order.
    golden.server.judge(|_| WebFault::Nothing);
    run(&mut golden.command("check vm.qcow2"));
    run(&mut golden.command("io -c read__-P__7__0__64k -c read__-P__1__1M__64k vm.qcow2"));
}
