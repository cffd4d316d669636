//! Our answers beside those of qemu-storage-daemon: the same lines, and requests that are drawn
//! from the schema and broken in one place. Skips loudly where it is not installed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cowslip_qmp::json::parse;
use cowslip_qmp::{Client, ServerOptions};
use serde_json::Value;

use crate::support::{Raw, Served};

const PROGRAM: &str = "qemu-storage-daemon";

/// qemu-storage-daemon with a socket, in a directory of its own.
pub struct Peer {
    dir: tempfile::TempDir,
    child: Child,
}

impl Peer {
    /// Starts it; `None` if it is not installed.
    pub fn start() -> Option<Peer> {
        let socket = "socket,id=c,path=qmp,server=on,wait=off";
        Peer::of(
            PROGRAM,
            &[
                "--chardev",
                socket,
                "--monitor",
                "chardev=c",
                "--pidfile",
                "pid",
            ],
        )
    }

    /// Starts a machine without a processor, which has commands that the daemon does not have.
    pub fn machine() -> Option<Peer> {
        let socket = "unix:qmp,server=on,wait=off";
        let none = ["-M", "none", "-display", "none", "-serial", "none"];
        let arguments = [
            &none[..],
            &["-monitor", "none", "-qmp", socket, "-pidfile", "pid"],
        ]
        .concat();
        Peer::of("qemu-system-x86_64", &arguments)
    }

    fn of(program: &str, arguments: &[&str]) -> Option<Peer> {
        let found = Command::new(program).arg("--version").output();
        if !found.is_ok_and(|output| output.status.success()) {
            eprintln!("SKIPPED: {program} is not installed");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new(program)
            .args(arguments)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let peer = Peer { dir, child };
        // It is written when everything is set up; a client that comes before may not be greeted.
        while !peer.dir.path().join("pid").exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Some(peer)
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    pub fn connect(&self) -> Raw {
        let mut raw = self.connected(|path| Raw::connect(path).ok());
        raw.line();
        raw
    }

    /// The library's client. It is the first connection: QEMU has one client at a time, and may
    /// greet one that comes before it has seen the last one leave twice, or reset it.
    pub fn client(&self) -> Client {
        self.connected(|path| match Client::connect(path, None) {
            Err(error) if error.is_absence() => None,
            client => Some(client.unwrap()),
        })
    }

    fn connected<T>(&self, connect: impl Fn(&Path) -> Option<T>) -> T {
        // The path exists shortly before it listens.
        loop {
            match connect(&self.path()) {
                Some(connection) => return connection,
                None => std::thread::sleep(std::time::Duration::from_millis(5)),
            }
        }
    }

    /// A client that has negotiated.
    pub fn negotiated(&self) -> Raw {
        let mut raw = self.connect();
        raw.ask("{'execute':'qmp_capabilities'}");
        raw
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The error of a reply; `None` if the command has succeeded.
pub fn error_of(line: &str) -> Option<(String, String)> {
    let reply = parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    let error = reply.get("error")?;
    let text = |name: &str| error[name].as_str().unwrap().to_string();
    Some((text("class"), text("desc")))
}

/// The next reply; events are passed over.
pub fn reply(raw: &mut Raw) -> String {
    loop {
        let line = raw.line();
        if !line.starts_with("{\"timestamp\"") {
            return line;
        }
    }
}

/// Lines that the protocol refuses, or the schema. Both sides answer each with one line.
const REFUSED: &str = r#"
{"execute":"query-version"}
{"execute":"foo"}
{"exec-oob":"qmp_capabilities"}
{"execute":"qmp_capabilities","arguments":{"enable":["x"]}}
{"execute":"qmp_capabilities","arguments":{"enable":"oob"}}
{"execute":"qmp_capabilities","arguments":{"enable":[1]}}
{"execute":"qmp_capabilities","x":1}
@
]
!{"execute":"qmp_capabilities","id":"it's"}
{"execute":"qmp_capabilities","id":{"a":1}}
{"execute":"no-such-command"}
{"execute":"query-version","arguments":{"x":1}}
{"execute":"query-version","foo":1}
{"execute":"query-version","arguments":[]}
{"execute":1}
{"exec-oob":"query-version"}
{"exec-oob":1}
{}
[]
1
"x"
null
true
{"arguments":{}, "id":3}
{"id":[{"x":"\u00e9\ud83d\ude00\u0001\u007f€"}]}
{'execute':'job-pause','id':'it\'s "x"'}
}
{"a" 1}
{"a":1,"a":2}
[1,]
[,]
{,}
{"a":}
{"a",}
{"a"}
{1:2}
{{}:1}
{"a":1 "b":2}
[1 2]
[1}
{"a":1]
{[}]
[{]}
@
@@@ abc
foo
tru
"\uD800"
"\ud800\u0041"
'\u12x4'
"\x"
.5
\x
#
/* */
;
ä
""#;

#[test]
fn lines_are_refused_in_the_same_words() {
    let Some(peer) = Peer::start() else { return };
    let served = Served::new(ServerOptions::default());
    let (mut ours, mut theirs) = (served.connect(), peer.connect());
    ours.line();
    for line in REFUSED.lines().filter(|line| !line.is_empty()) {
        let (line, accepted) = match line.strip_prefix('!') {
            Some(line) => (line, true),
            None => (line, false),
        };
        let (our, their) = (ours.ask(line), theirs.ask(line));
        assert_eq!(our, their, "{line}");
        assert_eq!(error_of(&our).is_none(), accepted, "{line}: {our}");
    }
    // Two errors each: what follows a stray character is read again from a bracket on.
    for line in [
        "{\"id\":%d}",
        "[01]",
        "\"abc",
        "a.b",
        "aB",
        "abc-d",
        "{\"x\":'a\tb'}",
    ] {
        ours.send(line);
        theirs.send(line);
        ours.send("\n}\n");
        theirs.send("\n}\n");
        let (our, their) = (ours.line(), theirs.line());
        assert_eq!(our, their, "{line}");
        // Up to an answer that both can only give once.
        let end = "{\"execute\":\"end\"}";
        ours.send(end);
        theirs.send(end);
        loop {
            let (our, their) = (ours.line(), theirs.line());
            assert_eq!(our, their, "{line}");
            if our.contains("The command end has not been found") {
                break;
            }
        }
    }
    ours.send("{'execute':'quit'}");
    served.end();
}

/// Arguments that the schema refuses, and some that it accepts, each with its command.
const ARGUMENTS: &str = r#"
blockdev-add {}
blockdev-add {"driver":"foo"}
blockdev-add {"driver":1}
blockdev-add {"driver":null}
blockdev-add {"driver":"file"}
blockdev-add {"driver":"file","filename":1}
blockdev-add {"driver":"file","filename":"/x","foo":1}
blockdev-add {"driver":"file","filename":"/x","locking":"maybe"}
blockdev-add {"driver":"qcow2","node-name":"n","file":{"driver":"file"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":{"driver":"foo"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":{"driver":7}}
blockdev-add {"driver":"qcow2","node-name":"n","file":{"driver":"file","filename":"x","y":1}}
blockdev-add {"driver":"qcow2","node-name":"n","file":{"driver":"file","filename":"x"},"z":1}
blockdev-add {"driver":"qcow2","node-name":"n","file":1}
blockdev-add {"driver":"qcow2","node-name":"n","file":null}
blockdev-add {"driver":"qcow2","node-name":"n","file":{"driver":"raw","file":[]}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","backing":1}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","backing":{"driver":"qcow2","file":3}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","l2-cache-size":99999999999999999999}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","l2-cache-size":1.5}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","l2-cache-size":"1M"}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","refcount-cache-size":9223372036854775808}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","overlap-check":"all2"}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","overlap-check":7}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","overlap-check":{"template":"x"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","overlap-check":{"main-header":"x"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","cache":{"direct":1}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","cache":3}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","encrypt":{"format":"zip"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","encrypt":{"key-secret":"s"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","encrypt":{"format":"luks","x":"s"}}
blockdev-add {"driver":"qcow2","node-name":"n","file":"x","discard":"on"}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","inject-error":[{"event":"foo"}]}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","inject-error":[{"event":"read_aio","zz":1}]}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","inject-error":[1]}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","inject-error":1}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","align":1e30}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","max-transfer":4294967296}
blockdev-add {"driver":"blkdebug","node-name":"n","image":"x","take-child-perms":["x"]}
blockdev-add {"driver":"null-co","node-name":"n","latency-ns":"x"}
blockdev-add {"driver":"null-co","node-name":"n","latency-ns":-1.5}
blockdev-add {"driver":"nbd","node-name":"n","server":{"type":"inet","host":"h"}}
blockdev-add {"driver":"nbd","node-name":"n","server":{"type":"inet","host":"h","port":1}}
blockdev-add {"driver":"nbd","node-name":"n","server":{"type":"unix"}}
blockdev-add {"driver":"nbd","node-name":"n","server":{"type":"tcp"}}
blockdev-add {"driver":"nbd","node-name":"n","server":"x"}
blockdev-add {"driver":"nbd","node-name":"n","server":{"type":"unix","path":"p"},"open-timeout":-1}
object-add {"qom-type":"authz-list","id":"a","rules":[{"match":"x","policy":"y"}]}
object-add {"qom-type":"authz-list","id":"a","rules":[{}]}
object-add {"qom-type":"authz-list","id":"a","rules":{}}
blockdev-del {}
block-dirty-bitmap-add {"node":"n","name":"b","granularity":4294967296}
block-dirty-bitmap-add {"node":"n","name":"b","granularity":-1}
block-dirty-bitmap-add {"node":"n","name":"b","granularity":"4k"}
block-dirty-bitmap-add {"name":"b","granularity":"4k"}
block-dirty-bitmap-merge {"node":"a","target":"b","bitmaps":[1]}
block-dirty-bitmap-merge {"node":"a","target":"b","bitmaps":[{"node":"x"}]}
block-dirty-bitmap-merge {"node":"a","target":"b","bitmaps":["x",null]}
transaction {"actions":[{"type":"foo","data":{}}]}
transaction {"actions":[{"type":"abort"}]}
transaction {"actions":[{"type":"abort","data":{"x":1}}]}
transaction {"actions":[{"type":"block-dirty-bitmap-add","data":{}}]}
transaction {"actions":[{"type":"block-dirty-bitmap-add"}]}
transaction {"actions":[{"data":{}}]}
transaction {"actions":[{"type":"blockdev-backup","data":{"device":"d","target":"t"}}]}
transaction {"actions":{}}
transaction {"actions":[],"properties":{"completion-mode":"x"}}
block_resize {"node-name":"n","size":1.0}
block_resize {"node-name":"n","size":1e3}
block_resize {"node-name":"n","size":18446744073709551615}
block_resize {"node-name":"n"}
job-pause {}
block-job-set-speed {"device":"x"}
block-job-change {"id":"x","type":"mirror"}
block-job-change {"id":"x","type":"backup","copy-mode":"background"}
block-job-change {"id":"x","type":"mirror","copy-mode":1}
block-commit {"device":"d","on-error":"panic"}
block-commit {"device":"d","auto-finalize":"on"}
block-stream {"device":"d","speed":"fast"}
block-export-add {"type":"nbd"}
block-export-add {"type":"nbd","id":"e"}
block-export-add {"type":"ftp","id":"e"}
block-export-add {"type":"nbd","id":"e","node-name":"n","mountpoint":"m"}
block-export-add {"type":"vhost-user-blk","id":"e","node-name":"n","addr":{"type":"unix"}}
block-export-add {"type":"vhost-user-blk","id":"e","node-name":"n","addr":{"type":"unix","path":"p"},"num-queues":70000}
block-export-add {"type":"fuse","id":"e","node-name":"n"}
block-export-add {"type":"fuse","id":"e","node-name":"n","mountpoint":"m","allow-other":true}
block-export-del {"id":"e","mode":"soft"}
nbd-server-start {"addr":{"type":"unix","path":"/x"}}
nbd-server-start {"addr":{"type":"inet","data":{"host":"1","port":1}}}
nbd-server-start {"addr":{"type":"unix","data":{"path":"p"}},"max-connections":-1}
nbd-server-start {}
nbd-server-add {"name":"x"}
nbd-server-remove {}
blockdev-create {"job-id":"j","options":{"driver":"file","filename":"f","size":18446744073709551616}}
blockdev-create {"job-id":"j","options":{"driver":"file","filename":"f"}}
blockdev-create {"job-id":"j","options":{"driver":"file","file":"f","filename":"f","size":1}}
blockdev-create {"job-id":"j","options":{"driver":"qcow2","file":"n","size":1,"version":"v4"}}
blockdev-create {"options":{"driver":"qcow2","file":"n","size":1}}
blockdev-mirror {"device":"x","target":"y","sync":"z"}
blockdev-mirror {"device":"x","target":"y","sync":"full","copy-mode":"z"}
blockdev-mirror {"device":"x","target":"y","sync":"full","granularity":4294967296}
blockdev-snapshot {"node":"n"}
blockdev-snapshot-sync {"snapshot-file":"x","mode":"y"}
blockdev-snapshot-internal-sync {"device":"d"}
blockdev-snapshot-delete-internal-sync {"id":"1"}
change-backing-file {}
query-named-block-nodes {"flat":1}
query-blockstats {"query-nodes":"yes"}
query-jobs {"x":1}
object-add {}
object-add {"qom-type":"foo","id":"x"}
object-add {"qom-type":"secret","id":"x","y":1}
object-add {"qom-type":"secret"}
object-add {"qom-type":"authz-list","id":"a","rules":[{"match":"*"}]}
object-add {"qom-type":"tls-creds-x509","id":"a","endpoint":"both"}
object-add {"qom-type":"iothread","id":"a","poll-max-ns":"x"}
object-del {}
"#;

#[test]
fn arguments_are_refused_in_the_same_words() {
    let Some(peer) = Peer::start() else { return };
    let served = Served::new(ServerOptions::default());
    let mut ours = served.negotiated();
    let mut theirs = peer.negotiated();
    for line in ARGUMENTS.lines().filter(|line| !line.is_empty()) {
        let (command, arguments) = line.split_once(' ').unwrap();
        let request = format!("{{\"execute\":\"{command}\",\"arguments\":{arguments}}}");
        let (our, their) = (ours.ask(&request), theirs.ask(&request));
        assert!(error_of(&our).is_some(), "{line}: {our}");
        assert_eq!(our, their, "{line}");
    }
    ours.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn the_client_speaks_with_both() {
    let served = Served::new(ServerOptions::default());
    let mut client = Client::connect(&served.path, None).unwrap();
    let package = &client.greeting()["version"]["package"];
    assert!(package.as_str().unwrap().starts_with("Cowslip "));
    client.execute("quit", Value::Null).unwrap_err();
    served.quit(&mut client);
    let Some(peer) = Peer::start() else { return };
    let mut client = peer.client();
    assert_eq!(
        client.execute("query-jobs", serde_json::json!({})).unwrap(),
        serde_json::json!([])
    );
}
