//! The daemon beside qemu-storage-daemon: the same commands get the same replies, errors in the
//! same words, and the same events in the same order.
//!
//! Scripts are in `daemon_protocol/`: a line is a command with its arguments, or `wait JOB STATUS`;
//! the status `error` is the event of an error that the job has met, and `deleted` is that of an
//! export. `run LINE` is a command line of a client, whose output counts as a reply. What differs
//! on purpose is left out by the functions below, each with its reason, or ends with `# ours:
//! TEXT`, the words of our error.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cowslip_qmp::Client;
use cowslip_qmp::client::{ClientError, Received};
use serde_json::{Value, json};

use crate::support::server::Server;
use crate::support::{cowslip, peers_are_installed, run, scratch};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
/// Time for events after the last line.
const REST: Option<Duration> = Some(Duration::from_millis(200));

/// The program that ours is compared with.
const QEMU: &str = "qemu-storage-daemon";

/// A line of a script.
struct Line<'a> {
    text: &'a str,
    /// Words of our error, where they are not QEMU's.
    ours: Option<&'a str>,
}

fn lines(script: &str) -> impl Iterator<Item = Line<'_>> {
    let is_line = |line: &&str| !line.is_empty() && !line.starts_with('#');
    script.lines().filter(is_line).map(|line| {
        let (text, ours) = match line.split_once(" # ours: ") {
            Some((text, ours)) => (text, Some(ours)),
            None => (line, None),
        };
        Line { text, ours }
    })
}

/// Outcome of a script: replies in order, and events of each job and export in order.
#[derive(Default)]
struct Outcome {
    replies: Vec<Value>,
    events: BTreeMap<String, Vec<Value>>,
}

impl Outcome {
    fn note(&mut self, event: &Received) {
        let about = event.data.get("id").or(event.data.get("device"));
        let about = about.and_then(Value::as_str).unwrap_or_default();
        let mut data = event.data.clone();
        // A job that fails or is cancelled has got so far by its own timing.
        if event.name == "BLOCK_JOB_CANCELLED" || data.contains_key("error") {
            data.remove("offset");
        }
        reason_alone(&mut data);
        if data.get("type") == Some(&"commit".into()) {
            data.remove("offset");
            data.remove("len");
        }
        let status = |it: &Value| it["data"]["status"].as_str().unwrap_or("").to_string();
        let events = self.events.entry(about.to_string()).or_default();
        events.push(json!({"event": event.name, "data": data}));
        let statuses: Vec<String> = events.iter().map(status).collect();
        let ends = |with: &[&str]| {
            statuses.ends_with(&with.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        // QEMU makes a job before it finds that it cannot begin, alone or in its transaction.
        for vain in [
            &["created", "null"][..],
            &["created", "aborting", "concluded", "null"],
        ] {
            if ends(vain) {
                events.truncate(events.len() - vain.len());
                return;
            }
        }
        // QEMU pauses jobs for a moment whenever it changes the graph.
        if let [before @ .., paused, now] = &statuses[..]
            && before.iter().rfind(|status| !status.is_empty()) == Some(now)
            && ["paused", "standby"].contains(&paused.as_str())
        {
            events.truncate(events.len() - 2);
        }
    }
}

/// The images of a script: `a` with data in its first half, `b` over it, `c` and others that are
/// empty, `r`, which is raw, and `k` and `i`, which have bitmaps: those of `i` were not saved.
fn make_images(dir: &Path) {
    for words in [
        &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"][..],
        &["io", "-c", "write -P 5 0 4M", "a.qcow2"],
        &[
            "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2",
        ],
        &["create", "-q", "-f", "qcow2", "c.qcow2", "8M"],
        &["create", "-q", "-f", "qcow2", "o.qcow2", "8M"],
        &["create", "-q", "-f", "qcow2", "small.qcow2", "1M"],
        &["create", "-q", "-f", "raw", "r.raw", "8M"],
        &["create", "-q", "-f", "qcow2", "k.qcow2", "8M"],
        &["bitmap", "--add", "k.qcow2", "p"],
        &["bitmap", "--add", "--disable", "k.qcow2", "q"],
        &["io", "-c", "write -P 5 1M 100k", "k.qcow2"],
    ] {
        run(cowslip().current_dir(dir).args(words));
    }
    let mut image = std::fs::read(dir.join("k.qcow2")).unwrap();
    let is_entry = |at: &usize| image[*at..].starts_with(b"p\0\0\0\0\0\0\0");
    let name = (0..image.len()).rev().find(is_entry).unwrap();
    // The lowest byte of its flags: what has changed is not in the file.
    image[name - 9] |= 1;
    std::fs::write(dir.join("i.qcow2"), image).unwrap();
}

/// A client, once there is a server. QEMU's monitor has one client at a time: after a connection
/// that only looks whether the server is there, it may greet the next one twice, lose its first
/// command or reset it.
fn connect(socket: &Path) -> Option<Client> {
    match Client::connect(socket, PATIENCE) {
        Err(error) if error.is_absence() => None,
        connected => Some(connected.unwrap()),
    }
}

fn play(command: &mut Command, script: &str) -> Outcome {
    let dir = scratch();
    make_images(dir.path());
    let socket = dir.path().join("qmp");
    let (_server, mut client) = Server::start_for(
        command.current_dir(dir.path()).args([
            "--chardev",
            "socket,path=qmp,server=on,wait=off,id=c",
            "--monitor",
            "c",
        ]),
        &socket,
        connect,
    );
    let mut outcome = Outcome::default();
    for line in lines(script) {
        if let Some(wanted) = line.text.strip_prefix("wait ") {
            let (job, status) = wanted.split_once(' ').unwrap();
            loop {
                let event = client.next_event(PATIENCE);
                let event = event.unwrap_or_else(|error| panic!("{}: {error}", line.text));
                let event = event.unwrap_or_else(|| {
                    panic!(
                        "{command:?} {}: no event after {:?}",
                        line.text,
                        outcome.replies.last()
                    )
                });
                outcome.note(&event);
                let has = |member: &str, value: &str| event.data.get(member) == Some(&value.into());
                let is_error = event.name == "BLOCK_JOB_ERROR" && has("device", job);
                let is_gone = event.name == "BLOCK_EXPORT_DELETED" && status == "deleted";
                let has_come = is_gone || has("status", status);
                if status == "error" && is_error || has("id", job) && has_come {
                    break;
                }
            }
            continue;
        }
        if let Some(client) = line.text.strip_prefix("run ") {
            // An underscore is a space within a word.
            let words: Vec<String> = client
                .split(' ')
                .map(|word| word.replace('_', " "))
                .collect();
            let mut client = Command::new(&words[0]);
            let output = run(client.current_dir(dir.path()).args(&words[1..]));
            outcome
                .replies
                .push(json!({"output": output.lines().collect::<Vec<_>>()}));
            continue;
        }
        let (name, arguments) = line.text.split_once(' ').unwrap_or((line.text, "{}"));
        let arguments = serde_json::from_str(arguments).expect(line.text);
        outcome.replies.push(match client.execute(name, arguments) {
            Ok(result) => comparable(name, result),
            Err(ClientError::Refused(error)) => {
                json!({"class": error.class.name(), "desc": error.desc})
            }
            Err(error) => panic!("{}: {error}", line.text),
        });
    }
    while let Some(event) = client.next_event(REST).unwrap() {
        outcome.note(&event);
    }
    outcome
}

/// A result without times, and without what depends on how images are stored or on nodes that only
/// QEMU has: those of files.
fn comparable(command: &str, mut result: Value) -> Value {
    if command == "query-named-block-nodes" {
        let nodes = result.as_array_mut().unwrap();
        nodes.retain(|node| !node["node-name"].as_str().unwrap().starts_with('#'));
        for node in nodes {
            if let Some(bitmaps) = node.get_mut("dirty-bitmaps").and_then(Value::as_array_mut) {
                // A backup by a bitmap makes it the first one in QEMU.
                bitmaps.sort_by_key(|bitmap| bitmap["name"].to_string());
            }
            let is_file = node["drv"] == "file";
            let image = node["image"].as_object_mut().unwrap();
            if is_file {
                // The length of an image's file.
                image.remove("virtual-size");
            }
            for name in [
                "actual-size",
                "dirty-flag",
                "format-specific",
                "backing-image",
                "full-backing-filename",
            ] {
                image.remove(name);
            }
            for snapshot in image
                .get_mut("snapshots")
                .into_iter()
                .flat_map(Value::as_array_mut)
            {
                snapshot.iter_mut().for_each(without_times);
            }
        }
    }
    if command.starts_with("query-") && command != "query-named-block-nodes" {
        for job in result.as_array_mut().into_iter().flatten() {
            for name in ["busy", "offset", "current-progress"] {
                job.as_object_mut().unwrap().remove(name);
            }
            reason_alone(job.as_object_mut().unwrap());
            // The work of making an image is a step in QEMU, and bytes here; a commit is as long as
            // the disk there, and as what is copied here.
            if job["type"] == "create" || job["type"] == "commit" {
                job.as_object_mut().unwrap().remove("total-progress");
                job.as_object_mut().unwrap().remove("len");
            }
        }
    }
    without_times(&mut result);
    result
}

/// Leaves the system's reason of an error of a job: QEMU does not say what it was about.
fn reason_alone(data: &mut serde_json::Map<String, Value>) {
    if let Some(Value::String(text)) = data.get_mut("error") {
        *text = text.rsplit(": ").next().unwrap_or_default().to_string();
    }
}

fn without_times(of: &mut Value) {
    if let Some(members) = of.as_object_mut() {
        let is_timed = |name: &str| {
            ["date-", "vm-clock-", "icount"]
                .iter()
                .any(|it| name.starts_with(it))
        };
        members.retain(|name, _| !is_timed(name));
    }
}

/// Places in which two values differ.
fn difference(at: &str, ours: &Value, theirs: &Value) -> Vec<String> {
    let none = Value::Null;
    match (ours, theirs) {
        (Value::Object(our), Value::Object(their)) => {
            let names: BTreeSet<&String> = our.keys().chain(their.keys()).collect();
            let within = names.into_iter().flat_map(|name| {
                let of = |members: &serde_json::Map<String, Value>| {
                    members.get(name).cloned().unwrap_or_default()
                };
                difference(&format!("{at}.{name}"), &of(our), &of(their))
            });
            within.collect()
        }
        (Value::Array(our), Value::Array(their)) => {
            let within = (0..our.len().max(their.len())).flat_map(|index| {
                let of = |list: &[Value]| list.get(index).unwrap_or(&none).clone();
                difference(&format!("{at}[{index}]"), &of(our), &of(their))
            });
            within.collect()
        }
        _ if ours == theirs => Vec::new(),
        _ => vec![format!("  {at} ours {ours}\n  {at} QEMU {theirs}")],
    }
}

fn compare(script: &str) {
    if !peers_are_installed(&[QEMU]) {
        return;
    }
    let theirs = play(&mut Command::new(QEMU), script);
    let ours = play(cowslip().arg(QEMU), script);
    let mut differences = Vec::new();
    let commands = lines(script).filter(|line| !line.text.starts_with("wait "));
    for (line, (ours, theirs)) in commands.zip(ours.replies.iter().zip(&theirs.replies)) {
        let is_as_expected = match line.ours {
            None => ours == theirs,
            Some(text) => ours["desc"] == text && ours != theirs,
        };
        if !is_as_expected {
            let differs = difference("", ours, theirs);
            differences.push(format!("{}\n{}", line.text, differs.join("\n")));
        }
    }
    let about: Vec<&String> = ours.events.keys().chain(theirs.events.keys()).collect();
    for about in about {
        let none = Vec::new();
        let of = |outcome: &Outcome| outcome.events.get(about).unwrap_or(&none).clone();
        let (ours, theirs) = (of(&ours), of(&theirs));
        if ours != theirs {
            let show = |events: &[Value]| {
                let shown = events.iter().map(|event| format!("    {event}\n"));
                shown.collect::<String>()
            };
            let (ours, theirs) = (show(&ours), show(&theirs));
            differences.push(format!(
                "events of '{about}'\n  ours\n{ours}  QEMU\n{theirs}"
            ));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// Tests of a file of commands each, some beside other peers.
macro_rules! alike {
    ($($test:ident: $file:literal $(, $peer:literal)*;)+) => {$(
        #[test]
        fn $test() {
            if peers_are_installed(&[$($peer),*]) {
                compare(include_str!(concat!("daemon_protocol/", $file, ".txt")));
            }
        }
    )+};
}

alike! {
    nodes_are_added_and_removed_alike: "nodes";
    nodes_that_nothing_uses_go_alike: "unused";
    snapshots_streams_and_commits_are_alike: "chains";
    mirrors_and_backups_are_alike: "copies";
    jobs_that_meet_errors_are_alike: "errors";
    commands_about_jobs_are_alike: "jobs";
    exports_are_alike: "exports";
    bitmaps_and_transactions_are_alike: "bitmaps";
    transactions_are_done_as_a_whole_or_not_at_all_alike: "transactions", "qemu-io";
    nodes_above_the_disk_of_a_commit_are_alike: "above", "qemu-io";
    bitmaps_of_images_are_alike: "kept";
    clients_of_nbd_see_the_same_bitmaps: "shown", "nbdinfo", "qemu-io", "qemu-img";
    nodes_are_reopened_alike: "reopen";
    images_and_objects_are_made_alike: "made";
}
